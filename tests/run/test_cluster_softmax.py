"""Rows that a cluster shares, with one meeting for maximum and sum: special numbers, far maxima, other uses of both, and where
it applies."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.passes.to_thread.cluster_softmax import find_meeting

NARROW = {"bf16": (ml_dtypes.bfloat16, 2.0**-8), "f16": (np.float16, 2.0**-11)}


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        total = tw.f32(0)
        for j in range(c):
            total += tw.exp(x[i, j] - most)
        for j in range(c):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@tw.kernel
def with_sums(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    """Softmax, and the maximum and the sum themselves."""
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    sums = tw.empty((n, 2), x.dtype)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        total = tw.f32(0)
        for j in range(c):
            total += tw.exp(x[i, j] - most)
        sums[i, 0] = most
        sums[i, 1] = total
        for j in range(c):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out, sums


@tw.kernel
def twice(x: tw.Array) -> tw.Array:
    """The exponentials are used beside the quotient: in whose units they are matters."""
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        total = tw.f32(0)
        for j in range(c):
            total += tw.exp(x[i, j] - most)
        for j in range(c):
            e = tw.exp(x[i, j] - most)
            out[i, j] = e / total + e
    return out


@tw.kernel
def below_twice(x: tw.Array) -> tw.Array:
    """Something else is below the maximum too."""
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        total = tw.f32(0)
        for j in range(c):
            total += tw.exp(x[i, j] - most)
        for j in range(c):
            out[i, j] = tw.exp(x[i, j] - most) / total * (x[i, j] - most)
    return out


def exact(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        most = wide.max(-1, keepdims=True)
        powers = np.exp(wide - most)
        return powers, most, powers.sum(-1, keepdims=True)


def check(found: np.ndarray, want: np.ndarray, unit: float) -> None:
    """Close, or too small to tell from 0."""
    got = found.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    with np.errstate(all="ignore"):
        fine = np.isnan(want) | (got == want) | (np.abs(got - want) <= 1.1 * unit * np.abs(want) + 6e-8)
    assert fine.all(), [(got[tuple(p)], want[tuple(p)]) for p in np.argwhere(~fine)[:3]]


def rows(c: int, dtype: type) -> np.ndarray:
    rng = np.random.default_rng(c)
    x = (3 * rng.standard_normal((9, c))).astype(dtype)
    x[1, 100], x[2, -1], x[3, :], x[4, 5] = -np.inf, np.nan, -np.inf, np.inf
    x[5, : c - 9000] = -np.inf  # some threads have nothing
    x[6] = (100 * rng.standard_normal(c)).astype(dtype)  # maxima of threads lie far apart
    x[7] = np.finfo(dtype).min if dtype is np.float16 else ml_dtypes.finfo(dtype).min
    x[8], x[8, 77] = -3e4, -2e4
    return x


@pytest.mark.parametrize("c", [40_000, 40_001])
@pytest.mark.parametrize("dtype", NARROW)
def test_softmax_with_special_numbers(dtype: str, c: int) -> None:
    kind, unit = NARROW[dtype]
    x = rows(c, kind)
    powers, _, total = exact(x)
    with np.errstate(all="ignore"):
        check(np.asarray(softmax(x, device="emulator:thread")), powers / total, unit)


@pytest.mark.parametrize("dtype", NARROW)
def test_maximum_and_sum_are_the_rows_own(dtype: str) -> None:
    kind, unit = NARROW[dtype]
    x = rows(36_007, kind)[[0, 2, 4, 5, 6, 8]]
    found, sums = (np.asarray(v) for v in with_sums(x, device="emulator:thread"))
    powers, most, total = exact(x)
    with np.errstate(all="ignore"):
        check(found, powers / total, unit)
    check(sums, np.concatenate([most, total], -1), unit)


@pytest.mark.parametrize(("kernel", "want"), [(twice, lambda e, m, s, x: e / s + e), (below_twice, lambda e, m, s, x: e / s * (x - m))])
def test_other_uses_keep_two_meetings(kernel: tw.Kernel[..., object], want) -> None:
    x = (3 * np.random.default_rng(0).standard_normal((2, 40_000))).astype(ml_dtypes.bfloat16)
    (call,) = kernel.stages(x, target="sm_90a").stages.tile.calls
    assert find_meeting(call.kernel) is None
    powers, most, total = exact(x)
    check(np.asarray(kernel(x, device="emulator:thread")), want(powers, most, total, x.astype(np.float64)), 2.0**-8)


@pytest.mark.parametrize(("dtype", "c", "barriers"), [(ml_dtypes.bfloat16, 50257, 2), (np.float16, 65536, 2), (np.float32, 50257, 3), (ml_dtypes.bfloat16, 16384, 0)])
def test_how_often_a_cluster_meets(dtype: type, c: int, barriers: int) -> None:
    """Once, and before anybody leaves; f32 has bits to lose by another factor."""
    ptx = softmax.compile(np.zeros((2, c), dtype), target="sm_90a").code.decode()
    assert len(re.findall(r"barrier\.cluster\.arrive", ptx)) == barriers
