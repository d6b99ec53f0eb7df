"""Types of operations: what dtype `a op b` has, and how weak operands settle.

`Typing` builds typed expressions from typed operands. It inserts the conversions, folds literals and sizes, and reports
what would lose data. It knows nothing of names or statements.

A weak expression carries how it is weak: `int` (a literal), `index` (a loop index, a size) or `float` (a literal, or made of
weak things by a division or a function). Weak floats keep their operands unsettled, so that `x / sqrt(n)` computes the root
in the dtype of `x`; `settled` fixes one that met nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tilewright.base.dtypes import DType, accumulator, bool_, f32, f64, i64, loses, promote
from tilewright.base.errors import Diagnostics
from tilewright.base.sizes import Size, floordiv, maximum, minimum, mod
from tilewright.base.source import Span
from tilewright.tree.typed import Apply, Cast, Choose, Const, Expr, Shape, SizeValue
from tilewright.tree.typed_text import show_expr

TypePair = tuple[DType, str]
"""A dtype and how weak it is."""


class Skip(Exception):
    """An error was reported; the statement it is in is given up."""


def join(a: TypePair, b: TypePair) -> TypePair | None:
    """The type two operands (or two values of one variable) meet in; None where data would be lost."""
    if a[1] and not b[1]:
        a, b = b, a
    (left, weak_left), (right, weak_right) = a, b
    if weak_left:
        kinds = {weak_left, weak_right}
        if "float" in kinds:
            return (left if weak_left == "float" else right), "float"
        return i64, "index" if "index" in kinds else "int"
    if weak_right == "float":
        return (left, "") if left.is_float else (f64, "")
    if weak_right and left.is_bool:
        return i64, ""
    if weak_right == "int" or (weak_right == "index" and left.is_float):
        return left, ""
    met = promote(left, right)
    return None if met is None else (met, "")


def type_of(expr: Expr) -> TypePair:
    return expr.dtype, expr.weak


def describe(expr: Expr) -> str:
    """How a message names the type of an operand."""
    kind = {"int": "a literal", "float": "a literal", "index": "an index", "": ""}[expr.weak]
    return f"{kind} ({expr.dtype})" if kind else expr.dtype.name


_FOLD: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b,
}  # fmt: skip
_SIZES: dict[str, Callable[[Size, Size], Size]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": floordiv, "zdiv": floordiv,
    "%": mod, "min": minimum, "max": maximum,
}  # fmt: skip
_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod"}
_BITS = {"&": "and", "|": "or", "^": "xor", "<<": "shl", ">>": "shr"}
_COMPARE = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
COMPARISONS = frozenset(_COMPARE)
FLOAT_FUNCTIONS = (
    "exp", "exp2", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "erf", "sqrt", "rsqrt", "sigmoid",
)  # fmt: skip
ROUNDINGS = ("floor", "ceil", "round", "trunc")


def size_of(expr: Expr) -> Size | None:
    """The size an integer expression is, where it is made of literals and sizes alone."""
    if isinstance(expr, SizeValue):
        return expr.size
    if isinstance(expr, Const) and isinstance(expr.value, int) and not isinstance(expr.value, bool):
        return Size.of(expr.value)
    return None


class Typing:
    """Builds typed expressions. `default_float` is what a weak float is when it meets nothing."""

    def __init__(self, sink: Diagnostics, default_float: DType) -> None:
        self.sink = sink
        self.default_float = default_float

    def fail(self, code: str, message: str, span: Span, help: str = "") -> Skip:
        """Report an error; the caller raises what comes back."""
        self.sink.error(code, message, span, help)
        return Skip()

    def broadcast(self, shapes: Sequence[Shape], span: Span) -> Shape:
        """The shape operands of these shapes meet in. The checker, which can make sizes equal, overrides it."""
        return max(shapes, key=len, default=())

    # -- settling ---------------------------------------------------------------------------------------------------

    def literal(self, value: int | float | bool, span: Span) -> Const:
        if isinstance(value, bool):
            return Const(value, bool_, span=span)
        if isinstance(value, int):
            return Const(value, i64, "int", span=span)
        return Const(value, self.default_float, "float", span=span)

    def convert(self, expr: Expr, dtype: DType) -> Expr:
        """The expression in that dtype, as an operation needs it: a weak one settles, another is converted."""
        if isinstance(expr, Const) and expr.weak:
            return self._fit(expr, dtype)
        if expr.weak == "float" and isinstance(expr, Apply | Choose):
            if not dtype.is_float:
                return Cast(self.convert(expr, expr.dtype), dtype, span=expr.span)
            if isinstance(expr, Apply):
                args = tuple(a if a.dtype.is_bool else self.convert(a, dtype) for a in expr.args)
                return replace(expr, args=args, dtype=dtype, weak="")
            then, otherwise = self.convert(expr.then, dtype), self.convert(expr.otherwise, dtype)
            return replace(expr, then=then, otherwise=otherwise, dtype=dtype, weak="")
        return expr if expr.dtype is dtype else Cast(expr, dtype, span=expr.span)

    def settled(self, expr: Expr) -> Expr:
        """A weak float gets its own dtype; everything else has one."""
        return self.convert(expr, expr.dtype) if expr.weak == "float" else expr

    def _fit(self, expr: Const, dtype: DType) -> Expr:
        value = expr.value
        if dtype.is_bool:
            return replace(expr, value=bool(value), dtype=dtype, weak="")
        if dtype.is_float:
            try:
                return replace(expr, value=float(value), dtype=dtype, weak="")
            except OverflowError:
                raise self.fail("TW006", f"{value} does not fit {dtype}", expr.span) from None
        if isinstance(value, float):
            raise self.fail("TW006", f"{value!r} would lose its fraction in {dtype}", expr.span, f"write cast({value!r}, {dtype})")
        if not int(dtype.min_value) <= value <= int(dtype.max_value):
            low, high = dtype.min_value, dtype.max_value
            raise self.fail("TW006", f"{value} does not fit {dtype} ({low} to {high})", expr.span, "cast the other operand to a wider dtype")
        return replace(expr, value=int(value), dtype=dtype, weak="")

    def meet(self, what: str, operands: Sequence[Expr], span: Span) -> TypePair:
        """The type several operands meet in, or an error."""
        met = type_of(operands[0])
        for position, operand in enumerate(operands[1:], 1):
            joined = join(met, type_of(operand))
            if joined is None:
                left, right = describe(operands[position - 1]), describe(operand)
                raise self.fail(
                    "TW006", f"{what} mixes {left} with {right}, which would lose data", span,
                    f"convert one operand, as in {_conversion(operands[position - 1], operand, met[0], type_of(operand)[0])}",
                )  # fmt: skip
            met = joined
        return met

    def apply(self, op: str, operands: Sequence[Expr], met: TypePair, span: Span, result: DType | None = None) -> Apply:
        """`op` on operands brought to the type `met`; a weak result keeps them as they are."""
        shape = self.broadcast([o.shape for o in operands], span)
        if met[1] and result is None:
            dtype = self.default_float if met[1] == "float" else met[0]
            return Apply(op, tuple(operands), dtype, met[1], shape, span=span)
        args = tuple(self.convert(o, met[0]) for o in operands)
        return Apply(op, args, result or met[0], "", shape, span=span)

    # -- operators --------------------------------------------------------------------------------------------------

    def binary(self, op: str, a: Expr, b: Expr, span: Span) -> Expr:
        """`a op b` for every operator but `and`, `or` and `@`; `zdiv` is ZynML's `/`."""
        if op in _COMPARE:
            return self.compare(op, a, b, span)
        if op in _BITS:
            return self.bits(op, a, b, span)
        if op == "**":
            return self.power(a, b, span)
        folded = self.fold(op, a, b, span)
        if folded is not None:
            return folded
        met = self.meet(f"'{'/' if op == 'zdiv' else op}'", [a, b], span)
        if met[0].is_bool:
            met = i64, ""
        if op == "/" or (op == "zdiv" and met[0].is_float):
            if met[0].is_float:
                return self.apply("div", [a, b], met, span)
            return self.apply("div", [a, b], (self.default_float, "float") if met[1] else (f64, ""), span)
        return self.apply("floordiv" if op == "zdiv" else _ARITHMETIC[op], [a, b], met, span)

    def fold(self, op: str, a: Expr, b: Expr, span: Span) -> Expr | None:
        """The literal or size it is, where both operands are."""
        if isinstance(a, Const) and isinstance(b, Const) and a.weak and b.weak:
            whole = isinstance(a.value, int) and isinstance(b.value, int)
            rule = _FOLD["//" if op == "zdiv" and whole else "/" if op == "zdiv" else op]
            try:
                return self.literal(rule(a.value, b.value), span)
            except ZeroDivisionError:
                if whole and op != "/":
                    raise self.fail("TW016", f"'{op}' by the literal 0", span) from None
                return None
        left, right = size_of(a), size_of(b)
        if left is not None and right is not None and a.weak and b.weak and op in _SIZES:
            return SizeValue(_SIZES[op](left, right), span=span)
        return None

    def compare(self, op: str, a: Expr, b: Expr, span: Span) -> Expr:
        met = self.meet(f"'{op}'", [a, b], span)
        if met[0].is_bool and op not in ("==", "!="):
            met = i64, ""
        return self.apply(_COMPARE[op], [a, b], (met[0], ""), span, bool_)

    def bits(self, op: str, a: Expr, b: Expr, span: Span) -> Expr:
        met = self.meet(f"'{op}'", [a, b], span)
        if met[0].is_float or (met[0].is_bool and op in ("<<", ">>")):
            raise self.fail("TW006", f"'{op}' takes integers, got {describe(a)} and {describe(b)}", span)
        return self.apply(_BITS[op], [a, b], met, span)

    def power(self, a: Expr, b: Expr, span: Span) -> Expr:
        if isinstance(b, Const) and isinstance(b.value, int) and abs(b.value) <= 64:
            return self._integer_power(a, int(b.value), span)
        if isinstance(b, Const) and b.value == 0.5 and (a.dtype.is_float or a.weak):
            return self.function("sqrt", a, span)
        met = self.meet("'**'", [a, b], span)
        if not met[0].is_float:
            if not met[1] and not met[0].is_bool:
                raise self.fail(
                    "TW005", f"'**' of {describe(a)} with {describe(b)} has no integer form", span,
                    "use a literal exponent, or cast the base to a float",
                )  # fmt: skip
            met = (self.default_float, "float") if met[1] else (f64, "")
        return self.apply("pow", [a, b], met, span)

    def _integer_power(self, a: Expr, exponent: int, span: Span) -> Expr:
        if exponent < 0:
            return self.binary("/", self.literal(1.0, span), self._integer_power(a, -exponent, span), span)
        if exponent == 0:
            return self.binary("+", self.binary("*", a, self.literal(0, span), span), self.literal(1, span), span)
        half = self._integer_power(a, exponent // 2, span) if exponent > 1 else None
        if half is None:
            return a
        square = self.binary("*", half, half, span)
        return self.binary("*", square, a, span) if exponent % 2 else square

    def negate(self, a: Expr, span: Span) -> Expr:
        if isinstance(a, Const) and a.weak:
            return self.literal(-a.value, span)
        if isinstance(a, SizeValue):
            return SizeValue(-a.size, span=span)
        if a.dtype.is_bool:
            a = Cast(a, i64, span=span)
        return self.apply("neg", [a], type_of(a), span)

    def logical(self, a: Expr, span: Span) -> Expr:
        """The truth of a number: bool as it is, anything else `!= 0`."""
        if a.dtype.is_bool:
            return a
        return self.compare("!=", a, self.literal(0, span), span)

    def invert(self, op: str, a: Expr, span: Span) -> Expr:
        if op == "not":
            a = self.logical(a, span)
        elif a.dtype.is_float:
            raise self.fail("TW006", f"'~' takes integers, got {describe(a)}", span)
        return self.apply("not", [a], (a.dtype, ""), span)

    # -- functions --------------------------------------------------------------------------------------------------

    def function(self, name: str, a: Expr, span: Span) -> Expr:
        """A function of floats; integers are taken to f64, weak ones stay weak."""
        if isinstance(a, Const) and a.weak:
            folded = _fold_function(name, float(a.value))
            if folded is not None:
                return self.literal(folded, span)
        return self.apply(name, [a], self._as_float(type_of(a)), span)

    def _as_float(self, pair: TypePair) -> TypePair:
        if pair[0].is_float:
            return pair
        return (self.default_float, "float") if pair[1] else (f64, "")

    def rounding(self, name: str, a: Expr, span: Span) -> Expr:
        return self.apply(name, [a], type_of(a), span) if a.dtype.is_float else a

    def absolute(self, a: Expr, span: Span) -> Expr:
        if a.dtype.is_bool or a.dtype.kind == "u":
            return a
        return self.apply("abs", [a], type_of(a), span)

    def extreme(self, name: str, operands: Sequence[Expr], span: Span) -> Expr:
        """min or max of two or more."""
        total = operands[0]
        for operand in operands[1:]:
            left, right = size_of(total), size_of(operand)
            if isinstance(total, Const) and isinstance(operand, Const) and total.weak and operand.weak:
                choose = min if name == "min" else max
                total = self.literal(choose(total.value, operand.value), span)
            elif left is not None and right is not None and total.weak and operand.weak:
                total = SizeValue(_SIZES[name](left, right), span=span)
            else:
                total = self.apply(name, [total, operand], self.meet(f"'{name}'", [total, operand], span), span)
        return total

    def select(self, cond: Expr, a: Expr, b: Expr, span: Span, lazy: bool) -> Expr:
        """`a` where `cond` holds, else `b`; `lazy` evaluates only the chosen one."""
        met = self.meet("the choice", [a, b], span)
        cond = self.logical(cond, span)
        shape = self.broadcast([cond.shape, a.shape, b.shape], span)
        if not met[1]:
            a, b = self.convert(a, met[0]), self.convert(b, met[0])
        if lazy and not shape:
            return Choose(cond, a, b, met[0], met[1], span=span)
        return Apply("select", (cond, a, b), met[0], met[1], shape, span=span)

    def fused(self, operands: Sequence[Expr], span: Span) -> Expr:
        """fma: one rounding on floats, plain arithmetic on integers."""
        met = self.meet("'fma'", operands, span)
        if not met[0].is_float:
            return self.binary("+", self.binary("*", operands[0], operands[1], span), operands[2], span)
        return self.apply("fma", operands, met, span)

    def cast(self, a: Expr, dtype: DType, span: Span) -> Expr:
        """What the user asked for: it may lose data, and it rounds."""
        if isinstance(a, Const) and dtype.is_float:
            with np.errstate(over="ignore"):
                return Const(float(np.float64(a.value).astype(dtype.numpy)), dtype, span=span)
        if isinstance(a, Const) and dtype.is_int and isinstance(a.value, int):
            wrapped = int(a.value) & ((1 << dtype.bits) - 1)
            signed = dtype.kind == "i" and wrapped >> (dtype.bits - 1)
            return Const(wrapped - (1 << dtype.bits) if signed else wrapped, dtype, span=span)
        if a.weak == "float":
            # Straight to the dtype asked for: nothing is gained by a detour.
            return Cast(self.convert(a, dtype if dtype.is_float else a.dtype), dtype, rounds=True, span=span)
        return Cast(a, dtype, rounds=True, span=span)

    def composite(self, name: str, x: Expr, span: Span, tanh_form: bool = True) -> Expr:
        """Functions made of others: relu, silu, gelu, softplus."""

        def times(a: Expr, b: Expr) -> Expr:
            return self.binary("*", a, b, span)

        def plus(a: Expr, b: Expr) -> Expr:
            return self.binary("+", a, b, span)

        def number(value: float) -> Expr:
            return self.literal(value, span)

        if name == "relu":
            return self.extreme("max", [x, self.literal(0, span)], span)
        if name == "silu":
            return times(x, self.function("sigmoid", x, span))
        if name == "softplus":
            tail = self.function("exp", self.negate(self.absolute(x, span), span), span)
            return plus(self.extreme("max", [x, self.literal(0, span)], span), self.function("log", plus(number(1.0), tail), span))
        if tanh_form:
            inner = plus(x, times(number(0.044715), times(times(x, x), x)))
            curve = self.function("tanh", times(number(0.7978845608028654), inner), span)
        else:
            curve = self.function("erf", times(x, number(math.sqrt(0.5))), span)
        return times(times(x, number(0.5)), plus(number(1.0), curve))

    # -- assignment -------------------------------------------------------------------------------------------------

    def assignable(self, value: Expr, dtype: DType, what: str, span: Span) -> Expr:
        """The value as `dtype` stores it; an error where that would lose data."""
        if isinstance(value, Const) and value.weak:
            return self.convert(value, dtype)
        if not value.weak and loses(value.dtype, dtype):
            raise self.fail(
                "TW006", f"{what} is {dtype}, and {value.dtype} does not fit it", span, f"write cast({show_expr(value)}, {dtype})"
            )
        if value.weak == "float" and not dtype.is_float:
            raise self.fail("TW006", f"{what} is {dtype}, and a float does not fit it", span, f"write cast({show_expr(value)}, {dtype})")
        return self.convert(value, dtype)


def sum_dtype(dtype: DType, kind: str) -> DType:
    """What a reduction of such elements gives: sums and products of integers are wide, everything else stays."""
    if kind in ("argmin", "argmax"):
        return i64
    if kind in ("and", "or"):
        return bool_
    return accumulator(dtype) if kind in ("add", "mul") and not dtype.is_float else dtype


def _fold_function(name: str, value: float) -> float | None:
    try:
        if name == "rsqrt":
            return 1.0 / math.sqrt(value)
        if name == "sigmoid":
            return 1.0 / (1.0 + math.exp(-value))
        return float(getattr(math, name)(value))
    except (ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None


def default_float(flavour: str) -> DType:
    """A float that met nothing: Python's is f64, ZynML's f32."""
    return f64 if flavour == "kernel" else f32


def _conversion(left: Expr, right: Expr, left_type: DType, right_type: DType) -> str:
    """A cast to suggest: towards the float, else towards the left."""
    if right_type.is_float and not left_type.is_float:
        return f"cast({show_expr(left)}, {right_type})"
    return f"cast({show_expr(right)}, {left_type})"
