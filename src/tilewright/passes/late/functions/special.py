"""erfc, lgamma and tgamma as arithmetic, for f32 and f64.

erfc(x) is e^(-x^2) Q(s) / (1 + 2x) with s = (x - c)/(x + c), which takes all of x to a short range.

The gamma functions are Stirling's from 3 on, with logarithms and powers of two as sums of two numbers; below 3 tgamma takes three steps of
G(x + 1) = x G(x), and lgamma, which has zeros at 1 and 2, polynomials about these. Negative arguments go through the reflection with sin(pi x).
Polynomials are interpolants at Chebyshev nodes, computed with 60 digits.
"""

from __future__ import annotations

import math

from tilewright.base.dtypes import f32
from tilewright.base.record import record
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.late.math_exponential import erf_slope, scaled_product, split_2, split_e
from tilewright.passes.late.math_logarithm import log, log2_in_pairs, pairs_of
from tilewright.passes.late.math_terms import Terms


@record
class _SpecialFormat:
    """What differs between f32 and f64."""

    erfc: tuple[float, ...]
    """(1 + 2x) e^(x^2) erfc(x) in (x - centre)/(x + centre), from 0 to erfc_limit."""
    erfc_centre: float
    erfc_limit: float
    """From here on erfc is 0."""
    denormal: float
    """Below this exponent of e erfc may be denormal."""
    stirling: tuple[float, ...]
    """x (log G(x) - (x - 1/2) log(x) + x - log(2 pi)/2) in 1/x^2, from 3 on."""
    near_one: tuple[float, ...]
    """log G(1 + d) / d from -0.3 to 0.7."""
    near_two: tuple[float, ...]
    """log G(2 + d) / d from -0.3 to 1, with as many terms."""
    sine: tuple[float, ...]
    """(sin(pi r) - pi r) / r^3 in r^2, |r| <= 1/2."""
    log2_e: tuple[float, float]
    ln2: tuple[float, float]
    offset: tuple[float, float]
    """log2(2 pi) / 2."""
    last: float
    """Below minus this tgamma is 0, far above it infinite."""


_F32 = _SpecialFormat(
    erfc=(-0.0002773269, -0.00079833914, 0.0019944746, 0.0025794348, -0.023790235, 0.06829351, -0.11927265, 0.12964657, -0.04756228,
          -0.13562115, 1.253008),  # 3.4e-9
    erfc_centre=3.0, erfc_limit=10.1, denormal=-86.0,
    stirling=(-0.00045442831, 0.00078471843, -0.0027775862, 0.083333336),  # 6.6e-10
    near_one=(0.017858533, -0.06250938, 0.102701314, -0.11865025, 0.12721811, -0.1436099, 0.16937481, -0.20739128, 0.27058676,
              -0.4006857, 0.82246697, -0.5772157),  # 8.9e-9
    near_two=(0.0, 0.0, 0.0, -7.0664464e-05, 0.0003872098, -0.0011585976, 0.0029018954, -0.0073930416, 0.020580996, -0.06735197,
              0.32246703, 0.42278433),  # 9.2e-9
    sine=(0.078538306, -0.5987044, 2.550136, -5.1677127),  # 1.8e-8
    log2_e=(1.4426950216293335, 1.9259629911266175e-08), ln2=(0.6931471824645996, -1.904654299957768e-09),
    offset=(1.325748085975647, -2.123948757363461e-08), last=43.5,
)  # fmt: skip
_F64 = _SpecialFormat(
    erfc=(-1.907388627007971e-09, -1.3952812123042384e-08, -7.796210935750394e-09, 1.1597564919712835e-07, 6.326381936013846e-08,
          -8.356886054802244e-07, 3.006053020270926e-07, 5.718067004785881e-06, -1.1224293594679385e-05, -2.4403160497192634e-05,
          0.0001506220523230599, -0.00019925553476007838, -0.0007577732963739462, 0.005031969765051122, -0.016197734065502876,
          0.03716751556105671, -0.0663303658110103, 0.09373283499690535, -0.10103906603637362, 0.0680970542547336,
          0.015379652102621091, -0.13962111684056286, 1.2329951186255526),  # 1.4e-17
    erfc_centre=4.0, erfc_limit=27.3, denormal=-704.0,
    stirling=(-1.2591741378706647, 1.0364376287210755, -0.41302940091672014, 0.11229667461420963, -0.02591763548428459,
              0.006266355072207451, -0.0019135564194573535, 0.000841678862598761, -0.0005952373063227016, 0.0007936507891020488,
              -0.002777777777767353, 0.08333333333333333),  # 4.0e-18
    near_one=(0.0012350473669382014, -0.007711352952374765, 0.0220920951297374, -0.03909520615311797, 0.049625462875190075,
              -0.05172618209433668, 0.05104353615908055, -0.05218305579650542, 0.05521185961250061, -0.05879229303120266,
              0.06253622934620685, -0.06667891297179476, 0.07143156408652789, -0.07693160412395998, 0.08335382200858367,
              -0.09095405923706054, 0.10009946122761024, -0.1113342647805543, 0.12550966938762395, -0.1440498967843428,
              0.16955717699964173, -0.20738555102856315, 0.27058080842776927, -0.40068563438653176, 0.8224670334241132,
              -0.5772156649015329),  # 2.4e-18
    near_two=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.164922447575303e-09, -2.8861687666652126e-08, 1.2817390796277455e-07,
              -3.846753667601216e-07, 9.292553867653057e-07, -2.0414248356112864e-06, 4.382827665256049e-06, -9.442610650355023e-06,
              2.0507017234289478e-05, -4.4925778919378e-05, 9.945743392668631e-05, -0.00022315478172502042, 0.0005096695324782328,
              -0.0011927539113522417, 0.0028905103304594157, -0.007385551028669606, 0.020580808427788755, -0.0673523010531982,
              0.3224670334241132, 0.42278433509846713),  # 2.0e-18
    sine=(-2.2349219540136354e-08, 7.949255930925136e-07, -2.19152828364736e-05, 0.0004663027953732641, -0.007370430944815148,
          0.08214588661108452, -0.599264529320791, 2.5501640398773455, -5.16771278004997),  # 1.3e-21
    log2_e=(1.4426950408889634, 2.0355273740931033e-17), ln2=(0.6931471805599453, 2.3190468138462996e-17),
    offset=(1.3257480647361595, -7.153413670427599e-17), last=190.5,
)  # fmt: skip


