"""Rows on a CPU that are shorter than a tile, or a little longer: sums, extremes, maps and softmax, every length, one dimension and several, with and without terms that are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(11)
LENGTHS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 81, 127, 128, 129, 150, 257)


@tw.kernel
def of_rows(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=1)


@tw.kernel
def of_outer_axes(x: tw.Array) -> tw.Array:
    return tw.sum(x, axis=(0, 2))


@tw.kernel
def of_squares(x: tw.Array) -> tw.Array:
    return x / tw.sqrt(tw.f32(1) + tw.sum(x * x, axis=1, keepdims=True))


@tw.kernel
def largest(x: tw.Array) -> tw.Array:
    return tw.max(x, axis=1)


@tw.kernel
def smallest_of_outer_axes(x: tw.Array) -> tw.Array:
    return tw.min(x, axis=(0, 2))


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    e = tw.exp(x - tw.max(x, axis=1, keepdims=True))
    return e / tw.sum(e, axis=1, keepdims=True)


@tw.kernel
def shifted(x: tw.Array, rows: tw.Array) -> tw.Array:
    return tw.sqrt(x * x + rows[:, None])


@tw.kernel
def add_rows(x: tw.InOut, rows: tw.Array) -> None:
    n, m = x.shape
    for i, j in tw.grid(n, m):
        x[i, j] = x[i, j] * 2 + rows[i]


@tw.kernel
def weighted(x: tw.Array, v: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((1,), x.dtype)
    for one in tw.grid(1):
        total = tw.f32(0)
        for i in range(rows):
            for j in range(columns):
                total += x[i, j] * v[j]
        out[one] = total
    return out


@tw.kernel
def of_some(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = tw.f32(0)
        for j in range(columns):
            if x[i, j] > 0:
                total += tw.log(x[i, j])
        out[i] = total
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.uint8])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows(length: int, dtype: Any) -> None:
    x = RNG.integers(0, 3, (37, length)).astype(dtype) if np.issubdtype(dtype, np.integer) else RNG.standard_normal((37, length)).astype(dtype)
    three = np.stack([x, x[::-1], x + 1]) if length else np.zeros((3, 37, 0), dtype)
    rough = 2e-2 if dtype is np.float16 else 2e-5
    np.testing.assert_allclose(of_rows(x), x.astype(np.float64).sum(1), rtol=rough, atol=rough)
    np.testing.assert_allclose(of_outer_axes(three), three.astype(np.float64).sum((0, 2)), rtol=rough, atol=3 * rough)
    np.testing.assert_allclose(of_rows(x[:, ::-1]), x.astype(np.float64).sum(1), rtol=rough, atol=rough)


@pytest.mark.parametrize("length", LENGTHS)
def test_terms(length: int) -> None:
    x = RNG.standard_normal((37, length)).astype(np.float32)
    v = RNG.standard_normal(length).astype(np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(of_squares(x), wide / np.sqrt(1 + (wide**2).sum(1, keepdims=True)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weighted(x, v), [(wide * v).sum()], rtol=1e-4, atol=1e-3)
    logs = np.log(np.where(wide > 0, wide, 1)).sum(1)
    np.testing.assert_allclose(of_some(x), logs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int8])
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_extremes(length: int, dtype: Any) -> None:
    x = RNG.integers(-100, 100, (37, length)).astype(dtype)
    three = np.stack([x, x[::-1], x // 2])
    np.testing.assert_array_equal(largest(x), x.max(1))
    np.testing.assert_array_equal(largest(-np.abs(x)), (-np.abs(x)).max(1))
    np.testing.assert_array_equal(smallest_of_outer_axes(three), three.min((0, 2)))
    if np.issubdtype(dtype, np.floating):
        x[3, length - 1], x[5, 0], x[7] = np.nan, -np.inf, -np.inf
        x[9] = -0.0
        x[9, length // 2] = 0.0
        np.testing.assert_array_equal(largest(x), x.max(1))
        assert not np.signbit(largest(x)[9])
        with_nan = np.stack([x, x])
        np.testing.assert_array_equal(smallest_of_outer_axes(with_nan), with_nan.min((0, 2)))


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_maps(length: int) -> None:
    x, rows = RNG.standard_normal((37, length)).astype(np.float32), RNG.random(37).astype(np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(shifted(x, rows), np.sqrt(wide**2 + rows[:, None]), rtol=1e-5)
    e = np.exp(wide - wide.max(1, keepdims=True))
    np.testing.assert_allclose(softmax(x), e / e.sum(1, keepdims=True), rtol=1e-5, atol=1e-7)
    y = x.copy()
    add_rows(y, rows)
    np.testing.assert_allclose(y, x * 2 + rows[:, None], rtol=1e-5, atol=1e-6)
    guarded = np.full((37, length + 5), 7, np.float32)
    shifted(x, rows, out=guarded[:, :length])
    np.testing.assert_array_equal(guarded[:, length:], 7)


@pytest.mark.parametrize("length", [17, 81, 130])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(length: int, value: float) -> None:
    x = np.ones((9, length), np.float32)
    x[4, length - 1] = value
    expected = np.full(9, length, np.float32)
    expected[4] = value
    np.testing.assert_array_equal(of_rows(x), expected)


def test_nothing_behind_the_last_row_is_read() -> None:
    """What lies behind is no number, and would show."""
    whole = np.full((5, 96), np.nan, np.float32)
    whole[:, :81] = 1
    np.testing.assert_array_equal(of_rows(whole[:, :81]), np.full(5, 81, np.float32))
    flat = np.full(81 * 5 + 200, np.nan, np.float32)
    flat[: 81 * 5] = 1
    np.testing.assert_array_equal(of_rows(flat[: 81 * 5].reshape(5, 81)), np.full(5, 81, np.float32))
