"""Bulk copies by the copy engine without a map, and accesses of the shared memory of other blocks of a cluster.

A bulk load makes its target undefined at once and writes it when no warp can go on without it; a bulk store reads and writes at once:
as copies by maps do (`copies`), with the same checks of order.
"""

from __future__ import annotations

import numpy as np

from tilewright.ir.emulator.frames import LANE, SLOT, Frame
from tilewright.ir.emulator.machine import Results
from tilewright.ir.emulator.memory.atomics import update
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.emulator.warps.barriers import Barriers
from tilewright.ir.emulator.warps.copies import Copies, Sending, Stores
from tilewright.ir.emulator.warps.thread import ThreadMachine
from tilewright.ir.nodes import Op

Array = np.ndarray
_UNIT = 16
"""What places and sizes of a bulk copy must be a multiple of, in bytes."""


class Bulk:
    """The ops of one machine."""

    def __init__(self, machine: ThreadMachine, barriers: Barriers, copies: Copies) -> None:
        self.machine, self.barriers, self.copies = machine, barriers, copies
        machine.simple |= {
            "bulk_load": self._load, "bulk_store": self._store, "store_remote": self._store_remote, "atomic_remote": self._atomic_remote,
        }  # fmt: skip

    # -- bulk copies ----------------------------------------------------------------------------------------------

    def _span(self, op: Op, frame: Frame, lane: int, shared: Memory, memory: Memory) -> tuple[Array, Array]:
        """The elements of both memories that a lane's copy is about."""
        rank = len(memory.shape)
        values = [int(frame.full(v)[lane]) for v in (op.operands[1], *op.operands[3 : 4 + rank])]
        offset, *indices, count = values
        size = count * memory.dtype.itemsize
        who = self.machine.describe(frame, lane)
        if count < 0 or size % _UNIT:
            raise fault(f"{op.opcode} of {size} bytes, which is no multiple of {_UNIT}, in {who}", op.span)
        if any(not 0 <= i < extent for i, extent in zip(indices, memory.shape, strict=True)) and count:
            raise fault(
                f"{op.opcode} of {memory.label} at {indices} is out of bounds: extents {list(memory.shape)}, in {who}", op.span
            )
        first = memory.base + sum(i * s for i, s in zip(indices, memory.strides, strict=True))
        places, elements = first + np.arange(count), offset + np.arange(count)
        if count and (memory.outside(places, places[:1]).any() or offset < 0 or offset + count > shared.size):
            raise fault(
                f"{op.opcode} of {count} elements between {memory.label} at {indices} (extents {list(memory.shape)}) and element {offset} of "
                f"{shared.label} (of {shared.size}) is out of bounds, in {who}", op.span,
            )  # fmt: skip
        at = (memory.address + (first - memory.base) * memory.dtype.itemsize, offset * shared.dtype.itemsize)
        if any(place % _UNIT for place in at):
            raise fault(
                f"{op.opcode} between {memory.label} at {indices} and element {offset} of {shared.label}: both must lie at multiples of "
                f"{_UNIT} bytes, in {who}", op.span,
            )  # fmt: skip
        return places, elements

    def _load(self, op: Op, frame: Frame) -> Results:
        machine, copies = self.machine, self.copies
        shared, memory, barriers = (machine.memories[op.operands[k]] for k in (0, 2, -2))
        index = frame.full(op.operands[-1])
        for lane in map(int, np.flatnonzero(frame.active)):
            places, elements = self._span(op, frame, lane, shared, memory)
            if not 0 <= index[lane] < barriers.size:
                raise fault(f"bulk_load tells {barriers.label}[{int(index[lane])}], which is out of bounds", op.span)
            slot, warp = int(frame.full(SLOT)[lane]), machine.warp_of(frame.full(LANE)[lane])
            copies.loads[slot] += 1
            there = slot * shared.size + elements
            copies.check_target(op, frame, lane, shared, there, warp, slot)
            shared.forget(there)
            told = self.barriers.at(op, barriers, slot * barriers.size + int(index[lane]), np.asarray([warp]))
            clocks = machine.clocks
            given = clocks.about(clocks.loads(slot), int(copies.loads[slot])) if clocks is not None else None
            copies.flights.append(Sending(op, np.array(memory.read(places)), ((shared, there, told),), given))
        return ()

    def _store(self, op: Op, frame: Frame) -> Results:
        machine, copies = self.machine, self.copies
        shared, memory = (machine.memories[op.operands[k]] for k in (0, 2))
        if not memory.flat.flags.writeable:
            raise fault(f"bulk_store to {memory.label}, which is read-only", op.span)
        for lane in map(int, np.flatnonzero(frame.active)):
            places, elements = self._span(op, frame, lane, shared, memory)
            slot, number = int(frame.full(SLOT)[lane]), int(frame.full(LANE)[lane])
            warp = machine.warp_of(number)
            copies.stored[warp] += 1
            access = int(copies.stored[warp])
            clocks = machine.clocks
            known = clocks.now[:, warp] if clocks is not None else None
            there = slot * shared.size + elements
            machine.races.engine_reads(op, shared, there, known, clocks.stores(warp) if clocks is not None else 0, access)
            memory.write(places, shared.read(there))
            copies.stores.setdefault(number, Stores(op)).open = access
            machine.changes += 1
        return ()

    # -- other blocks ---------------------------------------------------------------------------------------------

    def _remote(self, op: Op, frame: Frame) -> tuple[Memory, Array]:
        memory = self.machine.memories[op.operands[0]]
        index = frame.full(op.operands[1]).astype(np.int64)
        own = self.machine.element_places(op, frame, memory, [index], frame.mask)
        peers = self.machine.peer(op, frame, frame.full(op.operands[2]).astype(np.int64))
        return memory, np.broadcast_to(own + (peers - frame.full(SLOT)) * memory.size, (frame.lanes,))

    def _store_remote(self, op: Op, frame: Frame) -> Results:
        memory, places = self._remote(op, frame)
        values = frame.full(op.operands[3])
        self.machine.on_write(op, frame, memory, places, values, frame.mask)
        memory.write(places[frame.active], values[frame.active])
        self.machine.changes += 1
        return ()

    def _atomic_remote(self, op: Op, frame: Frame) -> Results:
        memory, places = self._remote(op, frame)
        self.machine.check_written(op, frame, memory, places, frame.mask)
        lanes = frame.active
        old = np.zeros(frame.lanes, memory.dtype.numpy)
        old[lanes] = update(str(op.attrs["kind"]), memory, places[lanes], [frame.full(v)[lanes] for v in op.operands[3:]])
        self.machine.changes += 1
        return (old,)
