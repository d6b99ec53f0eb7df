"""One piece of memory for the values between the programs of a plan.

In: values with their sizes and lifetimes. Out: an offset for each, and the size of the whole. Values that are needed at the same time do not overlap; the
largest are placed first, each in the lowest gap that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 256


@dataclass(frozen=True)
class Lifetime:
    """A value from the program that makes it to the last one that reads it."""

    value: int
    nbytes: int
    first: int
    last: int

    @property
    def room(self) -> int:
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


def place_lifetimes(lifetimes: Sequence[Lifetime]) -> tuple[dict[int, int], int]:
    """Offsets by value, and bytes of all."""
    placed: list[tuple[Lifetime, int]] = []
    for item in sorted(lifetimes, key=lambda i: (-i.room, i.first, i.value)):
        taken = sorted((at, at + other.room) for other, at in placed if other.first <= item.last and item.first <= other.last)
        offset = 0
        for start, end in taken:
            if offset + item.room <= start:
                break
            offset = max(offset, end)
        placed.append((item, offset))
    return {item.value: offset for item, offset in placed}, max((at + item.room for item, at in placed), default=0)


def lower_bound(lifetimes: Sequence[Lifetime]) -> int:
    """Bytes that are needed at the same time, at most."""
    steps = range(max((item.last for item in lifetimes), default=-1) + 1)
    return max((sum(item.room for item in lifetimes if item.first <= step <= item.last) for step in steps), default=0)


Offsets = Mapping[int, int]
