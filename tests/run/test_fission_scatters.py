"""Nests that run through loops before they scatter are two kernels on a CPU: one of lanes, and one that scatters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def centres(x: tw.Array, c: tw.Array, sums: tw.InOut, counts: tw.InOut) -> None:
    n, d = x.shape
    for i in range(n):
        best = 0
        least = 1e30
        for j in range(c.shape[0]):
            far = 0.0
            for f in range(d):
                far += (x[i, f] - c[j, f]) * (x[i, f] - c[j, f])
            if far < least:
                least = far
                best = j
        counts[best] += 1.0
        for f in range(d):
            sums[best, f] += x[i, f]


@tw.kernel
def lengths(start: tw.Array, bins: tw.InOut) -> None:
    """How often each length of a Collatz sequence comes."""
    for i in range(len(start)):
        value = start[i]
        steps = 0
        while value > 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            steps += 1
        bins[steps] += 1


@tw.kernel
def row_maxima(x: tw.Array, bins: tw.InOut) -> tw.Array:
    """Both are wanted: each row's sum, and how often each column has the largest."""
    n, m = x.shape
    total = tw.empty((n,), x.dtype)
    for i in range(n):
        where = 0
        for j in range(1, m):
            if x[i, j] > x[i, where]:
                where = j
        bins[where] += 1
        total[i] = x[i, where]
    return total


@tw.kernel
def grows(x: tw.Array, c: tw.InOut) -> None:
    """Reads what it adds to: one point after the other."""
    for i in range(len(x)):
        best = 0
        least = 1e30
        for j in range(len(c)):
            far = abs(x[i] - c[j])
            if far < least:
                least = far
                best = j
        c[best] += 0.5 * (x[i] - c[best])


def nearest(x: np.ndarray, c: np.ndarray) -> np.ndarray:
    return ((x[:, None].astype(np.float64) - c[None]) ** 2).sum(-1).argmin(1)


def names(kernel: Any, *args: np.ndarray) -> list[str]:
    return [call.kernel.name for call in kernel.stages(*args, target="cpu").stages.thread.calls]


@pytest.mark.parametrize("n", [0, 1, 2, 31, 33, 1009, 9973])
@pytest.mark.parametrize(("k", "d"), [(1, 1), (5, 3), (20, 4), (7, 19)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_points_go_to_their_centres(n: int, k: int, d: int, dtype: type) -> None:
    random = np.random.default_rng(n + k)
    x, c = random.random((n, d)).astype(dtype), random.random((k, d)).astype(dtype)
    sums, counts = np.ones((k, d), dtype), np.ones(k, dtype)
    centres(x, c, sums, counts)
    best = nearest(x, c)
    expected = np.ones((k, d))
    np.add.at(expected, best, x.astype(np.float64))
    assert np.array_equal(counts, 1.0 + np.bincount(best, minlength=k))
    assert np.allclose(sums, expected, rtol=1e-4 if dtype is np.float32 else 1e-12)


def test_the_nest_is_two_kernels_where_its_points_run_through_loops() -> None:
    x, c = np.random.random((100, 3)), np.random.random((5, 3))
    assert "centres.found" in names(centres, x, c, np.zeros((5, 3)), np.zeros(5))
    assert not any("found" in name for name in names(grows, x[:, 0].copy(), np.random.random(5)))


@pytest.mark.parametrize("n", [0, 1, 33, 5003])
def test_lengths_of_while_loops_are_counted(n: int) -> None:
    start = np.arange(1, n + 1)
    bins = np.zeros(400, np.int64)
    lengths(start, bins)
    expected = np.zeros(400, np.int64)
    for value in start.tolist():
        steps = 0
        while value > 1:
            value, steps = (value // 2 if value % 2 == 0 else 3 * value + 1), steps + 1
        expected[steps] += 1
    assert np.array_equal(bins, expected)


@pytest.mark.parametrize(("n", "m"), [(0, 4), (1, 1), (31, 33), (1009, 7)])
def test_results_beside_a_scatter(n: int, m: int) -> None:
    x = np.random.default_rng(n).random((n, m))
    view = np.empty((n, 2 * m))[:, ::2]
    view[...] = x
    for given in (x, view):
        bins = np.zeros(m, np.int64)
        total = row_maxima(given, bins)
        assert np.array_equal(total, x.max(1) if n else np.zeros(0))
        assert np.array_equal(bins, np.bincount(x.argmax(1), minlength=m) if n else np.zeros(m))


def test_points_that_read_what_they_add_to_run_in_order() -> None:
    x, c = np.random.default_rng(3).random(500), np.linspace(0, 1, 7)
    expected = c.copy()
    for value in x:
        best = int(np.abs(value - expected).argmin())
        expected[best] += 0.5 * (value - expected[best])
    grows(x, c)
    assert np.allclose(c, expected, rtol=1e-12)


def test_an_index_outside_names_its_line() -> None:
    with pytest.raises(IndexError, match="bins"):
        lengths(np.arange(1, 500), np.zeros(20, np.int64))
