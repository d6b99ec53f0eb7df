"""Vectors of which some elements count. Part of `lower_tiles`.

In: a mask and a vector of its tile. Out: the mask of an instruction, on CPUs whose instructions mask lanes: one load or store instead of one for each element; elsewhere a
condition for each element, and whether all of them hold.
"""

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


def lanes_inside(view: ThreadView, b: Builder, mask: Mask, cell: Cell) -> list[Value]:
    """Which elements of a vector are inside: scalars, so that ranges prove them one by one."""
    conditions: list[list[Value]] = []
    for index, bound in mask.edges:
        room = b.sub(bound, view.first(b, index, view.collapsed(cell, index.shape)))
        factor = index.factors.get(view.axis, 0)
        conditions.append([b.op("lt", b.index(factor * lane), room) for lane in range(view.vector)])
    for other in mask.others:
        value = other.cells[view.collapsed(cell, other.shape)]
        wide = isinstance(value.type, Vec)
        conditions.append([b.op("extract", value, lane=lane) if wide else value for lane in range(view.vector)])
    lanes = conditions[0]
    for more in conditions[1:]:
        lanes = [b.logical_and(a, c) for a, c in zip(lanes, more, strict=True)]
    return lanes


def all_inside(view: ThreadView, b: Builder, mask: Mask, cell: Cell) -> Value:
    """Whether all elements of a vector are inside; edges need be asked of its ends only."""
    lanes = lanes_inside(view, b, mask, cell)
    asked = lanes if any(other.shape[view.axis] > 1 for other in mask.others) else (lanes[0], lanes[-1])
    total = asked[0]
    for lane in asked[1:]:
        total = b.logical_and(total, lane)
    return total
