"""Norms and sums that are cut into stretches, on the emulator against float64: odd lengths, offsets, infinities and NaN, arrays in place."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.compile import driver
from tilewright.passes.rows import cut_rows


@pytest.fixture(autouse=True)
def _cut_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_rows, "LEAST", 1)
    monkeypatch.setattr(driver, "compiler_version", lambda: "cut_everything")


@tw.kernel
def batch_norm(x: tw.Array, w: tw.Array, mean: tw.InOut) -> tw.Array:
    n, c, m = x.shape
    out = tw.empty((n, c, m), x.dtype)
    for j in tw.grid(c):
        s = tw.f32(0)
        for i, k in tw.grid(n, m):
            s += x[i, j, k]
        mu = s / (n * m)
        v = tw.f32(0)
        for i, k in tw.grid(n, m):
            v += (x[i, j, k] - mu) * (x[i, j, k] - mu)
        mean[j] = mean[j] * 0.9 + mu * 0.1
        r = 1 / tw.sqrt(v / (n * m) + 1e-5)
        for i, k in tw.grid(n, m):
            out[i, j, k] = (x[i, j, k] - mu) * r * w[j]
    return out


@tw.kernel
def batch_norm_of_last(x: tw.Array) -> tw.Array:
    """Channels last: memory lies along the results."""
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for j in tw.grid(c):
        s = tw.f32(0)
        for i in range(n):
            s += x[i, j]
        mu = s / n
        v = tw.f32(0)
        for i in range(n):
            v += (x[i, j] - mu) * (x[i, j] - mu)
        r = 1 / tw.sqrt(v / n + 1e-5)
        for i in range(n):
            out[i, j] = (x[i, j] - mu) * r
    return out


@tw.kernel
def log_softmax(x: tw.Array) -> tw.Array:
    """Over two axes that do not lie beside one another."""
    n, c, m = x.shape
    out = tw.empty((n, c, m), x.dtype)
    for j in tw.grid(c):
        top = tw.max(x[:, j, :])
        s = tw.f32(0)
        for i, k in tw.grid(n, m):
            s += tw.exp(x[i, j, k] - top)
        for i, k in tw.grid(n, m):
            out[i, j, k] = x[i, j, k] - top - tw.log(s)
    return out


@tw.kernel
def in_place(x: tw.InOut) -> None:
    n, c, m = x.shape
    for j in tw.grid(c):
        s = tw.f32(0)
        for i, k in tw.grid(n, m):
            s += x[i, j, k]
        q = tw.f32(0)
        for i, k in tw.grid(n, m):
            q += x[i, j, k] * x[i, j, k]
        for i, k in tw.grid(n, m):
            x[i, j, k] = x[i, j, k] * s / q


@tw.kernel
def extremes(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array, tw.Array]:
    n, c, m = x.shape
    low = tw.empty((c,), x.dtype)
    high = tw.empty((c,), x.dtype)
    total = tw.empty((c,), tw.f64)
    some = tw.empty((c,), tw.bool_)
    for j in tw.grid(c):
        low[j] = tw.min(x[:, j, :])
        high[j] = tw.max(x[:, j, :])
        t = tw.f64(0)
        for i, k in tw.grid(n, m):
            t += tw.f64(x[i, j, k])
        total[j] = t
        some[j] = tw.any(x[:, j, :] > 2)
    return low, high, total, some


def numbers(*shape: int, offset: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(shape).standard_normal(shape) + offset).astype(np.float32)


def calls(kernel: tw.Kernel, *arguments: object) -> int:  # type: ignore[name-defined]
    return len(kernel.stages(*arguments, target="sm_90a").stages.thread.calls)


@pytest.mark.parametrize("shape", [(3, 2, 37), (5, 3, 64), (2, 1, 1031)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_batch_norm(shape: tuple[int, int, int], offset: float) -> None:
    x, w, mean = numbers(*shape, offset=offset), numbers(shape[1], 1)[:, 0], numbers(shape[1], 2)[:, 0]
    assert calls(batch_norm, x, w, mean) == 3
    wide = x.astype(np.float64)
    mu, var = wide.mean((0, 2)), wide.var((0, 2))
    running = mean * 0.9 + mu * 0.1
    got = batch_norm(x, w, mean, device="emulator")
    want = (wide - mu[:, None]) / np.sqrt(var + 1e-5)[:, None] * w[:, None]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 if offset else 5e-6)
    np.testing.assert_allclose(mean, running, rtol=1e-5)


def test_nothing_but_nan_comes_of_nan() -> None:
    x = numbers(3, 2, 40)
    x[1, 0, 7] = np.nan
    got = batch_norm(x, np.ones(2, np.float32), np.zeros(2, np.float32), device="emulator")
    assert np.isnan(got[:, 0]).all() and np.isfinite(got[:, 1]).all()


@pytest.mark.parametrize("shape", [(70, 3), (200, 33), (129, 130)])
def test_channels_last(shape: tuple[int, int]) -> None:
    x = numbers(*shape, offset=3.0)
    wide = x.astype(np.float64)
    want = (wide - wide.mean(0)) / np.sqrt(wide.var(0) + 1e-5)
    np.testing.assert_allclose(batch_norm_of_last(x, device="emulator"), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("special", ["none", "low", "all low", "high"])
def test_log_softmax(special: str) -> None:
    x = numbers(4, 2, 50)
    if special == "low":
        x[1:3, 0] = -np.inf
    elif special == "all low":
        x[:, 0] = -np.inf
    elif special == "high":
        x[2, 1, 3] = np.inf
    assert calls(log_softmax, x) == 3
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        top = wide.max((0, 2), keepdims=True)
        want = wide - top - np.log(np.exp(wide - top).sum((0, 2), keepdims=True))
    np.testing.assert_allclose(log_softmax(x, device="emulator"), want, rtol=1e-5, atol=1e-5)


def test_a_row_may_be_replaced() -> None:
    x = numbers(3, 2, 35, offset=1.0)
    wide = x.astype(np.float64)
    want = wide * wide.sum((0, 2), keepdims=True) / (wide**2).sum((0, 2), keepdims=True)
    assert calls(in_place, x) == 3
    in_place(x, device="emulator")
    np.testing.assert_allclose(x, want, rtol=1e-5)


def test_several_reductions_at_once() -> None:
    x = numbers(6, 3, 41)
    low, high, total, some = extremes(x, device="emulator")
    np.testing.assert_array_equal(low, x.min((0, 2)))
    np.testing.assert_array_equal(high, x.max((0, 2)))
    np.testing.assert_allclose(total, x.astype(np.float64).sum((0, 2)), rtol=1e-12)
    np.testing.assert_array_equal(some, (x > 2).any((0, 2)))


@tw.kernel
def weighted(x: tw.Array, v: tw.Array) -> float:
    n, m = x.shape
    s = 0.0
    for i, j in tw.grid(n, m):
        s += x[i, j] * v[j]
    return s


@tw.kernel
def largest_place(x: tw.Array) -> tw.Array:
    n, _ = x.shape
    out = tw.empty((n,), tw.i64)
    for i in tw.grid(n):
        out[i] = tw.argmax(x[i])
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("longest", [64, 8192])
def test_stretches_of_one_sum(dtype: type, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, so that every element counts once or the sum is another."""
    monkeypatch.setattr(cut_rows, "LONGEST", longest)
    rng = np.random.default_rng(3)
    for n, m in ((1, 1), (3, 31), (5, 33), (2, 63), (3, 64), (3, 65), (4, 97), (2, 129), (2, 1001), (3, 1000), (0, 5), (4, 0)):
        x, v = rng.integers(-2, 3, (n, m)).astype(dtype), rng.integers(-2, 3, m).astype(dtype)
        assert weighted(x, v, device="emulator") == float((x.astype(np.float64) * v).sum()), (n, m)


def test_terms_that_are_no_numbers_stay_in_their_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_rows, "LONGEST", 64)
    x, v = np.ones((3, 131), np.float32), np.ones(131, np.float32)
    x[1, 130] = np.inf
    assert weighted(x, v, device="emulator") == np.inf
    x[2, 66] = np.nan
    assert np.isnan(weighted(x, v, device="emulator"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_places_in_rows_that_begin_anywhere(dtype: type) -> None:
    """The first of equal ones, whichever lane has it."""
    rng = np.random.default_rng(4)
    for n, m in ((3, 31), (5, 33), (4, 257), (3, 1001), (2, 2303)):
        x = rng.integers(-3, 4, (n, m)).astype(dtype)
        np.testing.assert_array_equal(largest_place(x, device="emulator"), x.argmax(1))
