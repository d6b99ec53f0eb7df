"""How many blocks of a kernel one multiprocessor holds at once, and what stands in the way of more.

In: a GPU target and what one block takes; out: an `Occupancy`. Registers are handed out to warps in units of 256, four warps at a time;
from compute capability 8.0 on every block takes a kilobyte of shared memory for the system.
"""

from __future__ import annotations

from tilewright.base.record import record
from tilewright.base.target import Target

_REGISTER_UNIT = 256
_WARP_UNIT = 4
_SHARED_UNIT = 128
_SYSTEM_SHARED = 1 << 10


@record
class Occupancy:
    """Blocks and warps on one multiprocessor."""

    blocks: int
    warps: int
    most_warps: int
    limits: tuple[str, ...]
    """What allows no more: `threads`, `blocks`, `registers`, `shared memory`."""

    @property
    def fraction(self) -> float:
        return self.warps / self.most_warps


def occupancy(target: Target, threads: int, registers: int, shared_bytes: int) -> Occupancy | None:
    """For blocks of `threads` with `registers` each; None where the target has no multiprocessors."""
    if not target.threads_per_sm or threads < 1:
        return None
    warps = -(-threads // target.warp_size)
    room = {"threads": target.threads_per_sm // (warps * target.warp_size), "blocks": target.blocks_per_sm}
    if registers:
        per_warp = -(-registers * target.warp_size // _REGISTER_UNIT) * _REGISTER_UNIT
        warps_held = target.registers_per_sm // per_warp // _WARP_UNIT * _WARP_UNIT
        room["registers"] = warps_held // warps
    system = _SYSTEM_SHARED if target.sm >= 80 else 0
    taken = -(-shared_bytes // _SHARED_UNIT) * _SHARED_UNIT + system
    if taken:
        room["shared memory"] = target.shared_per_sm // taken
    least = min(room.values())
    return Occupancy(least, least * warps, target.threads_per_sm // target.warp_size, tuple(n for n, r in room.items() if r == least))
