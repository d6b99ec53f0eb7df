"""What the ops before a value say of its range, so that functions leave out the cases that cannot be: `log(1.0 + exp(-abs(x)))` needs no denormals, zeros or negative numbers.

In: a value and the ops that made those before it. Out: whether it is surely on one side of a number, or NaN: every answer allows that.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ir.nodes import Op, Value

_NEVER_NEGATIVE = frozenset({"abs", "exp", "exp2", "exp10", "cosh", "sqrt", "sigmoid"})
_DEPTH = 6
"""Ops that one question goes back, at most."""


def is_at_least(value: Value, limit: float, made: Mapping[Value, Op], depth: int = _DEPTH) -> bool:
    """Whether a float is surely not below a limit, which is 0 or 1."""
    op = made.get(value)
    if op is None or not depth:
        return False
    if op.opcode == "broadcast":
        return is_at_least(op.operands[0], limit, made, depth - 1)
    if op.opcode == "const":
        number = op.attrs["value"]
        return isinstance(number, int | float) and number >= limit
    if op.opcode in ("add", "max"):
        pairs = (op.operands, op.operands[::-1])
        if op.opcode == "max":
            return any(is_at_least(v, limit, made, depth - 1) for v in op.operands)
        return any(is_at_least(a, limit, made, depth - 1) and is_at_least(b, 0.0, made, depth - 1) for a, b in pairs)
    if op.opcode == "fma":
        return op.operands[0] is op.operands[1] and is_at_least(op.operands[2], limit, made, depth - 1)
    return limit <= 0 and (op.opcode in _NEVER_NEGATIVE or (op.opcode == "mul" and op.operands[0] is op.operands[1]))


def is_not_positive(value: Value, made: Mapping[Value, Op]) -> bool:
    """Whether a float is surely not above 0."""
    op = made.get(value)
    return op is not None and op.opcode == "neg" and is_at_least(op.operands[0], 0.0, made)
