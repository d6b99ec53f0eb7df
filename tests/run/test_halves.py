"""Loops that store and accumulate in one: two loops, where one needs of the other only what the same iteration has stored."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(24)


def softmax(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in range(n):
        top = x[i, 0]
        for j in range(m):
            top = max(top, x[i, j])
        total = 0.0
        for j in range(m):
            y[i, j] = tw.exp(x[i, j] - top)
            total += y[i, j]
        for j in range(m):
            y[i, j] = y[i, j] / total
    return y


def softmax_by_name(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.empty((n, m), dtype=x.dtype)
    for i in range(n):
        top = x[i, 0]
        for j in range(m):
            top = max(top, x[i, j])
        total = 0.0
        for j in range(m):
            e = tw.exp(x[i, j] - top)
            total += e
            y[i, j] = e
        for j in range(m):
            y[i, j] /= total
    return y


def centred(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.empty((n, m), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        low = x[i, 0]
        for j in range(1, m):
            v = x[i, j] * 2 + j
            y[i, j] = v
            if v > 3:
                total += v
            low = min(low, x[i, j])
        y[i, 0] = low
        for j in range(1, m):
            y[i, j] = y[i, j] + total
    return y


def read_before(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.empty((n, m), dtype=x.dtype)
    for i in range(n):
        for j in range(m):
            y[i, j] = x[i, j] + i
        total = 0.0
        for j in range(m):
            total += y[i, j]
            y[i, j] = x[i, j] * 3
        y[i, 0] = total
    return y


def both(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.ones((n, m), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        for j in range(m):
            total += y[i, j]
            y[i, j] = x[i, j] * 3
            total += y[i, j]
        y[i, 0] = total
    return y


def last(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, 2), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        for j in range(m):
            y[i, j % 2] = x[i, j]
            total += y[i, j % 2]
        y[i, 0] += total
    return y


def neighbours(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        for j in range(m):
            y[i, j] = x[i, j]
            total += y[i, m - 1 - j]
        for j in range(m):
            y[i, j] += total
    return y


def twice(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        for j in range(m):
            y[i, j] = x[i, j]
            total += y[i, j]
            y[i, j] = x[i, j] * 2
        for j in range(m):
            y[i, j] += total
    return y


def chosen(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        count = 0.0
        for j in range(m):
            if x[i, j] > 0:
                y[i, j] = x[i, j]
                total += x[i, j] * 2
                count += 1
        for j in range(m):
            y[i, j] += total - count
    return y


def named_after(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        for j in range(m):
            v = x[i, j]
            y[i, j] = v
            v = v + 1
            total += v
        for j in range(m):
            y[i, j] += total
    return y


def running(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in range(n):
        total = 0.0
        for j in range(m):
            total += x[i, j]
            y[i, j] = total
    return y


def of_all(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.empty((n, m), dtype=x.dtype)
    total = 0.0
    for i in range(n):
        for j in range(m):
            y[i, j] = x[i, j] * 2
            total += y[i, j]
    for i in range(n):
        for j in range(m):
            y[i, j] += total
    return y


def of_one_place(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    total = 0.0
    for i in range(n):
        y[0, 0] = x[i, 0]
        total += y[0, 0]
    for i in range(n):
        y[i, 0] = total
    return y


KERNELS = (softmax, softmax_by_name, centred, read_before, both, last, neighbours, twice, chosen, named_after, running, of_all, of_one_place)


def plain(function: Any, x: np.ndarray) -> np.ndarray:
    """What Python itself makes of a kernel, in float64."""

    class Words:
        zeros, ones, empty, exp = staticmethod(np.zeros), staticmethod(np.ones), staticmethod(np.empty), staticmethod(np.exp)

    return FunctionType(function.__code__, {"tw": Words, "min": min, "max": max, "range": range})(x.astype(np.float64))


@pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_as_python_computes_it(function: Any, dtype: type) -> None:
    kernel = tw.kernel(function)
    for shape in ((1, 1), (3, 7), (31, 33), (5, 1), (2, 131)):
        x = RNG.standard_normal(shape).astype(dtype)
        np.testing.assert_allclose(kernel(x), plain(function, x), rtol=3e-5, atol=3e-5 if dtype is np.float32 else 1e-12, err_msg=str(shape))


@pytest.mark.parametrize("function", KERNELS, ids=lambda f: f.__name__)
def test_on_the_emulator(function: Any) -> None:
    x = RNG.standard_normal((5, 7)).astype(np.float32)
    np.testing.assert_allclose(tw.kernel(function)(x, device="emulator"), plain(function, x), rtol=3e-5, atol=3e-5)


def test_what_is_no_number_stays() -> None:
    x = np.array([[1, np.inf, 2], [np.nan, 1, 2], [-np.inf, 0, 1]], np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(tw.kernel(softmax)(x), plain(softmax, x), rtol=1e-6)




# -- loops whose bounds the body changes ---------------------------------------------------------------------------


@tw.kernel
def ends_where_it_says(c: tw.InOut, x: tw.Array) -> tw.Array:
    out = tw.zeros(1, x.dtype)
    total = 0.0
    for j in range(c[0]):
        c[j] = 2
        total += x[j]
    out[0] = total
    return out


@tw.kernel
def ends_at_its_sum(y: tw.InOut) -> tw.Array:
    n = y.shape[0]
    out = tw.zeros(n, y.dtype)
    for i in range(n):
        total = 5
        for j in range(total):
            total += y[i, j]
            y[i, j] = 1
        out[i] = total
    return out


@tw.kernel
def begins_at_its_sum(y: tw.InOut) -> tw.Array:
    n, m = y.shape
    out = tw.zeros(n, y.dtype)
    for i in range(n):
        total = 2
        for j in range(total, m):
            total += y[i, j]
            y[i, j] = 1
        out[i] = total
    return out


@tw.kernel
def ends_in_rows(c: tw.InOut, a: tw.Array, q: tw.InOut, s: tw.InOut) -> None:
    n, m = a.shape
    for i in range(n):
        for j in range(c[i]):
            c[i] = 1
            q[i] += a[i, j]
        for j in range(m):
            s[j] += a[i, j]


def test_a_loop_has_the_bounds_it_began_with() -> None:
    c, x = np.full(33, 7), RNG.standard_normal(33)
    np.testing.assert_allclose(ends_where_it_says(c, x), [x[:7].sum()])
    assert c.tolist() == [2] * 7 + [7] * 26
    y = RNG.integers(1, 3, (4, 33))
    expected = y.copy()
    expected[:, :5] = 1
    sums = 5 + y[:, :5].sum(axis=1)
    np.testing.assert_array_equal(ends_at_its_sum(y), sums)
    np.testing.assert_array_equal(y, expected)
    y = RNG.integers(1, 3, (4, 33))
    expected = y.copy()
    expected[:, 2:] = 1
    sums = 2 + y[:, 2:].sum(axis=1)
    np.testing.assert_array_equal(begins_at_its_sum(y), sums)
    np.testing.assert_array_equal(y, expected)
    c, a, q, s = np.full(5, 7), RNG.standard_normal((5, 9)), np.zeros(5), np.zeros(9)
    ends_in_rows(c, a, q, s)
    np.testing.assert_allclose(q, a[:, :7].sum(axis=1))
    np.testing.assert_allclose(s, a.sum(axis=0))
