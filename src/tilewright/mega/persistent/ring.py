"""Which weights go by a ring in shared memory, and in which order.

In: a `StepPlan`, and how many bytes the ring may have. Out: a `RingPlan`. One warp of each block, the producer, walks the block's tasks in order and starts bulk
copies of their weights into slots of the ring; the other warps wait for a slot to be full, read it, and say that it is empty again. Copies wait for no counter:
weights are constant, so memory is busy while a block waits for others. `ring_emit` writes the code.

The work of a product's task is that of its warps. Where these do not meet, a *unit* is the work of some of them one after the other, by one warp; else it is a task. It has a number of slots of its own.
Which bytes it reads follows from the indices of its loads: `AffineRanges` proves that they move evenly from task to task. Where they do not, an op loads as before,
and `left` says why.

Why nobody waits for ever: slots are filled and emptied in one order, that of the block's units. A warp that waits for a unit has emptied all that it had
before; the producer waits for a slot only after it has filled those of all units before. So the oldest unit that is not done always goes on once its op's
counters have come, and these wait for ops that come earlier (`order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug, TargetLimit, UserError
from tilewright.ir.needs import shared_places
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops_simt import BULK_CACHES
from tilewright.ir.types import Scalar, Tensor, Vec
from tilewright.mega.persistent.records import PersistentOp, StepPlan, TaskLoop
from tilewright.mega.persistent.staging import ROW_BYTES, dense_bytes
from tilewright.mega.persistent.stream import NEXT_BYTES, combined_ranges

WARP = 32
UNIT = 16
"""Bytes that bulk copies are multiples of."""
LEAST_BYTES = 128
"""Of a piece: smaller ones are not worth a copy."""
MOST_SLOT = 16 << 10
"""Bytes of a slot, at most: a unit may have several."""
CHOSEN_BYTES, CHOSEN_FLIGHT = 192 << 10, 32 << 10
"""Bytes of a ring, and of its copies on their way, where nobody says otherwise: measured best for rows of 3 to 18 KB on an H200."""
LEAST_RING = 96 << 10
"""Bytes below which a ring is emptied before what comes next is there."""
ROOM_LEFT = 2 << 10
"""Bytes of shared memory that are left to whatever else a block has."""
LEAST_TOGETHER, LEAST_SHARE, LEAST_TASKS = 7, 0.75, 16
"""Warps that work at once on an op, at least; the share of a step's weights that comes by the ring; tasks of an op that reads its weights wholly."""
BARRIER_BYTES = 24
"""Of the mbarriers of a slot."""


@dataclass(frozen=True)
class RingPiece:
    """Bytes of an array that unit u reads: `size` from `start + u * stride` on. They lie in the unit's slots from slot `slot`, byte `offset` on."""

    name: str
    start: int
    stride: int
    size: int
    nbytes: int
    """Of the array."""
    slot: int = 0
    offset: int = 0

    def parts(self, slot_bytes: int, size: int) -> list[tuple[int, int, int]]:
        """The copies that so many bytes of it are: (slot of the unit, byte of the piece, bytes)."""
        return [(self.slot + n, at, min(slot_bytes, size - at)) for n, at in enumerate(range(0, size, slot_bytes))]

    def last(self, units: int) -> int:
        """Bytes of the last unit: where the array ends before it does, nobody reads the rest."""
        return min(self.size, self.nbytes - self.start - (units - 1) * self.stride)


