"""Loop stage -> tile stage for contractions on a CPU: blocks in cache, panels in order, results in SIMD registers.

In: a loop-stage kernel that is a contraction, and its schedule of family `cpu`. Out: a tile-stage kernel whose blocks are
single threads. A block computes a rectangle of the result. For each stretch of the sum it copies the factor it keeps (the second one,
say) into panels of `nr` columns, then, panel by panel of `mr` rows, the other; whatever the factors are (casts, guards, any strides)
is done while copying, and what lies outside is filled with zeros, so that the innermost loop has no edges:

    for %k { %a = load rows[0..mr, k]; %b = load columns[panel, k, 0..nr]; %acc = fma %a, %b, %acc }

Its tile of results is kept in local memory between stretches; after the last one the rest of the kernel runs on it row by row.
Every result is summed in the order of k, in stretches whose length depends on the schedule only: not on the number of threads.
Several loop indices on one side are walked as one and taken apart again, the innermost fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import address
from tilewright.analysis.contraction import Contraction, find_contraction
from tilewright.base.dtypes import DType, bool_, i64
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import CpuProduct, products_of
from tilewright.passes.to_tile.panel_copies import PanelCopies
from tilewright.passes.to_tile.panel_sides import Side, order
from tilewright.passes.windows.sum_ranges import sum_bounds, sum_range

SHORT = 6
"""Ops of an epilogue that is written out for a whole tile of registers; a longer one is a loop over its rows."""
AHEAD = 8
"""Steps of the innermost loop from when a row of columns is fetched to its use."""
LINE = 64
"""Bytes of a cache line."""


def lower_contraction_cpu(kernel: Kernel, schedule: CpuProduct, target: Target) -> Kernel:
    """The tile-stage kernel."""
    found = find_contraction(kernel)
    if found is None:
        raise CompilerBug.at("TW040", f"{kernel.name} is not a contraction", kernel.span)
    return PanelLowering(kernel, found, schedule, target).run_contraction()


class PanelLowering(PanelCopies):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    def __init__(self, kernel: Kernel, found: Contraction, schedule: CpuProduct, target: Target) -> None:
        super().__init__(kernel, Schedule((1,) * len(found.extents)), target)
        self.found, self.matrix = found, schedule
        self.rank = 2
        self.dtype = found.accumulator
        self.step = 1
        """Stretches of the sum are multiples of this."""
        self.lanes = schedule.nr // schedule.vectors
        self.k_order = order(found, range(len(found.k)), [found.a, found.b])
        self.a = Side(found, found.a, order(found, found.m, [found.a]), self.k_order)
        self.b = Side(found, found.b, order(found, found.n, [found.b], stores=True), self.k_order)
        self.k_extents = tuple(found.reduce_extents[p] for p in self.k_order)
        self.k_indices = tuple(found.k[p] for p in self.k_order)
        self.tiles = 1
        """Tiles of sums of one product that a block keeps."""
        self.terms: tuple[Value, Value] | None = None
        """Which terms of a stretch the next tile of sums has; None: all."""
        self.direct = self._direct()
        """Which indices of the second factor's load change along the sum, where panels of it are read without a copy."""

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run_contraction(self) -> Kernel:
        found, s = self.found, self.matrix
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        rows, columns = product(self.a.extents), product(self.b.numbered)
        batch = found.size(found.batch)
        across = maximum(ONE, ceildiv(columns, Size.of(s.n)))
        if not found.batch and s.keep == "b":
            # As many blocks side by side as keep all cores busy to the end, as long as each has some panels. Each of them copies all rows: where these are many
            # more than columns, cores share out the rows.
            even = ceildiv(across, Size.of(self.target.multiprocessors)) * self.target.multiprocessors
            most = minimum(ceildiv(columns, Size.of(2 * s.nr)), ceildiv(columns * self.target.multiprocessors, maximum(ONE, rows)))
            across = maximum(across, minimum(even, most))
        width = maximum(Size.of(s.nr), ceildiv(ceildiv(columns, across), Size.of(s.nr)) * s.nr)
        down = maximum(ONE, ceildiv(rows, Size.of(s.m)))
        # As many blocks as cores at least, as long as each has some panels to work on.
        cores = self.target.multiprocessors
        if s.keep == "b":
            wanted = ceildiv(Size.of(cores), maximum(ONE, across * batch))
            down = maximum(down, minimum(ceildiv(rows, Size.of(2 * s.mr)), wanted))
        else:
            wanted = ceildiv(Size.of(2 * cores), maximum(ONE, down * batch))
            across = maximum(across, minimum(ceildiv(columns, Size.of(4 * s.nr)), wanted))
            width = maximum(Size.of(s.nr), ceildiv(ceildiv(columns, across), Size.of(s.nr)) * s.nr)
        height = maximum(Size.of(s.mr), ceildiv(ceildiv(rows, down), Size.of(s.mr)) * s.mr)
        down, across = ceildiv(rows, height), ceildiv(columns, width)
        number = b.op("program_id", axis=0)
        pieces = (*(found.extents[p] for p in found.batch), down, across)
        *outer, row, column = self._apart(b, number, pieces)
        env.update(zip((found.indices[p] for p in found.batch), outer, strict=True))
        top, left = b.mul(row, b.index(height)), b.mul(column, b.index(width))
        bottom = b.op("min", b.add(top, b.index(height)), b.index(rows))
        right = b.op("min", b.add(left, b.index(width)), b.index(columns))
        self._block(b, env, (top, bottom), (left, right))
        attrs = MappingProxyType({**self.kernel.attrs, "schedule": s.describe()})
        grid = (batch * down * across,)
        return replace(self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=grid, attrs=attrs)

    def _block(self, b: Builder, env: dict[Value, Value], down: tuple[Value, Value], across: tuple[Value, Value]) -> None:
        s, total = self.matrix, product(self.k_extents)
        whole_a = s.keep == "a"
        known = total.constant
        once = known is not None and known <= s.k
        self._allocate(b, whole_a)
        self.tiles = 1 if once else (s.m // s.mr) * (s.n // s.nr)
        self._allocate_sums(b, env)
        zero, one, length = b.index(0), b.index(1), b.index(total)
        # Stretches of one length, none of them much shorter than the others.
        even = ceildiv(total, maximum(ONE, ceildiv(total, Size.of(s.k))))
        depth = b.index(maximum(ONE, ceildiv(even, Size.of(self.step)) * self.step))
        panels = b.op("floordiv", b.add(b.sub(across[1], across[0]), b.index(s.nr - 1)), b.index(s.nr))

        panels_down = b.op("floordiv", b.add(b.sub(down[1], down[0]), b.index(s.mr - 1)), b.index(s.mr))

        def tile(at: Builder, start: Value, count: Value, row: Value, column: Value, direct: bool) -> None:
            top, left = at.add(down[0], at.mul(row, at.index(s.mr))), at.add(across[0], at.mul(column, at.index(s.nr)))
            place = at.add(at.mul(row, panels), column)
            where = zero if once else at.select(at.op("le", length, at.index(s.k)), zero, place)
            if not whole_a:
                self._prefetch_rows(at, env, (at.add(top, at.index(s.mr)), down[1]), start, column)
            last = at.op("ge", at.add(start, depth), length)
            panels_at = (row if whole_a else zero, left if direct else zero if whole_a else column)
            self._one_tile(at, env, where, panels_at, (start, count), last, (top, down[1]), (left, across[1]), direct)

        def stretch(at: Builder, start: Value) -> list[Value]:
            count = at.op("min", at.sub(length, start), depth)

            def copy_row(inner: Builder, row: Value) -> list[Value]:
                top = inner.add(down[0], inner.mul(row, inner.index(s.mr)))
                self._pack_rows(inner, env, row if whole_a else zero, top, down[1], start, count)
                return []

            def copy_column(inner: Builder, column: Value) -> list[Value]:
                self._pack_columns(inner, env, across, column, zero if whole_a else column, start, count)
                return []

            outer, inside = (panels, panels_down) if whole_a else (panels_down, panels)
            kept, passing = (copy_row, copy_column) if whole_a else (copy_column, copy_row)

            def panel(inner: Builder, number: Value, direct: bool = False) -> list[Value]:
                if not direct:
                    passing(inner, number)

                def one_tile(deep: Builder, other: Value) -> list[Value]:
                    tile(deep, start, count, *((other, number) if whole_a else (number, other)), direct)
                    return []

                inner.for_(zero, self._panels_for(inner, number, inside, down, across), one, [], one_tile, name="panel")
                return []

            def either(inner: Builder, number: Value) -> list[Value]:
                left = inner.add(across[0], inner.mul(number, inner.index(s.nr)))
                fits = self._in_one_run(inner, left, across[1])
                inner.if_(fits, lambda deep: panel(deep, number, True), lambda deep: panel(deep, number))
                return []

            if self.direct:
                self._note_places(at, env, start, count)
            at.for_(zero, inside, one, [], kept, name="panel")
            at.for_(zero, outer, one, [], either if self.direct else panel, name="panel")
            return []

        # A sum of nothing still has its results written.
        b.for_(zero, b.op("max", length, one), depth, [], stretch, name="start")

    def _panels_for(self, b: Builder, number: Value, inside: Value, down: tuple[Value, Value], across: tuple[Value, Value]) -> Value:
        """Panels of the factor that is kept that meet panel `number` of the other: all `inside`."""
        return inside

    def _allocate(self, b: Builder, whole_a: bool) -> None:
        """Room for the copies of both factors."""
        s = self.matrix
        one_panel = (s.mr, s.k + self.lanes) if not self.a.along_side else (s.k, _up(s.mr, self.lanes))
        self.rows = self._local(b, "rows", (s.m // s.mr if whole_a else 1, *one_panel), self.a.dtype)
        # The extra row keeps panels from falling on the same places of the cache.
        self.columns = self._local(b, "columns", (1 if whole_a else s.n // s.nr, s.k + 1, s.nr), self.b.dtype)
        if self.direct:
            self.places = self._local(b, "places", (len(self.direct), s.k), i64)

    def _allocate_sums(self, b: Builder, env: dict[Value, Value]) -> None:
        s = self.matrix
        self.sums = self._local(b, "sums", (products_of(s) * self.tiles, s.mr, s.nr), self.dtype)

    def _local(self, b: Builder, name: str, shape: tuple[int, ...], dtype: DType) -> Value:
        return b.op("alloc", dtype=dtype, shape=shape, space="local", align=64, name=name)

    def _one_tile(
        self, b: Builder, env: dict[Value, Value], where: Value, panels: tuple[Value, Value], stretch: tuple[Value, Value], last: Value,
        down: tuple[Value, Value], across: tuple[Value, Value], direct: bool,
    ) -> None:  # fmt: skip
        """Add a stretch of the sum to the tile of sums at `where`; after the last one, do the rest of the kernel on it. `direct`: the second
        factor is read where it lies, from column `panels[1]` on."""
        self.terms = self._terms(b, stretch, down[0], across[0])
        half = self._half_rows()

        def whole(at: Builder) -> list[Value]:
            sums = self._multiply(at, env, where, *panels, *stretch, direct)
            return [self._keep_or_finish(at, env, sums, where, last, down, across)]

        def few(at: Builder) -> list[Value]:
            self._keep(at, self._multiply(at, env, where, *panels, *stretch, direct, half), where)
            return [last]

        if half:
            (left,) = b.if_(b.op("le", b.sub(down[1], down[0]), b.index(half)), few, whole)
        else:
            (left,) = whole(b)
        b.if_(left, lambda end: self._finish(end, env, where, down, across), lambda end: [])

    def _half_rows(self) -> int:
        """Rows of a tile at the lower edge that has no more than half of them, and is computed as one of half the height; 0: all tiles are alike."""
        return self.matrix.mr // 2

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
        self, b: Builder, env: dict[Value, Value], where: Value, row: Value, panel: Value, start: Value, count: Value, direct: bool, rows: int = 0,
    ) -> list[Value]:  # fmt: skip
        """The sums of a tile up to the end of this stretch, row by row: in this order code generators keep them in registers. `rows`: of so many
        rows; 0: of all."""
        s, zero = self.matrix, b.index(0)
        rows = rows or s.mr
        across = self.index_tile(b, zero, 1, s.nr)
        read = self._reader(b, env, panel) if direct else None
        nothing = b.op("broadcast", b.const(0, self.dtype), shape=(1, s.nr))

        def ahead(inner: Builder) -> list[Value]:
            for number in range(rows):
                for column in range(0, s.nr, LINE // self.dtype.itemsize):
                    inner.multi("prefetch", self.sums, where, inner.index(number), inner.index(column))
            return []

        # What was summed up before is added last: it has come into the nearest cache by then.
        first = b.op("eq", start, zero)
        b.if_(first, lambda inner: [], ahead)

        def step(inner: Builder, k: Value, *sums: Value) -> list[Value]:
            c = read(inner, k) if read else inner.op("load", self.columns, panel, k, across)
            if not read and self.target.vector_bytes == LINE:
                # A step needs whole lines, more than the hardware brings on its own in time.
                for column in range(0, s.nr, LINE // self.dtype.itemsize):
                    inner.multi("prefetch", self.columns, panel, inner.add(k, inner.index(AHEAD)), inner.index(column))
            following: list[Value] = []
            for number, acc in enumerate(sums):
                place = inner.index(number)
                a = inner.like(inner.op("load", self.rows, row, *((k, place) if self.a.along_side else (place, k))), c)
                following.append(inner.fma(a, c, acc) if self.dtype.is_float else inner.add(inner.mul(a, c), acc))
            return following

        low, high = self.terms or (zero, count)
        done = b.for_(low, high, b.index(1), [nothing] * rows, step, name="k")

        def more(inner: Builder) -> list[Value]:
            return [
                inner.add(inner.op("load", self.sums, where, inner.index(number), across), sums) for number, sums in enumerate(done)
            ]

        return list(b.if_(first, lambda inner: done, more))

    # -- results ------------------------------------------------------------------------------------------------

    def _keep_or_finish(
        self, b: Builder, env: dict[Value, Value], sums: Sequence[Value], where: Value, last: Value, down: tuple[Value, Value],
        across: tuple[Value, Value],
    ) -> Value:  # fmt: skip
        """Keep a tile of sums, or do the rest of the kernel on it: from registers where that is short code. Whether the rest is to be done now on what was
        kept."""
        s = self.matrix

        def keep(at: Builder) -> list[Value]:
            self._keep(at, sums, where)
            return [last]

        def finish(at: Builder) -> list[Value]:
            self._finish_registers(at, env, sums, down[0], across[0])
            return [at.const(False, bool_)]

        if not self._is_short():
            return keep(b)[0]
        digit = self._apart(b, across[0], self.b.numbered)[-1]
        full = self._run_fits(b, digit, across[0], s.nr, across[1], self.b)
        full = b.logical_and(full, b.op("le", b.add(down[0], b.index(s.mr)), down[1]))
        return b.if_(b.logical_and(last, full), finish, keep)[0]

    def _rest(self) -> list[Op]:
        """The ops of the kernel that follow its sum."""
        return [op for op in self.found.parallel.regions[0].ops if op is not self.found.reduction]

    def _is_short(self) -> bool:
        """Whether the rest of the kernel can be written out for a whole tile."""
        rest = self._rest()
        return len(self.a.indices) == 1 and self._writes_vectors(rest) and not has_functions(rest) and sum(op.opcode not in ("const", "size", "yield") for op in rest) <= SHORT

    def _keep(self, b: Builder, sums: Sequence[Value], where: Value) -> None:
        columns = self.index_tile(b, b.index(0), 1, self.matrix.nr)
        for number, row in enumerate(sums):
            b.multi("store", self.sums, where, b.index(number), columns, row)

    def _finish_registers(self, b: Builder, env: dict[Value, Value], sums: Sequence[Value], top: Value, left: Value) -> list[Value]:
        """The rest of the kernel on a whole tile of sums."""
        local = dict(env)
        digit = self._bind(b, local, self.b.indices, self.b.numbered, left)
        local[self.b.indices[-1]] = self.index_tile(b, digit, 1, self.matrix.nr)
        for number, row in enumerate(sums):
            own = {**local, self.a.indices[0]: b.add(top, b.index(number)), self.found.reduction.results[0]: row}
            self.ops(b, self._rest(), own, [])
        return []

    def _writes_vectors(self, rest: Sequence[Op]) -> bool:
        """Whether results that are columns side by side lie side by side in memory. Those of a phase do not: a tile of them is an instruction for each."""
        stores = [op for op in rest if op.opcode == "store"]
        return all(address(op, self.found.forms).factor(self.b.indices[-1]) in (ZERO, ONE) for op in stores)

    def _finish(
        self, b: Builder, env: dict[Value, Value], where: Value, down: tuple[Value, Value], across: tuple[Value, Value]
    ) -> list[Value]:
        """The rest of the kernel on one tile of sums, row by row."""
        s = self.matrix
        sums = self._tiles_of(b, where)
        rest = [op for op in self.found.parallel.regions[0].ops if op not in sums]
        written = {op.operands[0] for op in rest if op.opcode == "store"}
        again = not any(op.opcode == "load" and op.operands[0] in written for op in rest)
        end = b.op("min", b.add(across[0], b.index(s.nr)), across[1])
        rows = b.op("min", b.sub(down[1], down[0]), b.index(s.mr))
        # Functions are long chains of ops: several vectors side by side keep a CPU busy.
        widths = (s.nr, self.lanes) if s.nr > self.lanes and has_functions(rest) else (self.lanes,)

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            shift = at.sub(base, across[0])

            def by_row(inner: Builder, row: Value) -> list[Value]:
                local = {**env, **dict(zip(self.b.indices, digits, strict=False))}
                self._bind(inner, local, self.a.indices, self.a.extents, inner.add(down[0], row))

                def some(deep: Builder, place: Value, width: int) -> list[Value]:
                    own = {**local, self.b.indices[-1]: self._several(deep, place, width)}
                    where_in = self._several(deep, deep.add(shift, place), width)
                    own.update((op.result, deep.op("load", self.sums, tile, row, where_in)) for op, tile in sums.items())
                    self.ops(deep, rest, own, [])
                    return []

                self._strips_of(inner, low, high, widths, some, again)
                return []

            at.for_(at.index(0), rows, at.index(1), [], by_row, name="row")

        self._segments(b, self.b.numbered, self.b.limit, across[0], end, segment)
        return []

    def _tiles_of(self, b: Builder, where: Value) -> dict[Op, Value]:
        """Each sum of the kernel, and where its tile is; `where` is that of the first."""
        return {self.found.reduction: where}


def has_functions(ops: Sequence[Op]) -> bool:
    """Whether some op becomes a long chain of arithmetic."""
    return any(OPS[op.opcode].group == "function" for op in ops)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
