"""Tile stage -> thread stage for attention (`lower_attention`) with Hopper's warp-group instructions.

In: a tile-stage kernel made by `lower_attention`, with layouts, and its schedule. Out: the thread-stage kernel. A block has one
warp group that copies and several that compute, 64 rows each. Keys and values pass through rings of `stages` tiles; the queries
of a tile lie in shared memory while it is computed. A computing group keeps scores, weights and sums in registers: the
accumulators of the first product, rounded, are the first operand of the second as they lie.

    copying:    for tiles { k(0); q; for steps t { k(t + 1); v(t) } }
    computing:  for tiles { start scores(0); softmax
                            for steps t { start scores(t + 1); start out += weights(t) v(t); softmax(t + 1); scale out }
                            out += weights v; epilogue; store }

The exponentials are powers of two: what a score is multiplied by goes into the exponent's factor. Sums are scaled where the
maximum of any row of the warp has grown. (To leave them until it has grown by 2^8 is 4 % faster and up to twice as far off: the
largest weight of a row is then no longer 1, and is rounded.)

Operands of f32 come as three terms of bf16 each (`bf16_terms`, `passes/terms/attention_terms.py`), one behind the other in a row of shared memory, and each product is
six of these (`terms.py`). What a step adds to the sums begins at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis import divisors
from tilewright.base.dtypes import bf16, bool_, f32, i32, u32, u64
from tilewright.base.record import record
from tilewright.base.sizes import Size, floordiv
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.registers import Cell, Mask, Registers
from tilewright.passes.schedules.attention import OPERAND_TERMS, TERMS, WgmmaAttention
from tilewright.passes.to_thread.attention.queries import AttentionQueries
from tilewright.passes.to_thread.attention.scores import AttentionScores, ScoreStep, needed_ops
from tilewright.passes.to_thread.attention.terms import AttentionTerms
from tilewright.passes.to_thread.wgmma.epilogue import GROUP, Epilogue, ResultTile

EARLY = {1: 3, 2: 3, 3: 2, 4: 2}
"""By the number of computing groups: quarters of a step's exponentials that are computed while the product before runs; the
others follow it."""


def lower_wgmma_attention(kernel: Kernel, schedule: WgmmaAttention, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return _WgmmaAttentionLowering(kernel, schedule, target).run()


@record
class _Staged:
    """An operand in shared memory: blocks of 64 columns, each with all rows."""

    load: Op
    memory: Value
    map: Value
    rows: int
    columns: int
    whole: bool
    """One copy brings all blocks."""
    full: Value
    empty: Value


@record
class _WgmmaState:
    """What a computing thread carries from step to step. Rows are the two it has: `most` and `total` have one value for each."""

    out: list[Value]
    words: list[Value]
    most: list[Value]
    total: list[Value]

    def flat(self) -> list[Value]:
        return [*self.out, *self.words, *self.most, *self.total]


class _WgmmaAttentionLowering:
    """`epilogue` lowers what is around the steps, in either role; `scores` and `queries` are what products are computed from."""

    def __init__(self, kernel: Kernel, schedule: WgmmaAttention, target: Target) -> None:
        self.kernel, self.schedule = kernel, schedule
        groups, stages = schedule.math_warpgroups, schedule.epilogue_stages
        self.epilogue = Epilogue(kernel, ResultTile(schedule.m, schedule.head_dim_v, groups, False, stages, schedule.store), target)
        self.env, self.sum = self.epilogue.env, self.epilogue.sum
        self.scores = AttentionScores(self.epilogue, schedule.n)
        self.terms = AttentionTerms(kernel, schedule) if schedule.bf16_terms else None
        self.dtype = bf16 if self.terms is not None else self.scores.dtype
        """Of what is multiplied."""
        self.queries = AttentionQueries(self.epilogue, self.scores, schedule, self.dtype)
        self.in_registers = schedule.a_copy == "rs"
        """Each thread keeps its part of the queries."""

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        s = self.schedule
        self.epilogue.coordinates(b)
        step = self.scores.steps[-1]
        # Barriers lie behind all that begins at whole 1024 bytes: between, each would leave a gap.
        rows, columns, wide = s.stages * s.n, s.key_columns, s.value_columns
        query, key, value = (self._memory(b, *of) for of in (("q", s.m * columns), ("k", rows * columns), ("v", rows * wide)))
        self.epilogue.outputs(b)
        self.query = self._staged(b, "q", query, self.scores.query_load, 0, s.m, columns, 1)
        self.key = self._staged(b, "k", key, self.scores.made[step.key], 1, s.n, columns, s.stages)
        self.value = self._staged(b, "v", value, self.scores.made[step.value], 0, s.n, wide, s.stages)
        if s.dynamic:
            self.next = b.op("alloc", dtype=u32, shape=(2,), space="shared", name="next")
            self.next_full = b.op("alloc", dtype=u64, shape=(2,), space="shared", name="next.full")
            self.next_empty = b.op("alloc", dtype=u64, shape=(2,), space="shared", name="next.empty")
        b.if_(b.op("eq", self.epilogue.thread, b.index(0)), self._initialise, lambda inner: [])
        b.multi("barrier")
        if s.pdl:
            b.multi("release_next")
        is_copying = b.op("eq", self.epilogue.group, b.const(0, i32))
        b.if_(is_copying, self._copying, self._computing)
        attrs: dict[str, Attr] = {**self.kernel.attrs, "min_blocks": s.blocks}
        if s.dynamic or s.pdl:
            attrs["dependent"] = True  # on what sets the counter, or on whatever comes before
        return replace(
            self.kernel, stage=Stage.THREAD, body=Block((), tuple(b.ops)), threads=s.threads, attrs=MappingProxyType(attrs)
        )

    def _initialise(self, b: Builder) -> list[Value]:
        for staged, stages in ((self.query, 1), (self.key, self.schedule.stages), (self.value, self.schedule.stages)):
            b.multi("prefetch_map", staged.map)
            for number in range(stages):
                b.multi("mbarrier_init", staged.full, b.index(number), count=1)
                each = 4 if staged is self.query and self.in_registers else 1  # every warp has read its part itself
                b.multi("mbarrier_init", staged.empty, b.index(number), count=self.schedule.math_warpgroups * each)
        for number in range(2) if self.schedule.dynamic else ():
            b.multi("mbarrier_init", self.next_full, b.index(number), count=1)
            b.multi("mbarrier_init", self.next_empty, b.index(number), count=self.schedule.math_warpgroups * GROUP)
        b.multi("fence_init")
        return []

    def _memory(self, b: Builder, name: str, elements: int) -> Value:
        return b.op("alloc", dtype=self.dtype, shape=(elements,), space="shared", align=1024, name=name)

    def _staged(self, b: Builder, name: str, memory: Value, load: Op, row_tile_axis: int, rows: int, columns: int, stages: int) -> _Staged:
        tensor = load.operands[0] if self.terms is None else self.terms.memory(name)
        assert isinstance(tensor.type, Tensor)
        row_axis, column_axis = self.epilogue.axes(load, row_tile_axis)
        assert column_axis == tensor.type.rank - 1
        wide = ROW_BYTES // self.dtype.itemsize
        shape, strides, box = list(tensor.type.shape), list(tensor.type.strides), [1] * tensor.type.rank
        box[row_axis], box[column_axis] = rows, wide
        whole = columns == wide
        if not whole and divisors.of_size(shape[column_axis], self.kernel.facts) % wide == 0 and tensor.type.rank < 5:
            shape = [floordiv(shape[column_axis], Size.of(wide)), *shape[:column_axis], Size.of(wide)]
            strides, box, whole = [Size.of(wide), *strides], [columns // wide, *box], True
        tensor_map = b.op(
            "tensor_map", tensor, shape=tuple(shape), strides=tuple(strides), box=tuple(box), swizzle=ROW_BYTES,
            name=f"{name}.map",
        )  # fmt: skip
        full, empty = (
            b.op("alloc", dtype=u64, shape=(stages,), space="shared", name=f"{name}.{which}") for which in ("full", "empty")
        )
        return _Staged(load, memory, tensor_map, rows, columns, whole, full, empty)

    # -- roles --------------------------------------------------------------------------------------------------

    def _copying(self, b: Builder) -> list[Value]:
        if self.schedule.math_warpgroups * self.schedule.blocks > 1:
            b.multi("set_registers", count=self.schedule.registers[0], increase=False)
        number = b.cast(self.epilogue.warp, i32)
        first = b.op("eq", b.op("shuffle", number, b.const(0, i32), mode="idx"), b.const(0, i32))

        def one_thread(inner: Builder) -> list[Value]:
            if self.schedule.dynamic or self.schedule.pdl:
                inner.multi("wait_previous")
            self._body(inner, self.kernel.body.ops, True, inner.const(0, u32), inner.const(0, u32))
            return []

        b.if_(first, lambda inner: inner.if_(inner.op("elect"), one_thread, lambda deep: []), lambda inner: [])
        return []

    def _computing(self, b: Builder) -> list[Value]:
        if self.schedule.math_warpgroups * self.schedule.blocks > 1:
            b.multi("set_registers", count=self.schedule.registers[1], increase=True)
        if self.schedule.pdl:
            b.multi("wait_previous")  # what is written may still be read
        self._body(b, self.kernel.body.ops, False, b.const(0, u32), b.const(0, u32))
        if self.epilogue.out_maps:
            b.if_(self.epilogue.leader, lambda inner: inner.multi("tma_wait", pending=0, read=True), lambda inner: [])
        return []

    def _body(self, b: Builder, ops: Sequence[Op], copying: bool, position: Value, number: Value) -> tuple[Value, Value]:
        """The ops of a tile, or of the loop over tiles, in one role. `position` counts the steps taken so far, `number` the
        tiles that have any; gives what they are then."""
        for place, op in enumerate(ops):
            if op.opcode == "for" and op.attrs.get("role") == "tiles":
                self._tiles(b, op, copying, position, number)
                return position, number
            if op is self.scores.walks[0]:
                count = self.env[self.sum.operands[1]]
                assert isinstance(count, Value)
                steps = b.cast(count, u32)
                if copying:
                    self._copy_tile(b, steps, position, number)
                else:
                    self._compute_tile(b, steps, position, number)
                    self.epilogue.finish(b, [x for x in ops[place + 1 :] if x.opcode != "yield" and x not in self.scores.walks])
                some = b.op("gt", steps, b.const(0, u32))
                return b.add(position, steps), b.add(number, b.cast(some, u32))
            if op is not self.scores.query_load:
                self.epilogue.ops(b, [op])
            elif not copying:
                continue
        return position, number

    def _tiles(self, b: Builder, op: Op, copying: bool, position: Value, number: Value) -> None:
        low, high, step = (self.env[v] for v in op.operands[:3])
        assert isinstance(low, Value) and isinstance(high, Value) and isinstance(step, Value)
        region = op.regions[0]
        if self.schedule.dynamic:
            self._fetched_tiles(b, region, (low, high, step), copying, position, number)
            return

        def body(inner: Builder, index: Value, position: Value, number: Value) -> list[Value]:
            self.env[region.args[0]] = index
            return list(self._body(inner, region.ops, copying, position, number))

        b.for_(low, high, step, [position, number], body, name="tile", unroll=1)

    def _fetched_tiles(
        self, b: Builder, region: Block, bounds: tuple[Value, Value, Value], copying: bool, position: Value, number: Value
    ) -> None:
        """Tiles by a counter: the copying thread fetches the next one while it brings the one at hand, and tells the others in
        two places that take turns, each with a full and an empty mbarrier."""
        low, high, blocks = bounds
        one = b.const(1, u32)

        def more(inner: Builder, *carried: Value) -> list[Value]:
            return [inner.op("lt", carried[0], high), *carried]

        def body(inner: Builder, tile: Value, turn: Value, position: Value, number: Value) -> list[Value]:
            self.env[region.args[0]] = tile
            slot = inner.op("and", turn, one)
            parity = inner.op("and", inner.op("shr", turn, one), one)
            if copying:
                counter = self.kernel.params[-1]
                fetched = inner.op("atomic", counter, inner.index(0), one, kind="add", scope="device", order="relaxed")
            after = self._body(inner, region.ops, copying, position, number)
            if copying:
                following = inner.add(inner.cast(fetched, dtype_of(tile.type)), blocks)
                inner.multi("mbarrier_wait", self.next_empty, slot, inner.op("xor", parity, one))
                inner.multi("store", self.next, inner.cast(slot, dtype_of(tile.type)), inner.cast(following, u32))
                inner.multi("mbarrier_arrive", self.next_full, slot)
            else:
                inner.multi("mbarrier_wait", self.next_full, slot, parity)
                found = inner.op("load", self.next, inner.cast(slot, dtype_of(tile.type)))
                inner.multi("mbarrier_arrive", self.next_empty, slot)
                following = inner.cast(inner.op("shuffle", found, inner.const(0, i32), mode="idx"), dtype_of(tile.type))
            return [following, inner.add(turn, one), *after]

        start = (low, b.const(0, u32), position, number)
        types, names = [v.type for v in start], ["tile", "turn", "position", "number"]
        regions = b.region(types, names, more), b.region(types, names, body)
        results = tuple(Value(t, n) for t, n in zip(types, names, strict=True))
        b.append(Op("while", start, results, MappingProxyType({}), regions, b.span))

    def _ring_state(self, b: Builder, position: Value) -> tuple[Value, Value]:
        """The stage a step uses, and the parity of that use."""
        stages = b.const(self.schedule.stages, u32)
        return b.op("mod", position, stages), b.op("and", b.op("floordiv", position, stages), b.const(1, u32))

    # -- copying ------------------------------------------------------------------------------------------------

    def _copy_tile(self, b: Builder, steps: Value, position: Value, number: Value) -> None:
        zero, one = b.const(0, u32), b.const(1, u32)

        def everything(at: Builder) -> list[Value]:
            self._copy_step(at, self.key, zero, position)
            self._copy(at, self.query, zero, at.op("and", number, one))

            def step(inner: Builder, t: Value) -> list[Value]:
                self._copy_step(inner, self.key, t, position)
                self._copy_step(inner, self.value, inner.sub(t, one), position)
                return []

            at.for_(one, steps, one, [], step, name="step", unroll=1)
            self._copy_step(at, self.value, at.sub(steps, one), position)
            return []

        b.if_(b.op("gt", steps, zero), everything, lambda inner: [])

    def _copy_step(self, b: Builder, staged: _Staged, t: Value, position: Value) -> None:
        """Bring the keys or values of step t."""
        step = self.scores.steps[-1]
        self.env[step.index] = b.cast(t, dtype_of(step.index.type))
        self.epilogue.ops(b, needed_ops(step.ops, staged.load.operands[1:]))
        self._copy(b, staged, *self._ring_state(b, b.add(position, t)))

    def _copy(self, b: Builder, staged: _Staged, stage: Value, parity: Value) -> None:
        size = staged.rows * staged.columns
        b.multi("mbarrier_wait", staged.empty, stage, b.op("xor", parity, b.const(1, u32)))
        b.multi("mbarrier_expect", staged.full, stage, bytes=size * self.dtype.itemsize)
        tensor = staged.load.operands[0].type
        assert isinstance(tensor, Tensor)
        coordinates = [self.epilogue.origin(self.env[v]) for v in staged.load.operands[1 : 1 + tensor.rank]]
        offset = b.mul(stage, b.const(size, u32))
        wide = ROW_BYTES // self.dtype.itemsize
        blocks = staged.columns // wide
        if staged.whole:
            where = coordinates if blocks == 1 else [b.index(0), *coordinates[:-1], b.index(0)]
            b.multi("tma_load", staged.memory, offset, staged.map, staged.full, stage, *where)
            return
        for block in range(blocks):
            there = b.add(offset, b.const(block * wide * staged.rows, u32))
            b.multi("tma_load", staged.memory, there, staged.map, staged.full, stage, *coordinates[:-1], b.index(block * wide))

    # -- computing ------------------------------------------------------------------------------------------------

    def _compute_tile(self, b: Builder, steps: Value, position: Value, number: Value) -> None:
        s = self.schedule
        zero, one = b.const(0, u32), b.const(1, u32)
        nothing = b.const(0.0, f32)
        self.scores.begin(b)

        def everything(at: Builder) -> list[Value]:
            at.multi("mbarrier_wait", self.query.full, zero, at.op("and", number, one))
            self.words = self.queries.words(at, self.query.memory, self.query.empty) if self.in_registers else []
            if not self.in_registers:
                self.queries.turn_round(at, self.query.memory)
            skipped = self._skipped(at, steps, position)
            state = self._first(at, skipped, position)
            after = at.add(skipped, one)
            for which, step in enumerate(self.scores.steps):
                low = after if not which else at.op("max", after, self.scores.count(at, self.scores.walks[0]))
                high = self.scores.count(at, self.scores.walks[which])

                def body(inner: Builder, t: Value, *carried: Value, own: ScoreStep = step) -> list[Value]:
                    return self._next(inner, own, t, position, self._state(carried)).flat()

                state = self._state(at.for_(low, high, one, state.flat(), body, name="step", unroll=1))
            if not self.in_registers:
                self._release(at, self.query, zero)
            stage, parity = self._ring_state(at, at.add(position, at.sub(steps, one)))
            out = self._added(at, state.out, self._wait(at, self._multiply(at, stage, parity, state.words, state.out), 0))
            self._release(at, self.value, stage)
            return [*out, *(self.scores.largest(at, m) for m in state.most), *(self.scores.added(at, x) for x in state.total)]

        def empty(at: Builder) -> list[Value]:
            return [*[nothing] * (s.head_dim_v // 2), *[at.const(-math.inf, f32)] * 2, *[nothing] * 2]

        results = list(b.if_(b.op("gt", steps, zero), everything, empty))
        out, rows = results[:-4], results[-4:]
        most, total, product = self.sum.results
        for result, values in ((most, rows[:2]), (total, rows[2:])):
            self.env[result] = Registers((s.m, 1), {(h, 0): v for h, v in enumerate(values)})
        self.env[product] = Registers((s.m, s.head_dim_v), self.scores.cells(b, out))

    def _state(self, flat: Sequence[Value]) -> _WgmmaState:
        out, words = self.schedule.head_dim_v // 2, self.schedule.n // 4 * (1 if self.terms is None else OPERAND_TERMS)
        rest = list(flat[out + words :])
        return _WgmmaState(list(flat[:out]), list(flat[out : out + words]), rest[:2], rest[2:])

    def _skipped(self, b: Builder, steps: Value, position: Value) -> Value:
        """How many steps at the start have nothing for the rows of this group, though they have for those of others; their
        tiles are released."""
        step, one = self.scores.steps[0], b.const(1, u32)
        mask = self.scores.form(step).mask
        if self.schedule.m <= self.schedule.n or len(self.scores.steps) < 2 or mask is None:
            return b.const(0, u32)
        ops = needed_ops(step.ops, [mask])
        if any(op.opcode == "load" for op in ops):
            return b.const(0, u32)

        def count(inner: Builder, t: Value, total: Value) -> list[Value]:
            self.env[step.index] = inner.cast(t, dtype_of(step.index.type))
            self.epilogue.ops(inner, ops)
            held = self.env[mask]
            if not isinstance(held, Mask):
                return [total]
            nothing = inner.const(False, bool_)
            for index, bound in held.edges:
                least = index.base
                for axis, factor in index.factors.items():
                    first = inner.mul(self.epilogue.own, inner.index(64)) if axis == 0 else inner.index(0)
                    last = inner.add(first, inner.index(63 if axis == 0 else self.schedule.n - 1))
                    least = inner.add(least, inner.mul(first if factor > 0 else last, inner.index(factor)))
                nothing = inner.op("or", nothing, inner.op("ge", least, bound))
            return [inner.add(total, inner.cast(nothing, u32))]

        # The steps with the last keys come first, so those without any for these rows are the first.
        masked = b.op("min", self.scores.count(b, self.scores.walks[0]), b.sub(steps, one))
        (total,) = b.for_(b.const(0, u32), masked, one, [b.const(0, u32)], count, name="step", unroll=1)
        total = b.op("min", total, masked)

        def release(inner: Builder, t: Value) -> list[Value]:
            stage, parity = self._ring_state(inner, inner.add(position, t))
            for staged in (self.key, self.value):
                inner.multi("mbarrier_wait", staged.full, stage, parity)
                self._release(inner, staged, stage)
            return []

        b.for_(b.const(0, u32), total, one, [], release, name="step", unroll=1)
        return total

    def _first(self, b: Builder, t: Value, position: Value) -> _WgmmaState:
        """Scores and weights of the first step; nothing is multiplied yet."""
        stage, parity = self._ring_state(b, b.add(position, t))
        step = self.scores.steps[0]
        scores = self._start(b, stage, parity)
        self.scores.bind(b, step, t)
        scores = self._wait(b, scores, 0)
        self._release(b, self.key, stage)
        # Where only limits hide scores, a tile may have none that does: keys that are whole steps.
        only_limits = len(self.scores.steps) > 1 and self.scores.form(self.scores.steps[-1]).mask is None
        limited = b.op("lt", t, self.scores.count(b, self.scores.walks[0])) if only_limits else None
        units = self.scores.units(b, step, scores, limited)
        most = [self.scores.row_maximum(b, units, h) for h in range(2)]
        weights, total = self.scores.weights(b, units, most, range(self.schedule.n // 8))
        nothing = b.const(0.0, f32)
        return _WgmmaState([nothing] * (self.schedule.head_dim_v // 2), self._packed(b, weights), most, total)

    def _next(self, b: Builder, step: ScoreStep, t: Value, position: Value, state: _WgmmaState) -> _WgmmaState:
        """Scores and weights of step t, while those of the step before are multiplied."""
        stage, parity = self._ring_state(b, b.add(position, t))
        before, parity_before = self._ring_state(b, b.add(position, b.sub(t, b.const(1, u32))))
        scores = self._start(b, stage, parity)
        out = self._multiply(b, before, parity_before, state.words, state.out)
        self.scores.bind(b, step, t)
        scores = self._wait(b, scores, 1)
        self._release(b, self.key, stage)
        units = self.scores.units(b, step, scores)
        most, shrink, grown = self.scores.grown(b, units, state.most)
        columns = self.schedule.n // 8
        early = columns * EARLY[self.schedule.math_warpgroups] // 4
        weights, total = self.scores.weights(b, units, most, range(early))
        out = self._added(b, state.out, self._wait(b, out, 0))
        self._release(b, self.value, before)
        out, totals = self.scores.scaled(b, out, state.total, shrink, grown)
        late, more = self.scores.weights(b, units, most, range(early, columns))
        sums = [b.add(x, y) for x, y in zip(totals, total, strict=True)] if total else totals
        sums = [b.add(x, y) for x, y in zip(sums, more, strict=True)] if more else sums
        return _WgmmaState(out, self._packed(b, {**weights, **late}), most, sums)

    def _packed(self, b: Builder, weights: dict[Cell, Value]) -> list[Value]:
        """Weights as the first operand of the second product."""
        return self.scores.packed(b, weights) if self.terms is None else self.terms.packed(b, weights)

    def _added(self, b: Builder, before: Sequence[Value], out: Sequence[Value]) -> list[Value]:
        """The sums after a step. Of terms a step's begin at zero: matrix units drop bits when they add to long sums."""
        return list(out) if self.terms is None else [b.add(x, y) for x, y in zip(before, out, strict=True)]

    # -- matrix instructions ----------------------------------------------------------------------------------------

    def _start(self, b: Builder, stage: Value, parity: Value) -> Sequence[Value]:
        """Start the first product of a step."""
        s = self.schedule
        b.multi("mbarrier_wait", self.key.full, stage, parity)
        wide = ROW_BYTES // self.dtype.itemsize
        columns = [(number, number) for number in range(0, s.k, TERMS)] if self.terms is None else self.terms.score_columns

        def place(rows: int, column: int) -> int:
            block, inside = divmod(column, wide)
            return block * rows * wide + inside

        steps: list[Attr] = [(place(s.m, first), place(s.n, second), 0) for first, second in columns]
        first = b.mul(b.cast(self.epilogue.own, u32), b.const(64 * wide, u32))
        second = b.mul(stage, b.const(s.n * s.key_columns, u32))
        if self.in_registers:
            moves: tuple[Attr, ...] = tuple((4 * number, step[1], 0) for number, step in enumerate(steps) if isinstance(step, tuple))
            attrs: dict[str, Attr] = {
                "dtype": self.dtype, "words": len(self.words), "n": s.n, "k": TERMS, "steps": moves, "b_major": "k", "fresh": True,
            }  # fmt: skip
            return b.emit("wgmma_registers", (*self.words, self.key.memory, second), attrs)
        return b.multi(
            "wgmma", self.query.memory, first, self.key.memory, second,
            n=s.n, k=TERMS, steps=tuple(steps), a_major="k", b_major="k", fresh=True,
        )  # fmt: skip

    def _multiply(self, b: Builder, stage: Value, parity: Value, words: Sequence[Value], out: Sequence[Value]) -> Sequence[Value]:
        """Start the second product of a step."""
        s = self.schedule
        b.multi("mbarrier_wait", self.value.full, stage, parity)
        wide = ROW_BYTES // self.dtype.itemsize
        moves = [(4 * number, number * TERMS * wide) for number in range(s.n // TERMS)] if self.terms is None else self.terms.weight_moves
        steps: tuple[Attr, ...] = tuple((word, move, 0) for word, move in moves)
        offset = b.mul(stage, b.const(s.n * s.value_columns, u32))
        attrs: dict[str, Attr] = {
            "dtype": self.dtype, "words": len(words), "n": s.head_dim_v, "k": TERMS, "steps": steps, "b_major": "mn",
            "b_block": s.n * wide,
        }  # fmt: skip
        if self.terms is not None:
            return b.emit("wgmma_registers", (*words, self.value.memory, offset), {**attrs, "fresh": True})
        return b.emit("wgmma_registers", (*words, self.value.memory, offset, *out), attrs)

    def _wait(self, b: Builder, values: Sequence[Value], pending: int) -> list[Value]:
        return list(b.multi("wgmma_wait", *values, pending=pending, finished=True))

    def _release(self, b: Builder, staged: _Staged, stage: Value) -> None:
        b.if_(self.epilogue.leader, lambda inner: inner.multi("mbarrier_arrive", staged.empty, stage), lambda inner: [])
