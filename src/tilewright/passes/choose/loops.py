"""Choose how a loop nest is cut into blocks, tiles and threads.

In: a loop-stage kernel, the target and the sizes of the call. Out: a `Schedule`. `choose` looks at the nest's accesses: which index walks
memory one element at a time (the vector axis), whether that index is reduced, how wide the elements are. Sizes are symbolic; `hints` are
those of the call that caused the compilation and only steer the choice. `row_schedule` plans rows that are walked several times and fit
registers, for their very length; `range_schedule` rows whose length data decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from tilewright.analysis.affine import address, analyse
from tilewright.analysis.loop_nest import (
    FEWEST_LANES,
    Nest,
    aligned_rows,
    aligned_walk,
    aligned_width,
    can_repeat,
    compute_bytes,
    constant_of,
    crossing_index,
    gathers_in_loops,
    has_long_loops,
    inner_walks,
    is_strided_sum,
    nest_of,
    pairs_of_rows,
    record_index,
    slides,
    stored_width,
    vector_index,
    walks_views,
)
from tilewright.base.cost_model import RowCosts
from tilewright.base.dtypes import u64
from tilewright.base.levels import level_of
from tilewright.base.sizes import ONE, ZERO, Size, product
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, Value, is_watched, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.schedules.loops import Schedule

if TYPE_CHECKING:
    from tilewright.passes.common.scan_loops import ScanLoop

LONG_SEARCH, SHORT_SEARCH = 2048, 512
"""Elements of a run whose extreme value argmin and argmax look for first: the place is looked for in one run. Short ones end often, which costs little where a maximum is
one instruction."""


def choose(kernel: Kernel, target: Target, hints: Mapping[str, int], sizes: bool = False) -> Schedule:
    """The schedule for this kernel. `sizes`: code is made for calls like this one."""
    nest = nest_of(kernel)
    if target.simt and sizes and _is_small_map(nest, target, hints):
        return _gpu_map(nest, len(nest.extents), 1, hints, target, 1)
    return _choose_gpu(kernel, nest, target, hints) if target.simt else _choose_cpu(kernel, nest, target, hints)


def _is_small_map(nest: Nest, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether each element can have a thread of its own, without any having to wait: short code on many multiprocessors, not long code on one."""
    total = product(nest.extents)
    if nest.reductions or nest.sweeps or not nest.extents or not total.names <= hints.keys():
        return False
    return total.evaluate(hints) <= target.multiprocessors * SMALL_MAP


SMALL_MAP = 256
"""Elements for each multiprocessor, up to which a map is small."""


def hint(size: Size, hints: Mapping[str, int]) -> int:
    """What the size was in the call at hand; a large number when unknown."""
    return size.evaluate(hints) if size.names <= hints.keys() else 1 << 20


def power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


# -- CPU ----------------------------------------------------------------------------------------------------------


