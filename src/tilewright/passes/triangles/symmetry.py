"""Products whose sums are the same on both sides of the diagonal. `Contraction -> bool`.

In: a contraction. Out: whether its factors are one expression, of the row in the first and of the column in the second, as in `a[i, k] * a[j, k]` or
`(x[k, i] - mean[i]) * (x[k, j] - mean[j])`. The sum at (i, j) is then that at (j, i) to the last bit: the same products in the same order. What is done
with the sums afterwards may differ.
"""

from __future__ import annotations

from tilewright.analysis.contraction import Contraction
from tilewright.ir.nodes import Op, Value, walk


def is_symmetric(found: Contraction) -> bool:
    """Whether exchanging rows and columns changes no sum."""
    if len(found.m) != 1 or len(found.n) != 1 or found.a.dtype is not found.b.dtype:
        return False
    (m,), (n,) = found.m, found.n
    if found.extents[m] != found.extents[n] or found.a.guard is not None or found.b.guard is not None:
        return False
    made = {result: op for op in walk(found.parallel.regions[0]) for result in op.results}
    pending, seen = [(found.a.value, found.b.value)], set[tuple[Value, Value]]()
    while pending:
        pair = pending.pop()
        if pair in seen:
            continue
        seen.add(pair)
        parts = _operands(pair, (found.indices[m], found.indices[n]), made)
        if parts is None:
            return False
        pending += parts
    return True


def _operands(pair: tuple[Value, Value], ends: tuple[Value, Value], made: dict[Value, Op]) -> list[tuple[Value, Value]] | None:
    """What has to be alike for the second value to be the first with the column in place of the row; None where it cannot be."""
    if not set(pair).isdisjoint(ends):
        return [] if pair == ends else None
    first, second = (made.get(v) for v in pair)
    if first is None or second is None:
        return [] if pair[0] is pair[1] else None
    if first.opcode != second.opcode or first.attrs != second.attrs or first.regions or second.regions:
        return None
    if first.results.index(pair[0]) != second.results.index(pair[1]) or len(first.operands) != len(second.operands):
        return None
    return list(zip(first.operands, second.operands, strict=True))
