"""Loop stage -> tile stage: what one block of the grid computes.

In: a loop-stage kernel and its schedule. Out: a tile-stage kernel. Each parallel index becomes a scalar of the block or a
tile of indices; every value becomes a tile of the shape it depends on, so work that does not vary along an axis is done
once. Reductions are carried in tiles and combined across the tile at their end. Conditions that vary inside a tile become
masks and selects; uniform ones stay control flow.

Edges: on a GPU a block that is not full runs a masked twin of its code; on a CPU a block walks its chunk in full tiles and
finishes element by element, so that no masked access exists there.

    parallel %n (%i) { %v = load %x, %i; … }            tiles=(1024,)
    -> grid [ceildiv(n, 1024)]:  %lo = program_id * 1024
       if %lo + 1024 <= n { %i = %lo + iota; %v = load %x, %i : tile<f32, [1024]> … } else { the same, masked }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.analysis.affine import Affine, address, analyse
from tilewright.analysis.guarded import guarded_loads
from tilewright.analysis.loop_nest import has_long_loops, inner_walks, is_sweep, nest_of
from tilewright.base.dtypes import bool_, i64, u32
from tilewright.base.sizes import ONE, Size, ceildiv, floordiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Attrs, Block, Kernel, Op, Stage, Value, is_watched, walk, watched_axes
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import INDEX, Tensor, Tile, dtype_of
from tilewright.passes.common.combine import combine, combine_later, identities
from tilewright.passes.common.nest_shapes import Condition, Shape, join, shape_of
from tilewright.passes.common.scan_loops import find_scans, loads_inside
from tilewright.passes.common.shift_rows import aligned_accesses, row_start, shift_of
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.borders import Borders
from tilewright.passes.to_tile.even_tiles import border_tests

if TYPE_CHECKING:
    from tilewright.analysis.recomputed import Recomputed
    from tilewright.passes.to_tile.extreme_on_cpu import ExtremeOnCpu
    from tilewright.passes.to_tile.rows_on_cpu import RowsOnCpu

LINE = 64
"""Bytes that a CPU fetches together."""
FETCHED = 4096
"""Elements by which what a CPU fetches lies ahead, if rows are not shorter."""
LOOP_WEIGHT = 16
"""How many elements of a CPU's work a point counts as that runs through a loop of its own."""
SHORT_LOOP = 8
"""Turns of a short loop inside a reduction that are written out."""
WRITTEN_OUT = 64
"""Terms of a short sum that are."""
GROUP_TERMS = 16
"""The same where several rows are done together: what they are multiplied with stays in registers beside their sums."""


NEAR = (0, 1, 2, 3)
"""How many elements apart the lanes of a vector may lie, to be sorted out of a few registers."""


class RowPart(Enum):
    """Where in a row code is: among its borders, in the middle of any row, or in the middle of a row that is no border itself."""

    BORDER = 0
    MIDDLE = 1
    INNER = 2


def lower_loops(kernel: Kernel, schedule: Schedule, target: Target) -> Kernel:
    """The tile-stage kernel."""
    if schedule.window:
        from tilewright.passes.windows.window_terms import order_sums

        kernel = order_sums(kernel, schedule)
    return LoopLowering(kernel, schedule, target).run()


