"""Floor division and modulo of integers -> SPIR-V; by zero they give zero. In: ids of two numbers or vectors, and what they are. Out: the result's id."""

from __future__ import annotations

from typing import Protocol

from tilewright.codegen.spirv.module import ModuleText


class InstructionText(Protocol):
    """What divisions need of the writer of a function."""

    module: ModuleText

    def let(self, op: str, kind: str, *operands: str) -> str:
        """Append an instruction and name its result."""


def floor_divide(w: InstructionText, a: str, b: str, element: str, width: int, signed: bool, modulo: bool) -> str:
    module = w.module
    kind, truth = module.type(element, width), module.type("bool", width)

    def number(value: int) -> str:
        return module.constant(element, value, width)

    divisor = module.value_of(b) if width == 1 else None
    if isinstance(divisor, int) and divisor > 0:
        if divisor & (divisor - 1) == 0:
            if modulo:
                return w.let("OpBitwiseAnd", kind, a, number(divisor - 1))
            return w.let("OpShiftRightArithmetic" if signed else "OpShiftRightLogical", kind, a, number(divisor.bit_length() - 1))
        if not signed:
            return w.let("OpUMod" if modulo else "OpUDiv", kind, a, b)
        return _signed(w, a, b, element, width, modulo)
    zero = number(0)
    nothing = w.let("OpIEqual", truth, b, zero)
    safe = w.let("OpSelect", kind, nothing, number(1), b)
    if not signed:
        return w.let("OpSelect", kind, nothing, zero, w.let("OpUMod" if modulo else "OpUDiv", kind, a, safe))
    # The smallest integer over -1 overflows: divide by 1 and negate instead.
    minus = w.let("OpIEqual", truth, b, number(-1))
    safe = w.let("OpSelect", kind, minus, number(1), safe)
    found = _signed(w, a, safe, element, width, modulo)
    if not modulo:
        found = w.let("OpSelect", kind, minus, w.let("OpSNegate", kind, a), found)
    return w.let("OpSelect", kind, nothing, zero, found)


def _signed(w: InstructionText, a: str, b: str, element: str, width: int, modulo: bool) -> str:
    """Of a divisor that is neither 0 nor -1."""
    module = w.module
    kind, truth = module.type(element, width), module.type("bool", width)
    zero = module.constant(element, 0, width)
    quotient = w.let("OpSDiv", kind, a, b)
    rest = w.let("OpISub", kind, a, w.let("OpIMul", kind, quotient, b))
    differ = w.let("OpSLessThan", truth, w.let("OpBitwiseXor", kind, rest, b), zero)
    adjust = w.let("OpLogicalAnd", truth, w.let("OpINotEqual", truth, rest, zero), differ)
    if modulo:
        return w.let("OpSelect", kind, adjust, w.let("OpIAdd", kind, rest, b), rest)
    return w.let("OpSelect", kind, adjust, w.let("OpISub", kind, quotient, module.constant(element, 1, width)), quotient)
