"""Sums of packed weights times activations of eight bits, for kernels that say `activations="q8"`. In: loop-stage kernels with packed loads; out: sums over
blocks whose inner sums are of integers, and the kernels that round the activations.

    %s = reduce k (%j) {                         x.q, x.scale = round x to eight bits, one scale for as many elements as a block of w has
      yield load(w, i, j) * load(x, j) }    ->   %s = reduce blocks (%b) {
                                                   %n = reduce 32 (%t) { yield i32(byte of w) * i32(load x.q, %b, %t) }
                                                   yield f32(%n) * (scale of the block * load(x.scale, %b)) }

The inner sums are exact. Formats with a minimum or a zero point, and those whose numbers are taken as they lie, less a constant, need the sums of the
rounded activations as well (`x.sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType, by_name, f16, f32, i8, i16, i32, u8, u16, u32
from tilewright.base.record import record
from tilewright.base.sizes import Size, contiguous_strides, floordiv
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, ProgramArray
from tilewright.ir.rewrite import rewrite_block
from tilewright.ir.types import Tensor

Sub = tuple[int, Callable[[Builder, Value], Value]]
"""Where the activations of an inner sum begin, and the byte of the weights at a place, as i8."""


@record(identity=True)
class RoundedInput:
    """An array of activations that is rounded for weights of one format."""

    source: Value
    """The kernel's own parameter."""
    weights: DType
    numbers: Value
    scale: Value
    sums: Value


def inner_terms(dtype: DType) -> int:
    """How many products each inner sum has."""
    if dtype.scale:
        return dtype.block // 2 if dtype.bits == 4 else dtype.block
    return {"q8_0": 32, "q4_k": 32, "q5_k": 32}.get(dtype.name, 16)


def sums_of_blocks(body: Block, tensors: dict[Value, Value], formats: dict[Value, DType]) -> tuple[Block, list[RoundedInput]]:
    """A kernel's body with integer sums, and the activations they read. `tensors`: packed parameters as bytes."""
    rounded: dict[tuple[Value, str], RoundedInput] = {}
    made = {result: op for op in walk(body) for result in op.results}

    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        found = _match(op, made, formats, tensors)
        if found is None:
            return None
        weights, lead, source, outer = found
        lead, outer = (tuple(b.index(int(str(made[v].attrs["value"]))) if v in made and made[v].opcode == "const" else v for v in some) for some in (lead, outer))
        dtype = formats[tensors[weights]]
        key = source, dtype.name
        if key not in rounded:
            rounded[key] = _rounded(source, dtype)
        values = rounded[key]
        blocks = tensors[weights].type
        assert isinstance(blocks, Tensor)

        def term(inner: Builder, index: Value) -> list[Value]:
            return [_Term(inner, tensors[weights], (*lead, index), values, (*outer, index)).value(dtype)]

        found_sum = b.reduce("add", [b.index(blocks.shape[-2])], term, ["b"])
        b.ops[-1] = replace(b.ops[-1], attrs=MappingProxyType({**b.ops[-1].attrs, "packed": dtype.name}))
        return found_sum

    return rewrite_block(body, one, {}), list(rounded.values())


