"""Means and spreads of long rows in one pass: digits with large offsets, special numbers, other centres than the mean, and where
the pass applies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.nodes import Kernel, walk
from tilewright.passes.loop.one_pass_variance import CPU_STRETCH, SHORT, one_pass_variance


@tw.kernel
def normalised(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), tw.f32)
    for i in tw.grid(n):
        total = tw.f32(0)
        for j in range(c):
            total += x[i, j]
        mean = total / c
        spread = tw.f32(0)
        for j in range(c):
            d = x[i, j] - mean
            spread += d * d
        inverse = 1 / tw.sqrt(spread / c + 1e-5)
        for j in range(c):
            out[i, j] = (x[i, j] - mean) * inverse
    return out


@tw.kernel
def about(x: tw.Array, factor: tw.f32) -> tuple[tw.Array, tw.Array]:
    """The sum, and the squares about a multiple of it, which is not the mean; the row plus both."""
    n, c = x.shape
    sums = tw.empty((n, 2), tw.f32)
    out = tw.empty((n, c), tw.f32)
    for i in tw.grid(n):
        total = tw.f32(0)
        for j in range(c):
            total += x[i, j]
        centre = total * factor
        squares = tw.f32(0)
        for j in range(c):
            d = centre - x[i, j]
            squares += d * d
        sums[i, 0] = total
        sums[i, 1] = squares
        for j in range(c):
            out[i, j] = x[i, j] + squares
    return sums, out


@tw.kernel
def of_another(x: tw.Array, y: tw.Array) -> tw.Array:
    """The squares are of another array than the sum."""
    n, c = x.shape
    out = tw.empty((n, c), tw.f32)
    for i in tw.grid(n):
        total = tw.f32(0)
        for j in range(c):
            total += x[i, j]
        mean = total / c
        spread = tw.f32(0)
        for j in range(c):
            d = y[i, j] - mean
            spread += d * d
        for j in range(c):
            out[i, j] = x[i, j] * spread
    return out


def expected(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    mean = wide.mean(-1, keepdims=True)
    return (wide - mean) / np.sqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("c", [SHORT - 1, SHORT + 1, 3 * CPU_STRETCH, 50257, 1 << 20])
def test_an_offset_costs_few_digits(c: int) -> None:
    """Numbers near a million are 1/16 apart: with a spread of 30 the mean can be off by 2e-3 of that when it is stored."""
    rng = np.random.default_rng(c)
    x = (1e6 + 30 * rng.standard_normal((3, c))).astype(np.float32)
    # Shorter rows keep their plain sums, whose last digit at 10^10 is a thousand.
    assert np.max(np.abs(np.asarray(normalised(x)) - expected(x))) < (6e-3 if c > SHORT else 6e-2)


@pytest.mark.parametrize("make", [lambda rng, s: rng.standard_normal(s), lambda rng, s: 1e-3 * rng.random(s) - 7], ids=["normal", "near"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["f32", "bf16", "f16"])
def test_long_rows_against_float64(dtype: type, make) -> None:
    x = make(np.random.default_rng(2), (2, 70_003)).astype(dtype)
    assert np.max(np.abs(np.asarray(normalised(x)) - expected(x))) < (2e-5 if dtype is np.float32 and x.mean() > -1 else 5e-3)


def test_one_far_number_does_not_spoil_the_rest() -> None:
    """Sums shifted by the first number would lose all digits of the others here."""
    x = np.random.default_rng(3).standard_normal((2, 30_000)).astype(np.float32)
    x[0, 0], x[1, 29_999] = 1e6, -1e6
    np.testing.assert_allclose(np.asarray(normalised(x)), expected(x), rtol=2e-5, atol=2e-5)


def test_any_centre() -> None:
    x = (5 + np.random.default_rng(4).standard_normal((3, 20_001))).astype(np.float32)
    for factor in (0.0, 1 / 20_001, 1e-4, -1.0):
        sums, out = about(x, factor)
        wide = x.astype(np.float64)
        total = wide.sum(-1)
        squares = ((wide - np.float64(np.float32(factor)) * total[:, None]) ** 2).sum(-1)
        np.testing.assert_allclose(np.asarray(sums), np.stack([total, squares], -1), rtol=3e-6)
        np.testing.assert_allclose(np.asarray(out), x + squares[:, None], rtol=3e-6)


def test_special_numbers() -> None:
    x = np.ones((4, 20_000), np.float32)
    x[0, 15_000], x[1, 3], x[2, 19_999] = np.nan, np.inf, -np.inf
    sums = np.asarray(about(x, 1.0)[0])
    assert np.isnan(sums[0]).all()
    assert sums[1, 0] == np.inf
    assert sums[2, 0] == -np.inf
    assert np.isnan(sums[1:3, 1]).all()
    np.testing.assert_allclose(sums[3], [20_000, 20_000 * 19_999.0**2], rtol=1e-6)
    assert np.isnan(np.asarray(normalised(x))[:3]).all()
    assert not np.asarray(normalised(x))[3].any()


def test_rows_too_long_for_registers_on_a_gpu() -> None:
    rng = np.random.default_rng(5)
    x = (1e6 + 30 * rng.standard_normal((1, 300_001))).astype(np.float32)
    stretches, _, points = normalised.stages(x, target="sm_90a").stages.schedules
    assert "whole" in stretches.describe() and "whole" not in points.describe()
    assert np.max(np.abs(np.asarray(normalised(x, device="emulator:thread")) - expected(x))) < 6e-3


def loop_kernel(kernel: tw.Kernel[..., object], *arguments: object, target: str) -> Kernel:
    (call,) = kernel.stages(*arguments, target=target).stages.loop.calls
    return call.kernel


def stretched(kernel: Kernel) -> bool:
    return any(op.opcode == "for" and any(inner.opcode == "reduce" for inner in walk(op.regions[0])) for op in walk(kernel.body))


def test_where_it_applies() -> None:
    long, short = np.ones((2, 300_000), np.float32), np.ones((2, 64), np.float32)
    assert stretched(loop_kernel(normalised, long, target="x86-64-avx512"))
    assert len(normalised.stages(long, target="sm_90a").stages.loop.calls) == 3  # cut_rows is before it
    assert not stretched(loop_kernel(normalised, short, target="sm_90a"))  # stays in registers
    assert not stretched(loop_kernel(of_another, long, long, target="x86-64-avx512"))


def test_a_kernel_without_such_sums_is_left_alone() -> None:
    from tilewright.base.target import parse_target

    kernel = loop_kernel(of_another, np.ones((2, 64), np.float32), np.ones((2, 64), np.float32), target="x86-64-avx2")
    assert one_pass_variance(kernel, parse_target("x86-64-avx2")) is kernel
