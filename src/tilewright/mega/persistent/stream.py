"""What each block reads of weights, in order, and when it asks for it.

In: a `StepPlan`, and how far to look ahead. Out: for each op, which bytes of which constant arrays a task reads, and a plan of prefetches into the second-level
cache. A block's weights are a stream: those of its tasks, op after op. Whatever it waits for, the stream goes on, up to `ahead` bytes: so memory is busy while
blocks wait for each other. A prefetch changes no result.

Which bytes a task reads follows from the indices of its loads, as ranges: they must be whole runs of memory that move evenly from task to task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Tensor, Vec
from tilewright.mega.persistent.records import PersistentOp, StepPlan, TaskLoop

LEAST_BYTES = 64 << 10
"""Smaller arrays are not worth a prefetch."""
UNIT = 16
"""Bytes that prefetches are multiples of."""
LINE = 128
"""Bytes of a line of the second-level cache."""
NEXT_BYTES = 12 << 20
"""Weights of an iteration of a loop, at most, where each asks for those of the next: several of them lie in the second-level cache beside each other."""
MOST_GROUPS = 8
"""Tasks over which a look ahead is spread, at most."""

Range = tuple[int, int] | None


@dataclass(frozen=True)
class WeightRun:
    """Bytes of an array that task t reads: `size` from `start + t * stride` on."""

    name: str
    start: int
    stride: int
    size: int
    nbytes: int
    """Of the array."""


@dataclass(frozen=True)
class StreamPiece:
    """A part of what a block reads in its turn `turn` of an op."""

    loop: int
    op: int
    ahead: int
    """Iterations of the loop from here to there."""
    turn: int
    run: WeightRun
    offset: int
    size: int


@dataclass
class StreamPlan:
    """Prefetches. `depth`: how many turns ahead an op fetches its own; `inner`, `last`: what it fetches of ops behind it, in its last turns, when another iteration
    of its loop follows and when none does."""

    runs: dict[int, tuple[WeightRun, ...]] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=dict)
    inner: dict[int, list[list[StreamPiece]]] = field(default_factory=dict)
    last: dict[int, list[list[StreamPiece]]] = field(default_factory=dict)
    begin: list[StreamPiece] = field(default_factory=list)


def next_arrays(loop: TaskLoop, op: PersistentOp, most: int) -> list[tuple[str, int]]:
    """The constant arrays that an op reads in every iteration of a loop, with their bytes, where an iteration reads no more than `most` of all of them; those that iterations share are left out."""
    own: dict[str, int] = {}
    total = 0
    for other in loop.ops:
        for name in sorted({name for body in other.bodies for name in body.reads}):
            slots = [programs[other.position][name] for programs in loop.slots]
            if not all(slot.constant for slot in slots):
                continue
            total += max(slot.nbytes for slot in slots)
            least = min(slot.nbytes for slot in slots) // UNIT * UNIT
            if other is op and least and all(slot.align >= UNIT for slot in slots) and len({slot.region.space for slot in slots}) > 1:
                own[name] = least
    return sorted(own.items()) if loop.count > 1 and total <= most else []


def plan_stream(step: StepPlan, blocks: int, ahead: int) -> StreamPlan:
    """The prefetches of a step. `ahead`: bytes of each block."""
    found = StreamPlan()
    threads = max(op.kernel.threads for op in step.bodies)
    for op in step.ops:
        runs = weight_runs(step, op) if op.kernel.threads == threads else ()
        if runs:
            found.runs[op.number] = runs
    if not found.runs or ahead <= 0:
        return StreamPlan()
    followers = _Followers(step, found, blocks, ahead)
    for number, loop in enumerate(step.loops):
        for place, op in enumerate(loop.ops):
            if op.number not in found.runs:
                continue
            per_task = sum(run.size for run in found.runs[op.number])
            turns = -(-op.tasks // blocks)
            depth = found.depth[op.number] = max(1, min(ahead // per_task, turns, MOST_GROUPS))
            skip = max(0, ahead - per_task * turns)
            found.inner[op.number] = _spread(followers.after(number, place, False, skip), depth) if loop.count > 1 else [[] for _ in range(depth)]
            found.last[op.number] = _spread(followers.after(number, place, True, skip), depth)
    found.begin = followers.after(-1, 0, True, 0)
    return found


@dataclass(frozen=True)
class IdleFetch:
    """Bytes of an op's weights that blocks without a task ask for together."""

    op: int
    run: WeightRun
    begin: int
    end: int


