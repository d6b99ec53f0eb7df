"""Layers of transformers: which are measured, with what data, and how the result is known to be right.

In: a `Layer`, which is plain data, and a `Place`, where tensors live. Out: a `Problem`: buffers to go round, our kernel, the
peers on the same data (PyTorch eager and compiled, its attention by several libraries, NumPy on the CPU), and a reference in
float64.

A shape is (rows, columns) for rows, (batch, positions, heads, features) for rotary positions, (batch, heads, positions, features)
for attention, with the heads of keys after those of queries where they are fewer, and (batch, positions, features, heads, hidden)
for a block.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import transformer_kernels as kernels
from bench.contractions import STORED, UNIT, Bind, Place, Problem, Row, Thunk, empty, random, returning, writing

ROWS = ("softmax", "layer_norm", "rms_norm", "residual_norm_gate", "cross_entropy", "gelu")
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "transformer.py"
EPSILON = 1e-5
MASKED = 0.3
"""The part of a dense mask that hides something."""


@dataclass(frozen=True)
class Layer(Row):
    """One line of the table."""

    @property
    def flops(self) -> int:
        """Multiplications and additions of products; 0 where there are none. A causal problem counts as half."""
        if self.op.startswith("attention"):
            batch, heads, *_, length, depth = self.shape
            return 4 * batch * heads * length * length * depth // (2 if self.causal else 1)
        if self.op == "transformer_block":
            batch, length, features, _, hidden = self.shape
            return 4 * batch * length * features * (2 * features + hidden + length)
        return 0

    @property
    def causal(self) -> bool:
        return self.op in ("attention_causal", "attention_grouped")

    @property
    def steady(self) -> bool:
        return self.op.startswith("attention")

    @property
    def launches(self) -> int:
        return {"transformer_block": 24, "rope": 8, "residual_norm_gate": 8}.get(self.op, 1)

    @property
    def streams(self) -> bool:
        return self.op in ROWS or self.op == "rope"

    @property
    def weight_bytes(self) -> int:
        return 0


# -- the rows -------------------------------------------------------------------------------------------------------


def gpu_rows() -> list[Row]:
    """Every row of the GPU table."""
    rows: list[Row] = []
    for dtype in ("f32", "bf16"):
        for op in ("softmax", "layer_norm", "rms_norm"):
            rows += [Layer(op, shape, dtype) for shape in ((4096, 2048), (16384, 4096), (4096, 50257))]
    rows += [Layer("residual_norm_gate", (16384, 4096), "bf16"), Layer("rope", (4, 4096, 32, 128), "bf16")]
    rows += [Layer("gelu", (16384, 4096), "bf16")]
    rows += [Layer("cross_entropy", (4096, 50257), dtype) for dtype in ("f32", "bf16")]
    shapes = (
        (4, 16, 4096, 64), (4, 16, 4096, 128), (32, 16, 512, 128), (1, 16, 16384, 128), (16, 12, 512, 64), (4, 16, 777, 128),
        (4, 16, 1000, 128),
    )  # fmt: skip
    rows += [Layer(op, shape, "bf16") for shape in shapes for op in ("attention", "attention_causal")]
    rows += [Layer("attention_masked", (4, 16, 4096, 128), "bf16"), Layer("attention_grouped", (4, 32, 8, 4096, 128), "bf16")]
    rows += [Layer("transformer_block", (8, 512, 768, 12, 3072), "bf16")]
    return rows


def cpu_rows() -> list[Row]:
    """Every row of the CPU table."""
    rows: list[Row] = [Layer(op, (4096, 2048), "f32") for op in ("softmax", "layer_norm", "residual_norm_gate")]
    rows += [Layer("rope", (4, 1024, 12, 64), "f32")]
    rows += [Layer(op, (2, 12, 512, 64), "f32") for op in ("attention", "attention_causal")]
    return rows


# -- problems -------------------------------------------------------------------------------------------------------


def problem(row: Row, place: Place) -> Problem:
    """The row's data, kernel and peers."""
    assert isinstance(row, Layer)
    if place.compile:
        torch._dynamo.reset()
    if row.op == "transformer_block":
        return _block(row, place)
    if row.op.startswith("attention"):
        return _attention(row, place)
    return _rope(row, place) if row.op == "rope" else _rows(row, place)


