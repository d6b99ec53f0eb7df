"""Who knows of whose accesses: vector clocks for kernels whose warps order themselves by more than the block's barrier.

An *actor* is whoever touches shared memory on its own: a warp, the copy engine on behalf of a block's loads or of a warp's
stores, and the matrix unit of a warp group. Each warp has a clock: for each actor, up to which of its accesses the warp knows
them finished. Arriving at a barrier hands the clock on, leaving it takes over what was handed on there. A second clock of the
same kind holds what is known *and fenced*: what the copy engine and matrix units see of ordinary writes.

Two accesses of an element race if one writes and the later one's actor does not know of the earlier one. Threads of one warp
run in step and do not race; writing the value that is there already changes nothing and is let pass; atomics are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright.ir.nodes import Op

Array = np.ndarray
KNOWN, FENCED = 0, 1
GROUP = 4
"""Warps of a warp group."""


class Clocks:
    """The clocks of all warps of `blocks` blocks of `warps` warps."""

    def __init__(self, blocks: int, warps: int) -> None:
        self.warps = warps
        self.groups = -(-warps // GROUP)
        self.per_block = 2 * warps + self.groups + 1
        """Actors of one block: its warps, their stores, the matrix units, the loads."""
        self.now = np.zeros((2, blocks * warps, blocks * self.per_block), np.int64)
        own = np.asarray([self.warp(w) for w in range(blocks * warps)], np.int64)
        self.own = own
        self.now[KNOWN, np.arange(len(own)), own] = 1

    # -- actors -----------------------------------------------------------------------------------------------------

    def warp(self, warp: int) -> int:
        return warp // self.warps * self.per_block + warp % self.warps

    def stores(self, warp: int) -> int:
        return self.warp(warp) + self.warps

    def unit(self, group: int) -> int:
        return group // self.groups * self.per_block + 2 * self.warps + group % self.groups

    def loads(self, block: int) -> int:
        return (block + 1) * self.per_block - 1

    def name(self, actor: int) -> str:
        """Who that is, in words."""
        own = actor % self.per_block
        if own < self.warps:
            return f"warp {own}"
        return "the matrix unit" if 2 * self.warps <= own < self.per_block - 1 else "the copy engine"

    def of_block(self, vector: Array, block: int) -> Array:
        """The part of a clock that is about the block's own actors."""
        return vector[block * self.per_block : (block + 1) * self.per_block]

    def is_warp(self, actors: Array) -> Array:
        return np.asarray((actors >= 0) & (actors % self.per_block < self.warps))

    # -- what warps learn -------------------------------------------------------------------------------------------

    def release(self, warps: Array) -> Array:
        """What these warps know, to be handed on; what they do from now on is not part of it."""
        given: Array = np.maximum.reduce(self.now[:, warps], axis=1)
        self.now[KNOWN, warps, self.own[warps]] += 1
        return given

    def acquire(self, warps: Array, given: Array) -> None:
        self.now[:, warps] = np.maximum(self.now[:, warps], given[:, None])

    def learn(self, warp: int, actor: int, access: int) -> None:
        """The warp knows of an actor's accesses up to that one."""
        self.now[:, warp, actor] = np.maximum(self.now[:, warp, actor], access)

    def about(self, actor: int, access: int) -> Array:
        """To be handed on: an actor's accesses up to that one."""
        given = np.zeros(self.now.shape[::2], np.int64)
        given[:, actor] = access
        return given

    def fence(self, warps: Array) -> None:
        """What these warps know is seen by the copy engine and matrix units."""
        self.now[FENCED, warps] = self.now[KNOWN, warps]
        self.now[KNOWN, warps, self.own[warps]] += 1


@dataclass(frozen=True, eq=False)
class History:
    """The last write of each of `size` elements, and the last read of each actor of the block that owns them."""

    clocks: Clocks
    size: int
    writer: Array = field(init=False)
    wrote: Array = field(init=False)
    read: Array = field(init=False)
    ops: list[Op] = field(default_factory=list)
    """The ops that accessed, by the numbers in `writing` and `reading`; those are kept where somebody wants to know."""
    named: bool = False
    writing: Array = field(init=False)
    reading: Array = field(init=False)

    def __post_init__(self) -> None:
        actors = self.clocks.per_block if self.named else 0
        object.__setattr__(self, "writing", np.zeros(self.size if self.named else 0, np.int32))
        object.__setattr__(self, "reading", np.zeros((self.size, actors), np.int32))
        object.__setattr__(self, "writer", np.full(self.size, -1, np.int32))
        object.__setattr__(self, "wrote", np.zeros(self.size, np.int32))
        object.__setattr__(self, "read", np.zeros((self.size, self.clocks.per_block), np.int32))

    def unknown_write(self, places: Array, known: Array) -> Array:
        """Which places were written by someone whose write `known` does not cover."""
        writer = self.writer[places]
        return np.asarray((writer >= 0) & (self.wrote[places] > known[writer]))

    def unknown_read(self, places: Array, known: Array, block: int) -> Array:
        return np.asarray((self.read[places] > self.clocks.of_block(known, block)).any(axis=1))

    def unfenced(self, places: Array, fenced: Array) -> Array:
        """Which places hold an ordinary write that no fence has made visible to the copy engine and matrix units."""
        writer = self.writer[places]
        return np.asarray(self.clocks.is_warp(writer) & (self.wrote[places] > fenced[writer]))

    def note_read(self, places: Array, actor: int, access: int, op: Op) -> None:
        self.read[places, actor % self.clocks.per_block] = access
        if self.named:
            self.reading[places, actor % self.clocks.per_block] = self._number(op)

    def note_write(self, places: Array, actor: int, access: int, op: Op) -> None:
        self.writer[places] = actor
        self.wrote[places] = access
        if self.named:
            self.writing[places] = self._number(op)

    def _number(self, op: Op) -> int:
        if op not in self.ops:
            self.ops.append(op)
        return self.ops.index(op)

    def other_side(self, place: int, known: Array, block: int) -> tuple[int, Op] | None:
        """The actor and the op of the access of that place that `known` does not cover."""
        if not self.named:
            return None
        if self.unknown_write(np.asarray([place]), known)[0]:
            return int(self.writer[place]), self.ops[self.writing[place]]
        missing = np.flatnonzero(self.read[place] > self.clocks.of_block(known, block))
        if not missing.size:
            return None
        return block * self.clocks.per_block + int(missing[0]), self.ops[self.reading[place, missing[0]]]
