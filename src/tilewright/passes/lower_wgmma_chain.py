"""Tile stage -> thread stage for chains of two products (`lower_attention`) with Hopper's warp-group instructions.

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis import divisors
from tilewright.base.dtypes import bool_, f32, i32, u32, u64
from tilewright.base.record import record
from tilewright.base.sizes import Size, floordiv
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.chain_scores import ChainScores, Step, needed_ops
from tilewright.passes.registers import Mask, Registers
from tilewright.passes.schedule_matrix import MatrixSchedule
from tilewright.passes.wgmma_epilogue import GROUP

EARLY = {1: 3, 2: 3, 3: 2}
"""By the number of computing groups: quarters of a step's exponentials that are computed while the product before runs; the
others follow it."""
TERMS = 16
"""Terms of one matrix instruction of two-byte elements."""


def lower_wgmma_chain(kernel: Kernel, schedule: MatrixSchedule, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return _Chain(kernel, schedule, target).run()


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
class _State:
    """What a computing thread carries from step to step. Rows are the two it has: `most` and `total` have one value for each."""

    out: list[Value]
    words: list[Value]
    most: list[Value]
    total: list[Value]

    def flat(self) -> list[Value]:
        return [*self.out, *self.words, *self.most, *self.total]


class _Chain(ChainScores):
    def __init__(self, kernel: Kernel, schedule: MatrixSchedule, target: Target) -> None:
        super().__init__(kernel, schedule, target)
        self.in_registers = schedule.a_copy == "registers"
        """Each thread keeps its part of the queries."""

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        s = self.chain
        self._coordinates(b)
        step = self.steps[-1]
        self.query = self._staged(b, "q", self.query_load, 0, s.m, s.k, 1)
        self.key = self._staged(b, "k", self.made[step.key], 1, s.n, s.k, s.stages)
        self.value = self._staged(b, "v", self.made[step.value], 0, s.n, s.wide, s.stages)
        self.outputs(b)
        if s.dynamic:
            self.next = b.op("alloc", dtype=u32, shape=(2,), space="shared", name="next")
            self.next_full = b.op("alloc", dtype=u64, shape=(2,), space="shared", name="next.full")
            self.next_empty = b.op("alloc", dtype=u64, shape=(2,), space="shared", name="next.empty")
        b.if_(b.op("eq", self.thread, b.index(0)), self._initialise, lambda inner: [])
        b.multi("barrier")
        is_copying = b.op("eq", self.group, b.const(0, i32))
        b.if_(is_copying, self._copying, self._computing)
        attrs: dict[str, Attr] = {**self.kernel.attrs, "min_blocks": 1}
        if s.dynamic:
            attrs["dependent"] = True  # on what sets the counter
        return replace(
            self.kernel, stage=Stage.THREAD, body=Block((), tuple(b.ops)), threads=s.threads, attrs=MappingProxyType(attrs)
        )

    def _coordinates(self, b: Builder) -> None:
        self.thread = b.op("thread_id", name="thread")
        self.lane = b.op("and", self.thread, b.index(31), name="lane")
        self.warp = b.op("and", b.op("shr", self.thread, b.index(5)), b.index(3), name="warp")
        number = b.cast(b.op("shr", self.thread, b.index(7)), i32)
        # All threads of a warp have the same: saying so lets the compiler branch once for the warp.
        self.group = b.op("shuffle", number, b.const(0, i32), mode="idx", name="group")
        self.own = b.sub(b.cast(self.group, dtype_of(self.thread.type)), b.index(1))
        row = b.add(b.mul(self.warp, b.index(16)), b.op("shr", self.lane, b.index(2)))
        row = b.add(row, b.mul(self.own, b.index(64)))
        column = b.mul(b.op("and", self.lane, b.index(3)), b.index(2))
        self.divisors[row], self.divisors[column] = 1, 2
        self.bases = [row, column]
        self.leader = b.op("eq", b.op("and", self.thread, b.index(GROUP - 1)), b.index(0), name="leader")

    def _initialise(self, b: Builder) -> list[Value]:
        for staged, stages in ((self.query, 1), (self.key, self.chain.stages), (self.value, self.chain.stages)):
            b.multi("prefetch_map", staged.map)
            for number in range(stages):
                b.multi("mbarrier_init", staged.full, b.index(number), count=1)
                each = 4 if staged is self.query and self.in_registers else 1  # every warp has read its part itself
                b.multi("mbarrier_init", staged.empty, b.index(number), count=self.chain.groups * each)
        for number in range(2) if self.chain.dynamic else ():
            b.multi("mbarrier_init", self.next_full, b.index(number), count=1)
            b.multi("mbarrier_init", self.next_empty, b.index(number), count=self.chain.groups * GROUP)
        b.multi("fence_init")
        return []

    def _staged(self, b: Builder, name: str, load: Op, row_tile_axis: int, rows: int, columns: int, stages: int) -> _Staged:
        tensor = load.operands[0]
        assert isinstance(tensor.type, Tensor)
        row_axis, column_axis = self.axes(load, row_tile_axis)
        assert column_axis == tensor.type.rank - 1
        wide = ROW_BYTES // self.dtype.itemsize
        shape, strides, box = list(tensor.type.shape), list(tensor.type.strides), [1] * tensor.type.rank
        box[row_axis], box[column_axis] = rows, wide
        whole = columns == wide
        if not whole and divisors.of_size(shape[column_axis], self.kernel.facts) % wide == 0 and tensor.type.rank < 5:
            shape = [floordiv(shape[column_axis], Size.of(wide)), *shape[:column_axis], Size.of(wide)]
            strides, box, whole = [Size.of(wide), *strides], [columns // wide, *box], True
        memory = b.op("alloc", dtype=self.dtype, shape=(stages * rows * columns,), space="shared", align=1024, name=name)
        found = b.op(
            "tensor_map", tensor, shape=tuple(shape), strides=tuple(strides), box=tuple(box), swizzle=ROW_BYTES,
            name=f"{name}.map",
        )  # fmt: skip
        full, empty = (
            b.op("alloc", dtype=u64, shape=(stages,), space="shared", name=f"{name}.{which}") for which in ("full", "empty")
        )
        return _Staged(load, memory, found, rows, columns, whole, full, empty)

    # -- roles --------------------------------------------------------------------------------------------------

    def _copying(self, b: Builder) -> list[Value]:
        if self.chain.groups > 1:
            b.multi("set_registers", count=_REGISTERS[self.chain.groups][0], increase=False)
        number = b.cast(self.warp, i32)
        first = b.op("eq", b.op("shuffle", number, b.const(0, i32), mode="idx"), b.const(0, i32))

        def one_thread(inner: Builder) -> list[Value]:
            if self.chain.dynamic:
                inner.multi("wait_previous")
            self._body(inner, self.kernel.body.ops, True, inner.const(0, u32), inner.const(0, u32))
            return []

        b.if_(first, lambda inner: inner.if_(inner.op("elect"), one_thread, lambda deep: []), lambda inner: [])
        return []

    def _computing(self, b: Builder) -> list[Value]:
        if self.chain.groups > 1:
            b.multi("set_registers", count=_REGISTERS[self.chain.groups][1], increase=True)
        self._body(b, self.kernel.body.ops, False, b.const(0, u32), b.const(0, u32))
        if self.out_maps:
            b.if_(self.leader, lambda inner: inner.multi("tma_wait", pending=0, read=True), lambda inner: [])
        return []

    def _body(self, b: Builder, ops: Sequence[Op], copying: bool, position: Value, number: Value) -> tuple[Value, Value]:
        """The ops of a tile, or of the loop over tiles, in one role. `position` counts the steps taken so far, `number` the
        tiles that have any; gives what they are then."""
        for place, op in enumerate(ops):
            if op.opcode == "for" and op.attrs.get("role") == "tiles":
                self._tiles(b, op, copying, position, number)
                return position, number
            if op is self.walks[0]:
                count = self.env[self.sum.operands[1]]
                assert isinstance(count, Value)
                steps = b.cast(count, u32)
                if copying:
                    self._copy_tile(b, steps, position, number)
                else:
                    self._compute_tile(b, steps, position, number)
                    self.finish(b, [x for x in ops[place + 1 :] if x.opcode != "yield" and x not in self.walks])
                some = b.op("gt", steps, b.const(0, u32))
                return b.add(position, steps), b.add(number, b.cast(some, u32))
            if op is not self.query_load:
                self.ops(b, [op])
            elif not copying:
                continue
        return position, number

    def _tiles(self, b: Builder, op: Op, copying: bool, position: Value, number: Value) -> None:
        low, high, step = (self.env[v] for v in op.operands[:3])
        assert isinstance(low, Value) and isinstance(high, Value) and isinstance(step, Value)
        region = op.regions[0]
        if self.chain.dynamic:
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
        stages = b.const(self.chain.stages, u32)
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
        step = self.steps[-1]
        self.env[step.index] = b.cast(t, dtype_of(step.index.type))
        self.ops(b, needed_ops(step.ops, staged.load.operands[1:]))
        self._copy(b, staged, *self._ring_state(b, b.add(position, t)))

    def _copy(self, b: Builder, staged: _Staged, stage: Value, parity: Value) -> None:
        size = staged.rows * staged.columns
        b.multi("mbarrier_wait", staged.empty, stage, b.op("xor", parity, b.const(1, u32)))
        b.multi("mbarrier_expect", staged.full, stage, bytes=size * self.dtype.itemsize)
        tensor = staged.load.operands[0].type
        assert isinstance(tensor, Tensor)
        coordinates = [self.origin(self.env[v]) for v in staged.load.operands[1 : 1 + tensor.rank]]
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
        s = self.chain
        zero, one = b.const(0, u32), b.const(1, u32)
        nothing = b.const(0.0, f32)
        self.factor = self._factor(b)

        def everything(at: Builder) -> list[Value]:
            at.multi("mbarrier_wait", self.query.full, zero, at.op("and", number, one))
            self.words = self._query_words(at) if self.in_registers else []
            if not self.in_registers:
                self._turn_round(at)
            skipped = self._skipped(at, steps, position)
            state = self._first(at, skipped, position)
            after = at.add(skipped, one)
            for which, step in enumerate(self.steps):
                low = after if not which else at.op("max", after, self._count(at, self.walks[0]))
                high = self._count(at, self.walks[which])

                def body(inner: Builder, t: Value, *carried: Value, own: Step = step) -> list[Value]:
                    return self._next(inner, own, t, position, self._state(carried)).flat()

                state = self._state(at.for_(low, high, one, state.flat(), body, name="step", unroll=1))
            if not self.in_registers:
                self._release(at, self.query, zero)
            stage, parity = self._ring_state(at, at.add(position, at.sub(steps, one)))
            out = self._wait(at, self._multiply(at, stage, parity, state.words, state.out), 0)
            self._release(at, self.value, stage)
            return [*out, *(self._largest(at, m) for m in state.most), *(self._added(at, x) for x in state.total)]

        def empty(at: Builder) -> list[Value]:
            return [*[nothing] * (s.wide // 2), *[at.const(-math.inf, f32)] * 2, *[nothing] * 2]

        found = list(b.if_(b.op("gt", steps, zero), everything, empty))
        out, rows = found[:-4], found[-4:]
        most, total, product = self.sum.results
        for result, values in ((most, rows[:2]), (total, rows[2:])):
            self.env[result] = Registers((s.m, 1), {(h, 0): v for h, v in enumerate(values)})
        self.env[product] = Registers((s.m, s.wide), self._cells(b, out))

    def _state(self, flat: Sequence[Value]) -> _State:
        out, words = self.chain.wide // 2, self.chain.n // 4
        rest = list(flat[out + words :])
        return _State(list(flat[:out]), list(flat[out : out + words]), rest[:2], rest[2:])

    def _skipped(self, b: Builder, steps: Value, position: Value) -> Value:
        """How many steps at the start have nothing for the rows of this group, though they have for those of others; their
        tiles are released."""
        step, one = self.steps[0], b.const(1, u32)
        mask = self._score(step).mask
        if self.chain.m <= self.chain.n or len(self.steps) < 2 or mask is None:
            return b.const(0, u32)
        ops = needed_ops(step.ops, [mask])
        if any(op.opcode == "load" for op in ops):
            return b.const(0, u32)

        def count(inner: Builder, t: Value, total: Value) -> list[Value]:
            self.env[step.index] = inner.cast(t, dtype_of(step.index.type))
            self.ops(inner, ops)
            held = self.env[mask]
            if not isinstance(held, Mask):
                return [total]
            nothing = inner.const(False, bool_)
            for index, bound in held.edges:
                least = index.base
                for axis, factor in index.factors.items():
                    first = inner.mul(self.own, inner.index(64)) if axis == 0 else inner.index(0)
                    last = inner.add(first, inner.index(63 if axis == 0 else self.chain.n - 1))
                    least = inner.add(least, inner.mul(first if factor > 0 else last, inner.index(factor)))
                nothing = inner.op("or", nothing, inner.op("ge", least, bound))
            return [inner.add(total, inner.cast(nothing, u32))]

        # The steps with the last keys come first, so those without any for these rows are the first.
        masked = b.op("min", self._count(b, self.walks[0]), b.sub(steps, one))
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

    def _first(self, b: Builder, t: Value, position: Value) -> _State:
        """Scores and weights of the first step; nothing is multiplied yet."""
        stage, parity = self._ring_state(b, b.add(position, t))
        step = self.steps[0]
        scores = self._start(b, stage, parity)
        self._bind(b, step, t)
        scores = self._wait(b, scores, 0)
        self._release(b, self.key, stage)
        units = self._units(b, step, scores)
        most = [self._row_maximum(b, units, h) for h in range(2)]
        weights, total = self._weights(b, units, most, range(self.chain.n // 8))
        nothing = b.const(0.0, f32)
        return _State([nothing] * (self.chain.wide // 2), self._packed(b, weights), most, total)

    def _next(self, b: Builder, step: Step, t: Value, position: Value, state: _State) -> _State:
        """Scores and weights of step t, while those of the step before are multiplied."""
        stage, parity = self._ring_state(b, b.add(position, t))
        before, parity_before = self._ring_state(b, b.add(position, b.sub(t, b.const(1, u32))))
        scores = self._start(b, stage, parity)
        out = self._multiply(b, before, parity_before, state.words, state.out)
        self._bind(b, step, t)
        scores = self._wait(b, scores, 1)
        self._release(b, self.key, stage)
        units = self._units(b, step, scores)
        most, shrink, grown = self._grown(b, units, state.most)
        columns = self.chain.n // 8
        early = columns * EARLY[self.chain.groups] // 4
        weights, total = self._weights(b, units, most, range(early))
        out = self._wait(b, out, 0)
        self._release(b, self.value, before)
        out, totals = self._scaled(b, out, state.total, shrink, grown)
        late, more = self._weights(b, units, most, range(early, columns))
        sums = [b.add(x, y) for x, y in zip(totals, total, strict=True)] if total else totals
        sums = [b.add(x, y) for x, y in zip(sums, more, strict=True)] if more else sums
        return _State(out, self._packed(b, {**weights, **late}), most, sums)

    # -- matrix instructions ----------------------------------------------------------------------------------------

    def _start(self, b: Builder, stage: Value, parity: Value) -> Sequence[Value]:
        """Start the first product of a step."""
        s = self.chain
        b.multi("mbarrier_wait", self.key.full, stage, parity)
        wide = ROW_BYTES // self.dtype.itemsize
        steps: list[Attr] = []
        for number in range(s.k // TERMS):
            block, inside = divmod(number * TERMS, wide)
            steps.append((block * s.m * wide + inside, block * s.n * wide + inside, 0))
        first = b.mul(b.cast(self.own, u32), b.const(64 * wide, u32))
        second = b.mul(stage, b.const(s.n * s.k, u32))
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
        s = self.chain
        b.multi("mbarrier_wait", self.value.full, stage, parity)
        wide = ROW_BYTES // self.dtype.itemsize
        steps: tuple[Attr, ...] = tuple((4 * number, number * TERMS * wide, 0) for number in range(s.n // TERMS))
        offset = b.mul(stage, b.const(s.n * s.wide, u32))
        attrs: dict[str, Attr] = {
            "dtype": self.dtype, "words": len(words), "n": s.wide, "k": TERMS, "steps": steps, "b_major": "mn",
            "b_block": s.n * wide,
        }  # fmt: skip
        return b.emit("wgmma_registers", (*words, self.value.memory, offset, *out), attrs)

    def _wait(self, b: Builder, values: Sequence[Value], pending: int) -> list[Value]:
        return list(b.multi("wgmma_wait", *values, pending=pending, finished=True))

    def _release(self, b: Builder, staged: _Staged, stage: Value) -> None:
        b.if_(self.leader, lambda inner: inner.multi("mbarrier_arrive", staged.empty, stage), lambda inner: [])

    def _query_words(self, b: Builder) -> list[Value]:
        """The queries as a first operand in registers, with the sign of what scores are multiplied by; their memory is free
        then."""
        wide, chunk = ROW_BYTES // self.dtype.itemsize, 16 // self.dtype.itemsize
        row = b.add(b.mul(self.warp, b.index(16)), b.op("and", self.lane, b.index(15)))
        start = b.mul(b.add(row, b.mul(self.own, b.index(64))), b.index(wide))
        half, turn = b.op("shr", self.lane, b.index(4)), b.op("and", self.lane, b.index(7))
        words: list[Value] = []
        for number in range(self.chain.k // TERMS):
            block, inside = divmod(number * TERMS, wide)
            place = b.op("xor", b.add(half, b.index(inside // chunk)), turn)
            place = b.add(b.add(start, b.mul(place, b.index(chunk))), b.index(block * self.chain.m * wide))
            words += b.multi("ldmatrix", self.query.memory, place, count=4)
        one_each = b.op("eq", self.lane, b.index(0))
        b.if_(one_each, lambda inner: inner.multi("mbarrier_arrive", self.query.empty, inner.const(0, u32)), lambda inner: [])
        times = self._score(self.steps[-1]).times
        if times is None or self._is_positive(times):
            return words
        held = self._held(b, times)
        signs = b.select(b.op("lt", held, b.const(0.0, f32)), b.const(0x80008000, u32), b.const(0, u32))
        return [b.op("xor", word, signs) for word in words]

    def _turn_round(self, b: Builder) -> None:
        """Where scores are multiplied by a negative number: the queries change their sign instead."""
        times = self._score(self.steps[-1]).times
        if times is None or self._is_positive(times):
            return
        held = self._held(b, times)
        wide, width = ROW_BYTES // self.dtype.itemsize, 16 // self.dtype.itemsize
        mine = b.mul(b.op("and", self.thread, b.index(GROUP - 1)), b.index(width))
        mine = b.add(mine, b.mul(self.own, b.index(64 * wide)))

        def negate(inner: Builder) -> list[Value]:
            for block in range(self.chain.k // wide):
                for part in range(64 * wide // (GROUP * width)):
                    place = inner.add(mine, inner.index(block * self.chain.m * wide + part * GROUP * width))
                    value = inner.op("load", self.query.memory, place, width=width)
                    inner.multi("store", self.query.memory, place, inner.op("neg", value))
            inner.multi("fence_async")
            inner.multi("named_barrier", inner.cast(inner.add(self.own, inner.index(1)), i32), threads=GROUP)
            return []

        b.if_(b.op("lt", held, b.const(0.0, f32)), negate, lambda inner: [])

_REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Registers of a copying and of a computing thread, by the number of computing groups."""
