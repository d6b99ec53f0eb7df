"""Average and maximum of windows, with strides, padding and dilation, on the emulator and a CPU against float64; and how their memory is read."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import bf16

Pool = tuple[int, int, int, int]
"""Window, stride, padding, dilation."""


def pools(window: int, stride: int, padding: int, dilation: int) -> tuple[tw.Kernel, tw.Kernel, tw.Kernel, tw.Kernel]:  # type: ignore[type-arg]
    @tw.kernel
    def max_1d(x: tw.Array) -> tw.Array:
        n, c, length = x.shape
        count = (length + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        out = tw.empty((n, c, count), x.dtype)
        for i, j, t in tw.grid(n, c, count):
            m = tw.f32(-tw.inf)
            for k in range(window):
                p = t * stride - padding + k * dilation
                if 0 <= p < length:
                    m = tw.max(m, x[i, j, p])
            out[i, j, t] = m
        return out

    @tw.kernel
    def max_2d(x: tw.Array) -> tw.Array:
        n, c, h, w = x.shape
        rows = (h + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        columns = (w + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        out = tw.empty((n, c, rows, columns), x.dtype)
        for i, j, y, z in tw.grid(n, c, rows, columns):
            m = tw.f32(-tw.inf)
            for a in range(window):
                for b in range(window):
                    p = y * stride - padding + a * dilation
                    q = z * stride - padding + b * dilation
                    if 0 <= p < h and 0 <= q < w:
                        m = tw.max(m, x[i, j, p, q])
            out[i, j, y, z] = m
        return out

    @tw.kernel
    def mean_2d(x: tw.Array) -> tw.Array:
        """What is outside counts."""
        n, c, h, w = x.shape
        rows = (h + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        columns = (w + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        out = tw.empty((n, c, rows, columns), x.dtype)
        for i, j, y, z in tw.grid(n, c, rows, columns):
            m = tw.f32(0)
            for a, b in tw.grid(window, window):
                p = y * stride - padding + a * dilation
                q = z * stride - padding + b * dilation
                if 0 <= p < h and 0 <= q < w:
                    m += x[i, j, p, q]
            out[i, j, y, z] = m / (window * window)
        return out

    @tw.kernel
    def mean_inside_2d(x: tw.Array) -> tw.Array:
        n, c, h, w = x.shape
        rows = (h + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        columns = (w + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        out = tw.empty((n, c, rows, columns), x.dtype)
        for i, j, y, z in tw.grid(n, c, rows, columns):
            m = tw.f32(0)
            inside = tw.f32(0)
            for a in range(window):
                for b in range(window):
                    p = y * stride - padding + a * dilation
                    q = z * stride - padding + b * dilation
                    if 0 <= p < h and 0 <= q < w:
                        m += x[i, j, p, q]
                        inside += 1
            out[i, j, y, z] = m / inside
        return out

    return max_1d, max_2d, mean_2d, mean_inside_2d


def expected(x: np.ndarray, pool: Pool, kind: str, rank: int) -> np.ndarray:
    window, stride, padding, dilation = pool
    frame = [(0, 0)] * (x.ndim - rank) + [(padding, padding)] * rank
    wide = np.pad(x.astype(np.float64), frame, constant_values=-np.inf if kind == "max" else 0)
    inside = np.pad(np.ones(x.shape), frame)
    counts = [(s + 2 * padding - dilation * (window - 1) - 1) // stride + 1 for s in x.shape[-rank:]]
    terms, known = [], []
    for place in itertools.product(range(window), repeat=rank):
        cut = tuple(slice(k * dilation, k * dilation + stride * (count - 1) + 1, stride) for k, count in zip(place, counts, strict=True))
        terms.append(wide[(..., *cut)])
        known.append(inside[(..., *cut)])
    if kind == "max":
        return np.max(terms, axis=0)
    return np.sum(terms, axis=0) / (np.sum(known, axis=0) if kind == "inside" else window**rank)


@pytest.mark.parametrize("device", ["emulator:thread", "cpu"])
@pytest.mark.parametrize("pool", [(2, 2, 0, 1), (2, 3, 1, 1), (3, 2, 1, 1), (3, 4, 1, 1), (3, 1, 2, 2), (8, 3, 2, 1), (8, 8, 3, 1), (11, 1, 5, 1)])
def test_pools(pool: Pool, device: str) -> None:
    rng = np.random.default_rng(pool)
    max_1d, max_2d, mean_2d, mean_inside_2d = pools(*pool)
    for length in (32, 37):
        x = rng.standard_normal((2, 3, length)).astype(np.float32)
        x[1, 2, 5] = np.nan
        np.testing.assert_array_equal(max_1d(x, device=device), expected(x, pool, "max", 1))
    x = rng.standard_normal((1, 2, 16, 32)).astype(np.float32)
    np.testing.assert_array_equal(max_2d(x, device=device), expected(x, pool, "max", 2))
    np.testing.assert_allclose(mean_2d(x, device=device), expected(x, pool, "mean", 2), rtol=1e-5, atol=1e-6)
    x = x[..., 1:, 1:].copy()
    np.testing.assert_allclose(mean_inside_2d(x, device=device), expected(x, pool, "inside", 2), rtol=1e-5, atol=1e-6)


def test_windows_that_step_are_read_in_whole_vectors() -> None:
    max_1d, max_2d, _, _ = pools(2, 2, 0, 1)
    for kernel, x in ((max_1d, np.zeros((4, 4, 4096), np.float32)), (max_2d, np.zeros((2, 4, 64, 64), np.float32))):
        ptx = kernel.compile(x, target="sm_90a").code.decode()
        loads = re.findall(r"ld\.global[.\w]*", ptx)
        assert loads and all(".v4." in load for load in loads)


def test_large_windows_are_reduced_axis_by_axis() -> None:
    _, max_2d, _, mean_inside_2d = pools(11, 1, 5, 1)
    for kernel in (max_2d, mean_inside_2d):
        first, second = kernel.stages(np.zeros((2, 4, 64, 64), np.float32), target="sm_90a").stages.schedules
        assert first.window and second.window


def test_windows_side_by_side_are_windows() -> None:
    """Loads are predicated, and neighbours are in the same block; groups of many elements are rows."""
    for window, is_one in ((3, True), (11, True), (32, False)):
        max_1d, max_2d, _, _ = pools(window, window, 0, 1)
        (single,) = max_1d.stages(np.zeros((4, 4, 4096), np.float32), target="sm_90a").stages.schedules
        assert single.window is is_one
        if is_one:
            (plane,) = max_2d.stages(np.zeros((2, 4, 64, 64), np.float32), target="sm_90a").stages.schedules
            assert plane.window


def test_sums_over_fixed_axes_are_no_windows() -> None:
    @tw.kernel
    def totals(x: tw.Array) -> tw.Array:
        out = tw.empty((x.shape[0],), x.dtype)
        for i in tw.grid(x.shape[0]):
            total = tw.f32(0)
            for a in range(8):
                for b in range(16):
                    total += x[i, a, b]
            out[i] = total
        return out

    x = np.arange(5 * 8 * 16, dtype=np.float32).reshape(5, 8, 16)
    assert len(totals.stages(x, target="sm_90a").stages.loop.calls) == 1
    for device in ("emulator:thread", "cpu"):
        np.testing.assert_array_equal(totals(x, device=device), x.sum((1, 2)))


def volume_pool(window: int, stride: int, pad: int) -> tw.Kernel[..., Any]:
    """The largest of windows of three axes, with a condition for each of them."""

    @tw.kernel
    def largest(x: tw.Array) -> tw.Array:
        depth, height, width = x.shape
        planes = (depth + 2 * pad - window) // stride + 1
        rows = (height + 2 * pad - window) // stride + 1
        columns = (width + 2 * pad - window) // stride + 1
        out = tw.empty((planes, rows, columns), x.dtype)
        for h, i, j in tw.grid(planes, rows, columns):
            best = -tw.inf
            for t in range(window):
                v = h * stride + t - pad
                if 0 <= v < depth:
                    for q in range(window):
                        y = i * stride + q - pad
                        if 0 <= y < height:
                            for r in range(window):
                                z = j * stride + r - pad
                                if 0 <= z < width:
                                    best = max(best, x[v, y, z])
            out[h, i, j] = best
        return out

    return largest


@pytest.mark.parametrize(("pool", "kernels"), [((4, 3, 1), 1), ((5, 3, 2), 2), ((5, 1, 2), 2), ((4, 4, 0), 1), ((5, 5, 1), 1)])
def test_windows_that_overlap_little_are_reduced_at_once(pool: tuple[int, int, int], kernels: int) -> None:
    window, stride, pad = pool
    kernel = volume_pool(window, stride, pad)
    for dtype in (np.float32, bf16.numpy):
        x = np.random.default_rng(2).standard_normal((9, 12, 19)).astype(dtype)
        loop = kernel.stages(x, target="sm_90a").stages.loop
        assert len(loop.calls) == kernels
        assert all(array.type.dtype.numpy == x.dtype for array in loop.scratch)
        want = expected(x[None, None].astype(np.float64), (window, stride, pad, 1), "max", 3)[0, 0]
        for device in ("emulator:thread", "cpu"):
            np.testing.assert_array_equal(np.asarray(kernel(x, device=device)).astype(np.float64), want)
