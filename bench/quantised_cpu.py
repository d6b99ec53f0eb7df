"""Products of packed weights and a vector on the CPU, against a plain kernel that reads the same bytes.

In: whether the run is quick. Out: cases for `harness.measure`. Copies of the weights are taken in turn, more than caches hold, as a model's layers are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

BYTES = 192 << 20
"""What all copies have together."""
N = 4096


def gemv(w: tw.Array, x: tw.Array) -> tw.Array:
    rows, cols = w.shape
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        total = 0.0
        for k in range(cols):
            total += w[i, k] * x[k]
        out[i] = total
    return out


def read(words: tw.Array) -> tw.Array:
    rows, cols = words.shape
    out = tw.empty((rows,), tw.u64)
    for i in tw.grid(rows):
        total = tw.u64(0)
        for k in range(cols):
            total += words[i, k]
        out[i] = total
    return out


def _case(dtype: tw.DType, activations: str, quick: bool) -> Case:
    size = N * N // dtype.block * dtype.block_bytes

    def prepare() -> Prepared:
        random = np.random.default_rng(1)
        few = tw.quantize(random.standard_normal((64, N)).astype(np.float32), dtype).blocks
        count = 2 if quick else max(2, -(-BYTES // size))
        weights = [tw.PackedArray(np.ascontiguousarray(np.tile(few, (N // 64, 1, 1))), dtype) for _ in range(count)]
        words = [w.blocks.reshape(N, -1).view(np.uint64) for w in weights]
        x = random.standard_normal(N).astype(np.float32)
        expected = tw.dequantize(weights[0][:64]).astype(np.float64) @ x
        product, plain = tw.kernel(device="cpu", activations=activations)(gemv), tw.kernel(device="cpu")(read)
        ours, theirs = itertools.cycle(weights), itertools.cycle(words)

        def verify(slot: int, returned: object, variant: Variant) -> str:
            if variant.name != OURS:
                return ""
            # Rounding activations to eight bits errs by about a hundredth of their size, at random.
            worst = float(np.abs(np.asarray(returned)[:64] - expected).max())
            return "" if worst < (3.0 if activations else 1e-3) else f"off by {worst:.2g}"

        runs: dict[str, Callable[[], Any]] = {OURS: lambda: product(next(ours), x), "plain read": lambda: plain(next(theirs))}
        return Prepared([Variant(name, lambda _, run=run: run(), returns=True) for name, run in runs.items()], lambda: None, verify)  # type: ignore[misc]

    label = f"{dtype}, activations {activations or 'f32'}"
    return Case("gemv", (N, N), label, size, prepare, Bar(0.8))


def cpu_cases(quick: bool) -> list[Case]:
    formats = (tw.q8_0, tw.q4_k, tw.q6_k, tw.q5_0, tw.q4_0)
    return [_case(dtype, activations, quick) for dtype in formats for activations in ("q8", "")]
