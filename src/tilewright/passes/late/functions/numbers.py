"""Functions that look at the bits of a float: copysign, nextafter, the two halves of frexp, ldexp by an integer, and fmod.

All are exact. Those that depend on the format (`nextafter`) are written for narrow floats too, which are held in f32 here.
"""

from __future__ import annotations

import math

from tilewright.base.dtypes import DType, f32, f64, i32, i64
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.late.math_terms import Terms

_LOWEST = {f32: -(1 << 31), f64: -(1 << 63)}


def copysign(t: Terms, x: Value, y: Value) -> Value:
    return t.with_sign_of(t.abs(x), y)


def nextafter(t: Terms, x: Value, y: Value) -> Value:
    """One step of the bits: away from zero where y is beyond x."""
    pattern = t.bits(x)
    outwards = t.eq(t.gt(y, x), t.gt(x, 0.0))
    stepped = t.float_bits(t.add(pattern, t.select(outwards, 1, -1, dtype_of(pattern.type))))
    least = t.float_bits(t.bit_or(t.bit_and(t.bits(y), _LOWEST[dtype_of(x.type)]), 1))
    return _between(t, x, y, stepped, least)


def nextafter_narrow(t: Terms, x: Value, y: Value, dtype: DType) -> Value:
    """The same for floats of `dtype` that are held in f32: steps are those of the narrow format, denormals included."""
    least, least_normal, most = _limits(dtype)
    pattern = t.bits(x)
    away = t.gt(y, x)
    outwards = t.eq(away, t.gt(x, 0.0))
    step = 1 << (f32.mantissa - dtype.mantissa)
    # A step down from a power of two is that of the binade below: the bits say so by themselves.
    stepped = t.float_bits(t.add(pattern, t.select(outwards, step, -step, i32)))
    size = t.abs(x)
    dense = t.bit_or(t.lt(size, least_normal), t.bit_and(t.eq(size, least_normal), t.op("not", outwards)))
    evenly = t.add(x, t.select(away, least, -least, f32))
    # A step to zero keeps the sign.
    evenly = t.with_sign_of(t.abs(evenly), x)
    stepped = t.select(t.eq(size, math.inf), t.with_sign_of(t.number(most, f32), x), t.select(dense, evenly, stepped))
    return _between(t, x, y, stepped, t.with_sign_of(t.number(least, f32), y))


def _limits(dtype: DType) -> tuple[float, float, float]:
    """The least positive number of a narrow format, the least normal one, and the greatest."""
    least, normal, greatest = _FORMATS[dtype.name]
    return 2.0**least, 2.0**normal, greatest


_FORMATS = {
    "f16": (-24, -14, 65504.0), "bf16": (-133, -126, (2 - 2.0**-7) * 2.0**127), "f8e4m3": (-9, -6, 448.0), "f8e5m2": (-16, -14, 57344.0),
}  # fmt: skip
"""Exponents of the least positive and the least normal number, and the greatest number."""


def _between(t: Terms, x: Value, y: Value, stepped: Value, least: Value) -> Value:
    result = t.select(t.eq(x, 0.0), least, stepped)
    result = t.select(t.eq(x, y), y, result)
    return t.select(t.bit_and(t.eq(x, x), t.eq(y, y)), result, math.nan)


def _normal(t: Terms, x: Value) -> tuple[Value, Value]:
    """The bits of x as a normal number, and by which exponent it was scaled up; denormals only."""
    single = dtype_of(x.type) is f32
    small = t.lt(t.abs(x), 2.0**-126 if single else 2.0**-1022)
    up = 24 if single else 54
    scaled = t.select(small, t.mul(x, 2.0**up), x)
    return t.bits(scaled), t.select(small, up, 0, i32 if single else i64)


def frexp_fraction(t: Terms, x: Value) -> Value:
    """From 1/2 to 1, with the sign of x."""
    dtype = dtype_of(x.type)
    pattern, _ = _normal(t, x)
    mask, bias = ((1 << 8) - 1, 126) if dtype is f32 else ((1 << 11) - 1, 1022)
    rest = t.bit_and(pattern, ~(mask << dtype.mantissa))
    result = t.float_bits(t.bit_or(rest, bias << dtype.mantissa))
    return t.select(_ordinary(t, x), result, x)


def frexp_exponent(t: Terms, x: Value) -> Value:
    """The exponent for it, as i32."""
    dtype = dtype_of(x.type)
    pattern, up = _normal(t, x)
    mask, bias = ((1 << 8) - 1, 126) if dtype is f32 else ((1 << 11) - 1, 1022)
    exponent = t.sub(t.sub(t.bit_and(t.shr(pattern, dtype.mantissa), mask), bias), up)
    return t.cast(t.select(_ordinary(t, x), exponent, 0), i32)


def _ordinary(t: Terms, x: Value) -> Value:
    size = t.abs(x)
    return t.bit_and(t.gt(size, 0.0), t.lt(size, math.inf))


def scale_by_power(t: Terms, x: Value, n: Value) -> Value:
    """x 2^n with one rounding: two steps that keep all bits of what stays normal, and a last one."""
    dtype = dtype_of(x.type)
    integer = i32 if dtype is f32 else i64
    most, least = (127, -126) if dtype is f32 else (1023, -1022)
    down = least + dtype.mantissa + 1
    exponent = t.cast(n, integer)
    for _ in range(2):
        above, below = t.gt(exponent, most), t.lt(exponent, least)
        x = t.mul(x, t.select(above, 2.0**most, t.select(below, 2.0**down, 1.0, dtype)))
        exponent = t.sub(exponent, t.select(above, most, t.select(below, down, 0, integer)))
    exponent = t.select(t.gt(exponent, most), most, t.select(t.lt(exponent, least), least, exponent))
    return t.mul(x, t.float_bits(t.shl(t.add(exponent, most), dtype.mantissa)))
