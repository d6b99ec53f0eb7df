"""Vectors of which some lanes count, on CPUs whose instructions mask lanes: one load or store instead of one for each element. Part of `lower_tiles`."""

from __future__ import annotations

from tilewright.base.dtypes import i32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Vec, dtype_of
from tilewright.passes.common.registers import Cell, Held, Mask, Registers, ThreadView

MASKED = 64
"""Bytes of the vectors whose instructions take a mask."""
WORD = 4
"""Bytes of the smallest elements that all such CPUs mask."""


def lanes_mask(view: ThreadView, b: Builder, memory: Value, mask: Held | None, cell: Cell) -> Value | None:
    """The mask under which a vector of this cell is loaded or stored; None: not under one."""
    if view.target.simt or view.target.vector_bytes != MASKED or dtype_of(memory.type).itemsize < WORD:
        return None
    if not isinstance(mask, Mask | Registers) or not view.is_wide(mask.shape):
        return None
    others = mask.others if isinstance(mask, Mask) else (mask,)
    edges = mask.edges if isinstance(mask, Mask) else ()
    if any(index.factors.get(view.axis, 0) not in (0, 1) for index, _ in edges):
        return None
    lanes, most = b.op("lane_ids", dtype=i32, width=view.vector), b.index(view.vector)
    total: Value | None = None
    for index, bound in edges:
        room = b.sub(bound, view.first(b, index, view.collapsed(cell, index.shape)))
        if index.factors.get(view.axis, 0):  # as many lanes from the first on as there is room for
            room = b.cast(b.op("max", b.index(0), b.op("min", room, most)), i32)
            inside = b.op("lt", lanes, b.op("broadcast", room, width=view.vector))
        else:
            inside = b.op("broadcast", b.op("lt", b.index(0), room), width=view.vector)
        total = inside if total is None else b.logical_and(total, inside)
    for other in others:
        inside = other.cells[view.collapsed(cell, other.shape)]
        inside = inside if isinstance(inside.type, Vec) else b.op("broadcast", inside, width=view.vector)
        total = inside if total is None else b.logical_and(total, inside)
    return total