def idle_fetches(step: StepPlan, blocks: int, budget: int) -> dict[int, list[IdleFetch]]:
    """For each op that leaves most blocks without a task: what those ask for, of the weights of ops behind it, up to `budget` bytes. The second-level cache is
    for all: it does not matter which block asks."""
    found: dict[int, list[IdleFetch]] = {}
    for loop in step.loops if budget > 0 else ():
        done: dict[tuple[int, str], int] = {}
        runs = {op.number: weight_runs(step, op) for op in loop.ops}
        for place, op in enumerate(loop.ops):
            left = budget
            if op.tasks > blocks // 2 or runs[op.number]:
                continue
            for other in loop.ops[place + 1 :]:
                for run in runs[other.number]:
                    begin = done.get((other.number, run.name), 0)
                    share = left // len(runs[other.number]) // LINE * LINE
                    end = min(run.nbytes // LINE * LINE, begin + share)
                    if end > begin:
                        found.setdefault(op.number, []).append(IdleFetch(other.number, run, begin, end))
                        done[other.number, run.name] = end
                left -= sum(f.end - f.begin for f in found.get(op.number, []) if f.op == other.number)
                if left < LEAST_BYTES:
                    break
    return found


def _spread(pieces: Sequence[StreamPiece], groups: int) -> list[list[StreamPiece]]:
    """The pieces in that many groups of about as many bytes."""
    found: list[list[StreamPiece]] = [[] for _ in range(groups)]
    total, done = sum(p.size for p in pieces), 0
    for piece in pieces:
        found[min(groups - 1, done * groups // max(1, total))].append(piece)
        done += piece.size
    return found


class _Followers:
    """What a block reads after an op."""

    def __init__(self, step: StepPlan, stream: StreamPlan, blocks: int, ahead: int) -> None:
        self.step, self.stream, self.blocks, self.ahead = step, stream, blocks, ahead

    def after(self, loop: int, place: int, last: bool, skip: int) -> list[StreamPiece]:
        """The pieces from `skip` bytes on behind an op, up to `ahead` bytes behind it. `last`: no other iteration of its loop follows."""
        found: list[StreamPiece] = []
        at = 0
        for number, op, further in self._ops(loop, place, last):
            for turn in range(-(-op.tasks // self.blocks)):
                for run in self.stream.runs.get(op.number, ()):
                    if at >= self.ahead:
                        return found
                    size = min(run.size, -(-(self.ahead - at) // UNIT) * UNIT)
                    begin = min(size, max(0, skip - at) // UNIT * UNIT)
                    if begin < size:
                        found.append(StreamPiece(number, op.number, further, turn, run, begin, size - begin))
                    at += run.size
        return found

    def _ops(self, loop: int, place: int, last: bool) -> list[tuple[int, PersistentOp, int]]:
        """Ops behind one, with the loop of each and how many iterations further it is."""
        found: list[tuple[int, PersistentOp, int]] = []
        if loop >= 0:
            own = self.step.loops[loop]
            found += [(loop, op, 0) for op in own.ops[place + 1 :]]
            if not last:
                return found + [(loop, op, 1) for op in own.ops]
        for number in range(loop + 1, len(self.step.loops)):
            found += [(number, op, 0) for op in self.step.loops[number].ops]
        return found


# -- which bytes a task reads ---------------------------------------------------------------------------------------


def weight_runs(step: StepPlan, op: PersistentOp) -> tuple[WeightRun, ...]:
    """The runs of constant arrays that tasks of an op read."""
    loop = next(loop for loop in step.loops if op in loop.ops)
    found: list[WeightRun] = []
    if len(op.grid) != 1 or op.tasks < 1 or op.others:
        return ()
    samples = sorted({0, 1, 2, op.tasks // 2, max(0, op.tasks - 2)} & set(range(op.tasks)))
    ranges = {task: ValueRanges(op.kernel, task, task).run() for task in samples}
    for param, name in zip(op.kernel.params, op.args, strict=True):
        if not isinstance(param.type, Tensor) or not all(slots[op.position][name].constant for slots in loop.slots) or param.type.align < UNIT:
            continue
        nbytes = min(slots[op.position][name].nbytes for slots in loop.slots)
        known = [ranges[task].get(param) for task in samples]
        if nbytes < LEAST_BYTES or any(k is None for k in known):
            continue
        spans = [k for k in known if k is not None]
        stride = spans[1][0] - spans[0][0] if len(spans) > 1 else 0
        start, size = spans[0][0], spans[0][1] - spans[0][0]
        if any(span != (start + task * stride, start + task * stride + size) for span, task in zip(spans, samples, strict=True)):
            continue
        if stride % UNIT or start % UNIT or not 0 < size <= max(stride, UNIT):
            continue
        found.append(WeightRun(name, start, stride, size // UNIT * UNIT, nbytes))
    return tuple(run for run in found if run.size)


class ValueRanges:
    """The ranges of values of a kernel for some tasks, and of the bytes of each array that it loads."""

    def __init__(self, kernel: Kernel, first: int, last: int) -> None:
        self.kernel, self.tasks = kernel, (first, last)
        self.values: dict[Value, Range] = {}
        self.bytes: dict[Value, Range] = {}

    def run(self) -> dict[Value, Range]:
        self._block(self.kernel.body)
        return self.bytes

    def _block(self, block: Block) -> None:
        for op in block.ops:
            if op.opcode == "for":
                low, high = self._get(op.operands[0]), self._get(op.operands[1])
                self.values[op.regions[0].args[0]] = (low[0], max(low[0], high[1] - 1)) if low and high else None
                step = self._get(op.operands[2])
                if low and high and step and low[0] == low[1] and high[0] == high[1] and step[0] == step[1] and step[0] > 0 and high[0] > low[0]:
                    self.values[op.regions[0].args[0]] = (low[0], low[0] + (high[0] - 1 - low[0]) // step[0] * step[0])
                elif low and high and low[0] >= high[1]:
                    continue
            if op.opcode == "if" and self._get(op.operands[0]) in ((0, 0), (1, 1)):
                self._block(op.regions[0 if self._get(op.operands[0]) == (1, 1) else 1])
                continue
            for region in op.regions:
                self._block(region)
            if op.opcode == "load":
                self._load(op)
            elif len(op.results) == 1:
                self.values[op.results[0]] = self._value(op)

    def _get(self, value: Value) -> Range:
        return self.values.get(value)

    def _load(self, op: Op) -> None:
        memory = op.operands[0].type
        if op.operands[0] not in self.kernel.params or not isinstance(memory, Tensor):
            return
        if op.attrs.get("masked") and self._get(op.operands[-1]) == (0, 0):
            return
        indices = [self._get(v) for v in op.operands[1 : 1 + memory.rank]]
        before = self.bytes.get(op.operands[0], (1 << 62, -1))
        if before is None or any(i is None for i in indices):
            self.bytes[op.operands[0]] = None
            return
        low = high = 0
        width = op.result.type.width if isinstance(op.result.type, Vec) else 1
        for axis, (index, stride, extent) in enumerate(zip(indices, memory.strides, memory.shape, strict=True)):
            assert index is not None
            step, most = stride.evaluate({}), extent.evaluate({}) - (width if axis == memory.rank - 1 else 1)
            low, high = low + max(0, min(index[0], most)) * step, high + max(0, min(index[1], most)) * step
        size = memory.dtype.itemsize
        self.bytes[op.operands[0]] = (min(before[0], low * size), max(before[1], (high + width) * size))

    def _value(self, op: Op) -> Range:
        name = op.opcode
        if name == "const":
            value = op.attrs["value"]
            return (int(value), int(value)) if isinstance(value, int) else None
        if name == "size":
            size = op.attrs["value"]
            number = int(str(size)) if str(size).lstrip("-").isdigit() else None
            return None if number is None else (number, number)
        if name == "program_id":
            return self.tasks if op.attrs.get("axis", 0) == 0 and len(self.kernel.grid) == 1 else None
        if name == "thread_id":
            return 0, self.kernel.threads - 1
        operands = [self._get(v) for v in op.operands]
        if any(o is None for o in operands):
            # A mask of ones bounds whatever it is laid on.
            if name == "and" and any(o is not None and o[0] == o[1] and o[0] >= 0 for o in operands):
                return 0, max(o[1] for o in operands if o is not None and o[0] == o[1] and o[0] >= 0)
            return None
        known = [o for o in operands if o is not None]
        return combined_ranges(name, known)


def combined_ranges(name: str, known: list[tuple[int, int]]) -> Range:
    if name == "cast":
        return known[0]
    if len(known) == 3 and name == "select":
        return min(known[1][0], known[2][0]), max(known[1][1], known[2][1])
    if len(known) != 2:
        return None
    (a, b), (c, d) = known
    if name == "add":
        return a + c, b + d
    if name == "sub":
        return a - d, b - c
    if name == "mul":
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if name == "and" and c == d and c >= 0 and a >= 0:
        return (a & c, a & c) if a == b else (0, min(b, c))
    if name == "and" and a == b and a >= 0 and c >= 0:
        return 0, min(a, d)
    if name in ("shr", "shl") and c == d:
        return (a >> c, b >> c) if name == "shr" else (a << c, b << c)
    if name == "floordiv" and c == d and c > 0:
        return a // c, b // c
    if name == "mod" and c == d and c > 0:
        return (a % c, b % c) if a // c == b // c else (0, c - 1)
    if name == "min":
        return min(a, c), min(b, d)
    if name == "max":
        return max(a, c), max(b, d)
    if name == "lt":
        return (1, 1) if b < c else (0, 0) if a >= d else None
    if name == "ge":
        return (1, 1) if a >= d else (0, 0) if b < c else None
    return None
