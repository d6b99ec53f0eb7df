"""What authors wish of the schedule of a loop nest: `@workgroup`, `@tile`, `@vector`.

In: the schedule that `loops.py` chose, and the attributes. Out: a schedule that has what can be had of them. What became of every wish,
`fates.py` says afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilewright.analysis.loop_nest import nest_of
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.passes.schedules.loops import Schedule
from tilewright.tree.metadata import KernelMetadata


def wishes_for_loops(metadata: KernelMetadata | None) -> bool:
    """Whether anything is asked for that schedules of loop nests can have."""
    return metadata is not None and bool(metadata.workgroup_size or metadata.hints.tile or metadata.hints.vector_width)


def followed(schedule: Schedule, kernel: Kernel, metadata: KernelMetadata, target: Target) -> Schedule:
    """The schedule with the wishes that it can follow."""
    if schedule.window or schedule.repeat or schedule.whole:
        return schedule
    vector, tile = metadata.hints.vector_width, _tile(metadata, len(schedule.tiles))
    if vector is not None:
        schedule = _with_vector(schedule, kernel, vector, target)
    if tile is not None:
        schedule = _with_tile(schedule, tile, target)
    if metadata.workgroup_size is not None and target.simt:
        schedule = _with_threads(schedule, prod(metadata.workgroup_size), target)
    return schedule


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _tile(metadata: KernelMetadata, rank: int) -> tuple[int, ...] | None:
    """The extents asked for along the nest's loops."""
    given = [number for name, number in metadata.hints.tile if name.isdigit()]
    return (*given, *[1] * (rank - len(given))) if given and len(given) <= rank and all(map(_is_power, given)) else None


def _with_vector(schedule: Schedule, kernel: Kernel, vector: int, target: Target) -> Schedule:
    if not _is_power(vector) or (schedule.vector_index < 0 and not schedule.vector_on_reduction):
        return schedule
    if not target.simt:
        # On a CPU a tile is one vector.
        if schedule.vector_on_reduction:
            return replace(schedule, vector=vector, reduce_tile=vector) if schedule.reduce_tile > 1 and vector > 1 else schedule
        tiles = tuple(vector if p == schedule.vector_index else t for p, t in enumerate(schedule.tiles))
        return replace(schedule, tiles=tiles, vector=vector) if vector > 1 else schedule
    if schedule.across > 1 or vector * nest_of(kernel).narrowest > target.vector_bytes:
        return schedule
    return replace(schedule, vector=vector) if vector <= schedule.vector else schedule


def _with_tile(schedule: Schedule, tile: tuple[int, ...], target: Target) -> Schedule:
    axis = schedule.vector_index
    if schedule.vector_on_reduction or axis < 0 or schedule.across > 1:
        return schedule
    if not target.simt:
        alone = all(extent == 1 for position, extent in enumerate(tile) if position != axis)
        return replace(schedule, tiles=tile, vector=tile[axis]) if alone and 1 < tile[axis] <= 64 else schedule
    if schedule.reduce_tile > 1:
        return schedule
    several = [extent for extent in tile if extent > 1]
    vectors = prod(tile) // schedule.vector
    if len(several) > 2 or tile[axis] % schedule.vector or vectors < target.warp_size:
        return schedule
    threads = max(target.warp_size, min(schedule.threads, vectors))
    return replace(schedule, tiles=tile, threads=threads) if vectors // threads <= 16 else schedule


def _with_threads(schedule: Schedule, threads: int, target: Target) -> Schedule:
    """The same nest with blocks of so many threads: tiles grow or shrink with them."""
    if not _is_power(threads) or not target.warp_size <= threads <= target.max_threads or not schedule.tiles:
        return schedule
    if threads == schedule.threads:
        return schedule
    if schedule.vector_on_reduction and schedule.reduce_tile > 1:
        per_row = schedule.threads // prod(schedule.tiles)
        steps = max(1, schedule.reduce_tile // (per_row * schedule.vector))
        return replace(schedule, tiles=(1,) * len(schedule.tiles), reduce_tile=threads * schedule.vector * steps, threads=threads)
    if schedule.reduce_tile > 1:
        deep = max(1, schedule.reduce_tile * target.warp_size // schedule.threads)
        return replace(schedule, reduce_tile=threads // target.warp_size * deep, threads=threads)
    axis = schedule.vector_index if schedule.vector_index >= 0 else len(schedule.tiles) - 1
    tiles = list(schedule.tiles)
    if threads > schedule.threads:
        tiles[axis] *= threads // schedule.threads
    else:
        for _ in range((schedule.threads // threads).bit_length() - 1):
            largest = max(range(len(tiles)), key=lambda p: (tiles[p], p))
            tiles[largest] //= 2
        if tiles[axis] < schedule.vector:
            return schedule
    return replace(schedule, tiles=tuple(tiles), threads=threads)
