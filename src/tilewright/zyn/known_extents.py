"""Dimension conflicts of a kernel found without a call: from the extents its arrays are known to have.

In: a checked kernel and for each array its extents, None where nobody knows. Out: what does not fit, in the words of a call,
and the extents of the results as far as they follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base.errors import Diagnostic
from tilewright.base.sizes import Size
from tilewright.execute.calls.checks import RELATIONS, mismatch
from tilewright.tree.typed import ArrayInfo, TypedKernel

Extents = tuple[int | None, ...]


class KnownExtents:
    """The sizes of one kernel, as far as its inputs give them."""

    def __init__(self, kernel: TypedKernel, extents: Mapping[str, Extents]) -> None:
        self._kernel = kernel
        self._extents = extents
        self._values: dict[str, int] = {}
        self._origin: dict[str, tuple[str, int]] = {}
        for array in self._inputs():
            for axis, (size, extent) in enumerate(zip(array.shape, extents[array.name], strict=True)):
                if extent is not None and size.name is not None and size.name not in self._values:
                    self._values[size.name], self._origin[size.name] = extent, (array.name, axis)

    def _inputs(self) -> list[ArrayInfo]:
        found = [i for i in self._kernel.inputs if isinstance(i, ArrayInfo) and i.name in self._extents]
        return [i for i in found if len(i.shape) == len(self._extents[i.name])]

    def _known(self, size: Size) -> int | None:
        return size.evaluate(self._values) if size.names <= self._values.keys() else None

    def conflicts(self) -> list[Diagnostic]:
        """What a call with these extents would be refused for."""
        span = self._kernel.span
        found: list[Diagnostic] = []
        for array in self._inputs():
            for axis, (size, extent) in enumerate(zip(array.shape, self._extents[array.name], strict=True)):
                wanted = self._known(size)
                if extent is not None and wanted is not None and wanted != extent:
                    found.append(Diagnostic("TW004", mismatch(array.name, axis, extent, size, wanted, self._origin), span))
        if found:
            return found
        for output in self._kernel.outputs:
            for axis, size in enumerate(output.shape):
                extent = self._known(size)
                if extent is not None and extent < 0:
                    message = f"axis {axis} of the result '{output.name}' would have extent {size} = {extent}"
                    found.append(Diagnostic("TW004", message, span))
        for check in self._kernel.checks:
            left, right = self._known(check.left), self._known(check.right)
            if left is not None and right is not None and not RELATIONS[check.relation](left, right):
                message = check.message.replace("{left}", str(left)).replace("{right}", str(right))
                found.append(Diagnostic(check.code, message, check.span))
        return found

    def results(self) -> list[Extents]:
        """The extents of the results, in order."""
        return [tuple(self._known(size) for size in output.shape) for output in self._kernel.outputs]
