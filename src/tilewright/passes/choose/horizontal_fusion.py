"""Choose how products of the same rows are computed side by side by one kernel, and whether: by the models that rank schedules of one product.

In: a prepared program, the plan of each of its calls, and sizes. Out: plans in which the calls to be joined have a schedule with `beside`
(`fuse_horizontally.py` makes them one kernel), and of those that are not joined the reason. One kernel reads the rows once, never writes what
one product makes for another, and is one launch; in return a block has fewer columns of each product. A nest that was written with several
sums is such a kernel from the start (`nest_schedules`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.contraction import Contraction, find_contraction
from tilewright.base.errors import UserError
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.program import Program
from tilewright.ir.types import dtype_of
from tilewright.passes.choose import mma as choose_mma
from tilewright.passes.choose.cpu.contraction import cpu_schedules
from tilewright.passes.choose.epilogue_work import EpilogueWork, finishing_work
from tilewright.passes.choose.gemv import gemv_cost, gemv_schedules, work_of
from tilewright.passes.choose.matrix import fits_blocks, has_warp_groups, is_copied, tiles_of, warp_group_time
from tilewright.passes.choose.mma import mma_schedules
from tilewright.passes.choose.row_dots import find_row_dots
from tilewright.passes.choose.wgmma_tiles import ProductShape, cost, shape_of
from tilewright.passes.common.fusion_report import Refused
from tilewright.passes.packed.unpack_weights import unpacked_form
from tilewright.passes.program.fuse_horizontally import Join, find_joins, find_row_joins, joined_kernel, side_by_side
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import (
    Amx,
    CpuPanels,
    Fma,
    GpuProduct,
    MatrixSchedule,
    WarpProduct,
    Wgmma,
    products_of,
)
from tilewright.passes.schedules.plans import Plans
from tilewright.passes.schedules.text import parse_schedule

NARROWEST = 32
"""Columns of one product that a tile of warp-group instructions has at least: they leave in rows of 128 bytes."""
Ranked = list[tuple[float, MatrixSchedule]]
"""Schedules and the microseconds they are thought to take."""


def choose_horizontal_fusion(program: Program, plans: Plans, target: Target, sizes: Mapping[str, int]) -> tuple[Plans, tuple[Refused, ...]]:
    """The plans with calls joined where that is thought to be faster, and why others are not."""
    joins, refused = find_joins(program)
    chosen, reasons = list(plans), list(refused)
    few = find_row_joins(program, plans)
    for join in few:
        own = _few_rows(program, join, plans, target, sizes)
        if isinstance(own, Gemv):
            for number in join.members:
                chosen[number] = own
        else:
            reasons.append(own)
    for join in joins:
        if any(isinstance(plans[n], Gemv) for n in join.members):
            continue
        ranked = nest_schedules(joined_kernel(program, join), target, sizes)
        apart = _apart(program, join, target, sizes) if target.simt else float("inf")
        first, second = (_product(program, n).reduction.span for n in join.members[:2])
        if any(isinstance(plans[n], Amx) for n in join.members):
            reasons.append(Refused(join.shared, first, second, "not one product beside the other: the matrix unit computes each by itself"))
        elif not ranked or apart is None:
            reasons.append(Refused(join.shared, first, second, f"no tiles of {target.name} hold {len(join.members)} products side by side"))
        elif ranked[0][0] >= apart:
            times = f"one kernel would take {ranked[0][0]:.1f} µs, {len(join.members)} take {apart:.1f}"
            reasons.append(Refused(join.shared, first, second, f"not one product beside the other: {times} by the cost model"))
        else:
            for number in join.members:
                chosen[number] = ranked[0][1]
    return tuple(chosen), tuple(reasons)


def _few_rows(program: Program, join: Join, plans: Plans, target: Target, sizes: Mapping[str, int]) -> Gemv | Refused:
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


def forced_beside(text: str, program: Program, plans: Plans, target: Target, sizes: Mapping[str, int]) -> Plans:
    """The plans with the schedule somebody asked for where there are so many products to be computed side by side."""
    asked = parse_schedule(text)
    kernels: list[tuple[tuple[int, ...], Kernel]] = [((number,), call.kernel) for number, call in enumerate(program.calls)]
    kernels += [(join.members, joined_kernel(program, join)) for join in find_joins(program)[0]]
    chosen = list(plans)
    found = False
    for members, kernel in kernels:
        products = side_by_side(kernel)
        like = nest_schedules(kernel, target, sizes) if len(products) == products_of(asked) and _is_legal(asked, products[0]) else []
        if any(schedule.family == asked.family for _, schedule in like):
            found = True
            for number in members:
                chosen[number] = asked
    if not found:
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {program.name}", program.span,
            "horizontal is the number of products of the same rows that one kernel computes; a tile has m % 64 == 0 and, times horizontal, at most "
            "256 columns (family=wgmma), or powers of two (mma, fma)",
        )  # fmt: skip
    return tuple(chosen)


def _is_legal(asked: MatrixSchedule, found: Contraction) -> bool:
    if isinstance(asked, CpuPanels):
        return asked.keep == "b" and not asked.half and min(asked.mr, asked.nr, asked.k) > 0 and asked.m % asked.mr == asked.n % asked.nr == 0
    if isinstance(asked, WarpProduct):
        return not asked.swap_ab and asked.split_k == 1
    if not isinstance(asked, Wgmma) or not _is_alone(asked):
        return False
    legal = asked.k * found.a.dtype.itemsize == 128 and asked.m % (64 * asked.sharing) == 0
    return legal and asked.n % 8 == 0 and asked.columns <= 256 and fits_blocks(found, asked)


def _is_alone(schedule: Wgmma) -> bool:
    """Whether a block computes whole sums as they lie, for results that the copy engine writes: so products can be beside each other."""
    cuts = (schedule.split_k, schedule.cluster_k, schedule.cluster)
    return cuts == (1, 1, 1) and not schedule.swap_ab and not schedule.stream_k and schedule.store == "tma"


def nest_schedules(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> Ranked:
    """Schedules of a kernel that has several products of the same rows, best first; none for any other."""
    if (form := unpacked_form(kernel, rounds=target.simt)) is not None:
        listed = nest_schedules(form.kernel, target, sizes)
        return [(time, replace(s, unpack=True)) for time, s in listed if isinstance(s, GpuProduct | CpuPanels)]
    products = side_by_side(kernel)
    if len(products) < 2:
        return []
    if not target.simt:
        return _on_cpu(kernel, products, target)
    if has_warp_groups(kernel, products[0], target):
        return sorted(_by_warp_groups(kernel, products, target, sizes), key=lambda pair: pair[0])
    return sorted(_by_warps(kernel, products, target, sizes), key=lambda pair: pair[0])


def is_small_part(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether it is a part of a nest (`fission_products.py`) with so little to do that launches count for more."""
    found = find_contraction(kernel) if "parted" in kernel.attrs and target.simt else None
    if found is None:
        return False
    shape = shape_of(found, sizes)
    return shape.batch * shape.m * shape.n * shape.k < target.costs.launch.smallest_part


