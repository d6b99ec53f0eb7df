"""Scalar arithmetic of the ZynML host language, on Python and NumPy scalars.

In: an operator or function name and scalars. Out: a scalar. The type rules are those of kernels: a Python number takes the other
operand's dtype, `/` on two integers rounds down.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType

Scalar = bool | int | float | complex | np.generic


def _of_python(function: Callable[[float], float], poles: float) -> Callable[[Scalar], object]:
    """A function that NumPy has not. Where Python raises, it is infinite: at a pole, or that beyond the range."""

    def scalar(x: Scalar) -> object:
        number = float(x)  # type: ignore[arg-type]  # of a complex number it raises TypeError, which is reported
        try:
            result = function(number)
        except OverflowError:
            result = math.inf
        except ValueError:
            result = math.copysign(math.inf, number) if number == 0 and poles != poles else poles
        return type(x)(result) if isinstance(x, np.floating) else result

    return scalar


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
    "sinh": np.sinh, "cosh": np.cosh, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "abs": np.abs, "floor": np.floor,
    "ceil": np.ceil, "round": np.round, "trunc": np.trunc, "min": np.minimum, "max": np.maximum, "pow": np.power,
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high), "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.logaddexp(x, 0),
    "erf": lambda x: x * 0 + math.erf(x), "erfc": lambda x: x * 0 + math.erfc(x), "exp10": lambda x: np.power(10.0, x), "expm1": np.expm1, "log10": np.log10,
    "log1p": np.log1p, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "cbrt": np.cbrt,
    "lgamma": _of_python(math.lgamma, math.inf), "tgamma": _of_python(math.gamma, math.nan), "atan2": np.arctan2, "hypot": np.hypot, "fmod": np.fmod, "copysign": np.copysign,
    "nextafter": np.nextafter, "ldexp": lambda x, n: np.ldexp(x, int(max(-9999, min(9999, n)))), "sign": np.sign, "isinf": np.isinf, "isfinite": np.isfinite,
    "isnan": np.isnan, "complex": lambda re, im: np.result_type(re, im, 1j).type(complex(re, im)), "conj": np.conj, "real": np.real, "imag": np.imag,
    "gelu": lambda x: x * 0.5 * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
}  # fmt: skip
ELEMENTWISE = frozenset(_FUNCTIONS)
"""Functions that can be applied to a result outside a kernel."""

ARRAY_FUNCTIONS = frozenset({"row_max", "row_min", "row_sum", "dot", "matmul", "mean", "var", "std", "norm", "median"})
"""Functions of whole arrays, which only kernels compute."""


class NoNumber(TypeError):
    """Arithmetic with something that is no number."""


class NoSuchFunction(Exception):
    """A function that numbers do not have: one of the program's own, inside itself."""


_ARITY = {"complex": 2, "min": 2, "max": 2, "pow": 2, "clamp": 3, **dict.fromkeys(("atan2", "hypot", "fmod", "copysign", "nextafter", "ldexp"), 2)}

_OPERATORS: dict[str, Callable[[Scalar, Scalar], object]] = {
    "+": lambda a, b: np.add(a, b), "-": lambda a, b: np.subtract(a, b), "*": lambda a, b: np.multiply(a, b),
    "%": lambda a, b: np.mod(a, b), "**": lambda a, b: np.power(a, b), "&": lambda a, b: np.bitwise_and(a, b),
    "|": lambda a, b: np.bitwise_or(a, b), "^": lambda a, b: np.bitwise_xor(a, b), "<<": lambda a, b: np.left_shift(a, b),
    ">>": lambda a, b: np.right_shift(a, b), "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "<": lambda a, b: np.less(a, b), "<=": lambda a, b: np.less_equal(a, b), ">": lambda a, b: np.greater(a, b),
    ">=": lambda a, b: np.greater_equal(a, b), "and": lambda a, b: bool(a) and bool(b), "or": lambda a, b: bool(a) or bool(b),
    "zdiv": lambda a, b: np.floor_divide(a, b) if _is_integer(a) and _is_integer(b) else np.true_divide(a, b),
}  # fmt: skip


_WHOLE: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "zdiv": lambda a, b: a // b, "%": lambda a, b: a % b,
    "**": lambda a, b: pow(a, b, 1 << 64), "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << (b & 63), ">>": lambda a, b: wrapped(a) >> (b & 63),
}  # fmt: skip
"""Operators of whole numbers, which wrap at 64 bits as in kernels; so do the counts of shifts."""


