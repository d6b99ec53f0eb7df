"""Plain loops that are scans run in parts, with the results of the plain loop, on the CPU and at every stage of the emulator."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA

DEVICES = ("cpu", "emulator:loop", "emulator:tile", "emulator:thread")


@tw.kernel
def running_sum(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    s = x[0] * 0
    for i in range(n):
        s += x[i]
        out[i] = tw.cast(s, x.dtype)
    return out


@tw.kernel
def sum_before(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    s = x[0] * 0
    for i in range(n):
        out[i] = tw.cast(s, x.dtype)
        s = s + x[i]
    return out


@tw.kernel
def running_max(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    s = x[0]
    for i in range(n):
        s = max(s, x[i])
        out[i] = s
    return out


@tw.kernel
def rows_min(x: tw.Array, y: tw.Array) -> tw.Array:
    m, n = x.shape
    out = tw.empty((m, n), x.dtype)
    for r in tw.grid(m):
        s = x[r, 0] + y[r, 0]
        for i in range(n):
            s = min(x[r, i] + y[r, i], s)
            out[r, i] = s - y[r, i]
    return out


@tw.kernel
def columns_sum(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for j in tw.grid(m):
        s = x[0, j] * 0
        for i in range(1, n):
            s += x[i, j] * x[i, j]
            out[i, j] = s
        out[0, j] = x[0, j]
    return out


@tw.kernel
def columns_max(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for j in tw.grid(m):
        s = x[0, j]
        for i in range(n):
            s = max(s, x[i, j])
            out[i, j] = s
    return out


@tw.kernel
def running_mean(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), tw.f64)
    s = 0.0
    for i in range(n):
        s += x[i] * 0.5
        out[i] = s / (i + 1)
    return out


@tw.kernel
def running_product(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    s = x[0] * 0 + 1
    for i in range(n):
        s = s * x[i]
        out[i] = tw.cast(s, x.dtype)
    return out


def is_cut(kernel: Any, *arguments: Any, target: str) -> bool:
    program = kernel.stages(*arguments, target=target).stages.loop
    return any(call.kernel.name.endswith(".totals") for call in program.calls)


def numbers(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.random.default_rng(0).integers(0 if np.dtype(dtype).kind == "u" else -5, 6, shape).astype(dtype)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("n", [1, 31, 1031, 2048])
def test_one_line(device: str, n: int) -> None:
    n = n * 40 + 1 if device == "cpu" else n
    x = numbers(n)
    assert np.array_equal(running_sum(x, device=device), np.cumsum(x, dtype=np.int32))
    assert np.array_equal(sum_before(x, device=device), np.cumsum(x, dtype=np.int32) - x)
    assert np.array_equal(running_max(x, device=device), np.maximum.accumulate(x))
    assert np.array_equal(running_product(x | 1, device=device), np.cumprod(x | 1, dtype=np.int32))
    wanted = np.cumsum(x * 0.5) / np.arange(1, n + 1)
    np.testing.assert_allclose(running_mean(x.astype(np.float64), device=device), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_rows(device: str) -> None:
    x, y = numbers(3, 20_011 if device == "cpu" else 1100), numbers(3, 20_011 if device == "cpu" else 1100)[::-1].copy()
    assert np.array_equal(rows_min(x, y, device=device), np.minimum.accumulate(x + y, 1) - y)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("columns", [1, 7, 40])
def test_columns(device: str, columns: int) -> None:
    for rows in (1, 5001) if device == "cpu" else (1, 300):
        x = numbers(rows, columns)
        assert np.array_equal(columns_max(x, device=device), np.maximum.accumulate(x, 0))


@pytest.mark.parametrize("device", ["cpu", "emulator:thread", CUDA])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64], ids=str)
def test_dtypes(device: str, dtype: Any) -> None:
    n = 40_000 if device == "cpu" else 1500
    x = numbers(n, dtype=dtype) if np.dtype(dtype).kind != "f" else (numbers(n) % 2).astype(dtype)
    assert np.array_equal(running_sum(x, device=device), np.cumsum(x.astype(np.int64)).astype(dtype))
    assert np.array_equal(running_max(x, device=device), np.maximum.accumulate(x))


def test_nan_is_carried_on() -> None:
    x = np.random.default_rng(0).random(50_000).astype(np.float32)
    x[[20_000, 40_000]] = np.nan, np.inf
    np.testing.assert_array_equal(running_max(x), np.maximum.accumulate(x))
    assert np.isnan(running_sum(x)[20_000:]).all() and not np.isnan(running_sum(x)[:20_000]).any()


def test_sums_of_floats_are_close_and_the_same_every_time() -> None:
    x = np.random.default_rng(0).random(300_000).astype(np.float32)
    found = running_sum(x)
    np.testing.assert_allclose(found, np.cumsum(x, dtype=np.float64), rtol=1e-4)
    assert np.array_equal(found, running_sum(x))


def test_which_loops_are_cut() -> None:
    x = np.zeros(100_000, np.float32)
    for target in ("cpu", "x86-64-avx512", "sm_90a"):
        for kernel in (running_sum, sum_before, running_max, running_product):
            assert is_cut(kernel, x, target=target)
        assert is_cut(running_max, x.astype(np.float16), target=target)
        assert is_cut(columns_max, x.reshape(10_000, 10), target=target)
        assert not is_cut(columns_sum, x.reshape(1000, 100), target=target), "it writes beside the loop"
        for kernel in (decayed, crossing, in_place, wanted_later, same_place):
            assert not is_cut(kernel, x, target=target), kernel


@tw.kernel
def decayed(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    s = 0.0
    for i in range(n):
        s = 0.5 * s + x[i]
        out[i] = s
    return out


@tw.kernel
def crossing(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n + 1,), x.dtype)
    s = 0.0
    for i in range(n):
        s += x[i]
        out[i] = s
        out[i + 1] = s * 2
    return out


@tw.kernel
def in_place(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    s = 0.0
    for i in range(n):
        out[i] = x[i]
        s += out[i] * 2
        out[i] = s
    return out


@tw.kernel
def wanted_later(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n + 1,), x.dtype)
    s = 0.0
    for i in range(n):
        s += x[i]
        out[i] = s
    out[n] = s
    return out


@tw.kernel
def same_place(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    s = 0.0
    for i in range(n):
        s += x[i]
        out[i // 2] = s
    return out


def test_loops_that_are_not_cut_compute_the_same() -> None:
    x = np.random.default_rng(0).random(20_000).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        total = np.cumsum(x, dtype=np.float64)
        np.testing.assert_allclose(wanted_later(x), np.append(total, total[-1]), rtol=1e-4)
        np.testing.assert_allclose(same_place(x)[:10_000], total[1::2], rtol=1e-4)
        np.testing.assert_allclose(in_place(x), total * 2, rtol=1e-4)


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_notes_where_a_scan_is_not_cut(target: str) -> None:
    x = np.zeros(100_000, np.float32)
    assert not running_sum.stages(x, target=target).notes
    assert [note.code for note in decayed.stages(x, target=target).notes] == ["TW060"]


@tw.kernel
def masked_running_sum(x: tw.Array, keep: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            if keep[i, j] > 0:
                s += x[i, j]
            out[i, j] = s
    return out


def test_a_sum_under_a_condition_is_cut() -> None:
    """Of many rows each has a block; what is left out may be anything."""
    rng = np.random.default_rng(0)
    x, keep = rng.standard_normal((140, 1100)).astype(np.float32), rng.standard_normal((140, 1100)).astype(np.float32)
    x[:, 600], keep[:, 600] = np.nan, -1
    (call,) = masked_running_sum.stages(x, keep, target="sm_90a").stages.thread.calls
    assert "scan=True" in str(call.kernel.attrs["schedule"])
    want = np.cumsum(np.where(keep > 0, x.astype(np.float64), 0), axis=1)
    np.testing.assert_allclose(masked_running_sum(x, keep, device="emulator:thread"), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(masked_running_sum(x, keep, device="cpu"), want, rtol=1e-4, atol=1e-4)
