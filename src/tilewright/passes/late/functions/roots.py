"""cbrt and hypot as arithmetic, for f32 and f64, without overflow on the way."""

from __future__ import annotations

import math

from tilewright.base.dtypes import f32
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.late.math_exponential import power_of_two
from tilewright.passes.late.math_logarithm import split
from tilewright.passes.late.math_terms import Terms

# The cube root from sqrt(1/2) to sqrt(2); 9.2e-5 and 3.2e-8, of which a step of order three leaves nothing.
_CBRT_F32 = (0.055808, -0.28269666, 0.7317902, 0.49515423)
_CBRT_F64 = (
    0.015116439366089857, -0.13188446225709652, 0.5049233476924416, -1.1164554935007929, 1.5868860966419955, -1.561450005468906,
    1.3222725258071775, 0.3805915562816313,
)  # fmt: skip
_CBRT_2 = 1.2599210498948732


def cbrt(t: Terms, x: Value) -> Value:
    """With |x| = 8^q 2^r m and r from -1 to 1: a polynomial for the root of m, then one step of Halley's with the exact residue."""
    size = t.abs(x)
    k, m = split(t, size)
    q = t.op("round", t.mul(k, 1 / 3))
    r = t.fma(q, -3.0, k)
    up, down = t.gt(r, 0.0), t.lt(r, 0.0)
    dtype = dtype_of(x.type)
    y = t.product(t.polynomial(m, _CBRT_F32 if dtype is f32 else _CBRT_F64), t.select(up, _CBRT_2, t.select(down, 1 / _CBRT_2, 1.0, dtype)))
    m = t.mul(m, t.select(up, 2.0, t.select(down, 0.5, 1.0, dtype)))
    square, square_low = t.two_product(y, y)
    residue = t.fma(square_low, y, t.fma(square, y, t.neg(m)))
    y = t.sub(y, t.div(t.product(y, residue), t.fma(m, 3.0, t.add(residue, residue))))
    result = t.with_sign_of(t.mul(y, power_of_two(t, q)), x)
    ordinary = t.bit_and(t.gt(size, 0.0), t.lt(size, math.inf))
    return t.select(ordinary, result, x)


def hypot(t: Terms, x: Value, y: Value) -> Value:
    """sqrt(x^2 + y^2), scaled by a power of two where squares would leave the range."""
    dtype = dtype_of(x.type)
    edge, step = (60, 90) if dtype is f32 else (500, 600)
    a, b = t.abs(x), t.abs(y)
    swapped = t.gt(b, a)
    large, small = t.select(swapped, b, a), t.select(swapped, a, b)
    above, below = t.gt(large, 2.0**edge), t.lt(large, 2.0**-edge)
    scale = t.select(above, 2.0**-step, t.select(below, 2.0**step, 1.0, dtype))
    back = t.select(above, 2.0**step, t.select(below, 2.0**-step, 1.0, dtype))
    large, small = t.mul(large, scale), t.mul(small, scale)
    square, square_low = t.two_product(large, large)
    total, lost = t.fast_two_sum(square, t.mul(small, small))
    result = t.mul(t.op("sqrt", t.add(total, t.add(lost, square_low))), back)
    return t.select(t.bit_or(t.eq(a, math.inf), t.eq(b, math.inf)), math.inf, result)
