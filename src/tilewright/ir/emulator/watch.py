"""Watching the accesses of kernels whose threads a person wrote, and saying what races, with both sides.

In: a launch's arrays, and each machine's accesses and syncs. Out: a `UserError` that names the element, both threads and both
source lines. `thread_races` decides; here is what it is asked about. Arrays of one launch that overlap are watched as one;
arrays that nobody writes are not watched at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tilewright.ir.emulator.frames import BLOCK, LANE, SLOT, THREAD, Frame, align
from tilewright.ir.emulator.memory import Memory, fault
from tilewright.ir.emulator.thread_races import EPOCH, RELEASES, THREADS, Access, History, Order, Race
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import INDEX, Tensor

if TYPE_CHECKING:
    from tilewright.ir.emulator.thread import ThreadMachine

Array = np.ndarray
WARP = 32
WHO = Value(INDEX, "who")
"""The lane's thread in the launch, as `thread_races` counts them."""
_DONE = {"load": "loads", "store": "stores", "atomic": "updates", "atomic_load": "loads", "atomic_store": "stores",
         "copy_async": "copies to"}  # fmt: skip
_READS = frozenset({"load", "load_remote", "ldmatrix"})


def is_explicit(kernel: Kernel) -> bool:
    """Whether a person wrote what each thread does: then the shape of the block is part of the code."""
    return "block" in kernel.attrs


