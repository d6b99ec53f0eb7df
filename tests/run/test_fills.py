"""Arrays that are filled with a number and then written by a kernel: the fill and the kernel are one."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(22)


def scaled(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i, j in tw.grid(n, m):
        y[i, j] = x[i, j] * 2
    return y


def turned(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.full((m, n), 7, dtype=x.dtype)
    for i, j in tw.grid(n, m):
        y[j, i] = x[i, j]
    return y


def whole(x):  # type: ignore[no-untyped-def]
    y = tw.zeros_like(x)
    y[:] = x * 2
    return y


def shorter(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.ones((n, m - 1), dtype=x.dtype)
    for i in range(n):
        for j in range(m - 1):
            y[i, j] = x[i, j + 1] - x[i, j]
    return y


def positive(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.full((n, m), 3, dtype=x.dtype)
    for i, j in tw.grid(n, m):
        if x[i, j] > 0:
            y[i, j] = x[i, j]
    return y


def cases(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i, j in tw.grid(n, m):
        if i == 0:
            y[i, j] = x[i, j]
        elif j > 0 and x[i, j - 1] > 0:
            y[i, j] = x[i, j] - x[i - 1, j]
            if j == m - 1:
                y[i, j] += 1
        elif j == 2:
            y[i, j] += 5
    return y


def added(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.full((n, m), 4, dtype=x.dtype)
    for i, j in tw.grid(n, m):
        y[i, j] += x[i, j]
        if x[i, j] > 0:
            y[i, j] *= 2
    return y


def row_sums(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n,), dtype=x.dtype)
    for i in tw.grid(n):
        for j in range(m):
            y[i] += x[i, j]
    return y


def row_differences(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.full((n,), 100, dtype=x.dtype)
    for i in tw.grid(n):
        for j in range(m):
            y[i] -= x[i, j]
    return y


def centred(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in tw.grid(n):
        low = x[i, 0]
        for j in range(m):
            low = min(low, x[i, j])
        for j in range(m):
            if x[i, j] > 0:
                y[i, j] = x[i, j] - low
    return y


def last_of_row(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n,), dtype=x.dtype)
    for i in tw.grid(n):
        for j in range(m):
            if x[i, j] > 0:
                y[i] = x[i, j]
    return y


def grams(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, n), dtype=x.dtype)
    for i, j in tw.grid(n, n):
        for k in range(m):
            y[i, j] += x[i, k] * x[j, k]
    return y


def steps(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros_like(x)
    z = tw.empty_like(x)
    for i, j in tw.grid(n, m):
        z[i, j] = x[i, j]
    for _t in range(3):
        y[:] = 1
        for i, j in tw.grid(n, m):
            if z[i, j] > 0:
                y[i, j] = z[i, j] - 1
        for i, j in tw.grid(n, m):
            z[i, j] = y[i, j] + x[i, m - 1 - j]
    return z


FOLDED = (scaled, turned, whole, shorter, positive, cases, added, row_sums, row_differences, centred, grams)


def inside(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in range(1, n - 1):
        for j in range(1, m - 1):
            y[i, j] = x[i - 1, j] + x[i, j + 1]
    return y


def running(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n, m), dtype=x.dtype)
    for i in tw.grid(n):
        for j in range(1, m):
            y[i, j] = y[i, j - 1] + x[i, j]
    return y


def counted(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.zeros((n,), dtype=x.dtype)
    for i, j in tw.grid(n, m):
        if x[i, j] > 0:
            y[j % n] += x[i, j]
    return y


def read_before(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.ones((n, m), dtype=x.dtype)
    z = tw.empty((n, m), dtype=x.dtype)
    for i, j in tw.grid(n, m):
        z[i, j] = y[i, m - 1 - j] + x[i, j]
    for i, j in tw.grid(n, m):
        y[i, j] = z[i, j] * 2
    return y


def half(x):  # type: ignore[no-untyped-def]
    n, m = x.shape
    y = tw.ones((n, m), dtype=x.dtype)
    for i, j in tw.grid(n // 2, m):
        y[i, j] = x[i, j]
    return y


OTHERS = (steps, last_of_row, inside, running, counted, read_before, half)


def plain(function: Any, x: np.ndarray) -> np.ndarray:
    """What Python itself makes of a kernel."""

    class Words:
        empty_like = zeros_like = staticmethod(np.zeros_like)
        zeros = staticmethod(np.zeros)
        ones = staticmethod(np.ones)
        full = staticmethod(np.full)
        empty = staticmethod(np.empty)

        @staticmethod
        def grid(*extents: int) -> Any:
            return range(extents[0]) if len(extents) == 1 else np.ndindex(*extents)

    return FunctionType(function.__code__, {"tw": Words, "min": min, "range": range})(x)


SHAPES = [(1, 1), (1, 7), (31, 33), (2, 17), (0, 5), (5, 0), (67, 3)]


@pytest.mark.parametrize("function", [*FOLDED, *OTHERS], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_as_python_computes_it(function: Any, dtype: type) -> None:
    kernel = tw.kernel(function)
    for shape in SHAPES:
        if 0 in shape and function in (centred, shorter):
            continue
        x = RNG.integers(-9, 9, shape).astype(dtype)
        np.testing.assert_array_equal(kernel(x), plain(function, x), err_msg=str(shape))


@pytest.mark.parametrize("function", [*FOLDED, *OTHERS], ids=lambda f: f.__name__)
def test_on_the_emulator(function: Any) -> None:
    x = RNG.integers(-9, 9, (5, 7)).astype(np.float32)
    np.testing.assert_array_equal(tw.kernel(function)(x, device="emulator"), plain(function, x))


@pytest.mark.parametrize("function", FOLDED, ids=lambda f: f.__name__)
def test_nothing_is_filled(function: Any) -> None:
    kernel = tw.kernel(function)
    kernel(RNG.integers(-9, 9, (31, 33)).astype(np.float32))
    assert kernel.last is not None
    assert all(launch.args != ("y",) for launch in kernel.last.launches)


@pytest.mark.parametrize("function", [inside, running, counted, read_before, half], ids=lambda f: f.__name__)
def test_what_must_be_filled(function: Any) -> None:
    kernel = tw.kernel(function)
    kernel(RNG.integers(-9, 9, (31, 33)).astype(np.float32))
    assert kernel.last is not None
    assert any(launch.args == ("y",) for launch in kernel.last.launches)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint8, np.bool_, np.complex64])
def test_other_dtypes(dtype: type) -> None:
    @tw.kernel
    def chosen(x, mask):  # type: ignore[no-untyped-def]
        y = tw.zeros_like(x)
        for i in tw.grid(x.shape[0]):
            if mask[i] > 0:
                y[i] = x[i]
        return y

    x, mask = RNG.integers(0, 9, 33).astype(dtype), RNG.integers(0, 2, 33)
    np.testing.assert_array_equal(chosen(x, mask), np.where(mask, x, 0).astype(dtype))


def test_signs_of_zeros_and_what_is_no_number() -> None:
    x = np.array([[-0.0, -0.0], [np.nan, 1], [np.inf, -np.inf], [-np.inf, 1]], np.float32)
    for function in (row_sums, added, positive):
        with np.errstate(invalid="ignore"):
            found, wanted = tw.kernel(function)(x), plain(function, x)
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found)[:1], np.signbit(wanted)[:1])


def test_an_array_of_the_caller() -> None:
    @tw.kernel
    def into(x, y: tw.InOut):  # type: ignore[no-untyped-def]
        n, m = x.shape
        y[:] = 0
        for i, j in tw.grid(n, m):
            if x[i, j] > 0:
                y[i, j] = x[i, j]

    x = RNG.standard_normal((31, 33))
    into(x, y := np.full_like(x, np.nan))
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    into(x[:, ::-1], wide := np.full((31, 66), np.nan)[:, ::2])
    np.testing.assert_array_equal(wide, np.maximum(x[:, ::-1], 0))
