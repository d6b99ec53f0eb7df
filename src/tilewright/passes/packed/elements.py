"""One element of an array of packed blocks, as IR. In: a tensor of bytes [..., blocks, bytes of one] and where the element is; out: its f32.

`packed_element` takes the index along the row and finds block and place by `floordiv` and `mod` with constants, in the order of `RADICES`.
`element_at` takes the block and the digits of the place, outermost first, such as loops over blocks have them. Digits may be scalars or, at
later stages, tiles and vecs. The numbers are those of `base/packed/dequantize.py`, to the last bit.

    q4_k   256 elements = 4 chunks of 32 bytes * 2 halves * 32:  w[i, k]  ->  block k // 256, chunk k % 256 // 64, half k % 64 // 32, byte k % 32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import DType, by_name, f16, f32, i8, u8, u16, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor, dtype_of

RADICES: dict[str, tuple[int, ...]] = {
    "q4_0": (2, 16), "q4_1": (2, 16), "q5_0": (2, 16), "q5_1": (2, 16), "q8_0": (32,), "q4_k": (4, 2, 32), "q5_k": (4, 2, 32), "q6_k": (2, 4, 2, 16),
}  # fmt: skip
"""How the elements of a block are numbered: the digits of their place, outermost first. Along the last one, bytes follow each other."""


MAGIC, POWER = 0x4B000000, 8388608
"""2^23 as a f32: its bits, and itself."""


def hidden_zero(b: Builder, tensor: Value) -> Value:
    """Zero, as far as arrays fit memory, but no compiler knows: one that did would not keep 2^23 in a register, and take two instructions where one combines
    three registers."""
    assert isinstance(tensor.type, Tensor)
    return b.cast(b.op("shr", b.index(tensor.type.shape[-2]), b.index(48)), u32)


def radices(dtype: DType) -> tuple[int, ...]:
    """The digits of a place in a block."""
    if dtype.scale:
        return (dtype.block // 2, 2) if dtype.bits == 4 else (dtype.block,)
    return RADICES[dtype.name]


def packed_element(b: Builder, tensor: Value, lead: Sequence[Value], index: Value, dtype: DType) -> Value:
    """The f32 at `index` of a row; `lead` are the indices of the row."""
    digits: list[Value] = []
    size = dtype.block
    block = b.op("floordiv", index, _like(b, size, index))
    rest = b.op("mod", index, _like(b, size, index))
    for radix in radices(dtype)[:-1]:
        size //= radix
        digits.append(b.op("floordiv", rest, _like(b, size, index)))
        rest = b.op("mod", rest, _like(b, size, index))
    return element_at(b, tensor, lead, block, (*digits, rest), dtype)


def element_at(
    b: Builder, tensor: Value, lead: Sequence[Value], block: Value, digits: Sequence[Value], dtype: DType, nothing: Value | None = None
) -> Value:
    """The f32 with these digits in a block of a row. `nothing`: a zero of which no compiler knows (`hidden_zero`); numbers then become floats by their bits."""
    packed = _Block(b, tensor, lead, block, nothing)
    return _group(packed, digits, dtype) if dtype.scale else _ELEMENTS[dtype.name](packed, digits)


def _like(b: Builder, number: int, index: Value) -> Value:
    return b.splat(number, index)


class _Block:
    """One block of a row: its bytes, and arithmetic on them."""

    def __init__(self, b: Builder, tensor: Value, lead: Sequence[Value], block: Value, nothing: Value | None = None) -> None:
        self.b, self.tensor, self.lead, self.block, self.nothing = b, tensor, lead, block, nothing

    def byte(self, offset: int, *terms: tuple[int, Value]) -> Value:
        """The byte at `offset` plus the sum of factors times digits."""
        return self.b.op("load", self.tensor, *self.lead, self.block, self.place(offset, *terms))

    def place(self, offset: int, *terms: tuple[int, Value]) -> Value:
        total: Value | None = None
        for factor, digit in terms:
            term = digit if factor == 1 else self.b.mul(digit, _like(self.b, factor, digit))
            total = term if total is None else self.b.add(total, term)
        if total is None:
            return self.b.index(offset)
        return self.b.add(total, _like(self.b, offset, total)) if offset else total

    def word(self, offset: int, dtype: DType) -> Value:
        """Bytes that follow each other, as one whole number."""
        found = self.b.cast(self.byte(offset), dtype)
        for position in range(1, dtype.itemsize):
            byte = self.b.cast(self.byte(offset + position), dtype)
            found = self.b.op("or", found, self.b.op("shl", byte, _like(self.b, 8 * position, byte)))
        return found

    def half(self, offset: int) -> Value:
        """A f16, as f32."""
        return self.b.cast(self.b.bitcast(self.word(offset, u16), f16), f32)

    def bits(self, value: Value, shift: int | Value, mask: int) -> Value:
        """`value >> shift & mask`, where a shift by digits is an index."""
        if not isinstance(shift, int):
            value = self.b.op("shr", value, self.b.cast(shift, u8))
        elif shift:
            value = self.b.op("shr", value, _like(self.b, shift, value))
        return self.b.op("and", value, _like(self.b, mask, value))

    def times(self, digit: Value, factor: int) -> Value:
        return self.b.mul(digit, _like(self.b, factor, digit))

    def with_high(self, low: Value, high: Value, shift: int = 4) -> Value:
        return self.b.op("or", low, self.b.op("shl", high, _like(self.b, shift, high)))

    def number(self, value: Value, less: int = 0) -> Value:
        """A whole number of eight bits, less a constant, as f32."""
        if self.nothing is not None:
            flip = 128 if dtype_of(value.type) is i8 else 0
            code = self.b.cast(self.b.bitcast(value, u8), u32)
            bits = self.b.op("xor", code, self.b.add(self.b.const(MAGIC | flip, u32), self.nothing))
            return self.b.sub(self.b.bitcast(bits, f32), self.b.const(float(POWER + flip + less), f32))
        if less:
            signed = self.b.bitcast(value, i8)
            value = self.b.sub(signed, _like(self.b, less, signed))
        return self.b.cast(value, f32)

    def scaled(self, value: Value, factor: Value) -> Value:
        return self.b.mul(value, self.b.like(factor, value))


Digits = Sequence[Value]


def _nibble(p: _Block, offset: int, digits: Digits) -> Value:
    half, place = digits
    return p.bits(p.byte(offset, (1, place)), p.times(half, 4), 15)


def _fifth(p: _Block, offset: int, digits: Digits) -> Value:
    """The fifth bit: one of 32 that four bytes hold."""
    half, place = digits
    at = p.b.cast(p.place(0, (16, half), (1, place)), u32)
    found = p.b.op("shr", p.b.like(p.word(offset, u32), at), at)
    return p.b.cast(p.b.op("and", found, _like(p.b, 1, found)), u8)


def _q4_0(p: _Block, digits: Digits) -> Value:
    return p.scaled(p.number(_nibble(p, 2, digits), 8), p.half(0))


def _q4_1(p: _Block, digits: Digits) -> Value:
    found = p.scaled(p.number(_nibble(p, 4, digits)), p.half(0))
    return p.b.add(found, p.b.like(p.half(2), found))


def _q5_0(p: _Block, digits: Digits) -> Value:
    return p.scaled(p.number(p.with_high(_nibble(p, 6, digits), _fifth(p, 2, digits)), 16), p.half(0))


def _q5_1(p: _Block, digits: Digits) -> Value:
    found = p.scaled(p.number(p.with_high(_nibble(p, 8, digits), _fifth(p, 4, digits))), p.half(0))
    return p.b.add(found, p.b.like(p.half(2), found))


def _q8_0(p: _Block, digits: Digits) -> Value:
    return p.scaled(p.number(p.b.bitcast(p.byte(2, (1, digits[0])), i8)), p.half(0))


def _k(p: _Block, digits: Digits, number: Value) -> Value:
    """`d * s * q - m * t`: the sub-block's six bits of s and t lie in three of twelve bytes."""
    chunk, half, _ = digits
    sub = p.place(0, (2, chunk), (1, half))
    row = p.b.op("mod", sub, _like(p.b, 4, sub))
    first = p.b.op("lt", sub, _like(p.b, 4, sub))
    one, two, three = (p.byte(offset, (1, row)) for offset in (4, 8, 12))
    scale = p.b.select(first, p.bits(one, 0, 63), p.with_high(p.bits(three, 0, 15), p.bits(one, 6, 3)))
    minimum = p.b.select(first, p.bits(two, 0, 63), p.with_high(p.bits(three, 4, 15), p.bits(two, 6, 3)))
    factor = p.scaled(p.number(scale), p.half(0))
    low = p.scaled(p.number(minimum), p.half(2))
    found = p.scaled(p.number(number), factor)
    return p.b.sub(found, p.b.like(low, found))


