"""The units of packed rows for matrix instructions: the same sums as `units.py` writes, with numbers as words of two bf16 or f16. In: a `PackedUnit`; out: its sum.

A word of bytes becomes two words of two floats by `pair_bytes`, which puts the bits of a power of two above each byte: half of 16 + q for four bits in bf16. That
is exact, as is every product with a factor that is bf16 or f16 itself. `dot_pairs` adds products up in f32. A factor that is f32 is three bf16 whose sum it
is, so nothing of it is lost either. What the numbers have too much is taken off again: before the product (`add_pairs`), or, where a format has minima, together
with these, since both are a number times the sum of the factors.

    four bits, bf16:   byte = q << 3    ->   0x4100 | q << 3 = (16 + q) / 2

Formats whose units share their scale by fours (`spread`) are walked as before, the lanes of a warp along a row. In the others a lane has scales of its own,
and 8 lanes have different rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, bf16, by_name, f16, f32, u16, u32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.packed.unit_words import PackedUnit, UnitFormat, k_scales

ALL_BYTES = 0x01010101


@record
class Biased:
    """Where a number of so many bits lies in a byte, and what the byte above makes of it: the number plus `bias`, times `step`."""

    shift: int
    high: int
    bias: int
    step: float


def biased(bits: int, dtype: DType) -> Biased:
    """The floats `(2^bits + q) * step` of a dtype. bf16 has seven places for q below an exponent whose last bit is in the same byte: it has to be 0. One of f16's
    bytes has eight."""
    if dtype is bf16:
        power = 127 + bits & ~1
        return Biased(7 - bits, power >> 1, 1 << bits, 2.0 ** (power - 127 - bits))
    return Biased(8 - bits, (15 + bits + 2) << 2, 1 << bits + 2, 1.0)


def pair_of(number: float, dtype: DType) -> int:
    """The bits of a word that holds a small whole number twice."""
    import numpy as np

    half = int(np.asarray([number], np.float32).astype(dtype.numpy).view(np.uint16)[0])
    return half * 0x00010001


class Products:
    """Sums of products over a unit. `factors`: for each part of the factor, the words of its pairs."""

    def __init__(self, unit: PackedUnit, spread: int) -> None:
        self.unit, self.b, self.spread = unit, unit.b, spread
        self.elements: dict[int, list[Value]] = {}
        self.dtype = bf16

    # -- the factor -------------------------------------------------------------------------------------------------

    def parts(self, base: Value, offset: int) -> list[Value]:
        """The factor at a place of the unit, as bits of narrow floats whose sum it is: the upper halves of f32, or one that is narrow already."""
        if offset not in self.elements:
            b = self.b
            x = self.unit.x(base, offset)
            dtype = dtype_of(x.type)
            if dtype in (bf16, f16):
                self.dtype = dtype
                self.elements[offset] = [b.cast(b.bitcast(x, u16), u32)]
            else:
                self.elements[offset] = _three(b, x if dtype is f32 else b.cast(x, f32))
        return self.elements[offset]

    def words(self, base: Value, pairs: Sequence[tuple[int, int]]) -> list[list[Value]]:
        """For each part of the factor: a word for each pair of places."""
        found: list[list[Value]] = []
        for first, second in pairs:
            lows, highs = self.parts(base, first), self.parts(base, second)
            found.append([self.b.op("or", low, self.unit.shl(high, 16)) for low, high in zip(lows, highs, strict=True)])
        return [list(words) for words in zip(*found, strict=True)]

    # -- the numbers ------------------------------------------------------------------------------------------------

    def field(self, word: Value, at: int, bits: int, place: Biased) -> Value:
        """The bits that lie `at` so many places up in each byte, where numbers are wanted."""
        return self.moved(word, at - place.shift, ((1 << bits) - 1) << place.shift)

    def moved(self, word: Value, down: int, mask: int) -> Value:
        """Each byte's bits under `mask`, once the word is moved down, or up where that is negative."""
        unit = self.unit
        return unit.mask(unit.shr(word, down) if down >= 0 else unit.shl(word, -down), mask * ALL_BYTES)

    def pairs(self, word: Value, place: Biased) -> list[Value]:
        """Four bytes as two words of floats."""
        return [self.b.op("pair_bytes", word, high=place.high, upper=upper) for upper in (False, True)]

    def exact(self, words: Sequence[Value], bias: float) -> list[Value]:
        """The numbers without what they have too much."""
        less = self.b.const(pair_of(-bias, self.dtype), u32)
        return [self.b.op("add_pairs", word, less, dtype=self.dtype) for word in words]

    # -- sums -------------------------------------------------------------------------------------------------------

    def dot(self, numbers: Sequence[Value], factors: Sequence[Sequence[Value]]) -> Value:
        words = [word for _ in factors for word in numbers]
        return self.b.op("dot_pairs", *words, *(word for part in factors for word in part), dtype=self.dtype, spread=self.spread)

    def less(self, numbers: Sequence[Value], factors: Sequence[Sequence[Value]], bias: float, plain: Value) -> Value:
        """The sum without what numbers have too much. `plain` is the sum of the factors: where these are narrow the whole sum gives back what it has too
        much, which costs some bits of f32 and no instruction for each number."""
        if len(factors) > 1:
            return self.dot(self.exact(numbers, bias), factors)
        return self.b.fma(self.b.const(-bias, f32), plain, self.dot(numbers, factors))

    def total(self, factors: Sequence[Sequence[Value]]) -> Value:
        """The sum of the factors themselves."""
        one = self.b.const(pair_of(1.0, self.dtype), u32)
        return self.dot([one] * len(factors[0]), factors)


