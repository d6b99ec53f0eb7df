"""The code of a ring of weights: a warp that fills it, and warps that read from it.

In: a `RingPlan`. Out: ops of the persistent kernel. Slot q of a step's slots, counted from the beginning of the launch on, lies in place q modulo the ring's slots, in round
q divided by them. Each place has mbarriers: `full` ends a phase when the bytes of a copy have come, `empty` when a warp has read them:

    producer (one thread)                              another warp
    for every unit of the block, slot q:               for the units it takes, slot q:
        wait empty[place], the round before                wait full[place], this round
        expect bytes at full[place]; copy                  read; meet; arrive at empty[place]

A wait by parity must not be two phases ahead. The producer never is. Other warps are not, since `full` is two mbarriers, of even and of odd rounds, and no more
warps share an op than the ring has units: who waits for slot q has read one less than a ring before, which was filled when all slots two rings before q had been
read; what belongs to ops before has been read by all.

A unit that a block does not have takes its slots all the same, with no bytes: so what a slot's number is follows from loops alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, i64, u8, u32, u64
from tilewright.base.errors import CompilerBug
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value
from tilewright.ir.rewrite import replace_values, rewrite_block
from tilewright.ir.types import INDEX, Scalar, Tensor, Vec
from tilewright.mega.persistent.records import PersistentOp, StepPlan, TaskLoop
from tilewright.mega.persistent.ring import WARP, RingOp, RingPiece, RingPlan
from tilewright.mega.persistent.staging import UNREAD

PlacedIn = Callable[[Builder, Op, Value, Value], Sequence[Value] | None]


class RingWriter:
    """Writes the two sides of a ring."""

    def __init__(self, plan: RingPlan, step: StepPlan, blocks: int, consumers: int, table: Value, head: Builder) -> None:
        self.plan, self.step, self.blocks, self.consumers, self.table = plan, step, blocks, consumers, table
        self.memory = head.op("alloc", dtype=u8, shape=(plan.slots * plan.slot_bytes,), space="shared", align=128, common=True, name="ring")
        self.full = head.op("alloc", dtype=u64, shape=(2 * plan.slots,), space="shared", common=True, name="ring.full")
        self.empty = head.op("alloc", dtype=u64, shape=(plan.slots,), space="shared", common=True, name="ring.empty")

    def begin(self, b: Builder, leads: Value) -> None:
        """Make the mbarriers."""

        def make(inner: Builder) -> Sequence[Value]:
            def one(at: Builder, place: Value) -> Sequence[Value]:
                at.multi("mbarrier_init", self.full, place, count=1)
                at.multi("mbarrier_init", self.full, at.add(place, at.index(self.plan.slots)), count=1)
                at.multi("mbarrier_init", self.empty, place, count=1)
                return []

            inner.for_(inner.index(0), inner.index(self.plan.slots), inner.index(1), [], one, name="place")
            inner.multi("fence_init")
            return []

        b.if_(leads, make, lambda inner: [])
        b.multi("barrier")

    # -- where a slot is ------------------------------------------------------------------------------------------

    def first_slot(self, b: Builder, step: Value, loop: int, iteration: Value, op: RingOp) -> Value:
        """The number of the first slot of an op in an iteration."""
        plan = self.plan
        before = b.add(b.mul(step, b.index(plan.total)), b.mul(iteration, b.index(plan.sizes[loop])))
        return b.op("cast", b.add(before, b.index(plan.starts[loop] + op.first)), dtype=u32)

    def _place(self, b: Builder, slot: Value) -> tuple[Value, Value]:
        """Where it lies, and its round."""
        slots = b.const(self.plan.slots, u32)
        return b.op("cast", b.op("mod", slot, slots), dtype=i64), b.op("floordiv", slot, slots)

    def _full(self, b: Builder, place: Value, turn: Value) -> tuple[Value, Value]:
        """The mbarrier of a place in a round, and the parity of its phase."""
        one = b.const(1, u32)
        odd = b.op("cast", b.op("and", turn, one), dtype=i64)
        return b.add(place, b.mul(odd, b.index(self.plan.slots))), b.op("cast", b.op("and", b.op("shr", turn, one), one), dtype=i64)

    def _unit(self, b: Builder, block: Value, op: RingOp, turn: Value) -> Value:
        """The unit of a block in a turn."""
        first = block
        if op.shift:
            first = b.sub(block, b.index(op.shift))
            first = b.select(b.op("lt", first, b.index(0)), b.add(first, b.index(self.blocks)), first)
        return b.add(first, b.mul(turn, b.index(self.blocks)))

    def _slot(self, b: Builder, first: Value, op: RingOp, turn: Value, number: int) -> Value:
        return b.add(first, b.op("cast", b.add(b.mul(turn, b.index(op.slots)), b.index(number)), dtype=u32))

    def _if_there(self, b: Builder, op: RingOp, unit: Value, then: Callable[[Builder], None], otherwise: Callable[[Builder], None]) -> None:
        """`then` where the block has the unit."""
        if op.units % self.blocks == 0:
            then(b)
            return

        def does(inner: Builder) -> Sequence[Value]:
            then(inner)
            return []

        def else_(inner: Builder) -> Sequence[Value]:
            otherwise(inner)
            return []

        b.if_(b.op("lt", unit, b.index(op.units)), does, else_)

    # -- the producer ---------------------------------------------------------------------------------------------

    def produce(self, b: Builder, steps: Value) -> None:
        """All copies of a launch, by one thread."""

        def one_step(at: Builder, step: Value) -> Sequence[Value]:
            for number, loop in enumerate(self.step.loops):
                if self.plan.sizes[number] == 0:
                    continue
                if loop.count == 1:
                    self._copies(at, number, loop, step, at.index(0))
                    continue

                def iteration(inner: Builder, index: Value, number: int = number, loop: TaskLoop = loop) -> Sequence[Value]:
                    self._copies(inner, number, loop, step, index)
                    return []

                at.for_(at.index(0), at.index(loop.count), at.index(1), [], iteration, name="iteration")
            return []

        b.for_(b.index(0), steps, b.index(1), [], one_step, name="step")

    def _copies(self, b: Builder, number: int, loop: TaskLoop, step: Value, index: Value) -> None:
        block = b.op("program_id", axis=0)
        rings = [(op, self.plan.ops[op.number]) for op in loop.ops if op.number in self.plan.ops]
        # All addresses of an iteration are asked for at once.
        found = [{piece.name: self._source(b, loop, op, index, piece) for piece in ring.pieces} for op, ring in rings]
        for (_, ring), sources in zip(rings, found, strict=True):
            first = self.first_slot(b, step, number, index, ring)

            def turn(at: Builder, turn: Value, ring: RingOp = ring, first: Value = first, sources: dict[str, Value] = sources) -> Sequence[Value]:
                unit = self._unit(at, block, ring, turn)
                for slot in range(ring.slots):
                    self._fill(at, ring, unit, slot, self._slot(at, first, ring, turn, slot), sources)
                return []

            b.for_(b.index(0), b.index(ring.turns), b.index(1), [], turn, name="turn")

    def _source(self, b: Builder, loop: TaskLoop, op: PersistentOp, index: Value, piece: RingPiece) -> Value:
        """The bytes of an array of this iteration."""
        entry = b.add(b.index(loop.first_entry + loop.columns.index((op.position, piece.name))), b.mul(index, b.index(len(loop.columns))))
        return b.emit("tensor_at", (self.table, entry), {"dtype": u8, "shape": (piece.nbytes,), "strides": (1,), "align": 16, "constant": True}, piece.name)[0]

    def _fill(self, b: Builder, ring: RingOp, unit: Value, number: int, slot: Value, sources: dict[str, Value]) -> None:
        plan = self.plan
        place, turn = self._place(b, slot)
        full, _ = self._full(b, place, turn)
        b.multi("mbarrier_wait", self.empty, place, b.op("cast", b.op("xor", b.op("and", turn, b.const(1, u32)), b.const(1, u32)), dtype=i64))
        if plan.flight < plan.slots:
            self._limit(b, slot)
        every = [(piece, at, size) for piece in ring.pieces for s, at, size in piece.parts(plan.slot_bytes, piece.size) if s == number]
        last = [(piece, at, size) for piece in ring.pieces for s, at, size in piece.parts(plan.slot_bytes, piece.last(ring.units)) if s == number]

        def copy(at: Builder, parts: list[tuple[RingPiece, int, int]]) -> Sequence[Value]:
            if not parts:
                at.multi("mbarrier_arrive", self.full, full)
                return []
            at.multi("mbarrier_expect", self.full, full, bytes=sum(size for _, _, size in parts))
            to = at.mul(place, at.index(plan.slot_bytes))
            for piece, begin, size in parts:
                source = at.add(at.mul(unit, at.index(piece.stride)), at.index(piece.start + begin))
                operands = (self.memory, at.add(to, at.index(piece.offset)), sources[piece.name], source, at.index(size), self.full, full)
                at.emit("bulk_load", operands, {"cache": plan.cache} if plan.cache else {})
            return []

        def there(at: Builder) -> None:
            if every == last:
                copy(at, every)
            else:
                at.if_(at.op("eq", unit, at.index(ring.units - 1)), lambda inner: copy(inner, last), lambda inner: copy(inner, every))

        self._if_there(b, ring, unit, there, lambda at: _act(at, "mbarrier_arrive", self.full, full))

    def _limit(self, b: Builder, slot: Value) -> None:
        """No more copies on their way than that: what other warps load from memory would wait behind them."""
        flight = b.const(self.plan.flight, u32)

        def wait(at: Builder) -> Sequence[Value]:
            at.multi("mbarrier_wait", self.full, *self._full(at, *self._place(at, at.op("sub", slot, flight))))
            return []

        b.if_(b.op("ge", slot, flight), wait, lambda inner: [])

    # -- the other warps ------------------------------------------------------------------------------------------

    def consume(
        self, b: Builder, op: PersistentOp, own: Value, lane: Value, block: Value, first: Value, memories: dict[Value, RingPiece], rest: Sequence[Op], names: WarpNames,
        given: dict[Value, Value], placed: PlacedIn,
    ) -> None:
        """The units of warp `own`. `rest` are the body's ops that depend on the unit, `given` values for the others; `placed` is what else stands for an op of a task and a thread of it."""
        ring = self.plan.ops[op.number]

        def turn(at: Builder, turn: Value) -> Sequence[Value]:
            unit = self._unit(at, block, ring, turn)
            places = self._await(at, first, ring, turn)
            self._if_there(at, ring, unit, lambda inner: self._rows(inner, ring, unit, places, lane, memories, rest, names, given, placed), lambda inner: None)
            at.multi("warp_sync")
            self._give_back(at, at.op("eq", lane, at.index(0)), places)
            return []

        together = min(self.consumers, self.plan.slots // ring.slots)  # of the warps
        if together == self.consumers:
            b.for_(own, b.index(ring.turns), b.index(together), [], turn, name="unit")
            return

        def walk(at: Builder) -> Sequence[Value]:
            at.for_(own, at.index(ring.turns), at.index(together), [], turn, name="unit")
            return []

        b.if_(b.op("lt", own, b.index(together)), walk, lambda inner: [])

    def consume_tasks(
        self, b: Builder, op: PersistentOp, thread: Value, block: Value, first: Value, memories: dict[Value, RingPiece], body: Sequence[Op], placed: PlacedIn, meet: Callable[[Builder], None],
    ) -> None:
        """The units of an op whose warps meet: tasks, one after the other, by the threads that a task has."""
        ring = self.plan.ops[op.number]

        def turn(at: Builder, turn: Value) -> Sequence[Value]:
            unit = self._unit(at, block, ring, turn)
            places = self._await(at, first, ring, turn)

            def run(inner: Builder) -> None:
                def stands(deep: Builder, o: Op) -> Sequence[Value] | None:
                    piece = memories.get(o.operands[0]) if o.opcode == "load" else None
                    return placed(deep, o, unit, thread) if piece is None else [self._read(deep, o, piece, unit, places)]

                inner.ops += rewrite_block(Block((), tuple(body)), stands, {}).ops

            self._if_there(at, ring, unit, run, lambda inner: None)
            meet(at)  # all have read, and the next task may write to the shared memory of this one
            self._give_back(at, at.op("eq", thread, at.index(0)), places)
            return []

        def walk(at: Builder) -> Sequence[Value]:
            at.for_(at.index(0), at.index(ring.turns), at.index(1), [], turn, name="unit")
            return []

        b.if_(b.op("lt", thread, b.index(op.kernel.threads)), walk, lambda inner: [])

    def _await(self, b: Builder, first: Value, ring: RingOp, turn: Value) -> list[Value]:
        """Wait for the slots of a unit; gives their places."""
        places: list[Value] = []
        for number in range(ring.slots):
            place, round_ = self._place(b, self._slot(b, first, ring, turn, number))
            b.multi("mbarrier_wait", self.full, *self._full(b, place, round_))
            places.append(place)
        return places

    def _give_back(self, b: Builder, leads: Value, places: Sequence[Value]) -> None:
        """The slots of a unit are read: one thread says so."""

        def done(inner: Builder) -> Sequence[Value]:
            for place in places:
                inner.multi("mbarrier_arrive", self.empty, place)
            return []

        b.if_(leads, done, lambda inner: [])

    def _rows(
        self, b: Builder, ring: RingOp, unit: Value, places: Sequence[Value], lane: Value, memories: dict[Value, RingPiece], rest: Sequence[Op], names: WarpNames,
        given: dict[Value, Value], placed: PlacedIn,
    ) -> None:
        """The work of a unit: that of some warps, one after the other."""

        def row(at: Builder, number: Value) -> Sequence[Value]:
            warps = at.index(ring.warps)
            task, warp = at.op("floordiv", number, warps), at.op("mod", number, warps)
            thread = at.add(at.mul(warp, at.index(WARP)), lane)
            known = {**given, names.warp: warp, names.thread: thread}

            def stands(inner: Builder, o: Op) -> Sequence[Value] | None:
                piece = memories.get(o.operands[0]) if o.opcode == "load" else None
                return placed(inner, o, task, thread) if piece is None else [self._read(inner, o, piece, unit, places)]

            at.ops += rewrite_block(Block((), tuple(rest)), stands, known).ops
            return []

        if ring.rows == 1:
            row(b, unit)
            return
        begin = b.mul(unit, b.index(ring.rows))
        b.for_(begin, b.add(begin, b.index(ring.rows)), b.index(1), [], row, name="row")

    def _read(self, b: Builder, op: Op, piece: RingPiece, unit: Value, places: Sequence[Value]) -> Value:
        """What stands for a load of a weight: the same bytes of the ring."""
        memory, result = op.operands[0].type, op.result.type
        assert isinstance(memory, Tensor)
        assert isinstance(result, Scalar | Vec)
        size = memory.dtype.itemsize
        offset = b.sub(b.index(-piece.start), b.mul(unit, b.index(piece.stride)))
        for index, stride in zip(op.operands[1 : 1 + memory.rank], memory.strides, strict=True):
            offset = b.add(offset, b.mul(index, b.index(stride.evaluate({}) * size)))
        mask = op.operands[-1] if op.attrs.get("masked") else None
        if mask is not None:
            offset = b.select(mask, offset, b.index(0))
        # Slots that follow each other lie one behind the other: only at the ring's end a piece goes on at its beginning.
        place = b.add(b.mul(places[piece.slot], b.index(self.plan.slot_bytes)), b.add(offset, b.index(piece.offset)))
        if piece.size > self.plan.slot_bytes:
            end = b.index(self.plan.slots * self.plan.slot_bytes)
            place = b.select(b.op("ge", place, end), b.sub(place, end), place)
        value = typed_read(b, self.memory, place, memory.dtype, result)
        if mask is not None and not op.attrs.get(UNREAD):
            value = zero_where_not(b, mask, value)
        return value


def typed_read(b: Builder, memory: Value, place: Value, dtype: DType, result: Scalar | Vec) -> Value:
    """What a load gives of bytes in shared memory."""
    count = (result.width if isinstance(result, Vec) else 1) * dtype.itemsize
    value = b.op("load", memory, place, width=count) if count > 1 else b.op("load", memory, place)
    if dtype is not u8:
        value = b.op("bitcast", value, dtype=dtype)
    if value.type != result:
        raise CompilerBug.at("TW040", f"a load of {result} by shared memory gives {value.type}")
    return value


def zero_where_not(b: Builder, mask: Value, value: Value) -> Value:
    """The value where the mask holds, else zero. Whole words are chosen: halves would be taken apart for it."""
    type_ = value.type
    if not isinstance(type_, Vec):
        return b.select(mask, value, b.splat(0, value))
    words = type_.width * type_.dtype.itemsize // u32.itemsize
    if type_.dtype.itemsize >= u32.itemsize or words < 2:
        return b.select(b.op("broadcast", mask, width=type_.width), value, b.splat(0, value))
    whole = b.op("bitcast", value, dtype=u32)
    return b.op("bitcast", b.select(b.op("broadcast", mask, width=words), whole, b.splat(0, whole)), dtype=type_.dtype)


class WarpNames:
    """Values that stand for the lane, the warp and the thread of a task."""

    def __init__(self) -> None:
        self.lane, self.warp, self.thread = Value(INDEX, "lane"), Value(INDEX, "warp"), Value(INDEX, "thread")


def by_warps(body: Block, names: WarpNames) -> list[Op]:
    """The ops of a body in which lane and warp are values by themselves, where it computes them from the number of the thread."""
    threads: set[Value] = set()
    numbers: dict[Value, int] = {}
    known: dict[Value, Value] = {}
    kept: list[Op] = []
    for op in body.ops:
        if op.opcode == "const" and isinstance(op.attrs["value"], int):
            numbers[op.result] = int(op.attrs["value"])
        if op.opcode == "thread_id":
            threads.add(op.result)
            known[op.result] = names.thread
            continue
        if len(op.operands) == 2 and op.operands[0] in threads and op.result.type == INDEX:
            by = numbers.get(op.operands[1])
            if (op.opcode, by) in (("and", WARP - 1), ("shr", 5), ("mod", WARP), ("floordiv", WARP)):
                known[op.result] = names.lane if op.opcode in ("and", "mod") else names.warp
                continue
        kept.append(op)
    return list(replace_values(replace(body, ops=tuple(kept)), known).ops)


def _act(b: Builder, opcode: str, *operands: Value) -> None:
    b.multi(opcode, *operands)
