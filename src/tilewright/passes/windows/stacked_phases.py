"""Phases that read the same windows as one convolution, whose filters are those of all of them. Part of `gather_phases`.

In: the kernels of a transposed convolution's phases. Those with as many taps along each axis read the same windows of the image; they differ in the places where these begin, in weights and in
the results they write. Out: for each such stack a kernel that copies the weights of its phases, one below the other, a convolution that writes pixels with the channels of all phases side by side,
and one kernel that turns the pixels of all stacks to rows of results:

    parallel i { reduce c, t { x[c, i + t - 1] * w[c, 2 - 2 t] }; store y[2 i] }
    parallel i { reduce c, t { x[c, i + t] * w[c, 3 - 2 t] }; store y[2 i + 1] }
    -> parallel p, t, c { store stack[p, t, c] = w[c, (if p == 0 then 2 else 3) - 2 t] }
       parallel p, u { reduce t, c { x[c, u + t - 1] * stack[p, t, c] }; store pixels[u, p] }
       parallel o { store y[o] = pixels[o // 2 + (if o % 2 == 0 then 0 else 1), o % 2] }

Each place of the image is read once for all phases, tiles are as wide as the filters of all of them, and there is one launch where there were many. Pixels at the borders are computed for
phases that have no such result; nobody reads these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import product as combinations
from math import prod

from tilewright.analysis.affine import Affine
from tilewright.analysis.contraction import Contraction, find_contraction
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.program import KernelCall
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.common.simplify import simplify
from tilewright.passes.program.to_channels_last import upwards
from tilewright.passes.windows.guards import emit
from tilewright.passes.windows.image_forms import ImageForm, image_and_weights
from tilewright.passes.windows.pixel_phases import PixelPhases, PlacedPhase, chosen, divided

STEP = 64
"""Channels of weights are whole steps: the copy engine takes longer for what lies outside an array."""


@record
class _PhaseWindow:
    """Along one axis of the image: how many places, how far apart, and where the first of them is for the first result."""

    taps: Size
    apart: int
    first: int

    @property
    def kind(self) -> tuple[Size, int]:
        """What phases of one stack have in common."""
        return self.taps, self.apart


@record
class PhaseForm(ImageForm):
    """The convolution that a phase is, what it writes, and the names of the arrays it reads."""

    placed: PlacedPhase | None = None
    arrays: tuple[str, str] = ("", "")

    @property
    def windows(self) -> dict[int, _PhaseWindow] | None:
        """By axis of the results; None where windows are no plain ones."""
        assert self.placed is not None
        forms, found = self.found.access(self.image), dict[int, _PhaseWindow]()
        for axis, index in enumerate(self.placed.indices):
            own = next((form for form in forms if index in form.values), None)
            if own is None:
                continue
            taps = [v for v in own.values if v is not index]
            apart = own.factor(taps[0]).constant if taps else 1
            first = own.constant.constant
            if own.factor(index) != ONE or first is None or len(taps) > 1 or any(v not in self.found.k for v in taps) or apart is None or apart < 1:
                return None
            found[axis] = _PhaseWindow(self.found.reduce_extents[self.found.k.index(taps[0])] if taps else ONE, apart, first)
        return found

    @property
    def weight_forms(self) -> tuple[tuple[tuple[Size, ...], Size], ...] | None:
        """For each axis of the weights, factors of the filter and of the summed indices, and the constant; None where it has others."""
        indices = (self.found.indices[self.filters], *self.found.k)
        forms = self.found.access(self.weights)
        if any(v not in indices for form in forms for v in form.values):
            return None
        return tuple((tuple(form.factor(v) for v in indices), form.constant) for form in forms)

    @property
    def is_plain(self) -> bool:
        """Whether a result is made of its sum alone."""
        assert self.placed is not None
        region = self.found.parallel.regions[0]
        made = {result: op for op in region.ops for result in op.results}
        waiting, seen = [self.placed.store.operands[-1]], set[Value]()
        while waiting:
            value = waiting.pop()
            op = made.get(value)
            if value in region.args or (op is not None and op is not self.found.reduction and (op.opcode == "load" or op.regions)):
                return False
            if op is not None and op is not self.found.reduction and value not in seen:
                waiting += op.operands
            seen.add(value)
        return True


def phase_form(call: KernelCall, placed: PlacedPhase) -> PhaseForm | None:
    """The convolution that a phase is; None where its filters cannot be stacked."""
    kernel = upwards(call.kernel)
    found = find_contraction(kernel)
    if found is None or found.batch or found.a.dtype is not found.b.dtype:
        return None
    parts = image_and_weights(kernel, found)
    if parts is None:
        return None
    image, weights, order, channel = parts
    if weights.guard is not None or weights.tensor is None or image.load is None or weights.load is None:
        return None
    names = dict(zip(call.kernel.params, call.args, strict=True))
    arrays = names.get(image.load.operands[0]), names.get(weights.load.operands[0])
    if arrays[0] is None or arrays[1] is None or names.get(placed.store.operands[0]) in arrays:
        return None
    form = PhaseForm(kernel, found, image, weights, order, channel, placed=placed, arrays=(arrays[0], arrays[1]))
    return form if form.is_plain and form.windows is not None and form.weight_forms is not None and _reads_places(found, form) else None


def _reads_places(found: Contraction, form: PhaseForm) -> bool:
    """Whether every place of a window is one of the sum: no index but those of taps and channels is summed over."""
    values = {v for own in found.access(form.image) for v in own.values}
    return all(v in values for v in found.k)


@record
class PhaseAxis:
    """An axis of the results: rests that phases leave along it, in stacks, and how far each is shifted against the first place of its stack."""

    period: int
    stacks: tuple[tuple[int, ...], ...]
    shifts: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    """Where windows of a stack begin."""
    lengths: tuple[Size, ...]
    """Places of a stack."""

    @property
    def rests(self) -> list[int]:
        return sorted(rest for own in self.stacks for rest in own)

    @property
    def members(self) -> list[tuple[int, int]]:
        """For every rest in rising order, its stack and its place there."""
        at = {rest: (number, place) for number, own in enumerate(self.stacks) for place, rest in enumerate(own)}
        return [at[rest] for rest in self.rests]


@record
class PhaseStack:
    """The phases of one stack; the last axis comes fastest."""

    forms: tuple[PhaseForm, ...]
    firsts: tuple[int, ...]
    lengths: tuple[Size, ...]
    """By axis of the results; those of channels are not looked at."""
    row: Size
    """Where its rows of pixels begin, in rows of its own width."""

    @property
    def lead(self) -> PhaseForm:
        return self.forms[0]


@record
class StackedPhases:
    """All phases of a transposed convolution in stacks."""

    pixels: PixelPhases
    axes: tuple[PhaseAxis, ...]
    stacks: tuple[PhaseStack, ...]
    """By the stacks of each axis, the last fastest."""

    @property
    def columns(self) -> Size:
        return self.pixels.columns

    def rows(self, stack: PhaseStack) -> Size:
        return product(stack.lengths[axis] for axis in self.pixels.places)

    def scratch(self, name: str) -> Value:
        """The pixels of all stacks: a row has the channels of one phase."""
        last = self.stacks[-1]
        return Value(tensor(self.pixels.memory.dtype, (last.row + self.rows(last)) * len(last.forms), self.columns, align=16), name)

    def weights(self, stack: PhaseStack, name: str) -> Value:
        lead = stack.lead
        taps = product([lead.found.reduce_extents[p] for p in lead.taps])
        channels = lead.channels if lead.channels.divisible_by(STEP, lead.kernel.facts) else ceildiv(lead.channels, Size.of(STEP)) * STEP
        return Value(tensor(lead.weights.dtype, self.columns * len(stack.forms), taps, channels, align=16), name)

    # -- weights ----------------------------------------------------------------------------------------------------

    def packing(self, stack: PhaseStack, weights: Value) -> Kernel:
        """Copies the weights of all phases, with zeros for channels and filters that fill up."""
        lead, found = stack.lead, stack.lead.found
        assert isinstance(weights.type, Tensor) and lead.weights.load is not None
        memory, (_, taps, depth), filters = lead.weights.load.operands[0], weights.type.shape, found.extents[lead.filters]
        view = Value(tensor(weights.type.dtype, len(stack.forms), self.columns, taps, depth, align=16), weights.name)
        forms = [form.weight_forms for form in stack.forms]
        b = Builder(lead.kernel.span)

        def body(at: Builder, *indices: Value) -> list[Value]:
            phase, filter_, *places, channel = indices
            local = dict(zip((found.k[p] for p in lead.taps), places, strict=True)) | {found.k[lead.channel]: channel}
            walked = (filter_, *(local[k] for k in found.k))
            tests = [at.op("lt", filter_, at.index(filters))] if filters != self.columns else []
            tests += [at.op("lt", channel, at.index(lead.channels))] if lead.channels != depth else []
            place: list[Value] = []
            for axis, (factors, _) in enumerate(forms[0] or ()):
                own = emit(at, Affine(tuple((v, f) for v, f in zip(walked, factors, strict=True) if f != ZERO), ZERO))
                begin = _picked(at, phase, [form[axis][1] for form in forms if form is not None])
                place.append(at.add(own, begin))

            def element(inner: Builder) -> list[Value]:
                return [inner.op("load", memory, *place)]

            def nothing(inner: Builder) -> list[Value]:
                return [inner.const(0, lead.weights.dtype)]

            value = at.if_(reduce(at.logical_and, tests), element, nothing)[0] if tests else element(at)[0]
            at.multi("store", view, phase, filter_, lead._tap(at, local), channel, value)
            return []

        extents = [Size.of(len(stack.forms)), self.columns, *(found.reduce_extents[p] for p in lead.taps), depth]
        with b.at(lead.weights.load.span):
            b.parallel([b.index(e) for e in extents], body)
        return self._kernel(f"{lead.kernel.name}.stack", b, lead, (memory, view))

    # -- the convolution ----------------------------------------------------------------------------------------------

    def convolving(self, stack: PhaseStack, weights: Value, pixels: str) -> tuple[Kernel, Value]:
        """The convolution of a stack, and the array that it writes pixels to."""
        lead, found = stack.lead, stack.lead.found
        placed, wide = lead.placed, found.accumulator
        assert placed is not None and lead.image.load is not None and isinstance(lead.memory.type, Tensor)
        kept = Value(tensor(self.pixels.memory.dtype, stack.row + self.rows(stack), self.columns * len(stack.forms), align=16), pixels)
        forms, inside = found.access(lead.image), lead.memory.type.shape
        along = {axis: next(n for n, form in enumerate(forms) if index in form.values) for axis, index in enumerate(placed.indices) if axis != self.pixels.channel}
        begins = {along[axis]: stack.firsts[axis] for axis in self.pixels.places}
        b = Builder(lead.kernel.span)
        outer: dict[Value, Value] = {}
        clone_ops(b, [op for op in lead.kernel.body.ops if op.opcode != "parallel"], outer)

        def body(at: Builder, *indices: Value) -> list[Value]:
            local = outer | dict(zip(found.indices, indices, strict=True))

            def term(deep: Builder, *summed: Value) -> Sequence[Value]:
                known = local | dict(zip((found.k[p] for p in (*lead.taps, lead.channel)), summed, strict=True))
                place, tests = list[Value](), list[Value]()
                for axis, form in enumerate(forms):
                    own = Affine(tuple((known[v], f) for v, f in form.factors), Size.of(begins.get(axis, 0)))
                    place.append(emit(deep, own))
                    if axis in begins and (len(own.factors) > 1 or begins[axis] or inside[axis] != self._length(stack, along, axis)):
                        tests += [deep.op("ge", place[-1], deep.index(0)), deep.op("lt", place[-1], deep.index(inside[axis]))]

                def multiplied(region: Builder) -> list[Value]:
                    pixel = region.op("load", lead.memory, *place)
                    weight = region.op("load", weights, known[found.indices[lead.filters]], lead._tap(region, known), summed[-1])
                    pair = (pixel, weight) if lead.image is found.a else (weight, pixel)
                    return [region.mul(*(region.cast(v, wide) for v in pair))]

                return deep.if_(reduce(deep.logical_and, tests), multiplied, lambda region: [region.const(0, wide)]) if tests else multiplied(deep)

            sums = [*(found.reduce_extents[p] for p in lead.taps), lead.channels]
            with at.at(found.reduction.span):
                total = at.reduce("add", [at.index(e) for e in sums], term, [found.k[p].name for p in (*lead.taps, lead.channel)])
            local.update(zip(found.reduction.results, total, strict=True))
            lead._clone(at, [placed.store.operands[-1]], local)
            factors, behind = list[tuple[Value, Size]](), ONE
            for axis in reversed(self.pixels.places):
                factors.insert(0, (local[placed.indices[axis]], behind))
                behind = behind * stack.lengths[axis]
            row = emit(at, Affine(tuple(factors), stack.row))
            at.multi("store", kept, row, local[found.indices[lead.filters]], local.get(placed.store.operands[-1], placed.store.operands[-1]))
            return []

        lengths = {index: stack.lengths[axis] for axis, index in enumerate(placed.indices)} | {found.indices[lead.filters]: self.columns * len(stack.forms)}
        with b.at(found.parallel.span):
            b.parallel([b.index(lengths[index]) for index in found.indices], body, [a.name for a in found.indices])
        return replace(self._kernel(lead.kernel.name, b, lead, (lead.memory, weights, kept)), attrs=lead.kernel.attrs), kept

    def _length(self, stack: PhaseStack, along: dict[int, int], axis: int) -> Size:
        """Places of a stack along an axis of the image."""
        return stack.lengths[next(own for own, image in along.items() if image == axis)]

    @staticmethod
    def _kernel(name: str, b: Builder, lead: PhaseForm, params: tuple[Value, ...]) -> Kernel:
        """A kernel that reads an image or weights and nothing else, as plain phases do."""
        return simplify(Kernel(name, Stage.LOOP, params, Block((), tuple(b.ops)), facts=lead.kernel.facts, span=lead.kernel.span))

    # -- results ------------------------------------------------------------------------------------------------------

    def gathering(self, like: Kernel, store: Op, kept: Value, empty: float, columns: int) -> Kernel:
        """The kernel that turns pixels to results, with what is made of an empty sum where no phase has any. A block has so many columns."""
        pixels = self.pixels
        memory, b = Value(pixels.memory, store.operands[0].name), Builder(like.span)
        *outside, last = pixels.places

        def body(at: Builder, *indices: Value) -> list[Value]:
            row, slot, count, number, tests = at.index(0), at.index(0), at.index(1), at.index(0), list[Value]()
            for axis in outside:
                own = self.axes[axis]
                quotient, rest = divided(at, indices[axis], own.period) if own.period > 1 else (indices[axis], None)
                several = _among(at, own, rest, [len(own.stacks[stack]) for stack, _ in own.members])
                slot = at.add(at.mul(slot, several), _among(at, own, rest, [place for _, place in own.members]))
                count = at.mul(count, several)
                number = at.add(at.mul(number, at.index(len(own.stacks))), _among(at, own, rest, [stack for stack, _ in own.members]))
                shift = _among(at, own, rest, [own.shifts[stack][place] for stack, place in own.members])
                row = at.add(at.mul(row, _among(at, own, rest, [own.lengths[stack] for stack, _ in own.members])), at.add(quotient, shift))
                tests += pixels.there(at, axis, rest) if rest is not None else []
            # What columns have in common is computed before they differ.
            own, begins, steps = self.axes[last], list[Value](), list[Value]()
            for side, position in own.members:
                firsts = [s.row for s in self.stacks][side :: len(own.stacks)]
                steps.append(at.mul(count, at.index(len(own.stacks[side]))))
                begin = at.add(at.add(_picked(at, number, firsts), at.mul(row, at.index(own.lengths[side]))), at.index(own.shifts[side][position]))
                begins.append(at.add(at.mul(begin, steps[-1]), at.add(at.mul(slot, at.index(len(own.stacks[side]))), at.index(position))))
            quotient, rest = divided(at, indices[last], own.period)
            tests += pixels.there(at, last, rest)
            step = steps[0] if len({len(stack) for stack in own.stacks}) == 1 else chosen(at, rest, own.rests, steps)
            row = at.add(chosen(at, rest, own.rests, begins), at.mul(quotient, step))

            pixels.store_pixel(at, (memory, kept), row, indices, tests, empty)
            return []

        with b.at(store.span):
            b.parallel([b.index(extent) for extent in pixels.memory.shape], body)
        return pixels.gather_kernel(b, (memory, kept), like, columns)


def _among(b: Builder, axis: PhaseAxis, rest: Value | None, values: Sequence[Size | int]) -> Value:
    """The number that belongs to a rest along an axis."""
    sizes = [Size.of(value) for value in values]
    return b.index(sizes[0]) if rest is None or len(set(sizes)) == 1 else chosen(b, rest, axis.rests, [b.index(size) for size in sizes])


def _picked(b: Builder, index: Value, values: Sequence[Size]) -> Value:
    """The value with a number."""
    found = b.index(values[0])
    if len(set(values)) == 1:
        return found
    for number, value in list(enumerate(values))[1:]:
        found = b.select(b.op("eq", index, b.index(number)), b.index(value), found)
    return found


def stacked_phases(pixels: PixelPhases, calls: Sequence[KernelCall], phases: Sequence[PlacedPhase]) -> StackedPhases | None:
    """The phases in stacks; None where they have no windows in common, or make more of their sums than results."""
    forms = [phase_form(call, phase) for call, phase in zip(calls, phases, strict=True)]
    known = {form.placed.rests: form for form in forms if form is not None and form.placed is not None}
    if len(known) < len(forms) or len({(form.arrays, form.found.accumulator, form.order) for form in known.values()}) != 1:
        return None
    axes: list[PhaseAxis] = []
    for axis, period in enumerate(pixels.periods):
        own = _axis(axis, period, [] if axis == pixels.channel else list(known.values()))
        if own is None:
            return None
        axes.append(own)
    if all(len(stack) == 1 for axis in axes for stack in axis.stacks):
        return None
    stacks: list[PhaseStack] = []
    used = ZERO
    for numbers in combinations(*(range(len(axis.stacks)) for axis in axes)):
        taken = [axis.stacks[number] for axis, number in zip(axes, numbers, strict=True)]
        stacked = tuple(known[rests] for rests in combinations(*taken))
        if len({_alike(form) for form in stacked}) != 1:
            return None
        lengths = tuple(axis.lengths[number] for axis, number in zip(axes, numbers, strict=True))
        row = ceildiv(used, Size.of(prod(len(rests) for rests in taken)))
        stacks.append(PhaseStack(stacked, tuple(axis.firsts[number] for axis, number in zip(axes, numbers, strict=True)), lengths, row))
        used = (row + product(lengths[own] for own in pixels.places)) * len(stacked)
    return StackedPhases(pixels, tuple(axes), tuple(stacks))


def _alike(form: PhaseForm) -> tuple[object, ...]:
    """What is the same of all phases of a stack: the extents of the sum, and how weights are found, but for where they begin."""
    return form.found.reduce_extents, tuple(factors for factors, _ in form.weight_forms or ())


def _axis(axis: int, period: int, forms: Sequence[PhaseForm]) -> PhaseAxis | None:
    """The stacks along an axis of the results; None where windows do not depend on the rest alone."""
    windows: dict[int, tuple[_PhaseWindow, Size]] = {}
    for form in forms:
        assert form.placed is not None
        window = (form.windows or {}).get(axis)
        if window is None:
            return None
        rest = form.placed.rests[axis]
        if windows.setdefault(rest, (window, form.placed.extents[axis])) != (window, form.placed.extents[axis]):
            return None
    if not forms:
        return PhaseAxis(1, ((0,),), ((0,),), (0,), (ONE,))
    kinds = list(dict.fromkeys(windows[rest][0].kind for rest in sorted(windows)))
    stacks = tuple(tuple(rest for rest in sorted(windows) if windows[rest][0].kind == kind) for kind in kinds)
    firsts = tuple(min(windows[rest][0].first for rest in stack) for stack in stacks)
    shifts = tuple(tuple(windows[rest][0].first - first for rest in stack) for stack, first in zip(stacks, firsts, strict=True))
    # Phases have at most one place less than the first: of those shifted farthest, the first reaches farthest.
    lengths = []
    for stack, shift in zip(stacks, shifts, strict=True):
        farthest = stack[shift.index(max(shift))]
        lengths.append(windows[farthest][1] + max(shift))
    return PhaseAxis(period, stacks, shifts, firsts, tuple(lengths))
