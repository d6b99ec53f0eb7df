"""Convolutions of few channels read a row of a window as channels. `Program -> Program`.

In: a program and the schedules of its contractions. Where one says `to_channels_last = rows` (or `rows32`), the convolution's input is first copied to scratch
[n, h, w, c] with channels in whole 16 bytes (or 32) and zeros beside each row of the image, as far as windows reach. All pixels of a window's row are then neighbours in
memory, and so are their channels: the copy engine is told of an array [n, h, j, q] whose pixels overlap, q being all channels of the window's row, and no
byte is copied twice. Weights become a matrix [k, r, q]. With `to_channels_last = gather` the copy is [n, h, j, q] itself, each place of a window's row beside the next, wherever
these lie in the image, and nothing between them: a row of few channels fills fewer steps, and from places that windows leave out nothing is brought. It may be a column of a window
instead, or what lies along any axis (`folded`, a bit for each). Out: the program with these copies, and the convolution as a sum over r and q, which fills its steps.

    parallel n, k, i, j { acc = reduce c, r, s { yield x[n, c, i + r, j + s - 1] * w[k, c, r, s] }; out[n, k, i, j] = f(acc) }
    -> parallel n, h, w, c { store x.rows[n, h, w, c] = x[n, c, h, w - 1], or 0 }
       parallel k, r, q { store w.rows[k, r, q] = w[k, q % c, r, q // c] }
       parallel n, k, i, j { acc = reduce r, q { yield x.rows[n, i + r, j, q] * w.rows[k, r, q] }; out[n, k, i, j] = f(acc) }
       where x.rows has a stride of c along j
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import i64, u32
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.sizes import ONE, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.common.rebuild_nest import Copies, ValueCopier, all_of, copy_nest, copy_outside, finished
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.program.to_channels_last import turned_kernel, turns_of, upwards
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.windows.image_forms import image_and_weights
from tilewright.passes.windows.row_windows import OVERLAPPING, RowWindows

WAYS = OVERLAPPING | {"gather": 0, "image_gather": 0}
"""Values of a schedule's `to_channels_last`, and of how many bytes a pixel's channels are whole multiples: pixels that begin at whole 32 bytes are read faster, from more memory. 0: pixels
are copied for every window, as many channels as there are, from an image whose channels lie last, or that `to_channels_last` has turned before."""
ROWS, STEP = 8, 64
"""Rows of weights are whole multiples of so many, as columns of tiles are, and their channels are whole steps: the copy engine takes longer for what lies outside an array."""


def window_rows(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with kernels that copy, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    copied: dict[tuple[object, ...], Value] = {}
    """Copies of images, by array and what is copied: several kernels, phases above all, read the same copy until somebody writes the array."""
    for call, schedule in zip(program.calls, plans, strict=True):
        written = _written(call)
        if not isinstance(schedule, Wgmma) or schedule.to_channels_last not in WAYS or schedule.tf32_terms:
            calls.append(call)
            schedules.append(schedule)
            copied = {key: copy for key, copy in copied.items() if key[0] not in written}
            continue
        form = row_form(call.kernel, schedule.to_channels_last, schedule.folded)
        if form is None:
            raise CompilerBug.at("TW040", f"{call.kernel.name} is no convolution that reads rows of a window as channels", call.kernel.span)
        names = dict(zip(call.kernel.params, call.args, strict=True))
        rows, weights = form.image_rows(len(scratch)), form.weight_rows(len(scratch) + 1)
        key = names[form.memory], form.axis, form.first, form.gap, form.step(form.axis), form.order, rows.type
        ready = None if call.loops else copied.get(key)
        rows = ready or rows
        seen = form.overlapping(rows)
        for array in (weights,) if ready else (rows, weights):
            assert isinstance(array.type, Tensor)
            scratch.append(ProgramArray(array.name, array.type, "scratch"))
        given = names | {array: array.name for array in (rows, weights, seen)}
        if not ready:
            calls.append(KernelCall(form.copy_image(rows), (names[form.memory], rows.name), call.loops))
            schedules.append(None if form.whole else _gathering(calls[-1].kernel))
        copied = {one: copy for one, copy in (copied | ({} if call.loops else {key: rows})).items() if one[0] not in written}
        for kernel in (form.copy_weights(weights), form.convolution(seen, weights)):
            calls.append(KernelCall(kernel, tuple(given[p] for p in kernel.params), call.loops))
        schedules += [None, schedule]
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _gathering(copy: Kernel) -> Schedule:
    """Lanes lie along the channels of a window's row, in pairs, so that loads of single elements come from few lines; a thread has the same channels of several windows."""
    (nest,) = (op for op in copy.body.ops if op.opcode == "parallel")
    last = len(nest.operands) - 1
    return Schedule((1,) * (last - 1) + (32, STEP), vector=2, vector_index=last, threads=256)


