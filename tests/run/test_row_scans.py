"""Plain loops that are scans along rows: on a GPU the threads of a block, or of a warp, walk a row together. Results are those of the plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA

DEVICES = ("cpu", "emulator:tile", "emulator:thread", CUDA)


@tw.kernel
def either_term(x: tw.Array, keep: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            if keep[i, j] > 0:
                s += x[i, j] * x[i, j]
            else:
                s += 1.0
            out[i, j] = s
    return out


@tw.kernel
def sum_and_largest(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    best = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = x[i, 0] * 0
        m = x[i, 0]
        for j in range(c):
            m = max(m, x[i, j])
            out[i, j] = tw.cast(s, x.dtype)
            s += x[i, j]
            best[i, j] = m
    return out, best


@tw.kernel
def sum_of_largest(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    last = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        s = x[i, 0] * 0
        m = x[i, 0]
        for j in range(c):
            m = max(m, x[i, j])
            s += m
            out[i, j] = tw.cast(s, x.dtype)
        last[i] = tw.cast(s, x.dtype)
    return out, last


@tw.kernel
def backwards(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = x[i, 0] * 0
        for j in range(c):
            s += x[i, c - 1 - j]
            out[i, c - 1 - j] = tw.cast(s, x.dtype)
    return out


@tw.kernel
def in_place(x: tw.InOut) -> None:
    n, c = x.shape
    for i in tw.grid(n):
        s = x[i, 0] * 0
        for j in range(c):
            s += x[i, j]
            x[i, j] = tw.cast(s, x.dtype)


@tw.kernel
def least_under(x: tw.Array, keep: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = x[i, 0]
        for j in range(c):
            if keep[i, j] > 0:
                s = min(s, x[i, j])
            out[i, j] = s
    return out


@tw.kernel
def of_factors(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = x[i, 0] * 0 + 1
        for j in range(1, c):
            s = s * x[i, j]
            out[i, j] = s
        out[i, 0] = 1
    return out


def numbers(*shape: int, dtype: Any = np.int32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-5, 6, shape).astype(dtype)


def calls(kernel: Any, *arguments: Any) -> list[str]:
    return [str(call.kernel.attrs.get("schedule", "")) for call in kernel.stages(*arguments, target="sm_90a").stages.thread.calls]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 64), (2, 67), (6, 512), (5, 901), (3, 1031), (2, 2300)], ids=str)
def test_rows_of_any_length(device: str, shape: tuple[int, int]) -> None:
    x = numbers(*shape)
    out, best = sum_and_largest(x, device=device)
    assert np.array_equal(out, np.cumsum(x, 1) - x)
    assert np.array_equal(best, np.maximum.accumulate(x, 1))
    out, last = sum_of_largest(x, device=device)
    want = np.cumsum(np.maximum.accumulate(x, 1), 1)
    assert np.array_equal(out, want) and np.array_equal(last, want[:, -1])
    assert np.array_equal(backwards(x, device=device), np.cumsum(x[:, ::-1], 1)[:, ::-1])


@pytest.mark.parametrize("device", DEVICES)
def test_conditions(device: str) -> None:
    rng = np.random.default_rng(1)
    x, keep = (rng.standard_normal((3, 700)).astype(np.float32) for _ in range(2))
    x[1, 300], keep[1, 300] = np.nan, -1
    x[2, 400], keep[2, 400] = np.nan, 1
    want = np.cumsum(np.where(keep > 0, x.astype(np.float64) ** 2, 1.0), 1)
    np.testing.assert_allclose(either_term(x, keep, device=device), want, rtol=1e-4, atol=1e-4)
    least = np.minimum.accumulate(np.where(keep > 0, x, np.inf).astype(np.float32), 1)
    np.testing.assert_array_equal(least_under(x, keep, device=device), np.minimum(least, x[:, :1]))


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_and_views(device: str) -> None:
    x = numbers(4, 300)
    want = np.cumsum(x, 1)
    if device != CUDA:
        y = x.copy()
        in_place(y, device=device)
        assert np.array_equal(y, want)
    wide = numbers(4, 900)
    assert np.array_equal(sum_and_largest(wide[:, ::3], device=device)[1], np.maximum.accumulate(wide[:, ::3], 1))
    assert np.array_equal(sum_and_largest(wide[:, 1:], device=device)[0], np.cumsum(wide[:, 1:], 1) - wide[:, 1:])


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float16, np.float64], ids=str)
def test_dtypes(dtype: Any) -> None:
    x = numbers(2, 600, dtype=dtype)
    assert np.array_equal(sum_and_largest(x, device="emulator:thread")[1], np.maximum.accumulate(x, 1))
    y = (numbers(2, 600) % 2 * 2 + 1).astype(np.float64)
    assert np.array_equal(of_factors(y.astype(np.int64), device="emulator:thread"), np.cumprod(np.concatenate([np.ones((2, 1), np.int64), y[:, 1:].astype(np.int64)], 1), 1))


@pytest.mark.parametrize("device", ["emulator:thread", CUDA])
def test_few_long_rows_are_cut(device: str) -> None:
    """Parts of a row have a block each, and what is before a part is itself a scan."""
    x = numbers(1, 40_003)
    assert np.array_equal(sum_before_rows(x, device=device), np.cumsum(x, 1) - x)


@tw.kernel
def sum_before_rows(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = x[i, 0] * 0
        for j in range(c):
            out[i, j] = tw.cast(s, x.dtype)
            s += x[i, j]
    return out


def test_blocks_walk_rows() -> None:
    """Many rows: one kernel, which reads and writes in whole vectors. Few long ones: three, of which two walk rows."""
    many, few, odd = (np.zeros(shape, np.float32) for shape in ((4096, 4096), (2, 1 << 20), (4096, 4095)))
    for kernel in (sum_and_largest, sum_of_largest, backwards):
        (schedule,) = calls(kernel, many)
        assert "scan=True" in schedule and ("vector=4" in schedule or kernel is backwards), schedule
    (schedule,) = calls(either_term, many, many)
    assert "vector=4" in schedule and "scan=True" in schedule
    (schedule,) = calls(sum_before_rows, odd)
    assert "vector" not in schedule.replace("vector_on_reduction", "") and "scan=True" in schedule
    totals, before, walks = calls(sum_before_rows, few)
    assert "scan=True" not in totals and "scan=True" in before and "scan=True" in walks and "vector=4" in walks
    (schedule,) = calls(sum_before_rows, np.zeros((100_000, 8), np.float32))
    assert "scan=True" not in schedule, "short rows have a thread each"
