"""Numbers of explicit kernels: arithmetic on `NumberValue`s in, ops at the thread stage out.

Types follow the rules of other Python kernels (`tree.check.infer`): literals and indices take the other operand's dtype, `/` is true
division, floats narrower than f32 are computed in f32, and mixing that would lose data is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tilewright.base.dtypes import DType, arithmetic_dtype, bool_, compute_dtype, f64, from_numpy, i64, loses
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.source import Span
from tilewright.frontend.simt.values import Host, MemoryValue, Number, NumberValue, TextValue, Val, describe, literal
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value
from tilewright.ir.ops import OPS
from tilewright.ir.types import Scalar
from tilewright.tree.check.infer import TypePair, join

_FOLD: dict[str, Callable[..., Number]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
    "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod"}
_BITS = {"&": "and", "|": "or", "^": "xor", "<<": "shl", ">>": "shr"}
_COMPARE = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
_SHORT = 6
"""Ops up to which both sides of a choice are computed."""


class Numbers:
    """Appends ops; `b` is the builder of the block that is being built. What a launch and arrays are is the `Emitter`'s to know."""

    def __init__(self, default_float: DType, span: Span) -> None:
        self.default_float = default_float
        self.b = Builder(span)

    # -- errors ---------------------------------------------------------------------------------------------------

    def error(self, code: str, message: str, span: Span | None = None, help: str = "") -> TilewrightError:
        return UserError.at(code, message, span or self.b.span, help)

    def fail(self, message: str, help: str = "", code: str = "TW005") -> TilewrightError:
        """The error for the place that is being read; the caller raises it."""
        return self.error(code, message, None, help)

    # -- numbers --------------------------------------------------------------------------------------------------

    def num(self, value: Value, weak: str = "") -> NumberValue:
        assert isinstance(value.type, Scalar)
        return NumberValue(value.type.dtype, weak, value)

    def index(self, value: Value) -> NumberValue:
        """A number of type i64 that takes the dtype of floats it meets."""
        return NumberValue(i64, "index", value)

    def number(self, val: Val, what: str = "") -> NumberValue:
        """A value that has to be a number."""
        if isinstance(val, NumberValue):
            return val
        raise self.fail(f"{what or 'this'} is {describe(val)}, not a number", code="TW009")

    def integer(self, val: Val, what: str) -> NumberValue:
        number = self.number(val, what)
        if not number.dtype.is_int:
            raise self.fail(f"{what} is {describe(number)}, not an integer", "convert it: tw.i32(...) or int(...)", "TW009")
        return number

    def constant(self, val: Val, what: str) -> int:
        """An integer that must be known when the kernel is compiled."""
        number = self.integer(val, what)
        if number.const is None:
            raise self.fail(f"{what} must be known when the kernel is compiled", "use a literal or a captured number")
        return int(number.const)

    def dtype(self, val: Val, what: str) -> DType:
        found = as_dtype(val)
        if found is None:
            raise self.fail(f"{what} is {describe(val)}, not a dtype", "write for instance tw.f32", "TW009")
        return found

    def text(self, val: Val, what: str, choices: Sequence[str]) -> str:
        """One of some words, such as the name of a scope."""
        if not isinstance(val, TextValue) or val.text not in choices:
            shown = repr(val.text) if isinstance(val, TextValue) else describe(val)
            raise self.fail(f"{what} is {shown}", f"choose one of {', '.join(choices)}", "TW009")
        return val.text

    def memory(self, val: Val, what: str = "this") -> MemoryValue:
        if isinstance(val, MemoryValue):
            return val
        raise self.fail(f"{what} is {describe(val)}, not an array", code="TW009")

    def use(self, number: NumberValue, dtype: DType | None = None) -> Value:
        """The IR value, in that dtype where one is given: conversions are made as they come."""
        wanted = dtype or number.dtype
        if number.const is not None:
            return self.b.const(self._fitting(number.const, wanted), wanted)
        assert number.value is not None
        return self.b.cast(number.value, wanted)

    def _fitting(self, value: Number, dtype: DType) -> Number:
        if dtype.is_int:
            if isinstance(value, float) and value != int(value):
                raise self.fail(f"{value} is no {dtype}", "round or convert it", "TW006")
            if not dtype.min_value <= int(value) <= dtype.max_value:
                raise self.fail(f"{value} does not fit {dtype}", code="TW006")
        return value

    def convert(self, number: NumberValue, dtype: DType, what: str) -> NumberValue:
        """As part of an assignment or an argument: what would lose data is an error."""
        if number.weak == "float" and dtype.is_int and number.const is None:
            raise self.fail(f"{what} is {dtype}, but the value is a float", f"convert it: tw.{dtype}(...)", "TW006")
        if not number.weak and loses(number.dtype, dtype):
            raise self.fail(f"{what} is {dtype}, but the value is {number.dtype}", f"convert it: tw.{dtype}(...)", "TW006")
        if number.const is not None:
            return NumberValue(dtype, "", None, cast_constant(self._fitting(number.const, dtype), dtype))
        return self.num(self.use(number, dtype))

    def cast(self, number: NumberValue, dtype: DType) -> NumberValue:
        """An explicit conversion."""
        if number.const is not None and number.weak:
            value = number.const
            if dtype.is_int and isinstance(value, float):
                value = int(value)
            if not dtype.is_int or dtype.min_value <= value <= dtype.max_value:
                return NumberValue(dtype, "", None, cast_constant(value, dtype))
        source = self.use(number)
        return self.num(self.b.cast(source, dtype))

    def as_pair(self, number: NumberValue, pair: TypePair) -> NumberValue:
        """The number in the type of a variable."""
        dtype, weak = pair
        if number.const is not None:
            return NumberValue(dtype, weak, None, cast_constant(number.const, dtype))
        if number.dtype is dtype:
            return NumberValue(dtype, weak, number.value)
        return NumberValue(dtype, weak, self.use(number, dtype))

    def truth(self, val: Val, what: str = "a condition") -> NumberValue:
        number = self.number(val, what)
        if number.const is not None:
            return NumberValue(bool_, "", None, bool(number.const))
        if number.dtype.is_bool:
            return number
        dtype = arithmetic_dtype(number.dtype)
        return self.num(self.b.op("ne", self.use(number, dtype), self.b.const(0, dtype)))

    # -- operators ------------------------------------------------------------------------------------------------

    def binary(self, sign: str, a: NumberValue, b: NumberValue) -> NumberValue:
        if a.const is not None and b.const is not None and (a.weak or a.dtype.is_bool) and (b.weak or b.dtype.is_bool):
            return self._folded(sign, a.const, b.const)
        if sign in _COMPARE:
            return self._compare(sign, a, b)
        if sign == "**":
            return self._power(a, b)
        if sign in ("<<", ">>"):
            return self._shift(sign, a, b)
        dtype, weak = self._meeting(sign, a, b)
        if sign in _BITS:
            if dtype.is_float:
                raise self.fail(f"'{sign}' takes integers, got {describe(a)} and {describe(b)}", code="TW009")
            return self._made(_BITS[sign], (dtype, weak), a, b)
        if dtype.is_bool:
            dtype, weak = i64, "index"
        if sign == "/":
            if dtype.is_int:
                dtype, weak = self.default_float, "float"
            return self._made("div", (dtype, weak), a, b)
        return self._made(_ARITHMETIC[sign], (dtype, weak), a, b)

    def _made(self, opcode: str, pair: TypePair, a: NumberValue, b: NumberValue) -> NumberValue:
        dtype, weak = pair
        value = self.b.op(opcode, self.use(a, dtype), self.use(b, dtype))
        return NumberValue(dtype, "index" if weak == "int" else weak, value)

    def _meeting(self, sign: str, a: NumberValue, b: NumberValue) -> TypePair:
        left, right = ((compute_dtype(n.dtype), n.weak) for n in (a, b))
        met = meet(left, right)
        if met is None:
            name = a.dtype.name if a.dtype.is_float else b.dtype.name if b.dtype.is_float else "i64"
            raise self.fail(
                f"'{sign}' of {a.dtype} and {b.dtype} would lose data",
                f"convert one of them, for instance with tw.{name}(...)",
                "TW006",
            )
        for one, other in ((a, b), (b, a)):
            if one.const is not None and one.weak == "int" and not other.weak and other.dtype.is_int:
                self._fitting(one.const, met[0])
        return met

    def _folded(self, sign: str, a: Number, b: Number) -> NumberValue:
        try:
            result = _FOLD[sign](a, b)
        except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:
            raise self.fail(f"{a} {sign} {b}: {error}", code="TW009") from None
        if isinstance(result, int) and not isinstance(result, bool) and not -(1 << 63) <= result < 1 << 64:
            raise self.fail(f"{a} {sign} {b} is {result}, which no 64-bit integer holds", code="TW006")
        return literal(result, self.default_float)

    def _compare(self, sign: str, a: NumberValue, b: NumberValue) -> NumberValue:
        if a.dtype.is_bool and b.dtype.is_bool:
            if sign not in ("==", "!="):
                a, b = self.as_pair(a, (i64, "index")), self.as_pair(b, (i64, "index"))
            dtype = a.dtype
        else:
            dtype, _ = self._meeting(sign, a, b)
        return self.num(self.b.op(_COMPARE[sign], self.use(a, dtype), self.use(b, dtype)))

    def _power(self, a: NumberValue, b: NumberValue) -> NumberValue:
        most = 8 if a.dtype.is_float else 64  # products round: beyond eight they leave the bound of `pow`
        if b.const is not None and b.weak == "int" and 0 <= b.const <= most:
            return self._repeated(a, int(b.const))
        dtype, weak = self._meeting("**", a, b)
        if not dtype.is_float:
            dtype, weak = self.default_float, "float"
        return self._made("pow", (dtype, weak), a, b)

    def _repeated(self, a: NumberValue, times: int) -> NumberValue:
        """A power by squaring, from the highest bit on."""
        if times == 0:
            return NumberValue(compute_dtype(a.dtype), a.weak, None, 1)
        result = a
        for bit in bin(times)[3:]:
            result = self.binary("*", result, result)
            if bit == "1":
                result = self.binary("*", result, a)
        return result

    def _shift(self, sign: str, a: NumberValue, b: NumberValue) -> NumberValue:
        for number in (a, b):
            if not number.dtype.is_int:
                raise self.fail(f"'{sign}' takes integers, got {describe(number)}", code="TW009")
        value = self.b.op(_BITS[sign], self.use(a), self.use(b, a.dtype))
        return NumberValue(a.dtype, "index" if a.weak else "", value)

    def negative(self, a: NumberValue) -> NumberValue:
        if a.const is not None:
            return NumberValue(a.dtype if not a.dtype.is_bool else i64, a.weak or ("int" if a.dtype.is_bool else ""), None, -a.const)
        dtype = i64 if a.dtype.is_bool else compute_dtype(a.dtype)
        return NumberValue(dtype, a.weak, self.b.op("neg", self.use(a, dtype)))

    def invert(self, a: NumberValue) -> NumberValue:
        if a.dtype.is_float:
            raise self.fail(f"'~' takes integers, got {describe(a)}", code="TW009")
        if a.const is not None and a.weak:
            return literal(~int(a.const))
        return NumberValue(a.dtype, a.weak, self.b.op("not", self.use(a)))

    def negation(self, a: NumberValue) -> NumberValue:
        """`not a`"""
        a = self.truth(a)
        if a.const is not None:
            return literal(not a.const)
        return self.num(self.b.op("not", self.use(a)))

    def extreme(self, name: str, numbers: Sequence[NumberValue]) -> NumberValue:
        """`min` or `max` of two or more numbers."""
        result = numbers[0]
        for other in numbers[1:]:
            if result.const is not None and other.const is not None and result.weak and other.weak:
                result = literal((min if name == "min" else max)(result.const, other.const), self.default_float)
                continue
            pair = self._meeting(name, result, other)
            result = self._made(name, pair, result, other)
        return result

    def function(self, opcode: str, *numbers: NumberValue) -> NumberValue:
        """A function of floats: integers become the default float."""
        pair: TypePair = compute_dtype(numbers[0].dtype), numbers[0].weak
        for other in numbers[1:]:
            pair = self._meeting(opcode, NumberValue(*pair), other)
        dtype, weak = pair
        if not dtype.is_float:
            dtype, weak = (
                (self.default_float, "float") if weak or dtype.is_bool else (f64 if dtype.bits > 16 else self.default_float, "")
            )
        return NumberValue(dtype, weak, self.b.op(opcode, *(self.use(n, dtype) for n in numbers)))

    # -- choices --------------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self) -> Iterator[Builder]:
        """Ops go to a builder of their own meanwhile."""
        outer, self.b = self.b, Builder(self.b.span)
        try:
            yield self.b
        finally:
            self.b = outer

    def both(self, a: Callable[[], NumberValue], b: Callable[[], NumberValue], also: bool) -> NumberValue:
        """`a and b` (or `a or b`): the second is looked at only where it counts."""
        first = a()
        if first.const is not None:
            return b() if bool(first.const) is also else literal(not also)
        with self.inside() as inner:
            second = b()
        if _is_quick(inner.ops):
            self.b.ops += inner.ops
            if second.const is not None:
                return first if bool(second.const) is also else literal(not also)
            return self.num(self.b.op("and" if also else "or", self.use(first), self.use(second)))
        with self.inside() as other:
            known = self.b.const(not also, bool_)
        self._in(inner, lambda: self.use(second))
        value = inner.ops.pop().operands[0]
        regions = (value, inner), (known, other)
        return self.num(self._if(self.use(first), *(regions if also else regions[::-1])))

    def _in(self, builder: Builder, make: Callable[[], Value]) -> None:
        """Append to a builder that was left, and hand out the value as its `yield`."""
        outer, self.b = self.b, builder
        try:
            builder.multi("yield", make())
        finally:
            self.b = outer

    def _if(self, condition: Value, then: tuple[Value, Builder], otherwise: tuple[Value, Builder]) -> Value:
        blocks = []
        for value, builder in (then, otherwise):
            builder.multi("yield", value)
            blocks.append(Block((), tuple(builder.ops)))
        result = Value(then[0].type)
        self.b.append(Op("if", (condition,), (result,), {}, tuple(blocks), self.b.span))
        return result

    def choose(self, condition: NumberValue, a: Callable[[], NumberValue], b: Callable[[], NumberValue]) -> NumberValue:
        """`a if condition else b`"""
        condition = self.truth(condition)
        if condition.const is not None:
            return a() if condition.const else b()
        with self.inside() as left:
            first = a()
        with self.inside() as right:
            second = b()
        met = (bool_, "") if first.dtype.is_bool and second.dtype.is_bool else meet(first.pair, second.pair)
        if met is None:
            raise self.fail(
                f"the choice is {first.dtype} or {second.dtype}",
                f"convert one of them, for instance with tw.{first.dtype}(...)",
                "TW006",
            )
        weak = "index" if met[1] == "int" else met[1]
        values = []
        for number, builder in ((first, left), (second, right)):
            self._in(builder, lambda n=number: self.use(n, met[0]))  # type: ignore[misc]
            values.append((builder.ops.pop().operands[0], builder))
        if _is_quick(left.ops) and _is_quick(right.ops):
            self.b.ops += [*left.ops, *right.ops]
            return NumberValue(met[0], weak, self.b.select(self.use(condition), values[0][0], values[1][0]))
        return NumberValue(met[0], weak, self._if(self.use(condition), *values))


