"""Networks as ONNX models, with random weights: a BERT-class encoder, node by node as exporters write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.onnx_writer import model, node, value


def encoder(layers: int = 6, width: int = 384, heads: int = 12, inner: int = 1536, vocabulary: int = 1000, seed: int = 0, given: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Token numbers `[batch, tokens]` and a mask in, states `[batch, tokens, width]` out; both sizes are named. `given` are weights by name instead of random ones."""
    generator = np.random.default_rng(seed)
    weights: dict[str, Any] = {}
    nodes: list[bytes] = []
    each = width // heads

    def weight(name: str, *shape: int, scale: float = 0.02) -> str:
        weights[name] = given[name] if given is not None else (generator.standard_normal(shape) * scale).astype(np.float32)
        return name

    def constant(name: str, array: Any) -> str:
        weights[name] = np.asarray(array)
        return name

    def add(op: str, *inputs: str, out: str, **attributes: Any) -> str:
        nodes.append(node(op, inputs, [out], out, **attributes))
        return out

    def linear(x: str, name: str, depth: int, columns: int) -> str:
        product = add("MatMul", x, weight(f"{name}.w", depth, columns), out=f"{name}.product")
        return add("Add", product, weight(f"{name}.b", columns), out=f"{name}.out")

    def norm(x: str, name: str) -> str:
        constant(f"{name}.gamma", given[f"{name}.gamma"] if given is not None else 1 + 0.1 * generator.standard_normal(width).astype(np.float32))
        weight(f"{name}.beta", width)
        return add("LayerNormalization", x, f"{name}.gamma", f"{name}.beta", out=f"{name}.out", epsilon=1e-12)

    add("Shape", "tokens", out="shape")
    constant("split", np.array([0, 0, heads, each]))
    constant("joined", np.array([0, 0, width]))
    constant("scale", np.float32(1 / np.sqrt(each)))
    constant("half", np.float32(0.5))
    constant("one", np.float32(1.0))
    constant("root", np.float32(np.sqrt(2.0)))
    constant("large", np.float32(-10000.0))
    constant("axes", np.array([1, 2]))
    add("Cast", "mask", out="mask.float", to=1)
    add("Unsqueeze", "mask.float", "axes", out="mask.wide")
    add("Sub", "one", "mask.wide", out="mask.turned")
    add("Mul", "mask.turned", "large", out="mask.added")
    add("Gather", weight("words", vocabulary, width, scale=1.0), "tokens", out="embedded")
    constant("zero", np.array([0]))
    constant("first", np.array([1]))
    constant("second", np.array([2]))
    add("Slice", "shape", "first", "second", "zero", out="length")
    add("Slice", weight("positions", 512, width, scale=1.0), "zero", "length", "zero", out="placed")
    x = norm(add("Add", "embedded", "placed", out="sum"), "embedding")
    for layer in range(layers):
        name = f"layer{layer}"
        parts = {}
        for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            found = linear(x, f"{name}.{part}", width, width)
            cut = add("Reshape", found, "split", out=f"{name}.{part}.cut")
            parts[part] = add("Transpose", cut, out=f"{name}.{part}.turned", perm=order)
        scores = add("MatMul", parts["query"], parts["key"], out=f"{name}.scores")
        scaled = add("Mul", scores, "scale", out=f"{name}.scaled")
        masked = add("Add", scaled, "mask.added", out=f"{name}.masked")
        chances = add("Softmax", masked, out=f"{name}.softmax", axis=-1)
        mixed = add("MatMul", chances, parts["value"], out=f"{name}.mixed")
        turned = add("Transpose", mixed, out=f"{name}.mixed.turned", perm=[0, 2, 1, 3])
        flat = add("Reshape", turned, "joined", out=f"{name}.mixed.flat")
        x = norm(add("Add", linear(flat, f"{name}.output", width, width), x, out=f"{name}.residual"), f"{name}.norm")
        up = linear(x, f"{name}.up", width, inner)
        error = add("Erf", add("Div", up, "root", out=f"{name}.divided"), out=f"{name}.erf")
        gelu = add("Mul", add("Mul", up, add("Add", error, "one", out=f"{name}.plus"), out=f"{name}.times"), "half", out=f"{name}.gelu")
        x = norm(add("Add", linear(gelu, f"{name}.down", inner, width), x, out=f"{name}.residual2"), f"{name}.norm2")
    add("Identity", x, out="states")
    inputs = [value("tokens", np.int64, ["batch", "length"]), value("mask", np.int64, ["batch", "length"])]
    return model(nodes, inputs, ["states"], weights, 17)
