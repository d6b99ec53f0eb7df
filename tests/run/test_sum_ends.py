"""Sums that end before the arrays they read, and sums whose length depends on the result: what lies behind the end has no part in them, infinities least of all."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.emulator import run_program


@tw.kernel
def shifted(a: tw.Array, b: tw.Array) -> tw.Array:
    m, terms = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = tw.f32(0)
        for k in range(terms):
            total += a[i, k] * b[k + 1, j]
        out[i, j] = total
    return out


@tw.kernel
def turned(a: tw.Array, b: tw.Array) -> tw.Array:
    """Both factors along the sum; the first goes on behind it."""
    m, n, terms = a.shape[0], b.shape[0], b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = tw.f32(0)
        for k in range(terms):
            total += a[i, k + 8] * b[j, k]
        out[i, j] = total
    return out


@tw.kernel
def growing(a: tw.Array, b: tw.Array) -> tw.Array:
    m, n = a.shape[0], b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = tw.f32(0)
        for k in range(i + 1):
            total += a[i, k] * b[k, j]
        out[i, j] = total
    return out


@tw.kernel
def highest(a: tw.Array) -> tw.Array:
    m = a.shape[0]
    out = tw.empty((m,), a.dtype)
    for i in tw.grid(m):
        most = -tw.inf
        for k in range(i + 1):
            most = max(most, a[i, k])
        out[i] = most
    return out


def computed(kernel: tw.Kernel[..., tw.Array], *arguments: np.ndarray, target: str) -> np.ndarray:
    if target == "cpu":
        return np.asarray(kernel(*arguments)).astype(np.float64)
    program = kernel.stages(*arguments, target=target).stages.thread
    return np.asarray(next(iter(run_program(program, dict(kernel.bound(*arguments))).values()))).astype(np.float64)


TARGETS = pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
DTYPES = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64], ids=["bf16", "f16", "f32", "f64"])


@TARGETS
@DTYPES
@pytest.mark.parametrize("terms", [50, 72, 128])
def test_what_lies_behind_a_sum_is_not_read(target: str, dtype: type, terms: int) -> None:
    rng = np.random.default_rng(terms)
    a, b = rng.standard_normal((128, terms)).astype(dtype), rng.standard_normal((terms + 70, 128)).astype(dtype)
    b[terms + 1 :], b[0] = np.inf, np.nan
    want = a.astype(np.float64) @ b[1 : terms + 1].astype(np.float64)
    np.testing.assert_allclose(computed(shifted, a, b, target=target), want, rtol=2e-5, atol=2e-5)


@TARGETS
@pytest.mark.parametrize("terms", [56, 120])
def test_factors_along_the_sum(target: str, terms: int) -> None:
    rng = np.random.default_rng(terms)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((128, terms + 72), (128, terms)))
    a[:, :8], a[:, terms + 8 :] = np.inf, np.nan
    want = a[:, 8 : terms + 8].astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(computed(turned, a, b, target=target), want, rtol=2e-5, atol=2e-5)


@TARGETS
@DTYPES
@pytest.mark.parametrize("rows", [1, 33, 72])
def test_lengths_that_depend_on_the_row(target: str, dtype: type, rows: int) -> None:
    rng = np.random.default_rng(rows)
    a, b = rng.standard_normal((rows, rows)).astype(dtype), rng.standard_normal((rows + 9, 40)).astype(dtype)
    want = np.tril(a.astype(np.float64)) @ b[:rows].astype(np.float64)
    np.testing.assert_allclose(computed(growing, a, b, target=target), want, rtol=2e-5, atol=2e-5)
    if dtype in (np.float32, np.float64):
        np.testing.assert_array_equal(computed(highest, a, target=target), [a[i, : i + 1].max() for i in range(rows)])
