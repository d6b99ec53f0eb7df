"""exp, exp2, exp10, expm1, sinh, cosh, tanh, sigmoid and erf as arithmetic, for f32 and f64.

    2^x = 2^n * 2^f,  n = round(x),  -1/2 <= f <= 1/2

n is rounded by adding 1.5 * 2^(mantissa bits): the sum's low bits are n as an integer, ready to be shifted into an exponent.
2^f is a polynomial, or the hardware's `exp2_approx` where the bound has room for it. The polynomial gives 2^(f+1) and is scaled by 2^(n-1), which exists for
every n that does not overflow; results that may be denormal are scaled through 2^(n-1+lift) and brought down by one rounded
multiplication; a CPU with `ldexp` needs neither, and gives the same bits. e^x goes through x * log2(e) with log2(e) in two parts. All polynomials are interpolants at Chebyshev nodes,
computed with 60 digits; the errors given are of the exact polynomial, before rounding.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, f32, f64
from tilewright.base.record import record
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.late.math_terms import Terms


@record
class _ExponentFormat:
    """What differs between f32 and f64."""

    dtype: DType
    magic: float
    """1.5 * 2^mantissa."""
    bias: int
    """Exponent bias."""
    lift: int
    """By how much results that may be denormal are scaled up."""
    log2_e: tuple[float, float]
    """log2(e) in two parts."""
    exp2: tuple[float, ...]
    """2^f on [-1/2, 1/2]."""
    exp_range: tuple[float, float]
    """Below it e^x is 0, above it infinite."""
    exp2_range: tuple[float, float]
    cosh_limit: float
    """Beyond it e^x / 2 overflows."""
    sinh: tuple[float, ...]
    """(sinh(x) - x) / x^3 in x^2, |x| < 1."""
    erf: tuple[float, ...]
    """erf(x) / x in x^2, |x| < 1."""
    erf_tail: tuple[float, ...]
    """-log(1 - erf(x)), from 0.92 to erf_limit."""
    erf_limit: float
    """From here on erf is 1."""


_F32 = _ExponentFormat(
    dtype=f32, magic=1.5 * 2**23, bias=127, lift=64,
    log2_e=(1.442695, 1.925963033500519e-08),
    exp2=(0.00015461445, 0.0013400428, 0.009618057, 0.05550327, 0.2402265, 0.6931472, 1.0),  # 2.5e-9
    exp_range=(-104.0, 89.0), exp2_range=(-151.0, 129.0), cosh_limit=90.0,
    sinh=(2.8062802e-06, 0.00019838102, 0.008333339, 0.16666667),  # 1.7e-10
    erf=(7.875875e-05, -0.00080168643, 0.0051890872, -0.026854211, 0.11283594, -0.37612626, 1.1283791),  # 1.3e-9
    erf_tail=(-0.00019589436, 0.0030427994, -0.02222527, 0.10392822, 0.637186, 1.1276735, 0.00019618859),  # 1.5e-9
    erf_limit=4.0,
)  # fmt: skip
_F64 = _ExponentFormat(
    dtype=f64, magic=1.5 * 2**52, bias=1023, lift=512,
    log2_e=(1.4426950408889634, 2.0355273740931033e-17),
    exp2=(4.4558179083360645e-10, 7.074194297288521e-09, 1.0178057087733941e-07, 1.3215432535912375e-06,
          1.5252733841556773e-05, 0.00015403530463724353, 0.001333355814640647, 0.009618129107587256,
          0.055504108664821625, 0.24022650695910158, 0.6931471805599453, 1.0),  # 4.2e-18
    exp_range=(-746.0, 710.0), exp2_range=(-1076.0, 1025.0), cosh_limit=711.0,
    sinh=(7.746178593018927e-13, 1.6057679623801635e-10, 2.5052117695907823e-08, 2.7557319191381816e-06,
          0.00019841269841324198, 0.008333333333333299, 0.16666666666666666),  # 3.0e-19
    erf=(5.957176147746114e-11, -1.1372848856789924e-09, 1.4659775274046955e-08, -1.6350312701054618e-07,
         1.6461000484121361e-06, -1.4925595266831182e-05, 0.0001205533111164271, -0.000854832698083379,
         0.0052239776248180145, -0.026866170645076792, 0.11283791670954879, -0.3761263890318375,
         1.1283791670955126),  # 1.4e-19
    erf_tail=(2.036188287460706e-13, -1.0060676728985192e-11, 2.342433238624163e-10, -3.4167109017822555e-09,
              3.498805255960869e-08, -2.668388502690507e-07, 1.5656929587010764e-06, -7.170743121662208e-06,
              2.552001304782142e-05, -6.795464218368619e-05, 0.00011741899486448351, -3.312896635523906e-05,
              -0.0005373861352031879, 0.0016589052503420017, -0.00018878457944109087, -0.019136776427349542,
              0.10277498789507454, 0.6366193457771558, 1.1283792027961757, 5.040591707022746e-11),  # 2.9e-19
    erf_limit=5.95,
)  # fmt: skip

# ((e^2r - 1)/2 - r) / r^2 for |r| <= log(2)/4; 2.5e-8 and 5.5e-19 of (e^2r - 1)/2.
_TANH_F32 = (0.044564, 0.13381173, 0.33333242, 0.66666305, 1.0)
_TANH_F64 = (
    4.283341890742928e-06, 2.5707840235133033e-05, 0.00014109324021103914, 0.0007054657323520227, 0.003174603177686715,
    0.012698412720001459, 0.044444444444427876, 0.13333333333321734, 0.33333333333333337, 0.6666666666666669, 1.0,
)  # fmt: skip
# (e^r - 1 - r) / r^2 for |r| <= log(2)/2; 4.9e-10 and 4.9e-19 of e^r - 1.
_EXPM1_F32 = (0.0001989108, 0.0013933731, 0.0083333105, 0.041666463, 0.16666667, 0.5)
_EXPM1_F64 = (
    2.09147553258932e-09, 2.5105312729622103e-08, 2.755727347871858e-07, 2.755725517000089e-06, 2.480158732567746e-05,
    0.0001984126987500228, 0.0013888888888883711, 0.008333333333326084, 0.04166666666666667, 0.1666666666666667, 0.5,
)  # fmt: skip
_LN2_F32, _LN2_F64 = (0.6931471824645996, -1.9046542121259336e-09), (0.6931471805599453, 2.3190468138462996e-17)
_LOG2_10_F32, _LOG2_10_F64 = (3.321928024291992, 7.059537016037032e-08), (3.321928094887362, 1.661617516973592e-16)
_HALF_LN2 = (0.34657359027997264, 1.1595234069231498e-17)


def _format(x: Value) -> _ExponentFormat:
    return _F32 if dtype_of(x.type) is f32 else _F64


def _exp2_fraction(t: Terms, form: _ExponentFormat, f: Value, rough: bool = True) -> Value:
    """2^(f+1). `rough` allows the hardware's power, which is up to 2.06 units off: too much for exp and exp2 themselves."""
    if rough and t.hardware and form.dtype is f32:
        power = t.op("exp2_approx", f)
        return t.add(power, power)
    return t.polynomial(f, [2 * c for c in form.exp2])


