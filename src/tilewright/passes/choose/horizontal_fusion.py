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
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.passes.choose.cpu.contraction import cpu_schedules
from tilewright.passes.common.fusion_report import Refused
from tilewright.passes.packed.unpack_weights import unpacked_form
from tilewright.passes.program.fuse_horizontally import Join, find_joins, find_row_joins, joined_kernel, side_by_side
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import (
    Amx,
    CpuPanels,
    GpuProduct,
    MatrixSchedule,
    WarpProduct,
    Wgmma,
    products_of,
)
from tilewright.passes.schedules.plans import Plans
from tilewright.passes.schedules.text import parse_schedule

Ranked = list[tuple[float, MatrixSchedule]]
"""Schedules and the microseconds they are thought to take."""


def choose_horizontal_fusion(program: Program, plans: Plans, target: Target, sizes: Mapping[str, int]) -> tuple[Plans, tuple[Refused, ...]]:
    """The plans with calls joined where that is thought to be faster, and why others are not."""
    joins, refused = find_joins(program)
    chosen, reasons = list(plans), list(refused)
    if few := find_row_joins(program, plans):
        from tilewright.passes.choose.gpu_side_by_side import few_rows

        for join in few:
            own = few_rows(program, join, plans, target, sizes)
            if isinstance(own, Gemv):
                for number in join.members:
                    chosen[number] = own
            else:
                reasons.append(own)
    for join in joins:
        if any(isinstance(plans[n], Gemv) for n in join.members):
            continue
        ranked = nest_schedules(joined_kernel(program, join), target, sizes)
        apart = _apart(program, join, target, sizes)
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
    if not isinstance(asked, Wgmma):
        return False
    from tilewright.passes.choose.gpu_side_by_side import is_alone
    from tilewright.passes.choose.matrix import fits_blocks

    if not is_alone(asked):
        return False
    legal = asked.k * found.a.dtype.itemsize == 128 and asked.m % (64 * asked.sharing) == 0
    return legal and asked.n % 8 == 0 and asked.columns <= 256 and fits_blocks(found, asked)


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
    from tilewright.passes.choose.gpu_side_by_side import by_warp_groups, by_warps
    from tilewright.passes.choose.matrix import has_warp_groups

    if has_warp_groups(kernel, products[0], target):
        return sorted(by_warp_groups(kernel, products, target, sizes), key=lambda pair: pair[0])
    return sorted(by_warps(kernel, products, target, sizes), key=lambda pair: pair[0])


def is_small_part(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether it is a part of a nest (`fission_products.py`) with so little to do that launches count for more."""
    found = find_contraction(kernel) if "parted" in kernel.attrs and target.simt else None
    if found is None:
        return False
    from tilewright.passes.choose.wgmma_tiles import shape_of

    shape = shape_of(found, sizes)
    return shape.batch * shape.m * shape.n * shape.k < target.costs.launch.smallest_part


def ranked_beside(program: Program, target: Target, sizes: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """Schedules of the program's first products side by side, where they are or are thought to be faster so."""
    for call in program.calls:
        if ranked := nest_schedules(call.kernel, target, sizes):
            return tuple(schedule for _, schedule in ranked)
    for join in find_joins(program)[0] if len(program.calls) > 1 else ():
        ranked = nest_schedules(joined_kernel(program, join), target, sizes)
        apart = _apart(program, join, target, sizes)
        if ranked and apart is not None and ranked[0][0] < apart:
            return tuple(schedule for _, schedule in ranked)
    return ()


def _apart(program: Program, join: Join, target: Target, sizes: Mapping[str, int]) -> float | None:
    """Microseconds that one kernel for each of them is thought to take; on a CPU one for all is always quicker."""
    if not target.simt:
        return float("inf")
    from tilewright.passes.choose.gpu_side_by_side import time_apart

    return time_apart(program, join, target, sizes)


def _product(program: Program, number: int) -> Contraction:
    found = find_contraction(program.calls[number].kernel)
    assert found is not None
    return found


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


