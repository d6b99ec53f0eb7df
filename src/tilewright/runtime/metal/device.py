"""Metal devices. In: what pyobjc's `Metal` finds on macOS; out: devices with memory, streams, events and programs.

A stream is a command queue, whose command buffers run in order. Memory is shared between host and device: the host reads and writes it once the work before
it is done. Each buffer gets a range of numbers of our own, and an array is such a number; a kernel takes the buffer and the offset in it. One queue
waits for another by a shared event. Kernels are compiled from our text, without fast math.

The sequence of calls is tested against a stand-in; no device of Apple's was in reach.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.artifact import Artifact, Launch
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit, UserError
from tilewright.base.limits import Limits
from tilewright.base.target import PORTABLE, Target
from tilewright.runtime.core.device import DeviceEvent
from tilewright.runtime.core.found import FoundDevices
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.portable.buffers import NumberedBuffers
from tilewright.runtime.portable.programs import Argument, PooledProgram
from tilewright.runtime.portable.queued import QueuedDevice

_SHARED = 0
"""`MTLResourceStorageModeShared`."""
_COMPLETED, _ERROR = 4, 5
"""States of a command buffer."""


class MetalEvent(DeviceEvent):
    """A point in a queue: the command buffer that was committed last."""

    __slots__ = ("captured", "device", "point", "stream", "timing")

    def __init__(self, device: MetalDevice, timing: bool) -> None:
        self.device, self.timing, self.captured, self.stream = device, timing, False, 0
        self.point: Any = None

    def record(self, stream: int) -> MetalEvent:
        self.stream = stream
        self.point = self.device.submit(stream, lambda commands: None) if self.timing else self.device.last(stream)
        return self

    def done(self) -> bool:
        if self.point is not None and not self.device.is_reached(self.point):
            return False
        self.device.raise_reports()
        return True

    def synchronize(self) -> None:
        if self.point is not None:
            self.device.wait_point(self.point)
        self.device.raise_reports()

    def milliseconds(self, start: Any) -> float:
        if not (self.timing and start.timing):
            raise UserError.at("TW033", "the time between events made with timing=False is not known")
        return float(self.point.GPUEndTime() - start.point.GPUEndTime()) * 1e3


class MetalDevice(QueuedDevice):
    """One Metal device."""

    opaque = True

    def __init__(self, metal: Any, handle: Any, number: int) -> None:
        self.metal, self.handle = metal, handle
        self.id, self.name = f"metal:{number}", str(handle.name())
        self.label = f"{self.id} ({self.name})"
        self._buffers = NumberedBuffers[Any]()
        self.start()

    @cached_property
    def target(self) -> Target:
        """What to compile for, with the limits that the device reports."""
        handle = self.handle
        threads = min(int(handle.maxThreadsPerThreadgroup().width), PORTABLE["msl"].max_threads)
        return replace(PORTABLE["msl"], max_threads=threads, max_shared=int(handle.maxThreadgroupMemoryLength()))

    def limits(self) -> Limits:
        most, t = self.handle.maxThreadsPerThreadgroup(), self.target
        return Limits(
            threads_per_block=t.max_threads, block=(int(most.width), int(most.height), int(most.depth)), grid=(2**31 - 1,) * 3, warp_size=t.warp_size,
            shared_per_block=t.max_shared, vector_bytes=t.vector_bytes,
        )  # fmt: skip

    def free_memory(self) -> tuple[int, int]:
        whole = int(self.handle.recommendedMaxWorkingSetSize())
        return max(0, whole - self._buffers.held), whole

    # -- memory ---------------------------------------------------------------------------------------------------------

    def raw_allocate(self, nbytes: int) -> int:
        most = int(self.handle.maxBufferLength())
        if nbytes > most:
            raise DeviceError.at("TW031", f"{self.label} gives at most {most} bytes at once, and {nbytes} were asked for")
        buffer = self.handle.newBufferWithLength_options_(nbytes, _SHARED)
        return 0 if buffer is None else self._buffers.add(buffer, nbytes)

    def raw_free(self, pointers: list[int]) -> None:
        for pointer in pointers:
            self._buffers.remove(pointer)

    def locate(self, address: int) -> tuple[Any, int]:
        return self._buffers.locate(address)

    def _bytes(self, address: int, nbytes: int) -> np.ndarray:
        """The memory itself."""
        buffer, offset = self.locate(address)
        return np.frombuffer(buffer.contents().as_buffer(int(buffer.length())), np.uint8)[offset : offset + nbytes]

    def send(self, address: int, octets: np.ndarray, stream: int) -> None:
        self.wait_for(stream)
        self._bytes(address, octets.size)[...] = octets

    def fetch(self, address: int, octets: np.ndarray, stream: int) -> None:
        self.wait_for(stream)
        octets[...] = self._bytes(address, octets.size)

    def move(self, runs: Sequence[tuple[int, int, int]], stream: int) -> None:
        def copies(commands: Any) -> None:
            encoder = commands.blitCommandEncoder()
            for target, source, nbytes in runs:
                (to, at), (origin, start) = self.locate(target), self.locate(source)
                if (to, at) != (origin, start):
                    encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(origin, start, to, at, nbytes)
            encoder.endEncoding()

        self.submit(stream, copies)

    def repeat(self, address: int, pattern: bytes, nbytes: int, stream: int) -> None:
        self.wait_for(stream)
        self._bytes(address, nbytes)[...] = np.frombuffer(pattern * (nbytes // len(pattern)), np.uint8)

    # -- streams and events ---------------------------------------------------------------------------------------------

    def new_queue(self) -> Any:
        return self.handle.newCommandQueue()

    def submit(self, stream: int, fill: Any) -> Any:
        """One command buffer, which `fill` fills."""
        self.check_alive()
        with self._lock:
            commands = self.queue(stream).commandBuffer()
            fill(commands)
            commands.commit()
            self._last[stream] = commands
        return commands

    def failure(self, point: Any) -> str:
        return f"a command buffer failed: {point.error()}" if int(point.status()) == _ERROR else ""

    def completed(self, point: Any) -> bool:
        return int(point.status()) == _COMPLETED

    def order(self, later: int, earlier: int) -> None:
        if later == earlier or self.is_idle(earlier):
            return
        event = self.handle.newSharedEvent()
        self.submit(earlier, lambda commands: commands.encodeSignalEvent_value_(event, 1))
        self.submit(later, lambda commands: commands.encodeWaitForEvent_value_(event, 1))

    def hold(self, stream: int, event: Any) -> None:
        assert isinstance(event, MetalEvent)
        if event.point is None or event.device.is_reached(event.point):
            return
        if event.device is self:
            self.order(stream, event.stream)
        else:
            event.synchronize()

    def event(self, timing: bool = False) -> MetalEvent:
        return MetalEvent(self, timing)

    # -- programs -------------------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> MetalProgram:
        return MetalProgram(self, artifact)


class MetalProgram(PooledProgram):
    """An artifact's kernels as Metal's pipelines."""

    code_kind = "msl"
    device: MetalDevice

    def __init__(self, device: MetalDevice, artifact: Artifact) -> None:
        super().__init__(device, artifact, device.target)
        self._pipelines = [self._pipeline(library, one.entry) for library in [self._library()] for one in artifact.launches]
        self._numbers = {p.name: p.dtype for p in artifact.inputs}

    def _library(self) -> Any:
        options = self.device.metal.MTLCompileOptions.alloc().init()
        options.setFastMathEnabled_(False)
        text = self.artifact.code.decode()
        library, error = self.device.handle.newLibraryWithSource_options_error_(text, options, None)
        if library is None:
            raise self._rejected(error)
        return library

    def _pipeline(self, library: Any, entry: str) -> Any:
        pipeline, error = self.device.handle.newComputePipelineStateWithFunction_error_(library.newFunctionWithName_(entry), None)
        if pipeline is None:
            raise self._rejected(error)
        threads = next(one.threads for one in self.artifact.launches if one.entry == entry)
        if threads > int(pipeline.maxTotalThreadsPerThreadgroup()):
            raise TargetLimit.at(
                "TW020", f"kernel '{entry}' of '{self.artifact.name}' has blocks of {threads} threads; its registers leave room for "
                f"{int(pipeline.maxTotalThreadsPerThreadgroup())} on {self.device.label}",
            )  # fmt: skip
        return pipeline

    def _rejected(self, error: Any) -> CompilerBug:
        with tempfile.NamedTemporaryFile("wb", prefix="tilewright-", suffix=".metal", delete=False) as file:
            file.write(self.artifact.code)
        bug = CompilerBug.at("TW040", f"{self.device.label} rejects the code of '{self.artifact.name}': {error}", help=f"please report this; the text is in {file.name}")
        assert isinstance(bug, CompilerBug)
        return bug

    def launch(self, position: int, launch: Launch, grid: tuple[int, int, int], arguments: Sequence[Argument], sizes: Sequence[int], stream: int) -> None:
        device, named = self.device, dict(zip(launch.sizes, sizes, strict=True))
        arrays = [(dtype, value) for dtype, value in arguments if isinstance(value, DeviceArray)]
        words = [int(size.evaluate(named)).to_bytes(8, "little", signed=True) for size in launch.values]
        words += [_word(dtype.numpy, value, dtype.is_int) for dtype, value in arguments if not isinstance(value, DeviceArray)]
        data = b"".join(words) or bytes(8)

        def dispatch(commands: Any) -> None:
            encoder = commands.computeCommandEncoder()
            encoder.setComputePipelineState_(self._pipelines[position])
            for k, (_, array) in enumerate(arrays):
                buffer, offset = device.locate(array._pointer) if array.size else (None, 0)
                encoder.setBuffer_offset_atIndex_(buffer, offset, k)
            encoder.setBytes_length_atIndex_(data, len(data), len(arrays))
            size = device.metal.MTLSizeMake
            encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(*grid), size(launch.threads, 1, 1))
            encoder.endEncoding()

        device.submit(stream, dispatch)


def _word(dtype: np.dtype, value: Any, whole: bool) -> bytes:
    """A number of a call as the eight bytes that kernels read."""
    if whole:
        return (int(value) & (1 << 64) - 1).to_bytes(8, "little")
    return np.array(value).astype(dtype).tobytes().ljust(8, b"\0")


# -- finding devices ----------------------------------------------------------------------------------------------------

def load_metal() -> tuple[Any, str]:
    """pyobjc's module, and why there is none."""
    if platform.system() != "Darwin":
        return None, f"Metal is Apple's: it is there on macOS, and this is {platform.system()}"
    try:
        import Metal  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None, "pyobjc's Metal is not installed; pip install 'tilewright[metal]'"
    return Metal, ""


def _look() -> tuple[list[MetalDevice], str]:
    metal, reason = load_metal()
    handles = list(metal.MTLCopyAllDevices() or ()) if metal is not None else []
    return [MetalDevice(metal, handle, number) for number, handle in enumerate(handles)], reason or ("" if handles else "Metal finds no device")


FOUND = FoundDevices(_look)
"""The Metal devices of this machine."""
