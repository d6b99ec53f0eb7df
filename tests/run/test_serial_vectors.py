"""Sums and independent loops inside loops that run in order: factorisations and solvers as they stand in books, against float64, and at every stage of the emulator."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import tilewright as tw

pytestmark = pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
SIZES = (1, 2, 5, 16, 17, 31, 67)
EMULATED = ("emulator:loop", "emulator:tile", "emulator:thread")


@tw.kernel
def solve_lower(low: tw.Array, b: tw.Array) -> tw.Array:
    n = b.shape[0]
    x = b * 1.0
    for i in range(n):
        for j in range(i):
            x[i] -= low[i, j] * x[j]
        x[i] = x[i] / low[i, i]
    return x


@tw.kernel
def solve_upper(up: tw.Array, b: tw.Array) -> tw.Array:
    n = b.shape[0]
    x = b * 1.0
    for back in range(n):
        i = n - 1 - back
        s = b[i]
        for j in range(i + 1, n):
            s -= up[i, j] * x[j]
        x[i] = s / up[i, i]
    return x


@tw.kernel
def cholesky(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    a = x * 1.0
    for i in range(n):
        for j in range(i):
            for k in range(j):
                a[i, j] -= a[i, k] * a[j, k]
            a[i, j] = a[i, j] / a[j, j]
        for k in range(i):
            a[i, i] -= a[i, k] * a[i, k]
        a[i, i] = tw.sqrt(a[i, i])
    return a


@tw.kernel
def crout(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    a = x * 1.0
    for i in range(n):
        for j in range(i):
            for k in range(j):
                a[i, j] -= a[i, k] * a[k, j]
            a[i, j] = a[i, j] / a[j, j]
        for j in range(i, n):
            for k in range(i):
                a[i, j] -= a[i, k] * a[k, j]
    return a


@tw.kernel
def meets_itself(x: tw.Array) -> tw.Array:
    """What is added up is read, too: the loop is no sum."""
    n = x.shape[0]
    a = x * 1.0
    for i in range(n):
        for j in range(i + 1):
            a[i] += a[j] * 0.5
    return a


@tw.kernel
def extremes(x: tw.Array) -> tw.Array:
    """A maximum and its place for each step, which the next begins with."""
    n = x.shape[0]
    a = x * 1.0
    for _ in range(3):
        top = a[0]
        where = 0
        for i in range(n):
            if a[i] > top:
                top = a[i]
                where = i
        low = a[0]
        for i in range(n):
            low = min(low, a[i])
        a[where] = low - 1.0
    return a


@tw.kernel
def determinants(stack: tw.Array) -> tw.Array:
    """A pivoted elimination for each point of a grid."""
    g, n, _ = stack.shape
    a = stack * 1.0
    out = tw.empty(g, stack.dtype)
    for s in tw.grid(g):
        d = 1.0
        for k in range(n):
            best = k
            for i in range(k + 1, n):
                if abs(a[s, i, k]) > abs(a[s, best, k]):
                    best = i
            if best != k:
                d = -d
                for j in range(n):
                    tmp = a[s, k, j]
                    a[s, k, j] = a[s, best, j]
                    a[s, best, j] = tmp
            d = d * a[s, k, k]
            for i in range(k + 1, n):
                f = a[s, i, k] / a[s, k, k]
                for j in range(k, n):
                    a[s, i, j] = a[s, i, j] - f * a[s, k, j]
        out[s] = d
    return out


@tw.kernel
def logistic(x: tw.Array, steps: int) -> tw.Array:
    n = x.shape[0]
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        v = x[i]
        for _ in range(steps):
            v = 3.7 * v * (1.0 - v)
        out[i] = v
    return out


def _matrix(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, n)) + 2 * n * np.eye(n)


def _near(found: Any, wanted: np.ndarray, dtype: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=(2e-5 if dtype is np.float32 else 1e-12) * max(1.0, float(np.abs(wanted).max())))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_solvers(dtype: Any) -> None:
    for n in SIZES:
        m, b = _matrix(n).astype(dtype), np.random.default_rng(n).standard_normal(n).astype(dtype)
        wide = m.astype(np.float64)
        _near(solve_lower(m, b), np.linalg.solve(np.tril(wide), b.astype(np.float64)), dtype)
        _near(solve_upper(m, b), np.linalg.solve(np.triu(wide), b.astype(np.float64)), dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_factors(dtype: Any) -> None:
    for n in SIZES:
        m = _matrix(n)
        square = (m @ m.T).astype(dtype)
        _near(np.tril(np.asarray(cholesky(square))), np.linalg.cholesky(square.astype(np.float64)), dtype)
        found = np.asarray(crout(m.astype(dtype))).astype(np.float64)
        _near((np.tril(found, -1) + np.eye(n)) @ np.triu(found), m.astype(dtype).astype(np.float64), dtype)


@pytest.mark.parametrize("device", EMULATED)
def test_every_stage(device: str) -> None:
    n = 19
    m, b = _matrix(n), np.random.default_rng(n).standard_normal(n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _near(solve_lower(m, b, device=device), np.linalg.solve(np.tril(m), b), np.float64)
        _near(np.tril(np.asarray(cholesky(m @ m.T, device=device))), np.linalg.cholesky(m @ m.T), np.float64)


def test_a_sum_that_reads_what_it_adds_to_runs_in_order() -> None:
    x = np.random.default_rng(0).standard_normal(23)
    wanted = x.copy()
    for i in range(23):
        for j in range(i + 1):
            wanted[i] += wanted[j] * 0.5
    np.testing.assert_allclose(np.asarray(meets_itself(x)), wanted, rtol=1e-14)


def test_extremes_of_every_step() -> None:
    for n in (1, 7, 33, 70):
        x = np.random.default_rng(n).standard_normal(n)
        wanted = x.copy()
        for _ in range(3):
            where = int(np.argmax(wanted))
            wanted[where] = wanted.min() - 1.0
        np.testing.assert_array_equal(np.asarray(extremes(x)), wanted)


def test_a_solver_for_each_point() -> None:
    for g, n in ((1, 1), (3, 5), (7, 18), (130, 4)):
        stack = np.random.default_rng(g).standard_normal((g, n, n))
        np.testing.assert_allclose(np.asarray(determinants(stack)), np.linalg.det(stack), rtol=1e-9)


def test_points_with_loops_of_their_own_are_shared_out() -> None:
    """Blocks are of few points: a grid of hundreds is more than one block."""
    x = np.random.default_rng(5).random(300)
    wanted = x.copy()
    for _ in range(5):
        wanted = 3.7 * wanted * (1.0 - wanted)
    np.testing.assert_allclose(np.asarray(logistic(x, 5)), wanted, rtol=1e-12)
    for kernel, args in ((logistic, (x, 5)), (determinants, (np.ones((300, 4, 4)),))):
        call = kernel.stages(*args, target="aarch64-neon").stages.tile.calls[-1]
        blocks = call.kernel.grid[0]
        assert blocks.evaluate(dict.fromkeys(blocks.names, 300)) > 1


@tw.kernel
def grouped(x: tw.Array, scale: tw.Array) -> tw.Array:
    """Sums over two axes, then loops over both, of which what lies in memory is the inner one."""
    n, channels, width = x.shape
    each = channels // 2
    out = tw.empty((n, channels, width), x.dtype)
    for b, g in tw.grid(n, 2):
        total = 0.0
        for c in range(each):
            for j in range(width):
                total += x[b, g * each + c, j]
        mean = total / (each * width)
        for c in range(each):
            for j in range(width):
                out[b, g * each + c, j] = (x[b, g * each + c, j] - mean) * scale[g * each + c]
    return out


@pytest.mark.parametrize(("n", "channels", "width"), [(1, 2, 1), (2, 6, 31), (3, 4, 33), (2, 10, 127), (1, 4, 0)])
def test_loops_over_groups_are_vectors(n: int, channels: int, width: int) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((n, channels, width)).astype(np.float32)
    scale = rng.standard_normal(channels).astype(np.float32)
    parts = x.astype(np.float64).reshape(n, 2, channels // 2, width)
    wanted = (parts - (parts.mean((2, 3), keepdims=True) if width else 0.0)).reshape(x.shape) * scale[:, None]
    np.testing.assert_allclose(grouped(x, scale), wanted, rtol=1e-5, atol=1e-5)
    assert grouped.last is not None
    assert "vector=" in grouped.last.schedule
