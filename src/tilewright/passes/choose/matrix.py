"""Choose how a contraction is computed on a GPU: a short list of schedules, and a cost model that ranks them by the sizes at hand.

The model counts what decides: how many rounds of tiles the multiprocessors take (a last round that is nearly empty costs as much as a
full one), the rate each tile shape reaches, and what finishing a tile costs where nothing overlaps it. Its numbers are
the target's (`base/cost_model.py`). The tuner measures the best ranked; without it the first one is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from weakref import WeakKeyDictionary

from tilewright.analysis import divisors
from tilewright.analysis.contraction import Contraction, Factor, find_contraction, image, plane
from tilewright.base.dtypes import f32
from tilewright.base.errors import UserError
from tilewright.base.sizes import ONE, product
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.ops_matrix import CORNERS, MATRIX_DTYPES, MOST_OFFSET, ROW_BYTES, accumulator_dtype
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.choose.epilogue_work import finishing_work
from tilewright.passes.choose.mma import (
    SHORT_TERMS,
    SHORT_WORD,
    SHORTEST,
    THIN,
    in_words,
    is_deep,
    is_thin,
    mma_schedules,
    precision_of,
    warp_time,
)
from tilewright.passes.choose.packed import can_bring_packed
from tilewright.passes.choose.wgmma_tiles import (
    LARGE,
    SHAPES,
    TERM_TILES,
    PixelReads,
    ProductShape,
    Raw,
    Raws,
    cost,
    exchange,
    finishing,
    fitting,
    in_parts,
    number_of,
    rate_between,
    rounds_of,
    shape_of,
    tile_count,
    wgmma_tiles,
)
from tilewright.passes.packed.stage_units import can_stage
from tilewright.passes.packed.unpack_weights import unpacked_form
from tilewright.passes.program.repack import packable
from tilewright.passes.program.to_channels_last import Turn, turned_kernel, turns_of
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import CpuPanels, CpuProduct, GpuProduct, MatrixSchedule, Mma, Wgmma
from tilewright.passes.schedules.text import parse_schedule
from tilewright.passes.terms.split_terms import has_terms, terms_form
from tilewright.passes.triangles.skipped_steps import steps_left
from tilewright.passes.triangles.symmetry import is_symmetric
from tilewright.passes.windows.image_forms import UNIT, ImageForm, image_form
from tilewright.passes.windows.image_tiles import by_rows, fitted, is_crowded, sharing_sums, streaming, turned_out
from tilewright.passes.windows.row_parts import parts_form
from tilewright.passes.windows.row_windows import OVERLAPPING
from tilewright.passes.windows.sum_ranges import is_half, result_bounds, sum_bounds
from tilewright.passes.windows.window_rows import STEP, WAYS, row_forms, rows_kernel

SHORT_SUM, FEW_CHANNELS = 32, 8
"""A summed index shorter than this is not worth steps of its own; channels of pixels that the copy engine brings are, from the second on."""
MANY_CHANNELS, FEWER_STEPS = 256, 0.85
"""From so many channels on steps are nearly full; rows of windows as channels need at most so many of the steps that pixels do."""
STEPS = 8
"""From one pixel to the next, the most that the copy engine can be told; `ir/ops_matrix.py` has what goes with the axes of an image."""
SKIPPED = (1.0, 0.55, 0.25)
"""What is left of a product whose tiles skip what guards leave empty, where so many factors have one."""
GUARDED = 0.35
"""The part of their rate that warps reach which test guards of elements on their way to shared memory."""
UNEVEN = 0.25
"""The part of a whole tile's time for which tiles with sums of different lengths leave multiprocessors without work at the end."""
EXPOSED = 3.0
"""Microseconds of a tile that nothing hides where a block has one."""


