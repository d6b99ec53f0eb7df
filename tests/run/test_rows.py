"""Rows walked several times, held in registers on GPUs: every case on the CPU and in the emulator's thread stage, against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from kernels_rows import CASES

SIZES = ((1, 1), (3, 2), (2, 31), (5, 33), (3, 127), (2, 1000), (3, 1024), (2, 2053), (1, 5000), (2, 16391), (1, 50257))
DTYPES = {"f32": (np.float32, 4e-6), "bf16": (ml_dtypes.bfloat16, 2**-7), "f16": (np.float16, 2**-9)}


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(found.astype(np.float64) - expected) / (1 + np.abs(expected)), initial=0))


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rows_against_float64(name: str, dtype: str, device: str) -> None:
    case, (kind, bound) = CASES[name], DTYPES[dtype]
    rng = np.random.default_rng(7)
    for n, c in SIZES if device == "cpu" else SIZES[:10] if dtype == "f32" else SIZES[:6]:
        inputs = case.inputs(rng, n, c, kind)
        found = case.kernel(*inputs, device=device)
        assert error(found, case.expected(inputs)) < bound, (n, c)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rows_that_begin_anywhere(name: str, dtype: str) -> None:
    """Every distance of a row's beginning from a vector's, and lengths around those at which a thread has another vector."""
    case, (kind, bound) = CASES[name], DTYPES[dtype]
    rng = np.random.default_rng(8)
    for n, c in ((9, 1501), (3, 1531), (3, 1534), (3, 1535), (3, 1537), (3, 1539), (3, 1541), (3, 2045), (3, 2047)):
        inputs = case.inputs(rng, n, c, kind)
        assert error(case.kernel(*inputs, device="emulator"), case.expected(inputs)) < bound, (n, c)


def test_exact_rows_that_begin_anywhere() -> None:
    """Sums of small integers, and what surrounds a row would change them."""
    rows = np.random.default_rng(9).integers(-3, 4, (17, 1503)).astype(np.float32)
    np.testing.assert_array_equal(scaled_by_sum(rows, device="emulator"), rows * rows.sum(1, keepdims=True))


@tw.kernel
def scaled_by_sum(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            s += x[i, j]
        for j in range(c):
            out[i, j] = x[i, j] * s
    return out


@tw.kernel
def above_diagonal(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            if j >= i:
                s += x[i, j] * j
        for j in range(c):
            if j >= i:
                out[i, j] = x[i, j] - s
            else:
                out[i, j] = 0
    return out


def test_conditions_inside_rows_that_begin_anywhere() -> None:
    rows = np.random.default_rng(10).integers(-1, 2, (11, 1507)).astype(np.float32)
    upper = np.triu(rows)
    expected = np.triu(rows - (upper * np.arange(1507)).sum(1, keepdims=True))
    np.testing.assert_array_equal(above_diagonal(rows, device="emulator"), expected)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_no_rows(device: str) -> None:
    for n, c in ((0, 5), (4, 0), (0, 0)):
        assert CASES["softmax"].kernel(np.zeros((n, c), np.float32), device=device).shape == (n, c)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_rows_of_extremes(device: str) -> None:
    rows = np.zeros((7, 40), np.float32)
    rows[0] = -np.inf
    rows[1, 3] = np.nan
    rows[2, 5] = np.inf
    rows[3] = 7.5
    rows[4] = np.linspace(-1e38, 1e38, 40)
    rows[5, 9] = -np.inf
    rows[6] = 3e38
    found = CASES["softmax"].kernel(rows, device=device)
    expected = CASES["softmax"].expected([rows])
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    rest = ~np.isnan(expected)
    np.testing.assert_allclose(found[rest], expected[rest], atol=1e-7)


def test_strided_rows() -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((6, 400)).astype(np.float32)
    for view in (wide[:, ::2], wide[::-1, :77], wide.T):
        assert error(CASES["softmax"].kernel(view, device="emulator"), CASES["softmax"].expected([view])) < 4e-6


def test_results_do_not_change_from_run_to_run() -> None:
    inputs = CASES["layer_norm"].inputs(np.random.default_rng(2), 3, 20011, np.float32)
    first, second = (CASES["layer_norm"].kernel(*inputs, device="emulator") for _ in range(2))
    np.testing.assert_array_equal(first, second)


@tw.kernel
def norm_of_three_axes(x: tw.Array, w: tw.Array, b: tw.Array) -> tw.Array:
    n, c, h, wd = x.shape
    out = tw.empty((n, c, h, wd), x.dtype)
    for i in tw.grid(n):
        m = tw.sum(x[i]) / (c * h * wd)
        v = tw.f32(0)
        for k, y, z in tw.grid(c, h, wd):
            v += (x[i, k, y, z] - m) * (x[i, k, y, z] - m)
        r = 1 / tw.sqrt(v / (c * h * wd) + 1e-5)
        for k, y, z in tw.grid(c, h, wd):
            out[i, k, y, z] = (x[i, k, y, z] - m) * r * w[k, y, z] + b[k, y, z]
    return out


@tw.kernel
def norm_by_channel(x: tw.Array, w: tw.Array, b: tw.Array) -> tw.Array:
    """What is read by channel is found by a division of the row's index."""
    n, c, h = x.shape
    out = tw.empty((n, c, h), x.dtype)
    for i in tw.grid(n):
        m = tw.sum(x[i]) / (c * h)
        v = tw.f32(0)
        for k, y in tw.grid(c, h):
            v += (x[i, k, y] - m) * (x[i, k, y] - m)
        r = 1 / tw.sqrt(v / (c * h) + 1e-5)
        for k, y in tw.grid(c, h):
            out[i, k, y] = (x[i, k, y] - m) * r * w[k] + b[k]
    return out


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_rows_of_several_axes_that_begin_anywhere(dtype: str, by_channel: bool) -> None:
    """The same code serves several shapes with as many elements, other code all others."""
    kind, bound = DTYPES[dtype]
    rng = np.random.default_rng(11)
    for n, c, h, wd in ((3, 5, 17, 23), (3, 17, 5, 23), (3, 23, 85, 1), (2, 4, 32, 16), (2, 7, 19, 31), (2, 7, 19, 32), (1, 1, 1, 1), (4, 31, 1, 33), (2, 3, 683, 1), (2, 2049, 1, 1)):
        x = rng.standard_normal((n, c, h * wd) if by_channel else (n, c, h, wd)).astype(kind)
        w, b = (rng.standard_normal((c,) if by_channel else (c, h, wd)).astype(kind) for _ in range(2))
        found = (norm_by_channel if by_channel else norm_of_three_axes)(x, w, b, device="emulator")
        wide, scale, shift = (a.astype(np.float64) for a in (x, w, b))
        if by_channel:
            scale, shift = scale[:, None], shift[:, None]
        axes = tuple(range(1, x.ndim))
        expected = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-5) * scale + shift
        assert error(found, expected) < bound, (n, c, h, wd)
