"""Compute a transposed convolution as one product for all taps, and a sum of its results. `Program -> Program`, for CPUs.

In: a program whose sums have one condition each (`join_guards.py`), the target and the sizes of the call. Out: the same, where a sum over channels and taps that asks
`p % s == 0`, with p the place of a result less that of a tap, is three steps, if that is estimated to take less time than a kernel for each phase (`split_phases.py`):

    parallel o { reduce c, r { p = o + 1 - r; if p % 2 == 0 and 0 <= p // 2 < n { x[c, p // 2] * w[c, r] } else { 0 } }; store y[o] }
    -> a copy of x whose rows have zeros before and behind them
       parallel r, i { reduce c { copy[c, i] * w[c, r] }; store products[r, i] }
       parallel o (of length / 2) { store y[2 o] = products[1, o + …]; store y[2 o + 1] = products[0, o + …] + products[2, o + …] }

The product has a row for each tap of each filter and reads each input once; phases read it once for each tap. Results side by side along the last axis are written together.
A kernel of its own writes the last ones of a row, which are fewer than the steps of a tap, one after the other: its code is short, whatever the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod
from types import MappingProxyType

from tilewright.analysis.affine import Affine, Forms, analyse, floored
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, maximum, product, without_clamp
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, is_watched, walk
from tilewright.ir.program import KernelCall, LoopTurn, OrderedLoop, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.common.simplify import simplify
from tilewright.passes.windows.guards import GuardTest, Made, divisor_of, guard_tests
from tilewright.passes.windows.join_guards import FlatSum, flattened, is_sum

MOST_STEPS = 4
"""Results side by side that are written together."""
MOST_TERMS = 64
"""Terms of these: each is code of its own."""
_PRODUCT, _COPIED, _APART = 1.6, 2.0, 3.0
"""Nanoseconds: to write and add up a product, to copy an element of the image to a panel, and to write a result that is apart from others of its phase rather than beside
them. Measured on a core with vectors of 16 bytes."""
_MASKED_COPIED, _MASKED_APART = 0.45, 1.6
"""The last two where images have several axes, and a CPU copies what several short rows have of a vector at once."""
_MOST_PHASES = 8
"""Kernels for phases of several axes that are compiled in reasonable time."""
TYPICAL = 32
"""Channels or filters where their number is not known: code is made for small numbers only."""


def multiply_taps(program: Program, target: Target | None, sizes: Mapping[str, int]) -> Program:
    """The program with such kernels cut."""
    if target is None or target.simt:
        return program
    calls: list[KernelCall] = []
    scratch, loops = list(program.scratch), list(program.loops)
    for call in program.calls:
        found = None if call.varies or call.loops or is_watched(call.kernel) else find_taps(call.kernel)
        if found is None or not found.pays(sizes, target):
            calls.append(call)
            continue
        arrays = (found.copy(len(scratch)), found.products(len(scratch)))
        for array in arrays:
            assert isinstance(array.type, Tensor)
            scratch.append(ProgramArray(array.name, array.type, "scratch"))
        names = dict(zip(call.kernel.params, call.args, strict=True)) | {array: array.name for array in arrays}
        turns: tuple[LoopTurn, ...] = ()
        if found.batch is not None:
            images = found.extent(found.batch)
            found = replace(found, step=f"{call.kernel.name}.image{len(loops)}")
            loops.append(OrderedLoop(found.step, images, span=found.reduction.span))
            turns = (LoopTurn(found.step),)
        for kernel in (found.copying(arrays[0]), found.multiplying(*arrays), *found.summing(arrays[1])):
            calls.append(KernelCall(kernel, tuple(names[p] for p in kernel.params), turns))
    return replace(program, calls=tuple(calls), scratch=tuple(scratch), loops=tuple(loops))


@record
class Axis:
    """An axis of the image that taps walk along: `steps * place = result + shift - reach * tap`."""

    extent: Size
    result: int
    """Which index of the nest."""
    tap: int
    """Which index of the sum."""
    taps: int
    steps: int
    shift: int
    reach: int

    @property
    def common(self) -> int:
        return gcd(self.reach, self.steps)

    @property
    def period(self) -> int:
        """From one tap of a result to its next."""
        return self.steps // self.common

    @property
    def back(self) -> int:
        """Places from one term to the next."""
        return self.reach // self.common

    @property
    def terms(self) -> int:
        """Of a result, at most."""
        return -(-self.taps // self.period)

    def offsets(self, rest: int) -> list[tuple[int, int]]:
        """The taps of results that leave a rest, and how far their places are from that of the result."""
        found = [(tap, rest + self.shift - self.reach * tap) for tap in range(self.taps)]
        return [(tap, far // self.steps) for tap, far in found if far % self.steps == 0]

    def first(self, b: Builder, place: Value) -> tuple[Value, Value, Value | None]:
        """For one result: its first tap, where that reads, and whether there is one at all; None: there is."""
        there = b.add(place, b.index(self.shift))
        tap, some = b.index(0), None
        if self.period > 1:
            inverse = pow(self.back, -1, self.period)
            whole = there if self.common == 1 else b.op("floordiv", there, b.index(self.common))
            tap = b.op("mod", whole if inverse == 1 else b.mul(whole, b.index(inverse)), b.index(self.period))
        if self.common > 1:
            some = b.op("eq", b.op("mod", there, b.index(self.common)), b.index(0))
        start = b.sub(there, b.mul(tap, b.index(self.reach)))
        return tap, start if self.steps == 1 else b.op("floordiv", start, b.index(self.steps)), some


@record
class Taps:
    """A transposed convolution: its sum, the load of the image, and the axes that taps walk along, the last ones of the image."""

    kernel: Kernel
    nest: Op
    flat: FlatSum
    reduction: Op
    load: Op
    axes: tuple[Axis, ...]
    channels: tuple[int, ...]
    """Indices of the sum that are no taps."""
    batch: int | None = None
    """The index of the nest that counts images: the other factor is the same for all. Images are done one after another, so that their products stay in a cache."""
    step: str = ""
    """The name of the loop over images."""

    @property
    def lead(self) -> list[int]:
        """The first axes of the image that a copy has, too."""
        first = range(self.image.rank - len(self.axes))
        return [
            n
            for n in first
            if self.batch is None or self.load.operands[1 + n] is not self.nest.regions[0].args[self.batch]
        ]

    @property
    def image(self) -> Tensor:
        type_ = self.load.operands[0].type
        assert isinstance(type_, Tensor)
        return type_

    @property
    def last(self) -> Axis:
        return self.axes[-1]

    @property
    def others(self) -> list[int]:
        """Indices of the nest that are no places."""
        places = {axis.result for axis in self.axes}
        return [n for n in range(len(self.nest.operands)) if n not in places and n != self.batch]

    def _image(self, b: Builder) -> dict[Value, Value]:
        """The index of images is the number of the step."""
        return {} if self.batch is None else {self.nest.regions[0].args[self.batch]: b.index(Size.of(self.step))}

    def extent(self, position: int) -> Size:
        """Of an index of the nest."""
        size = analyse(self.kernel)[self.nest.operands[position]].constant
        shapes = {s for p in self.kernel.params if isinstance(p.type, Tensor) for s in p.type.shape}
        return without_clamp(size) if without_clamp(size) in shapes else size  # no array has a negative extent

    # -- the frame ------------------------------------------------------------------------------------------------------------------

    @property
    def before(self) -> int:
        """Zeros before a row."""
        return max(0, *(-far for rest in range(self.last.steps) for _, far in self.last.offsets(rest)))

    @property
    def width(self) -> Size:
        """Of a row of the copy."""
        behind = max((far for rest in range(self.last.steps) for _, far in self.last.offsets(rest)), default=0)
        groups = floored(self.extent(self.last.result) + (self.last.steps - 1), self.last.steps)
        return maximum(self.last.extent, groups + behind) + self.before

    @property
    def places(self) -> Size:
        """Of one image of the copy."""
        return product((*(axis.extent for axis in self.axes[:-1]), self.width))

    def place(self, b: Builder, indices: Sequence[Value]) -> Value:
        """Where an element lies; its last index is counted from the frame on."""
        total = indices[0]
        rows = (*(axis.extent for axis in self.axes[1:-1]), self.width)
        for index, size in zip(indices[1:], rows, strict=False):  # one axis has no rows
            total = b.add(b.mul(total, b.index(size)), index)
        return total

    # -- what it costs --------------------------------------------------------------------------------------------------------------

    def pays(self, sizes: Mapping[str, int], target: Target) -> bool:
        """Whether to write and add up products takes less time than to copy the image for each tap, and to write results one by one."""
        taps, results = prod(axis.taps for axis in self.axes), prod(axis.steps for axis in self.axes)
        forms = analyse(self.kernel)
        depth = prod(_known(forms[self.flat.extents[n]].constant, sizes) for n in self.channels)
        rows = prod(_known(self.extent(n), sizes) for n in self.others)
        masked = target.has_lane_masks and len(self.axes) > 1 and results <= _MOST_PHASES
        copied, apart = (_MASKED_COPIED, _MASKED_APART) if masked else (_COPIED, _APART)
        return _PRODUCT * taps * rows < copied * taps * depth + apart * rows * results

    # -- arrays ---------------------------------------------------------------------------------------------------------------------

    def copy(self, number: int) -> Value:
        lead = (self.image.shape[n] for n in self.lead)
        return Value(tensor(self.image.dtype, *lead, self.places, align=16), f"{self.kernel.name}.framed{number}")

    def products(self, number: int) -> Value:
        taps = (Size.of(axis.taps) for axis in self.axes)
        extents = (*(self.extent(n) for n in self.others), *taps, self.places)
        return Value(tensor(dtype_of(self.flat.term.type), *extents, align=16), f"{self.kernel.name}.products{number}")

    # -- kernels --------------------------------------------------------------------------------------------------------------------

    def _kernel(self, name: str, b: Builder, *arrays: Value) -> Kernel:
        body = Block((), tuple(b.ops))
        used = {v for op in walk(body) for v in op.operands}
        params = (*(p for p in self.kernel.params if p in used), *arrays)
        found = Kernel(
            f"{self.kernel.name}.{name}", Stage.LOOP, params, body, facts=self.kernel.facts, span=self.kernel.span
        )
        return simplify(eliminate_dead(found))

    def copying(self, copy: Value) -> Kernel:
        """Rows with zeros before and behind them."""
        memory, b = self.load.operands[0], Builder(self.kernel.span)
        outer = range(self.image.rank - len(self.axes), self.image.rank - 1)
        walked = [*self.lead, *outer]

        def body(at: Builder, *row: Value) -> list[Value]:
            zero, one, start, length = at.index(0), at.index(1), at.index(self.before), at.index(self.last.extent)
            lead, rows = row[: len(self.lead)], row[len(self.lead) :]
            given = dict(zip(walked, row, strict=True))

            def nothing(inner: Builder, z: Value) -> list[Value]:
                return list(
                    inner.multi("store", copy, *lead, self.place(inner, (*rows, z)), inner.const(0, self.image.dtype))
                )

            def element(inner: Builder, z: Value) -> list[Value]:
                where = [
                    given[n] if n in given else inner.index(Size.of(self.step)) for n in range(self.image.rank - 1)
                ]
                value = inner.op("load", memory, *where, z)
                return list(inner.multi("store", copy, *lead, self.place(inner, (*rows, inner.add(z, start))), value))

            at.for_(zero, start, one, [], nothing, name="z", independent=True)
            at.for_(zero, length, one, [], element, name="z", independent=True)
            at.for_(at.add(length, start), at.index(self.width), one, [], nothing, name="z", independent=True)
            return []

        with b.at(self.load.span):
            b.parallel([b.index(self.image.shape[n]) for n in walked], body)
        return self._kernel("frame", b, copy)

    def multiplying(self, copy: Value, products: Value) -> Kernel:
        """The products of all taps with all places of the copy."""
        b = Builder(self.kernel.span)
        outer: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op is not self.nest], outer)
        args, terms = self.nest.regions[0].args, self.flat.args

        def body(at: Builder, *indices: Value) -> list[Value]:
            *own, place = indices
            mapping = dict(outer)
            if self.batch is not None:
                mapping[args[self.batch]] = place
            mapping.update(zip((args[n] for n in self.others), own, strict=False))
            mapping.update(zip((terms[axis.tap] for axis in self.axes), own[len(self.others) :], strict=True))
            # What speaks of places is not needed any more.
            mapping.update({args[axis.result]: place for axis in self.axes})
            clone_ops(at, [op for op in self.nest.regions[0].ops if op in self.before_sum()], mapping)

            def term(inner: Builder, *channels: Value) -> list[Value]:
                mapping.update(zip((terms[n] for n in self.channels), channels, strict=True))
                for op in self.flat.ops:
                    if op is self.load:
                        with inner.at(op.span):
                            where = [mapping.get(v, v) for v in (op.operands[1 + n] for n in self.lead)]
                            mapping[op.result] = inner.op("load", copy, *where, place)
                    else:
                        clone_ops(inner, [op], mapping)
                return [mapping[self.flat.term]]

            (total,) = at.reduce(
                "add", [mapping.get(self.flat.extents[n], self.flat.extents[n]) for n in self.channels], term
            )
            at.multi("store", products, *indices, total)
            return []

        extents = [outer.get(self.nest.operands[n], self.nest.operands[n]) for n in self.others]
        with b.at(self.reduction.span):
            b.parallel([*extents, *(b.index(axis.taps) for axis in self.axes), b.index(self.places)], body)
        # There are too many places for factors to be read where they lie: that would be as much code again.
        return replace(self._kernel("multiply", b, copy, products), attrs=MappingProxyType({"copies": True}))

    def before_sum(self) -> list[Op]:
        """Ops of the nest that the sum needs."""
        ops = self.nest.regions[0].ops
        return [op for op in ops[: ops.index(self.reduction)] if op.opcode != "store" and not op.regions]

    def summing(self, products: Value) -> tuple[Kernel, ...]:
        """The kernel that adds up terms of as many results as a step has, and the one for what is left of a row."""
        steps, whole = self.last.steps, self.extent(self.last.result)
        groups = floored(whole, steps)
        kernels = [self._summing(products, groups, True)]
        if whole != groups * steps:
            kernels.append(self._summing(products, groups, False))
        return tuple(kernels)

    def _summing(self, products: Value, groups: Size, main: bool) -> Kernel:
        b = Builder(self.kernel.span)
        outer: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op is not self.nest], outer)
        args, last, steps = self.nest.regions[0].args, self.last, self.last.steps
        walked = [n for n in range(len(args)) if n not in (last.result, self.batch)]

        def body(at: Builder, *indices: Value) -> list[Value]:
            own = dict(zip(walked, indices, strict=False))

            def finish(inner: Builder, place: Value, total: Value) -> list[Value]:
                mapping = {
                    **outer,
                    **self._image(inner),
                    **{args[n]: v for n, v in own.items()},
                    args[last.result]: place,
                    self.reduction.result: total,
                }
                clone_ops(
                    inner,
                    [op for op in self.nest.regions[0].ops if op is not self.reduction and op.opcode != "yield"],
                    mapping,
                )
                return []

            if main:
                start = at.mul(indices[-1], at.index(steps))
                for rest, total in enumerate(self._sums(at, own, indices[-1], products)):
                    finish(at, at.add(start, at.index(rest)), total)
                return []

            def one(inner: Builder, place: Value) -> list[Value]:
                return finish(inner, place, self._sum(inner, own, place, products))

            # Few results, which lie apart: one after the other, by code that is the same for all.
            first, end = at.index(groups * steps), at.index(self.extent(last.result))
            at.for_(first, end, at.index(1), [], one, name="place")
            return []

        extents = [outer.get(self.nest.operands[n], self.nest.operands[n]) for n in walked]
        with b.at(self.reduction.span):
            b.parallel([*extents, b.index(groups)] if main else extents, body)
        return self._kernel("sum" if main else "ends", b, products)

    def _sums(self, b: Builder, own: Mapping[int, Value], group: Value, products: Value) -> list[Value]:
        """The sums of a group's results."""
        others = [own[n] for n in self.others]

        def sum_of(rest: int) -> Value:
            def row(inner: Builder, taps: Sequence[Value], places: Sequence[Value]) -> Value:
                total: Value | None = None
                for tap, far in self.last.offsets(rest):
                    where = self.place(inner, (*places, inner.add(group, inner.index(far + self.before))))
                    value = inner.op("load", products, *others, *taps, inner.index(tap), where)
                    total = value if total is None else inner.add(total, value)
                assert total is not None
                return total

            return self._added(b, firsts, row)

        firsts = [axis.first(b, own[axis.result]) for axis in self.axes[:-1]]
        return [sum_of(rest) if self.last.offsets(rest) else self._nothing(b) for rest in range(self.last.steps)]

    def _sum(self, b: Builder, own: Mapping[int, Value], place: Value, products: Value) -> Value:
        """The sum of any result."""
        others = [own[n] for n in self.others]
        firsts = [axis.first(b, place if axis is self.last else own[axis.result]) for axis in self.axes]

        def product_of(inner: Builder, taps: Sequence[Value], places: Sequence[Value]) -> Value:
            framed = inner.add(places[-1], inner.index(self.before))
            return inner.op("load", products, *others, *taps, self.place(inner, (*places[:-1], framed)))

        return self._added(b, firsts, product_of)

    def _nothing(self, b: Builder) -> Value:
        return b.const(0, dtype_of(self.flat.term.type))

    def _added(
        self,
        b: Builder,
        firsts: Sequence[tuple[Value, Value, Value | None]],
        value: Callable[[Builder, Sequence[Value], Sequence[Value]], Value],
    ) -> Value:
        """The sum of what `value` makes of the taps and places of each term, along the first axes, of which these are the first terms."""
        axes = self.axes[: len(firsts)]

        def taken(at: Builder, terms: Mapping[Axis, Value]) -> Value:
            taps: list[Value] = []
            places: list[Value] = []
            conditions: list[Value] = []
            for axis, (tap, place, some) in zip(axes, firsts, strict=True):
                if axis in terms:
                    tap = at.add(tap, at.mul(terms[axis], at.index(axis.period)))
                    place = at.sub(place, at.mul(terms[axis], at.index(axis.back)))
                taps.append(tap)
                places.append(place)
                conditions += [] if some is None else [some]
                if axis.taps % axis.period or axis.terms * axis.period > axis.taps:
                    conditions.append(at.op("lt", tap, at.index(axis.taps)))
                if axis is not self.last:  # whose frame has zeros
                    conditions += [at.op("ge", place, at.index(0)), at.op("lt", place, at.index(axis.extent))]

            def inside(inner: Builder) -> list[Value]:
                return [value(inner, taps, places)]

            if not conditions:
                return inside(at)[0]
            whole = conditions[0]
            for condition in conditions[1:]:
                whole = at.logical_and(whole, condition)
            return at.if_(whole, inside, lambda inner: [self._nothing(inner)])[0]

        several = [axis for axis in axes if axis.terms > 1]
        if not several:
            return taken(b, {})

        def term(inner: Builder, *terms: Value) -> list[Value]:
            return [taken(inner, dict(zip(several, terms, strict=True)))]

        return b.reduce("add", [b.index(axis.terms) for axis in several], term)[0]


