"""Divisions and square roots of ordinary numbers: correctly rounded, without a look for others.

In: a `div` or `sqrt` marked `ordinary` (its operands and result are numbers far from both ends of the dtype's range, a dividend may be zero). Out: the
device's approximation and the steps that round it correctly. They are those that ptxas takes for `div.rn` and `sqrt.rn` where its own look at the operands
finds them ordinary; without that look there is no branch either, and neighbours are computed side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, f32, f64
from tilewright.codegen.llvm.emitter import FunctionWriter, intrinsic, literal, llvm_type
from tilewright.ir.nodes import Op
from tilewright.ir.types import Type, Vec, dtype_of

_FIRST = {("div", f32): "rcp.approx.ftz.f", ("div", f64): "rcp.approx.ftz.d", ("sqrt", f32): "rsqrt.approx.ftz.f", ("sqrt", f64): "rsqrt.approx.ftz.d"}


def ordinary(w: FunctionWriter, op: Op, operands: Sequence[str]) -> str | None:
    """The result; None where the op is not marked, or of another dtype."""
    type_ = op.operands[0].type
    dtype = dtype_of(type_)
    if not op.attrs.get("ordinary") or (op.opcode, dtype) not in _FIRST:
        return None
    steps = _Steps(w, type_, dtype)
    first = steps.approximate(f"llvm.nvvm.{_FIRST[op.opcode, dtype]}", operands[-1])
    return steps.quotient(operands[0], operands[1], first) if op.opcode == "div" else steps.root(operands[0], first)


class _Steps:
    def __init__(self, w: FunctionWriter, type_: Type, dtype: DType) -> None:
        self.w, self.type, self.dtype = w, type_, dtype
        self.kind = llvm_type(type_)

    def approximate(self, name: str, value: str) -> str:
        """The device's approximation, element by element."""
        w, scalar = self.w, self.dtype.llvm
        if not isinstance(self.type, Vec):
            return w.call(scalar, name, (scalar, value))
        result = "poison"
        for lane in range(self.type.width):
            element = w.call(scalar, name, (scalar, w.let(f"extractelement {self.kind} {value}, i64 {lane}")))
            result = w.let(f"insertelement {self.kind} {result}, {scalar} {element}, i64 {lane}")
        return result

    def number(self, value: float) -> str:
        return self.w.splat(literal(value, self.dtype), self.type)

    def fma(self, a: str, b: str, c: str) -> str:
        return intrinsic(self.w, "fma", self.type, a, b, c)

    def negative(self, a: str) -> str:
        return self.w.let(f"fneg {self.kind} {a}")

    def product(self, a: str, b: str) -> str:
        return self.w.let(f"fmul {self.kind} {a}, {b}")

    def quotient(self, a: str, b: str, inverse: str) -> str:
        below, one = self.negative(b), self.number(1.0)
        error = self.fma(below, inverse, one)
        if self.dtype is f64:
            # Of 20 bits: once with two terms, and once more.
            inverse = self.fma(inverse, self.fma(error, error, error), inverse)
            error = self.fma(below, inverse, one)
        inverse = self.fma(inverse, error, inverse)
        result = self.product(a, inverse)
        for _ in range(2 if self.dtype is f32 else 1):
            result = self.fma(self.fma(below, result, a), inverse, result)
        return result

    def root(self, a: str, inverse: str) -> str:
        if self.dtype is f64:
            # Of 20 bits: y + (1/2 + 3/8 e) e y, where e = 1 - a y^2.
            error = self.fma(self.negative(a), self.product(inverse, inverse), self.number(1.0))
            inverse = self.fma(self.fma(error, self.number(0.375), self.number(0.5)), self.product(error, inverse), inverse)
        result, half = self.product(a, inverse), self.product(inverse, self.number(0.5))
        return self.fma(self.fma(self.negative(result), result, a), half, result)
