"""CPU: every second or third element of a row, sorted out of whole vectors. Part of `lower_tiles`.

    load %x, 2 * %i : 4 × f32   ->   x0 x1 x2 x3 and x3 x4 x5 x6, of which `rearrange` takes x0 x2 x4 x6
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.base.dtypes import bool_
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor, Vec
from tilewright.passes.common.registers import Cell, Held, Mask, RegisterIndex, Registers, Shape, ThreadView
from tilewright.passes.to_thread.masked_vectors import lanes_of


def load_every_second(
    view: ThreadView, b: Builder, memory: Value, indices: Sequence[Held], shape: Shape, cell: Cell, mask: Held | None, read: Callable[[Builder, Value, Sequence[Value], int], Value]
) -> Value | None:
    """The vector of a cell; None where its elements are not so far apart. The last vector that is read ends with the last element, so nothing else is read. Under a mask,
    those of its elements are loaded, where the CPU has masks. `read`: a vector from an index on."""
    tensor, width = memory.type, view.vector
    assert isinstance(tensor, Tensor)
    if width < 4 or tensor.dtype.is_bool or not view.is_wide(shape):
        return None
    moving = [d for d, held in enumerate(indices) if isinstance(held, RegisterIndex) and held.factors.get(view.axis, 0)]
    if len(moving) != 1 or tensor.strides[moving[0]].constant != 1:
        return None
    first: list[Value] = []
    for held in indices:
        if isinstance(held, Registers):
            first.append(held.cells[view.collapsed(cell, held.shape)])
        else:
            assert isinstance(held, RegisterIndex | Value)
            first.append(view.first(b, held, view.collapsed(cell, held.shape) if isinstance(held, RegisterIndex) else cell))
    walking = indices[moving[0]]
    assert isinstance(walking, RegisterIndex)
    stride = walking.factors[view.axis]
    if stride not in (2, 3) or any(isinstance(v.type, Vec) for v in first):
        return None
    chosen_lanes = None
    if mask is not None:
        if not view.target.has_lane_masks or not isinstance(mask, Mask | Registers) or not view.is_wide(mask.shape) or moving[0] != tensor.rank - 1:
            return None
        chosen_lanes = lanes_of(view, b, mask, cell)
    last = stride * (width - 1)
    starts = [*range(0, last - width + 1, width), last - width + 1]
    loaded: list[Value] = []
    for start in starts:
        own = list(first)
        own[moving[0]] = b.add(first[moving[0]], b.index(start)) if start else first[moving[0]]
        if chosen_lanes is None:
            loaded.append(read(b, memory, own, width))
            continue
        nothing = b.op("broadcast", b.const(False, bool_), width=width)
        chosen = tuple(place // stride if place % stride == 0 and place <= last else width for place in range(start, start + width))
        loaded.append(b.op("load_lanes", memory, *own, b.op("rearrange", chosen_lanes, nothing, lanes=chosen)))
    found, found_lanes = loaded[0], [lane * stride if lane * stride < width else -1 for lane in range(width)]
    for start, value in zip(starts[1:], loaded[1:], strict=True):
        lanes = []
        for lane in range(width):
            place = lane * stride - start
            lanes.append(found_lanes[lane] if found_lanes[lane] >= 0 else width + place if 0 <= place < width else 0)
        taken = [found_lanes[lane] >= 0 or 0 <= lane * stride - start < width for lane in range(width)]
        found = b.op("rearrange", found, value, lanes=tuple(lanes))
        found_lanes = [lane if taken[lane] else -1 for lane in range(width)]
    return found