def meet(a: TypePair, b: TypePair) -> TypePair | None:
    """The type two numbers meet in; an index stays one beside narrower integers, so that the result may be stored as such."""
    met = join(a, b) if a != b else a
    if met == (i64, "") and "index" in (a[1], b[1]) and (i64, "") not in (a, b):
        return i64, "index"
    return met


def cast_constant(value: Number, dtype: DType) -> Number:
    return bool(value) if dtype.is_bool else float(value) if dtype.is_float else int(value)


def as_dtype(val: Val) -> DType | None:
    """The dtype a value names: one of ours, or NumPy's."""
    if not isinstance(val, Host):
        return None
    if isinstance(val.object, DType):
        return None if val.object.is_complex else val.object  # explicit kernels compute with parts
    if val.object in (int, float, bool):
        return {int: i64, bool: bool_}.get(val.object)
    import numpy as np

    if isinstance(val.object, np.dtype) or (isinstance(val.object, type) and issubclass(val.object, np.generic)):
        return from_numpy(np.dtype(val.object))
    return None


def _is_quick(ops: Sequence[Op]) -> bool:
    """Whether ops may be executed where they were not asked for, and cost little."""
    return len(ops) <= _SHORT and all(
        OPS[op.opcode].is_pure and not op.regions and OPS[op.opcode].group != "function" for op in ops
    )
