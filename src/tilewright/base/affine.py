"""Affine forms: `constant + Σ factor * index`, with symbolic sizes as constant and factors.

The typed tree makes them of index expressions (`tree/bounds.py`), the IR of integer values (`analysis/affine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tilewright.base.intervals import Interval
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size

Index = TypeVar("Index", bound=Hashable)


@record
class AffineForm(Generic[Index]):
    """Indices are compared by identity; factors are never zero."""

    factors: tuple[tuple[Index, Size], ...] = ()
    constant: Size = ZERO

    def factor(self, index: Index) -> Size:
        for known, factor in self.factors:
            if known is index:
                return factor
        return ZERO

    @property
    def values(self) -> tuple[Index, ...]:
        """The indices it is made of."""
        return tuple(index for index, _ in self.factors)

    @property
    def bare(self) -> Index | None:
        """The index when the form is just that index."""
        if self.constant == ZERO and len(self.factors) == 1 and self.factors[0][1] == ONE:
            return self.factors[0][0]
        return None

    def is_just(self, index: Index) -> bool:
        """Whether it is that index itself."""
        return self.bare is index

    def plus(self, other: AffineForm[Index], scale: Size = ONE) -> AffineForm[Index]:
        factors = dict(self.factors)
        for index, factor in other.factors:
            factors[index] = factors.get(index, ZERO) + factor * scale
        return AffineForm(tuple((i, f) for i, f in factors.items() if f != ZERO), self.constant + other.constant * scale)

    def minus(self, other: AffineForm[Index]) -> AffineForm[Index]:
        return self.plus(other, -ONE)

    def times(self, scale: Size) -> AffineForm[Index]:
        factors = ((index, factor * scale) for index, factor in self.factors)
        return AffineForm(tuple((i, f) for i, f in factors if f != ZERO), self.constant * scale)

    def interval(
        self, interval_of: Callable[[Index], Interval[Size] | None], sign: Callable[[Size], int | None]
    ) -> Interval[Size] | None:
        """Between which sizes it lies, where intervals of its indices and signs of its factors are known."""
        total = Interval(self.constant, self.constant)
        for index, factor in self.factors:
            reach, direction = interval_of(index), sign(factor)
            if reach is None or direction is None:
                return None
            total = total + reach.scaled(factor, direction)
        return total


def combined(opcode: str, operands: list[AffineForm[Index] | None]) -> AffineForm[Index] | None:
    """`add`, `sub`, `neg` or `mul` of forms, where that is one."""
    first, last = operands[0], operands[-1]
    if first is None or last is None:
        return None
    if opcode == "neg":
        return first.times(-ONE)
    if opcode == "add":
        return first.plus(last)
    if opcode == "sub":
        return first.minus(last)
    if opcode == "mul" and not first.factors:
        return last.times(first.constant)
    if opcode == "mul" and not last.factors:
        return first.times(last.constant)
    return None
