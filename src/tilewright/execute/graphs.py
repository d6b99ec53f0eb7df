"""Graphs: a sequence of calls recorded once and replayed as one.

    with tw.capture() as graph:          graph = tw.graph(step, x, 0.5)
        y = scale(x, v)                  y = graph.result
        z = norm(y)                      graph.replay()
    graph.replay()                       graph.update(x=other); graph.replay()

Recording runs nothing: results are arrays that a replay fills. On a GPU it is a stream capture, so calls of other libraries on
the capturing stream belong to it; on the CPU and the emulator it is a list of calls with their arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewright.base.errors import DeviceError, UserError, public_methods
from tilewright.execute.calls.named_numbers import named
from tilewright.execute.devices import Device, array_device, device_of, find_device, kind_of
from tilewright.execute.kernel import Kernel, leave_direct_ways
from tilewright.execute.streams import Stream, host_queue
from tilewright.runtime.core import streams
from tilewright.runtime.core.futures import Future, GpuFuture
from tilewright.runtime.core.graph import DeviceGraph, RecordedGraph
from tilewright.runtime.cpu.graphs import HostGraph
from tilewright.runtime.exchange.host_tensors import as_array
from tilewright.runtime.exchange.libraries import is_array
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray


@public_methods("__call__")
class Graph:
    """Recorded calls. `replay` runs them all; inputs given a name can be exchanged."""

    def __init__(self, device: Device, function: Callable[..., object] | None = None) -> None:
        self.device = device.id
        self._device, self._function = device, function
        self._inputs: dict[str, object] = {}
        self._recording = False
        self._gpu = array_device(device)
        self.captured: DeviceGraph | None = None
        """What the device captured, where it is one with memory of its own."""
        self._host: HostGraph | None = None
        self.result: Any = None
        """What the recorded function returned: arrays that each replay fills."""

    # -- recording ----------------------------------------------------------------------------------------------

    def input(self, name: str, value: Any) -> Any:
        """Give an array or a number a name, under which `update` exchanges it. Use what it returns inside the capture."""
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError.at("TW016", f"the name of an input is {name!r}", help="use a name such as 'x'")
        if name in self._inputs:
            raise UserError.at("TW016", f"the graph has an input '{name}' already")
        if isinstance(value, bool) or not (isinstance(value, int | float) or is_array(value)):
            raise UserError.at("TW009", f"the input '{name}' is a {type(value).__name__}, not an array or a number")
        self._inputs[name] = value
        return self[name]

    def __getitem__(self, name: str) -> Any:
        """An input, to be used inside the capture; a number from here is the input wherever a kernel takes it as it is."""
        if name not in self._inputs:
            raise UserError.at(
                "TW008", f"the graph has no input '{name}'", help=f"its inputs are {', '.join(self._inputs) or 'none'}"
            )
        value: Any = self._inputs[name]
        return named(value, name) if isinstance(value, int | float) else value

    @contextmanager
    def record(self) -> Iterator[None]:
        """Calls of this thread on the device are recorded inside."""
        if self._gpu is not None:
            with self._record_device(self._gpu):
                yield
        else:
            host = HostGraph(self.device)
            with streams.capturing(self.device, self.device, host_recorder=host):
                leave_direct_ways()
                yield
            self._host = host

    @contextmanager
    def _record_device(self, gpu: ArrayDevice) -> Iterator[None]:
        graph = self.captured or kind_of(self._device).graph(self._device, streams.current(gpu.ordinal) or 0)
        handle = graph.begin()
        try:
            with streams.capturing(gpu.label, self.device, gpu.ordinal), streams.use(gpu.ordinal, handle):
                leave_direct_ways()
                yield
        except BaseException:
            graph.abort()
            raise
        if graph.diverged:
            # The memory it has does not fit the new arguments.
            graph.abort()
            self.captured = None
        else:
            graph.end()
            self.captured = graph

    @property
    def stream(self) -> Stream:
        """While a GPU captures: the stream to run other libraries' work on, so that it belongs to the graph."""
        if not self._recording or self._gpu is None:
            raise DeviceError.at("TW033", "a graph has a stream while it is captured on a GPU")
        return Stream.of(streams.current(self._gpu.ordinal) or 0, self.device)

    @property
    def recorded(self) -> HostGraph | None:
        """The list of calls, where it is one of the CPU or the emulator."""
        return self._host

    # -- running ------------------------------------------------------------------------------------------------

    def replay(self, stream: object = None, asynchronous: bool = False, **inputs: Any) -> Any:
        """Run it, on `stream` or the current one, with other values for the inputs named here; gives `result`.

        On a GPU it is queued; on the CPU it is done when this returns. `asynchronous=True` gives a future of the result.
        """
        if inputs:
            self.update(**inputs)
        self._check_usable()
        if self.captured is not None and self._gpu is not None:
            gpu = self._gpu
            handle = (streams.current(gpu.ordinal) or 0) if stream is None else Stream.of(stream, self.device).handle
            self.captured.replay(handle)
            if asynchronous:
                streams.refuse_in_capture("an asynchronous replay", gpu.ordinal)
                return GpuFuture(self.result, gpu.event().record(handle), handle)
            return self.result
        assert self._host is not None
        host = self._host
        recorder = streams.host_recorder()
        if recorder is not None:
            recorder.add_graph(host)
        elif asynchronous or stream is not None:
            queue = host_queue(self._device) if stream is None else Stream.of(stream, self.device).queue
            assert queue is not None
            done: Future[Any] = queue.submit(self._replay_on_host)
            return done if asynchronous else done.result()
        else:
            host.replay()
        return self.result

    __call__ = replay

    def _replay_on_host(self) -> Any:
        assert self._host is not None
        self._host.replay()
        return self.result

    # -- other arguments ----------------------------------------------------------------------------------------

    def update(self, **inputs: Any) -> None:
        """Exchange inputs. Arrays of the same form and numbers change in place; else the function is recorded again.

        A graph captured with `with` has no function: there the new array must have the form of the old one.
        """
        self._check_usable()
        streams.refuse_in_capture("update()")
        for name, value in inputs.items():
            if name not in self._inputs:
                known = ", ".join(self._inputs) or "none: name them with graph.input(name, value)"
                raise UserError.at("TW008", f"the graph has no input '{name}'", help=f"its inputs are {known}")
            _check_kind(name, self._inputs[name], value)
        changed = {name: value for name, value in inputs.items() if value is not self._inputs[name]}
        obstacle = self._obstacle(changed)
        if not obstacle:
            pairs = [(self._array(self._inputs[n]), self._array(v)) for n, v in changed.items() if not isinstance(v, int | float)]
            numbers = {n: v for n, v in changed.items() if isinstance(v, int | float)}
            graph = self._graph()
            assert graph is not None
            graph.exchange(pairs, numbers)
            exchanged = {id(self._inputs[name]): value for name, value in changed.items()}
            self.result = _mapped(self.result, lambda leaf: exchanged.get(id(leaf), leaf))
            self._inputs.update(changed)
        elif self._function is None:
            raise UserError.at("TW016", obstacle, help="use tw.graph(function, ...), which can record it again")
        else:
            self.record_function({**self._inputs, **changed})

    def _obstacle(self, changed: Mapping[str, Any]) -> str:
        """Why inputs cannot be exchanged in place; '' where they can."""
        graph = self._graph()
        assert graph is not None
        pairs = []
        for name, value in changed.items():
            if isinstance(value, int | float):
                if self._function is not None:
                    # It may compute with the number.
                    return f"'{name}' goes through a function"
                if name in graph.shaped and value != self._inputs[name]:
                    return f"'{name}' decides the shape of what the graph computes, and would be {value} instead of {self._inputs[name]}"
                continue
            old, new = self._array(self._inputs[name]), self._array(value)
            if _form(old) != _form(new):
                return f"'{name}' was {_form_text(old)} and would be {_form_text(new)}"
            pairs.append((old, new))
        if pairs and not graph.knows_all:
            return "the graph has work of other libraries or copies in it, whose arguments are not known"
        if pairs and graph.conflict(pairs):
            return f"{', '.join(changed)} would share memory with something the graph writes"
        inputs = [self._inputs[name] for name in changed]
        views = [leaf for leaf in _leaves(self.result) if is_array(leaf) and not any(leaf is value for value in inputs)]
        if any(graph.overlap(self._array(view), old) for view in views for old, _ in pairs):
            return f"the result is a view of {', '.join(changed)}"
        return ""

    def _array(self, value: Any) -> Any:
        """An input as the recorder sees it."""
        if self._gpu is not None:
            return value if isinstance(value, DeviceArray) else self._gpu.wrap(value)
        return value if type(value) is np.ndarray else np.asarray(as_array(value))

    def record_function(self, values: dict[str, Any]) -> None:
        """Record the function with these arguments."""
        assert self._function is not None
        self._recording = True
        before = self.captured
        try:
            with self.record():
                made = self._call_function(values)
            if before is not None and self.captured is None:
                with self.record():
                    made = self._call_function(values)
        except BaseException:
            self.captured = before
            raise
        finally:
            self._recording = False
        self.result, self._inputs = made, values

    def _call_function(self, values: dict[str, Any]) -> Any:
        assert self._function is not None
        bound = inspect.signature(self._function).bind_partial()
        bound.arguments.update(values)
        return self._function(*bound.args, **bound.kwargs)

    # -- asking and ending --------------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names `update` knows."""
        return tuple(self._inputs)

    @property
    def nodes(self) -> int:
        """How many pieces of work a replay runs."""
        graph = self._graph()
        return graph.nodes if graph is not None else 0

    @property
    def memory(self) -> int:
        """Bytes of the device reserved for it."""
        return self.captured.reserved if self.captured is not None else 0

    @property
    def instantiations(self) -> int:
        """How often the driver had to build it: once, and again whenever an update changed more than parameters."""
        return self.captured.instantiations if self.captured is not None else 1

    def close(self) -> None:
        """Give up what it holds. Replays under way run to their end; arrays of its results stay good."""
        graph = self._graph()
        if graph is not None:
            graph.close()

    def _graph(self) -> RecordedGraph | None:
        return self.captured or self._host

    def _check_usable(self) -> None:
        graph = self._graph()
        if self._recording or graph is None:
            raise streams.capture_error("the graph is still being captured", "use it after the 'with' block")
        if graph.closed:
            raise DeviceError.at("TW033", "the graph was used after it was closed")

    def __repr__(self) -> str:
        inputs = f", inputs {', '.join(self._inputs)}" if self._inputs else ""
        return f"Graph({self.device}, {self.nodes} nodes{inputs})"