def _written(call: KernelCall) -> set[str]:
    """The arrays that a call writes."""
    names = dict(zip(call.kernel.params, call.args, strict=True))
    return {names[op.operands[0]] for op in walk(call.kernel.body) if op.opcode in ("store", "atomic", "accumulate") and op.operands[0] in names}


def rows_kernel(kernel: Kernel, way: str, folded: int = 0) -> Kernel:
    """The convolution as it is once it reads rows of windows."""
    form = row_form(kernel, way, folded)
    assert form is not None
    return form.convolution(form.overlapping(form.image_rows(0)), form.weight_rows(1))


def row_form(kernel: Kernel, way: str = "rows", folded: int = 0) -> RowForm | None:
    """The convolution that a kernel is, where rows of its windows can be neighbours in memory; else None. `folded`: the axis along which these lie, as a bit; 0: the last one."""
    if way == "image_gather":
        if "image" not in turns_of(kernel):
            return None
        kernel = turned_kernel(kernel, "image")
    kernel = upwards(kernel)
    found = find_contraction(kernel)
    if found is None or found.batch or found.a.dtype is not found.b.dtype or found.a.dtype.itemsize != 2:
        return None
    parts = image_and_weights(kernel, found)
    if parts is None:
        return None
    image, weights, order, channel = parts
    places = {1 << number: axis for number, axis in enumerate(order[1:-1])} | {0: order[-2]}
    if folded not in places or (WAYS[way] and folded):
        return None
    form = RowForm(kernel, found, image, weights, order, channel, (places[folded],), WAYS[way])
    return form if form.axis in form.foldable and form.is_dense else None


def row_forms(kernel: Kernel) -> list[tuple[str, int, RowForm]]:
    """All ways to read what lies along an axis of a window as channels: values of a schedule's `to_channels_last` and `folded`, and what the convolution is then."""
    forms = {way: row_form(kernel, way) for way in ("rows", "rows32", "gather")}
    source = "gather" if _lies_last(kernel) else "image_gather"
    forms[source] = row_form(kernel, source)
    found = [(way, 0, form) for way, form in forms.items() if form is not None]
    for folded in (1, 2):
        form = row_form(kernel, source, folded)
        if form is not None and form.axis != form.order[-2]:
            found.append((source, folded, form))
    return found


def _lies_last(kernel: Kernel) -> bool:
    """Whether an image's channels are neighbours in memory."""
    found = find_contraction(kernel)
    parts = image_and_weights(kernel, found) if found is not None else None
    return parts is not None and parts[0].tensor is not None and parts[0].tensor.strides[parts[2][-1]] == ONE


