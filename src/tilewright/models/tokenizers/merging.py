"""Pairs of symbols, merged one by one, always the best. In: symbols and a rank for pairs; out: the symbols that are left.

Both kinds of merging tokenizers do this: by the score of the merged token, or by its place in a list. Of equal ranks the leftmost counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush


def merge_pairs(characters: Iterable[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """The symbols after all merges. `rank` is low for pairs that come early, None for those that are not merged."""
    symbols = list(characters)
    count = len(symbols)
    after, before = list(range(1, count + 1)), list(range(-1, count - 1))
    heap = [(found, left, 2) for left in range(count - 1) if (found := rank(symbols[left], symbols[left + 1])) is not None]
    heapify(heap)
    while heap:
        _, left, size = heappop(heap)
        right = after[left]
        # A symbol that was merged into another is empty, and has no neighbour. One that has grown has another size.
        if right >= count or len(symbols[left]) + len(symbols[right]) != size:
            continue
        merged = symbols[left] = symbols[left] + symbols[right]
        symbols[right] = ""
        follower = after[left] = after[right]
        after[right] = count
        if follower < count:
            before[follower] = left
            if (found := rank(merged, symbols[follower])) is not None:
                heappush(heap, (found, left, size + len(symbols[follower])))
        if (prior := before[left]) >= 0 and (found := rank(symbols[prior], merged)) is not None:
            heappush(heap, (found, prior, size + len(symbols[prior])))
    return [symbol for symbol in symbols if symbol]
