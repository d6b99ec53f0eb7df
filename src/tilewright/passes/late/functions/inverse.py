"""asin, acos, atan, atan2, asinh, acosh and atanh as arithmetic, for f32 and f64.

An argument is brought near zero by an identity, where a polynomial is short; what the step before loses is carried along as a second number. The
hyperbolic ones are logarithms of 1 + u, with u as a sum of two. Polynomials are interpolants at Chebyshev nodes, computed with 60 digits.
"""

from __future__ import annotations

import math

from tilewright.base.dtypes import f32
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.late.math_logarithm import log_of_one_and
from tilewright.passes.late.math_terms import Terms

# (atan(x) - x) / x^3 in x^2, |x| < sqrt(2) - 1; 8.1e-11 and 6.4e-21.
_ATAN_F32 = (0.050479375, -0.086245984, 0.11071355, -0.1428415, 0.19999978, -0.33333334)
_ATAN_F64 = (
    -0.013916943217800841, 0.03063443323901452, -0.04104381417807643, 0.04719381457895137, -0.052580394289794816, 0.05881925033877732,
    -0.06666642004996545, 0.07692306735321475, -0.0909090906699066, 0.11111111110754406, -0.14285714285711515, 0.19999999999999993,
    -0.3333333333333333,
)  # fmt: skip
# (asin(x) - x) / x^3 in x^2, |x| < 1/2; 1.0e-9 and 2.5e-19.
_ASIN_F32 = (0.033700727, 0.017143717, 0.031101728, 0.04459932, 0.07500095, 0.16666666)
_ASIN_F64 = (
    0.02963502626354855, -0.019277545928584557, 0.019579201619744684, 0.0030350071727267623, 0.009322101501082774, 0.00962140274734483,
    0.011566511821890942, 0.013963775787848137, 0.017352816768546473, 0.022372157435623815, 0.030381944475693704, 0.04464285714255019,
    0.07500000000000119, 0.16666666666666666,
)  # fmt: skip
_HALF_PI_F32, _HALF_PI_F64 = (1.5707963705062866, -4.3711390001862426e-08), (1.5707963267948966, 6.123233995736766e-17)
# pi/4 with a first part whose products with numbers up to 4 are exact.
_QUARTER_PI_F32, _QUARTER_PI_F64 = (0.7853975296020508, 6.337953975283657e-07), (0.7853981633974474, 9.18794589678809e-16)
_TAN_EIGHTH = math.sqrt(2) - 1


# -- of a circle ----------------------------------------------------------------------------------------------------


def _atan_rest(t: Terms, r: Value) -> Value:
    """atan(r) - r for |r| < sqrt(2) - 1."""
    z = t.mul(r, r)
    return t.mul(t.mul(r, z), t.polynomial(z, _ATAN_F32 if dtype_of(r.type) is f32 else _ATAN_F64))


def _at_quarter(t: Terms, quarters: Value, part: Value, rest: Value) -> Value:
    """quarters * pi/4 + part + rest, where rest is small beside part."""
    high, low = _QUARTER_PI_F32 if dtype_of(part.type) is f32 else _QUARTER_PI_F64
    total, lost = t.two_sum(t.product(quarters, high), part)
    return t.add(total, t.add(lost, t.fma(quarters, low, rest)))


def atan(t: Terms, x: Value) -> Value:
    """Beyond tan(3 pi/8) pi/2 + atan(-1/x), beyond tan(pi/8) pi/4 + atan((x - 1)/(x + 1))."""
    size = t.abs(x)
    far, middle = t.gt(size, 1 / _TAN_EIGHTH), t.gt(size, _TAN_EIGHTH)
    above = t.select(far, -1.0, t.select(middle, t.sub(size, 1.0), size))
    below = t.select(far, size, t.select(middle, t.add(size, 1.0), 1.0))
    r = t.div(above, below)
    quarters = t.select(far, 2.0, t.select(middle, 1.0, 0.0, dtype_of(x.type)))
    return t.with_sign_of(_at_quarter(t, quarters, r, _atan_rest(t, r)), x)


def atan2(t: Terms, y: Value, x: Value) -> Value:
    """The smaller of |x| and |y| over the larger; then the octant, from signs and which is larger."""
    dtype = dtype_of(x.type)
    across, along = t.abs(y), t.abs(x)
    steep = t.gt(across, along)
    large, small = t.select(steep, across, along), t.select(steep, along, across)
    # Sums must not overflow, and denormals have few bits; infinities count as one.
    most, least, lift = (126, -60, 100) if dtype is f32 else (1022, -900, 200)
    scale = t.select(t.gt(large, 2.0**most), 0.25, t.select(t.lt(large, 2.0**least), 2.0**lift, 1.0, dtype))
    endless = t.eq(large, math.inf)
    small = t.select(endless, t.select(t.eq(small, math.inf), 1.0, t.mul(small, 0.0)), t.mul(small, scale))
    large = t.select(endless, 1.0, t.mul(large, scale))
    middle = t.gt(small, t.mul(large, _TAN_EIGHTH))
    above, below = t.select(middle, t.sub(small, large), small), t.select(middle, t.add(small, large), large)
    r = t.select(t.eq(below, 0.0), 0.0, t.div(above, below))
    rest = _atan_rest(t, r)
    quarters = t.select(middle, 1.0, 0.0, dtype)
    # pi/2 - angle where it is steep, pi - angle where x is negative, -0 included.
    behind = t.lt(t.bits(x), 0)
    quarters = t.select(steep, t.sub(2.0, quarters), quarters)
    quarters = t.select(behind, t.sub(4.0, quarters), quarters)
    turned = t.ne(steep, behind)
    angle = _at_quarter(t, quarters, t.select(turned, t.neg(r), r), t.select(turned, t.neg(rest), rest))
    # A NaN of x may hide behind signs of bits, one of y not.
    angle = t.select(t.eq(x, x), t.with_sign_of(angle, y), math.nan)
    return t.select(t.eq(y, y), angle, math.nan)