def _power(t: Terms, form: _ExponentFormat, shifted: Value, offset: int | Value) -> Value:
    """2^(n + offset) from n + magic. The magic number's own bits leave by the shift."""
    exponent = t.shl(t.bits(shifted), form.dtype.mantissa)
    if isinstance(offset, int):
        offset = t.number((form.bias + offset) << form.dtype.mantissa, dtype_of(exponent.type))
    return t.float_bits(t.add(exponent, offset))


def scaled_power(t: Terms, shifted: Value, f: Value, small: Value, rough: bool = True) -> Value:
    """2^(n+f) from n + magic and f; `small` tells where the result may be denormal (and is not above 1)."""
    form = _format(f)
    if t.scales:
        return t.op("ldexp", t.polynomial(f, form.exp2), t.sub(shifted, form.magic))
    integer = dtype_of(t.bits(shifted).type)
    low, high = ((form.bias - 1 + lift) << form.dtype.mantissa for lift in (form.lift, 0))
    scale = _power(t, form, shifted, t.select(small, low, high, integer))
    result = t.mul(_exp2_fraction(t, form, f, rough), scale)
    return t.select(small, t.mul(result, 2.0**-form.lift), result)


def split_e(t: Terms, y: Value) -> tuple[Value, Value]:
    """n + magic and f with e^y = 2^(n + f)."""
    form = _format(y)
    high, low = form.log2_e
    if t.plain:
        # Products of n with a number of ten bits are exact, and so is the first difference.
        shifted = t.add(t.mul(y, high), form.magic)
        return shifted, t.mul(_without(t, y, t.sub(form.magic, shifted), 1.0), high)
    shifted = t.fma(y, high, form.magic)
    minus_n = t.neg(t.sub(shifted, form.magic)) if t.scales else t.sub(form.magic, shifted)
    return shifted, t.fma(y, low, t.fma(y, high, minus_n))


