"""Serial loops of a CPU: checksums whose remainders need no division, branches that only choose a value, sums into the elements of a row."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def adler(data: tw.Array) -> int:
    (n,) = data.shape
    a = tw.u32(1)
    b = tw.u32(0)
    for i in range(n):
        a = (a + data[i]) % 65521
        b = (b + a) % 65521
    return b * 65536 + a


@tw.kernel
def signed_steps(data: tw.Array) -> tw.Array:
    (n,) = data.shape
    out = tw.empty((n,), tw.i64)
    for _ in tw.grid(1):
        at = 3
        for i in range(n):
            at = (at + data[i]) % 7
            out[i] = at
    return out


@tw.kernel
def masked_running_sum(x: tw.Array, keep: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(columns):
            if keep[i, j] > 0.5:
                total += x[i, j]
            out[i, j] = total
    return out


@tw.kernel
def steps_from_before(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for _ in tw.grid(1):
        last = 0.0
        for i in range(n):
            if i > 0:
                last = x[i] - x[i - 1] + last * 0.5
            out[i] = last
    return out


def test_adler() -> None:
    rng = np.random.default_rng(1)
    for n in (1, 2, 31, 5553, 70001):
        for data in (rng.integers(0, 256, n).astype(np.uint8), np.full(n, 255, np.uint8)):
            assert int(adler(data)) == zlib.adler32(data.tobytes())


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_remainders_of_what_may_be_negative(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    data = np.random.default_rng(2).integers(max(limits.min, -1000), min(limits.max, 1000), 60).astype(dtype)
    at, wanted = 3, []
    for step in data.tolist():
        at = (at + step) % 7
        wanted.append(at)
    np.testing.assert_array_equal(signed_steps(data), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_masked_running_sums(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    for rows, columns in ((1, 1), (3, 33), (2, 9001)):
        x, keep = rng.integers(-9, 9, (rows, columns)).astype(dtype), rng.random((rows, columns)).astype(np.float32)
        x[:, ::7] = np.nan
        keep[:, ::7] = 0.0
        wanted = np.cumsum(np.where(keep > 0.5, x, 0), 1)
        np.testing.assert_array_equal(masked_running_sum(x, keep), wanted)
        np.testing.assert_array_equal(masked_running_sum(x[:, ::-1], keep[:, ::-1]), np.cumsum(np.where(keep > 0.5, x, 0)[:, ::-1], 1))


def test_a_load_that_may_lie_outside_stays_in_its_branch() -> None:
    x = np.random.default_rng(4).standard_normal(37).astype(np.float32)
    wanted, last = [], np.float32(0)
    for i in range(len(x)):
        if i > 0:
            last = np.float32(x[i] - x[i - 1] + last * np.float32(0.5))
        wanted.append(last)
    np.testing.assert_allclose(steps_from_before(x), wanted, rtol=1e-5, atol=1e-5)


@tw.kernel
def forward_substitution(a: tw.Array, b: tw.Array) -> tw.Array:
    n, columns = b.shape
    x = b * 1.0
    for i in range(n):
        for k in range(i):
            for j in range(columns):
                x[i, j] -= a[i, k] * x[k, j]
        for j in range(columns):
            x[i, j] = x[i, j] / a[i, i]
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_substitution_with_odd_numbers_of_columns(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    for n, columns in ((1, 1), (5, 3), (9, 17), (12, 33), (7, 0)):
        a = (rng.standard_normal((n, n)) + 2 * n * np.eye(n)).astype(dtype)
        b = rng.standard_normal((n, columns)).astype(dtype)
        wanted = np.linalg.solve(np.tril(a.astype(np.float64)), b.astype(np.float64))
        np.testing.assert_allclose(forward_substitution(a, b), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(forward_substitution(a, b[:, ::-1]), wanted[:, ::-1], rtol=1e-4, atol=1e-5)
