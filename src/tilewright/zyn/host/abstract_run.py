"""A ZynML program looked at instead of run: everything that is wrong with it, at once.

In: a checked program, stand-ins for its inputs, and a `run_compute` that checks blocks and gives stand-ins for their results.
Out: all errors, those of the program around its blocks and those of the blocks. A statement with an error leaves names behind
of which nobody knows anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import Diagnostic, UserError
from tilewright.base.source import Span
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.syntax import Expr, Stmt
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host.block_runner import AbstractBlocks
from tilewright.zyn.host.dimensions import AbstractValue, NamedSizes
from tilewright.zyn.host.run import Returned, Run, looked_at, owner
from tilewright.zyn.known_extents import Extents
from tilewright.zyn.module_check import ModuleCheck

UNKNOWN = 4
"""Extent of an axis of a stand-in whose extent nobody knows; kernels do not depend on it."""
_SMALL = 1 << 16


def stand_in(dtype: DType, extents: Extents) -> np.ndarray:
    """An array to look at. A large one has one element that it repeats."""
    shape = tuple(UNKNOWN if extent is None else extent for extent in extents)
    size = 1
    for extent in shape:
        size *= extent
    return np.ones(shape, dtype.numpy) if size <= _SMALL else np.broadcast_to(np.ones((), dtype.numpy), shape)


class Looker(AbstractBlocks):
    """What there is in place of what would run: arrays of the right rank and type, some of them with known extents."""

    def __init__(self) -> None:
        self._extents: dict[int, tuple[object, Extents]] = {}
        """By identity of an array, which is kept."""

    def array(self, dtype: DType, extents: Extents) -> object:
        """A new array; without axes it is a number."""
        made = stand_in(dtype, extents)
        return self.knows(made, extents) if extents else made[()]

    def knows(self, value: object, extents: Extents) -> object:
        self._extents[id(value)] = value, extents
        return value

    def extents(self, value: object) -> Extents:
        """What is known of the extents of an array."""
        known = self._extents.get(id(value))
        return known[1] if known is not None else (None,) * len(getattr(value, "shape", ()))

    def looked_at(self, name: str, given: Mapping[str, object]) -> object:
        """What a function of the host language gives: a value of the right rank and type, or one nobody knows."""
        first, parts, axis = given.get("x"), given.get("arrays", given.get("parts")), given.get("axis", 0)
        if name == "concat" and isinstance(parts, list | tuple) and parts:
            return self._along(parts[0], axis)
        found = looked_at(name, given)
        if name == "split" and isinstance(found, tuple):
            return tuple(self._along(part, axis) for part in found)
        return self._transposed(first, given.get("axes")) if name == "transpose" else found

    def _along(self, value: object, axis: object) -> object:
        """An array that differs along one axis."""
        if not isinstance(value, np.ndarray):
            return value
        extents = list(self.extents(value))
        if not isinstance(axis, int) or not -value.ndim <= axis < value.ndim:
            return stand_in(host_functions.dtype_of(value.dtype), (None,) * value.ndim)
        extents[axis] = None
        return self.array(host_functions.dtype_of(value.dtype), tuple(extents))

    def _transposed(self, value: object, axes: object) -> object:
        if not isinstance(value, np.ndarray):
            return value
        order = list(reversed(range(value.ndim))) if axes is None else axes
        if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(map(str, range(value.ndim))):
            return stand_in(host_functions.dtype_of(value.dtype), (None,) * value.ndim)
        return self.array(host_functions.dtype_of(value.dtype), tuple(self.extents(value)[int(axis)] for axis in order))


class Looking(Run):
    """A run without effects that goes on after errors."""

    _run_compute: AbstractBlocks

    def __init__(self, check: ModuleCheck, run_compute: AbstractBlocks, device: str | None, values: dict[str, object]) -> None:
        super().__init__(check, run_compute, device, values)
        self.errors: dict[Diagnostic, None] = {}
        self._wrong: set[Span] = {d.span for d in check.sink.errors if d.span.line}

    def _inner(self, values: dict[str, object]) -> Run:
        inner = Looking(self._check, self._run_compute, self._device, values)
        inner.errors, inner._wrong = self.errors, self._wrong
        inner._default_device, inner._program = self._default_device, self._program
        return inner

    def _statement(self, node: Stmt, names: dict[str, None]) -> Returned | None:
        try:
            if not self._is_wrong(node):
                return super()._statement(node, names)
        except UserError as error:
            self.errors.update(dict.fromkeys(error.diagnostics))
        targets = node.targets if isinstance(node, syntax.Let) else ()
        if isinstance(node, syntax.Assign):
            targets = tuple(owner(t) for t in (node.target.items if isinstance(node.target, syntax.Tuple) else (node.target,)))
        for name in targets:
            self._values[name] = AbstractValue()
        names.update(dict.fromkeys(node.targets if isinstance(node, syntax.Let) else ()))
        return Returned(AbstractValue()) if isinstance(node, syntax.Return) else None

    def _function(
        self, function: syntax.Function, call: syntax.Call, given: Sequence[object], named: Mapping[str, object], span: Span
    ) -> object:  # fmt: skip
        """A call whose arguments have extents that are known is held against its types as if it were made."""
        sizes = NamedSizes(function.name, span, True)
        values = {p.name: value for p, value in zip(function.params, given)} | dict(named)
        for param in function.params:
            value = values.get(param.name)
            known = self._run_compute.extents(value) if isinstance(value, np.ndarray) else (None,)
            if isinstance(param.type, syntax.Index) and all(extent is not None for extent in known):
                sizes.take(f"'{param.name}'", _names_alone(param.type), value, lambda part, _: self.evaluate(part))
        return super()._function(function, call, given, named, span)

    def _is_wrong(self, node: Stmt) -> bool:
        """Whether an error is known in a statement. The statements in a loop or a condition are asked by themselves."""
        if not self._wrong:
            return False
        heads: tuple[object, ...] = (node,)
        if isinstance(node, syntax.If | syntax.While):
            heads = (node.cond,)
        elif isinstance(node, syntax.For):
            heads = (*node.ranges, *(() if node.over is None else (node.over,)))
        return any(part.span in self._wrong for head in heads for part in nodes((head,)))


def _names_alone(type_: syntax.Index) -> Expr:
    """A type without extents that are computed: the numbers they are computed from may be stand-ins."""
    return replace(
        type_, indices=tuple(i if isinstance(i, syntax.Name) else syntax.Slice(None, None, span=i.span) for i in type_.indices)
    )


def look(
    module: syntax.Module, run_compute: AbstractBlocks, values: Mapping[str, object], check: ModuleCheck | None = None
) -> list[Diagnostic]:
    """Everything that is wrong with a program without imports; `check` is its own with inputs of these names, if there is one."""
    check = check or ModuleCheck(module, frozenset(values))
    check.note_inputs(dict(values))
    looking = Looking(check, run_compute, None, dict(values))
    looking.run(module)
    return list(dict.fromkeys((*check.sink.errors, *looking.errors)))
