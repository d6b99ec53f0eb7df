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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import SupportsInt

from tilewright.base.artifact import Artifact
from tilewright.base.errors import DeviceError, TilewrightError
from tilewright.base.limits import Limits
from tilewright.base.target import Target, for_device
from tilewright.runtime.core.launch_log import LaunchLog
from tilewright.runtime.core.streams import FAST_PATH_OFF, refuse_in_capture
from tilewright.runtime.cuda.driver import KERNEL_FAULTS, UNAVAILABLE, Driver, Results, load_driver
from tilewright.runtime.cuda.faults import Faults, unavailable
from tilewright.runtime.cuda.limits import limits_of
from tilewright.runtime.cuda.memory import CudaMemory
from tilewright.runtime.cuda.program import CudaProgram
from tilewright.runtime.cuda.streams import CudaStreams
from tilewright.runtime.memory.device_memory import stream_handle

__all__ = ["CudaDevice", "CudaProgram", "devices", "unavailable_reason"]

ErrorCallback = Callable[[TilewrightError], None]


class CudaDevice(CudaStreams, CudaMemory):
    """One GPU. Its context is made on first use."""

    writes_pinned = True

    def __init__(self, driver: Driver, ordinal: int) -> None:
        super().__init__()
        self.driver = driver
        self.ordinal = ordinal
        (self._handle,) = driver.call("cuDeviceGet", ordinal)
        (name,) = driver.call("cuDeviceGetName", 256, self._handle)
        self.name = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        self.id = f"cuda:{ordinal}"
        self.label = f"{self.id} ({self.name})"
        self.memory = int(driver.call("cuDeviceTotalMem", self._handle)[0])
        self.capability = (self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR"))
        self.multiprocessors = self.attribute("MULTIPROCESSOR_COUNT")
        self.max_shared = self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._get_current = driver.module.cuCtxGetCurrent
        self._wait_for_all = driver.module.cuCtxSynchronize
        self.faults = Faults(self.label)
        self.start_memory()
        self.log = LaunchLog()
        self.quick_wait = None
        self.wait_memory = None
        self._callbacks: dict[ErrorCallback, int] = {}
        self._retired: deque[SupportsInt] = deque()

    def __repr__(self) -> str:
        major, minor = self.capability
        return f"CudaDevice({self.label}, compute capability {major}.{minor}, {self.memory >> 20} MiB)"

    def attribute(self, name: str) -> int:
        """What the driver says of `CU_DEVICE_ATTRIBUTE_<name>`."""
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
    def context(self) -> SupportsInt:
        """The primary context, retained."""
        status, results = self.driver.attempt("cuDevicePrimaryCtxRetain", self._handle)
        if status == UNAVAILABLE:
            raise unavailable(self.label, self.attribute("COMPUTE_MODE"))
        if status:
            raise self.driver.error("cuDevicePrimaryCtxRetain", status, self.label)
        return results[0]

    @cached_property
    def context_address(self) -> int:
        return int(self.context)

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
            self.driver.call("cuCtxPushCurrent", self.context, where=self.label)
            return True
        self.driver.call("cuCtxSetCurrent", self.context, where=self.label)
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
        stopped = self.faults.stopped() if status in KERNEL_FAULTS else None
        error = stopped or self.driver.error(api, status, self.label + (f", {detail}" if detail else ""), kernels)
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

    @property
    def lost(self) -> str:
        return self.faults.lost

    def limits(self) -> Limits:
        return limits_of(self)

    def watch_module(self, module: SupportsInt, artifact: Artifact) -> None:
        self.faults.watchdogs.watch(self, module, artifact)

    def index_record(self, artifact: Artifact) -> int:
        return self.faults.indices.record(self, artifact.sites)

    def drop_index_record(self, address: int) -> None:
        self.faults.indices.drop(address)

    def raise_reports(self) -> None:
        """After a wait: raise what kernels found outside their arrays. They left such accesses out, so the device goes on."""
        if self.faults.indices.flag.value:
            with self.active():
                error = self.faults.indices.take(self)
            if error is not None:
                raise error

    def watch(self, callback: ErrorCallback, stream: int) -> None:
        """Call `callback` with the error if work launched on `stream` up to its next synchronisation faults."""
        self._callbacks[callback] = stream

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for all work, or for that of one stream. Raises what went wrong in it."""
        if stream is None and self.quick_wait is not None and not (self._callbacks or self._retired or self.faults.lost):
            status = self.quick_wait()
            if status is True:
                self.raise_reports()
                return
            if isinstance(status, int):
                raise self.error("cuCtxSynchronize", status)
        if FAST_PATH_OFF.value:
            refuse_in_capture("synchronize()", self.ordinal, "synchronise before or after the capture")
        if stream is not None:
            stream = stream_handle(stream)
        entered = self.enter()
        try:
            number = self.log.begin_wait()
            dropped = self.faults.indices.dropped() if stream is None else []
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
            try:
                self.raise_reports()
            finally:
                self.faults.indices.settle(dropped)
        finally:
            self.leave(entered)

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


# -- finding devices ------------------------------------------------------------------------------------------------

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
                said = error.diagnostics[0]
                _reason = f"{said.message}; {said.help}" if said.help.startswith("pip install") else said.message
        return list(_found)


def in_use() -> tuple[CudaDevice, ...]:
    """Those somebody has asked for: this starts no driver. The object is another one after a fork, with the devices."""
    return _found or ()


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
