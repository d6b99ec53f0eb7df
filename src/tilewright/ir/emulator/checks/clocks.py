"""Who knows of whose accesses: vector clocks for kernels whose warps order themselves by more than the block's barrier.

An *actor* is whoever touches shared memory on its own: a warp, the copy engine on behalf of a block's loads or of a warp's
stores, and the matrix unit of a warp group. Each warp has a clock: for each actor, up to which of its accesses the warp knows
them finished. Arriving at a barrier hands the clock on, leaving it takes over what was handed on there. A second clock of the
same kind holds what is known *and fenced*: what the copy engine and matrix units see of ordinary writes.
"""

from __future__ import annotations

import numpy as np

from tilewright.ir.layouts import WGMMA_WARPS

Array = np.ndarray
KNOWN, FENCED = 0, 1


class Clocks:
    """The clocks of all warps of `blocks` blocks of `warps` warps."""

    def __init__(self, blocks: int, warps: int) -> None:
        self.warps = warps
        self.groups = -(-warps // WGMMA_WARPS)
        self.per_block = 2 * warps + self.groups + 1
        """Actors of one block: its warps, their stores, the matrix units, the loads."""
        self.now = np.zeros((2, blocks * warps, blocks * self.per_block), np.int64)
        own = np.asarray([self.warp(w) for w in range(blocks * warps)], np.int64)
        self.own = own
        """The actor each warp is."""
        self.warp_of = np.zeros(blocks * self.per_block, np.int64)
        """The warp that an actor is."""
        self.warp_of[own] = np.arange(len(own))
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
