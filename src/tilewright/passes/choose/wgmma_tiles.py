"""Tiles of warp-group instructions, and the model of their time: rounds of the multiprocessors, the rate of each tile shape, and what finishing a tile costs.

In: the sizes of a contraction and the target. Out: tiles that may be worth it (`wgmma_tiles`), and microseconds (`cost`). `matrix` puts them together with how factors lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from tilewright.analysis.contraction import Contraction, plane
from tilewright.base.cost_model import WgmmaCosts
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.passes.choose.epilogue_work import EpilogueWork, finishing_work
from tilewright.passes.choose.mma import (
    is_deep,
    runs_along,
)
from tilewright.passes.schedules.matrix import WARPGROUP, Wgmma

NARROW = 24
"""Columns that multiplying none would cost as much as, by how instructions with few columns slow down."""
LARGE = 1 << 14
"""What an extent nobody knows is taken for."""
_TILES = (
    Wgmma(128, 256, 64, stages=4, math_warpgroups=2),
    Wgmma(128, 192, 64, stages=4, math_warpgroups=2, pingpong=True, mma_in_flight=1, epilogue_stages=3),
    Wgmma(128, 192, 64, stages=4, math_warpgroups=2, epilogue_stages=3),
    Wgmma(128, 128, 64, stages=6, math_warpgroups=2, pingpong=True, mma_in_flight=1),
    Wgmma(192, 192, 64, stages=4, math_warpgroups=3, epilogue_stages=1),
    Wgmma(192, 192, 64, stages=4, math_warpgroups=3, epilogue_stages=1, cluster=2),
    Wgmma(64, 128, 64, stages=8, math_warpgroups=2, pingpong=True, mma_in_flight=1),
    Wgmma(128, 64, 64, stages=8, math_warpgroups=2),
)
"""Tiles worth having."""
SHAPES = {(s.m, s.n) for s in _TILES}
TERM_TILES = tuple(
    replace(s, bf16_terms=6, chunk=512)
    for s in (
        Wgmma(128, 192, 64, stages=4, math_warpgroups=2),
        Wgmma(128, 128, 64, stages=6, math_warpgroups=2, mma_in_flight=1),
        Wgmma(192, 128, 64, stages=4, math_warpgroups=3, epilogue_stages=1),
        Wgmma(128, 64, 64, stages=8, math_warpgroups=2),
    )
)
"""Tiles of terms: threads hold their sums twice."""
_THIN = (8, 16, 32, 64)
"""Results along the short side of a product with few rows, whose time is that of reading the other factor."""


@record
class ProductShape:
    """The sizes of one contraction."""

    batch: int
    m: int
    n: int
    k: int


@record
class PixelReads:
    """How a convolution reads pixels."""

    taps: int = 1
    """Places of a window: as often a pixel is read."""
    empty: int = 0
    """Terms of a sum that are zeros, which fill up the channels of all places to whole steps."""


@record
class Raw:
    """What a factor that warp groups can compute in registers is computed from."""

    bytes: int
    """Of the arrays that have its size, for each element."""
    groups: bool
    """Others have an element for each group of steps."""


Raws = tuple[Raw | None, Raw | None]
"""Of the first factor and of the second."""


def shape_of(found: Contraction, hints: Mapping[str, int]) -> ProductShape:
    batch, m, n = (number_of(found.size(side), hints) for side in (found.batch, found.m, found.n))
    return ProductShape(batch, m, n, number_of(found.k_size, hints))


def number_of(size: Size, hints: Mapping[str, int]) -> int:
    return size.evaluate(hints) if size.names <= hints.keys() else LARGE


def wgmma_tiles(found: Contraction, shape: ProductShape, target: Target) -> list[Wgmma]:
    size = found.a.dtype.itemsize
    candidates: list[Wgmma] = []
    for tile in _TILES:
        candidates += in_parts(tile, shape, target)
    few = min(shape.m, shape.n)
    if few <= 64:
        # Nearly all of the time goes into reading the long side: many blocks, and deep rings.
        width = next((w for w in _THIN if w >= few), 64)
        for rows in (64, 128):
            thin = Wgmma(rows, width, 64, math_warpgroups=rows // 64, swap_ab=shape.m <= shape.n, store="direct")
            if rows == 64:
                thin = replace(thin, mma_in_flight=1, persistent=tile_count(thin, shape) > target.multiprocessors)
                candidates += _in_clusters(thin, shape, target)
            candidates += in_parts(_deep(thin, target), shape, target)
        for long in (16, 32, 64, 128):
            other = Wgmma(64, long, 64, swap_ab=shape.m > shape.n, store="direct")
            candidates.append(_deep(other, target))
    elif few == shape.m <= 256 and few % 64 and size == 2:
        candidates += _fitted_rows(few, target)
    if is_deep(shape.m, shape.n, shape.k) and shape.batch == 1:
        candidates += _long_sums(found, shape, target)
    # A row of 128 bytes is one step, whatever the element. Only a plain sum can be cut.
    return [replace(s, k=128 // size) for s in candidates if s.split_k == 1 or len(found.k) == 1]


def _fitted_rows(few: int, target: Target) -> list[Wgmma]:
    """Tiles for a product of few rows and many columns, exchanged: all rows are columns of a tile, so that the long factor is read once. Pieces of 16 columns are
    turned on their way out."""
    tile = Wgmma(128, -(-few // 16) * 16, 64, math_warpgroups=2, pingpong=True, mma_in_flight=1, swap_ab=True)
    room = target.max_shared - 2048 - tile.math_warpgroups * tile.epilogue_stages * 64 * ROW_BYTES
    return [replace(tile, stages=min(8, room // ((tile.m + tile.n) * ROW_BYTES)))] if tile.rows * tile.n <= 192 * WARPGROUP else []


def _long_sums(found: Contraction, shape: ProductShape, target: Target) -> list[Wgmma]:
    """Tiles for few results and a long sum, whose time is that of reading both factors: tiles so large that hardly a byte comes twice, and a part of the sum for
    every multiprocessor."""
    tiles: list[Wgmma] = []
    for groups, m in ((1, 64), (2, 128), (3, 192), (2, 256)):
        for n in (64, 128, 192, 256):
            if m - 64 < shape.m and n - 64 < shape.n:
                tiles.append(Wgmma(m, n, 64, math_warpgroups=groups, epilogue_stages=1))
        for swap, factor, rows, columns in ((False, found.b, shape.m, shape.n), (True, found.a, shape.n, shape.m)):
            # Rows that run across the sum come in whole blocks; to turn them first takes longer than to pack them as they lie.
            if m - 64 < rows and runs_along(found, factor):
                tiles += [Wgmma(m, n, 64, math_warpgroups=groups, epilogue_stages=1, swap_ab=swap, store="direct") for n in fitting(columns)]
    return [deep for tile in tiles for deep in _in_long_parts(tile, shape, target)]


def fitting(columns: int, least: int = NARROW + 8) -> list[int]:
    """Columns of a tile that leave hardly any of its instructions without work: those of one of a few like parts."""
    widths = dict.fromkeys(-(-columns // parts // 8) * 8 for parts in range(1, 5))
    return [n for n in widths if least <= n <= 256 and n % 64]


def _in_long_parts(schedule: Wgmma, shape: ProductShape, target: Target) -> list[Wgmma]:
    """The schedule with as many stages as there is room for, and a part of the sum for every multiprocessor; nothing where it has no room, or one part."""
    groups = schedule.math_warpgroups
    room = target.max_shared - 2048 - groups * 64 * 128
    deep = replace(schedule, stages=min(8, room // ((schedule.m + schedule.n) * 128)))
    parts = min(target.multiprocessors // max(1, tile_count(deep, shape)), shape.k // 512)
    registers = deep.rows * deep.n // 128
    return [replace(deep, split_k=parts)] if parts > 1 and deep.stages > 1 and registers <= (192 if groups < 3 else 112) else []


def _deep(schedule: Wgmma, target: Target) -> Wgmma:
    """With as many stages as shared memory holds, beside what the blocks of a cluster send of their sums."""
    room = target.max_shared - 4096 - 4 * (schedule.cluster_k - 1) * schedule.m * schedule.n
    return replace(schedule, stages=max(1, min(24, room // ((schedule.m + schedule.n) * 128))))


def in_parts(schedule: Wgmma, shape: ProductShape, target: Target) -> list[Wgmma]:
    """The schedule, and the same with the sum cut so that more multiprocessors take part."""
    tiles = max(1, tile_count(schedule, shape))
    found = [schedule]
    if tiles < target.multiprocessors and schedule.cluster == 1:
        most = min(32, target.multiprocessors // tiles, shape.k // 512)
        found += [replace(schedule, split_k=parts) for parts in {most, most // 2, 2} if parts > 1]
    return found


def _in_clusters(schedule: Wgmma, shape: ProductShape, target: Target) -> list[Wgmma]:
    """The same with every tile's sum shared by the blocks of a cluster."""
    found = [_deep(replace(schedule, cluster_k=blocks), target) for blocks in (2, 4, 8) if shape.k >= 512 * blocks]
    most = {s.cluster_k: target.costs.wgmma.clusters[s.cluster_k] * target.multiprocessors for s in found}
    return [s for s in found if tile_count(s, shape) * s.cluster_k <= most[s.cluster_k] and s.stages >= 4]


