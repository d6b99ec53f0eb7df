"""Results that are not there yet. In: a call queued on the host or on a GPU; out: a `Future`, which is waited for, asked or
awaited.

A `Future` of the host is set by the thread that ran the call. A `GpuFuture` has its arrays from the start and an event on its
stream behind them: waiting for it is waiting for the event, and kernels that take it as an argument wait on the device.

Somebody has to tell `await`, callbacks and `any_of` when an event is reached. That is one watcher thread, which asks the events
of those futures again and again, with pauses. The other way, a host function queued on the stream, holds up all work behind it
until Python has run, and is never called after a kernel faulted, so that the error would never arrive.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from tilewright.base.errors import UserError, public
from tilewright.base.forks import fork_safe_lock
from tilewright.runtime.core import streams

T = TypeVar("T")

_QUEUED, _RUNNING, _DONE, _FAILED, _CANCELLED = range(5)
_MISSING: Any = object()

_making = fork_safe_lock()

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 500e-6
"""Seconds between two looks at an event: short at first, since most kernels are."""


class FutureEvent(Protocol):
    """What a `GpuFuture` needs of an event."""

    def done(self) -> bool:
        """Whether all work before it is done. Raises what went wrong in it."""

    def synchronize(self) -> None:
        """Wait for it. Raises what went wrong before it."""


class Future(Generic[T]):
    """The result of a call that may still run: `result()` waits for it, `await` does so without blocking the event loop."""

    def __init__(self) -> None:
        self._state = _QUEUED
        self._condition: threading.Condition | None = None
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._value: T = _MISSING
        self._error: BaseException | None = None

    @property
    def _changed(self) -> threading.Condition:
        """Made when it is first needed: most work on a GPU is waited for by its event."""
        found = self._condition
        if found is None:
            with _making:
                found = self._condition = self._condition or threading.Condition()
        return found

    # -- asking -------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the result, an error or a cancellation is there."""
        return self._state >= _DONE

    def running(self) -> bool:
        """Whether it has begun and is not done."""
        return self._state == _RUNNING and not self.done()

    def cancelled(self) -> bool:
        return self._state == _CANCELLED

    @public
    def result(self, timeout: float | None = None, default: T = _MISSING) -> T:
        """The result, waited for at most `timeout` seconds; after that `default`, or TimeoutError where none is given."""
        if not self._wait(_checked(timeout)):
            if default is not _MISSING:
                return default
            raise TimeoutError(f"the result was not there after {timeout} s")
        if self._state == _CANCELLED:
            raise CancelledError("the call was cancelled before it began")
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, None where it went well. Waits like `result`."""
        if not self._wait(_checked(timeout)):
            raise TimeoutError(f"the call was not done after {timeout} s")
        if self._state == _CANCELLED:
            raise CancelledError("the call was cancelled before it began")
        return self._error

    def cancel(self) -> bool:
        """Drop the call if it has not begun; whether it will not run. Work a GPU has in its queue has begun."""
        with self._changed:
            if self._state != _QUEUED:
                return self._state == _CANCELLED
            self._end(_CANCELLED)
        self._tell()
        return True

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call `callback(self)` once it is done, on the thread that notices; at once where it is done already."""
        with self._changed:
            if self._state < _DONE:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        if not self.done():
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()

            def set_woken() -> None:
                if not woken.done():
                    woken.set_result(None)

            def wake(_: Future[T]) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(set_woken)

            self.add_done_callback(wake)
            try:
                yield from woken
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()

    def __repr__(self) -> str:
        names = ("queued", "running", "done", f"failed with {type(self._error).__name__}", "cancelled")
        return f"<Future {names[_DONE if self._state < _DONE and self.done() else self._state]}>"

    # -- for those who run it -----------------------------------------------------------------------------------

    def begin(self) -> bool:
        """The call is about to run; False when it was cancelled."""
        with self._changed:
            if self._state == _QUEUED:
                self._state = _RUNNING
            return self._state == _RUNNING

    def set_result(self, value: T) -> None:
        with self._changed:
            if self._state >= _DONE:
                return
            self._value = value
            self._end(_DONE)
        self._tell()

    def set_exception(self, error: BaseException) -> None:
        with self._changed:
            if self._state >= _DONE:
                return
            self._error = error
            self._end(_CANCELLED if isinstance(error, CancelledError) else _FAILED)
        self._tell()

    def after_fork(self, error: BaseException) -> None:
        """In a forked child, where nobody will set it. Another thread of the parent may have held the lock."""
        self._condition = threading.Condition()
        self._callbacks.clear()
        self.set_exception(error)

    def on_device(self) -> GpuFuture[Any] | None:
        """The part of it a GPU has in its queue, which other GPU work can wait for without the host."""
        return None

    def _end(self, state: int) -> None:
        self._state = state
        self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def _wait(self, timeout: float | None) -> bool:
        """Whether it is done within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state >= _DONE, timeout)


streams.FUTURES = (Future,)


class GpuFuture(Future[T]):
    """Work on a GPU's stream up to an event. `finish`, where given, makes the result once the event is reached."""

    def __init__(self, value: T, event: FutureEvent, stream: int, finish: Callable[[], T] | None = None) -> None:
        super().__init__()
        self._state = _RUNNING
        self.event, self.stream = event, stream
        self._pending, self._finish = value, finish

    @property
    def pending(self) -> Any:
        """The arrays the result will be in: good for work on the device that is ordered after the event."""
        return self._pending

    def on_device(self) -> GpuFuture[Any] | None:
        return self

    def done(self) -> bool:
        if self._state >= _DONE:
            return True
        try:
            return self.event.done()
        except Exception as error:
            self.set_exception(error)
            return True

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        super().add_done_callback(callback)
        if self._state < _DONE:
            _watcher.add(self)

    def settle(self) -> bool:
        """Take the result if the event is reached; whether it is."""
        if not self.done():
            return False
        if self._state < _DONE:
            self._complete()
        if self._callbacks:
            self._tell()
        return True

    def _complete(self) -> None:
        """The event is reached."""
        if self._finish is None:
            self._value = self._pending
            self._state = _DONE
            return
        with self._changed:
            if self._state >= _DONE:
                return
            try:
                self._value = self._pending if self._finish is None else self._finish()
                self._end(_DONE)
            except Exception as error:
                self._error = error
                self._end(_FAILED)
            self._pending, self._finish = _MISSING if self._error else self._value, None

    def _wait(self, timeout: float | None) -> bool:
        if timeout is None:
            if self._state < _DONE:
                try:
                    self.event.synchronize()
                except Exception as error:
                    self.set_exception(error)
                else:
                    self._complete()
            if self._callbacks:
                self._tell()
            return True
        end, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while not self.settle():
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return True


