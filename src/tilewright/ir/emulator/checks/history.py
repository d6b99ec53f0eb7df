"""Who touched each element last. In: accesses, in the order the emulator makes them; out: the earlier ones that still count.

An *agent* is whoever accesses on its own: a thread, a warp, a block, the copy engine or a matrix unit, as numbers that the order in
use gives them. An agent's *time* says when: barriers it has passed, or a count of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Access:
    """The accesses of one op. `who` and `time` have one axis, or are one number for all."""

    op: int
    who: Array
    time: Array
    phase: Array | None = None
    """How often the agent's block had fenced."""
    acquired: Array | None = None
    """Up to which stamp the agent knows what other blocks released."""
    known: Array | None = None
    """Of an agent without a clock of its own: the clock of whoever started it."""

    def chosen(self, pick: Array) -> Access:
        phase, acquired = (None if a is None else a[pick] for a in (self.phase, self.acquired))
        return replace(self, who=self.who[pick], time=self.time[pick], phase=phase, acquired=acquired)

    def repeated(self, times: int) -> Access:
        phase, acquired = (None if a is None else np.repeat(a, times) for a in (self.phase, self.acquired))
        return replace(self, who=np.repeat(self.who, times), time=np.repeat(self.time, times), phase=phase, acquired=acquired)


class AccessSlot:
    """One access of each of `size` elements; nobody is -1."""

    def __init__(self, size: int) -> None:
        self.who = np.full(size, -1, np.int64)
        self.time = np.zeros(size, np.int64)
        self.op = np.zeros(size, np.int32)
        self.phase: Array | None = None

    def note(self, places: Array, access: Access, pick: Array | None = None) -> None:
        """Of several accesses of one place the last is kept, whole: fancy assignment goes in order."""
        if pick is not None:
            places, access = places[pick], access.chosen(pick)
        self.who[places] = access.who
        self.time[places] = access.time
        self.op[places] = access.op
        if access.phase is not None:
            if self.phase is None:
                self.phase = np.zeros(len(self.who), np.int32)
            self.phase[places] = access.phase


@dataclass(eq=False)
class History:
    """The accesses of `size` elements that count; slots are made when first needed."""

    size: int
    written: AccessSlot | None = None
    read: dict[int, AccessSlot] = field(default_factory=dict)
    updated: dict[int, AccessSlot] = field(default_factory=dict)

    def slot(self, slots: dict[int, AccessSlot], number: int) -> AccessSlot:
        if number not in slots:
            slots[number] = AccessSlot(self.size)
        return slots[number]

    def slots(self) -> list[AccessSlot]:
        """Writes first."""
        written = [] if self.written is None else [self.written]
        return [*written, *self.read.values(), *self.updated.values()]
