"""One decode step of a model of the shape of Qwen2.5-1.5B, logits and next token included, as one captured graph; against a CUDA graph of PyTorch.

In: whether the run is quick. Out: cases for `harness.measure`. Weights are random, in bf16 (3.1 GB), and the step is at position 511. PyTorch's step is made
of its own functions, with attention over exactly 512 keys; ours reads the position from memory and would serve any other.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

POSITION, LONGEST = 511, 4096
BAR_MS = 1.1


def example() -> Any:
    """`examples/decode_graph.py`."""
    import sys

    if "decode_graph" not in sys.modules:
        path = Path(__file__).resolve().parent.parent / "examples" / "decode_graph.py"
        spec = importlib.util.spec_from_file_location("decode_graph", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["decode_graph"] = module
        spec.loader.exec_module(module)
    return sys.modules["decode_graph"]


def qwen_shape(layers: int = 28) -> Any:
    return example().Shape(layers=layers, wide=1536, heads=12, groups=2, depth=128, hidden=8960, words=151936, theta=1e6)


def torch_weights(torch: Any, shape: Any) -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(5)
    found: dict[str, Any] = {}
    for name, extents in shape.weights().items():
        values = torch.randn(extents, device="cuda", generator=generator, dtype=torch.bfloat16) * extents[-1] ** -0.5
        found[name] = 1 + 0.1 * values if "norm" in name else values
    found["output"] = found["embed"]  # one array, as in the model
    return found


class TorchStep:
    """The same step in PyTorch, in static arrays."""

    def __init__(self, torch: Any, shape: Any, weights: dict[str, Any], past: list[Any]) -> None:
        self.torch, self.s, self.w = torch, shape, weights
        self.token = torch.tensor([17], device="cuda")
        self.caches = past
        angles = POSITION * shape.theta ** (-torch.arange(0, shape.depth, 2, dtype=torch.float64) / shape.depth)
        self.cos, self.sin = (torch.cat([f(angles)] * 2).to("cuda", torch.bfloat16) for f in (torch.cos, torch.sin))

    def turned(self, x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return x * self.cos + self.torch.cat([-b, a], -1) * self.sin

    def __call__(self) -> tuple[Any, Any]:
        torch, s, w = self.torch, self.s, self.w
        f = torch.nn.functional
        queries, keys = s.heads * s.depth, s.groups * s.depth
        x = w["embed"][self.token]
        for n in range(s.layers):
            qkv = f.linear(f.rms_norm(x, (s.wide,), w[f"norm1.{n}"], s.epsilon), w[f"qkv.{n}"], w[f"qkv_bias.{n}"])
            q = self.turned(qkv[:, :queries].view(1, s.heads, s.depth))
            k = self.turned(qkv[:, queries : queries + keys].view(1, s.groups, s.depth))
            v = qkv[:, queries + keys :].view(1, s.groups, s.depth)
            self.caches[n][0][POSITION] = k[0]
            self.caches[n][1][POSITION] = v[0]
            seen = [c[: POSITION + 1].transpose(0, 1)[None] for c in self.caches[n]]
            mixed = f.scaled_dot_product_attention(q.transpose(0, 1)[None], *seen, enable_gqa=True)
            x = x + f.linear(mixed.transpose(1, 2).reshape(1, queries), w[f"mix.{n}"])
            h = f.rms_norm(x, (s.wide,), w[f"norm2.{n}"], s.epsilon)
            x = x + f.linear(f.silu(f.linear(h, w[f"gate.{n}"])) * f.linear(h, w[f"up.{n}"]), w[f"down.{n}"])
        logits = f.linear(f.rms_norm(x, (s.wide,), w["last_norm"], s.epsilon), w["output"])
        return logits, logits.argmax(-1)

    def captured(self) -> Any:
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.result = self()
        return graph


def prepared_steps(layers: int = 28, launches: int = 0) -> tuple[Any, Any, Any, Any]:
    """Our captured step, PyTorch's step, its graph, and the graph of ours."""
    torch: Any = importlib.import_module("torch")
    shape = qwen_shape(layers)
    weights = torch_weights(torch, shape)
    generator = torch.Generator(device="cuda").manual_seed(6)
    past = [[torch.randn(LONGEST, shape.groups, shape.depth, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(2)] for _ in range(layers)]
    g = example().build(shape, weights, tw.bf16, LONGEST)
    for n in range(layers):
        for name, source in zip(("keys", "values"), past[n], strict=True):
            state = g.state(f"{name}.{n}", "cuda")
            state.device.copy(state, state.device.wrap(source), 0)
    torch.cuda.synchronize()
    step = g.capture("cuda", launches=launches, token=np.array([17], np.int32), position=np.array([POSITION], np.int32))
    theirs = TorchStep(torch, shape, weights, past)
    return step, theirs, theirs.captured(), g


def _case() -> Case:
    def prepare() -> Prepared:
        torch: Any = importlib.import_module("torch")
        step, theirs, graph, _ = prepared_steps()

        def ours(slot: int) -> Any:
            return step()["logits"]

        def torch_graph(slot: int) -> Any:
            graph.replay()
            return theirs.result[0]

        torch_graph(0)
        torch.cuda.synchronize()
        wanted = theirs.result[0].float()

        def verify(slot: int, returned: Any, variant: Variant) -> str:
            found = returned if isinstance(returned, torch.Tensor) else torch.from_dlpack(returned)
            error = float((found.float().reshape(-1) - wanted.reshape(-1)).abs().max() / wanted.std())
            return "" if error < 0.25 else f"logits are off by {error:.2g} standard deviations"

        return Prepared([Variant(OURS, ours, returns=True), Variant("torch graph", torch_graph, returns=True)], lambda: None, verify, slots=1)

    nbytes = 2 * sum(int(np.prod(e)) for name, e in qwen_shape().weights().items() if name != "embed")
    return Case("decode_step", (28, 1536, 8960, 151936), "bf16, position 511", nbytes, prepare, Bar(2.92 / BAR_MS))


def gpu_cases(quick: bool) -> list[Case]:
    return [_case()]