def tile_count(schedule: Wgmma, shape: ProductShape) -> int:
    m, n = (shape.n, shape.m) if schedule.swap_ab else (shape.m, shape.n)
    return shape.batch * -(-m // schedule.m) * -(-n // (schedule.n * schedule.cluster)) * schedule.cluster


def rounds_of(schedule: Wgmma, shape: ProductShape, target: Target) -> float:
    """How many tiles, or as many steps, multiprocessors have one after another."""
    blocks = tile_count(schedule, shape) * schedule.split_k * schedule.cluster_k
    return blocks / target.multiprocessors if schedule.stream_k else -(-blocks // target.multiprocessors)


def cost(
    schedule: Wgmma,
    shape: ProductShape,
    target: Target,
    found: Contraction,
    raw: Raws = (None, None),
    work: EpilogueWork | None = None,
    pixel: PixelReads | None = None,
) -> float:
    """Estimated microseconds. `raw`: what the factors are computed from; `work`: what happens to the sums, where that is not the kernel's; `pixel`: how pixels are
    read, where they are."""
    size = found.a.dtype.itemsize
    costs, launch = target.costs.wgmma, target.costs.launch
    rate = costs.tile_rates.get((schedule.m, schedule.n, schedule.pingpong, schedule.cluster), costs.other_tiles)
    if (schedule.a_copy == "im2col" or schedule.n > 64) and schedule.n % 64:
        rate = rate_between(schedule, costs)
    cut = schedule.split_k * schedule.cluster_k
    k = -(-shape.k // cut)
    blocks = tile_count(schedule, shape) * cut
    rounds = rounds_of(schedule, shape, target)
    area = schedule.m * schedule.n
    ragged = not schedule.bf16_terms and _is_ragged(found, shape)  # rows of terms are whole lines
    # Blocks of a cluster share a's rows.
    along = (shape.n, shape.m) if schedule.swap_ab else (shape.m, shape.n)
    tile = (schedule.m, schedule.n)
    outside = costs.outside_long if is_deep(shape.m, shape.n, shape.k) else costs.outside
    down, across = (side + (outside - 1) * max(0, side - extent) for side, extent in zip(tile, along, strict=True))
    rows = down / schedule.cluster + across
    feed = rows * k * size / (costs.feed_ragged if ragged else costs.feed)
    pixels = pixel if pixel is not None and schedule.a_copy == "im2col" else None
    if pixels is not None and pixels.empty:
        empty = pixels.empty / cut
        feed = rows * size * ((k - empty) / costs.feed_pixels[0] + empty / costs.feed_pixels[1])
    # The rate goes with the bytes of an element: 32 bytes of the sum in one instruction.
    compute = 2 * area * k * size / 2 / (costs.rate * rate)
    sizes = [size, size]
    if schedule.a_copy == "rs":
        made_of = raw[int(schedule.swap_ab)] or Raw(size, False)
        steps = -(-k // schedule.k)
        compute = max(compute, costs.rs_beside * compute + steps * (costs.rs_step_of_groups if made_of.groups else costs.rs_step))
        sizes[int(schedule.swap_ab)] = made_of.bytes
    if schedule.a_copy == "im2col":
        compute += -(-k // schedule.k) * costs.pixels
    main = rounds * max(compute, feed)
    if schedule.split_k == 1:
        main += finishing(schedule, work or finishing_work(found), ceil(rounds), costs)
    else:
        main += 2 * 64 * area / costs.rate * (1 if schedule.pingpong else rounds)
    again = [1, 1] if pixels is None else [1, pixels.taps] if schedule.swap_ab else [pixels.taps, 1]
    # A pixel comes from memory once, and from the cache for all other windows it is in.
    read = shape.batch * shape.k * (shape.m * sizes[0] / again[0] + shape.n * sizes[1] / again[1])
    traffic = max(read / costs.stream, read / (max(1, min(blocks, target.multiprocessors)) * costs.arrive))
    # Reading hides computing only so far.
    total = costs.start + max(main, traffic) + 0.25 * min(main, traffic)
    packed = (schedule.b_copy, schedule.a_copy) if schedule.swap_ab else (schedule.a_copy, schedule.b_copy)
    for way, across in zip(packed, (shape.m, shape.n), strict=True):
        if way == "pack":
            moved = costs.packing if len(found.k) == 1 else costs.packing_windows
            total += launch.second + moved * shape.batch * across * shape.k * size / costs.stream
    if schedule.pdl:
        total -= launch.saved_early
        filled = blocks / target.multiprocessors
        uneven = 0.5 < filled < 0.95 or 1 < filled < 1.9
        often = 2.0 if is_deep(shape.m, shape.n, shape.k) else 2.5
        if feed > 0.9 * compute and (uneven or blocks * rows * k * size > often * read):
            total += launch.scattered * max(main, traffic)
    total += exchange(schedule, shape, target)
    if schedule.split_k > 1:
        total += launch.second + 2 * 4 * schedule.split_k * shape.batch * shape.m * shape.n / (1.5 * costs.stream)
    return total


def exchange(schedule: Wgmma, shape: ProductShape, target: Target) -> float:
    """Microseconds until the sums of blocks that share a tile are at the one that finishes it."""
    costs = target.costs.wgmma
    if schedule.stream_k:
        return costs.streamed[0] + costs.streamed[1] * (1 + ceil(target.multiprocessors / max(1, tile_count(schedule, shape))))
    return (schedule.cluster_k - 1) * (costs.exchange + 4 * schedule.m * schedule.n / costs.box)


def finishing(schedule: Wgmma, work: EpilogueWork, rounds: int, costs: WgmmaCosts) -> float:
    """Microseconds from the sums of tiles to their results."""
    area = schedule.m * schedule.n
    total = 2 * 64 * area / costs.rate * (1 if schedule.pingpong else rounds)
    each = (costs.finish_hidden, costs.read_hidden) if schedule.pingpong else (costs.finish, costs.read)
    if schedule.pingpong and rounds == 1:
        each = 2 * costs.finish, 2 * costs.read  # nobody else has a tile: one group alone finishes this one
    # One, a bias perhaps, is lost among what every result takes.
    total += rounds * area * (max(0, work.instructions - 1) * each[0] + work.arrays * each[1])
    if schedule.swap_ab and schedule.a_copy == "im2col":
        alone, hidden = (costs.turned, costs.turned_hidden) if schedule.store == "turned" else (costs.scatter, costs.scatter_hidden)
        total += rounds * area * (hidden if schedule.pingpong else alone)
    return total


def rate_between(schedule: Wgmma, costs: WgmmaCosts) -> float:
    """The rate of a tile with a number of columns that no known one has: between those of its neighbours, and below the narrowest what shared memory allows, which
    brings 64 rows for each instruction."""
    known = sorted((n, rate) for (m, n, pingpong, cluster), rate in costs.tile_rates.items() if (m, pingpong, cluster) == (schedule.m, schedule.pingpong, schedule.cluster))
    wider = next(((n, rate) for n, rate in known if n > schedule.n), None)
    narrower = next(((n, rate) for n, rate in reversed(known) if n < schedule.n), None)
    if wider is not None and narrower is not None:
        return narrower[1] + (wider[1] - narrower[1]) * (schedule.n - narrower[0]) / (wider[0] - narrower[0])
    if wider is not None:
        return wider[1] * schedule.n / (schedule.n + NARROW) * (wider[0] + NARROW) / wider[0]
    return narrower[1] if narrower is not None else costs.other_tiles


def _is_ragged(found: Contraction, shape: ProductShape) -> bool:
    """Whether rows of operands begin in the middle of the L2 cache's lines."""
    lengths = []
    for factor, across in ((found.a, shape.m), (found.b, shape.n)):
        lies, tensor = plane(found, factor), factor.tensor
        if lies is not None and tensor is not None:
            lengths.append((shape.k if lies.k == tensor.rank - 1 else across) * tensor.dtype.itemsize)
    return any(length % 128 for length in lengths)
