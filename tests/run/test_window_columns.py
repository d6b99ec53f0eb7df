"""Windows of several axes on a CPU: they are reduced down the columns first. Results against float64, in 2-D and 3-D, of all dtypes, with what is no number."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tilewright as tw


def pools_3d(window: int, stride: int, padding: int) -> tuple[tw.Kernel, tw.Kernel]:  # type: ignore[type-arg]
    @tw.kernel
    def largest(x: tw.Array) -> tw.Array:
        c, depth, h, w = x.shape
        planes = (depth + 2 * padding - window) // stride + 1
        rows = (h + 2 * padding - window) // stride + 1
        columns = (w + 2 * padding - window) // stride + 1
        out = tw.empty((c, planes, rows, columns), x.dtype)
        for i, v, y, z in tw.grid(c, planes, rows, columns):
            best = -tw.inf
            for a, b, k in tw.grid(window, window, window):
                o = v * stride + a - padding
                p = y * stride + b - padding
                q = z * stride + k - padding
                if 0 <= o < depth and 0 <= p < h and 0 <= q < w:
                    best = max(best, x[i, o, p, q])
            out[i, v, y, z] = best
        return out

    @tw.kernel
    def mean_inside(x: tw.Array) -> tw.Array:
        c, depth, h, w = x.shape
        planes = (depth + 2 * padding - window) // stride + 1
        rows = (h + 2 * padding - window) // stride + 1
        columns = (w + 2 * padding - window) // stride + 1
        out = tw.empty((c, planes, rows, columns), x.dtype)
        for i, v, y, z in tw.grid(c, planes, rows, columns):
            total = tw.f32(0)
            count = 0
            for a, b, k in tw.grid(window, window, window):
                o = v * stride + a - padding
                p = y * stride + b - padding
                q = z * stride + k - padding
                if 0 <= o < depth and 0 <= p < h and 0 <= q < w:
                    total += x[i, o, p, q]
                    count += 1
            out[i, v, y, z] = total / count
        return out

    return largest, mean_inside


@tw.kernel
def channels_last(x: tw.Array) -> tw.Array:
    h, w, c = x.shape
    out = tw.empty((h // 2, w // 2, c), x.dtype)
    for y, z, i in tw.grid(h // 2, w // 2, c):
        total = tw.f32(0)
        for a in range(5):
            for b in range(4):
                p = 2 * y + a - 2
                q = 2 * z + b - 1
                if 0 <= p < h and 0 <= q < w:
                    total += x[p, q, i]
        out[y, z, i] = total
    return out


def sums_of(dtype: Any) -> Any:
    @tw.kernel
    def sums(x: tw.Array) -> tw.Array:
        """Of windows of 4 x 5, in the dtype of x."""
        h, w = x.shape
        out = tw.empty((h - 3, w - 4), x.dtype)
        for y, z in tw.grid(h - 3, w - 4):
            total = dtype(0)
            for a in range(4):
                for b in range(5):
                    total += x[y + a, z + b]
            out[y, z] = total
        return out

    return sums


sums = sums_of(tw.f32)


@tw.kernel
def least(x: tw.Array) -> tw.Array:
    h, w = x.shape
    out = tw.empty((h // 3, w), x.dtype)
    for y, z in tw.grid(h // 3, w):
        low = x[3 * y, z]
        for a in range(3):
            for b in range(6):
                q = z + b - 3
                if 0 <= q < w:
                    low = min(low, x[3 * y + a, q])
        out[y, z] = low
    return out


@tw.kernel
def local_contrast(x: tw.Array) -> tw.Array:
    """A result that reads its own element beside its window's mean of squares."""
    h, w = x.shape
    out = tw.empty((h, w), x.dtype)
    for y, z in tw.grid(h, w):
        total = tw.f32(0)
        for a in range(7):
            for b in range(7):
                p = y + a - 3
                q = z + b - 3
                if 0 <= p < h and 0 <= q < w:
                    total += x[p, q] * x[p, q]
        out[y, z] = x[y, z] / tw.sqrt(1 + total / 49)
    return out


