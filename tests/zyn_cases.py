"""Every program of examples/zyn as a test case: inputs of a small and an odd size, and what float64 says its results are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from random_reference import uniforms

EXAMPLES = Path(__file__).parents[1] / "examples" / "zyn"
Named = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A program: the file, its inputs for a size (0, 1, …), its results in float64, and how close they must be."""

    name: str
    inputs: Callable[[int], Named]
    wanted: Callable[..., Named]
    tolerance: float = 2e-5
    replayed: bool = True
    """Whether a call made again is replayed: those that print, wait or look at devices are not."""

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        return EXAMPLES / f"{self.name}.zyn"

    def references(self, inputs: Named) -> Named:
        return self.wanted(**{name: widened(value) for name, value in inputs.items()})


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def widened(value: Any) -> Any:
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


def close(found: Any, wanted: Any, tolerance: float, what: str = "") -> None:
    host = found.numpy() if hasattr(found, "numpy") else found
    wide = np.asarray(wanted, np.float64)
    bound = tolerance * max(1.0, float(np.abs(wide).max(initial=0)))
    np.testing.assert_allclose(np.asarray(host, np.float64), wide, rtol=tolerance, atol=bound, err_msg=what)


# -- references -------------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray, axis: int | None = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def norm(x: np.ndarray, gain: np.ndarray, shift: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * gain + shift


def turned(x: np.ndarray, c: np.ndarray, s: np.ndarray) -> np.ndarray:
    return np.stack([x[..., ::2] * c - x[..., 1::2] * s, x[..., ::2] * s + x[..., 1::2] * c], -1).reshape(x.shape)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(scores if mask is None else np.where(mask, scores, -np.inf)) @ v


