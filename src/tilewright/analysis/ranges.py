"""Index ranges: between which symbolic sizes an index value lies.

Sizes are never negative, so `a <= b` is proven when every factor of `b - a` is non-negative. A kernel may know more: its attribute
`least` says how large some sizes, or products of them, are at least. Used to drop bounds tests that always hold and to choose narrower forms. Values without
a known range are simply absent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from weakref import WeakKeyDictionary

from tilewright.base.intervals import Interval, constant_floor
from tilewright.base.sizes import ZERO, Size, SizeCall
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import INDEX, Tensor

Range = Interval[Size]
_LARGE = 1 << 31
"""Factors from which on products of sizes may wrap around."""


def surely_not_negative(size: Size, least: Mapping[str, int] | None = None, extents: Collection[SizeCall] = ()) -> bool:
    """Whether it is >= 0 for all sizes: names count as >= 0, or as `least` says, and calls where what they are made of says so. `extents` are calls that
    extents of arrays are made of, which a call of the kernel has checked."""

    def is_trusted(call: SizeCall) -> bool:
        if call in extents:
            return True
        a, b = (surely_not_negative(s, least, extents) for s in (call.a, call.b))
        return a or b if call.op == "max" else b if call.op == "mod" else a and b

    floor = constant_floor(size, least, is_trusted)
    if floor is not None and floor >= 0:
        return True
    for lower in (_without_quotients(size), *_without_smallest(size)):
        floor = constant_floor(lower, least, is_trusted) if lower is not size else None
        if floor is not None and floor >= 0:
            return True
    return False


def _without_smallest(size: Size) -> list[Size]:
    """At most as large: `-min(a, b)` is at least `-a`, and at least `-b`."""
    for monomial, factor in size.terms:
        call = monomial[0] if len(monomial) == 1 else None
        if isinstance(call, SizeCall) and call.op == "min" and factor < 0:
            rest = size - Size(((monomial, factor),))
            return [lower for one in (call.a, call.b) for way in [rest + one * factor] for lower in (way, *_without_smallest(way))]
    return []


def _without_quotients(size: Size) -> Size:
    """At most as large: `-c * (a // c)` is at least `-a`."""
    found = size
    for monomial, factor in size.terms:
        call = monomial[0] if len(monomial) == 1 else None
        if not isinstance(call, SizeCall) or call.op != "floordiv" or factor >= 0:
            continue
        divisor = call.b.constant
        if divisor is not None and divisor > 0 and factor % divisor == 0:
            found = found - Size(((monomial, factor),)) + call.a * (factor // divisor)
    return found


def surely_at_most(a: Size, b: Size, least: Mapping[str, int] | None = None, extents: Collection[SizeCall] = ()) -> bool:
    return surely_not_negative(b - a, least, extents)


def checked_extents(kernel: Kernel) -> frozenset[SizeCall]:
    """The calls that extents of the kernel's arrays are made of."""
    shapes = (size for param in kernel.params if isinstance(param.type, Tensor) for size in param.type.shape)
    return frozenset(atom for size in shapes for monomial, _ in size.terms for atom in monomial if isinstance(atom, SizeCall))


def least_sizes(kernel: Kernel) -> dict[str, int]:
    """How large sizes are at least, where the kernel was made for large ones only."""
    declared = kernel.attrs.get("least", ())
    assert isinstance(declared, tuple)
    least: dict[str, int] = {}
    for entry in declared:
        assert isinstance(entry, tuple) and isinstance(entry[0], str) and isinstance(entry[1], int)
        least[entry[0]] = entry[1]
    return least


_known: WeakKeyDictionary[Kernel, dict[Value, Range]] = WeakKeyDictionary()


def analyse(kernel: Kernel, given: Mapping[Value, Range] | None = None) -> dict[Value, Range]:
    """The ranges of index values; those of some parameters may be given. The result is the caller's own."""
    if given:
        return _analysed(kernel, given)
    found = _known.get(kernel)
    if found is None:
        found = _known[kernel] = _analysed(kernel, {})
    return dict(found)


def _analysed(kernel: Kernel, given: Mapping[Value, Range]) -> dict[Value, Range]:
    known: dict[Value, Range] = dict(given)
    cluster = kernel.attrs.get("cluster", 1)
    assert isinstance(cluster, int)
    _block(kernel.body, known, {"thread_id": kernel.threads, "cluster_rank": cluster})
    return known


def _block(block: Block, known: dict[Value, Range], counts: Mapping[str, int]) -> None:
    for op in block.ops:
        if op.opcode in ("parallel", "reduce"):
            for extent, index in zip(op.operands, op.regions[0].args, strict=True):
                if extent in known:
                    known[index] = Interval(ZERO, known[extent].high - 1)
        elif op.opcode == "for":
            low, high = known.get(op.operands[0]), known.get(op.operands[1])
            if low and high:
                known[op.regions[0].args[0]] = Interval(low.low, high.high - 1)
        for region in op.regions:
            _block(region, known, counts)
        if len(op.results) == 1 and (op.results[0].type == INDEX or op.opcode == "cluster_rank"):
            reach = _range(op, known, counts)
            if reach is not None and not _wraps(reach):
                known[op.results[0]] = reach


def _wraps(reach: Range) -> bool:
    """Whether numbers in it may be too large for 64 bits."""
    return any(abs(factor) >= _LARGE for end in (reach.low, reach.high) for monomial, factor in end.terms if monomial)


def _range(op: Op, known: dict[Value, Range], counts: Mapping[str, int]) -> Range | None:
    if op.opcode == "const":
        value = Size.of(int(op.attrs["value"]))  # type: ignore[arg-type]
        return Interval(value, value)
    if op.opcode == "size":
        size = op.attrs["value"]
        assert isinstance(size, Size)
        return Interval(size, size)
    if counts.get(op.opcode):
        return Interval(ZERO, Size.of(counts[op.opcode] - 1))
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
        return a + b
    if op.opcode == "sub":
        return a - b
    if all(surely_not_negative(s) for s in (a.low, b.low)):
        return Interval(a.low * b.low, a.high * b.high)
    for one, other in ((a, b), (b, a)):
        factor = other.point
        if factor is not None and factor.constant is not None and factor.constant <= 0:
            return one.scaled(factor, -1)
    return None


def _of_bits(opcode: str, operands: list[Range | None]) -> Range | None:
    """A number cut to its low bits, or shifted down."""
    value, constant = operands
    point = constant.point if constant is not None else None
    number = point.constant if point is not None else None
    if number is None or number < 0:
        return None
    if opcode == "and":
        return Interval(ZERO, Size.of(number))
    if value is None or value.high.constant is None or not surely_not_negative(value.low):
        return None
    return Interval(ZERO, Size.of(value.high.constant >> number))
