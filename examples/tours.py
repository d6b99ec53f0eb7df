"""The programs `zyn/tour_*.zyn` and `zyn/transformer_block.zyn`: each shows one side of ZynML, with inputs of any size and what
must come out.

`TOURS` lists them; `tilewright demo` runs them on every device and compares each result with its reference in float64. `same`
says what PyTorch calls an operation, where it has it: a function of the inputs as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tilewright as tw

Array = NDArray[Any]
Inputs = dict[str, Any]
Results = dict[str, Any]
Same = Mapping[str, Callable[[Any, Inputs], Any]]
_ZYN = Path(__file__).parent / "zyn"


class Tour(NamedTuple):
    """One program. `make(rng, size)` gives inputs of about `size` elements; `reference(inputs)` results by name."""

    name: str
    make: Callable[[np.random.Generator, int], Inputs]
    reference: Callable[[Inputs], Results]
    same: Same = {}
    """By result, a function of `torch` and the inputs."""
    tolerance: float = 1e-5
    """Largest error accepted, in units of the largest magnitude in a result (at least 1)."""
    function: str = ""
    """A function that is called instead of running the program."""

    @property
    def path(self) -> Path:
        return _ZYN / f"{self.name}.zyn"

    def run(self, inputs: Inputs, device: str) -> Results:
        """The results of the program, or of its function, by name."""
        module = tw.load(self.path)
        if self.function:
            return {self.function: getattr(module, self.function)(device=device, **inputs)}
        return module.run(device=device, **inputs)


def _numbers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _wide(inputs: Inputs, *names: str) -> list[Array]:
    return [inputs[name].astype(np.float64) for name in names]


def softmax(x: Array, axis: int | None = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))


def gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))))


# -- elementwise ----------------------------------------------------------------------------------------------------


def _elementwise(rng: np.random.Generator, size: int) -> Inputs:
    side = max(2, int(size**0.5))
    angles = np.arange(20).reshape(5, 4) / 7
    return {
        "x": _numbers(rng, size), "matrix": _numbers(rng, side, side + 1), "vector": _numbers(rng, side + 1),
        "heads_in": _numbers(rng, 2, max(1, size // 80), 5, 8), "cos_cache": np.cos(angles).astype(np.float32),
        "sin_cache": np.sin(angles).astype(np.float32),
    }  # fmt: skip


def _elementwise_results(inputs: Inputs) -> Results:
    x, m, v, h, c, s = _wide(inputs, "x", "matrix", "vector", "heads_in", "cos_cache", "sin_cache")
    y = np.maximum(x, 0)
    turned = np.stack([h[..., ::2] * c - h[..., 1::2] * s, h[..., ::2] * s + h[..., 1::2] * c], -1).reshape(h.shape)
    return {"y": y, "z": x * y + 1, "scaled": m * v, "activated": gelu(x), "rotated": turned}


# -- reductions -----------------------------------------------------------------------------------------------------


def _reductions(rng: np.random.Generator, size: int) -> Inputs:
    return {"data": _numbers(rng, size), "matrix": _numbers(rng, max(1, size // 130), 130)}


def _reductions_results(inputs: Inputs) -> Results:
    data, matrix = _wide(inputs, "data", "matrix")
    return {
        "sum": data.sum(),
        "max_val": data.max(),
        "norm": np.sqrt((data * data).sum()),
        "row_sums": matrix.sum(1),
        "max_idx": data.argmax(),
    }


# -- matrices -------------------------------------------------------------------------------------------------------


def _matrices(rng: np.random.Generator, size: int) -> Inputs:
    n = max(3, int(size**0.5) // 2)
    side = max(5, int((size / 6) ** 0.5))
    return {
        "A": _numbers(rng, n, n + 6), "B": _numbers(rng, n + 6, n + 2), "P": _numbers(rng, 2, 9, n), "Q": _numbers(rng, 2, n, 6),
        "input": _numbers(rng, 2, 3, side + 1, side), "kernel": _numbers(rng, 4, 3, 3, 3), "bias": _numbers(rng, 4),
        "windows": _numbers(rng, 3, 3, 3),
    }  # fmt: skip


def _matrices_results(inputs: Inputs) -> Results:
    a, b, p, q, image, kernel, bias, windows = _wide(inputs, "A", "B", "P", "Q", "input", "kernel", "bias", "windows")
    padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
    strided = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    plain = np.lib.stride_tricks.sliding_window_view(image, (3, 3), (2, 3))
    return {
        "C": a @ b, "batched": p @ q, "output": np.einsum("bihwyx,oiyx->bohw", strided, kernel) + bias[:, None, None],
        "filtered": np.einsum("bchwyx,cyx->bchw", plain, windows),
    }  # fmt: skip


# -- attention ------------------------------------------------------------------------------------------------------


def _attention(rng: np.random.Generator, size: int) -> Inputs:
    seq = max(3, min(300, size // 32))
    q, k, v = (_numbers(rng, 2, 2, seq, 8) for _ in range(3))
    return {"Q": q, "K": k, "V": v, "mask": np.tril(np.ones((seq, seq), bool))}


def _attention_results(inputs: Inputs) -> Results:
    q, k, v = _wide(inputs, "Q", "K", "V")
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(8)
    return {"attn": softmax(np.where(inputs["mask"], scores, -np.inf)) @ v, "flash": softmax(scores) @ v}


# -- fused ----------------------------------------------------------------------------------------------------------


def _fused(rng: np.random.Generator, size: int) -> Inputs:
    rows = max(1, size // 96)
    return {
        "logits": _numbers(rng, rows, 50), "x": _numbers(rng, rows, 96), "gamma": _numbers(rng, 96),
        "beta": _numbers(rng, 96), "eps": 1e-5,
    }  # fmt: skip


def _fused_results(inputs: Inputs) -> Results:
    logits, x, gamma, beta = _wide(inputs, "logits", "x", "gamma", "beta")
    normalized = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + inputs["eps"]) * gamma + beta
    return {"probs": softmax(logits, None), "normalized": normalized}


# -- devices, several at once, futures, memory ----------------------------------------------------------------------


def _devices(rng: np.random.Generator, size: int) -> Inputs:
    n = max(2, int(size**0.5))
    return {"data": _numbers(rng, n, n + 3), "weights": _numbers(rng, n + 3, n - 1)}


def _devices_results(inputs: Inputs) -> Results:
    data, weights = _wide(inputs, "data", "weights")
    return dict.fromkeys(("gpu_result", "cpu_result", "result"), data @ weights)


def _parallel(rng: np.random.Generator, size: int) -> Inputs:
    n = max(8, int(size**0.5))
    return {
        "large_data": _numbers(rng, 4 * n, 24), "data": _numbers(rng, n, 24), "weights": _numbers(rng, 24, 40) / np.float32(5),
        "more_weights": _numbers(rng, 40, 10),
    }  # fmt: skip


def _parallel_results(inputs: Inputs) -> Results:
    large, data, weights, more = _wide(inputs, "large_data", "data", "weights", "more_weights")
    return {"result": large @ weights, "forward": softmax(gelu(data @ weights) @ more)}


def _async(rng: np.random.Generator, size: int) -> Inputs:
    return {"data": _numbers(rng, size), "default_value": 0.0, **{f"batch{n}": _numbers(rng, size) for n in (1, 2, 3)}}


def _async_results(inputs: Inputs) -> Results:
    data, *batches = _wide(inputs, "data", "batch1", "batch2", "batch3")
    return dict.fromkeys(("result_now", "result", "in_time"), np.exp(data) * 2) | {
        "results": [b + n + 1 for n, b in enumerate(batches)]
    }


def _memory(rng: np.random.Generator, size: int) -> Inputs:
    return {"data": _numbers(rng, size)}


def _memory_results(inputs: Inputs) -> Results:
    (data,) = _wide(inputs, "data")
    return {"cpu_data": data * 2, "shared_sum": data.sum() * 2}


# -- the transformer block ------------------------------------------------------------------------------------------


def weights_of_a_block(rng: np.random.Generator, hidden: int, inner: int) -> dict[str, Array]:
    shapes = {
        "qkv_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden), "ln1_weight": (hidden,), "ln1_bias": (hidden,),
        "ffn_up": (hidden, inner), "ffn_down": (inner, hidden), "ln2_weight": (hidden,), "ln2_bias": (hidden,),
    }  # fmt: skip
    return {
        name: _numbers(rng, *shape) / np.float32(shape[0] ** 0.5 if len(shape) > 1 else 1) for name, shape in shapes.items()
    }


def _block(rng: np.random.Generator, size: int) -> Inputs:
    heads, width = 4, 8
    seq = max(3, min(200, size // 64))
    layers = [weights_of_a_block(rng, heads * width, 48) for _ in range(2)]
    return {
        "x": _numbers(rng, 2, seq, heads * width),
        "layer": 1,
        "model": {"layers": layers},
        "num_heads": heads,
        "head_dim": width,
    }


def _block_results(inputs: Inputs) -> Results:
    x, heads = inputs["x"].astype(np.float64), inputs["num_heads"]
    w = {name: array.astype(np.float64) for name, array in inputs["model"]["layers"][inputs["layer"]].items()}
    q, k, v = (p.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for p in np.split(x @ w["qkv_proj"], 3, -1))
    mixed = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(inputs["head_dim"])) @ v

    def norm(rows: Array, gain: Array, shift: Array) -> Array:
        return np.asarray((rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-6) * gain + shift)

    seen = norm(x + mixed.swapaxes(1, 2).reshape(x.shape) @ w["out_proj"], w["ln1_weight"], w["ln1_bias"])
    return {"transformer_block": norm(seen + gelu(seen @ w["ffn_up"]) @ w["ffn_down"], w["ln2_weight"], w["ln2_bias"])}


def _torch_block(torch: Any, i: Inputs) -> Any:
    nn = torch.nn.functional
    w, x = i["model"]["layers"][i["layer"]], i["x"]
    q, k, v = (p.reshape(*x.shape[:2], i["num_heads"], -1).transpose(1, 2) for p in (x @ w["qkv_proj"]).chunk(3, -1))
    mixed = nn.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    seen = nn.layer_norm(x + mixed @ w["out_proj"], x.shape[-1:], w["ln1_weight"], w["ln1_bias"], 1e-6)
    inner = nn.gelu(seen @ w["ffn_up"], approximate="tanh")
    return nn.layer_norm(seen + inner @ w["ffn_down"], x.shape[-1:], w["ln2_weight"], w["ln2_bias"], 1e-6)


def _same(**by_result: Callable[[Any, Inputs], Any]) -> Same:
    return by_result


TOURS = (
    Tour("tour_elementwise", _elementwise, _elementwise_results, _same(
        y=lambda torch, i: torch.relu(i["x"]), z=lambda torch, i: i["x"] * torch.relu(i["x"]) + 1,
        scaled=lambda torch, i: i["matrix"] * i["vector"],
        activated=lambda torch, i: torch.nn.functional.gelu(i["x"], approximate="tanh"),
    )),
    Tour("tour_reductions", _reductions, _reductions_results, _same(
        sum=lambda torch, i: i["data"].sum(), max_val=lambda torch, i: i["data"].max(),
        norm=lambda torch, i: torch.linalg.vector_norm(i["data"]),
        row_sums=lambda torch, i: i["matrix"].sum(1), max_idx=lambda torch, i: i["data"].argmax(),
    ), 1e-4),
    Tour("tour_matrices", _matrices, _matrices_results, _same(
        C=lambda torch, i: i["A"] @ i["B"], batched=lambda torch, i: torch.bmm(i["P"], i["Q"]),
        output=lambda torch, i: torch.nn.functional.conv2d(i["input"], i["kernel"], i["bias"], stride=2, padding=1),
        filtered=lambda torch, i: torch.nn.functional.conv2d(i["input"], i["windows"][:, None], groups=3),
    )),
    Tour("tour_attention", _attention, _attention_results, _same(
        attn=lambda torch, i: torch.nn.functional.scaled_dot_product_attention(i["Q"], i["K"], i["V"], attn_mask=i["mask"]),
        flash=lambda torch, i: torch.nn.functional.scaled_dot_product_attention(i["Q"], i["K"], i["V"]),
    )),
    Tour("tour_fused", _fused, _fused_results, _same(
        probs=lambda torch, i: torch.softmax(i["logits"].flatten(), 0).reshape(i["logits"].shape),
        normalized=lambda torch, i: torch.nn.functional.layer_norm(i["x"], i["x"].shape[1:], i["gamma"], i["beta"], i["eps"]),
    )),
    Tour("tour_devices", _devices, _devices_results, _same(result=lambda torch, i: i["data"] @ i["weights"])),
    Tour("tour_parallel", _parallel, _parallel_results, _same(result=lambda torch, i: i["large_data"] @ i["weights"])),
    Tour("tour_async", _async, _async_results, _same(result=lambda torch, i: torch.exp(i["data"]) * 2)),
    Tour("tour_memory", _memory, _memory_results, _same(cpu_data=lambda torch, i: i["data"] * 2), 1e-4),
    Tour("transformer_block", _block, _block_results, _same(transformer_block=_torch_block), 2e-5, "transformer_block"),
)  # fmt: skip
