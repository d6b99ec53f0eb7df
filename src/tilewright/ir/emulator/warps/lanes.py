"""Lanes of vecs (`ir.ops_lanes`) in the emulator: what threads of a CPU do with the elements of SIMD values.

In: a machine of the thread stage, which gets the ops. A vec of the emulated threads has one axis of threads and one of lanes; a lane that its
mask leaves out is not looked at, whatever its index is.
"""

from __future__ import annotations

import numpy as np

from tilewright.ir.emulator.frames import Frame, align
from tilewright.ir.emulator.machine import Machine, Results
from tilewright.ir.emulator.memory.memory import Memory, fault
from tilewright.ir.nodes import NO_ATTRS, Op, Value
from tilewright.ir.numerics import evaluate
from tilewright.ir.types import Vec, dtype_of

Array = np.ndarray


class Lanes:
    """The ops, run by a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.simple |= {
            "lane_ids": self._lane_ids, "mask_bits": self._mask_bits, "rearrange": self._rearrange, "insert": self._insert, "fold": self._fold,
            "dot_lanes": self._dot_lanes, "as_lanes": self._as_lanes, "join_halves": self._join_halves,
            "compress": self._compress,
            "gather": self._read, "load_lanes": self._read, "scatter": self._write, "store_lanes": self._write, "fault": self._fault,
        }  # fmt: skip

    def _lane_ids(self, op: Op, frame: Frame) -> Results:
        type_ = op.result.type
        assert isinstance(type_, Vec)
        return (np.arange(type_.width, dtype=type_.dtype.numpy)[None, :],)

    def _mask_bits(self, op: Op, frame: Frame) -> Results:
        mask = frame.get(op.operands[0])
        bits = np.uint32(1) << np.arange(mask.shape[1], dtype=np.uint32)
        return (np.bitwise_or.reduce(np.where(mask, bits, np.uint32(0)), axis=1),)

    def _rearrange(self, op: Op, frame: Frame) -> Results:
        parts = np.broadcast_arrays(*(frame.get(v) for v in op.operands))
        lanes = op.attrs["lanes"]
        assert isinstance(lanes, tuple)
        return (np.concatenate(parts, axis=1)[:, np.array(lanes, np.int64)],)

    def _compress(self, op: Op, frame: Frame) -> Results:
        value, mask = np.broadcast_arrays(*(frame.get(v) for v in op.operands))
        order = np.argsort(~mask, axis=1, kind="stable")
        return (np.where(np.take_along_axis(mask, order, 1), np.take_along_axis(value, order, 1), np.zeros((), value.dtype)),)

    def _insert(self, op: Op, frame: Frame) -> Results:
        vec, one = frame.get(op.operands[0]), frame.get(op.operands[1])
        result = np.array(np.broadcast_to(vec, (max(len(vec), len(one)), vec.shape[1])))
        lane = op.attrs["lane"]
        assert isinstance(lane, int)
        result[:, lane] = one
        return (result,)

    def _fold(self, op: Op, frame: Frame) -> Results:
        value, kind, dtype = frame.get(op.operands[0]), str(op.attrs["kind"]), dtype_of(op.operands[0].type)
        while value.shape[1] > 1:
            half = value.shape[1] // 2
            value = evaluate(kind, (value[:, :half], value[:, half:]), NO_ATTRS, dtype)
        return (value[:, 0],)

    def _dot_lanes(self, op: Op, frame: Frame) -> Results:
        sums, a, b = (frame.get(v).astype(np.int64) for v in op.operands)
        products = a * b
        four = products.reshape(len(products), -1, 4).sum(axis=2)
        return ((sums + four).astype(np.int32),)

    def _as_lanes(self, op: Op, frame: Frame) -> Results:
        return (np.ascontiguousarray(frame.get(op.operands[0])).view(dtype_of(op.result.type).numpy),)

    def _join_halves(self, op: Op, frame: Frame) -> Results:
        a, b = (frame.get(v) for v in op.operands)
        return ((a & 15) | (b << 4) if op.attrs["side"] == "low" else (a & 240) | (b >> 4),)

    def _places(self, op: Op, frame: Frame, mask: Value) -> tuple[Memory, Array, Array]:
        """The memory, and for each lane its place and whether it is accessed."""
        machine, wanted = self.machine, frame.get(mask)
        memory = machine.memories[op.operands[0]]
        active = wanted if frame.mask is None else wanted & frame.mask[:, None]
        indices = [align(frame.get(v).astype(np.int64, copy=False), 1) for v in op.operands[1 : 1 + len(memory.shape)]]
        if op.opcode in ("load_lanes", "store_lanes"):
            # Neighbours in memory: lanes count along the last axis, which is where the elements follow one another.
            indices[-1] = indices[-1] + np.arange(wanted.shape[1])
        places = machine.element_places(op, frame, memory, indices, active)
        shape = np.broadcast_shapes(places.shape, active.shape)
        return memory, np.broadcast_to(places, shape), np.broadcast_to(active, shape)

    def _read(self, op: Op, frame: Frame) -> Results:
        memory, places, active = self._places(op, frame, op.operands[-1])
        places = np.where(active, places, 0)
        self.machine.check_written(op, frame, memory, places, active)
        self.machine.on_read(op, frame, memory, places, active)
        return (np.where(active, memory.read(places), np.zeros((), memory.dtype.numpy)),)

    def _write(self, op: Op, frame: Frame) -> Results:
        memory, places, active = self._places(op, frame, op.operands[-1])
        values = frame.get(op.operands[-2])
        shape = np.broadcast_shapes(places.shape, values.shape)
        places, values, active = (np.broadcast_to(x, shape) for x in (places, values, active))
        self.machine.on_write(op, frame, memory, places, values, active)
        memory.write(places[active], values[active])
        self.machine.changes += 1
        return ()

    def _fault(self, op: Op, frame: Frame) -> Results:
        here = frame.active
        if here.any():
            first = int(np.argmax(here))
            block, thread = (int(np.broadcast_to(frame.get(v), here.shape)[first]) for v in op.operands)
            raise fault(f"assertion failed: {op.attrs['text']}, in block {block}, thread {thread}", op.span)
        return ()