class LoopLowering:
    def __init__(self, kernel: Kernel, schedule: Schedule, target: Target) -> None:
        self.kernel, self.schedule, self.target = kernel, schedule, target
        self.nest = nest_of(kernel)
        self.forms = analyse(kernel)
        self.region = self.nest.parallel.regions[0]
        self.tiled = [p for p, t in enumerate(schedule.tiles) if t > 1]
        self.rank = len(self.tiled) + (1 if schedule.reduce_tile > 1 else 0)
        self.reduce_position = self.rank - 1 if schedule.reduce_tile > 1 else None
        self.inside_reduction = False
        inner = () if target.simt or schedule.reduce_tile == 1 else inner_walks(kernel, self.nest)
        self.inner_walks = {id(op) for op in inner}
        """CPU: reductions and sweeps in serial loops that vectors go along, where there are none at the top."""
        self.border_tests = set() if target.simt or kernel.attrs.get("frames") else border_tests(kernel)
        """Conditions that are asked of a whole tile first."""
        self.unguarded = {id(g.load) for g in guarded_loads(kernel) if g.needs_no_guard and not watched_axes(g.load)}
        """Loads under conditions that stay inside anyway."""
        rows = not target.simt and schedule.reduce_tile > 1 and schedule.vector_on_reduction
        self.recomputed = self._find_recomputed() if rows and not is_watched(kernel) else None
        self.fetched = self._row_arrays() if rows else {}
        """Arrays whose next rows are fetched, with an access to each; not a result in which a sum leaves something, for that is there already."""
        if self.recomputed is not None:
            self.fetched.pop(self.recomputed.store.operands[0], None)
        walks = (*self.nest.reductions, *self.nest.sweeps)
        self.row_start = row_start(kernel, self.nest.parallel, walks, schedule.vector) if schedule.shifted else None
        self.aligned = aligned_accesses(kernel, walks, self.row_start, schedule.vector) if self.row_start is not None else set()
        self.tested: set[tuple[int, int]] = set()
        """Accesses, and axes of them, whose indices were tested before the loop they stand in."""
        self.around = _loops_around(self.nest.parallel, ())
        """For each `accumulate`, the indices of the loops that it stands in."""
        self.shift: Value | None = None
        """How many elements a row's tile begins before the row."""
        self.scan = find_scans(kernel) if schedule.scan else None
        """The loop that the threads of a block walk together."""
        if self.scan is not None:
            self.unguarded |= loads_inside(kernel, self.scan)
        self.borders = self._find_borders()
        self.place: RowPart | None = None
        """Where in a row the code at hand is, where rows have borders."""
        self.clips: dict[Value, Value] = {}
        """Indices of sums that begin later, at a border, and where."""
        self.clipped: set[int] = set()
        """Comparisons that hold since sums end at the border."""
        self.groups_rows = not target.simt and schedule.row_axis >= 0 and schedule.tiles[schedule.row_axis] > 1
        """CPU: whether several rows are done together."""
        self.masks_rows = target.has_lane_masks and self._loads_vectors()
        """CPU: whether what is shorter than a vector is one whose lanes are masked."""
        self.edges: list[Condition] = []
        """CPU: which elements of the vector at hand belong to the row."""
        self.unchosen: set[int] = set()
        """GPU: branches whose terms are nothing where their condition does not hold."""
        self.again = False
        """GPU: whether a window's sum is added up once more, term by term."""

    def _find_recomputed(self) -> Recomputed | None:
        from tilewright.analysis.recomputed import find_recomputed

        return find_recomputed(self.kernel)

    def _row_arrays(self) -> dict[Value, Op]:
        from tilewright.analysis.row_arrays import row_arrays

        return row_arrays(self.region)

    def _loads_vectors(self) -> bool:
        """Whether all elements of a vector lie in a few registers: they are neighbours, or few elements apart."""
        axis = self.schedule.vector_index
        accesses = [op for op in walk(self.region) if op.opcode in ("load", "store")]
        return axis >= 0 and all(address(op, self.forms).factor(self.region.args[axis]).constant in NEAR for op in accesses)

    def _find_borders(self) -> Borders | None:
        axis = self.schedule.vector_index
        if self.target.simt or axis < 0 or len(self.tiled) != 1 or self.reduce_position is not None or self.kernel.attrs.get("frames"):
            return None
        borders = Borders(self.kernel, self.nest.parallel, self.forms, axis)
        return borders if borders.any else None

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        if self.target.simt:
            blocks = self._gpu(b, env)
        else:
            blocks = self._cpu(b, env)
        attrs = dict(self.kernel.attrs)
        attrs["schedule"] = self.schedule.describe()
        if not self.target.simt and has_long_loops(self.kernel, self.nest):
            attrs["weight"] = LOOP_WEIGHT
        if self.schedule.whole:
            attrs["early"] = True  # such kernels are short: what starts them overlaps the end of the kernel before
        if self.schedule.flat:
            attrs["short_rows"] = True  # a row that registers hold has indices of 32 bits
        if self.schedule.loads_turned:
            attrs["loads_turned"] = True
        if self.schedule.resident:
            attrs["min_blocks"] = self.schedule.resident
        name = self.nest.reduce_extent.product_name
        if self.schedule.whole and name is not None:
            # The schedule was made for rows that need all registers of a thread.
            least = self.schedule.reduce_tile - self.schedule.row_step + (0 if self.schedule.shifted else 1)
            attrs["least"] = ((name, least),) if self.schedule.reduce_tile > self.schedule.row_step else ()
        if self.schedule.window:
            attrs["tiled"] = tuple(self.nest.extents[p] for p in self.tiled)
        return replace(
            self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=(blocks,), attrs=MappingProxyType(attrs)
        )

    def _block_indices(self, b: Builder, steps: Sequence[int | Size]) -> tuple[Size, list[Value]]:
        """The number of blocks when index p advances by steps[p] per block, and this block's first index along each."""
        counts = [ceildiv(extent, Size.of(step) if isinstance(step, int) else step) for extent, step in zip(self.nest.extents, steps, strict=True)]
        blocks = ONE
        for count in counts:
            blocks = blocks * count
        pid = b.op("program_id", axis=0)
        if len(counts) == 1:
            positions = [pid]
        else:
            # Block numbers fit 32 bits, where division is cheap.
            positions = []
            rest = b.cast(pid, u32)
            for position in reversed(range(len(counts))):
                if position == 0 or all(c == ONE for c in counts[:position]):
                    positions.append(b.cast(rest, i64))
                    positions += [b.index(0)] * position
                    break
                divisor = b.cast(b.index(counts[position]), u32)
                quotient = b.op("floordiv", rest, divisor)
                positions.append(b.cast(b.sub(rest, b.mul(quotient, divisor)), i64))
                rest = quotient
            positions.reverse()
        starts = [p if s == 1 else b.mul(p, b.index(s)) for p, s in zip(positions, steps, strict=True)]
        return blocks, starts

    def _gpu(self, b: Builder, env: dict[Value, Value]) -> Size:
        tiles = self.schedule.tiles
        blocks, starts = self._block_indices(b, tiles)
        extents = [b.index(e) for e in self.nest.extents]
        full: Value | None = None
        for p in self.tiled:
            if self.nest.extents[p] == ONE or self.nest.extents[p].divisible_by(tiles[p], self.kernel.facts):
                continue
            if self.schedule.window and (p != self.schedule.along or self.schedule.masked):
                continue  # a thread's own results are all there or none is
            inside = b.op("le", b.add(starts[p], b.index(tiles[p])), extents[p])
            full = inside if full is None else b.logical_and(full, inside)

        def body(inner: Builder, masked: bool) -> list[Value]:
            local, masks = dict(env), []
            for p, index in enumerate(self.region.args):
                if tiles[p] == 1 or self.nest.extents[p] == ONE:
                    local[index] = starts[p]  # of an index that is always 0 there is one element, whatever the tile: stores need not name it
                    continue
                local[index] = self.index_tile(inner, starts[p], self.tiled.index(p), tiles[p])
                cut = masked or (self.schedule.window and (p != self.schedule.along or self.schedule.masked))
                if cut and not self.nest.extents[p].divisible_by(tiles[p], self.kernel.facts):
                    limit = inner.like(extents[p], local[index])
                    masks.append(Condition(inner.op("lt", local[index], limit), edge=True))
            if self.row_start is not None:
                self.shift = shift_of(inner, self.row_start, local, self.schedule.vector)
            self.ops(inner, self.region.ops, local, masks)
            return []

        if full is None:
            body(b, False)
        elif self.schedule.row_lanes:
            body(b, True)  # rows that end at different places are masked anyway
        else:
            b.if_(full, lambda inner: body(inner, False), lambda inner: body(inner, True))
        return blocks

    def _cpu(self, b: Builder, env: dict[Value, Value]) -> Size:
        if self.schedule.short_rows:
            return self._cpu_rows(b, env)
        axis = self.schedule.vector_index
        steps = [1] * len(self.schedule.tiles)
        if axis >= 0 and self.tiled:
            steps[axis] = self.schedule.chunk
        row_axis, rows = self.schedule.row_axis, self.schedule.rows_per_block
        if rows > 1:
            steps[row_axis] = rows
        blocks, starts = self._block_indices(b, steps)
        if rows == 1:
            self._cpu_row(b, env, starts)
            return blocks
        if self.groups_rows:
            self._cpu_pairs(b, env, starts)
            return blocks
        if self.schedule.rows_inside:
            self._cpu_row(b, env, starts, b.op("min", b.add(starts[row_axis], b.index(rows)), b.index(self.nest.extents[row_axis])))
            return blocks

        def row(inner: Builder, number: Value) -> list[Value]:
            self._cpu_row(inner, env, [number if p == row_axis else s for p, s in enumerate(starts)])
            return []

        end = b.op("min", b.add(starts[row_axis], b.index(rows)), b.index(self.nest.extents[row_axis]))
        b.for_(starts[row_axis], end, b.index(1), [], row, name="row")
        return blocks

    def _cpu_rows(self, b: Builder, env: dict[Value, Value]) -> Size:
        """Sums over rows, several to a block: of long rows vectors lie along each, of short ones across them, along the index of which there are many."""
        extents, length = self.nest.extents, maximum(ONE, self.nest.reduce_extent)
        (reduction,) = self.nest.reductions
        costs = self.target.costs
        ends = self._indices_of(reduction.operands[0])
        axes = [p for p in reversed(range(len(extents))) if self.region.args[p] not in ends][:2]
        # Few results are shared out one by one.
        spare = floordiv(product(extents), Size.of(costs.reductions.cpu_results))
        steps: list[int | Size] = [1] * len(extents)
        for p in axes:
            steps[p] = maximum(ONE, minimum(extents[p], minimum(floordiv(Size.of(costs.caches.columns), length), spare)))
            length, spare = length * maximum(ONE, extents[p]), floordiv(spare, maximum(ONE, extents[p]))
        blocks, starts = self._block_indices(b, steps)
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
            other = LoopLowering(self.kernel, Schedule(tiles, 1, tile, vector_index=axis, chunk=tile, repeat=True), self.target)
            return each(at, [p for p in reversed(axes) if p != axis], starts, lambda inner, own: other.row_between(inner, env, own, stops[axis]))

        def long(at: Builder) -> list[Value]:
            return each(at, list(reversed(axes)), starts, lambda inner, own: self._cpu_row(inner, env, own))

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
            self.ops(inner, self.region.ops, {**env, **{arg: index if p == axis else starts[p] for p, arg in enumerate(self.region.args)}}, list(self.edges))
            return []

        self._repeating(b, starts[axis], high, (self.schedule.vector,), body)

    def _cpu_pairs(self, b: Builder, env: dict[Value, Value], starts: Sequence[Value]) -> None:
        """A block of rows and vectors of columns, both several at a time. The last group ends where the block does; fewer rows than a group are done one by one."""
        schedule, one = self.schedule, b.index(1)
        axis, row_axis, group = schedule.vector_index, schedule.row_axis, schedule.tiles[schedule.row_axis]
        first, low = starts[row_axis], starts[axis]
        high = b.op("min", b.add(low, b.index(schedule.chunk)), b.index(self.nest.extents[axis]))
        end = b.op("min", b.add(first, b.index(schedule.rows_per_block)), b.index(self.nest.extents[row_axis]))

        def row(at: Builder, number: Value, widths: Sequence[int]) -> list[Value]:
            def body(inner: Builder, index: Value) -> list[Value]:
                local = {**env, **{arg: index if p == axis else number if p == row_axis else starts[p] for p, arg in enumerate(self.region.args)}}
                self.ops(inner, self.region.ops, local, list(self.edges))
                return []

            self._repeating(at, low, high, widths, body)
            return []

        def together(at: Builder) -> list[Value]:
            last, place = at.sub(end, at.index(group)), self.tiled.index(row_axis)
            widths = (schedule.tiles[axis], schedule.vector)
            at.for_(first, end, at.index(group), [], lambda inner, k: row(inner, self.index_tile(inner, inner.op("min", k, last), place, group), widths), name="rows")
            return []

        def alone(at: Builder) -> list[Value]:
            at.for_(first, end, one, [], lambda inner, number: row(inner, number, (schedule.vector,)), name="row")
            return []

        b.if_(b.op("ge", b.sub(end, first), b.index(group)), together, alone)

    def _cpu_row(self, b: Builder, env: dict[Value, Value], starts: Sequence[Value], rows_end: Value | None = None) -> None:
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
            self.ops(inner, self.region.ops, local, list(self.edges))
            return []

        if not self.tiled:
            body(b, None)
            return
        tile = self.schedule.tiles[axis]
        low = starts[axis]
        high = b.op("min", b.add(low, b.index(self.schedule.chunk)), b.index(self.nest.extents[axis]))
        if self.schedule.row_group:
            from tilewright.passes.to_tile.column_sums import ColumnSums

            indices = dict(env) | {arg: starts[p] for p, arg in enumerate(self.region.args) if p != axis}
            ColumnSums(self, self.region.ops, self.region.args[axis], self.schedule.row_group, tile, self.schedule.vector).lower(b, indices, low, high)
            return
        if self.borders is not None and rows_end is None:
            self._peeled(b, env, starts, low, high, body)
            return
        if self.schedule.repeat:
            self._repeating(b, low, high, (tile, self.schedule.vector), body)
            return
        first = dict(env) | {arg: starts[p] for p, arg in enumerate(self.region.args)}
        self._test_rows(b, dict(first), self.region.args[axis])
        if self.schedule.vector < tile:
            self._narrowing(b, low, high, (tile, self.schedule.vector), body)
            return
        head = self._head(b, self.region.ops, first, self.region.args[axis])
        self._strips(
            b, low, high, tile, head, [], [], lambda inner, k: body(inner, self.index_tile(inner, k, 0, tile)), body
        )

    def _narrowing(self, b: Builder, low: Value, high: Value, widths: Sequence[int], body: Callable[..., list[Value]]) -> None:
        """Walk low..high in tiles of these widths, the widest first, and what is fewer than the last of them."""
        end = b.op("max", low, high)
        for width in widths:
            size = b.index(width)
            middle = b.add(low, b.mul(b.op("floordiv", b.sub(end, low), size), size))
            b.for_(low, middle, size, [], lambda inner, k, width=width: body(inner, self.index_tile(inner, k, 0, width)))
            low = middle
        self._short(b, low, end, body)

    def _peeled(
        self, b: Builder, env: Mapping[Value, Value], starts: Sequence[Value], low: Value, high: Value, body: Callable[..., list[Value]]
    ) -> None:  # fmt: skip
        """A row whose borders are done element by element, and its middle in vectors without the conditions that hold there."""
        borders, tile, vector = self.borders, self.schedule.tiles[self.schedule.vector_index], self.schedule.vector
        assert borders is not None
        first = {**env, **{arg: starts[p] for p, arg in enumerate(self.region.args)}}
        self._test_rows(b, dict(first), borders.index)
        begin, end = borders.middle(b, low, high)
        if not self.schedule.repeat:
            end = b.add(begin, b.mul(b.op("floordiv", b.sub(end, begin), b.index(tile)), b.index(tile)))
        # What has no room for a vector is a border as a whole.
        least = b.index(tile if not self.schedule.repeat else 1 if self.masks_rows else vector)
        room = b.op("ge", b.sub(end, begin), least)
        begin, end = b.select(room, begin, high), b.select(room, end, high)

        def placed(place: RowPart) -> Callable[..., list[Value]]:
            def inside(inner: Builder, index: Value) -> list[Value]:
                before, self.place = self.place, place
                try:
                    return body(inner, index)
                finally:
                    self.place = before

            return inside

        def middle(at: Builder, place: RowPart, widths: Sequence[int]) -> list[Value]:
            width, run = at.index(widths[0]), placed(place)
            if not self.schedule.repeat:
                at.for_(begin, end, width, [], lambda inner, k: run(inner, self.index_tile(inner, k, 0, widths[0])))
                return []

            def vectors(deeper: Builder) -> list[Value]:
                last = deeper.sub(end, width)
                deeper.for_(begin, end, width, [], lambda inner, k: run(inner, self.index_tile(inner, inner.op("min", k, last), 0, widths[0])))
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
            at.for_(low, high, width, [], lambda inner, k: body(inner, self.index_tile(inner, inner.op("min", k, last), place, widths[0])))
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
        index = self.index_tile(b, low, self.tiled.index(self.schedule.vector_index), self.schedule.vector)
        self.edges.append(Condition(b.op("lt", index, b.like(high, index)), edge=True))
        try:
            body(b, index)
        finally:
            self.edges.pop()

    def _strips(
        self, b: Builder, low: Value, high: Value, tile: int, head: Value | None, lanes: Sequence[Value],
        singles: Sequence[Value], wide: Callable[..., Sequence[Value]], single: Callable[..., Sequence[Value]],
    ) -> tuple[tuple[Value, ...], tuple[Value, ...]]:  # fmt: skip
        """Walk low..high on a CPU: elements up to an aligned address, full tiles, the rest.

        `wide(builder, first, *lanes)` does a tile, `single(builder, index, *singles)` an element; each carries its own values.
        Both loops stand in a loop of two turns (head and tiles; rest and nothing), so that each body is there once.
        """
        width, zero, one = b.index(tile), b.index(0), b.index(1)
        length = b.op("max", b.sub(high, low), zero)
        begin = low if head is None else b.add(low, b.op("min", head, length))
        middle = b.add(begin, b.mul(b.op("floordiv", b.sub(b.add(low, length), begin), width), width))
        count = len(lanes)
        if head is None:
            wides = b.for_(low, middle, width, lanes, wide)
            return wides, b.for_(middle, high, one, singles, single)

        def turn(inner: Builder, number: Value, *carried: Value) -> list[Value]:
            last = inner.op("gt", number, zero)
            start, stop = inner.select(last, middle, low), inner.select(last, high, begin)
            alone = inner.for_(start, stop, one, carried[count:], single)
            together = inner.for_(inner.select(last, middle, begin), middle, width, carried[:count], wide)
            return [*together, *alone]

        results = b.for_(zero, b.index(2), one, [*lanes, *singles], turn, name="turn")
        return results[:count], results[count:]

    def _head(self, b: Builder, ops: Sequence[Op], env: dict[Value, Value], index: Value) -> Value | None:
        """How far the first array walked with stride one along `index` is from an aligned address; stores count first."""
        accesses = [
            op for op in ops
            if op.opcode in ("store", "load") and address(op, self.forms).factor(index) == ONE
        ]  # fmt: skip
        chosen = next((op for op in accesses if op.opcode == "store"), accesses[0] if accesses else None)
        if chosen is None or len(ops) > 64:
            return None
        memory = chosen.operands[0].type
        assert isinstance(memory, Tensor)
        local = dict(env)
        for op in ops:
            if op is chosen:
                break
            if op.regions or op.opcode in ("store", "yield") or any(v not in local for v in op.operands):
                continue  # the last: it needs the result of a loop or a branch, which is not repeated here
            with b.at(op.span):
                local.update(zip(op.results, self._op(b, op, local, []), strict=True))
        where = [local.get(v) for v in chosen.operands[1 : 1 + memory.rank]]
        if any(v is None for v in where):
            return None
        return b.op("head", local[chosen.operands[0]], *(v for v in where if v is not None), bytes=self.target.vector_bytes)

    def index_tile(self, b: Builder, start: Value, position: int, extent: int) -> Value:
        """`start + 0, 1, 2…` along a tile axis."""
        shape = tuple(extent if a == position else 1 for a in range(self.rank))
        iota = b.op("iota", shape=shape, axis=position)
        return b.add(b.op("broadcast", start, shape=shape), iota)

    def _whole_row(self, b: Builder, extent: Value) -> tuple[Value, Value]:
        """The indices of a row that one tile holds, and which of them are the row's."""
        position, tile = self.reduce_position, self.schedule.reduce_tile
        assert position is not None
        if self.shift is None:
            index = self.index_tile(b, b.index(0), position, tile)
            return index, b.op("lt", index, b.like(extent, index))
        first = b.sub(b.index(0), self.shift)
        index = self.index_tile(b, first, position, tile)
        return index, self._within_row(b, first, index, extent)

    def _within_row(self, b: Builder, first: Value, index: Value, extent: Value) -> Value:
        """Which indices of a tile that begins at `first`, maybe before the row, are the row's."""
        assert self.reduce_position is not None
        places = self.index_tile(b, b.index(0), self.reduce_position, self.schedule.reduce_tile)
        before = b.sub(b.index(0), first)
        begun = b.op("lt", b.sub(b.like(before, places), places), b.splat(1, places))  # index > -1
        return b.logical_and(begun, b.op("lt", index, b.like(extent, index)))

    # -- one body -----------------------------------------------------------------------------------------------

    def ops(self, b: Builder, ops: Sequence[Op], env: dict[Value, Value], masks: list[Condition]) -> tuple[Value, ...]:
        """Lower ops in order; returns what the block yields."""
        for op in ops:
            with b.at(op.span):
                if op.opcode == "yield":
                    return tuple(env[v] for v in op.operands)
                results = self._op(b, op, env, masks)
                env.update(zip(op.results, results, strict=True))
        return ()

    def _op(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        twice = self.recomputed
        if twice is not None and op is twice.again:
            return [self._load(b, [env[v] for v in twice.store.operands[:-1]], masks, {})]
        if twice is not None and op is twice.first:
            self.recomputed = None  # so that this one is computed here
            (value,) = self._op(b, op, env, masks)
            self.recomputed = twice
            local = {**env, twice.loop.regions[0].args[0]: env[twice.sum.regions[0].args[0]]}
            self._store(b, [*(local[v] for v in twice.store.operands[:-1]), value], masks, {})
            return [value]
        if id(op) in self.clipped:
            return [b.const(True, bool_)]
        if self.borders is not None and self.place in (RowPart.MIDDLE, RowPart.INNER):
            known = self.borders.known(b, op, env, self.place is RowPart.INNER)
            if known is not None:
                return [known]
        operands = [env[v] for v in op.operands]
        if op.opcode == "load":
            attrs = self._access_attrs(op)
            return [self._load(b, operands, [m for m in masks if m.edge] if id(op) in self.unguarded else masks, attrs)]
        if op.opcode == "store":
            self._store(b, operands, masks, self._access_attrs(op))
            return []
        if op.opcode == "accumulate":
            self._accumulate(b, op, operands, env, masks)
            return []
        if op.opcode == "if":
            return self._if(b, op, operands[0], env, masks)
        if op.opcode == "for":
            return self._for(b, op, operands, env, masks)
        if op.opcode == "reduce":
            return self._reduce(b, op, operands, env, masks)
        if op.opcode == "while":
            from tilewright.passes.to_tile.lower_while import WhileLowering

            return WhileLowering(self, op, env, masks).run(b, operands)
        if op.opcode == "parallel":
            from tilewright.base.errors import UserError

            what = "a parallel loop inside a parallel loop"
            raise UserError.at("TW005", f"{what} is not available in kernels yet", op.span, "use for with a fixed number of turns")
        shape = join(*(shape_of(v) for v in operands))
        return b.emit(op.opcode, [self.widen(b, v, shape) for v in operands], op.attrs)

    def _access_attrs(self, op: Op) -> Attrs:
        """What a tile's access says beside its indices."""
        attrs: dict[str, Attr] = {"aligned": self.schedule.vector} if id(op) in self.aligned else {}
        watch = tuple(axis for axis in watched_axes(op) if (id(op), axis) not in self.tested)
        return attrs | {"watch": watch} if watch else attrs

    def _test_reduction(self, b: Builder, op: Op, extent: Value, env: Mapping[Value, Value]) -> None:
        """CPU: indices that walk with a reduction are tested before it, the first and the last."""
        region = op.regions[0]
        inner = {v for o in walk(region) for v in o.results}
        found: list[tuple[Op, int, Affine]] = []
        for access in region.ops:
            for axis in watched_axes(access):
                form = self.forms.get(access.operands[1 + axis])
                others = [v for v in form.values if v is not region.args[0]] if form is not None else []
                known = all(v in env and v not in inner and not shape_of(env[v]) for v in others)
                if form is not None and known and form.factor(region.args[0]) == ONE:
                    found.append((access, axis, form))

        def tests(at: Builder) -> list[Value]:
            for access, axis, form in found:
                first = at.index(form.constant)
                for value, factor in form.factors:
                    if value is not region.args[0]:
                        first = at.add(first, env[value] if factor == ONE else at.mul(env[value], at.index(factor)))
                last = at.add(first, at.sub(extent, at.index(1)))
                with at.at(access.span):
                    at.multi("within", access.operands[0], first, last, axis=axis, access="load" if access.opcode == "load" else "store")
            return []

        if found:
            b.if_(b.op("gt", extent, b.index(0)), tests, lambda at: [])
            self.tested |= {(id(access), axis) for access, axis, _ in found}

    def _test_rows(self, b: Builder, env: dict[Value, Value], moving: Value) -> None:
        """CPU: indices that stay the same along a row of a block are tested before it. A block has an element at least."""
        made = {result: op for op in self.region.ops for result in op.results}

        def still(value: Value) -> bool:
            op = made.get(value)
            if op is None:
                return value is not moving
            plain = not op.regions and (OPS[op.opcode].is_pure or (op.opcode == "load" and not watched_axes(op)))
            return plain and all(map(still, op.operands))

        def lowered(value: Value) -> Value:
            op = made.get(value)
            if op is not None and value not in env:
                for operand in op.operands:
                    lowered(operand)
                env.update(zip(op.results, self._op(b, op, env, []), strict=True))
            return env[value]

        for access in self.region.ops:
            for axis in watched_axes(access):
                index = access.operands[1 + axis]
                if still(index) and not shape_of(place := lowered(index)):
                    with b.at(access.span):
                        b.multi("within", access.operands[0], place, place, axis=axis, access="load" if access.opcode == "load" else "store")
                    self.tested.add((id(access), axis))

    def widen(self, b: Builder, value: Value, shape: Shape) -> Value:
        return value if shape_of(value) == shape or not shape else b.op("broadcast", value, shape=shape)

    def _mask_for(self, b: Builder, shape: Shape, masks: list[Condition]) -> tuple[Shape, Value | None]:
        """The condition an access of that shape runs under, and the shape it then has."""
        relevant: list[Value] = []
        # A guard that varies is asked by elements beyond the edge, too: what they make of it counts for nothing.
        full = join(shape, *(shape_of(mask.value) for mask in masks if not mask.edge))
        for mask in masks:
            mine = shape_of(mask.value)
            if mask.edge and not (full and all(m == 1 or s > 1 for m, s in zip(mine, full, strict=True))):
                continue
            relevant.append(mask.value)
        if not relevant:
            return shape, None
        shape = join(shape, *(shape_of(v) for v in relevant))
        total = self.widen(b, relevant[0], shape)
        for value in relevant[1:]:
            total = b.logical_and(total, self.widen(b, value, shape))
        return shape, total

    def _load(self, b: Builder, operands: Sequence[Value], masks: list[Condition], attrs: Attrs) -> Value:
        memory, indices = operands[0], list(operands[1:])
        shape = join(*(shape_of(v) for v in indices))
        if not indices:
            return b.op("load", memory)
        access, mask = self._mask_for(b, shape, masks)
        if mask is None:
            return b.emit("load", [memory, *indices], attrs)[0]
        if access != shape:
            indices[0] = self.widen(b, indices[0], access)
        return b.emit("load", [memory, *indices, mask], {"masked": True, **attrs})[0]

    def _store(self, b: Builder, operands: Sequence[Value], masks: list[Condition], attrs: Attrs) -> None:
        memory, indices, value = operands[0], list(operands[1:-1]), operands[-1]
        shape = join(*(shape_of(v) for v in indices))
        if not shape and shape_of(value):
            # All indices are scalars of the block: the value is a tile of one element.
            value = self._item(b, value)
        access, mask = self._mask_for(b, shape, masks)
        if shape and access != shape:
            indices[0] = self.widen(b, indices[0], access)
        value = self.widen(b, value, access)
        if mask is None:
            b.emit("store", [memory, *indices, value], attrs)
        elif not access:
            b.if_(mask, lambda inner: inner.emit("store", [memory, *indices, value], attrs), lambda inner: [])
        else:
            b.emit("store", [memory, *indices, value, mask], {"masked": True, **attrs})

    def _accumulate(self, b: Builder, op: Op, operands: Sequence[Value], env: Mapping[Value, Value], masks: list[Condition]) -> None:
        """Every point combines once, also where neither place nor value tell points apart."""
        memory, indices, value = operands[0], list(operands[1:-1]), operands[-1]
        points = join(*(shape_of(v) for v in (*operands[1:], *(env[index] for index in self.around[id(op)]))))
        access, mask = self._mask_for(b, points, masks)
        attrs: dict[str, Attr] = {**{k: v for k, v in op.attrs.items() if k != "watch"}, **self._access_attrs(op)}
        if access and indices:
            indices[0] = self.widen(b, indices[0], access)
        value = self.widen(b, value, access)
        if mask is None:
            b.emit("accumulate", [memory, *indices, value], attrs)
        elif not access:
            b.if_(mask, lambda inner: inner.emit("accumulate", [memory, *indices, value], attrs), lambda inner: [])
        else:
            b.emit("accumulate", [memory, *indices, value, mask], {"masked": True, **attrs})

    def _item(self, b: Builder, value: Value) -> Value:
        return b.op("item", value) if isinstance(value.type, Tile) else value

    # -- control flow -------------------------------------------------------------------------------------------

    def _if(self, b: Builder, op: Op, cond: Value, env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        if shape_of(cond) and id(op) in self.border_tests:
            self.border_tests.discard(id(op))  # so that the other branch is masked
            holds = cond
            for axis in range(len(shape_of(cond))):
                holds = b.op("reduce_tile", holds, kind="and", axis=axis)
            results = self._branches(
                b, b.op("item", holds), lambda inner: self.ops(inner, op.regions[0].ops, dict(env), masks),
                lambda inner: tuple(self._if(inner, op, cond, dict(env), masks)),
            )  # fmt: skip
            self.border_tests.add(id(op))
            return results
        if shape_of(cond):
            then = self.ops(b, op.regions[0].ops, env, [*masks, Condition(cond, edge=False)])
            if id(op) in self.unchosen:
                return then
            inverse = b.op("not", cond)
            otherwise = self.ops(b, op.regions[1].ops, env, [*masks, Condition(inverse, edge=False)])
            results = []
            for x, y in zip(then, otherwise, strict=True):
                shape = join(shape_of(cond), shape_of(x), shape_of(y))
                results.append(b.select(*(self.widen(b, v, shape) for v in (cond, x, y))))
            return results
        first, second = op.regions
        return self._branches(
            b, cond, lambda inner: self.ops(inner, first.ops, dict(env), masks), lambda inner: self.ops(inner, second.ops, dict(env), masks)
        )

    def _branches(
        self, b: Builder, cond: Value, then: Callable[[Builder], tuple[Value, ...]], otherwise: Callable[[Builder], tuple[Value, ...]]
    ) -> Sequence[Value]:
        """An `if` on a number; what its branches give has the same shapes."""
        builders = [Builder(b.span), Builder(b.span)]
        yields = [side(inner) for inner, side in zip(builders, (then, otherwise), strict=True)]
        shapes = [join(shape_of(x), shape_of(y)) for x, y in zip(*yields, strict=True)]
        for inner, values in zip(builders, yields, strict=True):
            inner.multi("yield", *(self.widen(inner, v, s) for v, s in zip(values, shapes, strict=True)))
        types = [v.type for v in builders[0].ops[-1].operands]
        blocks = tuple(Block((), tuple(inner.ops)) for inner in builders)
        return b.append(Op("if", (cond,), tuple(Value(t) for t in types), regions=blocks, span=b.span))

    def _for(
        self, b: Builder, op: Op, operands: Sequence[Value], env: dict[Value, Value], masks: list[Condition]
    ) -> Sequence[Value]:
        low, high, step, *init = operands
        if self.scan is not None and op is self.scan.loop and self.reduce_position is not None:
            from tilewright.passes.rows.scan_rows import ScanRows

            was_inside, self.inside_reduction = self.inside_reduction, True
            carried = ScanRows(self, self.scan, self.reduce_position, self.schedule.reduce_tile, env, masks).run(b, low, high, init)
            self.inside_reduction = was_inside
            return carried
        if self.inner_walks and id(op) not in self.inner_walks:
            pass
        elif is_sweep(op) and self.reduce_position is not None and not self.inside_reduction and not (shape_of(low) or shape_of(high)):
            return self._sweep(b, op, low, high, step, env, masks)
        elif is_sweep(op) and self.reduce_position is not None and not self.inside_reduction and self.schedule.row_lanes:
            return self._ragged_sweep(b, op, env, masks)
        varying = join(shape_of(low), shape_of(high))

        def body(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            local = dict(env)
            local[op.regions[0].args[0]] = index
            local.update(zip(op.regions[0].args[1:], carried, strict=True))
            if not varying:
                return self.ops(inner, op.regions[0].ops, local, masks)
            # Bounds differ inside the tile: walk the common range and mask what lies outside one's own.
            wide = self.widen(inner, index, varying)
            active = inner.logical_and(
                inner.op("ge", wide, self.widen(inner, low, varying)), inner.op("lt", wide, self.widen(inner, high, varying))
            )
            values = self.ops(inner, op.regions[0].ops, local, [*masks, Condition(active, edge=False)])
            kept = []
            for new, old in zip(values, carried, strict=True):
                shape = join(varying, shape_of(new), shape_of(old))
                kept.append(inner.select(*(self.widen(inner, v, shape) for v in (active, new, old))))
            return kept

        if varying:
            high = self._within_edges(b, high, low, masks)
            varying = join(varying, shape_of(high))
            bounds = self._extreme(b, "min", low), self._extreme(b, "max", high)
        else:
            bounds = low, high
        return self.carried(b, bounds[0], bounds[1], self._item(b, step), init, body, op)

    def _sweep(
        self, b: Builder, op: Op, low: Value, high: Value, step: Value, env: dict[Value, Value], masks: list[Condition]
    ) -> Sequence[Value]:
        """An inner loop of independent iterations, along the axis reductions use: tiles, then the rest."""
        position, tile = self.reduce_position, self.schedule.reduce_tile
        assert position is not None
        was_inside, self.inside_reduction = self.inside_reduction, True
        if self.schedule.whole:
            index, inside = self._whole_row(b, high)
            self.ops(b, op.regions[0].ops, {**env, op.regions[0].args[0]: index}, [*masks, Condition(inside, edge=True)])
            self.inside_reduction = was_inside
            return []
        zero, width = b.index(0), b.index(tile)
        count = b.op("max", b.op("floordiv", b.add(b.sub(high, low), b.sub(step, b.index(1))), step), zero)
        whole = b.mul(b.op("floordiv", count, width), width)

        def body(inner: Builder, number: Value, masked: bool) -> list[Value]:
            """Iterations `number`, `number + 1`…: one, or a tile of them."""
            local, edge = dict(env), []
            if shape_of(number) and masked:
                edge = [Condition(inner.op("lt", number, inner.like(count, number)), edge=True)]
            index = inner.add(inner.like(low, number), inner.mul(number, inner.like(step, number)))
            local[op.regions[0].args[0]] = index
            self.ops(inner, op.regions[0].ops, local, [*masks, *edge])
            return []

        ahead = b.op("min", count, b.index(FETCHED)) if self.fetched else count

        def step_along(inner: Builder, k: Value) -> list[Value]:
            self._fetch_ahead(inner, inner.add(k, ahead), env)
            return body(inner, self.index_tile(inner, k, position, tile), False)

        b.for_(zero, whole, width, [], step_along)
        if self.target.simt:
            b.if_(
                b.op("lt", whole, count),
                lambda inner: body(inner, self.index_tile(inner, whole, position, tile), True),
                lambda inner: [],
            )
        else:
            narrow = self.schedule.vector
            if 1 < narrow < tile and self.target.has_lane_masks and not self.inner_walks:
                b.for_(whole, count, b.index(narrow), [], lambda inner, k: body(inner, self.index_tile(inner, k, position, narrow), True))
                whole = count
            elif 1 < narrow < tile:
                last = b.mul(b.op("floordiv", count, b.index(narrow)), b.index(narrow))
                b.for_(whole, last, b.index(narrow), [], lambda inner, k: body(inner, self.index_tile(inner, k, position, narrow), False))
                whole = last
            if whole is not count:
                b.for_(whole, count, b.index(1), [], lambda inner, k: body(inner, k, False))
        self.inside_reduction = was_inside
        return []

    def _ragged_sweep(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        """An inner loop of independent iterations that has bounds of its own in each row of the tile."""
        assert self.reduce_position is not None
        ends = [env[v] for v in op.operands[:3]]
        shape = join(*(shape_of(v) for v in ends))
        low, high, step = (self.widen(b, v, shape) for v in ends)
        count = b.op("floordiv", b.add(b.sub(high, low), b.sub(step, b.splat(1, step))), step)

        def index_of(inner: Builder, number: Value, local: Mapping[Value, Value]) -> Value:
            first, by = local[op.operands[0]], local[op.operands[2]]
            wide = join(shape_of(number), shape_of(first), shape_of(by))
            return inner.add(self.widen(inner, first, wide), inner.mul(self.widen(inner, number, wide), self.widen(inner, by, wide)))

        from tilewright.passes.to_tile.ragged_rows import RaggedRows

        was_inside, self.inside_reduction = self.inside_reduction, True
        tile = self.schedule.reduce_tile
        rows = RaggedRows(self, op.regions[0], "", self.reduce_position, tile, tile // self.schedule.row_lanes, env, masks, index_of, op.operands[:3])
        rows.run(b, count, [])
        self.inside_reduction = was_inside
        return []

    def combined(self, b: Builder, kind: str, left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
        """What two sets of terms come to."""
        return self._combine(b, kind, left, right)

    def longest(self, b: Builder, value: Value, by_warp: bool) -> Value:
        """The greatest of a tile; of what a warp has of it, for each warp, where a warp's own will do."""
        return self._extreme(b, "max", value, by_warp)

    def meets_others(self, region: Block) -> bool:
        """Whether what is done there makes the threads of a block wait for each other: loops whose ends they have to agree on, and arrays through which
        elements change threads."""
        inside = list(walk(region))
        if any(op.regions and op.opcode != "if" for op in inside):
            return True
        written = {op.operands[0] for op in walk(self.kernel.body) if op.opcode in ("store", "accumulate", "atomic")}
        read = {op.operands[0] for op in walk(self.kernel.body) if op.opcode == "load"}
        return any(op.opcode in ("load", "store", "accumulate") and op.operands[0] in written & read for op in inside)

    def _fetch_ahead(self, b: Builder, place: Value, env: Mapping[Value, Value]) -> None:
        """What the next rows read and write, a tile of it: rows follow one another in memory."""
        for memory, access in self.fetched.items():
            tensor = memory.type
            assert isinstance(tensor, Tensor)
            size = tensor.dtype.itemsize
            row = [env[v] for v in access.operands[1 : tensor.rank]]
            for line in range(0, self.schedule.reduce_tile * size, LINE):
                b.multi("prefetch", env[memory], *row, b.add(place, b.index(line // size)))

    def _within_edges(self, b: Builder, value: Value, otherwise: Value, masks: list[Condition]) -> Value:
        """A bound that differs inside the tile; elements beyond the edge have none of their own."""
        for mask in masks:
            if mask.edge:
                shape = join(shape_of(mask.value), shape_of(value), shape_of(otherwise))
                value = b.select(*(self.widen(b, v, shape) for v in (mask.value, value, otherwise)))
        return value

    def _extreme(self, b: Builder, kind: str, value: Value, by_warp: bool = False) -> Value:
        if not shape_of(value):
            return value
        for axis in range(self.rank):
            attrs: dict[str, Attr] = {"kind": kind, "axis": axis}
            if shape_of(value)[axis] > 1 or not by_warp:
                value = b.emit("reduce_tile", [value], attrs | ({"by_warp": True} if by_warp else {}))[0]
        return b.op("item", value)

    def carried(
        self, b: Builder, low: Value, high: Value, step: Value, init: Sequence[Value], body: Callable[..., Sequence[Value]],
        op: Op,
    ) -> tuple[Value, ...]:  # fmt: skip
        """A serial loop whose carried values may grow from scalars to tiles: widen them until the shapes hold still."""
        attrs = {k: v for k, v in op.attrs.items() if k in ("unroll", "stages")}
        current = list(init)
        while True:
            shapes = [shape_of(v) for v in current]
            trial = Builder(b.span)
            values = body(trial, Value(INDEX), *(Value(v.type) for v in current))
            grown = [join(s, shape_of(v)) for s, v in zip(shapes, values, strict=True)]
            if grown == shapes:
                break
            current = [self.widen(b, v, s) for v, s in zip(current, grown, strict=True)]

        def widened(inner: Builder, index: Value, *carried: Value) -> list[Value]:
            values = body(inner, index, *carried)
            return [self.widen(inner, v, shape_of(c)) for v, c in zip(values, carried, strict=True)]

        return b.for_(low, high, step, current, widened, name="k", **attrs)

    # -- reductions ---------------------------------------------------------------------------------------------

    def _reduce(
        self, b: Builder, op: Op, operands: Sequence[Value], env: dict[Value, Value], masks: list[Condition]
    ) -> Sequence[Value]:
        kind = str(op.attrs["kind"])
        dtypes = [dtype_of(r.type) for r in op.results]
        start = [b.const(v, d) for v, d in zip(identities(kind, dtypes), dtypes, strict=True)]
        tiled = self.reduce_position is not None and not self.inside_reduction and bool(operands) and (not self.inner_walks or id(op) in self.inner_walks)
        if not self.target.simt and "dots" in self.kernel.attrs and not masks:
            if any(inner.opcode == "reduce" for inner in op.regions[0].ops):
                return self._reduce_dimension(b, op, kind, operands, 0, env, masks, start, False)
            turns = self.forms[op.operands[0]].constant.constant if len(operands) == 1 and op.operands[0] in self.forms else None
            if tiled and turns == self.schedule.reduce_tile and kind == "add" and dtypes[0].is_int:
                return self._dot(b, op, env)
        if not self.target.simt and not masks and len(operands) == 1 and not shape_of(operands[0]):
            self._test_reduction(b, op, operands[0], env)
        if self.place in (RowPart.MIDDLE, RowPart.BORDER) and not masks:
            return self._clipped_sum(b, op, kind, operands, env, start)
        if self.schedule.window and not self.again:
            return self._window_sum(b, op, kind, operands, env, masks, start)
        was_inside, self.inside_reduction = self.inside_reduction, True
        try:
            if tiled and self._in_blocks(op, kind, operands, masks):
                return self._reduce_blocks(b, op, kind, operands, env, start)
            return self._reduce_dimension(b, op, kind, operands, 0, env, masks, start, tiled)
        finally:
            self.inside_reduction = was_inside

    def _window_sum(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], env: dict[Value, Value], masks: list[Condition], start: Sequence[Value]
    ) -> Sequence[Value]:  # fmt: skip
        """A sum over a window. Terms outside are zeros that need no choice; where one is multiplied with what is no finite number, the sum is no number, and is
        added up again by the threads of its warp, which then choose."""
        from tilewright.passes.windows.window_terms import Zeros, asks_along, zero_outside

        branch, zeros = zero_outside(op, self.unguarded)
        if zeros is Zeros.IF_FINITE and not self.schedule.masked and not asks_along(self.kernel, branch, self.region.args[self.schedule.vector_index]):
            branch, zeros = None, Zeros.NEVER  # `window_sums` chooses weights, which several results share
        if branch is not None:
            self.unchosen.add(id(branch))
        sums = self._reduce_dimension(b, op, kind, extents, 0, dict(env), masks, start, False)
        if branch is not None:
            self.unchosen.discard(id(branch))
        if zeros is not Zeros.IF_FINITE or not shape_of(sums[0]):
            return sums
        wrong = b.op("ne", sums[0], sums[0])
        for axis in range(self.rank):
            if shape_of(wrong)[axis] > 1:
                wrong = b.op("reduce_tile", wrong, kind="or", axis=axis, by_warp=True)

        def exact(inner: Builder) -> tuple[Value, ...]:
            self.again = True
            found = tuple(self._reduce_dimension(inner, op, kind, extents, 0, dict(env), masks, start, False))
            self.again = False
            return found

        return self._branches(b, b.op("item", wrong), exact, lambda inner: tuple(sums))

    def _clipped_sum(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], env: dict[Value, Value], start: Sequence[Value]
    ) -> Sequence[Value]:  # fmt: skip
        """A sum near a border, which ends where what it reads does."""
        assert self.borders is not None
        made = {result: inner for inner in walk(self.region) for result in inner.results}
        tests = self.borders.clipped(op, made, self.place is RowPart.MIDDLE)
        args = op.regions[0].args
        lows, highs = {arg: b.index(0) for arg in args}, dict(zip(args, extents, strict=True))
        for form in tests.values():
            (own,) = (v for v in form.values if v in args)
            rest = b.index(form.constant)
            for value, factor in form.factors:
                if value is not own:
                    rest = b.add(rest, env[value] if factor == ONE else b.mul(env[value], b.index(factor)))
            if form.factor(own) == ONE:
                lows[own] = b.op("max", lows[own], b.sub(b.index(0), rest))
            else:
                highs[own] = b.op("min", highs[own], b.add(rest, b.index(1)))
        cut = {own for form in tests.values() for own in form.values if own in args}
        bounds = [b.op("max", b.sub(highs[arg], lows[arg]), b.index(0)) if arg in cut else extent for arg, extent in zip(args, extents, strict=True)]
        before = self.clips, self.clipped, self.inside_reduction
        self.clips, self.clipped, self.inside_reduction = {**self.clips, **{arg: lows[arg] for arg in cut}}, self.clipped | set(tests), True
        try:
            return self._reduce_dimension(b, op, kind, bounds, 0, env, [], start, False)
        finally:
            self.clips, self.clipped, self.inside_reduction = before

    def _dot(self, b: Builder, op: Op, env: dict[Value, Value]) -> Sequence[Value]:
        """A sum of integers as long as a vector: LLVM makes one of the CPU's dot products of it."""
        assert self.reduce_position is not None
        index = self.index_tile(b, b.index(0), self.reduce_position, self.schedule.reduce_tile)
        (value,) = self.ops(b, op.regions[0].ops, {**env, op.regions[0].args[0]: index}, [])
        whole = self.widen(b, value, join(shape_of(value), shape_of(index)))
        return [b.op("item", b.op("reduce_tile", whole, kind="add", axis=self.reduce_position, together=True))]

    def _in_blocks(self, op: Op, kind: str, extents: Sequence[Value], masks: list[Condition]) -> bool:
        """Whether a sum walks packed blocks, and its innermost loop is whole vectors."""
        if self.target.simt or not self.kernel.attrs.get("blocks") or kind not in ("add", "mul") or masks or len(extents) < 2 or any(map(shape_of, extents)):
            return False
        turns = self.forms[op.operands[-1]].constant.constant if op.operands[-1] in self.forms else None
        return turns is not None and turns > 0 and turns % self.schedule.reduce_tile == 0

    def _reduce_blocks(self, b: Builder, op: Op, kind: str, extents: Sequence[Value], env: dict[Value, Value], start: Sequence[Value]) -> Sequence[Value]:
        """A sum over blocks: vectors of sums go through all loops, and are added up once at the end."""
        position, tile, args = self.reduce_position, self.schedule.reduce_tile, op.regions[0].args
        assert position is not None

        def terms(inner: Builder, first: Value, local: dict[Value, Value], carried: Sequence[Value]) -> Sequence[Value]:
            index = self.index_tile(inner, first, position, tile)
            values = self.ops(inner, op.regions[0].ops, {**local, args[-1]: index}, [])
            return self._combine(inner, kind, carried, [self.widen(inner, v, join(shape_of(v), shape_of(index))) for v in values])

        def along(inner: Builder, dimension: int, local: dict[Value, Value], carried: Sequence[Value]) -> Sequence[Value]:
            turns = self.forms[op.operands[dimension]].constant.constant if op.operands[dimension] in self.forms else None
            if dimension == len(extents) - 1:
                assert turns is not None
                for first in range(0, turns, tile):
                    carried = terms(inner, inner.index(first), local, carried)
                return carried
            if turns is not None and 0 < turns <= SHORT_LOOP:
                for turn in range(turns):
                    carried = along(inner, dimension + 1, {**local, args[dimension]: inner.index(turn)}, carried)
                return carried

            def body(deeper: Builder, index: Value, *sums: Value) -> Sequence[Value]:
                return along(deeper, dimension + 1, {**local, args[dimension]: index}, sums)

            return self.carried(inner, inner.index(0), extents[dimension], inner.index(1), carried, body, op)

        trial = {**env, **dict.fromkeys(args[:-1], Value(INDEX))}
        shape = self._reduced_shape(b, lambda at, first, _, sums: terms(at, first, trial, sums), start, position, tile)
        lanes = [self.widen(b, v, shape) for v in start]
        return self._combine(b, kind, start, self.folded(b, kind, along(b, 0, env, lanes)))

    def _reduce_dimension(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], dimension: int, env: dict[Value, Value],
        masks: list[Condition], start: Sequence[Value], tiled: bool,
    ) -> Sequence[Value]:  # fmt: skip
        """Combine over dimensions `dimension`… into `start`: serial loops outside, the innermost tiled when asked."""
        last = dimension == len(extents) - 1
        if last and tiled and shape_of(extents[-1]) and not self.schedule.row_lanes:
            return self._ragged(b, op, kind, extents, dimension, {**env}, masks, start)
        rows = self._rows_on_cpu(op, kind, env, masks) if tiled and not dimension and len(extents) > 1 else None
        plain = not any(shape_of(extent) for extent in extents) and not self.clips.keys() & set(op.regions[0].args)
        if rows is not None and plain:
            return rows.run(b, extents, start)
        if tiled and plain and not dimension and len(extents) > 1 and kind in ("min", "max") and not self.target.simt and not self.schedule.whole:
            return self._extreme_on_cpu(op, env, masks).lower(b, extents[-1], start, extents[:-1])
        if tiled and plain and not dimension and self._keeps_lanes(op, kind):
            from tilewright.passes.common.rows_in_turn import RowsInTurn

            assert self.reduce_position is not None
            return RowsInTurn(self, op, extents, env, masks, self.reduce_position, self.schedule.reduce_tile, self.schedule.rows_in_turn).run(b, start)
        if last and tiled and dimension:
            # Every element of a tile starts from the identity; what came before joins once, not once per element.
            dtypes = [dtype_of(r.type) for r in op.results]
            fresh = [b.const(v, d) for v, d in zip(identities(kind, dtypes), dtypes, strict=True)]
            return self._combine(b, kind, start, self._reduce_tiled(b, op, kind, extents[-1], env, masks, fresh))
        if last and tiled:
            return self._reduce_tiled(b, op, kind, extents[-1], env, masks, start)
        zero, one = b.index(0), b.index(1)

        arg = op.regions[0].args[dimension] if extents else None

        def body(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            env[op.regions[0].args[dimension]] = inner.add(self.clips[arg], index) if arg in self.clips else index
            if last:
                values = self.ops(inner, op.regions[0].ops, dict(env), masks)
                return self._combine(inner, kind, carried, values)
            return self._reduce_dimension(inner, op, kind, extents, dimension + 1, env, masks, carried, tiled)

        if not extents:
            return self._combine(b, kind, start, self.ops(b, op.regions[0].ops, dict(env), masks))
        extent = extents[dimension]
        if shape_of(extent):
            return self._ragged(b, op, kind, extents, dimension, env, masks, start)
        turns = self.forms[op.operands[dimension]].constant.constant if op.operands[dimension] in self.forms else None
        if turns is not None and self._is_written_out(op, dimension, turns):
            # A few turns stand one after another: what they load is on its way together.
            values: Sequence[Value] = start
            for turn in range(turns):
                values = body(b, b.index(turn), *values)
            return values
        if not self.target.simt and kind.startswith("arg") and len(extents) == 1 and arg not in self.clips and self._rises(op):
            return self._first_of_equals(b, op, kind, extent, env, masks, start)
        return self.carried(b, zero, extent, one, start, body, op)

    def _keeps_lanes(self, op: Op, kind: str) -> bool:
        """Whether the threads of a block have sums of their own through all axes of a reduction."""
        return self.target.simt and self.schedule.rows_in_turn > 0 and len(op.operands) > 1 and not kind.startswith("arg")

    def _first_of_equals(
        self, b: Builder, op: Op, kind: str, extent: Value, env: dict[Value, Value], masks: list[Condition], start: Sequence[Value]
    ) -> Sequence[Value]:
        """argmin or argmax term by term, where later terms have larger indices: one comparison for each."""
        index = op.regions[0].args[-1]
        dtypes = [dtype_of(v.type) for v in start]
        nothing = identities(kind, dtypes)

        def body(inner: Builder, number: Value, *carried: Value) -> Sequence[Value]:
            values = self.ops(inner, op.regions[0].ops, {**env, index: number}, masks)
            shape = join(*(shape_of(v) for v in (*carried, *values)))
            return combine_later(inner, kind, [self.widen(inner, v, shape) for v in carried], [self.widen(inner, v, shape) for v in values])

        best, place = self.carried(b, b.index(0), extent, b.index(1), [b.const(v, d) for v, d in zip(nothing, dtypes, strict=True)], body, op)
        # Nothing beat the identity: all values are equal to it, and the first one is the place.
        first = self.ops(b, op.regions[0].ops, {**env, index: b.index(0)}, masks)[1]
        kept = shape_of(place)
        lost = b.op("and", b.op("eq", place, b.splat(nothing[1], place)), self.widen(b, b.op("gt", extent, b.index(0)), kept))
        return self._combine(b, kind, start, [best, b.select(lost, self.widen(b, first, kept), place)])

    def _is_written_out(self, op: Op, dimension: int, turns: int) -> bool:
        """Whether the turns of a reduction's dimension stand one after another."""
        if turns < 1 or self.place is RowPart.BORDER or op.regions[0].args[dimension] in self.clips:
            return False
        if self.groups_rows:
            return self._number_of_terms(op, dimension) <= GROUP_TERMS
        if self.schedule.window:
            return not self.again and self._number_of_terms(op, dimension) <= self.schedule.written
        if not self.schedule.short:
            return turns <= SHORT_LOOP and len(op.operands) > 1
        return turns <= 2 * SHORT_LOOP and self._number_of_terms(op, dimension) <= WRITTEN_OUT

    def _number_of_terms(self, op: Op, dimension: int) -> int:
        """Terms of a sum over its dimensions from this one on; many where a call says how many."""
        return prod((self.forms[extent].constant.constant or 2 * WRITTEN_OUT) if extent in self.forms else 2 * WRITTEN_OUT for extent in op.operands[dimension:])

    def _ragged(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], dimension: int, env: dict[Value, Value],
        masks: list[Condition], start: Sequence[Value],
    ) -> Sequence[Value]:  # fmt: skip
        """A serial reduction whose extent differs inside the tile: walk to the longest, masked."""
        extent = self._within_edges(b, extents[dimension], b.index(0), masks)

        def body(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            env[op.regions[0].args[dimension]] = index
            active = inner.op("lt", self.widen(inner, index, shape_of(extent)), extent)
            inner_masks = [*masks, Condition(active, edge=False)]
            new: Sequence[Value]
            if dimension == len(extents) - 1:
                values = self.ops(inner, op.regions[0].ops, dict(env), inner_masks)
                new = self._combine(inner, kind, carried, values)
            else:
                new = self._reduce_dimension(inner, op, kind, extents, dimension + 1, env, inner_masks, carried, False)
            kept = []
            for value, old in zip(new, carried, strict=True):
                shape = join(shape_of(active), shape_of(value), shape_of(old))
                kept.append(inner.select(*(self.widen(inner, v, shape) for v in (active, value, old))))
            return kept

        return self.carried(b, b.index(0), self._extreme(b, "max", extent), b.index(1), start, body, op)

    def _combine(self, b: Builder, kind: str, left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
        shape = join(*(shape_of(v) for v in (*left, *right)))
        return combine(
            b, kind, [self.widen(b, v, shape) for v in left], [self.widen(b, v, shape) for v in right]
        )

    def _reduce_tiled(
        self, b: Builder, op: Op, kind: str, extent: Value, env: dict[Value, Value], masks: list[Condition], start: Sequence[Value]
    ) -> Sequence[Value]:
        position, tile = self.reduce_position, self.schedule.reduce_tile
        assert position is not None
        if shape_of(extent):
            from tilewright.passes.to_tile.ragged_rows import RaggedRows

            rows = RaggedRows(self, op.regions[0], kind, position, tile, tile // self.schedule.row_lanes, env, masks, lambda inner, number, local: number)
            return rows.run(b, extent, start)
        index_arg = op.regions[0].args[-1]
        rising = self.target.simt and self._rises(op)

        def values_at(inner: Builder, first: Value | None, masked: bool) -> list[Value]:
            """The terms from `first` on; of a whole row where there is none."""
            local = dict(env)
            edge = []
            if first is None:
                local[index_arg], inside = self._whole_row(inner, extent)
                edge = [Condition(inside, edge=True)]
            else:
                local[index_arg] = self.index_tile(inner, first, position, tile)
            if masked and first is not None and self.shift is not None:
                edge = [Condition(self._within_row(inner, first, local[index_arg], extent), edge=True)]
            elif masked:
                limit = inner.like(extent, local[index_arg])
                edge = [Condition(inner.op("lt", local[index_arg], limit), edge=True)]
            values = list(self.ops(inner, op.regions[0].ops, local, [*masks, *edge]))
            shape = join(*(shape_of(v) for v in values), shape_of(local[index_arg]))
            values = [self.widen(inner, v, shape) for v in values]
            if edge:
                keep = self.widen(inner, edge[0].value, shape)
                dtypes = [dtype_of(v.type) for v in values]
                values = [
                    inner.select(keep, v, inner.splat(n, v))
                    for v, n in zip(values, identities(kind, dtypes), strict=True)
                ]
            return values

        def step(inner: Builder, first: Value, masked: bool, carried: Sequence[Value]) -> Sequence[Value]:
            values = values_at(inner, first, masked)
            if rising:
                full = join(*(shape_of(v) for v in (*carried, *values)))
                return combine_later(
                    inner, kind, [self.widen(inner, v, full) for v in carried], [self.widen(inner, v, full) for v in values]
                )
            return self._combine(inner, kind, carried, values)

        if self.schedule.whole:
            return self._combine(b, kind, start, self.folded(b, kind, values_at(b, None, False)))
        if not self.target.simt and kind in ("min", "max", "argmin", "argmax"):
            return self._extreme_on_cpu(op, env, masks).lower(b, extent, start)
        # Lanes start from nothing: what was reduced before joins once, at the end.
        dtypes = [dtype_of(v.type) for v in start]
        nothing = [b.const(v, d) for v, d in zip(identities(kind, dtypes), dtypes, strict=True)]
        shape = self._reduced_shape(b, step, nothing, position, tile)
        lanes = [self.widen(b, v, shape) for v in nothing]
        if not self.target.simt:
            return self._reduce_on_cpu(b, op, kind, extent, env, masks, start, step, lanes)
        if self.shift is not None:
            return self._combine(b, kind, start, self.folded(b, kind, self._shifted_steps(b, op, extent, lanes, step)))
        whole = b.mul(b.op("floordiv", extent, b.index(tile)), b.index(tile))
        sums: Sequence[Value] = self.carried(
            b, b.index(0), whole, b.index(tile), lanes, lambda inner, k, *c: step(inner, k, False, c), op
        )
        remainder = b.op("lt", whole, extent)
        sums = b.if_(
            remainder,
            lambda inner: [self.widen(inner, v, shape) for v in step(inner, whole, True, sums)],
            lambda inner: sums,
        )
        results = self.folded(b, kind, sums)
        if rising:
            # Nothing beat the identity: all values are equal to it, and the first one is the place.
            first = self.ops(b, op.regions[0].ops, {**env, index_arg: b.index(0)}, masks)[1]
            kept = shape_of(results[1])
            lost = b.op("eq", results[1], b.splat(identities(kind, dtypes)[1], results[1]))
            some = self.widen(b, b.op("gt", extent, b.index(0)), kept)
            results = [results[0], b.select(b.op("and", lost, some), self.widen(b, first, kept), results[1])]
        return self._combine(b, kind, start, results)

    def _shifted_steps(
        self, b: Builder, op: Op, extent: Value, lanes: Sequence[Value], step: Callable[[Builder, Value, bool, Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:
        """The sums of a row's lanes, in tiles that begin up to a vector before the row: first those that lie wholly inside of it, several at a time, and then, under masks, its
        beginning and what is left."""
        assert self.shift is not None
        tile, stride = b.index(self.schedule.reduce_tile), b.index(self.schedule.reduce_tile * self.schedule.together)
        first = b.sub(b.index(0), self.shift)
        second = b.add(first, tile)
        end = b.add(second, b.mul(b.op("max", b.op("floordiv", b.sub(extent, second), stride), b.index(0)), stride))
        last = b.sub(end, tile)

        def inside(inner: Builder, k: Value, *carried: Value) -> Sequence[Value]:
            for number in range(self.schedule.together):
                carried = tuple(step(inner, inner.add(k, inner.index(number * self.schedule.reduce_tile)) if number else k, False, carried))
            inner.ops[:] = _loads_first(inner.ops)
            return carried

        def border(inner: Builder, k: Value, *carried: Value) -> Sequence[Value]:
            return step(inner, inner.select(inner.op("eq", k, last), first, k), True, carried)

        sums = self.carried(b, second, end, stride, lanes, inside, op)
        return self.carried(b, last, extent, tile, sums, border, op)

    def folded(self, b: Builder, kind: str, lanes: Sequence[Value]) -> Sequence[Value]:
        """Lanes combined along the reduction's axis; scalars where nothing else is left."""
        assert self.reduce_position is not None
        results: Sequence[Value] = b.multi("reduce_tile", *lanes, kind=kind, axis=self.reduce_position)
        return [b.op("item", v) for v in results] if all(s == 1 for s in shape_of(results[0])) else results

    def _reduce_on_cpu(
        self, b: Builder, op: Op, kind: str, extent: Value, env: dict[Value, Value], masks: list[Condition], start: Sequence[Value],
        step: Callable[..., Sequence[Value]], lanes: Sequence[Value],
    ) -> Sequence[Value]:  # fmt: skip
        """Vectors from an aligned address on, single elements before and after."""
        index_arg = op.regions[0].args[-1]

        def single(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            values = self.ops(inner, op.regions[0].ops, {**env, index_arg: index}, masks)
            return self._combine(inner, kind, carried, values)

        rows = self._rows_on_cpu(op, kind, env, masks)
        if rows is not None:
            return rows.run(b, [extent], start)
        # Sums of floats are taken in an order that does not depend on where the array lies.
        exact = kind not in ("add", "mul") or not dtype_of(start[0].type).is_float
        head = self._head(b, op.regions[0].ops, {**env, index_arg: b.index(0)}, index_arg) if exact else None
        wides, singles = self._strips(
            b, b.index(0), extent, self.schedule.reduce_tile, head, lanes, start,
            lambda inner, k, *carried: step(inner, k, False, carried), single,
        )  # fmt: skip
        return self._combine(b, kind, singles, self.folded(b, kind, wides))

    def _rows_on_cpu(self, op: Op, kind: str, env: dict[Value, Value], masks: list[Condition]) -> RowsOnCpu | None:
        """Rows that may be short: whole tiles, whole registers, and what is left of them. None where the schedule knows no registers."""
        from tilewright.passes.to_tile.rows_on_cpu import RowsOnCpu

        if self.target.simt or self.schedule.whole or not 1 < self.schedule.vector < self.schedule.reduce_tile or kind in ("min", "max", "argmin", "argmax"):
            return None
        assert self.reduce_position is not None
        widths = self.schedule.reduce_tile, self.schedule.vector
        return RowsOnCpu(self, op, env, masks, self.reduce_position, widths, self.target.has_lane_masks and not self.inner_walks)

    def row_terms(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition], inside: Value | None) -> Sequence[Value]:
        """What a reduction's body yields; at the edge of a row, for the indices inside of it."""
        return self.ops(b, op.regions[0].ops, env, masks if inside is None else [*masks, Condition(inside, edge=True)])

    def _rises(self, op: Op) -> bool:
        """Whether an argmin's or argmax's index grows with the reduction's own."""
        if len(op.results) != 2:
            return False
        step = self.forms[op.regions[0].yields[1]].factor(op.regions[0].args[-1]).constant
        return step is not None and step > 0

    def _extreme_on_cpu(self, op: Op, env: dict[Value, Value], masks: list[Condition]) -> ExtremeOnCpu:
        from tilewright.passes.to_tile.extreme_on_cpu import ExtremeOnCpu

        rising = self._rises(op)
        assert self.reduce_position is not None
        body = _ReductionBody(self, env, masks)
        tile, run = self.schedule.reduce_tile, self.schedule.block_search
        register = self.schedule.vector if 1 < self.schedule.vector < tile and not self.inner_walks else 0
        masked = bool(register) and self.target.has_lane_masks
        return ExtremeOnCpu(body, op, self.reduce_position, tile, run, rising, self.target.has_ieee_maximum, register, masked)

    def _reduced_shape(
        self, b: Builder, step: Callable[..., Sequence[Value]], sums: Sequence[Value], position: int, tile: int
    ) -> Shape:
        """The shape the accumulators have once a step was taken (the loop may have run no time)."""
        trial = Builder(b.span)
        values = step(trial, Value(INDEX), False, [Value(v.type) for v in sums])
        full = tuple(tile if a == position else 1 for a in range(self.rank))
        return join(full, *(shape_of(v) for v in (*values, *sums)))


def _loads_first(ops: Sequence[Op]) -> list[Op]:
    """Ops without effects, loads and what they need before the others: what is loaded is on its way while the rest is computed."""
    made = {result: op for op in ops for result in op.results}
    early: set[int] = set()
    pending = [op for op in ops if op.opcode == "load"]
    while pending:
        op = pending.pop()
        if id(op) not in early:
            early.add(id(op))
            pending += [made[v] for one in (op, *(inner for region in op.regions for inner in walk(region))) for v in one.operands if v in made]
    return [op for op in ops if id(op) in early] + [op for op in ops if id(op) not in early]


def _loops_around(op: Op, outer: tuple[Value, ...]) -> dict[int, tuple[Value, ...]]:
    found: dict[int, tuple[Value, ...]] = {}
    for region in op.regions:
        own = (*outer, *region.args) if op.opcode == "parallel" else (*outer, *region.args[:1]) if op.opcode == "for" else outer
        for inner in region.ops:
            if inner.opcode == "accumulate":
                found[id(inner)] = own
            found |= _loops_around(inner, own)
    return found


class _ReductionBody:
    """A reduction's body, evaluated where `ExtremeOnCpu` asks for it."""

    def __init__(self, lowering: LoopLowering, env: dict[Value, Value], masks: list[Condition]) -> None:
        self.lowering, self.env, self.masks = lowering, env, masks
        self.rank = lowering.rank

    def enter(self, op: Op, dimension: int, index: Value) -> None:
        self.env = {**self.env, op.regions[0].args[dimension]: index}

    def values(self, b: Builder, op: Op, index: Value, inside: Value | None = None) -> tuple[Value, ...]:
        found = self.lowering.row_terms(b, op, {**self.env, op.regions[0].args[-1]: index}, self.masks, inside)
        return tuple(self.lowering.widen(b, v, shape_of(index)) for v in found)

    def head(self, b: Builder, op: Op) -> Value | None:
        index = op.regions[0].args[-1]
        return self.lowering._head(b, op.regions[0].ops, {**self.env, index: b.index(0)}, index)

    def index_tile(self, b: Builder, start: Value, position: int, extent: int) -> Value:
        return self.lowering.index_tile(b, start, position, extent)
