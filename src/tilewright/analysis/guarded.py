"""Loads under conditions: which of their indices no condition speaks of.

In `if 0 <= y and y < h { … x[b, y, q] * w[o, q] … }` the condition is about y. The loop over q runs its course whatever y is, so
`w[o, q]` can be loaded without asking, and that q stays inside both arrays is a matter of their sizes, to be checked at a call.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.analysis.affine import analyse
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Tensor


@record
class Guarded:
    """A load under conditions. `plain` are the axes whose index is a loop's own and in no condition, with that loop's extent; `exact`
    those whose loop runs over just the axis."""

    load: Op
    plain: tuple[tuple[int, Value, Size], ...]
    exact: tuple[int, ...]

    @property
    def needs_no_guard(self) -> bool:
        """Whether it stays inside wherever the loops go, once the sizes of `plain` axes are known to fit."""
        memory = self.load.operands[0].type
        assert isinstance(memory, Tensor)
        return {axis for axis, _, _ in self.plain} | set(self.exact) == set(range(memory.rank))


def guarded_loads(kernel: Kernel) -> Iterator[Guarded]:
    """Every load that stands under an `if`, at the loop stage."""
    if any(op.opcode == "if" for op in walk(kernel.body)):
        yield from _GuardFinder(kernel).block(kernel.body, ())


class _GuardFinder:
    def __init__(self, kernel: Kernel) -> None:
        self.forms = analyse(kernel)
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.extents: dict[Value, Size] = {}
        for op in walk(kernel.body):
            if op.opcode in ("parallel", "reduce"):
                for extent, index in zip(op.operands, op.regions[0].args, strict=True):
                    if extent in self.forms and not self.forms[extent].factors:
                        self.extents[index] = self.forms[extent].constant

    def block(self, block: Block, tested: tuple[frozenset[Value], ...]) -> Iterator[Guarded]:
        for op in block.ops:
            if op.opcode == "load" and tested:
                yield self._load(op, frozenset[Value]().union(*tested))
            inner = (*tested, self._sources(op.operands[0])) if op.opcode == "if" else tested
            for region in op.regions:
                yield from self.block(region, inner)

    def _load(self, op: Op, tested: frozenset[Value]) -> Guarded:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        plain: list[tuple[int, Value, Size]] = []
        exact: list[int] = []
        for axis, index in enumerate(op.operands[1 : 1 + memory.rank]):
            form = self.forms.get(index)
            own = next((v for v in self.extents if form is not None and form.is_just(v)), None)
            if own is None:
                continue
            if self.extents[own] == memory.shape[axis]:
                exact.append(axis)
            elif own not in tested:
                plain.append((axis, own, self.extents[own]))
        return Guarded(op, tuple(plain), tuple(exact))

    def _sources(self, value: Value) -> frozenset[Value]:
        """The loop indices, what was loaded, and whatever else no op computes, that a condition is made of."""
        found: set[Value] = set()
        seen: set[Value] = set()
        waiting = [value]
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            op = self.made.get(current)
            if op is None or op.opcode == "load":
                found.add(current)  # what was read is data: that an index was used to read it says nothing about the index
            else:
                waiting += [*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)]
        return frozenset(found)