def _match(
    op: Op, made: dict[Value, Op], formats: dict[Value, DType], tensors: dict[Value, Value]
) -> tuple[Value, Sequence[Value], Value, Sequence[Value]] | None:
    """Of a sum of packed elements times others along the same row: the weights and their row, the activations and theirs."""
    if op.opcode != "reduce" or op.attrs.get("kind") != "add" or len(op.operands) != 1:
        return None
    (region,) = op.regions
    if any(inner.opcode not in ("load", "mul", "cast", "yield", "const") for inner in region.ops):
        return None
    product = made.get(region.yields[0])
    if product is None or product.opcode != "mul" or product not in region.ops:
        return None
    inside = {result for inner in region.ops if inner.opcode != "const" for result in inner.results} | set(region.args)  # x[0, k] is a row, too
    sides: list[tuple[Value, Sequence[Value]]] = []
    for value in product.operands:
        source = made.get(value)
        if source is not None and source.opcode == "cast" and source.attrs["dtype"] is f32:
            source = made.get(source.operands[0])
        if source is None or source.opcode != "load" or source.operands[-1] is not region.args[0] or any(v in inside for v in source.operands[:-1]):
            return None
        sides.append((source.operands[0], source.operands[1:-1]))
    packed = [side for side in sides if side[0] in tensors]
    plain = [side for side in sides if side[0] not in tensors]
    if len(packed) != 1 or len(plain) != 1:
        return None
    (weights, lead), (source_tensor, outer) = packed[0], plain[0]
    extent = made.get(op.operands[0])
    assert isinstance(weights.type, Tensor) and isinstance(source_tensor.type, Tensor)
    size = extent.attrs.get("value") if extent is not None and extent.opcode in ("size", "const") else None
    whole = isinstance(size, int | Size) and Size.of(size) == weights.type.shape[-1] and source_tensor.type.shape[-1] == weights.type.shape[-1]
    return (weights, lead, source_tensor, outer) if whole and source_tensor.type.dtype.is_float else None


def _row_major(dtype: DType, shape: tuple[Size, ...], align: int) -> Tensor:
    return Tensor(dtype, shape, contiguous_strides(shape), align=align)


def _rounded(source: Value, dtype: DType) -> RoundedInput:
    type_ = source.type
    assert isinstance(type_, Tensor)
    lead, blocks = type_.shape[:-1], floordiv(type_.shape[-1], Size.of(dtype.block))
    stem = f"{source.name}.{dtype.name}"
    return RoundedInput(
        source, dtype,
        Value(_row_major(i8, (*lead, blocks, Size.of(dtype.block)), 16), f"{stem}.q"),
        Value(_row_major(f32, (*lead, blocks), 16), f"{stem}.scale"),
        Value(_row_major(i16 if _sum_count(dtype) > 1 else i32, (*lead, blocks, Size.of(_sum_count(dtype))), 16), f"{stem}.sums"),
    )  # fmt: skip


def _sum_count(dtype: DType) -> int:
    return {"q4_k": 8, "q5_k": 8, "q6_k": 16}.get(dtype.name, 1)


def needs_sums(dtype: DType) -> bool:
    return dtype.name not in ("q8_0", "q5_0") and (not dtype.scale or dtype.bits == 4 or dtype.zero_point)


# -- one block ------------------------------------------------------------------------------------------------------------