def _known(size: Size, sizes: Mapping[str, int]) -> int:
    return size.evaluate(sizes) if size.names <= sizes.keys() else TYPICAL


# -- what is recognised -------------------------------------------------------------------------------------------------------------------


def find_taps(kernel: Kernel, most_steps: int = MOST_STEPS) -> Taps | None:
    """The transposed convolution that a kernel is, with at most so many steps along rows; None for other kernels."""
    nests = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(nests) != 1 or not nests[0].operands:
        return None
    (nest,), made = nests, {result: op for op in walk(kernel.body) for result in op.results}
    sums = [op for op in nest.regions[0].ops if is_sum(op)]
    flat = flattened(sums[0], made) if len(sums) == 1 else None
    if flat is None:
        return None
    forms = analyse(kernel)
    tests = [test for c in flat.conditions for test in guard_tests(c, made, forms)]
    if not any(test.divisor > 1 for test in tests):
        return None
    term = made.get(flat.term)
    if term is None or term.opcode != "mul" or any(forms[v].factors for v in nest.operands):
        return None
    loads = [op for op in flat.ops if op.opcode == "load"]
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    if len(loads) != 2 or any(op.operands[0] in written for op in walk(kernel.body) if op.opcode == "load"):
        return None
    for load, other in (loads, loads[::-1]):
        found = _taps(kernel, nest, flat, sums[0], load, made, forms, most_steps)
        if found is not None and _is_guarded_so(found, tests, forms) and _is_apart(found, other, made):
            return replace(found, batch=0) if _has_images(found, other, made) else found
    return None


