"""Streams and events of one GPU. In: what work belongs on which queue; out: the driver's handles, ordered and timed.

Streams and events that are not needed any more stay and serve again: a handle never means a stream that is gone, so memory that
was last used on one can always be ordered after it. What takes over a stream comes after the work it still has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, SupportsInt

from tilewright.runtime.core.streams import recorders
from tilewright.runtime.cuda.context import CudaContext
from tilewright.runtime.cuda.events import NOT_READY, CudaEvent
from tilewright.runtime.memory.device_memory import stream_handle


class CudaStreams(CudaContext):
    """The part of a `CudaDevice` that has to do with streams and events."""

    def __init__(self) -> None:
        self._idle_streams: dict[int, deque[int]] = {}
        self._capture_streams: deque[int] = deque()
        self.idle_events = (deque(), deque())

    # -- streams ------------------------------------------------------------------------------------------------

    def create_stream(self, priority: int = 0) -> int:
        """A new stream, not ordered with the default one. Lower numbers of `priority` come first."""
        with self.active():
            flags = self.driver.constant("CUstream_flags", "CU_STREAM_NON_BLOCKING")
            if priority:
                return int(self.call("cuStreamCreateWithPriority", int(flags), priority)[0])  # type: ignore[call-overload]
            return int(self.call("cuStreamCreate", flags)[0])

    def destroy_stream(self, stream: int) -> None:
        """Wait for the stream's work and end it."""
        self.synchronize(stream)
        self.pool.forget_stream(stream)
        with self.active():
            self.call("cuStreamDestroy", stream)

    def take_stream(self, priority: int = 0) -> int:
        """A stream for a while: an idle one, else a new one."""
        try:
            return self._idle_streams[priority].popleft()
        except (KeyError, IndexError):
            return self.create_stream(priority)

    def return_stream(self, stream: int, priority: int = 0) -> None:
        """Nobody queues work on it any more; what is queued still runs."""
        self._idle_streams.setdefault(priority, deque()).append(stream)

    def take_capture_stream(self) -> int:
        """A stream that serves captures alone: no memory is ever in use on it."""
        try:
            return self._capture_streams.popleft()
        except IndexError:
            return self.create_stream()

    def return_capture_stream(self, stream: int) -> None:
        self._capture_streams.append(stream)

    def checked_stream(self, stream: int) -> int:
        return stream_handle(stream)

    def priorities(self) -> tuple[int, int]:
        """The least and the greatest urgency a stream can have; numbers fall as urgency grows."""
        with self.active():
            least, greatest = self.call("cuCtxGetStreamPriorityRange")
            return int(least), int(greatest)

    def stream_done(self, stream: int) -> bool:
        """Whether all work queued on it is done. Raises what went wrong in it."""
        with self.active():
            status, _ = self.driver.attempt("cuStreamQuery", stream)
            if status == NOT_READY:
                return False
            if status:
                raise self.error("cuStreamQuery", status)
            self.raise_reports()
            return True

    def order(self, later: int, earlier: int) -> None:
        """Work queued on stream `later` from now on waits for what is queued on `earlier`; the host does not wait."""
        if recorders and later in recorders and earlier not in recorders:
            # A graph cannot wait for what is outside it; its first replay does.
            recorders[later].begin_after(earlier)
            return
        if recorders and earlier in recorders and later not in recorders:
            return  # what is captured does not run
        with self.active():
            flags = self.driver.constant("CUevent_flags", "CU_EVENT_DISABLE_TIMING")
            (event,) = self.call("cuEventCreate", flags)
            status, _ = self.driver.attempt("cuEventRecord", event, earlier)
            if not status:
                status, _ = self.driver.attempt("cuStreamWaitEvent", later, event, 0)
            self.call("cuEventDestroy", event)
            if status:
                # One of the streams was destroyed meanwhile; its work may still run.
                self.call("cuCtxSynchronize")

    def hold(self, stream: int, event: Any) -> None:
        """Work queued on `stream` from now on waits for the event, which may be another GPU's; the host does not."""
        assert isinstance(event, CudaEvent)
        with self.active():
            self.call("cuStreamWaitEvent", stream, event.handle, 0)

    # -- events and time ----------------------------------------------------------------------------------------

    def event(self, timing: bool = False) -> CudaEvent:
        return CudaEvent(self, timing)

    def take_event(self, timing: bool) -> SupportsInt:
        """For `CudaEvent`: a handle of the driver's."""
        try:
            handle: SupportsInt = self.idle_events[timing].popleft()
            return handle
        except IndexError:
            name = "CU_EVENT_DEFAULT" if timing else "CU_EVENT_DISABLE_TIMING"
            with self.active():
                return self.call("cuEventCreate", self.driver.constant("CUevent_flags", name))[0]

    def release_idle(self) -> None:
        """Wait for the device and end streams and events nobody uses."""
        self.synchronize()
        for streams in (*self._idle_streams.values(), self._capture_streams):
            while streams:
                self.destroy_stream(streams.popleft())
        with self.active():
            for events in self.idle_events:
                while events:
                    self.call("cuEventDestroy", events.popleft())

    def time(self, function: Callable[[], object], repeats: int = 10, warmup: int = 1, stream: int = 0) -> list[float]:
        """Milliseconds on the device of each of `repeats` calls of `function`, which queues its work on `stream`."""
        stream = stream_handle(stream)
        with self.active():
            for _ in range(warmup):
                function()
            events = [self.event(timing=True) for _ in range(2 * repeats)]
            for start, stop in zip(events[::2], events[1::2]):
                start.record(stream)
                function()
                stop.record(stream)
            self.synchronize(stream)
            return [stop.milliseconds(start) for start, stop in zip(events[::2], events[1::2])]