@dataclass(eq=False)
class Arena:
    """Arrays that overlap, or one: bytes from `start`, in units of the smallest element."""

    start: int
    end: int
    unit: int
    history: History | None = None

    def units(self, memory: Memory, places: Array, access: Access) -> tuple[History, Array, Access, int]:
        """The accesses of places as accesses of units, and how many of these each is."""
        if self.history is None:
            self.history = History((self.end - self.start) // self.unit)
        size = memory.dtype.itemsize // self.unit
        offset = (address(memory.flat) - self.start) // self.unit
        if size == 1:
            return self.history, places + offset, access, 1
        return self.history, (places[:, None] * size + offset + np.arange(size)).reshape(-1), access.repeated(size), size


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class Watch:
    """What all machines of a launch share."""

    def __init__(self, kernel: Kernel, blocks: int, arguments: Sequence[object], apart: bool, cluster: int = 1) -> None:
        self.kernel = kernel
        self.order = Order(blocks, apart, cluster)
        self.arenas = self._arenas(kernel, arguments)
        self.syncs = any(op.opcode == "fence" or op.attrs.get("order") in RELEASES for op in walk(kernel.body))
        """Whether an atomic can tell a thread of another's writes."""

    @staticmethod
    def _arenas(kernel: Kernel, arguments: Sequence[object]) -> list[Arena]:
        written = {op.operands[0] for op in walk(kernel.body) if op.operands and op.opcode not in _READS}
        found: list[tuple[int, int, int, bool]] = []
        for param, argument in zip(kernel.params, arguments, strict=True):
            if isinstance(param.type, Tensor) and isinstance(argument, np.ndarray) and argument.size:
                flat = Memory.of_array(param.name, param.type, argument).flat
                found.append((address(flat), address(flat) + flat.nbytes, flat.itemsize, param in written))
        arenas: list[tuple[Arena, bool]] = []
        for start, end, unit, changes in sorted(found):
            if arenas and start < arenas[-1][0].end:
                before, changed = arenas[-1]
                unit = int(np.gcd.reduce([before.unit, unit, start - before.start]))
                arenas[-1] = (Arena(before.start, max(before.end, end), unit), changed or changes)
            else:
                arenas.append((Arena(start, end, unit), changes))
        return [arena for arena, changes in arenas if changes]

    def arena(self, memory: Memory) -> Arena | None:
        start = address(memory.flat) if memory.flat.size else -1
        return next((arena for arena in self.arenas if arena.start <= start < arena.end), None)

    def forget(self) -> None:
        """All that happened is known to all."""
        for arena in self.arenas:
            arena.history = None

    def forget_blocks(self, first: int, blocks: int) -> None:
        """These blocks run again: what they did does not count. What it hid of other blocks' accesses is not known any more."""
        for arena in self.arenas:
            if arena.history is not None:
                arena.history.drop(first, blocks)


class Watcher:
    """The part of a watch that is about the blocks of one machine."""

    def __init__(self, machine: ThreadMachine, watch: Watch) -> None:
        self.machine = machine
        self.watch = watch
        self.order = watch.order
        lanes, values = machine.root.lanes, machine.root.values
        values[WHO] = (values[BLOCK] << THREADS) + values[THREAD]
        self.warp_syncs = np.zeros(lanes // WARP, np.int64)
        self.acquired = np.zeros(lanes, np.int64)
        """Up to which stamp of the order each lane knows what was released."""
        self.shared: dict[Memory, History] = {}
        self._arenas: dict[Memory, Arena | None] = {}
        self._sync = machine.simple["warp_sync"]
        machine.simple |= {"warp_sync": self._warp_sync, "fence": self._fence}

    # -- syncs ------------------------------------------------------------------------------------------------------

    def _warp_sync(self, op: Op, frame: Frame) -> tuple[Array, ...]:
        results = self._sync(op, frame)
        self.sync_warps(frame)
        return results

    def sync_warps(self, frame: Frame) -> None:
        """Threads of the warps that are here know of one another's accesses."""
        self.warp_syncs[np.unique(frame.full(LANE)[frame.active] // WARP)] += 1

    def _fence(self, op: Op, frame: Frame) -> tuple[Array, ...]:
        if op.attrs.get("scope") != "thread":
            self.order.fence(frame.full(BLOCK)[frame.active])
        return ()

    def open_barriers(self, opens: Array) -> None:
        """What one thread of a block knows of other blocks, all do after a barrier."""
        if self.order.stamp:
            by_block = self.acquired.reshape(len(opens), -1)
            by_block[opens] = by_block[opens].max(axis=1, keepdims=True)

    # -- accesses ---------------------------------------------------------------------------------------------------

    def allocate(self, memory: Memory) -> None:
        # What blocks of a cluster do to one another's shared memory is ordered by other means, which clocks know.
        if memory.space == "shared" and self.machine.cluster == 1:
            self.shared[memory] = History(memory.flat.size)

    def _history(
        self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None
    ) -> tuple[History, Array, Access, Array, int] | None:
        """Where an access is noted, the places and the access, which of the lanes it is of, and the units of each element."""
        shared = self.shared.get(memory)
        if shared is None and memory not in self._arenas:
            self._arenas[memory] = self.watch.arena(memory) if memory.space == "global" else None
        arena = None if shared is not None else self._arenas[memory]
        if shared is None and arena is None:
            return None
        shape = (frame.lanes, *places.shape[1:])
        lane, slot = frame.full(LANE), frame.full(SLOT)
        moment = (self.machine.barriers << EPOCH)[slot] + self.warp_syncs[lane >> 5]
        about = (frame.full(WHO), moment, self.order.phase[frame.full(BLOCK)], self.acquired[lane])
        there = np.broadcast_to(places, shape)
        if active is None:
            wanted = np.ones(shape, np.bool_)
            columns = tuple(np.broadcast_to(align(a, len(shape) - 1), shape).reshape(-1) for a in about)
            there = there.reshape(-1)
        else:
            wanted = np.broadcast_to(align(active, len(shape) - 1), shape)
            columns = tuple(np.broadcast_to(align(a, len(shape) - 1), shape)[wanted] for a in about)
            there = there[wanted]
        access = Access(self.order.number(op), *columns)
        if shared is not None:
            return shared, there, access, wanted, 1
        assert arena is not None
        history, there, access, size = arena.units(memory, there, access)
        return history, there, access, wanted, size

    def read(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        found = self._history(op, frame, memory, places, active)
        if found is not None:
            history, there, access, wanted, size = found
            race = self.order.read(history, there, access)
            if race is not None:
                self._report(op, frame, memory, places, wanted, race, size)

    def write(
        self, op: Op, frame: Frame, memory: Memory, places: Array, values: Array, active: Array | None
    ) -> None:
        found = self._history(op, frame, memory, places, active)
        if found is not None:
            history, there, access, wanted, size = found
            current = memory.read(np.broadcast_to(places, wanted.shape)[wanted])
            new = np.broadcast_to(values, wanted.shape)[wanted].astype(current.dtype, copy=False)
            race = self.order.write(history, there, access, np.repeat(current, size), np.repeat(new, size))
            if race is not None:
                self._report(op, frame, memory, places, wanted, race, size)

    def update(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        found = self._history(op, frame, memory, places, active)
        if found is not None:
            history, there, access, wanted, size = found
            race = self.order.update(history, there, access)
            if race is not None:
                self._report(op, frame, memory, places, wanted, race, size)
        if self.watch.syncs:
            lanes = np.flatnonzero(frame.active)
            self.acquired[frame.full(LANE)[lanes]] = self.order.synchronise(op, frame.full(BLOCK)[lanes])

    # -- messages ---------------------------------------------------------------------------------------------------

    def _report(
        self, op: Op, frame: Frame, memory: Memory, places: Array, wanted: Array, race: Race, size: int
    ) -> None:
        position = tuple(int(p) for p in np.argwhere(wanted)[race.at // size])
        lane = position[0]
        place = int(np.broadcast_to(places, wanted.shape)[position])
        me = int(frame.full(WHO)[lane])
        block, thread = divmod(race.who, 1 << THREADS)
        near = block == me >> THREADS
        who = self.machine.thread_text(thread) if near else f"{self.machine.block_text(block)}, {self.machine.thread_text(thread)}"
        does = _DONE.get(race.op.opcode, f"accesses by {race.op.opcode}")
        where = "by the same statement" if race.op is op else f"at {race.op.span.place()}"
        if not near:
            help = "blocks run in any order: use an atomic, or let each block have its own elements"
        elif race.who // WARP == me // WARP:
            help = "put a sync of the warp, or a barrier, between the two accesses"
        else:
            help = "put a barrier between the two accesses"
        if op.opcode.startswith("atomic") and race.op.opcode.startswith("atomic"):
            help = "atomics of scope 'block' hold for one block only: use scope 'device'"
        elif race.op is op:
            help = "let one thread do it, or use an atomic"
        raise fault(
            f"race on {memory.space} memory: {op.opcode} of {element_text(memory, place)}, which {who} {does} {where} "
            f"with nothing that orders the two, in {self.machine.describe(frame, lane)}",
            op.span, help,
        )  # fmt: skip


def element_text(memory: Memory, place: int) -> str:
    """`'x'[3, 4]`, from the element's place in `flat`."""
    place = place % max(memory.size, 1) if memory.owners else place - memory.base
    index: list[int] = []
    for axis in sorted(range(len(memory.shape)), key=lambda a: -abs(memory.strides[a])):
        stride = memory.strides[axis]
        index.append(place // stride if stride and memory.shape[axis] > 1 else 0)
        place -= index[-1] * stride
    order = sorted(range(len(memory.shape)), key=lambda a: -abs(memory.strides[a]))
    by_axis = dict(zip(order, index, strict=True))
    return f"{memory.label}{[by_axis[a] for a in range(len(memory.shape))]}" if place == 0 else f"{memory.label} (element {place})"
