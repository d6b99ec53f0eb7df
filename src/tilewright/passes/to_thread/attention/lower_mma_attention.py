"""Tile stage -> thread stage for attention (`lower_attention`) with warp-level matrix instructions: any NVIDIA GPU
that has them and copies asynchronously.

In: a tile-stage kernel made by `lower_attention`, with layouts, and its schedule (family `attention_mma`). Out: the thread-stage
kernel. Every warp computes 16 rows, or 32, which reads keys and values half as often; all warps of a block bring keys and values, which pass through a ring of `stages` steps.
Rows of shared memory are 16 bytes longer than they need be: the eight rows that `ldmatrix` reads at once lie in different
banks, and all places are a base of the thread, the stage, and a constant. Scores, weights and sums stay in registers, the
rounded weights being the first operand of the second product as they lie.

    bring the queries to the last stage, steps 0 .. S-2 to theirs; read the queries
    for steps t { wait for step t; barrier; bring step t + S-1; scores; maximum, weights; scale out; out += weights values }
    the epilogue; store

Queries stay in registers (`a_copy=registers`), or, where rows are too long for that, in shared memory of their own. Keys and values that are elements of
packed blocks are read as bytes and computed as they are brought: threads leave them where copies would.

Operands of f32 are multiplied as numbers of tf32 (`tf32_terms`): each is cut into two parts as it is read, and the products of 16 terms are added up from
zero, small ones first, before they are added to the rest: matrix units drop bits when they add, so that chains of them err more than f32 does. Values
lie across the sum and are read by plain loads; an instruction's first four terms are the even ones of eight keys, its others the odd ones, as the weights lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from tilewright.analysis.attention import loads_of
from tilewright.base.dtypes import f32, u32
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tensor, Tile, dtype_of
from tilewright.passes.common.registers import Mask, RegisterIndex, Registers
from tilewright.passes.common.tf32 import all_parts, rounded_tf32
from tilewright.passes.common.unsigned import unsigned_divisions
from tilewright.passes.schedules.attention import TERMS, MmaAttention, pitch
from tilewright.passes.to_thread.attention.scores import AttentionScores, ScoreStep, needed_ops
from tilewright.passes.to_thread.wgmma.epilogue import BAND_ROWS, Epilogue, ResultTile

MANY_TERMS = 64
"""Beyond as many, products of f32 are a loop over them: registers have no room for more of their parts."""


def lower_mma_attention(kernel: Kernel, schedule: MmaAttention, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return _MmaAttentionLowering(kernel, schedule, target).run()


@record
class _MmaPart:
    """An operand as it lies in shared memory: `rows` rows of `columns`, from `start` of a stage on. `row_axis` is the axis of the
    tile that walks the rows."""

    load: Op
    row_axis: int
    rows: int
    columns: int
    start: int


@record
class _MmaState:
    """What a thread carries from step to step; `most` and `total` have one value for each of its rows."""

    out: list[Value]
    most: list[Value]
    total: list[Value]

    def flat(self) -> list[Value]:
        return [*self.out, *self.most, *self.total]


class _ChunkElements:
    """The elements of a chunk of an operand that is computed: of one row, the columns of 16 bytes from `column` on, which is a multiple of their number."""

    def __init__(self, lowering: _MmaAttentionLowering, part: _MmaPart, row: Value, column: Value) -> None:
        self.lowering, self.part, self.row, self.column = lowering, part, row, column
        self.known: dict[tuple[Value, int], Value] = {}

    def at(self, b: Builder, value: Value, place: int) -> Value:
        """What a tile's value is at a place of the chunk. What is the same at all of them is computed once."""
        held = self.lowering.env.get(value)
        if isinstance(held, Value):
            return held
        key = value, 0 if self._steady(value) else place
        if key not in self.known:
            self.known[key] = self._new(b, value, key[1])
        return self.known[key]

    def _new(self, b: Builder, value: Value, place: int) -> Value:
        held = self.lowering.env.get(value)
        if isinstance(held, RegisterIndex):
            total = held.base
            for axis, factor in held.factors.items():
                own = self.row if axis == self.part.row_axis else b.add(self.column, b.index(place)) if place else self.column
                total = b.add(total, own if factor == 1 else b.mul(own, b.index(factor)))
            return total
        op = self.lowering.scores.made[value]
        if op.opcode == "broadcast":
            return self.at(b, op.operands[0], place)
        if op.opcode == "load":
            memory = op.operands[0].type
            assert isinstance(memory, Tensor)
            *front, last = op.operands[1 : 1 + memory.rank]
            indices = [self.at(b, v, place) for v in front]
            # Neighbours lie beside each other: places that are a sum with a constant become one load later.
            own = b.add(self.at(b, last, 0), b.index(place)) if place and self._slides(last) else self.at(b, last, place)
            return b.op("load", op.operands[0], *indices, own)
        if op.regions or OPS[op.opcode].effect != "pure":
            raise CompilerBug.at("TW040", f"lower_mma_attention: an operand is computed by {op.opcode}", op.span)
        return b.emit(op.opcode, [self.at(b, v, place) for v in op.operands], op.attrs)[0]

    def _number(self, value: Value) -> int | None:
        """The constant that a tile repeats."""
        op = self.lowering.scores.made.get(value)
        while op is not None and op.opcode == "broadcast":
            op = self.lowering.scores.made.get(op.operands[0])
        number = op.attrs["value"] if op is not None and op.opcode == "const" else None
        return number if isinstance(number, int) else None

    def _in_blocks(self, op: Op) -> bool:
        """Whether a quotient or remainder is that of the columns by blocks of whole chunks."""
        by = self._number(op.operands[1])
        return self._is_column(op.operands[0]) and by is not None and by > 0 and by % self.lowering.chunk == 0

    def _is_column(self, value: Value) -> bool:
        """Whether it is the index of the columns itself."""
        op = self.lowering.scores.made.get(value)
        if op is not None and op.opcode == "add":
            first, second = op.operands
            return (self._number(first) == 0 and self._is_column(second)) or (self._is_column(first) and self._number(second) == 0)
        return op is not None and op.opcode == "iota" and op.attrs["axis"] == 1 - self.part.row_axis

    def _steady(self, value: Value) -> bool:
        """Whether a value is the same in the whole chunk."""
        held = self.lowering.env.get(value)
        if isinstance(held, Value):
            return True
        if isinstance(held, RegisterIndex):
            return 1 - self.part.row_axis not in held.factors
        op = self.lowering.scores.made.get(value)
        if op is None:
            return True
        if op.opcode == "floordiv" and self._in_blocks(op):
            return True
        operands = op.operands[1 : 1 + op.operands[0].type.rank] if op.opcode == "load" and isinstance(op.operands[0].type, Tensor) else op.operands
        return all(self._steady(v) for v in operands)

    def _slides(self, value: Value) -> bool:
        """Whether an index grows by one from place to place."""
        if self._is_column(value):
            return True
        op = self.lowering.scores.made.get(value)
        if op is None:
            return False
        if op.opcode == "mod":
            return self._in_blocks(op)
        if op.opcode == "add":
            first, second = op.operands
            return (self._slides(first) and self._steady(second)) or (self._steady(first) and self._slides(second))
        return False


