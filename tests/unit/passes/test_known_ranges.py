"""Functions that leave out cases which cannot be: the same bits as without, on the emulator and on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.nodes import walk

NUMBERS = np.concatenate(
    [
        np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-38, 87.3, -87.3, 88.8, 103.9, 104.1, 1e30, -3e38, 0.5, -0.5], np.float32),
        np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.float32(20),
    ]
)


@tw.kernel
def together(x: tw.Array) -> tw.Array:
    out = tw.empty((x.shape[0],), x.dtype)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.log(1.0 + tw.exp(-abs(x[i])))
    return out


@tw.kernel
def power(x: tw.Array) -> tw.Array:
    out = tw.empty((x.shape[0],), x.dtype)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.exp(x[i])
    return out


@tw.kernel
def logarithm(x: tw.Array) -> tw.Array:
    out = tw.empty((x.shape[0],), x.dtype)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.log(x[i])
    return out


@tw.kernel
def log_of_square(x: tw.Array) -> tw.Array:
    out = tw.empty((x.shape[0],), x.dtype)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.log(x[i] * x[i] + 1.0)
    return out


@tw.kernel
def log_from_half(x: tw.Array) -> tw.Array:
    """The sum may be below 1."""
    out = tw.empty((x.shape[0],), x.dtype)
    for i in tw.grid(x.shape[0]):
        out[i] = tw.log(x[i] + 1.0)
    return out


@pytest.mark.parametrize("device", ["emulator", "cpu"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_same_bits_as_function_by_function(device: str, dtype: type) -> None:
    x: np.ndarray = NUMBERS.astype(dtype)
    raised = power(-np.abs(x), device=device)
    np.testing.assert_array_equal(together(x, device=device), logarithm(np.asarray(raised) + dtype(1), device=device))
    with np.errstate(over="ignore"):
        squares = x * x + dtype(1)
    found, want = np.asarray(log_of_square(x, device=device)), np.log(squares.astype(np.longdouble)).astype(dtype)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
    np.testing.assert_allclose(found, want, rtol=1e-5)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(log_from_half(x, device=device), np.log(x.astype(np.longdouble) + 1).astype(dtype), rtol=2e-5, atol=1e-4)


def test_cases_that_cannot_be_are_left_out() -> None:
    def size(kernel: Any) -> int:
        (call,) = kernel.stages(NUMBERS, target="sm_90a").stages.thread.calls
        return sum(1 for _ in walk(call.kernel.body))

    assert size(together) < size(power) + size(logarithm) - 20
    assert size(log_of_square) < size(log_from_half)
