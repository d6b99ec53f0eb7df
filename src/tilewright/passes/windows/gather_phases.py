"""Put the results of phases in their places by one kernel. `Program -> Program`.

In: a program in which the kernels of one transposed convolution (`split_phases.py`) stand one after another, and their schedules. Where these say `gather`,
every phase writes its results side by side to scratch. Out: the same with one more kernel, which takes all results from there, and what is made of
an empty sum where a phase has none:

    parallel o { …; store y[2 o] }
    parallel o { …; store y[2 o + 1] }
    -> parallel o { …; store y.phases[0, o] }
       parallel o { …; store y.phases[1, o] }
       parallel i { store y[i] = y.phases[i % 2, i // 2] }

Where schedules say `stacked`, phases that read the same windows are one convolution (`stacked_phases.py`).

Phases write every second element, or third, of the same rows: memory is read and written as whole sectors, each of them once for every phase. Scratch is
written and read once, and so are the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from tilewright.analysis.affine import analyse, floored
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, ceildiv, maximum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.common.simplify import simplify
from tilewright.passes.schedules.matrix import GpuProduct, Wgmma
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.windows.pixel_phases import PixelPhases, PlacedPhase, channel_axis
from tilewright.passes.windows.placing import PlacedAxis, place_values
from tilewright.passes.windows.stacked_phases import StackedPhases, stacked_phases

KEPT_BYTES = 24 << 20
"""Bytes of results that stay in the L2 cache until all phases have written theirs."""
WRITES = ("store", "atomic", "accumulate")


@record
class _Phase:
    """A kernel of one phase: its only store, and for every axis of the results the index along it and the rest it leaves."""

    periods: tuple[int, ...]
    placed: PlacedPhase

    @property
    def store(self) -> Op:
        return self.placed.store

    @property
    def rests(self) -> tuple[int, ...]:
        return self.placed.rests

    @property
    def indices(self) -> tuple[Value, ...]:
        return self.placed.indices


@record
class PhaseGroup:
    """The calls of one transposed convolution, from `first` on; the first of them may write what is made of empty sums."""

    first: int
    calls: tuple[KernelCall, ...]
    phases: tuple[_Phase, ...]
    empty: float | None
    """What phases without terms have; None where there are none."""

    @property
    def numbers(self) -> range:
        """The calls that compute phases."""
        return range(self.first + (self.empty is not None), self.first + len(self.calls))

    @property
    def memory(self) -> Tensor:
        type_ = self.phases[0].store.operands[0].type
        assert isinstance(type_, Tensor)
        return type_

    @property
    def periods(self) -> tuple[int, ...]:
        return self.phases[0].periods

    def rests(self, axis: int) -> list[int]:
        """The rests that phases with terms leave along an axis."""
        return sorted({phase.rests[axis] for phase in self.phases})

    @property
    def pixels(self) -> PixelPhases | None:
        """The same with scratch of pixels, where results have channels other than last."""
        channels = {channel_axis(call.kernel, phase.placed) for call, phase in zip(self.calls[-len(self.phases) :], self.phases, strict=True)}
        axis = channels.pop() if len(channels) == 1 else None
        if axis is None or self.periods[axis] != 1:
            return None
        return PixelPhases(self.memory, self.periods, axis, tuple(tuple(self.rests(own)) for own in range(len(self.periods))))

    @property
    def stacked(self) -> StackedPhases | None:
        """The same with phases that read the same windows as one, where there are such."""
        pixels = self.pixels
        return None if pixels is None else stacked_phases(pixels, self.calls[-len(self.phases) :], [phase.placed for phase in self.phases])

    def slot(self, phase: _Phase) -> int:
        """A phase's number in scratch."""
        number = 0
        for axis, period in enumerate(self.periods):
            if period > 1:
                number = number * len(self.rests(axis)) + self.rests(axis).index(phase.rests[axis])
        return number

    def pays(self, target: Target, sizes: Mapping[str, int]) -> bool:
        """Whether scratch is less to move than sectors of which each phase writes a part."""
        whole = product(self.memory.shape) * self.memory.dtype.itemsize
        if not target.is_gpu or self.periods[-1] == 1 or not whole.names <= sizes.keys() or whole.evaluate(sizes) < KEPT_BYTES:
            return False
        filled = prod(len(self.rests(axis)) / period for axis, period in enumerate(self.periods[:-1]))
        own = len(self.rests(len(self.periods) - 1))
        apart = 2 * own * filled + (self.empty is not None)
        together = 1 + 2 * filled * own / self.periods[-1]
        bytes_ = whole.evaluate(sizes)
        return together * bytes_ / target.costs.wgmma.stream + target.costs.launch.second < apart * bytes_ / target.costs.wgmma.stream


