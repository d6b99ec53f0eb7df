"""What an integer value is surely a multiple of: for aligned vector access.

Works at the tile and thread stages. A value's divisor is a positive integer that divides it in every execution; 0 has
divisor 0 (everything divides it), and 1 says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import gcd

from tilewright.base.sizes import ZERO, Size, SizeCall, product
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.types import Scalar

Facts = tuple[tuple[str, int], ...]
"""What names are multiples of."""


def of_size(size: Size, facts: Mapping[str, int]) -> int:
    """The largest divisor known of a symbolic size."""
    return _of_size(size, tuple(facts.items()))


@functools.lru_cache(maxsize=1 << 13)
def _of_size(size: Size, facts: Facts) -> int:
    """The same. A program asks for the same sizes again and again, and they are made of each other."""
    quotients = {atom: q for monomial, _ in size.terms for atom in monomial if (q := _exact_quotient(atom, facts)) is not None}
    if quotients:
        names = {atom: f"{atom}/" for atom in quotients}
        facts = (*facts, *((names[atom], known) for atom, (known, _) in quotients.items()))
        size = sum(
            (product([Size.of(names[a]) + quotients[a][1] if a in quotients else Size((((a,), 1),)) for a in monomial]) * factor for monomial, factor in size.terms),
            ZERO,
        )  # fmt: skip
    total, divisors = 0, dict(facts)
    for monomial, factor in size.terms:
        known = abs(factor)
        for atom in monomial:
            known *= divisors.get(atom, 1) if isinstance(atom, str) else _of_call(atom, facts)
        total = gcd(total, known)
    return total


def _exact_quotient(atom: str | SizeCall, facts: Facts) -> tuple[int, int] | None:
    """`floordiv(a + c, n)` where `n` surely divides `a`: a divisor of `a / n`, and `c // n`. Results of a window that steps by `n` are so many."""
    divisor = atom.b.constant if isinstance(atom, SizeCall) and atom.op == "floordiv" else None
    if not isinstance(atom, SizeCall) or divisor is None or divisor <= 0:
        return None
    constant = sum(factor for monomial, factor in atom.a.terms if not monomial)
    known = _of_size(atom.a - constant, facts)
    return (known // divisor, constant // divisor) if known and known % divisor == 0 else None


def _of_call(atom: SizeCall, facts: Facts) -> int:
    if atom.op in ("min", "max"):
        return gcd(_of_size(atom.a, facts), _of_size(atom.b, facts)) or 1
    divisor = atom.b.constant
    if atom.op == "floordiv" and divisor is not None and divisor > 0:
        known = _of_size(atom.a, facts)
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
