"""Variances written as a difference of means: which are found, and what they are worth."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.nodes import walk


@tw.kernel
def spread(x):
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        squares = 0.0
        for j in range(columns):
            v = x[i, j] + 1.0
            total += v
            squares += v * v
        mean = total / columns
        out[i] = squares / columns - mean * mean
    return out


@tw.kernel
def known_length(x):
    rows = x.shape[0]
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        squares = 0.0
        for j in range(64):
            total += x[i, j]
            squares += x[i, j] * x[i, j]
        mean = total / 64.0
        out[i] = squares / 64.0 - mean * mean
    return out


@tw.kernel
def unbiased(x):
    """Divided by another number than that of the terms: no variance about this mean."""
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        squares = 0.0
        for j in range(columns):
            total += x[i, j]
            squares += x[i, j] * x[i, j]
        mean = total / (columns - 1)
        out[i] = squares / (columns - 1) - mean * mean
    return out


@tw.kernel
def of_two(x, y):
    """The squares of other numbers than those of the mean."""
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        squares = 0.0
        for j in range(columns):
            total += x[i, j]
            squares += y[i, j] * y[i, j]
        mean = total / columns
        out[i] = squares / columns - mean * mean
    return out


def subtractions_in_sums(kernel: object, *arguments: np.ndarray) -> int:
    done = kernel.stages(*arguments)  # type: ignore[attr-defined]
    (call,) = done.stages.loop.calls
    sums = [op for op in walk(call.kernel.body) if op.opcode == "reduce"]
    return sum(inner.opcode == "sub" for op in sums for inner in op.regions[0].ops)


@pytest.mark.parametrize("kernel", [spread, known_length])
@pytest.mark.parametrize("device", ["cpu", "emulator:thread"])
def test_no_digits_are_lost_where_the_mean_is_large(kernel: object, device: str) -> None:
    """A hundred thousand times the spread: squares in f32 would have no digit of it."""
    x = (np.random.default_rng(0).standard_normal((4, 64)) * 0.01 + 1000).astype(np.float32)
    true = x.astype(np.float64).var(1)
    rounded = (x + 1 if kernel is spread else x).astype(np.float64).var(1)
    found = kernel(x, device=device)  # type: ignore[operator]
    np.testing.assert_allclose(found, rounded, rtol=1e-3)
    np.testing.assert_allclose(found, true, rtol=0.05)


def test_what_is_no_variance_stays() -> None:
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    assert (
        subtractions_in_sums(spread, x) == 1 and subtractions_in_sums(known_length, np.zeros((3, 64), np.float32)) == 1
    )
    assert subtractions_in_sums(unbiased, x) == 0 and subtractions_in_sums(of_two, x, x) == 0
    total = x.astype(np.float64).sum(1) / 15
    np.testing.assert_allclose(unbiased(x, device="cpu"), (x.astype(np.float64) ** 2).sum(1) / 15 - total**2, rtol=1e-4)
