"""Loop stage -> tile stage for attention (`analysis/attention.py`): one pass over the keys, with a running maximum.

In: a loop-stage kernel that is attention, and its schedule (`family=attention`). Out: a tile-stage kernel. A block computes
`m` rows; it walks the keys in steps of `n`, from the last to the first, and carries the maximum so far, and the sums of
exponentials and of weighted values below it. When the maximum grows, both sums are scaled down.

    for %t = program_id, tiles, blocks {
      %q = load Q[rows.., :]
      %max, %sum, %out = for %step = 0, steps, 1 {role = "sum"} (%m, %l, %o) {
        %k = load K; %s = dot %q, %k, 0; %f = … the score …; %new = max %m, row maximum of %f
        %p = exp(%f - %new); %a = exp(%m - %new)
        yield %new, %l * %a + row sum of %p, dot(cast %p, load V, %o * %a)
      }
      … what the kernel does to maximum and sums …
    }

Steps that need a mask (the last keys, and those a limit `j < i + c` cuts through) come first and are a loop of their own; those
wholly beyond the limit are left out. A row whose scores are all -inf has no maximum to subtract: 0 is subtracted instead, and
at the end such a row gets what the text gives: sums of 0 where it leaves those terms out or subtracts 0 as well (`empty_rows`
makes it so where it masks scores), else NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.dtypes import f32, i64, u32
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE, Size, ceildiv, minimum
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import dtype_of
from tilewright.passes.common.nest_shapes import Condition, shape_of
from tilewright.passes.schedules.attention import GpuAttention, WgmmaAttention
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.lower_loops import LoopLowering


def lower_attention(kernel: Kernel, schedule: GpuAttention, target: Target) -> Kernel:
    """The tile-stage kernel."""
    found = find_attention(kernel)
    if found is None:
        raise CompilerBug.at("TW040", f"{kernel.name} is not attention", kernel.span)
    return _AttentionLowering(kernel, found, schedule, target).run_attention()


class _AttentionLowering(LoopLowering):
    """Bodies are lowered as for loops, over tiles of rank 2: rows, and keys or columns."""

    def __init__(self, kernel: Kernel, found: Attention, schedule: GpuAttention, target: Target) -> None:
        super().__init__(kernel, Schedule((1,) * len(found.extents)), target)
        self.found, self.matrix = found, schedule
        self.rank = 2
        self.everything = list(walk(found.parallel.regions[0]))
        self.made = {result: op for op in self.everything for result in op.results}
        self.i = found.indices[found.row]
        self.rows = found.extents[found.row]

    def run_attention(self) -> Kernel:
        found, schedule = self.found, self.matrix
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        down = ceildiv(self.rows, schedule.m)
        batch = ONE
        for position in found.batch:
            batch = batch * found.extents[position]
        tiles = batch * down
        at_once, dynamic = (schedule.blocks, schedule.dynamic) if isinstance(schedule, WgmmaAttention) else (1, False)
        blocks = minimum(Size.of(self.target.multiprocessors * at_once), tiles) if schedule.persistent else tiles
        first = b.op("program_id", axis=0)

        def one(inner: Builder, number: Value) -> list[Value]:
            self._tile(inner, number, down, batch, dict(env))
            return []

        if schedule.persistent:
            b.for_(first, b.index(tiles), b.index(blocks), [], one, name="tile", role="tiles", dynamic=dynamic)
        else:
            one(b, first)
        attrs: dict[str, Attr] = {**self.kernel.attrs, "schedule": schedule.describe()}
        return replace(self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=(blocks,), attrs=MappingProxyType(attrs))

    # -- where a tile lies --------------------------------------------------------------------------------------

    def _place(self, b: Builder, number: Value, down: Size, batch: Size, env: dict[Value, Value]) -> Value:
        """Bind the batch indices of tile `number`, and give its first row. Where rows have more keys the further down they are,
        the longest come first, of `raster` batch points at a time, whose keys stay in the L2 cache."""

        def size(value: Size | int) -> Value:
            return b.cast(b.index(Size.of(value)), u32)

        def divide(value: Value, by: Value) -> tuple[Value, Value]:
            quotient = b.op("floordiv", value, by)
            return quotient, b.sub(value, b.mul(quotient, by))

        found, rest = self.found, b.cast(number, u32)
        if found.reach is None:
            outer, row = divide(rest, size(down))
        else:
            group, inside = divide(rest, size(down * self.matrix.raster))
            top = b.mul(group, size(self.matrix.raster))
            height = b.op("min", b.sub(size(batch), top), size(self.matrix.raster))
            from_last, low = divide(inside, height)
            row = b.sub(size(down - 1), from_last)
            outer = b.add(top, low)
        for position in reversed(found.batch[1:]):
            outer, digit = divide(outer, size(found.extents[position]))
            env[found.indices[position]] = b.cast(digit, i64)
        if found.batch:
            env[found.indices[found.batch[0]]] = b.cast(outer, i64)
        return b.mul(b.cast(row, i64), b.index(self.matrix.m))

    def _count(self, b: Builder, env: dict[Value, Value]) -> Value:
        """How many keys there are, where a number in memory says it."""
        assert self.found.count is not None
        self._evaluate(b, [self.found.count], env, [])
        return env[self.found.count]

    def _keys_edge(self, b: Builder, index: Value, env: dict[Value, Value]) -> list[Condition]:
        """That a key is one."""
        if self.found.count is None:
            return self._edge(b, index, self.found.keys, self.matrix.n)
        return [Condition(b.op("lt", index, b.like(self._count(b, env), index)), edge=True)]

    def _edge(self, b: Builder, index: Value, size: Size, extent: int) -> list[Condition]:
        """That an index is inside, where a tile of that extent may not be."""
        if size.divisible_by(extent, self.kernel.facts):
            return []
        return [Condition(b.op("lt", index, b.like(b.index(size), index)), edge=True)]

    def _steps(self, b: Builder, row: Value, env: dict[Value, Value]) -> tuple[Value, Value | None]:
        """How many steps there are, and how many of them need a mask; None where none does."""
        found, n = self.found, self.matrix.n
        if found.count is not None:
            count = self._count(b, env)
            steps = b.op("floordiv", b.add(count, b.index(n - 1)), b.index(n))
            return steps, b.sub(steps, b.op("floordiv", count, b.index(n)))
        keys = b.index(found.keys)
        if found.reach is None:
            steps = b.index(ceildiv(found.keys, n))
            if found.keys.divisible_by(n, self.kernel.facts):
                return steps, None
            return steps, b.sub(steps, b.op("floordiv", keys, b.index(n)))

        def clamped(value: Value) -> Value:
            return b.op("max", b.op("min", value, keys), b.index(0))

        last = b.op("min", b.add(row, b.index(self.matrix.m)), b.index(self.rows))
        if found.grain == 1:
            end = clamped(b.add(last, b.index(found.reach - 1)))
        else:
            end = clamped(b.add(found.start(b, b.sub(last, b.index(1))), b.index(found.reach)))
        whole = clamped(b.add(found.start(b, row), b.index(found.reach)))
        steps = b.op("floordiv", b.add(end, b.index(n - 1)), b.index(n))
        return steps, b.sub(steps, b.op("floordiv", whole, b.index(n)))

    # -- one tile -----------------------------------------------------------------------------------------------

    def _tile(self, b: Builder, number: Value, down: Size, batch: Size, env: dict[Value, Value]) -> None:
        found, s = self.found, self.matrix
        row = self._place(b, number, down, batch, env)
        env[self.i] = self.index_tile(b, row, 0, s.m)
        edge = self._edge(b, env[self.i], self.rows, s.m)
        query = self._operand(b, found.query, {self.i: env[self.i]}, found.score.regions[0].args[0], 1, edge, env)
        start = [
            b.op("broadcast", b.const(value, f32), shape=shape)
            for value, shape in ((-math.inf, (s.m, 1)), (0.0, (s.m, 1)), (0.0, (s.m, s.head_dim_v)))
        ]
        steps, masked = self._steps(b, row, env)

        def walk_keys(low: Value, high: Value, state: Sequence[Value], mask: bool) -> tuple[Value, ...]:
            def step(inner: Builder, index: Value, *state: Value) -> list[Value]:
                back = inner.sub(inner.sub(steps, inner.index(1)), index)
                return self._step(inner, inner.mul(back, inner.index(s.n)), query, state, edge, mask, dict(env))

            return b.for_(low, high, b.index(1), state, step, name="step", role="masked" if mask else "sum", stages=s.stages)

        with b.at(found.maximum.span):
            state: Sequence[Value] = start
            if masked is not None:
                state = walk_keys(b.index(0), masked, state, True)
            state = walk_keys(b.index(0) if masked is None else masked, steps, state, False)
            self._finish(b, state, edge, env)

    def _operand(
        self, b: Builder, load: Op, bound: dict[Value, Value], walked: Value, axis: int, edge: Sequence[Condition],
        env: dict[Value, Value],
    ) -> Value:  # fmt: skip
        """A tile of an operand: the bound index along one axis, the inner product's along `axis`."""
        local = {**env, **bound}
        local[walked] = self.index_tile(b, b.index(0), axis, self.matrix.k)
        masks = [*edge, *self._edge(b, local[walked], self.found.depth, self.matrix.k)]
        self._evaluate(b, [load.result], local, masks)
        return self._rounded(b, load, local)

    def _rounded(self, b: Builder, operand: Op, env: dict[Value, Value]) -> Value:
        """An operand as matrix units take it: one that is computed has the type of the queries."""
        value = env[operand.result]
        return value if operand.opcode == "load" else b.cast(value, dtype_of(self.found.query.result.type))

    def _step(
        self, b: Builder, first: Value, query: Value, state: Sequence[Value], edge: Sequence[Condition], mask: bool,
        env: dict[Value, Value],
    ) -> list[Value]:  # fmt: skip
        found, s = self.found, self.matrix
        most, total, out = state
        shape = (s.m, s.n)
        index = self.index_tile(b, first, 1, s.n)
        inside = self._keys_edge(b, index, env) if mask else []
        key = self._operand(b, found.key, {found.j: index}, found.score.regions[0].args[0], 0, inside, env)
        zero = b.op("broadcast", b.const(0, f32), shape=shape)
        local = {**env, found.j: index}
        with b.at(found.score.span):
            local[found.score.result] = b.op("dot", query, key, zero)
        score = self._score(b, index, inside, edge, mask, local)
        new = b.op("max", most, b.op("reduce_tile", score, kind="max", axis=1))
        empty = b.op("eq", new, b.splat(-math.inf, new))
        shift = b.select(empty, b.splat(0, new), new)
        weights = b.op(found.exponential, b.sub(score, self.widen(b, shift, shape)))
        shrink = b.op(found.exponential, b.sub(most, shift))
        total = b.fma(total, shrink, b.op("reduce_tile", weights, kind="add", axis=1))
        column = self.index_tile(b, b.index(0), 1, s.head_dim_v)
        down = self.index_tile(b, first, 0, s.n)
        bounds = [*(self._keys_edge(b, down, env) if mask else []), *self._edge(b, column, found.column_extent, s.head_dim_v)]
        own = {**env, found.weighted.regions[0].args[0]: down, found.column: column}
        self._evaluate(b, [found.value.result], own, bounds)
        value = self._rounded(b, found.value, own)
        scaled = b.mul(out, self.widen(b, shrink, (s.m, s.head_dim_v)))
        with b.at(found.weighted.span):
            return [new, total, b.op("dot", b.cast(weights, dtype_of(value.type)), value, scaled)]

    def _score(
        self, b: Builder, index: Value, inside: Sequence[Condition], edge: Sequence[Condition], mask: bool,
        env: dict[Value, Value],
    ) -> Value:  # fmt: skip
        """f, and -inf where a term does not count."""
        found, shape = self.found, (self.matrix.m, self.matrix.n)
        keep = [c.value for c in inside]
        masks = [*edge, *inside]
        if found.reach is not None and mask:
            ahead = b.sub(self.widen(b, index, shape), self.widen(b, found.start(b, env[self.i]), shape))
            keep.append(b.op("lt", ahead, b.like(b.index(found.reach), ahead)))
            if found.strict:
                masks.append(Condition(keep[-1], edge=False))
        for condition in found.conditions:
            self._evaluate(b, [condition], env, masks)
            keep.append(env[condition])
            if found.strict:
                masks.append(Condition(keep[-1], edge=False))
        self._evaluate(b, [found.term], env, masks)
        score = self.widen(b, env[found.term], shape)
        if keep:
            total = self.widen(b, keep[0], shape)
            for value in keep[1:]:
                total = b.logical_and(total, self.widen(b, value, shape))
            score = b.select(total, score, b.splat(-math.inf, score))
        return score

    # -- finishing ------------------------------------------------------------------------------------------------

    def _finish(self, b: Builder, state: Sequence[Value], edge: list[Condition], env: dict[Value, Value]) -> None:
        found, s = self.found, self.matrix
        shape = (s.m, s.head_dim_v)
        most, total, out = self._restored(b, state, env)
        column = self.index_tile(b, b.index(0), 1, s.head_dim_v)
        env[found.column] = column
        masks = [*edge, *self._edge(b, column, found.column_extent, s.head_dim_v)]
        env[found.maximum.result] = most
        env |= {op.result: total for op in found.sums}
        for scale in found.scales:
            self._evaluate(b, [scale.value], env, masks)
            divide = scale.divides and not self._is_rounded(found.weighted.result)
            by = self._inverse(b, env[scale.value]) if scale.divides and not divide else env[scale.value]
            out = b.op("div" if divide else "mul", out, self.widen(b, by, shape))
        env[found.weighted.result] = out
        reductions = (found.maximum, *found.sums, found.weighted)
        for op in found.parallel.regions[0].ops:
            if op is found.loop:
                self.ops(b, [inner for inner in op.regions[0].ops if inner not in reductions], env, masks)
            elif op not in reductions and op.opcode != "yield":
                self.ops(b, [op], env, masks)

    def lower_op(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        """As for loops; but what is divided by one number for each row, and rounded to few bits, is multiplied by its inverse."""
        if op.opcode == "div" and self._is_rounded(op.results[0]):
            value, by = (env[v] for v in op.operands)
            if shape_of(value) == (self.matrix.m, self.matrix.head_dim_v) and shape_of(by) == (self.matrix.m, 1):
                return [b.mul(value, self.widen(b, self._inverse(b, by), shape_of(value)))]
        return super().lower_op(b, op, env, masks)

    def _inverse(self, b: Builder, value: Value) -> Value:
        return b.op("div", b.like(b.const(1.0, f32), value), value)

    def _is_rounded(self, value: Value) -> bool:
        """Whether a value is only used, through products, in values of two bytes or less."""
        users = [op for op in self.everything if value in op.operands]
        if any(op.opcode not in ("cast", "mul", "div") for op in users) or not users:
            return False
        return all(
            dtype_of(op.results[0].type).is_small_float if op.opcode == "cast" else self._is_rounded(op.results[0]) for op in users
        )

    def _restored(self, b: Builder, state: Sequence[Value], env: dict[Value, Value]) -> Sequence[Value]:
        """Rows of -inf only: NaN, as exp(-inf - -inf) is, where the text has such terms."""
        found = self.found
        most, total, out = state
        if found.shifted or (found.strict and found.conditions):
            return state
        lost = b.op("eq", most, b.splat(-math.inf, most))
        there = b.op("gt", b.index(found.keys), b.index(0))
        lost = b.logical_and(lost, b.like(there, lost))
        if found.strict and found.reach is not None:
            limit = b.add(found.start(b, env[self.i]), b.like(b.index(found.reach), env[self.i]))
            lost = b.logical_and(lost, b.op("gt", limit, b.splat(0, limit)))
        total = b.select(lost, b.splat(math.nan, total), total)
        out = b.select(self.widen(b, lost, (self.matrix.m, self.matrix.head_dim_v)), b.splat(math.nan, out), out)
        return most, total, out

    def _evaluate(self, b: Builder, values: Sequence[Value], env: dict[Value, Value], masks: Sequence[Condition]) -> None:
        """Compute values of the nest from what is bound already."""
        wanted: set[Value] = set()
        waiting = [v for v in values if v not in env]
        while waiting:
            value = waiting.pop()
            op = self.made.get(value)
            if value in wanted or value in env or op is None:
                continue
            wanted.update(op.results)
            waiting += op.operands
            waiting += [v for region in op.regions for inner in walk(region) for v in inner.operands]
        inside = {id(inner) for op in self.everything if op.regions and any(r in wanted for r in op.results)
                  for region in op.regions for inner in walk(region)}  # fmt: skip
        needed = [op for op in self.everything if any(r in wanted for r in op.results) and id(op) not in inside]
        self.ops(b, needed, env, list(masks))
