"""Recorded runs as CUDA graphs. In: the calls of a recording, all on one GPU; out: a graph whose inputs and results are exchanged at every
replay, or None where the calls cannot be one.

Capturing runs nothing. The arrays it is given are those of the recorded run and new ones for the results; afterwards the graph holds neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.api.graphs import Graph
from tilewright.api.recorded_run import Call, Part, Recording, Value, values_in
from tilewright.base.errors import TilewrightError
from tilewright.runtime import streams
from tilewright.runtime.device_array import DeviceArray, array_form
from tilewright.runtime.graph_ports import PortedGraph, ports_are_apart

FEWEST_LAUNCHES = 2
"""A single kernel is launched sooner by itself."""


@dataclass(frozen=True)
class Captured:
    """A graph, the values whose addresses it takes, and what is left to do outside it."""

    ported: PortedGraph
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    makers: tuple[Callable[[int], DeviceArray], ...]
    """Makes the array of each output, for work on a stream."""
    views: tuple[Call, ...]
    """Calls that give results from the outputs and inputs."""


def captured(recording: Recording, calls: Sequence[Call]) -> Captured | None:
    kernels = [call for call in calls if call.runner is not None]
    devices = {call.device for call in kernels}
    if not kernels or len(devices) != 1 or any(call.runner is None and not call.is_view for call in calls):
        return None
    device = kernels[0].device
    if device is None or device.kind != "cuda":
        return None
    values = [v for call in calls for v in (*values_in(list(call.arguments.values())), *call.results)]
    if not all(type(v.sample) is DeviceArray and v.sample.pointer % 16 == 0 for v in values):
        return None
    used = set(values)
    inputs = tuple(v for v in recording.inputs.values() if v in used)
    views = _views_of_results(recording, calls)
    needed = {*values_in(recording.result), *(v for call in views for v in values_in(list(call.arguments.values())))}
    outer = [call for call in kernels if needed & set(call.results)]
    outputs = tuple(v for call in outer for v in call.results)
    if any(array_form(v.sample).strides != _row_major(v.sample) for v in outputs):  # type: ignore[arg-type]
        return None
    return _capture(device, calls, outer, inputs, outputs, views)


def _capture(
    device: Any, calls: Sequence[Call], outer: Sequence[Call], inputs: tuple[Value, ...], outputs: tuple[Value, ...], views: tuple[Call, ...]
) -> Captured | None:
    from tilewright.api.cuda_calls import gpu_of

    gpu = gpu_of(device)
    samples: list[Any] = [v.sample for v in outputs]
    makers = tuple(_maker(gpu, sample) for sample in samples)
    stream = streams.current(gpu.ordinal) or 0
    made = {v: make(stream) for v, make in zip(outputs, makers, strict=True)}
    ports: list[Any] = [*(v.sample for v in inputs), *made.values()]
    if not ports_are_apart(ports):
        return None
    graph = Graph(device)
    try:
        with graph._record():
            _run(calls, outer, made, {v: v.sample for v in inputs})
    except TilewrightError as error:
        if error.code != "TW036":
            warnings.warn(f"a program is not captured as a graph and runs as single calls: {error}", RuntimeWarning, stacklevel=2)
        return None
    cuda = graph._cuda
    if cuda is None or not cuda.knows_all or cuda.node_count < FEWEST_LAUNCHES:
        graph.close()
        return None
    return Captured(PortedGraph(cuda, ports), inputs, outputs, makers, views)


def _run(calls: Sequence[Call], outer: Sequence[Call], made: dict[Value, DeviceArray], known: dict[Value, object]) -> None:
    """Make the calls, with results that leave the graph in memory from outside it."""
    for call in calls:
        arguments = {name: _found(part, known) for name, part in call.arguments.items()}
        if call in outer:
            out = tuple(made[v] for v in call.results)
            assert call.runner is not None and call.device is not None
            call.runner.run(arguments, call.device, out if call.several else out[0])
            known.update(zip(call.results, out, strict=True))
            continue
        result: Any = call.function(*arguments.values())
        known.update(zip(call.results, result if call.several else (result,), strict=True))


def _views_of_results(recording: Recording, calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls that are views and that results are, or are views of."""
    wanted, found = set(values_in(recording.result)), []
    for call in reversed(calls):
        if call.runner is None and wanted & set(call.results):
            found.append(call)
            wanted.update(values_in(list(call.arguments.values())))
    return tuple(reversed(found))


def _found(part: Part, known: dict[Value, object]) -> Any:
    if isinstance(part, Value):
        return known[part]
    if isinstance(part, list | tuple):
        return type(part)(_found(item, known) for item in part)
    return {key: _found(item, known) for key, item in part.items()} if isinstance(part, dict) else part


def _row_major(array: DeviceArray) -> tuple[int, ...]:
    from tilewright.runtime.device_array import row_major

    return row_major(array.shape)


def _maker(gpu: Any, sample: DeviceArray) -> Callable[[int], DeviceArray]:
    shape, dtype, form = sample.shape, sample.dtype, array_form(sample)

    def make(stream: int) -> DeviceArray:
        made: DeviceArray = gpu.empty(shape, dtype, stream)
        made.form = form
        return made

    return make
