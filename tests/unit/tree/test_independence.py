"""Stores at a base from memory and an index (`cache[s, positions[s] + t]`) are parallel where the base is chosen by indices that an axis tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def by_sequence(cache: tw.InOut, rows: tw.Array, positions: tw.Array) -> None:
    sequences, tokens, depth = rows.shape
    for s, t, d in tw.grid(sequences, tokens, depth):
        cache[s, positions[s] + t, d] = rows[s, t, d]


@tw.kernel
def by_one_base(cache: tw.InOut, rows: tw.Array, positions: tw.Array) -> None:
    tokens, depth = rows.shape
    first = positions[0]
    for t, d in tw.grid(tokens, depth):
        cache[first + t, d] = rows[t, d]


@tw.kernel
def may_meet(cache: tw.InOut, rows: tw.Array, positions: tw.Array) -> None:
    sequences, tokens, depth = rows.shape
    for s, t, d in tw.grid(sequences, tokens, depth):
        cache[positions[s] + t, d] = rows[s, t, d]


@tw.kernel
def moves_its_base(cache: tw.InOut, rows: tw.Array, positions: tw.InOut) -> None:
    for t in range(len(rows)):
        cache[positions[0] + t] = rows[t]
        positions[0] = 1 - positions[0]


def parallel_over(kernel: Any, *args: np.ndarray) -> int:
    """How many indices the outermost parallel loop has."""
    typed = kernel.stages(*args, target="cpu").typed
    return max((len(s.vars) for s in typed.body if getattr(s, "kind", "") == "parallel"), default=0)


@pytest.mark.parametrize(("kernel", "shape", "cache", "indices"), [(by_sequence, (2, 3, 4), (2, 8, 4), 3), (by_one_base, (3, 4), (8, 4), 2), (may_meet, (2, 3, 4), (8, 4), 0), (moves_its_base, (5,), (8,), 0)])
def test_bases_from_memory(kernel: Any, shape: tuple[int, ...], cache: tuple[int, ...], indices: int) -> None:
    rows, positions = np.arange(np.prod(shape), dtype=np.float32).reshape(shape), np.array([1, 2], np.int32)
    assert parallel_over(kernel, np.zeros(cache, np.float32), rows, positions) == indices


def test_rows_that_meet_are_written_in_order() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    cache = np.zeros((8, 4), np.float32)
    may_meet(cache, rows, np.array([1, 2], np.int32))
    assert np.array_equal(cache[1:5], np.concatenate([rows[0, :1], rows[1]]))
    x, p = np.zeros(8, np.float32), np.array([0], np.int32)
    moves_its_base(x, np.arange(1, 6, dtype=np.float32), p)
    assert x.tolist() == [1, 0, 3, 0, 5, 0, 0, 0]
