"""Lines of shared memory through which the threads of a block turn a tile: who reads along one axis writes along the other.

Part of `turned_loads`, which turns loads element by element, and of `lower_turned`, which reads whole vectors. In: a tile, and how a thread holds it. Out: how long its lines
are, and where in them a thread's elements lie.

    lines of 64 elements of f16, 66 apart: neighbours along a line and neighbours down a column lie in different banks
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.common.registers import Cell, ThreadView

WORD = 4
"""Bytes of a bank of shared memory."""


def word_elements(dtype: DType) -> int:
    """Elements that a bank holds, at least one; lines are longer by as many than the tile is."""
    return max(1, WORD // dtype.itemsize)


def coordinates_of(view: ThreadView, b: Builder, cell: Cell, axes: Sequence[int]) -> list[Value]:
    """Where in the tile a thread's cell begins, along these axes."""
    return [b.add(view.bases[axis], b.index(view.layout.offset(axis, cell[axis]))) for axis in axes]
