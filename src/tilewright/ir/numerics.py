"""What every elementwise and function op of the op table computes, on NumPy arrays: the reference all devices answer to.

In: an opcode, operands as arrays of `dtype.numpy`, the op's attributes. Out: the result array. Integers wrap, floats are
IEEE with denormals, `fma` rounds once, conversions round once, and no warning escapes. Floats narrower than f32 are computed
in f32 and rounded to nearest even. Functions of f32 are computed in f64, those of f64 in extended precision where the machine
has it (x86), so that the result is all but always the correctly rounded one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilewright.base.dtypes import DType, f32, f64
from tilewright.base.errors import CompilerBug
from tilewright.ir.nodes import NO_ATTRS, Attrs

Array = np.ndarray


def evaluate(opcode: str, operands: Sequence[Array], attrs: Attrs, dtype: DType) -> Array:
    """The op applied to arrays; `dtype` is that of the first operand. Operands broadcast as NumPy's do."""
    arrays = [np.asarray(o) for o in operands]
    with np.errstate(all="ignore"):
        if opcode == "select":
            return np.asarray(np.where(arrays[0], arrays[1], arrays[2]))
        if opcode == "cast":
            return convert(arrays[0], dtype, _attr_dtype(attrs))
        if opcode == "bitcast":
            return _reinterpreted(arrays[0], _attr_dtype(attrs))
        if opcode in _PAIRS:
            return _PAIRS[opcode](arrays, attrs)
        if opcode.startswith("random_"):
            from tilewright.ir.random_numbers import ArrayTerms, steps

            return steps(ArrayTerms(evaluate), opcode, arrays, dtype)
        if opcode in _FUNCTIONS:
            return _function(_FUNCTIONS[opcode], arrays, dtype)
        if opcode in _MIXED:
            return _MIXED[opcode](arrays, dtype)
        if dtype.is_small_float:
            result = evaluate(opcode, [a.astype(np.float32) for a in arrays], attrs, f32)
            return result if result.dtype == np.bool_ else convert(result, f32, dtype)
        if opcode == "exp2_approx":
            result = _function(np.exp2, arrays, dtype)
            return np.where(np.abs(result) < np.finfo(np.float32).tiny, np.float32(0), result)
        if opcode == "fma":
            return fma(arrays[0], arrays[1], arrays[2])
        rule = _FLOATS.get(opcode) if dtype.is_float else _INTEGERS.get(opcode)
        rule = rule or _COMMON.get(opcode)
        if rule is None:
            raise CompilerBug.at("TW040", f"no numeric rule for {opcode} on {dtype}")
        return np.asarray(rule(*arrays))


def _reinterpreted(array: Array, dtype: DType) -> Array:
    """The bits as another dtype; the lanes of a vec become as many as the bits make, or a scalar."""
    if array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype.numpy)
    found = np.ascontiguousarray(array).view(dtype.numpy)
    return found[..., 0] if found.shape[-1] == 1 else found


def _halves(words: Array, dtype: DType) -> tuple[Array, Array]:
    """The two floats that each word holds, as f64."""
    found = (words & np.uint32(0xFFFF), words >> np.uint32(16))
    low, high = (half.astype(np.uint16).view(dtype.numpy).astype(np.float64) for half in found)
    return low, high


def _pair_bytes(arrays: Sequence[Array], attrs: Attrs) -> Array:
    word = arrays[0] >> np.uint32(16) if attrs.get("upper") else arrays[0]
    high = attrs["high"]
    assert isinstance(high, int)
    return np.asarray(word & np.uint32(0xFF) | (word & np.uint32(0xFF00)) << np.uint32(8) | np.uint32(high * 0x01000100))


def _add_pairs(arrays: Sequence[Array], attrs: Attrs) -> Array:
    dtype = _attr_dtype(attrs)
    low, high = (
        convert(np.asarray(a + b), f64, dtype).view(np.uint16).astype(np.uint32) for a, b in zip(*(_halves(x, dtype) for x in arrays), strict=True)
    )
    return np.asarray(low | high << np.uint32(16))


def _dot_pairs(arrays: Sequence[Array], attrs: Attrs) -> Array:
    dtype, half = _attr_dtype(attrs), len(arrays) // 2
    total: Array | float = 0.0
    for a, b in zip(arrays[:half], arrays[half:], strict=True):
        (a_low, a_high), (b_low, b_high) = _halves(a, dtype), _halves(b, dtype)
        total = total + (a_low * b_low + a_high * b_high)
    return np.asarray(total).astype(np.float32)