def _format(x: Value) -> _SpecialFormat:
    return _F32 if dtype_of(x.type) is f32 else _F64


def erfc(t: Terms, x: Value) -> Value:
    """1 - erf(x) near zero; 2 - erfc(-x) for negative x."""
    form = _format(x)
    size = t.at_most(t.abs(x), form.erfc_limit)
    square, square_low = t.two_product(size, size)
    shifted, f = split_e(t, t.neg(square))
    s = t.div(t.sub(size, form.erfc_centre), t.add(size, form.erfc_centre))
    # The divisor 1 + 2x is rounded; so is x^2. Both are put back to first order.
    below, below_low = t.two_sum(t.add(size, size), 1.0)
    top = t.polynomial(s, form.erfc)
    factor = t.div(t.fma(t.neg(square_low), top, top), below)
    factor = t.fma(t.neg(factor), t.div(below_low, below), factor)
    result = scaled_product(t, shifted, f, factor, t.lt(t.neg(square), form.denormal))
    result = t.select(t.lt(x, 0.0), t.sub(2.0, result), result)
    near = t.fma(t.neg(x), erf_slope(t, x), 1.0)
    return t.select(t.lt(size, 0.5), near, result)


# -- gamma functions ------------------------------------------------------------------------------------------------


def _log2_gamma(t: Terms, y: Value, lost: Value | None = None) -> tuple[Value, Value]:
    """log2 of G(y + lost) for y from 3 on, as a sum of two numbers; `lost` is what y lost in a rounding."""
    form = _format(y)
    high, low = log2_in_pairs(t, y)
    shifted, shifted_low = t.two_sum(y, -0.5)
    # (y - 1/2) log2(y) - y log2(e) + log2(2 pi)/2 + the rest of Stirling's series
    first, first_low = t.two_product(shifted, high)
    first_low = t.fma(shifted_low, high, t.fma(shifted, low, first_low))
    second, second_low = t.two_product(y, form.log2_e[0])
    second_low = t.fma(y, form.log2_e[1], second_low)
    total, total_low = t.two_sum(first, t.neg(second))
    total, more = t.two_sum(total, form.offset[0])
    inverse = t.div(1.0, y)
    series = t.mul(t.polynomial(t.mul(inverse, inverse), form.stirling), inverse)
    rest = t.fma(series, form.log2_e[0], t.add(t.sub(first_low, second_low), t.add(t.add(total_low, more), form.offset[1])))
    if lost is not None:
        # The slope is log2(y) and a little less.
        rest = t.fma(lost, t.fma(inverse, -0.5 * form.log2_e[0], high), rest)
    return t.fast_two_sum(total, rest)


def _sine_of_pi(t: Terms, size: Value) -> Value:
    """|sin(pi x)|; 0 for whole numbers."""
    r = t.abs(t.sub(size, t.op("round", size)))
    z = t.mul(r, r)
    pi = math.pi
    return t.fma(t.mul(r, z), t.polynomial(z, _format(size).sine), t.mul(r, pi))


