"""Functions of numbers that take two operands, look at bits, or are made of operators.

In come typed operands, out come typed expressions. `NumberFunctions.build` knows all of `ARITY`; those of one float that are ops of their own are
`operations.FLOAT_FUNCTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, bool_, f8e4m3, i8, i16, i32, i64, u8, u16, u32, u64
from tilewright.base.source import Span
from tilewright.tree.check.context import Context
from tilewright.tree.check.infer import describe, type_of
from tilewright.tree.check.operations import Typing
from tilewright.tree.typed import Apply, Cast, Const, Expr

OF_TWO = ("atan2", "hypot", "fmod", "copysign", "nextafter")
ARITY = {
    **dict.fromkeys(OF_TWO, 2), "ldexp": 2, "sign": 1, "isinf": 1, "isfinite": 1, "popcount": 1, "clz": 1, "rotate_left": 2, "rotate_right": 2,
}  # fmt: skip
_UNSIGNED = {i8: u8, i16: u16, i32: u32, i64: u64}
_MOST = 1 << 14
"""Powers of two beyond this are 0 or infinite in every float."""


class NumberFunctions:
    """Builds them."""

    def __init__(self, context: Context, typing: Typing) -> None:
        self.context = context
        self.typing = typing
        self._builders: dict[str, Callable[[str, Sequence[Expr], Span], Expr]] = {
            **dict.fromkeys(OF_TWO, self._of_two), "ldexp": self._ldexp, "sign": self._sign, "isinf": self._infinite, "isfinite": self._infinite,
            "popcount": self._count, "clz": self._count, "rotate_left": self._rotate, "rotate_right": self._rotate,
        }  # fmt: skip

    def build(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        if name not in ("isinf", "isfinite") and any(a.dtype.is_complex for a in args):
            self.typing.refuse_complex(name, span)
        return self._builders[name](name, args, span)

    # -- floats -------------------------------------------------------------------------------------------------------

    def _of_two(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        met = self.typing.as_float(self.typing.meet(f"'{name}'", args, span))
        return self.typing.apply(name, args, met, span)

    def _float(self, a: Expr) -> Expr:
        """The operand as a float of a dtype of its own."""
        return self.typing.convert(a, a.dtype if a.dtype.is_float else self.typing.as_float(type_of(a))[0])

    def frexp(self, a: Expr, span: Span) -> tuple[Expr, Expr]:
        """The fraction and the exponent."""
        if a.dtype.is_complex:
            self.typing.refuse_complex("frexp", span)
        value = self._float(a)
        return (
            Apply("frexp_fraction", (value,), value.dtype, "", value.shape, span=span),
            Apply("frexp_exponent", (value,), i32, "", value.shape, span=span),
        )

    def _ldexp(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        value, n = self._float(args[0]), args[1]
        if not n.dtype.is_int:
            raise self.context.fail("TW009", f"ldexp() takes an integer as its second argument, got {describe(n)}", span, "write cast(n, i32)")
        if n.dtype.bits >= 32 and not isinstance(n, Const):
            n = self.typing.extreme("min", [n, self.typing.literal(_MOST, span)], span)
            n = self.typing.extreme("max", [n, self.typing.literal(0 if n.dtype.kind == "u" else -_MOST, span)], span)
        elif isinstance(n, Const):
            n = replace(n, value=max(-_MOST, min(_MOST, int(n.value))))
        shape = self.typing.sizes.broadcast([value.shape, n.shape], span)
        return Apply("scale_by_power", (value, self.typing.convert(n, i32) if n.weak and isinstance(n, Const) else Cast(n, i32, span=span)), value.dtype, "", shape, span=span)

    def _infinite(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        (a,) = args
        if a.dtype.is_complex:
            return self.typing.apply(name, [a], (a.dtype, ""), span, bool_)
        if not a.dtype.is_float or (a.dtype is f8e4m3 and name == "isinf"):
            return Const(name == "isfinite", bool_, "", a.shape, span=span)
        if a.dtype is f8e4m3:
            return self.typing.invert("not", self.typing.apply("isnan", [a], (a.dtype, ""), span, bool_), span)
        size = self.typing.absolute(a, span)
        return self.typing.compare("==" if name == "isinf" else "<", size, self.typing.literal(math.inf, span), span)

    def _sign(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        """-1, 0 or 1; NaN for NaN."""
        (a,) = args
        if a.dtype.is_bool:
            return a
        if isinstance(a, Const) and a.weak and a.value == a.value:
            return self.typing.literal(type(a.value)((a.value > 0) - (a.value < 0)), span)
        zero, one = self.typing.literal(0, span), self.typing.literal(1, span)
        if a.dtype.kind == "u":
            return self.typing.extreme("min", [a, one], span)
        rest: Expr = zero
        if a.dtype.is_float:
            rest = self.typing.select(self.typing.compare("==", a, zero, span), zero, a, span, lazy=False)
        below = self.typing.select(self.typing.compare("<", a, zero, span), self.typing.literal(-1, span), rest, span, lazy=False)
        result = self.typing.select(self.typing.compare(">", a, zero, span), one, below, span, lazy=False)
        return result if result.dtype is a.dtype or a.weak else self.typing.convert(result, a.dtype)

    # -- bits ---------------------------------------------------------------------------------------------------------

    def _bits(self, name: str, a: Expr, span: Span) -> tuple[Expr, DType]:
        """The operand as an unsigned integer of as many bits, and its own dtype."""
        if not a.dtype.is_int:
            raise self.context.fail("TW009", f"{name}() takes an integer, got {describe(a)}", span, "bitcast() gives the bits of a float as an integer")
        own = i64 if a.weak else a.dtype
        value = self.typing.convert(a, own) if isinstance(a, Const) and a.weak else a if a.dtype is own and not a.weak else Cast(a, own, span=span)
        return (value if own.kind == "u" else self.typing.bitcast(value, _UNSIGNED[own], span)), own

    def _number(self, value: int, dtype: DType, span: Span) -> Expr:
        return Const(value, dtype, span=span)

    def _count(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        """How many bits are 1; or, of clz, how many 0 stand above the highest 1: none of those below it once it is smeared over them."""
        bits, own = self._bits(name, args[0], span)
        wide = u64 if own.bits == 64 else u32
        value = bits if bits.dtype is wide else Cast(bits, wide, span=span)

        def op(sign: str, a: Expr, b: Expr | int) -> Expr:
            return self.typing.binary(sign, a, self._number(b, wide, span) if isinstance(b, int) else b, span)

        if name == "clz":
            for step in (1, 2, 4, 8, 16, 32)[: own.bits.bit_length() - 1]:
                value = op("|", value, op(">>", value, step))
        ones = (1 << wide.bits) - 1
        value = op("-", value, op("&", op(">>", value, 1), ones // 3))
        value = op("+", op("&", value, ones // 5), op("&", op(">>", value, 2), ones // 5))
        value = op("&", op("+", value, op(">>", value, 4)), ones // 17)
        value = op(">>", op("*", value, ones // 255), wide.bits - 8)
        if name == "clz":
            value = op("-", self._number(own.bits, wide, span), value)
        return Cast(value, own, span=span)

    def _rotate(self, name: str, args: Sequence[Expr], span: Span) -> Expr:
        """Shift counts are taken modulo the bits, so that a rotation by none is one as well."""
        bits, own = self._bits(name, args[0], span)
        n = args[1]
        if not n.dtype.is_int:
            raise self.context.fail("TW009", f"{name}() takes an integer as its second argument, got {describe(n)}", span)
        mask = own.bits - 1
        if isinstance(n, Const):
            count: Expr = self._number(int(n.value) & mask, bits.dtype, span)
            other: Expr = self._number(-int(n.value) & mask, bits.dtype, span)
        else:
            count = Cast(self.typing.binary("&", n, self.typing.literal(mask, span), span), bits.dtype, span=span)
            other = self.typing.binary("-", self._number(own.bits, bits.dtype, span), count, span)
        signs = ("<<", ">>") if name == "rotate_left" else (">>", "<<")
        turned = self.typing.binary("|", self.typing.binary(signs[0], bits, count, span), self.typing.binary(signs[1], bits, other, span), span)
        return turned if own.kind == "u" else self.typing.bitcast(turned, own, span)
