"""f32 as numbers of tf32, for matrix instructions of thread-stage kernels: rounded, or in two parts.

In: the bits of an f32. Out: bits of which the instruction takes those above the lowest 13. Two parts are within 2^-22 of the number, and
have its sign: what an infinity is multiplied by must not give two of different signs, and no zero besides. So a number that is a tf32 leaves
2^-64 of itself, and an infinity leaves itself: their products are lost in those of the large parts, or the same infinity once more.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f32, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value

CUT = 0xFFFFE000
"""The bits of an f32 that tf32 has."""
HALF = 0x1000
"""Half of the last of them."""
REST = 2.0**-64
"""What a tf32 leaves of itself: far below what sums keep of a product, and above zero for numbers from 2^-72 on."""


def rounded_tf32(b: Builder, bits: Value) -> Value:
    """An f32 rounded to tf32: the instruction drops the bits below. What is NaN stays so."""
    value = b.bitcast(bits, f32)
    return b.select(b.op("isnan", value), bits, b.add(bits, b.const(HALF, u32)))


def tf32_parts(b: Builder, bits: Value) -> tuple[Value, Value]:
    """An f32 as a tf32, which is never larger, and what that leaves, rounded to tf32."""
    large = b.op("and", bits, b.const(CUT, u32))
    value, cut = b.bitcast(bits, f32), b.bitcast(large, f32)
    rest = b.select(b.op("eq", value, cut), b.mul(value, b.const(REST, f32)), b.sub(value, cut))
    return large, b.add(b.bitcast(rest, u32), b.const(HALF, u32))


def all_parts(b: Builder, words: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """The large parts of several, and the small ones."""
    parts = [tf32_parts(b, word) for word in words]
    return [large for large, _ in parts], [small for _, small in parts]