def phase_groups(program: Program) -> list[PhaseGroup]:
    """The transposed convolutions of a program whose phases can be gathered."""
    found: list[PhaseGroup] = []
    number = 0
    while number < len(program.calls):
        name = program.calls[number].kernel.attrs.get("phase_of")
        last = number
        while name is not None and last < len(program.calls) and program.calls[last].kernel.attrs.get("phase_of") == name:
            last += 1
        group = _group(program, number, last, str(name)) if name is not None else None
        found += [group] if group is not None else []
        number = max(last, number + 1)
    return found


def _group(program: Program, first: int, last: int, name: str) -> PhaseGroup | None:
    calls = program.calls[first:last]
    phases = [_phase(call) for call in calls]
    whole = [p for p in phases if p is not None]
    if len(whole) < len(phases) or len({_written(call) for call in calls}) != 1 or len({(p.periods, p.store.operands[0].type) for p in whole}) != 1:
        return None
    empty = None
    if first and program.calls[first - 1].kernel.name == f"{name}.empty" and program.calls[first - 1].loops == calls[0].loops:
        empty, first = _constant(program.calls[first - 1]), first - 1
        if empty is None:
            return None
    group = PhaseGroup(first, program.calls[first:last], tuple(whole), empty)
    several = prod(len(group.rests(axis)) for axis in range(len(group.periods)))
    alone = {p.rests for p in whole}
    if len(alone) != several or len(whole) != several or any(call.loops or call.varies for call in group.calls):
        return None
    return group if empty is not None or several == prod(group.periods) else None


def _written(call: KernelCall) -> str:
    """The array that a phase writes."""
    names = dict(zip(call.kernel.params, call.args, strict=True))
    return next((names[op.operands[0]] for op in walk(call.kernel.body) if op.opcode == "store" and op.operands[0] in names), "")


def _phase(call: KernelCall) -> _Phase | None:
    """What a kernel writes, where it is every element that leaves a rest along each axis, and nothing else."""
    kernel = call.kernel
    stores = [op for op in walk(kernel.body) if op.opcode in WRITES]
    nests = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(stores) != 1 or len(nests) != 1 or stores[0].opcode != "store" or stores[0].attrs.get("masked") or stores[0] not in nests[0].regions[0].ops:
        return None
    (store,), (nest,) = stores, nests
    memory, forms = store.operands[0].type, analyse(kernel)
    assert isinstance(memory, Tensor)
    args = nest.regions[0].args
    if any(store.operands[0] in op.operands for op in walk(kernel.body) if op is not store) or memory.rank != len(args):
        return None
    periods, rests, indices, extents = [], [], [], []
    for place, extent in zip(store.operands[1 : 1 + memory.rank], memory.shape, strict=True):
        form = forms[place]
        period, rest = (form.factors[0][1].constant if len(form.factors) == 1 else None), form.constant.constant
        if period is None or rest is None or period < 1 or not 0 <= rest < period or form.factors[0][0] not in args:
            return None
        index = form.factors[0][0]
        walked = forms[nest.operands[args.index(index)]]
        if walked.factors or not _covers(walked.constant, extent, period, rest):
            return None
        periods.append(period)
        rests.append(rest)
        indices.append(index)
        extents.append(walked.constant)
    placed = PlacedPhase(store, tuple(rests), tuple(indices), tuple(extents))
    return _Phase(tuple(periods), placed) if len(set(indices)) == len(args) else None


def _covers(walked: Size, extent: Size, period: int, rest: int) -> bool:
    """Whether a loop walks all numbers below an extent that leave a rest. No array has a negative extent."""
    return any(walked == ceildiv(size - rest, Size.of(period)) or walked == floored(size + (period - 1 - rest), period) for size in (extent, maximum(ZERO, extent)))


