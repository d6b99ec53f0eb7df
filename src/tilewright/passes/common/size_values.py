"""Symbolic sizes as IR values, where some of their names are values of the kernel.

In: a builder, a size, and the values of some names. Out: the value of the size. Names without a value stay symbolic; what has none of the others is one
`size` op.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.base.sizes import ONE, ZERO, Size, SizeCall
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value


def size_value(b: Builder, size: Size, values: Mapping[str, Value]) -> Value:
    """The value of a size."""
    if not size.names & values.keys():
        return b.index(size)
    plain = ZERO
    total: Value | None = None
    for monomial, factor in size.terms:
        rest, moving = Size.of(factor), []
        for atom in monomial:
            names = {atom} if isinstance(atom, str) else atom.a.names | atom.b.names
            if names & values.keys():
                moving.append(atom)
            else:
                rest = rest * Size((((atom,), 1),))
        if not moving:
            plain = plain + rest
            continue
        term: Value | None = None if rest == ONE else b.index(rest)
        for atom in moving:
            value = values[atom] if isinstance(atom, str) else _call(b, atom, values)
            term = value if term is None else b.mul(term, value)
        assert term is not None
        total = term if total is None else b.add(total, term)
    assert total is not None
    return total if plain == ZERO else b.add(total, b.index(plain))


def _call(b: Builder, call: SizeCall, values: Mapping[str, Value]) -> Value:
    left, right = size_value(b, call.a, values), size_value(b, call.b, values)
    if call.op != "ceildiv":
        return b.op(call.op, left, right)
    zero = b.index(0)
    return b.sub(zero, b.op("floordiv", b.sub(zero, left), right))
