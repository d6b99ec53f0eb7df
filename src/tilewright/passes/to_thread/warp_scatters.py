"""Scatters of a warp: elements that go to the same place are combined before they get there. Used while tiles become threads.

In: the places, values and conditions of the elements that a thread is to combine into an array. Out: thread-stage ops. Atomics on one element wait for each
other, so fewer are better. Three steps find elements that meet, each for nothing beside the atomics that random places need anyway:

- A warp whose elements all go to one place combines them in registers and by shuffles, and one lane has one atomic.
- Else each thread combines neighbours that go to the same place.
- Where that leaves each lane with one place, and lanes beside each other share it, each run of such lanes combines by shuffles, and its first lane has the atomic.

    atomic %out, %i0, %a;  atomic %out, %i1, %b
    =>
    if vote (%i0 == %i1 and %i0 == shuffle %i0, 0) {all} { %s = %a + %b over all lanes;  if lane == 0 { atomic %out, %i0, %s } }
    else { %c = select %i0 == %i1, %a + %b, %b;  runs of lanes, or: if %i0 != %i1 { atomic %out, %i0, %a };  atomic %out, %i1, %c }
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import i32, u32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.common.combine import combine

KINDS = ("add", "mul", "min", "max", "and", "or", "xor")
"""What may be combined in any order, before it gets to its place."""
FEW_RUNS = 16
"""Runs of lanes, at most, that are worth the shuffles."""


@record
class Scattered:
    """One element: where it goes, what it is, and under which condition."""

    place: tuple[Value, ...]
    value: Value
    condition: Value | None


One = Callable[[Builder, Sequence[Value], Value], list[Value]]


def scatter_each(b: Builder, elements: Sequence[Scattered], one: One) -> list[Value]:
    """The elements one by one: `one` does a single one."""
    for element in elements:
        if element.condition is None:
            one(b, element.place, element.value)
        else:
            b.if_(element.condition, lambda inner, e=element: one(inner, e.place, e.value), lambda inner: [])
    return []


class WarpScatter:
    """The elements of all lanes of a warp, which have to come here together. `cells` are those of a thread, neighbours in memory side by side."""

    def __init__(self, cells: Sequence[Sequence[Scattered]], kind: str, lane: Value, warp_size: int, one: One) -> None:
        self.cells, self.kind, self.lane, self.warp_size, self.one = cells, kind, lane, warp_size, one

    def run(self, b: Builder) -> None:
        elements = [element for cell in self.cells for element in cell]
        tests: dict[Value, None] = dict.fromkeys(e.condition for e in elements if e.condition is not None)
        first = elements[0]
        for element in elements:
            tests.update(dict.fromkeys(self._differing(b, element, first)))
        for index in first.place:
            tests[b.op("eq", index, b.op("shuffle", index, b.const(0, i32), mode="idx"))] = None
        alike = _all(b, list(tests))
        if alike is None:
            self._together(b, elements)
        else:
            b.if_(b.op("vote", alike, mode="all"), lambda inner: self._together(inner, elements), self._apart)

    def _together(self, b: Builder, elements: Sequence[Scattered]) -> list[Value]:
        values = [element.value for element in elements]
        while len(values) > 1:
            pairs = [self._combined(b, x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
            values = [*pairs, *values[len(values) & ~1 :]]
        total, distance = values[0], self.warp_size // 2
        while distance:
            total = self._combined(b, total, b.op("shuffle", total, b.const(distance, i32), mode="xor"))
            distance //= 2
        b.if_(b.op("eq", self.lane, b.index(0)), lambda inner: self.one(inner, elements[0].place, total), lambda inner: [])
        return []

    def _apart(self, b: Builder) -> list[Value]:
        for cell in self.cells:
            merged, own = self._merged(b, cell)
            if self.warp_size == 32:
                self._runs(b, merged, own)
            else:
                scatter_each(b, merged, self.one)
        return []

    def _merged(self, b: Builder, cell: Sequence[Scattered]) -> tuple[list[Scattered], Value | None]:
        """The elements, each combined into the next one where both go to the same place; and whether all are in the last one then."""
        merged, own = [cell[0]], list[Value]()
        for element in cell[1:]:
            before = merged[-1]
            conditions = [c for c in (before.condition, element.condition) if c is not None]
            same = _all(b, [*self._differing(b, element, before), *conditions])
            if same is None:
                merged[-1:] = [Scattered(element.place, self._combined(b, before.value, element.value), None)]
                continue
            own.append(same)
            left = b.op("not", same) if before.condition is None else b.logical_and(before.condition, b.op("not", same))
            value = b.select(same, self._combined(b, before.value, element.value), element.value)
            merged[-1:] = [Scattered(before.place, before.value, left), Scattered(element.place, value, element.condition)]
        if merged[-1].condition is not None:
            own.append(merged[-1].condition)
        return merged, _all(b, own)

    def _runs(self, b: Builder, merged: Sequence[Scattered], own: Value | None) -> None:
        """Lanes beside each other that go to the same place, where each lane has one; else every element by itself."""
        last, one = merged[-1], b.const(1, i32)
        same = [b.op("eq", index, b.op("shuffle", index, one, mode="up")) for index in last.place]
        begins = b.op("not", _all(b, [b.op("gt", self.lane, b.index(0)), *same]) or b.op("gt", self.lane, b.index(0)))
        heads = b.op("vote", begins, mode="ballot")
        few = b.op("le", b.cast(b.op("popcount", heads), i32), b.const(FEW_RUNS, i32))
        if own is not None:
            few = b.logical_and(few, b.op("vote", own, mode="all"))

        def by_runs(inner: Builder) -> list[Value]:
            lane = inner.cast(self.lane, u32)
            upto = inner.sub(inner.op("shl", inner.const(2, u32), lane), inner.const(1, u32))
            run, value, distance = inner.op("popcount", inner.op("and", heads, upto)), last.value, 1
            while distance < self.warp_size:
                step = inner.const(distance, i32)
                beside = inner.op("eq", run, inner.op("shuffle", run, step, mode="down"))
                there = inner.op("lt", inner.add(lane, inner.const(distance, u32)), inner.const(self.warp_size, u32))
                both = self._combined(inner, value, inner.op("shuffle", value, step, mode="down"))
                value = inner.select(inner.logical_and(beside, there), both, value)
                distance *= 2
            inner.if_(begins, lambda at: self.one(at, last.place, value), lambda at: [])
            return []

        b.if_(few, by_runs, lambda inner: scatter_each(inner, merged, self.one))

    def _differing(self, b: Builder, element: Scattered, other: Scattered) -> list[Value]:
        """Tests that two places are the same; none for indices that are one value."""
        return [b.op("eq", x, y) for x, y in zip(element.place, other.place, strict=True) if x is not y]

    def _combined(self, b: Builder, left: Value, right: Value) -> Value:
        return combine(b, self.kind, [left], [right])[0]


def _all(b: Builder, tests: Sequence[Value]) -> Value | None:
    found: Value | None = None
    for test in tests:
        found = test if found is None else b.logical_and(found, test)
    return found
