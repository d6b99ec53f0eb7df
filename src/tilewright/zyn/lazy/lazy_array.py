"""Arrays that have not been computed: what blocks of a pipeline that wait (`lazy_blocks.py`) will have made.

In: the value of a block, and parts, orders and shapes that the program asks for. Out: `LazyArray` arrays, which know their shape and type, and where
their elements will be in the memory of the value. A value whose axes are turned and then joined, as those of attention's heads, is stored in that
order to begin with, unless somebody reads it already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.tree.block_graph import AffineIndex, BlockView, StorageLayout, composed, straight
from tilewright.tree.typed import ArrayArg
from tilewright.tree.views import Groups, axis_groups, reshaped

Shape = tuple[int, ...]


def viewed(array: Any, shape: Shape, places: Sequence[AffineIndex]) -> Any:
    """A view of what lies in memory: an array of NumPy, of ours, or a tensor of PyTorch."""
    if isinstance(array, np.ndarray):
        offset, strides = _steps(tuple(s // array.itemsize for s in array.strides), len(shape), places)
        flat = array.reshape(-1)[offset:] if offset else array.reshape(-1)
        return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * array.itemsize for s in strides))
    if hasattr(array, "as_strided"):
        offset, strides = _steps(array.stride(), len(shape), places)
        return array.as_strided(shape, strides, array.storage_offset() + offset)
    offset, strides = _steps(array.strides, len(shape), places)
    return array.strided(offset, shape, strides)


def _steps(apart: Shape, rank: int, places: Sequence[AffineIndex]) -> tuple[int, Shape]:
    """Where the first element of a view is, and how far its others are apart, in elements."""
    offset = sum(p.offset * s for p, s in zip(places, apart, strict=True))
    return offset, tuple(sum(p.steps[axis] * s for p, s in zip(places, apart, strict=True)) for axis in range(rank))


class LazyArray:
    """An array that has not been computed. `places` says where its elements are in the memory of a value."""

    def __init__(self, value: PendingValue, shape: Shape, extents: tuple[int | None, ...], places: tuple[AffineIndex, ...]) -> None:
        self.value, self.shape, self._extents, self._places = value, shape, extents, places
        self.dtype = value.dtype
        value.views.add(self)

    @property
    def is_computed(self) -> bool:
        return self.value.array is not None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def T(self) -> LazyArray:
        return self.transpose()

    def force(self) -> Any:
        """The array itself, after everything it needs has run."""
        value = self.value
        if value.array is None:
            value.compute()
        if self.shape == tuple(value.array.shape) and self._places == straight(self.ndim):
            return value.array
        return value.look(value.array, self.shape, self._places)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        found = self.force()
        return np.asarray(found.numpy() if hasattr(found, "numpy") else found, dtype)  # type: ignore[call-overload, no-any-return]

    def view(self) -> BlockView:
        """How a block that reads it finds its elements. From then on they stay where they are."""
        self.value.is_read = True
        return BlockView(self.value.number, self._extents, self._places)

    # -- views ------------------------------------------------------------------------------------------------------

    def part(self, axis: int, first: int, size: int) -> LazyArray:
        """`size` elements along an axis, from `first` on."""
        places = tuple(AffineIndex(p.offset + p.steps[axis] * first, p.steps) for p in self._places)
        return LazyArray(self.value, _with(self.shape, axis, size), _with(self._extents, axis, size), places)

    def sliced(self, indices: Sequence[int | str | slice]) -> LazyArray | None:
        """`x[i, a:b]` as a view; None where it is none: an element, nothing at all, or wrong."""
        if len(indices) > self.ndim or (len(indices) == self.ndim and not any(isinstance(i, slice) for i in indices)):
            return None
        found, axis = self, 0
        for index in indices:
            extent = found.shape[axis]
            if isinstance(index, slice):
                start, stop, _ = index.indices(extent)
                if stop <= start:
                    return None
                found, axis = found.part(axis, start, stop - start), axis + 1
            elif isinstance(index, str) or not -extent <= index < extent:
                return None
            else:
                found = found.part(axis, index % extent, 1)._without(axis)
        return found

    def _without(self, axis: int) -> LazyArray:
        """One axis less, of which there is one element."""
        places = tuple(AffineIndex(p.offset, (*p.steps[:axis], *p.steps[axis + 1 :])) for p in self._places)
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        return LazyArray(self.value, shape, (*self._extents[:axis], *self._extents[axis + 1 :]), places)

    def transpose(self, *axes: int) -> LazyArray:
        axes = axes or tuple(reversed(range(self.ndim)))
        places = tuple(AffineIndex(p.offset, tuple(p.steps[a] for a in axes)) for p in self._places)
        return LazyArray(self.value, tuple(self.shape[a] for a in axes), tuple(self._extents[a] for a in axes), places)

    def reshape(self, shape: Shape) -> LazyArray | None:
        """Another shape of the same elements (whose number is right); None where they do not lie so and cannot be made to."""
        groups = axis_groups(self.shape, shape)
        if groups is None:
            return None
        found = reshaped(self.shape, shape, self._extents, self._places)
        if found is None:
            if not self._lie_anew(groups):
                return None
            found = reshaped(self.shape, shape, self._extents, self._places)
            assert found is not None
        return LazyArray(self.value, shape, *found)

    def _lie_anew(self, groups: Groups) -> bool:
        """Give the value another order in memory, in which these groups of axes are one axis each."""
        value = self.value
        axes = [p.axis for p in self._places]
        if (
            value.is_read
            or value.array is not None
            or value.kept.places != straight(len(axes))
            or {*axes} != {*range(self.ndim)}
        ):
            return False
        own = [axes.index(axis) for axis in range(self.ndim)]  # the axis of the value that each axis of this view is
        if own == sorted(own) or self.shape != tuple(value.shape[axis] for axis in own):
            # Once computed, it lies so anyway: that is no reason to make code for its very extents. Or this is only a part of it.
            return False
        extents: list[int | None] = []
        stored: list[int | None] = list(value.kept.stored)
        places: list[AffineIndex] = []
        for old, _ in groups:
            mine = [own[o] for o in old]
            steps = [0] * self.ndim
            apart = 1
            for o, axis in zip(reversed(old), reversed(mine), strict=True):
                steps[axis] = apart
                apart *= self.shape[o]
            if len(old) == 1:
                extents.append(value.kept.extents[mine[0]])
            else:
                extents.append(apart)
                for o, axis in zip(old, mine, strict=True):
                    stored[axis] = self.shape[o]
            places.append(AffineIndex(0, tuple(steps)))
        value.lie(StorageLayout(tuple(extents), tuple(stored), tuple(places)))
        return True


@dataclass(eq=False)
class PendingValue:
    """What a block will have made."""

    number: int
    dtype: DType
    shape: Shape
    kept: StorageLayout
    compute: Callable[[], None]
    """Runs all that waits, so that there is an array."""
    look: Callable[[Any, Shape, tuple[AffineIndex, ...]], Any] = viewed
    """Makes a view of the array."""
    views: weakref.WeakSet[LazyArray] = field(default_factory=weakref.WeakSet)
    is_read: bool = False
    """A block reads it: it stays where it is."""
    array: Any = None

    def lie(self, kept: StorageLayout) -> None:
        """Another order in memory; views go with it."""
        for view in self.views:
            view._places = composed(kept.places, view._places)
            whole = {place.axis for place in view._places}
            view._extents = tuple(
                n if e is None and a not in whole else e
                for a, (e, n) in enumerate(zip(view._extents, view.shape, strict=True))
            )
        self.kept = kept


def settled(value: object) -> object:
    """A value with the arrays in it computed."""
    return exchanged(value, lambda found: found.force())


def spec_of(value: LazyArray) -> ArrayArg:
    return ArrayArg(value.dtype, value.ndim)


def _with(items: tuple[Any, ...], axis: int, item: object) -> tuple[Any, ...]:
    return (*items[:axis], item, *items[axis + 1 :])


def exchanged(value: object, change: Callable[[LazyArray], object]) -> object:
    """A value with the arrays in it exchanged; the very same one where it has none."""
    if isinstance(value, LazyArray):
        return change(value)
    if type(value) in (tuple, list):
        items = [exchanged(item, change) for item in value]  # type: ignore[attr-defined]
        if all(new is old for new, old in zip(items, value, strict=True)):  # type: ignore[call-overload]
            return value
        return tuple(items) if isinstance(value, tuple) else items
    if type(value) is dict:
        found = {key: exchanged(item, change) for key, item in value.items()}
        return found if any(found[key] is not item for key, item in value.items()) else value
    return value
