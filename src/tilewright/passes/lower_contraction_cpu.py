"""Loop stage -> tile stage for contractions on a CPU: blocks in cache, panels in order, results in SIMD registers.

In: a loop-stage kernel that is a contraction, and its `MatrixSchedule` of family `cpu`. Out: a tile-stage kernel whose blocks are
single threads. A block computes a rectangle of the result. For each stretch of the sum it copies the second factor into panels
of `nr` columns, then, panel by panel of `mr` rows, the first one; whatever the factors are (casts, guards, any strides) is done while
copying, and what lies outside is filled with zeros, so that the innermost loop has no edges:

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
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.lower_loops import Condition, LoopLowering
from tilewright.passes.schedule import Schedule
from tilewright.passes.schedule_matrix import MatrixSchedule

SHORT = 6
"""Ops of an epilogue that is written out for a whole tile of registers; a longer one is a loop over its rows."""
LINE = 64
"""Bytes of a cache line."""


def lower_contraction_cpu(kernel: Kernel, schedule: MatrixSchedule, target: Target) -> Kernel:
    """The tile-stage kernel."""
    found = find_contraction(kernel)
    if found is None:
        raise CompilerBug.at("TW040", f"{kernel.name} is not a contraction", kernel.span)
    return _Lowering(kernel, found, schedule, target).run_contraction()


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
        self.indices = tuple(found.indices[p] for p in positions)
        self.extents = tuple(found.extents[p] for p in positions)
        wanted = [factor.value] if factor.guard is None else [factor.value, factor.guard]
        ops = needed_ops(found, wanted)
        assert ops is not None
        self.ops = ops
        self.along_side = self._walks(found, self.indices[-1])
        self.along_k = not self.along_side and self._walks(found, found.k[k[-1]])

    def _walks(self, found: Contraction, index: Value) -> bool:
        """Whether memory is read one element after the other along this index."""
        loads = [op for op in self.ops if op.opcode == "load"]
        return any(address(op, found.forms).factor(index) == ONE for op in loads)


class _Lowering(LoopLowering):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    def __init__(self, kernel: Kernel, found: Contraction, schedule: MatrixSchedule, target: Target) -> None:
        super().__init__(kernel, Schedule((1,) * len(found.extents)), target)
        self.found, self.matrix = found, schedule
        self.rank = 2
        self.dtype = found.accumulator
        self.lanes = schedule.nr // schedule.vectors
        self.k_order = _order(found, range(len(found.k)), [found.a, found.b])
        self.a = Side(found, found.a, _order(found, found.m, [found.a]), self.k_order)
        self.b = Side(found, found.b, _order(found, found.n, [found.b], stores=True), self.k_order)
        self.k_extents = tuple(found.reduce_extents[p] for p in self.k_order)
        self.k_indices = tuple(found.k[p] for p in self.k_order)

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run_contraction(self) -> Kernel:
        found, s = self.found, self.matrix
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        rows, columns = found.size(found.m), found.size(found.n)
        batch = found.size(found.batch)
        across = maximum(ONE, ceildiv(columns, Size.of(s.n)))
        width = maximum(Size.of(s.nr), ceildiv(ceildiv(columns, across), Size.of(s.nr)) * s.nr)
        # As many blocks as cores at least, as long as each has some panels to work on.
        wanted = ceildiv(Size.of(self.target.multiprocessors), maximum(ONE, across * batch))
        down = maximum(maximum(ONE, ceildiv(rows, Size.of(s.m))), minimum(ceildiv(rows, Size.of(2 * s.mr)), wanted))
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
        by_k = not self.a.along_side
        self.rows = self._local(b, "rows", (s.mr, s.k + self.lanes) if by_k else (s.k, _up(s.mr, self.lanes)))
        # The extra row keeps panels from falling on the same places of the cache.
        self.columns = self._local(b, "columns", (s.n // s.nr, s.k + 1, s.nr))
        tiles = (s.m // s.mr) * (s.n // s.nr)
        known = total.constant
        once = known is not None and known <= s.k
        self.sums = self._local(b, "sums", (1 if once else tiles, s.mr, s.nr))
        zero, one, length = b.index(0), b.index(1), b.index(total)
        panels = b.op("floordiv", b.add(b.sub(across[1], across[0]), b.index(s.nr - 1)), b.index(s.nr))

        def stretch(at: Builder, start: Value) -> list[Value]:
            count = at.op("min", at.sub(length, start), at.index(s.k))
            self._pack_columns(at, env, across, panels, start, count)

            def panel(inner: Builder, top: Value) -> list[Value]:
                self._pack_rows(inner, env, top, down[1], start, count)

                def tile(deep: Builder, number: Value) -> list[Value]:
                    row = deep.op("floordiv", deep.sub(top, down[0]), deep.index(s.mr))
                    place = deep.add(deep.mul(row, panels), number)
                    where = zero if once else deep.select(deep.op("le", length, deep.index(s.k)), zero, place)
                    self._prefetch_rows(deep, env, (deep.add(top, deep.index(s.mr)), down[1]), start, number)
                    sums = self._multiply(deep, where, number, start, count)
                    left = deep.add(across[0], deep.mul(number, deep.index(s.nr)))
                    last = deep.op("ge", deep.add(start, deep.index(s.k)), length)
                    self._keep_or_finish(deep, env, sums, where, last, (top, down[1]), (left, across[1]))
                    return []

                inner.for_(zero, panels, one, [], tile, name="panel")
                return []

            at.for_(down[0], down[1], at.index(s.mr), [], panel, name="top")
            return []

        # A sum of nothing still has its results written.
        b.for_(zero, b.op("max", length, one), b.index(s.k), [], stretch, name="start")

    def _local(self, b: Builder, name: str, shape: tuple[int, ...]) -> Value:
        return b.op("alloc", dtype=self.dtype, shape=shape, space="local", align=64, name=name)

    # -- the innermost loop -------------------------------------------------------------------------------------

    def _multiply(self, b: Builder, where: Value, panel: Value, start: Value, count: Value) -> Value:
        """The sums of a tile up to the end of this stretch."""
        s, shape = self.matrix, (self.matrix.mr, self.matrix.nr)
        zero = b.index(0)
        down, across = self.index_tile(b, zero, 0, s.mr), self.index_tile(b, zero, 1, s.nr)

        def fresh(inner: Builder) -> list[Value]:
            return [inner.op("broadcast", inner.const(0, self.dtype), shape=shape)]

        def ahead(inner: Builder) -> list[Value]:
            for row in range(s.mr):
                for column in range(0, s.nr, LINE // self.dtype.itemsize):
                    inner.multi("prefetch", self.sums, where, inner.index(row), inner.index(column))
            return []

        # What was summed up before is added last: it has come into the nearest cache by then.
        first = b.op("eq", start, zero)
        b.if_(first, lambda inner: [], ahead)
        sums = fresh(b)

        def step(inner: Builder, k: Value, acc: Value) -> list[Value]:
            a = inner.op("load", self.rows, down, k) if not self.a.along_side else inner.op("load", self.rows, k, down)
            c = inner.op("load", self.columns, panel, k, across)
            wide = [inner.op("broadcast", v, shape=shape) for v in (a, c)]
            if self.dtype.is_float:
                return [inner.fma(*wide, acc)]
            return [inner.add(inner.mul(*wide), acc)]

        (done,) = b.for_(zero, count, b.index(1), sums, step, name="k")

        def more(inner: Builder) -> list[Value]:
            return [inner.add(inner.op("load", self.sums, where, down, across), done)]

        return b.if_(first, lambda inner: [done], more)[0]

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
        value = b.cast(local[side.factor.value], self.dtype)
        if guard is None:
            return value
        like = local[guard]
        if dtype_of(like.type).is_bool and like.type != value.type:
            value = b.like(value, like) if not hasattr(value.type, "shape") else value
        return b.select(local[guard], value, b.splat(0, value))

    def _bind(self, b: Builder, env: dict[Value, Value], indices: Sequence[Value], extents: Sequence[Size], number: Value) -> Value:
        """Bind the loop indices that make up `number`; returns the innermost."""
        digits = self._apart(b, number, extents)
        env.update(zip(indices, digits, strict=True))
        return digits[-1]

    def _run_fits(self, b: Builder, inner: Value, number: Value, width: int, end: Value, extents: Sequence[Size]) -> Value:
        """Whether `width` numbers from here on differ in the innermost index only, and lie before the end."""
        inside = b.op("le", b.add(number, b.index(width)), end)
        if len(extents) == 1:
            return inside
        return b.logical_and(inside, b.op("le", b.add(inner, b.index(width)), b.index(extents[-1])))

    def _pack_columns(
        self, b: Builder, env: dict[Value, Value], across: tuple[Value, Value], panels: Value, start: Value, count: Value
    ) -> None:
        s, side = self.matrix, self.b
        zero, one = b.index(0), b.index(1)

        if side.along_k and len(self.k_indices) == 1:
            self._transpose_columns(b, env, across, panels, start, count)
            return

        def one_panel(at: Builder, k: Value, panel: Value, local: dict[Value, Value]) -> None:
            first = at.add(across[0], at.mul(panel, at.index(s.nr)))
            self._run(at, local, side, first, across[1], s.nr, lambda inner, c, v: inner.multi("store", self.columns, panel, k, c, v))

        def by_k(at: Builder, k: Value) -> list[Value]:
            local = dict(env)
            self._bind(at, local, self.k_indices, self.k_extents, at.add(start, k))
            at.for_(zero, panels, one, [], lambda inner, panel: [one_panel(inner, k, panel, dict(local))] and [], name="panel")
            return []

        b.for_(zero, count, one, [], by_k, name="k")

    def _transpose_columns(
        self, b: Builder, env: dict[Value, Value], across: tuple[Value, Value], panels: Value, start: Value, count: Value
    ) -> None:
        """Copy panels of a factor that lies along k: a vector of each column in turn, so that no line of memory is read twice."""
        s, side = self.matrix, self.b
        zero, one = b.index(0), b.index(1)
        whole = b.mul(b.op("floordiv", count, b.index(self.lanes)), b.index(self.lanes))

        def put(at: Builder, panel: Value, k: Value, c: Value, width: int) -> list[Value]:
            number = at.add(at.add(across[0], at.mul(panel, at.index(s.nr))), c)
            place = self.index_tile(at, k, 1, width) if width > 1 else k

            def there(inner: Builder) -> list[Value]:
                local = dict(env)
                self._bind(inner, local, side.indices, side.extents, number)
                local[self.k_indices[0]] = self.index_tile(inner, inner.add(start, k), 1, width) if width > 1 else inner.add(start, k)
                value = self._value(inner, side, local)
                return [self.widen(inner, value, (1, width)) if width > 1 else value]

            def outside(inner: Builder) -> list[Value]:
                nothing = inner.const(0, self.dtype)
                return [inner.op("broadcast", nothing, shape=(1, width)) if width > 1 else nothing]

            (value,) = at.if_(at.op("lt", number, across[1]), there, outside)
            at.multi("store", self.columns, panel, place, c, value)
            return []

        def by_panel(at: Builder, panel: Value) -> list[Value]:
            def steps(inner: Builder, low: Value, high: Value, width: int) -> None:
                inner.for_(
                    low, high, inner.index(width), [],
                    lambda deep, k: deep.for_(zero, deep.index(s.nr), one, [], lambda d, c: put(d, panel, k, c, width), name="c"),
                    name="k",
                )  # fmt: skip

            steps(at, zero, whole, self.lanes)
            steps(at, whole, count, 1)
            return []

        b.for_(zero, panels, one, [], by_panel, name="panel")

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

            (value,) = at.if_(at.op("lt", number, end), there, lambda inner: [inner.const(0, self.dtype)])
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
        b.if_(self._run_fits(b, digit, first, width, end, side.extents), together, singles)

    def _pack_rows(self, b: Builder, env: dict[Value, Value], top: Value, bottom: Value, start: Value, count: Value) -> None:
        s, side = self.matrix, self.a
        zero, one = b.index(0), b.index(1)
        if side.along_side:
            width = _up(s.mr, self.lanes)

            def by_k(at: Builder, k: Value) -> list[Value]:
                local = dict(env)
                self._bind(at, local, self.k_indices, self.k_extents, at.add(start, k))
                self._run(at, local, side, top, bottom, width, lambda inner, c, v: inner.multi("store", self.rows, k, c, v))
                return []

            b.for_(zero, count, one, [], by_k, name="k")
            return

        def by_row(at: Builder, row: Value) -> list[Value]:
            number = at.add(top, row)

            def there(inner: Builder) -> list[Value]:
                local = dict(env)
                self._bind(inner, local, side.indices, side.extents, number)
                self._along_k(inner, local, row, start, count)
                return []

            def outside(inner: Builder) -> list[Value]:
                inner.for_(zero, count, one, [], lambda deep, k: deep.multi("store", self.rows, row, k, deep.const(0, self.dtype)))
                return []

            at.if_(at.op("lt", number, bottom), there, outside)
            return []

        b.for_(zero, b.index(s.mr), one, [], by_row, name="row")

    def _along_k(self, b: Builder, env: dict[Value, Value], row: Value, start: Value, count: Value) -> None:
        """Copy one row of the first factor, vectors where they follow one another along k."""
        side, zero, one = self.a, b.index(0), b.index(1)
        wide = 4 * self.lanes

        def single(at: Builder, k: Value) -> list[Value]:
            local = dict(env)
            self._bind(at, local, self.k_indices, self.k_extents, at.add(start, k))
            at.multi("store", self.rows, row, k, self._value(at, side, local))
            return []

        if not side.along_k or len(self.k_extents) > 1:
            b.for_(zero, count, one, [], single, name="k")
            return

        def vector(at: Builder, k: Value, width: int) -> list[Value]:
            local = dict(env)
            local[self.k_indices[0]] = self.index_tile(at, at.add(start, k), 1, width)
            value = self.widen(at, self._value(at, side, local), (1, width))
            at.multi("store", self.rows, row, self.index_tile(at, k, 1, width), value)
            return []

        def whole(width: int) -> Value:
            return b.mul(b.op("floordiv", count, b.index(width)), b.index(width))

        b.for_(zero, whole(wide), b.index(wide), [], lambda at, k: vector(at, k, wide), name="k")
        b.for_(whole(wide), whole(self.lanes), b.index(self.lanes), [], lambda at, k: vector(at, k, self.lanes), name="k")
        b.for_(whole(self.lanes), count, one, [], single, name="k")

    # -- results ------------------------------------------------------------------------------------------------

    def _keep_or_finish(
        self, b: Builder, env: dict[Value, Value], sums: Value, where: Value, last: Value, down: tuple[Value, Value],
        across: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """Keep a tile of sums for the next stretch, or do the rest of the kernel on it: from registers where that is short code."""
        s, found = self.matrix, self.found
        zero = b.index(0)
        rows, columns = self.index_tile(b, zero, 0, s.mr), self.index_tile(b, zero, 1, s.nr)
        rest = [op for op in found.parallel.regions[0].ops if op is not found.reduction]

        def through_memory(at: Builder) -> list[Value]:
            at.multi("store", self.sums, where, rows, columns, sums)
            at.if_(last, lambda end: self._finish(end, env, where, down, across), lambda end: [])
            return []

        def at_once(at: Builder) -> list[Value]:
            local = dict(env)
            local[self.a.indices[0]] = self.index_tile(at, down[0], 0, s.mr)
            digit = self._bind(at, local, self.b.indices, self.b.extents, across[0])
            local[self.b.indices[-1]] = self.index_tile(at, digit, 1, s.nr)
            local[found.reduction.results[0]] = sums
            self.ops(at, rest, local, [])
            return []

        if len(self.a.indices) > 1 or sum(op.opcode not in ("const", "size", "yield") for op in rest) > SHORT:
            through_memory(b)
            return
        digit = self._apart(b, across[0], self.b.extents)[-1]
        full = self._run_fits(b, digit, across[0], s.nr, across[1], self.b.extents)
        full = b.logical_and(full, b.op("le", b.add(down[0], b.index(s.mr)), down[1]))
        b.if_(b.logical_and(last, full), at_once, through_memory)

    def _finish(
        self, b: Builder, env: dict[Value, Value], where: Value, down: tuple[Value, Value], across: tuple[Value, Value]
    ) -> list[Value]:
        """The rest of the kernel on one tile of sums, row by row."""
        s, found = self.matrix, self.found
        zero, one = b.index(0), b.index(1)
        rest = [op for op in found.parallel.regions[0].ops if op is not found.reduction]

        def by_row(at: Builder, row: Value) -> list[Value]:
            local = dict(env)
            self._bind(at, local, self.a.indices, self.a.extents, at.add(down[0], row))

            def together(inner: Builder) -> list[Value]:
                own = dict(local)
                digit = self._bind(inner, own, self.b.indices, self.b.extents, across[0])
                own[self.b.indices[-1]] = self.index_tile(inner, digit, 1, s.nr)
                own[found.reduction.results[0]] = inner.op("load", self.sums, where, row, self.index_tile(inner, zero, 1, s.nr))
                self.ops(inner, rest, own, [])
                return []

            def single(inner: Builder, c: Value) -> list[Value]:
                own = dict(local)
                self._bind(inner, own, self.b.indices, self.b.extents, inner.add(across[0], c))
                own[found.reduction.results[0]] = inner.op("load", self.sums, where, row, c)
                self.ops(inner, rest, own, [])
                return []

            def singles(inner: Builder) -> list[Value]:
                columns = inner.op("min", inner.sub(across[1], across[0]), inner.index(s.nr))
                inner.for_(zero, columns, one, [], single, name="c")
                return []

            digit = self._apart(at, across[0], self.b.extents)[-1]
            at.if_(self._run_fits(at, digit, across[0], s.nr, across[1], self.b.extents), together, singles)
            return []

        rows = b.op("min", b.sub(down[1], down[0]), b.index(s.mr))
        b.for_(zero, rows, one, [], by_row, name="row")
        return []


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _order(found: Contraction, positions: Sequence[int], factors: Sequence[Factor], stores: bool = False) -> tuple[int, ...]:
    """The positions with the one along which memory is walked one by one put last: stores count first, then loads."""
    indices = found.indices if stores or factors[0] is found.a and positions == found.m else found.k
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
