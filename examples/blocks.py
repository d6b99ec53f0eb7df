"""Kernels made of kernels, and more of a transformer's kernels: what calls another has its body in it, and loops that pass an array on are fused.

`tilewright inspect examples/blocks.py --fusion` shows what became one launch. `BLOCKS` lists each kernel with inputs of any size and a reference
in NumPy, exact when it is called with float64 arrays; `tilewright demo` runs them on every device.
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
def silu(x: float) -> float:
    """A function of one number, to be called in loops."""
    return x * tw.sigmoid(x)


@tw.kernel
def product(x: tw.Array, weight: tw.Array) -> tw.Array:
    rows, depth = x.shape
    columns = weight.shape[1]
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        total = 0.0
        for k in range(depth):
            total += x[i, k] * weight[k, j]
        out[i, j] = total
    return out


@tw.kernel
def gelu(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        out[i, j] = tw.gelu(x[i, j])
    return out


@tw.kernel
def gelu_mlp(x: tw.Array, up: tw.Array, down: tw.Array) -> tw.Array:
    """Three kernels as written, two after fusion: the activation is the end of the first product."""
    return product(gelu(product(x, up)), down)


@tw.kernel
def gated_mlp(x: tw.Array, gate: tw.Array, up: tw.Array, down: tw.Array) -> tw.Array:
    """SwiGLU: the gate opens what the other product gives."""
    opened = product(x, gate)
    wide = product(x, up)
    rows, columns = wide.shape
    hidden = tw.empty((rows, columns), x.dtype)
    for i, j in tw.grid(rows, columns):
        hidden[i, j] = silu(opened[i, j]) * wide[i, j]
    return product(hidden, down)


@tw.kernel
def rms_norm(x: tw.Array, gain: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        squares = 0.0
        for j in range(columns):
            squares += x[i, j] * x[i, j]
        for j in range(columns):
            out[i, j] = x[i, j] / tw.sqrt(squares / columns + 1e-5) * gain[j]
    return out


@tw.kernel
def residual_mlp(x: tw.Array, gain: tw.Array, up: tw.Array, down: tw.Array) -> tw.Array:
    """x + mlp(norm(x)): the residual is the end of the last product."""
    return x + gelu_mlp(rms_norm(x, gain), up, down)


@tw.kernel
def grouped_attention(q: tw.Array, k: tw.Array, v: tw.Array, bias: tw.Array, scale: float) -> tuple[tw.Array, tw.Array]:
    """Several query heads share a head of keys and values; scores get a bias. The logarithm of the sums comes along."""
    batch, heads, length, depth = q.shape
    group = heads // k.shape[1]
    keys = k.shape[2]
    out = tw.empty((batch, heads, length, depth), q.dtype)
    sums = tw.empty((batch, heads, length), tw.f32)
    for b, h, i in tw.grid(batch, heads, length):
        most = -tw.inf
        for j in range(keys):
            most = max(most, tw.dot(q[b, h, i], k[b, h // group, j]) * scale + bias[i, j])
        total = 0.0
        for j in range(keys):
            total += tw.exp(tw.dot(q[b, h, i], k[b, h // group, j]) * scale + bias[i, j] - most)
        for d in range(depth):
            mixed = 0.0
            for j in range(keys):
                mixed += tw.exp(tw.dot(q[b, h, i], k[b, h // group, j]) * scale + bias[i, j] - most) * v[b, h // group, j, d]
            out[b, h, i, d] = mixed / total
        sums[b, h, i] = most + tw.log(total)
    return out, sums


# -- inputs and references ------------------------------------------------------------------------------------------


class Block(NamedTuple):
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


def _weight(random: np.random.Generator, rows: int, columns: int, dtype: Any = np.float32) -> Floats:
    return (_normal(random, rows, columns) / np.float32(rows**0.5)).astype(dtype)


def _sizes(n: int) -> tuple[int, int, int]:
    """Rows, features, and features between the products."""
    return (2048, 1024, 4096) if n > 1 << 24 else (256, 128, 512) if n >= 1 << 16 else (5, 12, 20)


def _layers(random: np.random.Generator, n: int) -> dict[str, Any]:
    rows, features, inner = _sizes(n)
    return {"x": _normal(random, rows, features), "up": _weight(random, features, inner), "down": _weight(random, inner, features)}


def _gated_layers(random: np.random.Generator, n: int) -> dict[str, Any]:
    made = _layers(random, n)
    return {"x": made["x"], "gate": _weight(random, *made["up"].shape), "up": made["up"], "down": made["down"]}


def _normed_layers(random: np.random.Generator, n: int) -> dict[str, Any]:
    made = _layers(random, n)
    return {"x": made["x"], "gain": _normal(random, made["x"].shape[1]), "up": made["up"], "down": made["down"]}


def _rows(random: np.random.Generator, n: int) -> dict[str, Any]:
    columns = 1024 if n >= 1 << 16 else 37
    return {"x": _normal(random, max(1, n // columns), columns), "gain": _normal(random, columns)}


def _labelled(random: np.random.Generator, n: int) -> dict[str, Any]:
    columns = 1024 if n >= 1 << 16 else 37
    rows = max(1, n // columns)
    return {"scores": _normal(random, rows, columns), "label": random.integers(0, columns, rows)}


def _grouped(random: np.random.Generator, n: int) -> dict[str, Any]:
    batch, heads, length, depth = (4, 16, 1024, 64) if n > 1 << 24 else (1, 4, 128, 32) if n >= 1 << 16 else (1, 4, 9, 8)
    q, k, v = (_normal(random, batch, h, length, depth, dtype=np.float16) for h in (heads, heads // 2, heads // 2))
    return {"q": q, "k": k, "v": v, "bias": _normal(random, length, length, dtype=np.float16), "scale": depth**-0.5}


def _masked(random: np.random.Generator, n: int) -> dict[str, Any]:
    batch, heads, length, depth = (4, 16, 1024, 64) if n > 1 << 24 else (1, 4, 128, 32) if n >= 1 << 16 else (1, 2, 9, 8)
    mask = random.random((length, length)) < 0.7
    mask[:, 0] = True
    made = {name: _normal(random, batch, heads, length, depth, dtype=np.float16) for name in "QKV"}
    return {**made, "mask": mask}


def _transformer(random: np.random.Generator, n: int) -> dict[str, Any]:
    batch, length, heads, depth, inner = (8, 512, 12, 64, 3072) if n > 1 << 24 else (2, 64, 4, 32, 512) if n >= 1 << 16 else (1, 7, 2, 8, 24)
    features = heads * depth
    half = np.float16

    def vector(*shape: int) -> Floats:
        return _normal(random, *shape, dtype=half)

    return {
        "x": vector(batch, length, features),
        "qkv": _weight(random, features, 3 * features, half).reshape(features, 3, heads, depth), "qkv_bias": vector(3, heads, depth),
        "joined": _weight(random, features, features, half).reshape(heads, depth, features), "joined_bias": vector(features),
        "gain1": vector(features), "shift1": vector(features), "up": _weight(random, features, inner, half), "up_bias": vector(inner),
        "down": _weight(random, inner, features, half), "down_bias": vector(features), "gain2": vector(features), "shift2": vector(features),
    }  # fmt: skip


def _gelu(x: Floats) -> Floats:
    return np.asarray(0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))))


def _gelu_mlp(x: Floats, up: Floats, down: Floats) -> Floats:
    return _gelu(x @ up) @ down


def _gated_mlp(x: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    opened = x @ gate
    return np.asarray((opened / (1 + np.exp(-opened)) * (x @ up)) @ down)


def _rms_norm(x: Floats, gain: Floats) -> Floats:
    return np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * gain)


def _residual_mlp(x: Floats, gain: Floats, up: Floats, down: Floats) -> Floats:
    return x + _gelu_mlp(_rms_norm(x, gain), up, down)


def _cross_entropy(scores: Floats, label: NDArray[np.integer]) -> Floats:
    most = scores.max(1)
    return np.asarray(np.log(np.exp(scores - most[:, None]).sum(1)) + most - scores[np.arange(len(scores)), label.astype(np.int64)])


def _wide(x: Floats) -> Floats:
    """At least f32: NumPy has no fast product of halves."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _grouped_attention(q: Floats, k: Floats, v: Floats, bias: Floats, scale: float) -> tuple[Floats, Floats]:
    q, k, v = _wide(q), *(np.repeat(_wide(x), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * scale + bias
    most = scores.max(-1)
    return _softmax(scores) @ v, most + np.log(np.exp(scores - most[..., None]).sum(-1))


def _masked_attention(q: Floats, k: Floats, v: Floats, mask: NDArray[np.bool_]) -> Floats:
    scores = _wide(q) @ _wide(k).swapaxes(2, 3) * q.shape[-1] ** -0.5
    return _softmax(np.where(mask, scores, -np.inf)) @ _wide(v)


def _layer_norm(x: Floats, gain: Floats, shift: Floats) -> Floats:
    d = x - x.mean(-1, keepdims=True)
    return np.asarray(d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * gain + shift)


def _transformer_block(x: Floats, qkv: Floats, qkv_bias: Floats, joined: Floats, joined_bias: Floats, *rest: Floats) -> Floats:
    x, qkv, joined = _wide(x), _wide(qkv), _wide(joined)
    gain1, shift1, up, up_bias, down, down_bias, gain2, shift2 = (_wide(r) for r in rest)
    q, k, v = np.einsum("bsk,kphd->pbhsd", x, qkv, optimize=True) + qkv_bias[:, None, :, None]
    mixed = _softmax(q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5) @ v
    seen = _layer_norm(x + np.einsum("bhsd,hdj->bsj", mixed, joined, optimize=True) + joined_bias, gain1, shift1)
    return _layer_norm(seen + _gelu(seen @ up + up_bias) @ down + down_bias, gain2, shift2)


def _products(x: Floats, *weights: Floats) -> float:
    return float(2.0 * x.shape[0] * sum(w.size for w in weights if w.ndim == 2))


def _attention_operations(q: Floats, *others: object) -> float:
    return float(4.0 * q.size * q.shape[2])


_ZYN = Path(__file__).parent / "zyn"
_HALF = 2e-3
"""f16 is rounded to 11 bits, and so is what passes from kernel to kernel."""

LONGER = Block("residual_mlp", residual_mlp, _normed_layers, _residual_mlp, "", _products)
"""All of the above in one; not part of the demo, which takes long enough."""

BLOCKS: tuple[Block, ...] = (
    Block("gelu_mlp", gelu_mlp, _layers, _gelu_mlp, "", _products),
    Block("gated_mlp", gated_mlp, _gated_layers, _gated_mlp, "", _products),
    Block("rms_norm", rms_norm, _rows, _rms_norm),
    Block("grouped_attention f16", grouped_attention, _grouped, _grouped_attention, "", _attention_operations, _HALF),
    Block("rms_norm.zyn", _ZYN / "rms_norm.zyn", _rows, _rms_norm, "normed"),
    Block("cross_entropy.zyn", _ZYN / "cross_entropy.zyn", _labelled, _cross_entropy, "losses"),
    Block("masked_attention.zyn", _ZYN / "masked_attention.zyn", _masked, _masked_attention, "mixed", _attention_operations, _HALF),
    Block("transformer.zyn", _ZYN / "transformer.zyn", _transformer, _transformer_block, "y", None, 2 * _HALF),
)