def _taps(kernel: Kernel, nest: Op, flat: FlatSum, reduction: Op, load: Op, made: Made, forms: Forms, most_steps: int) -> Taps | None:
    """The axes of an image: those at its end whose places are made of a result's and a tap's."""
    memory, args = load.operands[0].type, nest.regions[0].args
    if not isinstance(memory, Tensor) or load.attrs.get("masked") or "watch" in load.attrs:
        return None
    axes: list[Axis] = []
    for value, extent in zip(reversed(load.operands[1 : 1 + memory.rank]), reversed(memory.shape), strict=True):
        axis = _axis(value, extent, args, flat, made, forms)
        if axis is None:
            break
        axes.insert(0, axis)
    if not axes or len({axis.result for axis in axes}) < len(axes) or len({axis.tap for axis in axes}) < len(axes):
        return None
    channels = tuple(n for n in range(len(flat.args)) if n not in {axis.tap for axis in axes})
    found = Taps(kernel, nest, flat, reduction, load, tuple(axes), channels)
    last = found.last
    code = sum(len(last.offsets(rest)) for rest in range(last.steps))
    if (
        not channels
        or not found.others
        or last.result != len(args) - 1
        or not 1 < last.steps <= most_steps
        or not 0 < code <= MOST_TERMS
    ):
        return None
    # The rest of the image's indices, and those of the sum, stand still while places and taps move.
    moving = {args[axis.result] for axis in axes} | {flat.args[axis.tap] for axis in axes}
    rest = [*load.operands[1 : 1 + memory.rank - len(axes)], *(flat.extents[n] for n in channels)]
    return (
        found
        if not any(_made_of(v, moving, made) for v in rest)
        and all(not forms[flat.extents[n]].factors for n in channels)
        else None
    )