def companions(row: Row, place: Place) -> dict[str, Problem]:
    """No other problem of ours is timed beside these."""
    return {}


def _plain(
    row: Layer, place: Place, kernel: Any, inputs: Callable[[], list[Tensor]], output: Callable[[], Tensor],
    reference: Callable[..., Tensor], peers: dict[str, Bind], bound: Callable[[bool], tuple[float, float | Tensor]],
    scalars: tuple[float, ...] = (),
) -> Problem:  # fmt: skip
    """A problem that is one call of ours; `scalars` follow its arrays."""

    def ours(*arrays: object, out: object) -> object:
        return kernel(*arrays, *scalars, out=out)

    return Problem(
        row, place, lambda: ours, inputs, output, reference, peers, bound=bound, optional=True,
        launches=lambda: len(kernel.last.launches),
    )  # fmt: skip


def _compiled(place: Place, function: Callable[..., Tensor]) -> dict[str, Bind]:
    """torch.compile of the expression, written into the given output."""
    if not place.compile:
        return {}
    into: Any = torch.compile(lambda *given: given[-1].copy_(function(*given[:-1])), dynamic=False)
    return {"torch.compile": writing(into)}


def _numpy(place: Place, function: Callable[..., None]) -> dict[str, Bind]:
    """A peer on the CPU that is called with inputs and output as arrays."""
    if place.gpu:
        return {}

    def bind(inputs: Sequence[Tensor], out: Tensor) -> Thunk:
        arrays, target = [t.numpy() for t in inputs], out.numpy()

        def call() -> Tensor:
            function(*arrays, target)
            return out

        return call

    return {"numpy": bind}


# -- rows -----------------------------------------------------------------------------------------------------------


def _rows(row: Layer, place: Place) -> Problem:
    n, c = row.shape
    stored = STORED[row.dtype]
    labels = row.op == "cross_entropy"
    forms: dict[str, tuple[tuple[int, ...], ...]] = {
        "layer_norm": ((n, c), (c,), (c,)), "rms_norm": ((n, c), (c,)), "residual_norm_gate": ((n, c), (n, c), (c,), (n, c)),
    }  # fmt: skip

    def inputs() -> list[Tensor]:
        made = [random(place, shape, stored) for shape in forms.get(row.op, ((n, c),))]
        return [*made, torch.randint(0, c, (n,), device=place.device)] if labels else made

    eager = EAGER[row.op]
    peers = {"torch": returning(eager)}
    if row.op == "softmax":
        peers = {"torch": writing(lambda x, out: torch.softmax(x, -1, out=out))}
    elif row.op == "gelu":
        peers = {"torch": writing(lambda x, out: torch.ops.aten.gelu.out(x, approximate="tanh", out=out))}
    elif row.op == "residual_norm_gate":
        peers["torch out="] = writing(_gated_into)
    # On a CPU a new result costs what the system takes to hand out its pages, which a compiled peer does not pay.
    if row.op in ("residual_norm_gate", "gelu", "cross_entropy") or not place.gpu:
        peers |= _compiled(place, eager)
    if row.op in NUMPY:
        peers |= _numpy(place, NUMPY[row.op])
    result = torch.float32 if labels else stored
    return _plain(
        row, place, getattr(kernels, row.op), inputs, lambda: empty(place, (n,) if labels else (n, c), result), eager, peers,
        lambda peer: row_bound(stored, result, peer, 1 / c if row.op == "softmax" else 1.0),
    )  # fmt: skip


