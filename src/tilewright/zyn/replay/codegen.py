"""Recorded runs of ZynML programs as functions. In: a `Recording`; out: a function that makes the same calls with other inputs.

The function is Python code made for the recording: it looks whether the inputs are of the forms that were recorded (`MISS` where they are
not), then calls machine code and takes views, one line for each call, with nothing in between:

    def replay(device, x, weights):
        if FAST_PATH_OFF.value or device != D0: return MISS
        if not (type(x) is ndarray and x.shape == S0 and x.dtype == T0): return MISS
        v2 = k0(x, v1)
        return v2.reshape(C0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilewright.runtime.core.graph import ParametricReplay
from tilewright.runtime.core.streams import FAST_PATH_OFF, STREAM_NAMED, current
from tilewright.runtime.exchange.libraries import is_tensor
from tilewright.runtime.memory.device_array import DeviceArray, array_form, view_taker
from tilewright.zyn.host.values import Unread
from tilewright.zyn.replay.graphs import captured
from tilewright.zyn.replay.trace import NotRecorded, Part, Path, Recording, TracedCall, TracedValue, values_in
from tilewright.zyn.replay.types import MISS, Replay


class CodeText:
    """Python code under way: its lines, and the objects they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"MISS": MISS, "FAST_PATH_OFF": FAST_PATH_OFF, "ndarray": np.ndarray, "DeviceArray": DeviceArray}

    def name(self, letter: str, value: object) -> str:
        """A name for an object."""
        made = f"{letter}{len(self.names)}"
        self.names[made] = value
        return made

    def function(self, head: str) -> Replay:
        text = "\n    ".join([head, *self.lines])
        exec(compile(text, "<recorded calls>", "exec"), self.names)
        made: Replay = self.names["replay"]
        return made


def linked(recording: Recording, device: str | None, only: str | None) -> Replay:
    """The function: `replay(device, *inputs)` gives all results by name, or the one named `only`."""
    if only is not None:
        recording.result = recording.result[only]
    text = CodeText()
    parameters = add_guards(text, recording, device)
    calls = recording.needed()
    add_graph(text, recording, calls)
    last_use = _last_uses(calls, recording)
    for index, call in enumerate(calls):
        add_call(text, call)
        done = [v for v in {*values_in(list(call.arguments.values())), *call.results} if last_use[v] == index]
        if done:
            text.lines.append("del " + ", ".join(sorted(variable(v) for v in done)))
    text.lines.append(f"return {expression(text, recording.result)}")
    return text.function(f"def replay({', '.join(['device', *parameters])}):")


def variable(value: TracedValue) -> str:
    return f"v{value.number}"


def _last_uses(calls: Sequence[TracedCall], recording: Recording) -> dict[TracedValue, int]:
    """The call after which nobody needs a value."""
    found: dict[TracedValue, int] = {}
    for index, call in enumerate(calls):
        for value in (*values_in(list(call.arguments.values())), *call.results):
            found[value] = index
    return found | dict.fromkeys(values_in(recording.result), len(calls))


def expression(text: CodeText, part: Part) -> str:
    if isinstance(part, TracedValue):
        return variable(part)
    if isinstance(part, tuple) and values_in(part):
        return "(" + "".join(f"{expression(text, item)}, " for item in part) + ")"
    if isinstance(part, list):
        return "[" + ", ".join(expression(text, item) for item in part) + "]"
    if isinstance(part, dict):
        return "{" + ", ".join(f"{key!r}: {expression(text, item)}" for key, item in part.items()) + "}"
    return text.name("C", part)


# -- inputs -----------------------------------------------------------------------------------------------------------


