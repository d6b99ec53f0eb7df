"""Copies of a GPU's memory: within it, from and to the host, from another GPU; with and without waiting.

In: arrays, or addresses with the streams that use them; out: copies queued on a stream, and `Ticket`s for those under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from tilewright.base.errors import UserError
from tilewright.runtime.core.device import Buffer, LoadedProgram, Transfer
from tilewright.runtime.core.streams import FAST_PATH_OFF, refuse_in_capture
from tilewright.runtime.cuda.context import CudaContext
from tilewright.runtime.cuda.host_memory import STAGED, Registry, Staging
from tilewright.runtime.cuda.strided_copy import copy_artifact, copy_strided
from tilewright.runtime.memory import native_memory
from tilewright.runtime.memory.array_views import block_of
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.device_memory import HOST, stream_handle


class Ticket(Transfer):
    """A copy under way. Keeps what it needs alive; `wait` returns when it is done, `done` says whether it is."""

    def __init__(self, device: CudaContext, stream: int, finish: Callable[[], None] | None, *kept: object) -> None:
        self._device = device
        self._finish = finish
        self._kept = kept
        self.stream = stream
        self.event: Any = None
        """The driver's event after the copy; None once it was waited for."""
        event = device.new_event()
        try:
            device.call("cuEventRecord", event, stream)
        except BaseException:
            device.driver.attempt("cuEventDestroy", event)
            raise
        self.event = event

    def done(self) -> bool:
        """Whether the copy has ended; for one to plain memory `wait` has still to move it there."""
        if self.event is None:
            return True
        with self._device.active():
            status, _ = self._device.driver.attempt("cuEventQuery", self.event)
            if status == 600:
                return False
            if status:
                raise self._device.error("cuEventQuery", status)
            return True

    def wait(self) -> None:
        """Return when the copy is done and its target can be read."""
        if self.event is None:
            return
        with self._device.active():
            self._device.call("cuEventSynchronize", self.event)
            if self._finish is not None:
                self._finish()
            event, self.event = self.event, None
            self._kept, self._finish = (), None
            self._device.call("cuEventDestroy", event)
            self._device.raise_reports()

    def __del__(self) -> None:
        event = getattr(self, "event", None)
        if event is not None:
            self._device.retire_event(event)


