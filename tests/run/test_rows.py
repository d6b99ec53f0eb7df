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
