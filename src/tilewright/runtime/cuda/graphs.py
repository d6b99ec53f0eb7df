"""Captured CUDA graphs. In: launches on a capturing stream; out: one object that replays them all, with arguments that can
change.

Capture is the driver's: whatever is queued on the capturing stream becomes a node, also by other libraries. For kernels
launched by a `CudaProgram` the node and the values of its parameters are noted, so that an array or a number that comes in by a
name can be exchanged in the instantiated graph, without capturing again. What a graph reads and writes stays alive as long as
the graph does.

The capture is of the relaxed kind: code may be loaded and memory be taken meanwhile. What cannot work (waiting for the stream,
copies to the host) is refused before the driver sees it, which would spoil the capture.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import TilewrightError
from tilewright.runtime.core.call_list import CallIndex, CallList, Extent, Move, Number, moved_extents
from tilewright.runtime.core.device import Buffer
from tilewright.runtime.core.graph import DeviceGraph
from tilewright.runtime.core.streams import capture_error, recorders
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.device_memory import MemoryBlock
from tilewright.runtime.memory.graph_memory import GraphArena

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext
    from tilewright.runtime.cuda.program import CudaProgram

_UPDATE_FAILED = 910
_ACTIVE = 1


@dataclass(frozen=True)
class CapturedCall:
    """One run of a program: its nodes, the values of its slots, and which of them came in by a name."""

    program: CudaProgram
    plan: Any
    values: list[Number]
    nodes: tuple[tuple[int, Any], ...]
    """Position in the plan's steps, and the node it became."""
    scalars: Mapping[int, str]
    """Slots of numbers that have a name."""
    extents: tuple[Extent, ...]
    """Memory it uses."""

    @property
    def array_count(self) -> int:
        return len(self.program.array_names())


class _Recording:
    """What one capture found out, and what it holds."""

    def __init__(self) -> None:
        self.calls: CallList[CapturedCall] = CallList()
        self.entries: dict[str, None] = {}
        """Names of the kernels."""
        self.inputs: set[Buffer] = set()
        """Memory it uses and does not own. Lent, so that `free` of an array does not take it away."""
        self.kept: dict[int, object] = {}
        """Other objects that must live, by identity."""
        self.after: set[int] = set()
        """Streams whose work replays come after."""
        self.known_streams: set[int] = set()
        """Streams it was replayed on."""
        self.nodes_known = True
        """Whether the nodes of the calls are those of the executable."""

    def index(self) -> CallIndex:
        """Where what is used."""
        return self.calls.used()

    def take_nodes(self, other: _Recording, alone: bool) -> None:
        """Its calls are those of another recording, with other parameters: so are the nodes. Sure only for work of one stream."""
        self.nodes_known = (
            alone
            and other.nodes_known
            and [(call.program, len(call.nodes)) for call in self.calls]
            == [(call.program, len(call.nodes)) for call in other.calls]
        )
        if self.nodes_known:
            self.calls = CallList(replace(call, nodes=old.nodes) for call, old in zip(self.calls, other.calls, strict=True))

    def lend(self, block: Buffer) -> None:
        if block not in self.inputs:
            self.inputs.add(block)
            block.lend()

    def release(self, array: DeviceArray) -> None:
        """An array came out of the graph: unless something else of its memory is in it, that is not needed any more."""
        owner = array.owner
        # The block of a foreign array is a new one each time it is wrapped.
        held = (
            {owner} & self.inputs
            if array.base is None
            else {b for b in self.inputs if b.base == owner.base and not b.nbytes}
        )
        span = (owner.base, owner.base + owner.nbytes) if owner.nbytes else bounds(array)
        if held and not self.index().uses_within(*span):
            self.inputs -= held
            for block in held:
                block.end_loan()
            self.kept.pop(id(array.base), None)

    def end(self) -> None:
        inputs, self.inputs = self.inputs, set()
        for block in inputs:
            block.end_loan()
        self.kept, self.calls = {}, CallList()


