"""What a block of a CPU walks, and in which steps: rows, vectors along them, borders apart, and what is shorter than a vector.

In: a nest with its schedule. Out: tile-stage loops around the body of the nest.

    for %k in low..high by 32 { the body, over tiles of 32 }
    the body, over a vector of which some lanes count
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.analysis.affine import address
from tilewright.base.sizes import ONE, Size, floordiv, maximum, minimum, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value, is_watched, walk
from tilewright.passes.common.nest_shapes import Condition
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering, RowPart
from tilewright.passes.to_tile.loops.strips import aligned_head, strips

NEAR = (0, 1, 2, 3)
"""How many elements apart the lanes of a vector may lie, to be sorted out of a few registers."""


class CpuBlocks:
    """The blocks of one kernel."""

    def __init__(self, lowering: NestLowering) -> None:
        self.lowering, self.schedule, self.nest, self.region = lowering, lowering.schedule, lowering.nest, lowering.region
        self.tiled = lowering.tiled
        self.masks_rows = lowering.target.has_lane_masks and self._loads_vectors()
        """Whether what is shorter than a vector is one whose lanes are masked."""
        self.edges: list[Condition] = []
        """Which elements of the vector at hand belong to the row."""

    def _loads_vectors(self) -> bool:
        """Whether all elements of a vector lie in a few registers: they are neighbours, or few elements apart."""
        axis = self.schedule.vector_index
        accesses = [op for op in walk(self.region) if op.opcode in ("load", "store")]
        return axis >= 0 and all(address(op, self.lowering.forms).factor(self.region.args[axis]).constant in NEAR for op in accesses)

    def lower(self, b: Builder, env: dict[Value, Value]) -> Size:
        """The code of a block; returns how many blocks there are."""
        if self.schedule.short_rows:
            return self._short_rows(b, env)
        axis = self.schedule.vector_index
        steps = [1] * len(self.schedule.tiles)
        if axis >= 0 and self.tiled:
            steps[axis] = self.schedule.chunk
        row_axis, rows = self.schedule.row_axis, self.schedule.rows_per_block
        if rows > 1:
            steps[row_axis] = rows
        blocks, starts = self.lowering.block_indices(b, steps)
        if rows == 1:
            self._row(b, env, starts)
            return blocks
        if self.lowering.groups_rows:
            self._grouped_rows(b, env, starts)
            return blocks
        if self.schedule.rows_inside:
            self._row(b, env, starts, b.op("min", b.add(starts[row_axis], b.index(rows)), b.index(self.nest.extents[row_axis])))
            return blocks

        def row(inner: Builder, number: Value) -> list[Value]:
            self._row(inner, env, [number if p == row_axis else s for p, s in enumerate(starts)])
            return []

        end = b.op("min", b.add(starts[row_axis], b.index(rows)), b.index(self.nest.extents[row_axis]))
        b.for_(starts[row_axis], end, b.index(1), [], row, name="row")
        return blocks

    def _short_rows(self, b: Builder, env: dict[Value, Value]) -> Size:
        """Sums over rows, several to a block: of long rows vectors lie along each, of short ones across them, along the index of which there are many."""
        extents, length = self.nest.extents, maximum(ONE, self.nest.reduce_extent)
        (reduction,) = self.nest.reductions
        costs = self.lowering.target.costs
        ends = self._indices_of(reduction.operands[0])
        axes = [p for p in reversed(range(len(extents))) if self.region.args[p] not in ends][:2]
        # Few results are shared out one by one.
        spare = floordiv(product(extents), Size.of(costs.reductions.cpu_results))
        steps: list[int | Size] = [1] * len(extents)
        for p in axes:
            steps[p] = maximum(ONE, minimum(extents[p], minimum(floordiv(Size.of(costs.caches.columns), length), spare)))
            length, spare = length * maximum(ONE, extents[p]), floordiv(spare, maximum(ONE, extents[p]))
        blocks, starts = self.lowering.block_indices(b, steps)
        stops = {p: b.op("min", b.add(starts[p], b.index(steps[p])), b.index(extents[p])) for p in axes}

        def each(at: Builder, places: Sequence[int], first: Sequence[Value], last: Callable[[Builder, list[Value]], object]) -> list[Value]:
            """Walk the block along these indices, and do `last` for each."""
            if not places:
                last(at, list(first))
                return []
            at.for_(
                first[places[0]], stops[places[0]], at.index(1), [],
                lambda inner, number: each(inner, places[1:], [number if p == places[0] else v for p, v in enumerate(first)], last), name="row",
            )  # fmt: skip
            return []

        def across(at: Builder, axis: int) -> list[Value]:
            tile = self.schedule.reduce_tile
            tiles = tuple(tile if p == axis else 1 for p in range(len(extents)))
            other = CpuBlocks(self.lowering.rescheduled(Schedule(tiles, 1, tile, vector_index=axis, chunk=tile, repeat=True)))
            return each(at, [p for p in reversed(axes) if p != axis], starts, lambda inner, own: other.row_between(inner, env, own, stops[axis]))

        def long(at: Builder) -> list[Value]:
            return each(at, list(reversed(axes)), starts, lambda inner, own: self._row(inner, env, own))

        # Vectors lie along the innermost index where that is long; the elements of others are further apart, and rows have to be shorter still.
        choices = [(axis, self.schedule.short_rows // (1 if place == 0 else 3), place == 0 and len(axes) > 1) for place, axis in enumerate(axes)]

        def choose(at: Builder, left: Sequence[tuple[int, int, bool]]) -> list[Value]:
            if not left:
                return long(at)
            axis, most, is_long = left[0]
            fits = at.op("le", at.index(self.nest.reduce_extent), at.index(most))
            if is_long:
                fits = at.logical_and(fits, at.op("ge", at.index(extents[axis]), at.index(self.schedule.reduce_tile)))
            at.if_(fits, lambda inner: across(inner, axis), lambda inner: choose(inner, left[1:]))
            return []

        choose(b, choices)
        return blocks

    def _indices_of(self, value: Value) -> set[Value]:
        """The parallel indices that a value is made of."""
        made = {result: op for op in self.region.ops for result in op.results}
        found, pending = set[Value](), [value]
        while pending:
            current = pending.pop()
            found.add(current)
            op = made.get(current)
            pending += [v for v in op.operands if v not in found] if op is not None else []
        return found

    def row_between(self, b: Builder, env: dict[Value, Value], starts: Sequence[Value], high: Value) -> None:
        """Results along the vector axis from `starts` up to `high`."""
        axis = self.schedule.vector_index

        def body(inner: Builder, index: Value) -> list[Value]:
            self.lowering.ops(inner, self.region.ops, {**env, **{arg: index if p == axis else starts[p] for p, arg in enumerate(self.region.args)}}, list(self.edges))
            return []

        self._repeating(b, starts[axis], high, (self.schedule.vector,), body)

    def _grouped_rows(self, b: Builder, env: dict[Value, Value], starts: Sequence[Value]) -> None:
        """A block of rows and vectors of columns, both several at a time. The last group ends where the block does; fewer rows than a group are done one by one."""
        schedule, one = self.schedule, b.index(1)
        axis, row_axis, group = schedule.vector_index, schedule.row_axis, schedule.tiles[schedule.row_axis]
        first, low = starts[row_axis], starts[axis]
        high = b.op("min", b.add(low, b.index(schedule.chunk)), b.index(self.nest.extents[axis]))
        end = b.op("min", b.add(first, b.index(schedule.rows_per_block)), b.index(self.nest.extents[row_axis]))

        def row(at: Builder, number: Value, widths: Sequence[int]) -> list[Value]:
            def body(inner: Builder, index: Value) -> list[Value]:
                local = {**env, **{arg: index if p == axis else number if p == row_axis else starts[p] for p, arg in enumerate(self.region.args)}}
                self.lowering.ops(inner, self.region.ops, local, list(self.edges))
                return []

            self._repeating(at, low, high, widths, body)
            return []

        def together(at: Builder) -> list[Value]:
            last, place = at.sub(end, at.index(group)), self.tiled.index(row_axis)
            widths = (schedule.tiles[axis], schedule.vector)
            at.for_(first, end, at.index(group), [], lambda inner, k: row(inner, self.lowering.index_tile(inner, inner.op("min", k, last), place, group), widths), name="rows")
            return []

        def alone(at: Builder) -> list[Value]:
            at.for_(first, end, one, [], lambda inner, number: row(inner, number, (schedule.vector,)), name="row")
            return []

        b.if_(b.op("ge", b.sub(end, first), b.index(group)), together, alone)

    def _row(self, b: Builder, env: dict[Value, Value], starts: Sequence[Value], rows_end: Value | None = None) -> None:
        """One block, or one of its rows: what lies along the vector axis from `starts` on. With `rows_end` the rows of a block are the inner loop."""
        axis, row_axis = self.schedule.vector_index, self.schedule.row_axis

        def body(inner: Builder, index: Value | None) -> list[Value]:
            if rows_end is not None:
                inner.for_(starts[row_axis], rows_end, inner.index(1), [], lambda at, number: one_row(at, index, number), name="row")
                return []
            return one_row(inner, index, None)

        def one_row(inner: Builder, index: Value | None, number: Value | None) -> list[Value]:
            local = dict(env)
            for p, arg in enumerate(self.region.args):
                local[arg] = index if index is not None and p == axis else number if number is not None and p == row_axis else starts[p]
            self.lowering.ops(inner, self.region.ops, local, list(self.edges))
            return []

        if not self.tiled:
            body(b, None)
            return
        tile = self.schedule.tiles[axis]
        low = starts[axis]
        high = b.op("min", b.add(low, b.index(self.schedule.chunk)), b.index(self.nest.extents[axis]))
        if self.schedule.row_group:
            from tilewright.passes.to_tile.loops.column_sums import ColumnSums

            indices = dict(env) | {arg: starts[p] for p, arg in enumerate(self.region.args) if p != axis}
            ColumnSums(self.lowering, self.region.ops, self.region.args[axis], self.schedule.row_group, tile, self.schedule.vector).lower(b, indices, low, high)
            return
        if self.lowering.borders is not None and rows_end is None:
            self._peeled(b, env, starts, low, high, body)
            return
        if self.schedule.repeat:
            self._repeating(b, low, high, (tile, self.schedule.vector), body)
            return
        first = dict(env) | {arg: starts[p] for p, arg in enumerate(self.region.args)}
        self._test_rows(b, first, self.region.args[axis])
        if self.schedule.vector < tile:
            self._narrowing(b, low, high, (tile, self.schedule.vector), body)
            return
        head = aligned_head(self.lowering, b, self.region.ops, first, self.region.args[axis])
        strips(b, low, high, tile, head, [], [], lambda inner, k: body(inner, self.lowering.index_tile(inner, k, 0, tile)), body)

    def _test_rows(self, b: Builder, env: Mapping[Value, Value], moving: Value) -> None:
        if is_watched(self.lowering.kernel):
            from tilewright.passes.to_tile.loops.index_tests import test_rows

            test_rows(self.lowering, b, dict(env), moving)

    def _narrowing(self, b: Builder, low: Value, high: Value, widths: Sequence[int], body: Callable[..., list[Value]]) -> None:
        """Walk low..high in tiles of these widths, the widest first, and what is fewer than the last of them."""
        end = b.op("max", low, high)
        for width in widths:
            size = b.index(width)
            middle = b.add(low, b.mul(b.op("floordiv", b.sub(end, low), size), size))
            b.for_(low, middle, size, [], lambda inner, k, width=width: body(inner, self.lowering.index_tile(inner, k, 0, width)))
            low = middle
        self._short(b, low, end, body)

    def _peeled(
        self, b: Builder, env: Mapping[Value, Value], starts: Sequence[Value], low: Value, high: Value, body: Callable[..., list[Value]]
    ) -> None:  # fmt: skip
        """A row whose borders are done element by element, and its middle in vectors without the conditions that hold there."""
        borders, tile, vector = self.lowering.borders, self.schedule.tiles[self.schedule.vector_index], self.schedule.vector
        assert borders is not None
        first = {**env, **{arg: starts[p] for p, arg in enumerate(self.region.args)}}
        self._test_rows(b, first, borders.index)
        begin, end = borders.middle(b, low, high)
        if not self.schedule.repeat:
            end = b.add(begin, b.mul(b.op("floordiv", b.sub(end, begin), b.index(tile)), b.index(tile)))
        # What has no room for a vector is a border as a whole.
        least = b.index(tile if not self.schedule.repeat else 1 if self.masks_rows else vector)
        room = b.op("ge", b.sub(end, begin), least)
        begin, end = b.select(room, begin, high), b.select(room, end, high)

        def placed(place: RowPart) -> Callable[..., list[Value]]:
            def inside(inner: Builder, index: Value) -> list[Value]:
                with self.lowering.at_place(place):
                    return body(inner, index)

            return inside

        def middle(at: Builder, place: RowPart, widths: Sequence[int]) -> list[Value]:
            width, run = at.index(widths[0]), placed(place)
            if not self.schedule.repeat:
                at.for_(begin, end, width, [], lambda inner, k: run(inner, self.lowering.index_tile(inner, k, 0, widths[0])))
                return []

            def vectors(deeper: Builder) -> list[Value]:
                last = deeper.sub(end, width)
                deeper.for_(begin, end, width, [], lambda inner, k: run(inner, self.lowering.index_tile(inner, inner.op("min", k, last), 0, widths[0])))
                return []

            def narrower(deeper: Builder) -> list[Value]:
                if len(widths) > 1:
                    return middle(deeper, place, widths[1:])
                self._short(deeper, begin, end, run)
                return []

            if len(widths) == 1 and not self.masks_rows:
                return vectors(at)
            at.if_(at.op("ge", at.sub(end, begin), width), vectors, narrower)
            return []

        widths = (tile,) if tile == vector or not self.schedule.repeat else (tile, vector)
        is_inner = borders.is_inner(b, first)
        if is_inner is None:
            middle(b, RowPart.INNER, widths)
        else:
            b.if_(is_inner, lambda at: middle(at, RowPart.INNER, widths), lambda at: middle(at, RowPart.MIDDLE, widths[-1:]))

        def side(inner: Builder, number: Value) -> list[Value]:
            after = inner.op("gt", number, inner.index(0))
            start, stop = inner.select(after, end, low), inner.select(after, high, begin)
            inner.for_(start, stop, inner.index(1), [], placed(RowPart.BORDER))
            return []

        b.for_(b.index(0), b.index(2), b.index(1), [], side, name="side")

    def _repeating(self, b: Builder, low: Value, high: Value, widths: Sequence[int], body: Callable[..., list[Value]]) -> None:
        """Walk low..high in vectors of the widest kind that fits; the last one ends where the row does and repeats a few elements."""
        if not widths:
            self._short(b, low, high, body)
            return
        width, place = b.index(widths[0]), self.tiled.index(self.schedule.vector_index)

        def vectors(at: Builder) -> list[Value]:
            last = at.sub(high, width)
            at.for_(low, high, width, [], lambda inner, k: body(inner, self.lowering.index_tile(inner, inner.op("min", k, last), place, widths[0])))
            return []

        def narrower(at: Builder) -> list[Value]:
            self._repeating(at, low, high, widths[1:], body)
            return []

        b.if_(b.op("ge", b.sub(high, low), width), vectors, narrower)

    def _short(self, b: Builder, low: Value, high: Value, body: Callable[..., list[Value]]) -> None:
        """Elements of a row that are fewer than a vector: one vector of which some lanes count, or one by one."""
        if not self.masks_rows:
            b.for_(low, high, b.index(1), [], body)
            return
        index = self.lowering.index_tile(b, low, self.tiled.index(self.schedule.vector_index), self.schedule.vector)
        self.edges.append(Condition(b.op("lt", index, b.like(high, index)), edge=True))
        try:
            body(b, index)
        finally:
            self.edges.pop()