_LN2_SHORT = (0.693359375, -2.1219444005469057e-4)
"""log(2) in two parts, the first of ten bits."""


def _without(t: Terms, y: Value, minus_n: Value, scale: float) -> Value:
    """y - n log(2) scale, without an fma that rounds once."""
    first, second = _LN2_SHORT
    return t.add(t.add(y, t.mul(minus_n, first * scale)), t.mul(minus_n, second * scale))


def scaled_product(t: Terms, shifted: Value, f: Value, factor: Value, small: Value) -> Value:
    """2^(n+f) times a factor, rounded once where the result may be denormal: which `small` tells."""
    form = _format(f)
    integer = dtype_of(t.bits(shifted).type)
    low, high = ((form.bias - 1 + lift) << form.dtype.mantissa for lift in (form.lift, 0))
    scale = _power(t, form, shifted, t.select(small, low, high, integer))
    result = t.mul(t.mul(_exp2_fraction(t, form, f, rough=False), factor), scale)
    return t.select(small, t.mul(result, 2.0**-form.lift), result)


def power_of_two(t: Terms, n: Value) -> Value:
    """2^n for a whole number n whose power is neither denormal nor infinite."""
    form = _format(n)
    return _power(t, form, t.add(n, form.magic), 0)


def split_2(t: Terms, y: Value) -> tuple[Value, Value]:
    """n + magic and f with 2^y = 2^(n + f)."""
    shifted = t.add(y, _format(y).magic)
    return shifted, t.sub(y, t.sub(shifted, _format(y).magic))


def exp(t: Terms, x: Value, not_positive: bool = False) -> Value:
    """`not_positive`: x is 0 or less, or NaN."""
    form = _format(x)
    y = t.at_least(x, form.exp_range[0])
    y = y if not_positive else t.at_most(y, form.exp_range[1])
    return scaled_power(t, *split_e(t, y), t.lt(y, -0.69 * (form.bias - 2)), rough=False)


def exp2(t: Terms, x: Value) -> Value:
    form = _format(x)
    y = t.at_most(t.at_least(x, form.exp2_range[0]), form.exp2_range[1])
    return scaled_power(t, *split_2(t, y), t.lt(y, float(2 - form.bias)), rough=False)


def exp10(t: Terms, x: Value) -> Value:
    form = _format(x)
    single = form.dtype is f32
    y = t.at_most(t.at_least(x, -45.5 if single else -324.0), 38.6 if single else 308.4)
    high, low = _LOG2_10_F32 if single else _LOG2_10_F64
    shifted = t.fma(y, high, form.magic)
    f = t.fma(y, low, t.fma(y, high, t.sub(form.magic, shifted)))
    return scaled_power(t, shifted, f, t.lt(y, -0.301 * (form.bias - 2)), rough=False)


def expm1(t: Terms, x: Value) -> Value:
    """2^n (e^r - 1) + (2^n - 1) with x = n log(2) + r. What r loses is carried along; 2^(n-1) is doubled last, so that only results overflow."""
    form = _format(x)
    single = form.dtype is f32
    low, high = (-18.0, 89.0) if single else (-38.0, 710.0)
    y = t.at_most(t.at_least(x, low), high)
    shifted = t.fma(y, form.log2_e[0], form.magic)
    minus_n = t.sub(form.magic, shifted)
    first, second = _LN2_F32 if single else _LN2_F64
    above = t.fma(minus_n, first, y)
    r, lost = t.fast_two_sum(above, t.product(minus_n, second))
    inner = t.fma(t.mul(r, r), t.polynomial(r, _EXPM1_F32 if single else _EXPM1_F64), lost)
    scale = _power(t, form, shifted, -1)
    half, half_low = t.fast_two_sum(t.sub(scale, 0.5), t.product(scale, r))
    half = t.add(half, t.fma(scale, inner, half_low))
    # The halves of the least denormals are 0.
    return t.select(t.lt(t.abs(x), 2.0**-100), x, t.with_sign_of(t.add(half, half), x))


