"""Views of memory: another shape of the same elements, as index arithmetic.

In: an array's shape, the places of its elements (`AffineIndex`), and another shape. Out: extents and places for that shape, or None where the elements
do not lie so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from tilewright.tree.block_graph import AffineIndex

Shape = tuple[int, ...]
Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@functools.lru_cache
def axis_groups(shape: Shape, other: Shape) -> Groups | None:
    """Axes of an array and of one of another shape, in groups of as many elements."""
    if 0 in other or not shape or not other:
        return None
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(shape) and j < len(other):
        first, second = i, j
        here, there = shape[i], other[j]
        i, j = i + 1, j + 1
        while here != there:
            if here < there:
                here, i = here * shape[i], i + 1
            else:
                there, j = there * other[j], j + 1
        found.append((tuple(range(first, i)), tuple(range(second, j))))
    # What is left are axes of one element.
    last = found[-1]
    found[-1] = (*last[0], *range(i, len(shape))), (*last[1], *range(j, len(other)))
    return tuple(found)


@functools.lru_cache
def reshaped(
    shape: Shape, other: Shape, extents: tuple[int | None, ...], places: tuple[AffineIndex, ...]
) -> tuple[tuple[int | None, ...], tuple[AffineIndex, ...]] | None:
    """Extents and places of another shape; None where the elements do not lie so."""
    new: list[int | None] = []
    found = [AffineIndex(p.offset, ()) for p in places]
    for before, after in axis_groups(shape, other) or ():
        steps = _merged(before, shape, places)
        if steps is None:
            return None
        real = [axis for axis in before if shape[axis] != 1] or [before[0]]
        new += (
            [extents[real[0]] if len(real) == 1 else other[after[0]]] if len(after) == 1 else [other[n] for n in after]
        )
        for n in after:
            apart = prod(other[m] for m in after if m > n)
            found = [AffineIndex(p.offset, (*p.steps, s * apart)) for p, s in zip(found, steps, strict=True)]
    return tuple(new), tuple(found)


def _merged(axes: Sequence[int], shape: Shape, places: Sequence[AffineIndex]) -> list[int] | None:
    """The step along each axis of memory of these axes as one; None where they are none."""
    real = [a for a in axes if shape[a] != 1] or list(axes[-1:])
    for first, second in pairwise(real):
        if any(place.steps[first] != place.steps[second] * shape[second] for place in places):
            return None
    return [place.steps[real[-1]] for place in places]
