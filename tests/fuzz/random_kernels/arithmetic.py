"""Numbers as docs/numerics.md and docs/python.md define them, in plain Python: dtypes, promotion, rounding, operators.

Integers are Python ints that wrap. Floats are Python floats where one result is right, and `Near` where several are: products
that may be fused into additions, sums in any order, functions with a bound. `UNKNOWN` is a number nothing can be said of, such
as a comparison of two numbers that may be equal. No module of Tilewright is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

np.seterr(all="ignore")


@dataclass(frozen=True)
class Kind:
    """An element type. `digits`: bits of a float's significand with the hidden one; `least`: the exponent of the smallest number."""

    name: str
    kind: str
    bits: int
    numpy: Any
    digits: int = 0
    least: int = 0
    largest: float = 0.0

    @property
    def small(self) -> bool:
        return self.kind == "f" and self.bits < 32

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1)) if self.kind == "i" else 0

    @property
    def high(self) -> int:
        return 1 if self.kind == "b" else (1 << (self.bits - (self.kind == "i"))) - 1


KINDS = {
    k.name: k
    for k in (
        Kind("bool", "b", 8, np.bool_),
        Kind("i8", "i", 8, np.int8), Kind("i16", "i", 16, np.int16), Kind("i32", "i", 32, np.int32), Kind("i64", "i", 64, np.int64),
        Kind("u8", "u", 8, np.uint8), Kind("u16", "u", 16, np.uint16), Kind("u32", "u", 32, np.uint32), Kind("u64", "u", 64, np.uint64),
        Kind("f16", "f", 16, np.float16, 11, -24, 65504.0), Kind("bf16", "f", 16, ml_dtypes.bfloat16, 8, -133, 3.3895313892515355e38),
        Kind("f32", "f", 32, np.float32, 24, -149, 3.4028234663852886e38), Kind("f64", "f", 64, np.float64, 53, -1074, 1.7976931348623157e308),
        Kind("f8e4m3", "f", 8, ml_dtypes.float8_e4m3fn, 4, -9, 448.0), Kind("f8e5m2", "f", 8, ml_dtypes.float8_e5m2, 3, -16, 57344.0),
    )
}  # fmt: skip
INTEGERS = tuple(n for n, k in KINDS.items() if k.kind in "iu")
FLOATS = tuple(n for n, k in KINDS.items() if k.kind == "f")


def meet(a: str, b: str) -> str | None:
    """The smaller type that holds both; None where data would be lost."""
    if a == b:
        return a
    first, second = KINDS[a], KINDS[b]
    if "b" in (first.kind, second.kind):
        return b if first.kind == "b" else a
    if first.kind == "f" and second.kind == "f":
        return None if first.bits == second.bits else max(first, second, key=lambda k: k.bits).name
    if "f" in (first.kind, second.kind):
        real, whole = (first, second) if first.kind == "f" else (second, first)
        return real.name if real.digits >= whole.bits - (whole.kind == "i") else None
    if first.kind == second.kind:
        return max(first, second, key=lambda k: k.bits).name
    signed, unsigned = (first, second) if first.kind == "i" else (second, first)
    if signed.bits > unsigned.bits:
        return signed.name
    return {8: "i16", 16: "i32", 32: "i64"}.get(unsigned.bits)


def stores(source: str, target: str) -> bool:
    """Whether a value may be stored without a conversion being written."""
    a, b = KINDS[source], KINDS[target]
    if source == target or a.kind == "b":
        return True
    if b.kind == "b":
        return False
    if a.kind == "f":
        return b.kind == "f"
    if b.kind == "f":
        return True
    if a.kind == b.kind:
        return b.bits >= a.bits
    return a.kind == "u" and b.bits > a.bits


def computed(dtype: str) -> str:
    """What arithmetic on the dtype is done in."""
    return "f32" if KINDS[dtype].small else dtype


def carried(dtype: str) -> str:
    """What sums of the dtype are carried in."""
    kind = KINDS[dtype]
    if kind.kind in "bi":
        return "i64"
    return "u64" if kind.kind == "u" else computed(dtype)


