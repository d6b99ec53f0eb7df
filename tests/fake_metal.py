"""A stand-in for pyobjc's `Metal`: a device that compiles Metal Shading Language by clang against `metal_shim` and runs it when a command buffer is committed.

`Metal().calls` lists what was called, in order. What Apple's framework would refuse is refused: encoders that are not ended, buffers that are not bound,
work after an error.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import metal_host

Size = namedtuple("Size", "width height depth")
_COMPLETED, _ERROR = 4, 5


class Metal:
    """The module."""

    def __init__(self, devices: int = 1, reject: str = "") -> None:
        self.calls: list[str] = []
        self.reject = reject
        self._devices = [Device(self, k) for k in range(devices)]
        self.MTLCompileOptions = Options

    def MTLCopyAllDevices(self) -> list[Device]:
        return self._devices

    def MTLSizeMake(self, x: int, y: int, z: int) -> Size:
        return Size(x, y, z)


class Options:
    fast = True

    @classmethod
    def alloc(cls) -> Options:
        return cls()

    def init(self) -> Options:
        return self

    def setFastMathEnabled_(self, on: bool) -> None:
        self.fast = on


class Contents:
    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def as_buffer(self, length: int) -> memoryview:
        return memoryview(self._memory).cast("B")[:length]


class Buffer:
    def __init__(self, length: int) -> None:
        self.memory = (ctypes.c_uint8 * max(1, length))()
        self._length = length

    def length(self) -> int:
        return self._length

    def contents(self) -> Contents:
        return Contents(self.memory)


class Device:
    def __init__(self, metal: Metal, number: int) -> None:
        self.metal, self._name = metal, f"Stand-in {number}"
        self.values: dict[Any, int] = {}

    def name(self) -> str:
        return self._name

    def maxThreadsPerThreadgroup(self) -> Size:
        return Size(1024, 1024, 1024)

    def maxThreadgroupMemoryLength(self) -> int:
        return 32 << 10

    def recommendedMaxWorkingSetSize(self) -> int:
        return 1 << 30

    def maxBufferLength(self) -> int:
        return 1 << 28

    def newBufferWithLength_options_(self, length: int, options: int) -> Buffer:
        assert options == 0
        return Buffer(length)

    def newCommandQueue(self) -> Queue:
        self.metal.calls.append("newCommandQueue")
        return Queue(self)

    def newSharedEvent(self) -> object:
        return object()

    def newLibraryWithSource_options_error_(self, text: str, options: Options, error: None) -> tuple[Any, Any]:
        self.metal.calls.append("newLibraryWithSource")
        assert not options.fast
        if self.metal.reject:
            return None, self.metal.reject
        return Library(text), None

    def newComputePipelineStateWithFunction_error_(self, function: tuple[Library, str], error: None) -> tuple[Any, Any]:
        self.metal.calls.append("newComputePipelineState")
        return Pipeline(*function), None


class Library:
    def __init__(self, text: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fake-metal-"))
        self.code = metal_host.compile_host([text], folder)

    def newFunctionWithName_(self, name: str) -> tuple[Library, str]:
        return self, name


class Pipeline:
    def __init__(self, library: Library, name: str) -> None:
        self.function = getattr(library.code, f"run_0_{name}")
        self.function.restype = ctypes.c_char_p

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return 1024


class Queue:
    def __init__(self, device: Device) -> None:
        self.device = device

    def commandBuffer(self) -> Commands:
        return Commands(self.device)


class Commands:
    def __init__(self, device: Device) -> None:
        self.device, self.work, self.open, self._status, self._error = device, [], 0, 0, None  # type: ignore[var-annotated]

    def computeCommandEncoder(self) -> ComputeEncoder:
        self.open += 1
        return ComputeEncoder(self)

    def blitCommandEncoder(self) -> BlitEncoder:
        self.open += 1
        return BlitEncoder(self)

    def encodeSignalEvent_value_(self, event: object, value: int) -> None:
        self.work.append(lambda: self.device.values.__setitem__(event, value))

    def encodeWaitForEvent_value_(self, event: object, value: int) -> None:
        def wait() -> None:
            assert self.device.values.get(event, 0) >= value, "a wait for an event that nobody signals before"

        self.work.append(wait)

    def commit(self) -> None:
        self.device.metal.calls.append("commit")
        assert not self.open, "an encoder was not ended"
        self._status = _COMPLETED
        for one in self.work:
            problem = one()
            if problem:
                self._status, self._error = _ERROR, problem.decode()

    def status(self) -> int:
        return self._status

    def error(self) -> object:
        return self._error

    def GPUEndTime(self) -> float:
        import time

        return time.perf_counter()


class BlitEncoder:
    def __init__(self, commands: Commands) -> None:
        self.commands = commands

    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(self, source: Buffer, start: int, target: Buffer, at: int, size: int) -> None:
        self.commands.work.append(lambda: ctypes.memmove(ctypes.addressof(target.memory) + at, ctypes.addressof(source.memory) + start, size) and None)

    def endEncoding(self) -> None:
        self.commands.open -= 1


class ComputeEncoder(BlitEncoder):
    def setComputePipelineState_(self, pipeline: Pipeline) -> None:
        self.pipeline, self.buffers, self.words = pipeline, {}, None  # type: ignore[var-annotated]

    def setBuffer_offset_atIndex_(self, buffer: Buffer | None, offset: int, index: int) -> None:
        self.buffers[index] = None if buffer is None else ctypes.addressof(buffer.memory) + offset

    def setBytes_length_atIndex_(self, data: bytes, length: int, index: int) -> None:
        assert len(data) == length <= 4096 and index == len(self.buffers), "numbers come after all buffers"
        self.words = ctypes.create_string_buffer(data, length)

    def dispatchThreadgroups_threadsPerThreadgroup_(self, grid: Size, block: Size) -> None:
        self.commands.device.metal.calls.append("dispatch")
        pointers = (ctypes.c_void_p * max(1, len(self.buffers)))(*(self.buffers[k] for k in range(len(self.buffers))))
        pipeline, words = self.pipeline, self.words
        self.commands.work.append(lambda: pipeline.function(pointers, words, grid.width, grid.height, grid.depth, block.width))
