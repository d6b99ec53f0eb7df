"""Columns of a contraction that lie a few elements apart in short rows of an array, as those of a convolution with steps do: vectors of them are merged in registers.

In: an array of one axis, the extents that number columns, and where a column is read at the first term of a sum. Out: tile-stage ops that copy a panel of columns,
term by term of the sum:

    %0 = load x, place + 0, place + 2, …       ; as if the row of the first column had no end
    %1 = load x, next + 0, next + 2, …         ; the next row, as if it had begun earlier
    store columns, select(lane >= begin, %1, %0)

Loads have no masks, for which there are too few registers: terms for which they would leave the array are left to others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.analysis.contraction import Contraction
from tilewright.analysis.ranges import surely_not_negative
from tilewright.base.dtypes import i32
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor
from tilewright.passes.to_tile.panels.count_up import count_up
from tilewright.passes.to_tile.panels.sides import Side

ROWS_APART = (2, 3, 5)
"""Rows of the array that a vector of columns is merged of."""
PLACES_AHEAD = 32
"""Steps of a sum from when a line is fetched to its copy."""


def merges_apart(found: Contraction, side: Side) -> bool:
    """Whether columns lie a few elements apart in an array of one axis, in which places grow along the sum."""
    forms = found.access(side.factor)
    if len(forms) != 1 or forms[0].factor(side.copied[-1]) == ONE:
        return False
    return all(surely_not_negative(forms[0].factor(k)) for k in found.k)


def span_of(found: Contraction, side: Side, terms: Sequence[Value], extents: Sequence[Size]) -> tuple[tuple[Size, Size], Size]:
    """How far one step of the outermost index of a sum moves, how far all steps of the others do, and how many terms these others have."""
    (form,) = found.access(side.factor)
    inner = sum(((extent - 1) * form.factor(k) for k, extent in zip(terms[1:], extents[1:], strict=True)), ZERO)
    return (form.factor(terms[0]), inner), product(extents[1:])


@record
class ShortRows:
    memory: Value
    extents: tuple[Size, ...]
    """What numbers of columns are made of; the last is the length of a row."""
    step: int
    """Elements from one column of a row to the next."""
    lanes: int
    index_tile: Callable[[Builder, Value, int, int], Value]
    place: Callable[[Builder, Sequence[Value]], Value]
    """Where a column, given by its digits, is read at the first term of the sum."""

    def pieces(self, b: Builder, left: Value, end: Value, rows: int) -> list[tuple[Value, Value | None]]:
        """For each of some rows: where lane 0 of the vector from column `left` on would be read, and the lanes from which on the row counts."""
        zero, one, length = b.index(0), b.index(1), b.index(self.extents[-1])
        # Masks of 32 bits for each lane are one instruction, those of 64 three.
        lane, last = b.cast(self.index_tile(b, zero, 1, self.lanes), i32), b.sub(end, one)
        digits = self._digits(b, b.op("min", left, last))
        found: list[tuple[Value, Value | None]] = [(self.place(b, digits), None)]
        begin = b.sub(length, digits[-1])
        for _ in range(rows - 1):
            following = [*self._next(b, digits[:-1]), zero]
            # Behind the last column nothing counts: the row before is read again.
            there = b.op("le", b.add(left, begin), last)
            digits = [b.select(there, new, old) for new, old in zip(following, digits, strict=True)]
            within = b.op("min", begin, b.index(self.lanes))
            place = b.sub(self.place(b, digits), b.mul(within, b.index(self.step)))
            found.append((place, b.op("ge", lane, b.like(b.cast(within, i32), lane))))
            begin = b.add(begin, length)
        return found

    def _digits(self, b: Builder, number: Value) -> list[Value]:
        digits: list[Value] = []
        for extent in reversed(self.extents[1:]):
            quotient = b.op("floordiv", number, b.index(extent))
            digits.insert(0, b.sub(number, b.mul(quotient, b.index(extent))))
            number = quotient
        return [number, *digits]

    def _next(self, b: Builder, digits: Sequence[Value]) -> list[Value]:
        """The row behind that of these digits."""
        return count_up(b, digits, self.extents)

    def steps_within(self, b: Builder, pieces: Sequence[tuple[Value, Value | None]], span: tuple[Size, Size], inner: Size) -> Value:
        """How many terms, from the first of the sum on, read nothing outside of the array."""
        memory = self.memory.type
        assert isinstance(memory, Tensor)
        low = high = pieces[0][0]
        for place, _ in pieces[1:]:
            low, high = b.op("min", low, place), b.op("max", high, place)
        behind = b.add(high, b.index(span[1] + self.step * (self.lanes - 1)))
        room = b.sub(b.index(memory.shape[0] - 1), behind)
        outer = b.op("floordiv", b.add(room, b.index(span[0])), b.op("max", b.index(span[0]), b.index(1)))
        return b.select(b.op("ge", low, b.index(0)), b.mul(outer, b.index(inner)), b.index(0))

    def merge(
        self, b: Builder, pieces: Sequence[tuple[Value, Value | None]], origin: Value, memory: tuple[Value, Value, Value, Value], count: Value
    ) -> None:
        """Copy `count` steps of the sum. `memory`: where places of steps are written down, as seen from `origin`; panels; the number of the one that is filled; and
        from which of its columns on."""
        places, columns, panel, shift = memory
        zero, last = b.index(0), b.sub(count, b.index(1))
        lane, across = self.index_tile(b, zero, 1, self.lanes), self.index_tile(b, shift, 1, self.lanes)
        steps = b.mul(lane, b.like(b.index(self.step), lane))
        begun = [(b.sub(place, origin), lanes) for place, lanes in pieces]
        far = b.add(begun[-1][0], b.index(self.step * (self.lanes - 1)))

        def by_k(at: Builder, k: Value) -> list[Value]:
            step = at.op("load", places, zero, k)
            ahead = at.op("load", places, zero, at.op("min", at.add(k, at.index(PLACES_AHEAD)), last))
            # What the vectors before have read is near: the line in which this one ends is not.
            at.multi("prefetch", self.memory, at.add(far, ahead))
            value: Value | None = None
            for place, lanes in begun:
                read = at.op("load", self.memory, at.add(at.like(at.add(place, step), lane), steps))
                value = read if value is None or lanes is None else at.select(lanes, read, value)
            assert value is not None
            return list(at.multi("store", columns, panel, k, across, value))

        b.for_(zero, count, b.index(1), [], by_k, name="k")
