"""Points in the work of a stream. In: a stream, with its queue as it is; out: an event that says when that work is done.

`CudaEvent` is one of the driver's, taken from those its device has idle and given back when dropped: making one takes longer than
recording it. `HostEvent` is the same for a queue of the host. Both measure time between two of their kind.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import UserError
from tilewright.runtime.futures import Future
from tilewright.runtime.streams import recorders

if TYPE_CHECKING:
    from tilewright.runtime.cuda_streams import CudaStreams
    from tilewright.runtime.host_queue import HostQueue

NOT_READY = 600


class CudaEvent:
    """An event of a GPU. Recording it again moves it; who waits for it already is not affected."""

    __slots__ = ("captured", "device", "handle", "stream", "timing")

    def __init__(self, device: CudaStreams, timing: bool = False) -> None:
        self.device, self.timing = device, timing
        self.stream, self.captured = 0, False
        self.handle: Any = None
        self.handle = device.take_event(timing)

    def record(self, stream: int) -> CudaEvent:
        """Put it behind the work queued on `stream`."""
        device = self.device
        entered = device.enter()
        try:
            device.call("cuEventRecord", self.handle, stream)
        finally:
            device.leave(entered)
        self.stream, self.captured = stream, stream in recorders
        return self

    def done(self) -> bool:
        """Whether all work before it is done. Raises what went wrong in it."""
        device = self.device
        entered = device.enter()
        try:
            status, _ = device.driver.attempt("cuEventQuery", self.handle)
            if status not in (0, NOT_READY):
                raise device.error("cuEventQuery", status)
            return not status
        finally:
            device.leave(entered)

    def synchronize(self) -> None:
        """Wait for it. Raises what went wrong before it."""
        device = self.device
        entered = device.enter()
        try:
            device.call("cuEventSynchronize", self.handle)
        finally:
            device.leave(entered)

    def milliseconds(self, start: CudaEvent) -> float:
        """Time on the device from `start` to it, both reached."""
        if not (self.timing and start.timing):
            raise UserError.at("TW033", "the time between events made with timing=False is not known")
        with self.device.active():
            (found,) = self.device.call("cuEventElapsedTime", start.handle, self.handle)
        assert isinstance(found, float)
        return found

    def __del__(self) -> None:
        if self.handle is not None:
            self.device.idle_events[self.timing].append(self.handle)


class HostEvent:
    """A mark in a queue of the host."""

    __slots__ = ("_reached", "timing")

    def __init__(self, timing: bool = True) -> None:
        self.timing = timing
        self._reached: Future[float] | None = None

    def record(self, queue: HostQueue) -> HostEvent:
        """Put it behind what is queued."""
        if queue.idle():
            self._reached = Future()
            self._reached.set_result(time.perf_counter())
        else:
            self._reached = queue.submit(time.perf_counter)
        return self

    def future(self) -> Future[float]:
        """The time at which it is reached."""
        assert self._reached is not None
        return self._reached

    def done(self) -> bool:
        return self._reached is None or self._reached.done()

    def synchronize(self) -> None:
        if self._reached is not None:
            self._reached.result()

    def milliseconds(self, start: HostEvent) -> float:
        """Time from `start` to it. Waits for both."""
        if not (self.timing and start.timing):
            raise UserError.at("TW033", "the time between events made with timing=False is not known")
        return (self.future().result() - start.future().result()) * 1e3
