"""What an integer value is surely a multiple of: for aligned vector access.

Works at the tile and thread stages. A value's divisor is a positive integer that divides it in every execution; 0 has
divisor 0 (everything divides it), and 1 says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from tilewright.base.sizes import Size, SizeCall
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Scalar


def of_size(size: Size, facts: Mapping[str, int]) -> int:
    """The largest divisor known of a symbolic size."""
    total = 0
    for monomial, factor in size.terms:
        known = abs(factor)
        for atom in monomial:
            known *= facts.get(atom, 1) if isinstance(atom, str) else _of_call(atom, facts)
        total = gcd(total, known)
    return total


def _of_call(atom: SizeCall, facts: Mapping[str, int]) -> int:
    if atom.op in ("min", "max"):
        return gcd(of_size(atom.a, facts), of_size(atom.b, facts)) or 1
    divisor = atom.b.constant
    if atom.op == "floordiv" and divisor is not None and divisor > 0:
        known = of_size(atom.a, facts)
        return known // divisor if known % divisor == 0 else 1
    return 1


def analyse(kernel: Kernel) -> dict[Value, int]:
    """Divisors of all scalar integer values of the kernel."""
    known: dict[Value, int] = {}
    _block(kernel.body, known, kernel.facts)
    return known


def _block(block: Block, known: dict[Value, int], facts: Mapping[str, int]) -> None:
    for op in block.ops:
        if op.opcode == "for":
            lo, _, step = op.operands[:3]
            known[op.regions[0].args[0]] = gcd(known.get(lo, 1), known.get(step, 1))
        for region in op.regions:
            _block(region, known, facts)
        for result in op.results:
            if isinstance(result.type, Scalar) and result.type.dtype.is_int:
                known[result] = _divisor(op, known, facts)


def _divisor(op: Op, known: dict[Value, int], facts: Mapping[str, int]) -> int:
    if op.opcode == "const":
        value = op.attrs["value"]
        return abs(value) if isinstance(value, int) else 1
    if op.opcode == "size":
        value = op.attrs["value"]
        assert isinstance(value, Size)
        return of_size(value, facts)
    operands = [known.get(v, 1) for v in op.operands]
    if op.opcode == "mul":
        return operands[0] * operands[1]
    if op.opcode in ("add", "sub", "min", "max", "mod"):
        return gcd(operands[0], operands[1])
    if op.opcode == "select":
        return gcd(operands[1], operands[2])
    if op.opcode == "neg":
        return operands[0]
    if op.opcode == "cast":
        # A narrowing cast wraps, which keeps only divisors that are powers of two.
        return operands[0] & -operands[0]
    return 1
