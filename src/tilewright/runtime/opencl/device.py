"""OpenCL devices. In: what pyopencl finds; out: devices with memory, streams, events and programs.

A stream is a command queue, which runs in order. Memory of OpenCL has no addresses: each buffer gets a range of numbers of our own, and an array is such
a number. A kernel takes the buffer and the offset in it. One queue waits for another by an event.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.artifact import Artifact, Launch
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, TilewrightError, UserError
from tilewright.base.limits import Limits
from tilewright.base.target import PORTABLE, Target
from tilewright.runtime.core.device import DeviceEvent
from tilewright.runtime.core.found import FoundDevices
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.opencl.spirv_loading import build, refusal, takes_spirv
from tilewright.runtime.portable.buffers import NumberedBuffers
from tilewright.runtime.portable.programs import Argument, PooledProgram
from tilewright.runtime.portable.queued import QueuedDevice
from tilewright.runtime.portable.waits import wait_blocked

_LOST = (-5, -14, -36)
"""Codes after which the device is no longer to be trusted: out of resources, a failed event, an invalid queue."""


class OpenClEvent(DeviceEvent):
    """A point in a queue."""

    __slots__ = ("_event", "captured", "device", "stream", "timing")

    def __init__(self, device: OpenClDevice, timing: bool) -> None:
        self.device, self.timing, self.captured, self.stream = device, timing, False, 0
        self._event: Any = None

    def record(self, stream: int) -> OpenClEvent:
        self.stream = stream
        self._event = self.device.marker(stream)
        return self

    def done(self) -> bool:
        if self._event is None or self.device.is_reached(self._event):
            self.device.raise_reports()
            return True
        return False

    def synchronize(self) -> None:
        if self._event is not None:
            self.device.wait_point(self._event)
        self.device.raise_reports()

    def milliseconds(self, start: Any) -> float:
        if not (self.timing and start.timing):
            raise UserError.at("TW033", "the time between events made with timing=False is not known")
        return float(self._event.profile.end - start._event.profile.end) * 1e-6

    @property
    def queued(self) -> Any:
        """pyopencl's event; None before it was recorded."""
        return self._event