_PAIRS: dict[str, Callable[[Sequence[Array], Attrs], Array]] = {"pair_bytes": _pair_bytes, "add_pairs": _add_pairs, "dot_pairs": _dot_pairs}


def _attr_dtype(attrs: Attrs) -> DType:
    dtype = attrs.get("dtype", NO_ATTRS)
    if not isinstance(dtype, DType):
        raise CompilerBug.at("TW040", "conversion without an attribute dtype")
    return dtype


# -- conversions ----------------------------------------------------------------------------------------------------


def convert(value: Array, source: DType, target: DType) -> Array:
    """`cast`: floats round once to nearest even; float to integer truncates and saturates, NaN gives 0; integers wrap."""
    with np.errstate(all="ignore"):
        if source is target:
            return np.asarray(value)
        if target.is_bool:
            return np.asarray((value.astype(np.float32) if source.is_small_float else value) != 0)
        if source.is_float and target.is_int:
            return _float_to_int(value.astype(np.float64), target)
        if target.is_small_float:
            return _to_small_float(value, source, target)
        return np.asarray(value.astype(target.numpy))


def _float_to_int(value: Array, target: DType) -> Array:
    lowest, highest = int(target.min_value), int(target.max_value)
    # float(highest) may round up to highest + 1, which is outside too.
    inside = (value > float(lowest - 1)) & (value < float(highest + 1)) & ~np.isnan(value)
    if target.bits == 64 and target.kind == "i":
        inside |= value == float(lowest)  # lowest - 1 is not an f64, so the comparison above drops lowest itself
    result = np.where(inside, value, 0.0).astype(target.numpy)
    result = np.where(~inside & (value > 0), target.numpy.type(highest), result)
    return np.where(~inside & (value < 0), target.numpy.type(lowest), result)


def _to_small_float(value: Array, source: DType, target: DType) -> Array:
    """Through f32 rounded to odd, which cannot disturb the second rounding."""
    if source.is_int and source.bits == 64:
        # 48 leading bits, the last one set if anything was cut off.
        high = value >> value.dtype.type(16)
        sticky = ((value & value.dtype.type(0xFFFF)) != 0).astype(value.dtype)
        large = np.abs(value.astype(np.float64)) > 2.0**40
        exact = np.where(large, (high | sticky).astype(np.float64) * 65536.0, value.astype(np.float64))
    elif source is f32 or source.is_small_float:
        return np.asarray(value.astype(np.float32).astype(target.numpy))
    else:
        exact = value.astype(np.float64)
    near = exact.astype(np.float32)
    odd = _to_odd(near, np.where(np.isfinite(near), exact - near.astype(np.float64), 0.0), np.int32)
    return np.asarray(odd.astype(target.numpy))


def _to_odd(near: Array, error: Array, bits: type[np.signedinteger]) -> Array:
    """`near + error` rounded to odd, where `near` is the sum rounded to nearest and `error` what that left out."""
    pattern = np.asarray(near).view(bits)
    step = np.where((near == 0) | ((error > 0) == (near > 0)), bits(1), bits(-1))
    move = (error != 0) & ((pattern & bits(1)) == 0) & np.isfinite(near)
    return np.where(move, pattern + step, pattern).view(near.dtype)


# -- fused multiply-add ---------------------------------------------------------------------------------------------


def fma(a: Array, b: Array, c: Array) -> Array:
    """`a*b + c` with one rounding, for f32 or f64 arrays."""
    a, b, c = (np.asarray(x) for x in (a, b, c))
    with np.errstate(all="ignore"):
        return _fma_double(a, b, c) if a.dtype == np.float64 else _fma_single(a, b, c)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Knuth: the rounded sum and its error, exactly."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _fma_single(a: Array, b: Array, c: Array) -> Array:
    # The product of two 24-bit numbers is exact in f64; the sum is rounded to odd there, then once to f32.
    total, error = _two_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    return np.asarray(_to_odd(total, np.where(np.isfinite(total), error, 0.0), np.int64).astype(np.float32))


