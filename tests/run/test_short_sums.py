"""Many short sums on a CPU: distances of points, rows of a few elements, products of small matrices with vectors."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def distances(a: tw.Array, b: tw.Array) -> tw.Array:
    n, d = a.shape
    m = b.shape[0]
    out = tw.empty((n, m), a.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for k in range(d):
            step = a[i, k] - b[j, k]
            total += step * step
        out[i, j] = tw.sqrt(total)
    return out


@tw.kernel
def nearest_coordinate(a: tw.Array, b: tw.Array) -> tw.Array:
    batch, n, d = a.shape
    m = b.shape[1]
    out = tw.empty((batch, n, m), a.dtype)
    for q, i, j in tw.grid(batch, n, m):
        least = tw.inf
        for k in range(d):
            least = tw.min(least, tw.abs(a[q, i, k] - b[q, j, k]))
        out[q, i, j] = least
    return out


@tw.kernel
def lengths(a: tw.Array) -> tw.Array:
    n, d = a.shape
    out = tw.empty(n, a.dtype)
    for i in tw.grid(n):
        total = 0.0
        for k in range(d):
            total += a[i, k] * a[i, k]
        out[i] = tw.sqrt(total)
    return out


@tw.kernel
def each_times(m: tw.Array, v: tw.Array) -> tw.Array:
    n, rows, cols = m.shape
    out = tw.empty((n, rows), m.dtype)
    for p, i in tw.grid(n, rows):
        total = 0.0
        for k in range(cols):
            total += m[p, i, k] * v[p, k]
        out[p, i] = total
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pairs_of_rows(dtype) -> None:
    random = np.random.default_rng(3)
    for n, m, d in [(1, 1, 1), (3, 5, 3), (5, 9, 7), (4, 8, 0), (9, 16, 16), (19, 520, 5), (2, 3, 33), (0, 4, 2)]:
        a, b = random.standard_normal((n, d)).astype(dtype), random.standard_normal((m, d)).astype(dtype)
        exact = np.sqrt(((a[:, None].astype(np.float64) - b[None]) ** 2).sum(-1))
        np.testing.assert_allclose(distances(a, b), exact, rtol=1e-5 if dtype is np.float32 else 1e-12)


def test_pairs_of_rows_by_batch() -> None:
    random = np.random.default_rng(4)
    for n, m, d in [(1, 3, 2), (6, 11, 3), (33, 31, 4)]:
        a, b = random.standard_normal((2, n, d)).astype(np.float32), random.standard_normal((2, m, d)).astype(np.float32)
        assert np.array_equal(nearest_coordinate(a, b), np.abs(a[:, :, None] - b[:, None]).min(-1))
    a[1, 5, 2] = np.nan
    assert np.isnan(nearest_coordinate(a, b)[1, 5]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_any_length(dtype) -> None:
    random = np.random.default_rng(5)
    for n, d in [(1, 1), (7, 3), (40, 5), (1000, 16), (33, 17), (130, 2), (5, 1000), (2, 70000), (70, 0), (0, 3)]:
        a = random.standard_normal((n, d)).astype(dtype)
        np.testing.assert_allclose(lengths(a), np.sqrt((a.astype(np.float64) ** 2).sum(1)), rtol=1e-5 if dtype is np.float32 else 1e-12)


def test_small_matrices_times_vectors() -> None:
    random = np.random.default_rng(6)
    for n, rows, cols in [(1, 1, 1), (50, 3, 3), (17, 4, 5), (100, 8, 8), (3, 40, 6), (2, 19, 100), (1, 300, 2), (90, 13, 13)]:
        m, v = random.standard_normal((n, rows, cols)).astype(np.float32), random.standard_normal((n, cols)).astype(np.float32)
        np.testing.assert_allclose(each_times(m, v), np.einsum("pik,pk->pi", m.astype(np.float64), v), rtol=1e-4, atol=1e-5)