def _three(b: Builder, x: Value) -> list[Value]:
    """Three bf16 whose sum is an f32: each the upper half of what is left. Nothing is left of an infinity."""
    parts: list[Value] = []
    for last in (False, False, True):
        bits = b.bitcast(x, u32)
        parts.append(b.op("shr", bits, b.const(16, u32)))
        if not last:
            upper = b.bitcast(b.op("and", bits, b.const(0xFFFF0000, u32)), f32)
            x = b.select(b.op("eq", x, upper), b.const(0.0, f32), b.sub(x, upper))
    return parts


FOURS = ((0, 1), (2, 3))
"""Places of the pairs of four neighbours."""


def _pairs(*firsts: int) -> list[tuple[int, int]]:
    """The pairs of the four neighbours that begin at each of these places."""
    return [(first + one, first + two) for first in firsts for one, two in FOURS]


def _q4_k(unit: PackedUnit) -> Value:
    return _quarter(unit, 4)


def _q5_k(unit: PackedUnit) -> Value:
    return _quarter(unit, 5)


def _quarter(unit: PackedUnit, bits: int) -> Value:
    """64 elements: 32 bytes, the low nibbles of which are one sub-block and the high ones the next; a fifth bit of each lies in one of eight rows."""
    b, products = unit.b, Products(unit, 1)
    unit.split(4)
    x0 = b.mul(unit.number, b.index(64))
    begin = 4 if bits == 4 else 12
    words = [unit.word(b.mul(unit.place, b.index(8)), begin + j) for j in range(8)]
    above = [unit.word(None, 4 + j) for j in range(8)] if bits == 5 else []
    head = [unit.word(None, j) for j in range(4)]
    factors = [products.words(x0, _pairs(*range(start, start + 32, 4))) for start in (0, 32)]
    place = biased(bits, products.dtype)
    down = b.cast(b.mul(unit.place, b.index(2)), u32)
    fifth = [b.op("shr", word, down) for word in above]
    total: Value | None = None
    for side, (scale, minimum) in enumerate(k_scales(unit, head)):
        numbers: list[Value] = []
        for j, word in enumerate(words):
            low = products.field(word, 4 * side, 4, place)
            if fifth:
                low = b.op("or", low, products.moved(fifth[j], side - place.shift - 4, 16 << place.shift))
            numbers += products.pairs(low, place)
        plain = products.total(factors[side])
        own = products.less(numbers, factors[side], place.bias * place.step, plain)
        own = b.sub(b.mul(unit.times(scale, 1 / place.step), own), b.mul(minimum, plain))
        total = own if total is None else b.add(total, own)
    assert total is not None
    return total


def _q8_0(unit: PackedUnit) -> Value:
    """8 elements: 8 bytes."""
    b, products = unit.b, Products(unit, 4)
    unit.split(4)
    x0 = b.mul(unit.number, b.index(8))
    base = b.mul(unit.place, b.index(4))
    words = [unit.word(base, 1 + j) for j in range(4)]
    d = unit.half(unit.word(None, 0))
    factors = products.words(x0, _pairs(0, 4))
    return b.mul(d, products.dot([_signed(products, word) for word in words], factors))


