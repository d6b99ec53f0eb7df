"""Convolutions of f32 as convolutions of tf32 parts: the arrays of parts, and the kernels that make them and multiply them.

In: a kernel that is a convolution. Out: an `ImageForm`: which factor is the image, which the weights, how parts of both lie, and the kernels of `split_images`. Images have
one to three axes besides batch and channels; one with a single axis gets a second of extent 1. Places of the window may be channels of the parts (`folded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import gap
from tilewright.analysis.contraction import Contraction, Factor, find_contraction, restates_bounds
from tilewright.base.dtypes import f32, i64, u32
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, ceildiv, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.common.tf32 import CUT, tf32_parts
from tilewright.passes.loop.collapse import collapse

PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""The parts of an image and of weights that are multiplied, in order, 0 being the small ones: the last three, or all four."""
UNIT = 8
"""Numbers of f32 in the 32 bytes that the L2 cache reads at once: rows of channels are whole multiples of them."""
ROWS = 128
"""Rows of weights are whole multiples of so many: the copy engine takes longer for one that lies outside an array than for one of zeros."""


def image_and_weights(kernel: Kernel, found: Contraction) -> tuple[Factor, Factor, tuple[int, ...], int] | None:
    """The factor that is an image, which the kernel does not write, the one that is weights, the order of the image's axes, and which summed index is its channel."""
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    images = [(f, order) for f in (found.a, found.b) if (order := image_order(found, f)) is not None]
    if len(images) != 1:
        return None
    ((image, order),) = images
    assert image.load is not None
    if image.load.operands[0] in written or len(found.n if image is found.a else found.m) != 1:
        return None
    channel = next(p for p, k in enumerate(found.k) if found.access(image)[order[-1]].is_just(k))
    return image, found.b if image is found.a else found.a, order, channel


def image_form(kernel: Kernel, found: Contraction | None = None, folded: int = 0) -> ImageForm | None:
    """The convolution of f32 that a kernel is, which may be at hand; None where it is none, or none that can be brought to parts. `folded` has a bit for each axis
    of the image whose places of the window are channels of the parts."""
    found = found or find_contraction(kernel)
    if found is None or found.batch or found.accumulator is not f32 or found.a.dtype is not f32 or found.b.dtype is not f32:
        return None
    parts = image_and_weights(kernel, found)
    if parts is None:
        return None
    image, weights, order, channel = parts
    form = ImageForm(kernel, found, image, weights, order, channel)
    if not folded:
        return form
    axes = tuple(axis for number, axis in enumerate(order[1:-1]) if folded >> number & 1)
    return replace(form, folded=axes) if set(axes) <= set(form.foldable) and folded >> len(order[1:-1]) == 0 else None


def image_order(found: Contraction, factor: Factor) -> tuple[int, ...] | None:
    """The axes of a factor that is a plain load, batch first, then those of an image, then channels; None where it is no load of an image."""
    memory = factor.tensor
    side = found.m if factor is found.a else found.n
    if memory is None or not 3 <= memory.rank <= 5 or len(side) != memory.rank - 1 or not restates_bounds(found, factor):
        return None
    forms = found.access(factor)
    batch, *places = (found.indices[p] for p in side)
    taken = [
        [axis for axis, form in enumerate(forms) if form.is_just(batch)],
        *([axis for axis, form in enumerate(forms) if own in form.values] for own in places),
        [axis for axis, form in enumerate(forms) if any(form.is_just(k) for k in found.k)],
    ]
    order = tuple(axes[0] for axes in taken if len(axes) == 1)
    return order if sorted(order) == list(range(memory.rank)) else None


