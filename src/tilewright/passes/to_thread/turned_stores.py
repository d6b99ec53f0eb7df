"""Stores of tiles that lie across their registers: a CPU turns them in registers. Part of `lower_tiles`.

A tile's vectors run along one axis. Where memory runs along the other, each element would be a store of its own. As many vectors as they have lanes are a square, which a
few rounds of pairs turn; its columns are then stored as vectors:

    %a = a0 a1 a2 a3   %b = b0 b1 b2 b3   %c …   %d …   ->   a0 b0 c0 d0   a1 b1 c1 d1   a2 …   a3 …
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor
from tilewright.passes.common.registers import Held, RegisterIndex, Registers, Shape, ThreadView

WORD = 4
"""Bytes of the smallest elements: there are instructions that sort words of two vectors."""


def store_turned(view: ThreadView, b: Builder, memory: Value, indices: Sequence[Held], shape: Shape, value: Registers) -> bool:
    """CPU: store a tile of two axes in squares, if memory runs across its vectors; whether it did."""
    tensor, lanes = memory.type, view.vector
    assert isinstance(tensor, Tensor)
    if view.kernel.threads != 1 or lanes < 2 or tensor.dtype.itemsize < WORD:
        return False
    other = 1 - view.axis
    if any(extent % lanes for extent in shape) or not all(isinstance(held, RegisterIndex | Value) for held in indices):
        return False
    if _step(tensor, indices, other) != 1 or _step(tensor, indices, view.axis) == 1:
        return False
    for along in range(shape[view.axis] // lanes):
        for first in range(0, shape[other], lanes):
            square = [tuple(along if axis == view.axis else first + row for axis in range(2)) for row in range(lanes)]
            for lane, column in enumerate(turned(b, [value.cells[cell] for cell in square])):
                place: list[Value] = []
                for held in indices:
                    assert isinstance(held, RegisterIndex | Value)
                    index = view.first(b, held, view.collapsed(square[0], held.shape) if isinstance(held, RegisterIndex) else square[0])
                    factor = held.factors.get(view.axis, 0) if isinstance(held, RegisterIndex) else 0
                    place.append(b.add(index, b.index(factor * lane)) if factor and lane else index)
                b.multi("store", memory, *place, column, unaligned=True)
    return True


def turned(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """The columns of a square of as many vectors as they have lanes, a power of two."""
    count = len(rows)
    low = tuple(lane for pair in range(count // 2) for lane in (pair, count + pair))
    high = tuple(lane + count // 2 for lane in low)
    vectors = list(rows)
    for _ in range(count.bit_length() - 1):
        pairs = list(zip(vectors[: count // 2], vectors[count // 2 :], strict=True))
        vectors = [b.op("rearrange", *pair, lanes=lanes) for pair in pairs for lanes in (low, high)]
    return vectors


def _step(memory: Tensor, indices: Sequence[Held], axis: int) -> int | None:
    """How many elements the memory is apart of neighbours along an axis of the tile; None: not known."""
    total = 0
    for held, stride in zip(indices, memory.strides, strict=True):
        factor = held.factors.get(axis, 0) if isinstance(held, RegisterIndex) else 0
        if factor and stride.constant is None:
            return None
        total += factor * (stride.constant or 0)
    return total
