"""Vectors of which some lanes count, on CPUs whose instructions mask lanes: one load or store instead of one for each element. Part of `lower_tiles`."""

from __future__ import annotations

from tilewright.base.dtypes import i32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Vec
from tilewright.passes.common.registers import Cell, Held, Mask, Registers, ThreadView


def lanes_of(view: ThreadView, b: Builder, mask: Held, cell: Cell) -> Value:
    """The mask under which a vector of this cell is loaded or stored."""
    assert isinstance(mask, Mask | Registers)
    others = mask.others if isinstance(mask, Mask) else (mask,)
    edges = mask.edges if isinstance(mask, Mask) else ()
    if isinstance(mask, Mask) and any(index.factors.get(view.axis, 0) not in (0, 1) for index, _ in edges):
        return view.mask_cell(b, mask, cell)
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
    assert total is not None
    return total
