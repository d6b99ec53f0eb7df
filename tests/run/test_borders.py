"""Conditions at the borders of rows on a CPU: the middle is computed without them, and gives what the kernel says everywhere."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw

SHAPES = [(1, 1), (1, 2), (2, 3), (3, 4), (5, 9), (8, 31), (4, 33), (7, 70)]


@tw.kernel
def guarded(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        if i > 0 and i < h - 1 and j > 0 and j < w - 1:
            out[i, j] = x[i - 1, j] + x[i + 1, j] + 2 * x[i, j - 1] + 3 * x[i, j + 1]
        else:
            out[i, j] = -x[i, j]
    return out


@tw.kernel
def outside_first(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        if i == 0 or j == 0 or i == h - 1 or j == w - 1:
            out[i, j] = -x[i, j]
        else:
            out[i, j] = x[i - 1, j] + x[i + 1, j] + 2 * x[i, j - 1] + 3 * x[i, j + 1]
    return out


@tw.kernel
def clamped(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        out[i, j] = x[tw.max(i - 1, 0), j] + x[tw.min(i + 1, h - 1), j] + 2 * x[i, tw.max(j - 2, 0)] + 3 * x[i, tw.min(j + 1, w - 1)]
    return out


@tw.kernel
def wrapped(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        out[i, j] = x[(i + h - 1) % h, j] + 2 * x[i, (j + w - 1) % w] + 3 * x[i, (j + 1) % w]
    return out


@tw.kernel
def below_diagonal(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        out[i, j] = x[i, j] if j < i and j > 0 else 0.0
    return out


@tw.kernel
def first_half(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        out[i, j] = x[i, j] if j < w // 2 else 0.0
    return out


def _steps(x: np.ndarray) -> np.ndarray:
    out = -x
    if min(x.shape) > 2:
        out[1:-1, 1:-1] = x[:-2, 1:-1] + x[2:, 1:-1] + 2 * x[1:-1, :-2] + 3 * x[1:-1, 2:]
    return out


def _clamped(x: np.ndarray) -> np.ndarray:
    h, w = x.shape
    i, j = np.arange(h), np.arange(w)
    return x[np.maximum(i - 1, 0)] + x[np.minimum(i + 1, h - 1)] + 2 * x[:, np.maximum(j - 2, 0)] + 3 * x[:, np.minimum(j + 1, w - 1)]


REFERENCES = {
    guarded: _steps, outside_first: _steps, clamped: _clamped,
    wrapped: lambda x: np.roll(x, 1, 0) + 2 * np.roll(x, 1, 1) + 3 * np.roll(x, -1, 1),
    below_diagonal: lambda x: np.where((np.arange(x.shape[1]) < np.arange(x.shape[0])[:, None]) & (np.arange(x.shape[1]) > 0), x, 0),
    first_half: lambda x: np.where(np.arange(x.shape[1]) < x.shape[1] // 2, x, 0),
}  # fmt: skip


@pytest.mark.parametrize("kernel", REFERENCES, ids=lambda k: k.function.name)
def test_stencils_with_borders(kernel) -> None:
    random = np.random.default_rng(1)
    for shape in SHAPES:
        x = random.integers(-9, 9, shape).astype(np.float32)
        assert np.array_equal(kernel(x), REFERENCES[kernel](x)), shape
        wide = np.full((shape[0], shape[1] + 3), np.nan, np.float32)
        wide[:, 1 : 1 + shape[1]] = x
        assert np.array_equal(kernel(wide[:, 1 : 1 + shape[1]]), REFERENCES[kernel](x)), shape


@tw.kernel
def averages(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for i, j in tw.grid(h, w):
        total = tw.f32(0)
        count = tw.f32(0)
        for r in range(5):
            for s in range(5):
                y = i + r - 2
                z = j + s - 2
                if y >= 0 and y < h and z >= 0 and z < w:
                    total += x[y, z]
                    count += 1.0
        out[i, j] = total / count
    return out


@tw.kernel
def largest(x: tw.Array) -> tw.Array:
    n, h, w = x.shape
    high, wide = (h + 1) // 2, (w + 1) // 2
    out = tw.empty((n, high, wide), x.dtype)
    for b, i, j in tw.grid(n, high, wide):
        best = -tw.inf
        for r in range(3):
            for s in range(3):
                y = 2 * i + r - 1
                z = 2 * j + s - 1
                if y >= 0 and y < h and z >= 0 and z < w:
                    best = tw.max(best, x[b, y, z])
        out[b, i, j] = best
    return out


@tw.kernel
def halves(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h // 2, w // 3), x.dtype)
    for i, j in tw.grid(h // 2, w // 3):
        total = tw.f32(0)
        for r in range(2):
            for s in range(3):
                total += x[2 * i + r, 3 * j + s]
        out[i, j] = total
    return out


def test_windows_at_borders() -> None:
    random = np.random.default_rng(2)
    for h, w in SHAPES:
        x = random.integers(-9, 9, (2, h, w)).astype(np.float32)
        framed = np.pad(x[0], 2, constant_values=np.nan)
        windows = np.lib.stride_tricks.sliding_window_view(framed, (5, 5))
        np.testing.assert_allclose(averages(x[0]), np.nanmean(windows, (2, 3)), rtol=1e-6)
        framed = np.pad(x, ((0, 0), (1, 2), (1, 2)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(framed, (3, 3), (1, 2))[:, : h + 1 : 2, : w + 1 : 2]
        assert np.array_equal(largest(x), windows.max((3, 4))[:, : (h + 1) // 2, : (w + 1) // 2])
        if h > 1 and w > 2:
            cut = x[0][: h // 2 * 2, : w // 3 * 3]
            assert np.array_equal(halves(x[0]), cut.reshape(h // 2, 2, w // 3, 3).sum((1, 3)))


def test_nan_in_a_window_stays_nan() -> None:
    x = np.zeros((1, 9, 40), np.float32)
    x[0, 4, 20] = np.nan
    found = np.isnan(largest(x))
    expected = np.zeros(found.shape, bool)
    expected[0, 2, 10] = True
    assert np.array_equal(found, expected)
