"""The schedules of a program's calls, chosen in two steps.

In: a program at the loop stage, a target, and sizes. Out: plans, one schedule for each call. `plan_contractions` decides before programs are cut
and joined, for the very sizes of a call: it leaves None where any size is served alike. `choose_schedules` fills those in just before kernels are lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.base.errors import UserError
from tilewright.base.target import Target
from tilewright.ir.nodes import is_watched
from tilewright.ir.program import Program
from tilewright.passes.choose.loops import choose, placing_schedule, range_schedule, row_schedule
from tilewright.passes.choose.packed_rows import packed_rows
from tilewright.passes.choose.windows import window_schedule
from tilewright.passes.choose.wishes import followed, wishes_for_loops, with_wishes
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import GpuProduct, MatrixSchedule, Wgmma, products_of
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.tree.metadata import KernelMetadata


def plan_contractions(
    program: Program, target: Target, sizes: Mapping[str, int], given: str = "", metadata: KernelMetadata | None = None
) -> Plans:
    """The schedule of each call of a prepared program that is a contraction; None for all others. `given`: use that one; `metadata` has
    the author's wishes."""
    from tilewright.passes.choose.attention import attention_schedules, forced_attention
    from tilewright.passes.choose.gemv import product_schedules
    from tilewright.passes.choose.hints import preferred
    from tilewright.passes.choose.horizontal_fusion import (
        choose_horizontal_fusion,
        forced_beside,
        is_small_part,
        nest_schedules,
    )
    from tilewright.passes.choose.matrix import forced
    from tilewright.passes.choose.phases import choose_gather, writing_pixels
    from tilewright.passes.schedules.attention import AttentionSchedule
    from tilewright.passes.schedules.text import parse_schedule

    plans: list[Plan] = []
    horizontal = bool(given) and products_of(parse_schedule(given)) > 1
    forced_schedule = "" if horizontal else given
    wished: set[int] = set()
    others = writing_pixels(program, forced_schedule)
    for number, call in enumerate(program.calls):
        call = replace(call, kernel=others.get(number, call.kernel))
        watched = is_watched(call.kernel)
        if call.varies:
            plans.append(None)  # only loops take sizes that change from step to step
            continue
        candidates = () if watched else product_schedules(call.kernel, target, sizes)
        candidates = candidates or attention_schedules(call.kernel, target, sizes)
        if watched and not candidates:
            plans.append(None)  # only loops carry checks of indices; attention in parts checks the last
            continue
        if candidates and not forced_schedule and is_small_part(call.kernel, target, sizes):
            candidates = ()
        several = () if candidates else nest_schedules(call.kernel, target, sizes)
        if several:
            plans.append(several[0][1])
        elif not candidates:
            own = metadata.of(call.kernel.name) if metadata is not None else None
            rows = None if wishes_for_loops(own) else row_schedule(call.kernel, target, sizes) or range_schedule(call.kernel, target, sizes)
            plans.append(rows or placing_schedule(call.kernel, target, sizes))
        elif forced_schedule and isinstance(candidates[0], AttentionSchedule):
            plans.append(forced_attention(forced_schedule, candidates, call.kernel, target))
        elif forced_schedule:
            plans.append(forced(forced_schedule, candidates, call.kernel, target))
        elif metadata is not None:
            plans.append(preferred(candidates, metadata.of(call.kernel.name), target, call.kernel.span))
            if plans[-1] is not candidates[0]:
                wished.add(number)
        else:
            plans.append(candidates[0])
    if horizontal:
        return forced_beside(given, program, tuple(plans), target, sizes)
    if forced_schedule and not any(isinstance(plan, MatrixSchedule) for plan in plans):
        raise UserError.at(
            "TW020", f"schedule '{given}': nothing in {program.name} is computed by tiles of a matrix here", program.span,
            "leave schedule= out; thin and tiny products, and what is no contraction, have none",
        )  # fmt: skip
    if forced_schedule:
        return _in_groups(program, tuple(plans), given)
    plans = list(choose_gather(program, tuple(plans), target, sizes))
    if wished or len(program.calls) == 1 or program.loops:
        return tuple(plans)
    return choose_horizontal_fusion(program, tuple(plans), target, sizes)[0]


def _in_groups(program: Program, plans: Plans, given: str) -> Plans:
    """The schedules that somebody asked for; those that gather phases are for kernels that have some."""
    from tilewright.passes.windows.gather_phases import phase_groups

    gathered = {number for number, plan in enumerate(plans) if isinstance(plan, GpuProduct) and plan.gather}
    pixels = any(isinstance(plan, Wgmma) and plan.pixels for plan in plans)
    known = {number for group in phase_groups(program) if not pixels or group.pixels is not None for number in group.numbers}
    if gathered - known:
        raise UserError.at(
            "TW020", f"schedule '{given}' does not fit {program.name}", program.span,
            "gather is for the phases of transposed convolutions, all of whose results are stored",
        )  # fmt: skip
    return plans


def choose_schedules(
    program: Program, plans: Plans, target: Target, hints: Mapping[str, int], metadata: KernelMetadata | None = None
) -> Plans:
    """The plans, with a schedule for every call that has none. Wishes are for the loops of a program without contractions: what stands
    beside those only prepares them."""
    wished = not any(isinstance(plan, MatrixSchedule) for plan in plans)
    chosen: list[Plan] = []
    for call, plan in zip(program.calls, plans, strict=True):
        own = metadata.of(call.kernel.name) if metadata is not None and wished else None
        if plan is None and own is not None and wishes_for_loops(own):
            plan = followed(choose(call.kernel, target, hints), call.kernel, own, target)
        if plan is None:
            plan = packed_rows(call.kernel, target)
        if plan is None and not is_watched(call.kernel):
            plan = window_schedule(call.kernel, target, hints)
        plan = plan or choose(call.kernel, target, hints, sizes=not wished)
        chosen.append(with_wishes(plan, call.kernel, target) if target.tuned and isinstance(plan, Schedule) else plan)
    return tuple(chosen)