@record
class RowForm(RowWindows):
    """A convolution whose windows along the last axis of the image, or along any if they are gathered, are read as channels."""

    # -- arrays ---------------------------------------------------------------------------------------------------

    def image_rows(self, number: int) -> Value:
        """The copy of the image."""
        assert self.image.tensor is not None
        along, unit = (self.length, self.unit) if self.whole else (self._places(self.axis), self._whole(self.depth, 16 // self.image.dtype.itemsize))
        places = [along if axis == self.axis else self.image.tensor.shape[axis] for axis in self.order[1:-1]]
        flat = [ONE] if len(places) == 1 else []
        return Value(tensor(self.image.dtype, self.images, *flat, *places, unit, align=16), f"{self.kernel.name}.rows{number}")

    def weight_rows(self, number: int) -> Value:
        found = self.found
        rows = self._whole(found.extents[self.filters], ROWS)
        taps = product([found.reduce_extents[p] for p in self.taps])
        return Value(tensor(self.weights.dtype, rows, taps, self._whole(self.depth, STEP), align=16), f"{self.kernel.name}.rows{number}")

    # -- kernels --------------------------------------------------------------------------------------------------

    def copy_image(self, rows: Value) -> Kernel:
        memory, order = self.memory, self.order
        assert isinstance(memory.type, Tensor) and isinstance(rows.type, Tensor) and self.image.load is not None
        source, dtype = memory.type, self.image.dtype
        flat = rows.type.rank > len(order)
        b = Builder(self.kernel.span)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            at = dict(zip(order, indices, strict=True))
            if self.whole:
                inside = all_of(inner, self.pixel_of(inner, at, indices[-1]))
            else:
                tap, at[order[-1]] = self._apart(inner, indices[-1])
                start = inner.add(inner.mul(at[self.axis], inner.index(self.step(self.axis))), inner.index(self.first))
                at[self.axis] = inner.add(start, inner.mul(tap, inner.index(self.gap)))
                inside = inner.logical_and(inner.op("ge", at[self.axis], inner.index(0)), inner.op("lt", at[self.axis], inner.index(source.shape[self.axis])))
                inside = inner.logical_and(inside, inner.op("lt", indices[-1], inner.index(self.depth)))
            element = [at[axis] for axis in range(source.rank)]
            (value,) = inner.if_(inside, lambda deep: [deep.op("load", memory, *element)], lambda deep: [deep.const(0, dtype)])
            inner.multi("store", rows, indices[0], *([inner.index(0)] if flat else []), *indices[1:], value)
            return []

        shape = [rows.type.shape[0], *rows.type.shape[1 + flat :]]
        with b.at(self.image.load.span):
            b.parallel([b.index(e) for e in shape], body, ["n", *"dhw"[-(len(order) - 2) :], "c"])
        whole = Kernel(f"{self.kernel.name}.rows", Stage.LOOP, (memory, rows), Block((), tuple(b.ops)), facts=self.kernel.facts, span=self.kernel.span)
        return collapse(whole)

    def _apart(self, b: Builder, number: Value) -> tuple[Value, Value]:
        """The place of a window's row that one of its channels belongs to, and which of that place's it is. They fit 32 bits, where division is cheap."""
        place = b.cast(b.op("floordiv", b.cast(number, u32), b.cast(b.index(self.unit), u32)), i64)
        return place, b.sub(number, b.mul(place, b.index(self.unit)))

    def copy_weights(self, weights: Value) -> Kernel:
        found = self.found
        assert isinstance(weights.type, Tensor)
        (rows, _, depth), filters, dtype = weights.type.shape, found.extents[self.filters], self.weights.dtype
        position = self._taps_along(self.axis)[0]
        assert position is not None
        b = Builder(self.kernel.span)
        mapping = copy_outside(b, self.kernel)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            filter_, *taps, number = indices
            place, channel = self._apart(inner, number)
            local = dict(mapping) | {found.indices[self.filters]: filter_, found.k[position]: place, found.k[self.channel]: channel}
            local |= dict(zip((found.k[p] for p in self.taps), taps, strict=True))
            inside = [inner.op("lt", channel, inner.index(self.channels))] if self.unit != self.channels else []
            if depth != self.depth:
                inside.append(inner.op("lt", number, inner.index(self.depth)))
            if rows != filters:
                inside.append(inner.op("lt", filter_, inner.index(filters)))
            if self.weights.guard is not None:
                self._clone(inner, [self.weights.guard], local)
                inside.append(local[self.weights.guard])

            def element(deep: Builder) -> list[Value]:
                known = dict(local)
                self._clone(deep, [self.weights.value], known)
                return [known[self.weights.value]]

            value = inner.if_(all_of(inner, inside), element, lambda deep: [deep.const(0, dtype)])[0] if inside else element(inner)[0]
            inner.multi("store", weights, filter_, self._tap(inner, local), number, value)
            return []

        extents = [rows, *(found.reduce_extents[p] for p in self.taps), depth]
        names = [found.indices[self.filters].name, *(found.k[p].name for p in (*self.taps, self.channel))]
        with b.at(found.reduction.span):
            b.parallel([b.index(e) for e in extents], body, names)
        return finished(self.kernel, f"{self.kernel.name}.pack", b, [weights])

    def convolution(self, rows: Value, weights: Value) -> Kernel:
        """The sum over what is left of a window, and over the channels of its rows."""
        found = self.found
        wide, copier = found.accumulator, ValueCopier(found.parallel.regions[0])
        b = Builder(self.kernel.span)
        assert isinstance(rows.type, Tensor) and self.image.load is not None
        flat = rows.type.rank > len(self.order)
        loads = self.image.load.operands[1:]

        def reduce(inner: Builder, local: Copies) -> Sequence[Value]:
            def product_of(deep: Builder, inside: dict[Value, Value], channel: Value) -> list[Value]:
                outside = [loads[axis] for axis in self.order[:-1] if axis != self.axis]
                self._clone(deep, outside, inside)
                at = {axis: inside[loads[axis]] for axis in self.order[:-1] if axis != self.axis}
                at[self.axis] = inside[found.indices[self._pixel(self.axis)]]
                batch, *places = (at[axis] for axis in self.order[:-1])
                pixel = deep.op("load", rows, batch, *([deep.index(0)] if flat else []), *places, channel)
                weight = deep.op("load", weights, inside[found.indices[self.filters]], self._tap(deep, inside), channel)
                pair = (pixel, weight) if self.image is found.a else (weight, pixel)
                return [deep.mul(*(deep.cast(v, wide) for v in pair))]

            def term(deep: Builder, *values: Value) -> Sequence[Value]:
                *taps, channel = values
                inside = local | dict(zip((found.k[p] for p in self.taps), taps, strict=True))
                return copier.where(deep, self._kept_tests(), inside, lambda region, known: product_of(region, known, channel), wide)

            extents = [*(inner.index(found.reduce_extents[p]) for p in self.taps), inner.index(self.depth)]
            with inner.at(found.reduction.span):
                return inner.reduce("add", extents, term, [*(found.k[p].name for p in self.taps), found.k[self.channel].name])

        copy_nest(b, self.kernel, found.parallel, found.extents, found.reduction, reduce)
        return finished(self.kernel, self.kernel.name, b, [rows, weights])
