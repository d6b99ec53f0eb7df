"""Watched accesses on a GPU: what lies outside its array is masked out and reported, and the kernel goes on. Tile stage, kernel to kernel.

In: a kernel whose loads and stores may have an attribute `watch`. Out: the kernel with such accesses under masks, and reports.

    store %out, %i, %v {watch = [0]}
    =>
    %inside = lt (cast %i {dtype = u64}), %n : tile<bool, [64]>
    report $failure, %i, %n, (not %inside) {site = 1}
    store %out, %i, %v, %inside {masked = true, checked = true}

A load that is masked out gives 0. A tile is many threads': each tests and reports its own elements, so that nobody waits for others. Indices that grow by ones
along a tile are tested as a whole first, the first and the last of them, and only a tile that is not all inside asks its elements:

    if %lo >= 0 and %lo + 63 < %n { store %out, %lo + iota, %v } { … as above … }
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.base.dtypes import i32, i64, u32
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk, watched_axes
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.nest_shapes import join, shape_of, widen
from tilewright.passes.to_tile.index_sites import Sites, inside_of, parts, unwatched


@record
class _Ends:
    """Indices of a tile: the sum of these numbers, less those taken off, and from `low` to `high` more."""

    numbers: tuple[Value, ...]
    low: int
    high: int
    taken: tuple[Value, ...] = ()


class MaskedAccesses:
    """The accesses of one kernel. `one` is for `ir.rewrite`."""

    def __init__(self, kernel: Kernel, sites: Sites, failure: Value) -> None:
        self.sites, self.failure = sites, failure
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.seldom = True
        """All tests are of whole tiles: elements are asked only where one fails."""

    def one(self, b: Builder, op: Op) -> Sequence[Value] | None:
        axes = watched_axes(op)
        if not axes:
            return None
        memory, indices, _, _ = parts(op)
        assert isinstance(memory.type, Tensor)
        ends = [self._ends(indices[axis]) for axis in axes] if op.opcode == "store" and any(shape_of(indices[axis]) for axis in axes) else [None]
        whole: Value | None = None
        for axis, found in zip(axes, ends, strict=False):
            if found is None:
                self.seldom = False
                return self._element_by_element(b, op, axes)
            low, high = (self._sum(b, found, offset) for offset in (found.low, found.high))
            inside = b.logical_and(b.op("ge", low, b.index(0)), inside_of(b, high, b.index(memory.type.shape[axis])))
            whole = inside if whole is None else b.logical_and(whole, inside)
        assert whole is not None
        b.if_(whole, lambda inner: inner.emit(op.opcode, op.operands, unwatched(op)), lambda inner: self._element_by_element(inner, op, axes))
        return []

    def _inside(self, b: Builder, index: Value, extent: Value) -> Value:
        """Whether an index lies inside: in 32 bits where it comes from so few. Negative ones are 2^31 and more there, which no such index reaches."""
        op = self.made.get(index)
        if op is None or op.opcode != "cast" or dtype_of(op.operands[0].type) is not i32:
            return inside_of(b, index, extent)
        narrow = op.operands[0]
        limit = b.cast(b.op("min", extent, b.index(1 << 31)), u32)
        return b.op("lt", b.cast(narrow, u32), b.like(limit, narrow))

    def _ends(self, index: Value) -> _Ends | None:
        """The first and the last of indices that grow by ones along a tile; None where they do not."""
        if not shape_of(index):
            # What is stored must not wait for a load of where to.
            return None if self._is_loaded(index) else _Ends((index,), 0, 0)
        op = self.made.get(index)
        if op is None:
            return None
        if op.opcode == "iota":
            return _Ends((), 0, prod(shape_of(index)) - 1)
        below = [self._ends(operand) for operand in op.operands] if op.opcode in ("broadcast", "add", "sub") else []
        known = [one for one in below if one is not None]
        if not below or len(known) < len(below):
            return None
        if op.opcode == "sub":
            known[1] = _Ends(known[1].taken, -known[1].high, -known[1].low, known[1].numbers)
        numbers, taken = [v for one in known for v in one.numbers], [v for one in known for v in one.taken]
        return _Ends(tuple(numbers), sum(one.low for one in known), sum(one.high for one in known), tuple(taken))

    def _is_loaded(self, number: Value) -> bool:
        """Whether a number depends on what memory holds."""
        op = self.made.get(number)
        return op is not None and (op.opcode in ("load", "atomic") or bool(op.regions) or any(map(self._is_loaded, op.operands)))

    def _sum(self, b: Builder, ends: _Ends, offset: int) -> Value:
        total = b.index(offset)
        for number in ends.numbers:
            total = b.add(total, b.cast(number, i64))
        for number in ends.taken:
            total = b.sub(total, b.cast(number, i64))
        return total

    def _element_by_element(self, b: Builder, op: Op, axes: Sequence[int]) -> Sequence[Value]:
        memory, indices, values, mask = parts(op)
        assert isinstance(memory.type, Tensor)
        shape = join(*map(shape_of, (*indices, *values, *([mask] if mask is not None else []))))
        allowed = None if mask is None else widen(b, mask, shape)
        for axis in axes:
            index, extent = b.cast(indices[axis], i64), b.index(memory.type.shape[axis])
            inside = self._inside(b, index, extent)
            if mask is None:
                b.multi("report", self.failure, index, extent, b.op("not", inside), site=self.sites.number(op, axis))
            else:
                # Where an access is masked out its index does not count.
                wide, wrong = widen(b, index, shape), b.op("not", widen(b, inside, shape))
                b.multi("report", self.failure, wide, extent, b.op("and", widen(b, mask, shape), wrong), site=self.sites.number(op, axis))
            inside = widen(b, inside, shape)
            allowed = inside if allowed is None else b.op("and", allowed, inside)
        assert allowed is not None
        attrs = {**unwatched(op), "masked": True, "checked": True}
        return b.emit(op.opcode, [memory, *indices, *values, allowed], attrs)
