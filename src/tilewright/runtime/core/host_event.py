"""Points in the work of a queue of the host. In: a queue as it is; out: an event that says when what is queued is done, and measures time."""

from __future__ import annotations

import time

from tilewright.base.errors import UserError
from tilewright.runtime.core.futures import Future
from tilewright.runtime.core.host_queue import HostQueue


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