def _axis(value: Value, extent: Size, args: Sequence[Value], flat: FlatSum, made: Made, forms: Forms) -> Axis | None:
    op, form, steps = made.get(value), forms.get(value), 1
    if op is not None and op.opcode == "floordiv" and form is not None and form.bare is value:
        divisor = divisor_of(op, forms)
        if divisor is None:
            return None
        form, steps = forms.get(op.operands[0]), divisor
    if form is None or form.constant.constant is None or len(form.factors) != 2:
        return None
    results = [(args.index(v), f.constant) for v, f in form.factors if v in args]
    taps = [(flat.args.index(v), f.constant) for v, f in form.factors if v in flat.args]
    if len(results) != 1 or len(taps) != 1 or results[0][1] != 1 or taps[0][1] is None or taps[0][1] >= 0:
        return None
    walked = forms.get(flat.extents[taps[0][0]])
    count = None if walked is None or walked.factors else walked.constant.constant
    if count is None or count < 1:
        return None
    return Axis(extent, results[0][0], taps[0][0], count, steps, form.constant.constant, -taps[0][1])


def _place(found: Taps, axis: Axis) -> Affine:
    """`steps * place`, as a form."""
    result, tap = found.nest.regions[0].args[axis.result], found.flat.args[axis.tap]
    return Affine(((result, Size.of(1)), (tap, Size.of(-axis.reach))), Size.of(axis.shift))


