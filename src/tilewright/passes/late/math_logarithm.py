"""log, log2, log10, log1p and pow as arithmetic, for f32 and f64.

    x = 2^k * m,  sqrt(1/2) <= m < sqrt(2),  f = m - 1 (exact)

so that k is 0 around 1, where the logarithm is small and nothing may cancel. f32 takes a polynomial in f; f64 one in
s = f / (2 + f), the form of fdlibm. pow needs the logarithm to more digits than its result has: f32 computes it in f64, f64 as
a sum of two numbers. Polynomials are interpolants at Chebyshev nodes, computed with 60 digits.
"""

from __future__ import annotations

import math

import numpy as np

from tilewright.base.dtypes import f32, f64
from tilewright.base.record import record
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.late.math_exponential import scaled_power, split_2
from tilewright.passes.late.math_terms import Terms

# (log(1+f) - f + f^2/2) / f^3; 2.0e-8 of log(1+f).
_LOG_F32 = (-0.07902744, 0.12622319, -0.12998183, 0.14214496, -0.16641282, 0.20001045, -0.25000307, 0.3333333)
# (log((1+s)/(1-s)) / s - 2) / s^2 in s^2; 4.6e-18 of the logarithm.
_LOG_F64 = (
    0.14616585424934123, 0.1533171061820642, 0.18182889455675105, 0.22222211130259875, 0.2857142862600327,
    0.39999999999899444, 0.666666666666667,
)  # fmt: skip
# log2((1+s)/(1-s)) / s in s^2; 2.7e-14.
_LOG2_FOR_F32 = (
    0.28288718263145973, 0.3199066608890888, 0.4122092273305262, 0.5770779426302618, 0.9617966941123595, 2.8853900817778504,
)  # fmt: skip
# The same without its first two terms c0 + c1 s^2, over s^4; 8.1e-22.
_LOG2_FOR_F64 = (
    0.1691297167029085, 0.16888529113777417, 0.1923805660306643, 0.22195278858509992, 0.2623081914681523, 0.3205988979671547,
    0.4121985831111439, 0.5770780163555853,
)  # fmt: skip
_C0 = (2.8853900817779268, 4.0710547481862066e-17)  # 2 / log(2)
_C1 = (0.9617966939259756, 5.0577616648125907e-17)  # 2 / (3 log(2))
_LN2_F32 = (0.6931471824645996, -1.9046542121259336e-09)
_LN2_F64 = (0.6931471805599453, 2.3190468138462996e-17)
_LOG2_E_F32 = (1.4426950216293335, 1.925963033500011e-08)
_LOG2_E_F64 = (1.4426950408889634, 2.0355273740931033e-17)
# log10(e), and log10(2) with a first part whose products with exponents are exact.
_LOG10_E_F32, _LOG10_E_F64 = (0.4342944920063019, -1.0103050052231683e-08), (0.4342944819032518, 1.098319650216765e-17)
_LOG10_2_F32, _LOG10_2_F64 = (0.301025390625, 4.605038981195214e-06), (0.30102999566361177, 3.694239077158931e-13)
_MAGIC_F64 = 1.5 * 2**52
_MAGIC_BITS = 0x4338000000000000


def split(t: Terms, x: Value, denormals: bool = True) -> tuple[Value, Value]:
    """k as a float and m, for positive finite x."""
    single = dtype_of(x.type) is f32
    mantissa, root_half, up = (23, 0x3F3504F3, 23) if single else (52, 0x3FE6A09E667F3BCD, 54)
    if denormals:
        small = t.lt(x, 2.0**-126 if single else 2.0**-1022)
        x = t.select(small, t.mul(x, 2.0**up), x)
    pattern = t.bits(x)
    k = t.shr(t.sub(pattern, root_half), mantissa)
    m = t.float_bits(t.sub(pattern, t.shl(k, mantissa)))
    # f64: a cast of 64-bit integers is slow below AVX-512; the sum of bits is not.
    power = t.cast(k, f32) if single else t.sub(t.float_bits(t.add(k, _MAGIC_BITS)), _MAGIC_F64)
    if denormals:
        power = t.select(small, t.sub(power, float(up)), power)
    return power, m


def _tail(t: Terms, f: Value) -> tuple[Value, Value]:
    """f^2/2 and g with log(1+f) = f - (f^2/2 - g)."""
    if dtype_of(f.type) is f32:
        square = t.mul(f, f)
        return t.mul(square, 0.5), t.mul(t.mul(f, square), t.polynomial(f, _LOG_F32))
    half = t.mul(t.mul(f, 0.5), f)
    s = t.div(f, t.add(f, 2.0))
    z = t.mul(s, s)
    return half, t.mul(s, t.fma(z, t.polynomial(z, _LOG_F64), half))