@tw.kernel
def corners(x: tw.Array) -> tw.Array:
    """A guard that asks both axes: only terms on one side of the diagonal count."""
    h, w = x.shape
    out = tw.empty((h - 4, w - 4), x.dtype)
    for y, z in tw.grid(h - 4, w - 4):
        total = tw.f32(0)
        for a in range(5):
            for b in range(5):
                if a >= b:
                    total += x[y + a, z + b]
        out[y, z] = total
    return out


@tw.kernel
def blurred(x: tw.Array, steps: int) -> tw.Array:
    """Windows in an ordered loop: each step reads what the one before wrote."""
    h, w = x.shape
    a = tw.empty((h, w), x.dtype)
    b = tw.empty((h, w), x.dtype)
    for y, z in tw.grid(h, w):
        a[y, z] = x[y, z]
    for _ in range(steps):
        for y, z in tw.grid(h, w):
            total = tw.f32(0)
            for i in range(5):
                for j in range(5):
                    p = y + i - 2
                    q = z + j - 2
                    if 0 <= p < h and 0 <= q < w:
                        total += a[p, q]
            b[y, z] = total / 25
        for y, z in tw.grid(h, w):
            a[y, z] = b[y, z]
    return a


def framed(
    x: np.ndarray, frame: list[tuple[int, int]], fill: float, window: tuple[int, ...], stride: int
) -> np.ndarray:
    """All terms of all windows along the first axes, one after another in the first axis of the result."""
    wide = np.pad(x, frame, constant_values=fill)
    counts = [(wide.shape[axis] - k) // stride + 1 for axis, k in enumerate(window)]
    return np.stack([
        wide[tuple(slice(at, at + stride * (count - 1) + 1, stride) for at, count in zip(place, counts, strict=True))]
        for place in itertools.product(*map(range, window))
    ])  # fmt: skip


def names(kernel: Any, *args: object) -> list[str]:
    return [call.kernel.name for call in kernel.stages(*args).stages.loop.calls]


@pytest.mark.parametrize("pool", [(3, 1, 1), (4, 4, 0), (5, 3, 2)], ids=str)
@pytest.mark.parametrize("shape", [(2, 9, 11, 37), (1, 5, 6, 8)], ids=str)
def test_three_axes(shape: tuple[int, ...], pool: tuple[int, int, int]) -> None:
    window, stride, padding = pool
    largest, mean_inside = pools_3d(*pool)
    x = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    x[0, 2, 3, 4], x[-1, 1, 1, -1], x[-1, -1, -1, 0] = np.nan, np.inf, -np.inf
    frame, last = [(padding, padding)] * 3 + [(0, 0)], np.moveaxis(x.astype(np.float64), 0, -1)
    most = framed(last, frame, -np.inf, (window,) * 3, stride).max(axis=0)
    np.testing.assert_array_equal(largest(x), np.moveaxis(most, -1, 0))
    total = framed(last, frame, 0, (window,) * 3, stride).sum(axis=0)
    count = framed(np.ones(last.shape), frame, 0, (window,) * 3, stride).sum(axis=0)
    np.testing.assert_allclose(mean_inside(x), np.moveaxis(total / count, -1, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 10, 3), (17, 13, 1), (6, 31, 16), (5, 4, 37)], ids=str)