def add_guards(text: CodeText, recording: Recording, device: str | None) -> list[str]:
    """Lines that refuse inputs of other forms, and take those in records and lists out of them; the parameters of the function."""
    parameters = {name: f"a{index}" for index, name in enumerate(recording.names)}
    places: dict[Path, str] = {(name,): place for name, place in parameters.items()}
    text.lines.append(f"if FAST_PATH_OFF.value or device != {text.name('D', device)}: return MISS")
    paths = [*recording.containers, *recording.constants, *recording.inputs, *(path for _, path in recording.same)]
    for path in sorted(paths, key=len):
        if len(path) > 1:
            places[path] = f"p{len(places)}"
            inside, key = places[path[:-1]], path[-1]
            text.lines.append(f"{places[path]} = {inside}[{key}]" if isinstance(key, int) else f"{places[path]} = {inside}.get({key!r}, MISS)")
        place = places[path]
        if path in recording.containers:
            kind, length = recording.containers[path]
            text.lines.append(f"if type({place}) is not {kind.__name__} or len({place}) != {length}: return MISS")
        elif path in recording.constants:
            value = recording.constants[path]
            sign = f" or str({place}) != {str(value)!r}" if isinstance(value, float | np.floating) and value == 0 else ""
            text.lines.append(f"if type({place}) is not {text.name('T', type(value))} or {place} != {text.name('C', value)}{sign}: return MISS")
        elif path in recording.inputs:
            text.lines.append(f"if {_mismatch(text, place, recording.inputs[path].sample)}: return MISS")
            text.lines.append(f"{variable(recording.inputs[path])} = {place}")
    text.lines += [f"if {places[first]} is not {places[second]}: return MISS" for first, second in recording.same]
    return list(parameters.values())


def _mismatch(text: CodeText, place: str, sample: Any) -> str:
    """Whether an array is of another form. Strides do not count: calls take all there are."""
    shape = text.name("S", sample.shape)
    if type(sample) is np.ndarray:
        return f"type({place}) is not ndarray or {place}.shape != {shape} or {place}.dtype != {text.name('T', sample.dtype)}"
    if type(sample) is DeviceArray:
        other = f"{place}.shape != {shape} or {place}.dtype is not {text.name('T', sample.dtype)} or {place}.device is not {text.name('G', sample.device)}"
        return f"type({place}) is not DeviceArray or {place}.form is not {text.name('F', array_form(sample))} and ({other})"
    if is_tensor(sample):
        kind, dtype, device = text.name("T", type(sample)), text.name("T", sample.dtype), text.name("G", sample.device)
        return f"type({place}) is not {kind} or {place}.shape != {shape} or {place}.dtype is not {dtype} or {place}.device != {device}"
    raise NotRecorded(f"an input is a {type(sample).__name__}")


# -- a graph ----------------------------------------------------------------------------------------------------------


def add_graph(text: CodeText, recording: Recording, calls: Sequence[TracedCall]) -> None:
    """Where all calls could be captured as one graph of a GPU: lines that replay it for inputs with the strides it was captured with. A result
    is new each time, as those of single calls are: it is taken before, and the graph is told of it."""
    graph = captured(recording, calls)
    if graph is None:
        return
    forms = [_fits(text, variable(v), v.sample, graph.ported) for v in graph.inputs]
    text.names |= {"array_form": array_form, "STREAM_NAMED": STREAM_NAMED, "current": current, "replay_graph": graph.ported.replay}
    text.lines.append(f"if {' and '.join(forms) or 'True'}:")
    lines = [f"s = (current({graph.ported.ordinal}) or 0) if STREAM_NAMED.value else 0"]
    ports: list[str] = []
    for value in graph.inputs:
        prepared, port = graph.ported.input_text(variable(value), "s")
        lines += prepared
        ports.append(port)
    for value, make in zip(graph.outputs, graph.makers, strict=True):
        lines.append(f"{variable(value)} = {text.name('m', make)}(s)")
        ports.append(graph.ported.output_text(variable(value)))
    lines.append(f"replay_graph(({', '.join(ports)},), s)")
    views = CodeText()
    views.names = text.names
    for call in graph.views:
        add_call(views, call)
    lines += [*views.lines, f"return {expression(text, recording.result)}"]
    text.lines += ["    " + line for line in lines]


