"""Arithmetic written as expressions: what the expansions of the math functions are made of.

`Terms` wraps a `Builder` for one container (a scalar, a vec or a tile like `like`): plain Python numbers become constants of
the other operand's dtype in that container, each made once. Nothing here is reassociated: the order written is the order of
the roundings, which the error bounds rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from tilewright.base.dtypes import DType, f32, f64, i32, i64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Scalar, Vec, dtype_of

Term = Value | float | int


class Terms:
    """Builds the ops of one expansion. `hardware` says that the target has `exp2_approx`, `scales` that it has `ldexp`, `plain` that it has no f64 and that its
    `fma` may round twice: one on which a bound rests then says that it must not. `branches` says that what few arguments need stands in a branch of its own; what several
    functions of one argument have in common is kept there, by block and argument."""

    def __init__(
        self, builder: Builder, like: Value, hardware: bool = False, scales: bool = False, plain: bool = False,
        branches: dict[tuple[Builder, Value], tuple[Value, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.builder = builder
        self.like = like
        self.hardware = hardware
        self.scales = scales
        self.plain = plain
        self.branches = branches
        self._numbers: dict[tuple[str, str], Value] = {}

    @property
    def is_scalar(self) -> bool:
        return isinstance(self.like.type, Scalar)

    def either(self, usual: Value, quick: Callable[[Terms], Sequence[Value]], rare: Callable[[Terms], Sequence[Value]]) -> tuple[Value, ...]:
        """What `quick` gives where the condition holds for all elements, else what `rare` does."""
        whole = self.builder.op("every", usual) if isinstance(usual.type, Vec) else usual

        def inside(write: Callable[[Terms], Sequence[Value]]) -> Callable[[Builder], Sequence[Value]]:
            return lambda builder: write(Terms(builder, self.like, self.hardware, self.scales, self.plain))

        return tuple(self.builder.if_(whole, inside(quick), inside(rare)))

    # -- constants --------------------------------------------------------------------------------------------------

    def number(self, value: float | int, dtype: DType) -> Value:
        """A constant, rounded to the dtype here, so that every reader of the IR sees the value that is meant."""
        key = (dtype.name, repr(value))
        if key not in self._numbers:
            exact: float | int = float(dtype.numpy.type(value)) if dtype.is_float else _wrapped(int(value), dtype)
            self._numbers[key] = self.builder.like(self.builder.const(exact, dtype), self.like)
        return self._numbers[key]

    def op(self, opcode: str, *terms: Term) -> Value:
        """Any op; numbers take the dtype of the first operand that is a value (not counting a condition)."""
        values = [t for t in terms if isinstance(t, Value)]
        model = values[1] if opcode == "select" and len(values) > 1 else values[0]
        dtype = dtype_of(model.type)
        return self.builder.op(opcode, *(t if isinstance(t, Value) else self.number(t, dtype) for t in terms))

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def add(self, a: Term, b: Term) -> Value:
        return self.op("add", a, b)

    def sub(self, a: Term, b: Term) -> Value:
        return self.op("sub", a, b)

    def mul(self, a: Term, b: Term) -> Value:
        return self.op("mul", a, b)

    def fma(self, a: Term, b: Term, c: Term) -> Value:
        made = self.op("fma", a, b, c)
        if self.plain:
            last = self.builder.ops[-1]
            self.builder.ops[-1] = replace(last, attrs=MappingProxyType({**last.attrs, "once": True}))
        return made

    def product(self, a: Term, b: Term) -> Value:
        """`a * b`, rounded, that no code generator contracts into an fma with what follows: its error is put back."""
        return self.fma(a, b, -0.0)

    def div(self, a: Term, b: Term) -> Value:
        return self.op("div", a, b)

    def neg(self, a: Value) -> Value:
        return self.op("neg", a)

    def abs(self, a: Value) -> Value:
        return self.op("abs", a)

    def shl(self, a: Term, b: Term) -> Value:
        return self.op("shl", a, b)

    def shr(self, a: Term, b: Term) -> Value:
        return self.op("shr", a, b)

    def bit_and(self, a: Term, b: Term) -> Value:
        return self.op("and", a, b)

    def bit_or(self, a: Term, b: Term) -> Value:
        return self.op("or", a, b)

    def xor(self, a: Term, b: Term) -> Value:
        return self.op("xor", a, b)

    def lt(self, a: Term, b: Term) -> Value:
        return self.op("lt", a, b)

    def gt(self, a: Term, b: Term) -> Value:
        return self.op("gt", a, b)

    def eq(self, a: Term, b: Term) -> Value:
        return self.op("eq", a, b)

    def ne(self, a: Term, b: Term) -> Value:
        return self.op("ne", a, b)

    def select(self, condition: Value, a: Term, b: Term, dtype: DType | None = None) -> Value:
        """`dtype` is needed only where both choices are numbers."""
        if dtype is not None:
            a = a if isinstance(a, Value) else self.number(a, dtype)
            b = b if isinstance(b, Value) else self.number(b, dtype)
        return self.op("select", condition, a, b)

    def cast(self, a: Value, dtype: DType) -> Value:
        return self.builder.cast(a, dtype)

    # -- shapes that recur ------------------------------------------------------------------------------------------

    def at_least(self, a: Value, low: float) -> Value:
        """max(a, low), NaN staying NaN: on x86 this order of operands is one instruction."""
        return self.op("max", a, low) if self.hardware else self.select(self.lt(a, low), low, a)

    def at_most(self, a: Value, high: float) -> Value:
        return self.op("min", a, high) if self.hardware else self.select(self.gt(a, high), high, a)

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Horner's rule; the highest power's coefficient first."""
        total: Term = coefficients[0]
        for coefficient in coefficients[1:]:
            total = self.op("fma", total, x, coefficient)
        assert isinstance(total, Value)
        return total

    def bits(self, a: Value) -> Value:
        return self.builder.bitcast(a, i32 if dtype_of(a.type) is f32 else i64)

    def float_bits(self, a: Value) -> Value:
        return self.builder.bitcast(a, f32 if dtype_of(a.type) is i32 else f64)

    def with_sign_of(self, magnitude: Value, sign: Value) -> Value:
        """`magnitude`, positive or of that sign already, with the sign bit of `sign` (so that -0 gives -0)."""
        pattern = self.bits(sign)
        lowest = int(np.iinfo(dtype_of(pattern.type).numpy).min)
        return self.float_bits(self.bit_or(self.bits(magnitude), self.bit_and(pattern, lowest)))

    def two_sum(self, a: Term, b: Term) -> tuple[Value, Value]:
        """The rounded sum and its exact error."""
        total = self.add(a, b)
        part = self.sub(total, a)
        return total, self.add(self.sub(a, self.sub(total, part)), self.sub(b, part))

    def fast_two_sum(self, a: Term, b: Term) -> tuple[Value, Value]:
        """Like `two_sum` where a is zero or not the smaller in magnitude."""
        total = self.add(a, b)
        return total, self.sub(b, self.sub(total, a))

    def two_product(self, a: Term, b: Term) -> tuple[Value, Value]:
        """The rounded product and its exact error."""
        product = self.product(a, b)
        return product, self.fma(a, b, self.neg(product))


def _wrapped(value: int, dtype: DType) -> int:
    """An integer constant given as a bit pattern, in the range of the dtype."""
    low = int(dtype.min_value)
    return (value - low) % (1 << dtype.bits) + low