class _MmaAttentionLowering:
    """`epilogue` lowers what is around the steps; `scores` is what happens between the two products."""

    def __init__(self, kernel: Kernel, schedule: MmaAttention, target: Target) -> None:
        self.kernel, self.schedule, self.target = kernel, schedule, target
        self.bands = schedule.bands
        self.epilogue = Epilogue(kernel, ResultTile(schedule.m, schedule.head_dim_v, bands=self.bands), target)
        self.env, self.sum = self.epilogue.env, self.epilogue.sum
        self.scores = AttentionScores(self.epilogue, schedule.n)
        self.dtype = self.scores.dtype
        self.chunk = 16 // self.dtype.itemsize
        """Elements of 16 bytes: one copy of a thread, and a row of an 8x8 matrix."""
        self.in_registers = schedule.a_copy == "rs"
        s = schedule
        self.slot = s.slot
        # Keys and values of any step: with the conditions of the steps that have some.
        self.source = self.scores.steps[0]
        self.key = _MmaPart(self.scores.made[self.source.key], 1, s.n, s.k, 0)
        self.value = _MmaPart(self.scores.made[self.source.value], 0, s.n, s.head_dim_v, s.n * self._pitch(s.k))
        self.query = _MmaPart(self.scores.query_load, 0, s.m, s.k, (s.stages - 1 if self.in_registers else s.stages) * self.slot)
        self.words: list[Value] = []
        self.signs: Value | None = None

    def _pitch(self, columns: int) -> int:
        return pitch(columns, self.dtype.itemsize)

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        attrs: dict[str, Attr] = {**self.kernel.attrs, "min_blocks": self.schedule.blocks_at_once(self.target)}
        if any(part.load.opcode != "load" for part in (self.key, self.value)):
            attrs["computed"] = True
        if (attrs.get("early") or attrs.get("release")) and "early" in self.target.features:
            b.multi("release_next")  # what adds up parts of keys is there when the last of them ends
        if attrs.get("early") and "early" in self.target.features:
            b.multi("wait_previous")
            attrs["dependent"] = True
        self._coordinates(b)
        self.ring = b.op(
            "alloc", dtype=self.dtype, shape=(self.schedule.shared_elements,), space="shared", align=128, name="ring"
        )
        self._body(b, self.kernel.body.ops)
        return unsigned_divisions(
            replace(
                self.kernel, stage=Stage.THREAD, body=Block((), tuple(b.ops)), threads=self.schedule.threads,
                attrs=MappingProxyType(attrs),
            )
        )  # fmt: skip

    def _coordinates(self, b: Builder) -> None:
        """Where each lane's row of an 8x8 matrix begins, in the first operand, in keys, and in values."""
        self.epilogue.coordinates(b)
        lane = self.epilogue.lane
        low, half = b.op("and", lane, b.index(15)), b.mul(b.op("shr", lane, b.index(4)), b.index(self.chunk))
        long, wide = b.index(self._pitch(self.schedule.k)), b.index(self._pitch(self.schedule.head_dim_v))
        mine = b.add(b.mul(self.epilogue.own, b.index(self.epilogue.rows)), low)
        if self.dtype is f32:
            # 16 terms of eight keys at once; a value of each even key, and of the odd one after it.
            row, column = b.op("and", lane, b.index(7)), b.mul(b.op("shr", lane, b.index(3)), b.index(self.chunk))
            even, across = b.mul(b.op("and", lane, b.index(3)), b.index(2)), b.op("shr", lane, b.index(2))
        else:
            column = b.op("and", lane, b.index(self.chunk))
            row = b.add(b.op("and", lane, b.index(7)), half)
            even, across = low, half
        self.query_place = b.add(b.mul(mine, long), b.add(half, b.index(self.query.start)))
        self.key_place = b.add(b.mul(row, long), column)
        self.value_place = b.add(b.mul(even, wide), b.add(across, b.index(self.value.start)))

    def _body(self, b: Builder, ops: Sequence[Op]) -> None:
        """The ops of a tile, or of the loop over tiles."""
        for place, op in enumerate(ops):
            if op.opcode == "for" and op.attrs.get("role") == "tiles":
                self._tiles(b, op)
                return
            if op is self.scores.walks[0]:
                count = self.env[self.sum.operands[1]]
                assert isinstance(count, Value)
                self._compute_tile(b, b.cast(count, u32))
                self.epilogue.finish(b, [x for x in ops[place + 1 :] if x.opcode != "yield" and x not in self.scores.walks])
                return
            if op is not self.scores.query_load:
                self.epilogue.ops(b, [op])

    def _tiles(self, b: Builder, op: Op) -> None:
        low, high, step = (self.env[v] for v in op.operands[:3])
        assert isinstance(low, Value) and isinstance(high, Value) and isinstance(step, Value)
        region = op.regions[0]

        def body(inner: Builder, index: Value) -> list[Value]:
            self.env[region.args[0]] = index
            self._body(inner, region.ops)
            inner.multi("barrier")  # the next tile overwrites what this one has read
            return []

        b.for_(low, high, step, [], body, name="tile", unroll=1)

    # -- copies ---------------------------------------------------------------------------------------------------

    def _bring(self, b: Builder, part: _MmaPart, offset: Value) -> None:
        """Start copying this thread's chunks of an operand whose indices are bound; zeros beyond the edges."""
        load, threads = part.load, self.schedule.threads
        tensor = load.operands[0].type
        assert isinstance(tensor, Tensor)
        chunks = part.columns // self.chunk
        beside = 1 << (chunks - 1).bit_length()
        down = threads // beside
        row = b.op("shr", self.epilogue.thread, b.index(beside.bit_length() - 1))
        chunk = b.op("and", self.epilogue.thread, b.index(beside - 1))
        column = b.mul(chunk, b.index(self.chunk))
        indices = load.operands[1 : 1 + tensor.rank]
        gathered = any(not isinstance(self.env.get(v), Value | RegisterIndex) for v in indices)
        coordinates: list[Value] = []
        walked = -1
        for axis, index in enumerate(() if gathered else indices):
            held = self.env[index]
            origin = self.epilogue.origin(held)
            for tile_axis in held.factors if isinstance(held, RegisterIndex) else ():
                origin = b.add(origin, row if tile_axis == part.row_axis else column)
                walked = axis if tile_axis == part.row_axis else walked
            coordinates.append(origin)
        rooms, always = self._rooms(b, part, row, column)
        place = b.add(b.add(offset, b.index(part.start)), b.add(b.mul(row, b.index(self._pitch(part.columns))), column))
        prefetch: dict[str, Attr] = {"prefetch": self.schedule.prefetch} if self.schedule.prefetch and part is not self.query else {}

        def pass_(inner: Builder, number: int) -> list[Value]:
            here = [inner.add(x, inner.index(number * down)) if a == walked else x for a, x in enumerate(coordinates)]
            if gathered:
                own = inner.add(row, inner.index(number * down))
                for room in rooms:  # a row that is not there has the indices of one that is
                    own = inner.op("min", own, inner.sub(inner.add(row, room), inner.index(1)))
                own = inner.op("max", own, inner.index(0))
                here = [self._gathered(inner, v, part, own, column) for v in indices]
            wanted = [inner.op("lt", inner.index(number * down), room) for room in rooms]
            wanted += always
            condition = [self._all_of(inner, wanted)] if wanted else []
            to = inner.add(place, inner.index(number * down * self._pitch(part.columns)))
            attrs: dict[str, Attr] = {"bytes": 16, "masked": bool(condition), **prefetch}
            inner.emit("copy_async", [self.ring, to, load.operands[0], *here, *condition], attrs)
            return []

        for number in range(-(-part.rows // down)):
            fits: list[Value] = []
            if beside > chunks:
                fits.append(b.op("lt", chunk, b.index(chunks)))
            if (number + 1) * down > part.rows:
                fits.append(b.op("lt", row, b.index(part.rows - number * down)))
            if fits:
                b.if_(self._all_of(b, fits), lambda inner, n=number: pass_(inner, n), lambda inner: [])
            else:
                pass_(b, number)

    def _compute(self, b: Builder, part: _MmaPart, offset: Value) -> None:
        """Compute this thread's chunks of an operand from what is read, and leave them where copies would. Rows beyond the last are that one."""
        threads, chunks = self.schedule.threads, part.columns // self.chunk
        beside = 1 << (chunks - 1).bit_length()
        down = threads // beside
        row = b.op("shr", self.epilogue.thread, b.index(beside.bit_length() - 1))
        chunk = b.op("and", self.epilogue.thread, b.index(beside - 1))
        column = b.mul(chunk, b.index(self.chunk))
        rooms, always = self._rooms(b, replace(part, load=self._loads(part)[0]), row, column)
        if always:
            raise CompilerBug.at("TW040", "lower_mma_attention: a computed operand has columns that are not there", part.load.span)
        place = b.add(b.add(offset, b.index(part.start)), b.add(b.mul(row, b.index(self._pitch(part.columns))), column))

        def pass_(inner: Builder, number: int) -> list[Value]:
            own = inner.add(row, inner.index(number * down))
            for room in rooms:
                own = inner.op("min", own, inner.sub(inner.add(row, room), inner.index(1)))
            element = _ChunkElements(self, part, inner.op("max", own, inner.index(0)), column)
            values = [element.at(inner, part.load.result, c) for c in range(self.chunk)]
            inner.multi("store", self.ring, inner.add(place, inner.index(number * down * self._pitch(part.columns))), inner.op("pack", *values))
            return []

        for number in range(-(-part.rows // down)):
            fits: list[Value] = []
            if beside > chunks:
                fits.append(b.op("lt", chunk, b.index(chunks)))
            if (number + 1) * down > part.rows:
                fits.append(b.op("lt", row, b.index(part.rows - number * down)))
            if fits:
                b.if_(self._all_of(b, fits), lambda inner, n=number: pass_(inner, n), lambda inner: [])
            else:
                pass_(b, number)

    def _loads(self, part: _MmaPart) -> list[Op]:
        return loads_of(part.load, self.scores.made)

    def _gathered(self, b: Builder, value: Value, part: _MmaPart, row: Value, column: Value) -> Value:
        """An index of one row, computed for that row alone: where rows are not those of an axis."""
        held = self.env.get(value)
        if isinstance(held, Value):
            return held
        if isinstance(held, RegisterIndex):
            total = held.base
            for axis, factor in held.factors.items():
                own = row if axis == part.row_axis else column
                total = b.add(total, own if factor == 1 else b.mul(own, b.index(factor)))
            return total
        op = self.scores.made[value]
        if op.opcode == "broadcast":
            return self._gathered(b, op.operands[0], part, row, column)
        if op.opcode == "load":
            memory = op.operands[0].type
            assert isinstance(memory, Tensor)
            return b.op("load", op.operands[0], *(self._gathered(b, v, part, row, column) for v in op.operands[1 : 1 + memory.rank]))
        if op.regions or OPS[op.opcode].effect != "pure":
            raise CompilerBug.at("TW040", f"lower_mma_attention: an index of an operand is made by {op.opcode}", part.load.span)
        return b.emit(op.opcode, [self._gathered(b, v, part, row, column) for v in op.operands], op.attrs)[0]

    def _rooms(self, b: Builder, part: _MmaPart, row: Value, column: Value) -> tuple[list[Value], list[Value]]:
        """Of the conditions of a load: how many rows from this thread's first on are inside, and what does not depend on rows."""
        if not part.load.attrs.get("masked"):
            return [], []
        mask = self.env[part.load.operands[-1]]
        if not isinstance(mask, Mask) or mask.others:
            raise CompilerBug.at("TW040", "lower_mma_attention: an operand is read under a condition", part.load.span)
        rooms: list[Value] = []
        always: list[Value] = []
        for index, bound in mask.edges:
            if part.row_axis in index.factors:
                rooms.append(b.sub(bound, b.add(index.base, row)))
            else:
                always.append(b.op("lt", b.add(index.base, column), bound))
        return rooms, always

    def _all_of(self, b: Builder, conditions: Sequence[Value]) -> Value:
        total = conditions[0]
        for condition in conditions[1:]:
            total = b.logical_and(total, condition)
        return total

    def _bring_step(self, b: Builder, t: Value, steps: Value) -> None:
        """Start bringing keys and values of step t, if there is one, and close the group of copies."""

        def bring(inner: Builder) -> list[Value]:
            step = self.source
            self.env[step.index] = inner.cast(t, dtype_of(step.index.type))
            for part in (self.key, self.value):
                indices = [v for load in self._loads(part) for v in load.operands[1:]]
                self.epilogue.ops(inner, self._straight(needed_ops(step.ops, indices)))
                (self._bring if part.load.opcode == "load" else self._compute)(inner, part, self._slot(inner, t))
            return []

        b.if_(b.op("lt", t, steps), bring, lambda inner: [])
        b.multi("copy_commit")

    def _straight(self, ops: Sequence[Op]) -> list[Op]:
        """Without ops that make indices of single rows (`_gathered`): tiles of quotients and of what is loaded by them."""
        late: set[Value] = set()
        kept: list[Op] = []
        for op in ops:
            apart = op.opcode in ("floordiv", "mod", "load") and isinstance(op.results[0].type, Tile)
            if apart or any(v in late for v in op.operands):
                late.update(op.results)
            else:
                kept.append(op)
        return kept

    def _slot(self, b: Builder, t: Value) -> Value:
        """Where the stage of step t begins."""
        stage = b.op("mod", t, b.const(self.schedule.stages, u32))
        return b.mul(b.cast(stage, dtype_of(self.epilogue.thread.type)), b.index(self.slot))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _compute_tile(self, b: Builder, steps: Value) -> None:
        s = self.schedule
        zero, one = b.const(0, u32), b.const(1, u32)
        self.scores.begin(b)
        self.signs = self.scores.query_signs(b)
        self._bring(b, self.query, b.index(0))
        for number in range(s.stages - 1):
            self._bring_step(b, b.const(number, u32), steps)
        if self.in_registers:
            self._arrived(b)
            self.words = [word for number in range(s.k // TERMS) for word in self._query_words(b, b.index(number * TERMS))]
        nothing, lowest = b.const(0.0, f32), b.const(-math.inf, f32)
        rows = 2 * self.bands
        state = _MmaState([nothing] * (rows * s.head_dim_v // 4), [lowest] * rows, [b.op("broadcast", nothing, width=2)] * rows)
        for which, step in enumerate(self.scores.steps):
            low = zero if not which else self.scores.count(b, self.scores.walks[0])

            def body(inner: Builder, t: Value, *carried: Value, own: ScoreStep = step) -> list[Value]:
                self._arrived(inner)
                self._bring_step(inner, inner.add(t, inner.const(s.stages - 1, u32)), steps)
                return self._next(inner, own, t, self._state(carried)).flat()

            high = self.scores.count(b, self.scores.walks[which])
            state = self._state(b.for_(low, high, one, state.flat(), body, name="step", unroll=1))
        b.multi("copy_wait", pending=0)
        most, total, weighted = self.sum.results
        ends = [self.scores.largest(b, m) for m in state.most], [self.scores.added(b, x) for x in state.total]
        for result, values in zip((most, total), ends, strict=True):
            self.env[result] = Registers((s.m, 1), {(h, 0): v for h, v in enumerate(values)})
        self.env[weighted] = Registers((s.m, s.head_dim_v), self.scores.cells(b, state.out))

    def _arrived(self, b: Builder) -> None:
        """Wait for the oldest of the steps on their way; the stage before it has been read."""
        b.multi("copy_wait", pending=self.schedule.stages - 2)
        b.multi("barrier")

    def _state(self, flat: Sequence[Value]) -> _MmaState:
        rows = 2 * self.bands
        return _MmaState(list(flat[: -2 * rows]), list(flat[-2 * rows : -rows]), list(flat[-rows:]))

    def _next(self, b: Builder, step: ScoreStep, t: Value, state: _MmaState) -> _MmaState:
        slot = self._slot(b, t)
        self.scores.bind(b, step, t)
        units = self.scores.units(b, step, self._scores(b, slot))
        most, shrink, grown = self.scores.grown(b, units, state.most)
        out, total = self.scores.scaled(b, state.out, state.total, shrink, grown)
        weights, more = self.scores.weights(b, units, most, range(self.schedule.n // 8))
        total = [b.add(x, y) for x, y in zip(total, more, strict=True)]
        return _MmaState(self._multiply(b, slot, self.scores.packed(b, weights), out), most, total)

    # -- matrix instructions ----------------------------------------------------------------------------------------

    def _query_words(self, b: Builder, term: Value) -> list[Value]:
        """The queries' first operand for 16 terms, of each band: of f32 that of two instructions."""
        words: list[Value] = []
        for band, part in product(range(self.bands), range(0, TERMS, 2 * self.chunk)):
            place = b.add(term, b.index(part + band * BAND_ROWS * self._pitch(self.schedule.k)))
            words += b.multi("ldmatrix", self.ring, b.add(self.query_place, place), count=4)
        signs = self.signs
        return words if signs is None else [b.op("xor", word, signs) for word in words]

    def _scores(self, b: Builder, slot: Value) -> list[Value]:
        """The first product of a step."""
        s = self.schedule
        sums = [b.const(0.0, f32)] * (self.bands * s.n // 2)
        each = TERMS // (2 * self.chunk) * 4 * self.bands
        start = b.add(slot, self.key_place)
        if self.dtype is f32 and not self.words and s.k > MANY_TERMS:

            def terms(inner: Builder, first: Value, *carried: Value) -> list[Value]:
                own = list(carried)
                self._add_terms(inner, self._query_words(inner, first), own, inner.add(start, first), [across * self._pitch(s.k) for across in range(0, s.n, 16)], False)
                return own

            return list(b.for_(b.index(0), b.index(s.k), b.index(TERMS), sums, terms, name="term", unroll=1))
        for number in range(s.k // TERMS):
            first = self.words[each * number : each * (number + 1)] or self._query_words(b, b.index(number * TERMS))
            places = [number * TERMS + across * self._pitch(s.k) for across in range(0, s.n, 16)]
            if self.dtype is f32:
                self._add_terms(b, first, sums, start, places, False)
            else:
                self._products(b, first, sums, start, places, False)
        return sums

    def _multiply(self, b: Builder, slot: Value, words: Sequence[Value], out: Sequence[Value]) -> list[Value]:
        """The second product of a step."""
        s = self.schedule
        sums = list(out)
        start = b.add(slot, self.value_place)
        each = TERMS // (2 * self.chunk) * 4
        for number in range(s.n // TERMS):
            first = [w for band in range(self.bands) for w in words[band * s.n // TERMS * each + each * number :][:each]]
            places = [number * TERMS * self._pitch(s.head_dim_v) + across for across in range(0, s.head_dim_v, 16)]
            if self.dtype is f32:
                self._add_terms(b, first, sums, start, places, True)
            else:
                self._products(b, first, sums, start, places, True)
        return sums

    def _products(
        self, b: Builder, first: Sequence[Value], sums: list[Value], start: Value, places: Sequence[int], trans: bool
    ) -> None:
        """Add the products of 16 terms to the sums of all columns; `places` say where each 16 columns begin, from `start` on."""
        for number, place in enumerate(places):
            second = b.multi("ldmatrix", self.ring, b.add(start, b.index(place)), count=4, trans=trans)
            for band, half in product(range(self.bands), range(2)):
                at = 8 * (band * len(places) + number) + 4 * half
                own = slice(at, at + 4)
                sums[own] = b.emit("mma", [*first[4 * band : 4 * band + 4], *second[2 * half : 2 * half + 2], *sums[own]], {"dtype": self.dtype})

    # -- products of f32 ----------------------------------------------------------------------------------------------

    def _add_terms(
        self, b: Builder, first: Sequence[Value], sums: list[Value], start: Value, places: Sequence[int], across: bool
    ) -> None:
        """As `_products`, for operands of f32; `across`: the second one's rows lie along the columns of the result."""
        large, small = self._parts(b, first)
        for number, place in enumerate(places):
            for half in range(2):
                other_large, other_small = self._parts(b, self._second(b, start, place, half, across))
                for band in range(self.bands):
                    at = 8 * (band * len(places) + number) + 4 * half
                    total = [b.const(0.0, f32)] * 4
                    for left, right in self._terms(large, small, other_large, other_small):
                        for part in range(2):
                            operands = [*left[8 * band + 4 * part :][:4], *right[2 * part : 2 * part + 2], *total]
                            total = list(b.emit("mma", operands, {"dtype": f32}))
                    sums[at : at + 4] = [b.add(x, y) for x, y in zip(sums[at : at + 4], total, strict=True)]

    def _parts(self, b: Builder, words: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        if self.schedule.tf32_terms == 1:
            return [rounded_tf32(b, word) for word in words], []
        return all_parts(b, words)

    def _terms(
        self, large: list[Value], small: list[Value], other_large: list[Value], other_small: list[Value]
    ) -> list[tuple[list[Value], list[Value]]]:
        """Which parts are multiplied, the smallest products first."""
        pairs = [(small, other_small), (small, other_large), (large, other_small), (large, other_large)]
        return pairs[4 - self.schedule.tf32_terms :]

    def _second(self, b: Builder, start: Value, place: int, half: int, across: bool) -> list[Value]:
        """The second operand of two instructions: 16 terms of eight columns."""
        if across:
            wide = self._pitch(self.schedule.head_dim_v)
            places = [place + 8 * half + (8 * part + odd) * wide for part in range(2) for odd in range(2)]
            return [b.bitcast(b.op("load", self.ring, b.add(start, b.index(at))), u32) for at in places]
        at = place + 8 * half * self._pitch(self.schedule.k)
        return list(b.multi("ldmatrix", self.ring, b.add(start, b.index(at)), count=4))
