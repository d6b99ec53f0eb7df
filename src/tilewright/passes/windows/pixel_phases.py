"""Scratch of phases whose results are pixels: all channels of a place side by side. Part of `gather_phases`.

In: the kernel of a phase, or all of them. Out: the kernel with its only store going to a matrix of pixels by channels, whose rows come in the very order in which a product of pixels
computes them, and the kernel that turns pixels to rows of results:

    parallel n, k, i, j { …; store y[n, k, 2 i, 2 j + 1] }
    -> parallel n, k, i, j { …; store pixels[first + (n I + i) J + j, k] }
       parallel n, k, i, j { store y[n, k, i, j] = pixels[first of (i % 2, j % 2) + …, k] }

A phase's rows end where its view of the matrix does, so that the copy engine writes no more than them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from types import MappingProxyType

from tilewright.analysis.affine import Affine, floored
from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import i64, u32
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, ceildiv, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.common.simplify import simplify
from tilewright.passes.windows.guards import emit

CHANNELS = 8
"""Channels of a row are a multiple of so many: 16 bytes, which the copy engine writes."""


@record
class PlacedPhase:
    """What a phase writes: for every axis of the results the rest that it leaves, the index that walks it, and how far."""

    store: Op
    rests: tuple[int, ...]
    indices: tuple[Value, ...]
    extents: tuple[Size, ...]


@record
class PixelPhases:
    """Phases with the same periods along the axes of their results, one of which is that of channels."""

    memory: Tensor
    periods: tuple[int, ...]
    channel: int
    rests: tuple[tuple[int, ...], ...]
    """Those that phases leave along each axis, rising."""

    @property
    def places(self) -> list[int]:
        """The axes of pixels."""
        return [axis for axis in range(len(self.periods)) if axis != self.channel]

    @property
    def rows(self) -> Size:
        """Rows of one phase, at most."""
        return product(ceildiv(self.memory.shape[axis], Size.of(self.periods[axis])) if self.periods[axis] > 1 else self.memory.shape[axis] for axis in self.places)

    @property
    def columns(self) -> Size:
        return ceildiv(self.memory.shape[self.channel], Size.of(CHANNELS)) * CHANNELS

    def slot(self, rests: Sequence[int]) -> int:
        """A phase's number."""
        number = 0
        for axis, own in enumerate(self.rests):
            number = number * len(own) + own.index(rests[axis])
        return number

    def scratch(self, name: str) -> Value:
        count = reduce(lambda total, own: total * len(own), self.rests, 1)
        return self._view(name, self.rows * count)

    def _view(self, name: str, rows: Size) -> Value:
        return Value(tensor(self.memory.dtype, rows, self.columns, align=16), name)

    def writing(self, kernel: Kernel, phase: PlacedPhase, name: str) -> tuple[Kernel, Value]:
        """A phase that writes pixels, and the array it does so to."""
        first, extents = self.rows * self.slot(phase.rests), [phase.extents[axis] for axis in self.places]
        kept = self._view(name, first + product(extents))
        nest = next(op for op in kernel.body.ops if op.opcode == "parallel")
        factors = [(phase.indices[axis], product(extents[number + 1 :])) for number, axis in enumerate(self.places)]
        ops: list[Op] = []
        for op in nest.regions[0].ops:
            if op is not phase.store:
                ops.append(op)
                continue
            b = Builder(op.span)
            row = emit(b, Affine(tuple(factors), first))
            ops += [*b.ops, op.with_operands(kept, row, phase.indices[self.channel], *op.operands[1 + len(phase.indices) :])]
        changed = Op(nest.opcode, nest.operands, nest.results, nest.attrs, (Block(nest.regions[0].args, tuple(ops)),), nest.span)
        body = Block(kernel.body.args, tuple(changed if op is nest else op for op in kernel.body.ops))
        params = (*(p for p in kernel.params if p is not phase.store.operands[0]), kept)
        return Kernel(kernel.name, kernel.stage, params, body, attrs=kernel.attrs, facts=kernel.facts, span=kernel.span), kept

    def gathering(self, like: Kernel, store: Op, kept: Value, empty: float, columns: int) -> Kernel:
        """The kernel that turns pixels to results, with what is made of an empty sum where no phase has any. A block has so many columns."""
        memory, b = Value(self.memory, store.operands[0].name), Builder(like.span)

        def body(at: Builder, *indices: Value) -> list[Value]:
            slot, row, tests = at.index(0), at.index(0), []
            for axis in self.places[:-1]:
                extent, period = self.memory.shape[axis], self.periods[axis]
                if period == 1:
                    row = at.add(at.mul(row, at.index(extent)), indices[axis])
                    continue
                quotient, rest = divided(at, indices[axis], period)
                slot = at.add(at.mul(slot, at.index(len(self.rests[axis]))), chosen(at, rest, self.rests[axis], [at.index(n) for n in range(len(self.rests[axis]))]))
                row = at.add(at.mul(row, chosen(at, rest, self.rests[axis], [at.index(self._extent(axis, own)) for own in self.rests[axis]])), quotient)
                tests += self.there(at, axis, rest)
            # What columns have in common is computed before they differ.
            last = self.places[-1]
            own = self.rests[last]
            begins = [
                at.add(at.mul(at.add(at.mul(slot, at.index(len(own))), at.index(number)), at.index(self.rows)), at.mul(row, at.index(self._extent(last, rest))))
                for number, rest in enumerate(own)
            ]
            quotient, rest = divided(at, indices[last], self.periods[last])
            tests += self.there(at, last, rest)
            row = at.add(chosen(at, rest, own, begins), quotient)

            self.store_pixel(at, (memory, kept), row, indices, tests, empty)
            return []

        with b.at(store.span):
            b.parallel([b.index(extent) for extent in self.memory.shape], body)
        return self.gather_kernel(b, (memory, kept), like, columns)

    def store_pixel(self, b: Builder, arrays: tuple[Value, Value], row: Value, indices: Sequence[Value], tests: Sequence[Value], empty: float) -> None:
        """Store a result, which is a channel of the pixel in `row` where the tests hold."""
        memory, kept = arrays

        def load(inner: Builder) -> list[Value]:
            return [inner.op("load", kept, row, indices[self.channel])]

        def nothing(inner: Builder) -> list[Value]:
            return [inner.const(empty, self.memory.dtype)]

        value = b.if_(reduce(b.logical_and, tests), load, nothing)[0] if tests else load(b)[0]
        b.multi("store", memory, *indices, value)

    def gather_kernel(self, b: Builder, arrays: tuple[Value, Value], like: Kernel, columns: int) -> Kernel:
        """The kernel of these ops, which turns pixels to rows of results."""
        attrs = MappingProxyType({"placed": True, "pixels": self.channel, "columns": columns})
        name = f"{like.attrs['phase_of']}.gather"
        return simplify(Kernel(name, Stage.LOOP, arrays, Block((), tuple(b.ops)), attrs=attrs, facts=like.facts, span=like.span))

    def _extent(self, axis: int, rest: int) -> Size:
        """Places along an axis that leave a rest."""
        return floored(self.memory.shape[axis] + (self.periods[axis] - 1 - rest), self.periods[axis])

    def there(self, b: Builder, axis: int, rest: Value) -> list[Value]:
        """Whether there is a phase with this rest."""
        own = self.rests[axis]
        if len(own) == self.periods[axis]:
            return []
        if own == tuple(range(len(own))):
            return [b.op("lt", rest, b.const(len(own), u32))]
        return [reduce(lambda left, right: b.op("or", left, right), [b.op("eq", rest, b.const(one, u32)) for one in own])]


