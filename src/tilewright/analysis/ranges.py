"""Index ranges: between which symbolic sizes an index value lies.

Sizes are never negative, so `a <= b` is proven when every factor of `b - a` is non-negative. A kernel may know more: its attribute
`least` says how large some sizes are at least. Used to drop bounds tests that always hold and to choose narrower forms. Values without
a known range are simply absent.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import INDEX


@record
class Range:
    """Both ends included."""

    low: Size
    high: Size


def surely_not_negative(size: Size, least: Mapping[str, int] | None = None) -> bool:
    """Whether it is >= 0 for all sizes (names count as >= 0, or as `least` says; opaque calls of such are too)."""
    constant = 0
    for monomial, factor in size.terms:
        if not monomial:
            constant += factor
        elif factor < 0:
            return False
        elif least and len(monomial) == 1 and isinstance(monomial[0], str):
            constant += factor * least.get(monomial[0], 0)
    return constant >= 0


def surely_at_most(a: Size, b: Size, least: Mapping[str, int] | None = None) -> bool:
    return surely_not_negative(b - a, least)


def least_sizes(kernel: Kernel) -> dict[str, int]:
    """How large sizes are at least, where the kernel was made for large ones only."""
    declared = kernel.attrs.get("least", ())
    assert isinstance(declared, tuple)
    found: dict[str, int] = {}
    for entry in declared:
        assert isinstance(entry, tuple) and isinstance(entry[0], str) and isinstance(entry[1], int)
        found[entry[0]] = entry[1]
    return found


def analyse(kernel: Kernel, given: Mapping[Value, Range] | None = None) -> dict[Value, Range]:
    """The ranges of index values; those of some parameters may be given."""
    known: dict[Value, Range] = dict(given or {})
    cluster = kernel.attrs.get("cluster", 1)
    assert isinstance(cluster, int)
    _block(kernel.body, known, {"thread_id": kernel.threads, "cluster_rank": cluster})
    return known


def _block(block: Block, known: dict[Value, Range], counts: Mapping[str, int]) -> None:
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
            _block(region, known, counts)
        if len(op.results) == 1 and (op.results[0].type == INDEX or op.opcode == "cluster_rank"):
            found = _range(op, known, counts)
            if found:
                known[op.results[0]] = found


def _range(op: Op, known: dict[Value, Range], counts: Mapping[str, int]) -> Range | None:
    if op.opcode == "const":
        value = Size.of(int(op.attrs["value"]))  # type: ignore[arg-type]
        return Range(value, value)
    if op.opcode == "size":
        size = op.attrs["value"]
        assert isinstance(size, Size)
        return Range(size, size)
    if counts.get(op.opcode):
        return Range(ZERO, Size.of(counts[op.opcode] - 1))
    operands = [known.get(v) for v in op.operands]
    if op.opcode == "cast":
        return operands[0]
    if op.opcode in ("and", "shr"):
        return _of_bits(op.opcode, operands)
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
    for one, other in ((a, b), (b, a)):
        number = other.low.constant
        if number is not None and number <= 0 and other.high == other.low:
            return Range(one.high * number, one.low * number)
    return None


def _of_bits(opcode: str, operands: list[Range | None]) -> Range | None:
    """A number cut to its low bits, or shifted down."""
    value, constant = operands
    number = constant.high.constant if constant is not None and constant.low == constant.high else None
    if number is None or number < 0:
        return None
    if opcode == "and":
        return Range(ZERO, Size.of(number))
    if value is None or value.high.constant is None or not surely_not_negative(value.low):
        return None
    return Range(ZERO, Size.of(value.high.constant >> number))
