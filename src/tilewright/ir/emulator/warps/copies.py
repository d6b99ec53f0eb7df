"""Copies that go on while the thread does: by the copy engine (`tma_*`, on tensor maps) and by threads (`copy_async`).

A load by the engine makes its target undefined at once and writes it only when no warp can go on without it, so a kernel that
does not wait for the mbarrier reads what nobody wrote. `copy_async` writes when its thread waits for it. A store by the engine
reads and writes at once; the order of accesses (`order`) tells whether someone writes its source before the thread has waited,
whether ordinary writes were fenced, and whether anyone still used a load's target. A kernel must not end with copies in flight.
A load by a map with pixels must start at one of the map's base positions: what the engine does elsewhere is not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tilewright.base.sizes import Size
from tilewright.ir.emulator.frames import LANE, SLOT, Frame, align
from tilewright.ir.emulator.machine import Results
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.emulator.warps.barriers import Barriers, Mbarrier, whole
from tilewright.ir.emulator.warps.thread import ThreadMachine
from tilewright.ir.nodes import Op, Value
from tilewright.ir.ops_matrix import CORNERS, MOST_OFFSET
from tilewright.ir.types import CopyMap

Array = np.ndarray
_UNIT = 16
"""What strides and rows of a tensor map must be a multiple of, in bytes."""
_ALIGNED = 128
"""What the place of a box in shared memory must be a multiple of, in bytes."""


def swizzled(places: Array, swizzle: int = 128) -> Array:
    """Where bytes with these linear places lie in rows of `swizzle` bytes that are swizzled; `swizzled_place` for arrays."""
    return places ^ ((places >> 3) & (swizzle - 1 & 0x70)) if swizzle else places


def _as_tf32(values: Array) -> Array:
    """f32 rounded to 10 bits of mantissa, to nearest, ties to even."""
    bits = values.view(np.uint32)
    near = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), near)


@dataclass(frozen=True)
class TensorMap:
    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    pixels: int = 0
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    """The first and the last base position along h and w."""
    steps: tuple[int, ...] = ()
    rounds: bool = False

    @property
    def count(self) -> int:
        """Elements of one copy."""
        return prod(self.box) * max(self.pixels, 1)

    @property
    def bytes(self) -> int:
        return self.count * self.memory.dtype.itemsize

    @property
    def coordinates(self) -> int:
        """How many say where a copy is."""
        return len(self.box) + (len(self.box) - 2 if self.pixels else 0)

    def sources(self, corner: Sequence[int]) -> tuple[Array, Array]:
        """Of the copy at those coordinates: the elements' places in memory, and which of them exist."""
        return self._pixel_sources(corner) if self.pixels else self._box_sources(corner)

    def misplaced(self, corner: Sequence[int]) -> str:
        """Why no copy of pixels can be there; empty where it can."""
        if not self.pixels:
            return ""
        rank = len(self.box)
        start, offset, most = list(corner[1 : rank - 1]), list(corner[rank:]), MOST_OFFSET[rank]
        if any(not low <= at <= high for at, low, high in zip(start, self.lower, self.upper, strict=True)):
            return f"{start} is no base position: they are from {list(self.lower)} to {list(self.upper)}"
        if any((at - low) % step for at, low, step in zip(start, self.lower, self.steps, strict=True)):
            return f"{start} is no base position: they are multiples of {list(self.steps)} from {list(self.lower)}"
        if not all(0 <= o <= most for o in offset):
            return f"the offset {offset} from the base position is not within 0 to {most}"
        return ""

    def _pixel_sources(self, corner: Sequence[int]) -> tuple[Array, Array]:
        rank = len(self.box)
        start, channel, offsets = corner[1 : rank - 1], corner[rank - 1], corner[rank:]
        per = [(high - low) // step + 1 for low, high, step in zip(self.lower, self.upper, self.steps, strict=True)]
        number = np.asarray(corner[0], np.int64)
        for count, at, low, step in zip(per, start, self.lower, self.steps, strict=True):
            number = number * count + (at - low) // step
        number = number + np.arange(self.pixels)
        indices = [(channel + np.arange(self.box[-1]))[None, :]]
        for count, low, step, offset in zip(per[::-1], self.lower[::-1], self.steps[::-1], offsets[::-1], strict=True):
            number, place = np.divmod(number, count)
            indices.insert(0, (low + place * step + offset)[:, None])
        indices.insert(0, number[:, None])
        inside = np.ones((self.pixels, self.box[-1]), np.bool_)
        places = np.full(inside.shape, self.memory.base, np.int64)
        for along, extent, stride in zip(indices, self.shape, self.strides, strict=True):
            inside &= (along >= 0) & (along < extent)
            places += along * stride
        return np.where(inside, places, 0).reshape(-1), inside.reshape(-1)

    def _box_sources(self, corner: Sequence[int]) -> tuple[Array, Array]:
        inside = np.ones(self.box, np.bool_)
        places = np.full(self.box, self.memory.base, np.int64)
        for axis, (start, extent, stride) in enumerate(zip(corner, self.shape, self.strides, strict=True)):
            along = (start + np.arange(self.box[axis])).reshape([-1 if a == axis else 1 for a in range(len(self.box))])
            inside &= (along >= 0) & (along < extent)
            places += along * stride
        return np.where(inside, places, 0).reshape(-1), inside.reshape(-1)


@dataclass(frozen=True, eq=False)
class Flight:
    """A load on its way: where it comes from, and for each block that gets it where it goes and whom it tells."""

    op: Op
    source: TensorMap
    places: Array
    inside: Array
    targets: tuple[tuple[Memory, Array, Mbarrier], ...]
    given: Array | None


@dataclass(frozen=True, eq=False)
class Sending:
    """A copy to another block's shared memory on its way: what is written, and like a load's where and whom it tells."""

    op: Op
    values: Array
    targets: tuple[tuple[Memory, Array, Mbarrier], ...]
    given: Array | None


@dataclass(eq=False)
class Stores:
    """A thread's stores by the engine: the number of the last one of each group."""

    op: Op
    open: int = 0
    closed: deque[int] = field(default_factory=deque)


@dataclass(frozen=True, eq=False)
class Pieces:
    """One `copy_async` of some lanes: what each writes, and as part of which of its groups."""

    op: Op
    target: Memory
    lanes: Array
    groups: Array
    places: Array
    values: Array
    done: Array


class Copies:
    """The copies of one machine's blocks, and the ops that start and await them."""

    def __init__(self, machine: ThreadMachine, barriers: Barriers) -> None:
        self.machine, self.barriers = machine, barriers
        machine.in_flight = self.in_flight
        self.maps: dict[Value, TensorMap] = {}
        self.flights: deque[Flight | Sending] = deque()
        self.loads = np.zeros(machine.blocks, np.int64)
        self.stored = np.zeros(machine.blocks * machine.warps, np.int64)
        self.stores: dict[int, Stores] = {}
        self.pieces: list[Pieces] = []
        self.committed = np.zeros(machine.root.lanes, np.int64)
        machine.simple |= {
            "tensor_map": self._map, "tma_load": self._load, "tma_store": self._store, "tma_commit": self._commit,
            "tma_wait": self._wait, "fence_async": self._fence, "copy_async": self._copy_async,
            "copy_commit": self._copy_commit, "copy_wait": self._copy_wait,
            "copy_remote": self._copy_remote,
        }  # fmt: skip

    # -- the engine -------------------------------------------------------------------------------------------------

    def _map(self, op: Op, frame: Frame) -> Results:
        memory = self.machine.memories[op.operands[0]]
        type_ = op.result.type
        assert isinstance(type_, CopyMap)
        shape, strides = (self._sizes(op, name) for name in ("shape", "strides"))
        size = memory.dtype.itemsize
        row = type_.box[-1] * size
        problem = ""
        if strides[-1] != 1:
            problem = f"the last axis has stride {strides[-1]}, which must be 1"
        elif any(s * size % _UNIT for s in strides[:-1]):
            problem = f"strides {list(strides)} of {size} bytes each are not all multiples of {_UNIT} bytes"
        elif row % _UNIT:
            problem = f"rows of {row} bytes are not a multiple of {_UNIT}"
        elif type_.swizzle and row > type_.swizzle:
            problem = f"rows of {row} bytes are longer than the {type_.swizzle} bytes that are swizzled"
        elif (
            all(shape)
            and memory.base + sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) >= memory.flat.size
        ):
            problem = f"shape {list(shape)} with strides {list(strides)} reaches beyond the {memory.flat.size} elements"
        found = TensorMap(memory, shape, strides, type_.box, type_.swizzle, rounds=bool(op.attrs.get("round")))
        if type_.pixels and not problem:
            found, problem = self._of_pixels(op, found, type_.pixels)
        if problem:
            raise fault(f"a map of {memory.label}: {problem}", op.span)
        self.maps[op.result] = found
        return ()

    def _of_pixels(self, op: Op, plain: TensorMap, pixels: int) -> tuple[TensorMap, str]:
        """The map in im2col mode, and what is wrong with it."""
        lower, upper, steps = (self._sizes(op, name) for name in ("lower", "upper", "steps"))
        last = tuple(extent - 1 + offset for extent, offset in zip(plain.shape[1:-1], upper, strict=True))
        problem = ""
        least, most = CORNERS[len(plain.shape)]
        if not all(least <= offset <= most for offset in (*lower, *upper)):
            problem = f"the corners {list(lower)} and {list(upper)} are not all between {least} and {most}"
        elif any(low > high for low, high in zip(lower, last, strict=True)) and all(plain.shape):
            problem = f"there are no base positions from {list(lower)} to {list(last)}"
        return replace(plain, pixels=pixels, lower=lower, upper=last, steps=steps), problem

    def _sizes(self, op: Op, name: str) -> tuple[int, ...]:
        items = op.attrs[name]
        assert isinstance(items, tuple)
        return tuple(Size.of(s).evaluate(self.machine.sizes) for s in items if isinstance(s, int | Size))

    def _box(self, op: Op, frame: Frame, lane: int, shared: Memory, source: TensorMap) -> Array:
        """The elements of a shared tensor that hold a box, in the box's order."""
        size = shared.dtype.itemsize
        offset = int(frame.full(op.operands[1])[lane])
        if offset * size % _ALIGNED:
            raise fault(
                f"{op.opcode} at element {offset} of {shared.label}: a box must lie at a multiple of {_ALIGNED} bytes, "
                f"in {self.machine.describe(frame, lane)}", op.span,
            )  # fmt: skip
        elements = swizzled((offset + np.arange(source.count)) * size, source.swizzle) // size
        if offset < 0 or int(elements.max()) >= shared.size:
            raise fault(
                f"{op.opcode} of {source.count} elements from element {offset} of {shared.label} on is out of bounds: it has "
                f"{shared.size}, in {self.machine.describe(frame, lane)}", op.span,
            )  # fmt: skip
        return np.asarray(elements)

    def _load(self, op: Op, frame: Frame) -> Results:
        shared, barriers = self.machine.memories[op.operands[0]], self.machine.memories[op.operands[3]]
        source = self.maps[op.operands[2]]
        corners = [frame.full(v).astype(np.int64) for v in op.operands[5 : 5 + source.coordinates]]
        index = frame.full(op.operands[4])
        for lane in np.flatnonzero(frame.active):
            elements = self._box(op, frame, int(lane), shared, source)
            if not 0 <= index[lane] < barriers.size:
                raise fault(f"tma_load tells {barriers.label}[{int(index[lane])}], which is out of bounds", op.span)
            corner = [int(c[lane]) for c in corners]
            if problem := source.misplaced(corner):
                who = self.machine.describe(frame, int(lane))
                raise fault(f"tma_load of {source.memory.label}: {problem}, in {who}", op.span)
            places, inside = source.sources(corner)
            slot, warp = int(frame.full(SLOT)[lane]), self.machine.warp_of(frame.full(LANE)[lane])
            slots = [slot]
            if op.attrs.get("multicast"):
                mask, first = int(frame.full(op.operands[-1])[lane]), slot - slot % self.machine.cluster
                if mask >> self.machine.cluster or mask <= 0:
                    raise fault(f"tma_load to blocks {mask:#b} of a cluster of {self.machine.cluster}", op.span)
                slots = [first + rank for rank in range(self.machine.cluster) if mask >> rank & 1]
            self.loads[slot] += 1
            targets: list[tuple[Memory, Array, Mbarrier]] = []
            for one in slots:
                there = one * shared.size + elements
                self.check_target(op, frame, int(lane), shared, there, warp, slot)
                shared.forget(there)
                told = self.barriers.at(
                    op, barriers, one * barriers.size + int(index[lane]), np.asarray([warp])
                )
                targets.append((shared, there, told))
            clocks = self.machine.clocks
            given = clocks.about(clocks.loads(slot), int(self.loads[slot])) if clocks is not None else None
            self.flights.append(Flight(op, source, places, inside, tuple(targets), given))
        return ()

    def check_target(
        self, op: Op, frame: Frame, lane: int, shared: Memory, there: Array, warp: int, slot: int
    ) -> None:
        """Of a load started by that warp of block `slot`: nobody uses its target any more."""
        clocks = self.machine.clocks
        if clocks is not None:
            self.machine.races.engine_writes(
                op, frame, lane, shared, there, clocks.now[:, warp], clocks.loads(slot), int(self.loads[slot])
            )

    def _copy_remote(self, op: Op, frame: Frame) -> Results:
        target, source, barriers = (self.machine.memories[op.operands[k]] for k in (0, 2, 4))
        count = whole(op.attrs, "count")
        peers = self.machine.peer(op, frame, frame.full(op.operands[6]).astype(np.int64))
        first, start, index = (frame.full(op.operands[k]).astype(np.int64) for k in (1, 3, 5))
        unit = _UNIT // source.dtype.itemsize
        for lane in np.flatnonzero(frame.active):
            for memory, offset in ((target, int(first[lane])), (source, int(start[lane]))):
                if offset < 0 or offset + count > memory.size or offset % unit:
                    raise fault(
                        f"copy_remote of {count} elements at element {offset} of {memory.label}, of {memory.size}, is out of "
                        f"bounds or not at a multiple of {_UNIT} bytes, in {self.machine.describe(frame, int(lane))}", op.span,
                    )  # fmt: skip
            if not 0 <= index[lane] < barriers.size:
                raise fault(f"copy_remote tells {barriers.label}[{int(index[lane])}], which is out of bounds", op.span)
            slot, warp, peer = int(frame.full(SLOT)[lane]), self.machine.warp_of(frame.full(LANE)[lane]), int(peers[lane])
            here = slot * source.size + int(start[lane]) + np.arange(count)
            there = peer * target.size + int(first[lane]) + np.arange(count)
            self.loads[slot] += 1
            clocks = self.machine.clocks
            known, actor, given = None, 0, None
            if clocks is not None:
                known, actor = clocks.now[:, warp], clocks.loads(slot)
                given = clocks.about(actor, int(self.loads[slot]))
            self.machine.races.engine_reads(op, source, here, known, actor, int(self.loads[slot]))
            values = np.array(source.read(here))
            self.check_target(op, frame, int(lane), target, there, warp, slot)
            target.forget(there)
            told = self.barriers.at(op, barriers, peer * barriers.size + int(index[lane]), np.asarray([warp]))
            self.flights.append(Sending(op, values, ((target, there, told),), given))
        return ()

    def land(self) -> bool:
        """Finish the oldest copy in flight, if there is one."""
        if not self.flights:
            return False
        flight = self.flights.popleft()
        if isinstance(flight, Sending):
            for shared, there, mbarrier in flight.targets:
                shared.write(there, flight.values)
                self.barriers.copied(mbarrier, flight.values.nbytes, flight.given)
            return True
        memory = flight.source.memory
        found = np.zeros(flight.places.shape, memory.flat.dtype)
        found[flight.inside] = memory.read(flight.places[flight.inside])
        if flight.source.rounds:
            found = _as_tf32(found)
        for shared, there, mbarrier in flight.targets:
            shared.write(there, found if found.dtype == shared.flat.dtype else found.view(shared.flat.dtype))
            self.barriers.copied(mbarrier, flight.source.bytes, flight.given)
        return True

    def in_flight(self, memory: Memory, place: int) -> Op | None:
        """The copy that will write there."""
        for flight in self.flights:
            if any(shared is memory and (there == place).any() for shared, there, _ in flight.targets):
                return flight.op
        for pieces in self.pieces:
            if pieces.target is memory and (pieces.places[~pieces.done] == place).any():
                return pieces.op
        return None

    def _store(self, op: Op, frame: Frame) -> Results:
        shared = self.machine.memories[op.operands[0]]
        target = self.maps[op.operands[2]]
        corners = [frame.full(v).astype(np.int64) for v in op.operands[3:]]
        if not target.memory.flat.flags.writeable:
            raise fault(f"tma_store to {target.memory.label}, which is read-only", op.span)
        for lane in np.flatnonzero(frame.active):
            elements = self._box(op, frame, int(lane), shared, target)
            places, inside = target.sources([int(c[lane]) for c in corners])
            slot, number = int(frame.full(SLOT)[lane]), int(frame.full(LANE)[lane])
            warp = self.machine.warp_of(number)
            there = (slot * shared.size + elements)[inside]
            self.stored[warp] += 1
            access = int(self.stored[warp])
            clocks = self.machine.clocks
            known = clocks.now[:, warp] if clocks is not None else None
            actor = clocks.stores(warp) if clocks is not None else 0
            self.machine.races.engine_reads(op, shared, there, known, actor, access)
            found = shared.read(there)
            target.memory.write(
                places[inside],
                found if found.dtype == target.memory.flat.dtype else found.view(target.memory.flat.dtype),
            )
            self.stores.setdefault(number, Stores(op)).open = access
            self.machine.changes += 1
        return ()

    def _lanes_with_stores(self, frame: Frame) -> list[tuple[int, Stores]]:
        here = set(frame.full(LANE)[frame.active].tolist())
        return [(lane, stores) for lane, stores in self.stores.items() if lane in here]

    def _commit(self, op: Op, frame: Frame) -> Results:
        for _, stores in self._lanes_with_stores(frame):
            # A group may be empty; it counts all the same, with nothing to wait for.
            stores.closed.append(stores.open)
            stores.open = 0
        return ()

    def _wait(self, op: Op, frame: Frame) -> Results:
        pending = whole(op.attrs, "pending")
        for lane, stores in self._lanes_with_stores(frame):
            while len(stores.closed) > pending:
                access = stores.closed.popleft()
                if self.machine.clocks is not None:
                    warp = self.machine.warp_of(lane)
                    self.machine.clocks.learn(warp, self.machine.clocks.stores(warp), access)
        return ()

    def _fence(self, op: Op, frame: Frame) -> Results:
        if self.machine.clocks is not None:
            self.machine.clocks.fence(self.machine.warps_of(frame, frame.active))
        return ()

    # -- copies by threads ------------------------------------------------------------------------------------------

    def _copy_async(self, op: Op, frame: Frame) -> Results:
        target, source = self.machine.memories[op.operands[0]], self.machine.memories[op.operands[2]]
        width = whole(op.attrs, "bytes") // source.dtype.itemsize
        rank = len(source.shape)
        wanted = frame.active
        copied = wanted & frame.full(op.operands[-1]) if op.attrs.get("masked") else wanted
        offset = frame.full(op.operands[1]).astype(np.int64)
        outside = wanted & ((offset < 0) | (offset + width > target.size) | (offset % width != 0))
        if outside.any():
            raise self.machine.fail_at(
                op, frame, outside,
                lambda p: f"copy_async of {width} elements to element {int(offset[p[0]])} of {target.label}, "
                f"of {target.size}, is misaligned or out of bounds",
            )  # fmt: skip
        with frame.masked(copied):
            indices = [frame.full(v).astype(np.int64) for v in op.operands[3 : 3 + rank]]
            first = self.machine.element_places(op, frame, source, indices, copied)
            found = self.machine.vector_places(op, frame, source, first, copied, width)
        values = source.read(found) if source.flat.size else np.zeros(found.shape, source.flat.dtype)
        values = np.where(align(copied, 1), values, np.zeros((), values.dtype))[wanted]
        places = (frame.full(SLOT) * target.size + offset)[:, None] + np.arange(width)
        self.machine.on_write(op, frame, target, places, np.zeros((), values.dtype), align(wanted, 1))
        lanes = frame.full(LANE)[wanted]
        target.forget(places[wanted])
        self.pieces.append(
            Pieces(op, target, lanes, self.committed[lanes], places[wanted], values, np.zeros(len(lanes), np.bool_))
        )
        return ()

    def _copy_commit(self, op: Op, frame: Frame) -> Results:
        self.committed[frame.full(LANE)[frame.active]] += 1
        return ()

    def _copy_wait(self, op: Op, frame: Frame) -> Results:
        waiting = np.zeros(len(self.committed), np.bool_)
        waiting[frame.full(LANE)[frame.active]] = True
        position = np.zeros(len(self.committed), np.int64)
        position[frame.full(LANE)] = np.arange(frame.lanes)
        for pieces in self.pieces:
            now = waiting[pieces.lanes] & ~pieces.done
            now &= pieces.groups < self.committed[pieces.lanes] - whole(op.attrs, "pending")
            if now.any():
                self._finish_pieces(pieces, now, frame, position)
        self.pieces = [pieces for pieces in self.pieces if not pieces.done.all()]
        return ()

    def _finish_pieces(self, pieces: Pieces, now: Array, frame: Frame, position: Array) -> None:
        width = pieces.places.shape[1]
        active = np.zeros(frame.lanes, np.bool_)
        places = np.zeros((frame.lanes, width), np.int64)
        values = np.zeros((frame.lanes, width), pieces.values.dtype)
        there = position[pieces.lanes[now]]
        active[there], places[there], values[there] = True, pieces.places[now], pieces.values[now]
        self.machine.on_write(pieces.op, frame, pieces.target, places, values, align(active, 1))
        pieces.target.write(pieces.places[now], pieces.values[now])
        pieces.done[now] = True
        self.machine.changes += 1

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Complain of copies nobody waited for."""
        if self.flights:
            op = self.flights[0].op
            raise fault(
                f"the kernel ends while a {op.opcode} is in flight",
                op.span,
                "wait for its mbarrier before the block's last thread ends",
            )
        for stores in self.stores.values():
            if stores.open:
                raise fault(
                    f"the kernel ends with a {stores.op.opcode} that is in no group",
                    stores.op.span,
                    "add tma_commit and tma_wait",
                )
            if stores.closed:
                raise fault(
                    f"the kernel ends before a {stores.op.opcode} has read its shared memory",
                    stores.op.span,
                    "add tma_wait at the end",
                )
