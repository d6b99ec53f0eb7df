"""Steps that read a row and a column which they write: whatever they compute, results are those of the plain loops; and such steps run in parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.tree.typed import TypedLoop

pytestmark = pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
EMULATED = ("emulator:loop", "emulator:tile", "emulator:thread")


@tw.kernel
def paths(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    d = x * 1.0
    for k in range(n):
        for i, j in tw.grid(n, n):
            d[i, j] = min(d[i, j], d[i, k] + d[k, j])
    return d


@tw.kernel
def anything(x: tw.Array) -> tw.Array:
    """No invariant saves this one: rows and columns do change in their own step."""
    n = x.shape[0]
    d = x * 1.0
    for k in range(n):
        for i in range(n):
            for j in range(n):
                d[i, j] = d[i, j] * 0.25 + d[i, k] * d[k, j] - d[k, k] * 0.125
    return d


@tw.kernel
def some_steps(x: tw.Array, first: int) -> tw.Array:
    """Steps are a part of the rows."""
    n = x.shape[0]
    d = x * 1.0
    for k in range(1, n - 1):
        for i in range(n):
            for j in range(n):
                d[i, j] = d[i, j] * 0.5 + d[i, k] * 0.25 + d[k, j] * first
    return d


@tw.kernel
def beyond(x: tw.Array) -> tw.Array:
    """The pivot need not be one of the rows that are written."""
    n = x.shape[0]
    d = x * 1.0
    for k in range(n):
        for i in range(2, n - 2):
            for j in range(n):
                d[i, j] = d[i, j] * 0.5 + d[k, j] * 0.25
    return d


@tw.kernel
def jordan(x: tw.Array) -> tw.Array:
    n, m = x.shape
    a = x * 1.0
    for k in range(n):
        for i in range(n):
            if i != k:
                f = a[i, k] / a[k, k]
                for j in range(m):
                    a[i, j] = a[i, j] - f * a[k, j]
    return a


def _by_loops(x: np.ndarray, step: Callable[[np.ndarray, int, int, int], float], steps: range, rows: range) -> np.ndarray:
    d = x.astype(np.float64)
    for k in steps:
        for i in rows:
            for j in range(d.shape[1]):
                d[i, j] = step(d, i, j, k)
    return d


@pytest.mark.parametrize("n", [1, 2, 5, 17, 23])
def test_shortest_paths(n: int) -> None:
    x = np.random.default_rng(n).random((n, n)).astype(np.float32)
    wanted = _by_loops(x, lambda d, i, j, k: min(d[i, j], d[i, k] + d[k, j]), range(n), range(n))
    np.testing.assert_allclose(np.asarray(paths(x)), wanted, rtol=1e-6)


def test_shortest_paths_with_infinities_and_nan() -> None:
    x = np.random.default_rng(3).random((19, 19))
    x[x > 0.6] = np.inf
    with np.errstate(invalid="ignore"):
        wanted = _by_loops(x, lambda d, i, j, k: min(d[i, j], d[i, k] + d[k, j]), range(19), range(19))
    np.testing.assert_array_equal(np.asarray(paths(x)), wanted)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 21])
def test_steps_that_change_their_own_row(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, n)) * 0.5
    wanted = _by_loops(x, lambda d, i, j, k: d[i, j] * 0.25 + d[i, k] * d[k, j] - d[k, k] * 0.125, range(n), range(n))
    np.testing.assert_allclose(np.asarray(anything(x)), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 18])
def test_parts_of_the_rows(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, n))
    wanted = _by_loops(x, lambda d, i, j, k: d[i, j] * 0.5 + d[i, k] * 0.25 + d[k, j] * 2, range(1, n - 1), range(n))
    np.testing.assert_allclose(np.asarray(some_steps(x, 2)), wanted, rtol=1e-9)
    wanted = _by_loops(x, lambda d, i, j, k: d[i, j] * 0.5 + d[k, j] * 0.25, range(n), range(2, n - 2))
    np.testing.assert_allclose(np.asarray(beyond(x)), wanted, rtol=1e-12)


def test_elimination_of_all_other_rows() -> None:
    for n in (1, 4, 17):
        x = np.random.default_rng(n).standard_normal((n, n + 3)) + 3 * n * np.eye(n, n + 3)
        found = np.asarray(jordan(x))
        np.testing.assert_allclose(found[:, n:] / np.diag(found)[:, None], np.linalg.solve(x[:, :n], x[:, n:]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", EMULATED)
def test_every_stage(device: str) -> None:
    x: Any = np.random.default_rng(1).standard_normal((9, 9)) * 0.5
    wanted = _by_loops(x, lambda d, i, j, k: d[i, j] * 0.25 + d[i, k] * d[k, j] - d[k, k] * 0.125, range(9), range(9))
    np.testing.assert_allclose(np.asarray(anything(x, device=device)), wanted, rtol=1e-9, atol=1e-9)


def test_steps_of_shortest_paths_are_shared_out() -> None:
    (loop,) = (s for s in paths.stages(np.ones((8, 8), np.float32), target="cpu").typed.body if getattr(s, "kind", "") == "ordered")
    assert [s.kind for s in loop.body if isinstance(s, TypedLoop)] == ["parallel"] * 4