def test_channels_last(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    x[3, 2, 0] = np.inf
    want = framed(x.astype(np.float64), [(2, 5), (1, 5), (0, 0)], 0, (5, 4), 2).sum(axis=0)[
        : shape[0] // 2, : shape[1] // 2
    ]
    np.testing.assert_allclose(channels_last(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [tw.f16, tw.f64, tw.i32, tw.u8], ids=str)
@pytest.mark.parametrize("shape", [(4, 5), (13, 77)], ids=str)
def test_dtypes(shape: tuple[int, int], dtype: Any) -> None:
    rng = np.random.default_rng(shape)
    kind, sums = np.dtype({"f16": "f2", "f64": "f8", "i32": "i4", "u8": "u1"}[str(dtype)]), sums_of(dtype)
    x = rng.integers(0, 100, shape).astype(kind) if kind.kind in "iu" else rng.standard_normal(shape).astype(kind)
    terms = framed(x, [(0, 0), (0, 0)], 0, (4, 5), 1)
    if kind.kind in "iu":
        np.testing.assert_array_equal(sums(x), terms.sum(axis=0, dtype=kind))  # sums of bytes wrap
    else:
        np.testing.assert_allclose(
            sums(x), terms.astype(np.float64).sum(axis=0), rtol=0, atol=40 * float(np.finfo(kind).eps)
        )
    low = framed(x[: shape[0] // 3 * 3], [(0, 0), (3, 2)], 100, (3, 6), 1)[:, ::3].min(axis=0)
    np.testing.assert_array_equal(least(x), low)


def test_no_numbers_spread_over_their_windows_alone() -> None:
    x = np.random.default_rng(0).standard_normal((23, 45)).astype(np.float32)
    x[4, 7], x[15, 20], x[15, 23], x[22, 44] = np.nan, np.inf, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        want = framed(x.astype(np.float64), [(0, 0), (0, 0)], 0, (4, 5), 1).sum(axis=0)
    got = sums(x)
    assert (
        np.array_equal(np.isnan(got), np.isnan(want))
        and np.array_equal(np.isinf(got), np.isinf(want))
        and np.isnan(want).any()
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_what_stands_beside_a_window() -> None:
    for shape in ((1, 1), (3, 50), (20, 20), (7, 133)):
        x = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
        square = framed(x.astype(np.float64) ** 2, [(3, 3), (3, 3)], 0, (7, 7), 1).sum(axis=0)
        np.testing.assert_allclose(local_contrast(x), x / np.sqrt(1 + square / 49), rtol=1e-5, atol=1e-6)


def test_guards_of_both_axes_keep_their_windows_whole() -> None:
    x = np.random.default_rng(0).standard_normal((11, 30)).astype(np.float32)
    counted = np.array([a >= b for a in range(5) for b in range(5)])
    want = framed(x.astype(np.float64), [(0, 0), (0, 0)], 0, (5, 5), 1)[counted].sum(axis=0)
    np.testing.assert_allclose(corners(x), want, rtol=1e-5, atol=1e-5)
    assert names(corners, x) == ["corners"]


def test_windows_in_an_ordered_loop() -> None:
    x = np.random.default_rng(0).standard_normal((19, 43)).astype(np.float32)
    want = x.astype(np.float64)
    for _ in range(3):
        want = framed(want, [(2, 2), (2, 2)], 0, (5, 5), 1).sum(axis=0) / 25
    np.testing.assert_allclose(blurred(x, 3), want, rtol=1e-5, atol=1e-6)


def test_empty_arrays() -> None:
    assert sums(np.zeros((3, 40), np.float32)).shape == (0, 36)
    assert sums(np.zeros((12, 4), np.float32)).shape == (9, 0)
    assert channels_last(np.zeros((6, 8, 0), np.float32)).shape == (3, 4, 0)
    largest, _ = pools_3d(4, 4, 0)
    assert largest(np.zeros((0, 8, 8, 8), np.float32)).shape == (0, 2, 2, 2)


def test_views_are_read_as_they_lie() -> None:
    x = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
    for view in (x.T, x[::2, ::-1], x[3:, 1:]):
        want = framed(view.astype(np.float64), [(0, 0), (0, 0)], 0, (4, 5), 1).sum(axis=0)
        np.testing.assert_allclose(sums(view), want, rtol=0, atol=1e-5)


def test_large_windows_are_reduced_down_their_columns_first() -> None:
    x = np.zeros((20, 30), np.float32)
    assert names(sums, x) == ["sums.rows", "sums"]
    assert names(local_contrast, x) == ["local_contrast.rows", "local_contrast"]
    x = np.zeros((2, 20, 30, 40), np.float32)
    largest, _ = pools_3d(5, 2, 1)
    program = largest.stages(x).stages.loop
    assert len(program.calls) == 3
    extents = {"c": 2, "depth": 20, "h": 30, "w": 40}
    assert [[e.evaluate(extents) for e in array.type.shape] for array in program.scratch] == [
        [2, 9, 30, 40],
        [2, 9, 14, 40],
    ]
    small, _ = pools_3d(2, 2, 0)
    assert names(small, x) == ["largest"]
