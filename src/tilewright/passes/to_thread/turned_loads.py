"""Loads of tiles that lie across their lanes: a block reads them along memory, and hands them over in shared memory. Part of `lower_tiles`, on GPUs.

Lanes run along the results' axis. Where what is read runs along the other one, as in a transposition, neighbouring lanes would read far apart; and results whose rows
begin anywhere are no vectors, which would make up for it. So neighbouring threads read neighbours in memory and write them to shared memory, where each then finds
its own elements:

    %v = load %x, %j, %i : tile<f16, [64, 64]>     lanes along %j
    -> %s[j, i] = load %x, … along %i for the whole tile;  barrier;  %v = load %s, j, i of this thread
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor
from tilewright.passes.common.registers import Held, Mask, RegisterIndex, Registers, Shape, ThreadView
from tilewright.passes.to_thread.turned_lines import coordinates_of, word_elements


def load_turned(
    view: ThreadView, b: Builder, memory: Value, indices: Sequence[Held], shape: Shape, mask: Held | None, read: Callable[[Sequence[Value], Value | None], Value]
) -> Registers | None:
    """The tile, read along memory; None where it does not run across the lanes, or a mask asks more than where its edges are. `read`: an element, under a condition."""
    tensor = memory.type
    assert isinstance(tensor, Tensor)
    other = 1 - view.axis
    if len(shape) != 2 or view.vector > 1 or tensor.space != "global" or not _runs_along(tensor, indices, other):
        return None
    if isinstance(mask, Registers) or (isinstance(mask, Mask) and mask.others):
        return None
    width, threads = shape[other], view.kernel.threads
    if width & (width - 1) or threads % width or shape[0] * shape[1] % threads:
        return None
    rows = threads // width
    along, down = b.op("and", view.thread, b.index(width - 1)), b.op("shr", view.thread, b.index(width.bit_length() - 1))
    shared = b.op("alloc", dtype=tensor.dtype, shape=(shape[view.axis], width + word_elements(tensor.dtype)), space="shared")
    elements: list[tuple[Value, Value]] = []
    for first in range(0, shape[view.axis], rows):
        row = b.add(down, b.index(first)) if first else down
        place = {other: along, view.axis: row}
        elements.append((row, read([_at(b, held, place) for held in indices], _inside(b, mask, place))))
    for row, value in elements:
        b.multi("store", shared, row, along, value)
    b.multi("barrier")
    cells = {}
    for cell in view.cells(shape):
        cells[cell] = b.op("load", shared, *coordinates_of(view, b, cell, (view.axis, other)))
    return Registers(shape, cells)


def _runs_along(memory: Tensor, indices: Sequence[Held], axis: int) -> bool:
    """Whether neighbours along this axis of the tile, and not along the other, are neighbours in memory."""
    if not all(isinstance(held, RegisterIndex | Value) for held in indices):
        return False
    moved = {d: held.factors for d, held in enumerate(indices) if isinstance(held, RegisterIndex)}
    along = [d for d, factors in moved.items() if factors.get(axis, 0)]
    return len(along) == 1 and moved[along[0]] == {axis: 1} and memory.strides[along[0]] == ONE


def _at(b: Builder, held: Held, place: dict[int, Value]) -> Value:
    """An index of the element at these coordinates of the tile."""
    if isinstance(held, Value):
        return held
    assert isinstance(held, RegisterIndex)
    total = held.base
    for axis, factor in held.factors.items():
        total = b.add(total, place[axis] if factor == 1 else b.mul(place[axis], b.index(factor)))
    return total


def _inside(b: Builder, mask: Held | None, place: dict[int, Value]) -> Value | None:
    """Whether the element at these coordinates is wanted; None where all are."""
    if mask is None or isinstance(mask, Value):
        return mask
    assert isinstance(mask, Mask)
    total: Value | None = None
    for index, bound in mask.edges:
        one = b.op("lt", _at(b, index, place), bound)
        total = one if total is None else b.logical_and(total, one)
    return total
