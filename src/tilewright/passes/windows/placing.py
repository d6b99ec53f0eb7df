"""Kernels that put results in their places: every result takes the one that was computed for it, or the sum of several, from scratch where those of a phase lie side by side.

In: how each index of the results says where its value lies. Out: a kernel at the loop stage whose points are results, so that neighbouring threads write neighbours:

    parallel o, q, j { y[o, 2 q, j] = values[…, q, j // 2]; y[o, 2 q + 1, j] = … }

The values of an image lie along one axis: where one is found is a sum of what each index adds. Rows that leave different rests are written apart, so that nothing of them is divided or asked, and all
of a point's values are on their way before one is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product

from tilewright.analysis.affine import floored
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor

MOST_RESTS = 8
"""Rests of rows that are written apart."""


@record
class PlacedAxis:
    """One index of the results: `period` of them, side by side, are at one place, each in another slot. Places and rests are those of the index plus `shift`."""

    extent: Size
    """Of the results."""
    stride: Size
    """From one place to the next."""
    period: int = 1
    shift: int = 0
    slots: tuple[tuple[tuple[Size, int], ...], ...] = (((ZERO, 0),),)
    """For every rest, its terms: where the slot of each begins, and how far its place is from the quotient; none where it has no values."""
    places: Size | None = None
    """Places of a slot, where not all that results ask for are there."""

    @property
    def terms(self) -> int:
        """Of a result, at most."""
        return max(map(len, self.slots))

    def slot(self, rest: int, term: int) -> tuple[Size, int] | None:
        """Of one term; None where a rest has fewer."""
        return self.slots[rest][term] if term < len(self.slots[rest]) else None


@record
class _Offset:
    """Where the value of a result lies, as far as one index says, and when there is one."""

    value: Value
    there: tuple[Value, ...] = ()
    more: Size = ZERO
    """To be added, the same for all."""


def _known(b: Builder, axis: PlacedAxis, term: int, index: Value, rest: int) -> _Offset | None:
    """For the result `period * index + rest`."""
    far, own = divmod(rest + axis.shift, axis.period)
    slot = axis.slot(own, term)
    if slot is None:
        return None
    begin, steps = slot[0], slot[1] + far
    place = b.add(index, b.index(steps)) if steps else index
    return _Offset(_times(b, index, axis.stride), _inside(b, axis, place, steps), begin + axis.stride * steps)


def _asked(b: Builder, axis: PlacedAxis, term: int, index: Value) -> _Offset:
    """For any result."""
    if axis.period == 1:
        known = _known(b, axis, term, index, 0)
        assert known is not None
        return known
    shifted = b.add(index, b.index(axis.shift)) if axis.shift else index
    quotient, rest = b.op("floordiv", shifted, b.index(axis.period)), b.op("mod", shifted, b.index(axis.period))
    slots = {number: slot for number in range(axis.period) if (slot := axis.slot(number, term)) is not None}
    first, steps = next(iter(slots.values())), {far for _, far in slots.values()}
    far = b.index(first[1])
    for number, (_, own) in slots.items():
        far = b.select(b.op("eq", rest, b.index(number)), b.index(own), far) if own != first[1] else far
    place = b.add(quotient, far) if steps != {0} else quotient
    there = _inside(b, axis, place, axis.shift // axis.period + min(steps))
    if len(slots) < axis.period:
        in_order = list(slots) == list(range(len(slots)))
        tests = [b.op("lt", rest, b.index(len(slots)))] if in_order else [b.op("eq", rest, b.index(number)) for number in slots]
        there = (*there, reduce(lambda left, right: b.op("or", left, right), tests))
    return _Offset(b.add(_times(b, place, axis.stride), _beginning(b, rest, {number: begin for number, (begin, _) in slots.items()})), there)


def _beginning(b: Builder, rest: Value, slots: Mapping[int, Size]) -> Value:
    """Where the slot of a rest begins."""
    unit = slots.get(1)
    if unit is not None and all(begin == unit * number for number, begin in slots.items()):
        return b.mul(rest, b.index(unit))
    (_, found), *others = ((number, b.index(begin)) for number, begin in slots.items())
    for number, begin in others:
        found = b.select(b.op("eq", rest, b.index(number)), begin, found)
    return found


def _times(b: Builder, place: Value, stride: Size) -> Value:
    return place if stride == ONE else b.mul(place, b.index(stride))


def _inside(b: Builder, axis: PlacedAxis, place: Value, least: int) -> tuple[Value, ...]:
    """That a place, `least` or more, is there."""
    if axis.places is None:
        return ()
    upper = b.op("lt", place, b.index(axis.places))
    return (upper,) if least >= 0 else (b.op("ge", place, b.index(0)), upper)


def place_values(
    b: Builder, axes: Sequence[PlacedAxis], values: Value, empty: float, finish: Callable[[Builder, list[Value], Value], None]
) -> None:
    """Write the nest; `finish` makes a result, with these indices, of the value that it takes: the sum of its terms. `values` has axes for the first indices of results, as many as it
    has but one; its last is that of offsets. `empty`: what results have that take none."""
    rows = len(axes) - 2
    apart = axes[rows].period if rows >= 0 and 1 < axes[rows].period <= MOST_RESTS else 1
    assert isinstance(values.type, Tensor)
    outer, dtype = values.type.rank - 1, values.type.dtype
    walked = range(outer, len(axes))

    def nothing(at: Builder) -> list[Value]:
        return [at.const(empty, dtype)]

    def body(at: Builder, *indices: Value) -> list[Value]:
        asked = {(n, term): _asked(at, axes[n], term, indices[n]) for n in walked if n != rows or apart == 1 for term in range(axes[n].terms)}

        def taken(terms: Mapping[int, int], rest: int, own: Value) -> Value | None:
            """One term of a result: the number of its term along each axis."""
            offsets = [asked[n, term] for n, term in terms.items() if (n, term) in asked]
            if apart > 1:
                row = _known(at, axes[rows], terms[rows], indices[rows], rest)
                if row is None:
                    return None
                # What is the same for all rows of a thread is added first.
                offsets.append(row)
            tests = [test for offset in offsets for test in offset.there]
            if rest and axes[rows].places is None:
                tests.insert(0, at.op("lt", own, at.index(axes[rows].extent)))
            more = sum((offset.more for offset in offsets), ZERO)
            parts = [*([at.index(more)] if more != ZERO else []), *(offset.value for offset in offsets)]
            place = reduce(at.add, parts)

            def load(inner: Builder) -> list[Value]:
                return [inner.op("load", values, *indices[:outer], place)]

            return at.if_(reduce(at.logical_and, tests), load, nothing)[0] if tests else load(at)[0]

        results: list[tuple[list[Value], Value]] = []
        for rest in range(apart):
            own = list(indices)
            if apart > 1:
                own[rows] = at.add(at.mul(indices[rows], at.index(apart)), at.index(rest))
            several = product(*(range(axes[n].terms) for n in walked))
            terms = [taken(dict(zip(walked, numbers, strict=True)), rest, own[rows]) for numbers in several]
            there = [term for term in terms if term is not None]
            results.append((own, reduce(at.add, there) if there else nothing(at)[0]))
        for rest, (own, value) in enumerate(results):

            def store(inner: Builder, own: list[Value] = own, value: Value = value) -> list[Value]:
                finish(inner, own, value)
                return []

            if rest:
                at.if_(at.op("lt", own[rows], at.index(axes[rows].extent)), store, lambda inner: [])
            else:
                store(at)
        return []

    extents = [floored(axis.extent + (apart - 1), apart) if apart > 1 and n == rows else axis.extent for n, axis in enumerate(axes)]
    b.parallel([b.index(extent) for extent in extents], body)
