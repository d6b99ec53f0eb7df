"""Whether the phases of a transposed convolution write to scratch, and how results lie there. Part of `plan`.

In: a program, the schedules of its calls, the target and the sizes of the call. Out: the schedules, with `gather` where one more kernel that puts results in their places
(`passes/windows/gather_phases.py`) takes less time than it saves. Phases write every second element of rows, or third: where elements have two bytes, each is a store of its own, and so it is
to scratch that lies as results do. Pixels with all of their channels leave by the copy engine, and the gathering kernel, which moves every result anyhow, turns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from tilewright.analysis.contraction import find_contraction
from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.passes.choose.loops import turned_columns
from tilewright.passes.choose.matrix import has_warp_groups, warp_group_times
from tilewright.passes.schedules.matrix import GpuProduct, Wgmma
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.schedules.text import parse_schedule
from tilewright.passes.windows.gather_phases import PhaseGroup, phase_groups

SHORT = 2
"""Bytes of elements that leave one by one where they are not neighbours in registers."""


def choose_gather(program: Program, plans: Plans, target: Target, sizes: Mapping[str, int]) -> Plans:
    """The schedules, with phases gathered where that pays."""
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
    whole, memory = product(group.memory.shape), group.memory
    if memory.dtype.itemsize != SHORT or group.periods[-1] == 1 or not whole.names <= sizes.keys() or not all(isinstance(p, Wgmma) for p in plans):
        return []
    elements, costs = whole.evaluate(sizes), target.costs.wgmma
    filled = len(group.phases) / prod(group.periods)
    moved = (elements * memory.dtype.itemsize) * (filled / costs.stream + (1 + filled) / costs.turn)
    if target.costs.launch.second + moved > filled * elements / costs.singles:
        return []
    pixels, columns = group.pixels, turned_columns(max(1, memory.shape[-1].evaluate(sizes)), memory.dtype.itemsize, target)
    found: list[Wgmma] = []
    for call, phase in zip(group.calls[-len(group.phases) :], group.phases, strict=True):
        kernel = pixels.writing(call.kernel, phase.placed, "pixels")[0] if pixels is not None else call.kernel
        contraction = find_contraction(kernel)
        if pixels is None or contraction is None or not has_warp_groups(kernel, contraction, target):
            return []
        best = next((s for _, s in warp_group_times(kernel, contraction, target, sizes) if s.store == "tma" and s.a_copy == "im2col"), None)
        if best is None:
            return []
        found.append(replace(best, gather=True, pixels=columns))
    return found


def writing_pixels(program: Program, given: str) -> dict[int, Kernel]:
    """The kernels of phases as they write pixels, by number of their call, where a schedule that somebody gave is for these."""
    asked = parse_schedule(given) if "pixels=" in given else None
    groups = phase_groups(program) if isinstance(asked, Wgmma) and asked.pixels else []
    found: dict[int, Kernel] = {}
    for group in groups:
        pixels = group.pixels
        for number, phase in zip(group.numbers, group.phases, strict=True):
            if pixels is not None:
                found[number] = pixels.writing(program.calls[number].kernel, phase.placed, "pixels")[0]
    return found
