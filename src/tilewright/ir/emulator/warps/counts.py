"""Counters in device memory by which blocks wait for one another, and tensors behind addresses. In: the ops of one machine; out: their effects.

A block that waits for a counter knows, once it has come far enough, of all that was written before those steps: clocks of blocks say so to the race
detector (`checks.order.CountOrder`).
"""

from __future__ import annotations

import numpy as np

from tilewright.ir.emulator.frames import BLOCK, Frame
from tilewright.ir.emulator.machine import Results, Steps, Wait
from tilewright.ir.emulator.memory.addresses import array_at
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.emulator.warps.thread import ThreadMachine
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor

_WORD = 1 << 32


class Counts:
    """The counters and addresses of one machine."""

    def __init__(self, machine: ThreadMachine) -> None:
        self.machine = machine
        self._views: dict[tuple[Value, int], Memory] = {}
        machine.simple |= {"count_up": self._count_up, "tensor_at": self._tensor_at}
        machine.control |= {"await_count": self._await_count}

    def _counters(self, op: Op, frame: Frame) -> tuple[Memory, np.ndarray]:
        memory = self.machine.memories[op.operands[0]]
        index = frame.full(op.operands[1]).astype(np.int64)
        places = self.machine.element_places(op, frame, memory, [index], frame.active)
        return memory, np.broadcast_to(places, (frame.lanes,))

    def _count_up(self, op: Op, frame: Frame) -> Results:
        memory, places = self._counters(op, frame)
        blocks = frame.full(BLOCK)
        for lane in np.flatnonzero(frame.active):
            place = int(places[lane])
            memory.flat[place] = (int(memory.flat[place]) + 1) % _WORD
            self.machine.races.launch.release(memory, place, int(blocks[lane]))
        self.machine.changes += 1
        return ()

    def _await_count(self, op: Op, frame: Frame) -> Steps:
        memory, places = self._counters(op, frame)
        wanted = frame.full(op.operands[2]).astype(np.int64)
        pairs = sorted({(int(places[lane]), int(wanted[lane])) for lane in np.flatnonzero(frame.active)})

        def missing() -> list[tuple[int, int]]:
            return [(place, number) for place, number in pairs if (int(memory.flat[place]) - number) % _WORD >= _WORD // 2]

        def text() -> str:
            return "for " + ", ".join(f"{memory.label}[{place}] to come to {number}, which is {int(memory.flat[place])}" for place, number in missing())

        if missing():
            yield Wait(op.span, lambda: not missing(), text)
        for block in np.unique(frame.full(BLOCK)[frame.active]):
            for place, _ in pairs:
                self.machine.races.launch.acquire(memory, place, int(block))
        return ()

    def _tensor_at(self, op: Op, frame: Frame) -> Results:
        table = self.machine.memories[op.operands[0]]
        index = frame.full(op.operands[1]).astype(np.int64)
        places = np.broadcast_to(self.machine.element_places(op, frame, table, [index], frame.active), (frame.lanes,))
        found = np.unique(table.read(places[frame.active]))
        if len(found) != 1:
            raise fault("tensor_at: threads that run together find different addresses", op.span)
        memory = self._memory(op, int(found[0]))
        self.machine.memories[op.result] = frame.tensors[op.result] = memory
        return ()

    def enter(self, frame: Frame) -> None:
        """Warps go on: what they found by addresses is what these values mean now."""
        if frame.parent is not None:
            self.enter(frame.parent)
        for value, memory in frame.tensors.items():
            assert isinstance(memory, Memory)
            self.machine.memories[value] = memory

    def _memory(self, op: Op, address: int) -> Memory:
        type_ = op.result.type
        assert isinstance(type_, Tensor)
        known = self._views.get((op.result, address))
        if known is None:
            shape, strides = (tuple(s.evaluate({}) for s in sizes) for sizes in (type_.shape, type_.strides))
            if type_.align and address % type_.align:
                raise fault(f"tensor_at: the address {address:#x} of '{op.result.name}' is no multiple of {type_.align}", op.span)
            array = array_at(address, type_.dtype.numpy, shape, strides)
            if array is None:
                raise fault(f"tensor_at: no array of {type_.dtype}{list(shape)} lies at the address {address:#x} of '{op.result.name}'", op.span)
            if op.attrs.get("constant"):
                array = array.view()
                array.flags.writeable = False
            known = self._views[op.result, address] = Memory.of_array(op.result.name, type_, array)
        return known