def _split(a: Array) -> tuple[Array, Array]:
    """Veltkamp: 26 high and 27 low bits."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def _fma_double(a: Array, b: Array, c: Array) -> Array:
    """Boldo and Melquiond, *Emulation of a FMA and correctly rounded sums* (2008), where no step over- or underflows."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a * b
    # A product that underflows keeps its sign: -tiny * tiny + 0 is -0.
    plain = np.where((c == 0) & (a != 0) & (b != 0), product, product + c)
    # With a zero factor or addend the plain formula rounds once; with infinities and NaN there is nothing to round.
    trivial = (a == 0) | (b == 0) | (c == 0) | ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c)
    # A product below 2^-960 is less than a quarter unit of an addend above 2^-800.
    trivial |= (np.abs(product) < 2.0**-960) & (np.abs(c) > 2.0**-800)
    tame = _within(a, -900, 990) & _within(b, -900, 990) & _within(product, -860, 1000) & _within(c, -860, 1000)
    x, y, z = (np.where(tame, v, 1.0) for v in (a, b, c))
    (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
    high = x * y
    low = x_low * y_low - (((high - x_high * y_high) - x_low * y_high) - x_high * y_low)
    inner, inner_error = _two_sum(z, low)
    outer, outer_error = _two_sum(high, inner)
    tail, tail_error = _two_sum(inner_error, outer_error)
    result = np.array(np.where(trivial, plain, outer + _to_odd(tail, tail_error, np.int64)))
    for place in np.argwhere(~(trivial | tame)):
        where = tuple(place)
        result[where] = _fma_exact(float(a[where]), float(b[where]), float(c[where]))
    return result


def _within(value: Array, low: int, high: int) -> Array:
    size = np.abs(value)
    return np.asarray((size > 2.0**low) & (size < 2.0**high))


def _fma_exact(a: float, b: float, c: float) -> float:
    """For the extremes of the exponent range: rational arithmetic, rounded once by the division of Python's integers."""
    from fractions import Fraction  # seldom needed, and slow to load

    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total == 0:
        return 0.0  # an exact cancellation of non-zero terms is +0
    try:
        result = total.numerator / total.denominator
    except OverflowError:
        result = float("inf") if total > 0 else float("-inf")
    return -0.0 if result == 0 and total < 0 else result


# -- arithmetic -----------------------------------------------------------------------------------------------------


def _divide_floor(a: Array, b: Array) -> Array:
    zero = b == 0
    return np.asarray(np.where(zero, b.dtype.type(0), np.floor_divide(a, np.where(zero, b.dtype.type(1), b))))


def _modulo(a: Array, b: Array) -> Array:
    zero = b == 0
    return np.asarray(np.where(zero, b.dtype.type(0), np.mod(a, np.where(zero, b.dtype.type(1), b))))


def _shift(direction: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def shift(a: Array, count: Array) -> Array:
        return direction(a, count & count.dtype.type(8 * count.dtype.itemsize - 1))

    return shift


def _wider(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float32 else np.longdouble)


def _float_divide_floor(a: Array, b: Array) -> Array:
    # One size wider the quotient's floor is exact; a quotient too large to hold its last digit is then rounded once.
    wide = _wider(a.dtype)
    return np.asarray(np.floor_divide(a.astype(wide), b.astype(wide)).astype(a.dtype))


def _smaller(a: Array, b: Array) -> Array:
    return np.asarray(np.where(a < b, a, b))


def _larger(a: Array, b: Array) -> Array:
    return np.asarray(np.where(a > b, a, b))


def _float_minimum(a: Array, b: Array) -> Array:
    return np.where(a == b, np.where(np.signbit(a), a, b), np.minimum(a, b))  # -0 is below +0


def _float_maximum(a: Array, b: Array) -> Array:
    return np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b))


def _ldexp(a: Array, b: Array) -> Array:
    """Beyond a few thousand every power is 0 or infinite."""
    return np.where(np.isnan(b), b, np.ldexp(a, np.clip(np.nan_to_num(b), -9999, 9999).astype(np.int32)))


