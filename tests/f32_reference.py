"""Products of f32 for tests of accuracy: a kernel, factors of several kinds, and what a chain of multiply-adds makes of them."""

from __future__ import annotations

import numpy as np

import tilewright as tw


@tw.kernel
def product(x: tw.Array, w: tw.Array) -> tw.Array:
    m, depth = x.shape
    n = w.shape[0]
    out = tw.empty((m, n), x.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(depth):
            total += x[i, p] * w[j, p]
        out[i, j] = total
    return out


def factors(kind: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k)
    x, w = (rng.random((r, k)) if kind == "positive" else rng.standard_normal((r, k)) for r in (m, n))
    if kind == "spread":
        x, w = x * np.exp(3 * rng.standard_normal(x.shape)), w * np.exp(3 * rng.standard_normal(w.shape))
    if kind == "cancelling":
        half = k // 2
        w[:, half : 2 * half] = w[:, :half]
        x[:, half : 2 * half] = -x[:, :half] * (1 + 1e-4 * rng.standard_normal((m, half)))
    scale = {"tiny": 1e-17, "huge": 1e17}.get(kind, 1.0)
    return (x * scale).astype(np.float32), (w * scale).astype(np.float32)


def chain(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Multiply-adds one after another: each rounds once, but for what f64 cannot hold."""
    total = np.zeros((len(x), len(w)), np.float32)
    for p in range(x.shape[1]):
        total = (total + x[:, p, None].astype(np.float64) * w[None, :, p]).astype(np.float32)
    return total
