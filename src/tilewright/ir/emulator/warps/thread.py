"""The thread stage: lanes are threads, in warps of as many as the launch's target has.

Warps at one place of the kernel run together as one frame. Threads of a warp that part ways run under masks. Where whole warps
part ways and one of them may have to wait for another (a barrier, or a loop that watches memory others write), the frame is
split, the parts run on their own and come together at the end of the region. Waiting is handing an event to the scheduler.
Blocks do not see one another's shared memory, so many blocks run in one frame, unless the kernel watches memory; then warps
may order themselves by other means than barriers. All blocks of a kernel with a `grid_barrier` run together.

A kernel with mbarriers, named barriers, the copy engine or warp-group matrix ops runs one cluster (or block) at a time. There
accesses to shared memory are ordered by clocks (`checks.clocks`) instead of by counting barriers: what is checked is that each
ordinary access, copy and matrix op knows of the accesses before it, and that what the copy engine and matrix units read was
fenced. Threads of one warp are not told apart in this, and a barrier that is used again counts for all its rounds so far.

The machine itself knows control flow, barriers of the block and the grid, and the ops of one thread. Units with state of their own
(`barriers`, `copies`, `matrix`, `simt_ops`…) add theirs; `scheduler` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from tilewright.ir import places
from tilewright.ir.emulator.checks.clocks import Clocks
from tilewright.ir.emulator.checks.detector import LaunchRaces, RaceDetector
from tilewright.ir.emulator.frames import BLOCK, EXISTS, LANE, SLOT, THREAD, Frame
from tilewright.ir.emulator.machine import BarrierReached, Fork, GridBarrier, Machine, Pause, Results, Steps, advance
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.emulator.warps.divergence import elsewhere
from tilewright.ir.nodes import Kernel, Op, walk
from tilewright.ir.types import Scalar, Tensor, Type, Vec, dtype_of

Array = np.ndarray
LANES = 1 << 18
"""Most threads run together."""
ALLOCATED = 1 << 26
"""Most bytes of shared and local memory at one time."""
HELD = 1 << 28
"""Most bytes of values at one time, if every op of the kernel were executed and none of its results forgotten."""
_WAITING = frozenset({"barrier", "barrier_reduce", "grid_barrier", "await_count", "mbarrier_wait", "named_barrier", "cluster_sync", "wgmma_wait"})
"""Ops at which a warp can have to wait for others."""
_ORDERING = frozenset(
    {"mbarrier_init", "named_barrier", "cluster_sync", "tma_load", "tma_store", "bulk_load", "bulk_store", "wgmma", "wgmma_registers", "await_flag"}
)
"""Ops by which accesses are ordered otherwise than by the block's barrier."""