class Relayed(Future[T]):
    """A call the host queues on a GPU once what it needs is there. From then on it is that GPU work."""

    def __init__(self) -> None:
        super().__init__()
        self._inner: GpuFuture[T] | None = None

    def relay(self, inner: GpuFuture[T]) -> None:
        """The call is in the GPU's queue now."""
        with self._changed:
            self._inner = inner
            self._changed.notify_all()
            wanted = bool(self._callbacks)
        if wanted:
            inner.add_done_callback(self._take)

    def done(self) -> bool:
        return super().done() or (self._inner is not None and self._inner.done())

    def on_device(self) -> GpuFuture[Any] | None:
        return self._inner

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        super().add_done_callback(callback)
        if self._inner is not None and self._state < _DONE:
            self._inner.add_done_callback(self._take)

    def _take(self, inner: Future[T]) -> None:
        error = inner.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(inner.result())

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if not self._changed.wait_for(lambda: self._state >= _DONE or self._inner is not None, timeout):
                return False
        if self._inner is not None and self._state < _DONE:
            if not self._inner._wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
            self._take(self._inner)
        return True


class _AllOf(Future[list[Any]]):
    def __init__(self, parts: tuple[Future[Any], ...]) -> None:
        super().__init__()
        self._state = _RUNNING
        self._parts = parts
        self._left = len(parts)
        self._watching = False
        self._counting = fork_safe_lock()

    def done(self) -> bool:
        return self._state >= _DONE or all(part.done() for part in self._parts)

    def cancel(self) -> bool:
        dropped = [part.cancel() for part in self._parts]
        return any(dropped)

    def add_done_callback(self, callback: Callable[[Future[list[Any]]], object]) -> None:
        super().add_done_callback(callback)
        with self._counting:
            first, self._watching = not self._watching, True
        if first:
            for part in self._parts:
                part.add_done_callback(self._count)

    def _count(self, _: Future[Any]) -> None:
        with self._counting:
            self._left -= 1
            last = not self._left
        if last:
            self._take()

    def _take(self) -> None:
        try:
            self.set_result([part.result() for part in self._parts])
        except (Exception, CancelledError) as error:
            self.set_exception(error)

    def _wait(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            if not part._wait(None if end is None else max(0.0, end - time.monotonic())):
                return False
        self._take()
        return True


class _AnyOf(Future[tuple[Any, int]]):
    def __init__(self, parts: tuple[Future[Any], ...]) -> None:
        super().__init__()
        self._state = _RUNNING
        self._parts = parts
        for index, part in enumerate(parts):
            part.add_done_callback(partial(self._first, index))

    def cancel(self) -> bool:
        dropped = [part.cancel() for part in self._parts]
        return all(dropped)

    def _first(self, index: int, part: Future[Any]) -> None:
        if self._state >= _DONE:
            return
        try:
            self.set_result((part.result(), index))
        except (Exception, CancelledError) as error:
            self.set_exception(error)


def all_of(*futures: Future[Any] | Iterable[Future[Any]]) -> Future[list[Any]]:
    """All results in order. Where some failed, the first of their errors by position, once every one has ended."""
    return _AllOf(_parts("all_of", futures, empty=True))


def any_of(*futures: Future[Any] | Iterable[Future[Any]]) -> Future[tuple[Any, int]]:
    """The result that is there first, and its position. If that one failed, its error."""
    return _AnyOf(_parts("any_of", futures, empty=False))


def _parts(name: str, given: tuple[Future[Any] | Iterable[Future[Any]], ...], empty: bool) -> tuple[Future[Any], ...]:
    listed: list[object] = []
    for item in given:
        listed += [item] if isinstance(item, Future) or not isinstance(item, Iterable) else list(item)
    parts = tuple(item for item in listed if isinstance(item, Future))
    if len(parts) != len(listed):
        wrong = next(item for item in listed if not isinstance(item, Future))
        raise UserError.at(
            "TW009", f"{name} takes futures, not {type(wrong).__name__}", help="call the kernel with asynchronous=True"
        )
    if not parts and not empty:
        raise UserError.at("TW016", f"{name} was given no future")
    return parts


def _checked(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise UserError.at("TW016", f"timeout is {timeout!r}", help="give seconds from 0 on, or None to wait as long as it takes")
    return timeout


class _Watcher:
    """The thread that looks at events for those who cannot wait for them themselves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[GpuFuture[Any]] = set()
        self._thread: threading.Thread | None = None
        self._leaving = False

    def add(self, future: GpuFuture[Any]) -> None:
        with self._changed:
            self._watched.add(future)
            if self._thread is None and not self._leaving:
                self._thread = threading.Thread(target=self._watch, name="tilewright-events", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _watch(self) -> None:
        pause = _FIRST_PAUSE
        while not self._leaving:
            with self._changed:
                if not self._watched:
                    self._changed.wait(1.0)
                    pause = _FIRST_PAUSE
                looked_at = list(self._watched)
            reached = {future for future in looked_at if future.settle()}
            if reached:
                with self._changed:
                    self._watched -= reached
                pause = _FIRST_PAUSE
            elif looked_at:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)

    def leave(self) -> None:
        with self._changed:
            self._leaving = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)


_watcher = _Watcher()


def _new_watcher() -> None:
    global _watcher
    _watcher = _Watcher()


atexit.register(lambda: _watcher.leave())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_watcher)
