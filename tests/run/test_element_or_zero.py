"""An element where a condition holds, and zero elsewhere: on a CPU one masked load gives both. Other branches are computed as they are written."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def shifted(x: tw.Array, by: tw.i64) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        at = i - by
        out[i] = x[at] if 0 <= at < n else x.dtype(0)
    return out


@tw.kernel
def minus_zero(x: tw.Array, by: tw.i64) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        at = i - by
        out[i] = x[at] if 0 <= at < n else x.dtype(-0.0)
    return out


@tw.kernel
def marked(x: tw.Array, there: tw.Array, outside: tw.InOut) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        value = x.dtype(0)
        if there[i] > 0:
            value = x[i]
        else:
            outside[i] = 1
            value = 0
        out[i] = value
    return out


def wanted(x: np.ndarray, by: int) -> np.ndarray:
    return np.array([x[i - by] if 0 <= i - by < len(x) else 0 for i in range(len(x))], x.dtype)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 31, 33, 97])
@pytest.mark.parametrize("by", [-40, -3, 0, 1, 17])
def test_zero_is_where_there_is_no_element(n: int, by: int) -> None:
    for dtype in (np.float32, np.float64, np.int32):
        x = (np.random.default_rng(n).standard_normal(n) * 100).astype(dtype)
        np.testing.assert_array_equal(shifted(x, by), wanted(x, by))


def test_minus_zero_keeps_its_sign() -> None:
    found = np.asarray(minus_zero(np.ones(40, np.float32), 3))
    assert np.signbit(found[:3]).all() and not np.signbit(found[3:]).any()


@pytest.mark.parametrize("n", [1, 16, 37, 100])
def test_what_else_the_other_branch_does_is_done(n: int) -> None:
    x, there, outside = np.arange(1, n + 1, dtype=np.float32), np.random.default_rng(n).standard_normal(n).astype(np.float32), np.zeros(n, np.float32)
    np.testing.assert_array_equal(marked(x, there, outside), np.where(there > 0, x, 0))
    np.testing.assert_array_equal(outside, (there <= 0).astype(np.float32))