# -- floats that may be off ------------------------------------------------------------------------------------------


class Near:
    """A float within `err` of `value`. `factors`: the value is their rounded product, which an addition may take unrounded."""

    __slots__ = ("err", "factors", "value")

    def __init__(self, value: float, err: float, factors: tuple[float, float] | None = None) -> None:
        self.value, self.err, self.factors = value, err, factors

    def __repr__(self) -> str:
        return f"{self.value!r}±{self.err:.3g}"


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Any = _Unknown()
Number = Any
"""int, float, `Near` or `UNKNOWN`."""


class Undecided(Exception):
    """The way through a kernel depends on how a device rounds."""


def near(value: float, err: float) -> Number:
    if not math.isfinite(value) or not math.isfinite(err):
        return UNKNOWN if err else value
    return Near(value, err)


def parts(x: Number) -> tuple[float, float]:
    return (x.value, x.err) if isinstance(x, Near) else (x, 0.0)


def unit(dtype: str, value: float) -> float:
    """One unit in the last place of a float of this size."""
    kind = KINDS[dtype]
    exponent = math.frexp(value)[1] if value and math.isfinite(value) else -5000
    return math.ldexp(1.0, max(exponent - kind.digits, kind.least))


def rounded(dtype: str, value: float) -> float:
    """To nearest even, once. Beyond the range infinite, of f8e4m3 NaN."""
    if dtype == "f64" or value == 0 or not math.isfinite(value):
        return math.nan if dtype == "f8e4m3" and math.isinf(value) else value
    if dtype == "f32":
        return float(np.float32(value))
    kind = KINDS[dtype]
    step = max(math.frexp(value)[1] - kind.digits, kind.least)
    result = math.ldexp(float(round(math.ldexp(value, -step))), step) if step > -1000 else value
    if abs(result) > kind.largest:
        return math.nan if dtype == "f8e4m3" else math.copysign(math.inf, value)
    return math.copysign(result, value)


def rounded_exact(dtype: str, value: Fraction | int) -> float:
    """A rational rounded once; also integers of any size."""
    kind = KINDS[dtype]
    if value == 0:
        return 0.0
    sign, size = (-1.0, -value) if value < 0 else (1.0, value)
    size = Fraction(size)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = max(exponent + 1 - kind.digits, kind.least)
    quotient = round(size / Fraction(2) ** step)
    result = Fraction(quotient) * Fraction(2) ** step
    if result > Fraction(kind.largest):
        return math.nan if dtype == "f8e4m3" else sign * math.inf
    return sign * float(result)


def round_near(dtype: str, x: Number) -> Number:
    """A number rounded to a dtype, with every rounding its error allows."""
    if x is UNKNOWN:
        return x
    if not isinstance(x, Near):
        return rounded(dtype, x)
    value, low, high = rounded(dtype, x.value), rounded(dtype, x.value - x.err), rounded(dtype, x.value + x.err)
    if x.err == 0 and x.factors is not None and value == x.value:
        return x
    if value == low == high:
        return value if value or x.err else Near(0.0, 0.0)
    return near(value, max(abs(value - low), abs(high - value)))


# -- conversions -----------------------------------------------------------------------------------------------------


def wrap(dtype: str, value: int) -> int:
    kind = KINDS[dtype]
    value &= (1 << kind.bits) - 1
    return value - (1 << kind.bits) if kind.kind == "i" and value >> (kind.bits - 1) else value


def _to_integer(kind: Kind, value: float) -> int:
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return kind.high if value > 0 else kind.low
    return min(max(math.trunc(value), kind.low), kind.high)


def convert(source: str, target: str, x: Number, rounds: bool = True) -> Number:
    """`cast`. Small floats are rounded only where the text asks for it, or memory does (`rounds`)."""
    if x is UNKNOWN or (source == target and not (rounds and KINDS[target].small)):
        return x
    a, b = KINDS[source], KINDS[target]
    goal = target if rounds else computed(target)
    if a.kind == "f":
        if b.kind == "f":
            return round_near(goal, x)
        value, err = parts(x)
        if b.kind == "b":
            return UNKNOWN if err and abs(value) <= err else int(value != 0)
        low, high = _to_integer(b, value - err), _to_integer(b, value + err)
        return low if low == high else UNKNOWN
    if b.kind == "b":
        return int(x != 0)
    return rounded_exact(goal, x) if b.kind == "f" else wrap(target, x)


