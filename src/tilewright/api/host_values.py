"""Scalar arithmetic of the ZynML host language, on Python and NumPy scalars.

In: an operator or function name and scalars. Out: a scalar. The type rules are those of kernels: a Python number takes the other
operand's dtype, `/` on two integers rounds down.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Scalar = bool | int | float | np.generic

_FUNCTIONS: dict[str, Callable[..., object]] = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
    "sinh": np.sinh, "cosh": np.cosh, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "abs": np.abs, "floor": np.floor,
    "ceil": np.ceil, "round": np.round, "trunc": np.trunc, "min": np.minimum, "max": np.maximum, "pow": np.power,
    "clamp": lambda x, low, high: np.minimum(np.maximum(x, low), high), "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.logaddexp(x, 0),
    "erf": lambda x: x * 0 + math.erf(x),
    "gelu": lambda x: x * 0.5 * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
}  # fmt: skip
ELEMENTWISE = frozenset(_FUNCTIONS)
"""Functions that can be applied to a result outside a kernel."""

_ARITY = {"min": 2, "max": 2, "pow": 2, "clamp": 3}

_OPERATORS: dict[str, Callable[[Scalar, Scalar], object]] = {
    "+": lambda a, b: np.add(a, b), "-": lambda a, b: np.subtract(a, b), "*": lambda a, b: np.multiply(a, b),
    "%": lambda a, b: np.mod(a, b), "**": lambda a, b: np.power(a, b), "&": lambda a, b: np.bitwise_and(a, b),
    "|": lambda a, b: np.bitwise_or(a, b), "^": lambda a, b: np.bitwise_xor(a, b), "<<": lambda a, b: np.left_shift(a, b),
    ">>": lambda a, b: np.right_shift(a, b), "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "<": lambda a, b: np.less(a, b), "<=": lambda a, b: np.less_equal(a, b), ">": lambda a, b: np.greater(a, b),
    ">=": lambda a, b: np.greater_equal(a, b), "and": lambda a, b: bool(a) and bool(b), "or": lambda a, b: bool(a) or bool(b),
    "zdiv": lambda a, b: np.floor_divide(a, b) if _is_integer(a) and _is_integer(b) else np.true_divide(a, b),
}  # fmt: skip


def as_scalar(value: object) -> Scalar | None:
    """A value as a scalar, or None where it is none; a NumPy array without axes is one."""
    if isinstance(value, bool | int | float | np.generic):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        element: object = value[()]
        return element if isinstance(element, np.generic) else None
    return None


def binary(op: str, left: Scalar, right: Scalar) -> Scalar:
    """`left op right`. Raises `ArithmeticError`, `TypeError` or `ValueError` where there is no such value."""
    if op in ("zdiv", "%") and _is_integer(left) and _is_integer(right) and right == 0:
        raise ZeroDivisionError("division by zero")
    if op == "**" and isinstance(left, int) and isinstance(right, int):
        return _plain(float(left) ** right if right < 0 else left**right, left, right)
    with np.errstate(all="ignore"):
        return _plain(_OPERATORS[op](left, right), left, right)


def unary(op: str, operand: Scalar) -> Scalar:
    if op == "not":
        return not operand
    with np.errstate(all="ignore"):
        return _plain(np.negative(operand) if op == "-" else np.invert(operand), operand)


def call(name: str, arguments: list[Scalar]) -> Scalar:
    wanted = _ARITY.get(name, 1)
    if len(arguments) != wanted and not (name in ("min", "max") and len(arguments) > wanted):
        raise ValueError(f"{name} takes {wanted} argument(s), got {len(arguments)}")
    function = _FUNCTIONS[name]
    with np.errstate(all="ignore"):
        result = function(*arguments[:wanted])
        for argument in arguments[wanted:]:
            result = function(result, argument)
    return _plain(result, *arguments)


def _is_integer(value: Scalar) -> bool:
    return isinstance(value, int | np.integer | np.bool_)


def _plain(result: object, *operands: Scalar) -> Scalar:
    """Python numbers in, a Python number out; NumPy scalars keep their dtype."""
    if isinstance(result, np.generic) and not any(isinstance(o, np.generic) for o in operands):
        item: object = result.item()
        result = item
    if not isinstance(result, bool | int | float | np.generic):
        raise TypeError(f"the result is a {type(result).__name__}, no number")
    return result
