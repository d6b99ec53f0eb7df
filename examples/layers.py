"""The kernels of a transformer as a user writes them: normalised rows, rotary positions, losses and attention, in Python and in ZynML.

`LAYERS` lists each with inputs of any size and a reference in NumPy, exact when it is called with float64 arrays. `tilewright demo` runs them
on every device; `examples/transformer.py` makes a whole block of such kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tilewright as tw

Floats = NDArray[np.floating]


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(columns):
            most = max(most, x[i, j])
        total = 0.0
        for j in range(columns):
            total += tw.exp(x[i, j] - most)
        for j in range(columns):
            out[i, j] = tw.exp(x[i, j] - most) / total
    return out


@tw.kernel
def layer_norm(x: tw.Array, gain: tw.Array, shift: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(columns):
            total += x[i, j]
        mean = total / columns
        spread = 0.0
        for j in range(columns):
            d = x[i, j] - mean
            spread += d * d
        inverse = 1 / tw.sqrt(spread / columns + 1e-5)
        for j in range(columns):
            out[i, j] = (x[i, j] - mean) * inverse * gain[j] + shift[j]
    return out


@tw.kernel
def residual_norm_gate(x: tw.Array, residual: tw.Array, gain: tw.Array, gate: tw.Array) -> tw.Array:
    """Three steps as written: residual, RMS norm, gate. One kernel after fusion."""
    rows, columns = x.shape
    summed = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        summed[i, j] = x[i, j] + residual[i, j]
    normed = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        squares = 0.0
        for j in range(columns):
            squares += summed[i, j] * summed[i, j]
        for j in range(columns):
            normed[i, j] = summed[i, j] / tw.sqrt(squares / columns + 1e-5) * gain[j]
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = normed[i, j] * tw.sigmoid(gate[i, j])
    return out


@tw.kernel
def swiglu(x: tw.Array, gate: tw.Array, up: tw.Array) -> tw.Array:
    """silu(x @ gate) * (x @ up): three steps as written. One kernel: both products are computed side by side and never written."""
    rows, features = x.shape
    columns = gate.shape[1]
    opened = tw.empty((rows, columns), tw.f32)
    for i, j in tw.grid(rows, columns):
        total = 0.0
        for k in range(features):
            total += x[i, k] * gate[k, j]
        opened[i, j] = total
    wide = tw.empty((rows, columns), tw.f32)
    for i, j in tw.grid(rows, columns):
        total = 0.0
        for k in range(features):
            total += x[i, k] * up[k, j]
        wide[i, j] = total
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = tw.silu(opened[i, j]) * wide[i, j]
    return out


@tw.kernel
def rope(x: tw.Array, cosines: tw.Array, sines: tw.Array) -> tw.Array:
    """Rotary positions: neighbouring features are turned by the angle of their position."""
    batch, heads, length, depth = x.shape
    out = tw.empty((batch, heads, length, depth), x.dtype)
    for b, h, t, d in tw.grid(batch, heads, length, depth // 2):
        first = x[b, h, t, 2 * d]
        second = x[b, h, t, 2 * d + 1]
        out[b, h, t, 2 * d] = first * cosines[t, d] - second * sines[t, d]
        out[b, h, t, 2 * d + 1] = first * sines[t, d] + second * cosines[t, d]
    return out


@tw.kernel
def cross_entropy(scores: tw.Array, label: tw.Array) -> tw.Array:
    rows, columns = scores.shape
    out = tw.empty(rows, scores.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(columns):
            most = max(most, scores[i, j])
        total = 0.0
        for j in range(columns):
            total += tw.exp(scores[i, j] - most)
        out[i] = tw.log(total) + most - scores[i, label[i]]
    return out


@tw.kernel
def causal_attention(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    """Each position sees itself and those before it."""
    batch, heads, length, depth = q.shape
    out = tw.empty((batch, heads, length, depth), q.dtype)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(i + 1):
            score = 0.0
            for d in range(depth):
                score += q[b, h, i, d] * k[b, h, j, d]
            most = max(most, score * scale)
        total = 0.0
        for j in range(i + 1):
            score = 0.0
            for d in range(depth):
                score += q[b, h, i, d] * k[b, h, j, d]
            total += tw.exp(score * scale - most)
        for e in range(depth):
            mixed = 0.0
            for j in range(i + 1):
                score = 0.0
                for d in range(depth):
                    score += q[b, h, i, d] * k[b, h, j, d]
                mixed += tw.exp(score * scale - most) * v[b, h, j, e]
            out[b, h, i, e] = mixed / total
    return out


# -- inputs and references ------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One kernel, with inputs and a reference; the fields are those of the gallery's examples."""

    name: str
    program: tw.Kernel[..., Any] | Path
    make: Callable[[np.random.Generator, int], dict[str, Any]]
    reference: Callable[..., Any]
    result: str = ""
    operations: Callable[..., float] | None = None
    tolerance: float = 1e-5