def _asin_parts(t: Terms, size: Value) -> tuple[Value, Value, Value]:
    """Whether |x| > 1/2, and asin of |x|, or of sqrt((1 - |x|)/2) there, as a sum of two numbers."""
    far = t.gt(size, 0.5)
    z = t.select(far, t.mul(t.sub(1.0, size), 0.5), t.product(size, size))
    root = t.op("sqrt", z)
    s = t.select(far, root, size)
    rest = t.mul(t.mul(s, z), t.polynomial(z, _ASIN_F32 if dtype_of(size.type) is f32 else _ASIN_F64))
    # What the root loses.
    lost = t.div(t.fma(t.neg(root), root, z), t.select(t.eq(root, 0.0), 1.0, t.add(root, root)))
    return far, s, t.select(far, t.add(rest, lost), rest)


def asin(t: Terms, x: Value) -> Value:
    """Beyond 1/2 it is pi/2 - 2 asin(sqrt((1 - |x|)/2))."""
    high, low = _HALF_PI_F32 if dtype_of(x.type) is f32 else _HALF_PI_F64
    far, s, rest = _asin_parts(t, t.abs(x))
    total, lost = t.fast_two_sum(high, t.mul(s, -2.0))
    large = t.add(total, t.add(lost, t.fma(rest, -2.0, low)))
    return t.with_sign_of(t.select(far, large, t.add(s, rest)), x)


def acos(t: Terms, x: Value) -> Value:
    """pi/2 - asin(x) near zero, 2 asin(sqrt((1 - |x|)/2)) beyond 1/2, and what is missing from pi below -1/2."""
    high, low = _HALF_PI_F32 if dtype_of(x.type) is f32 else _HALF_PI_F64
    far, s, rest = _asin_parts(t, t.abs(x))
    negative = t.lt(x, 0.0)
    flipped = t.bit_and(negative, t.op("not", far))
    s, rest = t.select(flipped, t.neg(s), s), t.select(flipped, t.neg(rest), rest)
    total, lost = t.fast_two_sum(high, t.neg(s))
    below = t.add(total, t.add(lost, t.sub(low, rest)))
    result = t.select(t.bit_and(far, t.op("not", negative)), t.add(s, rest), below)
    return t.select(far, t.add(result, result), result)


# -- hyperbolic -----------------------------------------------------------------------------------------------------


def _far(x: Value) -> float:
    """Beyond it asinh and acosh are log(2x)."""
    return 2.0**14 if dtype_of(x.type) is f32 else 2.0**30


_LN2 = math.log(2)


def asinh(t: Terms, x: Value) -> Value:
    """log(1 + |x| + x^2 / (1 + sqrt(1 + x^2))); log(|x|) + log(2) far out."""
    size = t.abs(x)
    far = t.gt(size, _far(x))
    near = t.select(far, 1.0, size)
    square = t.mul(near, near)
    more = t.div(square, t.add(t.op("sqrt", t.fma(near, near, 1.0)), 1.0))
    u, u_low = t.two_sum(near, more)
    u, u_low = t.select(far, t.sub(size, 1.0), u), t.select(far, 0.0, u_low)
    result = log_of_one_and(t, u, u_low)
    return t.with_sign_of(t.select(far, t.add(result, _LN2), result), x)


def acosh(t: Terms, x: Value) -> Value:
    """log(1 + u + sqrt(u^2 + 2u)) with u = x - 1; log(x) + log(2) far out."""
    far = t.gt(x, _far(x))
    near = t.sub(t.select(far, 2.0, x), 1.0)
    root = t.op("sqrt", t.fma(near, near, t.add(near, near)))
    u, u_low = t.two_sum(root, near)
    u, u_low = t.select(far, t.sub(x, 1.0), u), t.select(far, 0.0, u_low)
    result = log_of_one_and(t, u, u_low)
    result = t.select(far, t.add(result, _LN2), result)
    return t.select(t.lt(x, 1.0), math.nan, t.select(t.eq(x, 1.0), 0.0, result))


def atanh(t: Terms, x: Value) -> Value:
    """log(1 + 2|x| + 2x^2 / (1 - |x|)) / 2."""
    size = t.abs(x)
    twice = t.add(size, size)
    more = t.div(t.mul(twice, size), t.sub(1.0, size))
    u, u_low = t.two_sum(twice, more)
    u_low = t.select(t.eq(size, 1.0), 0.0, u_low)
    result = t.with_sign_of(t.mul(log_of_one_and(t, u, u_low), 0.5), x)
    return t.select(t.gt(size, 1.0), math.nan, result)