def _specials(t: Terms, x: Value, result: Value) -> Value:
    """0 gives -inf, negative numbers and NaN give NaN, inf gives inf."""
    outside = t.select(t.eq(x, 0.0), -math.inf, math.nan, dtype_of(x.type))
    return t.select(t.eq(x, math.inf), x, t.select(t.gt(x, 0.0), result, outside))


def log(t: Terms, x: Value, from_one: bool = False) -> Value:
    """`from_one`: x is 1 or more, or NaN."""
    high, low = _LN2_F32 if dtype_of(x.type) is f32 else _LN2_F64
    k, m = split(t, x, denormals=not from_one)
    f = t.sub(m, 1.0)
    half, g = _tail(t, f)
    rest = t.sub(t.fma(k, low, g), half)
    result = t.fma(k, high, t.add(f, rest))
    return t.select(t.lt(x, math.inf), result, x) if from_one else _specials(t, x, result)


def log2(t: Terms, x: Value) -> Value:
    """log(m) is carried as a sum, f - f^2/2 rounded and the rest, since its product with log2(e) would else add an error."""
    k, m = split(t, x)
    product, product_rest = _times_log(t, m, _LOG2_E_F32 if dtype_of(x.type) is f32 else _LOG2_E_F64)
    total, lost = t.fast_two_sum(k, product)
    return _specials(t, x, t.add(total, t.add(lost, product_rest)))


def _times_log(t: Terms, m: Value, factor: tuple[float, float]) -> tuple[Value, Value]:
    """A number in two parts times log(m), as a sum of two."""
    high, low = factor
    f = t.sub(m, 1.0)
    half, g = _tail(t, f)
    first, error = t.fast_two_sum(f, t.neg(half))
    rest = t.add(error, g)
    product = t.product(first, high)
    return product, t.fma(first, low, t.fma(rest, high, t.fma(first, high, t.neg(product))))


def log10(t: Terms, x: Value) -> Value:
    """As log2, with k log10(2) in place of k: its first part is exact."""
    single = dtype_of(x.type) is f32
    k, m = split(t, x)
    product, product_rest = _times_log(t, m, _LOG10_E_F32 if single else _LOG10_E_F64)
    high, low = _LOG10_2_F32 if single else _LOG10_2_F64
    total, lost = t.fast_two_sum(t.product(k, high), product)
    return _specials(t, x, t.add(total, t.fma(k, low, t.add(lost, product_rest))))


def log_of_one_and(t: Terms, u: Value, u_low: Value | None = None) -> Value:
    """log(1 + u + u_low) for u > -1, where `u_low` is small beside u.

    1 + u is taken as a sum of two numbers. Near 1 that is 1 and u itself; elsewhere what the first loses goes into the logarithm by its slope.
    """
    high, low = _LN2_F32 if dtype_of(u.type) is f32 else _LN2_F64
    whole, lost = t.two_sum(u, 1.0)
    k, m = split(t, whole, denormals=False)
    near = t.eq(k, 0.0)
    f = t.select(near, u, t.sub(m, 1.0))
    lost = t.select(near, 0.0, lost)
    slope = t.div(lost if u_low is None else t.add(lost, u_low), whole)
    half, g = _tail(t, f)
    rest = t.sub(t.add(t.fma(k, low, g), slope), half)
    return t.select(t.eq(u, math.inf), u, t.fma(k, high, t.add(f, rest)))


def log1p(t: Terms, x: Value) -> Value:
    result = t.with_sign_of(log_of_one_and(t, x), x)
    outside = t.select(t.eq(x, -1.0), -math.inf, math.nan, dtype_of(x.type))
    return t.select(t.gt(x, -1.0), result, outside)


def power(t: Terms, x: Value, y: Value) -> Value:
    """x^y = 2^(y log2|x|), then the sign and the special cases of IEEE 754's pow."""
    single = dtype_of(x.type) is f32
    size = t.abs(x)
    result = _power_f32(t, size, y) if single and not t.plain else _power_in_pairs(t, size, y)
    # 0 and infinity to any number but NaN.
    ordered = t.eq(y, y)
    edge = t.bit_or(t.eq(size, 0.0), t.eq(size, math.inf))
    grows = t.eq(t.gt(y, 0.0), t.gt(size, 1.0))
    result = t.select(t.bit_and(edge, ordered), t.select(grows, math.inf, 0.0, dtype_of(x.type)), result)
    result = t.select(t.bit_and(t.eq(size, 1.0), ordered), 1.0, result)
    # Negative bases: the sign of an odd power, NaN for a power that is no integer (infinities count as even).
    integer = t.eq(t.op("floor", y), y)
    half = t.mul(y, 0.5)
    odd = t.bit_and(integer, t.ne(t.op("floor", half), half))
    pattern = t.bits(x)
    result = t.select(t.bit_and(odd, t.lt(pattern, 0)), t.neg(result), result)
    invalid = t.bit_and(t.bit_and(t.lt(x, 0.0), t.lt(size, math.inf)), t.op("not", integer))
    result = t.select(invalid, math.nan, t.select(t.eq(x, x), result, x))
    return t.select(t.bit_or(t.eq(x, 1.0), t.eq(y, 0.0)), 1.0, result)


