"""The factors of a contraction as a CPU copies them: along which indices, in which order, and how memory is walked.

In: a contraction. Out: `Side`s, one for each factor, for `panel_copies.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis.affine import address
from tilewright.analysis.contraction import Contraction, Factor
from tilewright.analysis.ranges import surely_not_negative
from tilewright.base.sizes import ONE, ZERO, maximum
from tilewright.ir.nodes import Op, Value, walk


def needed_ops(found: Contraction, values: Sequence[Value]) -> tuple[Op, ...] | None:
    """The ops of the nest that compute these values, in order; None when one of them has a region of its own."""
    everything = list(walk(found.parallel.regions[0]))
    made = {result: op for op in everything for result in op.results}
    needed: set[int] = set()
    waiting = list(values)
    while waiting:
        op = made.get(waiting.pop())
        if op is None or id(op) in needed:
            continue
        if op.regions:
            return None
        needed.add(id(op))
        waiting += op.operands
    return tuple(op for op in everything if id(op) in needed)


class Side:
    """One factor and the result indices it varies along: `m` for the first, `n` for the second."""

    def __init__(self, found: Contraction, factor: Factor, positions: Sequence[int], k: Sequence[int]) -> None:
        self.factor, self.positions = factor, positions
        self.dtype = found.accumulator
        """Of the copies."""
        self.indices = tuple(found.indices[p] for p in positions)
        self.extents = tuple(found.extents[p] for p in positions)
        wanted = [factor.value] if factor.guard is None else [factor.value, factor.guard]
        ops = needed_ops(found, wanted)
        assert ops is not None
        self.ops = ops
        self.limit = self.extents[-1]
        self.numbered = self.extents
        """What numbers along this side are made of; of the innermost only those below `limit` are results."""
        self.copied, self.copied_extents = self.indices, self.extents
        """The indices a copy is made along."""
        self.idle: tuple[Value, ...] = ()
        """Indices that are zero while copying."""
        self._run_rows_together(found)
        self.along_side = self.walks(found, self.indices[-1])
        self.along_k = not self.along_side and self.walks(found, found.k[k[-1]])

    def _run_rows_together(self, found: Contraction) -> None:
        """Where rows of an array follow one another, with a gap at the end of each (`x[w * i + j]`), number the gaps as well: copies are
        then made without regard to where rows end."""
        if self.factor.load is None or self.factor.guard is not None or len(self.indices) < 2:
            return
        outer, inner = self.indices[-2:]
        using = [form for form in found.access(self.factor) if form.factor(outer) != ZERO or form.factor(inner) != ZERO]
        if len(using) != 1 or using[0].factor(inner) != ONE or using[0].factor(outer) == ZERO:
            return
        width, length = using[0].factor(outer), self.extents[-1]
        if width == length or not surely_not_negative(width - length + 1):
            return
        # Without the sum's steps there is no gap, and nothing is copied.
        width = maximum(width, length)
        self.numbered = (*self.extents[:-1], width)
        self.copied, self.copied_extents = (*self.indices[:-2], inner), (*self.extents[:-2], self.extents[-2] * width)
        self.idle = (outer,)

    def walks(self, found: Contraction, index: Value) -> bool:
        """Whether memory is read one element after the other along this index."""
        loads = [op for op in self.ops if op.opcode == "load"]
        return any(address(op, found.forms).factor(index) == ONE for op in loads)


def order(found: Contraction, positions: Sequence[int], factors: Sequence[Factor], stores: bool = False) -> tuple[int, ...]:
    """The positions with the one along which memory is walked one by one put last: stores count first, then loads."""
    indices = found.k if len(factors) == 2 else found.indices
    accesses: list[Op] = []
    if stores:
        accesses += [op for op in found.parallel.regions[0].ops if op.opcode == "store"]
    accesses += [op for factor in factors for op in needed_ops(found, [factor.value]) or () if op.opcode == "load"]
    for op in accesses:
        form = address(op, found.forms)
        for p in positions:
            if form.factor(indices[p]) == ONE:
                return (*(q for q in positions if q != p), p)
    return tuple(positions)
