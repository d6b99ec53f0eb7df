"""Several compute blocks as one function: what each computes, and where it finds what others have computed.

A `BlockGraph` function has parameters like any other, and parts in place of a body. What a part makes is a *value*; values are numbered in the order of
the parts. A value lies in memory with axes of its own, and every element of an array, when it is stored and when it is read through a view, has a
`AffineIndex` along each of them: an offset, and a step for each index. Extents are numbers where a view depends on them, and None where an axis is that of
the memory, whatever its extent.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tilewright.base.record import record
from tilewright.tree.syntax import Function


class AffineIndex(NamedTuple):
    """The index along one axis of memory: `offset + sum(step * index)`."""

    offset: int
    steps: tuple[int, ...]

    @property
    def axis(self) -> int | None:
        """The index that it is, where it is just one."""
        if self.offset or self.steps.count(0) != len(self.steps) - 1 or 1 not in self.steps:
            return None
        return self.steps.index(1)


class BlockView(NamedTuple):
    """An array whose elements are those of a value. `extents` has its axes, None where one is just an axis of the memory."""

    value: int
    extents: tuple[int | None, ...]
    places: tuple[AffineIndex, ...]


class StorageLayout(NamedTuple):
    """How a value lies in memory: the extents there, and the places of what is stored (`stored` has the extents of that)."""

    extents: tuple[int | None, ...]
    stored: tuple[int | None, ...]
    places: tuple[AffineIndex, ...]


@record
class BlockCall:
    """A block, what its parameters are (a parameter of the whole, or a view), and how its results lie in memory."""

    function: Function
    args: tuple[str | BlockView, ...]
    kept: tuple[StorageLayout, ...]


@record
class BlockGraph(Function):
    """Parts in order; `results` are the values that leave it."""

    parts: tuple[BlockCall, ...] = ()
    results: tuple[int, ...] = ()


@functools.cache
def straight(rank: int) -> tuple[AffineIndex, ...]:
    """Every index along its own axis."""
    return tuple(AffineIndex(0, tuple(int(i == axis) for i in range(rank))) for axis in range(rank))


def composed(outer: tuple[AffineIndex, ...], inner: tuple[AffineIndex, ...]) -> tuple[AffineIndex, ...]:
    """Places by way of others: `inner` gives the indices of `outer`."""
    found: list[AffineIndex] = []
    for place in outer:
        offset = place.offset + sum(s * p.offset for s, p in zip(place.steps, inner, strict=True))
        ranks = len(inner[0].steps) if inner else 0
        steps = tuple(sum(s * p.steps[i] for s, p in zip(place.steps, inner, strict=True)) for i in range(ranks))
        found.append(AffineIndex(offset, steps))
    return tuple(found)
