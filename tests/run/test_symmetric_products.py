"""Products of a matrix with itself: half of the sums are computed, and all results are those of the full product to the last bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def rank_update(a: tw.Array) -> tw.Array:
    n, k = a.shape
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * a[j, p]
        out[i, j] = total
    return out


@tw.kernel
def of_two(a: tw.Array, b: tw.Array) -> tw.Array:
    """The same of what may be two matrices."""
    n, k = a.shape
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[j, p]
        out[i, j] = total
    return out


@tw.kernel
def columns(a: tw.Array) -> tw.Array:
    return a.T @ a


@tw.kernel
def covariance(x: tw.Array) -> tw.Array:
    samples, n = x.shape
    mean = tw.sum(x, axis=0) / samples
    out = tw.empty((n, n), x.dtype)
    for i, j in tw.grid(n, n):
        total = 0.0
        for s in range(samples):
            total += (x[s, i] - mean[i]) * (x[s, j] - mean[j])
        out[i, j] = total / (samples - 1)
    return out


@tw.kernel
def leaning(a: tw.Array, v: tw.Array) -> tw.Array:
    """What is done with the sums is not symmetric."""
    n, k = a.shape
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * a[j, p]
        out[i, j] = tw.exp(-abs(total)) + v[i] - 2 * v[j]
    return out


@tw.kernel
def added_to(a: tw.Array, c: tw.InOut):
    n, k = a.shape
    for i, j in tw.grid(n, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * a[j, p]
        c[i, j] = 0.5 * c[i, j] + 2 * total


@tw.kernel
def batched(a: tw.Array) -> tw.Array:
    batch, n, k = a.shape
    out = tw.empty((batch, n, n), a.dtype)
    for b, i, j in tw.grid(batch, n, n):
        total = 0.0
        for p in range(k):
            total += a[b, i, p] * a[b, j, p]
        out[b, i, j] = total
    return out


@tw.kernel
def whole_numbers(a: tw.Array) -> tw.Array:
    n, k = a.shape
    out = tw.empty((n, n), tw.i32)
    for i, j in tw.grid(n, n):
        total = tw.i32(0)
        for p in range(k):
            total += tw.i32(a[i, p]) * tw.i32(a[j, p])
        out[i, j] = total
    return out


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def test_half_of_the_tiles_is_computed() -> None:
    x = numbers(40, 30)
    for kernel, given, half in ((rank_update, (x,), True), (columns, (x,), True), (covariance, (x,), True), (of_two, (x, x), False)):
        schedules = [s.describe() for s in kernel.stages(*given, target="aarch64-neon").stages.schedules]
        assert any("half=1" in text for text in schedules) == half, schedules


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "k"), [(1, 3), (12, 1), (31, 33), (67, 33), (97, 600), (101, 0), (730, 17), (2503, 2)])
def test_the_same_bits_as_the_full_product(n: int, k: int, dtype: Any) -> None:
    """730 is wider than one stripe for each core, 2503 higher than a block."""
    a = numbers(n, k, dtype=dtype)
    found = rank_update(a)
    full = np.asarray(of_two(a, a.copy()))
    if n > 128:
        assert found.tobytes() == full.tobytes()
    else:  # few rows are multiplied vector by vector along the sum, or where they lie, in another order
        np.testing.assert_allclose(found, full, rtol=0, atol=64 * np.finfo(dtype).eps * max(1, k) ** 0.5)
    np.testing.assert_allclose(found, a.astype(np.float64) @ a.astype(np.float64).T, atol=1e-3 if dtype is np.float32 else 1e-11)
    np.testing.assert_allclose(columns(a.T), found, rtol=1e-6, atol=1e-3 if dtype is np.float32 else 1e-11)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("n", [5, 29])
def test_what_follows_the_sums(n: int, device: str) -> None:
    a, v, c = numbers(n, 7), numbers(n), numbers(n, n)
    exact = a.astype(np.float64) @ a.astype(np.float64).T
    np.testing.assert_allclose(leaning(a, v, device=device), np.exp(-np.abs(exact)) + v[:, None] - 2 * v, atol=1e-5)
    np.testing.assert_allclose(covariance(a.T, device=device), np.cov(a.astype(np.float64)), atol=1e-5)
    wanted = 0.5 * c.astype(np.float64) + 2 * exact
    added_to(a, c, device=device)
    np.testing.assert_allclose(c, wanted, atol=1e-4)


def test_layouts_and_dtypes() -> None:
    wide = numbers(66, 90)
    for view in (wide[::2, 1::3], wide.T[:40], wide[::-1]):
        exact = view.astype(np.float64) @ view.astype(np.float64).T
        np.testing.assert_allclose(rank_update(view), exact, atol=1e-4)
        np.testing.assert_allclose(columns(view), view.astype(np.float64).T @ view, atol=1e-4)
    many = numbers(3, 41, 9)
    np.testing.assert_allclose(batched(many), many @ many.transpose(0, 2, 1), atol=1e-4)
    for short in (np.float16, ml_dtypes.bfloat16):
        a = wide.astype(short)
        np.testing.assert_allclose(rank_update(a).astype(np.float64), a.astype(np.float64) @ a.astype(np.float64).T, rtol=2e-2, atol=0.3)
    small = np.random.default_rng(0).integers(-100, 100, (37, 21)).astype(np.int8)
    np.testing.assert_array_equal(whole_numbers(small), small.astype(np.int32) @ small.astype(np.int32).T)


def test_special_values() -> None:
    a = numbers(40, 20)
    a[3, 4], a[17, 2], a[39, 0] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(rank_update(a), a.astype(np.float64) @ a.astype(np.float64).T, atol=1e-3)


def test_a_schedule_for_others_is_refused() -> None:
    x = numbers(40, 30)
    with pytest.raises(tw.UserError, match="half is for symmetric products"):
        tw.kernel(schedule="family=cpu m=64 n=48 k=64 mr=8 nr=12 vectors=3 half=1")(of_two.python)(x, x)