def _signed(products: Products, two: Value) -> Value:
    """Two bytes, signed, as two floats."""
    b, dtype, mask = products.b, products.dtype, products.unit.mask
    if dtype is f16:
        word = b.op("xor", b.op("pair_bytes", two, high=0x64), b.const(0x00800080, u32))  # 1024 + 128 + q
        return products.exact([word], 1024 + 128)[0]
    # 128 + its lower seven bits, less 128, or 256 where the sign is set
    low, sign = mask(b.op("pair_bytes", two, high=0x43), 0xFF7FFF7F), mask(b.op("pair_bytes", two, high=0xC3), 0xFF80FF80)
    return b.op("add_pairs", low, sign, dtype=dtype)


def _unsigned(products: Products, word: Value, upper: bool) -> Value:
    """Two bytes of a word, less 128, as two floats."""
    b = products.b
    if products.dtype is f16:
        return products.exact([b.op("pair_bytes", word, high=0x64, upper=upper)], 1024 + 128)[0]
    return _signed(products, b.op("xor", b.op("shr", word, b.const(16, u32)) if upper else word, b.const(0x8080, u32)))


def _thirty_two(unit: PackedUnit, bits: int, minimum: bool) -> Value:
    """8 elements of q4_0, q4_1, q5_0, q5_1: the low nibbles of four bytes, and 16 elements further on the high ones; fifth bits lie side by side."""
    b, products = unit.b, Products(unit, 4)
    unit.split(4)
    x0 = b.add(b.mul(unit.block, b.index(32)), b.mul(unit.place, b.index(4)))
    size = 4 if minimum else 2
    at = (2 + 2 * minimum + 4 * (bits == 5)) // size
    if minimum:
        word = unit.word(unit.place, at)
        head = unit.word(None, 0)
        above = unit.word(None, 1) if bits == 5 else None
    else:
        base = b.mul(unit.place, b.index(2))
        word = unit.joined(unit.word(base, at), unit.word(base, at + 1))
        head = unit.word(None, 0)
        above = unit.joined(unit.word(None, 1), unit.word(None, 2)) if bits == 5 else None
    factors = products.words(x0, _pairs(0, 16))
    place = biased(bits, products.dtype)
    numbers: list[Value] = []
    for side in (0, 1):
        low = products.field(word, 4 * side, 4, place)
        if above is not None:
            four = unit.mask(b.op("shr", above, b.cast(unit.at((unit.place, 4)) if not side else b.add(unit.at((unit.place, 4)), b.index(16)), u32)), 15)
            # Four bits become the same bit of four bytes.
            spread = b.mul(four, b.const(0x00204081 << place.shift + 4 & 0xFFFFFFFF, u32))
            low = b.op("or", low, unit.mask(spread, (16 << place.shift) * ALL_BYTES))
        numbers += products.pairs(low, place)
    d = unit.half(head)
    if not minimum:
        return b.mul(unit.times(d, 1 / place.step), products.dot(products.exact(numbers, (place.bias + (1 << bits - 1)) * place.step), factors))
    plain = products.total(factors)
    own = products.less(numbers, factors, place.bias * place.step, plain)
    return b.fma(unit.half(unit.shr(head, 16)), plain, b.mul(unit.times(d, 1 / place.step), own))


