"""A driver module without a GPU: device memory is host memory, kernels are Python functions, faults are injected.

It has the functions of `cuda.bindings.driver` that the runtime calls, with the same results, and keeps a log of the calls.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace

NAMES = {0: "CUDA_SUCCESS", 2: "CUDA_ERROR_OUT_OF_MEMORY", 218: "CUDA_ERROR_INVALID_PTX", 400: "CUDA_ERROR_INVALID_HANDLE",
         500: "CUDA_ERROR_NOT_FOUND", 700: "CUDA_ERROR_ILLEGAL_ADDRESS", 1: "CUDA_ERROR_INVALID_VALUE"}  # fmt: skip
CONTEXT, FOREIGN_CONTEXT = 0xC0, 0xF0

Kernel = Callable[[int, tuple[int, int, int]], None]
"""Gets the address of the table of parameter pointers, and the grid."""


class _Members:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeInteger(int):
    """The bindings take numbers of a tensor map only as objects of their own."""


class FakeMap:
    """An encoded map: the address it is for, then a number that no other map has."""

    def __init__(self, address: int, number: int) -> None:
        self.words = (ctypes.c_uint64 * 16)(address, number)

    def getPtr(self) -> int:
        return ctypes.addressof(self.words)


class FakeCuda(SimpleNamespace):
    def __init__(self, memory: int = 1 << 30, count: int = 1) -> None:
        super().__init__()
        self.total = memory
        self.count = count
        self.buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.log: list[tuple[object, ...]] = []
        self.kernels: dict[str, Kernel] = {}
        self.fail: dict[str, int] = {}
        """The status the named function gives from now on."""
        self.ptx_log = b""
        self.function_attributes = {"CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 1024, "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": 0}
        self.cuuint64_t = self.cuuint32_t = FakeInteger
        self.thread = threading.local()
        self.CUresult = lambda code: IntEnum("CUresult", {NAMES.get(code, f"CODE_{code}"): code})(code)
        for name in ("CUdevice_attribute", "CUjit_option", "CUfunction_attribute", "CUstream_flags", "CUevent_flags",
                     "CUpointer_attribute", "CUdriverProcAddress_flags", "CUtensorMapDataType", "CUtensorMapInterleave",
                     "CUtensorMapSwizzle", "CUtensorMapL2promotion", "CUtensorMapFloatOOBfill", "CUlaunchAttributeID"):  # fmt: skip
            setattr(self, name, _Members())

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if not name.startswith("cu") or name.startswith("cuuint"):
            return found

        def logged(*arguments: object) -> tuple[object, ...]:
            self.log.append((name, *arguments))
            if name in self.fail:
                if name == "cuModuleLoadDataEx":
                    buffer = arguments[3][0]  # type: ignore[index]
                    buffer[: len(self.ptx_log)] = self.ptx_log
                return (self.fail[name], None)
            assert callable(found)
            result = found(*arguments)
            return (0, *(result if isinstance(result, tuple) else () if result is None else (result,)))

        return logged

    def calls(self, name: str) -> list[tuple[object, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == name]

    # -- device and context

    def cuInit(self, flags: int) -> None: ...
    def cuDeviceGetCount(self) -> int:
        return self.count

    def cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Fake GPU\0\0\0"

    def cuDeviceTotalMem(self, device: int) -> int:
        return self.total

    def cuDeviceGetAttribute(self, name: str, device: int) -> int:
        return {"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
                "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
                "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10}[name]  # fmt: skip

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return CONTEXT

    def stack(self) -> list[int]:
        if not hasattr(self.thread, "stack"):
            self.thread.stack = [0]
        stack: list[int] = self.thread.stack
        return stack

    def cuCtxGetCurrent(self) -> int:
        return self.stack()[-1]

    def cuCtxSetCurrent(self, context: int) -> None:
        self.stack()[-1] = context

    def cuCtxPushCurrent(self, context: int) -> None:
        self.stack().append(context)

    def cuCtxPopCurrent(self) -> int:
        return self.stack().pop()

    def cuCtxSynchronize(self) -> None: ...
    def cuStreamSynchronize(self, stream: int) -> None: ...
    def cuGetErrorName(self, code: IntEnum) -> bytes:
        return code.name.encode()

    def cuGetErrorString(self, code: IntEnum) -> bytes:
        return code.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    # -- memory

    def used(self) -> int:
        return sum(map(len, self.buffers.values()))

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.total - self.used(), self.total

    def cuMemAlloc(self, nbytes: int) -> int:
        buffer = (ctypes.c_char * nbytes)()
        self.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def cuMemFree(self, pointer: int) -> None:
        del self.buffers[pointer]

    def cuMemcpyHtoD(self, pointer: int, host: int, nbytes: int) -> None:
        self.check_range(pointer, nbytes)
        ctypes.memmove(pointer, host, nbytes)

    def cuMemcpyDtoH(self, host: int, pointer: int, nbytes: int) -> None:
        self.check_range(pointer, nbytes)
        ctypes.memmove(host, pointer, nbytes)

    def check_range(self, pointer: int, nbytes: int) -> None:
        assert any(a <= pointer and pointer + nbytes <= a + len(b) for a, b in self.buffers.items()), "out of bounds"

    def cuPointerGetAttribute(self, name: str, pointer: int) -> int:
        return 0

    # -- streams and events

    def cuStreamCreate(self, flags: str) -> int:
        return 0x5000 + len(self.log)

    def cuStreamDestroy(self, stream: int) -> None: ...
    def cuEventCreate(self, flags: str) -> int:
        return 0xE000 + len(self.log)

    def cuEventDestroy(self, event: int) -> None: ...
    def cuEventRecord(self, event: int, stream: int) -> None: ...
    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None: ...
    def cuEventElapsedTime(self, start: int, stop: int) -> float:
        return 0.25

    # -- programs

    def cuModuleLoadDataEx(self, image: bytes, count: int, options: list[str], values: list[object]) -> int:
        assert image.endswith(b"\0")
        assert len(options) == len(values) == count
        return 0xAAAA

    def cuModuleUnload(self, module: int) -> None: ...
    def cuModuleGetFunction(self, module: int, name: bytes) -> str:
        return name.decode()

    def cuFuncSetAttribute(self, function: str, name: str, value: int) -> None: ...
    def cuFuncGetAttribute(self, name: str, function: str) -> int:
        return self.function_attributes[name]

    def cuLaunchKernel(self, function: str, *rest: int) -> None:
        x, y, z, *_, parameters, _ = rest
        kernel = self.kernels.get(function)
        if kernel is not None:
            kernel(parameters, (x, y, z))


    def CUlaunchConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    def cuLaunchKernelEx(self, config: SimpleNamespace, function: str, parameters: int, extra: int) -> None:
        kernel = self.kernels.get(function)
        if kernel is not None:
            kernel(parameters, (config.gridDimX, config.gridDimY, config.gridDimZ))

    def cuTensorMapEncodeTiled(
        self, dtype: str, rank: int, address: int, extents: list[int], strides: list[int], box: list[int], steps: list[int], *modes: str
    ) -> FakeMap:
        assert all(type(number) is FakeInteger for number in (*extents, *strides, *box, *steps))
        assert len(extents) == len(box) == len(steps) == rank
        assert len(strides) == max(1, rank - 1)
        assert len(modes) == 4
        # What the driver itself refuses.
        assert all(1 <= extent <= 1 << 32 for extent in extents)
        assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in strides)
        assert address > 0
        assert address % 16 == 0
        return FakeMap(address, len(self.calls("cuTensorMapEncodeTiled")))

    def cuTensorMapEncodeIm2col(
        self, dtype: str, rank: int, address: int, extents: list[int], strides: list[int], lower: list[int], upper: list[int],
        channels: int, pixels: int, steps: list[int], *modes: str
    ) -> FakeMap:  # fmt: skip
        assert all(type(number) is FakeInteger for number in (*extents, *strides, *steps))
        assert all(type(number) is int for number in (*lower, *upper, channels, pixels))
        assert len(extents) == len(steps) == rank == 4
        assert (len(strides), len(lower), len(upper), len(modes)) == (3, 2, 2, 4)
        # What the driver itself refuses.
        assert all(1 <= extent <= 1 << 32 for extent in extents)
        assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in strides)
        assert all(-128 <= offset <= 127 for offset in (*lower, *upper))
        assert all(extent - 1 + high >= low for extent, low, high in zip(extents[1:3], lower, upper, strict=True))
        assert 1 <= channels <= 256
        assert 1 <= pixels <= 1024
        assert all(1 <= step <= 8 for step in steps)
        assert address > 0
        assert address % 16 == 0
        return FakeMap(address, 1000 + len(self.calls("cuTensorMapEncodeIm2col")))
