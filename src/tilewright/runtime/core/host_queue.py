"""Calls that run in order on threads of their own. In: functions, with futures they wait for; out: a `Future` for each.

A queue is what a stream is on a GPU: its calls run one after another, those of different queues at once. A few worker threads
serve all queues. A call whose turn has come but whose futures are not there yet holds up its queue, not a thread. At exit what
has not begun is cancelled, and what runs is waited for.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from tilewright.base.errors import DeviceError
from tilewright.runtime.core.futures import Future

_EXIT_SECONDS = 5.0


class _Task:
    __slots__ = ("after", "future", "run")

    def __init__(self, run: Callable[[], Any], after: Sequence[Future[Any]], future: Future[Any]) -> None:
        self.run, self.after, self.future = run, after, future


class HostQueue:
    """Calls in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._tasks: deque[_Task] = deque()
        self._busy = False
        """A task is running, or the first one waits for a future that will call back."""
        self._current: _Task | None = None
        _all.add(self)

    def submit(self, run: Callable[[], Any], after: Sequence[Future[Any]] = (), future: Future[Any] | None = None) -> Future[Any]:
        """Queue a call that begins when all of `after` are done; if one of those failed, so does this."""
        made: Future[Any] = Future() if future is None else future
        with self._lock:
            self._tasks.append(_Task(run, tuple(after), made))
        self._advance()
        return made

    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        with self._lock:
            return not self._busy and not self._tasks

    def synchronize(self) -> None:
        """Wait for what is queued now. What went wrong in it is raised by the futures, not here."""
        if not self.idle():
            self.submit(lambda: None).exception()

    def cancel(self) -> None:
        """Drop what has not begun."""
        with self._lock:
            waiting = list(self._tasks)
        for task in waiting:
            task.future.cancel()

    def _advance(self) -> None:
        """Begin the first task if it can run; else have the future it waits for call again."""
        with self._lock:
            if self._busy:
                return
            while self._tasks and self._tasks[0].future.cancelled():
                self._tasks.popleft()
            if not self._tasks:
                return
            self._busy = True
            task = self._tasks[0]
        awaited = next((future for future in task.after if not future.done()), None)
        if awaited is not None:
            awaited.add_done_callback(self._again)
            return
        with self._lock:
            self._current = self._tasks.popleft()
        try:
            _workers.do(lambda: self._run(task))
        except RuntimeError as error:
            task.future.set_exception(error)
            self._next()

    def _again(self, _: Future[Any]) -> None:
        with self._lock:
            self._busy = False
        self._advance()

    def _run(self, task: _Task) -> None:
        future = task.future
        try:
            if future.begin():
                failed = next((error for error in map(_failure, task.after) if error is not None), None)
                if failed is not None:
                    future.set_exception(failed)
                else:
                    value = task.run()
                    if not future.on_device():
                        future.set_result(value)
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._next()

    def _next(self) -> None:
        with self._lock:
            self._busy, self._current = False, None
        self._advance()

    def after_fork(self) -> None:
        """The threads stayed with the parent, and so did the calls they were to run."""
        self._lock = threading.Lock()
        lost = [*([self._current] if self._current else ()), *self._tasks]
        self._tasks.clear()
        self._busy, self._current = False, None
        for task in lost:
            task.future.after_fork(DeviceError.at("TW033", "a call queued before the process forked runs in the parent alone"))


def _failure(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:
        return error


class _Workers:
    """Threads that run what they are given, started as they are needed."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._most = max(4, os.cpu_count() or 1)
        self._threads = 0
        self._open = 0
        """Jobs given and not done."""

    def do(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._open += 1
            if self._threads < min(self._open, self._most):
                name = f"tilewright-queue-{self._threads + 1}"
                try:
                    threading.Thread(target=self._work, name=name, daemon=True).start()
                    self._threads += 1
                except RuntimeError:
                    # No more threads to be had: a limit, or the interpreter is leaving.
                    if not self._threads:
                        self._open -= 1
                        raise
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            job()
            # Not kept alive until the next one comes: it holds arrays.
            del job
            with self._lock:
                self._open -= 1

    def leave(self) -> None:
        end = time.monotonic() + _EXIT_SECONDS
        while self._open and time.monotonic() < end:
            time.sleep(0.001)


class _Queues:
    """Every queue of the process, for exit and fork."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[HostQueue] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, item: HostQueue) -> None:
        with self._lock:
            self._known.add(item)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        for item in self._known:
            item.after_fork()

    def every(self) -> list[HostQueue]:
        with self._lock:
            return list(self._known)


_all = _Queues()
_workers = _Workers()


def _leave() -> None:
    for item in _all.every():
        item.cancel()
    _workers.leave()


def _after_fork() -> None:
    global _workers
    _workers = _Workers()
    _all.after_fork()


atexit.register(_leave)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
