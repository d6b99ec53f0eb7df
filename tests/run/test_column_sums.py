"""Reductions across the rows of a matrix: `y[j] = sum_i t[i] * a[i, j]` in its spellings, against float64, on the CPU and at every stage of the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw

EMULATED = ("emulator:loop", "emulator:tile", "emulator:thread")


@tw.kernel
def weighted(t: tw.Array, a: tw.Array) -> tw.Array:
    m, n = a.shape
    y = tw.empty(n, a.dtype)
    for j in tw.grid(n):
        s = a[0, j] * t[0] * 0
        for i in range(m):
            s += t[i] * a[i, j]
        y[j] = tw.cast(s, a.dtype)
    return y


@tw.kernel
def added(t: tw.Array, a: tw.Array) -> tw.Array:
    m, n = a.shape
    y = tw.zeros(n, a.dtype)
    for i in range(m):
        for j in range(n):
            y[j] += t[i] * a[i, j]
    return y


@tw.kernel
def product(t: tw.Array, a: tw.Array) -> tw.Array:
    return t @ a


@tw.kernel
def transposed(t: tw.Array, a: tw.Array) -> tw.Array:
    return a.T @ t


@tw.kernel
def both_ways(a: tw.Array, x: tw.Array, t: tw.Array) -> tuple[tw.Array, tw.Array]:
    return a @ x, a.T @ t


@tw.kernel
def lowest(t: tw.Array, a: tw.Array) -> tw.Array:
    m, n = a.shape
    y = tw.empty(n, a.dtype)
    for j in tw.grid(n):
        s = tw.inf
        for i in range(m):
            s = min(s, t[i] + a[i, j])
        y[j] = tw.cast(s, a.dtype)
    return y


@tw.kernel
def batches(t: tw.Array, a: tw.Array) -> tw.Array:
    b, m, n = a.shape
    y = tw.empty((b, n), a.dtype)
    for k, j in tw.grid(b, n):
        s = 0.0
        for i in range(m):
            s += t[k, i] * a[k, i, j]
        y[k, j] = s
    return y


def _inputs(m: int, n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m * 1000 + n)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 7, m).astype(dtype), rng.integers(0, 7, (m, n)).astype(dtype)
    return rng.standard_normal(m).astype(dtype), rng.standard_normal((m, n)).astype(dtype)


def _near(found: Any, wanted: np.ndarray, dtype: Any, terms: int) -> None:
    scale = {"f": {2: 2e-2, 4: 2e-6, 8: 1e-14}.get(np.dtype(dtype).itemsize, 0)}.get(np.dtype(dtype).kind, 0)
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), wanted, rtol=0, atol=scale * (1 + terms) ** 0.5 * 4)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (9, 16), (31, 33), (64, 67), (200, 5), (131, 101), (70, 4500)])
@pytest.mark.parametrize("kernel", [weighted, added, product, transposed], ids=["sum", "loops", "product", "transposed"])
def test_spellings(kernel: Any, shape: tuple[int, int]) -> None:
    t, a = _inputs(*shape, np.float32)
    _near(kernel(t, a), t.astype(np.float64) @ a.astype(np.float64), np.float32, shape[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.int64])
def test_dtypes(dtype: Any) -> None:
    for shape in ((31, 33), (77, 19)):
        t, a = _inputs(*shape, dtype)
        _near(weighted(t, a), t.astype(np.float64) @ a.astype(np.float64), dtype, shape[0])


@pytest.mark.parametrize("device", EMULATED)
def test_every_stage(device: str) -> None:
    t, a = _inputs(19, 23, np.float32)
    _near(weighted(t, a, device=device), t.astype(np.float64) @ a.astype(np.float64), np.float32, 19)
    _near(lowest(t, a, device=device), (t[:, None].astype(np.float64) + a).min(0), np.float32, 1)


def test_layouts() -> None:
    t, a = _inputs(90, 134, np.float32)
    for rows, view in ((t, np.asfortranarray(a)), (t, a), (t[:45], a[::2]), (t, a[:, ::2]), (t, a[:, 3:100])):
        _near(product(rows, view), rows.astype(np.float64) @ view.astype(np.float64), np.float32, 90)


def test_both_products_of_one_matrix() -> None:
    t, a = _inputs(67, 129, np.float64)
    x = _inputs(129, 1, np.float64)[0]
    across, down = both_ways(a, x, t)
    _near(across, a @ x, np.float64, 129)
    _near(down, a.T @ t, np.float64, 67)


def test_batches() -> None:
    rng = np.random.default_rng(2)
    t, a = rng.standard_normal((3, 41)), rng.standard_normal((3, 41, 37))
    _near(batches(t, a), np.einsum("ki,kij->kj", t, a), np.float64, 41)


def test_minima_keep_nan_and_infinities() -> None:
    t, a = _inputs(41, 37, np.float32)
    a[5, 3], a[6, 4], a[7, 36] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(np.asarray(lowest(t, a)), (t[:, None] + a).min(0))


def test_nothing_to_add() -> None:
    assert np.asarray(product(np.empty(0, np.float32), np.empty((0, 5), np.float32))).tolist() == [0] * 5
    assert np.asarray(product(np.ones(4, np.float32), np.empty((4, 0), np.float32))).shape == (0,)
