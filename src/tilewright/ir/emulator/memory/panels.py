"""A CPU's matrix unit: products of packed panels, added to tiles of sums in local memory, as `panel_dot` says.

In: a machine of the tile or the thread stage, which gets the ops. Products of bf16 are summed as the unit does it: within a step first
over even and over odd k, each by `fma` in order, then both together, then to what was there; denormals are zero on the way in and out.
"""

from __future__ import annotations

import numpy as np

from tilewright.ir.emulator.frames import Frame
from tilewright.ir.emulator.machine import Machine, Results
from tilewright.ir.emulator.memory.memory import Memory
from tilewright.ir.nodes import Op
from tilewright.ir.numerics import fma
from tilewright.ir.ops_matrix import PANEL, PANEL_STEP

Array = np.ndarray
_TINY = np.float32(2.0**-126)


def flushed(values: Array) -> Array:
    """f32 with denormals as zeros."""
    return np.where(np.abs(values) < _TINY, np.copysign(np.float32(0), values), values)


def step_of_floats(sums: Array, rows: Array, columns: Array) -> Array:
    """Sums after one step: rows [m, k] and columns [k, n], f32."""
    halves = []
    for odd in (0, 1):
        half = np.zeros_like(sums)
        for k in range(odd, rows.shape[1], 2):
            half = flushed(fma(np.broadcast_to(rows[:, k, None], half.shape), np.broadcast_to(columns[None, k], half.shape), half))
        halves.append(half)
    with np.errstate(all="ignore"):
        return flushed(sums + flushed(halves[0] + halves[1]))


class Panels:
    """The ops, run by a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.simple |= {"panel_begin": self._nothing, "panel_end": self._nothing, "panel_dot": self._panel_dot}

    def _nothing(self, op: Op, frame: Frame) -> Results:
        return ()

    def _panel_dot(self, op: Op, frame: Frame) -> Results:
        sums, rows, columns = (self.machine.memories[v] for v in op.operands[:3])
        numbers = [frame.full(v) for v in op.operands[3:]]
        for lane in map(int, np.flatnonzero(frame.active)):
            where, row, panel, steps = (int(n[lane]) for n in numbers[:4])
            depth = steps * PANEL_STEP // rows.dtype.itemsize
            group = 4 // rows.dtype.itemsize
            at = np.ix_([where], range(PANEL), range(PANEL))
            first = self._read(op, frame, lane, rows, np.ix_([row], range(PANEL), range(depth)))
            second = self._read(op, frame, lane, columns, np.ix_([panel], range(depth // group), range(PANEL)))
            if numbers[4][lane]:
                total = np.zeros((PANEL, PANEL), sums.dtype.numpy)
            else:
                total = self._read(op, frame, lane, sums, at)
            narrow = op.attrs["second"].numpy  # type: ignore[union-attr]
            second = second.copy().view(narrow).reshape(depth // group, PANEL, group).swapaxes(1, 2).reshape(depth, PANEL)
            self._write(op, frame, lane, sums, at, self._sum(total, first, second, PANEL_STEP // rows.dtype.itemsize))
        return ()

    @staticmethod
    def _sum(total: Array, first: Array, second: Array, step: int) -> Array:
        if total.dtype == np.int32:
            return np.asarray((total.astype(np.int64) + first.astype(np.int64) @ second.astype(np.int64)).astype(np.int32))
        first, second = flushed(first.astype(np.float32)), flushed(second.astype(np.float32))
        for k in range(0, first.shape[1], step):
            total = step_of_floats(total, first[:, k : k + step], second[k : k + step])
        return total

    def _places(self, op: Op, frame: Frame, lane: int, memory: Memory, index: tuple[Array, ...]) -> Array:
        owner = self.machine.owner(memory, frame)
        own = None if owner is None else frame.spread(owner)[lane : lane + 1]
        bounds = [np.asarray(axis)[None] for axis in index]
        self.machine.element_places(op, frame, memory, list(bounds), None)
        return memory.offsets(bounds, own)

    def _read(self, op: Op, frame: Frame, lane: int, memory: Memory, index: tuple[Array, ...]) -> Array:
        places = self._places(op, frame, lane, memory, index)
        self.machine.check_written(op, frame, memory, places, None)
        return np.ascontiguousarray(memory.read(places)[0, 0])

    def _write(self, op: Op, frame: Frame, lane: int, memory: Memory, index: tuple[Array, ...], values: Array) -> None:
        memory.write(self._places(op, frame, lane, memory, index), values[None, None])
        self.machine.changes += 1
