"""Products with few rows on a CPU: columns that lie along the sum are read where they lie, others are copied several panels at a time."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import host_cpu


@tw.kernel
def of_rows(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[j, p]
        out[i, j] = total
    return out


@tw.kernel
def of_rows_with_more(a: tw.Array, b: tw.Array, bias: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[j, p]
        out[i, j] = max(total + bias[j], 0.0)
    return out


@tw.kernel
def plain(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


def _numbers(*shape: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def _check(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found,
        wanted,
        rtol=0,
        atol=(1e-12 if dtype == "float64" else 2e-5) * max(1.0, float(np.abs(wanted).max(initial=0.0))),
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m", [1, 4, 5, 9, 14, 15, 28, 29, 31, 64, 65, 70, 449, 701])
def test_columns_along_the_sum(m: int, dtype: str) -> None:
    for n, k in ((1, 3), (11, 512), (12, 515), (131, 1030), (25, 1)):
        a, b = _numbers(m, k, dtype=dtype), _numbers(n, k, dtype=dtype)
        _check(of_rows(a, b), a.astype(np.float64) @ b.astype(np.float64).T, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m", [1, 9, 66])
def test_columns_side_by_side(m: int, dtype: str) -> None:
    for n, k in ((1, 3), (95, 7), (96, 515), (203, 1030), (1100, 40)):
        a, b = _numbers(m, k, dtype=dtype), _numbers(k, n, dtype=dtype)
        _check(plain(a, b), a.astype(np.float64) @ b.astype(np.float64), dtype)


def test_views_and_what_follows_the_sum() -> None:
    a, b, bias = (
        _numbers(13, 2 * 700, dtype="float32")[:, ::2],
        _numbers(50, 900, dtype="float32")[:, 100:800],
        _numbers(50, dtype="float32"),
    )
    wanted = np.maximum(a.astype(np.float64) @ b.astype(np.float64).T + bias, 0.0)
    _check(of_rows_with_more(a, b, bias), wanted, "float32")


def test_no_terms_and_no_columns() -> None:
    assert (of_rows(np.zeros((3, 0), np.float32), np.zeros((5, 0), np.float32)) == 0).all()
    assert of_rows(np.zeros((3, 4), np.float32), np.zeros((0, 4), np.float32)).shape == (3, 0)


@pytest.mark.parametrize("n", [170, 61, 20])
@pytest.mark.parametrize("m", [3, 15, 28, 29, 40, 64, 65, 460])
def test_bits_do_not_depend_on_cores(m: int, n: int) -> None:
    a, b = _numbers(m, 1500, dtype="float32"), _numbers(n, 1500, dtype="float32")
    np.testing.assert_array_equal(of_rows(a, b), of_rows(a, b, device="cpu:0/1"))
    try:
        halves = of_rows(a, b, device="cpu:1/2")
    except tw.DeviceError:
        return  # one core
    np.testing.assert_array_equal(of_rows(a, b), halves)


@pytest.mark.parametrize(("m", "n"), [(17, 61), (61, 17), (25, 20), (100, 40)])
def test_few_results_are_shared_by_cores(m: int, n: int) -> None:
    a, b, bias = _numbers(m, 5000, dtype="float32"), _numbers(n, 5000, dtype="float32"), _numbers(n, dtype="float32")
    _check(of_rows_with_more(a, b, bias), np.maximum(a.astype(np.float64) @ b.astype(np.float64).T + bias, 0.0), "float32")
    (launch,) = of_rows_with_more.last.launches
    (blocks,) = (extent.evaluate({"m": m, "n": n, "k": 5000}) for extent in launch.grid)
    assert blocks >= min(2, host_cpu().multiprocessors)


@tw.kernel
def operator(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def then_more(a: tw.Array, b: tw.Array, v: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(k):
            total += a[i, p] * b[p, j]
        out[i, j] = tw.tanh(total * 0.01) + v[i] + i
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 203, 77), (203, 1, 77), (1, 1, 5000), (1, 17, 1030), (1, 4100, 3), (1, 4100, 0)]
)
def test_one_row_and_one_column(m: int, n: int, k: int, dtype: str) -> None:
    a, b, v = _numbers(m, k, dtype=dtype), _numbers(k, n, dtype=dtype), _numbers(m, dtype=dtype)
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    _check(plain(a, b), wanted, dtype)
    _check(operator(a, b), wanted, dtype)
    _check(of_rows(a, np.ascontiguousarray(b.T)), wanted, dtype)
    _check(then_more(a, b, v), np.tanh(wanted * 0.01) + v[:, None] + np.arange(m)[:, None], dtype)


def test_calls_with_one_row_and_with_more_take_turns() -> None:
    b = _numbers(120, 90, dtype="float32")
    for m in (1, 2, 1, 70, 1, 2):
        a = _numbers(m, 120, dtype="float32")
        _check(plain(a, b), a.astype(np.float64) @ b.astype(np.float64), "float32")
    with pytest.raises(tw.TilewrightError):
        plain(_numbers(1, 121, dtype="float32"), b)


def test_one_row_is_a_matrix_times_a_vector() -> None:
    a, b = _numbers(1, 300, dtype="float32"), _numbers(300, 400, dtype="float32")
    plain(a, b)
    assert "family=cpu" not in str(plain.last.schedule) and "mr=" not in str(plain.last.schedule)
