"""Products with few rows or few columns on a CPU that masks lanes: both factors are read where they lie. Against float64, at sizes around the edges of tiles, strips
and stretches."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def of_columns(a: tw.Array, b: tw.Array) -> tw.Array:
    k, m = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[p, i] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def with_more(a: tw.Array, b: tw.Array, bias: tw.Array, other: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = tw.exp(max(total + bias[j], 0.0) * -0.125) + other[i, j]
    return out


def _numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def _check(found: np.ndarray, wanted: np.ndarray) -> None:
    close = 1e-12 if found.dtype == "float64" else 2e-5
    np.testing.assert_allclose(found, wanted, rtol=0, atol=close * max(1.0, float(np.abs(wanted).max(initial=0.0))))


SIZES = [
    (1, 1, 1), (2, 3, 0), (0, 5, 4), (5, 0, 4), (3, 64, 33), (4, 65, 40), (5, 16, 31), (7, 17, 97), (8, 48, 12), (9, 49, 520), (13, 33, 3), (6, 128, 41), (33, 31, 31), (64, 2, 5),
    (25, 1, 19), (3, 500, 34), (2, 1100, 70), (67, 40, 9000), (20, 300, 2500), (900, 17, 610), (1100, 66, 130), (61, 2011, 257), (127, 128, 300), (4200, 65, 20), (2, 66000, 3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_sizes(m: int, n: int, k: int, dtype: str) -> None:
    a, b = _numbers(m, k, dtype=dtype), _numbers(k, n, dtype=dtype)
    wanted = a.astype("float64") @ b.astype("float64")
    _check(product(a, b), wanted)
    _check(of_columns(np.ascontiguousarray(a.T), b), wanted)


def test_what_follows_the_sum() -> None:
    for m, n, k in ((5, 7, 3), (33, 65, 40), (9, 300, 1000)):
        a, b, bias, other = _numbers(m, k), _numbers(k, n), _numbers(n), _numbers(m, n)
        wanted = np.exp(np.maximum(a.astype("float64") @ b + bias, 0) * -0.125) + other
        _check(with_more(a, b, bias, other), wanted)


def test_views() -> None:
    """Rows that lie apart, and factors that begin in the middle of a line."""
    a, b = _numbers(40, 700)[::2, 3:603], _numbers(601, 90)[1:, 5:82]
    _check(product(a, b), a.astype("float64") @ b.astype("float64"))


def test_what_is_no_number_stays_where_it_is() -> None:
    a, b = _numbers(11, 70), _numbers(70, 37)
    a[3, 5], b[9, 20], b[69, 36] = np.nan, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        wanted = a.astype("float64") @ b.astype("float64")
    found = product(a, b)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))


def test_long_sums_lose_few_bits() -> None:
    """Stretches, then sixteen of them, then all: as exact as sums in order of stretches alone are."""
    a, b = np.abs(_numbers(8, 60000)), np.abs(_numbers(60000, 24))
    wanted = a.astype("float64") @ b.astype("float64")
    assert np.max(np.abs(product(a, b) / wanted - 1)) < 4e-6


@pytest.mark.parametrize(("m", "n"), [(33, 33), (9, 700), (500, 20)])
def test_bits_do_not_depend_on_cores(m: int, n: int) -> None:
    a, b = _numbers(m, 1500), _numbers(1500, n)
    np.testing.assert_array_equal(product(a, b), product(a, b, device="cpu:0/1"))
    try:
        halves = product(a, b, device="cpu:1/2")
    except tw.DeviceError:
        return  # one core
    np.testing.assert_array_equal(product(a, b), halves)
