"""Choosing the next token on the device: the largest logit, or a draw among the best ones.

In: logits of one token. Out: nodes that give its id, and the op that feeds it back. Everything reads its settings from device memory, so that one captured
step serves all of them.

A draw is the largest of `logit / temperature + g`, with g = -log(-log u) and u drawn by `tw.random` for (seed, position, word): that is a draw from the softmax,
and the same seed gives the same text on every device. `top_k` and `top_p` leave only words whose logit is above a bound. The bound is found digit by digit:
how far a logit lies below the largest one is a number of 24 bits (steps of 2^-18, 64 and more are alike); a histogram of eight bits says in which
of 256 parts the bound lies, and the next one looks into that part. Logits that are closer than a step are kept or left out together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.base.dtypes import f32, f64, i32, i64
from tilewright.execute.kernel import kernel
from tilewright.execute.random_arrays import random
from tilewright.frontend import words as tw
from tilewright.graphs.graph import TensorGraph
from tilewright.graphs.registry import NodeCall, OpRecord, TensorType, add_op
from tilewright.graphs.tensor import Tensor

PARTS = 256
"""Of each digit."""


@kernel
def advance(token: tw.InOut, position: tw.InOut, history: tw.InOut, chosen: tw.Array) -> None:
    """The chosen token is the next input, and goes to the history; the position moves on."""
    for i in tw.grid(1):
        history[position[i]] = tw.cast(chosen[i], i32)
        token[i] = tw.cast(chosen[i], i32)
        position[i] = position[i] + 1


@kernel
def advance_rows(token: tw.InOut, position: tw.InOut, history: tw.InOut, left: tw.InOut, chosen: tw.Array, stops: tw.Array) -> None:
    """The same for several sequences, as long as tokens are left to them. A token that stops a sequence is its last: whatever steps come behind it leave it as it is."""
    (count,) = chosen.shape
    (ends,) = stops.shape
    for i in tw.grid(count):
        if left[i] > 0:
            word = tw.cast(chosen[i], i32)
            history[i, position[i]] = word
            token[i] = word
            position[i] = position[i] + 1
            stopped = i32(0)
            for j in range(ends):
                stopped = max(stopped, i32(1) if stops[j] == word else i32(0))
            left[i] = left[i] - 1 if stopped == 0 else i32(0)


@kernel
def place_row(picked: tw.InOut, chosen: tw.Array, row: int) -> None:
    """The choice of one sequence among those of all."""
    for i in tw.grid(1):
        picked[row + i] = tw.cast(chosen[i], i32)


@kernel
def below_best(logits: tw.Array) -> tw.Array:
    """How far each logit lies below the largest, in steps of 2^-18; at most 2^24 - 1. NaN counts as the least."""
    (words,) = logits.shape
    out = tw.empty((words,), i32)
    best = -tw.inf
    for i in range(words):
        best = max(best, logits[i])
    for i in tw.grid(words):
        gap = (best - logits[i]) * 262144.0
        out[i] = tw.cast(gap, i32) if gap < 16777215.0 else 16777215
    return out


@kernel
def unit_weights(distance: tw.Array) -> tw.Array:
    """For `top_k`: every word counts as one."""
    (words,) = distance.shape
    out = tw.empty((words,), i64)
    for i in tw.grid(words):
        out[i] = 1
    return out


@kernel
def softmax_weights(distance: tw.Array, bound: tw.Array, settings: tw.Array) -> tw.Array:
    """For `top_p`: a word counts by its probability, as a whole number; those behind the bound do not."""
    (words,) = distance.shape
    out = tw.empty((words,), i64)
    for i in tw.grid(words):
        share = tw.exp(tw.cast(distance[i], f32) * (-1.0 / 262144.0) * settings[0])
        out[i] = tw.cast(share * 1099511627776.0, i64) if distance[i] <= bound[0] else 0
    return out


@kernel
def share_of(weights: tw.Array, settings: tw.Array) -> tw.Array:
    """The `top_p` part of all weights, at least 1."""
    (words,) = weights.shape
    out = tw.empty((1,), i64)
    for i in tw.grid(1):
        total = i64(0)
        for j in range(words):
            total += weights[j]
        out[i] = max(tw.cast(tw.cast(total, f64) * tw.cast(settings[1], f64), i64), i64(1))
    return out


@kernel
def digit_sums(distance: tw.Array, weights: tw.Array, prefix: tw.Array, shift: int) -> tw.Array:
    """Weights by digit, of the words whose digits before it are those of the bound."""
    (words,) = distance.shape
    out = tw.zeros((256,), i64)
    for i in range(words):
        if (distance[i] >> (shift + 8)) == prefix[0]:  # type: ignore[operator]
            out[(distance[i] >> shift) & 255] += weights[i]  # type: ignore[operator]
    return out


@kernel
def running_sums(sums: tw.Array) -> tw.Array:
    out = tw.empty((256,), i64)
    for i in tw.grid(256):
        total = i64(0)
        for j in range(256):
            if j <= i:
                total += sums[j]
        out[i] = total
    return out


@kernel
def next_digit(sums: tw.Array, prefix: tw.Array, missing: tw.Array) -> tw.Array:
    """The bound with one digit more: the first at which enough weights lie before it."""
    out = tw.empty((1,), i32)
    for i in tw.grid(1):
        count = i32(0)
        for j in range(256):
            count += i32(1) if sums[j] < missing[i] else i32(0)
        out[i] = prefix[i] * 256 + min(count, i32(255))
    return out


@kernel
def still_missing(sums: tw.Array, missing: tw.Array) -> tw.Array:
    """What is missing of the weights once those of earlier digits are taken."""
    out = tw.empty((1,), i64)
    for i in tw.grid(1):
        taken = i64(0)
        for j in range(256):
            taken = max(taken, sums[j] if sums[j] < missing[i] else i64(0))
        out[i] = missing[i] - taken
    return out


@kernel
def perturbed(logits: tw.Array, settings: tw.Array, seed: tw.Array, position: tw.Array) -> tw.Array:
    (words,) = logits.shape
    out = tw.empty((words,), f32)
    for i in tw.grid(words):
        u = random.uniform(seed[0], position[0], i) + 2.9802322387695312e-08
        out[i] = logits[i] * settings[0] - tw.log(-tw.log(u))
    return out


@kernel
def perturbed_best(logits: tw.Array, settings: tw.Array, seed: tw.Array, position: tw.Array, distance: tw.Array, bound: tw.Array) -> tw.Array:
    (words,) = logits.shape
    out = tw.empty((words,), f32)
    for i in tw.grid(words):
        u = random.uniform(seed[0], position[0], i) + 2.9802322387695312e-08
        drawn = logits[i] * settings[0] - tw.log(-tw.log(u))
        out[i] = drawn if distance[i] <= bound[0] else -tw.inf
    return out


def _op(name: str, inputs: tuple[str, ...], made: Any, rule: Callable[[NodeCall], TensorType]) -> None:
    add_op(OpRecord(f"Sample{name}", inputs, rule, made, doc=made.python.__doc__ or "a draw by temperature"))


def _like_first(dtype: Any) -> Callable[[NodeCall], TensorType]:
    return lambda call: TensorType(next(iter(call.inputs.values())).sizes, dtype)


_op("Distance", ("logits",), below_best, _like_first(i32))
_op("Units", ("distance",), unit_weights, _like_first(i64))
_op("Weights", ("distance", "bound", "settings"), softmax_weights, _like_first(i64))
_op("Share", ("weights", "settings"), share_of, lambda call: TensorType((1,), i64))
_op("Running", ("sums",), running_sums, _like_first(i64))
_op("Digit", ("sums", "prefix", "missing"), next_digit, lambda call: TensorType((1,), i32))
_op("Missing", ("sums", "missing"), still_missing, lambda call: TensorType((1,), i64))
_op("Perturb", ("logits", "settings", "seed", "position"), perturbed, _like_first(f32))
_op("PerturbBest", ("logits", "settings", "seed", "position", "distance", "bound"), perturbed_best, _like_first(f32))
add_op(OpRecord("SampleDigitSums", ("distance", "weights", "prefix", "shift"), lambda call: TensorType((PARTS,), i64), digit_sums, doc="weights by digit"))
add_op(OpRecord("Advance", ("token", "position", "history", "chosen"), lambda call: TensorType(call["token"].sizes, i32), advance, writes=("token", "position", "history"), aliases=True, doc="a chosen token is fed back"))
add_op(
    OpRecord(
        "AdvanceRows", ("token", "position", "history", "left", "chosen", "stops"), lambda call: TensorType(call["token"].sizes, i32), advance_rows,
        writes=("token", "position", "history", "left"), aliases=True, doc="chosen tokens of several sequences are fed back, unless they have stopped",
    )
)  # fmt: skip
add_op(OpRecord("SamplePlace", ("picked", "chosen", "row"), lambda call: TensorType(call["picked"].sizes, i32), place_row, writes=("picked",), aliases=True, doc="the choice of one sequence among those of all"))


def add_sampling(g: TensorGraph, logits: Tensor, position: Tensor, draws: bool, top_k: bool, top_p: bool, label: str = "sample", given: Mapping[str, Tensor] | None = None) -> Tensor:
    """Nodes that choose a token: the best one, or a draw; among the `top_k` best words, and those that have `top_p` of the probability. `given` are the inputs that say how, where
    several draws share them."""
    flat = logits.reshape(-1)
    if not draws:
        found: Tensor = g.op("Argmax", logits, name=f"{label}.argmax")
        return found.reshape(-1)
    inputs = given or sampling_inputs(g, top_k)
    settings, seed = inputs["settings"], inputs["seed"]
    if not top_k and not top_p:
        drawn = g.op("SamplePerturb", flat, settings, seed, position, name=f"{label}.draw")
    else:
        distance = g.op("SampleDistance", flat, name=f"{label}.distance")
        bound = None
        if top_k:
            bound = _bound(g, distance, g.op("SampleUnits", distance, name=f"{label}.units"), inputs["top_k"], f"{label}.k")
        if top_p:
            everything: Any = bound if bound is not None else g.weight(f"{label}.all", _whole(1 << 24))
            weights = g.op("SampleWeights", distance, everything, settings, name=f"{label}.weights")
            bound = _bound(g, distance, weights, g.op("SampleShare", weights, settings, name=f"{label}.share"), f"{label}.p")
        drawn = g.op("SamplePerturbBest", flat, settings, seed, position, distance, bound, name=f"{label}.draw")
    chosen: Tensor = g.op("Argmax", drawn.reshape((1, *drawn.sizes)), name=f"{label}.argmax")
    return chosen.reshape(-1)


def sampling_inputs(g: TensorGraph, top_k: bool, seeds: int = 1) -> dict[str, Tensor]:
    """What says how tokens are drawn: 1 / temperature and `top_p`, seeds, and `top_k`."""
    found: dict[str, Tensor] = {"settings": g.input("settings", (2,), f32), "seed": g.input("seed", (seeds,), i64)}
    return found | ({"top_k": g.input("top_k", (1,), i64)} if top_k else {})


def _whole(value: int) -> Any:
    import numpy as np

    return np.array([value], np.int32)


def _bound(g: TensorGraph, distance: Tensor, weights: Tensor, missing: Tensor, label: str) -> Tensor:
    """The least distance up to which words have the missing weights together."""
    prefix: Any = g.weight(f"{label}.prefix", _whole(0))
    for shift in (16, 8, 0):
        name = f"{label}{shift}"
        sums = g.op("SampleRunning", g.op("SampleDigitSums", distance, weights, prefix, shift, name=f"{name}.sums"), name=f"{name}.running")
        before = missing
        missing = g.op("SampleMissing", sums, before, name=f"{name}.missing")
        prefix = g.op("SampleDigit", sums, prefix, before, name=f"{name}.digit")
    found: Tensor = prefix
    return found
