"""Frames: the values of a batch of lanes at one place of the kernel.

A lane is whatever a stage runs many of: a point of the iteration domain, a block of the grid, a thread. A value of a frame is
an array whose first axis is the lanes; it has length 1 when all lanes hold the same. A child frame has other lanes, each made
from one lane of its parent (`select`); values of the parent are gathered when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import BOOL, INDEX

Array = np.ndarray

# What a lane is, kept as values so that child frames gather them like any other.
LANE = Value(INDEX, "lane")
"""The lane's number in the root frame."""
SLOT = Value(INDEX, "slot")
"""The lane's block, counted among the blocks that run together."""
BLOCK = Value(INDEX, "block")
"""The lane's block as a linear number in the grid, x fastest."""
THREAD = Value(INDEX, "thread")
"""The lane's thread in its block."""
EXISTS = Value(BOOL, "exists")
"""False for the lanes that fill up a block's last warp."""


class Frame:
    """Values by lane; `mask` says which lanes are active, None for all."""

    def __init__(
        self, lanes: int, mask: Array | None = None, parent: Frame | None = None, select: Array | None = None
    ) -> None:
        self.lanes = lanes
        self.mask = mask
        self.parent = parent
        self.select = select
        self.values: dict[Value, Array] = {}
        self.tensors: dict[Value, object] = {}
        """Memory that lanes of this frame found by its address."""
        self.ways: list[tuple[Op, Array, Array]] = []
        """The ops with regions we are in whose lanes parted: the op, who came to it, and who is inside with us."""
        self.points: tuple[Value, ...] = parent.points if parent else ()
        """Loop indices that say which point of the domain a lane is, for messages."""

    def get(self, value: Value) -> Array:
        found = self.values.get(value)
        if found is None:
            if self.parent is None:
                raise KeyError(value)
            found = self.parent.get(value)
            if self.select is not None and found.shape[0] != 1:
                found = found[self.select]
            # Gathered once: a child frame lives for one run of a region, during which the parent's values stand still.
            self.values[value] = found
        return found

    def full(self, value: Value) -> Array:
        """The value with one entry per lane."""
        return self.spread(self.get(value))

    def spread(self, array: Array) -> Array:
        return np.broadcast_to(array, (self.lanes, *array.shape[1:])) if array.shape[0] != self.lanes else array

    @property
    def active(self) -> Array:
        """The mask as an array."""
        return np.ones(self.lanes, np.bool_) if self.mask is None else self.mask

    @contextmanager
    def masked(self, mask: Array | None, op: Op | None = None) -> Iterator[None]:
        """Inside, only these lanes are active; `op` is why."""
        before, self.mask = self.mask, mask
        noted = op is not None and mask is not None and mask is not before
        if noted:
            assert op is not None and mask is not None
            self.ways.append((op, np.ones(self.lanes, np.bool_) if before is None else before, mask))
        try:
            yield
        finally:
            self.mask = before
            if noted:
                self.ways.pop()

    def left_at(self, lane: int) -> Op | None:
        """The op at which that lane went another way than the active ones."""
        if self.parent is not None and self.select is not None:
            found = self.parent.left_at(int(self.select[lane]))
            if found is not None:
                return found
        return next((op for op, came, inside in self.ways if came[lane] and not inside[lane]), None)

    def child(self, select: Array, mask: Array | None) -> Frame:
        """A frame whose lane n is made from our lane `select[n]`."""
        return Frame(len(select), mask, self, select)


def align(array: Array, rank: int) -> Array:
    """Axes of extent 1 appended until there are `rank` axes after the lanes."""
    return array.reshape(array.shape + (1,) * (rank + 1 - array.ndim)) if array.ndim < rank + 1 else array


def choose(condition: Array, chosen: Array, other: Array) -> Array:
    """Lane by lane one of two values of any shape."""
    if chosen is other:
        return chosen
    return np.where(align(condition, max(chosen.ndim, other.ndim) - 1), chosen, other)
