"""Quicksort by vectors, in place: what CPUs with wide vectors do in their caches, where a vector's lanes can be compressed.

In: keys, as unsigned numbers in the memory of what they stand for, and the range to sort. Out: the numbers, in order, in that memory.

A part of an array is split by a pivot: vectors are read from whichever end has less room, and their lanes go to either end. To begin
with, the outermost vectors are set aside for there to be room. Parts of a few vectors are sorted in registers (`network`). Every
part knows bounds of its keys: equal keys end a part, and where pivots have been bad too often, the middle between the bounds is taken,
so that there are at most as many steps as a key has bits.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, i64
from tilewright.primitives.code import Code, Mem, Num
from tilewright.primitives.keys import cooked, from_key, key_dtype, raw
from tilewright.primitives.vectors.network import sorted_vectors

VECTOR_BYTES = 64
"""Bytes of the vectors a CPU must have: of shorter ones, digits are sooner sorted."""
_MOST_VECTORS = 16
"""Vectors that are sorted in registers."""
_STEP = 4
"""Vectors that are read at once from one end."""
_PARTS = 64
"""Parts that wait: each is at most half of the one before."""


def whole(c: Code, value: Num, width: int) -> Num:
    return c.op("broadcast", value, width=width)


def lanes_below(c: Code, count: Num, width: int, unsigned: DType) -> Num:
    """The lanes below a number, which may be more than there are, or less than 0."""
    return c.op("lane_ids", width=width, dtype=unsigned) < whole(c, count.max(0).to(unsigned), width)


def load_lanes(data: Mem, i: Num, mask: Num) -> Num:
    """The elements from `i` on, as many as the mask has lanes; 0 where it is false."""
    return Num(data.code, data.code.b.emit("load_lanes", [data.value, i.value, mask.value], {})[0])


def store_lanes(data: Mem, i: Num, values: Num, mask: Num) -> None:
    data.code.b.emit("store_lanes", [data.value, i.value, values.value, mask.value], {})


class Quicksort:
    """The sort of ranges of one array, `data`; memory of its own is taken where this is made."""

    def __init__(self, c: Code, data: Mem, dtype: DType, descending: bool) -> None:
        self.c, self.data, self.dtype, self.descending = c, data, dtype, descending
        self.unsigned = key_dtype(dtype)
        self.width = VECTOR_BYTES // dtype.itemsize
        self.aside = c.alloc("local", self.unsigned, 4 * _STEP * self.width, align=64)
        self.ends = c.alloc("local", i64, 3 * _PARTS, align=64)
        self.bounds = c.alloc("local", self.unsigned, 2 * _PARTS, align=64)

    def load(self, i: Num) -> Num:
        return raw(self.data.load(i, self.width, unaligned=True))

    def put(self, i: Num, keys: Num) -> None:
        self.data.store(i, cooked(keys, self.dtype), unaligned=True)

    def finished(self, keys: Num) -> Num:
        return cooked(from_key(self.c, keys, self.dtype, self.descending), self.dtype)

    def below(self, count: Num) -> Num:
        return lanes_below(self.c, count, self.width, self.unsigned)

    def sort(self, low: Num, high: Num, least: Num | None = None, most: Num | None = None) -> None:
        """The keys of a range; none is below `least`, or above `most`."""
        c = self.c
        tries = (64 - c.op("clz", high - low)) * 2
        first = c.const(0, self.unsigned) if least is None else least
        last = c.const(-1, self.unsigned) if most is None else most
        self._push(c.const(0, i64), low, high, first, last, tries)

        def turn(waiting: Num) -> list[Num]:
            place = waiting - 1
            low, high, tries = (self.ends[place * 3 + k] for k in range(3))
            least, most = (self.bounds[place * 2 + k] for k in range(2))
            small = high - low <= _MOST_VECTORS * self.width

            def ended() -> Num:
                c.either(small, lambda: self._in_registers(low, high - low), lambda: self._all_equal(low, high))
                return place

            return c.either(small | least.eq(most), ended, lambda: self._split(place, low, high, least, most, tries))

        c.loop_while([c.const(1, i64)], lambda waiting: waiting > 0, turn)

    def _push(self, place: Num, low: Num, high: Num, least: Num, most: Num, tries: Num) -> None:
        for k, end in enumerate((low, high, tries)):
            self.ends.store(place * 3 + k, end)
        for k, bound in enumerate((least, most)):
            self.bounds.store(place * 2 + k, bound)

    def _split(self, place: Num, low: Num, high: Num, least: Num, most: Num, tries: Num) -> Num:
        """Two parts in the place of one; the smaller one is next."""
        c = self.c
        sample = self._pivot(low, high)
        middle = least + ((most - least) >> 1) + 1
        pivot = c.select(tries > 0, c.select(sample > least, sample, least + 1), middle)
        cut = self.partition(low, high, pivot)
        left, right = (low, cut, least, pivot - 1, tries - 1), (cut, high, pivot, most, tries - 1)
        first = cut - low <= high - cut
        for position, (a, b) in enumerate(((right, left), (left, right))):
            self._push(place + position, *(c.select(first, one, other) for one, other in zip(a, b, strict=True)))
        return place + 2

    def _pivot(self, low: Num, high: Num) -> Num:
        """The median of medians of three."""
        c, count = self.c, high - low
        a, b, d = (self.load(low + (count >> 2) * k - (self.width // 2)) for k in (1, 2, 3))
        median = a.min(b).max(a.max(b).min(d))
        return c.op("extract", sorted_vectors(c, [median])[0], lane=self.width // 2)

    def partition(self, low: Num, high: Num, pivot: Num) -> Num:
        """Where the keys begin that are not below the pivot."""
        c, width = self.c, self.width
        block = _STEP * width
        count, limit = high - low, whole(c, pivot, width)
        backwards = tuple(reversed(range(width)))

        def divided(keys: Num, left: Num, right: Num) -> list[Num]:
            """Of what is written to either end, the lanes behind the keys are in the room between them."""
            below = keys < limit
            few = c.op("popcount", c.op("mask_bits", below)).to(i64)
            self.put(left, c.op("compress", keys, below))
            self.put(right - width, c.op("rearrange", c.op("compress", keys, ~below), lanes=backwards))
            return [left + few, right - width + few]

        def block_at(place: Num) -> list[Num]:
            return [self.load(place + k * width) for k in range(_STEP)]

        def turn(_: Num, start: Num, end: Num, left: Num, right: Num, *vectors: Num) -> list[Num]:
            # The next block is chosen before this one is written: it is there when its turn comes. Either end has room for both.
            from_left = start - left <= right - end
            ahead = block_at(c.select(from_left, start, end - block))
            for keys in vectors:
                left, right = divided(keys, left, right)
            return [c.select(from_left, start + block, start), c.select(from_left, end, end - block), left, right, *ahead]

        def many() -> list[Num]:
            """The odd keys, two blocks behind them and the last block are set aside."""
            odd = count & (block - 1)
            front = odd + 2 * block
            c.loop(0, front, width, [], lambda i: self.aside.store(i, self.load(low + i), unaligned=True))
            for k in range(_STEP):
                self.aside.store(front + k * width, self.load(high - block + k * width), unaligned=True)
            inner = (count - front - block) >> (block.bit_length() - 1)
            _, _, left, right, *vectors = c.loop(0, inner - 1, 1, [low + front + block, high - block, low, high, *block_at(low + front)], turn)
            for keys in vectors:
                left, right = divided(keys, left, right)
            return [left, right, front + block]

        def few() -> list[Num]:
            vectors = count & -width
            c.loop(0, vectors, width, [], lambda i: self.aside.store(i, self.load(low + i), unaligned=True))
            c.loop(vectors, count, 1, [], lambda i: self.aside.store(i, raw(self.data.load(low + i))))
            return [low, high, count]

        left, right, saved = c.either(count >= 4 * block, many, few)
        # Where there is room for less than two vectors, the ends would write over each other.
        roomy = ((saved & -width) - width).max(0)
        left, right = c.loop(0, roomy, width, [left, right], lambda i, a, b: divided(self.aside.load(i, width, unaligned=True), a, b))

        def careful(i: Num, left: Num, right: Num) -> list[Num]:
            there = self.below(saved - i)
            keys = load_lanes(self.aside, i, there)
            below, above = (keys < limit) & there, (keys >= limit) & there
            few, many = (c.op("popcount", c.op("mask_bits", mask)).to(i64) for mask in (below, above))
            self._put_some(left, c.op("compress", keys, below), self.below(few))
            self._put_some(right - many, c.op("compress", keys, above), self.below(many))
            return [left + few, right - many]

        left, _ = c.loop(roomy, saved, width, [left, right], careful)
        return left

    def _put_some(self, i: Num, keys: Num, mask: Num) -> None:
        store_lanes(self.data, i, cooked(keys, self.dtype), mask)

    def _all_equal(self, low: Num, high: Num) -> None:
        self.c.loop(low, high, 1, [], lambda i: self.data.store(i, self.finished(raw(self.data.load(i)))))

    def _in_registers(self, low: Num, count: Num) -> None:
        """A part of a few vectors."""
        c, width = self.c, self.width
        most = whole(c, c.const(-1, self.unsigned), width)

        def keys_at(i: Num, mask: Num | None) -> Num:
            if mask is None:
                return self.load(i)
            return c.select(mask, raw(load_lanes(self.data, i, mask)), most)

        def network(vectors: int) -> None:
            # More than half of the vectors are full.
            masks = [None if k < vectors // 2 else self.below(count - k * width) for k in range(vectors)]
            rows = [keys_at(low + k * width, mask) for k, mask in enumerate(masks)]
            for k, (row, mask) in enumerate(zip(sorted_vectors(c, rows), masks, strict=True)):
                result = self.finished(row)
                if mask is None:
                    self.data.store(low + k * width, result, unaligned=True)
                else:
                    store_lanes(self.data, low + k * width, result, mask)

        def by_size(vectors: int) -> None:
            if vectors == _MOST_VECTORS:
                network(vectors)
            else:
                c.either(count <= vectors * width, lambda: network(vectors), lambda: by_size(2 * vectors))

        c.when(count > 0, lambda: by_size(1))