def _fits(text: CodeText, name: str, sample: Any, ported: ParametricReplay) -> str:
    return f"({name}.form or array_form({name})) is {text.name('F', array_form(sample))} and {ported.fits_text(name)}"


# -- calls ------------------------------------------------------------------------------------------------------------


def add_call(text: CodeText, call: TracedCall) -> None:
    targets = ", ".join(variable(v) for v in call.results) + ("," if call.several and len(call.results) == 1 else "")
    text.lines.append(f"{targets} = {_view(text, call) or _called(text, call)}")


def _called(text: CodeText, call: TracedCall) -> str:
    arguments = ", ".join(expression(text, part) for part in call.arguments.values())
    if call.runner is None:
        return f"{text.name('h', call.function)}({arguments})"
    return f"{_Entry(text, call).name}({arguments})"


def _view(text: CodeText, call: TracedCall) -> str:
    """A view without the checks that the recorded run has made; '' for other calls."""
    array = call.arguments.get("x")
    if not isinstance(array, TracedValue) or type(array.sample) not in (np.ndarray, DeviceArray):
        return ""
    source, made = variable(array), [value.sample for value in call.results]
    if isinstance(array.sample, DeviceArray):
        if not all(isinstance(view, DeviceArray) and view.owner is array.sample.owner for view in made):
            return ""
        rest = "".join(f", {expression(text, part)}" for name, part in call.arguments.items() if name != "x")
        return f"{text.name('h', view_taker(array.sample, made, call.several, call.function))}({source}{rest})"  # type: ignore[arg-type]
    if call.label == "reshape":
        return f"{source}.reshape({text.name('S', made[0].shape)})"  # type: ignore[attr-defined]
    if call.label == "T" or (call.label == "transpose" and "axes" not in call.arguments):
        return f"{source}.transpose()"
    if call.label == "transpose" and not values_in(call.arguments["axes"]):
        axes = call.arguments["axes"]
        return f"{source}.transpose({', '.join(str(int(axis)) for axis in (axes if isinstance(axes, list | tuple) else [axes]))})"
    if call.label == "split":
        axis = int(call.arguments.get("axis", 0)) % len(array.sample.shape)  # type: ignore[attr-defined]
        pieces, first = [], 0
        for part in made:
            size = part.shape[axis]  # type: ignore[attr-defined]
            pieces.append(f"{source}[{text.name('I', (*(slice(None),) * axis, slice(first, first + size)))}]")
            first += size
        return f"({', '.join(pieces)},)"
    return ""


class _Entry:
    """The way into machine code for a compute block: it makes the calls it knows itself, others come back here."""

    def __init__(self, text: CodeText, call: TracedCall) -> None:
        self._general = call.function
        self._runner = call.runner
        self._names = text.names
        self._device = call.device
        self._fallback = self.fallback
        values = {name: _sample(part) for name, part in call.arguments.items()}
        self.name = text.name("k", self._fallback)
        self._names[self.name] = self._found(call, values) or self._fallback

    def _found(self, call: TracedCall, values: dict[str, object]) -> Callable[..., object] | None:
        assert call.runner is not None and call.device is not None
        return call.runner.calls(call.device).entry_for(values, call.device, self._fallback)

    def fallback(self, *values: object) -> object:
        """The general way; what was learnt from it is used from now on."""
        result = self._general(*values)
        if self._device is not None and self._runner is not None and self._runner.calls(self._device).learns:
            self._names[self.name] = self._runner.entry(self._device, self._fallback) or self._fallback
        return result


def _sample(part: Part) -> object:
    """An argument as it was when it was recorded."""
    if not isinstance(part, TracedValue):
        return part
    return part.sample.value if isinstance(part.sample, Unread) else part.sample