@dataclass(frozen=True)
class RingOp:
    """An op whose weights go by the ring."""

    op: int
    warps: int
    """Of a task."""
    rows: int
    """Warps of tasks whose work a unit is, one after the other."""
    units: int
    turns: int
    """Units of a block. Blocks that have one less skip the slots of the last."""
    pieces: tuple[RingPiece, ...]
    slots: int
    """Of a unit."""
    first: int = 0
    """Slots of an iteration of its loop before its own."""
    meets: bool = False
    """Whether the warps of a task meet: then a unit is a task, and the threads that it has run one after the other."""
    shift: int = 0
    """The block that has the first unit: those that have one more than others are not always the same."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(piece.nbytes for piece in self.pieces)

    def piece(self, name: str) -> RingPiece | None:
        return next((piece for piece in self.pieces if piece.name == name), None)


@dataclass
class RingPlan:
    """The ring of a block: `slots` slots of `slot_bytes` bytes, of which at most `flight` are on their way; `cache` is what copies say of the second-level cache."""

    slot_bytes: int = 0
    slots: int = 0
    flight: int = 0
    cache: str = ""
    ops: dict[int, RingOp] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    """Ops that load weights themselves, and why."""
    starts: list[int] = field(default_factory=list)
    """Slots of a step before each loop."""
    sizes: list[int] = field(default_factory=list)
    """Slots of an iteration of each loop."""
    total: int = 0
    """Slots of a step."""

    @property
    def nbytes(self) -> int:
        return self.slots * (self.slot_bytes + BARRIER_BYTES)


def chosen_ring(step: StepPlan, blocks: int, consumers: int, room: int, cache: str = BULK_CACHES[0]) -> RingPlan:
    """The ring that pays, by what was measured on an H200; none where it does not. `room`: bytes of shared memory that a block has for ring and ops.

    It pays where most weights of a step come by it, from memory: where an iteration has few, they are in the second-level cache when they are read (`stream.NEXT_BYTES`). Ops whose warps
    meet, and those of which few warps could work at once, load by themselves. Few bytes are on their way at a time: what else blocks load would wait behind them."""
    own = max((shared_places(body.kernel)[1] for body in step.bodies), default=0)
    size = min(CHOSEN_BYTES, room - max(own, _longest_row(step)) - ROOM_LEFT)
    if size < LEAST_RING:
        return RingPlan()
    plan = plan_ring(step, blocks, consumers, size, flight=CHOSEN_FLIGHT, cache=cache, together=min(LEAST_TOGETHER, consumers))
    total = by_ring = 0
    for loop in step.loops:
        for op in loop.ops:
            if op.tasks >= LEAST_TASKS:  # an embedding has fewer, and reads little of its weights
                constant = [name for name in sorted(op.reads) if all(slots[op.position][name].constant for slots in loop.slots)]
                nbytes = loop.count * sum(min(slots[op.position][name].nbytes for slots in loop.slots) for name in constant)
                total += nbytes
                by_ring += nbytes if op.number in plan.ops else 0
    largest = max((sum(plan.ops[op.number].nbytes for op in loop.ops if op.number in plan.ops) for loop in step.loops), default=0)
    return plan if by_ring >= LEAST_SHARE * total and largest > NEXT_BYTES else RingPlan()


def _longest_row(step: StepPlan) -> int:
    """Bytes of a row of x that a product of the step may put into shared memory (`staging`)."""
    sizes = [dense_bytes(param) for body in step.bodies for param, name in zip(body.kernel.params, body.args, strict=True) if name not in body.writes]
    return max((size for size in sizes if size <= ROW_BYTES), default=0)


def plan_ring(
    step: StepPlan, blocks: int, consumers: int, ring_bytes: int, slot_bytes: int = 0, flight: int = 0, cache: str = BULK_CACHES[0], together: int = 0,
) -> RingPlan:  # fmt: skip
    """The ring of a step. `consumers`: warps that read from it; `slot_bytes`: of a slot, chosen where it is 0; `flight`: bytes that are on their way, at most, of a block; all of the ring where it is 0;
    `together`: ops of which fewer warps can work at once, or whose warps meet, load by themselves."""
    if ring_bytes < 0 or slot_bytes < 0 or flight < 0 or slot_bytes % UNIT:
        raise UserError.at("TW009", f"a ring of {ring_bytes} bytes in slots of {slot_bytes}, {flight} on their way", help=f"sizes are not negative, and slots are multiples of {UNIT} bytes")
    if cache and cache not in BULK_CACHES:
        raise UserError.at("TW009", f"ring_cache={cache!r}", help=f"one of {', '.join(BULK_CACHES)}, or nothing")
    plan = RingPlan(cache=cache)
    if not ring_bytes:
        return plan
    shapes: dict[int, _WarpReads] = {}
    for loop in step.loops:
        for op in loop.ops:
            shape = _warp_reads(step, loop, op)
            if isinstance(shape, _WarpReads):
                shapes[op.number] = shape
            elif shape:
                plan.left[op.number] = shape
    plan.slot_bytes = slot_bytes or _best_slot(step, shapes, blocks, consumers, ring_bytes)
    plan.slots = ring_bytes // (plan.slot_bytes + BARRIER_BYTES)
    plan.flight = min(plan.slots, -(-flight // plan.slot_bytes)) if flight else plan.slots
    for loop in step.loops:
        at = shift = 0
        for op in loop.ops:
            if op.number not in shapes:
                continue
            made = shapes[op.number].unit(blocks, consumers, plan.slot_bytes)
            if made is None:
                plan.left[op.number] = f"{op.tasks} tasks are too few for {blocks} blocks, or no whole units"
            elif made.slots > plan.slots:
                plan.left[op.number] = f"a unit of its work has {made.slots * plan.slot_bytes:,} bytes, and the ring {plan.slots * plan.slot_bytes:,}"
            elif together and (made.meets or plan.slots // made.slots < together):
                plan.left[op.number] = "its warps meet" if made.meets else f"the ring has room for the work of {plan.slots // made.slots} warps at once"
            else:
                plan.ops[op.number] = replace(made, first=at, shift=shift)
                at, shift = at + made.slots * made.turns, (shift + made.units) % blocks
        plan.starts.append(plan.total)
        plan.sizes.append(at)
        plan.total += at * loop.count
    if not plan.ops:
        return RingPlan(left=plan.left)
    check_ring(step, plan, blocks)
    return plan


def check_ring(step: StepPlan, plan: RingPlan, blocks: int) -> None:
    """Raise where a piece is not within its array, where its slots overlap, or where somebody writes what goes by the ring: bulk copies do not see ordinary stores of the same launch."""
    written = [
        (op, slots[op.position][name].region) for loop in step.loops for slots in loop.slots for op in loop.ops for name in sorted(op.writes)
    ]  # fmt: skip
    for loop in step.loops:
        for op in loop.ops:
            ring = plan.ops.get(op.number)
            if ring is None:
                continue
            title = f"op '{op.title}' of {loop.titles[op.position]}"
            if ring.slots > plan.slots or ring.turns != -(-ring.units // blocks) or ring.units * ring.rows != op.tasks * ring.warps:
                raise CompilerBug.at("TW040", f"{title}: its units do not make up its tasks")
            for piece in ring.pieces:
                inside = piece.start >= 0 and piece.last(ring.units) > 0 and (ring.units == 1 or piece.start + (ring.units - 2) * piece.stride + piece.size <= piece.nbytes)
                if not inside or any(n % UNIT for n in (piece.start, piece.stride, piece.size, piece.offset, piece.last(ring.units))):
                    raise CompilerBug.at("TW040", f"{title}: the ring would read '{piece.name}' outside its {piece.nbytes} bytes")
                for slots in loop.slots:
                    mine = slots[op.position][piece.name]
                    writer = next((other for other, region in written if region.overlaps(mine.region)), None)
                    if writer is not None or not mine.constant:
                        raise UserError.at("TW016", f"{title} reads '{piece.name}' by the ring, and {f'op {writer.title!r}' if writer else 'somebody'} writes it in the same launch")


def check_shared(step: StepPlan, plan: RingPlan, shared: int, most: int, target: str) -> None:
    """Raise where ring and shared memory of ops are more than a block has."""
    if plan.ops and shared > most:
        largest = max((op for op in step.ops if op.number in plan.ops), key=lambda op: plan.ops[op.number].slots)
        raise TargetLimit.at(
            "TW020", f"a ring of {plan.nbytes:,} bytes for {', '.join(repr(op.title) for op in step.ops if op.number in plan.ops)} (the largest is '{largest.title}') and what other ops need are "
            f"{shared:,} bytes of shared memory, and a block of {target} has {most:,}", help="make ring_bytes smaller",
        )  # fmt: skip


# -- units ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WarpRun:
    """Bytes of an array that warp w of task t reads: from `start + t * task + w * warp` on `size`, where `warp` is not None; those of all warps are `all_size` from `all_start` on."""

    name: str
    nbytes: int
    task: int
    start: int
    warp: int | None
    size: int
    all_start: int
    all_size: int


@dataclass(frozen=True)
class _WarpReads:
    """What the warps of an op's tasks read."""

    op: int
    tasks: int
    warps: int
    runs: tuple[_WarpRun, ...]
    meets: bool = False

    def pieces(self, rows: int) -> list[RingPiece] | None:
        """The pieces of a unit of so many warps' work; None where they are no whole runs of bytes."""
        found: list[RingPiece] = []
        for run in self.runs:
            even = run.warp is not None and run.task == self.warps * run.warp and run.size <= run.warp
            if even and run.warp is not None and (rows == 1 or run.size == run.warp):
                start, stride, size = run.start, rows * run.warp, (rows - 1) * run.warp + run.size
            elif rows % self.warps == 0 and (rows == self.warps or run.all_size == run.task):
                count = rows // self.warps
                start, stride, size = run.all_start, count * run.task, (count - 1) * run.task + run.all_size
            else:
                return None
            if start % UNIT or stride % UNIT or size % UNIT or size < LEAST_BYTES:
                return None
            found.append(RingPiece(run.name, start, stride, size, run.nbytes))
        return found

    def unit(self, blocks: int, consumers: int, slot_bytes: int) -> RingOp | None:
        """Units as large as fit a slot, of which every block has one at least, and whose warps have about as much to do; the smallest ones where none fit."""
        total = self.tasks * self.warps
        least = -(-total // (blocks * consumers))
        """What the warp with most to do has to do where a unit is the work of one warp."""
        best: RingOp | None = None
        for rows in (self.warps,) if self.meets else range(1, min(total, 16 * self.warps) + 1):
            units = total // rows
            if total % rows or units < blocks:
                continue
            pieces = self.pieces(rows)
            busiest = -(-units // blocks // consumers) * rows
            if pieces is None or (best is not None and (max(piece.size for piece in pieces) > slot_bytes or 2 * busiest > 3 * least)):
                continue
            if any(piece.last(units) <= 0 or piece.last(units) % UNIT or piece.start + (units - 2) * piece.stride + piece.size > piece.nbytes for piece in pieces):
                continue
            placed, slots = _placed(pieces, slot_bytes)
            best = RingOp(self.op, self.warps, rows, units, -(-units // blocks), placed, slots, meets=self.meets)
        return best


def _placed(pieces: Sequence[RingPiece], slot_bytes: int) -> tuple[tuple[RingPiece, ...], int]:
    """The pieces in slots: small ones share one, large ones have several."""
    found: list[RingPiece] = []
    slot, used = 0, 0
    for piece in pieces:
        if used and used + piece.size > slot_bytes:
            slot, used = slot + 1, 0
        found.append(replace(piece, slot=slot, offset=used))
        used += piece.size
        if used > slot_bytes:
            slot, used = slot + -(-piece.size // slot_bytes), 0
    return tuple(found), slot + (1 if used else 0)


def _best_slot(step: StepPlan, shapes: dict[int, _WarpReads], blocks: int, consumers: int, ring_bytes: int) -> int:
    """The size of a slot that leaves least of the ring unused; of those that are about as good, the largest: few large copies cost the producer less."""
    most = max(LEAST_BYTES, min(MOST_SLOT, ring_bytes // 4))
    sizes = {-(-piece.size // LEAST_BYTES) * LEAST_BYTES for shape in shapes.values() for rows in range(1, 17) for piece in shape.pieces(rows) or ()}
    sizes = {size for size in sizes if size <= most} | {most // LEAST_BYTES * LEAST_BYTES}
    scored: list[tuple[int, int]] = []
    for size in sizes:
        used = wanted = 0
        for loop in step.loops:
            for shape in (shapes[op.number] for op in loop.ops if op.number in shapes):
                made = shape.unit(blocks, consumers, size)
                if made is not None:
                    used += loop.count * made.units * made.slots * size
                    wanted += loop.count * made.units * sum(piece.size for piece in made.pieces)
        scored.append((round(20 * used / max(1, wanted)), -size))
    return -min(scored)[1]


def _warp_reads(step: StepPlan, loop: TaskLoop, op: PersistentOp) -> _WarpReads | str:
    """What an op's warps read of weights; or why that does not go by the ring, empty where there are none."""
    kernel = op.kernel
    candidates = [
        (param, name) for param, name in zip(kernel.params, op.args, strict=True)
        if isinstance(param.type, Tensor) and all(slots[op.position][name].constant for slots in loop.slots) and min(slots[op.position][name].nbytes for slots in loop.slots) >= LEAST_BYTES
    ]  # fmt: skip
    if not candidates or op.tasks < 1:
        return ""
    if op.others:
        return "iterations run different kernels"
    if len(op.grid) != 1 or kernel.threads % WARP:
        return f"its grid is {list(op.grid)} blocks of {kernel.threads} threads"
    meets = any(o.opcode == "barrier" or (o.opcode == "alloc" and isinstance(o.results[0].type, Tensor) and o.results[0].type.space == "shared") for o in walk(kernel.body))
    if any(o.opcode == "load" and o.attrs.get("unaligned") for o in walk(kernel.body)):
        return "it loads vectors that are not aligned"
    warps = kernel.threads // WARP
    read = [AffineRanges(kernel, op.tasks, warp).run() for warp in range(warps)]
    runs: list[_WarpRun] = []
    reason = ""
    for param, name in candidates:
        assert isinstance(param.type, Tensor)
        spans = [found.get(param, ()) for found in read]
        if all(span == () for span in spans):
            continue
        if any(not span for span in spans):
            reason = reason or f"the places in '{name}' that it reads are not known"
            continue
        known = [span for span in spans if span]
        task, start = known[0][0], known[0][1]
        size = known[0][2] - start
        if task == 0:
            continue  # all tasks read the same
        if any(span[0] != task for span in known) or task < 0:
            reason = reason or f"what it reads of '{name}' does not move evenly from task to task"
            continue
        warp: int | None = known[1][1] - start if warps > 1 else task
        if any(span[1:] != (start + n * (warp or 0), start + n * (warp or 0) + size) for n, span in enumerate(known)):
            warp = None
        all_start, all_end = min(span[1] for span in known), max(span[2] for span in known)
        nbytes = min(slots[op.position][name].nbytes for slots in loop.slots)
        if all_end - all_start > task or param.type.align < UNIT:
            reason = reason or f"tasks read the same parts of '{name}', or it is not aligned"
            continue
        run = _WarpRun(name, nbytes, task, start, warp, size, all_start, all_end - all_start)
        alone = _WarpReads(op.number, op.tasks, warps, (run,), meets)
        if alone.pieces(warps) is None and (meets or alone.pieces(1) is None):
            if all_end - all_start >= LEAST_BYTES:
                reason = reason or f"what a task reads of '{name}' is no multiple of {UNIT} bytes"
            continue
        runs.append(run)
    return _WarpReads(op.number, op.tasks, warps, tuple(runs), meets) if runs else reason


# -- which bytes a warp reads -----------------------------------------------------------------------------------------

Affine = tuple[int, int, int] | None
"""(a, low, high): a times the number of the task, and something from low to high."""
Span = tuple[int, int, int] | tuple[()] | None
"""Bytes of an array, from a * task + low to a * task + high; nothing; or not known."""


class AffineRanges:
    """What the loads of one warp of a kernel's tasks read, for all tasks at once."""

    def __init__(self, kernel: Kernel, tasks: int, warp: int) -> None:
        self.kernel, self.tasks, self.warp = kernel, tasks, warp
        self.values: dict[Value, Affine] = {}
        self.bytes: dict[Value, Span] = {}

    def run(self) -> dict[Value, Span]:
        """The bytes of each parameter that is loaded from."""
        self._block(self.kernel.body)
        return self.bytes

    def _ends(self, value: Affine) -> tuple[int, int] | None:
        """The least and the greatest over all tasks."""
        if value is None:
            return None
        a, low, high = value
        far = a * (self.tasks - 1)
        return low + min(0, far), high + max(0, far)

    def _block(self, block: Block) -> None:
        for op in block.ops:
            if op.opcode == "for" and not self._loop(op):
                continue
            if op.opcode == "if":
                known = self._ends(self.values.get(op.operands[0]))
                if known in ((0, 0), (1, 1)):
                    self._block(op.regions[0 if known == (1, 1) else 1])
                    continue
            for region in op.regions:
                self._block(region)
            if op.opcode == "load":
                self._load(op)
            elif any(v in self.kernel.params and isinstance(v.type, Tensor) for v in op.operands) and op.opcode not in ("store", "for", "if"):
                for value in op.operands:
                    if value in self.kernel.params:
                        self.bytes[value] = None  # another way to read, which is not followed
            if len(op.results) == 1 and isinstance(op.results[0].type, Scalar):
                self.values[op.results[0]] = self._value(op)

    def _loop(self, op: Op) -> bool:
        """Whether a loop turns at all; its index."""
        ends = [self._ends(self.values.get(v)) for v in op.operands[:3]]
        index = op.regions[0].args[0]
        self.values[index] = None
        low, high, step = ends
        if low is None or high is None or step is None or step[0] != step[1] or step[0] <= 0:
            return True
        if low[0] >= high[1]:
            return False
        last = low[0] + (high[1] - 1 - low[0]) // step[0] * step[0] if low[0] == low[1] else high[1] - 1
        self.values[index] = (0, low[0], last)
        return True

    def _load(self, op: Op) -> None:
        memory, param = op.operands[0].type, op.operands[0]
        if param not in self.kernel.params or not isinstance(memory, Tensor):
            return
        masked = bool(op.attrs.get("masked"))
        if masked and self._ends(self.values.get(op.operands[-1])) == (0, 0):
            return
        before = self.bytes.get(param, ())
        indices = [self.values.get(v) for v in op.operands[1 : 1 + memory.rank]]
        if before is None or any(i is None for i in indices):
            self.bytes[param] = None
            return
        width = op.result.type.width if isinstance(op.result.type, Vec) else 1
        a = low = high = 0
        for axis, (index, stride, extent) in enumerate(zip(indices, memory.strides, memory.shape, strict=True)):
            assert index is not None
            apart, most = stride.evaluate({}), extent.evaluate({}) - (width if axis == memory.rank - 1 else 1)
            first, last = index[1], index[2]
            if index[0] == 0:
                # Where a mask lets it, it lies inside.
                first, last = max(0, min(first, most)), max(0, min(last, most))
            if apart < 0:
                self.bytes[param] = None
                return
            a, low, high = a + index[0] * apart, low + first * apart, high + last * apart
        size = memory.dtype.itemsize
        here = (a * size, low * size, (high + width) * size)
        if before and before[0] != here[0]:
            self.bytes[param] = None
            return
        self.bytes[param] = (here[0], min(before[1], here[1]), max(before[2], here[2])) if before else here

    def _value(self, op: Op) -> Affine:
        name = op.opcode
        if name == "const":
            value = op.attrs["value"]
            return (0, int(value), int(value)) if isinstance(value, int) else None
        if name == "size":
            text = str(op.attrs["value"])
            return (0, int(text), int(text)) if text.lstrip("-").isdigit() else None
        if name == "program_id":
            return (1, 0, 0) if op.attrs.get("axis", 0) == 0 else None
        if name == "thread_id":
            return 0, self.warp * WARP, self.warp * WARP + WARP - 1
        operands = [self.values.get(v) for v in op.operands]
        if any(o is None for o in operands):
            return None
        known = [o for o in operands if o is not None]
        if name == "cast":
            type_ = op.results[0].type
            assert isinstance(type_, Scalar)
            return known[0] if self._fits(known[0], type_.dtype) else None
        return self._combined(name, known)

    def _fits(self, value: Affine, dtype: DType) -> bool:
        """Whether a conversion keeps the number."""
        ends = self._ends(value)
        if not dtype.is_int or ends is None:
            return False
        signed = dtype.kind == "i"
        return ends[0] >= (-(1 << (dtype.bits - 1)) if signed else 0) and ends[1] < 1 << (dtype.bits - (1 if signed else 0))

    def _combined(self, name: str, known: Sequence[tuple[int, int, int]]) -> Affine:
        if len(known) == 2:
            (a, b, c), (d, e, f) = known
            if name == "add":
                return a + d, b + e, c + f
            if name == "sub":
                return a - d, b - f, c - e
            if name == "mul" and (d == 0 and e == f):
                return a * e, min(b * e, c * e), max(b * e, c * e)
            if name == "mul" and (a == 0 and b == c):
                return d * b, min(b * e, b * f), max(b * e, b * f)
            if name == "shl" and d == 0 and e == f and 0 <= e < 63:
                return a << e, b << e, c << e
            one, other = self._ends(known[0]), self._ends(known[1])
            assert one is not None
            assert other is not None
            if name == "min" and (one[1] <= other[0] or other[1] <= one[0]):
                return known[0] if one[1] <= other[0] else known[1]
            if name == "max" and (one[0] >= other[1] or other[0] >= one[1]):
                return known[0] if one[0] >= other[1] else known[1]
            if name in ("lt", "ge"):
                found = combined_ranges(name, [one, other])
                return None if found is None else (0, *found)
        if all(value[0] == 0 for value in known):
            found = combined_ranges(name, [(value[1], value[2]) for value in known])
            return None if found is None else (0, *found)
        return None
