"""The schedules of a program's calls, chosen in two steps.

In: a program at the loop stage, a target, and sizes. Out: plans, one schedule for each call. `plan_contractions` decides before programs are cut
and joined, for the very sizes of a call: it leaves None where any size is served alike. `choose_schedules` fills those in just before kernels are lowered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from tilewright.base.errors import UserError
from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, is_watched, walk
from tilewright.ir.program import Program
from tilewright.ir.types import Tensor
from tilewright.passes.choose.loops import choose, placing_schedule, range_schedule, row_schedule, turned_columns
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import GpuProduct, MatrixSchedule, Wgmma, products_of
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.tree.metadata import KernelMetadata

if TYPE_CHECKING:
    from tilewright.passes.windows.gather_phases import PhaseGroup
    from tilewright.passes.windows.stacked_phases import PhaseStack, StackedPhases

_LONGEST = 1 << 31
"""Columns, rows and planes that 32 bits count."""
_SHORT = 2
"""Bytes of elements that leave one by one where they are not neighbours in registers."""


def plan_contractions(
    program: Program, target: Target, sizes: Mapping[str, int], given: str = "", metadata: KernelMetadata | None = None
) -> Plans:
    """The schedule of each call of a prepared program that is a contraction; None for all others. `given`: use that one; `metadata` has
    the author's wishes."""
    from tilewright.passes.choose.attention import attention_schedules, forced_attention
    from tilewright.passes.choose.hints import preferred
    from tilewright.passes.choose.horizontal_fusion import (
        choose_horizontal_fusion,
        forced_beside,
        is_small_part,
        nest_schedules,
    )
    from tilewright.passes.choose.matrix import forced
    from tilewright.passes.choose.products import product_schedules
    from tilewright.passes.schedules.attention import AttentionSchedule
    from tilewright.passes.schedules.text import parse_schedule

    plans: list[Plan] = []
    horizontal = bool(given) and products_of(parse_schedule(given)) > 1
    forced_schedule = "" if horizontal else given
    wished: set[int] = set()
    others = _writing_pixels(program, forced_schedule)
    for number, call in enumerate(program.calls):
        call = replace(call, kernel=others.get(number, call.kernel))
        watched = is_watched(call.kernel)
        if call.varies or "seldom" in call.kernel.attrs:
            plans.append(None)  # only loops take sizes that change from step to step; and what seldom has work is not worth the code
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
            from tilewright.passes.choose.wishes import wishes_for_loops

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
    plans = list(_choose_gather(program, tuple(plans), target, sizes))
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
    stacks = {number for number, plan in enumerate(plans) if isinstance(plan, Wgmma) and plan.stacked}
    if stacks and (stacks - gathered or not pixels or any(group.stacked is None for group in phase_groups(program) if stacks & set(group.numbers))):
        raise UserError.at(
            "TW020", f"schedule '{given}' does not fit {program.name}", program.span,
            "stacked goes with gather and pixels, for phases that read the same windows and store their sums",
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
        if plan is None and own is not None:
            plan = _wished(call.kernel, own, target, hints)
        if plan is None:
            plan = _special(call.kernel, target, hints)
        plan = plan or choose(call.kernel, target, hints, sizes=not wished)
        if target.tuned and isinstance(plan, Schedule):
            from tilewright.passes.choose.wishes import with_wishes

            plan = with_wishes(plan, call.kernel, target)
        chosen.append(plan)
    return tuple(chosen)


def _wished(kernel: Kernel, metadata: KernelMetadata, target: Target, hints: Mapping[str, int]) -> Plan:
    """The schedule of loops that somebody has wishes for; None without any."""
    from tilewright.passes.choose.wishes import followed, wishes_for_loops

    return followed(choose(kernel, target, hints), kernel, metadata, target) if wishes_for_loops(metadata) else None


def _special(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> Plan:
    """The schedule of packed rows, or of windows on GPUs; None for other kernels."""
    if not target.simt and kernel.attrs.keys() & {"activations", "blocks"}:
        from tilewright.passes.choose.cpu.packed_rows import packed_rows

        found = packed_rows(kernel, target)
        if found is not None:
            return found
    if not target.has_warps or is_watched(kernel) or not _may_slide(kernel):
        return None
    from tilewright.passes.choose.windows import window_schedule

    return window_schedule(kernel, target, hints)


def _may_slide(kernel: Kernel) -> bool:
    """Whether results may read windows: in a sum, or by several loads of an array."""
    loaded = [op.operands[0] for op in walk(kernel.body) if op.opcode == "load"]
    return "reduce" in kernel.opcodes or len(set(loaded)) < len(loaded)


# -- phases of transposed convolutions ----------------------------------------------------------------------------------------------


def _choose_gather(program: Program, plans: Plans, target: Target, sizes: Mapping[str, int]) -> Plans:
    """The schedules, with `gather` where one more kernel, which puts the results of a transposed convolution's phases in their places, takes less time than it saves. Phases write every second
    element of rows, or third: where elements have two bytes, each is a store of its own, and so it is to scratch that lies as results do. Pixels with all of their channels leave by the copy engine,
    and the kernel that gathers, which moves every result anyhow, turns them."""
    from tilewright.passes.windows.gather_phases import phase_groups

    chosen: list[Plan] = list(plans)
    for group in phase_groups(program):
        own = [plan for number in group.numbers if isinstance(plan := chosen[number], GpuProduct)]
        if len(own) < len(group.numbers):
            continue
        pixels = _as_pixels(group, own, target, sizes)
        if pixels:
            chosen[group.numbers.start : group.numbers.stop] = pixels
        elif group.pays(target, sizes):
            chosen[group.numbers.start : group.numbers.stop] = [replace(plan, gather=True) for plan in own]
    return tuple(chosen)


def _as_pixels(group: PhaseGroup, plans: list[GpuProduct], target: Target, sizes: Mapping[str, int]) -> list[Wgmma]:
    """Schedules of phases that write pixels; none where that cannot be, or takes longer."""
    from tilewright.passes.choose.matrix import warp_group_times

    whole, memory = product(group.memory.shape), group.memory
    if memory.dtype.itemsize != _SHORT or group.periods[-1] == 1 or not whole.names <= sizes.keys() or not all(isinstance(p, Wgmma) for p in plans):
        return []
    pixels, costs, elements = group.pixels, target.costs.wgmma, whole.evaluate(sizes)
    if pixels is None or max(extent.evaluate(sizes) for extent in memory.shape) >= _LONGEST:
        return []
    columns = turned_columns(max(1, memory.shape[-1].evaluate(sizes)), memory.dtype.itemsize, target)
    filled = len(group.phases) / prod(group.periods)
    moved = elements * memory.dtype.itemsize * (filled / costs.stream + (1 + filled) / costs.turn)
    turned = target.costs.launch.second + moved
    time, direct = turned, filled * elements / costs.singles
    found: list[Wgmma] = []
    kernels: list[Kernel] = []
    for call, phase in zip(group.calls[-len(group.phases) :], group.phases, strict=True):
        kernels.append(pixels.writing(call.kernel, phase.placed, "pixels")[0])
        best, as_it_is = _pixel_times(kernels[-1], target, sizes), warp_group_times(call.kernel, target, sizes)
        if not best or not as_it_is:
            return []
        time, direct = time + best[0][0], direct + as_it_is[0][0]
        found.append(replace(best[0][1], gather=True, pixels=columns))
    stacks = _as_stacks(group, target, sizes)
    if stacks is not None and stacks[0] + turned < min(time, direct) - _shared(kernels, found, target, sizes):
        return [replace(schedule, gather=True, pixels=columns, stacked=True) for schedule in stacks[1]]
    return found if time < direct else []


def _pixel_times(kernel: Kernel, target: Target, sizes: Mapping[str, int]) -> list[tuple[float, Wgmma]]:
    """Schedules that write whole pixels, and their times, best first."""
    from tilewright.passes.choose.matrix import warp_group_times

    return [(time, s) for time, s in warp_group_times(kernel, target, sizes) if s.store == "tma" and s.a_copy == "im2col"]


def _shared(kernels: Sequence[Kernel], schedules: Sequence[Wgmma], target: Target, sizes: Mapping[str, int]) -> float:
    """What was counted too often of an image that several kernels read with channels last: one copies it for all."""
    from tilewright.passes.choose.matrix import turning_time

    copies = [turning_time(kernel, s.to_channels_last, target, sizes) for kernel, s in zip(kernels, schedules, strict=True) if s.to_channels_last == "image"]
    return sum(copies[1:])


def _as_stacks(group: PhaseGroup, target: Target, sizes: Mapping[str, int]) -> tuple[float, list[Wgmma]] | None:
    """The time of phases in stacks without that of what turns their pixels, and a schedule for each phase; None where they have no windows in common."""
    stacked = group.stacked
    if stacked is None:
        return None
    kernels = [kernel for _, kernel in _stack_kernels(stacked)]
    ranked = [_pixel_times(kernel, target, sizes) for kernel in kernels]
    shared = [[(time, s) for time, s in own if s.to_channels_last == "image"] for own in ranked]
    ways: list[tuple[float, list[Wgmma]]] = []
    # Stacks that all read one copy of the image may be faster than with what is best for each alone.
    for listed in (ranked, shared):
        if all(listed):
            schedules = [own[0][1] for own in listed]
            ways.append((sum(own[0][0] for own in listed) - _shared(kernels, schedules, target, sizes), schedules))
    if not ways:
        return None
    time, schedules = min(ways, key=lambda way: way[0])
    for stack in stacked.stacks:
        weights = stacked.weights(stack, "stack").type
        assert isinstance(weights, Tensor)
        time += target.costs.launch.second + product(weights.shape).evaluate(sizes) * weights.dtype.itemsize / target.costs.wgmma.turn
    chosen = {form.placed: schedule for stack, schedule in zip(stacked.stacks, schedules, strict=True) for form in stack.forms}
    return time, [chosen[phase.placed] for phase in group.phases]


def _writing_pixels(program: Program, given: str) -> dict[int, Kernel]:
    """The kernels of phases as they write pixels, by number of their call, where a schedule that somebody gave is for these."""
    from tilewright.passes.schedules.text import parse_schedule
    from tilewright.passes.windows.gather_phases import phase_groups

    asked = parse_schedule(given) if "pixels=" in given else None
    groups = phase_groups(program) if isinstance(asked, Wgmma) and asked.pixels else []
    found: dict[int, Kernel] = {}
    for group in groups:
        pixels, stacked = group.pixels, group.stacked if isinstance(asked, Wgmma) and asked.stacked else None
        kernels = {} if stacked is None else {form.placed: kernel for stack, kernel in _stack_kernels(stacked) for form in stack.forms}
        for number, phase in zip(group.numbers, group.phases, strict=True):
            if pixels is not None:
                found[number] = kernels.get(phase.placed) or pixels.writing(program.calls[number].kernel, phase.placed, "pixels")[0]
    return found


def _stack_kernels(stacked: StackedPhases) -> list[tuple[PhaseStack, Kernel]]:
    """The convolutions of stacks of phases."""
    return [(stack, stacked.convolving(stack, stacked.weights(stack, "stack"), "pixels")[0]) for stack in stacked.stacks]
