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


@tw.kernel
def by_a_square(x: tw.Array) -> tw.Array:
    a = tw.zeros((len(x), 7), tw.f64)
    for i in range(len(x)):
        a[i, (i * i) % 7] = a[5, 4] + x[i]
    return a


@tw.kernel
def by_a_sum(x: tw.Array, steps: tw.Array) -> tw.Array:
    a = tw.zeros((len(x), 9), tw.f64)
    for i in range(len(x)):
        k = 1
        for j in range(len(steps)):
            k = k + steps[j]
        a[i, k] = a[3, 7] + x[i]
    return a


@tw.kernel
def by_a_square_in_steps(x: tw.Array) -> tw.Array:
    a = tw.zeros((len(x), 7), tw.f64)
    for t in range(3):
        for i in range(len(x)):
            a[i, (i * i + t) % 7] = a[5, 4] + x[i]
    return a


def in_order(columns: list[int], other: tuple[int, int], x: np.ndarray, width: int, steps: int = 1) -> np.ndarray:
    """Each row stores next to an element of one row, one after the other."""
    a = np.zeros((len(x), width))
    for t in range(steps):
        for i, column in enumerate(columns):
            a[i, (column + t) % width] = a[other] + x[i]
    return a


def test_an_index_of_which_nothing_is_known_may_be_any() -> None:
    x = np.arange(1.0, 10.0)
    squares = [i * i for i in range(9)]
    assert parallel_over(by_a_square, x) == 0
    assert np.array_equal(by_a_square(x), in_order(squares, (5, 4), x, 7))
    steps = np.array([1, 2, 3])
    assert parallel_over(by_a_sum, x, steps) == 0
    assert np.array_equal(by_a_sum(x, steps), in_order([7] * 9, (3, 7), x, 9))
    assert np.array_equal(by_a_square_in_steps(x), in_order(squares, (5, 4), x, 7, 3))


@tw.kernel
def knapsack(weights: tw.Array, values: tw.Array, room: int) -> tw.Array:
    best = tw.zeros((len(weights) + 1, room + 1), tw.f64)
    for i in range(1, len(weights) + 1):
        for c in range(room + 1):
            best[i, c] = best[i - 1, c]
            if weights[i - 1] <= c:
                best[i, c] = max(best[i, c], best[i - 1, c - weights[i - 1]] + values[i - 1])
    return best


@tw.kernel
def knapsack_again(weights: tw.Array, values: tw.Array, room: int) -> tw.Array:
    """Each may be taken several times: a row reads itself."""
    best = tw.zeros((len(weights) + 1, room + 1), tw.f64)
    for i in range(1, len(weights) + 1):
        w = weights[i - 1]
        for c in range(room + 1):
            best[i, c] = best[i - 1, c]
            if w <= c:
                best[i, c] = max(best[i, c], best[i, c - w] + values[i - 1])
    return best


@tw.kernel
def shifted_by_number(x: tw.Array, by: int) -> tw.Array:
    y = x * 1.0
    for _t in range(3):
        for i in range(len(x) - by):
            y[i + by] = y[i] + 1.0
    return y


def exact_knapsack(weights: np.ndarray, values: np.ndarray, room: int, again: bool) -> np.ndarray:
    best = np.zeros((len(weights) + 1, room + 1))
    for i in range(1, len(weights) + 1):
        best[i] = best[i - 1]
        for c in range(weights[i - 1], room + 1):
            best[i, c] = max(best[i, c], best[i if again else i - 1, c - weights[i - 1]] + values[i - 1])
    return best


@pytest.mark.parametrize(("count", "room"), [(1, 1), (3, 0), (7, 31), (12, 133)])
def test_steps_that_read_the_row_before_at_a_place_from_memory_are_parallel(count: int, room: int) -> None:
    random = np.random.default_rng(count)
    weights, values = random.integers(0, 20, count), random.random(count)
    kinds = [getattr(s, "kind", "") for s in knapsack.stages(weights, values, room, target="cpu").typed.body]
    assert "ordered" in kinds
    assert np.array_equal(knapsack(weights, values, room), exact_knapsack(weights, values, room, False))
    kinds = [getattr(s, "kind", "") for s in knapsack_again.stages(weights, values, room, target="cpu").typed.body]
    assert "ordered" not in kinds
    assert np.array_equal(knapsack_again(weights, values, room), exact_knapsack(weights, values, room, True))


@pytest.mark.parametrize("by", [0, 1, 3])
def test_a_row_that_reads_itself_a_number_before_stays_in_order(by: int) -> None:
    x = np.random.default_rng(by).random(33)
    y = x.copy()
    for _ in range(3):
        for i in range(33 - by):
            y[i + by] = y[i] + 1.0
    assert np.array_equal(shifted_by_number(x, by), y)
