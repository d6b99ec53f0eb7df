"""A product on a CPU whose factors are read where they lie: for few rows, or few columns, whose elements are used too seldom to be copied.

In: a product of two matrices and a block of its result. Out: tile-stage ops. The second factor is walked in strips as wide as four vectors, the first in a few rows at a time, of
which each element is repeated to a vector as it is read:

    for %start { for %strip { for %rows { for %k { %b = load b[k, strip]; %acc = fma a[row, k], %b, %acc }; sums[row, strip] += %acc } } }

Edges need no copies either: vectors behind the last column are masked, and rows behind the last repeat it. A stretch of the sum is so short that the rows it reads lie on no more pages
than hardware follows as streams; several stretches are added up before they are added to the rest, which loses fewer bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.contraction import Contraction
from tilewright.base.sizes import ONE, Size, ceildiv, floordiv, maximum, minimum
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value
from tilewright.ir.types import dtype_of
from tilewright.passes.schedules.matrix import CpuProduct
from tilewright.passes.to_tile.panels.results import PanelResults
from tilewright.passes.to_tile.panels.sides import Side
from tilewright.passes.to_tile.panels.steps import local_array
from tilewright.passes.windows.sum_ranges import sum_bounds

SELDOM = 48
"""The harmonic mean of rows and columns, halved, up to which copying takes more time than it saves."""
VECTORS = 4
"""Of a strip."""
TILE_ROWS, WIDE_ROWS = 8, 6
"""Rows of a tile, and of one of all vectors of a strip: as many addresses and sums as there are registers for."""
STREAMS, PAGE = 32, 4096
"""Rows that hardware fetches ahead at once, and the bytes of memory in which it follows one."""
FEWEST, LONGEST = 32, 512
"""Steps of a stretch."""
TOGETHER = 16
"""Stretches that are added up by themselves."""
AHEAD = 12
"""Rows from when one is fetched to its use, where rows are short."""
ROWS_UNIT = 24
"""Rows of all tiles: room for sums is made in multiples of them."""
ROOM = 1 << 17
"""Sums of a block, which stay in the second-level cache."""


def product_in_place(kernel: Kernel, found: Contraction, schedule: CpuProduct, target: Target) -> InPlaceProduct | None:
    """The product, where its factors can be read where they lie."""
    if schedule.to_tile != "lower_contraction_cpu" or schedule.keep != "b" or not target.has_lane_masks or not found.accumulator.is_float:
        return None
    if kernel.attrs.get("copies") or found.batch or not len(found.m) == len(found.n) == len(found.k) == 1 or sum_bounds(found):
        return None
    product = InPlaceProduct(kernel, found, schedule, target)
    return product if all(map(product.can_read, (product.a, product.b))) and product.b.along_side else None


class InPlaceProduct(PanelResults):
    def __init__(self, kernel: Kernel, found: Contraction, schedule: CpuProduct, target: Target) -> None:
        lanes = schedule.nr // schedule.vectors
        super().__init__(kernel, found, replace(schedule, mr=ROOM // lanes, nr=VECTORS * lanes, vectors=VECTORS), target)
        (self.down,), (self.across,), (self.length,) = self.a.extents, self.b.extents, self.k_extents

    def can_read(self, side: Side) -> bool:
        """Whether a factor is an element of an array, with no loads to find it, whose neighbours in memory are neighbours of the product."""
        load = side.factor.load
        plain = load is not None and side.factor.guard is None and side.factor.value is load.result and dtype_of(load.operands[0].type) is self.dtype
        return plain and (side.along_side or side.along_k) and not any(op.opcode == "load" for op in side.ops if op is not load)

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def is_seldom(self) -> Size:
        """1 where elements are used so seldom that copies of them are not worth making, else 0."""
        return minimum(ONE, floordiv((self.down + self.across) * SELDOM, maximum(ONE, self.down * self.across)))

    def shares(self) -> tuple[Size, Size]:
        """Rows and columns of a block. All cores have some, along the longer side."""
        cores, tall = self.target.multiprocessors, minimum(ONE, floordiv(self.down, maximum(ONE, self.across)))

        def share(extent: Size, other: Size, unit: int, least: int) -> Size:
            most = maximum(ONE, floordiv(Size.of(ROOM // unit), maximum(ONE, other))) * unit
            blocks = ceildiv(extent, most)
            # The last round keeps all cores busy, too.
            even = minimum(ceildiv(blocks, Size.of(cores)) * cores, ceildiv(extent, Size.of(2 * least)))
            return ceildiv(ceildiv(extent, maximum(ONE, maximum(blocks, even))), Size.of(least)) * least

        rows, columns = (ceildiv(extent, Size.of(unit)) * unit for extent, unit in ((self.down, ROWS_UNIT), (self.across, self.matrix.nr)))
        height, width = share(self.down, columns, ROWS_UNIT, TILE_ROWS // 2), share(self.across, rows, self.matrix.nr, self.lanes)
        return rows + (height - rows) * tall, width + (columns - width) * tall

    def grid(self) -> tuple[Size, Size]:
        """Blocks one above another, and side by side."""
        height, width = self.shares()
        return ceildiv(self.down, maximum(ONE, height)), ceildiv(self.across, maximum(ONE, width))

    def _depth(self) -> Size:
        """Steps of a stretch."""
        longest = maximum(self.across, self.down) if self.a.along_side else self.across
        followed = floordiv(Size.of(STREAMS * PAGE // self.dtype.itemsize), maximum(ONE, longest))
        return minimum(Size.of(LONGEST), maximum(Size.of(FEWEST), followed))

    # -- the block ----------------------------------------------------------------------------------------------

    def block(self, b: Builder, env: dict[Value, Value], number: Value) -> None:
        """Block `number` of the grid."""
        height, width = self.shares()
        row, column = self._apart(b, number, self.grid())
        top, left = b.mul(row, b.index(height)), b.mul(column, b.index(width))
        down = top, b.op("min", b.add(top, b.index(height)), b.index(self.down))
        across = left, b.op("min", b.add(left, b.index(width)), b.index(self.across))
        room = ROOM // self.matrix.nr
        self.sums = self._local(b, "sums", (2 * room, self.matrix.nr))
        zero, one = b.index(0), b.index(1)
        step, length = b.index(self._depth()), b.index(self.length)
        together = b.mul(step, b.index(TOGETHER))
        strips = b.op("floordiv", b.add(b.sub(across[1], across[0]), b.index(self.matrix.nr - 1)), b.index(self.matrix.nr))
        pad = b.mul(b.op("floordiv", b.add(b.sub(down[1], down[0]), b.index(ROWS_UNIT - 1)), b.index(ROWS_UNIT)), b.index(ROWS_UNIT))
        several, short = b.op("gt", length, together), b.op("gt", step, b.index(FEWEST))
        # Not a minimum, which LLVM would find anew for each step of the innermost loop.
        latest = b.mul(b.op("floordiv", b.sub(b.op("max", length, one), one), step), step)

        def stretch(at: Builder, start: Value) -> list[Value]:
            count = at.select(at.op("eq", start, latest), at.sub(length, latest), step)
            group = at.op("floordiv", start, together)
            first = at.op("eq", start, at.mul(group, together))

            def strip(inner: Builder, place: Value) -> list[Value]:
                begin = inner.add(across[0], inner.mul(place, inner.index(self.matrix.nr)))
                following = inner.add(begin, inner.index(self.matrix.nr))
                # What is read next: of long rows the next strip, after the last one the first of the next stretch. Short rows are followed by the next ones.
                over = inner.op("ge", following, across[1])
                ahead = (
                    inner.select(short, inner.index(AHEAD), inner.select(over, step, zero)),
                    inner.select(short, begin, inner.select(over, across[0], following)),
                )
                self._strip(inner, env, down, (begin, across[1]), inner.mul(place, pad), (start, count), first, ahead)
                return []

            at.for_(zero, strips, one, [], strip, name="strip")
            behind = at.add(start, step)
            ends = at.op("or", at.op("ge", behind, length), at.op("eq", behind, at.mul(at.add(group, one), together)))
            at.if_(at.logical_and(several, ends), lambda inner: self._gather(inner, inner.mul(strips, pad), room, group), lambda inner: [])
            return []

        # A sum of nothing still has its results written.
        b.for_(zero, b.op("max", length, one), step, [], stretch, name="start")
        total = b.select(several, b.index(room), zero)

        def finish(at: Builder, place: Value) -> list[Value]:
            begin = at.add(across[0], at.mul(place, at.index(self.matrix.nr)))
            return self._finish(at, env, at.add(total, at.mul(place, pad)), down, (begin, across[1]))

        b.for_(zero, strips, one, [], finish, name="strip")

    def _gather(self, b: Builder, rows: Value, room: int, group: Value) -> list[Value]:
        """Add the sums of some stretches to those of all before."""
        columns = self.index_tile(b, b.index(0), 1, self.matrix.nr)
        begun = b.op("eq", group, b.index(0))

        def each(at: Builder, row: Value) -> list[Value]:
            own, place = at.op("load", self.sums, row, columns), at.add(row, at.index(room))
            (value,) = at.if_(begun, lambda inner: [own], lambda inner: [inner.add(inner.op("load", self.sums, place, columns), own)])
            return list(at.multi("store", self.sums, place, columns, value))

        b.for_(b.index(0), rows, b.index(1), [], each, name="row")
        return []

    def _strip(
        self, b: Builder, env: dict[Value, Value], down: tuple[Value, Value], across: tuple[Value, Value], where: Value, stretch: tuple[Value, Value], first: Value,
        ahead: tuple[Value, Value],
    ) -> list[Value]:  # fmt: skip
        """Add a stretch to the sums of a strip, which are at row `where`: by the fewest vectors that have all its columns."""

        def rows_of(at: Builder, vectors: int) -> list[Value]:
            rows = WIDE_ROWS if vectors == VECTORS else TILE_ROWS

            def some(inner: Builder, top: Value) -> list[Value]:
                # The first rows fetch for all of them; others, what is there.
                begun = inner.op("eq", top, down[0])
                fetched = inner.select(begun, ahead[0], inner.index(0)), inner.select(begun, ahead[1], across[0])

                def tile(deep: Builder, height: int) -> list[Value]:
                    place = deep.add(where, deep.sub(top, down[0]))
                    self._tile(deep, env, (top, down[1], height), (*across, vectors), place, stretch, first, fetched)
                    return []

                few = inner.op("le", inner.sub(down[1], top), inner.index(rows // 2))
                inner.if_(few, lambda deep: tile(deep, rows // 2), lambda deep: tile(deep, rows))
                return []

            at.for_(*down, at.index(rows), [], some, name="row")
            return []

        def fewest(at: Builder, vectors: int) -> list[Value]:
            if vectors == VECTORS:
                return rows_of(at, vectors)
            fits = at.op("le", at.sub(across[1], across[0]), at.index(vectors * self.lanes))
            at.if_(fits, lambda inner: rows_of(inner, vectors), lambda inner: fewest(inner, vectors + 1))
            return []

        return fewest(b, 1)

    def _tile(
        self, b: Builder, env: dict[Value, Value], down: tuple[Value, Value, int], across: tuple[Value, Value, int], where: Value, stretch: tuple[Value, Value],
        first: Value, ahead: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """Add a stretch to a tile of sums, which are in registers meanwhile. `down`, `across`: where it begins, where the block ends, and rows and vectors."""
        (top, bottom, rows), (left, right, vectors), (start, count) = down, across, stretch
        (row_index,), (column_index,), (k_index,) = self.a.indices, self.b.indices, self.k_indices
        last = b.sub(bottom, b.index(1))
        numbers = [b.op("min", b.add(top, b.index(row)), last) for row in range(rows)]
        columns = [self.index_tile(b, b.add(left, b.index(v * self.lanes)), 1, self.lanes) for v in range(vectors)]
        inside = b.op("lt", columns[-1], b.like(right, columns[-1]))
        nothing = b.op("broadcast", b.const(0, self.dtype), shape=(1, self.lanes))

        def step(at: Builder, k: Value, *sums: Value) -> list[Value]:
            place = at.add(start, k)
            self._fetch_row(at, {**env, k_index: at.add(place, ahead[0])}, ahead[1], vectors)
            if self.a.along_side:
                self._fetch_element(at, self.a, {**env, row_index: numbers[-1], k_index: at.add(place, at.index(AHEAD))})
            masks = [*[None] * (vectors - 1), inside]
            others = [self._value(at, self.b, {**env, column_index: column, k_index: place}, mask) for column, mask in zip(columns, masks, strict=True)]
            following: list[Value] = []
            for row, number in enumerate(numbers):
                own = at.like(self._value(at, self.a, {**env, row_index: number, k_index: place}), nothing)
                following += [at.fma(own, other, sums[row * vectors + v]) for v, other in enumerate(others)]
            return following

        done = b.for_(b.index(0), count, b.index(1), [nothing] * (rows * vectors), step, name="k")
        places = [self.index_tile(b, b.index(v * self.lanes), 1, self.lanes) for v in range(vectors)]
        cells = [(b.add(where, b.index(row)), place) for row in range(rows) for place in places]

        def more(at: Builder) -> list[Value]:
            return [at.add(at.op("load", self.sums, *cell), value) for cell, value in zip(cells, done, strict=True)]

        for cell, value in zip(cells, b.if_(first, lambda at: done, more), strict=True):
            b.multi("store", self.sums, *cell, value)

    def _fetch_row(self, b: Builder, env: dict[Value, Value], left: Value, vectors: int) -> None:
        """Fetch a row of the second factor from column `left` on: the lines in which vectors end. That in which the first begins came with the strip before."""
        for v in range(vectors):
            self._fetch_element(b, self.b, {**env, self.b.indices[0]: b.add(left, b.index((v + 1) * self.lanes - 1))})

    def _fetch_element(self, b: Builder, side: Side, env: dict[Value, Value]) -> None:
        load, local = side.factor.load, dict(env)
        assert load is not None
        self.ops(b, [op for op in side.ops if op is not load], local, [])
        b.multi("prefetch", *(local[value] for value in load.operands))

    def _sums_at(self, b: Builder, tile: Value, row: Value, columns: Value, inside: Value | None = None) -> Value:
        where = (self.sums, b.add(tile, row), columns)
        return b.op("load", *where) if inside is None else b.op("load", *where, inside, masked=True)

    def _local(self, b: Builder, name: str, shape: Sequence[int]) -> Value:
        return local_array(b, name, shape, self.dtype)