def _choose_cpu(kernel: Kernel, nest: Nest, target: Target, hints: Mapping[str, int]) -> Schedule:
    rank, costs = len(nest.extents), target.costs.caches
    if kernel.attrs.get("in_order") == "parts":
        # Each point walks a stretch of memory of its own: one to a block.
        return Schedule((1,) * rank)
    dots = kernel.attrs.get("dots")
    if isinstance(dots, int):
        # One row after the other; vectors are those of the integer sums inside.
        return Schedule((1,) * rank, dots, dots, vector_on_reduction=True)
    lanes = max(1, target.vector_bytes // max(compute_bytes(kernel), nest.widest if not nest.reductions else 1))
    if kernel.attrs.get("frames"):
        # Rows with their frames are short: whole vectors, whose lanes are masked at the borders.
        tiles = tuple(lanes if p == rank - 1 else 1 for p in range(rank))
        rows = costs.rows_per_block * 4 if rank > 1 else 1
        return Schedule(tiles, 1, lanes, vector_index=rank - 1, chunk=costs.columns, repeat=True, row_axis=rank - 2, rows_per_block=rows)
    heavy = sum(1 for op in walk(kernel.body) if op.opcode not in ("load", "store", "const", "size"))
    small = level_of(target).size > 0
    unroll = 1 if small else 8 if draws_words(kernel) else 4 if heavy < 24 else 2
    on_reduction = bool(nest.reductions or nest.sweeps) and nest.reduces_along
    if "repairs" in kernel.attrs:
        on_reduction = False  # hardly any result has terms: what counts is that all are looked at
    search = SHORT_SEARCH if target.has_ieee_maximum else LONG_SEARCH
    window = slides(kernel, nest)
    points = _points(kernel, nest, target, lanes, hints)
    if points is not None:
        return points
    if nest.reductions:
        from tilewright.passes.choose.short_sums import short_schedule

        short = short_schedule(kernel, nest, target, lanes, hints)
        if short is not None:
            return short
    pair = pairs_of_rows(nest, analyse(kernel)) if on_reduction and not window and can_repeat(kernel) and lanes > 1 and not kernel.attrs.keys() & {"blocks", "in_order"} else None
    if pair is not None:
        # Some rows of the one array and a few vectors of rows of the other are loaded once for all their pairs.
        tiles = tuple(lanes * 2 if p == pair[1] else PAIRED_ROWS if p == pair[0] else 1 for p in range(rank))
        return Schedule(tiles, 1, lanes, vector_index=pair[1], chunk=costs.paired, repeat=True, row_axis=pair[0], rows_per_block=costs.rows_per_block)
    if on_reduction and not window:
        arg = any(str(op.attrs["kind"]).startswith("arg") for op in nest.reductions)
        width = lanes * (1 if small else 8 if heavy < 8 else 4)
        length = nest.reduce_extent.constant
        if kernel.attrs.get("blocks") and length and not length & (length - 1):
            width = min(width, length)  # whole vectors of a block's innermost loop
        elif length and not arg and length < width:
            # Where lanes can be masked, what is left of a row is a register of them, and where they cannot, it is single elements.
            width = max(2 * lanes if target.has_lane_masks else 2, min(width, power_of_two(length + 1) // 2))
            if rank and not nest.sweeps:
                return Schedule((1,) * rank, width, min(lanes, width), vector_on_reduction=True, row_axis=rank - 1, rows_per_block=max(1, costs.columns // length))
        if not nest.reductions and len({op.operands[:2] for op in nest.sweeps}) > 1:
            # Parts of a row, which begin and end anywhere: whole tiles, whole registers, single elements.
            return Schedule((1,) * rank, lanes * 4, lanes, vector_on_reduction=True)
        short_rows = costs.short_row if _may_be_short(kernel, nest) else 0
        # What rows have beside whole tiles is read by whole registers, too.
        register = width if arg or small else min(lanes, width)
        return Schedule((1,) * rank, width, register, vector_on_reduction=True, block_search=search if arg else 0, short_rows=short_rows)
    axis = vector_index(nest)
    walks = inner_walks(kernel, nest)
    if axis < 0 or (walks and gathers_in_loops(kernel, nest, axis)):
        arg = any(str(op.attrs.get("kind", "")).startswith("arg") for op in walks)
        if walks and lanes > 1:
            return Schedule((1,) * rank, lanes * 4, lanes, vector_on_reduction=True, block_search=search if arg else 0)
        if lanes > 1 and is_strided_sum(kernel, nest):
            # Elements that lie apart are loaded one by one, but added up in several sums side by side.
            width = lanes * (1 if small else 4)
            return Schedule((1,) * rank, width, width, vector_on_reduction=True)
        records = record_index(kernel, nest) if lanes >= FEWEST_LANES and not walks and not kernel.attrs.get("in_order") else -1
        if records >= 0:
            tiles = tuple(lanes * 2 if position == records else 1 for position in range(rank))
            return Schedule(tiles, 1, lanes * 2, vector_index=records, chunk=costs.chunk // 2)
        if rank and not nest.reductions and not nest.sweeps and not has_long_loops(kernel, nest) and not kernel.attrs.get("in_order"):
            # Single elements that lie apart, such as the halves of pairs: a block does many, and finds the indices before them once.
            return Schedule((1,) * rank, row_axis=rank - 1, rows_per_block=costs.chunk // 16)
        return Schedule((1,) * rank)
    chunk = costs.chunk if not nest.reductions else costs.columns
    group = _row_group(kernel, nest, axis)
    if group:
        width = dtype_of(nest.reductions[0].results[0].type).itemsize
        tiles = tuple(lanes * 4 if position == axis else 1 for position in range(rank))
        return Schedule(tiles, 1, lanes, vector_index=axis, chunk=max(1, costs.columns * 4 // max(4, width)), row_group=group)
    if (window or slides(kernel, nest, any_axis=True)) and can_repeat(kernel):
        # Rows of images are short: a step of two registers, then of one; so are their channels. A block does several of them.
        from tilewright.passes.choose.short_sums import row_group_of

        row_axis = next((p for p in reversed(range(rank)) if p != axis), -1)
        group = row_group_of(kernel, nest, row_axis, hints)
        tiles = tuple(lanes * (2 if window or group > 1 else 4) if position == axis else group if position == row_axis else 1 for position in range(rank))
        rows = costs.rows_per_block if row_axis >= 0 else 1
        return Schedule(tiles, 1, lanes, vector_index=axis, chunk=chunk, repeat=True, row_axis=row_axis, rows_per_block=rows)
    crossing = crossing_index(kernel, nest, axis) if not nest.reductions and not nest.sweeps and not walks and not kernel.attrs.get("in_order") else -1
    if crossing >= 0 and lanes > 1 and not has_long_loops(kernel, nest):
        # What is read along another index is read in squares, whose pages the processor knows until all of them is used: a few rows of the square at a time, each from
        # its beginning to its end, go to as many neighbours of every result's row.
        width, side = max(8, 32 // nest.narrowest), min(256, costs.square // nest.narrowest)
        tiles = tuple(width if position == axis else 1 for position in range(rank))
        return Schedule(tiles, 1, width, vector_index=axis, chunk=side, repeat=can_repeat(kernel), row_axis=crossing, rows_per_block=side, rows_inside=True)
    tiles = tuple(lanes * unroll if position == axis else 1 for position in range(rank))
    if nest.reductions and not nest.sweeps and lanes > 1 and not can_repeat(kernel) and not kernel.attrs.keys() & {"blocks", "in_order"}:
        # A single element at the edge takes as long as a vector: whole tiles, whole registers, and as few of them as can be.
        return Schedule(tiles, 1, lanes, vector_index=axis, chunk=chunk)
    is_long = has_long_loops(kernel, nest)
    if kernel.attrs.get("in_order") or is_long:
        chunk = 4 * lanes * unroll  # A point is a whole line: a few vectors of them are work enough for a block.
    if is_long and lanes > 1 and not kernel.attrs.keys() & {"blocks", "in_order"}:
        # So is a single element: whole tiles, wherever these begin, whole registers, and the last of these under a mask.
        return Schedule(tiles, 1, lanes, vector_index=axis, chunk=chunk)
    if rank > 1 and lanes > 1 and not nest.reductions and not nest.sweeps and not walks and not kernel.attrs.keys() & {"blocks", "in_order"}:
        # Rows may be short: whole tiles, whole registers, and the last of these under a mask, or once more where that does no harm.
        return Schedule(tiles, 1, lanes, vector_index=axis, chunk=chunk, repeat=not target.has_lane_masks and can_repeat(kernel))
    return Schedule(tiles, 1, lanes * unroll, vector_index=axis, chunk=chunk)


def _points(kernel: Kernel, nest: Nest, target: Target, lanes: int, hints: Mapping[str, int]) -> Schedule | None:
    from tilewright.passes.choose.short_sums import points_schedule

    return points_schedule(kernel, nest, target, lanes, 16 * lanes, hints)


def _may_be_short(kernel: Kernel, nest: Nest) -> bool:
    """Whether results are single sums over rows of a length that only a call tells: they may be many short ones."""
    body = nest.parallel.regions[0]
    inside = [op for op in walk(body) if op.opcode not in ("const", "size")]
    if not nest.extents or nest.rows_differ or len(nest.reductions) != 1 or nest.sweeps or len(nest.reductions[0].operands) != 1 or len(inside) > _LIGHT:
        return False
    if kernel.attrs.keys() & {"blocks", "in_order", "dots"} or "packed" in nest.reductions[0].attrs or not can_repeat(kernel):
        return False
    single = all(not op.regions or op is nest.reductions[0] for op in inside)
    return single and nest.reductions[0].attrs["kind"] in ("add", "mul", "min", "max") and not is_watched(kernel)


_LIGHT = 32
"""Ops of a nest that is written twice, for short rows and for long ones."""
PAIRED_ROWS = 4
"""Rows of one array that are taken together with vectors of rows of another."""


def draws_words(kernel: Kernel) -> bool:
    """Whether it draws random numbers: each block of four words is a long chain of products, and two vectors of blocks hide it."""
    return any(op.opcode in ("random_u32", "random_u64") for op in walk(kernel.body))


_MANY_QUANTILES = 1 << 22
"""Points from which on there are blocks enough when each has twice the work."""


def draws_many_quantiles(kernel: Kernel, nest: Nest, hints: Mapping[str, int]) -> bool:
    """Whether it draws many normal numbers of f64: elements of a thread share a loop for their tails, and constants."""
    if not any(op.opcode == "random_normal" and dtype_of(op.operands[0].type) is u64 for op in walk(kernel.body)):
        return False
    return prod(hint(extent, hints) for extent in nest.extents) >= _MANY_QUANTILES


# -- GPU ----------------------------------------------------------------------------------------------------------


def _choose_gpu(kernel: Kernel, nest: Nest, target: Target, hints: Mapping[str, int]) -> Schedule:
    rank, costs = len(nest.extents), target.costs.maps
    vector = max(1, min(8, target.vector_bytes // nest.narrowest))
    if target.has("serial") and not nest.reductions and not _in_vectors(kernel, nest, target, vector):
        vector = 1  # its own lanes take neighbours, a thread each
    if kernel.attrs.get("in_order") == "parts":
        return _gpu_map(nest, rank, 1, hints, target, 1)
    if "pixels" in kernel.attrs:
        return _turning(kernel, nest, vector, target, hints)
    if kernel.attrs.get("placed"):
        return _placing(kernel, nest, vector, target, tuple(hint(extent, hints) * 3 // 4 for extent in nest.extents))  # a hint is a power of two, and no less
    if not nest.reductions and not nest.sweeps:
        scan = _block_scan(kernel, target, hints)
        if scan is not None:
            return _gpu_scan(kernel, nest, scan, vector, hints, target)
        turned = _turned_map(kernel, nest, vector, hints, target)
        if turned is not None:
            return turned
        vector = _whole_vectors(kernel, nest, vector, hints, target)
        plain = _gpu_map(nest, rank, vector, hints, target, 1 if kernel.attrs.get("in_order") else costs.vectors * (2 if draws_many_quantiles(kernel, nest, hints) else 1))
        return _shifted_map(kernel, nest, plain, hints, target) or plain
    if _are_ranges(kernel, nest):
        ranges = _gpu_ranges(kernel, nest, vector, hints, target, target.costs.ranges.length)
        if ranges is not None:
            return ranges
    if rank and not nest.sweeps and hint(nest.reduce_extent, hints) <= costs.few_terms and vector_index(nest) >= 0 and not _wait_for_terms(nest, hints, target, vector):
        # Every thread adds up its few terms itself. Where the terms are neighbours too (a window that slides along memory), vectors would
        # not be aligned.
        return _gpu_map(nest, rank, 1 if nest.reduce_stride_one else vector, hints, target, 1)
    if rank and not nest.sweeps and hint(nest.reduce_extent, hints) <= costs.few_terms and slides(kernel, nest, any_axis=True):
        return _gpu_map(nest, rank, 1, hints, target, 1)  # windows that are too far apart for vectors
    if target.has("serial") and rank > 1 and not nest.sweeps and vector_index(nest) >= 0:
        return _patches(nest, rank, vector, hints)
    along = rank and nest.reduces_along and hint(nest.extents[-1], hints) >= _ROW_THREADS
    if target.has("serial", "vec4") and along and vector == _WHOLE and nest.reduce_extent.divisible_by(vector, kernel.facts):
        # A thread for each row, which it walks in vectors.
        return Schedule((*[1] * (rank - 1), _ROW_THREADS), vector, vector, vector_on_reduction=True, threads=_ROW_THREADS)
    if target.has("serial") and rank and hint(nest.extents[-1], hints) >= _PATCH_THREADS:
        return Schedule((*[1] * (rank - 1), _PATCH_THREADS), 1, 1, vector_index=rank - 1, threads=_PATCH_THREADS)
    if "rows_in_turn" in kernel.attrs:
        return _gpu_rows_in_turn(nest, rank, aligned_rows(kernel, nest, vector) if nest.reduces_along else 1, hint(nest.reduce_extent, hints), target)
    if nest.reduces_along:
        streamed = _streamed_rows(kernel, nest, rank, vector, hints, target)
        if streamed is not None:
            return streamed
        return _gpu_rows(nest, rank, vector, power_of_two(hint(nest.reduce_extent, hints)), target, aligned_rows(kernel, nest, vector) if _reads_most(nest) else 0)
    if walks_views(kernel, nest):
        return _gpu_rows(nest, rank, 1, power_of_two(hint(nest.reduce_extent, hints)), target)
    return _gpu_columns(kernel, nest, rank, vector, target, hints)


def _wait_for_terms(nest: Nest, hints: Mapping[str, int], target: Target, vector: int) -> bool:
    """Whether sums across rows, of a length that only a call tells, are too few to fill the device: a thread would ask for a few of its terms at a time, and nobody else
    would have anything to do meanwhile. The partial results of a sum that was cut are such."""
    if target.has("serial") or nest.reduce_stride_one or nest.reduce_extent.constant is not None or hint(nest.reduce_extent, hints) <= _AT_ONCE:
        return False
    return hint(product(nest.extents), hints) < target.multiprocessors * _MAP_THREADS * vector


_AT_ONCE, _MAP_THREADS = 8, 128
"""Terms of a loop that are on their way soon, and threads of a block that has results of its own."""


def _reads_most(nest: Nest) -> bool:
    """Whether one sum along rows is all there is, with little to compute for each element: its time is that of reading."""
    if len(nest.reductions) != 1 or nest.sweeps:
        return False
    return sum(op.opcode not in ("load", "const", "size", "yield") for op in walk(nest.reductions[0].regions[0])) <= _LIGHT_TERMS


def _computes_much(nest: Nest) -> bool:
    """Whether the terms of the one sum there is take longer to compute than to read, or about as long: functions do."""
    return not _reads_most(nest) or any(OPS[op.opcode].group == "function" for op in walk(nest.reductions[0].regions[0]))


def _in_vectors(kernel: Kernel, nest: Nest, target: Target, vector: int) -> bool:
    """Whether all of a map is read and written in whole vectors of memory."""
    axis = vector_index(nest)
    return target.has("vec4") and vector == _WHOLE and axis >= 0 and nest.extents[axis].divisible_by(vector, kernel.facts)


def placing_schedule(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> Schedule | None:
    """The schedule of a kernel that puts results in their places, for the very sizes of a call; None for other kernels."""
    if not kernel.attrs.get("placed") or not target.simt:
        return None
    nest = nest_of(kernel)
    if not product(nest.extents).names <= sizes.keys():
        return None
    vector = max(1, min(8, target.vector_bytes // nest.narrowest))
    return _placing(kernel, nest, vector, target, tuple(extent.evaluate(sizes) for extent in nest.extents))


def _placing(kernel: Kernel, nest: Nest, vector: int, target: Target, extents: tuple[int, ...]) -> Schedule:
    """Results that take values from scratch (`passes/windows/placing.py`): lanes along rows of results, in vectors where all rows begin at one, and a few rows in a thread. Where two
    blocks share a row, both write a part of the sector between them; blocks wider than rows leave threads without results."""
    costs, rank = target.costs.maps, len(nest.extents)
    while vector > 1 and not nest.extents[-1].divisible_by(vector, kernel.facts):
        vector //= 2
    stores = sum(1 for op in walk(kernel.body) if op.opcode == "store")
    each = power_of_two(max(1, costs.placed // (max(1, stores) * vector)) + 1) // 2
    points, lanes = each * costs.placing_threads * vector, target.warp_size * vector
    width, rows = max(1, extents[-1]), max(1, extents[-2]) if rank > 1 else 1

    def time(columns: int) -> float:
        down, across = max(1, points // columns), -(-width // columns)
        idle = columns * across / width * (down * -(-rows // down) / rows) - 1
        return (1 + costs.border * across / (width * nest.narrowest)) * (1 + costs.idle * idle)

    tiles = [1] * rank
    widest = min(points, costs.placed_columns * costs.placing_threads * vector)
    tiles[-1] = min((lanes << power for power in range(widest.bit_length()) if lanes << power <= widest), key=time)
    if rank > 1:
        tiles[-2] = max(1, points // tiles[-1])
    return Schedule(tuple(tiles), 1, vector, vector_index=rank - 1, threads=costs.placing_threads)


def turned_columns(width: int, itemsize: int, target: Target) -> int:
    """Columns of a row that a block turns from pixels: as many as leave few threads without results, and few borders between blocks."""
    costs = target.costs.maps

    def time(columns: int) -> float:
        across = -(-width // columns)
        return (1 + costs.border * across / (width * itemsize)) * (1 + costs.idle * (columns * across / width - 1))

    return min((target.warp_size << power for power in range(4)), key=time)


def _turning(kernel: Kernel, nest: Nest, vector: int, target: Target, hints: Mapping[str, int]) -> Schedule:
    """Pixels that become rows of results (`passes/windows/pixel_phases.py`): a line of channels for each column of a row."""
    costs, channel, columns = target.costs.maps, kernel.attrs["pixels"], kernel.attrs["columns"]
    assert isinstance(channel, int) and isinstance(columns, int)
    tiles = [1] * len(nest.extents)
    tiles[channel] = max(vector, min(costs.turned_bytes // nest.narrowest, power_of_two(hint(nest.extents[channel], hints))))
    tiles[-1] = columns
    threads = max(target.warp_size, min(costs.turning_threads, tiles[channel] * columns // vector))
    return Schedule(tuple(tiles), 1, vector, vector_index=channel, threads=threads, turned="vectors")


def _powers_down(most: int, least: int) -> list[int]:
    return [n for n in (most >> shift for shift in range(most.bit_length())) if n >= least] or [most]


def _gpu_map(nest: Nest, rank: int, vector: int, hints: Mapping[str, int], target: Target, vectors: int) -> Schedule:
    costs = target.costs.maps
    threads = 128 if nest.widest >= 4 else 256
    axis = vector_index(nest)
    if axis < 0:
        axis, vector = rank - 1, 1
    per_block = threads * vector * vectors
    if rank == 0:
        return Schedule((), threads=target.warp_size)
    tiles = [1] * rank
    # What does not move along the axis, such as scales by channel, comes from the cache however it is read.
    turned = next((p for p, weight in enumerate(nest.stride_one) if weight and p != axis and axis in nest.beside[p]), None)
    apart = turned is None
    if apart:
        turned = next((p for p in range(rank) if p != axis and axis in nest.near[p]), None)
    if turned is not None and not nest.reductions and vector > 1 and hint(nest.extents[turned], hints) >= costs.across:
        # Lanes take 4 vectors along the axis: a tile has at least these, and no more than the array. Of views rows are short.
        tiles[axis] = max(4 * vector, min((32 if apart else 16) * vector, power_of_two(hint(nest.extents[axis], hints))))
        tiles[turned] = per_block // tiles[axis]
        if rank > 3 and turned == axis - 1:
            # Rows that are no part of a longer one, as those of an image with a frame, fill tiles of several short ones better.
            length = hint(nest.extents[turned], hints)
            tiles[turned] = min(_powers_down(tiles[turned], 32), key=lambda n: (1 + costs.across / n) * -(-length // n) * n)
            tiles[turned - 1] = per_block // (tiles[axis] * tiles[turned])
        return Schedule(tuple(tiles), 1, vector, vector_index=axis, threads=threads, across=costs.across)
    tiles[axis] = min(per_block, max(power_of_two(hint(nest.extents[axis], hints)), vector * 8))
    other = next((p for p in reversed(range(rank)) if p != axis), None)
    if other is None:
        tiles[axis] = max(tiles[axis], target.warp_size * vector)
    else:
        rest = per_block // tiles[axis]
        tiles[other] = max(min(rest, power_of_two(hint(nest.extents[other], hints))), target.warp_size * vector // tiles[axis], 1)
    threads = max(target.warp_size, min(threads, prod(tiles) // vector))
    return Schedule(tuple(tiles), 1, vector, vector_index=axis, threads=threads)


def _shifted_map(kernel: Kernel, nest: Nest, plain: Schedule, hints: Mapping[str, int], target: Target) -> Schedule | None:
    """The same for rows of results that begin anywhere, whose tiles begin before them, at whole vectors. Of short rows a block has several, and a thread a vector of
    one. None for rows that begin at whole vectors anyway, and for those of few vectors, which are ends above all."""
    from tilewright.passes.common.shift_rows import map_start, shares_columns

    axis, vector, costs = plain.vector_index, plain.vector, target.costs.maps
    if vector == 1 or target.kind != "nvptx" or plain.across > 1 or kernel.attrs.get("in_order") or is_watched(kernel):
        return None
    length = hint(nest.extents[axis], hints)
    if length < costs.shifted_vectors * vector or any(op.opcode in ("for", "while", "if", "accumulate") for op in walk(nest.parallel.regions[0])):
        return None
    if stored_width(kernel, nest, axis, vector) * nest.narrowest >= target.costs.rows.vector or map_start(kernel, nest.parallel, axis, vector) is None:
        return None
    tiles = [1] * len(nest.extents)
    tiles[axis] = min(plain.tiles[axis], power_of_two(length))
    other = next((p for p in reversed(range(len(tiles))) if p != axis and nest.extents[p] != ONE), None)
    if other is not None and length < costs.shifted_row:
        if shares_columns(kernel, nest.parallel, axis):
            return None  # what is one vector for all rows of a block would be single elements for each
        tiles[other] = min(costs.shifted_threads * vector // tiles[axis], power_of_two(hint(nest.extents[other], hints)))
        return replace(plain, tiles=tuple(tiles), threads=max(target.warp_size, prod(tiles) // vector), shifted=True)
    return replace(plain, tiles=tuple(tiles), threads=max(target.warp_size, min(plain.threads, tiles[axis] // vector)), shifted=True)


def _whole_vectors(kernel: Kernel, nest: Nest, vector: int, hints: Mapping[str, int], target: Target) -> int:
    """How many elements the threads of a map take at once: of short rows whose ends would cut through vectors, as many as divide all rows, if these are 8 bytes or more."""
    axis = vector_index(nest)
    if axis < 0 or target.kind != "nvptx" or nest.reductions or nest.sweeps or hint(nest.extents[axis], hints) > target.costs.maps.shifted_row:
        return vector
    width = stored_width(kernel, nest, axis, vector)
    return width if width * nest.narrowest >= target.costs.rows.vector else vector


def _turned_map(kernel: Kernel, nest: Nest, vector: int, hints: Mapping[str, int], target: Target) -> Schedule | None:
    """The schedule of a transposition whose blocks read squares along memory. None for all else, and for wide elements whose results' rows are whole vectors: lanes that read
    across memory read whole sectors then."""
    axis, costs = vector_index(nest), target.costs.maps
    if axis < 0 or kernel.attrs.get("in_order") or target.kind != "nvptx" or is_watched(kernel):
        return None
    other = crossing_index(kernel, nest, axis)
    loads = [op for op in walk(kernel.body) if op.opcode == "load"]
    if other < 0 or len(loads) != 1 or any(op.opcode in ("for", "while", "if") for op in walk(nest.parallel.regions[0])):
        return None
    if min(hint(nest.extents[p], hints) for p in (axis, other)) < costs.turned_side:
        return None
    if nest.narrowest >= costs.turned_below and stored_width(kernel, nest, axis, vector) * nest.narrowest >= target.vector_bytes:
        return None
    tiles = [1] * len(nest.extents)
    tiles[axis], tiles[other] = costs.turned_side, costs.turned_side // (2 if nest.widest > 4 else 1)
    return Schedule(tuple(tiles), 1, 1, vector_index=axis, threads=costs.turned_threads, turned="elements")


def _row_group(kernel: Kernel, nest: Nest, axis: int) -> int:
    """Rows of a sum over columns that are added at a time; 0 for others."""
    if not nest.reductions:
        return 0
    from tilewright.passes.to_tile.loops.column_sums import row_group

    return row_group(kernel, nest, axis)


def _block_scan(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> ScanLoop | None:
    """The loop that the threads of a block scan together, where there is one."""
    if "for" not in kernel.opcodes:
        return None
    from tilewright.passes.common.scan_loops import scanned_by_blocks

    return scanned_by_blocks(kernel, target, hints)


def _gpu_scan(kernel: Kernel, nest: Nest, scan: ScanLoop, vector: int, hints: Mapping[str, int], target: Target) -> Schedule:
    """Lines are scanned by the threads of a block together, short ones by a warp, which waits for no other. What the warps of a block have in a step, a lane each
    finds out of all."""
    from tilewright.passes.common.scan_loops import scan_length

    length, lanes = scan_length(kernel, scan, hints), target.warp_size
    vector = aligned_walk(kernel, scan.loop, vector)
    tiles = [1] * len(nest.extents)
    steps = max(1, min(_SCAN_STEPS, _SCANNED // vector))
    if length <= lanes * vector * steps * (4 if vector == 1 else 1) and tiles and not any(scan.forms[v].factors for v in scan.loop.operands[:2]):
        while steps > 1 and length <= lanes * vector * steps // 2:
            steps //= 2
        tiles[-1] = 4
        return Schedule(tuple(tiles), lanes * vector * steps, vector, vector_on_reduction=True, threads=lanes * tiles[-1], scan=True)
    warps = max(2, min(8, lanes // steps))
    while warps > 2 and length <= lanes * vector * warps // 2:
        warps //= 2
    wide = [s for s in (steps, max(1, steps // 2)) if s * warps <= lanes]
    steps = min(wide, key=lambda s: (-(-length // (lanes * vector * warps * s)) * s, -s))
    return Schedule(tuple(tiles), lanes * vector * warps * steps, vector, vector_on_reduction=True, threads=lanes * warps, scan=True)


_SCANNED, _SCAN_STEPS = 16, 8
"""Elements of a line that one thread has at a time, and vectors of them."""
_PATCH_ROWS, _PATCH_THREADS = 4, 64
_WHOLE, _ROW_THREADS = 4, 32


def _patches(nest: Nest, rank: int, vector: int, hints: Mapping[str, int]) -> Schedule:
    """Where threads run one after another: each adds up a patch of results by itself, and meets nobody."""
    axis = vector_index(nest)
    tiles = [1] * rank
    tiles[axis] = max(vector, min(_PATCH_THREADS * vector // 2, power_of_two(hint(nest.extents[axis], hints))))
    other = next(p for p in reversed(range(rank)) if p != axis)
    tiles[other] = _PATCH_ROWS * max(1, min(_PATCH_THREADS * vector // tiles[axis], power_of_two(hint(nest.extents[other], hints)) // _PATCH_ROWS))
    return Schedule(tuple(tiles), 1, vector, vector_index=axis, threads=max(1, prod(tiles) // (vector * _PATCH_ROWS)))


def _gpu_rows(nest: Nest, rank: int, vector: int, length: int, target: Target, aligned: int = 0) -> Schedule:
    """The reduction walks memory: lanes and warps along it; several rows per block when rows are short. `aligned`: the elements that are read at once where rows do not
    begin at whole vectors. A thread has as many elements of them, but those of neighbouring lanes lie side by side: single elements of whole vectors would ask for
    every line of the cache several times."""
    # Wide accumulators and (value, index) pairs leave room for fewer vectors in flight.
    pairs = any(str(op.attrs["kind"]).startswith("arg") for op in nest.reductions)
    steps = 4 if nest.narrowest >= 4 and not pairs else 2
    aligned = 0 if pairs else aligned  # what is found out of pairs takes longer than reading them
    # A row of ordinary length takes 128 threads, the long stretches of a split reduction more.
    most = 8 if target.has("serial") else 128 if length <= 8192 else 512 if nest.narrowest >= 4 and not pairs else 256
    per_row = max(target.warp_size, min(most, target.max_threads, length // vector))
    reduce_tile = min(per_row * vector * steps, max(per_row * vector, length))
    rows = max(1, 128 // per_row)
    tiles = [1] * rank
    if rank and rows > 1:
        tiles[rank - 1] = rows
    else:
        rows = 1
    return Schedule(tuple(tiles), reduce_tile, aligned or vector, vector_on_reduction=True, threads=per_row * rows)


def _streamed_rows(kernel: Kernel, nest: Nest, rank: int, vector: int, hints: Mapping[str, int], target: Target) -> Schedule | None:
    """One sum along rows that begin anywhere: vectors all the same, from up to a vector before the row on. None where rows begin at vectors, are short, or where arrays begin
    differently."""
    from tilewright.passes.common.shift_rows import read_shared, row_start

    costs, length, results = target.costs.rows, power_of_two(hint(nest.reduce_extent, hints)), hint(product(nest.extents), hints)
    if len(nest.reductions) != 1 or nest.sweeps or not rank or str(nest.reductions[0].attrs["kind"]).startswith("arg") or target.has("serial"):
        return None
    if length < (costs.streamed if _computes_much(nest) else costs.streamed_light):
        return None
    if vector * nest.narrowest < target.vector_bytes or aligned_rows(kernel, nest, vector) == vector or read_shared(kernel, nest.reductions):
        return None
    if row_start(kernel, nest.parallel, nest.reductions, vector) is None:
        return None
    # The shorter the row, the fewer threads, which waste less at its ends, and have more on their way instead.
    threads, together = (costs.block // 2, 2 * costs.together) if length < costs.long else (costs.block, costs.together)
    if "reduce_extent" in kernel.attrs and length > costs.long:
        threads = costs.threads * (2 if nest.narrowest >= 4 else 1)  # a stretch of a row that was cut: there are just as many as fill the device with such blocks
    while threads < 2 * costs.threads and results * threads < target.multiprocessors * target.threads_per_sm // 2:
        threads *= 2
    threads = min(threads, target.max_threads)
    return Schedule((1,) * rank, threads * vector, vector, vector_on_reduction=True, threads=threads, shifted=True, together=together)


def _gpu_rows_in_turn(nest: Nest, rank: int, vector: int, length: int, target: Target) -> Schedule:
    """Short rows, of which a block adds up several: as few threads as have a row in a few steps, so that none is idle, and so many rows at a time that enough is on its way."""
    costs = target.costs.rows
    vectors, threads = max(1, -(-length // vector)), target.warp_size
    while threads < costs.block and vectors > threads * (2 if threads < costs.block // 2 else 4):
        threads *= 2
    loads = costs.loads if vector == 1 else costs.loads // 2
    steps = min(loads, -(-vectors // threads))
    return Schedule((1,) * rank, threads * vector * steps, vector, vector_on_reduction=True, threads=threads, rows_in_turn=max(2, loads // steps))


def range_schedule(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> Schedule | None:
    """The schedule for rows whose length data decide (`range(starts[r], starts[r + 1])`), by how long they are on average in this call. None for other nests,
    and where that is not known."""
    nest = nest_of(kernel)
    if not target.simt or not _are_ranges(kernel, nest):
        return None
    mean = _mean_length(kernel, nest, sizes)
    if mean is None:
        return None
    length, vector = power_of_two(max(1, round(mean))), max(1, min(8, target.vector_bytes // nest.narrowest))
    if length > target.costs.ranges.longest and _results_side_by_side(kernel, nest) is None:
        return _gpu_rows(nest, len(nest.extents), vector, length, target)  # such a row is worth a block
    return _gpu_ranges(kernel, nest, vector, sizes, target, length)


def _are_ranges(kernel: Kernel, nest: Nest) -> bool:
    """Whether data decide how long all reductions and sweeps of a nest are."""
    walks = (*nest.reductions, *nest.sweeps)
    return bool(nest.extents) and bool(walks) and all(_extent_is_data(kernel, op) for op in walks)


def _gpu_ranges(kernel: Kernel, nest: Nest, vector: int, hints: Mapping[str, int], target: Target, length: int) -> Schedule | None:
    """A few lanes for each row, by how long rows are on average."""
    costs, across = target.costs.ranges, _results_side_by_side(kernel, nest)
    tiles = [1] * len(nest.extents)
    if across is not None and "repairs" in kernel.attrs:
        # Hardly any result has terms: what counts is that all are looked at, several by each thread.
        tiles[across] = costs.dense_threads * costs.repaired
        vector = aligned_width(kernel, nest, across, vector)
        return Schedule(tuple(tiles), 1, vector, vector_index=across, threads=costs.dense_threads, row_lanes=1, resident=costs.dense_resident)
    if across is None:
        terms = costs.gathered_terms if _gathers(kernel, nest) else costs.terms
        lanes = max(costs.fewest_lanes, min(target.warp_size, length // terms))
        tiles[-1] = costs.threads // lanes
        return Schedule(tuple(tiles), lanes * terms, 1, vector_on_reduction=True, threads=costs.threads, row_lanes=lanes)
    # What is read lies along an index of the results: lanes go there, and each thread takes a few terms of its row at once.
    while vector > 1 and not nest.extents[across].divisible_by(vector, kernel.facts):
        vector //= 2
    threads = costs.dense_threads
    tiles[across] = min(threads * vector, max(power_of_two(hint(nest.extents[across], hints)), vector))
    other = next((p for p in reversed(range(len(tiles))) if p != across), None)
    lanes = max(1, tiles[across] // vector)
    if other is not None:
        tiles[other] = max(1, threads // lanes)
    if all(tile == 1 for tile in tiles) or (other is None and lanes < target.warp_size):
        return None
    return Schedule(tuple(tiles), costs.terms, vector, vector_index=across, threads=threads, row_lanes=1, resident=costs.dense_resident)


def _extent_is_data(kernel: Kernel, op: Op) -> bool:
    """Whether how long a reduction or loop is depends on what a load gives."""
    made = {result: one for one in walk(kernel.body) for result in one.results}
    pending = list(op.operands if op.opcode == "reduce" else op.operands[:2])
    while pending:
        own = made.get(pending.pop())
        if own is not None and own.opcode == "load":
            return True
        pending += own.operands if own is not None else ()
    return False


def _mean_length(kernel: Kernel, nest: Nest, hints: Mapping[str, int]) -> float | None:
    """How long rows are on average, if they lie one after the other in what is read along them."""
    forms = analyse(kernel)
    points, found = product(nest.extents), None
    for op in (*nest.reductions, *nest.sweeps):
        for access in walk(op.regions[0]):
            if access.opcode in ("load", "store") and address(access, forms).factor(op.regions[0].args[-1]) == ONE:
                memory = access.operands[0].type
                assert isinstance(memory, Tensor)
                size = product(memory.shape)
                if (size.names | points.names) <= hints.keys():
                    found = max(found or 0.0, size.evaluate(hints) / max(1, points.evaluate(hints)))
    return found


def _gathers(kernel: Kernel, nest: Nest) -> bool:
    """Whether terms read at places that other loads give: `x[columns[p]]`."""
    for op in (*nest.reductions, *nest.sweeps):
        loaded: set[Value] = set()
        for inner in walk(op.regions[0]):
            if inner.opcode == "load" and not loaded.isdisjoint(inner.operands[1:]):
                return True
            if inner.opcode == "load" or not loaded.isdisjoint(inner.operands):
                loaded.update(inner.results)
    return False


def _results_side_by_side(kernel: Kernel, nest: Nest) -> int | None:
    """The index of the results along which lies what each term reads anew: `x[columns[p], j]`."""
    forms = analyse(kernel)
    for position, index in reversed(list(enumerate(nest.parallel.regions[0].args))):
        for op in (*nest.reductions, *nest.sweeps):
            anew = {op.regions[0].args[-1]}
            for access in walk(op.regions[0]):
                if anew.isdisjoint(access.operands):
                    continue
                anew.update(access.results)
                if access.opcode in ("load", "store") and address(access, forms).factor(index) == ONE:
                    return position
    return None


_WALKS = frozenset({"for", "reduce"})
"""Ops that walk a row."""


def row_schedule(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> Schedule | None:
    """The schedule for rows that are walked several times and fit the registers of a block, or of a cluster; None for all else. It serves
    rows up to its `reduce_tile` that need all its steps, so the sizes of the call must be known."""
    if target.has("serial"):
        return None  # threads that share a row would wait for each other
    nest = nest_of(kernel)
    if not target.simt:
        return None
    if kernel.opcodes.isdisjoint(_WALKS):
        return None
    from tilewright.passes.common.shift_rows import read_shared
    from tilewright.passes.rows.flatten_rows import flattened

    if not _walks_rows(kernel, nest):
        flat = flattened(kernel)
        found = row_schedule(flat, target, sizes) if flat is not None else None
        return replace(found, flat=True) if found is not None and flat is not None and not _is_better_cut(flat, found, target.costs.rows) else None
    if not nest.reduce_extent.names <= sizes.keys():
        return None
    length, costs = max(1, nest.reduce_extent.evaluate(sizes)), target.costs.rows
    vector = max(1, min(8, target.vector_bytes // nest.narrowest, dict(target.tuned).get("vector", 8)))
    while vector > 1 and not nest.reduce_extent.divisible_by(vector, kernel.facts):
        vector //= 2
    tiles = [1] * len(nest.extents)
    narrow = vector * nest.narrowest < costs.vector
    scaled = not narrow and bool(read_shared(kernel, (*nest.reductions, *nest.sweeps)))
    threads, cluster = _row_threads(kernel, nest, target, length, vector, scaled)
    if tiles and threads < costs.block:
        rows = product(nest.extents)
        if rows.names <= sizes.keys() and rows.evaluate(sizes) == 1:
            threads = costs.block  # all of the block's threads walk the one row
        else:
            tiles[-1] = costs.block // threads
    steps = -(-length // (threads * vector * cluster))
    if steps * vector > _most_values(kernel, nest, costs, threads, cluster):
        return None
    found = Schedule(
        tuple(tiles), steps * vector * threads * cluster, vector, vector_on_reduction=True, threads=threads * (tiles[-1] if tiles else 1),
        whole=True, cluster=cluster, resident=_row_resident(kernel, nest, costs, threads, cluster, steps * vector, scaled),
    )  # fmt: skip
    known = nest.reduce_extent.product_name or nest.reduce_extent.constant is not None
    narrow = min(vector, aligned_rows(kernel, nest, vector)) * nest.narrowest < costs.vector  # rows of whole vectors may begin anywhere, too
    return (_shifted(kernel, nest, costs, found, length) if narrow and known and all(t == 1 for t in tiles) else None) or found


def _is_better_cut(kernel: Kernel, schedule: Schedule, costs: RowCosts) -> bool:
    """Whether a long row of several axes is read element by element, or what is read at its quotients is: several kernels then read it faster (`cut_rows`)."""
    if schedule.reduce_tile < costs.cut:
        return False
    forms, nest = analyse(kernel), nest_of(kernel)
    quotients = [forms[op.operands[1]] for op in walk(nest.parallel.regions[0]) if op.opcode == "floordiv" and op.operands[1] in forms]
    single = not schedule.shifted and aligned_rows(kernel, nest, schedule.vector) * nest.narrowest < costs.vector
    return single or not all(constant_of(by).divisible_by(schedule.vector, kernel.facts) for by in quotients)


def _row_resident(kernel: Kernel, nest: Nest, costs: RowCosts, threads: int, cluster: int, values: int, scaled: bool) -> int:
    """Blocks that are to find room at once, where each thread holds so many elements of a row; 0 leaves it to the assembler. `scaled`: rows in whole vectors are
    multiplied with what is the same for all of them."""
    if values <= costs.values // 2:
        return 0
    if cluster > 1:
        return 2 if scaled and threads == costs.threads else 0
    from tilewright.passes.common.shift_rows import read_shared

    return max(1, 2 * costs.threads // threads) if len(read_shared(kernel, (*nest.reductions, *nest.sweeps))) == 1 else 0


def _row_threads(kernel: Kernel, nest: Nest, target: Target, length: int, vector: int, scaled: bool) -> tuple[int, int]:
    """Threads of a block, and blocks, that hold a row: as few as can."""
    whole, costs = power_of_two(length), target.costs.rows
    share = max(vector, costs.share * (1 if nest.narrowest >= 4 else 2))
    threads = max(target.warp_size, min(costs.threads, whole // share), min(128, whole // max(vector, costs.share)))
    if length <= threads * _most_values(kernel, nest, costs, threads, 1):
        return threads, 1
    if target.max_threads >= 2 * costs.threads and length <= 2 * costs.threads * _most_values(kernel, nest, costs, 2 * costs.threads, 1):
        return 2 * costs.threads, 1
    if "cluster" not in target.features or not nest.extents:
        return target.max_threads, 1
    # A row that is scaled takes registers for what it is scaled with: rather few large blocks.
    for threads in (2 * costs.threads, costs.threads) if scaled and nest.narrowest >= 4 else (costs.threads, 2 * costs.threads):
        cluster = max(2, whole // (_most_values(kernel, nest, costs, threads, 2) * threads))
        if cluster <= costs.cluster:
            break
    return threads, min(costs.cluster, cluster)


def _most_values(kernel: Kernel, nest: Nest, costs: RowCosts, threads: int, cluster: int) -> int:
    """Elements of a row that one thread of such blocks may hold."""
    from tilewright.passes.common.shift_rows import walked

    if threads == 1024:
        return costs.values // 4
    if len(walked(kernel, (*nest.reductions, *nest.sweeps))) > 1 or any(op.opcode == "floordiv" for op in walk(nest.parallel.regions[0])):
        return costs.values // 2  # quotients, and what is read at them, take registers as another array does
    return costs.most if threads <= costs.threads and cluster == 1 else costs.values


def _shifted(kernel: Kernel, nest: Nest, costs: RowCosts, plain: Schedule, length: int) -> Schedule | None:
    """The same for rows that begin anywhere, with wide vectors all the same: of 16 bytes, or of 8 where a row then leaves clearly
    fewer registers empty, or where single elements are read beside them, which lie the further apart the wider vectors are. None
    where arrays begin differently, or the last full step would not be surely full."""
    from tilewright.passes.common.shift_rows import read_shared, row_start

    walks = (*nest.reductions, *nest.sweeps)
    shared = bool(read_shared(kernel, walks))
    best: Schedule | None = None
    for size in (2 * costs.vector, costs.vector):
        vector = min(8, size // nest.narrowest)
        step = vector * plain.threads * plain.cluster
        steps = -(-(length + vector - 1) // step)
        most = _most_values(kernel, nest, costs, plain.threads, plain.cluster)
        if vector < 2 or steps * vector > most or length < (steps - 1) * step:
            continue
        if row_start(kernel, nest.parallel, walks, vector) is None:
            continue
        if best is None or shared or 10 * steps * step < 9 * best.reduce_tile:
            crowded = plain.cluster > 1 and plain.threads == costs.threads and vector == 8 and nest.sweeps
            resident = costs.resident if crowded else plain.resident
            best = replace(plain, reduce_tile=steps * step, vector=vector, shifted=True, resident=resident)
    return best


def _walks_rows(kernel: Kernel, nest: Nest) -> bool:
    """Whether all reductions and sweeps of a kernel walk one axis from its beginning to its end, and more than once."""
    if len(nest.reductions) + len(nest.sweeps) < 2 or not nest.reductions or "reduce_extent" in kernel.attrs:
        return False
    if not nest.reduces_along:
        return False
    forms = analyse(kernel)
    for op in (*nest.reductions, *nest.sweeps):
        if any(inner.regions and inner.opcode != "if" for inner in walk(op.regions[0])) or str(op.attrs.get("kind", "")).startswith("arg"):
            return False
        low, high, step = (ZERO, constant_of(forms[op.operands[-1]]), ONE) if op in nest.reductions else (constant_of(forms[v]) for v in op.operands)
        if len(op.regions[0].args) != 1 or (low, high, step) != (ZERO, nest.reduce_extent, ONE):
            return False
    others = [op for op in nest.parallel.regions[0].ops if op.regions and op not in nest.reductions and op not in nest.sweeps]
    return all(op.opcode == "if" for op in others)


def _gpu_columns(kernel: Kernel, nest: Nest, rank: int, vector: int, target: Target, hints: Mapping[str, int]) -> Schedule:
    """The reduction crosses rows: lanes along the kept index, warps down the rows, meeting in shared memory. Lanes that a short row has no use for are at other rows."""
    axis = vector_index(nest)
    if axis < 0:
        axis, vector = rank - 1, 1
    if rank == 0:
        return Schedule((), 256, 1, vector_on_reduction=True, threads=256)
    tiles = [1] * rank
    wide = part_tile(kernel, nest, axis, target, hints) if "reduce_extent" in kernel.attrs else None
    if wide is not None:
        tiles[axis], rows, threads = wide
        return Schedule(tuple(tiles), rows, min(vector, tiles[axis]), vector_index=axis, threads=threads, resident=PARTS_RESIDENT)
    warps, deep = (8, 4) if nest.narrowest >= 4 else (4, 8)
    sums = max((dtype_of(op.results[0].type).itemsize + 8 * str(op.attrs["kind"]).startswith("arg") for op in nest.reductions), default=4)
    width, aligned = target.warp_size * vector, aligned_width(kernel, nest, axis, vector)
    sums, share = (sums, 4) if aligned == vector else (max(4, sums), 8)
    while target.has("rdna") and deep > 1 and vector * deep * sums // 4 > target.max_registers // share:
        deep //= 2  # LLVM keeps as many elements at hand again, or their addresses, and what does not fit goes to memory
    held = width * warps * deep
    vector = aligned
    tiles[axis] = column_tile(nest, axis, width, hints)
    return Schedule(tuple(tiles), min(held // tiles[axis], _MOST_ROWS), min(vector, tiles[axis]), vector_index=axis, threads=target.warp_size * warps)


def part_tile(kernel: Kernel, nest: Nest, axis: int, target: Target, hints: Mapping[str, int]) -> tuple[int, int, int] | None:
    """Columns, rows of a step, and threads of a block that has a part of sums across rows: a warp reads four vectors side by side, and two such blocks are all that a
    multiprocessor has at once. None where blocks are those of sums that are not cut."""
    threads = target.warp_size * _PART_WARPS
    if nest.narrowest < 4 or len(nest.reductions) != 1 or target.warp_size != 32:
        return None
    vector = max(1, min(8, target.vector_bytes // nest.narrowest))
    if not _is_light_sum(kernel, nest, axis, target.vector_bytes // vector):
        return None
    held, columns = threads * vector * _PART_VECTORS, target.warp_size * vector * _PART_VECTORS
    if aligned_width(kernel, nest, axis, vector) < vector or column_tile(nest, axis, columns, hints) < columns:
        return None  # single elements, and several rows of a thread, take registers for their places
    if threads > target.max_threads or PARTS_RESIDENT * threads > target.threads_per_sm or PARTS_RESIDENT * held * nest.widest * 2 > target.max_shared:
        return None
    return columns, held // columns, threads


def _is_light_sum(kernel: Kernel, nest: Nest, axis: int, widest: int) -> bool:
    """Whether the one reduction reads one array along an index, does little with it, and has results of no more bytes: two large blocks have registers for that."""
    reduction, forms = nest.reductions[0], analyse(kernel)
    if len(reduction.results) != 1 or dtype_of(reduction.results[0].type).itemsize > widest:
        return False
    inside, index = list(walk(reduction.regions[0])), nest.parallel.regions[0].args[axis]
    along = sum(op.opcode == "load" and address(op, forms).factor(index) == ONE for op in inside)
    return along == 1 and sum(op.opcode not in ("load", "const", "size", "yield") for op in inside) <= _LIGHT_TERMS


_LIGHT_TERMS = 6
"""Ops of a term that take hardly any registers besides what they are given."""
_PART_WARPS, _PART_VECTORS, PARTS_RESIDENT = 16, 4, 2
"""Warps of a block that adds up a part of the rows, vectors that each of its threads has on their way, and such blocks of a multiprocessor."""
_FEWEST_COLUMNS, _MOST_ROWS = 4, 512


def column_tile(nest: Nest, axis: int, width: int, hints: Mapping[str, int]) -> int:
    """Columns of a block that adds up rows: as many as its lanes read at once, `width`, or as there are."""
    return min(width, max(_FEWEST_COLUMNS, power_of_two(hint(nest.extents[axis], hints))))