def convolved(image: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    framed = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
    views = np.lib.stride_tricks.sliding_window_view(framed, weights.shape[2:], (2, 3))[:, :, ::2, ::2]
    return np.einsum("bihwyx,oiyx->bohw", views, weights) + bias[:, None, None]


def filtered(image: np.ndarray, windows: np.ndarray) -> np.ndarray:
    views = np.lib.stride_tricks.sliding_window_view(image, windows.shape[1:], (2, 3))
    return np.einsum("bchwyx,cyx->bchw", views, windows)


def block(x: np.ndarray, w: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """The block of transformer_block.zyn."""
    x, w = widened(x), {name: widened(array) for name, array in w.items()}
    batch, seq, _ = x.shape
    q, k, v = (p.reshape(batch, seq, heads, -1).swapaxes(1, 2) for p in np.split(x @ w["qkv_proj"], 3, -1))
    mixed = attention(q, k, v).swapaxes(1, 2).reshape(x.shape)
    seen = norm(x + mixed @ w["out_proj"], w["ln1_weight"], w["ln1_bias"], 1e-6)
    return norm(seen + gelu(seen @ w["ffn_up"]) @ w["ffn_down"], w["ln2_weight"], w["ln2_bias"], 1e-6)


def block_weights(hidden: int, inner: int, seed: int = 0) -> dict[str, np.ndarray]:
    shapes = {
        "qkv_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden), "ln1_weight": (hidden,), "ln1_bias": (hidden,),
        "ffn_up": (hidden, inner), "ffn_down": (inner, hidden), "ln2_weight": (hidden,), "ln2_bias": (hidden,),
    }  # fmt: skip
    return {n: numbers(*s, seed=seed + p) / np.float32(s[0] ** 0.5 if len(s) > 1 else 1) for p, (n, s) in enumerate(shapes.items())}


def _bert(**w: np.ndarray) -> Named:
    """The block of transformer.zyn."""
    x = w["x"]
    qkv = np.einsum("bsk,kphd->bsphd", x, w["qkv"]) + w["qkv_bias"]
    q, k, v = (qkv[:, :, part].swapaxes(1, 2) for part in range(3))
    joined = np.einsum("bshd,hdj->bsj", attention(q, k, v).swapaxes(1, 2), w["joined"]) + w["joined_bias"]
    seen = norm(x + joined, w["gain1"], w["shift1"], 1e-5)
    inner = gelu(seen @ w["up"] + w["up_bias"])
    return {"y": norm(seen + inner @ w["down"] + w["down_bias"], w["gain2"], w["shift2"], 1e-5)}


def _bert_inputs(size: int) -> Named:
    batch, seq, heads, width = ((2, 48, 4, 16), (1, 77, 2, 32))[size]
    hidden, inner = heads * width, 96
    shapes = {
        "x": (batch, seq, hidden), "qkv": (hidden, 3, heads, width), "qkv_bias": (3, heads, width), "joined": (heads, width, hidden),
        "joined_bias": (hidden,), "gain1": (hidden,), "shift1": (hidden,), "up": (hidden, inner), "up_bias": (inner,),
        "down": (inner, hidden), "down_bias": (hidden,), "gain2": (hidden,), "shift2": (hidden,),
    }  # fmt: skip
    depths = {"qkv": hidden, "joined": hidden, "up": hidden, "down": inner}
    return {n: (numbers(*s, seed=p) / depths.get(n, 1) ** 0.5).astype(np.float16) for p, (n, s) in enumerate(shapes.items())}


def _tour_elementwise(x: Any, matrix: Any, vector: Any, heads_in: Any, cos_cache: Any, sin_cache: Any) -> Named:
    y = np.maximum(x, 0)
    return {"y": y, "z": x * y + 1, "scaled": matrix * vector, "activated": gelu(x), "rotated": turned(heads_in, cos_cache, sin_cache)}


def _tour_elementwise_inputs(n: int) -> Named:
    angles = (np.arange(20).reshape(5, 4) / 7).astype(np.float32)
    given = {"x": numbers((64, 1037)[n]), "matrix": numbers((8, 5)[n], (16, 9)[n]), "vector": numbers((16, 9)[n])}
    return given | {"heads_in": numbers(2, 3, 5, 8), "cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}


def _tour_reductions(data: Any, matrix: Any) -> Named:
    found = {"sum": data.sum(), "max_val": data.max(), "norm": np.sqrt((data * data).sum())}
    return found | {"row_sums": matrix.sum(1), "max_idx": data.argmax()}


def _tour_matrices(A: Any, B: Any, P: Any, Q: Any, input: Any, kernel: Any, bias: Any, windows: Any) -> Named:
    return {"C": A @ B, "batched": P @ Q, "output": convolved(input, kernel, bias), "filtered": filtered(input, windows)}


def _tour_matrices_inputs(n: int) -> Named:
    m, k, c = ((32, 64, 48), (17, 23, 19))[n]
    given = {"A": numbers(m, k), "B": numbers(k, c), "P": numbers(2, 9, 11), "Q": numbers(2, 11, 6), "input": numbers(2, 3, 9, 8)}
    return given | {"kernel": numbers(4, 3, 3, 3), "bias": numbers(4), "windows": numbers(3, 3, 3)}


def _tour_attention(Q: Any, K: Any, V: Any, mask: Any) -> Named:
    return {"attn": attention(Q, K, V, mask), "flash": attention(Q, K, V)}


def _heads(n: int) -> Named:
    seq, width = ((64, 16), (77, 8))[n]
    return {name: numbers(2, 2, seq, width, seed=p) for p, name in enumerate("QKV")}


def _masked(n: int) -> Named:
    given = _heads(n)
    seq = given["Q"].shape[2]
    return given | {"mask": np.tril(np.ones((seq, seq), bool))}


def _rows(n: int) -> tuple[int, int]:
    return ((16, 128), (7, 131))[n]


def _tour_async(data: Any, default_value: float, batch1: Any, batch2: Any, batch3: Any) -> Named:
    twice = np.exp(data) * 2
    results = [b + p for p, b in enumerate((batch1, batch2, batch3), 1)]
    return {"result_now": twice, "result": twice, "in_time": twice, "results": results}


def _rope_inputs(n: int) -> Named:
    seq = (8, 5)[n]
    angles = (np.arange(seq * 4).reshape(seq, 4) / 7).astype(np.float32)
    return {"x": numbers(2, 3, seq, 8), "cosines": np.cos(angles), "sines": np.sin(angles)}


def _vector(name: str) -> Callable[[int], Named]:
    return lambda n: {name: numbers((1024, 1001)[n])}



def _dropout(x: np.ndarray, seed: int, keep: float) -> Named:
    rows, cols = x.shape
    return {"dropped": np.where(uniforms(seed, np.arange(rows)[:, None], np.arange(cols)) < keep, x / keep, 0)}


def _pi(seeds: np.ndarray) -> Named:
    x, y = (uniforms(seeds[:, None], before, np.arange(4096)) for before in (0, 1))
    estimates = 4 * np.mean(x * x + y * y < 1, axis=1)
    return {"estimates": estimates, "mean": estimates.mean()}


CASES = [
    Case("argmax", _vector("data"), lambda data: {"where_largest": data.argmax()}),
    Case("axpy", lambda n: {"a": 1.5, "x": numbers(64 + n), "y": numbers(64 + n, seed=1)}, lambda a, x, y: {"result": a * x + y}),
    Case("batched_matmul", lambda n: {"a": numbers(3, 16 + n, 32 + n), "b": numbers(3, 24, 32 + n)},
         lambda a, b: {"products": a @ b.swapaxes(1, 2)}),
    Case("conv2d", lambda n: {"image": numbers(2, 3, 8 + n, 8), "weights": numbers(4, 3, 3, 3), "bias": numbers(4)},
         lambda image, weights, bias: {"features": convolved(image, weights, bias)}),
    Case("conv2d_depthwise", lambda n: {"image": numbers(2, 3, 8 + n, 9), "windows": numbers(3, 3, 3)},
         lambda image, windows: {"filtered": filtered(image, windows)}),
    Case("cross_entropy", lambda n: {"scores": numbers(*_rows(n)), "label": np.arange(_rows(n)[0], dtype=np.int32) * 5},
         lambda scores, label: {"losses": -np.log(softmax(scores))[np.arange(len(label)), label]}),
    Case("dropout", lambda n: {"x": numbers(*_rows(n)), "seed": 5 + n, "keep": 0.75}, _dropout),
    Case("flash_attention", _heads, lambda Q, K, V: {"mixed": attention(Q, K, V)}),
    Case("layer_norm", lambda n: {"x": numbers(*_rows(n)), "gain": numbers(_rows(n)[1]), "shift": numbers(_rows(n)[1], seed=1)},
         lambda x, gain, shift: {"normed": norm(x, gain, shift, 1e-5)}),
    Case("masked_attention", _masked, lambda Q, K, V, mask: {"mixed": attention(Q, K, V, mask)}),
    Case("matmul", lambda n: {"a": numbers(32 + n, 64 + n), "b": numbers(64 + n, 48)}, lambda a, b: {"product": a @ b}),
    Case("max", _vector("data"), lambda data: {"largest": data.max()}),
    Case("norm", _vector("data"), lambda data: {"norm": np.sqrt((data * data).sum())}),
    Case("pi", lambda n: {"seeds": np.arange(1 + n) << 40}, _pi),
    Case("relu", _vector("x"), lambda x: {"y": np.maximum(x, 0)}),
    Case("rms_norm", lambda n: {"x": numbers(*_rows(n)), "gain": numbers(_rows(n)[1])},
         lambda x, gain: {"normed": x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain}),
    Case("rope", _rope_inputs, lambda x, cosines, sines: {"turned": turned(x, cosines, sines)}),
    Case("row_sums", lambda n: {"matrix": numbers(*_rows(n))}, lambda matrix: {"row_sums": matrix.sum(1)}),
    Case("scale", lambda n: {"matrix": numbers(*_rows(n)), "vector": numbers(_rows(n)[1])}, lambda matrix, vector: {"scaled": matrix * vector}),
    Case("softmax", lambda n: {"x": numbers(*_rows(n))}, lambda x: {"weights": softmax(x)}),
    Case("sum", _vector("data"), lambda data: {"total": data.sum()}, 1e-4),
    Case("tour_async", lambda n: {"data": numbers(33 + n), "default_value": 0.0, **{f"batch{p}": numbers(20, seed=p) for p in (1, 2, 3)}},
         _tour_async, replayed=False),
    Case("tour_attention", _masked, _tour_attention),
    Case("tour_devices", lambda n: {"data": numbers(9 + n, 12), "weights": numbers(12, 7)},
         lambda data, weights: dict.fromkeys(("gpu_result", "cpu_result", "result"), data @ weights), replayed=False),
    Case("tour_elementwise", _tour_elementwise_inputs, _tour_elementwise),
    Case("tour_fused", lambda n: {"logits": numbers(6, 50 + n), "x": numbers(5, 96 + n), "gamma": numbers(96 + n, seed=1),
                                  "beta": numbers(96 + n, seed=2), "eps": 1e-5},
         lambda logits, x, gamma, beta, eps: {"probs": softmax(logits, None), "normalized": norm(x, gamma, beta, eps)}),
    Case("tour_matrices", _tour_matrices_inputs, _tour_matrices),
    Case("tour_memory", lambda n: {"data": numbers(40 + n)}, lambda data: {"cpu_data": data * 2, "shared_sum": data.sum() * 2}, 1e-4, replayed=False),
    Case("tour_reductions", lambda n: {"data": numbers((1024, 1001)[n]), "matrix": numbers(7, 130 + n)}, _tour_reductions, 1e-4),
    Case("transformer", _bert_inputs, _bert, 4e-3),
]  # fmt: skip
"""All but `transformer_block.zyn`, which has a function to call and nothing to run."""
