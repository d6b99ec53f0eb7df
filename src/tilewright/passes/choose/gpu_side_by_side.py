"""Products side by side on a GPU: schedules, and the times they are thought to take.

In: a kernel with several products of the same rows, or the calls that would become one. Out: ranked schedules, and microseconds. `horizontal_fusion.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.contraction import Contraction, find_contraction
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.program import Program
from tilewright.ir.types import dtype_of
from tilewright.passes.choose import mma as choose_mma
from tilewright.passes.choose.epilogue_work import EpilogueWork, finishing_work
from tilewright.passes.choose.gemv import gemv_cost, gemv_schedules, work_of
from tilewright.passes.choose.matrix import fits_blocks, is_copied, tiles_of, warp_group_time
from tilewright.passes.choose.mma import mma_schedules
from tilewright.passes.choose.row_dots import find_row_dots
from tilewright.passes.choose.wgmma_tiles import ProductShape, cost, shape_of
from tilewright.passes.common.fusion_report import Refused
from tilewright.passes.program.fuse_horizontally import Join, joined_kernel
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import Fma, MatrixSchedule, WarpProduct, Wgmma
from tilewright.passes.schedules.plans import Plans

NARROWEST = 32
"""Columns of one product that a tile of warp-group instructions has at least: they leave in rows of 128 bytes."""
Ranked = list[tuple[float, MatrixSchedule]]
"""Schedules and the microseconds they are thought to take."""


def few_rows(program: Program, join: Join, plans: Plans, target: Target, sizes: Mapping[str, int]) -> Gemv | Refused:
    """The schedule of products with few rows as one kernel, or why they stay apart. One kernel is one launch, and x is read once."""
    first, second = (next(op.span for op in walk(program.calls[n].kernel.body) if op.opcode == "reduce") for n in join.members[:2])
    kernel = joined_kernel(program, join)
    ranked, found = gemv_schedules(kernel, target, sizes), find_row_dots(kernel, sizes)
    if not ranked or found is None:
        return Refused(join.shared, first, second, f"no registers of {target.name} hold {len(join.members)} products of few rows side by side")
    together = gemv_cost(ranked[0], work_of(found, sizes, target), target)
    apart = target.costs.launch.second * (len(join.members) - 1)
    for number in join.members:
        plan, alone = plans[number], find_row_dots(program.calls[number].kernel, sizes)
        assert isinstance(plan, Gemv)
        assert alone is not None
        apart += gemv_cost(plan, work_of(alone, sizes, target), target)
    if together >= apart:
        times = f"one kernel would take {together:.1f} µs, {len(join.members)} take {apart:.1f}"
        return Refused(join.shared, first, second, f"not one product beside the other: {times} by the cost model")
    return replace(ranked[0], horizontal=len(join.members))


def is_alone(schedule: Wgmma) -> bool:
    """Whether a block computes whole sums as they lie, for results that the copy engine writes: so products can be beside each other."""
    cuts = (schedule.split_k, schedule.cluster_k, schedule.cluster)
    return cuts == (1, 1, 1) and not schedule.swap_ab and not schedule.stream_k and schedule.store == "tma"


def _whole(products: Sequence[Contraction], sizes: Mapping[str, int]) -> ProductShape:
    """The sizes of all products as one."""
    shape = shape_of(products[0], sizes)
    return replace(shape, n=len(products) * shape.n)


def _work(products: Sequence[Contraction]) -> EpilogueWork:
    """What happens to a result once the sums are known, on average."""
    whole = finishing_work(products[0], [found.reduction for found in products])
    return EpilogueWork(whole.instructions / len(products), whole.arrays / len(products))


def by_warp_groups(kernel: Kernel, products: Sequence[Contraction], target: Target, sizes: Mapping[str, int]) -> Ranked:
    count, found, work = len(products), products[0], _work(products)
    if not all(is_copied(kernel, product) for product in products):
        return []
    whole = _whole(products, sizes)
    ranked: Ranked = []
    for tile in tiles_of(found, whole, target):
        own = replace(tile, n=tile.n // count, horizontal=count)
        if not is_alone(tile) or tile.n % count or own.n % _narrowest(products) or not fits_blocks(found, own):
            continue
        for early in (False, True):
            ranked.append((cost(replace(tile, pdl=early), whole, target, found, work=work), replace(own, pdl=early)))
    return ranked


def _narrowest(products: Sequence[Contraction]) -> int:
    """Columns of which results are whole rows of 128 bytes."""
    stores = [op for found in products for op in found.parallel.regions[0].ops if op.opcode == "store"]
    return max(NARROWEST, 128 // min(dtype_of(op.operands[-1].type).itemsize for op in stores))


def by_warps(kernel: Kernel, products: Sequence[Contraction], target: Target, sizes: Mapping[str, int]) -> Ranked:
    """The same for instructions of single warps and for plain multiply-adds."""
    count, found, whole = len(products), products[0], _whole(products, sizes)
    work = _mma_work(kernel, found, whole)
    part = 1 << (count - 1).bit_length()
    ranked: Ranked = []
    for tile in mma_schedules(kernel, found, target, whole.batch, whole.m, whole.n, whole.k):
        own = _narrowed(tile, tile.n // part, found)
        if own is None or tile.split_k > 1 or "pack" in (tile.a_copy, tile.b_copy):
            continue
        time = choose_mma.cost(replace(own, n=own.n * count), target, work, choose_mma.turned(found, tile))
        ranked.append((time, replace(own, horizontal=count)))
    return ranked


def _narrowed(tile: WarpProduct, columns: int, found: Contraction) -> WarpProduct | None:
    """The tile with fewer columns, its warps standing so that each has whole instructions, or vectors of all its lanes."""
    vector = 16 // found.accumulator.itemsize
    least = (4 * vector, 8 * vector) if isinstance(tile, Fma) else (16, 16)
    down, across = tile.warps_m, tile.warps_n
    while across > 1 and columns // across < least[1]:
        down, across = 2 * down, across // 2
    if columns // across < least[1] or tile.m // down < least[0]:
        return None
    return replace(tile, n=columns, warps_m=down, warps_n=across)


def _mma_work(kernel: Kernel, found: Contraction, shape: ProductShape) -> choose_mma.TileWork:
    operand = found.a.dtype if found.a.dtype is found.b.dtype else found.accumulator
    precision = choose_mma.precision_of(kernel, operand, shape.k)
    return choose_mma.TileWork(operand, found.accumulator, precision, shape.batch, shape.m, shape.n, shape.k)


def time_apart(program: Program, join: Join, target: Target, sizes: Mapping[str, int]) -> float | None:
    """Microseconds that one kernel for each of them is thought to take."""
    times = [_alone(program.calls[n].kernel, target, sizes) for n in join.members]
    if None in times:
        return None
    # The model of warp groups counts what a launch costs; that of single warps does not.
    launches = 0.0 if warp_group_time(program.calls[join.members[0]].kernel, target, sizes) is not None else target.costs.launch.second
    return sum(time for time in times if time is not None) + launches * (len(times) - 1)


def _alone(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> float | None:
    time = warp_group_time(kernel, target, sizes)
    if time is not None or not target.simt:
        return time
    found = find_contraction(kernel)
    assert found is not None
    shape = shape_of(found, sizes)
    listed = mma_schedules(kernel, found, target, shape.batch, shape.m, shape.n, shape.k)
    work = _mma_work(kernel, found, shape)
    return min((choose_mma.cost(s, target, work, choose_mma.turned(found, s)) for s in listed), default=None)
