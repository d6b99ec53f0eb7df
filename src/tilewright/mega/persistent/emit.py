"""The ops of a step as one kernel whose blocks stay.

In: a `StepPlan` with waits. Out: a program of one cooperative kernel. Its parameters are a table of addresses, counters, and how many steps to make. Every
block walks the ops in order and takes every so many of their tasks:

    for step { for iteration { for op {
        prefetch weights of tasks to come
        if block < tasks(op) {
            wait for counters; for task = block, tasks, blocks { body with program_id = task }; count up } } } }

Counters are never cleared: what a block waits for is computed from the number of steps made so far, which the last block of a launch writes down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from tilewright.base.dtypes import f64, i32, i64, u8, u32, u64
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.needs import shared_places
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program, ProgramArray, ScalarInput
from tilewright.ir.rewrite import clone_block, rewrite_block
from tilewright.ir.types import Scalar, Tensor, Vec, tensor
from tilewright.mega.persistent.invariant import MOST_WORDS, early, split, write_out
from tilewright.mega.persistent.records import OpWait, PersistentOp, StepPlan, TaskLoop
from tilewright.mega.persistent.ring import WARP, RingPlan
from tilewright.mega.persistent.ring_emit import RingWriter, WarpNames, by_warps, typed_read, zero_where_not
from tilewright.mega.persistent.staging import dense_bytes, loads_first, mark_unread, row_arrays
from tilewright.mega.persistent.stream import NEXT_BYTES, StreamPiece, StreamPlan, WeightRun, idle_fetches, next_arrays

LINE = 32
"""Words between counters: each has a line of the cache to itself."""
EXITS, STEPS = 0, 1
"""Words before the counters: blocks of this launch that have ended, and steps made."""
_OWN_BARRIER, _TASK_BARRIER = 1, 2
"""Numbers of the barriers of the threads that a kernel has, where they are fewer than those of the block, and of all threads that run tasks, where one warp fills a ring."""
_GROUP_BARRIER = 3
"""The first number of the barriers of groups of threads."""
MOST_GROUPS = 12
"""Groups of threads of a block that run tasks beside each other, at most: each has one of sixteen barriers."""
STAMPS = 3
"""Times that a block writes down for each op of each iteration."""
_PLACED_IN_SHARED = frozenset({"load", "store", "copy_async", "ldmatrix"})
"""Ops whose first operand is memory, and the next ones places in it."""
ROOM_LEFT = 4 << 10
"""Bytes of shared memory that groups leave to others."""
LINE_BYTES = 128
"""Of a line of the second-level cache."""
EARLY_TURNS, EARLY_WORDS = 6, 80
"""Turns of a loop that is written out where the loads of its first ones come before a wait, and the registers that these loads may take."""
ROW_VECTOR = 16
"""Bytes of a row that a thread fetches at once."""


WAIT_POLLS = ("acquire", "relaxed", "fence")
"""How a block looks at a counter: each look acquires; or looks are relaxed, and one that acquires, or a fence, comes behind the last."""


def counter_words(step: StepPlan, copies: int = 1) -> int:
    """Words of the counters. Where there are `copies` of each, a block that counts counts them all, and each block looks at one."""
    return LINE * (1 + len(step.ops) * copies)


def _is_shared(op: Op) -> bool:
    return op.opcode == "alloc" and isinstance(op.results[0].type, Tensor) and op.results[0].type.space == "shared"


def _meets(kernel: Kernel) -> bool:
    """Whether threads of a block depend on each other beyond their warps."""
    return any(op.opcode == "barrier" or _is_shared(op) for op in walk(kernel.body))


def _can_be_grouped(kernel: Kernel) -> bool:
    """Whether shared memory of a kernel may be a part of a larger tensor: whoever uses it names places in it."""
    memories = {o.results[0] for o in walk(kernel.body) if _is_shared(o)}
    for o in walk(kernel.body):
        if o.opcode in ("barrier_reduce", "dynamic_shared") or any(v in memories for v in o.operands[1:]):
            return False
        if o.operands and o.operands[0] in memories and o.opcode not in _PLACED_IN_SHARED:
            return False
    for memory in memories:
        assert isinstance(memory.type, Tensor)
        if memory.type.rank < 1 or (memory.type.strides[0] * memory.type.shape[0]).evaluate({}) * memory.type.dtype.itemsize % max(1, memory.type.align):
            return False
    return True


def emit(
    step: StepPlan, blocks: int, waits: bool = True, attrs: dict[str, Attr] | None = None, stream: StreamPlan | None = None, keep: int = MOST_WORDS,
    clocks: bool = False, threads: int = 0, early_loads: bool = True, pause: int = 0, idle: int = 0, ring: RingPlan | None = None, polls: str = "acquire", copies: int = 1, delays: int = 0,
    next_bytes: int = NEXT_BYTES,
) -> Program:
    """The program of one launch of `blocks` blocks, which must all run at once. `waits`: without them results are wrong, and time shows what they cost.
    `threads`: of a block, where it is to have more than its largest kernel; `early_loads`: single tasks load weights before they wait; `pause`: nanoseconds between
    looks at a counter; `idle`: bytes of weights that blocks without a task ask for; `ring`: weights that a warp of its own fetches into shared memory; `polls`, `copies`: how blocks
    look at counters, and how many copies of each there are, see `WAIT_POLLS`. `clocks`: each block writes down when it comes to an op, when it has waited, and when it has ended its tasks.
    `next_bytes`: where an iteration of a loop reads no more weights, it asks for those of the next; `delays`: now and then a block sleeps before an op, up to so many nanoseconds, as its number, the op and the step say."""
    return _Emitter(step, blocks, waits, attrs or {}, stream or StreamPlan(), keep, clocks, threads, early_loads, pause, idle, ring or RingPlan(), polls, copies, delays, next_bytes).run()


def task_threads(step: StepPlan, threads: int, ring: bool) -> int:
    """Threads of a block that run tasks, of `threads` at least: where there is a ring, one warp fills it."""
    largest = max(op.kernel.threads for op in step.bodies)
    return max(threads - WARP, largest) if ring else max(threads, largest)


@dataclass(frozen=True)
class _ThreadGroup:
    """A group of a block's threads that runs a task: its number, and how many there are."""

    number: Value
    count: int


