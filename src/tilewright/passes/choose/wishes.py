"""What authors wish of the schedule of a loop nest: `@workgroup`, `@tile`, `@vector`; and what tuning says of it.

In: the schedule that `loops.py` chose, and the attributes. Out: a schedule that has what can be had of them. What became of every wish,
`fates.py` says afterwards. `with_wishes` follows the words `vector` and `threads` of a schedule of loops (`schedules/loop_words.py`).
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
        schedule = with_vector(schedule, kernel, vector, target)
    if tile is not None:
        schedule = _with_tile(schedule, tile, target)
    if metadata.workgroup_size is not None and target.simt:
        schedule = with_threads(schedule, prod(metadata.workgroup_size), target)
    return schedule


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _tile(metadata: KernelMetadata, rank: int) -> tuple[int, ...] | None:
    """The extents asked for along the nest's loops."""
    given = [number for name, number in metadata.hints.tile if name.isdigit()]
    return (*given, *[1] * (rank - len(given))) if given and len(given) <= rank and all(map(_is_power, given)) else None


def with_vector(schedule: Schedule, kernel: Kernel, vector: int, target: Target) -> Schedule:
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


def with_threads(schedule: Schedule, threads: int, target: Target) -> Schedule:
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


# -- what tuning says --------------------------------------------------------------------------------------------------

_WIDEST = 64
"""Elements of a CPU's step at most: more registers than there are would go to memory."""


def with_wishes(schedule: Schedule, kernel: Kernel, target: Target) -> Schedule:
    """The schedule with the vector and the threads that tuning says."""
    said = dict(target.tuned)
    vector, threads = said.get("vector"), said.get("threads")
    if vector is not None:
        schedule = _with_gpu_vector(schedule, kernel, vector, target) if target.simt else _with_cpu_vector(schedule, kernel, vector, target)
    plain = not (schedule.window or schedule.whole or schedule.scan or schedule.row_lanes or schedule.across > 1)
    return with_threads(schedule, threads, target) if threads is not None and target.simt and plain else schedule


def _with_gpu_vector(schedule: Schedule, kernel: Kernel, vector: int, target: Target) -> Schedule:
    if schedule.window or schedule.whole or schedule.scan or schedule.row_lanes:
        return schedule
    return with_vector(schedule, kernel, vector, target)


def _with_cpu_vector(schedule: Schedule, kernel: Kernel, vector: int, target: Target) -> Schedule:
    """A step of that many elements. Where a step is several vectors, those stay as they are."""
    if vector > _WIDEST or (schedule.rows_inside and not schedule.short) or kernel.attrs.keys() & {"dots", "blocks"}:
        return schedule
    if schedule.vector_on_reduction:
        if schedule.reduce_tile == schedule.vector:
            return with_vector(schedule, kernel, vector, target)
        return replace(schedule, reduce_tile=vector) if vector >= schedule.vector else schedule
    axis = schedule.vector_index
    if axis < 0:
        return schedule
    if schedule.tiles[axis] == schedule.vector and not schedule.repeat:
        return with_vector(schedule, kernel, vector, target)
    tiles = tuple(vector if p == axis else tile for p, tile in enumerate(schedule.tiles))
    return replace(schedule, tiles=tiles) if vector >= schedule.vector else schedule
