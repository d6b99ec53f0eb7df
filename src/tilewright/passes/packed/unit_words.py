"""A unit of a packed row, and arithmetic on its words: what `units.py` and `matrix_units.py` write formats with.

In: a builder, a tensor of words and where a unit is. Out: values of the loop stage. Whole numbers become floats by their bits: those of 2^23 with the
number in its last places, less 2^23.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import DType, f16, f32, u16, u32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.packed.elements import MAGIC, POWER, hidden_zero


@record
class UnitFormat:
    """How a format is walked in units."""

    word: DType
    elements: int
    """Of a unit."""
    sum: Callable[[PackedUnit], Value]
    """The sum over the unit that stands there."""
    whole: bool = False
    """The elements of a unit are neighbours."""
    lanes: int = 1
    """Lanes of a warp that have different rows."""


class PackedUnit:
    """A unit of a row, and arithmetic on its words."""

    def __init__(
        self, b: Builder, tensor: Value, lead: Sequence[Value], number: Value, other: Callable[[Builder, Value, int], Value], elements: int
    ) -> None:
        self.b, self.tensor, self.lead, self.number, self.other, self.elements = b, tensor, lead, number, other, elements
        self.nothing = hidden_zero(b, tensor)

    def split(self, count: int) -> None:
        """There are so many units in a block: which block, and which of them it is."""
        self.block = self.b.op("floordiv", self.number, self.b.index(count))
        self.place = self.b.op("mod", self.number, self.b.index(count))

    def digit(self, value: Value, below: int, radix: int) -> Value:
        found = self.b.op("floordiv", value, self.b.index(below)) if below > 1 else value
        return self.b.op("mod", found, self.b.index(radix)) if radix else found

    def at(self, *terms: tuple[Value, int]) -> Value:
        total: Value | None = None
        for value, factor in terms:
            term = self.b.mul(value, self.b.index(factor)) if factor != 1 else value
            total = term if total is None else self.b.add(total, term)
        assert total is not None
        return total

    def word(self, base: Value | None, offset: int) -> Value:
        """A word of the block, as u32."""
        place = self.b.index(offset) if base is None else self.b.add(base, self.b.index(offset)) if offset else base
        return self.b.cast(self.b.op("load", self.tensor, *self.lead, self.block, place), u32)

    def joined(self, low: Value, high: Value) -> Value:
        return self.b.op("or", low, self.shl(high, 16))

    def shr(self, value: Value, bits: int) -> Value:
        return self.b.op("shr", value, self.b.const(bits, u32)) if bits else value

    def shl(self, value: Value, bits: int) -> Value:
        return self.b.op("shl", value, self.b.const(bits, u32))

    def mask(self, value: Value, bits: int) -> Value:
        return self.b.op("and", value, self.b.const(bits, u32))

    def half(self, word: Value) -> Value:
        """The f16 in the low half of a word, as f32."""
        return self.b.cast(self.b.bitcast(self.b.cast(word, u16), f16), f32)

    def float_of(self, word: Value, mask: int, less: int = 0, flip: int = 0) -> Value:
        """The whole number that lies under `mask`, with the bits of `flip` turned over, less `less`, as f32."""
        bits = self.b.op("xor", self.mask(word, mask), self.b.add(self.b.const(MAGIC | flip, u32), self.nothing))
        return self.b.sub(self.b.bitcast(bits, f32), self.b.const(float(POWER + less), f32))

    def x(self, base: Value, offset: int) -> Value:
        return self.other(self.b, self.b.add(base, self.b.index(offset)) if offset else base, offset)

    def times(self, value: Value, factor: float) -> Value:
        return value if factor == 1.0 else self.b.mul(value, self.b.const(factor, f32))


def k_scales(unit: PackedUnit, head: Sequence[Value], quarter: Value | None = None) -> list[tuple[Value, Value]]:
    """Of q4_k and q5_k, from the first four words of a block: scale and minimum of the two sub-blocks of a quarter, which is the unit where nothing else is said. Six bits each lie side by side."""
    b = unit.b
    quarter = unit.place if quarter is None else quarter
    first = b.op("lt", quarter, b.index(2))
    shift = b.cast(b.mul(b.op("mod", quarter, b.index(2)), b.index(16)), u32)
    one, two, three = (b.op("shr", word, shift) for word in head[1:])
    scales = b.select(first, unit.mask(one, 0x3F3F), b.op("or", unit.mask(three, 0x0F0F), unit.mask(unit.shr(one, 2), 0x3030)))
    minima = b.select(first, unit.mask(two, 0x3F3F), b.op("or", unit.mask(unit.shr(three, 4), 0x0F0F), unit.mask(unit.shr(two, 2), 0x3030)))
    d, m = unit.half(head[0]), unit.half(unit.shr(head[0], 16))
    return [
        (
            b.mul(d, unit.times(unit.float_of(scales, 63 << 8 * side), 2.0 ** (-8 * side))),
            b.mul(m, unit.times(unit.float_of(minima, 63 << 8 * side), 2.0 ** (-8 * side))),
        )
        for side in (0, 1)
    ]
