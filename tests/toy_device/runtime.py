"""The toy device's runtime: memory behind opaque handles, copies, and queues that a thread of its own works off.

In: artifacts of kind 'toy', arrays, work for streams. Out: the same work, done later and in order. There is no address anywhere: memory
is a table of handles, each with its bytes, and an array is a handle with an offset. The thread is the "hardware": it alone touches the
table's bytes, and the host waits for it wherever it reads or writes them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.limits import Limits
from tilewright.base.sizes import product
from tilewright.runtime.core.device import Buffer, DeviceEvent, LoadedProgram, Number, Transfer, Workspace, new_ordinal
from tilewright.runtime.memory.array_views import reach
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray
from toy_device.machine import launch, load_code
from toy_device.target import TOY

MEMORY = 64 << 20
Work = Callable[[], object]


class Handle:
    """What the hardware calls a piece of its memory. It says nothing and can be asked nothing."""

    __slots__ = ()

    def __index__(self) -> int:
        raise TypeError("the memory of the toy device has no addresses")

    __int__ = __index__


class ToyBuffer(Buffer):
    """A handle, as arrays hold it."""

    __slots__ = ("_loans", "device", "freed", "handle", "host", "nbytes", "recent", "stream", "trace", "users")

    def __init__(self, device: ToyDevice, nbytes: int, stream: int) -> None:
        self.device, self.nbytes, self.stream, self.recent = device, nbytes, stream, stream
        self.freed, self.host, self._loans = True, 0, 0
        self.trace: str | None = None
        self.users: set[int] = set()
        self.handle = device.new_handle(nbytes)
        self.freed = False

    def use_on(self, stream: int) -> None:
        self.recent = stream
        if stream != self.stream:
            self.users.add(stream)

    def note_line(self, line: str) -> None:
        self.trace = line

    def lend(self) -> None:
        self._loans += 1

    def end_loan(self) -> None:
        self._loans -= 1
        if self.freed and not self._loans:
            self._drop()

    def free(self) -> None:
        if not self.freed:
            self.freed = True
            if not self._loans:
                self._drop()

    def _drop(self) -> None:
        """The memory goes when the work that uses it is done."""
        device, handle = self.device, self.handle
        for stream in self.users:
            device.order(self.stream, stream)
        device.queue(self.stream, lambda: device.drop_handle(handle), always=True)

    def __del__(self) -> None:
        if not getattr(self, "freed", True):
            self.free()


class ToyEvent(DeviceEvent):
    """A point in a queue: the number of its piece of work."""

    def __init__(self, device: ToyDevice, timing: bool) -> None:
        self.device, self.timing, self.captured, self.stream = device, timing, False, 0
        self._reached = threading.Event()
        self._when = 0.0
        self._reached.set()

    def record(self, stream: int) -> ToyEvent:
        self.stream, self._reached = stream, threading.Event()
        reached = self._reached

        def reach_it() -> None:
            self._when = time.perf_counter()
            reached.set()

        self.device.queue(stream, reach_it, always=True)
        return self

    def done(self) -> bool:
        self.device.raise_failure()
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()
        self.device.raise_failure()

    def milliseconds(self, start: Any) -> float:
        if not (self.timing and start.timing):
            raise UserError.at("TW033", "the time between events made with timing=False is not known")
        return float(self._when - start._when) * 1e3

    @property
    def reached(self) -> threading.Event:
        return self._reached


class ToyTransfer(Transfer):
    """A copy under way."""

    def __init__(self, event: ToyEvent, *kept: object) -> None:
        self._event, self._kept = event, kept

    def done(self) -> bool:
        return self._event.done()

    def wait(self) -> None:
        self._event.synchronize()
        self._kept = ()


class _Hardware:
    """The thread that works off the queues, one piece of work of any stream after another."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[int, deque[tuple[threading.Event | None, Work, bool]]] = {0: deque()}
        self.memory: dict[int, bytearray] = {}
        self.busy = -1
        self.failure: BaseException | None = None
        threading.Thread(target=self._work, name="toy-hardware", daemon=True).start()

    def _ready(self) -> tuple[int, Work, bool] | None:
        for stream, waiting in self.queues.items():
            if waiting and (waiting[0][0] is None or waiting[0][0].is_set()):
                _, work, always = waiting.popleft()
                return stream, work, always
        return None

    def _work(self) -> None:
        while True:
            with self.changed:
                found = self._ready()
                while found is None:
                    # An event of another stream is set outside the lock, so look again after a moment.
                    self.changed.wait(0.001 if any(self.queues.values()) else None)
                    found = self._ready()
                self.busy, work, always = found
            try:
                if self.failure is None or always:
                    work()
            except BaseException as error:  # a fault ends the device, as on real ones
                self.failure = error
            # What the work kept alive must be gone before anybody hears that it is done.
            del work, found
            with self.changed:
                self.busy = -1
                self.changed.notify_all()

    def idle(self, stream: int | None) -> bool:
        if stream is None:
            return self.busy < 0 and not any(self.queues.values())
        return self.busy != stream and not self.queues.get(stream)


