"""Sorting a few vectors of unsigned keys without a branch: networks of minima and maxima.

In: 1, 2, 4, 8 or 16 vectors, whose lanes are a power of two. Out: the same keys in order, from the first lane of the first vector on.

Columns of lanes are sorted first, by Batcher's network. Then neighbouring groups of columns, each in order from row to row, are merged
until one group is left. A merge compares the row r with the row that lies as far from the end, its lanes reversed: the smaller keys
stay in the upper rows, and the same is done with either half, down to single rows; there lanes are compared with lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.primitives.code import Code, Num


def sorted_vectors(c: Code, rows: Sequence[Num]) -> list[Num]:
    """The keys of all the vectors in order."""
    vectors, lanes = list(rows), rows[0].width
    for a, b in batcher(len(vectors)):
        vectors[a], vectors[b] = vectors[a].min(vectors[b]), vectors[a].max(vectors[b])
    group = 2
    while group <= lanes:
        vectors = _merged_rows(c, vectors, group)
        vectors = [_exchanged(c, v, lambda lane, span=group: lane ^ (span - 1)) for v in vectors]  # type: ignore[misc]
        distance = group // 4
        while distance:
            vectors = [_exchanged(c, v, lambda lane, step=distance: lane ^ step) for v in vectors]  # type: ignore[misc]
            distance //= 2
        group *= 2
    return vectors


def batcher(count: int) -> list[tuple[int, int]]:
    """Pairs to compare, one after another, that sort so many keys: a power of two."""
    pairs: list[tuple[int, int]] = []
    block = 1
    while block < count:
        step = block
        while step:
            for first in range(step % block, count - step, 2 * step):
                for k in range(first, min(first + step, count - step)):
                    if k // (2 * block) == (k + step) // (2 * block):
                        pairs.append((k, k + step))
            step //= 2
        block *= 2
    return pairs


def _merged_rows(c: Code, vectors: list[Num], group: int) -> list[Num]:
    """Rows of which each has only keys that come before those of the next, in groups of so many lanes."""
    if len(vectors) == 1:
        return vectors
    half, result = len(vectors) // 2, list(vectors)
    for row in range(half):
        other = _lanes(c, vectors[-1 - row], lambda lane: lane ^ (group - 1))
        result[row], result[-1 - row] = vectors[row].min(other), vectors[row].max(other)
    return _merged_rows(c, result[:half], group) + _merged_rows(c, result[half:], group)


def _exchanged(c: Code, vector: Num, partner: Callable[[int], int]) -> Num:
    """Each lane compared with its partner: the lower lane gets the smaller key."""
    other, width = _lanes(c, vector, partner), vector.width
    lanes = tuple(lane if lane < partner(lane) else lane + width for lane in range(width))
    return c.op("rearrange", vector.min(other), vector.max(other), lanes=lanes)


def _lanes(c: Code, vector: Num, source: Callable[[int], int]) -> Num:
    return c.op("rearrange", vector, lanes=tuple(source(lane) for lane in range(vector.width)))
