"""NVIDIA GPUs: finding them, their memory, timing, and running artifacts of kind 'ptx' on them.

In: an `Artifact` and arrays on a device; out: launches queued on a stream. Nothing here needs a GPU, a driver or the bindings to
be imported: `devices()` is then empty and `unavailable_reason()` says why. A device uses the primary context, shared with other
libraries of the process, and leaves the calling thread's current context as it found it. Launches return at once; what goes wrong
on the device is raised by the next call that notices, with the kernels that could have caused it, at the latest by `synchronize`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import SupportsInt

import numpy as np

from tilewright.base import dtypes
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, TilewrightError, UserError
from tilewright.base.target import Target, for_device
from tilewright.runtime.cuda_driver import KERNEL_FAULTS, OUT_OF_MEMORY, UNAVAILABLE, Driver, Results, load_driver
from tilewright.runtime.cuda_faults import Faults, unavailable
from tilewright.runtime.cuda_program import CudaProgram
from tilewright.runtime.cuda_streams import CudaStreams
from tilewright.runtime.device_array import DeviceArray, foreign_dtype, row_major
from tilewright.runtime.device_memory import Block, MemoryPool, stream_handle
from tilewright.runtime.launch_log import LaunchLog
from tilewright.runtime.libraries import is_tensor
from tilewright.runtime.streams import SPECIAL, recorders, refuse_in_capture

__all__ = ["CudaDevice", "CudaProgram", "devices", "unavailable_reason"]

ErrorCallback = Callable[[TilewrightError], None]


class CudaDevice(CudaStreams):
    """One GPU. Its context is made on first use."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        super().__init__()
        self.driver = driver
        self.ordinal = ordinal
        (self._handle,) = driver.call("cuDeviceGet", ordinal)
        (name,) = driver.call("cuDeviceGetName", 256, self._handle)
        self.name = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        self.label = f"cuda:{ordinal} ({self.name})"
        self.memory = int(driver.call("cuDeviceTotalMem", self._handle)[0])
        self.capability = (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR"))
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.max_shared = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._get_current = driver.module.cuCtxGetCurrent
        self._wait_for_all = driver.module.cuCtxSynchronize
        self.faults = Faults(self.label)
        self.pool = MemoryPool(self)
        self.log = LaunchLog()
        self._callbacks: dict[ErrorCallback, int] = {}
        self._retired: deque[SupportsInt] = deque()

    def __repr__(self) -> str:
        major, minor = self.capability
        return f"CudaDevice({self.label}, compute capability {major}.{minor}, {self.memory >> 20} MiB)"

    def _attribute(self, name: str) -> int:
        attribute = self.driver.constant("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.driver.call("cuDeviceGetAttribute", attribute, self._handle, where=self.label)[0])

    @cached_property
    def target(self) -> Target:
        """What to compile for. Raises UserError when this generation is not known, DeviceError when the driver is too old for it."""
        found = for_device(*self.capability, self.multiprocessors, self.max_shared)
        self.driver.check_ptx(found.ptx, self.label)
        return found

    # -- calls --------------------------------------------------------------------------------------------------

    @cached_property
    def _context(self) -> SupportsInt:
        status, results = self.driver.attempt("cuDevicePrimaryCtxRetain", self._handle)
        if status == UNAVAILABLE:
            raise unavailable(self.label, self._attribute("COMPUTE_MODE"))
        if status:
            raise self.driver.error("cuDevicePrimaryCtxRetain", status, self.label)
        return results[0]

    @cached_property
    def context_address(self) -> int:
        return int(self._context)

    def enter(self) -> bool:
        """Make the context current on this thread; True when another one was and `leave` must bring it back."""
        if self.faults.lost:
            raise self.faults.again()
        # The one driver call on every launch besides the launch itself, so without the layers between.
        status, current = self._get_current()
        if status != 0:
            raise self.driver.error("cuCtxGetCurrent", int(status), self.label)
        number = int(current)
        if number == self.context_address:
            return False
        if number:
            self.driver.call("cuCtxPushCurrent", self._context, where=self.label)
            return True
        self.driver.call("cuCtxSetCurrent", self._context, where=self.label)
        return False

    def leave(self, entered: bool) -> None:
        if entered:
            self.driver.call("cuCtxPopCurrent", where=self.label)

    @contextmanager
    def active(self) -> Iterator[None]:
        """`with device.active():` the context is current inside."""
        entered = self.enter()
        try:
            yield
        finally:
            self.leave(entered)

    def call(self, api: str, *arguments: object) -> Results:
        """A driver call inside the active context, with errors that name this device and the kernels under way."""
        status, results = self.driver.attempt(api, *arguments)
        if status:
            raise self.error(api, status)
        return results

    def error(self, api: str, status: int, detail: str = "") -> TilewrightError:
        """The error for a failed call; callbacks given at launches hear of kernel faults. After the first of these it is a short one."""
        if self.faults.lost:
            return self.faults.again()
        kernels = self.faults.named(name for _, name in self.launched)
        error = self.driver.error(api, status, self.label + (f", {detail}" if detail else ""), kernels)
        if status in KERNEL_FAULTS:
            self.faults.lose(f"a fault of {' or '.join(kernels) or 'another library'} ended its context")
            callbacks, self._callbacks = self._callbacks, {}
            for callback in callbacks:
                callback(error)
        return error

    @property
    def launched(self) -> dict[tuple[int, str], None]:
        """Stream and name of each kernel launched since that stream was last synchronised; -1 stands for several streams."""
        return self.log.pending()

    def watch(self, callback: ErrorCallback, stream: int) -> None:
        """Call `callback` with the error if work launched on `stream` up to its next synchronisation faults."""
        self._callbacks[callback] = stream

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for all work, or for that of one stream. Raises what went wrong in it."""
        if SPECIAL.value:
            refuse_in_capture("synchronize()", self.ordinal, "synchronise before or after the capture")
        if stream is not None:
            stream = stream_handle(stream)
        entered = self.enter()
        try:
            number = self.log.begin_wait()
            if stream is None:
                # The other half of a short kernel's round trip, so without the layers between.
                status = int(self._wait_for_all()[0])
            else:
                status, _ = self.driver.attempt("cuStreamSynchronize", stream)
            if status:
                raise self.error("cuCtxSynchronize" if stream is None else "cuStreamSynchronize", status)
            self.log.end_wait(number, stream)
            if self._callbacks:
                self._callbacks = {c: s for c, s in list(self._callbacks.items()) if stream not in (None, s)}
            while stream is None and self._retired:
                self.call("cuModuleUnload", self._retired.popleft())
        finally:
            self.leave(entered)

    # -- memory -------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        """A new row-major array with undefined contents, for work on `stream`."""
        extents = tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise UserError.at("TW004", f"an array cannot have shape {extents}")
        count = 1
        for extent in extents:
            count *= extent
        recorder = recorders.get(stream) if recorders else None
        block = (recorder or self.pool).take(count * dtype.itemsize, stream_handle(stream))
        return DeviceArray(self, block.pointer, extents, dtype, None, block)

    def from_numpy(self, values: np.ndarray, dtype: DType | None = None, stream: int = 0) -> DeviceArray:
        """A copy of a host array. `dtype` is needed only where NumPy's does not tell (packed blocks)."""
        known = dtype or dtypes.from_numpy(values.dtype)
        if known is None or known.numpy != values.dtype:
            raise UserError.at("TW009", f"arrays of {values.dtype} are not supported on a device")
        array = self.empty(values.shape, known, stream)
        array.copy_from(values)
        return array

    def wrap(self, item: object, stream: int = 0) -> DeviceArray:
        """An array of another library that is on this device, without a copy; work on `stream` waits for its producer."""
        if isinstance(item, DeviceArray):
            self._check_device(item.device.ordinal)
            return item
        if is_tensor(item):
            return self._wrap_torch(item)
        pointer, shape, strides, dtype, producer, readonly = _describe(item)
        if pointer:
            with self.active():
                attribute = self.driver.constant("CUpointer_attribute", "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL")
                self._check_device(int(self.call("cuPointerGetAttribute", attribute, pointer)[0]))
        stream = stream_handle(stream)
        if producer is not None and stream_handle(producer) != stream:
            self.order(stream, stream_handle(producer))
        block = Block(pointer, 0, stream, None)
        return DeviceArray(self, pointer, shape, dtype, strides, block, item, readonly)

    def _wrap_torch(self, tensor: object) -> DeviceArray:
        """A PyTorch tensor by its own methods: its array interface takes ten times as long."""
        if not tensor.is_cuda:  # type: ignore[attr-defined]
            raise UserError.at("TW009", "a tensor on the CPU is not an array on a CUDA device", help="pass tensor.cuda()")
        if tensor.requires_grad:  # type: ignore[attr-defined]
            raise UserError.at("TW009", "the tensor requires a gradient, which kernels do not compute", help="pass tensor.detach()")
        if tensor.is_neg():  # type: ignore[attr-defined]
            raise UserError.at("TW009", "the tensor is a negated view of other elements", help="pass tensor.resolve_neg()")
        self._check_device(tensor.get_device())  # type: ignore[attr-defined]
        kind = tensor.dtype  # type: ignore[attr-defined]
        dtype = _torch_dtypes.get(kind)
        if dtype is None:
            dtype = foreign_dtype(tensor, "")
            if dtype is None:
                raise UserError.at("TW009", f"arrays of {kind} are not supported on a device")
            _torch_dtypes[kind] = dtype
        pointer = int(tensor.data_ptr())  # type: ignore[attr-defined]
        shape, strides = tuple(tensor.shape), tensor.stride()  # type: ignore[attr-defined]
        return DeviceArray(self, pointer, shape, dtype, strides, Block(pointer, 0, 0, None), tensor)

    def _check_device(self, ordinal: int) -> None:
        if ordinal != self.ordinal:
            raise DeviceError.at("TW033", f"the array is on cuda:{ordinal}, but was given to {self.label}")

    def free_memory(self) -> tuple[int, int]:
        """Bytes free and in all, as the driver sees them."""
        with self.active():
            free, total = self.call("cuMemGetInfo")
            return int(free), int(total)

    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        """Device to device, in stream order; both arrays are contiguous and of one form."""
        with self.active():
            self.call("cuMemcpyDtoDAsync", target.launch_pointer(stream), source.launch_pointer(stream), source.nbytes, stream)
        if recorders and stream in recorders:
            recorders[stream].keep(target, source)

    def copy_in(self, pointer: int, host: int, nbytes: int, streams: Iterable[int]) -> None:
        """Host to device, after the work queued on `streams`."""
        self._refuse_copy()
        with self.active():
            self._settle(streams)
            self.call("cuMemcpyHtoD", pointer, host, nbytes)

    def copy_out(self, host: int, pointer: int, nbytes: int, streams: Iterable[int]) -> None:
        """Device to host, after the work queued on `streams`."""
        self._refuse_copy()
        with self.active():
            self._settle(streams)
            self.call("cuMemcpyDtoH", host, pointer, nbytes)

    def _refuse_copy(self) -> None:
        if SPECIAL.value:
            refuse_in_capture(
                "a copy between host and device", self.ordinal,
                "copy inputs to the device before the capture and read results after a replay",
            )  # fmt: skip

    def _settle(self, streams: Iterable[int]) -> None:
        # A plain copy is ordered with the default stream by itself.
        for stream in streams:
            if stream:
                self.call("cuStreamSynchronize", stream)

    def raw_allocate(self, nbytes: int) -> int:
        """For the pool: a pointer, or 0 when memory is exhausted."""
        with self.active():
            status, results = self.driver.attempt("cuMemAlloc", nbytes)
            if status == OUT_OF_MEMORY:
                return 0
            if status:
                raise self.error("cuMemAlloc", status, f"{nbytes} bytes")
            return int(results[0])

    def raw_free(self, pointers: list[int]) -> None:
        """For the pool: free what streams may still be using, so wait first."""
        with self.active():
            self.call("cuCtxSynchronize")
            for pointer in pointers:
                self.call("cuMemFree", pointer)

    def exhausted(self, nbytes: int, pool: MemoryPool) -> TilewrightError:
        """For the pool: the error when memory has run out."""
        free, total = self.free_memory()
        limit = f", of a limit of {pool.limit} bytes" if pool.limit is not None else ""
        return DeviceError.at(
            "TW031",
            f"out of memory on {self.label}: asked for {nbytes} bytes, {free} bytes are free of {total}; "
            f"Tilewright arrays hold {pool.in_use} bytes{limit}",
            help="drop arrays that are not needed, or work on smaller pieces",
        )

    # -- programs -----------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> CudaProgram:
        """The artifact's code on this device, ready to run."""
        with self.active():
            loaded = CudaProgram(self, artifact)
        self.faults.note(artifact.launches)
        return loaded

    def retire(self, module: SupportsInt) -> None:
        """Unload a module once nothing can be running of it: at the next full synchronisation."""
        self._retired.append(module)


_Description = tuple[int, tuple[int, ...], tuple[int, ...], DType, int | None, bool]


def _describe(item: object) -> _Description:
    """Pointer, shape, strides in elements, dtype, producer's stream (None where it wants no waiting) and read-only flag."""
    interface = None
    try:
        interface = getattr(item, "__cuda_array_interface__", None)
    except (KeyError, TypeError, RuntimeError):
        # PyTorch has no code for its 8-bit floats and refuses tensors that need gradients; its own methods tell all.
        if getattr(item, "requires_grad", False):
            raise
    if isinstance(interface, dict):
        typestr = str(interface["typestr"])
        dtype = foreign_dtype(item, typestr)
        if dtype is None:
            raise UserError.at("TW009", f"arrays of type '{typestr}' are not supported on a device")
        if interface.get("mask") is not None:
            raise UserError.at("TW009", "masked arrays are not supported on a device")
        shape = tuple(int(extent) for extent in interface["shape"])
        steps = interface.get("strides")
        if steps is not None and any(step % dtype.itemsize for step in steps):
            raise UserError.at("TW009", f"strides {tuple(steps)} are not multiples of the {dtype.itemsize} bytes of {dtype}")
        strides = row_major(shape) if steps is None else tuple(int(step) // dtype.itemsize for step in steps)
        pointer, readonly = interface["data"]
        return int(pointer or 0), shape, strides, dtype, interface.get("stream"), bool(readonly)
    data_pointer, stride = getattr(item, "data_ptr", None), getattr(item, "stride", None)
    if data_pointer is None or stride is None or not getattr(item, "is_cuda", False):
        raise UserError.at(
            "TW009",
            f"a {type(item).__name__} is not an array on a CUDA device",
            help="pass a DeviceArray, or an array with __cuda_array_interface__ (PyTorch, CuPy, Numba, JAX)",
        )
    dtype = foreign_dtype(item, "")
    if dtype is None:
        raise UserError.at("TW009", f"arrays of {getattr(item, 'dtype', '?')} are not supported on a device")
    return int(data_pointer()), tuple(getattr(item, "shape", ())), tuple(stride()), dtype, None, False


# -- finding devices ------------------------------------------------------------------------------------------------

_torch_dtypes: dict[object, DType] = {}
_lock = threading.Lock()
_found: tuple[CudaDevice, ...] | None = None
_reason = ""


def devices() -> list[CudaDevice]:
    """The GPUs of this machine; empty where there is none, and then `unavailable_reason` says why."""
    global _found, _reason
    with _lock:
        if _found is None:
            _found = ()
            try:
                driver = load_driver()
                (count,) = driver.call("cuDeviceGetCount")
                _found = tuple(CudaDevice(driver, ordinal) for ordinal in range(int(count)))
                _reason = "" if _found else "the NVIDIA driver reports no device"
            except DeviceError as error:
                _reason = error.diagnostics[0].message
        return list(_found)


def unavailable_reason() -> str:
    """Why `devices()` is empty; '' when it is not."""
    devices()
    return _reason


def _forget() -> None:
    """A forked child cannot use its parent's contexts; it asks the driver anew and is told so."""
    global _lock, _found
    _lock = threading.Lock()
    _found = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
