"""A thread for each device that takes part in work of several devices. In: functions, in order, with futures they wait for; out: futures.

Calls for one device run one after another on its thread, those of different devices at once. Whoever hands in calls that wait for
each other does so in an order in which none waits for a later one; then no thread waits for itself.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.runtime.core.futures import Future

Call = tuple[Callable[[], Any], Sequence[Future[Any]], Future[Any]]


class DeviceThread:
    """The thread of one device; it starts with its first call."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], Any], after: Sequence[Future[Any]] = ()) -> Future[Any]:
        """Run it when all of `after` are done; if one of those failed, so does this, with its error."""
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"tilewright-{self.device}", daemon=True)
                self._thread.start()
        self._calls.put((run, tuple(after), future))
        return future

    def _work(self) -> None:
        while True:
            self._one(*self._calls.get())

    def _one(self, run: Callable[[], Any], after: Sequence[Future[Any]], future: Future[Any]) -> None:
        """Nothing of a call is kept once it is done: it holds arrays."""
        try:
            for awaited in after:
                awaited.result()
            if future.begin():
                future.set_result(run())
        except BaseException as error:
            future.set_exception(error)


_threads: dict[str, DeviceThread] = {}


def thread_of(device: str) -> DeviceThread:
    """The thread of a device, by its id."""
    return _threads.get(device) or _threads.setdefault(device, DeviceThread(device))


def all_done(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all of them, also where one fails; then their results, or the first error."""
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)