class _Term:
    """The sum of one block."""

    def __init__(self, b: Builder, weights: Value, place: Sequence[Value], x: RoundedInput, row: Sequence[Value]) -> None:
        self.b, self.weights, self.place, self.x, self.row = b, weights, tuple(place), x, tuple(row)

    def value(self, dtype: DType) -> Value:
        if dtype.scale:
            return self.group(dtype)
        return getattr(self, f"_{dtype.name}")()  # type: ignore[no-any-return]

    # -- parts --------------------------------------------------------------------------------------------------------

    def byte(self, offset: int, b: Builder | None = None, t: Value | None = None) -> Value:
        b = b or self.b
        at = b.index(offset) if t is None else b.add(t, b.index(offset)) if offset else t
        return b.op("load", self.weights, *self.place, at)

    def word(self, offset: int, dtype: DType) -> Value:
        found = self.b.cast(self.byte(offset), dtype)
        for position in range(1, dtype.itemsize):
            byte = self.b.cast(self.byte(offset + position), dtype)
            found = self.b.op("or", found, self.b.op("shl", byte, self.b.const(8 * position, dtype)))
        return found

    def half(self, offset: int) -> Value:
        return self.b.cast(self.b.bitcast(self.word(offset, u16), f16), f32)

    def total(self, terms: Sequence[Value]) -> Value:
        """Their sum, in pairs: no sum waits for all the others."""
        while len(terms) > 1:
            terms = [self.b.add(*terms[at : at + 2]) if at + 1 < len(terms) else terms[at] for at in range(0, len(terms), 2)]
        return terms[0]

    def dot(self, sub: Sub, terms: int) -> Value:
        """The sum of bytes times rounded activations."""
        first, weight = sub

        def body(b: Builder, t: Value) -> list[Value]:
            x = b.op("load", self.x.numbers, *self.row, b.add(t, b.index(first)) if first else t)
            return [b.mul(b.cast(weight(b, t), i32), b.cast(x, i32))]

        return self.b.reduce("add", [self.b.index(terms)], body, ["t"])[0]

    def four(self, offset: int, half: int) -> Callable[[Builder, Value], Value]:
        """Four bits of a byte, from 0 to 15."""

        def byte(b: Builder, t: Value) -> Value:
            whole = self.byte(offset, b, t)
            return b.bitcast(b.op("shr", whole, b.const(4, u8)) if half else b.op("and", whole, b.const(15, u8)), i8)

        return byte

    def sums(self, number: int = 0) -> Value:
        return self.b.cast(self.b.op("load", self.x.sums, *self.row, self.b.index(number)), i32)

    def scale(self, weight: Value) -> Value:
        return self.b.mul(weight, self.b.op("load", self.x.scale, *self.row))

    def scaled(self, whole: Value, weight: Value) -> Value:
        return self.b.mul(self.b.cast(whole, f32), self.scale(weight))

    def times(self, value: Value, factor: int) -> Value:
        return self.b.mul(value, self.b.const(factor, i32))

    # -- formats ------------------------------------------------------------------------------------------------------

    def _q8_0(self) -> Value:
        return self.scaled(self.dot((0, lambda b, t: b.bitcast(self.byte(2, b, t), i8)), 32), self.half(0))

    def nibbles(self, offset: int) -> Value:
        """The sum of 32 numbers from 0 to 15."""
        return self.b.add(self.dot((0, self.four(offset, 0)), 16), self.dot((16, self.four(offset, 1)), 16))

    def _q4_0(self) -> Value:
        return self.scaled(self.b.sub(self.nibbles(2), self.times(self.sums(), 8)), self.half(0))

    def _q4_1(self) -> Value:
        return self.b.add(self.scaled(self.nibbles(4), self.half(0)), self.scaled(self.sums(), self.half(2)))

    def fives(self, bits: int, offset: int) -> Value:
        """The sum of 32 numbers less 16, whose fifth bits are a word."""
        word = self.word(bits, u32)

        def number(half: int) -> Callable[[Builder, Value], Value]:
            def byte(b: Builder, t: Value) -> Value:
                four = b.op("and", b.op("shr", self.byte(offset, b, t), b.const(4 * half, u8)), b.const(15, u8))
                at = b.add(b.cast(t, u32), b.const(16 * half, u32))
                fifth = b.cast(b.op("and", b.op("shr", word, at), b.const(1, u32)), u8)
                return b.sub(b.bitcast(b.op("or", four, b.op("shl", fifth, b.const(4, u8))), i8), b.const(16, i8))

            return byte

        return self.b.add(self.dot((0, number(0)), 16), self.dot((16, number(1)), 16))

    def _q5_0(self) -> Value:
        return self.scaled(self.fives(2, 6), self.half(0))

    def _q5_1(self) -> Value:
        whole = self.b.add(self.fives(4, 8), self.times(self.sums(), 16))
        return self.b.add(self.scaled(whole, self.half(0)), self.scaled(self.sums(), self.half(2)))

    def k_scales(self) -> tuple[list[Value], list[Value]]:
        """The eight scales and factors of the minimum, as i32: four at once in the bytes of words."""
        b = self.b
        one, two, three = (self.word(offset, u32) for offset in (4, 8, 12))

        def bits(value: Value, shift: int, mask: int) -> Value:
            shifted = b.op("shr", value, b.const(shift, u32)) if shift else value
            return b.op("and", shifted, b.const(mask * 0x01010101, u32))

        def bytes_of(word: Value) -> list[Value]:
            return [b.cast(b.op("and", b.op("shr", word, b.const(8 * place, u32)), b.const(255, u32)), i32) for place in range(4)]

        # The upper two bits of the first eight bytes belong to the last four scales.
        scales = bits(one, 0, 63), b.op("or", bits(three, 0, 15), bits(one, 2, 48))
        minima = bits(two, 0, 63), b.op("or", bits(three, 4, 15), bits(two, 2, 48))
        return [s for word in scales for s in bytes_of(word)], [m for word in minima for m in bytes_of(word)]

    def k(self, dots: Sequence[Value], less: int) -> Value:
        b = self.b
        scales, minima = self.k_scales()
        sums = [self.sums(j) for j in range(8)]
        whole = self.total([b.mul(s, dot) for s, dot in zip(scales, dots, strict=True)])
        if less:
            whole = b.add(whole, self.times(self.total([b.mul(s, x) for s, x in zip(scales, sums, strict=True)]), less))
        low = self.total([b.mul(m, x) for m, x in zip(minima, sums, strict=True)])
        return b.sub(self.scaled(whole, self.half(0)), self.scaled(low, self.half(2)))

    def _q4_k(self) -> Value:
        return self.k([self.dot((64 * c + 32 * h, self.four(16 + 32 * c, h)), 32) for c in range(4) for h in range(2)], 0)

    def _q5_k(self) -> Value:
        def number(c: int, h: int) -> Callable[[Builder, Value], Value]:
            def byte(b: Builder, t: Value) -> Value:
                four = b.op("and", b.op("shr", self.byte(48 + 32 * c, b, t), b.const(4 * h, u8)), b.const(15, u8))
                fifth = b.op("and", b.op("shr", self.byte(16, b, t), b.const(2 * c + h, u8)), b.const(1, u8))
                return b.sub(b.bitcast(b.op("or", four, b.op("shl", fifth, b.const(4, u8))), i8), b.const(16, i8))

            return byte

        return self.k([self.dot((64 * c + 32 * h, number(c, h)), 32) for c in range(4) for h in range(2)], 16)

    def _q6_k(self) -> Value:
        b = self.b

        def number(n: int, r: int, g: int) -> Callable[[Builder, Value], Value]:
            def byte(b: Builder, t: Value) -> Value:
                four = b.op("and", b.op("shr", self.byte(64 * n + 32 * (r % 2) + 16 * g, b, t), b.const(4 * (r // 2), u8)), b.const(15, u8))
                two = b.op("and", b.op("shr", self.byte(128 + 32 * n + 16 * g, b, t), b.const(2 * r, u8)), b.const(3, u8))
                return b.bitcast(b.op("or", four, b.op("shl", two, b.const(4, u8))), i8)

            return byte

        places = [(n, r, g) for n in range(2) for r in range(4) for g in range(2)]
        scales = [b.cast(b.bitcast(self.byte(192 + place), i8), i32) for place in range(16)]
        whole = self.total([b.mul(scale, self.dot((16 * place, number(*where)), 16)) for place, (scale, where) in enumerate(zip(scales, places, strict=True))])
        less = self.total([b.mul(scale, self.sums(place)) for place, scale in enumerate(scales)])
        return self.scaled(b.sub(whole, self.times(less, 32)), self.half(208))

    def group(self, dtype: DType) -> Value:
        b, scale = self.b, by_name(dtype.scale)
        start, half = scale.itemsize * (1 + dtype.zero_point), dtype.block // 2
        if dtype.bits == 4:
            # The activations lie with all even places first.
            whole = b.add(self.dot((0, self.four(start, 0)), half), self.dot((half, self.four(start, 1)), half))
        else:
            whole = self.dot((0, lambda b, t: b.bitcast(b.op("xor", self.byte(start, b, t), b.const(0x80, u8)), i8)), dtype.block)
        if dtype.zero_point:
            zero = b.cast(self.byte(scale.itemsize), i32)
            whole = b.sub(whole, b.mul(zero if dtype.bits == 4 else b.sub(zero, b.const(128, i32)), self.sums()))
        elif dtype.bits == 4:
            whole = b.sub(whole, self.times(self.sums(), 8))
        return self.scaled(whole, self.half(0) if scale is f16 else b.bitcast(self.word(0, u32), f32))


# -- rounding activations -------------------------------------------------------------------------------------------------


def rounding_calls(x: RoundedInput, names: dict[Value, str], call: KernelCall) -> tuple[list[KernelCall], list[ProgramArray]]:
    """The kernels that round one array of activations, in front of the call that reads them, and the arrays they write."""
    dtype, source = x.weights, x.source
    assert isinstance(source.type, Tensor)
    lead, block = source.type.shape[:-1], dtype.block
    numbers, scale, sums = (Value(v.type, v.name) for v in (x.numbers, x.scale, x.sums))
    blocks = floordiv(source.type.shape[-1], Size.of(block))

    def element(b: Builder, row: Sequence[Value], index: Value) -> Value:
        return b.cast(b.op("load", source, *row, index), f32)

    def kernel(suffix: str, params: Sequence[Value], extents: Sequence[Size], body: Callable[..., Sequence[Value]]) -> KernelCall:
        b = Builder(call.kernel.span)
        b.parallel([b.index(extent) for extent in extents], body)
        found = Kernel(
            f"{call.kernel.name}.{x.source.name}.{suffix}", Stage.LOOP, tuple(params), Block((), tuple(b.ops)), facts=call.kernel.facts,
            attrs=MappingProxyType({"apart": "activations are rounded once"}), span=call.kernel.span,
        )  # fmt: skip
        return KernelCall(found, tuple(names[p] for p in (x.source, x.numbers, x.scale, x.sums) if any(p.name == q.name for q in params)), call.loops)

    even_first = bool(dtype.scale) and dtype.bits == 4

    def rounding(b: Builder, *indices: Value) -> Sequence[Value]:
        *row, block_index = indices
        start = b.mul(block_index, b.index(block))
        (largest,) = b.reduce("max", [b.index(block)], lambda inner, t: [inner.op("abs", element(inner, row, inner.add(start, t)))])
        step, zero = b.op("div", largest, b.const(127.0, f32)), b.const(0.0, f32)
        b.multi("store", scale, *indices, step)
        inverse = b.select(b.op("eq", step, zero), zero, b.op("div", b.const(1.0, f32), step))

        def one(inner: Builder, t: Value) -> Sequence[Value]:
            place = t
            if even_first:
                place = inner.add(inner.mul(inner.op("mod", t, inner.index(block // 2)), inner.index(2)), inner.op("floordiv", t, inner.index(block // 2)))
            value = element(inner, row, inner.add(start, place))
            inner.multi("store", numbers, *indices, t, inner.cast(inner.op("round", inner.mul(value, inverse)), i8))
            return []

        b.for_(b.index(0), b.index(block), b.index(1), [], one, name="t", independent=True)
        return []

    def adding(b: Builder, *indices: Value) -> Sequence[Value]:
        *row, block_index, part = indices
        each = block // _sum_count(dtype)
        start = b.mul(part, b.index(each))
        (total,) = b.reduce("add", [b.index(each)], lambda inner, t: [inner.cast(inner.op("load", numbers, *row, block_index, inner.add(start, t)), i32)])
        b.multi("store", sums, *indices, b.cast(total, i16) if _sum_count(dtype) > 1 else total)
        return []

    calls = [
        kernel("round", (source, numbers, scale), (*lead, blocks), rounding),
    ]
    arrays = [(x.numbers, numbers), (x.scale, scale)]
    if needs_sums(dtype):
        calls.append(kernel("sums", (numbers, sums), (*lead, blocks, Size.of(_sum_count(dtype))), adding))
        arrays.append((x.sums, sums))
    found = [ProgramArray(names[old], value.type, "scratch") for old, value in arrays if isinstance(value.type, Tensor)]
    return calls, found


def with_inputs(kernel: Kernel, rounded: Sequence[RoundedInput]) -> tuple[Kernel, list[Value]]:
    """The kernel with the rounded activations among its parameters, and without those it reads no more."""
    used = {v for op in walk(kernel.body) for v in op.operands}
    added = [v for x in rounded for v in (x.numbers, x.scale, x.sums) if v in used]
    kept = [p for p in kernel.params if p in used]
    terms = {inner_terms(x.weights) for x in rounded}
    attrs = {**kernel.attrs, "activations": "q8", **({"dots": terms.pop()} if len(terms) == 1 else {})}
    return replace(kernel, params=(*kept, *added), attrs=MappingProxyType(attrs)), added