class OpenClDevice(QueuedDevice):
    """One OpenCL device."""

    opaque = True

    def __init__(self, cl: Any, handle: Any, number: int) -> None:
        self.cl, self.handle = cl, handle
        self.id = f"opencl:{number}"
        self.name = " ".join(f"{handle.name} ({handle.platform.name})".split())
        self.label = f"{self.id} ({self.name})"
        self._buffers = NumberedBuffers[Any]()
        self.start()

    @cached_property
    def context(self) -> Any:
        return self.cl.Context([self.handle])

    @cached_property
    def target(self) -> Target:
        """What to compile for, with the limits that the driver reports."""
        d, extensions = self.handle, self.handle.extensions.split()
        wide = {"cl_khr_int64_base_atomics", "cl_khr_int64_extended_atomics"} <= {*extensions}
        missing = frozenset() if d.double_fp_config else frozenset({"f64"})
        threads, vector, registers, local = min(int(d.max_work_group_size), 256), 16, 128, 16 << 10
        if self.is_cpu:
            # A core runs the threads of a block one after the other: a block is one thread with SIMD registers, as in code for CPUs.
            threads, vector, local = 1, max(16, 4 * int(d.native_vector_width_float)), int(d.local_mem_size) - (4 << 10)
            registers = 32 if vector == 64 or platform.machine() in ("aarch64", "arm64") else 16
        half = "cl_khr_fp16" in extensions
        return replace(
            PORTABLE["spirv-opencl"], max_threads=threads, max_shared=int(d.local_mem_size), multiprocessors=int(d.max_compute_units), vector_bytes=vector,
            features=PORTABLE["spirv-opencl"].features | (frozenset() if takes_spirv(d) else {"spir"}) | ({"f16"} if half else set()),
            soft_casts=PORTABLE["spirv-opencl"].soft_casts - ({"f16"} if half else set()), max_registers=registers, max_local=local, shared_per_sm=int(d.local_mem_size), atomic_bits=frozenset({32, 64} if wide else {32}), missing_dtypes=missing,
        )  # fmt: skip

    @property
    def is_cpu(self) -> bool:
        return bool(self.handle.type & self.cl.device_type.CPU)

    def error(self, what: str, error: Exception) -> TilewrightError:
        """The error of a failed call."""
        code = getattr(error, "code", 0)
        if code in _LOST:
            self._lost = f"{what} failed with code {code}"
        return DeviceError.at("TW032", f"{self.label}: {what} failed: {error}")

    def limits(self) -> Limits:
        d, sizes = self.handle, [int(s) for s in self.handle.max_work_item_sizes]
        return Limits(
            threads_per_block=self.target.max_threads, block=(sizes[0], sizes[1], sizes[2]), grid=(2**31 - 1,) * 3, warp_size=self.target.warp_size,
            shared_per_block=int(d.local_mem_size), vector_bytes=self.target.vector_bytes, clock=int(d.max_clock_frequency) * 1_000_000,
        )  # fmt: skip

    def free_memory(self) -> tuple[int, int]:
        whole = int(self.handle.global_mem_size)
        return whole - self._buffers.held, whole

    # -- memory ---------------------------------------------------------------------------------------------------------

    def raw_allocate(self, nbytes: int) -> int:
        if nbytes > int(self.handle.max_mem_alloc_size):
            raise DeviceError.at("TW031", f"{self.label} gives at most {int(self.handle.max_mem_alloc_size)} bytes at once, and {nbytes} were asked for")
        try:
            buffer = self.cl.Buffer(self.context, self.cl.mem_flags.READ_WRITE, nbytes)
        except (self.cl.MemoryError, MemoryError):
            return 0
        return self._buffers.add(buffer, nbytes)

    def raw_free(self, pointers: list[int]) -> None:
        for pointer in pointers:
            self._buffers.remove(pointer).release()

    def locate(self, address: int) -> tuple[Any, int]:
        return self._buffers.locate(address)

    def send(self, address: int, octets: np.ndarray, stream: int) -> None:
        buffer, offset = self.locate(address)
        self.enqueue("a copy to the device", self.cl.enqueue_copy, stream, buffer, octets, dst_offset=offset, is_blocking=False)

    def fetch(self, address: int, octets: np.ndarray, stream: int) -> None:
        buffer, offset = self.locate(address)
        self.enqueue("a copy from the device", self.cl.enqueue_copy, stream, octets, buffer, src_offset=offset, is_blocking=False)

    def move(self, runs: Sequence[tuple[int, int, int]], stream: int) -> None:
        for target, source, nbytes in runs:
            (to, at), (origin, start) = self.locate(target), self.locate(source)
            if to is origin and at == start:
                continue
            self.enqueue("a copy", self.cl.enqueue_copy, stream, to, origin, byte_count=nbytes, src_offset=start, dst_offset=at)

    def repeat(self, address: int, pattern: bytes, nbytes: int, stream: int) -> None:
        buffer, offset = self.locate(address)
        octets = np.frombuffer(pattern, np.uint8)
        self.enqueue("a fill", self.cl.enqueue_fill_buffer, stream, buffer, octets, offset, nbytes)

    # -- streams and events ---------------------------------------------------------------------------------------------

    def new_queue(self) -> Any:
        profiling = self.cl.command_queue_properties.PROFILING_ENABLE
        return self.cl.CommandQueue(self.context, self.handle, properties=profiling)

    def flush(self, queue: Any) -> None:
        queue.flush()

    def enqueue(self, what: str, function: Any, stream: int, *arguments: Any, **named: Any) -> Any:
        self.check_alive()
        try:
            event = self._last[stream] = function(self.queue(stream), *arguments, **named)
            return event
        except self.cl.Error as error:
            raise self.error(what, error) from error

    def marker(self, stream: int) -> Any:
        found = self.enqueue("a marker", self.cl.enqueue_marker, stream)
        self.queue(stream).flush()
        return found

    def failure(self, point: Any) -> str:
        status = int(point.command_execution_status)
        return f"a kernel or copy failed with code {status}" if status < 0 else ""

    def completed(self, point: Any) -> bool:
        return int(point.command_execution_status) == int(self.cl.command_execution_status.COMPLETE)

    def wait_point(self, point: Any) -> None:
        if not self.is_reached(point):
            try:
                wait_blocked(point.wait, self.label, "the work of a stream")
            except self.cl.Error:
                self.is_reached(point)
                raise

    def order(self, later: int, earlier: int) -> None:
        if later != earlier and earlier in self._queues:
            self._hold(later, self.marker(earlier))

    def hold(self, stream: int, event: Any) -> None:
        assert isinstance(event, OpenClEvent)
        if event.queued is None:
            return
        if event.device is self:
            self._hold(stream, event.queued)
        else:
            event.synchronize()

    def _hold(self, stream: int, event: Any) -> None:
        self.enqueue("a wait", self.cl.enqueue_barrier, stream, wait_for=[event])

    def event(self, timing: bool = False) -> OpenClEvent:
        return OpenClEvent(self, timing)

    # -- programs -------------------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> OpenClProgram:
        return OpenClProgram(self, artifact)


