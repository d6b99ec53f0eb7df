"""Forward passes of all architectures in NumPy alone, float32 or float64: what the models of the package are compared with.

Weights are arrays by the names of GGUF files. Nothing of the package is used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Weights = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Shape:
    """Of a decoder or an encoder. `windows` is the window of each layer (0: all positions), `thetas` the base of its angles."""

    layers: int
    heads: int
    groups: int
    depth: int
    epsilon: float = 1e-6
    thetas: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    pairs: bool = False
    """Whether neighbours are turned against each other, instead of halves."""
    factors: np.ndarray | None = None
    """What the angles of positions are divided by."""
    embedding_scale: float = 1.0
    gelu: bool = False
    has: frozenset[str] = field(default_factory=frozenset)
    """Names of weights that only some models have."""


def rms(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(epsilon)) * gain


def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + x.dtype.type(epsilon)) * gain + bias


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turned(x: np.ndarray, theta: float, pairs: bool, factors: np.ndarray | None) -> np.ndarray:
    """x: [token, head, feature]."""
    depth = x.shape[-1]
    turns = theta ** (-np.arange(0, depth, 2, dtype=np.float64) / depth)
    turns = turns if factors is None else turns / factors
    angles = np.arange(len(x), dtype=np.float64)[:, None] * turns
    cos, sin = np.cos(angles)[:, None].astype(x.dtype), np.sin(angles)[:, None].astype(x.dtype)
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., : depth // 2], x[..., depth // 2 :])
    first, second = a * cos - b * sin, a * sin + b * cos
    return np.stack([first, second], -1).reshape(x.shape) if pairs else np.concatenate([first, second], -1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float) -> np.ndarray:
    times = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for h in range(q.shape[1]):
        scores = np.where(seen, (q[:, h] @ k[:, h // times].T) * q.dtype.type(scale), -np.inf)
        out[:, h] = softmax(scores) @ v[:, h // times]
    return out.reshape(len(q), -1)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)))


def gelu(x: np.ndarray) -> np.ndarray:
    erf = np.vectorize(math.erf)
    return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(x.dtype)


def decoder(weight: Weights, s: Shape, ids: Any, rows: Callable[[np.ndarray], np.ndarray] | None = None, dtype: Any = np.float32) -> np.ndarray:
    """Logits after each token: [token, word]. `rows` gives rows of the embedding, where unpacking all of it is too much."""

    def w(name: str) -> np.ndarray:
        return weight(name).astype(dtype)

    def product(x: np.ndarray, name: str) -> np.ndarray:
        found = x @ w(f"{name}.weight").T
        return found + w(f"{name}.bias") if f"{name}.bias" in s.has else found

    ids = np.asarray(ids)
    x = (rows(ids) if rows is not None else weight("token_embd.weight")[ids]).astype(dtype) * dtype(s.embedding_scale)
    n = len(ids)
    past = np.arange(n)[:, None] - np.arange(n)[None]
    for layer in range(s.layers):
        at = f"blk.{layer}"
        h = rms(x, w(f"{at}.attn_norm.weight"), s.epsilon)
        q = product(h, f"{at}.attn_q").reshape(n, s.heads, s.depth)
        k = product(h, f"{at}.attn_k").reshape(n, s.groups, s.depth)
        v = product(h, f"{at}.attn_v").reshape(n, s.groups, s.depth)
        if f"{at}.attn_q_norm.weight" in s.has:
            q, k = rms(q, w(f"{at}.attn_q_norm.weight"), s.epsilon), rms(k, w(f"{at}.attn_k_norm.weight"), s.epsilon)
        q, k = (turned(y, s.thetas[layer], s.pairs, s.factors if s.windows[layer] == 0 or s.pairs else None) for y in (q, k))
        window = s.windows[layer] or n
        mixed = product(attention(q, k, v, (past >= 0) & (past < window), s.depth**-0.5), f"{at}.attn_output")
        x = x + (rms(mixed, w(f"{at}.post_attention_norm.weight"), s.epsilon) if f"{at}.post_attention_norm.weight" in s.has else mixed)
        h = rms(x, w(f"{at}.ffn_norm.weight"), s.epsilon)
        gate = product(h, f"{at}.ffn_gate")
        gate = gelu_tanh(gate) if s.gelu else gate / (1 + np.exp(-gate))
        down = product(gate * product(h, f"{at}.ffn_up"), f"{at}.ffn_down")
        x = x + (rms(down, w(f"{at}.post_ffw_norm.weight"), s.epsilon) if f"{at}.post_ffw_norm.weight" in s.has else down)
    x = rms(x, w("output_norm.weight"), s.epsilon)
    return x @ w("output.weight" if "output.weight" in s.has else "token_embd.weight").T


def bert(weights: Mapping[str, np.ndarray], s: Shape, ids: Any, dtype: Any = np.float32) -> np.ndarray:
    """The last hidden rows of one sentence: [token, feature]."""
    w = {name: array.astype(dtype) for name, array in weights.items()}
    ids = np.asarray(ids)
    n = len(ids)

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["token_embd.weight"][ids] + w["position_embd.weight"][:n] + w["token_types.weight"][0]
    x = layer_norm(x, w["token_embd_norm.weight"], w["token_embd_norm.bias"], s.epsilon)
    seen = np.ones((n, n), bool)
    for layer in range(s.layers):
        at = f"blk.{layer}"
        q, k, v = (product(x, f"{at}.attn_{p}").reshape(n, s.heads, s.depth) for p in "qkv")
        x = layer_norm(x + product(attention(q, k, v, seen, s.depth**-0.5), f"{at}.attn_output"), w[f"{at}.attn_output_norm.weight"], w[f"{at}.attn_output_norm.bias"], s.epsilon)
        h = product(gelu(product(x, f"{at}.ffn_up")), f"{at}.ffn_down")
        x = layer_norm(x + h, w[f"{at}.layer_output_norm.weight"], w[f"{at}.layer_output_norm.bias"], s.epsilon)
    return x