@record
class ImageForm:
    """A convolution of f32: which factor is the image, the axes of its array (batch, image, channels), and the summed index along channels."""

    kernel: Kernel
    found: Contraction
    image: Factor
    weights: Factor
    order: tuple[int, ...]
    channel: int
    folded: tuple[int, ...] = ()
    """Axes of the image along which parts have an element for each place of the results, and the places of the window there beside the channels: of few
    channels a step of the sum has little else, and of places that no window reads no parts are made."""

    @property
    def key(self) -> tuple[object, ...]:
        """What parts of one array have in common."""
        if not self.folded:
            return self.order
        forms = self.found.access(self.image)
        windows = [(tuple(f for _, f in forms[axis].factors), forms[axis].constant, self._places(axis), self._taps_along(axis)[1]) for axis in self.folded]
        return (*self.order, *self.folded, *windows)

    @property
    def foldable(self) -> list[int]:
        """Axes whose places are made of one index of the results and at most one of the window, which no other axis has."""
        found, forms = self.found, self.found.access(self.image)
        if not self._separate_guard():
            return []
        axes: list[int] = []
        for axis in self.order[1:-1]:
            values = forms[axis].values
            taps = [v for v in values if v in found.k]
            known = all(f.constant is not None for _, f in forms[axis].factors) and forms[axis].constant.constant is not None
            alone = all(v not in form.values for v in values for other, form in enumerate(forms) if other != axis)
            if known and alone and len(taps) <= 1 and len(values) == len(taps) + 1:
                axes.append(axis)
        return axes

    def _pixel(self, axis: int) -> int:
        """The parallel index along an axis."""
        values = self.found.access(self.image)[axis].values
        return next(p for p, v in enumerate(self.found.indices) if v in values)

    def _places(self, axis: int) -> Size:
        """Places of the results along an axis."""
        return self.found.extents[self._pixel(axis)]

    def _taps_along(self, axis: int) -> tuple[int | None, Size]:
        """The summed index along an axis, and how many values it has."""
        values = self.found.access(self.image)[axis].values
        position = next((p for p, v in enumerate(self.found.k) if v in values), None)
        return position, ONE if position is None else self.found.reduce_extents[position]

    def taps_along(self, axis: int) -> Size:
        """Places of the window along an axis."""
        return self._taps_along(axis)[1]

    @property
    def read(self) -> Size:
        """Elements of the image in whose lines something is read."""
        tensor = self.image.tensor
        assert tensor is not None
        skipped = {a for a in self.folded if tensor.strides[a] != ONE and (n := self.taps_along(a).constant) is not None and n < self.step(a)}
        return product([self._places(a) * self.taps_along(a) if a in skipped else tensor.shape[a] for a in range(tensor.rank)])

    @property
    def turns_last(self) -> bool:
        """Whether an axis is folded whose places are neighbours in memory."""
        assert self.image.tensor is not None
        return any(self.image.tensor.strides[axis] == ONE for axis in self.folded)

    def step(self, axis: int) -> int:
        """How far windows of neighbouring results lie apart along an axis."""
        factor = self.found.access(self.image)[axis].factor(self.found.indices[self._pixel(axis)]).constant
        return factor or 1

    def _tests(self) -> list[Op] | None:
        """The tests of the image's guard; None where it is no conjunction of comparisons."""
        made = {result: op for op in walk(self.found.parallel.regions[0]) for result in op.results}
        tests: list[Op] = []
        waiting = [self.image.guard] if self.image.guard is not None else []
        while waiting:
            op = made.get(waiting.pop())
            if op is None:
                return None
            if op.opcode == "and":
                waiting += op.operands
            else:
                tests.append(op)
        return tests

    def _separate_guard(self) -> bool:
        return self._tests() is not None

    def _kept_tests(self) -> list[Value]:
        """The tests that speak of no folded axis."""
        forms, tests = self.found.access(self.image), self._tests()
        assert tests is not None
        gone = {v for axis in self.folded for v in forms[axis].values}
        return [op.result for op in tests if (distance := gap(op, self.found.forms)) is None or not gone & set(distance.values)]

    @property
    def memory(self) -> Value:
        assert self.image.load is not None
        return self.image.load.operands[0]

    @property
    def channels(self) -> Size:
        return self.found.reduce_extents[self.channel]

    @property
    def depth(self) -> Size:
        """Channels, for each place of the window that is folded into them."""
        return product([self.channels, *(self._taps_along(axis)[1] for axis in self.folded)])

    @property
    def padded(self) -> Size:
        """Those in whole 32 bytes."""
        return self._whole(self.depth, UNIT)

    def _unfolded(self, b: Builder, index: Value) -> tuple[Value, dict[int, Value]]:
        """The channel that an index of parts is, and by axis the place of the window."""
        taps = {axis: position for axis in self.folded if (position := self._taps_along(axis)[0]) is not None}
        several = [axis for axis in taps if self._taps_along(axis)[1] != ONE]
        places = {axis: b.index(0) for axis in taps if axis not in several}
        if not several:
            return index, places

        def divided(value: Value, by: Size) -> tuple[Value, Value]:
            # Channels of a pixel fit 32 bits, where division is cheap.
            quotient = b.cast(b.op("floordiv", b.cast(value, u32), b.cast(b.index(by), u32)), i64)
            return quotient, b.sub(value, b.mul(quotient, b.index(by)))

        rest, channel = divided(index, self.channels)
        for axis in reversed(several[1:]):
            rest, places[axis] = divided(rest, self._taps_along(axis)[1])
        places[several[0]] = rest
        return channel, places

    def _whole(self, size: Size, unit: int) -> Size:
        return size if size.divisible_by(unit, self.kernel.facts) else ceildiv(size, Size.of(unit)) * unit

    @property
    def taps(self) -> list[int]:
        """The other summed indices, but those that are folded into channels."""
        folded = {self._taps_along(axis)[0] for axis in self.folded}
        return [p for p in range(len(self.found.k)) if p != self.channel and p not in folded]

    @property
    def reversed_taps(self) -> set[int]:
        """Those of them along which the image is read backwards, as transposed convolutions do."""
        forms = self.found.access(self.image)
        factors = {p: [n for form in forms if (n := form.factor(self.found.k[p]).constant)] for p in self.taps}
        return {p for p, numbers in factors.items() if numbers and max(numbers) < 0}

    @property
    def images(self) -> Size:
        """How many images there are."""
        assert self.image.tensor is not None
        return self.image.tensor.shape[self.order[0]]

    @property
    def filters(self) -> int:
        """The parallel index of the weights."""
        (position,) = self.found.n if self.image is self.found.a else self.found.m
        return position

    def image_parts(self, number: int) -> Value:
        """The array of the image's parts."""
        assert self.image.tensor is not None
        inside = [self._places(axis) if axis in self.folded else self.image.tensor.shape[axis] for axis in self.order[1:-1]]
        return Value(tensor(f32, self.images * 2, *([ONE] if len(inside) == 1 else []), *inside, self.padded, align=16), f"{self.kernel.name}.parts{number}")

    def seen(self, parts: Value) -> Value:
        """The array of the image's parts as the convolution reads it."""
        return parts

    def weight_parts(self, number: int) -> Value:
        """The array of the weights' parts."""
        found = self.found
        rows = self._whole(found.extents[self.filters], ROWS)
        return Value(tensor(f32, 2, rows, product([found.reduce_extents[p] for p in self.taps]), self.padded, align=16), f"{self.kernel.name}.parts{number}")

    # -- kernels that make parts ----------------------------------------------------------------------------------

    def image_kernel(self, parts: Value) -> Kernel:
        assert isinstance(parts.type, Tensor)
        memory, flat = self.memory, parts.type.rank > len(self.order)
        b = Builder(self.kernel.span)
        _, *shape = parts.type.shape[1:] if flat else parts.type.shape

        def body(inner: Builder, *indices: Value) -> list[Value]:
            at, there = self.stored(inner, indices)
            value = self._inside(inner, there, [], {}, lambda deep, local: deep.op("load", memory, *at))
            places = [*([inner.index(0)] if flat else []), *indices[1:]]
            for image, part in zip((indices[0], inner.add(indices[0], inner.index(self.images))), _parts(inner, value), strict=True):
                inner.multi("store", parts, image, *places, part)
            return []

        assert self.image.load is not None
        with b.at(self.image.load.span):
            b.parallel([b.index(e) for e in (self.images, *shape)], body, ["n", *"dhw"[-(len(shape) - 1) :], "c"])
        kernel = Kernel(f"{self.kernel.name}.parts", Stage.LOOP, (memory, parts), Block((), tuple(b.ops)), facts=self.kernel.facts, span=self.kernel.span)
        return collapse(kernel)

    def stored(self, b: Builder, indices: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Where in the image an element of its parts is, whose indices are given, and the conditions that there is one."""
        memory, order = self.memory.type, self.order
        assert isinstance(memory, Tensor)
        at = {axis: indices[order.index(axis)] for axis in range(len(order))}
        at[order[-1]], window = self._unfolded(b, indices[-1])
        there: list[Value] = []
        for axis in self.folded:
            at[axis] = self._place(b, axis, at[axis], window.get(axis))
            there += [b.op("ge", at[axis], b.index(0)), b.op("lt", at[axis], b.index(memory.shape[axis]))]
        return [at[axis] for axis in range(len(order))], [*there, *self._there(b, at[order[-1]], indices[-1])]

    def _there(self, b: Builder, channel: Value, number: Value) -> list[Value]:
        """The conditions that a channel exists, which has this number among those of parts."""
        return [b.op("lt", number, b.index(self.depth))] if self.padded != self.depth else []

    def weight_kernel(self, parts: Value) -> Kernel:
        found = self.found
        b = Builder(self.kernel.span)
        mapping: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], mapping)
        sums = [*self.taps, self.channel]
        assert isinstance(parts.type, Tensor)
        rows, filters = parts.type.shape[1], found.extents[self.filters]

        def body(inner: Builder, *indices: Value) -> list[Value]:
            local = dict(mapping) | {found.indices[self.filters]: indices[0]} | dict(zip((found.k[p] for p in sums), indices[1:], strict=True))
            local[found.k[self.channel]], window = self._unfolded(inner, indices[-1])
            local |= {found.k[p]: place for axis, place in window.items() if (p := self._taps_along(axis)[0]) is not None}
            guards = [self.weights.guard] if self.weights.guard is not None else []
            there = [inner.op("lt", indices[0], inner.index(filters))] if rows != filters else []
            there += self._there(inner, local[found.k[self.channel]], indices[-1])

            def element(deep: Builder, inside: dict[Value, Value]) -> Value:
                self._clone(deep, [self.weights.value], inside)
                return inside[self.weights.value]

            small, large = _parts(inner, self._inside(inner, there, guards, local, element))
            place = [indices[0], self._tap(inner, local), indices[-1]]
            inner.multi("store", parts, inner.index(0), *place, small)
            inner.multi("store", parts, inner.index(1), *place, large)
            return []

        extents = [rows, *(found.reduce_extents[p] for p in self.taps), self.padded]
        names = [found.indices[self.filters].name, *(found.k[p].name for p in sums)]
        with b.at(found.reduction.span):
            b.parallel([b.index(e) for e in extents], body, names)
        return self._finished(f"{self.kernel.name}.pack", b, [parts], {})

    def _inside(
        self, b: Builder, known: Sequence[Value], guards: Sequence[Value], local: dict[Value, Value], element: Callable[[Builder, dict[Value, Value]], Value]
    ) -> Value:
        """An element where the conditions hold, of which some are known; zero elsewhere."""
        conditions = list(known)
        for guard in guards:
            self._clone(b, [guard], local)
            conditions.append(local[guard])
        if not conditions:
            return element(b, local)
        whole = conditions[0]
        for condition in conditions[1:]:
            whole = b.logical_and(whole, condition)

        def there(deep: Builder) -> list[Value]:
            return [element(deep, dict(local))]

        (result,) = b.if_(whole, there, lambda deep: [deep.const(0, f32)])
        return result

    # -- the convolution ------------------------------------------------------------------------------------------

    def main(self, terms: int, parts: Value, weights: Value) -> Kernel:
        """The convolution of parts."""
        found = self.found
        region = found.parallel.regions[0]
        b = Builder(self.kernel.span)
        mapping: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], mapping)
        sums = [*self.taps, self.channel]
        assert isinstance(parts.type, Tensor) and self.image.load is not None
        flat = parts.type.rank > len(self.order)
        loads = self.image.load.operands[1:]

        def body(inner: Builder, *indices: Value) -> list[Value]:
            local = dict(mapping) | dict(zip(region.args, indices, strict=True))

            def products(deep: Builder, number: Value, inside: dict[Value, Value]) -> list[Value]:
                # Of four the first is that of the small parts.
                pair = deep.add(number, deep.index(4 - terms)) if terms < 4 else number
                first = deep.op("floordiv", pair, deep.index(2))
                second = deep.sub(pair, deep.mul(first, deep.index(2)))
                walked = {axis: found.indices[self._pixel(axis)] for axis in self.folded} | {axis: loads[axis] for axis in self.order if axis not in self.folded}
                if self.folded:
                    walked[self.order[-1]] = found.k[self.channel]
                self._clone(deep, [walked[axis] for axis in self.order], inside)
                batch, *places = (inside[walked[axis]] for axis in self.order)
                where = [deep.add(batch, deep.mul(first, deep.index(self.images))), *([deep.index(0)] if flat else []), *places]
                pixel = deep.op("load", parts, *where)
                weight = deep.op("load", weights, second, inside[found.indices[self.filters]], self._tap(deep, inside), inside[found.k[self.channel]])
                return [deep.mul(*((pixel, weight) if self.image is found.a else (weight, pixel)))]

            def term(deep: Builder, number: Value, *values: Value) -> Sequence[Value]:
                inside = dict(local) | dict(zip((found.k[p] for p in sums), values, strict=True))
                for p in self.reversed_taps:
                    # The copy engine walks upwards.
                    inside[found.k[p]] = deep.sub(deep.index(found.reduce_extents[p] - 1), inside[found.k[p]])
                guards = ([self.image.guard] if self.image.guard is not None else []) if not self.folded else self._kept_tests()
                if not guards:
                    return products(deep, number, inside)
                self._clone(deep, guards, inside)
                zero, whole = deep.const(0, f32), inside[guards[0]]
                for guard in guards[1:]:
                    whole = deep.logical_and(whole, inside[guard])
                return deep.if_(whole, lambda region: products(region, number, dict(inside)), lambda region: [zero])

            for op in region.ops[:-1]:
                if op is found.reduction:
                    extents = [inner.index(terms), *(inner.index(found.reduce_extents[p]) for p in self.taps), inner.index(self.depth)]
                    with inner.at(op.span):
                        results = inner.reduce("add", extents, term, ["term", *(found.k[p].name for p in sums)])
                    local.update(zip(op.results, results, strict=True))
                else:
                    clone_ops(inner, [op], local)
            return []

        with b.at(found.parallel.span):
            b.parallel([b.index(e) for e in found.extents], body, [a.name for a in region.args])
        return self._finished(self.kernel.name, b, [parts, weights], {"precision": "tf32"})

    def _place(self, b: Builder, axis: int, pixel: Value, tap: Value | None) -> Value:
        """Where a result reads along an axis that is folded."""
        form = self.found.access(self.image)[axis]
        place = b.mul(pixel, b.index(self.step(axis)))
        position = self._taps_along(axis)[0]
        if position is not None:
            factor = form.factor(self.found.k[position])
            place = b.add(place, b.mul(tap if tap is not None else b.index(0), b.index(factor)))
        return b.add(place, b.index(form.constant))

    def _tap(self, b: Builder, local: dict[Value, Value]) -> Value:
        """All summed indices but that along channels, as one."""
        found = self.found
        total = b.index(0)
        for position, p in enumerate(self.taps):
            total = local[found.k[p]] if position == 0 else b.add(b.mul(total, b.index(found.reduce_extents[p])), local[found.k[p]])
        return total

    def _clone(self, b: Builder, values: Sequence[Value], mapping: dict[Value, Value]) -> None:
        """Copy the ops that make these values."""
        everything = list(walk(self.found.parallel.regions[0]))
        made = {result: op for op in everything for result in op.results}
        wanted: set[Value] = set()
        waiting = [v for v in values if v not in mapping]
        while waiting:
            value = waiting.pop()
            op = made.get(value)
            if value in wanted or op is None or value in mapping:
                continue
            wanted.update(op.results)
            waiting += [*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)]
        chosen: list[Op] = [op for op in everything if any(r in wanted for r in op.results)]
        nested = {id(inner) for op in chosen for region in op.regions for inner in walk(region)}
        clone_ops(b, [op for op in chosen if id(op) not in nested], mapping)

    def _finished(self, name: str, b: Builder, parts: Sequence[Value], attrs: dict[str, str]) -> Kernel:
        whole = eliminate_dead(
            Kernel(
                name, Stage.LOOP, (), Block((), tuple(b.ops)), facts=self.kernel.facts,
                attrs=MappingProxyType({**self.kernel.attrs, **attrs}), span=self.kernel.span,
            )
        )  # fmt: skip
        used = {v for op in walk(whole.body) for v in op.operands}
        return replace(whole, params=(*(p for p in self.kernel.params if p in used), *(p for p in parts if p in used)))


def _parts(b: Builder, value: Value) -> tuple[Value, Value]:
    """The small part of an f32, and the large one, as f32."""
    large, small = tf32_parts(b, b.bitcast(value, u32))
    return b.bitcast(b.op("and", small, b.const(CUT, u32)), f32), b.bitcast(large, f32)
