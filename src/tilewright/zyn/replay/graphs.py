"""Recorded runs as graphs of a GPU. In: the calls of a recording, all on one GPU; out: a graph whose inputs and results are exchanged at every
replay, or None where the calls cannot be one.

Capturing runs nothing. The arrays it is given are those of the recorded run and new ones for the results; afterwards the graph holds neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.base.errors import TilewrightError
from tilewright.execute.devices import Device, array_device, kind_of
from tilewright.execute.graphs import Graph
from tilewright.runtime.core import streams
from tilewright.runtime.core.graph import ParametricReplay
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray, array_form, row_major
from tilewright.zyn.replay.trace import Part, Recording, TracedCall, TracedValue, values_in

FEWEST_LAUNCHES = 2
"""A single kernel is launched sooner by itself."""


@dataclass(frozen=True)
class Captured:
    """A graph, the values that are its ports, and what is left to do outside it."""

    ported: ParametricReplay
    inputs: tuple[TracedValue, ...]
    outputs: tuple[TracedValue, ...]
    makers: tuple[Callable[[int], DeviceArray], ...]
    """Makes the array of each output, for work on a stream."""
    views: tuple[TracedCall, ...]
    """Calls that give results from the outputs and inputs."""


def captured(recording: Recording, calls: Sequence[TracedCall]) -> Captured | None:
    kernels = [call for call in calls if call.runner is not None]
    devices = {call.device for call in kernels}
    if not kernels or len(devices) != 1 or any(call.runner is None and not call.is_view for call in calls):
        return None
    device = kernels[0].device
    if device is None or array_device(device) is None:
        return None
    values = [v for call in calls for v in (*values_in(list(call.arguments.values())), *call.results)]
    if not all(type(v.sample) is DeviceArray and v.sample.is_aligned(16) for v in values):
        return None
    used = set(values)
    inputs = tuple(v for v in recording.inputs.values() if v in used)
    views = _views_of_results(recording, calls)
    needed = {*values_in(recording.result), *(v for call in views for v in values_in(list(call.arguments.values())))}
    outer = [call for call in kernels if needed & set(call.results)]
    outputs = tuple(v for call in outer for v in call.results)
    if any(array_form(v.sample).strides != row_major(v.sample.shape) for v in outputs):  # type: ignore[attr-defined, arg-type]
        return None
    return _capture(device, calls, outer, inputs, outputs, views)


def _capture(
    device: Device, calls: Sequence[TracedCall], outer: Sequence[TracedCall], inputs: tuple[TracedValue, ...], outputs: tuple[TracedValue, ...], views: tuple[TracedCall, ...]
) -> Captured | None:
    gpu = array_device(device)
    assert gpu is not None
    samples: list[Any] = [v.sample for v in outputs]
    makers = tuple(_maker(gpu, sample) for sample in samples)
    stream = streams.current(gpu.ordinal) or 0
    made = {v: make(stream) for v, make in zip(outputs, makers, strict=True)}
    ports: list[Any] = [*(v.sample for v in inputs), *made.values()]
    if any(one.overlaps(other) for number, one in enumerate(ports) for other in ports[:number]):
        return None
    graph = Graph(device)
    try:
        with graph.record():
            _run(calls, outer, made, {v: v.sample for v in inputs})
    except TilewrightError as error:
        if error.code != "TW036":
            warnings.warn(f"a program is not captured as a graph and runs as single calls: {error}", RuntimeWarning, stacklevel=2)
        return None
    recorded = graph.captured
    usable = recorded is not None and recorded.knows_all and recorded.nodes >= FEWEST_LAUNCHES
    ported = kind_of(device).parametric(recorded, ports) if usable and recorded is not None else None
    if ported is None:
        graph.close()
        return None
    return Captured(ported, inputs, outputs, makers, views)


def _run(calls: Sequence[TracedCall], outer: Sequence[TracedCall], made: dict[TracedValue, DeviceArray], known: dict[TracedValue, object]) -> None:
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


def _views_of_results(recording: Recording, calls: Sequence[TracedCall]) -> tuple[TracedCall, ...]:
    """The calls that are views and that results are, or are views of."""
    wanted, found = set(values_in(recording.result)), []
    for call in reversed(calls):
        if call.runner is None and wanted & set(call.results):
            found.append(call)
            wanted.update(values_in(list(call.arguments.values())))
    return tuple(reversed(found))


def _found(part: Part, known: dict[TracedValue, object]) -> Any:
    if isinstance(part, TracedValue):
        return known[part]
    if isinstance(part, list | tuple):
        return type(part)(_found(item, known) for item in part)
    return {key: _found(item, known) for key, item in part.items()} if isinstance(part, dict) else part


def _maker(gpu: ArrayDevice, sample: DeviceArray) -> Callable[[int], DeviceArray]:
    shape, dtype, form = sample.shape, sample.dtype, array_form(sample)

    def make(stream: int) -> DeviceArray:
        made = gpu.empty(shape, dtype, stream)
        made.form = form
        return made

    return make
