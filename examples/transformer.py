"""A transformer block (as in BERT: attention, then a feed-forward layer, each with residual and layer norm), from plain loops.

    python examples/transformer.py

Each function is one call. Loops that pass an array on are fused: `tilewright inspect examples/transformer.py --fusion` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import tilewright as tw


@tw.kernel
def project(x: tw.Array, weight: tw.Array, bias: tw.Array) -> tw.Array:
    """x @ weight + bias."""
    n, k = x.shape
    m = weight.shape[1]
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * weight[p, j]
        out[i, j] = total + bias[j]
    return out


@tw.kernel
def attend(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    """softmax(q @ k^T * scale) @ v for each batch and head of [batch, head, position, feature]; heads lie side by side in the result."""
    batch, heads, length, depth = q.shape
    keys = k.shape[2]
    out = tw.empty((batch, length, heads, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(keys):
            score = 0.0
            for d in range(depth):
                score += q[b, h, i, d] * k[b, h, j, d]
            most = max(most, score * scale)
        total = 0.0
        for j in range(keys):
            score = 0.0
            for d in range(depth):
                score += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(keys):
                score = 0.0
                for d in range(depth):
                    score += q[b, h, i, d] * k[b, h, j, d]
                mixed += tw.exp(score * scale - most) * v[b, h, j, e]
            out[b, i, h, e] = mixed / total
    return out


@tw.kernel
def project_add_norm(
    x: tw.Array, weight: tw.Array, bias: tw.Array, residual: tw.Array, gain: tw.Array, shift: tw.Array
) -> tw.Array:
    """layer_norm(x @ weight + bias + residual): three steps as written, two kernels after fusion. The sums pass from one to the other in
    x's own dtype, as in most implementations."""
    n, k = x.shape
    m = weight.shape[1]
    product = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * weight[p, j]
        product[i, j] = total
    summed = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        summed[i, j] = product[i, j] + bias[j] + residual[i, j]
    out = tw.empty((n, m), x.dtype)
    for i in tw.grid(n):
        total = 0.0
        for j in range(m):
            total += summed[i, j]
        mean = total / m
        spread = 0.0
        for j in range(m):
            d = summed[i, j] - mean
            spread += d * d
        inverse = 1 / tw.sqrt(spread / m + 1e-5)
        for j in range(m):
            out[i, j] = (summed[i, j] - mean) * inverse * gain[j] + shift[j]
    return out


@tw.kernel
def project_gelu(x: tw.Array, weight: tw.Array, bias: tw.Array) -> tw.Array:
    """gelu(x @ weight + bias), with the usual tanh form: two steps as written, one kernel after fusion."""
    n, k = x.shape
    m = weight.shape[1]
    product = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * weight[p, j]
        product[i, j] = total + bias[j]
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        u = product[i, j]
        out[i, j] = 0.5 * u * (1 + tw.tanh(0.7978845608 * (u + 0.044715 * u * u * u)))
    return out


def block(x: Any, weights: Mapping[str, Any], batch: int, heads: int, device: str | None = None, out: Any = None) -> Any:
    """One block on [batch * positions, features]; `weights` maps names to arrays. Arrays on a GPU stay there: heads are views of what
    the product before them wrote, nothing is copied. `device` says where NumPy's arrays are computed on."""
    rows, features = x.shape
    w, where = weights, {} if device is None else {"device": device}
    qkv: Any = project(x, w["qkv"], w["qkv_bias"], **where)
    parts = qkv.reshape(batch, rows // batch, 3, heads, features // heads).transpose(2, 0, 3, 1, 4)
    mixed: Any = attend(parts[0], parts[1], parts[2], (features // heads) ** -0.5, **where)
    seen = project_add_norm(mixed.reshape(rows, features), w["out"], w["out_bias"], x, w["gain1"], w["shift1"], **where)
    hidden = project_gelu(seen, w["up"], w["up_bias"], **where)
    target = where if out is None else {**where, "out": out}
    return project_add_norm(hidden, w["down"], w["down_bias"], seen, w["gain2"], w["shift2"], **target)


def make_weights(rng: np.random.Generator, features: int, hidden: int) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return np.asarray((rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32))

    def vector(length: int) -> np.ndarray:
        return (0.1 * rng.standard_normal(length)).astype(np.float32)

    return {
        "qkv": matrix(features, 3 * features), "qkv_bias": vector(3 * features), "out": matrix(features, features),
        "out_bias": vector(features), "up": matrix(features, hidden), "up_bias": vector(hidden), "down": matrix(hidden, features),
        "down_bias": vector(features), "gain1": 1 + vector(features), "shift1": vector(features), "gain2": 1 + vector(features),
        "shift2": vector(features),
    }  # fmt: skip


def reference(x: np.ndarray, weights: dict[str, np.ndarray], batch: int, heads: int) -> np.ndarray:
    """The same in NumPy, in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    x = x.astype(np.float64)
    rows, features = x.shape

    def norm(y: np.ndarray, gain: np.ndarray, shift: np.ndarray) -> np.ndarray:
        d = y - y.mean(1, keepdims=True)
        return np.asarray(d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5) * gain + shift)

    q, k, v = (x @ w["qkv"] + w["qkv_bias"]).reshape(batch, rows // batch, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    scores = q @ k.transpose(0, 1, 3, 2) * (features // heads) ** -0.5
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(rows, features)
    seen = norm(mixed @ w["out"] + w["out_bias"] + x, w["gain1"], w["shift1"])
    u = seen @ w["up"] + w["up_bias"]
    hidden = 0.5 * u * (1 + np.tanh(0.7978845608 * (u + 0.044715 * u**3)))
    return norm(hidden @ w["down"] + w["down_bias"] + seen, w["gain2"], w["shift2"])


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    made = make_weights(rng, 128, 512)
    given = rng.standard_normal((2 * 64, 128)).astype(np.float32)
    found = block(given, made, batch=2, heads=4)
    print(f"largest error against float64: {np.abs(found - reference(given, made, 2, 4)).max():.1e}")
