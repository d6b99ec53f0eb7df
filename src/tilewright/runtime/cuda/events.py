"""Points in the work of a stream. In: a stream, with its queue as it is; out: an event that says when that work is done.

`CudaEvent` is one of the driver's, taken from those its device has idle and given back when dropped: making one takes longer than
recording it.
"""

from __future__ import annotations

from typing import Any

from tilewright.base.errors import UserError
from tilewright.runtime.core.device import DeviceEvent
from tilewright.runtime.core.streams import recorders
from tilewright.runtime.cuda.context import CudaContext

NOT_READY = 600


class CudaEvent(DeviceEvent):
    """An event of a GPU. Recording it again moves it; who waits for it already is not affected."""

    __slots__ = ("captured", "device", "handle", "stream", "timing")

    def __init__(self, device: CudaContext, timing: bool = False) -> None:
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
            if not status:
                device.raise_reports()
            return not status
        finally:
            device.leave(entered)

    def synchronize(self) -> None:
        """Wait for it. Raises what went wrong before it."""
        device = self.device
        entered = device.enter()
        try:
            device.call("cuEventSynchronize", self.handle)
            device.raise_reports()
        finally:
            device.leave(entered)

    def milliseconds(self, start: Any) -> float:
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
