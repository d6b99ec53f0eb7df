"""Views of arrays that have not been computed: where their elements are in the end, whatever order the array got."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.base.dtypes import f32
from tilewright.tree.block_graph import StorageLayout, straight
from tilewright.zyn.lazy.lazy_array import LazyArray, PendingValue


def deferred(shape: tuple[int, ...]) -> LazyArray:
    rank = len(shape)

    def compute() -> None:
        raise AssertionError("nothing was to be computed")

    value = PendingValue(0, f32, shape, StorageLayout((None,) * rank, (None,) * rank, straight(rank)), compute)
    return LazyArray(value, shape, (None,) * rank, straight(rank))


def store(array: np.ndarray, value: PendingValue) -> np.ndarray:
    """The array as it lies in memory, one axis for each place."""
    kept = value.kept
    extents = [e if e is not None else array.shape[p.axis or 0] for e, p in zip(kept.extents, kept.places, strict=True)]
    memory = np.full(extents, np.nan, np.float32)
    for index in itertools.product(*map(range, array.shape)):
        memory[tuple(p.offset + sum(s * i for s, i in zip(p.steps, index, strict=True)) for p in kept.places)] = array[
            index
        ]
    return memory


def shapes_of(size: int, draw: Any) -> tuple[int, ...]:
    found = []
    while size > 1:
        factor = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        found.append(factor)
        size //= factor
    return tuple(found) or (1,)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_views_are_those_of_numpy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    first = deferred(shape)
    pairs: list[tuple[LazyArray, np.ndarray]] = [(first, array)]
    for _ in range(data.draw(st.integers(1, 5))):
        view, same = pairs[data.draw(st.integers(0, len(pairs) - 1))]
        kind = data.draw(st.sampled_from(["part", "index", "transpose", "reshape"]))
        if kind == "index" and view.ndim > 1:
            index = data.draw(st.integers(-view.shape[0], view.shape[0] - 1)), slice(None, data.draw(st.integers(1, 3)))
            found = view.sliced(index)
            assert found is not None
            pairs.append((found, same[index]))
        elif kind in ("part", "index"):
            axis = data.draw(st.integers(0, view.ndim - 1))
            start = data.draw(st.integers(0, view.shape[axis] - 1))
            count = data.draw(st.integers(1, view.shape[axis] - start))
            pairs.append((view.part(axis, start, count), same[(slice(None),) * axis + (slice(start, start + count),)]))
        elif kind == "transpose":
            axes = tuple(data.draw(st.permutations(range(view.ndim))))
            pairs.append((view.transpose(*axes), same.transpose(axes)))
        else:
            other = shapes_of(view.size, data.draw)
            made = view.reshape(other)
            if made is not None:  # else it has to be computed first
                pairs.append((made, same.reshape(other)))
    first.value.array = store(array, first.value)
    assert not np.isnan(first.value.array).any()
    for view, same in pairs:
        assert view.shape == same.shape and view.dtype is f32
        np.testing.assert_array_equal(view.force(), same)


def test_shapes_of_a_new_array() -> None:
    for shape, other in (((2, 1, 6), (2, 2, 3)), ((6,), (2, 3, 1)), ((4, 1, 3), (4, 3))):
        found = deferred(shape).reshape(other)
        assert found is not None and found.shape == other
    for shape, other in (((3, 4), (12,)), ((3, 4), (4, 3)), ((2, 3, 4), (2, 12))):
        assert deferred(shape).reshape(other) is None  # a view of the array, once it is there
        assert deferred(shape[::-1]).T.reshape(other) is not None


def test_heads_beside_each_other() -> None:
    """[batch, head, position, feature], turned and joined: stored as [batch, position, head and feature]."""
    made = deferred((2, 3, 5, 4))
    joined = made.transpose(0, 2, 1, 3).reshape((2, 5, 12))
    assert joined is not None
    assert made.value.kept.extents == (None, None, 12) and made.value.kept.stored == (None, 3, None, 4)
    assert joined.view().places == straight(3)


def test_what_is_read_stays_where_it_is() -> None:
    made = deferred((3, 4))
    made.view()
    assert made.transpose().reshape((12,)) is None and made.reshape((12,)) is None
    assert made.reshape((3, 2, 2)) is not None
