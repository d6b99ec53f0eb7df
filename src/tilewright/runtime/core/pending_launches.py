"""GPU calls the host holds back. In: a call for a stream, and futures of the host it needs; out: the call, queued when they are
there.

A GPU waits for its own events by itself, but not for a thread of the host. Such a call stays in a queue of the host, and so
does all that follows on its stream: asynchronous calls join the queue, plain ones wait until it is empty (`streams.current`
asks for that).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.runtime.core import streams
from tilewright.runtime.core.futures import Future, GpuFuture, Relayed
from tilewright.runtime.core.host_queue import HostQueue


class _Held:
    """The calls of one stream."""

    def __init__(self, ordinal: int, stream: int) -> None:
        self.queue = HostQueue(f"cuda:{ordinal} stream {stream:#x}")
        self.block = streams.held_back(ordinal, stream, self.wait)
        self.count = 0

    def wait(self) -> None:
        if not getattr(_relaying, "active", False):
            self.queue.synchronize()


_relaying = threading.local()
_lock = threading.Lock()
_held: dict[tuple[int, int], _Held] = {}


def is_holding(ordinal: int, stream: int) -> bool:
    """Whether calls for this stream wait on the host."""
    return (ordinal, stream) in _held


def hold(ordinal: int, stream: int, launch: Callable[[], GpuFuture[Any] | None], after: Sequence[Future[Any]]) -> Future[Any]:
    """Make the call once `after` are done and earlier calls for the stream were made."""
    key = (ordinal, stream)
    with _lock:
        held = _held.get(key)
        if held is None:
            held = _held[key] = _Held(ordinal, stream)
            held.block.__enter__()
        held.count += 1
    relayed: Relayed[Any] = Relayed()
    queued = held.queue.submit(lambda: _make(launch, relayed), after, _Guard(relayed))
    queued.add_done_callback(lambda _: _release(key))
    return relayed


class _Guard(Future[Any]):
    """The host's part of a held call: cancelled with the future the caller has, and failing it."""

    def __init__(self, relayed: Relayed[Any]) -> None:
        super().__init__()
        self._relayed = relayed
        relayed.add_done_callback(lambda done: self.cancel() if done.cancelled() else None)

    def begin(self) -> bool:
        return super().begin() and self._relayed.begin()

    def cancel(self) -> bool:
        dropped = super().cancel()
        if dropped:
            self._relayed.cancel()
        return dropped

    def set_exception(self, error: BaseException) -> None:
        self._relayed.set_exception(error)
        super().set_exception(error)


def _make(launch: Callable[[], GpuFuture[Any] | None], relayed: Relayed[Any]) -> None:
    _relaying.active = True
    try:
        made = launch()
    finally:
        _relaying.active = False
    if made is None:
        relayed.set_result(None)
    else:
        relayed.relay(made)


def _release(key: tuple[int, int]) -> None:
    with _lock:
        held = _held[key]
        held.count -= 1
        if held.count:
            return
        del _held[key]
    held.block.__exit__(None, None, None)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
