"""Arrays that have not been computed: what blocks of a pipeline that wait (`waiting.py`) will have made.

In: the value of a block, and parts, orders and shapes that the program asks for. Out: `Deferred` arrays, which know their shape and type, and where
their elements will be in the memory of the value. A value whose axes are turned and then joined, as those of attention's heads, is stored in that
order to begin with, unless somebody reads it already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.tree.joined import Kept, Place, View, composed, straight
from tilewright.tree.typed import ArrayArg

Shape = tuple[int, ...]


class Deferred:
    """An array that has not been computed. `places` says where its elements are in the memory of a value."""

    def __init__(self, value: Value, shape: Shape, extents: tuple[int | None, ...], places: tuple[Place, ...]) -> None:
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
    def T(self) -> Deferred:
        return self.transpose()

    def force(self) -> Any:
        """The array itself, after everything it needs has run."""
        value = self.value
        if value.array is None:
            value.compute()
        return _viewed(value.array, self.shape, self._places)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        found = self.force()
        return np.asarray(found if isinstance(found, np.ndarray) else found.numpy(), dtype)  # type: ignore[call-overload, no-any-return]

    def view(self) -> View:
        """How a block that reads it finds its elements. From then on they stay where they are."""
        self.value.is_read = True
        return View(self.value.number, self._extents, self._places)

    # -- views ------------------------------------------------------------------------------------------------------

    def part(self, axis: int, first: int, size: int) -> Deferred:
        """`size` elements along an axis, from `first` on."""
        places = tuple(replace(p, offset=p.offset + p.steps[axis] * first) for p in self._places)
        return Deferred(self.value, _with(self.shape, axis, size), _with(self._extents, axis, size), places)

    def transpose(self, *axes: int) -> Deferred:
        axes = axes or tuple(reversed(range(self.ndim)))
        places = tuple(replace(p, steps=tuple(p.steps[a] for a in axes)) for p in self._places)
        return Deferred(self.value, tuple(self.shape[a] for a in axes), tuple(self._extents[a] for a in axes), places)

    def reshape(self, shape: Shape) -> Deferred | None:
        """Another shape of the same elements (whose number is right); None where they do not lie so and cannot be made to."""
        found = self._groups(shape)
        if found is None:
            return None
        if any(self._merged(old) is None for old, _ in found) and not self._lie_anew(found):
            return None
        extents: list[int | None] = []
        places = [Place(p.offset, ()) for p in self._places]
        for old, new in found:
            steps = self._merged(old)
            assert steps is not None
            extents += [self._kept_extent(old, new, shape)] if len(new) == 1 else [shape[n] for n in new]
            for n in new:
                apart = prod(shape[m] for m in new if m > n)
                places = [replace(p, steps=(*p.steps, s * apart)) for p, s in zip(places, steps, strict=True)]
        return Deferred(self.value, shape, tuple(extents), tuple(places))

    def _kept_extent(self, old: Sequence[int], new: Sequence[int], shape: Shape) -> int | None:
        real = [o for o in old if self.shape[o] != 1]
        return self._extents[old[0]] if len(old) == 1 else self._extents[real[0]] if len(real) == 1 else shape[new[0]]

    def _groups(self, shape: Shape) -> list[tuple[list[int], list[int]]] | None:
        """Axes of this array and of one of another shape, in groups of as many elements."""
        if 0 in shape or not self.shape:
            return None
        found: list[tuple[list[int], list[int]]] = []
        i = j = 0
        while i < len(self.shape) and j < len(shape):
            old, new = [i], [j]
            here, there = self.shape[i], shape[j]
            i, j = i + 1, j + 1
            while here != there:
                if here < there:
                    here, old, i = here * self.shape[i], [*old, i], i + 1
                else:
                    there, new, j = there * shape[j], [*new, j], j + 1
            found.append((old, new))
        if not found:
            return None
        found[-1] = [*found[-1][0], *range(i, len(self.shape))], [*found[-1][1], *range(j, len(shape))]
        return found

    def _merged(self, axes: Sequence[int]) -> list[int] | None:
        """The step along each axis of memory of these axes as one; None where they are none."""
        real = [a for a in axes if self.shape[a] != 1] or list(axes[-1:])
        found: list[int] = []
        for place in self._places:
            for first, second in pairwise(real):
                if place.steps[first] != place.steps[second] * self.shape[second]:
                    return None
            found.append(place.steps[real[-1]])
        return found

    def _lie_anew(self, groups: Sequence[tuple[list[int], list[int]]]) -> bool:
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
        extents: list[int | None] = []
        stored: list[int | None] = list(value.kept.stored)
        places: list[Place] = []
        for old, new in groups:
            if len(new) != 1:
                return False
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
            places.append(Place(0, tuple(steps)))
        value.lie(Kept(tuple(extents), tuple(stored), tuple(places)))
        return True


@dataclass(eq=False)
class Value:
    """What a block will have made."""

    number: int
    dtype: DType
    kept: Kept
    compute: Callable[[], None]
    """Runs all that waits, so that there is an array."""
    views: weakref.WeakSet[Deferred] = field(default_factory=weakref.WeakSet)
    is_read: bool = False
    """A block reads it: it stays where it is."""
    array: Any = None

    def lie(self, kept: Kept) -> None:
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


def spec_of(value: Deferred) -> ArrayArg:
    return ArrayArg(value.dtype, value.ndim)


def _with(items: tuple[Any, ...], axis: int, item: object) -> tuple[Any, ...]:
    return (*items[:axis], item, *items[axis + 1 :])


def exchanged(value: object, change: Callable[[Deferred], object]) -> object:
    """A value with the arrays in it exchanged."""
    if isinstance(value, Deferred):
        return change(value)
    if isinstance(value, tuple | list):
        items = [exchanged(item, change) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: exchanged(item, change) for key, item in value.items()}
    return value


def _viewed(array: Any, shape: Shape, places: Sequence[Place]) -> Any:
    """A view of what lies in memory."""
    if shape == tuple(array.shape) and tuple(places) == straight(len(shape)):
        return array
    apart = tuple(s // array.itemsize for s in array.strides) if isinstance(array, np.ndarray) else array.strides
    offset = sum(p.offset * s for p, s in zip(places, apart, strict=True))
    strides = tuple(sum(p.steps[axis] * s for p, s in zip(places, apart, strict=True)) for axis in range(len(shape)))
    if not isinstance(array, np.ndarray):
        return array.strided(offset, shape, strides)
    flat = array.reshape(-1)[offset:] if offset else array.reshape(-1)
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(s * array.itemsize for s in strides))
