"""The null driver's functions as C functions, for machine code that calls the driver by address.

In: a name; out: the address of a function with the C signature of `cuda.h`, which calls the same method as Python would. Results
go where the pointers point that come first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

Q, W, Z, P, F = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_float
N = ctypes.c_int32

SIGNATURES: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "cuInit": ((), (W,)),
    "cuDriverGetVersion": ((N,), ()),
    "cuCtxGetCurrent": ((Q,), ()),
    "cuCtxSetCurrent": ((), (Q,)),
    "cuCtxPushCurrent": ((), (Q,)),
    "cuCtxPopCurrent": ((Q,), ()),
    "cuCtxGetDevice": ((N,), ()),
    "cuCtxSynchronize": ((), (Q,)),  # as cuGetProcAddress gives it from CUDA 13.0 on
    "cuDevicePrimaryCtxRetain": ((Q,), (N,)),
    "cuDeviceGetCount": ((N,), ()),
    "cuLaunchKernel": ((), (Q, W, W, W, W, W, W, W, Q, Q, Q)),
    "cuLaunchCooperativeKernel": ((), (Q, W, W, W, W, W, W, W, Q, Q)),
    "cuLaunchKernelEx": ((), (Q, Q, Q, Q)),
    "cuLaunchHostFunc": ((), (Q, Q, Q)),
    "cuMemAlloc": ((Q,), (Z,)),
    "cuMemFree": ((), (Q,)),
    "cuMemAllocAsync": ((Q,), (Z, Q)),
    "cuMemFreeAsync": ((), (Q, Q)),
    "cuMemAllocManaged": ((Q,), (Z, W)),
    "cuMemHostAlloc": ((Q,), (Z, W)),
    "cuMemFreeHost": ((), (Q,)),
    "cuMemHostRegister": ((), (Q, Z, W)),
    "cuMemHostUnregister": ((), (Q,)),
    "cuMemGetInfo": ((Z, Z), ()),
    "cuMemcpyHtoD": ((), (Q, Q, Z)),
    "cuMemcpyDtoH": ((), (Q, Q, Z)),
    "cuMemcpyDtoD": ((), (Q, Q, Z)),
    "cuMemcpyHtoDAsync": ((), (Q, Q, Z, Q)),
    "cuMemcpyDtoHAsync": ((), (Q, Q, Z, Q)),
    "cuMemcpyDtoDAsync": ((), (Q, Q, Z, Q)),
    "cuMemcpyAsync": ((), (Q, Q, Z, Q)),
    "cuMemsetD8Async": ((), (Q, ctypes.c_uint8, Z, Q)),
    "cuMemsetD32Async": ((), (Q, W, Z, Q)),
    "cuStreamCreate": ((Q,), (W,)),
    "cuStreamCreateWithPriority": ((Q,), (W, N)),
    "cuStreamDestroy": ((), (Q,)),
    "cuStreamSynchronize": ((), (Q,)),
    "cuStreamQuery": ((), (Q,)),
    "cuStreamWaitEvent": ((), (Q, Q, W)),
    "cuStreamBeginCapture": ((), (Q, W)),
    "cuStreamIsCapturing": ((), (Q, P)),
    "cuEventCreate": ((Q,), (W,)),
    "cuEventDestroy": ((), (Q,)),
    "cuEventRecord": ((), (Q, Q)),
    "cuEventQuery": ((), (Q,)),
    "cuEventSynchronize": ((), (Q,)),
    "cuEventElapsedTime": ((F,), (Q, Q)),
    "cuGraphLaunch": ((), (Q, Q)),
    "cuPointerGetAttribute": ((), (P, N, Q)),
}
"""Types of what a function writes through its first pointers, then of its plain arguments."""
_WRITES_LATE = {"cuStreamIsCapturing": (1, N), "cuPointerGetAttribute": (0, Q)}
"""Functions whose pointer is not where the table puts it, with its position among the plain arguments."""


class EntryPoints:
    """C functions for one driver; they live as long as it does."""

    def __init__(self, find: Callable[[str], Callable[..., tuple[object, ...]]]) -> None:
        self._find = find
        self._made: dict[str, object] = {}

    def address(self, name: str) -> int:
        """The address, or 0 where there is no such function."""
        if name not in SIGNATURES:
            return 0
        if name not in self._made:
            results, arguments = SIGNATURES[name]
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *([P] * len(results)), *arguments)
            self._made[name] = kind(self._adapter(name, results))
        address = ctypes.cast(self._made[name], P).value  # type: ignore[arg-type]
        assert address is not None
        return address

    def _adapter(self, name: str, results: tuple[type, ...]) -> Callable[..., int]:
        function = self._find(name)
        late = _WRITES_LATE.get(name)

        def call(*values: int) -> int:
            try:
                places, arguments = values[: len(results)], list(values[len(results) :])
                types = results
                if late is not None:
                    places, types = (arguments.pop(late[0]),), (late[1],)
                if name == "cuCtxSynchronize":
                    _, current = self._find("cuCtxGetCurrent")()
                    if arguments.pop() not in (0, int(current)):  # type: ignore[call-overload]
                        return 709
                status, *given = function(*arguments)
                if not status:
                    for place, type_, value in zip(places, types, given):
                        type_.from_address(place).value = value  # type: ignore[attr-defined]
                return int(status)
            except Exception:
                import traceback

                traceback.print_exc()
                return 999

        return call