def _is_guarded_so(found: Taps, tests: Sequence[GuardTest], forms: Forms) -> bool:
    """Whether every test is a bound of a place, or whether it is one, and each place is tested to be one."""
    rank = found.image.rank
    whole: set[Axis] = set()
    for test in tests:
        for axis, value in zip(found.axes, found.load.operands[1 + rank - len(found.axes) : 1 + rank], strict=True):
            if test.form is None:
                return False
            far = _place(found, axis)
            if test.divisor:
                if test.divisor == axis.steps and _equal(test.form, far):
                    whole.add(axis)
                    break
                continue
            end = Affine((), axis.extent * axis.steps - 1)
            bounds = [far, end.minus(far), Affine((), (axis.extent - 1) * axis.steps).minus(far)]
            bounds += [forms[value], Affine((), axis.extent - 1).minus(forms[value])]
            if any(_equal(test.form, bound) for bound in bounds):
                break
        else:
            return False
    return all(axis in whole or axis.steps == 1 for axis in found.axes)


def _equal(form: Affine, other: Affine) -> bool:
    rest = form.minus(other)
    return not rest.factors and rest.constant == ZERO


def _is_apart(found: Taps, other: Op, made: Made) -> bool:
    """Whether the other factor does not depend on places."""
    places = {found.nest.regions[0].args[axis.result] for axis in found.axes}
    return (
        not any(_made_of(v, places, made) for v in other.operands)
        and "watch" not in other.attrs
        and not other.attrs.get("masked")
    )


def _has_images(found: Taps, other: Op, made: Made) -> bool:
    """Whether the first index of the nest counts images: it is one axis of the image, and nothing else is made of it."""
    first = found.nest.regions[0].args[0]
    lead = found.load.operands[1 : 1 + found.image.rank - len(found.axes)]
    rest = [*other.operands, *(v for v in lead if v is not first), *(found.flat.extents[n] for n in found.channels)]
    return (
        0 in found.others
        and len(found.others) > 1
        and lead.count(first) == 1
        and not any(_made_of(v, {first}, made) for v in rest)
    )


def _made_of(value: Value, moving: set[Value], made: Made) -> bool:
    waiting, seen = [value], set[Value]()
    while waiting:
        current = waiting.pop()
        if current in moving:
            return True
        if current not in seen:
            seen.add(current)
            op = made.get(current)
            waiting += op.operands if op is not None else ()
    return False