class ToyDevice(ArrayDevice):
    """One toy device."""

    def __init__(self, number: int = 0) -> None:
        self.id = f"toy:{number}"
        self.label = f"{self.id} (eight lanes)"
        self.ordinal = new_ordinal()
        self.hardware = _Hardware()
        self._handles: dict[Handle, bytearray] = {}
        self._numbers = itertools.count(1)
        self.launched = 0
        """Launches so far."""

    def queue(self, stream: int, work: Work, after: threading.Event | None = None, always: bool = False) -> None:
        """Put work behind what a stream has; `always`: also after a fault."""
        with self.hardware.changed:
            self.hardware.queues[stream].append((after, work, always))
            self.hardware.changed.notify_all()

    def raise_failure(self) -> None:
        if self.hardware.failure is not None:
            raise DeviceError.at("TW032", f"{self.label} failed: {self.hardware.failure!r}") from self.hardware.failure

    @property
    def lost(self) -> str:
        return repr(self.hardware.failure) if self.hardware.failure is not None else ""

    # -- memory -------------------------------------------------------------------------------------------------

    def new_handle(self, nbytes: int) -> Handle:
        if sum(map(len, self._handles.values())) + nbytes > MEMORY:
            raise DeviceError.at("TW031", f"out of memory on {self.label}: asked for {nbytes} bytes of {MEMORY}")
        handle = Handle()
        # What is read before it is written is wrong, and looks so.
        self._handles[handle] = bytearray(b"\xff" * nbytes)
        return handle

    def drop_handle(self, handle: Handle) -> None:
        self._handles.pop(handle, None)

    def free_memory(self) -> tuple[int, int]:
        return MEMORY - sum(map(len, self._handles.values())), MEMORY

    def limits(self) -> Limits:
        return Limits(
            threads_per_block=TOY.max_threads, block=(TOY.max_threads, 1, 1), grid=TOY.max_grid, warp_size=TOY.warp_size,
            shared_per_block=TOY.max_shared, registers_per_thread=TOY.max_registers, vector_bytes=TOY.vector_bytes,
        )  # fmt: skip

    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        extents = tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise UserError.at("TW004", f"an array cannot have shape {extents}")
        return DeviceArray.at(self, ToyBuffer(self, prod(extents) * dtype.itemsize, stream), 0, extents, dtype)

    def octets(self, array: DeviceArray) -> np.ndarray:
        """The bytes from an array's first element to the end of its buffer. For the hardware's thread."""
        buffer = array.owner
        assert isinstance(buffer, ToyBuffer)
        return np.frombuffer(self._handles[buffer.handle], np.uint8)[array.offset :]

    def elements(self, array: DeviceArray) -> np.ndarray:
        """An array's elements where they lie. For the hardware's thread."""
        buffer = array.owner
        assert isinstance(buffer, ToyBuffer)
        if not array.size:
            return np.empty(array.shape, array.dtype.numpy)
        low, _ = reach(array.shape, array.strides)
        size = array.dtype.itemsize
        assert array.offset + low * size >= 0
        strides = tuple(s * size for s in array.strides)
        return np.ndarray(array.shape, array.dtype.numpy, self._handles[buffer.handle], array.offset, strides)

    def read(self, array: DeviceArray, out: np.ndarray) -> None:
        self.copy_out_async(out, array, self._settled(array)).wait()

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        self.copy_in_async(array, values, self._settled(array)).wait()

    def _settled(self, array: DeviceArray) -> int:
        """The array's home stream, after the work of all streams that use it."""
        home, *others = array.streams()
        for other in others:
            self.order(home, other)
        return home

    def copy_in_async(self, target: DeviceArray, source: np.ndarray, stream: int = 0) -> ToyTransfer:
        target.check_usable()
        values = np.array(source).view(np.uint8).reshape(-1) if source.size else np.empty(0, np.uint8)
        target.owner.use_on(stream)

        def move() -> None:
            self.octets(target)[: values.size] = values

        self.queue(stream, move)
        return ToyTransfer(self.event().record(stream), target)

    def copy_out_async(self, target: np.ndarray, source: DeviceArray, stream: int = 0) -> ToyTransfer:
        source.check_usable()
        source.owner.use_on(stream)

        def move() -> None:
            if target.size:
                target.reshape(-1).view(np.uint8)[...] = self.octets(source)[: target.nbytes]

        self.queue(stream, move)
        return ToyTransfer(self.event().record(stream), source, target)

    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        target.check_usable()
        source.check_usable()
        if source.device is not self:
            target.copy_from(source.numpy())
            return
        target.owner.use_on(stream)
        source.owner.use_on(stream)

        def move() -> None:
            self.elements(target)[...] = self.elements(source)

        self.queue(stream, move)

    def fill(self, array: DeviceArray, pattern: bytes, stream: int) -> None:
        def set_all() -> None:
            self.octets(array)[: array.nbytes] = np.frombuffer(pattern * (array.nbytes // len(pattern)), np.uint8)

        self.queue(stream, set_all)

    # -- streams and events -------------------------------------------------------------------------------------

    def take_stream(self, priority: int = 0) -> int:
        stream = next(self._numbers)
        with self.hardware.changed:
            self.hardware.queues[stream] = deque()
        return stream

    def return_stream(self, stream: int, priority: int = 0) -> None:
        pass

    def checked_stream(self, stream: int) -> int:
        if stream not in self.hardware.queues:
            raise DeviceError.at("TW033", f"{self.label} has no stream {stream}")
        return stream

    def stream_done(self, stream: int) -> bool:
        self.raise_failure()
        with self.hardware.changed:
            return self.hardware.idle(stream)

    def wait_for(self, stream: int) -> None:
        with self.hardware.changed:
            self.hardware.changed.wait_for(lambda: self.hardware.idle(stream))

    def synchronize(self, stream: int | None = None) -> None:
        with self.hardware.changed:
            self.hardware.changed.wait_for(lambda: self.hardware.idle(stream))
        self.raise_failure()

    def order(self, later: int, earlier: int) -> None:
        if later != earlier:
            self.hold(later, self.event().record(earlier))

    def hold(self, stream: int, event: Any) -> None:
        assert isinstance(event, ToyEvent)
        self.queue(stream, lambda: None, event.reached, always=True)

    def event(self, timing: bool = False) -> ToyEvent:
        return ToyEvent(self, timing)

    # -- programs -----------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> ToyProgram:
        return ToyProgram(self, artifact)


class ToyProgram(LoadedProgram):
    """An artifact's kernels, as functions of the machine."""

    def __init__(self, device: ToyDevice, artifact: Artifact) -> None:
        if artifact.kind != "toy":
            raise DeviceError.at("TW030", f"'{artifact.name}' is {artifact.kind} code, which {device.label} cannot run")
        self.device, self.artifact = device, artifact
        self._kernels = load_code(artifact.code)

    def run(
        self, arrays: Mapping[str, Any], scalars: Mapping[str, Number], sizes: Mapping[str, int], stream: int = 0, *,
        take: Callable[[int], Workspace] | None = None,
    ) -> None:  # fmt: skip
        device, given = self.device, dict(arrays)
        for array in self.artifact.scratch:
            given[array.name] = device.empty((product(array.shape).evaluate(sizes),), array.dtype, stream)
        params = [p for p in (*self.artifact.inputs, *self.artifact.outputs) if isinstance(p, ArrayParam)]
        for param in params:
            self._check(param.name, given[param.name])
            given[param.name].owner.use_on(stream)
        for one in self.artifact.launches:
            grid = [extent.evaluate(sizes) for extent in one.grid]
            kernel, args = self._kernels[one.entry], [given.get(name, scalars.get(name)) for name in one.args]
            device.launched += 1
            device.queue(stream, self._launch(kernel, grid, args, [sizes[name] for name in one.sizes]))

    def _check(self, name: str, array: DeviceArray) -> None:
        array.check_usable()
        if array.device is not self.device:
            raise UserError.at("TW009", f"an array on {array.device.label} was given to a program on {self.device.label}")
        if any(stride < 0 for stride in array.strides):
            raise UserError.at("TW009", f"'{name}' runs backwards, which {self.device.label} cannot read", help="copy() it first")

    def _launch(self, kernel: Callable[..., None], grid: list[int], args: list[Any], sizes: list[int]) -> Work:
        def run() -> None:
            views = [self._view(a) if isinstance(a, DeviceArray) else a for a in args]
            launch(kernel, grid, views, sizes)

        return run

    def _view(self, array: DeviceArray) -> np.ndarray:
        octets = self.device.octets(array)
        return octets[: octets.size // array.dtype.itemsize * array.dtype.itemsize]
