"""The factors of a contraction as a CPU copies them: along which indices, in which order, and how memory is walked.

In: a contraction. Out: `Side`s, one for each factor, for `copies.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.affine import address
from tilewright.analysis.contraction import Contraction, Factor
from tilewright.analysis.ranges import surely_not_negative
from tilewright.base.sizes import ONE, ZERO, Size, contiguous_strides, floordiv, maximum, minimum, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk, watched_axes
from tilewright.ir.rewrite import rewrite, use_counts
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.windows.sum_ranges import sum_bounds

SORTED = 3
"""Elements from one column to the next, at most, for vectors of columns to be sorted out of whole vectors of memory."""
RUN, PIECE, WRITTEN = 12, 4, 12
"""Columns of a vector that crosses the end of a row; how many products copying one of them in pieces costs for a step of the sum; and how many products writing a
result of them costs."""


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


def join_terms(kernel: Kernel, found: Contraction) -> Kernel:
    """The kernel with one axis for all those of the first factor that its sum walks along, one behind the other (`w[o, c, y, x]` is `w[o, cyx]`): they are copied
    as one run."""
    load, memory = found.a.load, found.a.tensor
    if load is None or memory is None or len(found.k) == 1:
        return kernel
    forms = found.access(found.a)
    first = next((axis for axis, form in enumerate(forms) if any(k in form.values for k in found.k)), memory.rank)
    return _with_one_axis(kernel, load, first, memory.rank - 1)


def join_rows(kernel: Kernel, found: Contraction) -> Kernel:
    """The kernel with one axis for the several that make up rows, in what it reads and writes behind its sum (`out[b, y, x, o]` is `out[byx, o]`): the number of a
    row is its place there."""
    if len(found.m) == 1:
        return kernel
    rows = [found.indices[p] for p in found.m]
    for op in found.parallel.regions[0].ops:
        if op.opcode not in ("load", "store"):
            continue
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        bare = [found.forms[v].bare if v in found.forms else None for v in op.operands[1 : 1 + memory.rank]]
        first = next((axis for axis, index in enumerate(bare) if index is rows[0]), memory.rank)
        last = first + len(rows) - 1
        if last < memory.rank and all(one is row for one, row in zip(bare[first : last + 1], rows, strict=True)):
            kernel = _with_one_axis(kernel, op, first, last)
    return kernel


def join_results(kernel: Kernel, found: Contraction) -> Kernel:
    """The kernel with one axis for the innermost of those that make up columns, in what it reads and writes behind its sum (`out[b, o, y, x]` is `out[b, o, yx]`):
    vectors of results need not end with a row."""
    columns = [found.indices[p] for p in order(found, found.n, [found.b], stores=True)]
    for op in found.parallel.regions[0].ops:
        if op.opcode not in ("load", "store"):
            continue
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        bare = [found.forms[v].bare if v in found.forms else None for v in op.operands[1 : 1 + memory.rank]]
        same = 0
        while same < min(len(columns), memory.rank) and bare[-1 - same] is columns[-1 - same]:
            same += 1
        kernel = _with_one_axis(kernel, op, memory.rank - same, memory.rank - 1)
    return kernel


def join_columns(kernel: Kernel, found: Contraction) -> Kernel:
    """The kernel with one axis for all those of the second factor that its sum walks along, where columns lie side by side (`x[b, c, y + i, x + j]` is
    `x[b, …]`): where a step of the sum is read is one number then. Where columns lie a few elements apart, all its axes are one."""
    load, memory = found.b.load, found.b.tensor
    if load is None or memory is None or found.b.guard is not None or found.b.value is not load.result or len(found.n) == 1:
        return kernel
    forms = found.access(found.b)
    moving = [axis for axis, form in enumerate(forms) if any(k in form.values for k in found.k)]
    steps = [forms[-1].factor(found.indices[p]) for p in found.n]
    if ONE in steps:
        return _with_one_axis(kernel, load, moving[0], memory.rank - 1) if len(moving) > 1 else kernel
    apart = moving and any(step.constant is not None and 1 < step.constant <= SORTED for step in steps)
    return _with_one_axis(kernel, load, 0, memory.rank - 1) if apart else kernel


def _with_one_axis(kernel: Kernel, access: Op, first: int, last: int) -> Kernel:
    """The kernel with axes first..last of the array that `access` alone touches as one; the kernel itself where rows do not follow one another."""
    old = access.operands[0]
    memory = old.type
    assert isinstance(memory, Tensor)
    if first >= last or not memory.is_contiguous or watched_axes(access) or old not in kernel.params:
        return kernel
    if use_counts(kernel.body)[old] != 1:
        return kernel
    shape = (*memory.shape[:first], product(memory.shape[first : last + 1]), *memory.shape[last + 1 :])
    joined = Value(replace(memory, shape=shape, strides=contiguous_strides(shape)), old.name)

    def rebuilt(b: Builder, op: Op) -> list[Value] | None:
        if not op.operands or op.operands[0] is not old:
            return None
        place = op.operands[1 + first]
        for axis in range(first + 1, last + 1):
            place = b.add(b.mul(place, b.index(memory.shape[axis])), op.operands[1 + axis])
        operands = (joined, *op.operands[1 : 1 + first], place, *op.operands[2 + last :])
        b.append(replace(op, operands=operands))
        return list(op.results)

    return replace(rewrite(kernel, rebuilt), params=tuple(joined if p is old else p for p in kernel.params))


class Side:
    """One factor and the result indices it varies along: `m` for the first, `n` for the second."""

    def __init__(self, found: Contraction, factor: Factor, positions: Sequence[int], k: Sequence[int], gaps: bool = True) -> None:
        """`gaps`: what lies between the rows of an array, and as much behind its last one, may be read."""
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
        """The indices a copy is made along, and how far it goes along each before the next one outside moves on."""
        if gaps:
            self._run_rows_together(found)
        self.along_side = self.walks(found, self.indices[-1])
        self.along_k = not self.along_side and self.walks(found, found.k[k[-1]])
        self.run = self._run(found, k) if self.along_k else 1
        """How many of the innermost indices of the sum walk along one run of elements, one behind the other."""

    def _run_rows_together(self, found: Contraction) -> None:
        """Where rows of an array follow one another, with a gap at the end of each (`x[w * i + j]`), number the gaps as well where that
        is cheap: copies are then made without regard to where rows end."""
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
        width, rows = maximum(width, length), self.extents[-2]
        spread = self._is_spread(found, width)
        self.numbered = (*self.extents[:-1], length + (width - length) * spread)
        # With gaps all rows of an image are one run, and else each is one.
        self.copied_extents = (
            *self.extents[:-2],
            rows - (rows - ONE) * spread,
            length + (rows * width - length) * spread,
        )

    def _is_spread(self, found: Contraction, width: Size) -> Size:
        """1 where gaps are numbered, else 0. A gap is computed as results are; without gaps, vectors that cross the end of a row are copied and written in
        pieces."""
        across, gap = minimum(self.extents[-1], Size.of(RUN)), width - self.extents[-1]
        others = found.size(found.n if self.factor is found.a else found.m)
        wasted = others * gap * found.k_size
        pieces = across * (found.k_size * PIECE + others * WRITTEN)
        return minimum(ONE, floordiv(pieces, maximum(ONE, wasted)))

    def _run(self, found: Contraction, k: Sequence[int]) -> int:
        load = self.factor.load
        if load is None or self.factor.guard is not None or self.factor.value is not load.result:
            return 1
        using = [form for form in found.access(self.factor) if any(index in form.values for index in found.k)]
        if len(using) != 1:
            return 1
        steps = contiguous_strides(tuple(found.reduce_extents[p] for p in k))
        follow = [using[0].factor(found.k[p]) == step for p, step in zip(k, steps, strict=True)]
        return next((n for n, one in enumerate(reversed(follow)) if not one), len(follow))

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


def rows_lie(found: Contraction, columns: int) -> bool:
    """Whether a tile of so many columns has all, for any call, and rows of the first factor lie along the sum of a window."""
    load, known = found.a.load, found.size(found.n).constant
    if known is None or known > columns or len(found.k) == 1 or load is None or found.a.guard is not None or found.a.value is not load.result:
        return False
    if dtype_of(load.operands[0].type) is not found.accumulator or not found.accumulator.is_float or sum_bounds(found):
        return False
    last = order(found, range(len(found.k)), [found.a, found.b])[-1]
    walked = address(load, found.forms)
    return walked.factor(found.k[last]) == ONE and all(walked.factor(found.indices[p]) != ONE for p in found.m)
