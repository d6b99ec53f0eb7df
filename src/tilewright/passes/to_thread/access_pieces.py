"""The accesses that make up a vector of a tile: one, several narrower ones, or one for each element. Part of `lower_tiles`.

In: an array and the indices of a tile's element. Out: the first index and the width of each access, wide where neighbours in the tile are neighbours in memory and
alignment is proven.

    load %x, %i : 8 × f32 at a multiple of 4   ->   (%first, 4), (%first + 4, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tilewright.analysis import divisors
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor, Vec
from tilewright.passes.common.registers import Cell, Held, RegisterIndex, Registers, SameInVector, Shape, ThreadView

Piece = tuple[list[Value], int]
"""The indices of an access, and how many elements it takes."""


def pieces_of(
    view: ThreadView, b: Builder, memory: Tensor, indices: Sequence[Held], shape: Shape, cell: Cell, aligned: int = 0
) -> list[Piece]:
    """The accesses that make up one cell: indices and width of each."""
    first, width, elements = _access(view, b, memory, indices, shape, cell, aligned)
    if elements:
        return [(own, 1) for own in elements]
    if not view.is_wide(shape):
        return [(first, 1)]
    walking = next(
        d for d, held in enumerate(indices) if isinstance(held, RegisterIndex) and held.factors.get(view.axis, 0)
    )
    step = memory.strides[walking].constant
    pieces: list[Piece] = []
    for start in range(0, view.vector, width):
        own = list(first)
        if start:
            assert step
            own[walking] = b.add(first[walking], b.index(start // step))
        pieces.append((own, width))
    return pieces


def singles(
    view: ThreadView, b: Builder, memory: Tensor, indices: Sequence[Held], pieces: Sequence[Piece]
) -> list[Piece]:
    """Cut accesses into single elements, for masks that cut through vectors."""
    walking = next(
        d for d, held in enumerate(indices) if isinstance(held, RegisterIndex) and held.factors.get(view.axis, 0)
    )
    step = memory.strides[walking].constant or 1
    elements: list[Piece] = []
    for own, width in pieces:
        for lane in range(width):
            each = list(own)
            if lane:
                each[walking] = b.add(own[walking], b.index(lane // step))
            elements.append((each, 1))
    return elements


def _access(
    view: ThreadView, b: Builder, memory: Tensor, indices: Sequence[Held], shape: Shape, cell: Cell, aligned: int
) -> tuple[list[Value], int, list[list[Value]]]:
    """For one cell: the first element's indices, how many elements one access may take (0: elements are not
    neighbours and each has indices of its own, given last). `aligned`: every so many elements of the tile begin a vector."""
    first: list[Value] = []
    stride, divisor, affine = 0, 0, True
    known = True
    for held, size in zip(indices, memory.strides, strict=True):
        if isinstance(held, Registers | SameInVector):
            own_value = held.cells[view.collapsed(cell, held.shape)]
            affine = affine and not isinstance(own_value.type, Vec)
            divisor = gcd(divisor, divisors.of_size(size, view.kernel.facts))
            first.append(own_value)
            continue
        assert isinstance(held, RegisterIndex | Value)
        value = view.first(b, held, view.collapsed(cell, held.shape) if isinstance(held, RegisterIndex) else cell)
        first.append(value)
        factor = held.factors.get(view.axis, 0) if isinstance(held, RegisterIndex) else 0
        if factor:
            step = size.constant
            known = known and step is not None
            stride += factor * (step or 0)
        divisor = gcd(divisor, view.divisors.get(value, 1) * divisors.of_size(size, view.kernel.facts))
    divisor = aligned or divisor
    if not view.is_wide(shape):
        return first, 1, []
    if affine and known and stride == 1:
        if not view.target.simt:
            return first, view.vector, []  # CPUs load vectors from any address
        width = view.vector
        align = memory.align or memory.dtype.itemsize
        while width > 1 and (
            width * memory.dtype.itemsize > 16 or divisor % width or align % (width * memory.dtype.itemsize)
        ):
            width //= 2
        return first, width, []
    elements: list[list[Value]] = []
    for lane in range(view.vector):
        own: list[Value] = []
        for held, value in zip(indices, first, strict=True):
            factor = held.factors.get(view.axis, 0) if isinstance(held, RegisterIndex) else 0
            if isinstance(value.type, Vec):
                value = b.op("extract", value, lane=lane)
            elif factor and lane:
                value = b.add(value, b.index(factor * lane))
            own.append(value)
        elements.append(own)
    return first, 0, elements
