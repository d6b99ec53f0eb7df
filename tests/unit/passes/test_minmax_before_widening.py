"""Maxima of narrow rows before they are widened, and quotients of few bits: fewer instructions, the same results."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from kernels_rows import CASES
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.types import Vec, dtype_of

softmax = CASES["softmax"].kernel
NARROW = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@tw.kernel
def extremes(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    n, c = x.shape
    low = tw.empty((n,), tw.f32)
    high = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        least, most = tw.inf, -tw.inf
        for j in range(c):
            most = max(most, tw.f32(x[i, j]))
        for j in range(c):
            least = min(least, tw.f32(x[i, j]))
        low[i] = least
        high[i] = most
    return low, high


@tw.kernel
def over(x: tw.Array, by: tw.Array) -> tw.Array:
    """Rows over the sum of what they are to be divided by."""
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        most = -tw.inf
        for j in range(c):
            most = max(most, x[i, j])
        s = by[i] + 0 * most
        for j in range(c):
            out[i, j] = x[i, j] / s
    return out


def thread_kernel(kernel: tw.Kernel[..., object], *arrays: np.ndarray, target: str) -> Kernel:
    (call,) = kernel.stages(*arrays, target=target).stages.thread.calls
    return call.kernel


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("c", [4096, 4099, 50257])
def test_pairs_are_compared_at_once(dtype: str, c: int) -> None:
    x = np.zeros((3, c), NARROW[dtype])
    ptx = softmax.compile(x, target="sm_90a").code.decode()
    (schedule,) = softmax.stages(x, target="sm_90a").stages.schedules
    held = schedule.reduce_tile // (schedule.threads * schedule.cluster)
    assert len(re.findall(rf"max\.NaN\.{dtype}x2", ptx)) >= held // 2 - 4
    assert len(re.findall(r"max\.NaN\.f32", ptx)) <= 12  # between threads


def test_older_gpus_and_wide_rows_have_none() -> None:
    for dtype, target in ((ml_dtypes.bfloat16, "sm_75"), (np.float32, "sm_90a")):
        found = walk(thread_kernel(softmax, np.zeros((3, 2048), dtype), target=target).body)
        assert all(op.opcode not in ("max", "min") or not dtype_of(op.operands[0].type).is_small_float for op in found)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("c", [7, 1001, 9001])
def test_extremes_with_special_numbers(dtype: str, c: int) -> None:
    rng = np.random.default_rng(c)
    x = rng.standard_normal((6, c)).astype(NARROW[dtype])
    x[1] = -np.inf
    x[2, c // 2], x[3, -1], x[4, 0] = np.nan, np.inf, -np.inf
    low, high = (np.asarray(v) for v in extremes(x, device="emulator:thread"))
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(low, wide.min(-1))
    np.testing.assert_array_equal(high, wide.max(-1))


@pytest.mark.parametrize("dtype", NARROW)
def test_one_test_of_the_divisor_for_all_vectors(dtype: str) -> None:
    kernel = thread_kernel(softmax, np.zeros((3, 4096), NARROW[dtype]), target="sm_90a")
    choices = [op for op in kernel.body.ops if op.opcode == "if" and any(o.opcode == "div" for o in op.regions[1].ops)]
    (choice,) = choices
    assert len(choice.results) > 1
    assert all(isinstance(r.type, Vec) for r in choice.results)
    assert [o.opcode for o in choice.regions[0].ops if o.opcode != "yield"] == ["mul"] * len(choice.results)


@pytest.mark.parametrize("dtype", NARROW)
def test_quotients_by_any_divisor(dtype: str) -> None:
    """Tiny and huge ones too: a reciprocal alone would overflow where quotients do not."""
    kind = NARROW[dtype]
    divisors = np.array([1.0, -3.0, 1e-42, -2.0**-149, 3e38, np.inf, np.nan, 0.0, 2.0**-126, 2.0**-130, 2.0**127], np.float32)
    row = np.array([0.0, 1.0, -2.5, 1e-7, 6e4, np.inf, np.nan, -0.0] + [0.125] * 900, np.float64).astype(kind)
    x = np.tile(row, (len(divisors), 1))
    x[:, 6] = 1  # the rows' maxima must not be NaN
    found = np.asarray(over(x, divisors, device="emulator:thread"))
    with np.errstate(all="ignore"):
        most = x.astype(np.float32).max(-1)
        want = (x.astype(np.float32) / (divisors + 0 * most)[:, None]).astype(kind)
    np.testing.assert_allclose(found.astype(np.float64), want.astype(np.float64), rtol=2.0**-7 if dtype == "bf16" else 2.0**-10)
