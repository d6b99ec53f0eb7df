"""sin, cos and tan as arithmetic, for f32 and f64, over the whole range of arguments.

    |x| = n * pi/2 + r,  |r| <= pi/4 and a little

From n modulo 4 and polynomials of r everything follows. The reduction is exact for any size of argument:

- f32 on a GPU: in f32 with pi/2 in three parts below 2^16; above, rarely taken, as on the CPU.
- f32: in f64. |x| * 2/pi modulo 4 with 2/pi in two parts. Of 2/pi only the digits matter that do not give multiples of 4:
  they are chosen by the size of x from five windows.
- f64: with pi/2 in three parts below 2^28; above by integers: the 53 bits of x times the 192 bits of 2/pi that matter
  (Payne and Hanek), chosen from a table by a tree of selects.

On a CPU what only large arguments need stands in a branch, which a vector takes where one of its elements is large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tilewright.base.dtypes import f32, f64, i32, i64, u32, u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.late.math_terms import Terms

# (sin(r) - r) / r^3 and (cos(r) - 1 + r^2/2) / r^4 in r^2: 1.5e-8 and 1.2e-9, 1.6e-17 and 8.1e-19.
_SIN_F32 = (-0.00019582856, 0.008332725, -0.16666664)
_COS_F32 = (2.4542896e-05, -0.0013888279, 0.041666664)
_SIN_F64 = (
    1.5915323212271172e-10, -2.505109250706138e-08, 2.755731591191116e-06, -0.00019841269836387345, 0.0083333333333307,
    -0.16666666666666666,
)  # fmt: skip
_COS_F64 = (
    -1.1380876948169573e-11, 2.0876121658871157e-09, -2.755731715246704e-07, 2.4801587298533456e-05, -0.0013888888888887241,
    0.041666666666666664,
)  # fmt: skip
_HALF_PI_F32 = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
_HALF_PI_F64 = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)
_TWO_OVER_PI = 0.6366197723675814
_MAGIC_F64 = 1.5 * 2**52
_HUGE_F64 = 2.0**28

# From |x| = 2^start on: 2/pi modulo 4 * 2^(23-start), in two parts. An f32 of that size is a multiple of 2^(start-23).
# Up to the next window the product's second part stays below 2^-7, so that the fraction is hardly more than a half.
_WINDOWS: tuple[tuple[int, float, float], ...] = (
    (0, 0.6366197723675814, -3.935735335036497e-17),
    (44, 2.0449648759307553e-07, 6.074026489649846e-24),
    (65, 2.418782397124712e-13, 2.471138875912043e-29),
    (86, 1.0760572810738749e-19, -1.690193447800753e-36),
    (107, 7.696704864039572e-26, 4.420676015940119e-42),
)
# 64 zero bits, then the bits of 2/pi.
_DIGITS = (
    0x0000000000000000, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561, 0xB7246E3A424DD2E0,
    0x06492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41, 0x3991D639835339F4, 0x9C845F8BBDF9283B,
    0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7, 0x4F463F669E5FEA2D, 0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA,
    0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB,
)  # fmt: skip
_LOW_32 = 0xFFFFFFFF
_SIGN_32, _SIGN_64 = 1 << 31, 1 << 63


# -- reductions -----------------------------------------------------------------------------------------------------


def _reduce_in_f64(t: Terms, size: Value, windows: int = len(_WINDOWS)) -> tuple[Value, Value]:
    """n (i32, its low two bits count) and r (f32) for |x| in f32, which lies in one of the first windows."""
    x = t.cast(size, f64)
    high, low = t.number(_WINDOWS[0][1], f64), t.number(_WINDOWS[0][2], f64)
    for start, window_high, window_low in _WINDOWS[1:windows]:
        above = t.op("ge", x, 2.0**start)
        high, low = t.select(above, window_high, high), t.select(above, window_low, low)
    product, error = t.two_product(x, high)
    shifted = t.add(product, _MAGIC_F64)
    fraction = t.sub(product, t.sub(shifted, _MAGIC_F64))
    r = t.mul(t.add(fraction, t.fma(x, low, error)), _HALF_PI_F64[0])
    return t.cast(t.bits(shifted), i32), t.cast(r, f32)


def _reduce_in_f32(t: Terms, size: Value) -> tuple[Value, Value]:
    """The same for |x| < 2^16. The first step is exact, the others lose nothing that a remainder of an f32 has."""
    magic = 1.5 * 2**23
    shifted = t.fma(size, _TWO_OVER_PI, magic)
    minus_n = t.sub(magic, shifted)
    r = size
    for part in _HALF_PI_F32:
        r = t.fma(minus_n, part, r)
    return t.bits(shifted), r


def _reduce_by_words(t: Terms, size: Value) -> tuple[Value, Value]:
    """The same for any |x| from 2^16 on, in integers of 32 bits: the 24 bits of x times the 96 bits of 2/pi that matter (Payne and Hanek)."""
    pattern = t.builder.bitcast(size, u32)
    mantissa = t.bit_or(t.bit_and(pattern, 0x7FFFFF), 0x800000)
    # Digits of 2/pi before `place` give multiples of 4.
    place = t.sub(t.shr(pattern, 23), 150 - 30)
    first, shift = t.shr(place, 5), t.bit_and(place, 31)
    words = [word for digit in _DIGITS[:6] for word in (digit >> 32, digit & _LOW_32)][1:]
    chosen: list[Value] = []
    for position in range(4):
        word = t.number(words[position], u32)
        for start in range(1, 5):
            word = t.select(t.op("ge", first, start), words[position + start], word)
        chosen.append(word)
    none = t.eq(shift, 0)
    high, middle, low = (
        t.select(none, a, t.bit_or(t.shl(a, shift), t.shr(b, t.sub(32, shift)))) for a, b in itertools.pairwise(chosen)
    )
    # The product modulo 2^96: quarters of the circle in the upper two bits.
    carried = t.op("mul_high", mantissa, low)
    second = t.add(t.mul(mantissa, middle), carried)
    carry = t.cast(t.lt(second, carried), u32)
    third = t.add(t.add(t.mul(mantissa, high), t.op("mul_high", mantissa, middle)), carry)
    n = t.shr(t.add(third, 1 << 29), 30)
    fraction, rest = t.sub(third, t.shl(n, 30)), second
    below = t.lt(t.builder.bitcast(fraction, i32), 0)
    flipped_rest = t.op("neg", rest)
    flipped = t.add(t.op("not", fraction), t.cast(t.eq(rest, 0), u32))
    fraction, rest = t.select(below, flipped, fraction), t.select(below, flipped_rest, rest)
    # Normalised, so that a remainder near zero keeps its digits.
    zeros = t.op("clz", fraction)
    whole = t.eq(zeros, 32)
    bits = t.select(whole, rest, t.select(t.eq(zeros, 0), fraction, t.bit_or(t.shl(fraction, zeros), t.shr(rest, t.sub(32, zeros)))))
    scale = t.builder.bitcast(t.shl(t.sub(127 - 30, zeros), 23), f32)
    r = t.mul(t.mul(t.cast(bits, f32), scale), _HALF_PI_F64[0])
    return t.builder.bitcast(n, i32), t.select(below, t.neg(r), r)


def _reduce_f32(t: Terms, size: Value) -> tuple[Value, Value]:
    if t.plain:
        n, r = _reduce_in_f32(t, size)
        huge_n, huge_r = _reduce_by_words(t, size)
        far = t.op("ge", size, 65536.0)
        r = t.select(far, huge_r, r)
        return t.select(far, huge_n, n), t.select(t.lt(size, math.inf), r, math.nan)
    if t.branches is not None:
        n, r = t.either(t.lt(size, 2.0 ** _WINDOWS[1][0]), lambda inner: _reduce_in_f64(inner, size, 1), lambda inner: _reduce_in_f64(inner, size))
        return n, r
    if not (t.hardware and t.is_scalar):
        return _reduce_in_f64(t, size)

    def huge(builder: Builder) -> Sequence[Value]:
        return _reduce_in_f64(Terms(builder, t.like, t.hardware), size)

    def usual(builder: Builder) -> Sequence[Value]:
        return _reduce_in_f32(Terms(builder, t.like, t.hardware), size)

    n, r = t.builder.if_(t.op("ge", size, 65536.0), huge, usual)
    return n, r


def _reduce_f64(t: Terms, size: Value) -> tuple[Value, Value, Value]:
    """n (i64, its low two bits count) and r as a sum of two numbers."""
    if t.branches is not None:
        n, r, low = t.either(t.lt(size, _HUGE_F64), lambda inner: _reduce_by_parts(inner, size, False), lambda inner: _reduce_by_parts(inner, size, True))
        return n, r, low
    return _reduce_by_parts(t, size, True)


def _reduce_by_parts(t: Terms, size: Value, any_size: bool) -> tuple[Value, Value, Value]:
    """The same with pi/2 in three parts; by integers where |x| is huge, if it may be."""
    shifted = t.fma(size, _TWO_OVER_PI, _MAGIC_F64)
    minus_n = t.sub(_MAGIC_F64, shifted)
    first = t.fma(minus_n, _HALF_PI_F64[0], size)  # exact
    second, second_error = t.two_product(minus_n, _HALF_PI_F64[1])
    r, error = t.two_sum(first, second)
    r_low = t.fma(minus_n, _HALF_PI_F64[2], t.add(error, second_error))
    if not any_size:
        return t.bits(shifted), *t.fast_two_sum(r, r_low)
    huge_n, huge_r, huge_low = _reduce_by_integers(t, size)
    huge = t.op("ge", size, _HUGE_F64)
    n = t.select(huge, huge_n, t.bits(shifted))
    return n, *t.fast_two_sum(t.select(huge, huge_r, r), t.select(huge, huge_low, r_low))


def _reduce_by_integers(t: Terms, size: Value) -> tuple[Value, Value, Value]:
    """The same for |x| >= 2^28 by the digits of 2/pi."""
    pattern = t.builder.bitcast(size, u64)
    # |x| = m 2^(e-1075). In the table the digit of weight 2^(1076-e), whose product with 2^(e-1075) is 2, is number e - 1013.
    position = t.sub(t.shr(pattern, 52), 1013)
    m = t.bit_or(t.bit_and(pattern, (1 << 52) - 1), 1 << 52)
    a, b, c, d = _four_words(t, t.shr(position, 6))
    left = t.bit_and(position, 63)
    right = t.sub(63, left)

    def aligned(first: Value, second: Value) -> Value:
        return t.bit_or(t.shl(first, left), t.shr(t.shr(second, 1), right))

    window = [aligned(a, b), aligned(b, c), aligned(c, d)]
    w0, w2, w4 = (t.shr(w, 32) for w in window)
    w1, w3, w5 = (t.bit_and(w, _LOW_32) for w in window)
    m0, m1 = t.bit_and(m, _LOW_32), t.shr(m, 32)
    # m * window modulo 2^192 in digits of 32 bits. Of the lowest digit nothing is needed, of the next its carry.
    carry: Value | None = None
    digits: list[Value] = []
    for lower, upper in ((w4, w5), (w3, w4), (w2, w3), (w1, w2)):
        products = [t.mul(m0, lower), t.mul(m1, upper)]
        total = t.add(t.bit_and(products[0], _LOW_32), t.bit_and(products[1], _LOW_32))
        total = total if carry is None else t.add(total, carry)
        digits.append(t.bit_and(total, _LOW_32))
        carry = t.add(t.shr(total, 32), t.add(t.shr(products[0], 32), t.shr(products[1], 32)))
    assert carry is not None
    top = t.add(t.add(t.mul(m0, w0), t.mul(m1, w1)), carry)
    high = t.bit_or(t.shl(top, 32), digits[3])
    low = t.bit_or(t.shl(digits[2], 32), digits[1])
    # Two bits before the point: n is the nearest integer, the rest a signed fraction of 126 bits.
    n = t.builder.bitcast(t.shr(t.add(high, 1 << 61), 62), i64)
    high, low = t.bit_or(t.shl(high, 2), t.shr(low, 62)), t.shl(low, 2)
    sign = t.builder.bitcast(t.shr(t.builder.bitcast(high, i64), 63), u64)
    high, low = t.xor(high, sign), t.xor(low, sign)
    parts = [t.shr(high, 32), t.bit_and(high, _LOW_32), t.shr(low, 32), t.bit_and(low, _LOW_32)]
    f0, f1, f2, f3 = (t.mul(_exact_float(t, p), 2.0 ** (-32 * (i + 1))) for i, p in enumerate(parts))
    fraction, fraction_low = t.fast_two_sum(f0, f1)
    fraction_low = t.add(fraction_low, t.add(f2, f3))
    fraction, fraction_low = t.fast_two_sum(fraction, fraction_low)
    r, r_low = t.two_product(fraction, _HALF_PI_F64[0])
    r_low = t.fma(fraction_low, _HALF_PI_F64[0], t.fma(fraction, _HALF_PI_F64[1], r_low))
    flip = t.bit_and(sign, _SIGN_64)
    return n, t.add(_flipped(t, r, flip), t.sub(size, size)), _flipped(t, r_low, flip)  # infinity gives NaN


def _four_words(t: Terms, index: Value) -> list[Value]:
    """Words index … index + 3 of the table, 0 <= index <= 16: shift it by 16, 8, 4, 2, 1 words, keeping what is needed."""
    words = [t.number(w, u64) for w in _DIGITS]
    for shift in (16, 8, 4, 2, 1):
        chosen = t.ne(t.bit_and(index, shift), 0)
        needed = 4 if shift == 16 else 3 + shift
        words = [t.select(chosen, words[i + shift], words[i]) for i in range(needed)] + words[needed:]
    return words[:4]


def _exact_float(t: Terms, digit: Value) -> Value:
    """A u64 below 2^32 as f64, without a conversion (which is slow below AVX-512)."""
    return t.sub(t.builder.bitcast(t.bit_or(digit, 0x4330000000000000), f64), 2.0**52)


def _flipped(t: Terms, value: Value, sign: Value) -> Value:
    pattern = t.builder.bitcast(value, dtype_of(sign.type))
    return t.builder.bitcast(t.xor(pattern, sign), dtype_of(value.type))


# -- functions ------------------------------------------------------------------------------------------------------


def _sine_and_cosine(t: Terms, x: Value) -> tuple[Value, Value, Value]:
    """n, sin(r) and cos(r) for |x|. A branch is written once for all functions of x."""
    if t.branches is None:
        return _both(t, t.abs(x))
    key = (t.builder, x)
    if key not in t.branches:
        t.branches[key] = _both(t, t.abs(x))
    n, sine, cosine = t.branches[key]
    return n, sine, cosine


def _both(t: Terms, size: Value) -> tuple[Value, Value, Value]:
    if dtype_of(size.type) is f32:
        n, r = _reduce_f32(t, size)
        z = t.mul(r, r)
        sine = t.fma(t.mul(r, z), t.polynomial(z, _SIN_F32), r)
        cosine = t.fma(t.mul(z, z), t.polynomial(z, _COS_F32), t.fma(z, -0.5, 1.0))
        return n, sine, cosine
    n, r, r_low = _reduce_f64(t, size)
    z = t.mul(r, r)
    half = t.mul(z, 0.5)
    sine = t.add(r, t.fma(t.mul(r, z), t.polynomial(z, _SIN_F64), t.fma(t.neg(half), r_low, r_low)))
    near = t.sub(1.0, half)
    lost = t.sub(t.sub(1.0, near), half)
    cosine = t.add(near, t.add(lost, t.fma(t.mul(z, z), t.polynomial(z, _COS_F64), t.neg(t.mul(r, r_low)))))
    return n, sine, cosine


def _quarter(t: Terms, n: Value, sine: Value, cosine: Value) -> tuple[Value, Value]:
    """The magnitude by n's lowest bit, and the sign bit from the next."""
    odd = t.ne(t.bit_and(n, 1), 0)
    single = dtype_of(n.type) is i32
    sign = t.bit_and(t.shl(n, 30 if single else 62), _SIGN_32 if single else _SIGN_64)
    return t.select(odd, cosine, sine), sign


def sin(t: Terms, x: Value) -> Value:
    n, sine, cosine = _sine_and_cosine(t, x)
    value, sign = _quarter(t, n, sine, cosine)
    own = t.bit_and(t.bits(x), _SIGN_32 if dtype_of(x.type) is f32 else _SIGN_64)
    return _flipped(t, value, t.xor(sign, own))


def cos(t: Terms, x: Value) -> Value:
    n, sine, cosine = _sine_and_cosine(t, x)
    value, sign = _quarter(t, t.add(n, 1), sine, cosine)
    return _flipped(t, value, sign)


def tan(t: Terms, x: Value) -> Value:
    n, sine, cosine = _sine_and_cosine(t, x)
    odd = t.ne(t.bit_and(n, 1), 0)
    value = t.div(t.select(odd, t.neg(cosine), sine), t.select(odd, sine, cosine))
    return _flipped(t, value, t.bit_and(t.bits(x), _SIGN_32 if dtype_of(x.type) is f32 else _SIGN_64))
