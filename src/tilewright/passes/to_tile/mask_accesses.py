"""Watched accesses on a GPU: what lies outside its array is masked out and reported, and the kernel goes on. Tile stage, kernel to kernel.

In: a kernel whose loads and stores may have an attribute `watch`. Out: the kernel with such accesses under masks, and reports.

    store %out, %i, %v {watch = [0]}
    =>
    %inside = lt (cast %i {dtype = u64}), %n : tile<bool, [64]>
    report $failure, %i, %n, (not %inside) {site = 1}
    store %out, %i, %v, %inside {masked = true, checked = true}

A load that is masked out gives 0. A tile is many threads': each tests and reports its own elements, so that nobody waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import i64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value, watched_axes
from tilewright.ir.types import Tensor
from tilewright.passes.common.nest_shapes import join, shape_of
from tilewright.passes.to_tile.index_sites import Sites, inside_of, parts, unwatched, widen


class MaskedAccesses:
    """The accesses of one kernel. `one` is for `ir.rewrite`."""

    def __init__(self, sites: Sites, failure: Value) -> None:
        self.sites, self.failure = sites, failure

    def one(self, b: Builder, op: Op) -> Sequence[Value] | None:
        axes = watched_axes(op)
        if not axes:
            return None
        memory, indices, values, mask = parts(op)
        assert isinstance(memory.type, Tensor)
        shape = join(*map(shape_of, (*indices, *values, *([mask] if mask is not None else []))))
        allowed = None if mask is None else widen(b, mask, shape)
        for axis in axes:
            index, extent = b.cast(indices[axis], i64), b.index(memory.type.shape[axis])
            inside = inside_of(b, index, extent)
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
