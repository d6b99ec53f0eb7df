"""Rows of packed weights times rounded activations, as `packed_dots` says.

In: a machine of the tile stage, which gets the op. Weights and activations become numbers first, and are added up in f64.
"""

from __future__ import annotations

import numpy as np

from tilewright.base.dtypes import DType, by_name
from tilewright.base.packed.dequantize import dequantize_blocks
from tilewright.ir.emulator.frames import Frame
from tilewright.ir.emulator.machine import Machine, Results
from tilewright.ir.emulator.memory.memory import Memory
from tilewright.ir.nodes import Op
from tilewright.ir.ops_lanes import packed_operands

Array = np.ndarray


class PackedDots:
    """The op, run by a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.simple |= {"packed_dots": self._packed_dots}

    def _packed_dots(self, op: Op, frame: Frame) -> Results:
        operands, dtype = packed_operands(op.operands, op.attrs), by_name(str(op.attrs["format"]))
        weights, numbers = (self.machine.memories[v] for v in operands.tensors[:2])
        scale = self.machine.memories[operands.tensors[2]] if operands.tensors[2] is not None else None
        found = np.zeros((len(op.results), frame.lanes), np.float32)
        rows = [[frame.full(v) for v in row] for row in operands.rows]
        columns = [[frame.full(v) for v in column] for column in operands.columns]
        for lane in map(int, np.flatnonzero(frame.active)):
            left = [_weights(self._row(op, frame, weights, [int(i[lane]) for i in row]), dtype) for row in rows]
            for c, column in enumerate(columns):
                place = [int(i[lane]) for i in column]
                right = self._row(op, frame, numbers, place).astype(np.float64)
                if scale is None:
                    right = _in_order(right.reshape(-1, dtype.block), dtype)
                with np.errstate(invalid="ignore", over="ignore"):
                    if scale is not None:
                        right = right * self._row(op, frame, scale, place).astype(np.float64)[:, None]
                    for r, row in enumerate(left):
                        found[r * len(columns) + c, lane] = (row * right).sum()
        return tuple(found)

    def _row(self, op: Op, frame: Frame, memory: Memory, place: list[int]) -> Array:
        """What lies at these first indices."""
        index = np.ix_(*([i] for i in place), *(range(extent) for extent in memory.shape[len(place) :]))
        bounds = [np.asarray(axis)[None] for axis in index]
        if memory.shape[len(place)] == 0:
            return np.zeros(memory.shape[len(place) :], memory.dtype.numpy)
        self.machine.element_places(op, frame, memory, list(bounds), None)
        places = memory.offsets(bounds, None)
        self.machine.check_written(op, frame, memory, places, None)
        return np.ascontiguousarray(memory.read(places)).reshape(memory.shape[len(place) :])


def _weights(blocks: Array, dtype: DType) -> Array:
    """Numbers [blocks, elements of one], in the order in which the activations lie."""
    return _in_order(dequantize_blocks(blocks, dtype).astype(np.float64), dtype)


def _in_order(numbers: Array, dtype: DType) -> Array:
    if dtype.scale and dtype.bits == 4:
        return np.concatenate([numbers[:, ::2], numbers[:, 1::2]], axis=1)
    return numbers