def _next_after(arrays: Sequence[Array], dtype: DType) -> Array:
    """In the format itself: a narrow float's neighbour is not that of the f32."""
    if not dtype.is_small_float:
        return np.asarray(np.nextafter(*arrays))
    x, y = (np.array(array, order="C") for array in np.broadcast_arrays(*arrays))
    a, b = x.astype(np.float32), y.astype(np.float32)
    bits = f"u{dtype.itemsize}"
    sign = 1 << (dtype.bits - 1)
    pattern = x.view(bits).astype(np.int64)
    stepped = np.where((b > a) == (a > 0), pattern + 1, pattern - 1)
    stepped = np.where(a == 0, np.where(np.signbit(b), sign, 0) | 1, stepped)
    result = np.where(a == b, y.view(bits), stepped).astype(bits).view(dtype.numpy)
    return np.where(np.isnan(a) | np.isnan(b), np.array(np.nan, dtype.numpy), result)


def _scale_by_power(arrays: Sequence[Array], dtype: DType) -> Array:
    a, n = arrays
    wide = a.astype(np.float32) if dtype.is_small_float else a
    result = np.asarray(np.ldexp(wide, np.clip(n, -9999, 9999)))
    return convert(result, f32, dtype) if dtype.is_small_float else result


def _frexp_exponent(arrays: Sequence[Array], dtype: DType) -> Array:
    (a,) = arrays
    wide = a.astype(np.float32) if dtype.is_small_float else a
    return np.where(np.isfinite(wide), np.frexp(wide)[1], 0).astype(np.int32)


_MIXED: dict[str, Callable[[Sequence[Array], DType], Array]] = {
    "nextafter": _next_after, "scale_by_power": _scale_by_power, "frexp_exponent": _frexp_exponent,
}  # fmt: skip
"""Of operands and results of more than one dtype, or not by way of f32."""

Rule = Callable[..., Array]
_COMMON: dict[str, Rule] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_INTEGERS: dict[str, Rule] = {
    "min": np.minimum, "max": np.maximum, "floordiv": _divide_floor, "mod": _modulo,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": _shift(np.left_shift), "shr": _shift(np.right_shift),
}  # fmt: skip
_FLOATS: dict[str, Rule] = {
    "min": _float_minimum, "max": _float_maximum, "smaller": _smaller, "larger": _larger, "floordiv": _float_divide_floor, "mod": np.mod, "div": np.divide,
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc, "sqrt": np.sqrt, "isnan": np.isnan,
    "ldexp": _ldexp, "fmod": np.fmod, "copysign": np.copysign, "frexp_fraction": lambda a: np.frexp(a)[0],
}  # fmt: skip


# -- functions ------------------------------------------------------------------------------------------------------


def _function(rule: Rule, arrays: Sequence[Array], dtype: DType) -> Array:
    wide = np.dtype(np.longdouble) if dtype is f64 else np.dtype(np.float64)
    result = np.asarray(rule(*(a.astype(wide) for a in arrays)))
    return convert(result, f64, dtype) if dtype.is_small_float else np.asarray(result.astype(dtype.numpy))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _rsqrt(x: Array) -> Array:
    return np.asarray(1 / np.sqrt(x))


def _power_of_ten(x: Array) -> Array:
    return np.asarray(np.power(x.dtype.type(10), x))


def _flushed(rule: Rule) -> Rule:
    """Of an instruction that takes f32 denormals as zeros."""
    return lambda x: rule(np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x))


def _special(name: str) -> Rule:
    """A function of `reference/special_functions.py`, which is loaded when it is asked for."""

    def rule(x: Array) -> Array:
        from tilewright.ir.reference import special_functions

        found: Array = getattr(special_functions, name)(x)
        return found

    return rule


_FUNCTIONS: dict[str, Rule] = {
    "sin_approx": np.sin, "cos_approx": np.cos, "log2_approx": _flushed(np.log2), "sqrt_approx": _flushed(np.sqrt), "rsqrt_approx": _flushed(_rsqrt),
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "tanh": np.tanh, "tanh_approx": np.tanh, "rcp_approx": np.reciprocal, "sinh": np.sinh, "cosh": np.cosh, "erf": _special("erf_of_wide"), "rsqrt": _rsqrt, "sigmoid": _sigmoid, "pow": np.power,
    "exp10": _power_of_ten, "expm1": np.expm1, "log10": np.log10, "log1p": np.log1p, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "cbrt": np.cbrt, "hypot": np.hypot, "erfc": _special("erfc_of_wide"),
    "lgamma": _special("lgamma_of_wide"), "tgamma": _special("tgamma_of_wide"),
}  # fmt: skip
