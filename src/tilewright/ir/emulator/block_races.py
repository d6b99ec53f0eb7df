"""Finds races on global memory: two blocks that touch one element between the same two barriers of the grid, one writing.

In: every access of a kernel that has such barriers; its blocks run together. Other kernels are not watched: what their
blocks do to one another is not ordered by anything the emulator could count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tilewright.ir.emulator.frames import Frame
from tilewright.ir.emulator.memory import Memory
from tilewright.ir.emulator.races import Races
from tilewright.ir.nodes import Op

if TYPE_CHECKING:
    from tilewright.ir.emulator.thread import ThreadMachine

Array = np.ndarray


class BlockRaces:
    """The accesses of one machine's blocks."""

    def __init__(self, machine: ThreadMachine) -> None:
        self.machine = machine
        self.passed = 0
        """Barriers of the grid."""
        self._races: dict[Memory, Races] = {}

    def watch(self, memory: Memory) -> None:
        self._races[memory] = Races(memory.flat.size)

    def access(self, op: Op, frame: Frame, memory: Memory, places: Array, values: Array | None, active: Array | None) -> None:
        """Check and note a read, or a write of `values`."""
        races = self._races.get(memory)
        if races is None:
            return
        wanted, there, warps, _ = self.machine.actors(frame, places, active)
        blocks, epochs = warps // self.machine.warps, np.full(there.shape, self.passed)
        if values is None:
            bad = races.on_read(there, blocks, epochs)
        else:
            bad = races.on_write(there, blocks, epochs, memory.read(there), np.broadcast_to(values, wanted.shape)[wanted])
        if not bad.any():
            return
        where = np.zeros(wanted.shape, np.bool_)
        where[wanted] = bad
        raise self.machine.fail_at(
            op, frame, where,
            lambda _: f"race on global memory: {op.opcode} of {memory.label} (element {int(there[np.argmax(bad)])} in memory), "
            "which another block accesses between the same barriers of the grid",
            "put a grid_barrier between the two accesses",
        )  # fmt: skip
