"""What a machine of threads looks at when they touch memory: who else did, and whether anything orders the two.

In: each read, write and atomic before it happens. Out: nothing, or a `UserError` for a race. Which of the ways to tell applies
is the machine's: counting barriers (`races`), clocks of warps and engines (`order`), barriers of the grid (`block_races`), and
for kernels whose threads a person wrote, each thread by itself (`watch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tilewright.base.errors import UserError
from tilewright.ir.emulator.frames import LANE, SLOT, Frame, align
from tilewright.ir.emulator.machine import Machine
from tilewright.ir.emulator.memory import Memory, fault
from tilewright.ir.emulator.order import FENCED, KNOWN, Clocks, History
from tilewright.ir.emulator.races import Races, clashes
from tilewright.ir.nodes import Op

if TYPE_CHECKING:
    from tilewright.ir.emulator.block_races import BlockRaces
    from tilewright.ir.emulator.copies import Copies
    from tilewright.ir.emulator.watch import Watcher

Array = np.ndarray
WARP = 32


class RacingMachine(Machine):
    """A machine whose lanes are threads."""

    warps: int
    """Warps of one block."""
    barriers: Array
    """How many barriers each block has passed."""
    races: dict[Memory, Races]
    block_races: BlockRaces
    clocks: Clocks | None
    histories: dict[Memory, History]
    copy_units: Copies
    watcher: Watcher | None

    def actors(self, frame: Frame, places: Array, active: Array | None) -> tuple[Array, Array, Array, Array]:
        """Of the accesses that happen: which they are, and their places, warps and barriers passed, on one axis each."""
        shape = (frame.lanes, *places.shape[1:])
        wanted = np.broadcast_to(np.True_ if active is None else align(active, len(shape) - 1), shape)
        warps = np.broadcast_to(align(frame.full(LANE) // WARP, len(shape) - 1), shape)
        epochs = np.broadcast_to(align(self.barriers[frame.full(SLOT)], len(shape) - 1), shape)
        return wanted, np.broadcast_to(places, shape)[wanted], warps[wanted], epochs[wanted]

    def _race(
        self, op: Op, frame: Frame, memory: Memory, wanted: Array, places: Array, bad: Array, other: str = ""
    ) -> UserError:
        where = np.zeros(wanted.shape, np.bool_)
        where[wanted] = bad
        element = np.unravel_index(int(places[np.argmax(bad)]) % memory.size, memory.shape)
        other = other or "another warp, the copy engine or a matrix unit accesses"
        why = (
            "another warp accesses between the same barriers"
            if self.clocks is None
            else f"{other} with nothing that orders the two"
        )
        return self.fail_at(
            op, frame, where,
            lambda _: f"race on shared memory: {op.opcode} of {memory.label}{[int(i) for i in element]}, which {why}",
            "put a barrier between the two accesses",
        )  # fmt: skip

    def _clocked_access(
        self, op: Op, frame: Frame, memory: Memory, places: Array, values: Array | None, active: Array | None
    ) -> None:
        """Check and note an ordinary read, or a write of `values`."""
        history, clocks = self.histories.get(memory), self.clocks
        if history is None or clocks is None:
            return
        wanted, there, warps, _ = self.actors(frame, places, active)
        bad = np.zeros(there.shape, np.bool_)
        for warp in np.unique(warps):
            own, known = warps == warp, clocks.now[KNOWN, warp]
            bad[own] = history.unknown_write(there[own], known)
            if values is not None:
                bad[own] |= history.unknown_read(there[own], known, int(warp) // self.warps)
        if values is not None:
            new = np.broadcast_to(values, wanted.shape)[wanted]
            bad = bad & (memory.read(there) != new) | clashes(there, warps, new)
        if bad.any():
            at = int(np.argmax(bad))
            side = history.other_side(int(there[at]), clocks.now[KNOWN, warps[at]], int(warps[at]) // self.warps)
            other = "" if side is None else f"{clocks.name(side[0])} accesses by the {side[1].opcode} at {side[1].span.place()}"
            raise self._race(op, frame, memory, wanted, there, bad, other)
        for warp in np.unique(warps):
            note = history.note_read if values is None else history.note_write
            note(there[warps == warp], clocks.warp(int(warp)), int(clocks.now[KNOWN, warp, clocks.own[warp]]), op)

    def engine_reads(self, op: Op, memory: Memory, places: Array, known: Array | None, actor: int, access: int) -> None:
        """Check and note a read by the copy engine or a matrix unit, started by someone who knows `known`."""
        if memory.written is not None and not memory.written[places].all():
            place = int(places[np.argmin(memory.written[places])])
            element = [int(i) for i in np.unravel_index(place % memory.size, memory.shape)]
            raise fault(
                f"{op.opcode} of uninitialised {memory.space} memory: {memory.label}{element} "
                f"{self.unwritten_text(memory, place)}",
                op.span,
            )
        history = self.histories.get(memory)
        if history is None or known is None:
            return
        for bad, text, help in (
            (history.unknown_write(places, known[KNOWN]), "was written with nothing that orders the two",
             "put a barrier between the two"),
            (history.unfenced(places, known[FENCED]), "was written by a thread and not fenced since",
             "put fence_async between the write and the barrier that leads here"),
        ):  # fmt: skip
            if bad.any():
                element = [int(i) for i in np.unravel_index(int(places[np.argmax(bad)]) % memory.size, memory.shape)]
                raise fault(
                    f"race on shared memory: {op.opcode} reads {memory.label}{element}, which {text}", op.span, help
                )
        history.note_read(places, actor, access, op)

    def unwritten_text(self, memory: Memory, place: int) -> str:
        copy = self.copy_units.in_flight(memory, place)
        return (
            super().unwritten_text(memory, place)
            if copy is None
            else f"is still being copied by the {copy.opcode} at {copy.span.place()}"
        )

    def on_read(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        if self.watcher is not None:
            self.watcher.read(op, frame, memory, places, active)
        self._clocked_access(op, frame, memory, places, None, active)
        self.block_races.access(op, frame, memory, places, None, active)
        races = self.races.get(memory)
        if races is not None:
            wanted, there, warps, epochs = self.actors(frame, places, active)
            bad = races.on_read(there, warps, epochs)
            if bad.any():
                raise self._race(op, frame, memory, wanted, there, bad)

    def on_write(
        self, op: Op, frame: Frame, memory: Memory, places: Array, values: Array, active: Array | None
    ) -> None:
        if self.watcher is not None:
            self.watcher.write(op, frame, memory, places, values, active)
        self._clocked_access(op, frame, memory, places, values, active)
        self.block_races.access(op, frame, memory, places, values, active)
        races = self.races.get(memory)
        if races is not None:
            wanted, there, warps, epochs = self.actors(frame, places, active)
            new = np.broadcast_to(values, wanted.shape)[wanted]
            bad = races.on_write(there, warps, epochs, memory.read(there), new)
            if bad.any():
                raise self._race(op, frame, memory, wanted, there, bad)

    def on_update(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        if self.watcher is not None:
            self.watcher.update(op, frame, memory, places, active)