def _q4_k(p: _Block, digits: Digits) -> Value:
    chunk, half, place = digits
    return _k(p, digits, p.bits(p.byte(16, (32, chunk), (1, place)), p.times(half, 4), 15))


def _q5_k(p: _Block, digits: Digits) -> Value:
    chunk, half, place = digits
    low = p.bits(p.byte(48, (32, chunk), (1, place)), p.times(half, 4), 15)
    high = p.bits(p.byte(16, (1, place)), p.place(0, (2, chunk), (1, half)), 1)
    return _k(p, digits, p.with_high(low, high))


def _q6_k(p: _Block, digits: Digits) -> Value:
    part, quarter, half, place = digits
    odd = p.b.op("mod", quarter, _like(p.b, 2, quarter))
    upper = p.b.op("floordiv", quarter, _like(p.b, 2, quarter))
    low = p.bits(p.byte(0, (64, part), (32, odd), (16, half), (1, place)), p.times(upper, 4), 15)
    high = p.bits(p.byte(128, (32, part), (16, half), (1, place)), p.times(quarter, 2), 3)
    scale = p.b.bitcast(p.byte(192, (8, part), (2, quarter), (1, half)), i8)
    factor = p.scaled(p.number(scale), p.half(208))
    return p.scaled(p.number(p.with_high(low, high), 32), factor)


def _group(p: _Block, digits: Digits, dtype: DType) -> Value:
    scale = by_name(dtype.scale)
    start = scale.itemsize * (1 + dtype.zero_point)
    factor = p.half(0) if scale is f16 else p.b.bitcast(p.word(0, u32), f32)
    byte = p.byte(start, (1, digits[0]))
    number = p.number(p.bits(byte, p.times(digits[1], 4), 15) if dtype.bits == 4 else byte)
    zero = p.number(p.byte(scale.itemsize)) if dtype.zero_point else p.b.const(1 << dtype.bits - 1, f32)
    return p.scaled(p.b.sub(number, p.b.like(zero, number)), factor)


_ELEMENTS: dict[str, Callable[[_Block, Digits], Value]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
