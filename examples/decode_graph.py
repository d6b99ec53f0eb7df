"""One step of a decoder (as in Llama and Qwen2) as a tensor graph: a token in, logits and the next token out, with caches of keys and values.

    python examples/decode_graph.py

The graph is plain nodes. The planner fuses them, makes one program of all layers, and `capture` records the step once: the position is read from device
memory, so that one recording serves all positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilewright as tw

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Of a decoder: `heads` query heads share `groups` heads of keys and values."""

    layers: int = 2
    wide: int = 32
    heads: int = 4
    groups: int = 2
    depth: int = 8
    hidden: int = 48
    words: int = 50
    theta: float = 10000.0
    epsilon: float = 1e-6

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight. Rows are outputs; queries, keys and values are one product."""
        found: dict[str, tuple[int, ...]] = {"embed": (self.words, self.wide), "last_norm": (self.wide,), "output": (self.words, self.wide)}
        qkv = (self.heads + 2 * self.groups) * self.depth
        for layer in range(self.layers):
            found |= {
                f"norm1.{layer}": (self.wide,), f"qkv.{layer}": (qkv, self.wide), f"qkv_bias.{layer}": (qkv,),
                f"mix.{layer}": (self.wide, self.heads * self.depth), f"norm2.{layer}": (self.wide,),
                f"gate.{layer}": (self.hidden, self.wide), f"up.{layer}": (self.hidden, self.wide), f"down.{layer}": (self.wide, self.hidden),
            }  # fmt: skip
        return found


def make_weights(shape: Shape, rng: np.random.Generator) -> Arrays:
    made: Arrays = {}
    for name, extents in shape.weights().items():
        values = rng.standard_normal(extents) / extents[-1] ** 0.5
        made[name] = (1 + 0.1 * values if "norm" in name else values).astype(np.float32)
    return made


def build(shape: Shape, weights: Arrays, dtype: Any = tw.f32, longest: int | str = "longest", sequences: int = 1) -> tw.TensorGraph:
    """The step. Caches hold `longest` positions: a number, or a name that `g.capacity(…)` or `max_position=` gives a number. With several `sequences`, each has its own token,
    position and caches."""
    s = shape
    g = tw.TensorGraph("decode")
    token, position = g.input("token", (sequences,), tw.i32), g.input("position", (sequences,), tw.i32)
    rows: tuple[int, ...] = (1,) if sequences == 1 else (sequences, 1)
    room: tuple[int | str, ...] = (longest,) if sequences == 1 else (sequences, longest)
    w = {name: g.weight(name, array) for name, array in weights.items()}
    queries, keys = s.heads * s.depth, s.groups * s.depth
    x = g.op("Embedding", token, w["embed"], name="embedding")
    for n in range(s.layers):
        h = g.op("RmsNorm", x, w[f"norm1.{n}"], epsilon=s.epsilon, name=f"layer{n}.norm1")
        qkv = g.op("MulMat", h, w[f"qkv.{n}"], w[f"qkv_bias.{n}"], name=f"layer{n}.qkv")
        q = qkv[:, :queries].reshape(*rows, s.heads, s.depth)
        k = qkv[:, queries : queries + keys].reshape(*rows, s.groups, s.depth)
        v = qkv[:, queries + keys :].reshape(*rows, s.groups, s.depth)
        q = g.op("Rope", q, position, theta=s.theta, name=f"layer{n}.rope_q")
        k = g.op("Rope", k, position, theta=s.theta, name=f"layer{n}.rope_k")
        all_k = g.op("KVAppend", g.cache(f"keys.{n}", (*room, s.groups, s.depth), dtype), k, position, name=f"layer{n}.append_k")
        all_v = g.op("KVAppend", g.cache(f"values.{n}", (*room, s.groups, s.depth), dtype), v, position, name=f"layer{n}.append_v")
        mixed = g.op("Attention", q, all_k, all_v, position, name=f"layer{n}.attention").reshape(sequences, queries)
        x = g.op("Add", x, g.op("MulMat", mixed, w[f"mix.{n}"], name=f"layer{n}.mix"), name=f"layer{n}.sum1")
        h = g.op("RmsNorm", x, w[f"norm2.{n}"], epsilon=s.epsilon, name=f"layer{n}.norm2")
        gate = g.op("Silu", g.op("MulMat", h, w[f"gate.{n}"], name=f"layer{n}.gate"), name=f"layer{n}.silu")
        up = g.op("MulMat", h, w[f"up.{n}"], name=f"layer{n}.up")
        down = g.op("MulMat", g.op("Mul", gate, up, name=f"layer{n}.mul"), w[f"down.{n}"], name=f"layer{n}.down")
        x = g.op("Add", x, down, name=f"layer{n}.sum2")
    logits = g.op("MulMat", g.op("RmsNorm", x, w["last_norm"], epsilon=s.epsilon, name="last_norm_"), w["output"], name="logits")
    g.output("logits", logits)
    g.output("next", g.op("Argmax", logits, name="next"))
    return g


def reference(shape: Shape, weights: Arrays, tokens: list[int]) -> NDArray[np.float64]:
    """The logits after each token, in float64."""
    s = shape
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    turns = np.arange(len(tokens))[:, None] * s.theta ** (-np.arange(0, s.depth, 2) / s.depth)
    cosines, sines = np.cos(turns)[:, None], np.sin(turns)[:, None]

    def norm(x: Any, gain: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + s.epsilon) * gain

    def turned(x: Any) -> Any:
        a, b = x[..., : s.depth // 2], x[..., s.depth // 2 :]
        return np.concatenate([a * cosines - b * sines, a * sines + b * cosines], -1)

    x = w["embed"][tokens]
    queries, keys = s.heads * s.depth, s.groups * s.depth
    seen = np.tri(len(tokens), dtype=bool)
    for n in range(s.layers):
        qkv = norm(x, w[f"norm1.{n}"]) @ w[f"qkv.{n}"].T + w[f"qkv_bias.{n}"]
        q = turned(qkv[:, :queries].reshape(-1, s.heads, s.depth))
        k = turned(qkv[:, queries : queries + keys].reshape(-1, s.groups, s.depth)).repeat(s.heads // s.groups, 1)
        v = qkv[:, queries + keys :].reshape(-1, s.groups, s.depth).repeat(s.heads // s.groups, 1)
        scores = np.where(seen, np.einsum("ihd,jhd->hij", q, k) * s.depth**-0.5, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", e / e.sum(-1, keepdims=True), v).reshape(-1, queries)
        x = x + mixed @ w[f"mix.{n}"].T
        h = norm(x, w[f"norm2.{n}"])
        gate = h @ w[f"gate.{n}"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"up.{n}"].T)) @ w[f"down.{n}"].T
    return np.asarray(norm(x, w["last_norm"]) @ w["output"].T)


def decode(g: tw.TensorGraph, tokens: list[int], device: str, longest: int) -> list[Any]:
    """The logits after each token, by one recording that is replayed."""
    first = {"token": np.array(tokens[:1], np.int32), "position": np.zeros(1, np.int32)}
    step = g.capture(device, max_position=longest, token=first["token"], position=first["position"])
    found: list[Any] = []
    for position, token in enumerate(tokens):
        made = step(token=np.array([token], np.int32), position=np.array([position], np.int32))
        found.append(np.array(made["logits"], np.float64).reshape(-1))
    return found


def main() -> None:
    shape = Shape()
    weights = make_weights(shape, np.random.default_rng(0))
    tokens = [3, 14, 15, 9, 2, 6]
    wanted = reference(shape, weights, tokens)
    for place in tw.devices():
        found = decode(build(shape, weights), tokens, place.id, 16)
        error = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
        print(f"{place.id}: {len(tokens)} steps, largest error against float64 {error:.1e}")


if __name__ == "__main__":
    main()
