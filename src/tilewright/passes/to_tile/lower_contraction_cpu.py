"""Loop stage -> tile stage for contractions on a CPU: blocks in cache, panels in order, results in SIMD registers.

In: a loop-stage kernel that is a contraction, and its schedule of family `cpu`. Out: a tile-stage kernel whose blocks are
single threads. A block computes a rectangle of the result. For each stretch of the sum it copies the factor it keeps (the second one,
say) into panels of `nr` columns, then, panel by panel of `mr` rows, the other; whatever the factors are (casts, guards, any strides)
is done while copying, and what lies outside is filled with zeros, so that the innermost loop has no edges:

    for %k { %a = load rows[0..mr, k]; %b = load columns[panel, k, 0..nr]; %acc = fma %a, %b, %acc }

Its tile of results is kept in local memory between stretches; after the last one the rest of the kernel runs on it row by row.
Every result is summed in the order of k, in stretches whose length depends on the schedule only: not on the number of threads.
Where rows or columns are few, and columns lie side by side, both factors are read where they lie instead (`panels/in_place.py`).
Where the second factor lies along k (`x @ w.T`), rows are kept if their copy is near: a panel of columns, turned in registers, is used for all of them while it lies in
the nearest cache, and the next one takes its place. Where rows are few, a copy of columns would hardly be used: vectors of both factors are multiplied along k where
they lie. Lanes are then sums of their own, which are added up at the end of a stretch.
Several loop indices on one side are walked as one and taken apart again, the innermost fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Affine
from tilewright.analysis.contraction import Contraction, find_contraction
from tilewright.base.dtypes import DType, i64
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import (
    ONE,
    ZERO,
    Size,
    ceildiv,
    floordiv,
    maximum,
    minimum,
    product,
)
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.rewrite import clone_ops
from tilewright.passes.schedules.matrix import CpuProduct, products_of
from tilewright.passes.to_tile.panels.active_steps import ActiveRuns, ActiveSteps, steps_left_out, without_frames
from tilewright.passes.to_tile.panels.copies import ROWS_MERGED
from tilewright.passes.to_tile.panels.frames import frame_of
from tilewright.passes.to_tile.panels.in_place import product_in_place
from tilewright.passes.to_tile.panels.results import PanelResults
from tilewright.passes.to_tile.panels.rows_in_place import LONG_RUN
from tilewright.passes.to_tile.panels.shares import blocks_across, blocks_down, multiple_down
from tilewright.passes.to_tile.panels.short_rows import merges_apart
from tilewright.passes.to_tile.panels.sides import join_columns, join_results, join_rows, join_terms, rows_lie
from tilewright.passes.to_tile.panels.steps import local_array
from tilewright.passes.windows.sum_ranges import sum_bounds, sum_range

FEW_PANELS, FEWEST_PANELS = 8, 2
"""Panels of rows up to which a copy of the second factor is not used often enough to be worth making: one that is turned element by element, and in squares."""
KEPT_PANELS = 32
"""Panels of rows up to which a second factor that is turned in squares is not kept: the squares go to a panel in the nearest cache, where stores do not wait for lines. Copies of
more rows than these are no longer near."""
SELDOM = 1
"""Panels of rows up to which columns that lie side by side are read where they lie. More of them read a copy, whose lines follow one another: it finds room in the
nearest cache."""
MOST_MERGED = 2
"""Vectors along a row that are merged from short rows as they are read: masks of three rows each have room in registers."""
COLUMN_PANELS = 16
"""Panels of columns of a block, at least, where a core computes a second one."""
AHEAD = 8
"""Steps of the innermost loop from when a row of columns is fetched to its use."""
LINE = 64
"""Bytes of a cache line."""


def lower_contraction_cpu(kernel: Kernel, schedule: CpuProduct, target: Target) -> Kernel:
    """The tile-stage kernel."""
    kernel, frames = without_frames(kernel)
    found = find_contraction(kernel)
    if found is None:
        raise CompilerBug.at("TW040", f"{kernel.name} is not a contraction", kernel.span)
    joined = join_rows(join_terms(kernel, found), found)
    if schedule.keep == "a":
        joined = join_results(joined, found)
    if joined is not kernel:
        kernel, found = joined, find_contraction(joined)
        assert found is not None
    joined = join_columns(kernel, found) if target.has_lane_masks and schedule.keep == "a" else kernel
    gaps = joined is kernel  # an array whose rows follow one another has nothing behind the last
    if not gaps:
        kernel, found = joined, find_contraction(joined)
        assert found is not None
    return PanelLowering(kernel, found, schedule, target, gaps, frames).run_contraction()


class PanelLowering(PanelResults):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    def __init__(self, kernel: Kernel, found: Contraction, schedule: CpuProduct, target: Target, gaps: bool = True, frames: tuple[Affine, ...] = ()) -> None:
        super().__init__(kernel, found, schedule, target, gaps)
        self.step = 1
        """Stretches of the sum are multiples of this."""
        self.tiles = 1
        """Tiles of sums of one product that a block keeps."""
        self.terms: tuple[Value, Value] | None = None
        """Which terms of a stretch the next tile of sums has; None: all."""
        self.frame = frame_of(found, target) if schedule.keep == "a" and schedule.to_tile == "lower_contraction_cpu" else ()
        self.placed = self._placed()
        self.direct = self._direct()
        self.few = self._few_panels() if self._reads_in_place() else 0
        """Panels of rows up to which the second factor is read where it lies."""
        self.kept_panels = min(schedule.m // schedule.mr, max(self.few, KEPT_PANELS if self._turns_squares() else 0)) if self.few else 0
        """Panels of rows up to which the first factor is the one that is kept: a panel of the second is used for all of them at once, and makes room for the next."""
        if self.few and target.vector_bytes == LINE:
            self.step = self.lanes  # no stretch but the last has terms beside whole vectors
        self.lie = schedule.to_tile == "lower_contraction_cpu" and schedule.keep == "b" and not self.few and self.a.along_k and rows_lie(found, schedule.nr)
        """Whether rows of the first factor may be read where they lie."""
        self.in_place: tuple[Value, Value] | None = None
        """Whether the next tile of sums reads the second factor where it lies, and from which column on; None: it never does."""
        self.on_the_way: tuple[Value, Value] | None = None
        """Whether the next tile of sums copies its panel of columns, and from which column on; None: all panels are copied before."""
        self.merging: tuple[Value, Value, int] | None = None
        """Which columns the next tile of sums merges from short rows as it reads them, and of how many rows each vector; None: it reads a copy."""
        filters = product(self.a.extents).constant
        self.merges_once = schedule.keep == "a" and filters is not None and filters <= schedule.mr and schedule.vectors <= MOST_MERGED and self._merges_rows()
        """Whether all rows are one tile, so that a copy of merged columns would be read once."""
        self.outside = steps_left_out(frames, found, found.n if schedule.keep == "a" else found.m) if self._lists_steps() else ()
        """What is at least 0 for steps that count, where some count for no pixel of a panel."""

    def _lists_steps(self) -> bool:
        """Whether steps may be left out: columns are read by their places alone, or rows have all steps of a run."""
        if sum_bounds(self.found) or self.frame or self.matrix.to_tile != "lower_contraction_cpu":
            return False
        if self.matrix.keep == "b":
            return not self.few
        return len(self.placed) == 1 and not merges_apart(self.found, self.b)

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run_contraction(self) -> Kernel:
        found, s = self.found, self.matrix
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        rows, columns = product(self.a.extents), product(self.b.numbered)
        batch = found.size(found.batch)
        cores, across = self.target.multiprocessors, maximum(ONE, ceildiv(columns, Size.of(s.n)))
        in_registers = s.to_tile == "lower_contraction_cpu"
        if not found.batch and s.keep == "b":
            across = blocks_across(rows, columns, across, s.nr // 2 if in_registers else 2 * s.nr, cores)
        # Blocks end where a tile of fewer registers, or of half the rows, does. Columns that are read where they lie are added up in another order than those
        # of a panel that is not full: which these are does not depend on the number of cores.
        least, lowest = Size.of(s.nr), s.mr
        if in_registers:
            if self._narrow_widths():
                many_rows = minimum(ONE, floordiv(rows, Size.of(self.few * s.mr + 1))) if self.few else ONE
                least = least - many_rows * (s.nr - self.lanes)
            lowest = self._half_rows() or s.mr
        width = maximum(Size.of(s.nr), ceildiv(ceildiv(columns, across), least) * least)
        down = maximum(ONE, ceildiv(rows, Size.of(s.m)))
        # As many blocks as cores, as long as each has some panels to work on.
        if s.keep == "b":
            # A number that divides that of cores needs no search.
            in_rounds = blocks_down(down, maximum(ONE, across * batch), cores) if found.batch else multiple_down(down, across, cores)
            # Two panels of rows at least, unless there is little else to share out.
            least_rows = s.mr * (ONE + minimum(ONE, floordiv(columns, Size.of(2 * s.nr)))) if in_registers else Size.of(2 * s.mr)
            down = maximum(down, minimum(ceildiv(rows, least_rows), in_rounds))
        else:
            # Each block copies all rows: there are two of them for each core where they have some columns more.
            rounds = maximum(ONE, minimum(Size.of(2), floordiv(columns, Size.of(COLUMN_PANELS * cores * s.nr))))
            one_above_another = maximum(ONE, down * batch)
            wanted = blocks_down(maximum(across, floordiv(rounds * cores, one_above_another)), one_above_another, cores)
            across = maximum(across, minimum(ceildiv(columns, Size.of(4 * s.nr)), wanted))
            width = maximum(Size.of(s.nr), ceildiv(ceildiv(columns, across), Size.of(s.nr)) * s.nr)
        height = maximum(Size.of(s.mr), ceildiv(ceildiv(rows, down), Size.of(lowest)) * lowest)
        down, across = ceildiv(rows, height), ceildiv(columns, width)
        number = b.op("program_id", axis=0)
        pieces = (*(found.extents[p] for p in found.batch), down, across)

        def panels(at: Builder) -> list[Value]:
            *outer, row, column = self._apart(at, number, pieces)
            local = {**env, **dict(zip((found.indices[p] for p in found.batch), outer, strict=True))}
            top, left = at.mul(row, at.index(height)), at.mul(column, at.index(width))
            bottom = at.op("min", at.add(top, at.index(height)), at.index(rows))
            right = at.op("min", at.add(left, at.index(width)), at.index(columns))
            self._block(at, local, (top, bottom), (left, right))
            return []

        def in_place(at: Builder) -> list[Value]:
            assert beside is not None
            beside.block(at, env, number)
            return []

        beside, grid = product_in_place(self.kernel, found, s, self.target), batch * down * across
        seldom = ZERO if beside is None else beside.is_seldom
        if beside is None or seldom == ZERO:
            panels(b)
        else:
            grid = grid + (product(beside.grid()) - grid) * seldom
            if seldom == ONE:
                in_place(b)
            else:
                b.if_(b.op("eq", b.index(seldom), b.index(1)), in_place, panels)
        attrs = MappingProxyType({**self.kernel.attrs, "schedule": s.describe()})
        return replace(self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=(grid,), attrs=attrs)

    def _block(
        self, b: Builder, env: dict[Value, Value], down: tuple[Value, Value], across: tuple[Value, Value]
    ) -> None:
        s, total = self.matrix, product(self.k_extents)
        whole_a = s.keep == "a"
        known = total.constant
        once = known is not None and known <= s.k
        self._allocate(b, whole_a)
        self.tiles = 1 if once else (s.m // s.mr) * (s.n // s.nr)
        self._allocate_sums(b, env)
        zero, one, length = b.index(0), b.index(1), b.index(total)

        def even(most: int) -> Value:
            """Stretches of one length, none of them much shorter than the others."""
            share = ceildiv(total, maximum(ONE, ceildiv(total, Size.of(most))))
            return b.index(maximum(ONE, ceildiv(share, Size.of(self.step)) * self.step))

        are_long = b.op("ge", self._run_length(b), b.index(LONG_RUN)) if self.lie else zero
        # Rows that are copied find room in the nearest caches.
        depth = b.select(are_long, even(s.k), even(min(s.k, self.target.costs.caches.window_depth))) if self.lie else even(s.k)
        panels = b.op("floordiv", b.add(b.sub(across[1], across[0]), b.index(s.nr - 1)), b.index(s.nr))

        panels_down = b.op("floordiv", b.add(b.sub(down[1], down[0]), b.index(s.mr - 1)), b.index(s.mr))
        # Of all rows, not of those of a block: how sums are added up does not depend on how many cores share them out.
        is_few = b.op("le", b.index(product(self.a.extents)), b.index(self.few * s.mr))
        rows_kept = b.op("le", panels_down, b.index(self.kept_panels)) if self.few else zero

        is_near = self._is_near(b) if self._copies_on_the_way() else zero

        def tile(at: Builder, start: Value, count: Value, row: Value, column: Value, direct: bool) -> None:
            top, left = at.add(down[0], at.mul(row, at.index(s.mr))), at.add(across[0], at.mul(column, at.index(s.nr)))
            place = at.add(at.mul(row, panels), column)
            where = zero if once else at.select(at.op("le", length, depth), zero, place)

            def fetch(inner: Builder) -> list[Value]:
                self._prefetch_rows(inner, env, top, down, (start, count), (column, panels))
                return []

            if self.few:
                at.if_(rows_kept, lambda _: [], fetch)
            elif not whole_a:
                fetch(at)
            last = at.op("ge", at.add(start, depth), length)
            panels_at = (row if whole_a else zero, left if direct else zero if whole_a else column)
            if self.few:
                self.in_place = at.logical_and(is_few, self._in_one_run(at, left, across[1])), left
                panels_at = at.select(rows_kept, row, zero), at.select(rows_kept, zero, column)
            if self._copies_on_the_way():
                full = at.op("le", at.add(left, at.index(s.nr)), across[1])
                self.on_the_way = at.logical_and(at.logical_and(is_near, full), at.op("eq", row, zero)), left
            tile_at = (start, count), last, (top, down[1]), (left, across[1])

            def copied(inner: Builder) -> list[Value]:
                self._one_tile(inner, env, where, panels_at, *tile_at, direct)
                return []

            if self.lie:
                at.if_(are_long, lambda inner: self._lying_tile(inner, env, where, *tile_at), copied)
            else:
                copied(at)

        def stretch(at: Builder, start: Value) -> list[Value]:
            count = at.op("min", at.sub(length, start), depth)

            def copy_row(inner: Builder, row: Value) -> list[Value]:
                def copied(deep: Builder) -> list[Value]:
                    return self._copy_rows(deep, env, down, row, row if whole_a else zero, start, count)

                return list(inner.if_(are_long, lambda deep: [], copied)) if self.lie else copied(inner)

            def copy_column(inner: Builder, column: Value, steps: Value | None = None) -> list[Value]:
                return self._copy_columns(inner, env, across, column, zero if whole_a else column, start, steps or count)

            outer, inside = (panels, panels_down) if whole_a else (panels_down, panels)
            kept = copy_row if whole_a else copy_column

            def panel(inner: Builder, number: Value, direct: bool = False) -> list[Value]:
                steps = self._steps_of_panel(inner, across, number, count) if whole_a else count
                if not whole_a:
                    self._runs_of_panel(inner, down, number, (start, count))
                if not direct and whole_a:
                    copy_column(inner, number, steps)
                elif not direct:
                    copy_row(inner, number)

                def one_tile(deep: Builder, other: Value) -> list[Value]:
                    tile(deep, start, steps, *((other, number) if whole_a else (number, other)), direct)
                    return []

                inner.for_(zero, self._panels_for(inner, number, inside, down, across), one, [], one_tile, name="panel")
                return []

            def merged(inner: Builder, number: Value, rows: Sequence[int]) -> list[Value]:
                """By the fewest rows that a vector of columns can have part of, if these are few."""
                if not rows:
                    return panel(inner, number)

                def as_it_is_read(deep: Builder) -> list[Value]:
                    left = deep.add(across[0], deep.mul(number, deep.index(s.nr)))
                    steps = self._steps_of_panel(deep, across, number, count)
                    self.merging = left, deep.op("min", deep.add(left, deep.index(s.nr)), across[1]), rows[0]
                    tile(deep, start, steps, zero, number, False)
                    self.merging = None
                    return []

                inner.if_(self._rows_fit(inner, rows[0]), as_it_is_read, lambda deep: merged(deep, number, rows[1:]))
                return []

            def either(inner: Builder, number: Value) -> list[Value]:
                left = inner.add(across[0], inner.mul(number, inner.index(s.nr)))
                seldom = inner.op("le", panels_down, inner.index(SELDOM))
                there = inner.logical_and(self._in_one_run(inner, left, across[1]), seldom)
                inner.if_(there, lambda deep: panel(deep, number, True), lambda deep: merged(deep, number, ROWS_MERGED if self.merges_once else ()))
                return []

            def whichever(inner: Builder, number: Value) -> list[Value]:
                """Few rows: all of them are copied before the first panel of columns, of which the last alone may be. Else all columns are copied before the
                first panel of rows, and these one by one."""
                started = inner.op("gt", number, zero)
                left = inner.add(across[0], inner.mul(number, inner.index(s.nr)))
                copied = inner.select(inner.logical_and(is_few, self._in_one_run(inner, left, across[1])), zero, one)
                rows = (
                    inner.select(rows_kept, zero, number),
                    inner.select(rows_kept, inner.select(started, zero, panels_down), inner.add(number, one)),
                )
                columns = (
                    inner.select(rows_kept, number, zero),
                    inner.select(rows_kept, inner.add(number, copied), inner.select(started, zero, panels)),
                )
                inner.for_(
                    *columns,
                    one,
                    [],
                    lambda deep, column: self._copy_columns(
                        deep, env, across, column, deep.select(rows_kept, zero, column), start, count
                    ),
                    name="panel",
                )
                inner.for_(
                    *rows,
                    one,
                    [],
                    lambda deep, row: self._copy_rows(
                        deep, env, down, row, deep.select(rows_kept, row, zero), start, count
                    ),
                    name="panel",
                )

                def one_tile(deep: Builder, other: Value) -> list[Value]:
                    tile(
                        deep,
                        start,
                        count,
                        deep.select(rows_kept, other, number),
                        deep.select(rows_kept, number, other),
                        False,
                    )
                    return []

                inner.for_(zero, inner.select(rows_kept, panels_down, panels), one, [], one_tile, name="panel")
                return []

            if self.few:
                at.for_(zero, at.select(rows_kept, panels, panels_down), one, [], whichever, name="panel")
                return []
            if self._notes_places():
                self._note_places(at, env, start, count)
            if whole_a:
                at.for_(zero, inside, one, [], kept, name="panel")
            elif self._copies_on_the_way():
                full = at.op("floordiv", at.sub(across[1], across[0]), at.index(s.nr))

                def all_columns(inner: Builder) -> list[Value]:
                    self._pack_all_columns(inner, env, across, panels, start, count)
                    return []

                def last_column(inner: Builder) -> list[Value]:
                    inner.for_(full, panels, one, [], copy_column, name="panel")
                    return []

                at.if_(is_near, last_column, all_columns)
            else:
                self._pack_all_columns(at, env, across, panels, start, count)
            at.for_(zero, outer, one, [], either if self.direct else panel, name="panel")
            return []

        # A sum of nothing still has its results written.
        b.for_(zero, b.op("max", length, one), depth, [], stretch, name="start")

    def _copy_rows(
        self,
        b: Builder,
        env: dict[Value, Value],
        down: tuple[Value, Value],
        row: Value,
        panel: Value,
        start: Value,
        count: Value,
    ) -> list[Value]:
        """Copy rows of panel `row` to place `panel`."""
        top = b.add(down[0], b.mul(row, b.index(self.matrix.mr)))
        self._pack_rows(b, env, panel, top, down[1], start, count)
        return []

    def _copy_columns(
        self,
        b: Builder,
        env: dict[Value, Value],
        across: tuple[Value, Value],
        column: Value,
        panel: Value,
        start: Value,
        count: Value,
    ) -> list[Value]:
        self._pack_columns(b, env, across, column, panel, start, count)
        return []

    def _panels_for(
        self, b: Builder, number: Value, inside: Value, down: tuple[Value, Value], across: tuple[Value, Value]
    ) -> Value:
        """Panels of the factor that is kept that meet panel `number` of the other: all `inside`."""
        return inside

    def _steps_of_panel(self, b: Builder, across: tuple[Value, Value], number: Value, count: Value) -> Value:
        """How many steps of a stretch count for panel `number` of columns: it is read by these from here on."""
        if self.active is None:
            return count
        left = b.add(across[0], b.mul(number, b.index(self.matrix.nr)))
        last = b.sub(b.op("min", b.add(left, b.index(self.matrix.nr)), across[1]), b.index(1))
        ends = self._apart(b, left, self.b.numbered), self._apart(b, last, self.b.numbered)
        self.place_row, steps = self.active.of_panel(b, ends, count)
        return steps

    def _runs_of_panel(self, b: Builder, down: tuple[Value, Value], number: Value, stretch: tuple[Value, Value]) -> None:
        """Find which steps of a stretch count for panel `number` of rows."""
        if self.runs is None:
            return
        top = b.add(down[0], b.mul(number, b.index(self.matrix.mr)))
        last = b.sub(b.op("min", b.add(top, b.index(self.matrix.mr)), down[1]), b.index(1))
        ends = self._apart(b, top, self.a.extents), self._apart(b, last, self.a.extents)
        self.runs = self.runs[0], self.runs[0].of_panel(b, ends, *stretch)

    def _allocate(self, b: Builder, whole_a: bool) -> None:
        """Room for the copies of both factors."""
        s = self.matrix
        one_panel = (s.mr, s.k + self.lanes) if not self.a.along_side else (s.k, _up(s.mr, self.lanes))
        self.rows = self._local(b, "rows", (s.m // s.mr if whole_a else max(1, self.kept_panels), *one_panel), self.a.dtype)
        # The extra row keeps panels from falling on the same places of the cache.
        self.columns = self._local(b, "columns", (1 if whole_a else s.n // s.nr, s.k + 1, s.nr), self.b.dtype)
        if self.few:
            self.dots = self._local(b, "dots", (s.mr, s.nr), self.dtype)
        if self.merges_once:
            self.merged = self._local(b, "merged", (s.mr, s.nr), self.dtype)
        if self._notes_places():
            self.places = self._local(b, "places", (2 if self.outside else len(self.placed), s.k), i64)
        if self.outside and not whole_a:
            rows, terms = (tuple(zip(*digits, strict=True)) for digits in ((self.a.indices, self.a.extents), (self.k_indices, self.k_extents)))
            self.runs = ActiveRuns.allocate(b, self.outside, self.found, rows, terms, s.k), b.index(0)
        elif self.outside:
            columns = tuple(zip(self.b.indices, self.b.numbered, strict=True))
            self.active = ActiveSteps.allocate(b, self.outside, self.found, columns, self.places, s.k)

    def _allocate_sums(self, b: Builder, env: dict[Value, Value]) -> None:
        s = self.matrix
        self.sums = self._local(b, "sums", (products_of(s) * self.tiles, s.mr, s.nr), self.dtype)

    def _local(self, b: Builder, name: str, shape: tuple[int, ...], dtype: DType) -> Value:
        return local_array(b, name, shape, dtype)

    def _one_tile(
        self, b: Builder, env: dict[Value, Value], where: Value, panels: tuple[Value, Value], stretch: tuple[Value, Value], last: Value,
        down: tuple[Value, Value], across: tuple[Value, Value], direct: bool,
    ) -> None:  # fmt: skip
        """Add a stretch of the sum to the tile of sums at `where`; after the last one, do the rest of the kernel on it. `direct`: the second
        factor is read where it lies, from column `panels[1]` on."""
        s = self.matrix
        self.terms = self._terms(b, stretch, down[0], across[0])

        def whole(at: Builder) -> list[Value]:
            sums = self._multiply(at, env, where, *panels, *stretch, direct)
            return [self._keep_or_finish(at, env, sums, where, last, down, across)]

        def part(at: Builder, rows: int, width: int) -> list[Value]:
            self._keep(at, self._multiply(at, env, where, *panels, *stretch, direct, rows, width), where)
            return [last]

        def any_width(at: Builder, rows: int, widths: Sequence[int]) -> list[Value]:
            """The least of the widths that has all columns; all of a tile's where none has."""
            if not widths:
                return whole(at) if rows == s.mr else part(at, rows, s.nr)
            width, *wider = widths
            fits = at.op("le", at.sub(across[1], across[0]), at.index(width))
            return list(at.if_(fits, lambda deep: part(deep, rows, width), lambda deep: any_width(deep, rows, wider)))

        def any_height(at: Builder, heights: Sequence[int]) -> list[Value]:
            """The least of the heights that has all rows."""
            rows, *higher = heights
            if not higher:
                return any_width(at, rows, widths)
            fits = at.op("le", at.sub(down[1], down[0]), at.index(rows))
            return list(at.if_(fits, lambda deep: any_width(deep, rows, widths), lambda deep: any_height(deep, higher)))

        widths = self._narrow_widths()
        (left,) = any_height(b, self._heights())
        b.if_(left, lambda end: self._finish(end, env, where, down, across), lambda end: [])

    def _lying_tile(
        self, b: Builder, env: dict[Value, Value], where: Value, stretch: tuple[Value, Value], last: Value, down: tuple[Value, Value], across: tuple[Value, Value]
    ) -> list[Value]:
        """As `_one_tile`, of rows that are read where they lie."""
        start, count = stretch
        done = self._multiply_rows(b, env, down, start, count, self.runs)
        zero = b.index(0)
        sums = self._with_earlier(b, done, where, b.op("eq", start, zero), self.index_tile(b, zero, 1, self.matrix.nr))
        left = self._keep_or_finish(b, env, sums, where, last, down, across)
        b.if_(left, lambda end: self._finish(end, env, where, down, across), lambda end: [])
        return []

    def _few_panels(self) -> int:
        return FEWEST_PANELS if self._turns_squares() else FEW_PANELS

    def _half_rows(self) -> int:
        """Rows of a tile at the lower edge that has no more than half of them, and is computed as one of half the height; 0: all tiles are alike."""
        half, known = self.matrix.mr // 2, product(self.a.extents).constant
        return half if known is None or 0 < known % self.matrix.mr <= half else 0

    def _heights(self) -> list[int]:
        """Rows of a tile: of those at the lower edge, and of all others."""
        half, rows = self._half_rows(), self.matrix.mr
        if self.target.vector_bytes != LINE or not half:
            return [half, rows] if half else [rows]
        # Rows of which each column takes an addition of lanes are not computed in vain where there are few. Quarters for filters, too, would take a tenth less time where
        # these are few, and half as long again to compile.
        return [half // 2, half, rows] if self.few else [half, rows]

    def _narrow_widths(self) -> tuple[int, ...]:
        """Widths of tiles at the right edge that have fewer registers along a row: where the second factor is kept its columns may be as few as filters are."""
        if self.matrix.keep != "b":
            return ()
        return tuple(self.lanes * vectors for vectors in range(1, self.matrix.vectors))

    def _terms(self, b: Builder, stretch: tuple[Value, Value], top: Value, left: Value) -> tuple[Value, Value] | None:
        """Which terms of a stretch count for a tile of results, where guards leave out some; None: all of them."""
        found, s = self.found, self.matrix
        bounds = sum_bounds(found)
        if not bounds:
            return None
        tile = {
            found.indices[found.m[0]]: (top, b.add(top, b.index(s.mr))),
            found.indices[found.n[0]]: (left, b.add(left, b.index(s.nr))),
        }
        first, behind = sum_range(b, bounds, tile)
        start, count = stretch
        zero = b.index(0)
        low = zero if first is None else b.op("max", zero, b.sub(first, start))
        return low, count if behind is None else b.op("min", count, b.sub(behind, start))

    # -- the innermost loop -------------------------------------------------------------------------------------

    def _multiply(
        self, b: Builder, env: dict[Value, Value], where: Value, row: Value, panel: Value, start: Value, count: Value, direct: bool, rows: int = 0, width: int = 0,
    ) -> list[Value]:  # fmt: skip
        """The sums of a tile up to the end of this stretch, row by row: in this order code generators keep them in registers. `rows`, `width`: of so many
        rows and columns; 0: of all."""
        s, zero = self.matrix, b.index(0)
        rows, width = rows or s.mr, width or s.nr
        across = self.index_tile(b, zero, 1, width)
        read = self._reader(b, env, panel, count) if direct else None
        nothing = b.op("broadcast", b.const(0, self.dtype), shape=(1, width))

        def ahead(inner: Builder) -> list[Value]:
            for number in range(rows):
                for column in range(0, width, LINE // self.dtype.itemsize):
                    inner.multi("prefetch", self.sums, where, inner.index(number), inner.index(column))
            return []

        # What was summed up before is added last: it has come into the nearest cache by then.
        first = b.op("eq", start, zero)
        b.if_(first, lambda inner: [], ahead)

        def step(inner: Builder, k: Value, *sums: Value) -> list[Value]:
            c = read(inner, k) if read else inner.op("load", self.columns, panel, k, across)
            if not read and self.target.vector_bytes == LINE:
                # A step needs whole lines, more than the hardware brings on its own in time.
                for column in range(0, width, LINE // self.dtype.itemsize):
                    inner.multi("prefetch", self.columns, panel, inner.add(k, inner.index(AHEAD)), inner.index(column))
            return add(inner, k, c, sums)

        def add(inner: Builder, k: Value, c: Value, sums: Sequence[Value]) -> list[Value]:
            following: list[Value] = []
            if self.active is not None and self.place_row is not None:
                k = inner.op("load", self.active.steps, self.place_row, k)
            for number, acc in enumerate(sums):
                place = inner.index(number)
                a = inner.like(inner.op("load", self.rows, row, *((k, place) if self.a.along_side else (place, k))), c)
                following.append(inner.fma(a, c, acc) if self.dtype.is_float else inner.add(inner.mul(a, c), acc))
            return following

        low, high = self.terms or (zero, count)

        def copied(inner: Builder) -> list[Value]:
            if self.runs is None:
                return list(inner.for_(low, high, inner.index(1), [nothing] * rows, step, name="k"))
            runs, number = self.runs
            return runs.over(
                inner, number, [nothing] * rows, lambda at, first, end, sums: at.for_(first, end, at.index(1), list(sums), step, name="k")
            )

        def on_the_way(inner: Builder, left: Value) -> list[Value]:
            fetched = self._copying_reader(inner, env, panel, left, start)
            return list(
                inner.for_(
                    low,
                    high,
                    inner.index(1),
                    [nothing] * rows,
                    lambda at, k, *sums: add(at, k, fetched(at, k), sums),
                    name="k",
                )
            )

        done: Sequence[Value]
        if self.merging is not None:
            done = self._multiply_merged(b, env, row, start, count, (low, high), rows)
        elif width < s.nr or (self.in_place is None and self.on_the_way is None):  # a panel that is not full has a copy
            done = copied(b)
        elif self.on_the_way is not None:
            now, left = self.on_the_way
            done = b.if_(now, lambda inner: on_the_way(inner, left), copied)
        else:
            assert self.in_place is not None
            there, left = self.in_place
            done = b.if_(
                there, lambda inner: self._multiply_in_place(inner, env, row, left, start, (low, high), rows), copied
            )

        return self._with_earlier(b, done, where, first, across)

    def _multiply_merged(self, b: Builder, env: dict[Value, Value], row: Value, start: Value, count: Value, terms: tuple[Value, Value], rows: int) -> list[Value]:
        """The sums of `rows` rows of a tile whose columns are merged as they are read."""
        assert self.merging is not None
        s, zero, lanes = self.matrix, b.index(0), self.lanes
        vectors = range(s.vectors)
        first, end, short_rows = self.merging
        read = self._merging_reader(b, env, first, end, count, short_rows)
        nothing = b.op("broadcast", b.const(0, self.dtype), shape=(1, lanes))

        def step(at: Builder, k: Value, *sums: Value) -> list[Value]:
            values = read(at, k)
            if self.active is not None and self.place_row is not None:
                k = at.op("load", self.active.steps, self.place_row, k)
            following: list[Value] = []
            for number in range(rows):
                place = at.index(number)
                own = at.op("load", self.rows, row, *((k, place) if self.a.along_side else (place, k)))
                following += [at.fma(at.like(own, values[v]), values[v], sums[number * s.vectors + v]) for v in vectors]
            return following

        done = b.for_(*terms, b.index(1), [nothing] * (rows * s.vectors), step, name="k")
        for number in range(rows):
            for v in vectors:
                b.multi("store", self.merged, b.index(number), self.index_tile(b, b.index(v * lanes), 1, lanes), done[number * s.vectors + v])
        across = self.index_tile(b, zero, 1, s.nr)
        return [b.op("load", self.merged, b.index(number), across) for number in range(rows)]

    def _with_earlier(self, b: Builder, sums: Sequence[Value], where: Value, first: Value, across: Value) -> list[Value]:
        """Sums of a stretch, with those of the stretches before where it is not the first."""

        def more(at: Builder) -> list[Value]:
            return [at.add(at.op("load", self.sums, where, at.index(number), across), own) for number, own in enumerate(sums)]

        return list(b.if_(first, lambda at: list(sums), more))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
