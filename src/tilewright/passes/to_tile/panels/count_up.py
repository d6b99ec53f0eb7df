"""Indices that count up together, as the digits of one number do.

In: digits, and how many values each has. Out: the digits of the number behind it. The first digit has no end: it goes on.

    digits (2, 6), extents (_, 7)  ->  (3, 0)
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value


def count_up(b: Builder, digits: Sequence[Value], extents: Sequence[Size]) -> list[Value]:
    """The digits of the next number."""
    following: list[Value] = []
    zero, one = b.index(0), b.index(1)
    carry = one
    for position in reversed(range(len(digits))):
        raised = b.add(digits[position], carry)
        if position:
            full = b.op("eq", raised, b.index(extents[position]))
            raised, carry = b.select(full, zero, raised), b.select(full, one, zero)
        following.insert(0, raised)
    return following
