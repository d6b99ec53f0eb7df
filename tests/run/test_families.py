"""One kernel of every family on the CPU and in the emulator, at sizes with a whole tile, an edge and more than one block.

It is what a fast run executes; the other files of this folder go through the families one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(11)
ROWS = RNG.standard_normal((19, 67)).astype(np.float32)
OTHER = RNG.standard_normal((67, 35)).astype(np.float32)


@tw.kernel
def gelu(x: tw.Array) -> tw.Array:
    return 0.5 * x * (1.0 + tw.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = tw.max(x[i, :])
        total = tw.sum(tw.exp(x[i, :] - most))
        for j in tw.grid(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@tw.kernel
def total(x: tw.Array) -> tw.Array:
    return tw.sum(x)


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


def exact_softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


FAMILIES: dict[str, tuple[tw.Kernel[..., Any], tuple[np.ndarray, ...], Callable[..., np.ndarray]]] = {
    "elementwise": (gelu, (ROWS,), lambda x: 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))),
    "rows": (softmax, (ROWS,), exact_softmax),
    "reduction": (total, (ROWS.ravel(),), np.sum),
    "contraction": (product, (ROWS, OTHER), np.matmul),
}


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels(name: str, device: str) -> None:
    kernel, arguments, reference = FAMILIES[name]
    want = reference(*(a.astype(np.float64) for a in arguments))
    np.testing.assert_allclose(np.asarray(kernel(*arguments, device=device)), want, rtol=2e-5, atol=2e-5)


@tw.gpu
def reversed_blocks(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32], n: tw.i64):
    tile = tw.shared(32, tw.f32)
    t, i = tw.thread.x, tw.gpu_thread_id()
    if i < n:
        tile[t] = x[i]
    tw.gpu_sync()
    if i < n:
        y[i] = tile[31 - t]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_explicit_kernels(device: str) -> None:
    x, y = RNG.standard_normal(96).astype(np.float32), np.zeros(96, np.float32)
    reversed_blocks[3, 32](x, y, 96, device=device)
    np.testing.assert_array_equal(y, x.reshape(3, 32)[:, ::-1].ravel())


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_pipelines(device: str) -> None:
    text = "let y = compute(x) {\n    for i in 0..rows, j in 0..cols: out[i, j] = x[i, j] * 2\n}\nlet z = y + 1\n"
    found = tw.load(text).run(x=ROWS, device=device)
    np.testing.assert_allclose(np.asarray(found["z"]), ROWS * 2 + 1, rtol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_primitives(device: str) -> None:
    x = RNG.integers(0, 100, 301).astype(np.int32)
    np.testing.assert_array_equal(np.asarray(tw.gpu_sort(x, device=device)), np.sort(x))
