"""Index ranges: between which symbolic sizes an index value lies.

Sizes are never negative, so `a <= b` is proven when every factor of `b - a` is non-negative. Used to drop bounds tests that
always hold and to choose narrower forms. Values without a known range are simply absent.
"""

from __future__ import annotations

from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import INDEX


@record
class Range:
    """Both ends included."""

    low: Size
    high: Size


def surely_not_negative(size: Size) -> bool:
    """Whether it is >= 0 for all sizes (names count as >= 0; opaque calls of such are too)."""
    return all(factor >= 0 for _, factor in size.terms)


def surely_at_most(a: Size, b: Size) -> bool:
    return surely_not_negative(b - a)


def analyse(kernel: Kernel) -> dict[Value, Range]:
    known: dict[Value, Range] = {}
    _block(kernel.body, known)
    return known


def _block(block: Block, known: dict[Value, Range]) -> None:
    for op in block.ops:
        if op.opcode in ("parallel", "reduce"):
            for extent, index in zip(op.operands, op.regions[0].args, strict=True):
                if extent in known:
                    known[index] = Range(ZERO, known[extent].high - 1)
        elif op.opcode == "for":
            low, high = known.get(op.operands[0]), known.get(op.operands[1])
            if low and high:
                known[op.regions[0].args[0]] = Range(low.low, high.high - 1)
        for region in op.regions:
            _block(region, known)
        if len(op.results) == 1 and op.results[0].type == INDEX:
            found = _range(op, known)
            if found:
                known[op.results[0]] = found


def _range(op: Op, known: dict[Value, Range]) -> Range | None:
    if op.opcode == "const":
        value = Size.of(int(op.attrs["value"]))  # type: ignore[arg-type]
        return Range(value, value)
    if op.opcode == "size":
        size = op.attrs["value"]
        assert isinstance(size, Size)
        return Range(size, size)
    operands = [known.get(v) for v in op.operands]
    if any(o is None for o in operands) or op.opcode not in ("add", "sub", "mul"):
        return None
    a, b = operands
    assert a is not None and b is not None
    if op.opcode == "add":
        return Range(a.low + b.low, a.high + b.high)
    if op.opcode == "sub":
        return Range(a.low - b.high, a.high - b.low)
    if all(surely_not_negative(s) for s in (a.low, b.low)):
        return Range(a.low * b.low, a.high * b.high)
    return None
