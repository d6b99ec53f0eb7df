"""Reductions of a whole array that stand beside one another: all cores take part, whatever they depend on, and results are right."""

from __future__ import annotations

import math
import warnings

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

SIZES = [0, 1, 31, 33, 32767, 32768, 32769, 100003]


@tw.kernel
def sum_and_squares(x: tw.Array) -> tw.Array:
    out = tw.empty(3, tw.f32)
    total = tw.f32(0)
    squares = tw.f32(0)
    most = -tw.inf
    for i in range(len(x)):
        total += x[i]
        squares += x[i] * x[i]
        most = max(most, x[i])
    out[0] = total
    out[1] = squares
    out[2] = most
    return out


@tw.kernel
def moments(x: tw.Array) -> tw.Array:
    out = tw.empty(2, x.dtype)
    for _ in tw.grid(1):
        mean = tw.sum(x) / len(x)
        out[0] = mean
        out[1] = tw.sum((x - mean) * (x - mean)) / len(x)
    return out


@tw.kernel
def log_of_exponentials(x: tw.Array) -> tw.Array:
    out = tw.empty(1, x.dtype)
    for _ in tw.grid(1):
        most = tw.max(x)
        out[0] = most + tw.log(tw.sum(tw.exp(x - most)))
    return out


@tw.kernel
def complex_sum(z: tw.Array) -> complex:
    return tw.sum(z)


@tw.kernel
def complex_dot(z: tw.Array, w: tw.Array) -> complex:
    return tw.sum(z * w.conj())


@tw.kernel
def rows_of_complex(z: tw.Array) -> tw.Array:
    rows, columns = z.shape
    out = tw.empty(rows, z.dtype)
    for i in tw.grid(rows):
        total = tw.complex(0.0, 0.0)
        for j in range(columns):
            total += z[i, j]
        out[i] = total
    return out


@tw.kernel
def extremes(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    found = tw.empty(2, x.dtype)
    places = tw.empty(2, tw.i64)
    for _ in tw.grid(1):
        places[0] = tw.argmax(x)
        places[1] = tw.argmin(x)
        found[0] = tw.max(x)
        found[1] = tw.sum(x)
    return found, places


@tw.kernel
def of_integers(x: tw.Array) -> tw.Array:
    out = tw.empty(3, tw.i64)
    total = tw.i64(0)
    product = tw.i64(1)
    most = tw.i64(0)
    for i in range(len(x)):
        total += x[i]
        product *= x[i]
        most = max(most, x[i])
    out[0] = total
    out[1] = product
    out[2] = most
    return out


@tw.kernel
def of_narrow_floats(x: tw.Array) -> tw.Array:
    out = tw.empty(2, tw.f32)
    total = tw.f32(0)
    squares = tw.f32(0)
    for i in range(len(x)):
        total += x[i]
        squares += tw.f32(x[i]) * tw.f32(x[i])
    out[0] = total
    out[1] = squares
    return out


@tw.kernel
def sum_of_sums(x: tw.Array) -> tw.Array:
    out = tw.empty(2, tw.f64)
    total = tw.f64(0)
    running = tw.f64(0)
    for i in range(len(x)):
        total += x[i]
        running += total
    out[0] = total
    out[1] = running
    return out


@tw.kernel
def into_its_ends(x: tw.InOut) -> None:
    total = tw.f64(0)
    squares = tw.f64(0)
    for i in range(len(x)):
        total += x[i]
        squares += x[i] * x[i]
    x[0] = total
    x[len(x) - 1] = squares


def numbers(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_sums_in_one_loop(size: int) -> None:
    x = numbers(size)
    wide = x.astype(np.float64)
    found = sum_and_squares(x)
    np.testing.assert_allclose(found[:2], [wide.sum(), (wide * wide).sum()], rtol=1e-5, atol=1e-4 * math.sqrt(size + 1))
    assert found[2] == (x.max() if size else -np.inf)


@pytest.mark.parametrize("size", SIZES[1:])
def test_sums_that_need_another(size: int) -> None:
    x = numbers(size) + 100
    wide = x.astype(np.float64)
    np.testing.assert_allclose(moments(x), [wide.mean(), wide.var()], rtol=1e-4)
    np.testing.assert_allclose(log_of_exponentials(x), np.log(np.exp(wide - wide.max()).sum()) + wide.max(), rtol=1e-6)


def test_special_numbers() -> None:
    x = numbers(70001)
    x[40000] = np.nan
    assert np.isnan(sum_and_squares(x)[:2]).all()
    assert np.isnan(moments(x)).all()
    x[40000] = -np.inf
    assert np.isfinite(log_of_exponentials(x)).all()
    x[:] = -np.inf
    x[1] = 3
    np.testing.assert_allclose(log_of_exponentials(x), 3.0)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("size", SIZES)
def test_complex_numbers(size: int, dtype: type) -> None:
    z = (numbers(size) + 1j * numbers(size + 1)[:size]).astype(dtype)
    w = z[::-1].copy()
    bound = {"rtol": 1e-5 if dtype is np.complex64 else 1e-12, "atol": (1e-5 if dtype is np.complex64 else 1e-12) * (size + 1)}
    np.testing.assert_allclose(complex_sum(z), z.astype(np.complex128).sum(), **bound)
    np.testing.assert_allclose(complex_dot(z, w), np.vdot(w.astype(np.complex128), z.astype(np.complex128)), **bound)
    np.testing.assert_allclose(complex_sum(np.repeat(z, 3)[::3]), z.astype(np.complex128).sum(), **bound)
    rows = np.stack([z, w, z - w])
    np.testing.assert_allclose(rows_of_complex(rows), rows.astype(np.complex128).sum(1), **bound)


@pytest.mark.parametrize("size", SIZES[1:])
def test_places_and_integers(size: int) -> None:
    x = np.random.default_rng(size).permutation(size).astype(np.float64)
    found, places = extremes(x)
    assert (places[0], places[1], found[0], found[1]) == (x.argmax(), x.argmin(), x.max(), x.sum())
    whole = np.random.default_rng(size).integers(1, 3, size)
    assert of_integers(whole).tolist() == [whole.sum(), np.prod(whole), whole.max()]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_narrow_floats_and_views(size: int, dtype: type) -> None:
    x = numbers(size).astype(dtype)
    wide = x.astype(np.float64)
    for given in (x, np.repeat(x, 2)[::2]):
        np.testing.assert_allclose(of_narrow_floats(given), [wide.sum(), (wide * wide).sum()], rtol=1e-5, atol=1e-4 * math.sqrt(size + 1))


@pytest.mark.parametrize("size", SIZES[2:])
def test_what_is_read_in_order_or_written_in_place(size: int) -> None:
    x = numbers(size).astype(np.float64)
    np.testing.assert_allclose(sum_of_sums(x), [x.sum(), np.cumsum(x).sum()], rtol=1e-9, atol=1e-9 * size)
    y = x.copy()
    into_its_ends(y)
    np.testing.assert_allclose([y[0], y[-1]], [x.sum(), (x * x).sum()], rtol=1e-10, atol=1e-10 * size)
    np.testing.assert_array_equal(y[1:-1], x[1:-1])


def test_nothing_is_said_about_one_thread() -> None:
    x = numbers(1 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum_and_squares(x)
        complex_sum(x.astype(np.complex64))
        moments(x)
