"""Rows walked several times, held in registers on GPUs: every case on the CPU and in the emulator's thread stage, against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

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
    for n, c in SIZES if device == "cpu" or dtype != "f16" else SIZES[:6]:
        inputs = case.inputs(rng, n, c, kind)
        found = case.kernel(*inputs, device=device)
        assert error(found, case.expected(inputs)) < bound, (n, c)


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
