"""Types: which two meet in which, and how weak operands settle.

In come the types of operands, out comes the type of the result (`operations.py` builds the expressions).

A weak expression carries how it is weak: `int` (a literal), `index` (a loop index, a size) or `float` (a literal, or made of
weak things by a division or a function) or `complex` (made of a literal such as `2j`). Weak floats keep their operands unsettled, so that `x / sqrt(n)` computes the root
in the dtype of `x`; `settled` fixes one that met nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from tilewright.base.dtypes import (
    DType,
    accumulator,
    bool_,
    complex64,
    complex128,
    complex_of,
    f32,
    f64,
    i64,
    promote,
    u64,
)
from tilewright.base.sizes import Size, number_name
from tilewright.tree.typed import Apply, Cast, Const, Expr, ScalarRef, SizeValue

TypePair = tuple[DType, str]
"""A dtype and how weak it is."""


def join(a: TypePair, b: TypePair) -> TypePair | None:
    """The type two operands (or two values of one variable) meet in; None where data would be lost."""
    if a[1] and not b[1]:
        a, b = b, a
    (left, weak_left), (right, weak_right) = a, b
    if weak_left:
        kinds = {weak_left, weak_right}
        if "complex" in kinds:
            return (left if weak_left == "complex" else right), "complex"
        if "float" in kinds:
            return (left if weak_left == "float" else right), "float"
        return i64, "index" if "index" in kinds else "int"
    if weak_right == "complex":
        return complex_of(left), ""
    if weak_right == "float":
        return (left, "") if left.is_inexact else (f64, "")
    if weak_right and left.is_bool:
        return i64, ""
    if weak_right == "int" or (weak_right == "index" and left.is_inexact):
        return left, ""
    met = promote(left, right)
    return None if met is None else (met, "")


def type_of(expr: Expr) -> TypePair:
    return expr.dtype, expr.weak


def describe(expr: Expr) -> str:
    """How a message names the type of an operand."""
    kind = {"int": "a literal", "float": "a literal", "complex": "a literal", "index": "an index", "": ""}[expr.weak]
    return f"{kind} ({expr.dtype})" if kind else expr.dtype.name


def size_of(expr: Expr) -> Size | None:
    """The size an integer expression is, where it is made of literals, sizes and whole numbers that the call gives."""
    if isinstance(expr, SizeValue):
        return expr.size
    if isinstance(expr, Const) and isinstance(expr.value, int) and not isinstance(expr.value, bool):
        return Size.of(expr.value)
    value = expr.value if isinstance(expr, Cast) and expr.dtype is i64 else expr
    if isinstance(value, ScalarRef) and value.dtype.is_int and value.dtype is not u64:
        return Size.of(number_name(value.scalar.name))
    return None


_TRUTH: dict[str, Callable[..., bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "and": lambda a, b: bool(a and b), "or": lambda a, b: bool(a or b), "not": operator.not_,
}  # fmt: skip


def constant_of(expr: Expr) -> int | float | bool | None:
    """The value of an expression that is made of literals alone, as far as conditions need it."""
    if isinstance(expr, Const) and not expr.shape:
        value: int | float | bool | None = None if isinstance(expr.value, complex) else expr.value
        return value
    if isinstance(expr, SizeValue):
        return expr.size.constant
    if isinstance(expr, Cast):
        return constant_of(expr.value)
    if isinstance(expr, Apply) and expr.op in _TRUTH:
        values = [constant_of(a) for a in expr.args]
        return None if None in values else _TRUTH[expr.op](*values)
    return None


def sum_dtype(dtype: DType, kind: str) -> DType:
    """What a reduction of such elements gives: sums and products of integers are wide, everything else stays."""
    if kind in ("argmin", "argmax"):
        return i64
    if kind in ("and", "or"):
        return bool_
    return accumulator(dtype) if kind in ("add", "mul") and not dtype.is_inexact else dtype


def default_float(flavour: str) -> DType:
    """A float that met nothing: Python's is f64, ZynML's f32."""
    return f64 if flavour == "kernel" else f32


def default_complex(flavour: str) -> DType:
    """A complex number that met nothing: of parts as a float has them."""
    return complex128 if flavour == "kernel" else complex64
