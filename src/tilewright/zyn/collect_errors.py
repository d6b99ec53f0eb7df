"""A run of a ZynML program that fails says everything that is wrong with the program, not only what it met first.

In: the program, the inputs of the run, and the error it ended with. Out: that error with those that looking at the rest of the
program finds for inputs of these types and sizes. Nothing is looked at while runs go well.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.base.dtypes import from_numpy
from tilewright.base.errors import Diagnostic, UserError, in_order
from tilewright.execute.calls.arguments import read_argument
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.packed_array import PackedArray
from tilewright.tree import syntax
from tilewright.tree.check.kernel import check_kernel
from tilewright.zyn.host.abstract_run import Looker, look, stand_in
from tilewright.zyn.host.dimensions import AbstractValue
from tilewright.zyn.known_extents import KnownExtents


def every_error(error: UserError, module: syntax.Module, inputs: Mapping[str, object]) -> UserError:
    """The error, with all others there are for inputs like these."""
    if (
        type(error).__module__ != UserError.__module__
    ):  # a fault of a critical function, or a deadlock: it stands for itself
        return error
    more = [
        d for d in _others(module, inputs) if d.code != "TW008" and not any(_is_same(d, known) for known in error.diagnostics)
    ]
    return UserError(*in_order((*error.diagnostics, *more))) if more else error


def _is_same(found: Diagnostic, known: Diagnostic) -> bool:
    """Whether a message is one the run had, at the same place or with the place in its text."""
    if found.code != known.code:
        return False
    return (found.span.line, found.span.column) == (known.span.line, known.span.column) or known.message.startswith(
        found.message
    )


def _others(module: syntax.Module, inputs: Mapping[str, object]) -> list[Diagnostic]:
    looker = _ErrorCollector()
    try:
        values = {name: looker.like(name, value) for name, value in inputs.items()}
    except UserError:
        return []  # the run said what is wrong with an input
    return look(module, looker, values)


class _ErrorCollector(Looker):
    """Checks blocks for the types and sizes they would be called with."""

    def like(self, name: str, value: object) -> object:
        """A stand-in for an input. Numbers and strings stand for themselves."""
        if isinstance(value, Mapping):
            return {key: self.like(name, part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.like(name, part) for part in value) if type(value) in (list, tuple) else AbstractValue()
        if value is None or isinstance(value, bool | int | float | complex | str | np.generic):
            return value
        if isinstance(value, PackedArray):
            return AbstractValue()  # blocks have one axis more than the array
        found = read_argument(name, value).value
        if isinstance(found, np.ndarray | DeviceArray):
            dtype = from_numpy(found.dtype) if isinstance(found, np.ndarray) else found.dtype
            assert dtype is not None
            return self.array(dtype, tuple(found.shape)) if found.shape else stand_in(dtype, ())
        return found

    def stand_in(self, name: str, function: syntax.Function) -> object:
        return AbstractValue()

    def __call__(self, function: syntax.Function, arguments: dict[str, object], device: str) -> object:
        if any(isinstance(value, AbstractValue) for value in arguments.values()):
            return AbstractValue()
        typed = check_kernel(function, tuple(read_argument(name, value).spec for name, value in arguments.items()))
        known = KnownExtents(
            typed, {name: self.extents(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
        )
        conflicts = known.conflicts()
        if conflicts:
            raise UserError(*conflicts)
        made = [self.array(output.dtype, extents) for output, extents in zip(typed.outputs, known.results(), strict=True)]
        return made[0] if len(made) == 1 else tuple(made)