def _normal(random: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Floats:
    return random.standard_normal(shape, np.float32).astype(dtype)


def _rows(n: int) -> tuple[int, int]:
    columns = 1024 if n >= 1 << 16 else 37
    return max(1, n // columns), columns


def _matrix(random: np.random.Generator, n: int) -> dict[str, Any]:
    return {"x": _normal(random, *_rows(n))}


def _normed(random: np.random.Generator, n: int) -> dict[str, Any]:
    rows, columns = _rows(n)
    return {"x": _normal(random, rows, columns), "gain": _normal(random, columns), "shift": _normal(random, columns)}


def _gated(random: np.random.Generator, n: int) -> dict[str, Any]:
    rows, columns = _rows(n)
    x, residual, gate = (_normal(random, rows, columns) for _ in range(3))
    return {"x": x, "residual": residual, "gain": _normal(random, columns), "gate": gate}


def _opened(random: np.random.Generator, n: int) -> dict[str, Any]:
    rows, features, columns = (2048, 1024, 2816) if n > 1 << 24 else (256, 128, 384) if n >= 1 << 16 else (19, 24, 40)
    gate, up = (_normal(random, features, columns) / np.float32(features**0.5) for _ in range(2))
    return {"x": _normal(random, rows, features), "gate": gate, "up": up}


def _turned(random: np.random.Generator, n: int) -> dict[str, Any]:
    heads, depth = (8, 64) if n >= 1 << 16 else (2, 8)
    length = max(1, n // (2 * heads * depth))
    angles = random.uniform(-3, 3, (length, depth // 2))
    turns = {"cosines": np.cos(angles).astype(np.float32), "sines": np.sin(angles).astype(np.float32)}
    return {"x": _normal(random, 2, heads, length, depth), **turns}


def _labelled(random: np.random.Generator, n: int) -> dict[str, Any]:
    rows, columns = _rows(n)
    return {"scores": _normal(random, rows, columns), "label": random.integers(0, columns, rows)}


def _lengths(n: int) -> tuple[int, int, int, int]:
    return (4, 16, 2048, 128) if n > 1 << 24 else (2, 4, 256, 64) if n >= 1 << 16 else (1, 2, 33, 16)


def _heads(random: np.random.Generator, n: int) -> dict[str, Any]:
    shape = _lengths(n)
    q, k, v = (_normal(random, *shape, dtype=np.float16) for _ in range(3))
    return {"q": q, "k": k, "v": v, "scale": shape[-1] ** -0.5}


def _capitals(random: np.random.Generator, n: int) -> dict[str, Any]:
    made = _heads(random, n)
    return {name.upper(): made[name] for name in "qkv"}


def _softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _layer_norm(x: Floats, gain: Floats, shift: Floats) -> Floats:
    d = x - x.mean(1, keepdims=True)
    return np.asarray(d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5) * gain + shift)


def _residual_norm_gate(x: Floats, residual: Floats, gain: Floats, gate: Floats) -> Floats:
    t = x + residual
    return np.asarray(t / np.sqrt((t * t).mean(1, keepdims=True) + 1e-5) * gain / (1 + np.exp(-gate)))


def _swiglu(x: Floats, gate: Floats, up: Floats) -> Floats:
    opened = x @ gate
    return np.asarray(opened / (1 + np.exp(-opened)) * (x @ up))


def _products(x: Floats, gate: Floats, up: Floats) -> float:
    return float(4.0 * x.shape[0] * gate.size)


def _rope(x: Floats, cosines: Floats, sines: Floats) -> Floats:
    first, second = x[..., ::2], x[..., 1::2]
    return np.stack([first * cosines - second * sines, first * sines + second * cosines], -1).reshape(x.shape)


def _cross_entropy(scores: Floats, label: NDArray[np.integer]) -> Floats:
    most = scores.max(1)
    return np.asarray(np.log(np.exp(scores - most[:, None]).sum(1)) + most - scores[np.arange(len(scores)), label.astype(np.int64)])


def _wide(x: Floats) -> Floats:
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _causal(q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
    scores = _wide(q) @ _wide(k).swapaxes(2, 3) * scale
    allowed = np.tri(scores.shape[-1], dtype=bool)
    return _softmax(np.where(allowed, scores, -np.inf)) @ _wide(v)


def _attention(q: Floats, k: Floats, v: Floats) -> Floats:
    return _softmax(_wide(q) @ _wide(k).swapaxes(2, 3) * q.shape[-1] ** -0.5) @ _wide(v)


def _scores(q: Floats, *others: object) -> float:
    """Multiplications and additions of attention that sees everything."""
    return float(4.0 * q.size * q.shape[2])


def _half_scores(q: Floats, *others: object) -> float:
    return _scores(q) / 2


_ZYN = Path(__file__).parent / "zyn"
_HALF = 2e-3
"""f16 is rounded to 11 bits, weights and results."""

LAYERS: tuple[Layer, ...] = (
    Layer("softmax", softmax, _matrix, _softmax),
    Layer("layer_norm", layer_norm, _normed, _layer_norm),
    Layer("residual_norm_gate", residual_norm_gate, _gated, _residual_norm_gate),
    Layer("swiglu", swiglu, _opened, _swiglu, "", _products),
    Layer("rope", rope, _turned, _rope),
    Layer("cross_entropy", cross_entropy, _labelled, _cross_entropy),
    Layer("causal_attention f16", causal_attention, _heads, _causal, "", _half_scores, _HALF),
    Layer("softmax.zyn", _ZYN / "softmax.zyn", _matrix, _softmax, "weights"),
    Layer("layer_norm.zyn", _ZYN / "layer_norm.zyn", _normed, _layer_norm, "normed"),
    Layer("rope.zyn", _ZYN / "rope.zyn", _turned, _rope, "turned"),
    Layer("flash_attention.zyn", _ZYN / "flash_attention.zyn", _capitals, _attention, "mixed", _scores, _HALF),
)
