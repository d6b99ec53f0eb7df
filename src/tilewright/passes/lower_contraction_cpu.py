"""Loop stage -> tile stage for contractions on a CPU: blocks in cache, panels in order, results in SIMD registers.

In: a loop-stage kernel that is a contraction, and its `MatrixSchedule` of family `cpu`. Out: a tile-stage kernel whose blocks are
single threads. A block computes a rectangle of the result. For each stretch of the sum it copies the factor it keeps (the second one,
say) into panels of `nr` columns, then, panel by panel of `mr` rows, the other; whatever the factors are (casts, guards, any strides)
is done while copying, and what lies outside is filled with zeros, so that the innermost loop has no edges:

    for %k { %a = load rows[0..mr, k]; %b = load columns[panel, k, 0..nr]; %acc = fma %a, %b, %acc }

Its tile of results is kept in local memory between stretches; after the last one the rest of the kernel runs on it row by row.
Every result is summed in the order of k, in stretches whose length depends on the schedule only: not on the number of threads.
Several loop indices on one side are walked as one and taken apart again, the innermost fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import address
from tilewright.analysis.contraction import Contraction, Factor, find_contraction
from tilewright.analysis.ranges import surely_not_negative
from tilewright.base.dtypes import DType, i64
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import dtype_of
from tilewright.passes.lower_loops import Condition, LoopLowering, join, shape_of
from tilewright.passes.schedule import Schedule
from tilewright.passes.schedule_matrix import MatrixSchedule

SHORT = 6
"""Ops of an epilogue that is written out for a whole tile of registers; a longer one is a loop over its rows."""
AHEAD = 8
"""Steps of the innermost loop from when a row of columns is fetched to its use."""
LINE = 64
"""Bytes of a cache line."""


def lower_contraction_cpu(kernel: Kernel, schedule: MatrixSchedule, target: Target) -> Kernel:
    """The tile-stage kernel."""
    found = find_contraction(kernel)
    if found is None:
        raise CompilerBug.at("TW040", f"{kernel.name} is not a contraction", kernel.span)
    return PanelLowering(kernel, found, schedule, target).run_contraction()


def needed_ops(found: Contraction, values: Sequence[Value]) -> tuple[Op, ...] | None:
    """The ops of the nest that compute these values, in order; None when one of them has a region of its own."""
    everything = list(walk(found.parallel.regions[0]))
    made = {result: op for op in everything for result in op.results}
    needed: set[int] = set()
    waiting = list(values)
    while waiting:
        op = made.get(waiting.pop())
        if op is None or id(op) in needed:
            continue
        if op.regions:
            return None
        needed.add(id(op))
        waiting += op.operands
    return tuple(op for op in everything if id(op) in needed)


class Side:
    """One factor and the result indices it varies along: `m` for the first, `n` for the second."""

    def __init__(self, found: Contraction, factor: Factor, positions: Sequence[int], k: Sequence[int]) -> None:
        self.factor, self.positions = factor, positions
        self.dtype = found.accumulator
        """Of the copies."""
        self.indices = tuple(found.indices[p] for p in positions)
        self.extents = tuple(found.extents[p] for p in positions)
        wanted = [factor.value] if factor.guard is None else [factor.value, factor.guard]
        ops = needed_ops(found, wanted)
        assert ops is not None
        self.ops = ops
        self.limit = self.extents[-1]
        self.numbered = self.extents
        """What numbers along this side are made of; of the innermost only those below `limit` are results."""
        self.copied, self.copied_extents = self.indices, self.extents
        """The indices a copy is made along."""
        self.idle: tuple[Value, ...] = ()
        """Indices that are zero while copying."""
        self._run_rows_together(found)
        self.along_side = self.walks(found, self.indices[-1])
        self.along_k = not self.along_side and self.walks(found, found.k[k[-1]])

    def _run_rows_together(self, found: Contraction) -> None:
        """Where rows of an array follow one another, with a gap at the end of each (`x[w * i + j]`), number the gaps as well: copies are
        then made without regard to where rows end."""
        if self.factor.load is None or self.factor.guard is not None or len(self.indices) < 2:
            return
        outer, inner = self.indices[-2:]
        using = [form for form in found.access(self.factor) if form.factor(outer) != ZERO or form.factor(inner) != ZERO]
        if len(using) != 1 or using[0].factor(inner) != ONE or using[0].factor(outer) == ZERO:
            return
        width, length = using[0].factor(outer), self.extents[-1]
        if width == length or not surely_not_negative(width - length + 1):
            return
        # Without the sum's steps there is no gap, and nothing is copied.
        width = maximum(width, length)
        self.numbered = (*self.extents[:-1], width)
        self.copied, self.copied_extents = (*self.indices[:-2], inner), (*self.extents[:-2], self.extents[-2] * width)
        self.idle = (outer,)

    def walks(self, found: Contraction, index: Value) -> bool:
        """Whether memory is read one element after the other along this index."""
        loads = [op for op in self.ops if op.opcode == "load"]
        return any(address(op, found.forms).factor(index) == ONE for op in loads)


class PanelLowering(LoopLowering):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    def __init__(self, kernel: Kernel, found: Contraction, schedule: MatrixSchedule, target: Target) -> None:
        super().__init__(kernel, Schedule((1,) * len(found.extents)), target)
        self.found, self.matrix = found, schedule
        self.rank = 2
        self.dtype = found.accumulator
        self.step = 1
        """Stretches of the sum are multiples of this."""
        self.lanes = schedule.nr // schedule.vectors
        self.k_order = _order(found, range(len(found.k)), [found.a, found.b])
        self.a = Side(found, found.a, _order(found, found.m, [found.a]), self.k_order)
        self.b = Side(found, found.b, _order(found, found.n, [found.b], stores=True), self.k_order)
        self.k_extents = tuple(found.reduce_extents[p] for p in self.k_order)
        self.k_indices = tuple(found.k[p] for p in self.k_order)
        self.tiles = 1
        """Tiles of sums of one product that a block keeps."""
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
            # As many blocks side by side as keep all cores busy to the end, as long as each has some panels.
            even = ceildiv(across, Size.of(self.target.multiprocessors)) * self.target.multiprocessors
            across = maximum(across, minimum(even, ceildiv(columns, Size.of(2 * s.nr))))
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

    def _apart(self, b: Builder, number: Value, extents: Sequence[Size]) -> list[Value]:
        """The digits of a number, the last fastest."""
        digits: list[Value] = []
        for extent in reversed(extents[1:]):
            quotient = b.op("floordiv", number, b.index(extent))
            digits.insert(0, b.sub(number, b.mul(quotient, b.index(extent))))
            number = quotient
        return [number, *digits]

    def _block(self, b: Builder, env: dict[Value, Value], down: tuple[Value, Value], across: tuple[Value, Value]) -> None:
        s, total = self.matrix, product(self.k_extents)
        whole_a = s.keep == "a"
        known = total.constant
        once = known is not None and known <= s.k
        self._allocate(b, whole_a)
        self.tiles = 1 if once else (s.m // s.mr) * (s.n // s.nr)
        self.sums = self._local(b, "sums", (s.beside * self.tiles, s.mr, s.nr), self.dtype)
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

                inner.for_(zero, inside, one, [], one_tile, name="panel")
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

    def _allocate(self, b: Builder, whole_a: bool) -> None:
        """Room for the copies of both factors."""
        s = self.matrix
        one_panel = (s.mr, s.k + self.lanes) if not self.a.along_side else (s.k, _up(s.mr, self.lanes))
        self.rows = self._local(b, "rows", (s.m // s.mr if whole_a else 1, *one_panel), self.a.dtype)
        # The extra row keeps panels from falling on the same places of the cache.
        self.columns = self._local(b, "columns", (1 if whole_a else s.n // s.nr, s.k + 1, s.nr), self.b.dtype)
        if self.direct:
            self.places = self._local(b, "places", (len(self.direct), s.k), i64)

    def _local(self, b: Builder, name: str, shape: tuple[int, ...], dtype: DType) -> Value:
        return b.op("alloc", dtype=dtype, shape=shape, space="local", align=64, name=name)

    def _one_tile(
        self, b: Builder, env: dict[Value, Value], where: Value, panels: tuple[Value, Value], stretch: tuple[Value, Value], last: Value,
        down: tuple[Value, Value], across: tuple[Value, Value], direct: bool,
    ) -> None:  # fmt: skip
        """Add a stretch of the sum to the tile of sums at `where`; after the last one, do the rest of the kernel on it. `direct`: the second
        factor is read where it lies, from column `panels[1]` on."""
        sums = self._multiply(b, env, where, *panels, *stretch, direct)
        self._keep_or_finish(b, env, sums, where, last, down, across)

    # -- the innermost loop -------------------------------------------------------------------------------------

    def _multiply(
        self, b: Builder, env: dict[Value, Value], where: Value, row: Value, panel: Value, start: Value, count: Value, direct: bool
    ) -> list[Value]:
        """The sums of a tile up to the end of this stretch, row by row: in this order code generators keep them in registers."""
        s, zero = self.matrix, b.index(0)
        across = self.index_tile(b, zero, 1, s.nr)
        read = self._reader(b, env, panel) if direct else None
        nothing = b.op("broadcast", b.const(0, self.dtype), shape=(1, s.nr))

        def ahead(inner: Builder) -> list[Value]:
            for number in range(s.mr):
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

        done = b.for_(zero, count, b.index(1), [nothing] * s.mr, step, name="k")

        def more(inner: Builder) -> list[Value]:
            return [
                inner.add(inner.op("load", self.sums, where, inner.index(number), across), sums) for number, sums in enumerate(done)
            ]

        return list(b.if_(first, lambda inner: done, more))

    # -- columns read where they lie ------------------------------------------------------------------------------

    def _direct(self) -> tuple[int, ...]:
        """A factor that is copied panel by panel, each for a few tiles only, needs no copy where its columns lie side by side as they are."""
        side, load = self.b, self.b.factor.load
        if self.matrix.keep != "a" or load is None or side.factor.guard is not None or not side.along_side:
            return ()
        forms = self.found.access(side.factor)
        own = [form.factor(side.copied[-1]) for form in forms]
        indices = {*self.found.indices, *self.k_indices}
        if dtype_of(load.operands[0].type) is not self.dtype or sorted(map(str, own)) != [*["0"] * (len(own) - 1), "1"]:
            return ()
        if not all(value in indices for form in forms for value in form.values):
            return ()
        return tuple(p for p, form in enumerate(forms) if any(k in form.values for k in self.k_indices))

    def _load_indices(self, b: Builder, env: dict[Value, Value], k: dict[Value, Value], columns: dict[Value, Value]) -> list[Value]:
        load = self.b.factor.load
        assert load is not None
        zero = b.index(0)
        local = {**env, **dict.fromkeys((*self.k_indices, *self.b.indices), zero), **k, **columns}
        self.ops(b, [op for op in self.b.ops if op is not load], local, [])
        return [local[v] for v in load.operands[1:]]

    def _note_places(self, b: Builder, env: dict[Value, Value], start: Value, count: Value) -> None:
        """Write down where each step of the sum is read, as seen from column 0."""

        def each(at: Builder, k: Value, found: dict[Value, Value]) -> None:
            indices = self._load_indices(at, env, found, {})
            for number, position in enumerate(self.direct):
                at.multi("store", self.places, at.index(number), k, indices[position])

        self._k_loop(b, start, count, each)

    def _in_one_run(self, b: Builder, left: Value, end: Value) -> Value:
        """Whether the panel from column `left` on lies side by side."""
        side, nr = self.b, b.index(self.matrix.nr)
        inside = b.op("le", b.add(left, nr), end)
        digit = self._apart(b, left, side.copied_extents)[-1]
        return b.logical_and(inside, b.op("le", b.add(digit, nr), b.index(side.copied_extents[-1])))

    def _reader(self, b: Builder, env: dict[Value, Value], left: Value) -> Callable[[Builder, Value], Value]:
        """`read(builder, k)` gives a row of the panel from column `left` on."""
        side, load = self.b, self.b.factor.load
        assert load is not None
        digits = dict(zip(side.copied, self._apart(b, left, side.copied_extents), strict=True))
        here, origin = self._load_indices(b, env, {}, digits), self._load_indices(b, env, {}, {})
        along = next(p for p, form in enumerate(self.found.access(side.factor)) if form.factor(side.copied[-1]) == ONE)

        def read(at: Builder, k: Value) -> Value:
            indices: list[Value] = []
            for position, (index, first) in enumerate(zip(here, origin, strict=True)):
                if position in self.direct:
                    place = at.op("load", self.places, at.index(self.direct.index(position)), k)
                    index = at.add(at.sub(index, first), place)
                indices.append(index)
            indices[along] = self.index_tile(at, indices[along], 1, self.matrix.nr)
            return at.op("load", load.operands[0], *indices)

        return read

    def _prefetch_rows(
        self, b: Builder, env: dict[Value, Value], rows: tuple[Value, Value], start: Value, number: Value
    ) -> None:
        """A share of the rows of the next panel, so that copying them does not wait."""
        s, load = self.matrix, self.a.factor.load
        if load is None or not self.a.along_k or len(self.k_indices) > 1:
            return
        share = max(1, s.k * s.nr // s.n)
        line = LINE // dtype_of(load.operands[0].type).itemsize
        first = b.add(start, b.mul(number, b.index(share)))

        def by_row(at: Builder, row: Value) -> list[Value]:
            for place in range(0, share, line):
                local = dict(env)
                self._bind(at, local, self.a.indices, self.a.extents, row)
                local[self.k_indices[0]] = at.add(first, at.index(place))
                self.ops(at, [op for op in self.a.ops if op is not load], local, [])
                at.multi("prefetch", *(local[v] for v in load.operands))
            return []

        b.for_(rows[0], b.op("min", b.add(rows[0], b.index(s.mr)), rows[1]), b.index(1), [], by_row, name="row")

    # -- copying factors ----------------------------------------------------------------------------------------

    def _value(self, b: Builder, side: Side, env: dict[Value, Value]) -> Value:
        """The factor at the indices in `env`; zero where its guard does not hold."""
        local = dict(env)
        conditions: list[Condition] = []
        guard = side.factor.guard
        if guard is not None:
            before = needed_ops(self.found, [guard])
            assert before is not None
            self.ops(b, before, local, [])
            conditions.append(Condition(local[guard], edge=False))
        self.ops(b, [op for op in side.ops if op.results[0] not in local], local, conditions)
        value = b.cast(local[side.factor.value], side.dtype)
        if guard is None:
            return value
        shape = join(shape_of(value), shape_of(local[guard]))
        value = self.widen(b, value, shape)
        return b.select(self.widen(b, local[guard], shape), value, b.splat(0, value))

    def _bind(self, b: Builder, env: dict[Value, Value], indices: Sequence[Value], extents: Sequence[Size], number: Value) -> Value:
        """Bind the loop indices that make up `number`; returns the innermost."""
        digits = self._apart(b, number, extents)
        env.update(zip(indices, digits, strict=True))
        return digits[-1]

    def _run_fits(self, b: Builder, inner: Value, number: Value, width: int, end: Value, side: Side) -> Value:
        """Whether `width` numbers from here on differ in the innermost index only, and lie before the end."""
        inside = b.op("le", b.add(number, b.index(width)), end)
        if len(side.extents) == 1:
            return inside
        return b.logical_and(inside, b.op("le", b.add(inner, b.index(width)), b.index(side.limit)))

    def _pack_columns(
        self, b: Builder, env: dict[Value, Value], across: tuple[Value, Value], number: Value, panel: Value, start: Value, count: Value
    ) -> None:
        """Copy columns of panel `number` to place `panel`."""
        s, side = self.matrix, self.b
        zero, one = b.index(0), b.index(1)
        first = b.add(across[0], b.mul(number, b.index(s.nr)))
        end = b.op("min", b.add(first, b.index(s.nr)), across[1])
        if side.along_k and len(self.k_indices) == 1:
            self._transpose_columns(b, env, first, end, panel, start, count)
            return

        def blank(inner: Builder, k: Value) -> list[Value]:
            nothing = inner.op("broadcast", inner.const(0, side.dtype), shape=(1, s.nr))
            return list(inner.multi("store", self.columns, panel, k, self.index_tile(inner, zero, 1, s.nr), nothing))

        partly = b.op("lt", b.sub(end, first), b.index(s.nr))
        b.if_(partly, lambda inner: inner.for_(zero, count, one, [], blank, name="k"), lambda inner: [])

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            local = {**env, **dict(zip(side.copied, digits, strict=False)), **dict.fromkeys(side.idle, zero)}
            shift = at.sub(base, first)

            def some(inner: Builder, place: Value, width: int) -> list[Value]:
                def each(deep: Builder, k: Value, found: dict[Value, Value]) -> None:
                    own = {**local, **found, side.copied[-1]: self._several(deep, place, width)}
                    value = self._value(deep, side, own)
                    value = self.widen(deep, value, (1, width)) if width > 1 else value
                    deep.multi("store", self.columns, panel, k, self._several(deep, deep.add(shift, place), width), value)

                self._k_loop(inner, start, count, each)
                return []

            self._strips_of(at, low, high, (s.nr, self.lanes), some, True)

        self._segments(b, side.copied_extents, side.copied_extents[-1], first, end, segment)

    def _several(self, b: Builder, first: Value, width: int) -> Value:
        return self.index_tile(b, first, 1, width) if width > 1 else first

    def _k_loop(
        self, b: Builder, start: Value, count: Value, body: Callable[[Builder, Value, dict[Value, Value]], None]
    ) -> None:
        """`count` steps of the sum from `start` on. The indices that make up a step are counted up, not taken apart every time."""
        zero, one = b.index(0), b.index(1)
        if len(self.k_indices) == 1:

            def plain(inner: Builder, k: Value) -> list[Value]:
                body(inner, k, {self.k_indices[0]: inner.add(start, k)})
                return []

            b.for_(zero, count, one, [], plain, name="k")
            return

        def step(inner: Builder, k: Value, *digits: Value) -> list[Value]:
            body(inner, k, dict(zip(self.k_indices, digits, strict=True)))
            return self._count_up(inner, digits)

        b.for_(zero, count, one, self._apart(b, start, self.k_extents), step, name="k")

    def _count_up(self, b: Builder, digits: Sequence[Value]) -> list[Value]:
        """The indices of the next step of the sum."""
        following: list[Value] = []
        zero, one = b.index(0), b.index(1)
        carry = one
        for position in reversed(range(len(digits))):
            raised = b.add(digits[position], carry)
            full = b.op("eq", raised, b.index(self.k_extents[position]))
            following.insert(0, b.select(full, zero, raised) if position else raised)
            carry = b.select(full, one, zero)
        return following

    def _segments(
        self, b: Builder, extents: Sequence[Size], limit: Size, low: Value, high: Value,
        body: Callable[[Builder, Sequence[Value], Value, Value, Value], None],
    ) -> None:  # fmt: skip
        """Cut the numbers low..high where their outer digits change: `body(builder, outer digits, first, end, base)` for each piece, whose
        numbers are `base` and the innermost index, below `limit`."""
        if len(extents) == 1:
            body(b, (), low, high, b.index(0))
            return
        row = b.index(extents[-1])

        def piece(inner: Builder, outer: Value) -> list[Value]:
            base = inner.mul(outer, row)
            first, end = inner.op("max", inner.sub(low, base), inner.index(0)), inner.op("min", inner.sub(high, base), inner.index(limit))
            body(inner, self._apart(inner, outer, extents[:-1]), first, end, base)
            return []

        last = b.op("floordiv", b.sub(b.add(high, row), b.index(1)), row)
        b.for_(b.op("floordiv", low, row), last, b.index(1), [], piece, name="outer")

    def _strips_of(
        self, b: Builder, low: Value, high: Value, widths: Sequence[int], some: Callable[[Builder, Value, int], Sequence[Value]],
        again: bool,
    ) -> None:  # fmt: skip
        """Walk low..high in vectors. With `again`, what is left over is done by a vector that ends there and repeats a few elements."""
        one, lanes = b.index(1), b.index(widths[-1])

        def vectors(at: Builder) -> list[Value]:
            begin = low
            for width in widths[:-1]:
                middle = at.add(begin, at.mul(at.op("floordiv", at.sub(high, begin), at.index(width)), at.index(width)))
                at.for_(begin, middle, at.index(width), [], lambda inner, k, w=width: some(inner, k, w), name="c")
                begin = middle
            if again:
                at.for_(begin, high, lanes, [], lambda inner, k: some(inner, inner.op("min", k, inner.sub(high, lanes)), widths[-1]), name="c")
                return []
            middle = at.add(begin, at.mul(at.op("floordiv", at.sub(high, begin), lanes), lanes))
            at.for_(begin, middle, lanes, [], lambda inner, k: some(inner, k, widths[-1]), name="c")
            at.for_(middle, high, one, [], lambda inner, k: some(inner, k, 1), name="c")
            return []

        def singles(at: Builder) -> list[Value]:
            at.for_(low, high, one, [], lambda inner, k: some(inner, k, 1), name="c")
            return []

        if again:
            b.if_(b.op("ge", b.sub(high, low), lanes), vectors, singles)
        else:
            vectors(b)

    def _transpose_columns(
        self, b: Builder, env: dict[Value, Value], first: Value, end: Value, panel: Value, start: Value, count: Value
    ) -> None:
        """Copy a panel of a factor that lies along k: a vector of each column in turn, so that no line of memory is read twice."""
        s, side = self.matrix, self.b
        zero, one = b.index(0), b.index(1)
        whole = b.mul(b.op("floordiv", count, b.index(self.lanes)), b.index(self.lanes))

        def put(at: Builder, k: Value, c: Value, width: int) -> list[Value]:
            number = at.add(first, c)

            def there(inner: Builder) -> list[Value]:
                local = dict(env)
                self._bind(inner, local, side.indices, side.extents, number)
                local[self.k_indices[0]] = self._several(inner, inner.add(start, k), width)
                value = self._value(inner, side, local)
                return [self.widen(inner, value, (1, width)) if width > 1 else value]

            def outside(inner: Builder) -> list[Value]:
                nothing = inner.const(0, side.dtype)
                return [inner.op("broadcast", nothing, shape=(1, width)) if width > 1 else nothing]

            (value,) = at.if_(at.op("lt", number, end), there, outside)
            at.multi("store", self.columns, panel, self._several(at, k, width), c, value)
            return []

        def steps(low: Value, high: Value, width: int) -> None:
            b.for_(
                low, high, b.index(width), [],
                lambda at, k: at.for_(zero, at.index(s.nr), one, [], lambda inner, c: put(inner, k, c, width), name="c"),
                name="k",
            )  # fmt: skip

        steps(zero, whole, self.lanes)
        steps(whole, count, 1)

    def _run(
        self, b: Builder, env: dict[Value, Value], side: Side, first: Value, end: Value, width: int,
        put: Callable[[Builder, Value, Value], object],
    ) -> None:  # fmt: skip
        """Copy `width` neighbours along a side, zeros from `end` on: as one vector where they lie side by side."""
        zero, one = b.index(0), b.index(1)

        def single(at: Builder, c: Value) -> list[Value]:
            number = at.add(first, c)

            def there(inner: Builder) -> list[Value]:
                local = dict(env)
                self._bind(inner, local, side.indices, side.extents, number)
                return [self._value(inner, side, local)]

            (value,) = at.if_(at.op("lt", number, end), there, lambda inner: [inner.const(0, side.dtype)])
            put(at, c, value)
            return []

        def singles(at: Builder) -> list[Value]:
            at.for_(zero, at.index(width), one, [], single, name="c")
            return []

        def together(at: Builder) -> list[Value]:
            local = dict(env)
            digit = self._bind(at, local, side.indices, side.extents, first)
            local[side.indices[-1]] = self.index_tile(at, digit, 1, width)
            value = self.widen(at, self._value(at, side, local), (1, width))
            put(at, self.index_tile(at, zero, 1, width), value)
            return []

        digit = self._apart(b, first, side.extents)[-1]
        b.if_(self._run_fits(b, digit, first, width, end, side), together, singles)

    def _pack_rows(
        self, b: Builder, env: dict[Value, Value], panel: Value, top: Value, bottom: Value, start: Value, count: Value
    ) -> None:
        """Copy `mr` rows from `top` on to place `panel`."""
        s, side = self.matrix, self.a
        zero, one = b.index(0), b.index(1)
        if side.along_side:
            width = _up(s.mr, self.lanes)

            def by_k(at: Builder, k: Value) -> list[Value]:
                local = dict(env)
                self._bind(at, local, self.k_indices, self.k_extents, at.add(start, k))
                self._run(at, local, side, top, bottom, width, lambda inner, c, v: inner.multi("store", self.rows, panel, k, c, v))
                return []

            b.for_(zero, count, one, [], by_k, name="k")
            return

        def by_row(at: Builder, row: Value) -> list[Value]:
            number = at.add(top, row)

            def there(inner: Builder) -> list[Value]:
                local = dict(env)
                self._bind(inner, local, side.indices, side.extents, number)
                self._along_k(inner, local, panel, row, start, count)
                return []

            def outside(inner: Builder) -> list[Value]:
                inner.for_(zero, count, one, [], lambda deep, k: deep.multi("store", self.rows, panel, row, k, deep.const(0, side.dtype)))
                return []

            at.if_(at.op("lt", number, bottom), there, outside)
            return []

        b.for_(zero, b.index(s.mr), one, [], by_row, name="row")

    def _along_k(self, b: Builder, env: dict[Value, Value], panel: Value, row: Value, start: Value, count: Value) -> None:
        """Copy one row of the first factor, vectors where they follow one another along k."""
        side = self.a

        def each(at: Builder, k: Value, found: dict[Value, Value]) -> None:
            at.multi("store", self.rows, panel, row, k, self._value(at, side, {**env, **found}))

        def one_by_one(at: Builder) -> list[Value]:
            self._k_loop(at, start, count, each)
            return []

        if not side.along_k:
            one_by_one(b)
            return

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            local = {**env, **dict(zip(self.k_indices, digits, strict=False))}
            shift = at.sub(base, start)

            def some(inner: Builder, place: Value, width: int) -> list[Value]:
                own = {**local, self.k_indices[-1]: self._several(inner, place, width)}
                value = self._value(inner, side, own)
                value = self.widen(inner, value, (1, width)) if width > 1 else value
                return list(inner.multi("store", self.rows, panel, row, self._several(inner, inner.add(shift, place), width), value))

            self._strips_of(at, low, high, (4 * self.lanes, self.lanes), some, True)

        def by_vectors(at: Builder) -> list[Value]:
            self._segments(at, self.k_extents, self.k_extents[-1], start, at.add(start, count), segment)
            return []

        if len(self.k_extents) == 1:
            by_vectors(b)
        else:
            b.if_(b.op("ge", b.index(self.k_extents[-1]), b.index(self.lanes)), by_vectors, one_by_one)

    # -- results ------------------------------------------------------------------------------------------------

    def _keep_or_finish(
        self, b: Builder, env: dict[Value, Value], sums: Sequence[Value], where: Value, last: Value, down: tuple[Value, Value],
        across: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """Keep a tile of sums for the next stretch, or do the rest of the kernel on it: from registers where that is short code."""
        s, found = self.matrix, self.found
        zero = b.index(0)
        columns = self.index_tile(b, zero, 1, s.nr)
        rest = [op for op in found.parallel.regions[0].ops if op is not found.reduction]

        def through_memory(at: Builder) -> list[Value]:
            for number, row in enumerate(sums):
                at.multi("store", self.sums, where, at.index(number), columns, row)
            at.if_(last, lambda end: self._finish(end, env, where, down, across), lambda end: [])
            return []

        def at_once(at: Builder) -> list[Value]:
            local = dict(env)
            digit = self._bind(at, local, self.b.indices, self.b.numbered, across[0])
            local[self.b.indices[-1]] = self.index_tile(at, digit, 1, s.nr)
            for number, row in enumerate(sums):
                own = {**local, self.a.indices[0]: at.add(down[0], at.index(number)), found.reduction.results[0]: row}
                self.ops(at, rest, own, [])
            return []

        if len(self.a.indices) > 1 or sum(op.opcode not in ("const", "size", "yield") for op in rest) > SHORT:
            through_memory(b)
            return
        digit = self._apart(b, across[0], self.b.numbered)[-1]
        full = self._run_fits(b, digit, across[0], s.nr, across[1], self.b)
        full = b.logical_and(full, b.op("le", b.add(down[0], b.index(s.mr)), down[1]))
        b.if_(b.logical_and(last, full), at_once, through_memory)

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

                self._strips_of(inner, low, high, (self.lanes,), some, again)
                return []

            at.for_(at.index(0), rows, at.index(1), [], by_row, name="row")

        self._segments(b, self.b.numbered, self.b.limit, across[0], end, segment)
        return []


    def _tiles_of(self, b: Builder, where: Value) -> dict[Op, Value]:
        """Each sum of the kernel, and where its tile is; `where` is that of the first."""
        return {self.found.reduction: where}


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _order(found: Contraction, positions: Sequence[int], factors: Sequence[Factor], stores: bool = False) -> tuple[int, ...]:
    """The positions with the one along which memory is walked one by one put last: stores count first, then loads."""
    indices = found.k if len(factors) == 2 else found.indices
    accesses: list[Op] = []
    if stores:
        accesses += [op for op in found.parallel.regions[0].ops if op.opcode == "store"]
    accesses += [op for factor in factors for op in needed_ops(found, [factor.value]) or () if op.opcode == "load"]
    for op in accesses:
        form = address(op, found.forms)
        for p in positions:
            if form.factor(indices[p]) == ONE:
                return (*(q for q in positions if q != p), p)
    return tuple(positions)
