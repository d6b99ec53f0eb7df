"""The null driver as a whole: initialisation, devices, contexts, tensor maps and addresses of native functions."""

from __future__ import annotations

import ctypes
import os

from null_cuda.graphs import GraphCalls
from null_cuda.native import EntryPoints
from null_cuda.programs import LaunchAttribute
from null_cuda.state import (
    CONTEXT,
    DEVICE_UNAVAILABLE,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_VALUE,
    NO_DEVICE,
    Context,
    CUresult,
    Refused,
)  # fmt: skip

_MEANINGS = {2: "out of memory", 3: "initialization error", 46: "CUDA-capable device(s) is/are busy or unavailable"}


class Integer(int):
    """The bindings take numbers of a tensor map only as objects of their own."""


class TensorMap:
    """An encoded map: the address it is for, then a number that no other map has."""

    def __init__(self, address: int, number: int) -> None:
        self.words = (ctypes.c_uint64 * 16)(address, number)

    def getPtr(self) -> int:
        return ctypes.addressof(self.words)


class NullCuda(GraphCalls):
    """See the package. `memory` is in bytes per process, `count` the number of devices, `version` the driver's (13000 is 13.0)."""

    def __init__(
        self,
        memory: int = 1 << 30,
        count: int = 1,
        *,
        mode: str = "eager",
        seed: int = 0,
        version: int = 13000,
        capability: tuple[int, int] = (9, 0),
        name: str = "Fake GPU",
        record: bool = True,
    ) -> None:
        super().__init__(memory, count, mode, seed, version, capability, record)
        self.name = name
        self.multiprocessors = 132
        self.cuuint64_t = self.cuuint32_t = Integer
        self.CUlaunchAttribute = LaunchAttribute
        self.entry_points = EntryPoints(lambda function: getattr(self, function))
        self.start_memory()
        self.start_execution()
        self.start_graphs()

    # -- starting -----------------------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> None:
        if flags:
            raise Refused(INVALID_VALUE)
        if self.process and self.process != os.getpid():
            raise Refused(3)
        if not self.count:
            raise Refused(NO_DEVICE)
        self.process = os.getpid()

    def cuDriverGetVersion(self) -> int:
        return self.version

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[int, int]:
        address = self.entry_points.address(symbol.decode())
        if not address:
            raise Refused(500)
        return address, self.CUdriverProcAddressQueryResult(0)

    def cuGetErrorName(self, code: int) -> bytes:
        return CUresult(code).name.encode()

    def cuGetErrorString(self, code: int) -> bytes:
        known = CUresult(code)
        return _MEANINGS.get(int(code), known.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()).encode()

    # -- devices ------------------------------------------------------------------------------------------------

    def _device(self, device: int) -> int:
        if int(device) not in range(self.count):
            raise Refused(INVALID_DEVICE)
        return int(device)

    def cuDeviceGetCount(self) -> int:
        return self.count

    def cuDeviceGet(self, ordinal: int) -> int:
        return self._device(ordinal)

    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        self._device(device)
        return self.name.encode()[: length - 1] + b"\0\0\0"

    def cuDeviceTotalMem(self, device: int) -> int:
        self._device(device)
        return self.total

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        self._device(device)
        name = self.CUdevice_attribute(attribute).name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        answers = {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0], "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MULTIPROCESSOR_COUNT": self.multiprocessors, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
            "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10, "COMPUTE_MODE": self.compute_mode,
            "MAX_THREADS_PER_BLOCK": 1024, "MAX_BLOCK_DIM_X": 1024, "MAX_BLOCK_DIM_Y": 1024, "MAX_BLOCK_DIM_Z": 64, "WARP_SIZE": 32,
            "MAX_GRID_DIM_X": 2**31 - 1, "MAX_GRID_DIM_Y": 65535, "MAX_GRID_DIM_Z": 65535, "MAX_REGISTERS_PER_BLOCK": 65536,
            "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536, "MAX_THREADS_PER_MULTIPROCESSOR": 2048, "CLOCK_RATE": 1_980_000,
            "MEMORY_CLOCK_RATE": 3_201_000, "GLOBAL_MEMORY_BUS_WIDTH": 6144, "L2_CACHE_SIZE": 60 << 20, "UNIFIED_ADDRESSING": 1,
            "MANAGED_MEMORY": 1, "CONCURRENT_MANAGED_ACCESS": 1, "PAGEABLE_MEMORY_ACCESS": 0, "CAN_MAP_HOST_MEMORY": 1,
            "MEMORY_POOLS_SUPPORTED": 1, "COOPERATIVE_LAUNCH": 1, "CLUSTER_LAUNCH": 1, "STREAM_PRIORITIES_SUPPORTED": 1,
            "ASYNC_ENGINE_COUNT": 3, "CONCURRENT_KERNELS": 1, "INTEGRATED": 0, "ECC_ENABLED": 1, "PCI_BUS_ID": int(device) + 1,
            "PCI_DEVICE_ID": 0, "PCI_DOMAIN_ID": 0, "TEXTURE_ALIGNMENT": 512, "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
            "HOST_REGISTER_SUPPORTED": 1, "KERNEL_EXEC_TIMEOUT": 0, "MAX_PITCH": 2**31 - 1, "TOTAL_CONSTANT_MEMORY": 64 << 10,
            "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
        }  # fmt: skip
        if name not in answers:
            raise Refused(INVALID_VALUE, f"the null driver has no answer for {name}")
        return answers[name]

    # -- contexts -----------------------------------------------------------------------------------------------

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        context = self.contexts[CONTEXT + self._device(device)]
        if self.compute_mode in (2, 3) and not context.retained:
            raise Refused(DEVICE_UNAVAILABLE)
        if context.reset:
            raise Refused(context.error)
        context.retained += 1
        return context.number

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        context = self.contexts[CONTEXT + self._device(device)]
        if not context.retained:
            raise Refused(INVALID_CONTEXT, "the primary context was released more often than retained")
        context.retained -= 1

    def cuDevicePrimaryCtxReset(self, device: int) -> None:
        old = self.contexts[CONTEXT + self._device(device)]
        for handle in [h for h in self.handles.values() if h.context is old]:
            self.drop(handle)
        for allocation in [a for a in self.allocations.values() if a.context is old and not a.adopted]:
            self._bury(allocation) if allocation.buffer is not None else self._forget(allocation)
        fresh = self.contexts[old.number] = Context(old.number, old.ordinal)
        fresh.retained, fresh.error, fresh.reset = old.retained, old.error, bool(old.error)

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int]:
        return 0, int(self.contexts[CONTEXT + self._device(device)].retained > 0)

    def cuCtxGetCurrent(self) -> int:
        return self.stack()[-1]

    def _context(self, context: object) -> int:
        number = int(context or 0)  # type: ignore[call-overload]
        if number and number not in self.contexts:
            raise Refused(INVALID_CONTEXT, f"{number:#x} is no context")
        return number

    def cuCtxSetCurrent(self, context: int) -> None:
        self.stack()[-1] = self._context(context)

    def cuCtxPushCurrent(self, context: int) -> None:
        number = self._context(context)
        if not number:
            raise Refused(INVALID_VALUE)
        self.stack().append(number)

    def cuCtxPopCurrent(self) -> int:
        if len(self.stack()) == 1:
            raise Refused(INVALID_CONTEXT, "the stack of contexts is empty")
        return self.stack().pop()

    def cuCtxGetDevice(self) -> int:
        return self.current().ordinal

    # -- tensor maps --------------------------------------------------------------------------------------------

    def cuTensorMapEncodeTiled(
        self, dtype: int, rank: int, address: int, extents: list[int], strides: list[int], box: list[int], steps: list[int], *modes: int
    ) -> TensorMap:
        assert all(type(number) is Integer for number in (*extents, *strides, *box, *steps))
        assert len(extents) == len(box) == len(steps) == rank
        assert len(strides) == max(1, rank - 1)
        assert len(modes) == 4
        self._check_map(address, extents, strides)
        return TensorMap(address, self.counts["cuTensorMapEncodeTiled"])

    def cuTensorMapEncodeIm2col(
        self, dtype: int, rank: int, address: int, extents: list[int], strides: list[int], lower: list[int], upper: list[int],
        channels: int, pixels: int, steps: list[int], *modes: int
    ) -> TensorMap:  # fmt: skip
        assert all(type(number) is Integer for number in (*extents, *strides, *steps))
        assert all(type(number) is int for number in (*lower, *upper, channels, pixels))
        assert len(extents) == len(steps) == rank == 4
        assert (len(strides), len(lower), len(upper), len(modes)) == (3, 2, 2, 4)
        self._check_map(address, extents, strides)
        legal = all(-128 <= offset <= 127 for offset in (*lower, *upper)) and 1 <= channels <= 256 and 1 <= pixels <= 1024
        legal = legal and all(extent - 1 + high >= low for extent, low, high in zip(extents[1:3], lower, upper, strict=True))
        if not legal or not all(1 <= step <= 8 for step in steps):
            raise Refused(INVALID_VALUE, "a map of images the hardware does not know")
        return TensorMap(address, 1000 + self.counts["cuTensorMapEncodeIm2col"])

    def _check_map(self, address: int, extents: list[int], strides: list[int]) -> None:
        legal = all(1 <= extent <= 1 << 32 for extent in extents) and address > 0 and address % 16 == 0
        if not legal or not all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in strides):
            raise Refused(INVALID_VALUE, f"a map at {address:#x} of {extents} with strides {strides}")