class _Emitter:
    def __init__(self, step: StepPlan, blocks: int, waits: bool, attrs: dict[str, Attr], stream: StreamPlan, keep: int, clocks: bool, threads: int, early_loads: bool, pause: int, idle: int, ring: RingPlan, polls: str, copies: int, delays: int, next_bytes: int) -> None:
        self.delays, self.next_bytes = delays, next_bytes if "tma" in step.target.features else 0
        self.idle = idle_fetches(step, blocks, idle)
        self.stream, self.keep, self.clocks, self.early_loads, self.pause = stream, keep, clocks, early_loads, pause
        self.step, self.most, self.waits, self.attrs = step, blocks, waits, attrs
        self.threads = task_threads(step, threads, bool(ring.ops))
        """Threads that run tasks."""
        self.all_threads = self.threads + (WARP if ring.ops else 0)
        self.polls, self.copies = polls, copies
        self.table = Value(tensor(u64, max(1, step.entries)), "table")
        self.counters = Value(tensor(u32, counter_words(step, copies)), "counters")
        self.steps = Value(Scalar(i64), "steps")
        self.times = Value(tensor(i64, STAMPS * blocks * step.length), "times")
        self.head = Builder()
        self.block = self.head.op("program_id", axis=0, name="block")
        self.blocks = self.head.index(blocks)
        self.thread = self.head.op("thread_id", name="thread")
        self.leads = self.head.op("eq", self.thread, self.head.index(0))
        self.made = self.head.op("cast", self.head.op("load", self.counters, self.head.index(STEPS)), dtype=i64, name="made")
        self.ring = RingWriter(ring, step, blocks, self.threads // WARP, self.table, self.head) if ring.ops else None
        self.step_index = self.block
        """The number of the step in this launch."""
        self.phase = 0
        self.group: _ThreadGroup | None = None
        self.grown: dict[Value, tuple[Value, int]] = {}
        """Shared memory of groups: whose number it is, and the extent of its first axis for one of them."""
        self.room = step.target.max_shared - ring.nbytes - ROOM_LEFT
        self.current: TaskLoop | None = None
        self.stamp_at = self.block
        """The number of the op of this iteration, over all iterations of a step."""
        self.loop_of = {op.number: loop for loop in step.loops for op in loop.ops}

    def run(self) -> Program:
        body = Builder()
        zero, one = body.index(0), body.index(1)

        def one_step(b: Builder, index: Value) -> Sequence[Value]:
            now, self.step_index = b.add(self.made, index), index
            if self.stream.begin:
                self._fetch(b, self.stream.begin, b.index(0))
            for loop in self.step.loops:
                self._loop(b, loop, now)
            return []

        body.for_(zero, self.steps, one, [], one_step, name="step")
        self._end(body)
        if self.ring is not None:
            body = self._with_producer(self.ring, body)
        attrs: dict[str, Attr] = {"schedule": f"{len(self.step.ops)} ops", **self.attrs}
        params: tuple[Value, ...] = (self.table, self.counters, self.steps)
        kernel = Kernel(
            "persistent", Stage.THREAD, params, Block((), (*self.head.ops, *body.ops)), (Size.of(self.most),), self.all_threads, MappingProxyType({}),
            MappingProxyType(attrs), self.step.ops[0].kernel.span,
        )  # fmt: skip
        table, counters = self.table.type, self.counters.type
        assert isinstance(table, Tensor)
        assert isinstance(counters, Tensor)
        inputs: tuple[ProgramArray | ScalarInput, ...] = (ProgramArray("table", table, "input"), ProgramArray("counters", counters, "inout"), ScalarInput("steps", i64))
        if self.clocks:
            times = self.times.type
            assert isinstance(times, Tensor)
            inputs = (*inputs, ProgramArray("times", times, "inout"))
            kernel = replace(kernel, params=(*params, self.times))
        return Program(self.step.name, inputs, (), (), (KernelCall(kernel, tuple(item.name for item in inputs)),))

    def _with_producer(self, ring: RingWriter, tasks: Builder) -> Builder:
        """The last warp fills the ring, the others run tasks."""
        body = Builder()
        ring.begin(body, self.leads)

        def run(inner: Builder) -> Sequence[Value]:
            inner.ops += tasks.ops
            return []

        def fill(inner: Builder) -> Sequence[Value]:
            def one(at: Builder) -> Sequence[Value]:
                ring.produce(at, self.steps)
                return []

            inner.if_(inner.op("eq", self.thread, inner.index(self.threads)), one, lambda at: [])
            return []

        body.if_(body.op("lt", self.thread, body.index(self.threads)), run, fill)
        return body

    # -- loops ----------------------------------------------------------------------------------------------------

    def _loop(self, b: Builder, loop: TaskLoop, now: Value) -> None:
        if loop.count == 1:
            self._ops(b, loop, now, b.index(0))
            return

        def iteration(inner: Builder, index: Value) -> Sequence[Value]:
            self._ops(inner, loop, now, index)
            return []

        b.for_(b.index(0), b.index(loop.count), b.index(1), [], iteration, name="iteration")

    def _ops(self, b: Builder, loop: TaskLoop, now: Value, index: Value) -> None:
        done = b.add(b.mul(now, b.index(loop.count)), index)  # iterations of this loop before this one, over all steps
        first_entry = b.add(b.index(loop.first_entry), b.mul(index, b.index(len(loop.columns))))
        for place, op in enumerate(loop.ops):
            self.stamp_at = b.add(b.index(loop.first_instance + place), b.mul(index, b.index(len(loop.ops))))
            with b.at(op.kernel.span):
                self._op(b, loop, op, now, index, done, first_entry)

    def _op(self, b: Builder, loop: TaskLoop, op: PersistentOp, now: Value, index: Value, done: Value, first_entry: Value) -> None:
        def take_part(inner: Builder) -> Sequence[Value]:
            kept = self.thread, self.block, self.leads
            self.thread, self.block = inner.op("thread_id", name="thread", fresh=True), inner.op("program_id", name="block", axis=0, fresh=True)
            self.leads = inner.op("eq", self.thread, inner.index(0))
            run(inner)
            self.thread, self.block, self.leads = kept
            return []

        def run(inner: Builder) -> Sequence[Value]:
            self._delay(inner, op, now, index)
            self._stamp(inner, 0)
            chosen = self._number(inner, loop, op, op.choice, first_entry) if op.others else None
            self._chosen(inner, op.bodies, chosen, 0, lambda at, body: self._body(at, loop, body, op.tasks, now, index, done, first_entry))
            return []

        if op.tasks <= 0:
            return
        self._fetch_next(b, loop, op, index)

        def stand_by(inner: Builder) -> Sequence[Value]:
            """A block without a task goes on with what it will read later, or asks for what all will read."""
            self._fetch_idle(inner, loop, op, first_entry)
            if op.number in self.stream.depth:
                for group in range(self.stream.depth[op.number]):
                    self._behind(inner, loop, op, index, group)
            return []

        # Every block has a unit of what comes by a ring.
        most = self.most if self._by_ring(op) else op.tasks
        b.if_(b.op("lt", self.block, b.index(most)), take_part, stand_by)

    def _by_ring(self, op: PersistentOp) -> bool:
        return self.ring is not None and op.number in self.ring.plan.ops

    def _delay(self, b: Builder, op: PersistentOp, now: Value, index: Value) -> None:
        """One time in sixteen, sleep: whoever relies on blocks that come at the same time is found out."""
        if not self.delays:
            return
        mixed = b.add(b.add(b.mul(self.block, b.index(7919)), b.mul(now, b.index(104729))), b.add(b.mul(index, b.index(31337)), b.index(15485863 * (1 + op.number))))
        drawn = b.op("and", b.op("shr", b.mul(b.op("and", mixed, b.index((1 << 24) - 1)), b.index(2654435761)), b.index(14)), b.index(1023))

        def sleep(inner: Builder) -> Sequence[Value]:
            inner.multi("nanosleep", inner.op("cast", inner.op("floordiv", inner.mul(drawn, inner.index(self.delays)), inner.index(64)), dtype=u32))
            return []

        b.if_(b.op("lt", drawn, b.index(64)), sleep, lambda inner: [])

    def _chosen(self, b: Builder, bodies: Sequence[PersistentOp], chosen: Value | None, first: int, build: Callable[[Builder, PersistentOp], None]) -> None:
        """The op with the kernel of this iteration."""
        if chosen is None or len(bodies) == 1:
            build(b, bodies[0])
            return

        def this(inner: Builder) -> Sequence[Value]:
            build(inner, bodies[0])
            return []

        def another(inner: Builder) -> Sequence[Value]:
            self._chosen(inner, bodies[1:], chosen, first + 1, build)
            return []

        b.if_(b.op("eq", chosen, b.index(first)), this, another)

    def _number(self, b: Builder, loop: TaskLoop, op: PersistentOp, name: str, first_entry: Value) -> Value:
        """A whole number of this iteration's row of the table."""
        return b.op("bitcast", b.op("load", self.table, b.add(first_entry, b.index(loop.columns.index((op.position, name))))), dtype=i64)

    def _body(self, b: Builder, loop: TaskLoop, op: PersistentOp, most: int, now: Value, index: Value, done: Value, first_entry: Value) -> None:
        """The op with one kernel. `most`: tasks of the kernel that has most; blocks that have none of this one's wait and count all the same."""
        mapping = self._arguments(b, loop, op, first_entry)
        if self._by_ring(op):
            self._units(b, loop, op, mapping, now, index, done, first_entry)
            return
        if self._is_single(op) and op.tasks == most:
            self._single(b, loop, op, mapping, now, index, done)
            return
        if (beside := self._one_each(op)) and op.tasks == most:
            self._single_groups(b, loop, op, mapping, now, index, done, beside)
            return
        flats = [
            self._bytes(b, b.add(first_entry, b.index(loop.columns.index((op.position, run.name)))), run) for run in self.stream.runs.get(op.number, ())
        ]
        self._await(b, loop, op, now, index, done)
        self._tasks(b, loop, op, mapping, flats, index)
        self._done(b, op)

    def _stamp(self, b: Builder, which: int) -> None:
        """Write down the time."""
        if not self.clocks:
            return

        def write(at: Builder) -> None:
            place = at.add(at.mul(at.add(at.mul(self.block, at.index(self.step.length)), self.stamp_at), at.index(STAMPS)), at.index(which))
            at.multi("store", self.times, place, at.op("cast", at.op("global_timer"), dtype=i64))

        self._once(b, write)

    def _once(self, b: Builder, what: Any) -> None:
        """By one thread of the block."""

        def act(inner: Builder) -> Sequence[Value]:
            what(inner)
            return []

        b.if_(self.leads, act, lambda inner: [])

    # -- waits ----------------------------------------------------------------------------------------------------

    def _await(self, b: Builder, loop: TaskLoop, op: PersistentOp, now: Value, index: Value, done: Value) -> None:
        first, rest = (lists[op.number] if self.waits else [] for lists in (loop.first, loop.rest))

        def listed(at: Builder, waits: Sequence[OpWait]) -> None:
            for wait in waits:
                self._wait(at, op, wait, now, done)

        def act(at: Builder) -> None:
            if loop.count == 1 or first == rest:
                listed(at, first)
                return

            def begin(inner: Builder) -> Sequence[Value]:
                listed(inner, first)
                return []

            def go_on(inner: Builder) -> Sequence[Value]:
                listed(inner, rest)
                return []

            at.if_(at.op("eq", index, at.index(0)), begin, go_on)

        if first or (rest and loop.count > 1):
            self._once(b, act)
        self._barrier(b, self.threads)
        self._stamp(b, 1)

    def _wait(self, b: Builder, op: PersistentOp, wait: OpWait, now: Value, done: Value) -> None:
        other = self.loop_of[wait.op]
        target = next(o for o in other.ops if o.number == wait.op)
        arrivals = b.index(self.most if self._by_ring(target) else min(target.tasks, self.most))
        if wait.which == "same":
            times = b.add(done, b.index(1))
        elif wait.which == "previous":
            times = done
        else:
            times = b.mul(now if wait.which == "last_step" else b.add(now, b.index(1)), b.index(other.count))
        number = b.op("cast", b.mul(arrivals, times), dtype=u32)
        attrs: dict[str, Attr] = {"code": 1 + op.number * len(self.step.ops) + wait.op}
        if self.pause:
            attrs["pause"] = self.pause
        if self.polls != "acquire":
            attrs["polls"] = self.polls
        place = b.index(LINE * (1 + wait.op * self.copies))
        if self.copies > 1:
            place = b.add(place, b.mul(b.op("mod", self.block, b.index(self.copies)), b.index(LINE)))
        b.emit("await_count", (self.counters, place, number), attrs)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _is_single(self, op: PersistentOp) -> bool:
        """Whether each block has one task at most, and its threads need not meet."""
        return self.early_loads and op.tasks <= self.most and op.kernel.threads == self.threads and not _meets(op.kernel)

    def _units(self, b: Builder, loop: TaskLoop, op: PersistentOp, mapping: dict[Value, Value], now: Value, index: Value, done: Value, first_entry: Value) -> None:
        """The tasks of an op whose weights come by the ring, warp by warp. What else is constant and common to all of them is loaded before the wait: behind the copies of the
        ring it would take long to come."""
        assert self.ring is not None
        ring = self.ring.plan.ops[op.number]
        memories = {mapping[param]: piece for param, name in zip(op.kernel.params, op.args, strict=True) if (piece := ring.piece(name)) is not None}
        phase, self.phase = self.phase, self.phase + 1

        def placed(at: Builder, o: Op, task: Value, thread: Value) -> Sequence[Value] | None:
            return self._placed(at, o, (task,), thread, op.kernel.threads, phase)

        first = self.ring.first_slot(b, self.step_index, self.step.loops.index(loop), index, ring)
        if ring.meets:
            self._await(b, loop, op, now, index, done)
            whole = clone_block(write_out(op.kernel).body, mapping)
            self.ring.consume_tasks(b, op, self.thread, self.block, first, memories, whole.ops, placed, lambda at: self._barrier(at, op.kernel.threads))
            self._done(b, op)
            return
        names = WarpNames()
        body = Block((), tuple(by_warps(clone_block(write_out(op.kernel).body, mapping), names)))
        common, rest = self._split(mark_unread(body, memories), {names.warp, names.thread})
        rest = loads_first(rest)
        lane, own = b.op("and", self.thread, b.index(WARP - 1)), b.op("shr", self.thread, b.index(WARP.bit_length() - 1))
        given: dict[Value, Value] = {names.lane: lane}

        def once(ops: Sequence[Op]) -> None:
            b.ops += rewrite_block(Block((), tuple(ops)), lambda at, o: placed(at, o, lane, lane), given).ops

        if self.early_loads:
            loads, common = early(common, {o.results[0] for o in b.ops if o.opcode == "tensor_at" and o.attrs.get("constant")})
            # A number that the warp makes together: no load can come before the count of the op before, which would wait for it.
            known = b.op("cast", lane, dtype=i32)
            given[names.lane] = b.op("cast", b.op("shuffle", known, known, mode="idx"), dtype=i64) if loads else lane
            once(loads)
            given[names.lane] = lane
        self._await(b, loop, op, now, index, done)
        once(common)
        rows = self._rows(b, loop, op, mapping, rest, phase, first_entry)

        def by_row(at: Builder, o: Op, task: Value, thread: Value) -> Sequence[Value] | None:
            row = rows.get(o.operands[0]) if o.opcode == "load" else None
            return placed(at, o, task, thread) if row is None else [self._read_row(at, o, row)]

        self.ring.consume(b, op, own, lane, self.block, first, memories, rest, names, given, by_row)
        self._done(b, op)

    def _rows(self, b: Builder, loop: TaskLoop, op: PersistentOp, mapping: dict[Value, Value], rest: Sequence[Op], phase: int, first_entry: Value) -> dict[Value, Value]:
        """Rows that all tasks read in loops, in shared memory: gives it for each of their arrays."""
        names = {mapping[param]: name for param, name in zip(op.kernel.params, op.args, strict=True) if isinstance(param.type, Tensor)}
        assert self.ring is not None
        pieces = self.ring.plan.ops[op.number].pieces
        found: dict[Value, Value] = {}
        for array in row_arrays(rest, [value for value, name in names.items() if all(piece.name != name for piece in pieces)]):
            size = dense_bytes(array)
            memory = self.head.op("alloc", dtype=u8, shape=(size,), space="shared", align=16, phase=phase, name=f"{array.name}.row")
            entry = b.add(first_entry, b.index(loop.columns.index((op.position, names[array]))))
            flat = b.emit("tensor_at", (self.table, entry), {"dtype": u8, "shape": (size,), "strides": (1,), "align": 16}, array.name)[0]
            first = b.mul(self.thread, b.index(ROW_VECTOR))
            places = [(b.add(first, b.index(begin)), begin) for begin in range(0, size, self.threads * ROW_VECTOR)]
            whole = [begin + self.threads * ROW_VECTOR <= size for _, begin in places]
            # All are on their way before the first is stored.
            masks = [None if full else b.op("lt", place, b.index(size)) for (place, _), full in zip(places, whole, strict=True)]
            values = [
                b.op("load", flat, place, width=ROW_VECTOR) if mask is None else b.op("load", flat, place, mask, width=ROW_VECTOR, masked=True) for (place, _), mask in zip(places, masks, strict=True)
            ]
            for (place, _), mask, value in zip(places, masks, values, strict=True):
                def keep(at: Builder, place: Value = place, value: Value = value, memory: Value = memory) -> Sequence[Value]:
                    at.multi("store", memory, place, value)
                    return []

                if mask is None:
                    keep(b)
                else:
                    b.if_(mask, keep, lambda inner: [])
            found[array] = memory
        if found:
            self._barrier(b, self.threads)
        return found

    def _read_row(self, b: Builder, op: Op, memory: Value) -> Value:
        """What stands for a load of a row: the same bytes of shared memory."""
        array, result = op.operands[0].type, op.result.type
        assert isinstance(array, Tensor)
        assert isinstance(result, Scalar | Vec)
        offset = b.index(0)
        for index, stride in zip(op.operands[1 : 1 + array.rank], array.strides, strict=True):
            offset = b.add(offset, b.mul(index, b.index(stride.evaluate({}) * array.dtype.itemsize)))
        if not op.attrs.get("masked"):
            return typed_read(b, memory, offset, array.dtype, result)
        mask = op.operands[-1]
        return zero_where_not(b, mask, typed_read(b, memory, b.select(mask, offset, b.index(0)), array.dtype, result))

    def _single(self, b: Builder, loop: TaskLoop, op: PersistentOp, mapping: dict[Value, Value], now: Value, index: Value, done: Value) -> None:
        """The only task of a block: its weights are on their way while it waits."""
        phase, self.phase = self.phase, self.phase + 1
        body = clone_block(write_out(op.kernel).body, mapping)
        constant = {o.results[0] for o in b.ops if o.opcode == "tensor_at" and o.attrs.get("constant")}
        first, rest = early(body.ops, constant)
        ids = self._along(b, self.block, op.grid)
        given: dict[Value, Value] = {}
        b.ops += rewrite_block(Block((), tuple(first)), lambda at, o: self._placed(at, o, ids, self.thread, self.threads, phase), given).ops
        if op.number in self.stream.depth:
            for group in range(self.stream.depth[op.number]):
                self._behind(b, loop, op, index, group)
        self._await(b, loop, op, now, index, done)
        b.ops += rewrite_block(Block((), tuple(rest)), lambda at, o: self._placed(at, o, ids, self.thread, self.threads, phase), given).ops
        self._done(b, op)

    def _one_each(self, op: PersistentOp) -> int:
        """Groups of a block's threads that have one task at most of a product of a few rows by matrix instructions; 0 where some have more, or where it is another op."""
        if not self.early_loads or not op.kernel.attrs.get("row_matrix") or op.kernel.threads >= self.threads:
            return 0
        beside = self._groups(op)
        return beside if op.tasks <= beside * self.most else 0

    def _single_groups(self, b: Builder, loop: TaskLoop, op: PersistentOp, mapping: dict[Value, Value], now: Value, index: Value, done: Value, beside: int) -> None:
        """The only task of each group of threads: the first of its weights are on their way while it waits."""
        phase, self.phase = self.phase, self.phase + 1
        width = b.index(op.kernel.threads)
        group, thread = b.op("floordiv", self.thread, width, name="group"), b.op("mod", self.thread, width)
        place = b.add(self.block, b.mul(group, self.blocks)) if beside > 1 else self.block
        takes_part = b.op("and", b.op("lt", self.thread, b.index(beside * op.kernel.threads)), b.op("lt", place, b.index(op.tasks)))
        body = clone_block(write_out(op.kernel, EARLY_TURNS).body, mapping)
        constant = {o.results[0] for o in b.ops if o.opcode == "tensor_at" and o.attrs.get("constant")}
        first, rest = early(body.ops, constant, EARLY_WORDS)
        ids = self._along(b, place, op.grid)
        given: dict[Value, Value] = {}

        def ahead(at: Builder, o: Op) -> Sequence[Value] | None:
            if o.opcode == "load":
                return at.emit("load", (*o.operands[:-1], at.op("and", o.operands[-1], takes_part)), o.attrs)
            return self._placed(at, o, ids, thread, op.kernel.threads, phase)

        b.ops += rewrite_block(Block((), tuple(first)), ahead, given).ops
        self._await(b, loop, op, now, index, done)

        def run(inner: Builder) -> Sequence[Value]:
            self.group = _ThreadGroup(group, beside) if beside > 1 else None
            inner.ops += rewrite_block(Block((), tuple(rest)), lambda at, o: self._placed(at, o, ids, thread, op.kernel.threads, phase), given).ops
            self.group = None
            return []

        b.if_(takes_part, run, lambda inner: [])
        self._done(b, op)

    def _done(self, b: Builder, op: PersistentOp) -> None:
        """The block has ended its tasks of an op."""
        self._barrier(b, self.threads)
        self._stamp(b, 2)
        if self.copies == 1:
            self._once(b, lambda at: at.multi("count_up", self.counters, at.index(LINE * (1 + op.number))))
            return

        def count(at: Builder) -> Sequence[Value]:
            at.multi("count_up", self.counters, at.add(at.index(LINE * (1 + op.number * self.copies)), at.mul(self.thread, at.index(LINE))))
            return []

        b.if_(b.op("lt", self.thread, b.index(self.copies)), count, lambda at: [])

    # -- weights to come ------------------------------------------------------------------------------------------

    def _fetch(self, b: Builder, pieces: Sequence[StreamPiece], index: Value) -> None:
        """Ask for these pieces; `index` is the iteration of the loop that asks."""
        for piece in pieces:
            loop = self.step.loops[piece.loop]
            op = next(o for o in loop.ops if o.number == piece.op)
            iteration = b.index(0) if loop.count == 1 or (piece.ahead == 0 and loop is not self.current) else b.add(index, b.index(piece.ahead))
            entry = b.add(b.index(loop.first_entry + loop.columns.index((op.position, piece.run.name))), b.mul(iteration, b.index(len(loop.columns))))
            task = b.add(self.block, b.mul(self.blocks, b.index(piece.turn))) if piece.turn else self.block

            def ask(at: Builder, piece: StreamPiece = piece, entry: Value = entry, task: Value = task) -> Sequence[Value]:
                flat = self._bytes(at, entry, piece.run)
                self._lines(at, flat, at.add(at.mul(task, at.index(piece.run.stride)), at.index(piece.run.start + piece.offset)), piece.size)
                return []

            b.if_(b.op("lt", task, b.index(op.tasks)), ask, lambda inner: [])

    def _fetch_next(self, b: Builder, loop: TaskLoop, op: PersistentOp, index: Value) -> None:
        """Ask for the weights that the op reads in the next iteration, each block for a part of them, whoever reads it: where an iteration has few, all come from the second-level cache."""
        arrays = next_arrays(loop, op, self.next_bytes)
        if not arrays:
            return

        def ask(at: Builder) -> Sequence[Value]:
            row = at.add(at.index(loop.first_entry), at.mul(at.add(index, at.index(1)), at.index(len(loop.columns))))
            for name, nbytes in arrays:
                size = min(nbytes, -(-nbytes // self.most // LINE_BYTES) * LINE_BYTES)
                first = at.mul(self.block, at.index(size))

                def part(inner: Builder, name: str = name, nbytes: int = nbytes, size: int = size, first: Value = first) -> Sequence[Value]:
                    flat = self._bytes(inner, inner.add(row, inner.index(loop.columns.index((op.position, name)))), WeightRun(name, 0, 0, size, nbytes))
                    inner.multi("prefetch", flat, inner.op("min", first, inner.index(nbytes - size)), bytes=size)
                    return []

                at.if_(at.op("lt", first, at.index(nbytes)), part, lambda inner: [])
            return []

        # Not by the thread that looks at counters.
        asks = b.op("eq", self.thread, b.index(WARP if self.threads > WARP else 0))
        b.if_(b.op("and", asks, b.op("lt", index, b.index(loop.count - 1))), ask, lambda inner: [])

    def _fetch_idle(self, b: Builder, loop: TaskLoop, op: PersistentOp, first_entry: Value) -> None:
        """Blocks without a task of an op ask for lines of weights, each thread for every so many."""
        fetches = self.idle.get(op.number, [])
        if not fetches:
            return
        together = (self.most - op.tasks) * self.threads
        mine = b.add(b.mul(b.sub(self.block, b.index(op.tasks)), b.index(self.threads)), self.thread)
        first = b.mul(mine, b.index(LINE_BYTES))
        for fetch in fetches:
            other = next(o for o in loop.ops if o.number == fetch.op)
            flat = self._bytes(b, b.add(first_entry, b.index(loop.columns.index((other.position, fetch.run.name)))), fetch.run)
            for begin in range(fetch.begin, fetch.end, together * LINE_BYTES):
                place = b.add(first, b.index(begin))

                def ask(at: Builder, flat: Value = flat, place: Value = place) -> Sequence[Value]:
                    at.multi("prefetch", flat, place)
                    return []

                b.if_(b.op("lt", place, b.index(fetch.end)), ask, lambda inner: [])

    def _lines(self, b: Builder, flat: Value, place: Value, size: int) -> None:
        """Ask for so many bytes: each thread for lines of the cache."""
        first = b.mul(self.thread, b.index(LINE_BYTES))
        for begin in range(0, size, LINE_BYTES * self.threads):
            left = -(-(size - begin) // LINE_BYTES)

            def one(at: Builder, begin: int = begin) -> Sequence[Value]:
                at.multi("prefetch", flat, at.add(at.add(place, first), at.index(begin)))
                return []

            if left >= self.threads:
                one(b)
            else:
                b.if_(b.op("lt", self.thread, b.index(left)), one, lambda inner: [])

    def _bytes(self, b: Builder, entry: Value, run: WeightRun) -> Value:
        return b.emit("tensor_at", (self.table, entry), {"dtype": u8, "shape": (run.nbytes,), "strides": (1,), "align": 16, "constant": True}, run.name)[0]

    def _behind(self, b: Builder, loop: TaskLoop, op: PersistentOp, index: Value, group: int) -> None:
        """What a block reads behind this op: a group of it."""
        self.current = loop
        inner, last = self.stream.inner[op.number][group], self.stream.last[op.number][group]
        if loop.count == 1 or inner == last:
            self._fetch(b, last, index)
            return

        def go_on(at: Builder) -> Sequence[Value]:
            self._fetch(at, inner, index)
            return []

        def leave(at: Builder) -> Sequence[Value]:
            self._fetch(at, last, index)
            return []

        b.if_(b.op("lt", index, b.index(loop.count - 1)), go_on, leave)

    def _ahead(self, b: Builder, loop: TaskLoop, op: PersistentOp, index: Value, task: Value, flats: Sequence[Value]) -> None:
        """What a block asks for as it begins a task: a later task of the same op, or, in its last tasks, what comes behind the op."""
        depth = self.stream.depth[op.number]
        later = b.add(task, b.mul(self.blocks, b.index(depth)))

        def own(at: Builder) -> Sequence[Value]:
            for run, flat in zip(self.stream.runs[op.number], flats, strict=True):
                self._lines(at, flat, at.add(at.mul(later, at.index(run.stride)), at.index(run.start)), run.size)
            return []

        def behind(group: int) -> Callable[[Builder], Sequence[Value]]:
            def build(at: Builder) -> Sequence[Value]:
                if group == depth - 1:
                    self._behind(at, loop, op, index, group)
                    return []
                after = at.add(task, at.mul(self.blocks, at.index(depth - 1 - group)))

                def here(inner: Builder) -> Sequence[Value]:
                    self._behind(inner, loop, op, index, group)
                    return []

                at.if_(at.op("lt", after, at.index(op.tasks)), here, behind(group + 1))
                return []

            return build

        b.if_(b.op("lt", later, b.index(op.tasks)), own, behind(0))

    def _tasks(self, b: Builder, loop: TaskLoop, op: PersistentOp, mapping: dict[Value, Value], flats: Sequence[Value], iteration: Value) -> None:
        kernel = op.kernel
        body = clone_block(write_out(kernel).body if op.tasks > 1 else kernel.body, mapping)
        phase, self.phase = self.phase, self.phase + 1
        if kernel.threads == self.threads:
            fetch = (lambda at, task: self._ahead(at, loop, op, iteration, task, flats)) if flats else None
            self._walk(b, op, body, self.block, self.blocks, self.thread, phase, fetch)
        elif not _meets(kernel) and (self.threads % kernel.threads == 0 or (self.ring is not None and self.threads >= 2 * kernel.threads)):
            beside = self.threads // kernel.threads

            def walk(inner: Builder) -> Sequence[Value]:
                width = inner.index(kernel.threads)
                # The first tasks go to as many blocks as there are.
                first = inner.add(self.block, inner.mul(inner.op("floordiv", self.thread, width), self.blocks))
                self._walk(inner, op, body, first, inner.mul(self.blocks, inner.index(beside)), inner.op("mod", self.thread, width), phase)
                return []

            if beside * kernel.threads == self.threads:
                walk(b)
            else:
                b.if_(b.op("lt", self.thread, b.index(beside * kernel.threads)), walk, lambda inner: [])
        elif (beside := self._groups(op)) > 1:
            self._grouped(b, op, body, phase, beside)
        else:

            def take_part(inner: Builder) -> Sequence[Value]:
                self._zigzag(inner, op, body, phase, self.block, self.most, self.thread)
                return []

            b.if_(b.op("lt", self.thread, b.index(kernel.threads)), take_part, lambda inner: [])

    def _arguments(self, b: Builder, loop: TaskLoop, op: PersistentOp, first_entry: Value) -> dict[Value, Value]:
        """What stands for the kernel's parameters: tensors at addresses of the table, and numbers."""
        found: dict[Value, Value] = {}
        for param, name in zip(op.kernel.params, op.args, strict=True):
            if not isinstance(param.type, Tensor):
                assert isinstance(param.type, Scalar)
                if (op.position, f"#{name}") in loop.columns:
                    bits = self._number(b, loop, op, f"#{name}", first_entry)
                    number = bits if isinstance(op.numbers[name], int) else b.op("bitcast", bits, dtype=f64)
                    found[param] = b.cast(number, param.type.dtype)
                else:
                    found[param] = b.const(op.numbers[name], param.type.dtype)
                continue
            place = b.add(first_entry, b.index(loop.columns.index((op.position, name))))
            constant = all(slots[op.position][name].constant for slots in loop.slots)
            attrs: dict[str, Attr] = {
                "dtype": param.type.dtype, "shape": tuple(s.evaluate({}) for s in param.type.shape), "strides": tuple(s.evaluate({}) for s in param.type.strides),
                "align": param.type.align,
            }  # fmt: skip
            if constant:
                attrs["constant"] = True
            found[param] = b.emit("tensor_at", (self.table, place), attrs, param.name)[0]
        return found

    def _groups(self, op: PersistentOp) -> int:
        """Groups of the block's threads that run tasks of an op beside each other, each as a block of its own: with shared memory and a barrier of its own."""
        kernel = op.kernel
        if op.tasks <= self.most or kernel.threads % WARP or not _can_be_grouped(kernel):
            return 1
        fitting: int = self.room // max(1, shared_places(kernel)[1])
        return max(1, min(self.threads // kernel.threads, -(-op.tasks // self.most), MOST_GROUPS, fitting))

    def _grouped(self, b: Builder, op: PersistentOp, body: Block, phase: int, beside: int) -> None:
        """Tasks by groups of threads."""

        def walk_tasks(inner: Builder) -> Sequence[Value]:
            width = inner.index(op.kernel.threads)
            group, thread = inner.op("floordiv", self.thread, width, name="group"), inner.op("mod", self.thread, width)
            self.group = _ThreadGroup(group, beside)
            # The first tasks go to as many blocks as there are.
            place = inner.add(self.block, inner.mul(group, self.blocks))
            if op.tasks <= beside * self.most:
                ids = self._along(inner, place, op.grid)

                def run(at: Builder) -> Sequence[Value]:
                    at.ops += rewrite_block(body, lambda deep, o: self._placed(deep, o, ids, thread, op.kernel.threads, phase), {}).ops
                    return []

                inner.if_(inner.op("lt", place, inner.index(op.tasks)), run, lambda at: [])
            else:
                self._zigzag(inner, op, body, phase, place, beside * self.most, thread)
            self.group = None
            return []

        if beside * op.kernel.threads == self.threads:
            walk_tasks(b)
        else:
            b.if_(b.op("lt", self.thread, b.index(beside * op.kernel.threads)), walk_tasks, lambda inner: [])

    def _zigzag(self, b: Builder, op: PersistentOp, body: Block, phase: int, first: Value, most: int, thread: Value) -> None:
        """Tasks in rows of as many as there are blocks, or groups of their threads, every other row backwards: where the first tasks have most to do, as those of attention with few keys, no
        block has two of them."""
        turns = -(-op.tasks // most)

        def turn(inner: Builder, row: Value) -> Sequence[Value]:
            back = inner.op("eq", inner.op("mod", row, inner.index(2)), inner.index(1))
            place = inner.select(back, inner.sub(inner.index(most - 1), first), first)
            task = inner.add(inner.mul(row, inner.index(most)), place)

            def run(at: Builder) -> Sequence[Value]:
                self._walk(at, op, body, task, at.index(op.tasks), thread, phase)
                return []

            inner.if_(inner.op("lt", task, inner.index(op.tasks)), run, lambda at: [])
            return []

        if turns == 1:
            self._walk(b, op, body, first, b.index(most), thread, phase)
        else:
            b.for_(b.index(0), b.index(turns), b.index(1), [], turn, name="row")

    def _walk(
        self, b: Builder, op: PersistentOp, body: Block, first: Value, step: Value, thread: Value, phase: int, fetch: Callable[[Builder, Value], None] | None = None
    ) -> None:
        """The tasks from `first` on, with `thread` as the number of the thread."""
        meets = _meets(op.kernel)
        common, rest = self._split(body, set()) if op.tasks > self.most and not meets else ([], list(body.ops))
        given: dict[Value, Value] = {}
        b.ops += rewrite_block(Block((), tuple(common)), lambda at, o: self._placed(at, o, (), thread, op.kernel.threads, phase), given).ops

        def turn(inner: Builder, index: Value) -> Sequence[Value]:
            if fetch is not None:
                fetch(inner, index)
            ids = self._along(inner, index, op.grid)
            placed = rewrite_block(Block(body.args, tuple(rest)), lambda at, o: self._placed(at, o, ids, thread, op.kernel.threads, phase), given)
            inner.ops += placed.ops
            if meets:
                self._barrier(inner, op.kernel.threads)  # before the next task writes to the shared memory of this one
            return []

        b.for_(first, b.index(op.tasks), step, [], turn, name="task")

    def _split(self, body: Block, varies: set[Value]) -> tuple[list[Op], list[Op]]:
        """The ops that all tasks have in common, and the others; `varies`: what else is another number for another task."""
        numbers = {value for o in walk(body) if o.opcode == "program_id" for value in o.results} | varies
        written = {o.operands[0] for o in walk(body) if o.operands and OPS[o.opcode].effect not in ("pure", "read", "control", "sync")}
        common, rest = split(body.ops, numbers, written, self.keep)
        return [o for o in common if o.opcode != "program_id"], [*(o for o in common if o.opcode == "program_id"), *rest]

    def _placed(self, b: Builder, op: Op, ids: Sequence[Value], thread: Value, threads: int, phase: int) -> Sequence[Value] | None:
        """What stands for an op of a task; None for the op itself."""
        if op.opcode == "program_id":
            axis = op.attrs["axis"]
            assert isinstance(axis, int)
            return [ids[axis]]
        if op.opcode == "thread_id":
            return [thread]
        if op.opcode in ("wait_previous", "release_next"):
            return []
        if op.opcode == "alloc":
            return [self._alloc(op, phase)]
        grown = self.grown.get(op.operands[0]) if op.operands else None
        if grown is not None:
            group, extent = grown
            return b.emit(op.opcode, (op.operands[0], b.add(op.operands[1], b.mul(group, b.index(extent))), *op.operands[2:]), op.attrs)
        if op.opcode == "barrier" and threads < self.all_threads:
            self._barrier(b, threads)
            return []
        return None

    def _alloc(self, op: Op, phase: int) -> Value:
        """Memory of a task: a thread's own must not grow with every turn of a loop; ops of a step share what is shared, and each group of threads has its own."""
        if not _is_shared(op):
            return self.head.append(op)[0]
        attrs = {**{name: value for name, value in op.attrs.items() if name != "common"}, "phase": phase}
        if self.group is None:
            return self.head.append(replace(op, attrs=MappingProxyType(attrs)))[0]
        shape = op.attrs["shape"]
        assert isinstance(shape, tuple)
        extent = shape[0]
        assert isinstance(extent, int)
        memory = self.head.emit("alloc", (), {**attrs, "shape": (extent * self.group.count, *shape[1:])}, op.results[0].name)[0]
        self.grown[memory] = self.group.number, extent
        return memory

    def _along(self, b: Builder, index: Value, grid: Sequence[int]) -> list[Value]:
        """A task's number along each axis of the kernel's grid."""
        ids: list[Value] = []
        for extent in grid[:-1]:
            ids.append(b.op("mod", index, b.index(extent)))
            index = b.op("floordiv", index, b.index(extent))
        return [*ids, index]

    def _barrier(self, b: Builder, threads: int) -> None:
        if self.group is not None:
            b.multi("named_barrier", b.add(b.index(_GROUP_BARRIER), self.group.number), threads=threads)
        elif threads == self.all_threads:
            b.multi("barrier")
        else:
            b.multi("named_barrier", b.index(_TASK_BARRIER if threads == self.threads else _OWN_BARRIER), threads=threads)

    # -- the end --------------------------------------------------------------------------------------------------

    def _end(self, b: Builder) -> None:
        """The last block to end writes down how many steps were made."""

        def leave(at: Builder) -> None:
            before = at.op("atomic", self.counters, at.index(EXITS), at.const(1, u32), kind="add", scope="device", order="acq_rel")
            last = at.op("eq", at.op("cast", before, dtype=i64), at.sub(self.blocks, at.index(1)))

            def close(inner: Builder) -> Sequence[Value]:
                inner.multi("store", self.counters, inner.index(EXITS), inner.const(0, u32))
                inner.multi("store", self.counters, inner.index(STEPS), inner.op("cast", inner.add(self.made, self.steps), dtype=u32))
                return []

            at.if_(last, close, lambda inner: [])

        self._once(b, leave)