class _Handles:
    """The driver's objects of one graph. Apart, so that a finaliser can end them."""

    def __init__(self, device: CudaContext) -> None:
        self.device = device
        self.graph: Any = None
        self.executable: Any = None
        self.recording = _Recording()

    def end(self) -> None:
        """Destroy what there is; replays under way run to their end."""
        executable, self.executable = self.executable, None
        graph, self.graph = self.graph, None
        try:
            with self.device.active():
                _destroy(self.device, graph, executable)
        except TilewrightError:
            pass  # the context is lost, and the graph with it
        self.recording.end()


class CudaGraph(DeviceGraph):
    """A graph of one GPU. `origin` is the stream whose place it takes: what was queued there comes first."""

    def __init__(self, device: CudaContext, origin: int) -> None:
        self.device, self.origin = device, origin
        self.arena = GraphArena(device.pool, origin)
        self.shaped: set[str] = set()
        self.names: Mapping[str, str] = {}
        """Names of the numbers of the call under way, by parameter; set by whoever makes the call."""
        self.instantiations = 0
        self.node_count = 0
        self._knows_all = False
        self._handles = _Handles(device)
        self._finalizer = weakref.finalize(self, self._handles.end)
        self._finalizer.atexit = False
        self._lock = threading.Lock()
        """The driver leaves it to its callers that one thread at a time uses a graph."""
        self._open = _Recording()
        self._stream = 0
        self._thread = 0
        self._members: set[int] = set()
        """The streams that take part in the capture under way."""
        self._launch = device.driver.module.cuGraphLaunch

    # -- capture ------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Start capturing; the stream to queue work on."""
        device = self.device
        self._stream = device.take_capture_stream()
        try:
            with device.active():
                mode = device.driver.constant("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_RELAXED")
                device.call("cuStreamBeginCapture", self._stream, mode)
        except BaseException:
            device.return_capture_stream(self._stream)
            raise
        self._thread = threading.get_ident()
        self._open = _Recording()
        self.arena.begin()
        self.join(self._stream)
        return self._stream

    def thread_is_mine(self) -> bool:
        return self._thread == threading.get_ident()

    def join(self, stream: int) -> None:
        """Work of another stream, made to wait for one that takes part, belongs to the graph too."""
        self._members.add(stream)
        recorders[stream] = self

    def end(self) -> None:
        """Stop capturing and make it ready to run. Captured again, the executable takes over the new parameters if it can."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        device, handles = self.device, self._handles
        try:
            alone = len(self._members) == 1
            graph = self._stop()
            with device.active():
                try:
                    count = int(device.call("cuGraphGetNodes", graph)[1])
                    updated = handles.executable is not None and self._update(graph)
                    executable = handles.executable if updated else device.call("cuGraphInstantiate", graph, 0)[0]
                except BaseException:
                    _destroy(device, graph, None)
                    raise
                if updated:
                    # The executable keeps knowing its nodes by those it was made of.
                    self._open.take_nodes(handles.recording, alone)
                    _destroy(device, graph, None)
                else:
                    _destroy(device, handles.graph, handles.executable)
                    handles.graph, handles.executable = graph, executable
                    self.instantiations += 1
                self.node_count = count
        except BaseException:
            self._drop_open()
            raise
        recording, handles.recording = handles.recording, self._open
        recording.end()
        self._knows_all = self._open.nodes_known and self.node_count == sum(len(call.nodes) for call in self._open.calls)

    def abort(self) -> None:
        """Stop capturing and drop what was captured; a graph captured before stays as it is."""
        try:
            graph = self._stop()
        except TilewrightError:
            pass  # another error is on its way already
        else:
            with self.device.active():
                _destroy(self.device, graph, None)
        finally:
            self._drop_open()

    def _drop_open(self) -> None:
        self._open.end()
        self.arena.abort()

    def _stop(self) -> Any:
        device, stream = self.device, self._stream
        for member in self._members:
            recorders.pop(member, None)
        self._members.clear()
        with device.active():
            status, results = device.driver.attempt("cuStreamEndCapture", stream)
        device.return_capture_stream(stream)
        if status:
            name, meaning = device.driver.describe(status)
            raise capture_error(
                f"the capture on {device.label} was spoilt: cuStreamEndCapture gave {name} ({status}): {meaning}",
                "something in it waited for the stream, or used another stream that was not joined again by an event",
            )
        return results[0]

    def _update(self, graph: Any) -> bool:
        """Have the executable take over the parameters of a graph; whether it could, being of the same form."""
        device = self.device
        status, _ = device.driver.attempt("cuGraphExecUpdate", self._handles.executable, graph)
        if status and status != _UPDATE_FAILED:
            raise device.error("cuGraphExecUpdate", status)
        return not status

    # -- while capturing (streams.Recorder) ---------------------------------------------------------------------

    def take(self, nbytes: int, stream: int) -> MemoryBlock:
        return self.arena.take(nbytes, stream)

    def workspace(self, stream: int) -> Callable[[int], tuple[int, object]]:
        def take(nbytes: int) -> tuple[int, object]:
            block = self.take(nbytes, stream)
            return block.pointer, block

        return take

    def begin_after(self, stream: int) -> None:
        self._open.after.add(stream)

    def use(self, array: DeviceArray, stream: int) -> None:
        self.arena.used_on(array.owner, stream)
        self._keep(array, self._open)

    def _keep(self, item: object, recording: _Recording) -> None:
        if not isinstance(item, DeviceArray):
            recording.kept[id(item)] = item
        elif not self.arena.owns(item.owner):
            recording.lend(item.owner)
            if item.base is not None:
                recording.kept[id(item.base)] = item.base

    def launch(
        self,
        program: CudaProgram,
        arrays: Mapping[str, Any],
        values: Sequence[Number],
        plan: Any,
        steps: Sequence[Any],
        stream: int,
    ) -> None:
        named = {slot: self.names[name] for name, slot in program.scalar_slots().items() if name in self.names}
        self.shaped |= {name for parameter, name in self.names.items() if parameter in program.artifact.shaping}
        if named:
            self.names = {}
        written = {param.name for param in (*program.artifact.outputs, *program.artifact.in_place)}
        extents = tuple((*bounds(a), name in written) for name, a in arrays.items() if isinstance(a, DeviceArray) and a.size)
        self._launch_call(CapturedCall(program, plan, list(values), (), named, extents), steps, stream)

    def _launch_call(self, call: CapturedCall, steps: Sequence[Any], stream: int) -> None:
        nodes: list[tuple[int, Any]] = []
        for index, step in enumerate(steps):
            call.program.launch_steps((step,), stream)
            nodes.append((index, self._latest_node(stream)))
            self._open.entries[step[0].launch.entry] = None
        self._open.calls.append(replace(call, nodes=tuple(nodes)))

    def include(self, other: CudaGraph, stream: int) -> None:
        """Capture what another graph runs, as it is now."""
        if not other.knows_all:
            raise capture_error("a graph with work of other libraries in it cannot become part of another")
        self._open.kept[id(other)] = other
        for call in other._handles.recording.calls:
            with call.program.bound(call.values, call.plan) as steps:
                self._launch_call(replace(call, scalars={}), steps, stream)

    def _latest_node(self, stream: int) -> Any:
        """The node the next one on the stream will depend on: that of the launch just made."""
        driver = self.device.driver
        # Version 12 of the bindings has the form that knows programmatic edges under a name of its own.
        api = "cuStreamGetCaptureInfo_v3" if hasattr(driver.module, "cuStreamGetCaptureInfo_v3") else "cuStreamGetCaptureInfo"
        results: tuple[Any, ...] = self.device.call(api, stream)
        status, nodes = int(results[0]), results[3]
        if status != _ACTIVE or len(nodes) != 1:
            raise capture_error(f"the capture on {self.device.label} was spoilt by an earlier call of another library")
        return nodes[0]

    # -- replay -------------------------------------------------------------------------------------------------

    def replay(self, stream: int) -> None:
        """Queue all of it on `stream`."""
        device, recording = self.device, self._handles.recording
        if recorders and stream in recorders:
            recorders[stream].include(self, stream)
            return
        entered = device.enter()
        try:
            if stream not in recording.known_streams:
                self._first_on(stream, recording)
            with self._lock:
                status = int(self._launch(self._handles.executable, stream)[0])
            if status:
                raise device.error("cuGraphLaunch", status, f"graph of {self.node_count} nodes")
            for entry in recording.entries:
                device.log.note(stream, entry)
        finally:
            device.leave(entered)

    def _first_on(self, stream: int, recording: _Recording) -> None:
        for earlier in {self.origin, *recording.after}:
            if earlier != stream:
                self.device.order(stream, earlier)
        self.arena.replayed_on(stream)
        for block in recording.inputs:
            block.use_on(stream)
        recording.known_streams.add(stream)

    # -- other arguments ----------------------------------------------------------------------------------------

    @property
    def knows_all(self) -> bool:
        """Whether all nodes are launches made here, so that exchanging an array reaches every use of it."""
        return self._knows_all

    def conflict(self, arrays: Sequence[tuple[DeviceArray, DeviceArray]]) -> bool:
        """Whether after the exchange something would be written that something else uses and did not before."""
        return self._handles.recording.calls.conflict(_spans(arrays))

    def overlap(self, one: DeviceArray, other: DeviceArray) -> bool:
        (low, high), (start, stop) = bounds(one), bounds(other)
        return low < stop and start < high

    def exchange(self, arrays: Sequence[tuple[DeviceArray, DeviceArray]], numbers: Mapping[str, Number]) -> int:
        """Let nodes use the second array of a pair, of the same form, for the first, and other named numbers; how many nodes."""
        recording = self._handles.recording
        with self._lock, self.device.active():
            moves = _spans(arrays)
            try:
                count = 0
                for number, values in recording.calls.exchange(moves, numbers).items():
                    before = recording.calls[number]
                    call = replace(before, values=values, extents=moved_extents(before.extents, moves))
                    count += self._set_parameters(call)
                    recording.calls[number] = call
            except BaseException:
                recording.calls.forget_index()
                raise
            for _, new in arrays:
                self._keep(new, recording)
                for stream in recording.known_streams:
                    new.owner.use_on(stream)
            for old, _ in arrays:
                recording.release(old)
            return count

    def _set_parameters(self, call: CapturedCall) -> int:
        with call.program.bound(call.values, call.plan) as steps:
            for index, node in call.nodes:
                parameters = node_parameters(self.device, steps[index])
                self.device.call("cuGraphExecKernelNodeSetParams", self._handles.executable, node, parameters)
        return len(call.nodes)

    @property
    def nodes(self) -> int:
        return self.node_count

    @property
    def diverged(self) -> bool:
        return self.arena.diverged

    @property
    def reserved(self) -> int:
        return self.arena.reserved

    def close(self) -> None:
        """End it now. Replays under way run to their end; its memory goes back after them, unless results are still held."""
        self._finalizer()
        self.arena = GraphArena(self.device.pool, self.origin)

    @property
    def closed(self) -> bool:
        return self._handles.executable is None


def _destroy(device: CudaContext, graph: Any, executable: Any) -> None:
    if executable is not None:
        device.driver.attempt("cuGraphExecDestroy", executable)
    if graph is not None:
        device.driver.attempt("cuGraphDestroy", graph)


def node_parameters(device: CudaContext, step: Any) -> Any:
    """What the driver is told of a launch in an executable."""
    kernel, x, y, z = step[:4]
    parameters = device.driver.module.CUDA_KERNEL_NODE_PARAMS()
    parameters.func = kernel.function
    parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = x, y, z
    parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = kernel.launch.threads, 1, 1
    parameters.sharedMemBytes = kernel.launch.shared_bytes
    parameters.kernelParams = kernel.parameters
    return parameters


def bounds(array: DeviceArray) -> tuple[int, int]:
    """The address of the first byte of an array and the one behind its last."""
    steps = [(n - 1) * s * array.dtype.itemsize for n, s in zip(array.shape, array.strides)] if array.size else []
    low = array.pointer + sum(min(0, step) for step in steps)
    return low, array.pointer + sum(max(0, step) for step in steps) + array.dtype.itemsize


def _spans(arrays: Sequence[tuple[DeviceArray, DeviceArray]]) -> list[Move]:
    """Of each pair: the memory of the first, and how far away that of the second is."""
    return [(*bounds(old), new.pointer - old.pointer) for old, new in arrays]