class OpenClProgram(PooledProgram):
    """An artifact's kernels as OpenCL's."""

    device: OpenClDevice

    def __init__(self, device: OpenClDevice, artifact: Artifact) -> None:
        super().__init__(device, artifact, device.target)
        self._program = build(device.cl, device.context, device.handle, artifact.code, device.label, artifact.name)
        self._kernels = [device.cl.Kernel(self._program, one.entry) for one in artifact.launches]
        self._lock = threading.Lock()
        self._set: list[tuple[object, ...]] = [()] * len(self._kernels)
        """The arguments that each kernel has."""

    def launch(self, position: int, launch: Launch, grid: tuple[int, int, int], arguments: Sequence[Argument], sizes: Sequence[int], stream: int) -> None:
        device, kernel = self.device, self._kernels[position]
        given: list[object] = []
        for dtype, value in arguments:
            if not isinstance(value, DeviceArray):
                given += [dtype, value]
            elif value.size:
                buffer, offset = device.locate(value._pointer)
                given += [buffer, offset // dtype.itemsize]
            else:
                given += [None, 0]
        wanted = (*given, *sizes)
        blocks = (grid[0] * launch.threads, grid[1], grid[2])
        # Arguments belong to the kernel object: nobody else may set them before it is queued.
        with self._lock:
            known = self._set[position]
            if len(known) != len(wanted) or not all(map(_is_same, known, wanted)):
                self._set[position] = ()
                kernel.set_args(*_arguments(given), *map(np.int64, sizes))
                self._set[position] = wanted
            device.enqueue(f"the launch of '{self.artifact.name}'", device.cl.enqueue_nd_range_kernel, stream, kernel, blocks, (launch.threads, 1, 1))


def _is_same(one: object, other: object) -> bool:
    """Whether two arguments are the same bits: one object, or equal numbers; zeros have signs."""
    return one is other or (type(one) is type(other) and type(one) in (int, float) and one == other and (one != 0 or type(one) is int))


def _arguments(given: Sequence[object]) -> Iterator[object]:
    """What a kernel is given, from pairs of a buffer and an offset, or of a dtype and a number."""
    for first, second in zip(given[::2], given[1::2], strict=True):
        if isinstance(first, DType):
            yield np.array(second).astype(first.numpy)
        else:
            yield first
            assert isinstance(second, int)
            yield np.int64(second)


# -- finding devices ----------------------------------------------------------------------------------------------------


def _look() -> tuple[list[OpenClDevice], str]:
    """Those that can run SPIR-V, and why there are none."""
    try:
        import pyopencl as cl
    except ImportError:
        return [], "pyopencl is not installed; pip install 'tilewright[opencl]'"
    try:
        handles = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as error:
        return [], f"OpenCL finds no platform: {error}"
    reasons = [(handle, refusal(handle)) for handle in handles]
    able = [handle for handle, reason in reasons if not reason]
    why = "" if able else "; ".join(reason for _, reason in reasons if reason) or "no OpenCL platform has a device"
    return [OpenClDevice(cl, handle, number) for number, handle in enumerate(able)], why


FOUND = FoundDevices(_look)
"""The OpenCL devices of this machine."""