@dataclass(frozen=True)
class Waits:
    """Where warps of a kernel can have to wait for one another."""

    polling: frozenset[Op]
    """`while` ops that read memory the kernel writes: they may wait for another warp's write."""
    blocking: frozenset[Op]
    """Ops with a region that holds a barrier or a polling loop, and the polling loops themselves."""
    allocated: int
    """Bytes of shared and local memory of one block."""
    cluster: int
    """Blocks of a cluster."""
    clocked: bool
    """Whether accesses are ordered otherwise than by the block's barrier."""
    grid: bool
    """Whether blocks wait for all others."""
    held: int = 0
    """Bytes of the values of one thread."""

    @staticmethod
    def of(kernel: Kernel) -> Waits:
        ops = list(walk(kernel.body))
        written = {op.operands[0] for op in ops if op.opcode in ("store", "atomic", "atomic_store", "store_remote", "atomic_remote")}
        polling = {
            op for op in ops if op.opcode == "while" and any(
                inner.opcode in ("atomic", "atomic_load", "atomic_remote") or (inner.opcode == "load" and inner.operands[0] in written)
                for region in op.regions for inner in walk(region)
            )
        }  # fmt: skip
        blocking = set(polling)
        for op in ops:
            inside = [inner for region in op.regions for inner in walk(region)]
            if any(inner.opcode in _WAITING or inner in polling for inner in inside):
                blocking.add(op)
        allocated = 0
        for op in ops:
            if op.opcode == "alloc" and isinstance(op.result.type, Tensor):
                elements = prod(s.evaluate({}) for s in op.result.type.shape)
                copies = kernel.threads if op.result.type.space == "local" else 1
                allocated += elements * copies * op.result.type.dtype.itemsize
        cluster = kernel.attrs.get("cluster", 1)
        assert isinstance(cluster, int)
        clocked = cluster > 1 or any(op.opcode in _ORDERING for op in ops)
        grid = any(op.opcode in ("grid_barrier", "await_count", "count_up") for op in ops)
        held = sum(_bytes_of(result.type) for op in ops for result in op.results)
        return Waits(frozenset(polling), frozenset(blocking), allocated, cluster, clocked, grid, held)

    def blocks_at_once(self, threads: int, total: int) -> int:
        if self.grid:
            return max(1, total)
        if self.polling or self.clocked:
            return self.cluster
        return max(1, min(LANES // threads, ALLOCATED // max(1, self.allocated), HELD // max(1, self.held * threads)))


def _bytes_of(type_: Type) -> int:
    if isinstance(type_, Scalar):
        return type_.dtype.itemsize
    return type_.width * type_.dtype.itemsize if isinstance(type_, Vec) else 0


def pick(array: Array, select: Array) -> Array:
    """The lanes `select` of a value."""
    return array if array.shape[0] == 1 else array[select]


def place(values: Results, select: Array, parts: Results, lanes: int) -> Results:
    """`values` with the lanes `select` replaced."""
    results: list[Array] = []
    for value, part in zip(values, parts, strict=True):
        full = np.array(np.broadcast_to(value, (lanes, *part.shape[1:])))
        full[select] = part
        results.append(full)
    return tuple(results)


class ThreadMachine(Machine):
    """Runs blocks `first` to `first + blocks` of the grid."""

    def __init__(
        self, kernel: Kernel, sizes: Mapping[str, int], waits: Waits, first: int, blocks: int, warp_size: int, launch: LaunchRaces
    ) -> None:
        super().__init__(kernel, sizes)
        self.waits = waits
        self.blocks = blocks
        self.warp_size = warp_size
        self.warps = -(-kernel.threads // warp_size)
        """Warps of one block."""
        padded = self.warps * warp_size
        number = np.arange(blocks * padded)
        thread = number % padded
        exists = thread < kernel.threads
        self.root = Frame(blocks * padded, None if exists.all() else exists)
        slot = number // padded
        self.root.values |= {LANE: number, SLOT: slot, BLOCK: first + slot, THREAD: thread, EXISTS: exists}
        self.simple |= {
            "thread_id": self._thread_id, "grid_size": self._grid_size, "alloc": self._alloc,
            "fence": self._fence, "extract": self._extract, "pack": self._pack, "split": self._split,
            "every": self._every,
            "elect": self._elect, "cluster_rank": self._cluster_rank, "load_remote": self._load_remote, "to_bits": self._to_bits, "from_bits": self._from_bits,
            "prefetch_map": self._nothing, "cluster_arrive": self._nothing, "prefetch": self._nothing, "fence_init": self._nothing, "wait_previous": self._nothing,
            "release_next": self._nothing, "set_registers": self._nothing,
        }  # fmt: skip
        self.control |= {"barrier": self._barrier, "grid_barrier": self._grid_barrier, "run_blocks": self._run_blocks}
        self.barriers = np.zeros(blocks, np.int64)
        """How many barriers each block has passed."""
        self.cluster = waits.cluster
        self.clocks = Clocks(blocks, self.warps) if waits.clocked and not waits.polling else None
        self.races = RaceDetector(self, self.root, launch, warp_size, self.barriers, self.cluster, self.clocks, bool(waits.polling))
        self.in_flight: Callable[[Memory, int], Op | None] = lambda memory, place: None
        """The copy that will write to a place of shared memory."""

    def start(self, apart: bool, single: bool = False) -> Steps:
        """The kernel from its start to its end; `apart`: each warp on its own from the start; `single`: each thread."""
        if not apart:
            return (yield from self.run(self.kernel.body, self.root))
        if single:
            lanes = np.flatnonzero(self.root.active)
            children = [
                self._child(self.root, self.warp_of(n) * self.warp_size + np.arange(self.warp_size), np.arange(self.root.lanes) == n)
                for n in lanes.tolist()
            ]
        else:
            warps = np.flatnonzero(self.warps_with(self.root.active))
            children = [self._child(self.root, warp * self.warp_size + np.arange(self.warp_size), self.root.mask) for warp in warps]
        yield Fork(None, tuple((child, self.run(self.kernel.body, child)) for child in children))
        return ()

    def describe(self, frame: Frame, lane: int) -> str:
        return f"{self.block_text(int(frame.full(BLOCK)[lane]))}, {places.thread_text(self.kernel, int(frame.full(THREAD)[lane]))}"

    # -- what is looked at before memory is touched ---------------------------------------------------------------

    def on_read(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        self.races.read(op, frame, memory, places, active)

    def on_write(
        self, op: Op, frame: Frame, memory: Memory, places: Array, values: Array, active: Array | None
    ) -> None:
        self.races.write(op, frame, memory, places, values, active)

    def on_update(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        self.races.update(op, frame, memory, places, active)

    def unwritten_text(self, memory: Memory, place: int) -> str:
        copy = self.in_flight(memory, place)
        return (
            super().unwritten_text(memory, place)
            if copy is None
            else f"is still being copied by the {copy.opcode} at {copy.span.place()}"
        )

    # -- warps ----------------------------------------------------------------------------------------------------

    def by_warp(self, lanes: Array) -> Array:
        return lanes.reshape(-1, self.warp_size)

    def warps_with(self, lanes: Array) -> Array:
        """Which warps have one of these lanes."""
        found: Array = np.logical_or.reduce(self.by_warp(lanes), axis=1)
        return found

    def lanes_of(self, warps: Array) -> Array:
        """The lanes of the warps where `warps` holds."""
        return (np.flatnonzero(warps)[:, None] * self.warp_size + np.arange(self.warp_size)).reshape(-1)

    def warp_of(self, lane: int) -> int:
        """The warp of a lane of the root frame, over all blocks that run together."""
        return int(lane) // self.warp_size

    def warps_of(self, frame: Frame, lanes: Array) -> Array:
        """The numbers of the warps that these lanes of a frame, chosen by number or by a mask, are in."""
        return np.unique(frame.full(LANE)[lanes] // self.warp_size)

    # -- ways that part -------------------------------------------------------------------------------------------

    def if_(self, op: Op, frame: Frame) -> Steps:
        if op not in self.waits.blocking:
            return (yield from super().if_(op, frame))
        condition = frame.full(op.operands[0])
        one_side = self.warps_with(condition & frame.active)
        other_side = self.warps_with(~condition & frame.active)
        groups = [one_side & ~other_side, other_side & ~one_side, one_side & other_side]
        groups = [g for g in groups if g.any()]
        if len(groups) == 1:
            return (yield from super().if_(op, frame))
        children = [self._child(frame, self.lanes_of(group), frame.mask) for group in groups]
        parts = yield Fork(op, tuple((child, self.if_(op, child)) for child in children))
        results: Results = tuple(np.zeros((1, *part.shape[1:]), part.dtype) for part in parts[0])
        for child, part in zip(children, parts, strict=True):
            assert child.select is not None
            results = place(results, child.select, part, frame.lanes)
        return results

    def _child(self, frame: Frame, select: Array, mask: Array | None) -> Frame:
        return frame.child(select, None if mask is None else mask[select])

    def for_from(self, op: Op, frame: Frame, index: Array, high: Array, step: Array, carried: Results) -> Steps:
        if op not in self.waits.blocking:
            return (yield from super().for_from(op, frame, index, high, step, carried))
        (region,) = op.regions
        while True:
            goes_on = np.where(step > 0, index < high, index > high)
            lanes = goes_on & frame.active
            warps = self.warps_with(lanes)
            if not warps.any():
                return carried
            if not warps.all():
                select = self.lanes_of(warps)
                child = self._child(frame, select, frame.mask)
                rest = self.for_from(
                    op, child, pick(index, select), pick(high, select), pick(step, select),
                    tuple(pick(c, select) for c in carried),
                )  # fmt: skip
                (parts,) = yield Fork(op, ((child, rest),))
                return place(carried, select, parts, frame.lanes)
            frame.values.update(zip(region.args, (index, *carried), strict=True))
            with frame.masked(frame.mask if goes_on.all() else lanes, op):
                following = yield from self.run(region, frame)
            # Values that are the same for all lanes stay so where all lanes go on.
            carried = following if goes_on.all() else self._update(lanes, following, carried)
            index = advance(index, step, goes_on)

    @staticmethod
    def _update(lanes: Array, following: Results, carried: Results) -> Results:
        select = np.flatnonzero(lanes)
        return place(carried, select, tuple(pick(f, select) for f in following), len(lanes))

    def while_from(self, op: Op, frame: Frame, carried: Results) -> Steps:
        if op not in self.waits.blocking:
            return (yield from super().while_from(op, frame, carried))
        return (yield from self._while_waiting(op, frame, frame.active, carried, tested=False))

    def _while_waiting(self, op: Op, frame: Frame, active: Array, carried: Results, tested: bool) -> Steps:
        """A `while` in which warps can wait: split as soon as whole warps are done. `tested`: start with the body."""
        test, body = op.regions
        following = carried
        while True:
            if not tested:
                with frame.masked(active, op):
                    frame.values.update(zip(test.args, following, strict=True))
                    condition, *values = yield from self.run(test, frame)
                carried = self._update(active, tuple(values), carried)
                active = active & condition
                warps = self.warps_with(active)
                if not warps.any():
                    return carried
                if not warps.all():
                    select = self.lanes_of(warps)
                    child = self._child(frame, select, frame.mask)
                    own = tuple(pick(c, select) for c in carried)
                    rest = self._while_waiting(op, child, active[select], own, tested=True)
                    (parts,) = yield Fork(op, ((child, rest),))
                    return place(carried, select, parts, frame.lanes)
            tested = False
            with frame.masked(active, op):
                frame.values.update(zip(body.args, carried, strict=True))
                following = yield from self.run(body, frame)
            if op in self.waits.polling:
                yield Pause(op.span)

    def require_whole_warps(self, op: Op, frame: Frame, full: bool = False) -> None:
        """Each warp that comes here must come with all its threads; `full`: as many as a warp has."""
        here, exists = self.by_warp(frame.active), self.by_warp(frame.full(EXISTS))
        exists = np.ones_like(exists) if full else exists
        apart = here.any(axis=1) & (here != exists).any(axis=1)
        if apart.any():
            warp = int(np.argmax(apart))
            lane = warp * self.warp_size
            first = int(frame.full(THREAD)[lane])
            missing = np.flatnonzero(exists[warp] & ~here[warp])
            raise fault(
                f"divergent {op.opcode}: only {int(here[warp].sum())} of {int(exists[warp].sum())} threads of warp "
                f"{first // self.warp_size} of {self.block_text(int(frame.full(BLOCK)[lane]))} arrive"
                f"{elsewhere(frame, first, missing, lane)}",
                op.span, f"every thread of a {'block' if op.opcode in ('barrier', 'barrier_reduce', 'grid_barrier') else 'warp'} must reach the {op.opcode}; "
                "move it out of the condition",
            )  # fmt: skip

    def _barrier(self, op: Op, frame: Frame) -> Steps:
        self.require_whole_warps(op, frame)
        yield BarrierReached(op.span)
        return ()

    def _run_blocks(self, op: Op, frame: Frame) -> Steps:
        """All blocks, one after the other: any order will do."""
        low, step = np.zeros(1, np.int64), np.ones(1, np.int64)
        return (yield from self.for_from(op, frame, low, frame.get(op.operands[0]), step, ()))

    def _grid_barrier(self, op: Op, frame: Frame) -> Steps:
        self.require_whole_warps(op, frame)
        yield GridBarrier(op.span)
        return ()

    def open_grid_barrier(self) -> None:
        """All blocks pass a barrier of the grid."""
        self.barriers += 1
        self.races.launch.forget()
        if self.clocks is not None:
            warps = np.arange(self.blocks * self.warps)
            self.clocks.acquire(warps, self.clocks.release(warps))

    def open_barriers(self, opens: Array) -> None:
        """All warps of the blocks where `opens` holds pass a barrier."""
        self.barriers[opens] += 1
        self.races.open_barriers(opens)
        if self.clocks is not None:
            for block in np.flatnonzero(opens):
                warps = block * self.warps + np.arange(self.warps)
                self.clocks.acquire(warps, self.clocks.release(warps))

    def peer(self, op: Op, frame: Frame, rank: Array) -> Array:
        """The blocks with these ranks in the lanes' clusters, counted among the blocks that run together."""
        bad = frame.active & ((rank < 0) | (rank >= self.cluster))
        if bad.any():
            raise self.fail_at(op, frame, bad, lambda p: f"block {int(rank[p[0]])} of a cluster of {self.cluster}")
        slot = frame.full(SLOT)
        return np.asarray(slot - slot % self.cluster + rank)

    # -- ops of one thread ----------------------------------------------------------------------------------------

    def _thread_id(self, op: Op, frame: Frame) -> Results:
        return (frame.get(THREAD),)

    def _grid_size(self, op: Op, frame: Frame) -> Results:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        return (np.full(1, self.grid[axis], np.int64),)

    def _nothing(self, op: Op, frame: Frame) -> Results:
        """Warps run in step and memory is consistent: there is nothing to order."""
        return ()

    def _fence(self, op: Op, frame: Frame) -> Results:
        self.races.fence(op, frame)
        return ()

    def _alloc(self, op: Op, frame: Frame) -> Results:
        """The one allocation of this op: threads that come here later, or again, find the same memory."""
        if op.result not in self.memories:
            type_ = op.result.type
            assert isinstance(type_, Tensor)
            shape = tuple(s.evaluate({}) for s in type_.shape)
            owners = self.root.lanes if type_.space == "local" else self.blocks
            values = op.attrs.get("values")
            if isinstance(values, tuple):
                constant = np.array(values).astype(type_.dtype.numpy).reshape(shape)
                self.memories[op.result] = Memory.of_array(op.result.name, type_, constant)
                return ()
            memory = Memory.allocate(op.result.name, type_, shape, owners)
            self.memories[op.result] = memory
            self.races.allocate(memory)
        return ()

    def _split(self, op: Op, frame: Frame) -> Results:
        value = frame.get(op.operands[0])
        half = value.shape[1] // 2
        return (value[:, 0], value[:, 1]) if half == 1 else (value[:, :half], value[:, half:])

    def _every(self, op: Op, frame: Frame) -> Results:
        return (np.asarray(frame.get(op.operands[0]).all(axis=1)),)

    def _extract(self, op: Op, frame: Frame) -> Results:
        lane = op.attrs["lane"]
        assert isinstance(lane, int)
        return (frame.get(op.operands[0])[:, lane],)

    def _pack(self, op: Op, frame: Frame) -> Results:
        return (np.stack(np.broadcast_arrays(*(frame.get(v) for v in op.operands)), axis=-1),)

    def _to_bits(self, op: Op, frame: Frame) -> Results:
        value = np.ascontiguousarray(frame.get(op.operands[0]))
        return (value.view(np.uint32).reshape(-1),)

    def _from_bits(self, op: Op, frame: Frame) -> Results:
        value = np.ascontiguousarray(frame.get(op.operands[0]))
        return (value.reshape(-1, 1).view(dtype_of(op.result.type).numpy),)

    def _load_remote(self, op: Op, frame: Frame) -> Results:
        memory = self.memories[op.operands[0]]
        index = frame.full(op.operands[1]).astype(np.int64)
        own = self.element_places(op, frame, memory, [index], frame.mask)
        places = own + (self.peer(op, frame, frame.full(op.operands[2]).astype(np.int64)) - frame.full(SLOT)) * memory.size
        self.check_written(op, frame, memory, places, frame.mask)
        self.on_read(op, frame, memory, places, frame.mask)
        return (memory.read(places),)

    def _cluster_rank(self, op: Op, frame: Frame) -> Results:
        return ((frame.get(BLOCK) % self.cluster).astype(np.int32),)

    # -- ops of a warp --------------------------------------------------------------------------------------------

    def _elect(self, op: Op, frame: Frame) -> Results:
        active = self.by_warp(frame.active)
        return ((active & (np.cumsum(active, axis=1) == 1)).reshape(-1),)
