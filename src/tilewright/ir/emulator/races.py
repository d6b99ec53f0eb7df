"""Finds races on shared memory: two warps of a block that touch one element between the same two barriers, one writing.

Each element remembers who last wrote and read it and after how many barriers of its block. Threads of one warp run in step
and do not race here. Writing the value that is there already changes nothing and is let pass; atomics are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray
_MANY = -2


@dataclass(frozen=True, eq=False)
class Races:
    """The history of `size` elements; -1 is nobody, never."""

    size: int
    writer: Array = field(init=False)
    written: Array = field(init=False)
    reader: Array = field(init=False)
    read: Array = field(init=False)

    def __post_init__(self) -> None:
        for name in ("writer", "written", "reader", "read"):
            object.__setattr__(self, name, np.full(self.size, -1, np.int64))

    def on_read(self, places: Array, warps: Array, epochs: Array) -> Array:
        """Note reads; says which of them race with a write. Arrays have one axis."""
        bad: Array = (self.written[places] == epochs) & (self.writer[places] != warps)
        earlier = (self.read[places] == epochs) & (self.reader[places] != warps)
        self.reader[places] = warps
        self.read[places] = epochs
        self.reader[places[earlier | (self.reader[places] != warps)]] = _MANY
        return bad

    def on_write(self, places: Array, warps: Array, epochs: Array, current: Array, values: Array) -> Array:
        """Note writes of `values` over `current`; says which of them race with a read or another write."""
        changed = current != values
        bad: Array = (self.written[places] == epochs) & (self.writer[places] != warps) & changed
        bad |= (self.read[places] == epochs) & (self.reader[places] != warps) & changed
        self.writer[places] = warps
        self.written[places] = epochs
        # Of two warps that write one place at once, the last is noted; the other's value is lost.
        bad |= clashes(places, warps, values)
        return bad


def clashes(places: Array, warps: Array, values: Array) -> Array:
    """Which of these writes go, with another value, where another warp's do."""
    bad = np.zeros(places.shape, np.bool_)
    order = np.argsort(places, kind="stable")
    same = places[order][1:] == places[order][:-1]
    clash = same & (warps[order][1:] != warps[order][:-1]) & (values[order][1:] != values[order][:-1])
    bad[order[1:][clash]] = True
    return bad