def ranked_beside(program: Program, target: Target, sizes: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules of the program's first products side by side, where they are or are thought to be faster so."""
    for call in program.calls:
        if ranked := nest_schedules(call.kernel, target, sizes):
            return tuple(schedule for _, schedule in ranked)
    for join in find_joins(program)[0] if len(program.calls) > 1 else ():
        ranked = nest_schedules(joined_kernel(program, join), target, sizes)
        apart = _apart(program, join, target, sizes) if target.simt else float("inf")
        if ranked and apart is not None and ranked[0][0] < apart:
            return tuple(schedule for _, schedule in ranked)
    return ()


def _product(program: Program, number: int) -> Contraction:
    found = find_contraction(program.calls[number].kernel)
    assert found is not None
    return found


def _whole(products: Sequence[Contraction], sizes: Mapping[str, int]) -> ProductShape:
    """The sizes of all products as one."""
    shape = shape_of(products[0], sizes)
    return replace(shape, n=len(products) * shape.n)


def _work(products: Sequence[Contraction]) -> EpilogueWork:
    """What happens to a result once the sums are known, on average."""
    whole = finishing_work(products[0], [found.reduction for found in products])
    return EpilogueWork(whole.instructions / len(products), whole.arrays / len(products))


def _by_warp_groups(kernel: Kernel, products: Sequence[Contraction], target: Target, sizes: Mapping[str, int]) -> Ranked:
    count, found, work = len(products), products[0], _work(products)
    if not all(is_copied(kernel, product) for product in products):
        return []
    whole = _whole(products, sizes)
    ranked: Ranked = []
    for tile in tiles_of(found, whole, target):
        own = replace(tile, n=tile.n // count, horizontal=count)
        if not _is_alone(tile) or tile.n % count or own.n % _narrowest(products) or not fits_blocks(found, own):
            continue
        for early in (False, True):
            ranked.append((cost(replace(tile, pdl=early), whole, target, found, work=work), replace(own, pdl=early)))
    return ranked


def _narrowest(products: Sequence[Contraction]) -> int:
    """Columns of which results are whole rows of 128 bytes."""
    stores = [op for found in products for op in found.parallel.regions[0].ops if op.opcode == "store"]
    return max(NARROWEST, 128 // min(dtype_of(op.operands[-1].type).itemsize for op in stores))


def _on_cpu(kernel: Kernel, products: Sequence[Contraction], target: Target) -> Ranked:
    """On a CPU rows are copied once, and what one product makes for another stays in the cache: the same kernel serves all, each block with
    fewer columns."""
    count = len(products)
    alone = [[replace(s, half=False) for s in cpu_schedules(kernel, found, target) if isinstance(s, CpuPanels)] for found in products]
    if any(listed != alone[0] or not listed or listed[0].keep != "b" for listed in alone):
        return []
    own = alone[0][0]
    columns = max(1, own.n // own.nr // count) * own.nr
    return [(0.0, replace(own, n=columns, horizontal=count))]


def _by_warps(kernel: Kernel, products: Sequence[Contraction], target: Target, sizes: Mapping[str, int]) -> Ranked:
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


def _apart(program: Program, join: Join, target: Target, sizes: Mapping[str, int]) -> float | None:
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
