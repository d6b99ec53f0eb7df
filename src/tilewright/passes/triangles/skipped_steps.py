"""How much of a product is left where its tiles skip what cannot count (`passes/windows/sum_ranges.py`).

In: a contraction, what is known of its sums, and a schedule. Out: the part of all steps that some tile takes, counted tile by tile for the sizes of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.analysis.affine import Affine
from tilewright.analysis.contraction import Contraction
from tilewright.base.sizes import ONE
from tilewright.passes.schedules.matrix import GpuProduct
from tilewright.passes.windows.sum_ranges import SumBound

MOST_LOOKED_AT = 64
"""Rows and columns of tiles for which is counted what is left of a product."""


def steps_left(
    found: Contraction, bounds: Sequence[SumBound], used: Sequence[Affine], schedule: GpuProduct, hints: Mapping[str, int]
) -> float:
    """The part of a product's steps that is left where tiles skip what guards leave empty, and sums that nothing uses."""
    sizes = [found.extents[p] for p in (*found.m, *found.n)] + [found.reduce_extents[-1]]
    sizes += [form.constant for form in (*(x.form for x in bounds), *used)]
    if not (bounds or used) or not all(size.names <= hints.keys() for size in sizes):
        return 1.0
    m, n, length = (size.evaluate(hints) for size in sizes[:3])
    tall, wide = (schedule.n, schedule.m) if schedule.swap_ab else (schedule.m, schedule.n)
    down, across = -(-m // tall), -(-n // wide)
    if not down * across * length:
        return 1.0
    rows, left = found.indices[found.m[0]], 0
    # Of many tiles every so many.
    firsts, seconds = (range(0, count, max(1, count // MOST_LOOKED_AT)) for count in (down, across))

    def extreme(form: Affine, row: int, column: int, largest: bool) -> int:
        total = form.constant.evaluate(hints)
        for value, factor in form.factors:
            start, size = (row * tall, tall) if value is rows else (column * wide, wide)
            total += (start + size - 1 if largest == (factor == ONE) else start) * (1 if factor == ONE else -1)
        return total

    for row in firsts:
        for column in seconds:
            if all(extreme(form, row, column, True) >= 0 for form in used):
                low = max([0, *(extreme(x.form, row, column, False) for x in bounds if not x.upper)])
                high = min([length, *(extreme(x.form, row, column, True) + 1 for x in bounds if x.upper)])
                left += max(0, high - low)
    return left / (length * len(firsts) * len(seconds))