def wrapped(value: int) -> int:
    """A whole number in 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def as_whole(value: object) -> int | None:
    """A number without a fraction as an int; None where it is none, or endless."""
    number = as_scalar(value)
    if number is None or isinstance(number, bool | np.bool_):
        return None
    if isinstance(number, int | np.integer):
        return int(number)
    if is_complex(number):
        return None
    as_float = float(number)  # type: ignore[arg-type]
    return int(as_float) if math.isfinite(as_float) and as_float == int(as_float) else None


class Unread:
    """A number that a kernel computed, while a run is recorded: it is computed with, but nothing may depend on its value."""

    shape = ()

    def __init__(self, value: np.generic) -> None:
        self.value, self.dtype = value, value.dtype


class ValueNeeded(Exception):
    """The value of an `Unread` is asked for."""


def as_scalar(value: object) -> Scalar | None:
    """A value as a scalar, or None where it is none; a NumPy array without axes is one."""
    found = scalar_leaf(value)
    if isinstance(found, Unread):
        raise ValueNeeded
    return found


def scalar_leaf(value: object) -> Scalar | Unread | None:
    """The same for somebody who only hands values on, who gets an `Unread` as it is."""
    if isinstance(value, Unread):
        return value
    if isinstance(value, bool | int | float | complex | np.generic):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        element: object = value[()]
        return element if isinstance(element, np.generic) else None
    return None


def binary(op: str, left: Scalar, right: Scalar) -> Scalar:
    """`left op right`. Raises `ArithmeticError`, `TypeError` or `ValueError` where there is no such value."""
    if op in ("zdiv", "%") and _is_integer(left) and _is_integer(right) and right == 0:
        raise ZeroDivisionError("division by zero")
    if op in _WHOLE and isinstance(left, int) and isinstance(right, int) and not isinstance(left, np.generic) and not isinstance(right, np.generic):
        if op == "**" and right < 0:
            return _plain(np.power(float(left), right), left, right)
        return wrapped(_WHOLE[op](left, right))
    if op in ("<", "<=", ">", ">="):
        _check_ordered(op, left, right)
    with np.errstate(all="ignore"):
        return _plain(_OPERATORS[op](left, right), left, right)


def number(value: object) -> Scalar:
    """A value that must be a number; an element type passes, for `cast`."""
    if isinstance(value, bool | int | float | complex | np.generic | DType):
        return value  # type: ignore[return-value]
    raise NoNumber(f"arithmetic with a {type(value).__name__}")


def combine(op: str, left: object, right: object) -> object:
    """`left op right` of any values: beside numbers, `==` and `!=` of everything, `+` of two strings, two lists, or two tuples."""
    first, second = as_scalar(left), as_scalar(right)
    if first is not None and second is not None:
        return binary(op, first, second)
    if op in ("==", "!="):
        return (left == right) is (op == "==")
    for kind in (str, list, tuple):
        if op == "+" and isinstance(left, kind) and isinstance(right, kind):
            return left + right  # type: ignore[operator]
    culprit = left if first is None else right
    raise NoNumber(f"arithmetic with a {type(culprit).__name__}")


def unary(op: str, operand: Scalar) -> Scalar:
    if op == "not":
        return not operand
    if isinstance(operand, int) and not isinstance(operand, bool):
        return wrapped(-operand if op == "-" else ~operand)
    with np.errstate(all="ignore"):
        return _plain(np.negative(operand) if op == "-" else np.invert(operand), operand)


def operator(op: str) -> Callable[..., object]:
    """What computes `left op right` of NumPy's floats and numbers beside them."""
    return np.true_divide if op == "zdiv" else {"+": np.add, "-": np.subtract, "*": np.multiply, "**": np.power}[op]


def function(name: str, arity: int) -> Callable[..., object] | None:
    """What computes a function of so many of NumPy's floats; None where there is no such function."""
    return _FUNCTIONS.get(name) if _ARITY.get(name, 1) == arity else None


def call(name: str, arguments: list[Scalar]) -> Scalar:
    if name == "cast" or dtypes.is_name(name):
        return _cast(name, arguments)
    if name not in _FUNCTIONS:
        raise NoSuchFunction(name)
    wanted = _ARITY.get(name, 1)
    if len(arguments) != wanted and not (name in ("min", "max") and len(arguments) > wanted):
        raise ValueError(f"{name} takes {wanted} argument(s), got {len(arguments)}")
    if name in ("min", "max", "clamp", "relu", "sign"):
        _check_ordered(name, *arguments)
    function = _FUNCTIONS[name]
    with np.errstate(all="ignore"):
        result = function(*arguments[:wanted])
        for argument in arguments[wanted:]:
            result = function(result, argument)
    return _plain(result, *arguments)


def _cast(name: str, arguments: list[Scalar]) -> Scalar:
    """`cast(x, f16)` or `f16(x)`."""
    value, *rest = arguments if name == "cast" else (*arguments[:1], dtypes.by_name(name), *arguments[1:])
    if len(rest) != 1 or not isinstance(rest[0], DType) or isinstance(value, DType):
        raise ValueError("cast takes a number and an element type")
    dtype = rest[0]
    if isinstance(value, int | np.integer) and dtype.is_int:
        bits = int(value) % (1 << dtype.bits)
        value = bits - (1 << dtype.bits) if dtype.kind == "i" and bits >> (dtype.bits - 1) else bits
    with np.errstate(all="ignore"):
        return dtype.numpy.type(value)  # type: ignore[no-any-return]


def is_complex(value: object) -> bool:
    return isinstance(value, complex | np.complexfloating)


def _check_ordered(what: str, *operands: Scalar) -> None:
    if any(map(is_complex, operands)):
        raise TypeError(f"complex numbers have no order, which {what} needs")


def _is_integer(value: Scalar) -> bool:
    return isinstance(value, int | np.integer | np.bool_)


def _plain(result: object, *operands: Scalar) -> Scalar:
    """Python numbers in, a Python number out; NumPy scalars keep their dtype."""
    if isinstance(result, np.generic) and not any(isinstance(o, np.generic) for o in operands):
        item: object = result.item()
        result = item
    if not isinstance(result, bool | int | float | complex | np.generic):
        raise TypeError(f"the result is a {type(result).__name__}, no number")
    return result
