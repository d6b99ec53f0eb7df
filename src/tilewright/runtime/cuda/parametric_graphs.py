"""Captured graphs whose inputs and results are others at every replay.

In: a captured `CudaGraph` and its *ports*, the arrays that a replay brings along; out: `replay(addresses, stream)`. A replay has its own
executable of the graph for a combination of addresses seen lately, so calls that alternate between buffers, or get the memory of the result
before last, set no parameters: they are one launch. For other addresses the executable that was used longest ago is told them.
Unlike `CudaGraph`, which keeps what it uses, this holds no port: whoever replays has them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import TilewrightError
from tilewright.runtime.core.call_list import CallList
from tilewright.runtime.core.graph import ParametricReplay
from tilewright.runtime.cuda.graphs import CudaGraph, bounds, node_parameters

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext
    from tilewright.runtime.memory.device_array import DeviceArray

Addresses = tuple[int, ...]
MOST_EXECUTABLES = 4
"""Combinations of addresses that have an executable each."""


class _Executables:
    """The driver's objects, apart so that a finaliser can end them."""

    def __init__(self, device: CudaContext) -> None:
        self.device = device
        self.all: list[Any] = []

    def end(self) -> None:
        known, self.all = self.all, []
        try:
            with self.device.active():
                for executable in known:
                    self.device.driver.attempt("cuGraphExecDestroy", executable)
        except TilewrightError:
            pass  # the context is lost, and the graphs with it


class ParametricGraph(ParametricReplay):
    """A graph that is replayed with other arrays each time."""

    def __init__(self, graph: CudaGraph, ports: Sequence[DeviceArray]) -> None:
        self.graph, self.device = graph, graph.device
        self.ordinal = graph.device.ordinal
        recording = graph._handles.recording
        self._calls = CallList(recording.calls)
        self._places = [self._calls.uses(*bounds(port), port.pointer) for port in ports]
        """For each port: the call, the slot, and how far behind the port's own address the slot's one is."""
        self._captured: Addresses = tuple(port.pointer for port in ports)
        self._ready: dict[Addresses, Any] = {}
        """Executables, the one used last at the end."""
        self._latest: Any = None
        self._spare: Any = graph._handles.executable
        """The graph's own, until it is used."""
        self._parameters: dict[tuple[int, int, int], Any] = {}
        """Parameter objects by call, step and the address of the table they point to."""
        self._entries = tuple(recording.entries)
        self._launch = self.device.driver.module.cuGraphLaunch
        self._stream: int | None = None
        """The stream of the latest replay."""
        self._epoch, self._noted = -1, -1
        """When its kernels were last noted as running, and on which stream."""
        self._lock = threading.Lock()
        self._executables = _Executables(self.device)
        self._finalizer = weakref.finalize(self, self._executables.end)
        self._finalizer.atexit = False
        self._let_go(ports)

    def _let_go(self, ports: Sequence[DeviceArray]) -> None:
        """The graph holds its ports no longer; what else it uses stays."""
        recording = self.graph._handles.recording
        owners = {port.owner for port in ports}
        for block in recording.inputs & owners:
            block.end_loan()
        recording.inputs -= owners
        for port in ports:
            recording.kept.pop(id(port.base), None)

    def fits_text(self, name: str) -> str:
        return f"not {name}._pointer & 15"

    def input_text(self, name: str, stream: str) -> tuple[list[str], str]:
        lines = [f"o = {name}.owner", f"p{name} = {name}.launch_pointer({stream}) if o.freed or o.recent != {stream} else {name}._pointer"]
        return lines, f"p{name}"

    def output_text(self, name: str) -> str:
        return f"{name}._pointer"

    @property
    def nodes(self) -> int:
        return self.graph.node_count

    # -- replay -------------------------------------------------------------------------------------------------

    def replay(self, addresses: Addresses, stream: int) -> None:
        """Queue it on `stream`, with its ports at these addresses; the caller has the arrays noted as used there."""
        device = self.device
        entered = device.enter()
        try:
            with self._lock:
                executable = self._ready.get(addresses)
                if executable is not self._latest or executable is None or stream != self._stream:
                    executable = self._prepared(executable, addresses, stream)
                status = self._launch(executable, stream)[0]
            if status != 0:
                raise device.error("cuGraphLaunch", int(status), f"graph of {self.nodes} nodes")
            epoch = device.log.words[0]
            if epoch != self._epoch or stream != self._noted:
                # Until somebody waits, all replays on a stream are one to those who look for a fault.
                self._epoch, self._noted = epoch, stream
                for entry in self._entries:
                    device.log.note(stream, entry)
        finally:
            device.leave(entered)

    def _prepared(self, executable: Any, addresses: Addresses, stream: int) -> Any:
        """The executable for these addresses, made where there is none; work on another stream than before comes after what was there."""
        recording = self.graph._handles.recording
        if executable is None:
            executable = self._told(addresses)
        else:
            self._ready[addresses] = self._ready.pop(addresses)
        if stream not in recording.known_streams:
            self.graph._first_on(stream, recording)
        if self._stream is not None and stream != self._stream:
            # All executables use the same memory in between.
            self.device.order(stream, self._stream)
        self._latest, self._stream = executable, stream
        return executable

    def _told(self, addresses: Addresses) -> Any:
        """An executable that has these addresses."""
        device = self.device
        if self._spare is not None:
            executable, self._spare, before = self._spare, None, self._captured
        elif len(self._ready) < MOST_EXECUTABLES:
            executable = device.call("cuGraphInstantiate", self.graph._handles.graph, 0)[0]
            self._executables.all.append(executable)
            before = self._captured
        else:
            before = next(iter(self._ready))
            executable = self._ready.pop(before)
        try:
            self._tell(executable, before, addresses)
        except BaseException:
            # Nobody knows what it has now.
            if executable in self._executables.all:
                self._executables.all.remove(executable)
                device.driver.attempt("cuGraphExecDestroy", executable)
            raise
        self._ready[addresses] = executable
        return executable

    def _tell(self, executable: Any, before: Addresses, addresses: Addresses) -> None:
        changed = {
            number for port, (old, new) in enumerate(zip(before, addresses, strict=True)) if old != new for number, _, _ in self._places[port]
        }
        for number in sorted(changed):
            call = self._calls[number]
            values = list(call.values)
            for port, address in enumerate(addresses):
                for other, slot, offset in self._places[port]:
                    if other == number:
                        values[slot] = address + offset
            with call.program.bound(values, call.plan) as steps:
                for index, node in call.nodes:
                    parameters = self._parameters_of(number, index, steps[index])
                    self.device.call("cuGraphExecKernelNodeSetParams", executable, node, parameters)

    def _parameters_of(self, number: int, index: int, step: Any) -> Any:
        key = number, index, step[0].parameters
        found = self._parameters.get(key)
        if found is None:
            if len(self._parameters) >= 256:
                self._parameters.clear()
            found = self._parameters[key] = node_parameters(self.device, step)
        return found

    def close(self) -> None:
        """End it; replays under way run to their end."""
        self._finalizer()
        self._ready = {}
        self.graph.close()


def ports_are_apart(ports: Sequence[DeviceArray]) -> bool:
    """Whether no two arrays share memory, so that an address tells which of them is meant."""
    spans = sorted(bounds(port) for port in ports)
    return all(spans[i][1] <= spans[i + 1][0] for i in range(len(spans) - 1))