def row_bound(stored: torch.dtype, result: torch.dtype, peer: bool, size: float = 1.0) -> tuple[float, float]:
    """How far results of about this size may be off. Ours computes in float32 and rounds once; peers may round each step of
    several to the dtype of the arrays."""
    steps = 2.0**-18
    if peer:
        return 8 * UNIT[stored] + steps, (8 * UNIT[stored] + steps) * size
    return 1.01 * UNIT[result] + steps, steps * size


def _layer_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gain, shift, EPSILON)


def _rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], gain, EPSILON)


def _gated(x: Tensor, residual: Tensor, gain: Tensor, gate: Tensor) -> Tensor:
    return _rms_norm(x + residual, gain) * functional.silu(gate)


def _gated_into(x: Tensor, residual: Tensor, gain: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.add(x, residual, out=out)
    lengths = torch.linalg.vector_norm(out, dim=-1, keepdim=True, dtype=torch.float32)
    out.mul_((lengths.square_() / x.shape[-1]).add_(EPSILON).rsqrt_()).mul_(gain).mul_(functional.silu(gate))


def _cross_entropy(x: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(x, label.long(), reduction="none")


EAGER: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x: functional.softmax(x, -1), "layer_norm": _layer_norm, "rms_norm": _rms_norm,
    "residual_norm_gate": _gated, "cross_entropy": _cross_entropy, "gelu": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip
"""What PyTorch computes, and in float64 what is right."""


def _numpy_softmax(x: np.ndarray, out: np.ndarray) -> None:
    np.subtract(x, x.max(-1, keepdims=True), out=out)
    np.exp(out, out=out)
    out /= out.sum(-1, keepdims=True)


def _numpy_layer_norm(x: np.ndarray, gain: np.ndarray, shift: np.ndarray, out: np.ndarray) -> None:
    np.subtract(x, x.mean(-1, keepdims=True), out=out)
    squares = np.einsum("ij,ij->i", out, out)[:, None]
    out /= np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(EPSILON))
    out *= gain
    out += shift


def _numpy_gated(x: np.ndarray, residual: np.ndarray, gain: np.ndarray, gate: np.ndarray, out: np.ndarray) -> None:
    np.add(x, residual, out=out)
    squares = np.einsum("ij,ij->i", out, out)[:, None]
    out /= np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(EPSILON))
    out *= gain
    out *= gate
    turned = np.exp(-gate)
    turned += 1
    out /= turned


NUMPY: dict[str, Callable[..., None]] = {
    "softmax": _numpy_softmax, "layer_norm": _numpy_layer_norm, "residual_norm_gate": _numpy_gated,
}  # fmt: skip


# -- rotary positions -----------------------------------------------------------------------------------------------


