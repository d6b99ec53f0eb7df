"""Scatters whose places are the same for a whole warp: one lane combines what the warp has. Used while tiles become threads.

In: the places, values and conditions of the elements that a thread is to combine into an array. Out: thread-stage ops. Atomics on one element wait for each
other, so a warp first asks whether all its elements go to the same place. If so they are combined in registers and by shuffles, and one atomic is left of
them; else each element has its own. The question costs a comparison for each element and a vote: nothing beside the atomics.

    atomic %out, %i0, %a;  atomic %out, %i1, %b
    =>
    if vote (%i0 == %i1 and %i0 == shuffle %i0, 0) {all} { %s = %a + %b over all lanes;  if lane == 0 { atomic %out, %i0, %s } } { the same as before }
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import i32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.common.combine import combine

KINDS = ("add", "mul", "min", "max", "and", "or", "xor")
"""What may be combined in any order, before it gets to its place."""


@record
class Scattered:
    """One element: where it goes, what it is, and under which condition."""

    place: tuple[Value, ...]
    value: Value
    condition: Value | None


def scatter_by_warp(
    b: Builder, elements: Sequence[Scattered], kind: str, lane: Value, warp_size: int, one: Callable[[Builder, Sequence[Value], Value], list[Value]],
    each: Callable[[Builder], list[Value]],
) -> None:  # fmt: skip
    """Combine the elements of all lanes: `one` does a single one, `each` all of them, one by one. All lanes of the warp have to come here together."""
    first = elements[0]
    tests: dict[Value, None] = {}
    for element in elements:
        if element.condition is not None:
            tests[element.condition] = None
        for index, other in zip(element.place, first.place, strict=True):
            if index is not other:
                tests[b.op("eq", index, other)] = None
    for index in first.place:
        tests[b.op("eq", index, b.op("shuffle", index, b.const(0, i32), mode="idx"))] = None
    alike: Value | None = None
    for test in tests:
        alike = test if alike is None else b.logical_and(alike, test)

    def together(inner: Builder) -> list[Value]:
        values = [element.value for element in elements]
        while len(values) > 1:
            pairs = [combine(inner, kind, [x], [y])[0] for x, y in zip(values[::2], values[1::2], strict=False)]
            values = [*pairs, *values[len(values) & ~1 :]]
        total, distance = values[0], warp_size // 2
        while distance:
            (total,) = combine(inner, kind, [total], [inner.op("shuffle", total, inner.const(distance, i32), mode="xor")])
            distance //= 2
        inner.if_(inner.op("eq", lane, inner.index(0)), lambda at: one(at, first.place, total), lambda at: [])
        return []

    if alike is None:
        together(b)
    else:
        b.if_(b.op("vote", alike, mode="all"), together, each)
