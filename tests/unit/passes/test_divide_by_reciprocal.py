"""Rows divided by one number: the same bits as a division, whatever the numbers; and where the pass applies."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from support import undefined_symbols
from tilewright.ir.nodes import Kernel, walk


@tw.kernel
def divided(x: tw.Array, by: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = by[i, 0] * 1
        for j in range(c):
            out[i, j] = x[i, j] / s
    return out


@tw.kernel
def by_another(x: tw.Array, by: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i, j in tw.grid(n, c):
        out[i, j] = x[i, j] / by[i, j]
    return out


BITS = {np.float32: np.uint32, np.float64: np.uint64}


def thread_kernel(kernel: tw.Kernel[..., object], *arrays: np.ndarray, target: str) -> Kernel:
    (call,) = kernel.stages(*arrays, target=target).stages.thread.calls
    return call.kernel


def of_any_size(rng: np.random.Generator, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    bits = BITS[dtype]
    return rng.integers(0, np.iinfo(bits).max, shape, dtype=bits, endpoint=True).view(dtype)


def ordinary(rng: np.random.Generator, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    return ((rng.random(shape) + 1) * 2.0 ** rng.integers(-23, 23, (shape[0], 1))).astype(dtype)


def at_the_edges(rng: np.random.Generator, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """Mantissas just above one and just below two, where quotients lie close to midpoints."""
    bits = BITS[dtype]
    near = rng.integers(0, 1 << 11, shape).astype(bits)
    low, high = np.array(1.0, dtype).view(bits) + near, np.array(2.0, dtype).view(bits) - 1 - near
    return np.where(rng.random(shape) < 0.5, low, high).view(dtype)


@pytest.mark.parametrize("make", [of_any_size, ordinary, at_the_edges], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
def test_quotients_have_the_bits_of_a_division(make, dtype: type) -> None:
    rng = np.random.default_rng(7)
    x, by = make(rng, dtype, (512, 777)), make(rng, dtype, (512, 1))
    with np.errstate(all="ignore"):
        want = x / by
    got = np.asarray(divided(x, by))
    same = (got.view(BITS[dtype]) == want.view(BITS[dtype])) | (np.isnan(got) & np.isnan(want))
    assert same.all(), [(x[i, j], by[i, 0], got[i, j], want[i, j]) for i, j in np.argwhere(~same)[:3]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
def test_special_dividends_and_divisors(dtype: type) -> None:
    info = np.finfo(dtype)
    some = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.0, info.tiny, info.smallest_subnormal, -info.max, 2.0**-100, 2.0**100, 2.0**24, 2.0**-24]
    by = np.array(some, dtype)[:, None]
    x = np.ones((len(some), 14 * 64), dtype)
    for k, value in enumerate(some):
        x[:, 64 * k + k] = value  # one among ordinary ones, so that every vector has both
    with np.errstate(all="ignore"):
        want = x / by
    np.testing.assert_array_equal(np.asarray(divided(x, by)), want)
    np.testing.assert_array_equal(np.signbit(np.asarray(divided(x, by))), np.signbit(want))


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2", "aarch64-neon"])
def test_the_emulator_and_every_target_have_it(target: str) -> None:
    rng = np.random.default_rng(1)
    x, by = rng.standard_normal((3, 150)).astype(np.float32), rng.random((3, 1)).astype(np.float32)
    opcodes = [op.opcode for op in walk(thread_kernel(divided, x, by, target=target).body)]
    assert "every" in opcodes
    assert divided.compile(x, by, target=target).code
    np.testing.assert_array_equal(np.asarray(divided(x, by, device="emulator:thread")), x / by)


@pytest.mark.parametrize("target", ["x86-64-scalar", "aarch64-scalar", "x86-64", "x86-64-sse4.1"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_not_where_corrections_would_be_calls(target: str, dtype: type) -> None:
    x = np.ones((4, 300), dtype)
    assert all(op.opcode not in ("every", "fma") for op in walk(thread_kernel(divided, x, x[:, :1].copy(), target=target).body))
    assert not undefined_symbols(divided.compile(x, x[:, :1].copy(), target=target).code) & {"fma", "fmaf"}


def test_only_what_a_loop_divides_alike() -> None:
    x = np.ones((4, 300), np.float32)
    for target in ("x86-64-avx512", "sm_90a"):
        assert all(op.opcode != "every" for op in walk(thread_kernel(by_another, x, x, target=target).body))
    assert all(op.opcode != "every" for op in walk(thread_kernel(divided, x, x[:, :1].copy(), target="sm_90a").body))