class CudaCopies(CudaContext):
    """The part of a `CudaDevice` that copies."""

    def start_copies(self) -> None:
        """Called once by the device."""
        self._retired_events: list[Any] = []
        self._copy_programs: dict[tuple[int, int, bool], LoadedProgram] = {}

    @cached_property
    def registry(self) -> Registry:
        return Registry(self)

    @cached_property
    def staging(self) -> Staging:
        made = Staging(self)
        if native_memory.available():
            made.move = native_memory.move
        return made

    # -- copies -------------------------------------------------------------------------------------------------

    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        """Device to device, in stream order; both arrays are of one shape and dtype, and do not overlap unless they are the same."""
        if source.device is not self:
            self._copy_across(target, source, stream)
            return
        to, origin = target.launch_pointer(stream), source.launch_pointer(stream)
        if target.is_contiguous and source.is_contiguous:
            if source.nbytes:
                with self.active():
                    self.call("cuMemcpyDtoDAsync", to, origin, source.nbytes, stream)
            return
        ends = (origin, source.strides), (to, target.strides)
        copy_strided(self, source.dtype.itemsize, source.shape, *ends, stream)

    def _copy_across(self, target: DeviceArray, source: DeviceArray, stream: int) -> None:
        """From another device: what its streams do to the source is waited for there."""
        other = source.device
        if not isinstance(other, CudaContext):
            # A device of another kind: through the host.
            target.copy_from(source.numpy())
            return
        whole = source if source.is_contiguous else source.copy()
        for used in streams_to_wait(whole):
            other.wait_for(used)
        landing = target if target.is_contiguous else self.empty(target.shape, target.dtype, stream)
        if whole.nbytes:
            with self.active():
                ends = landing.launch_pointer(stream), self.context, whole.pointer, other.context
                self.call("cuMemcpyPeerAsync", *ends, whole.nbytes, stream)
                # The source's memory belongs to streams of the other device, which know nothing of this copy.
                self.call("cuStreamSynchronize", stream)
        if landing is not target:
            self.copy(target, landing, stream)

    def copy_program(self, width: int, rank: int, wide: bool) -> LoadedProgram:
        """The loaded kernel for copies between strided arrays."""
        found = self._copy_programs.get((width, rank, wide))
        if found is None:
            found = self._copy_programs.setdefault((width, rank, wide), self.load(copy_artifact(width, rank, wide)))
        return found

    def fill(self, array: DeviceArray, pattern: bytes, stream: int) -> None:
        """Repeat 1, 2 or 4 bytes over a contiguous array, in stream order."""
        with self.active():
            kind = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[len(pattern)]
            self.call(kind, array.pointer, int.from_bytes(pattern, "little"), array.nbytes // len(pattern), stream)

    def read(self, array: DeviceArray, out: np.ndarray) -> None:
        """Copy a contiguous array to the host, after the work queued on the streams that use it."""
        address = out.__array_interface__["data"][0]
        self.copy_out(address, array.pointer, out.nbytes, array.streams(), self.is_pinned(address, out.nbytes, out))

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        """Copy host values to a contiguous array, after the work queued on the streams that use it."""
        address = values.__array_interface__["data"][0]
        self.copy_in(array.pointer, address, values.nbytes, array.streams(), self.is_pinned(address, values.nbytes, values))

    def is_pinned(self, address: int, nbytes: int, array: np.ndarray | None = None) -> bool:
        """Whether the device reaches host memory by itself."""
        return (array is not None and block_of(array) is not None) or self.registry.covers(address, nbytes)

    def copy_in(self, pointer: int, host: int, nbytes: int, streams: Iterable[int], pinned: bool = False) -> None:
        """Host to device, after the work queued on `streams`, the first of which is the memory's home."""
        self._refuse_copy()
        with self.active():
            home, alone = self._settle(streams)
            if nbytes >= STAGED and not pinned:
                self.staging.copy_in(pointer, host, nbytes, home)
                if not alone:
                    self.call("cuStreamSynchronize", home)
            elif home:
                self.call("cuMemcpyHtoDAsync", pointer, host, nbytes, home)
                self.call("cuStreamSynchronize", home)
            else:
                self.call("cuMemcpyHtoD", pointer, host, nbytes)

    def copy_out(self, host: int, pointer: int, nbytes: int, streams: Iterable[int], pinned: bool = False) -> None:
        """Device to host, after the work queued on `streams`."""
        self._refuse_copy()
        with self.active():
            number = self.log.begin_wait()
            home, _ = self._settle(streams)
            if nbytes >= STAGED and not pinned:
                self.staging.copy_out(host, pointer, nbytes, home)
            elif home:
                self.call("cuMemcpyDtoHAsync", host, pointer, nbytes, home)
                self.call("cuStreamSynchronize", home)
            else:
                self.call("cuMemcpyDtoH", host, pointer, nbytes)
            self.log.end_wait(number, home)
            self.raise_reports()

    def copy_in_async(self, target: DeviceArray, source: np.ndarray, stream: int = 0) -> Ticket:
        """Host to device in stream order, without waiting. What is not pinned is read before this returns."""
        target.check_values(source)
        source = np.ascontiguousarray(source)
        return self._copy_async(target, source, stream, to_device=True)

    def copy_out_async(self, target: np.ndarray, source: DeviceArray, stream: int = 0) -> Ticket:
        """Device to host in stream order, without waiting. What is not pinned is written by the ticket's `wait`."""
        source.check_values(target, writing=False)
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise UserError.at("TW018", "the target of a copy must be a writable array in C order")
        return self._copy_async(source, target, stream, to_device=False)

    def _copy_async(self, array: DeviceArray, host: np.ndarray, stream: int, to_device: bool) -> Ticket:
        self._refuse_copy()
        stream = stream_handle(stream)
        if not array.is_contiguous:
            raise UserError.at("TW033", f"a view with strides {array.strides} cannot be copied without waiting", help="copy() it first")
        address, nbytes = host.__array_interface__["data"][0], host.nbytes
        finish: Callable[[], None] | None = None
        block: Buffer | None = block_of(host)
        with self.active():
            pointer = array.launch_pointer(stream)
            if nbytes:
                if block is None and not self.registry.covers(address, nbytes):
                    taken = block = self.pinned_pool.take(nbytes, HOST)
                    staged = taken.host = taken.pointer
                    if to_device:
                        self.staging.move(staged, address, nbytes)
                    else:
                        finish = lambda: self.staging.move(address, staged, nbytes)  # noqa: E731
                else:
                    staged = address
                if block is not None:
                    block.use_on(stream)
                if to_device:
                    self.call("cuMemcpyHtoDAsync", pointer, staged, nbytes, stream)
                else:
                    self.call("cuMemcpyDtoHAsync", staged, pointer, nbytes, stream)
            return Ticket(self, stream, finish, array, host, block)

    def _refuse_copy(self) -> None:
        if FAST_PATH_OFF.value:
            refuse_in_capture(
                "a copy between host and device", self.ordinal,
                "copy inputs to the device before the capture and read results after a replay",
            )  # fmt: skip

    def _settle(self, streams: Iterable[int]) -> tuple[int, bool]:
        """Wait for all streams; the home and whether it is the only one. A plain copy is ordered with the default stream by itself."""
        used = [0 if stream == HOST else stream for stream in streams if stream not in self.pool.forgotten]
        for stream in used:
            if stream:
                self.call("cuStreamSynchronize", stream)
        home = used[0] if used else 0
        return home, all(stream == home for stream in used)

    def new_event(self) -> Any:
        """An event without timing."""
        with self.active():
            while self._retired_events:
                self.driver.attempt("cuEventDestroy", self._retired_events.pop())
            flags = self.driver.constant("CUevent_flags", "CU_EVENT_DISABLE_TIMING")
            return self.call("cuEventCreate", flags)[0]

    def retire_event(self, event: Any) -> None:
        """Destroy an event later: this may run anywhere."""
        self._retired_events.append(event)


def streams_to_wait(array: DeviceArray) -> list[int]:
    """The streams known to use an array's memory."""
    return [stream for stream in (array.owner.stream, *array.owner.users) if stream != HOST]
