"""`tilewright demo`, the decode step of `examples/decode_graph.py`: a tensor graph, captured once and replayed, on every device found.

In: the example and the devices. Out: a row for each device: the time of a step, and the largest error of its logits against float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from tilewright.base.errors import TilewrightError
from tilewright.cli import repository
from tilewright.cli.commands.demo_rows import DemoRow
from tilewright.execute.devices import Device, array_device

_TOKENS = [3, 14, 15, 9]
_TOLERANCE = 1e-4


def run_graph(places: list[Device], best_seconds: Callable[[Callable[[], object]], float]) -> Iterator[DemoRow]:
    """One row for each device; `best_seconds(call)` is the time of a call."""
    example = repository.load("examples/decode_graph.py", "tilewright_decode_graph")
    shape = example.Shape()
    weights = example.make_weights(shape, np.random.default_rng(0))
    wanted = example.reference(shape, weights, _TOKENS)
    for place in places:
        try:
            graph = example.build(shape, weights)
            found = example.decode(graph, _TOKENS, place.id, 16)
            last = {"token": np.array(_TOKENS[-1:], np.int32), "position": np.array([len(_TOKENS) - 1], np.int32)}
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