def _power_f32(t: Terms, size: Value, y: Value) -> Value:
    """|x|^y for finite positive |x|, in f64 up to 2^f, which f32 does."""
    k, m = split(t, t.cast(size, f64), denormals=False)
    f = t.sub(m, 1.0)
    s = t.div(f, t.add(f, 2.0))
    logarithm = t.fma(s, t.polynomial(t.mul(s, s), _LOG2_FOR_F32), k)
    exponent = t.at_most(t.at_least(t.mul(t.cast(y, f64), logarithm), -151.0), 129.0)
    shifted, fraction = split_2(t, exponent)
    whole = t.cast(t.sub(shifted, _MAGIC_F64), f32)
    shifted_f32 = t.add(whole, 1.5 * 2**23)
    return scaled_power(t, shifted_f32, t.cast(fraction, f32), t.lt(whole, -124.0))


@record
class PairFormat:
    """What differs between f32 and f64 where the logarithm is a sum of two numbers."""

    c0: tuple[float, float]
    c1: tuple[float, float]
    terms: tuple[float, ...]
    bounds: tuple[float, float]
    denormal: float


def _two_parts(value: float) -> tuple[float, float]:
    first = float(np.float32(value))
    return first, value - first


_PAIRS_F64 = PairFormat(_C0, _C1, _LOG2_FOR_F64, (-1077.0, 1025.0), -1020.0)
_PAIRS_F32 = PairFormat(_two_parts(_C0[0]), _two_parts(_C1[0]), _LOG2_FOR_F64[-4:], (-152.0, 129.0), -124.0)


def pairs_of(x: Value) -> PairFormat:
    """The numbers of that dtype for logarithms and powers in pairs."""
    return _PAIRS_F32 if dtype_of(x.type) is f32 else _PAIRS_F64


def log2_in_pairs(t: Terms, size: Value) -> tuple[Value, Value]:
    """log2 of a positive finite number, as a sum of two: in f64 good to 2^-65 of itself."""
    form = pairs_of(size)
    k, m = split(t, size)
    f = t.sub(m, 1.0)
    d = t.add(m, 1.0)
    d_low = t.sub(m, t.sub(d, 1.0))
    inverse = t.div(1.0, d)
    s = t.product(f, inverse)
    minus_s = t.neg(s)
    s_low = t.mul(t.fma(minus_s, d_low, t.fma(minus_s, d, f)), inverse)
    z, z_error = t.two_product(s, s)
    z_low = t.fma(t.add(s, s), s_low, z_error)
    # c1 + z q(z)
    u, u_low = t.fast_two_sum(form.c1[0], t.product(z, t.polynomial(z, form.terms)))
    u_low = t.add(u_low, form.c1[1])
    # c0 + z u
    v, v_low = t.two_product(z, u)
    v_low = t.fma(z_low, u, t.fma(z, u_low, v_low))
    w, w_low = t.fast_two_sum(form.c0[0], v)
    w_low = t.add(w_low, t.add(v_low, form.c0[1]))
    # k + s w
    part, part_low = t.two_product(s, w)
    part_low = t.fma(s_low, w, t.fma(s, w_low, part_low))
    total, total_low = t.fast_two_sum(k, part)
    return total, t.add(total_low, part_low)


def _power_in_pairs(t: Terms, size: Value, y: Value) -> Value:
    """|x|^y for finite positive |x|, with the logarithm as a sum of two numbers."""
    total, total_low = log2_in_pairs(t, size)
    exponent, exponent_low = t.two_product(y, total)
    exponent_low = t.fma(y, total_low, exponent_low)
    shifted, fraction, small = _split_pair(t, exponent, exponent_low)
    return scaled_power(t, shifted, fraction, small)


def _split_pair(t: Terms, exponent: Value, low: Value) -> tuple[Value, Value, Value]:
    """n + magic and f with 2^(exponent + low) = 2^(n + f), and whether that may be denormal. Exponents are kept where powers are 0 or infinite."""
    form = pairs_of(exponent)
    bounded = t.at_most(t.at_least(exponent, form.bounds[0]), form.bounds[1])
    shifted, fraction = split_2(t, bounded)
    # Beyond the bounds the low part means nothing, and may be infinite.
    fraction = t.add(fraction, t.select(t.eq(bounded, exponent), low, 0.0))
    return shifted, fraction, t.lt(bounded, form.denormal)
