"""The race detector: what a machine of threads tells of its accesses and syncs, and the words for a race.

In: a launch's arrays, each access before it happens, and each sync. Out: nothing, or a `UserError` that names the element and the
thread; of a kernel whose threads a person wrote, both threads and both source lines. `order` decides.

| kernel | shared memory | global memory |
|---|---|---|
| written by a person | each thread | each thread; arrays that overlap are watched as one |
| compiled | each warp | each block, where blocks meet at barriers of the grid |

Where warps order themselves by more than barriers of the block, clocks of warps and engines watch shared memory, besides the threads
of a warp of a kernel that a person wrote. Where a compiled kernel's warps watch memory for one another, nothing is looked at there.
Arrays that nobody writes are not watched at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewright.ir.emulator.checks.clocks import Clocks
from tilewright.ir.emulator.checks.history import Access, History
from tilewright.ir.emulator.checks.order import (
    EPOCH,
    RELEASES,
    THREADS,
    BarrierOrder,
    ClockOrder,
    CountOrder,
    Grain,
    Order,
    Race,
)
from tilewright.ir.emulator.frames import BLOCK, LANE, SLOT, THREAD, Frame, align
from tilewright.ir.emulator.machine import Machine
from tilewright.ir.emulator.memory.addresses import registered
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.places import thread_text
from tilewright.ir.types import INDEX, Tensor

Array = np.ndarray
WHO = Value(INDEX, "who")
"""The lane's thread in the launch, as `order` counts them."""
_DONE = {"load": "loads", "store": "stores", "atomic": "updates", "atomic_load": "loads", "atomic_store": "stores",
         "copy_async": "copies to"}  # fmt: skip
_READS = frozenset({"load", "load_remote", "ldmatrix"})


def is_explicit(kernel: Kernel) -> bool:
    """Whether a person wrote what each thread does: then the shape of the block is part of the code."""
    return "block" in kernel.attrs


