"""Streams that are queues of a driver, each in order. In: queues and the point behind what was queued last on each; out: the streams of an `ArrayDevice`.

A point is what the driver gives for a piece of work: an event, or a command buffer. Streams that were given back are used again.
"""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from typing import Any

from tilewright.base.errors import DeviceError
from tilewright.runtime.portable.pooled import PooledDevice
from tilewright.runtime.portable.waits import wait_until


class QueuedDevice(PooledDevice):
    """A device with a queue for each stream."""

    def start(self) -> None:
        self._lost = ""
        self._lock = threading.RLock()
        self._queues: dict[int, Any] = {}
        self._last: dict[int, Any] = {}
        """The point behind what was queued last on each stream."""
        self._numbers = itertools.count(1)
        self._idle: list[int] = []
        super().start()

    @abstractmethod
    def new_queue(self) -> Any:
        """A queue of the driver."""

    @abstractmethod
    def failure(self, point: Any) -> str:
        """Why the work before a point failed; '' where it did not, or not yet."""

    @abstractmethod
    def completed(self, point: Any) -> bool:
        """Whether the work before a point is done."""

    def flush(self, queue: Any) -> None:
        """Have the driver begin with what was queued."""
        return

    @property
    def lost(self) -> str:
        return self._lost

    def queue(self, stream: int) -> Any:
        """The queue of a stream."""
        found = self._queues.get(stream)
        if found is None:
            if stream:
                raise DeviceError.at("TW033", f"{self.label} has no stream {stream}")
            found = self._queues[0] = self.new_queue()
        return found

    def last(self, stream: int) -> Any:
        """The point behind what was queued last on a stream; None where nothing was."""
        return self._last.get(stream)

    def take_stream(self, priority: int = 0) -> int:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            stream = next(self._numbers)
            self._queues[stream] = self.new_queue()
            return stream

    def return_stream(self, stream: int, priority: int = 0) -> None:
        self._idle.append(stream)

    def checked_stream(self, stream: int) -> int:
        self.queue(stream)
        return stream

    def is_reached(self, point: Any) -> bool:
        """Whether the work before a point is done; where it failed, the device is lost."""
        failure = self.failure(point)
        if failure:
            self._lost = failure
            self.check_alive()
        return self.completed(point)

    def wait_point(self, point: Any) -> None:
        """Return when the work before a point is done."""
        wait_until(lambda: self.is_reached(point), self.label, "the work of a stream")

    def is_idle(self, stream: int) -> bool:
        last = self._last.get(stream)
        return last is None or self.is_reached(last)

    def wait_for(self, stream: int) -> None:
        for one in list(self._last) if stream < 0 else [stream]:
            last = self._last.get(one)
            if last is not None:
                self.flush(self._queues[one])
                self.wait_point(last)
