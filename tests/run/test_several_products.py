"""Nests written with several products: of the same rows, which one kernel computes side by side, and of different rows, which are cut; on the CPU
and at every stage of the emulator, against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from support import as_wide
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import MatrixSchedule


@tw.kernel
def gated(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    """Both sums in one loop."""
    n, k = x.shape
    m = gate.shape[1]
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        opened = 0.0
        wide = 0.0
        for p in range(k):
            opened += x[i, p] * gate[p, j]
            wide += x[i, p] * up[p, j]
        out[i, j] = tw.silu(opened) * wide
    return out


@tw.kernel
def cell(x: tw.Array, h: tw.Array, w: tw.Array, u: tw.Array, bias: tw.Array) -> tw.Array:
    """tanh(x @ w + h @ u + bias), one sum after the other."""
    n, k = x.shape
    length = h.shape[1]
    m = w.shape[1]
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = bias[j]
        for p in range(k):
            total += x[i, p] * w[p, j]
        for p in range(length):
            total += h[i, p] * u[p, j]
        out[i, j] = tw.tanh(total)
    return out


@tw.kernel
def complex_product(ar: tw.Array, ai: tw.Array, br: tw.Array, bi: tw.Array) -> tuple[tw.Array, tw.Array]:
    """Four products, two of each factor."""
    n, k = ar.shape
    m = br.shape[1]
    real = tw.empty((n, m), ar.dtype)
    imaginary = tw.empty((n, m), ar.dtype)
    for i, j in tw.grid(n, m):
        a = 0.0
        b = 0.0
        c = 0.0
        d = 0.0
        for p in range(k):
            a += ar[i, p] * br[p, j]
            b += ai[i, p] * bi[p, j]
            c += ar[i, p] * bi[p, j]
            d += ai[i, p] * br[p, j]
        real[i, j] = a - b
        imaginary[i, j] = c + d
    return real, imaginary


def made(dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    kind: Any = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}[dtype]
    return [(random.standard_normal(shape) / 4).astype(np.float32).astype(kind) for shape in shapes]


CASES: dict[str, tuple[tw.Kernel[..., Any], Any, Any, int]] = {
    "gated": (
        gated, lambda n, k, m: ((n, k), (k, m), (k, m)), lambda x, g, u: (x @ g / (1 + np.exp(-(x @ g))) * (x @ u),), 1,
    ),
    "cell": (
        cell, lambda n, k, m: ((n, k), (n, k + 8), (k, m), (k + 8, m), (m,)), lambda x, h, w, u, b: (np.tanh(x @ w + h @ u + b),), 2,
    ),
    "complex": (
        complex_product, lambda n, k, m: ((n, k), (n, k), (k, m), (k, m)),
        lambda ar, ai, br, bi: (ar @ br - ai @ bi, ar @ bi + ai @ br), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", "bf16"), ("sm_80", "bf16"), ("sm_80", "f32"), ("x86-64-avx512", "f32")])
@pytest.mark.parametrize("name", CASES)
def test_stages(name: str, target: str, dtype: str) -> None:
    kernel, shapes, reference, kernels = CASES[name]
    # The emulator takes one element at a time where a CPU's block is one thread.
    arguments = made(dtype, *(shapes(136, 72, 200) if target.startswith("sm") else shapes(30, 9, 40)))
    done = kernel.stages(*arguments, target=target)
    assert len(done.stages.thread.calls) == done.fusion.after == kernels
    assert all(isinstance(schedule, MatrixSchedule) for schedule in done.stages.schedules)
    wanted = reference(*(as_wide(a) for a in arguments))
    for stage in ("loop", "tile", "thread"):
        found = run_program(getattr(done.stages, stage), kernel.bound(*arguments))
        for result, want in zip(found.values(), wanted, strict=True):
            bound = (2.0**-8 if dtype == "bf16" else 2.0**-18) * (np.abs(want) + 0.25)
            assert (np.abs(as_wide(result) - want) <= bound).all(), stage


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 0, 5), (0, 4, 4), (65, 130, 33)], ids=str)
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("name", CASES)
def test_sizes(name: str, device: str, sizes: tuple[int, int, int]) -> None:
    kernel, shapes, reference, _ = CASES[name]
    arguments = made("f32", *shapes(*sizes))
    found = kernel(*arguments, device=device)
    for result, want in zip(found if isinstance(found, tuple) else (found,), reference(*(as_wide(a) for a in arguments)), strict=True):
        np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-5)


def test_small_nests_stay_whole() -> None:
    """Sizes that are left to plain loops are no reason for more than one kernel."""
    for target in ("sm_90a", "sm_80"):
        done = cell.stages(*made("bf16", (16, 8), (16, 16), (8, 16), (16, 16), (16,)), target=target)
        assert len(done.stages.thread.calls) == 1
        assert done.fusion.after == 1
        assert not done.stages.thread.scratch