def divided(b: Builder, index: Value, period: int) -> tuple[Value, Value]:
    """The quotient of an index, and the rest in 32 bits, where division is cheap: no axis is as long as these count."""
    short = b.cast(index, u32)
    quotient = b.op("floordiv", short, b.const(period, u32))
    return b.cast(quotient, i64), b.sub(short, b.mul(quotient, b.const(period, u32)))


def chosen(b: Builder, rest: Value, rests: Sequence[int], values: Sequence[Value]) -> Value:
    """The value that belongs to a rest."""
    found = values[0]
    for own, value in list(zip(rests, values, strict=True))[1:]:
        found = b.select(b.op("eq", rest, b.const(own, u32)), value, found)
    return found


def channel_axis(kernel: Kernel, phase: PlacedPhase) -> int | None:
    """The axis of channels among those of the results, which it is not the last of; None where the phase is no convolution of an image with two sides that are so."""
    found = find_contraction(kernel)
    if found is None or found.batch or min(len(found.m), len(found.n)) != 1 or max(len(found.m), len(found.n)) < 2:
        return None
    (position,) = min(found.m, found.n, key=len)
    axis = next((axis for axis, index in enumerate(phase.indices) if index is found.indices[position]), None)
    places = [phase.indices[a] for a in range(len(phase.indices)) if a != axis]
    side = [found.indices[p] for p in max(found.m, found.n, key=len)]
    memory = phase.store.operands[0].type
    assert isinstance(memory, Tensor)
    if axis is None or axis == len(phase.indices) - 1 or places != side or memory.strides[-1] != ONE:
        return None
    return axis