def tgamma(t: Terms, x: Value) -> Value:
    """2^log2(G(y)) times or divided by the steps from y down to |x|; for negative x the reflection, with 2^-log2."""
    form, pairs = _format(x), pairs_of(x)
    size = t.at_most(t.abs(x), form.last)
    near = t.lt(size, 3.0)
    negative = t.lt(x, 0.0)
    whole = t.add(size, 3.0)
    lost = t.sub(size, t.sub(whole, 3.0))
    high, low = _log2_gamma(t, t.select(near, whole, size), t.select(near, lost, 0.0))
    high, low = t.select(negative, t.neg(high), high), t.select(negative, t.neg(low), low)
    bounded = t.at_most(high, pairs.bounds[1])
    shifted, f = split_2(t, bounded)
    f = t.add(f, t.select(t.eq(bounded, high), low, 0.0))
    # (x + 1)(x + 2) = x (x + 3) + 2 as a sum of two numbers, and that times x.
    inner, inner_low = t.two_product(size, whole)
    steps, steps_low = t.two_sum(inner, 2.0)
    steps_low = t.add(steps_low, t.fma(size, lost, inner_low))
    product, product_low = t.two_product(size, steps)
    product_low = t.fma(size, steps_low, product_low)
    above = t.select(negative, t.select(near, t.mul(t.add(steps, steps_low), math.pi), math.pi), 1.0)
    one = t.number(1.0, dtype_of(x.type))
    below = t.select(negative, t.mul(_sine_of_pi(t, size), t.select(near, one, size)), t.select(near, product, one))
    factor = t.div(above, below)
    exact = t.select(t.bit_and(near, t.op("not", negative)), t.div(product_low, product), 0.0)
    factor = t.fma(t.neg(factor), exact, factor)
    result = scaled_product(t, shifted, f, factor, t.lt(bounded, pairs.denormal))
    # Signs alternate between the poles: negative where the whole part is even.
    floor = t.op("floor", t.abs(x))
    half = t.mul(floor, 0.5)
    even = t.eq(t.op("floor", half), half)
    result = t.select(t.bit_and(negative, even), t.neg(result), result)
    result = t.select(t.bit_and(negative, t.eq(t.op("floor", x), x)), math.nan, result)
    # Near zero it is 1/x, which is finite longer than its factors are.
    result = t.select(t.lt(size, 2.0**-60), t.div(1.0, x), result)
    result = t.select(t.eq(x, math.inf), x, result)
    return t.select(t.eq(x, x), result, x)


def lgamma(t: Terms, x: Value) -> Value:
    """log |G(x)|. From 3 on Stirling's; below it polynomials about 1 and 2, less log(x) below 0.7; log(pi / |x sin(pi x)|) - lgamma(-x) for negative x."""
    form = _format(x)
    dtype = dtype_of(x.type)
    size = t.abs(x)
    negative = t.lt(x, 0.0)
    high, low = _log2_gamma(t, t.at_most(t.at_least(size, 3.0), _HUGE))
    product, product_low = t.two_product(high, form.ln2[0])
    far = t.add(product, t.fma(high, form.ln2[1], t.fma(low, form.ln2[0], product_low)))
    tiny, first = t.lt(size, 0.7), t.lt(size, 1.7)
    d = t.select(tiny, size, t.select(first, t.sub(size, 1.0), t.sub(size, 2.0)))
    total = t.select(first, form.near_one[0], form.near_two[0], dtype)
    for one, two in zip(form.near_one[1:], form.near_two[1:], strict=True):
        total = t.fma(total, d, t.select(first, one, two, dtype))
    near = t.mul(d, total)
    near = t.select(t.eq(near, 0.0), 0.0, near)
    # For negative x of |x sin(pi x)| / pi, where -log|x| is not part of log G(|x|) already.
    sine = t.mul(_sine_of_pi(t, size), 1 / math.pi)
    sine = t.select(tiny, sine, t.mul(sine, size))
    logarithm = log(t, t.select(negative, sine, size))
    result = t.select(t.lt(size, 3.0), near, t.select(t.gt(size, _HUGE), t.mul(size, t.sub(logarithm, 1.0)), far))
    plain = t.select(tiny, t.sub(near, logarithm), result)
    result = t.select(negative, t.neg(t.add(logarithm, result)), plain)
    pole = t.bit_or(t.eq(x, 0.0), t.bit_and(negative, t.eq(t.op("floor", x), x)))
    result = t.select(t.bit_or(pole, t.eq(size, math.inf)), math.inf, result)
    return t.select(t.eq(x, x), result, x)


_HUGE = 2.0**60
"""Beyond it log G(x) is x (log(x) - 1)."""