@dataclass(eq=False)
class WatchedMemory:
    """Arrays that overlap, or one: bytes from `start`, in units of the smallest element."""

    start: int
    end: int
    unit: int
    history: History = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.history = History((self.end - self.start) // self.unit)

    def units(self, memory: Memory, places: Array, access: Access) -> tuple[Array, Access, int]:
        """The accesses of places as accesses of units, and how many of these each is."""
        size = memory.dtype.itemsize // self.unit
        offset = (address(memory.flat) - self.start) // self.unit
        if size == 1:
            return places + offset, access, 1
        return (places[:, None] * size + offset + np.arange(size)).reshape(-1), access.repeated(size), size


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class LaunchRaces:
    """What all machines of a launch share."""

    def __init__(
        self, kernel: Kernel, blocks: int, arguments: Sequence[object], warp_size: int, apart: bool, cluster: int, meets: bool
    ) -> None:
        """`apart`: warps order themselves by more than the block's barrier; `meets`: blocks meet at barriers of the grid."""
        self.explicit = is_explicit(kernel)
        grain = Grain.THREAD if self.explicit else Grain.BLOCK
        self.order = BarrierOrder(grain, blocks, warp_size, apart and self.explicit, cluster)
        self.by_warp = BarrierOrder(Grain.WARP, blocks, warp_size)
        self.counted = CountOrder(blocks) if any(op.opcode in ("await_count", "count_up") for op in walk(kernel.body)) else None
        """The order of blocks that wait for counters."""
        self.arenas = _addressed() if self.counted is not None else _arenas(kernel, arguments) if self.explicit or meets else []
        self.syncs = self.explicit and any(
            op.opcode == "fence" or op.attrs.get("order") in RELEASES for op in walk(kernel.body)
        )
        """Whether an atomic can tell a thread of another's writes."""

    def release(self, memory: Memory, place: int, block: int) -> None:
        """A block counts a counter up."""
        if self.counted is not None:
            self.counted.release((address(memory.flat), place), block)

    def acquire(self, memory: Memory, place: int, block: int) -> None:
        """A block has waited for a counter."""
        if self.counted is not None:
            self.counted.acquire((address(memory.flat), place), block)

    def arena(self, memory: Memory) -> WatchedMemory | None:
        start = address(memory.flat) if memory.flat.size else -1
        return next((arena for arena in self.arenas if arena.start <= start < arena.end), None)

    def forget(self) -> None:
        """All that happened is known to all."""
        for arena in self.arenas:
            arena.forget()

    def forget_blocks(self, first: int, blocks: int) -> None:
        """These blocks run again: what they did does not count. What it hid of other blocks' accesses is not known any more."""
        for slot in (slot for arena in self.arenas for slot in arena.history.slots()):
            block = slot.who >> THREADS
            slot.who[(block >= first) & (block < first + blocks)] = -1


def _arenas(kernel: Kernel, arguments: Sequence[object]) -> list[WatchedMemory]:
    """The global arrays that someone writes."""
    written = {op.operands[0] for op in walk(kernel.body) if op.operands and op.opcode not in _READS}
    found: list[tuple[int, int, int, bool]] = []
    for param, argument in zip(kernel.params, arguments, strict=True):
        if isinstance(param.type, Tensor) and isinstance(argument, np.ndarray) and argument.size:
            flat = Memory.of_array(param.name, param.type, argument).flat
            found.append((address(flat), address(flat) + flat.nbytes, flat.itemsize, param in written))
    arenas: list[tuple[WatchedMemory, bool]] = []
    for start, end, unit, changes in sorted(found):
        if arenas and start < arenas[-1][0].end:
            before, changed = arenas[-1]
            unit = int(np.gcd.reduce([before.unit, unit, start - before.start]))
            arenas[-1] = (WatchedMemory(before.start, max(before.end, end), unit), changed or changes)
        else:
            arenas.append((WatchedMemory(start, end, unit), changes))
    return [arena for arena, changes in arenas if changes]


def _addressed() -> list[WatchedMemory]:
    """The arrays that kernels find by their addresses."""
    found: list[WatchedMemory] = []
    for array in registered():
        start = address(array)
        if array.size and array.flags.writeable and not (found and start < found[-1].end):
            found.append(WatchedMemory(start, start + array.nbytes, array.itemsize))
    return found


@dataclass(frozen=True, eq=False)
class Track:
    """One way a memory is watched: the accesses so far, and what orders them."""

    history: History
    order: Order


class RaceDetector:
    """The part of it that is about the blocks of one machine."""

    def __init__(
        self, machine: Machine, root: Frame, launch: LaunchRaces, warp_size: int, barriers: Array, cluster: int, clocks: Clocks | None, polls: bool
    ) -> None:
        """`barriers`: how many each block has passed, which the machine counts. `polls`: warps watch memory for one another."""
        self.machine, self.launch, self.warp_size, self.barriers, self.cluster, self.polls = machine, launch, warp_size, barriers, cluster, polls
        self.clocked = None if clocks is None else ClockOrder(clocks)
        values = root.values
        values[WHO] = (values[BLOCK] << THREADS) + values[THREAD]
        self.warp_syncs = np.zeros(root.lanes // warp_size, np.int64)
        self.acquired = np.zeros(root.lanes, np.int64)
        """Up to which stamp of the order each lane knows what was released."""
        self._tracks: dict[Memory, tuple[Track, ...]] = {}
        self._arenas: dict[Memory, WatchedMemory | None] = {}

    def allocate(self, memory: Memory) -> None:
        """Shared memory that is watched from now on."""
        if memory.space != "shared":
            return
        tracks: list[Track] = []
        # What blocks of a cluster do to one another's shared memory is ordered by other means, which clocks know.
        if self.launch.explicit and self.cluster == 1:
            tracks.append(Track(History(memory.flat.size), self.launch.order))
        if self.clocked is not None:
            tracks.append(Track(History(memory.flat.size), self.clocked))
        elif not self.launch.explicit and not self.polls:
            tracks.append(Track(History(memory.flat.size), self.launch.by_warp))
        self._tracks[memory] = tuple(tracks)

    # -- syncs ------------------------------------------------------------------------------------------------------

    def sync_warps(self, frame: Frame) -> None:
        """Threads of the warps that are here know of one another's accesses."""
        if self.launch.explicit:
            self.warp_syncs[np.unique(frame.full(LANE)[frame.active] // self.warp_size)] += 1

    def fence(self, op: Op, frame: Frame) -> None:
        if self.launch.explicit and op.attrs.get("scope") != "thread":
            self.launch.order.fence(frame.full(BLOCK)[frame.active])

    def open_barriers(self, opens: Array) -> None:
        """What one thread of a block knows of other blocks, all do after a barrier."""
        if self.launch.order.stamp:
            by_block = self.acquired.reshape(len(opens), -1)
            by_block[opens] = by_block[opens].max(axis=1, keepdims=True)

    # -- accesses ---------------------------------------------------------------------------------------------------

    def read(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        for track in self._watched(memory):
            made = self._access(track, op, frame, memory, places, active)
            race = track.order.read(track.history, made.places, made.access)
            if race is not None:
                raise self._error(track.order, op, frame, memory, made, race)

    def write(
        self, op: Op, frame: Frame, memory: Memory, places: Array, values: Array, active: Array | None
    ) -> None:
        for track in self._watched(memory):
            made = self._access(track, op, frame, memory, places, active)
            current = memory.read(made.elements)
            new = np.broadcast_to(values, made.wanted.shape)[made.wanted].astype(current.dtype, copy=False)
            if made.size > 1:
                current, new = np.repeat(current, made.size), np.repeat(new, made.size)
            race = track.order.write(track.history, made.places, made.access, current, new)
            if race is not None:
                raise self._error(track.order, op, frame, memory, made, race)

    def update(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        """Atomics, which are looked at thread by thread only."""
        order = self.launch.order
        if not self.launch.explicit:
            return
        for track in self._watched(memory):
            if track.order is order:
                made = self._access(track, op, frame, memory, places, active)
                race = order.update(track.history, made.places, made.access)
                if race is not None:
                    raise self._error(order, op, frame, memory, made, race)
        if self.launch.syncs:
            lanes = np.flatnonzero(frame.active)
            self.acquired[frame.full(LANE)[lanes]] = order.synchronise(op, frame.full(BLOCK)[lanes])

    def _watched(self, memory: Memory) -> tuple[Track, ...]:
        tracks = self._tracks.get(memory)
        if tracks is not None:
            return tracks
        if memory not in self._arenas:
            self._arenas[memory] = self.launch.arena(memory) if memory.space == "global" else None
        arena = self._arenas[memory]
        # Barriers of the grid give an arena a new history.
        return () if arena is None or not memory.flat.flags.writeable else (Track(arena.history, self.launch.counted or self.launch.order),)

    def _access(self, track: Track, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> Accesses:
        """The accesses that happen."""
        shape = (frame.lanes, *places.shape[1:])
        wanted = np.broadcast_to(np.True_ if active is None else align(active, len(shape) - 1), shape)

        def of(by_lane: Array) -> Array:
            spread = np.broadcast_to(align(by_lane, len(shape) - 1), shape)
            return spread.reshape(-1) if active is None else spread[wanted]

        there = np.broadcast_to(places, shape)
        there = there.reshape(-1) if active is None else there[wanted]
        order, arena = track.order, self._arenas.get(memory)
        if isinstance(order, ClockOrder):
            return Accesses(wanted, there, there, order.by_warps(op, of(frame.full(LANE) // self.warp_size)), 1)
        if isinstance(order, CountOrder):
            access = order.by_blocks(op, of(frame.full(BLOCK)))
            assert arena is not None
            units, access, size = arena.units(memory, there, access)
            return Accesses(wanted, there, units, access, size)
        assert isinstance(order, BarrierOrder)
        time, phase, acquired = (self.barriers << EPOCH)[frame.full(SLOT)], None, None
        if order.grain is Grain.THREAD:
            lane = frame.full(LANE)
            time = time + self.warp_syncs[lane // self.warp_size]
            if self.launch.syncs:
                phase, acquired = of(order.phase[frame.full(BLOCK)]), of(self.acquired[lane])
        access = Access(order.number(op), of(order.agents(frame.full(WHO))), of(time), phase, acquired)
        if arena is None:
            return Accesses(wanted, there, there, access, 1)
        units, access, size = arena.units(memory, there, access)
        return Accesses(wanted, there, units, access, size)

    # -- the copy engine and matrix units ---------------------------------------------------------------------------

    def engine_reads(self, op: Op, memory: Memory, places: Array, known: Array | None, actor: int, access: int) -> None:
        """Check and note a read by the copy engine or a matrix unit, started by someone who knows `known`."""
        if memory.written is not None and not memory.written[places].all():
            place = int(places[np.argmin(memory.written[places])])
            raise fault(
                f"{op.opcode} of uninitialised {memory.space} memory: {element_text(memory, place)} "
                f"{self.machine.unwritten_text(memory, place)}",
                op.span,
            )
        history = self._clocked(memory)
        if history is None or known is None or self.clocked is None:
            return
        made = self.clocked.by_engine(op, actor, access, known)
        for bad, text, help in (
            (self.clocked.unknown(history, places, made, writes=False), "was written with nothing that orders the two",
             "put a barrier between the two"),
            (self.clocked.unfenced(history.written, places, known), "was written by a thread and not fenced since",
             "put fence_async between the write and the barrier that leads here"),
        ):  # fmt: skip
            if bad.any():
                element = element_text(memory, int(places[np.argmax(bad)]))
                raise fault(f"race on shared memory: {op.opcode} reads {element}, which {text}", op.span, help)
        self.clocked.note(history, history.read, places, made)

    def engine_writes(
        self, op: Op, frame: Frame, lane: int, memory: Memory, places: Array, known: Array | None, actor: int, access: int
    ) -> None:
        """Check and note a write by the copy engine, which a lane started that knows `known`."""
        history = self._clocked(memory)
        if history is None or known is None or self.clocked is None:
            return
        made = self.clocked.by_engine(op, actor, access, known)
        bad = self.clocked.unknown(history, places, made, writes=True)
        if bad.any():
            raise fault(
                f"race on shared memory: {op.opcode} into {element_text(memory, int(places[np.argmax(bad)]))}, which may still be in use, "
                f"in {self.machine.describe(frame, lane)}", op.span,
                "wait for an mbarrier at which those who use it arrive when they are done",
            )  # fmt: skip
        self.clocked.note_write(history, places, made)

    def _clocked(self, memory: Memory) -> History | None:
        tracks = self._tracks.get(memory, ())
        return next((track.history for track in tracks if track.order is self.clocked), None)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _error(self, order: Order, op: Op, frame: Frame, memory: Memory, made: Accesses, race: Race) -> Exception:
        at = race.at // made.size
        lane, place = int(np.argwhere(made.wanted)[at][0]), int(made.elements[at])
        what, help = element_text(memory, place), "put a barrier between the two accesses"
        if isinstance(order, ClockOrder):
            who = "another warp, the copy engine or a matrix unit accesses"
            if self.launch.explicit:
                who = f"{order.clocks.name(race.who)} accesses by the {race.op.opcode} at {race.op.span.place()}"
            why = f"{who} with nothing that orders the two"
        elif order is self.launch.by_warp:
            why = "another warp accesses between the same barriers"
        elif isinstance(order, CountOrder):
            what = f"{memory.label} (element {place} in memory)"
            why = f"{self.machine.block_text(race.who)} accesses by the {race.op.opcode} at {race.op.span.place()} with no counter that orders the two"
            help = "wait for the counter of the task that comes first"
        elif not self.launch.explicit:
            what = f"{memory.label} (element {place} in memory)"
            why = "another block accesses between the same barriers of the grid"
            help = "put a grid_barrier between the two accesses"
        else:
            why, help = self._both_sides(op, int(frame.full(WHO)[lane]), race)
        return fault(
            f"race on {memory.space} memory: {op.opcode} of {what}, which {why}, in {self.machine.describe(frame, lane)}", op.span, help
        )

    def _both_sides(self, op: Op, me: int, race: Race) -> tuple[str, str]:
        """What another thread did, and how to part the two."""
        block, thread = divmod(race.who, 1 << THREADS)
        near = block == me >> THREADS
        who = thread_text(self.machine.kernel, thread)
        who = who if near else f"{self.machine.block_text(block)}, {who}"
        does = _DONE.get(race.op.opcode, f"accesses by {race.op.opcode}")
        where = "by the same statement" if race.op is op else f"at {race.op.span.place()}"
        if not near:
            help = "blocks run in any order: use an atomic, or let each block have its own elements"
        elif race.who // self.warp_size == me // self.warp_size:
            help = "put a sync of the warp, or a barrier, between the two accesses"
        else:
            help = "put a barrier between the two accesses"
        if op.opcode.startswith("atomic") and race.op.opcode.startswith("atomic"):
            help = "atomics of scope 'block' hold for one block only: use scope 'device'"
        elif race.op is op:
            help = "let one thread do it, or use an atomic"
        return f"{who} {does} {where} with nothing that orders the two", help


@dataclass(frozen=True, eq=False)
class Accesses:
    """One op's accesses on one axis. `wanted`: which of the lanes' they are."""

    wanted: Array
    elements: Array
    """Places in the memory."""
    places: Array
    """Places in the history: `size` for each element."""
    access: Access
    size: int


def element_text(memory: Memory, place: int) -> str:
    """`'x'[3, 4]`, from the element's place in `flat`."""
    place = place % max(memory.size, 1) if memory.owners else place - memory.base
    index: list[int] = []
    order = sorted(range(len(memory.shape)), key=lambda a: -abs(memory.strides[a]))
    for axis in order:
        stride = memory.strides[axis]
        index.append(place // stride if stride and memory.shape[axis] > 1 else 0)
        place -= index[-1] * stride
    by_axis = dict(zip(order, index, strict=True))
    return f"{memory.label}{[by_axis[a] for a in range(len(memory.shape))]}" if place == 0 else f"{memory.label} (element {place})"
