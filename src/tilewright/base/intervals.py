"""What can be proven about sizes: their signs, and intervals of numbers and sizes.

Names of sizes stand for extents and are never negative, but for those of numbers that a call gives (`is_number`). Every answer is safe: `False` or `None` means "not proven". The typed tree, the IR's
range analysis and passes that need numbers use this one arithmetic: an `Interval` of sizes is symbolic, one of integers is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, SizeCall, has_numbers, is_number, maximum

# -- signs --------------------------------------------------------------------------------------------------------


def surely_nonnegative(size: Size) -> bool:
    """Whether the size is at least 0 whatever its names are."""
    floor = _floor(size, 4)
    return floor is not None and floor >= 0


def surely_positive(size: Size) -> bool:
    return surely_nonnegative(size - 1)


def surely_negative(size: Size) -> bool:
    return surely_nonnegative(-size - 1)


def sign_of(size: Size) -> int | None:
    """1 for a size that is surely not negative, -1 for one that is surely not positive."""
    return 1 if surely_nonnegative(size) else -1 if surely_nonnegative(-size) else None


def constant_sign(size: Size) -> int | None:
    """As `sign_of`, for constants alone."""
    number = size.constant
    return None if number is None else -1 if number < 0 else 1


def clamped(count: Size) -> Size:
    """The count, or 0 where it could be negative."""
    return count if surely_nonnegative(count) else maximum(count, ZERO)


def constant_floor(
    size: Size, least: Mapping[str, int] | None = None, trusts: Callable[[SizeCall], bool] | None = None
) -> int | None:
    """The constant the size is surely not below, where no other term is negative.

    A name counts as 0, or as `least` says, which may know products of names, too (`a*b`). A call counts as 0 where `trusts` says so; without it, always.
    """
    total = 0
    for monomial, factor in size.terms:
        if not monomial:
            total += factor
        elif any(isinstance(atom, str) and is_number(atom) for atom in monomial) or factor < 0 or (trusts is not None and not all(trusts(atom) for atom in monomial if isinstance(atom, SizeCall))):
            return None
        elif least:
            total += factor * least.get("*".join(map(str, monomial)), 0)
    return total


def _floor(size: Size, depth: int) -> int | None:
    """A lower bound of the size."""
    floor = constant_floor(size, trusts=lambda call: _call_nonnegative(call, depth))
    if floor is not None or not depth:
        return floor
    # Trade one call for a bound of it and look at what all comes to then.
    for monomial, factor in size.terms:
        calls = [a for a in monomial if isinstance(a, SizeCall)]
        if len(calls) != 1:
            continue
        others = tuple(a for a in monomial if a is not calls[0])
        rest = Size(tuple(t for t in size.terms if t != (monomial, factor)))
        for bound in _call_bounds(calls[0], factor):
            floor = _floor(rest + Size(((others, 1),)) * bound, depth - 1)
            if floor is not None:
                return floor
    return None


def _call_nonnegative(call: SizeCall, depth: int) -> bool:
    if not depth:
        return False

    def nonnegative(size: Size) -> bool:
        floor = _floor(size, depth - 1)
        return floor is not None and floor >= 0

    if call.op == "max":
        return nonnegative(call.a) or nonnegative(call.b)
    if call.op == "mod":
        return nonnegative(call.b)
    return nonnegative(call.a) and nonnegative(call.b)


def _call_bounds(call: SizeCall, factor: int) -> list[Size]:
    """Sizes that `factor * call` is surely not smaller than."""
    a, b = call.a, call.b
    divisor = b.constant
    if call.op == "min" and factor < 0:
        return [a * factor, b * factor]
    if call.op == "max" and factor > 0:
        return [a * factor, b * factor]
    if call.op == "mod" and factor < 0 and not has_numbers(b):
        return [maximum(b - 1, ZERO) * factor, b * factor]
    if call.op in ("floordiv", "ceildiv") and divisor and divisor > 0 and factor % divisor == 0:
        each = factor // divisor
        slack = divisor - 1
        if call.op == "floordiv":
            return [a * each if factor < 0 else (a - slack) * each]
        return [a * each if factor > 0 else (a + slack) * each]
    return []


# -- intervals ----------------------------------------------------------------------------------------------------

Number = TypeVar("Number", int, Size)


@record
class Interval(Generic[Number]):
    """From `low` to `high`, both included."""

    low: Number
    high: Number

    @property
    def point(self) -> Number | None:
        """The only number in it."""
        return self.low if self.low == self.high else None

    def __add__(self, other: Interval[Number]) -> Interval[Number]:
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Interval[Number]) -> Interval[Number]:
        return Interval(self.low - other.high, self.high - other.low)

    def __neg__(self) -> Interval[Number]:
        return Interval(-self.high, -self.low)

    def scaled(self, factor: Number, sign: int = 1) -> Interval[Number]:
        """Times a factor of that sign."""
        return Interval(self.low * factor, self.high * factor) if sign > 0 else Interval(self.high * factor, self.low * factor)


def hull(a: Interval[int], b: Interval[int]) -> Interval[int]:
    """The smallest interval with both inside."""
    return Interval(min(a.low, b.low), max(a.high, b.high))


def least_of(a: Interval[int], b: Interval[int]) -> Interval[int]:
    """min of a number from each."""
    return Interval(min(a.low, b.low), min(a.high, b.high))


def largest_of(a: Interval[int], b: Interval[int]) -> Interval[int]:
    """max of a number from each."""
    return Interval(max(a.low, b.low), max(a.high, b.high))


def product(a: Interval[int], b: Interval[int]) -> Interval[int]:
    corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(corners), max(corners))


def quotient(a: Interval[int], b: Interval[int]) -> Interval[int] | None:
    """Floor division by positive numbers."""
    if b.low < 1:
        return None
    corners = [x // y for x in (a.low, a.high) for y in (b.low, b.high)]
    return Interval(min(corners), max(corners))


def remainder(a: Interval[int], b: Interval[int]) -> Interval[int] | None:
    """Of a floor division by positive numbers."""
    if b.low < 1:
        return None
    return Interval(0, min(a.high, b.high - 1) if a.low >= 0 else b.high - 1)


def bit_and(a: Interval[int], b: Interval[int]) -> Interval[int] | None:
    ends = [side.high for side in (a, b) if side.low >= 0]
    return Interval(0, min(ends)) if ends else None


def shift_left(a: Interval[int], b: Interval[int]) -> Interval[int] | None:
    """By a known number of bits of a word."""
    return a.scaled(1 << b.low) if b.low == b.high and 0 <= b.low < 32 else None


def shift_right(a: Interval[int], b: Interval[int]) -> Interval[int] | None:
    """By a known number of bits of a word."""
    return Interval(a.low >> b.low, a.high >> b.low) if b.low == b.high and 0 <= b.low < 32 else None
