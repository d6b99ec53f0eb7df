"""Operations on typed operands: conversions, operators, functions.

In come typed expressions, out comes a typed expression. `Typing` inserts the conversions, folds literals and sizes, and reports what would lose data.
It knows nothing of names or statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tilewright.base.dtypes import DType, bool_, complex_of, f64, i64, loses
from tilewright.base.record import replace
from tilewright.base.sizes import Size, floordiv, maximum, minimum, mod
from tilewright.base.source import Span
from tilewright.tree.check.context import Context
from tilewright.tree.check.infer import TypePair, describe, join, size_of, type_of
from tilewright.tree.check.sizes import SizeChecker
from tilewright.tree.typed import Apply, Cast, Choose, Const, Expr, SizeValue
from tilewright.tree.typed_text import show_expr

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
_MOST_REPEATED = 8
"""Exponents of floats up to which a power is made of products: each rounds, and eight stay within the bound of `pow`; of an inverse four."""
_MOST_SQUARED = 64
"""The same for integers, which do not round."""
FLOAT_FUNCTIONS = (
    "exp", "exp2", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "erf", "sqrt", "rsqrt", "sigmoid",
    "exp10", "expm1", "log10", "log1p", "asin", "acos", "atan", "asinh", "acosh", "atanh", "cbrt", "erfc", "lgamma", "tgamma",
)  # fmt: skip
ROUNDINGS = ("floor", "ceil", "round", "trunc")
COMPLEX_FUNCTIONS = ("exp", "log", "sqrt")
"""Those of `FLOAT_FUNCTIONS` that take complex numbers."""
_COMPLEX_OPS = frozenset({*COMPLEX_FUNCTIONS, "add", "sub", "mul", "div", "neg", "pow", "eq", "ne", "abs", "real", "imag", "conj", "select", "isnan", "isinf", "isfinite"})
_ORDERS = frozenset({"lt", "le", "gt", "ge", "min", "max"})
_SPELLED = {**{op: sign for sign, op in _COMPARE.items()}, **{op: sign for sign, op in _BITS.items()}, "floordiv": "//", "mod": "%", "not": "~"}


class Typing:
    """Builds typed expressions."""

    def __init__(self, context: Context, sizes: SizeChecker) -> None:
        self.context = context
        self.sizes = sizes

    # -- settling -----------------------------------------------------------------------------------------------------

    def literal(self, value: int | float | bool | complex, span: Span) -> Const:
        if isinstance(value, bool):
            return Const(value, bool_, span=span)
        if isinstance(value, int):
            return Const(value, i64, "int", span=span)
        if isinstance(value, complex):
            return Const(value, complex_of(self.context.default_float), "complex", span=span)
        return Const(value, self.context.default_float, "float", span=span)

    def convert(self, expr: Expr, dtype: DType) -> Expr:
        """The expression in that dtype, as an operation needs it: a weak one settles, another is converted."""
        if isinstance(expr, Const) and expr.weak:
            return self._fit(expr, dtype)
        if dtype.is_complex and not expr.dtype.is_complex:
            return Cast(self.convert(expr, dtype.part), dtype, span=expr.span)
        if expr.weak in ("float", "complex") and isinstance(expr, Apply | Choose):
            if not dtype.is_inexact:
                return Cast(self.convert(expr, expr.dtype), dtype, span=expr.span)
            if isinstance(expr, Apply):
                args = tuple(a if a.dtype.is_bool else self.convert(a, _beside(expr, a, dtype)) for a in expr.args)
                return replace(expr, args=args, dtype=dtype, weak="")
            then, otherwise = self.convert(expr.then, dtype), self.convert(expr.otherwise, dtype)
            return replace(expr, then=then, otherwise=otherwise, dtype=dtype, weak="")
        return expr if expr.dtype is dtype else Cast(expr, dtype, span=expr.span)

    def settled(self, expr: Expr) -> Expr:
        """A weak float gets its own dtype; everything else has one."""
        return self.convert(expr, expr.dtype) if expr.weak in ("float", "complex") else expr

    def _fit(self, expr: Const, dtype: DType) -> Expr:
        value = expr.value
        if dtype.is_complex:
            return replace(expr, value=value, dtype=dtype, weak="") if isinstance(value, complex) else Cast(self._fit(expr, dtype.part), dtype, span=expr.span)
        if isinstance(value, complex):
            raise self.context.fail("TW006", f"{value} does not fit {dtype}", expr.span, "take its .real or .imag, or use a complex dtype")
        if dtype.is_bool:
            return replace(expr, value=bool(value), dtype=dtype, weak="")
        if dtype.is_float:
            try:
                return replace(expr, value=float(value), dtype=dtype, weak="")
            except OverflowError:
                raise self.context.fail("TW006", f"{value} does not fit {dtype}", expr.span) from None
        if isinstance(value, float):
            raise self.context.fail("TW006", f"{value!r} would lose its fraction in {dtype}", expr.span, f"write cast({value!r}, {dtype})")
        if not int(dtype.min_value) <= value <= int(dtype.max_value):
            low, high = dtype.min_value, dtype.max_value
            raise self.context.fail("TW006", f"{value} does not fit {dtype} ({low} to {high})", expr.span, "cast the other operand to a wider dtype")
        return replace(expr, value=int(value), dtype=dtype, weak="")

    def meet(self, what: str, operands: Sequence[Expr], span: Span) -> TypePair:
        """The type several operands meet in, or an error."""
        met = type_of(operands[0])
        for position, operand in enumerate(operands[1:], 1):
            joined = join(met, type_of(operand))
            if joined is None:
                left, right = describe(operands[position - 1]), describe(operand)
                raise self.context.fail(
                    "TW006", f"{what} mixes {left} with {right}, which would lose data", span,
                    f"convert one operand, as in {_conversion(operands[position - 1], operand, met[0], type_of(operand)[0])}",
                )  # fmt: skip
            met = joined
        return met

    def apply(self, op: str, operands: Sequence[Expr], met: TypePair, span: Span, result: DType | None = None) -> Apply:
        """`op` on operands brought to the type `met`; a weak result keeps them as they are."""
        if met[0].is_complex and op not in _COMPLEX_OPS:
            self.refuse_complex(op, span)
        shape = self.sizes.broadcast([o.shape for o in operands], span)
        if met[1] and result is None:
            dtype = self.context.default_float if met[1] == "float" else met[0]
            return Apply(op, tuple(operands), dtype, met[1], shape, span=span)
        args = tuple(self.convert(o, met[0]) for o in operands)
        return Apply(op, args, result or met[0], "", shape, span=span)

    def refuse_complex(self, op: str, span: Span) -> None:
        """What complex numbers do not have."""
        what = f"'{_SPELLED[op]}'" if op in _SPELLED else f"{op}()"
        if op in _ORDERS:
            raise self.context.fail("TW006", f"{what} asks for the order of complex numbers, which have none", span, "compare abs(z), z.real or z.imag")
        raise self.context.fail("TW006", f"{what} does not take complex numbers", span, "use it on z.real, z.imag or abs(z)")

    # -- operators ----------------------------------------------------------------------------------------------------

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
        if op == "/" or (op == "zdiv" and met[0].is_inexact):
            if met[0].is_inexact:
                return self.apply("div", [a, b], met, span)
            return self.apply("div", [a, b], (self.context.default_float, "float") if met[1] else (f64, ""), span)
        return self.apply("floordiv" if op == "zdiv" else _ARITHMETIC[op], [a, b], met, span)

    def fold(self, op: str, a: Expr, b: Expr, span: Span) -> Expr | None:
        """The literal or size it is, where both operands are."""
        if isinstance(a, Const) and isinstance(b, Const) and a.weak and b.weak:
            integers = isinstance(a.value, int) and isinstance(b.value, int)
            if op in ("//", "%") and isinstance(a.value + b.value, complex):
                self.refuse_complex(_ARITHMETIC[op], span)
            rule = _FOLD["//" if op == "zdiv" and integers else "/" if op == "zdiv" else op]
            try:
                return self.literal(rule(a.value, b.value), span)
            except (ZeroDivisionError, OverflowError):
                if integers and op != "/":
                    raise self.context.fail("TW016", f"'{op}' by the literal 0", span) from None
                return None
        left, right = size_of(a), size_of(b)
        if left is not None and right is not None and a.weak and b.weak and op in _SIZES:
            return self.sizes.numbers.value(_SIZES[op](left, right), span)
        by_one = (isinstance(b, Const) and b.value == 1 and b.weak == "int") or (right is not None and right.constant == 1 and a.dtype is i64)
        if by_one and op in ("//", "%", "zdiv") and a.dtype.is_int:
            # A stride or a group of 1: the index is as affine as it was.
            return a if op != "%" else Const(0, a.dtype, a.weak, a.shape, span=span)
        return None

    def compare(self, op: str, a: Expr, b: Expr, span: Span) -> Expr:
        met = self.meet(f"'{op}'", [a, b], span)
        if met[0].is_bool and op not in ("==", "!="):
            met = i64, ""
        return self.apply(_COMPARE[op], [a, b], (met[0], ""), span, bool_)

    def bits(self, op: str, a: Expr, b: Expr, span: Span) -> Expr:
        met = self.meet(f"'{op}'", [a, b], span)
        if met[0].is_inexact or (met[0].is_bool and op in ("<<", ">>")):
            raise self.context.fail("TW006", f"'{op}' takes integers, got {describe(a)} and {describe(b)}", span)
        return self.apply(_BITS[op], [a, b], met, span)

    def power(self, a: Expr, b: Expr, span: Span) -> Expr:
        if a.dtype.is_complex or b.dtype.is_complex:
            return self._complex_power(a, b, span)
        if isinstance(b, Const) and isinstance(b.value, int) and self._is_repeated(a, int(b.value)):
            return self._integer_power(a, int(b.value), span)
        if isinstance(b, Const) and b.value == 0.5 and (a.dtype.is_float or a.weak):
            return self.function("sqrt", a, span)
        met = self.meet("'**'", [a, b], span)
        if not met[0].is_float:
            if not met[1] and not met[0].is_bool:
                return self.apply("pow", [a, b], met, span)  # `integer_power` when it is lowered
            met = (self.context.default_float, "float") if met[1] else (f64, "")
        return self.apply("pow", [a, b], met, span)

    def _complex_power(self, a: Expr, b: Expr, span: Span) -> Expr:
        """A power of complex numbers: by squaring where the exponent is a literal integer, else by `exp(b * log(a))`."""
        if isinstance(b, Const) and isinstance(b.value, int) and abs(b.value) <= _MOST_SQUARED:
            if b.value == 0:
                return self._integer_power(a, 0, span)
            power = self._integer_power(a, abs(int(b.value)), span)
            return power if b.value > 0 else self.binary("/", self.literal(1, span), power, span)
        if isinstance(b, Const) and b.value == 0.5:
            return self.function("sqrt", a, span)
        return self.apply("pow", [a, b], self.meet("'**'", [a, b], span), span)

    def _is_repeated(self, a: Expr, exponent: int) -> bool:
        """Whether a power is computed by multiplying: always that of an integer; of floats one that keeps within the bound of `pow`."""
        if a.dtype.is_float or a.weak == "float" or exponent < 0:
            return 2 * exponent >= -_MOST_REPEATED and exponent <= _MOST_REPEATED
        return exponent <= _MOST_SQUARED

    def _integer_power(self, a: Expr, exponent: int, span: Span) -> Expr:
        if exponent < 0:
            # The inverse first: the power itself may leave the range where its inverse does not.
            inverse = self.binary("/", self.literal(1.0, span), a, span)
            return self._integer_power(inverse, -exponent, span)
        if exponent == 0:
            # 1 for NaN and infinities, too; of the shape and the type of a product.
            same, other = self.compare("==", a, a, span), self.compare("!=", a, a, span)
            dtype, weak = type_of(self.binary("*", a, self.literal(1, span), span))
            one = Cast(self.bits("|", same, other, span), dtype, span=span)
            return self.literal(1.0 if dtype.is_inexact else 1, span) if weak and not a.shape else one
        half = self._integer_power(a, exponent // 2, span) if exponent > 1 else None
        if half is None:
            return a
        square = self.binary("*", half, half, span)
        return self.binary("*", square, a, span) if exponent % 2 else square

    def negate(self, a: Expr, span: Span) -> Expr:
        if isinstance(a, Const) and a.weak:
            return self.literal(-a.value, span)
        if isinstance(a, SizeValue):
            return self.sizes.numbers.value(-a.size, span)
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
        elif a.dtype.is_inexact:
            raise self.context.fail("TW006", f"'~' takes integers, got {describe(a)}", span)
        return self.apply("not", [a], (a.dtype, ""), span)

    # -- functions ----------------------------------------------------------------------------------------------------

    def function(self, name: str, a: Expr, span: Span) -> Expr:
        """A function of floats; integers are taken to f64, weak ones stay weak."""
        if a.dtype.is_complex and name not in COMPLEX_FUNCTIONS:
            self.refuse_complex(name, span)
        if isinstance(a, Const) and a.weak and not isinstance(a.value, complex):
            folded = _fold_function(name, float(a.value))
            if folded is not None:
                return self.literal(folded, span)
        return self.apply(name, [a], self.as_float(type_of(a)), span)

    def as_float(self, pair: TypePair) -> TypePair:
        """The float type in which a function of such operands is computed."""
        if pair[0].is_inexact:
            return pair
        return (self.context.default_float, "float") if pair[1] else (f64, "")

    def rounding(self, name: str, a: Expr, span: Span) -> Expr:
        return self.apply(name, [a], type_of(a), span) if a.dtype.is_inexact else a

    def absolute(self, a: Expr, span: Span) -> Expr:
        if a.dtype.is_bool or a.dtype.kind == "u":
            return a
        return self.part("abs", a, span) if a.dtype.is_complex else self.apply("abs", [a], type_of(a), span)

    def part(self, name: str, a: Expr, span: Span) -> Expr:
        """real, imag or abs of a complex number: a float; of a weak one, a weak float."""
        if isinstance(a, Const) and a.weak:
            value = complex(a.value)
            return replace(self.literal(abs(value) if name == "abs" else getattr(value, name), span), shape=a.shape)
        weak = "float" if a.weak else ""
        return Apply(name, (a,), a.dtype.part, weak, a.shape, span=span)

    def real_or_imag(self, name: str, a: Expr, span: Span) -> Expr:
        """`z.real` and `z.imag`; a real number is its own real part."""
        if a.dtype.is_complex:
            return self.part(name, a, span)
        return a if name == "real" else self.binary("*", a, self.literal(0, span), span) if a.shape else self.convert(self.literal(0, span), i64 if a.dtype.is_bool else a.dtype)

    def conjugate(self, a: Expr, span: Span) -> Expr:
        if not a.dtype.is_complex:
            return a
        return self.literal(complex(a.value).conjugate(), span) if isinstance(a, Const) and a.weak else self.apply("conj", [a], type_of(a), span)

    def complex(self, args: Sequence[Expr], span: Span) -> Expr:
        """`complex(re, im)` of real numbers; `complex(x)`, of any."""
        if len(args) == 1 and args[0].dtype.is_complex:
            return args[0]
        parts = [*args, self.literal(0.0, span)][:2]
        for value in parts:
            if value.dtype.is_complex:
                raise self.context.fail("TW006", f"complex() takes real numbers, got {describe(value)}", span, "add complex numbers: a + 1j * b")
        if all(isinstance(p, Const) and p.weak for p in parts):
            return self.literal(complex(*(p.value for p in parts if isinstance(p, Const))), span)
        met = self.as_float(self.meet("complex()", parts, span))
        shape = self.sizes.broadcast([p.shape for p in parts], span)
        if met[1]:
            return Apply("complex", tuple(parts), complex_of(met[0]), "complex", shape, span=span)
        dtype = complex_of(met[0])
        return Apply("complex", tuple(self.convert(p, dtype.part) for p in parts), dtype, "", shape, span=span)

    def extreme(self, name: str, operands: Sequence[Expr], span: Span) -> Expr:
        """min or max of two or more."""
        if any(o.dtype.is_complex for o in operands):
            self.refuse_complex(name, span)
        total = operands[0]
        for operand in operands[1:]:
            left, right = size_of(total), size_of(operand)
            if isinstance(total, Const) and isinstance(operand, Const) and total.weak and operand.weak:
                choose = min if name == "min" else max
                total = self.literal(choose(total.value, operand.value), span)
            elif left is not None and right is not None and total.weak and operand.weak:
                total = self.sizes.numbers.value(_SIZES[name](left, right), span)
            else:
                total = self.apply(name, [total, operand], self.meet(f"'{name}'", [total, operand], span), span)
        return total

    def select(self, cond: Expr, a: Expr, b: Expr, span: Span, lazy: bool) -> Expr:
        """`a` where `cond` holds, else `b`; `lazy` evaluates only the chosen one."""
        met = self.meet("the choice", [a, b], span)
        cond = self.logical(cond, span)
        shape = self.sizes.broadcast([cond.shape, a.shape, b.shape], span)
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
        if a.dtype.is_complex and not dtype.is_complex:
            raise self.context.fail("TW006", f"{describe(a)} would lose its imaginary part in {dtype}", span, "take z.real, z.imag or abs(z)")
        if dtype.is_complex:
            return self.convert(a, dtype) if a.dtype.is_complex or a.weak else Cast(Cast(a, dtype.part, rounds=True, span=span), dtype, span=span)
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

    def bitcast(self, a: Expr, dtype: DType, span: Span) -> Expr:
        """The same bits as another dtype of the same size."""
        value = self.settled(a)
        if value.dtype.is_complex or dtype.is_complex:
            self.refuse_complex("bitcast", span)
        if value.weak or value.dtype.bits != dtype.bits or value.dtype.is_bool or dtype.is_bool:
            shown = f"{value.dtype}, of {value.dtype.bits} bits" if not value.weak else "a number without a dtype"
            raise self.context.fail("TW009", f"bitcast() to {dtype}, of {dtype.bits} bits, was given {shown}", span, "both must have as many bits; cast() converts numbers")
        return Apply("bitcast", (value,), dtype, "", value.shape, span=span)

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
            # log(1 + t) with what the sum 1 + t loses of t put back: t itself where t is tiny.
            tail = self.function("exp", self.negate(self.absolute(x, span), span), span)
            total = plus(number(1.0), tail)
            lost = self.binary("-", tail, self.binary("-", total, number(1.0), span), span)
            rest = plus(self.function("log", total, span), self.binary("/", lost, total, span))
            return plus(self.extreme("max", [x, self.literal(0, span)], span), rest)
        if tanh_form:
            inner = plus(x, times(number(0.044715), times(times(x, x), x)))
            curve = self.function("tanh", times(number(0.7978845608028654), inner), span)
        else:
            curve = self.function("erf", times(x, number(math.sqrt(0.5))), span)
        return times(times(x, number(0.5)), plus(number(1.0), curve))

    # -- assignment ---------------------------------------------------------------------------------------------------

    def assignable(self, value: Expr, dtype: DType, what: str, span: Span) -> Expr:
        """The value as `dtype` stores it; an error where that would lose data."""
        if isinstance(value, Const) and value.weak:
            return self.convert(value, dtype)
        if not value.weak and loses(value.dtype, dtype):
            raise self.context.fail(
                "TW006", f"{what} is {dtype}, and {value.dtype} does not fit it", span,
                "store its .real or .imag, or make it complex64 or complex128" if value.dtype.is_complex and not dtype.is_complex else f"write cast({show_expr(value)}, {dtype})",
            )  # fmt: skip
        if value.weak == "complex" and not dtype.is_complex:
            raise self.context.fail("TW006", f"{what} is {dtype}, and a complex number does not fit it", span, "store its .real or .imag, or make it complex64 or complex128")
        if value.weak == "float" and not dtype.is_inexact:
            raise self.context.fail("TW006", f"{what} is {dtype}, and a float does not fit it", span, f"write cast({show_expr(value)}, {dtype})")
        return self.convert(value, dtype)

    def scalar_only(self, name: str, value: Expr, span: Span) -> None:
        """A value that is a number, not an array."""
        if value.shape:
            raise self.context.fail("TW003", f"{name} is a number, and the value has rank {len(value.shape)}", span, "index the arrays in it")


def _beside(expr: Apply, operand: Expr, dtype: DType) -> DType:
    """The dtype of an operand of a weak operation that becomes `dtype`: complex numbers and their parts change places in some."""
    if expr.op == "complex":
        return dtype.part
    return complex_of(dtype) if operand.dtype.is_complex else dtype


def _fold_function(name: str, value: float) -> float | None:
    try:
        if name == "rsqrt":
            return 1.0 / math.sqrt(value)
        if name == "sigmoid":
            return 1.0 / (1.0 + math.exp(-value))
        if name in ("lgamma", "tgamma"):
            return None  # Python's own are not exact enough
        return float(getattr(math, name)(value))
    except (ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None


def _conversion(left: Expr, right: Expr, left_type: DType, right_type: DType) -> str:
    """A cast to suggest: towards the float, else towards the left."""
    if right_type.is_float and not left_type.is_float:
        return f"cast({show_expr(left)}, {right_type})"
    return f"cast({show_expr(right)}, {left_type})"