# -- operators -------------------------------------------------------------------------------------------------------


def _sum(dtype: str, a: Number, b: Number) -> Number:
    (x, ex), (y, ey) = parts(a), parts(b)
    value = rounded(dtype, x + y)
    err = ex + ey
    loose = (isinstance(a, Near) and not a.factors and x == 0) or (isinstance(b, Near) and not b.factors and y == 0)
    if err:
        return near(value, err + unit(dtype, value))
    options = [value]
    for this, other in ((a, y), (b, x)):
        if isinstance(this, Near) and this.factors and math.isfinite(other):
            product = Fraction(this.factors[0]) * Fraction(this.factors[1])
            options.append(rounded_exact(dtype, product + Fraction(other)))
    off = max((abs(o - value) for o in options), default=0.0) if math.isfinite(value) else float(any(o != value for o in options))
    if off and not math.isfinite(value):
        return UNKNOWN if not math.isnan(value) else value
    if off:
        return near(value, off)
    return Near(0.0, 0.0) if value == 0 and (loose or len(options) > 1) else value


def _product(dtype: str, a: Number, b: Number) -> Number:
    (x, ex), (y, ey) = parts(a), parts(b)
    value = rounded(dtype, x * y)
    if ex or ey:
        return near(value, (abs(x) * ey + abs(y) * ex + ex * ey) * 1.0001 + unit(dtype, value))
    if not (math.isfinite(x) and math.isfinite(y)):
        return value
    exact = x * y == value if dtype == "f32" else Fraction(x) * Fraction(y) == (Fraction(value) if math.isfinite(value) else None)
    if value == 0 and (isinstance(a, Near) or isinstance(b, Near)):
        return Near(0.0, 0.0)
    return value if exact else Near(value, 0.0, (x, y))


def _quotient(dtype: str, a: Number, b: Number) -> Number:
    (x, ex), (y, ey) = parts(a), parts(b)
    if isinstance(b, Near) and abs(y) <= ey:
        return UNKNOWN
    value = float(np.float64(x) / np.float64(y))
    if dtype == "f64" or not math.isfinite(value) or value == 0:
        value = rounded(dtype, value)
    else:
        value = rounded_exact(dtype, Fraction(x) / Fraction(y)) if math.isfinite(y) else rounded(dtype, value)
    if ex or ey:
        if not math.isfinite(y) or y == 0:
            return UNKNOWN
        return near(value, (ex + abs(value) * ey) / (abs(y) - ey) * 1.0001 + unit(dtype, value))
    return Near(0.0, 0.0) if value == 0 and isinstance(a, Near) else value


def _extreme(a: Number, b: Number, largest: bool) -> Number:
    (x, ex), (y, ey) = parts(a), parts(b)
    if math.isnan(x) or math.isnan(y):
        return math.nan
    if x == y == 0:
        if isinstance(a, Near) or isinstance(b, Near):
            return Near(0.0, max(ex, ey))
        negative = math.copysign(1, x) < 0 and math.copysign(1, y) < 0 if largest else math.copysign(1, x) < 0 or math.copysign(1, y) < 0
        return -0.0 if negative else 0.0
    first = (x > y) == largest
    if ex or ey:
        return near(x if first else y, max(ex, ey))
    return a if first else b


def _floor_parts(dtype: str, a: Number, b: Number, want: str) -> Number:
    """Floats: the floor of the exact quotient, or what is left of it."""
    (x, ex), (y, ey) = parts(a), parts(b)
    if ex or ey or y == 0 or x == 0 or not (math.isfinite(x) and math.isfinite(y)):
        return UNKNOWN
    quotient = math.floor(Fraction(x) / Fraction(y))
    if abs(quotient) > 2 ** (KINDS[dtype].digits - 1):
        return UNKNOWN
    value = rounded_exact(dtype, quotient if want == "//" else Fraction(x) - quotient * Fraction(y))
    return value if value else Near(0.0, 0.0)