def gpu_schedules(kernel: Kernel, guarded: Contraction, found: Contraction, literal: bool, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules for a contraction, best first. `guarded`: as it stands in the kernel; `literal`: what its conditions leave out is no factor of zero."""
    inner = _inner(found, hints)
    if in_terms := terms_schedules(kernel, guarded, target, hints) or ([] if literal else image_schedules(kernel, found, target, hints)):
        by_warps = _by_warps(kernel, found, target, hints, inner)
        shape = shape_of(found, hints)
        other = warp_time(by_warps, kernel, found, target, shape.batch, shape.m, shape.n, shape.k)
        if literal:
            other *= SKIPPED[sum(1 for f in (found.a, found.b) if f.guard is not None)]
        elif by_warps and isinstance(by_warps[0], GpuProduct):
            left_over = steps_left(guarded, sum_bounds(guarded), result_bounds(guarded), by_warps[0], hints)
            other *= left_over + UNEVEN * (1 - left_over)
        ranked_terms = tuple(s for _, s in in_terms)
        return (*ranked_terms, *by_warps) if in_terms[0][0] < other else (*by_warps, *ranked_terms)
    if literal:
        by_warps, shape = _by_warps(kernel, found, target, hints, inner), shape_of(found, hints)
        triangular = _triangular(kernel, found, target, hints)
        left = SKIPPED[sum(1 for f in (found.a, found.b) if f.guard is not None)]
        other = left * warp_time(by_warps, kernel, found, target, shape.batch, shape.m, shape.n, shape.k) / GUARDED
        by_groups = tuple(s for _, s in triangular)
        return (*by_groups, *by_warps) if triangular and triangular[0][0] < other else (*by_warps, *by_groups)
    if has_warp_groups(kernel, found, target):
        ranked = warp_group_times(kernel, target, hints)
        by_warps, by_groups = _by_warps(kernel, found, target, hints, inner), tuple(s for _, s in ranked)
        if ranked and "pack" in (ranked[0][1].a_copy, ranked[0][1].b_copy) and len(found.k) == len(found.m) == len(found.n) == 1:
            # Warps bring factors that the copy engine cannot read as they lie; of few results and a long sum, and of few rows, the copies take longer than the product.
            shape = shape_of(found, hints)
            if is_thin(shape.m, shape.n):
                # The short factor hardly counts.
                long = found.b if shape.m <= shape.n else found.a
                pays = _way(kernel, found, long, inner) == "pack" and in_words(kernel, long, SHORT_WORD)
            else:
                pays = is_deep(shape.m, shape.n, shape.k) and all(in_words(kernel, factor, SHORT_WORD) for factor in (found.a, found.b))
            if pays and warp_time(by_warps, kernel, found, target, shape.batch, shape.m, shape.n, shape.k) < ranked[0][0]:
                return (*by_warps, *by_groups)
        return (*by_groups, *by_warps)
    return _by_warps(kernel, found, target, hints, inner)


Ranked = list[tuple[float, Wgmma]]
"""Schedules and the microseconds they are thought to take."""


_ranked: WeakKeyDictionary[Kernel, tuple[Target, Mapping[str, int], Ranked]] = WeakKeyDictionary()
"""What was found for a kernel last: phases of a transposed convolution are asked for alone, and as a group."""


def warp_group_times(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> Ranked:
    """Schedules of Hopper's warp-group instructions, with images turned or as they lie, best first; none where they do not multiply what the kernel does."""
    known = _ranked.get(kernel)
    if known is None or known[:2] != (target, hints):
        known = _ranked[kernel] = target, dict(hints), _warp_group_times(kernel, target, hints)
    return list(known[2])


def _warp_group_times(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> Ranked:
    found = find_contraction(kernel)
    if found is None or not has_warp_groups(kernel, found, target):
        return []
    ranked = [*_by_warp_groups(kernel, found, target, hints, _inner(found, hints)), *_turned(kernel, found, target, hints), *_in_rows(kernel, target, hints)]
    return sorted(ranked, key=lambda pair: pair[0])


def _by_warp_groups(kernel: Kernel, found: Contraction, target: Target, hints: Mapping[str, int], inner: int) -> Ranked:
    """Schedules of Hopper's warp-group instructions for a contraction as it stands."""
    # Where several indices on a side are no matrix, the innermost alone may be.
    for apart in (False, True) if len(found.m) + len(found.n) > 2 else (False,):
        lying = found.apart() if apart else found
        ways = [_way(kernel, lying, factor, inner) for factor in (lying.a, lying.b)]
        if any(way == "im2col" and not _in_reach(lying, f, hints) for way, f in zip(ways, (lying.a, lying.b), strict=True)):
            continue
        if all(ways) and ways.count("im2col") < 2:
            shape = shape_of(lying, hints)
            tiles = wgmma_tiles(lying, shape, target)
            if ways[0] == "im2col":
                tiles += [by_rows(s, target) for s in fitted(shape.n, lying.a.dtype.itemsize, target)]
            if ways[1] == "im2col":
                # Pixels are rows of a tile, though results lie side by side along them.
                known = {(s.m, s.n) for s in tiles if s.swap_ab}
                tiles += [replace(s, swap_ab=True, store="direct") for s in tiles if s.store == "tma" and (s.m, s.n) not in known]
                tiles += fitted(shape.m, lying.a.dtype.itemsize, target)
                reads = any(op.opcode == "load" for op in lying.parallel.regions[0].ops)
                if lying.a.dtype.itemsize == 2 and "phase" not in kernel.attrs and not reads:
                    tiles += [turned_out(s, target) for s in tiles if s.swap_ab and s.store == "direct" and s.n % 16 == 0 and not is_crowded(s)]
            candidates = [_with_copies(s, ways) for s in tiles if _in_blocks(lying, s, ways, inner)]
            candidates = [replace(s, inner=inner, apart=apart) for s in candidates if s.b_copy != "im2col"]
            candidates = [s for s in candidates if s.a_copy != "im2col" or (s.cluster == 1 and _is_roomy(s, lying))]
            pixels = [(s, tile_count(s, shape)) for s in candidates if s.a_copy == "im2col"]
            candidates += [shared for s, count in pixels for shared in (*sharing_sums(s, count, shape.k, target), *streaming(s, count, target))]
            raw = raw_of(kernel, lying, lying.a, inner), raw_of(kernel, lying, lying.b, inner)
            # Of convolutions, and of factors computed in registers, nobody has measured what an early launch does.
            both = [(s, replace(s, pdl=s.a_copy != "im2col")) for s in candidates]
            pixel = PixelReads()
            if inner >= 0:
                # Steps are whole for every place of the window.
                channels = number_of(lying.reduce_extents[inner], hints)
                step = 128 // lying.a.dtype.itemsize
                taps = shape.k // max(1, channels)
                pixel = PixelReads(max(1, taps), taps * (-channels % step))
                shape = replace(shape, k=shape.k + pixel.empty)
            candidates = [min(pair, key=lambda s: cost(s, shape, target, lying, raw)) for pair in both]
            candidates += [replace(s, inner=inner, apart=apart) for s in _from_registers(lying, shape, target, ways, raw, inner)]
            return [(cost(s, shape, target, lying, raw, pixel=pixel), s) for s in candidates]
    return []


def _triangular(kernel: Kernel, found: Contraction, target: Target, hints: Mapping[str, int]) -> Ranked:
    """Schedules of warp-group instructions for a product of which a triangle counts, best first: factors that have a guard are packed with zeros where it does
    not hold, and blocks skip what is empty for all of their tile."""
    if not has_warp_groups(kernel, found, target):
        return []
    ways = ["pack" if factor.guard is not None else _way(kernel, found, factor, -1) for factor in (found.a, found.b)]
    if "" in ways or "im2col" in ways or not all(way != "pack" or packable(found, f, -1) for way, f in zip(ways, (found.a, found.b), strict=True)):
        return []
    shape, left = shape_of(found, hints), SKIPPED[sum(1 for f in (found.a, found.b) if f.guard is not None)]
    tiles = [replace(s, persistent=False) for s in wgmma_tiles(found, shape, target) if _in_blocks(found, s, ways, -1)]
    ranked: Ranked = []
    for s in tiles:
        if s.skips and s.store == "tma":
            plain, packed = (cost(_with_copies(s, own), shape, target, found) for own in (["tma", "tma"], ways))
            ranked.append((_part_left(s, shape, target, left) * plain + packed - plain, _with_copies(s, ways)))
    return sorted(ranked, key=lambda pair: pair[0])


def terms_schedules(kernel: Kernel, found: Contraction, target: Target, hints: Mapping[str, int]) -> Ranked:
    """Schedules of warp-group instructions for factors of f32 as terms of bf16, and their times, best first."""
    if "wgmma" not in target.features or kernel.attrs.get("precision") is not None or not has_terms(found) or not found.k_size.names <= hints.keys():
        return []
    whole = shape_of(found, hints)
    if min(whole.m, whole.n) <= 16 or whole.k < SHORTEST:
        return []
    form = terms_form(kernel)
    assert form is not None
    product_of_terms = find_contraction(form.kernel)
    assert product_of_terms is not None
    shape = shape_of(product_of_terms, hints)
    costs, launch = target.costs.wgmma, target.costs.launch
    written = 0.0
    for (memory, _), source in zip(form.scratch, form.sources, strict=True):
        assert isinstance(memory.type, Tensor)
        size = number_of(product(memory.type.shape), hints) / costs.stream
        written += launch.second + size * TERM_BYTES if source is None else size * MADE_TERM_BYTES
    listed = [own for tile in TERM_TILES for own in in_parts(tile, shape, target)]
    bounds, used = sum_bounds(product_of_terms, form.inner), result_bounds(product_of_terms)
    if bounds or used:
        halves = [s for s in listed if s.split_k == 1 and is_half(product_of_terms, (s.m, s.n), kernel)]
        # Blocks of one tile each balance sums of different lengths. Of three warp groups threads have no registers left for where these end.
        others = [replace(s, persistent=s.split_k > 1) for s in listed if s not in halves and (s.split_k > 1 or s.math_warpgroups < 3)]
        listed = [*halves, *others]
    product_of_terms = product_of_terms.unguarded()
    both = [(s, replace(s, pdl=True)) for s in listed if _in_blocks(product_of_terms, s, ["tma", "tma"], form.inner) and s.has_room(target)]
    some = bool(bounds or used)
    parts = {s: _part_left(s, shape, target, steps_left(product_of_terms, bounds, used, s, hints)) if some and s.split_k == 1 else 1.0 for pair in both for s in pair}
    ranked = [(part * (cost(s, shape, target, product_of_terms) / costs.chunked + _exposed(s, shape, target)) + written, s) for s, part in parts.items()]
    return sorted(ranked, key=lambda pair: pair[0])


def _exposed(schedule: Wgmma, shape: ProductShape, target: Target) -> float:
    """What blocks of one tile each wait for their first operands and for their last results to leave."""
    return 0.0 if schedule.persistent else EXPOSED * -(-tile_count(schedule, shape) // target.multiprocessors)


def _part_left(schedule: Wgmma, shape: ProductShape, target: Target, left: float) -> float:
    """The part of its time that a product takes of which so much is left: as long as the longest tile takes, and as what is left of all of them."""
    tiles = tile_count(schedule, shape)
    rounds = left * tiles / target.multiprocessors
    # Tiles of persistent blocks are alike.
    return (ceil(rounds) if schedule.persistent else max(1.0, rounds + UNEVEN)) / max(1, -(-tiles // target.multiprocessors))


def _turned(kernel: Kernel, whole: Contraction, target: Target, hints: Mapping[str, int]) -> Ranked:
    """Schedules for a convolution whose images are turned before it or after it, so that channels lie last."""
    ranked: Ranked = []
    for way, turns in turns_of(kernel, whole).items():
        turned = turned_kernel(kernel, way)
        found = find_contraction(turned)
        if found is None:
            continue
        moved = _turns_time(turns, target, hints)
        own = _by_warp_groups(turned, found, target, hints, _channel(found, hints))
        ranked += [(time + moved, replace(s, to_channels_last=way)) for time, s in own if s.a_copy == "im2col" and _is_roomy(s, found, way != "image")]
    return ranked


def turning_time(kernel: Kernel, way: str, target: Target, hints: Mapping[str, int]) -> float:
    """Microseconds of the copies that a schedule's `to_channels_last` asks for."""
    return _turns_time(turns_of(kernel)[way], target, hints)


def _turns_time(turns: Sequence[Turn], target: Target, hints: Mapping[str, int]) -> float:
    moved = 0.0
    for turn in turns:
        memory = turn.memory.type
        assert isinstance(memory, Tensor)
        moved += target.costs.launch.second
        moved += 2 * number_of(product(memory.shape), hints) * memory.dtype.itemsize / target.costs.wgmma.turn
    return moved


def _in_rows(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> Ranked:
    """Schedules for a convolution of few channels that counts the row of a window as channels, where sums have fewer steps than with a pixel's channels alone."""
    ranked: Ranked = []
    for way, folded, form in row_forms(kernel):
        if number_of(form.channels, hints) >= MANY_CHANNELS:
            return []
        depth, taps = number_of(form.depth, hints), number_of(form.taps_along(form.axis), hints)
        steps = -(-depth // STEP)
        if not steps or steps > FEWER_STEPS * taps * -(-number_of(form.channels, hints) // STEP):
            continue
        rows = form.image_rows(0)
        main = form.convolution(form.overlapping(rows), form.weight_rows(1))
        found = find_contraction(main)
        if found is None:
            continue
        assert isinstance(rows.type, Tensor) and form.image.tensor is not None
        elements = sum(number_of(product(shape), hints) for shape in (rows.type.shape, form.image.tensor.shape))
        moved = 2 * target.costs.launch.second + elements * rows.type.dtype.itemsize / (target.costs.wgmma.turn if WAYS[way] else target.costs.wgmma.gather)
        if way == "image_gather":
            assert form.image.tensor is not None
            moved += target.costs.launch.second + 2 * number_of(product(form.image.tensor.shape), hints) * rows.type.dtype.itemsize / target.costs.wgmma.turn
        # Phases of a transposed convolution would share an image that is turned, but have rows of their own. Such a copy takes twice the time of one that turns: 32 µs instead of 16 for 18 MB.
        moved *= 2 if "phase" in kernel.attrs else 1
        apart = number_of(form.pitch(rows.type.shape[-1]), hints)
        shape = shape_of(found, hints)
        shape = replace(shape, k=shape.k // max(1, depth) * steps * STEP)
        own = [s for _, s in _by_warp_groups(main, found, target, hints, len(found.k) - 1) if s.a_copy == "im2col" and s.split_k == 1 and _is_roomy(s, found)]
        ranked += [(_rows_time(s, shape, target, found, apart, depth) + moved, replace(s, to_channels_last=way, folded=folded)) for s in own]
    return ranked


def _rows_time(schedule: Wgmma, shape: ProductShape, target: Target, found: Contraction, apart: int, depth: int) -> float:
    """Microseconds of a convolution by rows of windows, of `depth` channels each, that lie `apart` elements from one another. Sums are whole steps."""
    costs, area = target.costs.wgmma, schedule.m * schedule.n
    rounds, steps = rounds_of(schedule, shape, target), -(-shape.k // (STEP * schedule.cluster_k))
    rate = costs.tile_rates.get((schedule.m, schedule.n, schedule.pingpong, 1), costs.other_tiles) if schedule.n % 64 == 0 else rate_between(schedule, costs)
    lines = 1.0 if apart % STEP == 0 else costs.straddling[int(apart % 16 != 0)]
    feed = (schedule.m * lines + schedule.n) * ROW_BYTES / costs.rows[0] * (costs.rows_in_turns if schedule.pingpong else 1.0)
    whole = -(-depth // STEP) * STEP
    outside = shape.k // whole * schedule.m * (whole - depth) * found.a.dtype.itemsize / costs.rows[1] / schedule.cluster_k
    main = rounds * (steps * max(2 * area * STEP / (costs.rate * rate) + costs.pixels, feed) + outside)
    return costs.start + main + finishing(schedule, finishing_work(found), ceil(rounds), costs) + exchange(schedule, shape, target)


_IMAGE_TILES = {(128, 2): (120, (128, 96, 64, 32)), (192, 3): (80, (128, 64)), (256, 2): (56, (64, 32))}
"""Rows and computing groups of tiles of convolutions in parts of tf32: the most columns that fit the filters at hand, and columns for any number of filters. A thread has two
levels of sums, and a stage two tiles of each factor."""
IMAGE_ROOM = 200 << 10
"""Bytes of shared memory for stages."""
IMAGE_STEP, IMAGE_PART = 32, 8
"""Channels of one step, at most, and of one instruction. Matrix units add up a step's products of each kind from zero: their sums drop bits, and the error of a chain in f32 is
the bound."""


def image_schedules(kernel: Kernel, whole: Contraction, target: Target, hints: Mapping[str, int]) -> Ranked:
    """Schedules for a convolution of f32 as products of parts of tf32, which copies make first, and their times, best first."""
    sizes = shape_of(whole, hints)
    if "wgmma" not in target.features or precision_of(kernel, whole.a.dtype, sizes.k) != "3xtf32" or min(sizes.m, sizes.n) <= THIN:
        return []
    whole_form = image_form(kernel, whole)
    if whole_form is None:
        return []
    terms = 4 if sizes.k < SHORT_TERMS else 3
    ranked: Ranked = []
    few = bool(number_of(whole_form.channels, hints) % IMAGE_STEP)
    for folded, way in [*((folded, "") for folded in _foldings(whole_form, hints)), *((0, way) for way in OVERLAPPING if few)]:
        form = parts_form(kernel, folded, way, whole)
        if form is not None:
            ranked += _image_ranked(form, terms, folded, way, target, hints)
    return sorted(ranked, key=lambda pair: pair[0])


def _foldings(form: ImageForm, hints: Mapping[str, int]) -> list[int]:
    """Which axes may be worth folding into channels, as bits: those along which windows leave places out, and one more where channels are few."""
    places = {axis: 1 << number for number, axis in enumerate(form.order[1:-1])}
    foldable = form.foldable
    sparse = sum(places[axis] for axis in foldable if form.step(axis) > number_of(form.taps_along(axis), hints))
    few = number_of(form.channels, hints) % IMAGE_STEP or IMAGE_STEP
    others = [sparse | places[axis] for axis in foldable if number_of(form.taps_along(axis), hints) > 1] if few < IMAGE_STEP else []
    return list(dict.fromkeys((0, sparse, *others)))


def _image_ranked(form: ImageForm, terms: int, folded: int, way: str, target: Target, hints: Mapping[str, int]) -> Ranked:
    """Schedules of one way to lay out parts, with their times."""
    image_parts, weight_parts = form.image_parts(0), form.weight_parts(1)
    seen = form.seen(image_parts)
    main = form.main(terms, seen, weight_parts)
    found = find_contraction(main)
    if found is None:
        return []
    swap = isinstance(found.b.load, Op) and found.b.load.operands[0] is seen
    pixels, inner = (found.b if swap else found.a), len(found.k) - 1
    lies = image(found, pixels)
    if lies is None or lies.channel != inner or not _in_reach(found, pixels, hints):
        return []
    shape = shape_of(found, hints)
    whole, divided, along = target.costs.wgmma.parts
    rate = target.costs.wgmma.turn if way else whole if form.depth == form.channels else along if form.turns_last else divided
    assert isinstance(image_parts.type, Tensor) and isinstance(weight_parts.type, Tensor)
    weights = number_of(product(weight_parts.type.shape), hints)
    elements = number_of(product(image_parts.type.shape), hints) + number_of(form.read, hints) + 1.5 * weights
    moved = 2 * target.costs.launch.second + 4 * elements / rate
    moved *= 2 if way and "phase" in form.kernel.attrs else 1  # phases would share parts of the image as it is, but have rows of their own
    store = "direct" if swap else "tma"
    # Steps of a place of the window are alike, and as short as instructions allow; what they read lies in the L2 cache, into which every pixel comes once.
    channels = number_of(found.reduce_extents[inner], hints)
    steps = -(-channels // IMAGE_STEP)
    step = -(-channels // (max(1, steps) * IMAGE_PART)) * IMAGE_PART
    like = Wgmma(128, 128, step, epilogue_stages=1, inner=inner, swap_ab=swap, store=store, a_copy="im2col", tf32_terms=terms, folded=folded, to_channels_last=way, chunk=step)
    # Columns of results that leave registers one by one may be as many as there are filters.
    tiles = _image_tiles(like, fitting(shape.m, THIN + 8) if swap else [])
    # Windows' rows that begin anywhere in 32 bytes take longer to bring.
    assert isinstance(seen.type, Tensor)
    slower = target.costs.wgmma.straddling_parts if way and number_of(seen.type.strides[-2], hints) % UNIT else 1.0
    return [(slower * _image_time(s, replace(shape, k=shape.k // max(1, channels) * steps * step), target) + moved, s) for s in tiles]


def _image_tiles(like: Wgmma, fitting: list[int]) -> list[Wgmma]:
    """Tiles for any number of filters, and those whose columns fit, as far as registers have room."""
    tiles = [replace(like, m=m, n=n, math_warpgroups=groups) for (m, groups), (most, columns) in _IMAGE_TILES.items() for n in (*columns, *(n for n in fitting if n <= most))]
    return [replace(s, stages=min(5, IMAGE_ROOM // ((s.m + s.n) * 2 * ROW_BYTES))) for s in tiles]


def _image_time(schedule: Wgmma, shape: ProductShape, target: Target) -> float:
    """Microseconds of a convolution in parts, without the copies that make these."""
    costs, area = target.costs.wgmma, schedule.m * schedule.n
    rounds = -(-tile_count(schedule, shape) // target.multiprocessors)
    # Instructions with few columns wait for shared memory, which brings 64 rows for each.
    rate = costs.rate / 2 * costs.parted * schedule.n / (schedule.n + 32)
    # Pixels come as slowly as rows of windows do, and where only the next step is on its way, later.
    feed = (schedule.m + schedule.n) * shape.k / schedule.k * ROW_BYTES / schedule.tf32_terms * schedule.parts / costs.rows[0]
    feed *= 1.0 if schedule.stages > 2 else costs.shallow
    finish = 2 * 64 * area / costs.rate + area * (costs.scatter if schedule.swap_ab else costs.finish)
    return costs.start + rounds * (max(2 * area * shape.k / rate, feed) + finish + costs.first * schedule.m / 128)


def _is_roomy(schedule: Wgmma, found: Contraction, across: bool = False) -> bool:
    """Whether the threads that multiply pixels have registers left for places of results and for what these are combined with. Elements
    of arrays that lie `across` have an address each; results that do so themselves (`swap`) leave no room for a bias either."""
    results = schedule.rows * schedule.n
    reads = schedule.swap_ab and any(op.opcode == "load" for op in found.parallel.regions[0].ops)
    if results <= ROOMY and not (reads and schedule.math_warpgroups > 2):
        return True
    if reads:
        return False
    return results <= 2 * ROOMY and not (across and finishing_work(found).arrays)


def warp_group_time(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> float | None:
    """Microseconds the best schedule of warp-group instructions is thought to take; None where there is none."""
    found = find_contraction(kernel)
    if found is None or not has_warp_groups(kernel, found, target):
        return None
    return min((time for time, _ in _by_warp_groups(kernel, found, target, hints, _inner(found, hints))), default=None)


def has_warp_groups(kernel: Kernel, found: Contraction, target: Target) -> bool:
    """Whether warp-group instructions multiply its factors."""
    return "wgmma" in target.features and _multiplies(found, str(kernel.attrs.get("precision", "ieee")))


def is_copied(kernel: Kernel, found: Contraction) -> bool:
    """Whether the copy engine brings both factors as they lie."""
    return all(_way(kernel, found, factor, -1) == "tma" for factor in (found.a, found.b))


def tiles_of(found: Contraction, shape: ProductShape, target: Target) -> list[Wgmma]:
    """Tiles for a contraction of these sizes, with nothing said of how operands lie."""
    return wgmma_tiles(found, shape, target)


def fits_blocks(found: Contraction, schedule: Wgmma) -> bool:
    """Whether factors that the copy engine brings in blocks of 128 bytes have whole ones in the tile."""
    return _in_blocks(found, schedule, [schedule.a_copy, schedule.b_copy], -1)


def _by_warps(
    kernel: Kernel, found: Contraction, target: Target, hints: Mapping[str, int], inner: int
) -> tuple[MatrixSchedule, ...]:
    """Schedules any GPU of the family has."""
    shape = shape_of(found, hints)
    return tuple(replace(s, inner=inner) for s in mma_schedules(kernel, found, target, shape.batch, shape.m, shape.n, shape.k))


def forced(text: str, listed: tuple[MatrixSchedule, ...], kernel: Kernel, target: Target) -> MatrixSchedule:
    """The schedule somebody asked for. How operands are brought is kept from the choice, for it must fit them; what cannot be is refused."""
    asked = parse_schedule(text)
    if any(isinstance(s, CpuProduct) and s.unpack for s in listed):
        form = unpacked_form(kernel, rounds=False)
        assert form is not None
        own = forced(text, tuple(replace(s, unpack=False) for s in listed if isinstance(s, CpuProduct)), form.kernel, target)
        assert isinstance(own, CpuProduct)
        return replace(own, unpack=True)
    if any(isinstance(s, GpuProduct) and s.unpack for s in listed) and not any(s.family == asked.family for s in listed if not isinstance(s, GpuProduct)):
        form = unpacked_form(kernel)
        assert form is not None
        chosen = forced(text, tuple(replace(s, unpack=False) for s in listed if isinstance(s, GpuProduct)), form.kernel, target)
        assert isinstance(chosen, GpuProduct)
        if chosen.b_copy != "packed":
            return replace(chosen, unpack=True)
        if not isinstance(chosen, Mma) or not can_bring_packed(kernel, chosen.k):
            raise UserError.at(
                "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
                "b_copy=packed is for family=mma, factors of f16 or bf16 and packed weights along the results' columns, in whole steps of k",
            )  # fmt: skip
        return chosen
    alike = [s for s in listed if s.family == asked.family]
    if not alike:
        families = ", ".join(dict.fromkeys(s.family for s in listed))
        raise UserError.at(
            "TW020", f"schedule '{text}': {kernel.name} cannot be computed with family={asked.family} here", kernel.span,
            f"it can with {families}",
        )  # fmt: skip
    if isinstance(asked, Gemv):
        like = next(s for s in alike if isinstance(s, Gemv))
        asked = replace(asked, m_index=like.m_index, n_index=like.n_index)
        if asked.unit != like.unit or (asked.stage_x and not can_stage(kernel)):
            raise UserError.at(
                "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
                f"lanes take {like.unit} elements of these rows together; stage_x is for packed rows whose units are neighbours (q4_k, q8_0)",
            )  # fmt: skip
    contraction = find_contraction(kernel)
    if reason := asked.refusal(target, contraction.a.dtype if contraction is not None else f32):
        raise UserError.at("TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span, reason)
    if isinstance(asked, Wgmma):
        return _forced_wgmma(text, asked, [s for s in alike if isinstance(s, Wgmma)], kernel, target)
    if isinstance(asked, CpuPanels) and asked.half and not (contraction is not None and is_symmetric(contraction) and asked.keep == "b"):
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
            "half is for symmetric products, whose factors are one expression of rows and of columns, with keep=b",
        )  # fmt: skip
    if isinstance(asked, GpuProduct):
        return replace(asked, inner=next(s.inner for s in alike if isinstance(s, GpuProduct)))
    return asked


def _forced_wgmma(text: str, asked: Wgmma, listed: list[Wgmma], kernel: Kernel, target: Target) -> Wgmma:
    if asked.tf32_terms:
        form = parts_form(kernel, asked.folded, asked.to_channels_last) if any(s.tf32_terms for s in listed) else None
        for _, s in _image_ranked(form, asked.tf32_terms, asked.folded, asked.to_channels_last, target, {}) if form is not None else []:
            return replace(asked, a_copy=s.a_copy, b_copy=s.b_copy, inner=s.inner, swap_ab=s.swap_ab, store=s.store)
        raise UserError.at("TW020", f"schedule '{text}': {kernel.name} is no convolution of f32 that copies bring to parts so", kernel.span, "leave tf32_terms out; folded has a bit for each axis of the image")
    if any(bool(s.bf16_terms) != bool(asked.bf16_terms) for s in listed):
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
            "bf16_terms=6 is for products of f32 with the default precision, which have no family=wgmma without it",
        )  # fmt: skip
    alike = [s for s in listed if (s.to_channels_last, s.folded) == (asked.to_channels_last, asked.folded) and not s.tf32_terms]
    if not alike:
        raise UserError.at(
            "TW020", f"schedule '{text}': {kernel.name} has no images to bring to channels last that way", kernel.span,
            "to_channels_last=image is for a convolution whose input lies channels first, =result for one whose results do, =both for both, =rows and =gather for one of few channels",
        )  # fmt: skip
    computed = asked.a_copy == "rs"
    like = next((s for s in alike if s.swap_ab == asked.swap_ab and (s.a_copy == "rs") == computed), None)
    if like is None and computed:
        raise UserError.at(
            "TW020", f"schedule '{text}': the {'second' if asked.swap_ab else 'first'} factor of {kernel.name} cannot be computed in registers",
            kernel.span, "it can where it is computed from an array whose rows run along the sum, with whole 16 bytes from one to the next",
        )  # fmt: skip
    if like is None:
        other = next(s for s in alike if s.a_copy != "rs")
        like = replace(other, a_copy=other.b_copy, b_copy=other.a_copy)
    schedule = replace(asked, a_copy=like.a_copy, b_copy=like.b_copy, inner=like.inner, apart=like.apart)
    contraction = find_contraction(_copied(kernel, schedule.to_channels_last, schedule.folded))
    assert contraction is not None
    lying = contraction.apart() if schedule.apart else contraction
    ways = [schedule.b_copy, schedule.a_copy] if schedule.swap_ab else [schedule.a_copy, schedule.b_copy]
    if not _in_blocks(lying, schedule, ways, schedule.inner) or schedule.b_copy == "im2col":
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span, "factors that lie across the sum need whole blocks of 128 bytes"
        )
    return schedule


def _copied(kernel: Kernel, way: str, folded: int) -> Kernel:
    """The kernel as it is once images have been copied that way."""
    if way in WAYS:
        return rows_kernel(kernel, way, folded)
    return turned_kernel(kernel, way) if way else kernel


def _multiplies(found: Contraction, precision: str) -> bool:
    """Whether warp-group instructions multiply what is multiplied here."""
    dtype = found.a.dtype
    if dtype is not found.b.dtype or dtype not in MATRIX_DTYPES or accumulator_dtype(dtype) is not found.accumulator:
        return False
    return dtype is not f32 or precision == "tf32"


def _inner(found: Contraction, hints: Mapping[str, int]) -> int:
    """Of several summed indices the one to cut into steps: the longest, if it is long enough."""
    lengths = [e.evaluate(hints) if e.names <= hints.keys() else LARGE for e in found.reduce_extents]
    if len(lengths) == 1 or max(lengths) < SHORT_SUM:
        return -1
    return max(range(len(lengths)), key=lambda p: (lengths[p], p))


def _channel(found: Contraction, hints: Mapping[str, int]) -> int:
    """The summed index to cut into steps where pixels come with all of their channels: these, also if they are few."""
    for factor in (found.a, found.b):
        lies = image(found, factor)
        if lies is not None and number_of(found.reduce_extents[lies.channel], hints) >= FEW_CHANNELS:
            return lies.channel
    return _inner(found, hints)


def _way(kernel: Kernel, found: Contraction, factor: Factor, inner: int) -> str:
    """How a factor gets to shared memory: as it lies, as pixels, or packed first."""
    if _copyable(kernel, found, factor, inner):
        return "tma"
    lies, tensor = image(found, factor), factor.tensor
    if lies is not None and tensor is not None and lies.channel == inner and _aligned(kernel, tensor):
        return "im2col"
    return "pack" if packable(found, factor, inner) else ""


def _in_reach(found: Contraction, factor: Factor, hints: Mapping[str, int]) -> bool:
    """Whether an image's positions, as far as they are known, are within what the copy engine can be told."""
    lies, tensor = image(found, factor), factor.tensor
    assert lies is not None and tensor is not None
    least, most = CORNERS[tensor.rank]
    for axis, pixel in enumerate(lies.pixels):
        step, first, offset = lies.steps[axis], lies.lower[axis], lies.offsets[axis]
        last = ((found.extents[pixel] if pixel is not None else ONE) - 1) * step + first - (tensor.shape[1 + axis] - 1)
        corners = [first, *([last.evaluate(hints)] if last.names <= hints.keys() else [])]
        places = found.reduce_extents[offset] if offset is not None else ONE
        far = (number_of(places, hints) - 1) * lies.dilations[axis] if places.names <= hints.keys() else 0
        if step > STEPS or far > MOST_OFFSET[tensor.rank] or not all(least <= c <= most for c in corners):
            return False
    return True


def _in_blocks(found: Contraction, schedule: Wgmma, ways: list[str], inner: int) -> bool:
    """A factor whose rows run across the sum comes in blocks of 128 bytes: the tile must have whole ones."""
    # The blocks of a cluster bring a part each of the tile's rows.
    part = schedule.m // schedule.cluster
    extents = (schedule.n, part) if schedule.swap_ab else (part, schedule.n)
    for factor, way, extent in zip((found.a, found.b), ways, extents, strict=True):
        tensor = factor.tensor
        if way != "tma" or tensor is None or extent * tensor.dtype.itemsize % 128 == 0:
            continue
        lies = plane(found, factor, inner)
        if lies is not None and lies.k != tensor.rank - 1:
            return False
    return True


def _with_copies(schedule: Wgmma, ways: list[str]) -> Wgmma:
    first, second = reversed(ways) if schedule.swap_ab else ways
    return replace(schedule, a_copy=first, b_copy=second)


def _copyable(kernel: Kernel, found: Contraction, factor: Factor, inner: int, across: bool = False) -> bool:
    """Whether the copy engine reads a factor as it lies; `across`: whichever way that is."""
    lies, tensor = plane(found, factor, inner), factor.tensor
    if lies is None or tensor is None or tensor.rank > 5 or not _aligned(kernel, tensor):
        return False
    last = tensor.rank - 1
    if lies.k != last and (lies.row != last or (tensor.dtype.itemsize != 2 and not across)):
        return False
    # Copies begin at whole 16 bytes.
    form, step = found.access(factor)[last], 16 // tensor.dtype.itemsize
    moving = {*found.k, *found.indices}
    shifts = [form.constant, *(f for v, f in form.factors if f != ONE or v not in moving)]
    alone = sum(1 for _, f in form.factors if f == ONE) == 1
    return alone and all(divisors.of_size(x, kernel.facts) % step == 0 for x in shifts)


def _aligned(kernel: Kernel, tensor: Tensor) -> bool:
    """Whether the copy engine can read it: neighbours along the last axis, everything else 16 bytes apart."""
    if tensor.align < 16 or tensor.strides[-1] != ONE:
        return False
    size = tensor.dtype.itemsize
    return all(divisors.of_size(x, kernel.facts) * size % 16 == 0 for x in tensor.strides[:-1])


def raw_of(kernel: Kernel, found: Contraction, factor: Factor, inner: int) -> Raw | None:
    """What a factor is computed from, where warp groups can do it in registers: what has its size can be copied in rows along the sum (f32
    also across it), and all else is the same for a row, a column, or a step."""
    if factor.guard is not None or (factor.load is not None and _way(kernel, found, factor, inner) != "pack"):
        return None
    made = {result: op for op in walk(found.parallel.regions[0]) for result in op.results}
    rows = {found.indices[p] for p in (found.m if factor is found.a else found.n)}
    total, groups = 0, False
    waiting, seen = [factor.value], set[Value]()
    while waiting:
        value = waiting.pop()
        op = made.get(value)
        if op is None or value in seen:
            continue
        seen.add(value)
        if op.regions or op.attrs.get("masked"):
            return None
        if op.opcode != "load":
            waiting += op.operands
            continue
        as_factor = replace(factor, value=value, dtype=dtype_of(value.type), load=op)
        lying = replace(found, a=as_factor) if factor is found.a else replace(found, b=as_factor)
        lies, tensor = plane(lying, as_factor, inner), as_factor.tensor
        assert tensor is not None
        if lies is not None:
            across = tensor.rank - 1 == lies.row and factor.dtype is f32 and tensor.dtype is f32
            if not (lies.k == tensor.rank - 1 or across) or not _copyable(kernel, lying, as_factor, inner, across):
                return None
            total += tensor.dtype.itemsize
            continue
        depends = [_sources(v, made) for v in op.operands[1:]]
        if any(rows & d for d in depends) and any(set(found.k) & d for d in depends):
            walking = [v for v, d in zip(op.operands[1:], depends, strict=True) if set(found.k) & d]
            if not all(_by_groups(v, found, made, 128 // factor.dtype.itemsize) for v in walking):
                return None
            groups = True
    return Raw(total, groups) if total else None


def _sources(value: Value, made: Mapping[Value, Op]) -> set[Value]:
    """All values an index is made of."""
    found, waiting = set[Value](), [value]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            waiting += made[value].operands if value in made else ()
    return found


def _by_groups(value: Value, found: Contraction, made: Mapping[Value, Op], step: int) -> bool:
    """Whether an index is the number of a group along the sum that is made of whole steps."""
    op = made.get(value)
    if op is None or op.opcode != "floordiv" or op.operands[0] not in found.k:
        return False
    size = found.forms[op.operands[1]]
    return not size.factors and size.constant.constant is not None and size.constant.constant % step == 0


def _from_registers(
    found: Contraction, shape: ProductShape, target: Target, ways: list[str], raw: Raws, inner: int
) -> list[Wgmma]:
    """Schedules whose first factor is computed by the warp groups that multiply it: factors are exchanged where that is the second one."""
    candidates: list[Wgmma] = []
    for swap, factor, made_of, way in ((False, found.a, raw[0], ways[1]), (True, found.b, raw[1], ways[0])):
        if made_of is None or way == "im2col":
            continue
        for s in wgmma_tiles(found, shape, target):
            given = replace(s, swap_ab=swap) if (s.m, s.n) in SHAPES else s
            rows = given.m // given.math_warpgroups
            # Taking turns leaves nobody to multiply while words are computed; parts of a sum need masks in every step.
            if given.pingpong or given.split_k > 1 or given.swap_ab != swap or given.cluster > 1 or rows * given.n > 128 * 128 + 64 * 128 * (given.math_warpgroups == 1):
                continue
            # What is left beside the results on their way out.
            room = target.max_shared - 1280 - (given.math_warpgroups * given.epilogue_stages * 64 * 128 if given.store == "tma" else 0)
            stages = min(max(given.stages, 4), room // (given.k * (given.m * made_of.bytes + given.n * factor.dtype.itemsize)))
            whole = replace(given, stages=stages, mma_in_flight=0, a_copy="rs", b_copy=way)
            if stages >= FEWEST and _in_blocks(found, whole, [way, "rs"] if swap else ["rs", way], inner):
                candidates.append(whole)
    return candidates


TERM_BYTES = 3.2
"""Moved for each element of terms, about, beside what the product reads: terms are written, f32 is read, and writing is slower than reading."""
MADE_TERM_BYTES = 1.0
"""The same where what makes a factor writes its terms, instead of f32."""
FEWEST = 4
"""Stages a factor computed in registers needs: two steps hold theirs at once."""
ROOMY = 64 * 128
"""Results of a warp group that multiplies pixels beside which its threads hold addresses without spilling; twice as many without these."""