def _constant(call: KernelCall) -> float | None:
    """The number that a kernel stores everywhere."""
    made = {result: op for op in walk(call.kernel.body) for result in op.results}
    stores = [op for op in walk(call.kernel.body) if op.opcode in WRITES]
    source = made.get(stores[0].operands[-1]) if len(stores) == 1 else None
    while source is not None and source.opcode == "cast":
        source = made.get(source.operands[0])
    value = source.attrs["value"] if source is not None and source.opcode == "const" else None
    return float(value) if isinstance(value, int | float) else None


def gather_phases(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with kernels that put results of phases in their places, and the schedules of its calls."""
    if not any(isinstance(plan, GpuProduct) and plan.gather for plan in plans):
        return program, plans
    groups = {group.first: group for group in phase_groups(program) if all(isinstance(p := plans[n], GpuProduct) and p.gather for n in group.numbers)}
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    number = 0
    while number < len(program.calls):
        group = groups.get(number)
        if group is None:
            plan = plans[number]
            if isinstance(plan, GpuProduct) and plan.gather:
                raise CompilerBug.at("TW040", f"{program.calls[number].kernel.name} is no phase whose results can be gathered", program.calls[number].kernel.span)
            calls.append(program.calls[number])
            schedules.append(plan)
            number += 1
            continue
        own = [plans[place] for place in group.numbers]
        if any(isinstance(plan, Wgmma) and plan.stacked for plan in own):
            made = _stacked(group, own, scratch)
            calls += made[0]
            schedules += made[1]
            number += len(group.calls)
            continue
        gathered, kept = _gathered(group, own, len(scratch))
        assert isinstance(kept.type, Tensor)
        scratch.append(ProgramArray(kept.name, kept.type, "scratch"))
        calls += gathered
        schedules += [*own, None]
        number += len(group.calls)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _gathered(group: PhaseGroup, plans: list[Plan], number: int) -> tuple[list[KernelCall], Value]:
    """The calls of phases that write to scratch, and of the kernel that takes results from there; the scratch."""
    own = group.calls[-len(group.phases) :]
    columns = max(plan.pixels if isinstance(plan, Wgmma) else 0 for plan in plans)
    if not columns:
        kept = _scratch(group, number)
        return [*(_to_scratch(call, group, phase, kept) for call, phase in zip(own, group.phases, strict=True)), _gathering(group, kept)], kept
    pixels, last = group.pixels, group.calls[-1]
    if pixels is None:
        raise CompilerBug.at("TW040", f"{last.kernel.name} has no pixels to gather", last.kernel.span)
    kept = pixels.scratch(f"{last.kernel.attrs['phase_of']}.pixels{number}")
    calls: list[KernelCall] = []
    for call, phase in zip(own, group.phases, strict=True):
        kernel, view = pixels.writing(call.kernel, phase.placed, kept.name)
        names = dict(zip(call.kernel.params, call.args, strict=True)) | {view: kept.name}
        calls.append(replace(call, kernel=kernel, args=tuple(names[p] for p in kernel.params)))
    gather = pixels.gathering(last.kernel, group.phases[-1].store, kept, group.empty or 0.0, columns)
    return [*calls, KernelCall(gather, (_written(last), kept.name))], kept


def _stacked(group: PhaseGroup, plans: list[Plan], scratch: list[ProgramArray]) -> tuple[list[KernelCall], list[Plan]]:
    """The calls of stacks of phases, what they need and what turns their pixels, and the schedules of these; their arrays are added to scratch."""
    stacked, last = group.stacked, group.calls[-1]
    if stacked is None:
        raise CompilerBug.at("TW040", f"{last.kernel.name} has no phases that read the same windows", last.kernel.span)
    name = str(last.kernel.attrs["phase_of"])
    kept = stacked.scratch(f"{name}.pixels{len(scratch)}")
    weights = [stacked.weights(stack, f"{name}.stack{len(scratch) + 1 + number}") for number, stack in enumerate(stacked.stacks)]
    for array in (kept, *weights):
        assert isinstance(array.type, Tensor)
        scratch.append(ProgramArray(array.name, array.type, "scratch"))
    packs: list[KernelCall] = []
    convolutions: list[KernelCall] = []
    schedules: list[Plan] = []
    for stack, own in zip(stacked.stacks, weights, strict=True):
        image, filters = stack.lead.arrays
        packs.append(KernelCall(stacked.packing(stack, own), (filters, own.name)))
        convolutions.append(KernelCall(stacked.convolving(stack, own, kept.name)[0], (image, own.name, kept.name)))
        schedules.append(next(plan for plan, phase in zip(plans, group.phases, strict=True) if phase.placed is stack.lead.placed))
    columns = max(plan.pixels if isinstance(plan, Wgmma) else 0 for plan in plans)
    gather = stacked.gathering(last.kernel, group.phases[-1].store, kept, group.empty or 0.0, columns)
    calls = [*packs, *convolutions, KernelCall(gather, (_written(last), kept.name))]
    return calls, [*(None for _ in packs), *schedules, None]


def _scratch(group: PhaseGroup, number: int) -> Value:
    """An array for the results of all phases, each from 0 on along every axis."""
    extents = [extent if period == 1 else ceildiv(extent, Size.of(period)) for extent, period in zip(group.memory.shape, group.periods, strict=True)]
    name = str(group.calls[-1].kernel.attrs["phase_of"])
    return Value(tensor(group.memory.dtype, len(group.phases), *extents, align=16), f"{name}.phases{number}")


def _to_scratch(call: KernelCall, group: PhaseGroup, phase: _Phase, kept: Value) -> KernelCall:
    """A phase that writes its results side by side."""
    kernel = call.kernel
    nest = next(op for op in kernel.body.ops if op.opcode == "parallel")
    ops: list[Op] = []
    for op in nest.regions[0].ops:
        if op is phase.store:
            b = Builder(op.span)
            slot = b.index(group.slot(phase))
            ops += [*b.ops, op.with_operands(kept, slot, *phase.indices, *op.operands[1 + len(phase.indices) :])]
        else:
            ops.append(op)
    changed = replace(nest, regions=(replace(nest.regions[0], ops=tuple(ops)),))
    body = replace(kernel.body, ops=tuple(changed if op is nest else op for op in kernel.body.ops))
    names = dict(zip(kernel.params, call.args, strict=True)) | {kept: kept.name}
    params = (*(p for p in kernel.params if p is not phase.store.operands[0]), kept)
    return replace(call, kernel=replace(kernel, body=body, params=params), args=tuple(names[p] for p in params))


def _gathering(group: PhaseGroup, kept: Value) -> KernelCall:
    """The kernel that takes results from scratch."""
    last = group.calls[-1]
    memory = Value(group.memory, group.phases[-1].store.operands[0].name)
    assert isinstance(kept.type, Tensor)
    flat = Value(tensor(kept.type.dtype, product(kept.type.shape), align=16), kept.name)
    b = Builder(last.kernel.span)

    def finish(at: Builder, indices: list[Value], value: Value) -> None:
        at.multi("store", memory, *indices, value)

    with b.at(group.phases[-1].store.span):
        place_values(b, _axes(group, kept.type), flat, group.empty or 0.0, finish)
    name = f"{last.kernel.attrs['phase_of']}.gather"
    attrs = MappingProxyType({"placed": True})
    kernel = Kernel(name, Stage.LOOP, (memory, flat), Block((), tuple(b.ops)), attrs=attrs, facts=last.kernel.facts, span=last.kernel.span)
    return KernelCall(simplify(kernel), (_written(last), kept.name))


def _axes(group: PhaseGroup, scratch: Tensor) -> list[PlacedAxis]:
    """How each index of the results says where its value lies in scratch. Phases without terms have no room there."""
    found: list[PlacedAxis] = []
    phases = 1
    for axis, period in reversed(list(enumerate(group.periods))):
        extent, stride, rests = group.memory.shape[axis], scratch.strides[1 + axis], group.rests(axis)
        if period == 1:
            found.append(PlacedAxis(extent, stride))
            continue
        slots = {rest: (scratch.strides[0] * (number * phases), 0) for number, rest in enumerate(rests)}
        found.append(PlacedAxis(extent, stride, period, slots=tuple((slots[rest],) if rest in slots else () for rest in range(period))))
        phases *= len(rests)
    return found[::-1]
