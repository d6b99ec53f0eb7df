"""`tilewright demo`, the decode step of `examples/decode_graph.py`: a tensor graph, captured once and replayed, on every device found.

In: the example and the devices. Out: a row for each device: the time of a step, and the largest error of its logits against float64.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import numpy as np

from tilewright.base.errors import TilewrightError
from tilewright.cli import repository
from tilewright.cli.commands.demo_rows import DemoRow
from tilewright.execute.devices import Device, array_device, kind_of

_TOKENS = [3, 14, 15, 9]
_TOLERANCE = 1e-4


def run_graph(places: list[Device], best_seconds: Callable[[Callable[[], object]], float]) -> Iterator[DemoRow]:
    """One row for each device; `best_seconds(call)` is the time of a call."""
    example = repository.load("examples/decode_graph.py", "tilewright_decode_graph")
    for place in places:
        simulated = kind_of(place).simulated
        shape = example.Shape(layers=1 if simulated else 2)
        tokens = _TOKENS[:2] if simulated else _TOKENS
        weights = example.make_weights(shape, np.random.default_rng(0))
        wanted = example.reference(shape, weights, tokens)
        try:
            graph = example.build(shape, weights)
            start = time.perf_counter()
            found = example.decode(graph, tokens, place.id, 16)
            seconds = (time.perf_counter() - start) / len(tokens)
            if not simulated:
                last = {"token": np.array(tokens[-1:], np.int32), "position": np.array([len(tokens) - 1], np.int32)}
                seconds = best_seconds(functools.partial(_step, graph.capture(place.id, max_position=16, **last), array_device(place)))
        except TilewrightError as error:
            yield DemoRow("decode_graph", place.id, failure=str(error))
            continue
        largest = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
        yield DemoRow("decode_graph", place.id, seconds, error=largest, tolerance=_TOLERANCE)


def _step(step: Callable[[], object], runtime: object) -> None:
    step()
    if runtime is not None:
        runtime.synchronize()  # type: ignore[attr-defined]