def _exp_of_negative(t: Terms, y: Value) -> Value:
    """e^y for y <= 0."""
    form = _format(y)
    y = t.at_least(y, form.exp_range[0])
    return scaled_power(t, *split_e(t, y), t.lt(y, -0.69 * (form.bias - 2)))


def _quotient(t: Terms, a: Value, d: Value) -> Value:
    """a / d for positive d that are neither denormal nor huge.

    f32: 1/d within 5.1 % by subtracting the bits, within 1.3e-4 by a step of order three, and the quotient corrected once:
    less than half a unit off before its last rounding, so 1 is never passed. Seven instructions, where a vector division
    blocks its unit for longer than the rest of a function takes. f64: the division itself.
    """
    if dtype_of(d.type) is f64 or t.plain:
        return t.div(a, d)
    minus = t.neg(d)
    inverse = t.float_bits(t.sub(0x7EF311C0, t.bits(d)))
    error = t.fma(minus, inverse, 1.0)
    inverse = t.fma(inverse, t.fma(error, error, error), inverse)
    quotient = t.mul(a, inverse)
    return t.fma(t.fma(minus, quotient, a), inverse, quotient)


def sigmoid(t: Terms, x: Value) -> Value:
    """With z = e^-|x|: 1/(1+z), or z/(1+z) for negative x, which keeps its digits down to the denormals."""
    z = _exp_of_negative(t, t.neg(t.abs(x)))
    return _quotient(t, t.select(t.lt(x, 0.0), z, 1.0), t.add(z, 1.0))


def tanh(t: Terms, x: Value) -> Value:
    """For |x|: H / (H + 1) with H = (e^2x - 1)/2. With x = n log(2)/2 + r it is 2^n (e^2r - 1)/2 + (2^n - 1)/2.

    Far from zero the quotient forgets the errors of H, near zero n is 0 and r is x itself.
    """
    form = _format(x)
    single = form.dtype is f32
    limit = 9.02 if single else 19.1  # tanh is 1 from here on
    y = t.at_most(t.abs(x), limit)
    shifted = t.add(t.mul(y, 2 * form.log2_e[0]), form.magic) if t.plain else t.fma(y, 2 * form.log2_e[0], form.magic)
    minus_n = t.sub(form.magic, shifted)
    r = _without(t, y, minus_n, 0.5) if t.plain else t.fma(minus_n, _HALF_LN2[0], y)
    if not single:
        r = t.fma(minus_n, _HALF_LN2[1], r)
    inner = t.fma(t.mul(r, r), t.polynomial(r, _TANH_F32 if single else _TANH_F64), r)
    scale = _power(t, form, shifted, 0)
    h = t.fma(scale, inner, t.fma(scale, 0.5, -0.5))
    return t.with_sign_of(_quotient(t, h, t.add(h, 1.0)), x)


def _half_exp(t: Terms, size: Value) -> Value:
    """e^size / 2 for size >= 0: overflows only where that does."""
    form = _format(size)
    shifted, f = split_e(t, t.at_most(size, form.cosh_limit))
    return t.mul(_exp2_fraction(t, form, f), _power(t, form, shifted, -2))


def cosh(t: Terms, x: Value) -> Value:
    half = _half_exp(t, t.abs(x))
    return t.add(half, t.div(0.25, half))


def sinh(t: Terms, x: Value) -> Value:
    size = t.abs(x)
    half = _half_exp(t, size)
    large = t.with_sign_of(t.sub(half, t.div(0.25, half)), x)
    z = t.mul(x, x)
    small = t.fma(t.mul(x, z), t.polynomial(z, _format(x).sinh), x)
    return t.select(t.lt(size, 1.0), small, large)


def erf_slope(t: Terms, x: Value) -> Value:
    """erf(x) / x for |x| < 1."""
    return t.polynomial(t.mul(x, x), _format(x).erf)


def erf(t: Terms, x: Value) -> Value:
    """x P(x^2) near zero; 1 - e^-P(|x|) beyond, where an error of the power hardly shows."""
    form = _format(x)
    size = t.abs(x)
    z = t.mul(x, x)
    small = t.mul(x, t.polynomial(z, form.erf))
    bounded = t.at_most(size, form.erf_limit)
    shifted, f = split_e(t, t.neg(t.polynomial(bounded, form.erf_tail)))
    rest = t.mul(_exp2_fraction(t, form, f), _power(t, form, shifted, -1))
    large = t.with_sign_of(t.sub(1.0, rest), x)
    return t.select(t.lt(size, 0.94), small, large)