def float_binary(op: str, dtype: str, a: Number, b: Number) -> Number:
    if a is UNKNOWN or b is UNKNOWN:
        return UNKNOWN
    dtype = computed(dtype)
    if op == "+":
        return _sum(dtype, a, b)
    if op == "-":
        return _sum(dtype, a, negated(b))
    if op == "*":
        return _product(dtype, a, b)
    if op == "/":
        return _quotient(dtype, a, b)
    if op in ("min", "max"):
        return _extreme(a, b, op == "max")
    return _floor_parts(dtype, a, b, op)


def negated(x: Number) -> Number:
    if isinstance(x, Near):
        return Near(-x.value, x.err, (-x.factors[0], x.factors[1]) if x.factors else None)
    return -x


def integer_binary(op: str, dtype: str, a: Number, b: Number) -> Number:
    if a is UNKNOWN or b is UNKNOWN:
        return UNKNOWN
    if op in ("//", "%"):
        return 0 if b == 0 else wrap(dtype, a // b if op == "//" else a % b)
    if op in ("<<", ">>"):
        count = b & (KINDS[dtype].bits - 1)
        return wrap(dtype, a << count if op == "<<" else a >> count)
    rule: dict[str, Callable[[int, int], int]] = {
        "+": lambda p, q: p + q, "-": lambda p, q: p - q, "*": lambda p, q: p * q, "min": min, "max": max,
        "&": lambda p, q: p & q, "|": lambda p, q: p | q, "^": lambda p, q: p ^ q,
    }  # fmt: skip
    return wrap(dtype, rule[op](a, b))


def compare(op: str, a: Number, b: Number) -> Number:
    if a is UNKNOWN or b is UNKNOWN:
        return UNKNOWN
    (x, ex), (y, ey) = parts(a), parts(b)
    if (ex or ey) and not (math.isnan(x) or math.isnan(y)) and abs(x - y) <= (ex + ey) * 1.0001:
        return UNKNOWN
    rule: dict[str, bool] = {"<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "==": x == y, "!=": x != y}
    return int(rule[op])


# -- sums and products in any order ----------------------------------------------------------------------------------


def _granule(value: float) -> int:
    """The exponent of the lowest bit that is set."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator).bit_length() - 1 - (denominator.bit_length() - 1)


def any_order_sum(dtype: str, terms: Sequence[Number], digits: int | None = None) -> Number:
    """The sum of floats, added in whatever order; `digits`: those the additions keep, where they are fewer than the dtype's."""
    kept = digits or KINDS[dtype].digits
    if any(t is UNKNOWN for t in terms):
        return UNKNOWN
    values = [parts(t)[0] for t in terms]
    err = sum(parts(t)[1] for t in terms)
    if not all(map(math.isfinite, values)):
        total = sum(values)
        return total if math.isnan(total) or all(math.isfinite(v) or v == total for v in values) else UNKNOWN
    size = math.fsum(map(abs, values))
    if size > KINDS[dtype].largest / 4:
        return UNKNOWN
    total = rounded(dtype, math.fsum(values))
    loose = any(isinstance(t, Near) and t.factors for t in terms)
    others = [v for v in values if v]
    if not err and not loose:
        if len(others) < 2:
            return total if total else Near(0.0, 0.0)
        if size <= math.ldexp(1.0, min(map(_granule, others)) + kept):
            return total if total else Near(0.0, 0.0)
    return near(total, err + (len(terms) + 2) * math.ldexp(size, -kept + 1) + unit(dtype, total))


_PRODUCTS = {8: (120, -120), 11: (15, -13), 4: (8, -5), 3: (15, -13)}
"""By digits of a small float: the exponents that products in it may have, without care for overflow and denormals."""


def any_order_product(dtype: str, terms: Sequence[Number], kept: int | None = None) -> Number:
    """The product of floats, in whatever order; `kept`: the digits that each step keeps, where they are fewer than the dtype's."""
    if any(t is UNKNOWN for t in terms):
        return UNKNOWN
    values = [parts(t)[0] for t in terms]
    if any(parts(t)[1] for t in terms) or not all(map(math.isfinite, values)):
        return UNKNOWN
    exact = Fraction(1)
    digits = 0
    top = bottom = least = 0
    for value in values:
        exact *= Fraction(value)
        if value:
            numerator = abs(value.as_integer_ratio()[0])
            digits += (numerator >> ((numerator & -numerator).bit_length() - 1)).bit_length()
            exponent = math.frexp(value)[1]
            top, bottom = top + max(exponent, 0), bottom + min(exponent - KINDS[dtype].digits, 0)
            least += min(exponent - 1, 0)
    if top > 120 or bottom < -140:
        return UNKNOWN
    if kept is not None and (top > _PRODUCTS[kept][0] or least < _PRODUCTS[kept][1]):
        return UNKNOWN
    value = rounded_exact(dtype, exact)
    if not value:
        return Near(0.0, 0.0)
    loose = any(isinstance(t, Near) and t.factors for t in terms)
    if digits <= (kept or KINDS[dtype].digits) and not loose:
        return value
    wide = 1 if kept is None else 2 ** (KINDS[dtype].digits - kept)
    return near(value, (2 * len(terms) + 2) * wide * unit(dtype, value))


# -- functions -------------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "exp": (np.exp, 2), "exp2": (np.exp2, 2), "log": (np.log, 2), "log2": (np.log2, 2), "sin": (np.sin, 2), "cos": (np.cos, 2), "tan": (np.tan, 4),
    "tanh": (np.tanh, 3), "sinh": (np.sinh, 4), "cosh": (np.cosh, 4), "rsqrt": (lambda x: 1 / np.sqrt(x), 2),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 4), "erf": (np.vectorize(math.erf, otypes=[float]), 4),
}  # fmt: skip
"""Functions with their bounds in units in the last place."""
_WIDE = np.longdouble