@contextmanager
def capture(device: str = "auto", **inputs: Any) -> Iterator[Graph]:
    """`with tw.capture() as graph:` records the calls this thread makes on the device.

    Keywords name inputs: with `capture(x=x)`, `graph["x"]` is what to use inside, and `graph.update(x=other)` exchanges it.
    """
    chosen = find_device(device)
    streams.refuse_in_capture("capture() inside a capture", help="replay one graph inside the capture of another")
    made = Graph(chosen)
    for name, value in inputs.items():
        made.input(name, value)
    made._recording = True
    try:
        with made.record():
            yield made
    finally:
        made._recording = False
    if not made.nodes:
        made.close()
        raise UserError.at(
            "TW016",
            f"nothing was captured on '{chosen.id}'",
            help="calls are captured on one device: name it with capture(device)",
        )


def graph(function: Callable[..., Any], *args: Any, device: str | None = None, **keywords: Any) -> Graph:
    """Record what `function(*args, **keywords)` does. Its parameters are the inputs, what it returns is `graph.result`."""
    if not callable(function):
        raise UserError.at("TW009", f"a {type(function).__name__} cannot be recorded", help="pass a function and its arguments")
    streams.refuse_in_capture("graph() inside a capture", help="replay one graph inside the capture of another")
    if isinstance(function, Kernel):
        values = function.bound(*args) if not keywords else {**dict(zip(function.parameter_names, args)), **keywords}
        wrapped: Callable[..., Any] = function
    else:
        try:
            values = dict(inspect.signature(function).bind(*args, **keywords).arguments)
        except TypeError as error:
            raise UserError.at(
                "TW016", f"the arguments do not fit {getattr(function, '__name__', 'the function')}: {error}"
            ) from None
        wrapped = function
    listed = [v for value in values.values() for v in (value if isinstance(value, tuple | list) else [value])]
    made = Graph(find_device(device or device_of(listed) or "auto"), wrapped)
    made.record_function(values)
    if not made.nodes:
        made.close()
        raise UserError.at(
            "TW016", f"the function did nothing on '{made.device}'", help="name the device with graph(function, ..., device=)"
        )
    return made


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """What a function returned, with each thing in its tuples, lists and dictionaries mapped."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, function) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, function) for key, item in value.items()}
    return function(value)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(value, found.append)
    return found


def _check_kind(name: str, old: object, new: object) -> None:
    if isinstance(old, int | float) and type(old) is not type(new):
        raise UserError.at("TW009", f"the input '{name}' is a number of type {type(old).__name__}, not {type(new).__name__}")
    if is_array(old) and not is_array(new):
        raise UserError.at("TW009", f"the input '{name}' is an array, not {type(new).__name__}")


def _form(array: Any) -> tuple[object, ...]:
    """All that code depends on."""
    if isinstance(array, DeviceArray):
        return array.device.ordinal, array.shape, array.strides, array.dtype, array.is_aligned(16), array.readonly
    return array.shape, array.strides, array.dtype, array.flags.aligned, array.flags.writeable


def _form_text(array: Any) -> str:
    strides = f", strides {tuple(array.strides)}"
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]{strides}"
