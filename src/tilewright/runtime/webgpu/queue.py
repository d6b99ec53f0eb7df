"""One WebGPU device: memory, copies, events. In: arrays; out: work on wgpu's queue.

There is one queue, and it is in order: streams are numbers only. Waiting is mapping a few bytes that are copied behind the work; it has a time limit, after
which the device counts as lost. Copies of parts of words read, change and write these words: the host does it, after all work.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.limits import Limits
from tilewright.runtime.core.device import DeviceEvent, Transfer, new_ordinal
from tilewright.runtime.memory.array_views import reach
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray
from tilewright.runtime.portable.waits import wait_blocked
from tilewright.runtime.webgpu.adapters import FoundAdapter
from tilewright.runtime.webgpu.memory import COPY_DST, MAP_READ, BufferPool, WebGpuBuffer
from tilewright.runtime.webgpu.raw_commands import RawCommands

WAIT_SECONDS = 60.0
"""After so long a device that does not answer counts as lost."""


class QueuePoint(DeviceEvent):
    """A point on the queue."""

    def __init__(self, device: WebGpuQueue, timing: bool) -> None:
        self.device, self.timing, self.captured, self.stream = device, timing, False, 0
        self._number = 0
        self._when = 0.0

    def record(self, stream: int) -> QueuePoint:
        self.stream, self._number = stream, self.device.submitted
        if self.timing:
            # The queue says when it is done only to who waits.
            self.device.wait()
            self._when = time.perf_counter()
        return self

    def done(self) -> bool:
        self.device.raise_lost()
        if self._number > self.device.reached:
            self.device.wait()
        return True

    def synchronize(self) -> None:
        if self._number > self.device.reached:
            self.device.wait()
        self.device.raise_failures()

    def milliseconds(self, start: Any) -> float:
        if not (self.timing and start.timing):
            raise UserError.at("TW033", "the time between events made with timing=False is not known")
        return float(self._when - start._when) * 1e3


class FinishedTransfer(Transfer):
    """A copy that was made at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class WebGpuQueue(ArrayDevice):
    """A device of an adapter, made when it is first used, but for its programs."""

    def __init__(self, number: int, adapter: FoundAdapter) -> None:
        self.id, self.adapter, self.target = f"webgpu:{number}", adapter, adapter.target
        self.label = f"{self.id} ({adapter.name}, {adapter.api})"
        self.ordinal = new_ordinal()
        self.lock = threading.RLock()
        self.submitted = self.reached = 0
        """Pieces of work given to the queue, and those known to be done."""
        self.dispatched = 0
        """Dispatches so far."""
        self._lost = ""
        self._failures: list[Callable[[], None]] = []
        self._streams = 0
        self._device: Any = None

    # -- the device -----------------------------------------------------------------------------------------------------

    @property
    def gpu(self) -> Any:
        """wgpu's device."""
        if self._device is None:
            with self.lock:
                if self._device is None:
                    try:
                        self._device = self.adapter.adapter.request_device_sync(required_features=self.adapter.features, required_limits=self.adapter.limits)
                    except Exception as error:
                        raise DeviceError.at("TW030", f"{self.label} gives no device: {error}") from error
                    self.pool = BufferPool(self._device, self.label, self.adapter.binding)
                    self._probe = self._device.create_buffer(size=4, usage=COPY_DST | 0x4)
        return self._device

    @property
    def lost(self) -> str:
        return self._lost

    def raise_lost(self) -> None:
        if self._lost:
            raise DeviceError.at("TW032", f"{self.label} is lost: {self._lost}", help="start a new process to use it again")

    def lose(self, reason: str) -> DeviceError:
        """The device cannot be used any more."""
        self._lost = self._lost or reason
        error = DeviceError.at("TW032", f"{self.label} is lost: {self._lost}", help="start a new process to use it again")
        assert isinstance(error, DeviceError)
        return error

    def submit(self, encoder: Any) -> None:
        """Give what an encoder holds to the queue."""
        self.raise_lost()
        try:
            self.gpu.queue.submit([encoder.finish()])
        except Exception as error:
            if "lost" in str(error).lower():
                raise self.lose(str(error)) from error
            raise DeviceError.at("TW032", f"{self.label} refused work: {error}") from error
        self.submitted += 1

    @functools.cached_property
    def raw(self) -> RawCommands | None:
        """wgpu-native's C functions, where wgpu-py has them where we look."""
        return RawCommands.find(self.gpu)

    def submit_raw(self, commands: Callable[[], str]) -> None:
        """Give the commands of a bound call to the queue."""
        problem = commands()
        if problem:
            raise self.lose(problem) if "lost" in problem.lower() else DeviceError.at("TW032", f"{self.label} refused work: {problem}")
        self.submitted += 1

    def map_read(self, buffer: Any, nbytes: int) -> memoryview:
        """The bytes of a staging buffer when all work before is done."""
        promise = buffer.map_async("READ_NOSYNC", 0, nbytes)
        gpu = self.gpu
        gpu._poll()
        if promise._state == "pending":
            try:
                wait_blocked(gpu._poll_wait, self.label, "its work", WAIT_SECONDS)
            except DeviceError as error:
                raise self.lose(f"it did not answer for {WAIT_SECONDS:.0f} s") from error
        try:
            promise.sync_wait()
        except Exception as error:
            raise self.lose(str(error)) from error
        return memoryview(buffer.read_mapped(0, nbytes, copy=False))

    def read_bytes(self, buffer: Any, start: int, nbytes: int) -> bytes:
        """Bytes of a buffer, from any place, after all work."""
        with self.lock:
            low, high = start // 4 * 4, -(-(start + nbytes) // 4) * 4
            gpu = self.gpu
            staging = self.pool.take(high - low, MAP_READ | COPY_DST)
            encoder = gpu.create_command_encoder()
            encoder.copy_buffer_to_buffer(buffer, low, staging, 0, high - low)
            self.submit(encoder)
            now = self.submitted
            data = bytes(self.map_read(staging, high - low)[start - low : start - low + nbytes])
            staging.unmap()
            self.pool.give(staging)
            self.reached = now
            return data

    def write_bytes(self, buffer: Any, start: int, data: Any, spare: bool = False) -> None:
        """Bytes to any place of a buffer, behind all work. `spare`: what follows them in their last word is nobody's."""
        with self.lock:
            self.raise_lost()
            nbytes = len(data)
            low, high = start // 4 * 4, -(-(start + nbytes) // 4) * 4
            if (low, high) != (start, start + nbytes):
                if low == start and spare:
                    data = bytes(data) + b"\0" * (high - start - nbytes)
                else:
                    edges = bytearray(self.read_bytes(buffer, low, high - low))
                    edges[start - low : start - low + nbytes] = data
                    data = bytes(edges)
            self.gpu.queue.write_buffer(buffer, low, data)
            self.submitted += 1

    def wait(self) -> None:
        """Return when all work is done."""
        if self._device is not None and self.submitted > self.reached:
            self.raise_lost()
            self.read_bytes(self._probe, 0, 4)

    def watch(self, check: Callable[[], None]) -> None:
        """Have a check of a program's failures made by the next call that waits."""
        self._failures.append(check)

    def raise_failures(self) -> None:
        checks, self._failures = self._failures, []
        for check in checks:
            check()

    # -- properties -----------------------------------------------------------------------------------------------------

    def free_memory(self) -> tuple[int, int]:
        gpu_limit = self.adapter.limits["max-buffer-size"]
        used = self.pool.used if self._device is not None else 0
        return max(0, gpu_limit - used), gpu_limit

    def peak_memory(self) -> int:
        return self.pool.peak if self._device is not None else 0

    def reset_peak_memory(self) -> None:
        if self._device is not None:
            self.pool.peak = self.pool.used

    def limits(self) -> Limits:
        t = self.target
        return Limits(
            threads_per_block=t.max_threads, block=(t.max_threads, 1, 1), grid=t.max_grid, warp_size=t.warp_size, shared_per_block=t.max_shared,
            registers_per_thread=0, vector_bytes=t.vector_bytes,
        )  # fmt: skip

    # -- memory ---------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        extents = tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise UserError.at("TW004", f"an array cannot have shape {extents}")
        if not dtype.numpy.kind or dtype.name in self.target.missing_dtypes:
            raise UserError.at("TW009", f"{self.label} has no {dtype}")
        assert self.gpu is not None
        return DeviceArray.at(self, WebGpuBuffer(self.pool, prod(extents) * dtype.itemsize, stream), 0, extents, dtype)

    def read(self, array: DeviceArray, out: np.ndarray) -> None:
        buffer = _buffer(array)
        if array.nbytes:
            out.reshape(-1).view(np.uint8)[...] = np.frombuffer(self.read_bytes(buffer.buffer, array.offset, array.nbytes), np.uint8)
        self.raise_failures()

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        buffer = _buffer(array)
        if values.nbytes:
            whole = array.offset + array.nbytes >= buffer.nbytes
            self.write_bytes(buffer.buffer, array.offset, values.reshape(-1).view(np.uint8).data, spare=whole)

    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        target.check_usable()
        source.check_usable()
        if not target.size:
            return
        words = target.offset % 4 == 0 and source.offset % 4 == 0 and target.nbytes % 4 == 0
        if source.device is self and words and target.is_contiguous and source.is_contiguous and target.owner is not source.owner:
            encoder = self.gpu.create_command_encoder()
            encoder.copy_buffer_to_buffer(_buffer(source).buffer, source.offset, _buffer(target).buffer, target.offset, target.nbytes)
            self.submit(encoder)
            return
        values = source.numpy()
        if target.is_contiguous:
            self.write(target, np.ascontiguousarray(values))
            return
        low, high = reach(target.shape, target.strides)
        size = target.dtype.itemsize
        start, nbytes = target.offset + low * size, (high - low) * size
        octets = np.frombuffer(bytearray(self.read_bytes(_buffer(target).buffer, start, nbytes)), np.uint8)
        np.ndarray(target.shape, target.dtype.numpy, octets.data, -low * size, tuple(s * size for s in target.strides))[...] = values
        self.write_bytes(_buffer(target).buffer, start, octets.data)

    def fill(self, array: DeviceArray, pattern: bytes, stream: int) -> None:
        buffer = _buffer(array)
        if not any(pattern) and array.offset % 4 == 0 and array.nbytes % 4 == 0:
            encoder = self.gpu.create_command_encoder()
            encoder.clear_buffer(buffer.buffer, array.offset, array.nbytes)
            self.submit(encoder)
            return
        self.write_bytes(buffer.buffer, array.offset, pattern * (array.nbytes // len(pattern)), spare=array.offset + array.nbytes >= buffer.nbytes)

    def copy_in_async(self, target: DeviceArray, source: np.ndarray, stream: int = 0) -> Transfer:
        target.check_usable()
        self.write(target, np.ascontiguousarray(source))
        return FinishedTransfer()

    def copy_out_async(self, target: np.ndarray, source: DeviceArray, stream: int = 0) -> Transfer:
        source.check_usable()
        self.read(source, target)
        return FinishedTransfer()

    # -- streams and events ---------------------------------------------------------------------------------------------

    def take_stream(self, priority: int = 0) -> int:
        self._streams += 1
        return self._streams

    def return_stream(self, stream: int, priority: int = 0) -> None:
        return

    def checked_stream(self, stream: int) -> int:
        if not 0 <= stream <= self._streams:
            raise DeviceError.at("TW033", f"{self.label} has no stream {stream}")
        return stream

    def stream_done(self, stream: int) -> bool:
        self.synchronize()
        return True

    def wait_for(self, stream: int) -> None:
        self.wait()

    def synchronize(self, stream: int | None = None) -> None:
        self.wait()
        self.raise_failures()

    def order(self, later: int, earlier: int) -> None:
        return

    def hold(self, stream: int, event: Any) -> None:
        return

    def event(self, timing: bool = False) -> QueuePoint:
        return QueuePoint(self, timing)


def _buffer(array: DeviceArray) -> WebGpuBuffer:
    buffer = array.owner
    assert isinstance(buffer, WebGpuBuffer)
    return buffer
