"""mean, var, std and norm, `keepdims`, and conversion by `x.dtype(…)`, against NumPy in f64."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw

DEVICES = ["cpu", "emulator"]
X = np.random.default_rng(3).normal(5, 2, (7, 33)).astype(np.float32)
WIDE = X.astype(np.float64)


@tw.kernel
def along_rows(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array, tw.Array]:
    return tw.mean(x, axis=1), tw.var(x, axis=-1), x.std(axis=1), tw.norm(x, axis=1)


@tw.kernel
def along_columns(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    return tw.mean(x, axis=0, keepdims=True), tw.std(x, axis=0)


@tw.kernel
def of_all(x: tw.Array) -> tw.Array:
    out = tw.empty(3, x.dtype)
    a = tw.mean(x)
    b = tw.var(x)
    c = tw.norm(x)
    out[0] = a
    out[1] = b
    out[2] = c
    return out


@tw.kernel
def normalised(x: tw.Array) -> tw.Array:
    centred = x - tw.mean(x, axis=1, keepdims=True)
    return centred / tw.max(tw.abs(centred), axis=1, keepdims=True)


@tw.kernel
def row_by_row(x: tw.Array) -> tw.Array:
    rows, _ = x.shape
    out = tw.empty(rows, x.dtype)
    for i in tw.grid(rows):
        out[i] = tw.mean(x[i, :]) + tw.std(x[i, :])
    return out


@tw.kernel
def converted(x: tw.Array, n: tw.Array) -> tw.Array:
    out = tw.empty_like(x)
    for i, j in tw.grid(*x.shape):
        out[i, j] = x[i, j] * x.dtype(n[i]) + x.dtype(1)
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_statistics(device: str) -> None:
    found = along_rows(X, device=device)
    wanted = WIDE.mean(1), WIDE.var(1), WIDE.std(1), np.linalg.norm(WIDE, axis=1)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-5)
    mean, std = along_columns(X, device=device)
    assert mean.shape == (1, 33)
    np.testing.assert_allclose(mean, WIDE.mean(0, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(std, WIDE.std(0), rtol=1e-5)
    np.testing.assert_allclose(of_all(X, device=device), [WIDE.mean(), WIDE.var(), np.linalg.norm(WIDE)], rtol=1e-5)
    np.testing.assert_allclose(row_by_row(X, device=device), WIDE.mean(1) + WIDE.std(1), rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_axes_that_stay_meet_the_array(device: str) -> None:
    centred = WIDE - WIDE.mean(1, keepdims=True)
    np.testing.assert_allclose(normalised(X, device=device), centred / np.abs(centred).max(1, keepdims=True), atol=1e-5)


def test_integers_have_means_of_floats() -> None:
    found = of_all_integers(np.arange(12).reshape(3, 4).astype(np.int32))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [1.5, 5.5, 9.5])


@tw.kernel
def of_all_integers(x: tw.Array) -> tw.Array:
    return tw.mean(x, axis=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_conversion_by_the_dtype_of_an_array(dtype: type, device: str) -> None:
    x = np.arange(6).reshape(2, 3).astype(dtype)
    found = converted(x, np.array([2.5, 3.5]), device=device)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, x * np.array([[2.5], [3.5]]).astype(dtype) + 1)
