"""Which terms of a sum can count for a tile of results: triangular products skip the rest.

In: a contraction whose factors have guards such as `k >= i` or `k <= j`, and a tile's rows and columns. Out: the first term that may count, and the one
behind the last, as values; None where nothing is known. Where a condition such as `j <= i` chooses between sums and a constant, a tile for which it holds nowhere
needs no sums at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.affine import Affine
from tilewright.analysis.contraction import Contraction
from tilewright.base.record import record
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Value, walk
from tilewright.passes.windows.guards import guard_tests


@record
class SumBound:
    """The summed index is at least `form`, or at most it where it is `upper`; its indices are those of rows and columns."""

    form: Affine
    upper: bool


def sum_bounds(found: Contraction, inner: int = -1) -> tuple[SumBound, ...]:
    """What the guards of both factors say about the summed index, or about one of several."""
    if (inner < 0 and len(found.k) != 1) or len(found.m) != 1 or len(found.n) != 1:
        return ()
    k = found.k[inner]
    sides = {found.indices[found.m[0]], found.indices[found.n[0]]}
    made = {result: op for op in walk(found.parallel.regions[0]) for result in op.results}
    bounds: list[SumBound] = []
    for guard in (found.a.guard, found.b.guard):
        for test in guard_tests(guard, made, found.forms) if guard is not None else ():
            if test.form is None or test.divisor or test.form.factor(k) not in (ONE, -ONE):
                continue
            rest = test.form.minus(Affine(((k, test.form.factor(k)),)))
            if not rest.factors or any(v not in sides or f not in (ONE, -ONE) for v, f in rest.factors):
                continue
            upper = test.form.factor(k) == -ONE
            bounds.append(SumBound(rest if upper else rest.times(-ONE), upper))
    return tuple(bounds)


def result_bounds(found: Contraction) -> tuple[Affine, ...]:
    """Forms of row and column that are at least 0 for every result whose sum is used: a condition chooses a constant for all others."""
    if len(found.m) != 1 or len(found.n) != 1:
        return ()
    region, total = found.parallel.regions[0], found.reduction.result
    uses = [op for op in walk(region) if total in op.operands]
    made = {result: op for op in walk(region) for result in op.results}
    if len(uses) != 1 or uses[0].opcode != "select" or uses[0].operands[1] is not total or total is uses[0].operands[2]:
        return ()
    sides = {found.indices[found.m[0]], found.indices[found.n[0]]}
    tests = [test.form for test in guard_tests(uses[0].operands[0], made, found.forms) if not test.divisor]
    return tuple(form for form in tests if form is not None and form.factors and all(v in sides and f in (ONE, -ONE) for v, f in form.factors))


def is_half(found: Contraction, tile: tuple[int, int], kernel: Kernel) -> bool:
    """Whether the tiles on and below the diagonal are all that a kernel has to compute: those above it have no result that anything reads (`partial`)."""
    forms = result_bounds(found) if kernel.attrs.get("partial") and tile[0] == tile[1] else ()
    if len(forms) != 1 or found.extents[found.m[0]] != found.extents[found.n[0]]:
        return False
    (form,), row, column = forms, found.indices[found.m[0]], found.indices[found.n[0]]
    beyond = form.constant.constant
    return form.factor(row) == ONE and form.factor(column) == -ONE and beyond is not None and -tile[0] < beyond <= 0


def is_used(b: Builder, forms: tuple[Affine, ...], tile: Mapping[Value, tuple[Value, Value]]) -> Value:
    """Whether some result of a tile may have a use for its sum."""
    used: Value | None = None
    for form in forms:
        largest = b.index(form.constant)
        for index, factor in form.factors:
            first, behind = tile[index]
            largest = b.add(largest, b.sub(behind, b.index(1))) if factor == ONE else b.sub(largest, first)
        inside = b.op("ge", largest, b.index(0))
        used = inside if used is None else b.logical_and(used, inside)
    assert used is not None
    return used


def sum_range(b: Builder, bounds: tuple[SumBound, ...], tile: Mapping[Value, tuple[Value, Value]]) -> tuple[Value | None, Value | None]:
    """The first term and the one behind the last that some result of a tile may have; `tile` has the first value of each index and the one behind the last."""
    low: Value | None = None
    high: Value | None = None
    for bound in bounds:
        total = b.index(bound.form.constant)
        for index, factor in bound.form.factors:
            first, behind = tile[index]
            # The smallest of lower bounds, the largest of upper ones.
            largest = bound.upper == (factor == ONE)
            value = b.sub(behind, b.index(1)) if largest else first
            total = b.add(total, value) if factor == ONE else b.sub(total, value)
        if bound.upper:
            total = b.add(total, b.index(1))
            high = total if high is None else b.op("min", high, total)
        else:
            low = total if low is None else b.op("max", low, total)
    return low, high