def _q6_k(unit: PackedUnit) -> Value:
    """16 elements: four neighbours in each of four rows of 32, which share bytes."""
    b, products = unit.b, Products(unit, 4)
    unit.split(16)
    part, four = unit.digit(unit.place, 8, 0), unit.digit(unit.place, 1, 8)
    x0 = b.add(b.add(b.mul(unit.block, b.index(256)), b.mul(part, b.index(128))), b.mul(four, b.index(4)))
    low = unit.at((part, 32), (four, 2))
    first, second = (unit.joined(unit.word(low, j), unit.word(low, j + 1)) for j in (0, 16))
    above = unit.at((part, 16), (four, 2))
    high = unit.joined(unit.word(above, 64), unit.word(above, 65))
    scale_base = b.mul(part, b.index(4))
    scales = [unit.word(scale_base, 96 + quarter) for quarter in range(4)]
    d = unit.half(unit.word(None, 104))
    down = b.cast(b.mul(b.op("floordiv", four, b.index(4)), b.index(8)), u32)
    factors = [products.words(x0, _pairs(32 * quarter)) for quarter in range(4)]
    place = biased(6, products.dtype)
    total: Value | None = None
    for quarter in range(4):
        word = products.field((first, second)[quarter % 2], 4 * (quarter // 2), 4, place)
        word = b.op("or", word, products.moved(high, 2 * quarter - place.shift - 4, 48 << place.shift))
        own = products.dot(products.exact(products.pairs(word, place), (place.bias + 32) * place.step), factors[quarter])
        scale = unit.float_of(b.op("shr", scales[quarter], down), 255, 128, 128)
        total = b.mul(scale, own) if total is None else b.fma(scale, own, total)
    assert total is not None
    return b.mul(unit.times(d, 1 / place.step), total)


def _group(unit: PackedUnit, dtype: DType) -> Value:
    """8 elements of a group: four bytes, each with two neighbours, or eight bytes with one each."""
    b, products = unit.b, Products(unit, 4)
    scale, word = by_name(dtype.scale), 2 if dtype.scale == "f16" else 4
    unit.split(dtype.block // 8)
    x0 = b.mul(unit.number, b.index(8))
    begin, each = (2 if dtype.zero_point else 1), dtype.bits // word
    base = b.mul(unit.place, b.index(each))
    raw = [unit.word(base, begin + j) for j in range(each)]
    if word == 2:
        raw = [unit.joined(one, two) for one, two in zip(raw[::2], raw[1::2], strict=True)]
    head = unit.word(None, 0)
    factor = unit.half(head) if scale is f16 else b.bitcast(head, f32)
    zero = unit.word(None, 1) if dtype.zero_point else None
    numbers: list[Value] = []
    if dtype.bits == 4:
        factors = products.words(x0, [(0, 2), (4, 6), (1, 3), (5, 7)])
        place = biased(4, products.dtype)
        for side in (0, 1):
            numbers += products.pairs(products.field(raw[0], 4 * side, 4, place), place)
        centre = (place.bias + 8) * place.step
        factor = unit.times(factor, 1 / place.step)
        whole_step = place.step
    else:
        factors = products.words(x0, _pairs(0, 4))
        numbers = [_unsigned(products, w, upper) for w in raw for upper in (False, True)]
        centre, whole_step = 0.0, 1.0
    if zero is None:
        return b.mul(factor, products.dot(products.exact(numbers, centre) if centre else numbers, factors))
    # sum (q - z) x = sum (q - c) x - (z - c) sum x
    c = 8 if dtype.bits == 4 else 128
    whole = unit.float_of(zero, 255)
    plain = products.total(factors)
    own = products.dot(products.exact(numbers, centre) if centre else numbers, factors)
    return b.mul(factor, b.fma(unit.times(b.sub(b.const(float(c), f32), whole), whole_step), plain, own))


def matrix_format(name: str) -> UnitFormat | None:
    """How a format is walked for matrix instructions; None for one that cannot be."""
    if name in MATRIX_UNITS:
        return MATRIX_UNITS[name]
    dtype = by_name(name) if name else None
    if dtype is None or not dtype.scale or dtype.block < 32:
        return None
    return UnitFormat(u16 if dtype.scale == "f16" else u32, 8, lambda unit: _group(unit, dtype), whole=True)


MATRIX_UNITS: dict[str, UnitFormat] = {
    "q4_k": UnitFormat(u32, 64, _q4_k, whole=True, lanes=8), "q5_k": UnitFormat(u32, 64, _q5_k, whole=True, lanes=8),
    "q8_0": UnitFormat(u16, 8, _q8_0, whole=True), "q6_k": UnitFormat(u16, 16, _q6_k),
    "q4_0": UnitFormat(u16, 8, lambda unit: _thirty_two(unit, 4, False)), "q4_1": UnitFormat(u32, 8, lambda unit: _thirty_two(unit, 4, True)),
    "q5_0": UnitFormat(u16, 8, lambda unit: _thirty_two(unit, 5, False)), "q5_1": UnitFormat(u32, 8, lambda unit: _thirty_two(unit, 5, True)),
}  # fmt: skip
"""Formats by name. Groups of 32 and more are walked like blocks of 32."""