def _rope(row: Layer, place: Place) -> Problem:
    _, length, _, depth = row.shape
    stored = STORED[row.dtype]
    angles = torch.arange(length, device=place.device)[:, None] * 10000.0 ** (
        torch.arange(depth // 2, device=place.device) * (-2.0 / depth)
    )

    def inputs() -> list[Tensor]:
        return [random(place, row.shape, stored), angles.cos().to(stored), angles.sin().to(stored)]

    def into(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
        low, high, c, s = x[..., : depth // 2], x[..., depth // 2 :], cos[:, None], sin[:, None]
        np.multiply(low, c, out=out[..., : depth // 2])
        out[..., : depth // 2] -= high * s
        np.multiply(high, c, out=out[..., depth // 2 :])
        out[..., depth // 2 :] += low * s

    peers = {"torch": returning(_turned), "torch out=": writing(_turned_into), **_compiled(place, _turned), **_numpy(place, into)}

    def bound(peer: bool) -> tuple[float, float]:
        # Two products of up to five, which may cancel.
        relative, absolute = row_bound(stored, stored, peer)
        return relative, absolute * (5 if peer else 1)

    return _plain(row, place, kernels.rope, inputs, lambda: empty(place, row.shape, stored), _turned, peers, bound)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((low * c - high * s, high * c + low * s), -1)


def _turned_into(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    (low, high), (first, second) = x.chunk(2, -1), out.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    torch.mul(low, c, out=first)
    first.addcmul_(high, s, value=-1)
    torch.mul(high, c, out=second)
    second.addcmul_(low, s)


# -- attention ------------------------------------------------------------------------------------------------------


def _attention(row: Layer, place: Place) -> Problem:
    batch, heads, *fewer, length, depth = row.shape
    stored, scale, causal = STORED[row.dtype], row.shape[-1] ** -0.5, row.causal
    shape, keys = (batch, heads, length, depth), (batch, fewer[0] if fewer else heads, length, depth)
    masked = row.op == "attention_masked"

    def inputs() -> list[Tensor]:
        made = [random(place, size, stored) for size in (shape, keys, keys)]
        return [*made, _mask(place, length)] if masked else made

    def reference(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return attended(q, k, v, scale, causal, mask[0] if mask else None)

    def library(backends: list[SDPBackend]) -> Bind:
        def bind(inputs: Sequence[Tensor], out: Tensor) -> Thunk:
            q, k, v = inputs[:3]
            # What PyTorch makes of a mask of truths at every call.
            mask = torch.zeros_like(inputs[3], dtype=stored).masked_fill_(inputs[3] == 0, -math.inf) if masked else None

            def call() -> Tensor:
                with sdpa_kernel(backends):
                    return functional.scaled_dot_product_attention(
                        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=bool(fewer)
                    )

            return call

        return bind

    peers = {"torch": library([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])}
    if place.gpu:
        # Flash attention takes no mask.
        other = ("efficient", SDPBackend.EFFICIENT_ATTENTION) if masked else ("flash", SDPBackend.FLASH_ATTENTION)
        peers = {"torch cuDNN": library([SDPBackend.CUDNN_ATTENTION]), f"torch {other[0]}": library([other[1]])}

    hidden = np.triu(np.full((length, length), -np.inf, np.float32), 1) if causal and not place.gpu else None

    def with_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        scores = q @ k.swapaxes(-1, -2)
        scores *= np.float32(scale)
        if hidden is not None:
            scores += hidden
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        np.matmul(scores, v, out=out)

    if not masked and not fewer:
        peers |= _numpy(place, with_numpy)
    seen = (1 - MASKED) * length if masked else length

    def bound(peer: bool) -> tuple[float, float | Tensor]:
        return attention_bound(place, stored, length, seen, causal, peer)

    kernel = getattr(kernels, row.op)
    return _plain(row, place, kernel, inputs, lambda: empty(place, shape, stored), reference, peers, bound, (scale,))


def _mask(place: Place, length: int) -> Tensor:
    """Which positions see which, each itself among them; bytes of 0 and 1."""
    mask = (torch.rand((length, length), device=place.device) > MASKED).to(torch.uint8)
    return mask.fill_diagonal_(1)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """softmax(scores) @ v, a head at a time: the scores of all heads would not fit."""
    out = torch.empty_like(q)
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    hidden = torch.ones((length, length), dtype=torch.bool, device=q.device).triu_(1) if causal else None
    if mask is not None:
        hidden = mask == 0
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = (q[b, h] @ k[b, h // group].mT).mul_(scale)
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            out[b, h] = scores.softmax(-1) @ v[b, h // group]
    return out


def attention_bound(
    place: Place, stored: torch.dtype, length: int, seen: float, causal: bool, peer: bool
) -> tuple[float, float | Tensor]:
    """How far attention of normal random numbers may be from float64.

    Weights are rounded to the arrays' dtype before they are multiplied with the values. The squares of a row's n weights add up
    to about e / n, so the errors, of either sign, add up to a unit times the root of that; eight times as much never happens.
    """
    relative, absolute = row_bound(stored, stored, peer)
    if stored is torch.float32:
        return relative, absolute
    n = torch.arange(1, length + 1, device=place.device, dtype=torch.float64)[:, None] if causal else torch.tensor(seen)
    return (4 if peer else 1.01) * UNIT[stored], (16 if peer else 8) * UNIT[stored] * (math.e / n.to(place.device)).sqrt()


# -- a block --------------------------------------------------------------------------------------------------------

WEIGHTS = ("qkv", "qkv_bias", "out", "out_bias", "up", "up_bias", "down", "down_bias", "gain1", "shift1", "gain2", "shift2")


def example() -> ModuleType:
    """The kernels of `examples/transformer.py`."""
    spec = importlib.util.spec_from_file_location("bench_transformer_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _block(row: Layer, place: Place) -> Problem:
    batch, length, features, heads, hidden = row.shape
    rows, depth, stored = batch * length, features // heads, STORED[row.dtype]
    block, made = Block(row, place), example_weights(features, hidden)

    def inputs() -> list[Tensor]:
        return [random(place, (rows, features), stored), *(made[name].to(place.device, stored, copy=True) for name in WEIGHTS)]

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        w = dict(zip(WEIGHTS, weights, strict=True))
        parts = torch.addmm(w["qkv_bias"], x, w["qkv"]).view(batch, length, 3, heads, depth).permute(2, 0, 3, 1, 4)
        if x.dtype is torch.float64:
            mixed = attended(parts[0], parts[1], parts[2], depth**-0.5, False, None)
        else:
            mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        mixed = mixed.transpose(1, 2).reshape(rows, features)
        seen = _layer_norm(torch.addmm(w["out_bias"], mixed, w["out"]) + x, w["gain1"], w["shift1"])
        wider = functional.gelu(torch.addmm(w["up_bias"], seen, w["up"]), approximate="tanh")
        return _layer_norm(torch.addmm(w["down_bias"], wider, w["down"]) + seen, w["gain2"], w["shift2"])

    def bound(peer: bool) -> tuple[float, float]:
        # Results near one, of two norms: what is between them is rounded a few times to the arrays' dtype.
        return 0.0, (32 if peer else 16) * UNIT[stored] + 2.0**-16

    return Problem(
        row, place, block.refuse, inputs, lambda: empty(place, (rows, features), stored), layers,
        {"torch": returning(layers), **_compiled(place, layers)}, bound=bound, arrange=block.bind, optional=True,
        launches=lambda: block.launches,
    )  # fmt: skip


def example_weights(features: int, hidden: int) -> dict[str, Tensor]:
    made = example().make_weights(np.random.default_rng(0), features, hidden)
    return {name: torch.from_numpy(made[name].astype(np.float32)) for name in WEIGHTS}


class Block:
    """The example's block on tensors, as it is: heads are views of what the product before them wrote, no copies."""

    def __init__(self, row: Layer, place: Place) -> None:
        self.place, self.shape = place, row.shape
        self.example = example()
        self.launches = 0
        """Of one block, as the first one counted them."""

    @staticmethod
    def refuse() -> Callable[..., object]:
        raise AssertionError("a block is more than one call")

    def bind(self, inputs: Sequence[Tensor], out: Tensor) -> Thunk:
        batch, _, _, heads, _ = self.shape
        made = self.example
        x, *weights = (self.place.wrap(t) for t in inputs)
        w, target = dict(zip(WEIGHTS, weights, strict=True)), self.place.wrap(out)

        def call() -> Tensor:
            made.block(x, w, batch, heads, out=target)
            return out

        def counted() -> Tensor:
            if not self.launches:
                call()
                kernels = made.project, made.attend, made.project_add_norm, made.project_gelu, made.project_add_norm
                self.launches = sum(len(kernel.last.launches) for kernel in kernels)
                return out
            return call()

        return counted
