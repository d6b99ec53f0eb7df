"""Sums along rows that begin anywhere, walked in vectors (`shifted`), and sums over several axes whose rows are short (`rows_in_turn`): on the emulator against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

LENGTHS = (1, 31, 515, 1025, 2051, 3333, 4099, 6147, 8195, 12347)
LONG = (33, 4099, 8193, 9001, 12347)
"""Lengths of rows with little to compute, which are read in vectors from 8193 on."""


@tw.kernel
def row_sums(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        total = tw.f32(0)
        for j in range(c):
            total += x[i, j]
        out[i] = total
    return out


@tw.kernel
def row_extremes(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        out[i] = most
    return out


@tw.kernel
def divergence(x: tw.Array, y: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        total = tw.f32(0)
        for j in range(c):
            total += y[i, j] * (tw.log(y[i, j]) - tw.log(x[i, j]))
        out[i] = total
    return out


@tw.kernel
def outer_axes(x: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    out = tw.empty((channels,), tw.f32)
    for c in tw.grid(channels):
        total = tw.f32(0)
        for b in range(n):
            for i in range(length):
                total += x[b, c, i]
        out[c] = total
    return out


@tw.kernel
def largest_of_outer(x: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    out = tw.empty((channels,), x.dtype)
    for c in tw.grid(channels):
        best = -tw.inf
        for b in range(n):
            for i in range(length):
                best = max(best, x[b, c, i])
        out[c] = best
    return out


@tw.kernel
def three_axes(x: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    out = tw.empty((channels,), tw.f32)
    for c in tw.grid(channels):
        total = tw.f32(0)
        for b in range(n):
            for y in range(height):
                for i in range(width):
                    total += x[b, c, y, i] * x[b, c, y, i]
        out[c] = total
    return out


def schedules(kernel: Any, *inputs: np.ndarray) -> list[str]:
    return [schedule.describe() for schedule in kernel.stages(*inputs, target="sm_90a").stages.schedules]


@pytest.mark.parametrize("length", LENGTHS)
def test_losses_of_rows_that_begin_anywhere(length: int) -> None:
    """The lanes outside of a row have the logarithm of nothing."""
    rng = np.random.default_rng(length)
    x, y = (rng.random((5, length)).astype(np.float32) + np.float32(0.1) for _ in range(2))
    want = (y * (np.log(y.astype(np.float64)) - np.log(x.astype(np.float64)))).sum(1)
    np.testing.assert_allclose(divergence(x, y, device="emulator"), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_sums_and_extremes_of_rows_that_begin_anywhere(length: int, dtype: Any) -> None:
    x = np.random.default_rng(length).standard_normal((5, length)).astype(dtype)
    np.testing.assert_allclose(row_sums(x, device="emulator"), x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(row_extremes(x, device="emulator"), x.astype(np.float64).max(1).astype(dtype))


def test_infinities_and_nan_stay_in_their_rows() -> None:
    """What lies before a row, in the vector it begins in, is the end of another."""
    x = np.ones((9, 8195), np.float32)
    x[2, -1], x[4, 0], x[6, 2048] = np.nan, np.inf, -np.inf
    want = np.full(9, 8195, np.float32)
    want[[2, 4, 6]] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(row_sums(x, device="emulator"), want)


def test_views_whose_rows_begin_anywhere() -> None:
    whole = np.random.default_rng(0).standard_normal((6, 8203)).astype(np.float32)
    for x in (whole[:, 1:], whole[:, 3:-2], whole[::2, :8197], whole[1:]):
        np.testing.assert_allclose(row_sums(x, device="emulator"), x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_that_begin_anywhere_are_shifted_only_where_they_do(dtype: Any) -> None:
    (odd,) = schedules(row_sums, np.zeros((300, 12347), dtype))
    (even,) = schedules(row_sums, np.zeros((300, 12352), dtype))
    assert "shifted=True" in odd
    assert "shifted" not in even


@pytest.mark.parametrize("shape", [(515, 33, 177), (2000, 16, 65), (513, 40, 300), (1030, 17, 33), (67, 140, 601), (2048, 8, 128)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_sums_over_axes_with_short_rows(shape: tuple[int, int, int], dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    assert "rows_in_turn=" in schedules(outer_axes, x)[0]
    np.testing.assert_allclose(outer_axes(x, device="emulator"), x.astype(np.float64).sum((0, 2)), rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(largest_of_outer(x, device="emulator"), x.astype(np.float64).max((0, 2)).astype(dtype))


def test_infinities_and_nan_in_short_rows() -> None:
    x = np.ones((515, 33, 177), np.float32)
    x[514, 3, -1], x[0, 5, 0], x[100, 7, 176] = np.nan, np.inf, -np.inf
    want = np.full(33, 515 * 177, np.float32)
    want[[3, 5, 7]] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(outer_axes(x, device="emulator"), want)


def test_sums_over_three_axes() -> None:
    """The axes in the middle are many: one of the two that are not along rows is cut, and the other has blocks of its own."""
    x = np.random.default_rng(0).standard_normal((40, 5, 130, 67)).astype(np.float32)
    np.testing.assert_allclose(three_axes(x, device="emulator"), (x.astype(np.float64) ** 2).sum((0, 2, 3)), rtol=1e-4)
    # A view of it, whose axes do not lie one after another.
    view = x[:, :, ::2, 1:]
    np.testing.assert_allclose(three_axes(view, device="emulator"), (view.astype(np.float64) ** 2).sum((0, 2, 3)), rtol=1e-4)
