"""Vectors that an edge cuts through, on CPUs whose instructions mask lanes: one load instead of one for each element. Part of `lower_tiles`."""

from __future__ import annotations

from tilewright.base.dtypes import i32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of
from tilewright.passes.common.registers import Cell, Mask, ThreadView

MASKED = 64
"""Bytes of the vectors whose instructions take a mask."""
WORD = 4
"""Bytes of the smallest elements that all such CPUs mask."""


def masks_vectors(view: ThreadView, memory: Value, mask: Mask, cell: Cell) -> bool:
    """Whether a vector of this cell is loaded under a mask: elements in a row, of which the last ones may lie outside."""
    if view.target.simt or view.target.vector_bytes != MASKED or not view.is_wide(mask.shape) or mask.others:
        return False
    return dtype_of(memory.type).itemsize >= WORD and all(index.factors.get(view.axis, 0) in (0, 1) for index, _ in mask.edges)


def lanes_inside(view: ThreadView, b: Builder, mask: Mask, cell: Cell) -> Value:
    """The mask of a cell's vector: as many lanes from the first on as there is room for."""
    lanes, most = b.op("lane_ids", dtype=i32, width=view.vector), b.index(view.vector)
    total: Value | None = None
    for index, bound in mask.edges:
        room = b.sub(bound, view.first(b, index, view.collapsed(cell, index.shape)))
        if index.factors.get(view.axis, 0):
            room = b.cast(b.op("max", b.index(0), b.op("min", room, most)), i32)
            inside = b.op("lt", lanes, b.op("broadcast", room, width=view.vector))
        else:
            inside = b.op("broadcast", b.op("lt", b.index(0), room), width=view.vector)
        total = inside if total is None else b.logical_and(total, inside)
    assert total is not None
    return total