def function(name: str, dtype: str, x: Number) -> Number:
    if x is UNKNOWN:
        return x
    value, err = parts(x)
    inner = computed(dtype)
    if name == "sqrt":
        return _root(inner, x)
    if name in ("floor", "ceil", "round", "trunc"):
        return _whole(name, x)
    rule, bound = FUNCTIONS[name]
    if not math.isfinite(value):
        return float(rule(np.float64(value)))
    wide = np.float64 if name == "erf" else _WIDE
    result = float(rule(wide(value)))
    if not math.isfinite(result):
        return UNKNOWN if err else result if abs(value) < 1 or math.isnan(result) else UNKNOWN
    if abs(result) > KINDS[inner].largest / 8:
        return UNKNOWN
    off = (bound + 1) * unit(inner, result)
    if KINDS[dtype].small:
        off += 2 * unit(dtype, result)
    if err:
        ends = [float(rule(wide(value + e))) for e in (-err, err)]
        if not all(map(math.isfinite, ends)) or err > 0.1:
            return UNKNOWN
        off += 2 * max(abs(e - result) for e in ends) + 2 * err * unit(inner, 1.0)
    return near(rounded(inner, result), off)


def _root(inner: str, x: Number) -> Number:
    value, err = parts(x)
    if err:
        if value <= 2 * err:
            return UNKNOWN
        result = rounded(inner, math.sqrt(value))
        return near(result, err / result + unit(inner, result))
    result = float(np.sqrt(np.float64(value)))
    return Near(0.0, 0.0) if isinstance(x, Near) and not value else rounded(inner, result)


_ROUNDING: dict[str, Callable[[float], float]] = {
    "floor": lambda v: float(np.floor(v)), "ceil": lambda v: float(np.ceil(v)), "round": lambda v: float(np.rint(v)), "trunc": lambda v: float(np.trunc(v)),
}  # fmt: skip


def _whole(name: str, x: Number) -> Number:
    value, err = parts(x)
    rule = _ROUNDING[name]
    result = rule(value)
    if not isinstance(x, Near):
        return result
    low, high = rule(value - err), rule(value + err)
    return near(result, max(high - result, result - low)) if low != high else result if result else Near(0.0, 0.0)
