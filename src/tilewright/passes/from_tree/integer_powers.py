"""Powers of integers, as `lower_body` builds them: `a ** b` where both are integers that only the run knows.

In: two IR values of an integer dtype; out: the power in that dtype, which wraps, as in NumPy. A loop squares the base and takes one bit of the exponent in each turn; it ends when no bit is left, so that
small exponents take few products. Vectors stay vectors: their loop ends with the last of its lanes. Dtypes of eight bits have so few bits that all are taken, without a loop. A negative exponent gives
what is left of `1 / a ** -b` without its fraction: 1 of 1, 1 or -1 of -1, else 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, i64, u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value


def integer_power(builder: Builder, base: Value, exponent: Value, dtype: DType) -> Value:
    """`base ** exponent`; `dtype` is that of both and of the result."""
    one, zero = builder.const(1, dtype), builder.const(0, dtype)
    # Numbers that wrap are no indices: i64 would be taken for one, and the range of its squares followed.
    wraps = u64 if dtype is i64 else dtype
    count = builder.op("max", exponent, zero) if dtype.is_signed else exponent
    if dtype is i64:
        found = builder.bitcast(
            _by_turns(builder, builder.bitcast(base, wraps), builder.bitcast(count, wraps), wraps), i64
        )
    elif dtype.bits <= 8:
        found = _bit_by_bit(builder, base, count, dtype)
    else:
        found = _by_turns(builder, base, count, dtype)
    if not dtype.is_signed:
        return found
    # The lowest bit of a negative exponent says whether it is odd.
    odd = builder.op("ne", builder.op("and", exponent, one), zero)
    minus = builder.const(-1, dtype)
    unit = builder.select(
        builder.op("eq", base, one),
        one,
        builder.select(builder.op("eq", base, minus), builder.select(odd, minus, one), zero),
    )
    return builder.select(builder.op("lt", exponent, zero), unit, found)


def _bit_by_bit(builder: Builder, base: Value, count: Value, dtype: DType) -> Value:
    """All bits of the exponent, one after the other."""
    one, zero = builder.const(1, dtype), builder.const(0, dtype)
    found, square = one, base
    for bit in range(dtype.bits - dtype.is_signed):
        taken = builder.op("ne", builder.op("and", count, builder.const(1 << bit, dtype)), zero)
        found = builder.op("mul", found, builder.select(taken, square, one))
        square = builder.op("mul", square, square)
    return found


def _by_turns(builder: Builder, base: Value, count: Value, dtype: DType) -> Value:
    """The bits of the exponent up to the highest that is set. The lowest takes no product, and no square is made that is not used."""
    one = builder.const(1, dtype)

    def lowest(inner: Builder, left: Value) -> Value:
        return inner.op("ne", inner.op("and", left, inner.const(1, dtype)), inner.const(0, dtype))

    def test(inner: Builder, left: Value, found: Value, square: Value) -> Sequence[Value]:
        return [inner.op("gt", left, inner.const(1, dtype)), left, found, square]

    def turn(inner: Builder, left: Value, found: Value, square: Value) -> Sequence[Value]:
        left, square = inner.op("shr", left, inner.const(1, dtype)), inner.op("mul", square, square)
        return [left, inner.op("mul", found, inner.select(lowest(inner, left), square, inner.const(1, dtype))), square]

    start = count, builder.select(lowest(builder, count), base, one), base
    names, types = ("left", "power", "square"), [value.type for value in start]
    regions = builder.region(types, names, test), builder.region(types, names, turn)
    results = tuple(Value(t, name) for t, name in zip(types, names, strict=True))
    builder.append(Op("while", start, results, regions=regions, span=builder.span))
    return results[1]
