"""Tiles of convolutions on Hopper: as wide as there are filters, with results that leave as the image lies, and with sums that several blocks share.

In: filters, schedules of other tiles, the target. Out: schedules, which `matrix.py` ranks beside those for any product.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.target import Target
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.passes.schedules.matrix import WARPGROUP, Wgmma

UNEVEN_ROUNDS = 1.15
"""How many times as long as they had to multiprocessors must take for tiles, the last of which some of them have not, that it is worth sharing all steps instead."""
FEWEST_STAGES = 4
"""Stages that hide the way of operands from memory."""


def fitted(channels: int, size: int, target: Target) -> list[Wgmma]:
    """Tiles for a convolution whose results have few channels, which are columns of a tile: as many as there are, or a part of them."""
    parts = max(1, -(-channels // 256))
    found: list[Wgmma] = []
    for n in dict.fromkeys(-(-channels // p // 8) * 8 for p in (parts, parts + 1)):
        for m, groups, pingpong in ((128, 2, False), (128, 2, True), (192, 3, False)):
            tile = Wgmma(m, n, 128 // size, math_warpgroups=groups, pingpong=pingpong, mma_in_flight=int(pingpong), swap_ab=True, store="direct")
            # Few columns wait for pixels: of those there are as many as can be.
            if n % 64 and (n > 32 or groups > 2) and (n <= 192 or groups < 3):
                found.append(replace(tile, stages=min(8, (target.max_shared - 4096) // ((m + n) * 128))))
    return found


def by_rows(schedule: Wgmma, target: Target) -> Wgmma:
    """The same for results with channels last: pixels are rows of results, too, which leave by way of shared memory; with as many stages as are left room."""
    room = target.max_shared - 2048 - schedule.math_warpgroups * 64 * ROW_BYTES
    return replace(schedule, swap_ab=False, store="tma", stages=min(schedule.stages, room // ((schedule.m + schedule.n) * ROW_BYTES)))


def is_crowded(schedule: Wgmma) -> bool:
    """Whether threads of groups that take turns have no registers left to turn their results with."""
    return schedule.pingpong and schedule.rows * schedule.n > 96 * WARPGROUP


def turned_out(schedule: Wgmma, target: Target) -> Wgmma:
    """With results that are turned in shared memory on their way to rows of an image, and as many stages as are left room."""
    room = target.max_shared - 2048 - schedule.math_warpgroups * 9 * 1024
    return replace(schedule, store="turned", stages=min(schedule.stages, room // ((schedule.m + schedule.n) * ROW_BYTES)))


def streaming(schedule: Wgmma, tiles: int, target: Target) -> list[Wgmma]:
    """The same with an equal stretch of all steps of all tiles for every multiprocessor, where whole tiles would leave many without work."""
    rounds = tiles / target.multiprocessors
    groups = schedule.m // 64 if schedule.pingpong else schedule.math_warpgroups
    if schedule.split_k > 1 or schedule.cluster_k > 1 or -(-tiles // target.multiprocessors) < UNEVEN_ROUNDS * rounds:
        return []
    return [replace(schedule, pingpong=False, mma_in_flight=0, math_warpgroups=groups, stream_k=True, persistent=True)]


def sharing_sums(schedule: Wgmma, tiles: int, terms: int, target: Target) -> list[Wgmma]:
    """The same for few results of a convolution whose sums are long: blocks of a cluster share the sum of each tile, which nobody computes in turns then. `tiles` are
    those of all results, `terms` those of a sum."""
    groups = schedule.m // 64 if schedule.pingpong else schedule.math_warpgroups
    alone = replace(schedule, pingpong=False, mma_in_flight=0, math_warpgroups=groups)
    if schedule.split_k > 1 or schedule.cluster_k > 1 or tiles > target.multiprocessors // 2:
        return []
    leaving = 0 if schedule.store == "direct" else groups * max(9 * 1024, schedule.epilogue_stages * 64 * ROW_BYTES)
    listed: list[Wgmma] = []
    for blocks in (2, 4, 8):
        room = target.max_shared - 4096 - leaving - 4 * (blocks - 1) * schedule.m * schedule.n
        stages = min(schedule.stages, room // ((schedule.m + schedule.n) * ROW_BYTES))
        most = target.costs.wgmma.clusters[blocks] * target.multiprocessors
        if stages >= FEWEST_STAGES and terms >= 512 * blocks and tiles * blocks <= most:
            listed.append(replace(alone, cluster_k=blocks, stages=stages))
    return listed
