"""The transformer block of `transformer.py` as one graph: recorded once, then replayed for new inputs with a single launch.

    python examples/transformer_graph.py

On a GPU the seven launches of a block become one. The graph owns the memory between them; inputs are exchanged in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw
from transformer import block, make_weights, reference


def captured(x: Any, weights: dict[str, Any], batch: int, heads: int, device: str | None = None) -> tw.Graph:
    """The block on `x`. `graph.replay(x=other)` runs it on another input of the same form; `graph.result` is where results are."""

    def run(x: Any) -> Any:
        return block(x, weights, batch, heads, device)

    return tw.graph(run, x, device=device)


def main(rows: int = 128, features: int = 128, hidden: int = 512, batch: int = 2, heads: int = 4) -> None:
    rng = np.random.default_rng(0)
    weights = make_weights(rng, features, hidden)
    inputs = [rng.standard_normal((rows, features)).astype(np.float32) for _ in range(4)]
    device = "cuda" if any(found.kind == "cuda" for found in tw.devices()) else "cpu"
    there = {name: tw.to_device(value, device) for name, value in weights.items()}
    given = [tw.to_device(values, device) for values in inputs]
    graph = captured(given[0], there, batch, heads)
    print(f"{graph} on {device}")
    for values, array in zip(inputs, given, strict=True):
        found = np.asarray(graph.replay(x=array))
        print(f"largest error against float64: {np.abs(found - reference(values, weights, batch, heads)).max():.1e}")
    ways: dict[str, Callable[[], Any]] = {"calls": lambda: block(given[0], there, batch, heads), "graph": graph.replay}
    for label, call in ways.items():
        call()
        start = time.perf_counter()
        with tw.timed(device) as timer:
            for _ in range(100):
                call()
        queued = time.perf_counter() - start
        print(f"{label}: {timer.milliseconds * 10:.1f} us each, of which the host takes {queued * 1e4:.1f} us")


if __name__ == "__main__":
    main()
