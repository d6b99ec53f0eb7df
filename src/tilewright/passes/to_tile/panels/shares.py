"""How the blocks of a product are shared out to cores: as many side by side and one above another as keep all cores busy to the end, and copy little.

In: extents of the product, and the largest block that a cache holds. Out: numbers of blocks. Each block copies its rows and its columns, so blocks that are about as wide as they are
high copy least; blocks that are one more than the cores take twice as long as the cores would.
"""

from __future__ import annotations

from itertools import pairwise

from tilewright.base.sizes import ONE, Size, ceildiv, floordiv, maximum, minimum

_ROUNDS = 4
"""Numbers of rounds that are looked at."""
_ENOUGH, _OF = 7, 8
"""Cores that have work in the last round too, of all."""


def blocks_across(rows: Size, columns: Size, needed: Size, narrowest: int, cores: int) -> Size:
    """Blocks side by side, of which there are `needed` at least: a number that divides the number of cores, or a multiple of it. No block is narrower than `narrowest` unless it must be."""
    counts = [count for count in range(1, cores + 1) if cores % count == 0]
    across = ONE
    for few, many in pairwise(counts):
        copies_less = minimum(_is_more(columns * cores, rows * (few * many)), _is_more(columns, Size.of(narrowest * many - 1)))
        across = across + maximum(_is_more(needed, Size.of(few)), copies_less) * (many - few)
    return maximum(across, ceildiv(needed, Size.of(cores)) * cores * _is_more(needed, Size.of(cores)))


def multiple_down(needed: Size, across: Size, cores: int) -> Size:
    """Blocks one above another, of which there are `needed` at least, of a product of which `blocks_across` are side by side: whole rounds of all cores."""
    together = maximum(ONE, floordiv(Size.of(cores), across))
    return ceildiv(needed, together) * together


def blocks_down(needed: Size, side_by_side: Size, cores: int) -> Size:
    """Blocks one above another, of which there are `needed` at least: in as few rounds as leave hardly a core without work in the last one."""
    rounds, worse = ceildiv(needed * side_by_side, Size.of(cores)), ONE
    for _ in range(_ROUNDS - 1):
        slots = rounds * cores
        filled = floordiv(slots, side_by_side) * side_by_side
        worse = minimum(worse, ONE - minimum(ONE, floordiv(filled * _OF, maximum(ONE, slots) * _ENOUGH)))
        rounds = rounds + worse
    return maximum(needed, floordiv(rounds * cores, side_by_side))


def _is_more(left: Size, right: Size) -> Size:
    """1 where `left` is larger than `right`, else 0."""
    return minimum(ONE, floordiv(left, right + 1))
