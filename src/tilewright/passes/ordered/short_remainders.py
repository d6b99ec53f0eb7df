"""Remainders of numbers that are surely less than twice the divisor become a comparison and a subtraction. In and out: a kernel at the thread stage.

A checksum or a counter that wraps around carries a remainder from turn to turn, and each turn has to wait for the one before: a product and three more ops of a remainder take longer than
a comparison. What numbers may be follows from constants, widths, masks and other remainders; what a loop carries, from its beginning and from what a turn hands on.

    for … (%i, %a) { %s = add %a, (cast %byte); %r = mod %s, 65521; yield %r }   ->   %r = select (%s < 65521), %s, (%s - 65521)
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import dtype_of

Range = tuple[int, int]
"""The least and the largest value."""


def short_remainders(kernel: Kernel) -> Kernel:
    """The kernel with short forms of remainders."""
    if not any(op.opcode == "mod" and dtype_of(op.results[0].type).is_int for op in walk(kernel.body)):
        return kernel
    ranges = _Ranges(kernel)
    small = {op.results[0] for op in walk(kernel.body) if op.opcode == "mod" and ranges.is_short(op)}

    def shorter(b: Builder, op: Op) -> list[Value] | None:
        if op.opcode != "mod" or op.results[0] not in small:
            return None
        number, divisor = op.operands
        return [b.select(b.op("lt", number, divisor), number, b.sub(number, divisor))]

    return rewrite(kernel, shorter) if small else kernel


class _Ranges:
    """What values of a kernel may be."""

    def __init__(self, kernel: Kernel) -> None:
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.carried: dict[Value, tuple[Value, Value]] = {}
        """Of what a loop carries: where it begins, and what a turn hands on."""
        self.found: dict[Value, Range] = {}
        for op in walk(kernel.body):
            if op.opcode == "for":
                body = op.regions[0]
                self.carried |= {arg: (begin, on) for arg, begin, on in zip(body.args[1:], op.operands[3:], body.yields, strict=True)}
                self.carried |= {r: (begin, on) for r, begin, on in zip(op.results, op.operands[3:], body.yields, strict=True)}

    def is_short(self, op: Op) -> bool:
        number, divisor = op.operands
        wanted = self.constant(divisor)
        if wanted is None or wanted <= 0 or not dtype_of(number.type).is_int:
            return False
        low, high = self.of(number)
        return low >= 0 and high < 2 * wanted

    def constant(self, value: Value) -> int | None:
        op = self.made.get(value)
        if op is not None and op.opcode == "broadcast":
            return self.constant(op.operands[0])
        number = op.attrs["value"] if op is not None and op.opcode == "const" else None
        return number if isinstance(number, int) and not isinstance(number, bool) else None

    def of(self, value: Value, depth: int = 0) -> Range:
        """What an integer may be; all of its dtype where nothing is known."""
        if value in self.found:
            return self.found[value]
        dtype = dtype_of(value.type)
        whole = _range_of(dtype)
        if not dtype.is_int or depth > 12:
            return whole
        self.found[value] = whole  # for what asks for itself
        low, high = self._of(value, depth, whole)
        if low < whole[0] or high > whole[1]:
            low, high = whole
        self.found[value] = (low, high)
        return low, high

    def _of(self, value: Value, depth: int, whole: Range) -> Range:
        if value in self.carried:
            ranges = [self.of(v, depth + 1) for v in self.carried[value]]
            return min(r[0] for r in ranges), max(r[1] for r in ranges)
        op = self.made.get(value)
        number = self.constant(value)
        if number is not None:
            return number, number
        if op is None:
            return whole
        if op.opcode == "cast" and dtype_of(op.operands[0].type).is_int:
            return self.of(op.operands[0], depth + 1)
        if op.opcode == "cast" and dtype_of(op.operands[0].type).is_bool:
            return 0, 1
        if op.opcode in ("broadcast", "extract"):
            return self.of(op.operands[0], depth + 1)
        if op.opcode == "mod":
            divisor = self.constant(op.operands[1])
            return (0, divisor - 1) if divisor is not None and divisor > 0 else whole
        if len(op.operands) == 2 and all(dtype_of(v.type).is_int for v in op.operands):
            return self._of_two(op, depth, whole)
        if op.opcode == "select":
            ranges = [self.of(v, depth + 1) for v in op.operands[1:]]
            return min(r[0] for r in ranges), max(r[1] for r in ranges)
        return whole

    def _of_two(self, op: Op, depth: int, whole: Range) -> Range:
        (a, b), (c, d) = (self.of(v, depth + 1) for v in op.operands)
        if op.opcode == "add":
            return a + c, b + d
        if op.opcode == "sub":
            return a - d, b - c
        if op.opcode == "mul":
            corners = (a * c, a * d, b * c, b * d)
            return min(corners), max(corners)
        if op.opcode == "and" and (c >= 0 or a >= 0):
            return 0, min(end for start, end in ((a, b), (c, d)) if start >= 0)
        if op.opcode == "shr" and a >= 0 and c == d and 0 <= c < 64:
            return a >> c, b >> c
        if op.opcode in ("min", "max"):
            pick = min if op.opcode == "min" else max
            return pick(a, c), pick(b, d)
        return whole


def _range_of(dtype: object) -> Range:
    kinds: Mapping[str, Range] = {f"{kind}{bits}": ((0, 2**bits - 1) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)) for kind in "iu" for bits in (8, 16, 32, 64)}
    return kinds.get(str(dtype), (-(2**63), 2**64 - 1))
