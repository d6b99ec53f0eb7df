"""Which stream work goes to. In: a device's ordinal; out: the handle of the stream that is current on this thread, or none.

A thread names a stream with `use`; calls on that thread go there until the block ends. Machine code that launches kernels looks
at `STREAM_NAMED` first, a count of such blocks on all threads: while it is 0 nobody has to be asked. While `FAST_PATH_OFF` is not 0, some
thread records a graph, or the host holds GPU calls back until what they need is there: then every call takes the general path.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tilewright.base.errors import DeviceError, TilewrightError
from tilewright.base.source import NOWHERE, Source, Span
from tilewright.runtime.core.device import Buffer

STREAM_NAMED = ctypes.c_int64(0)
"""How many `use` blocks are open in the process."""
FAST_PATH_OFF = ctypes.c_int64(0)
"""How many reasons there are for calls to take the general path."""

FUTURES: tuple[type, ...] = ()
"""The class of futures, once its module is loaded: before that there are none."""

HOST = -1
"""The ordinal of what is not a GPU."""

_PACKAGE = str(Path(__file__).parents[2])


class StreamRecorder(Protocol):
    """A graph that is being captured."""

    names: Mapping[str, str]
    """Names of the numbers of the call under way, by parameter."""

    def thread_is_mine(self) -> bool:
        """Whether it is this thread that captures."""

    def take(self, nbytes: int, stream: int) -> Buffer:
        """Memory that stays the graph's."""

    def workspace(self, stream: int) -> Callable[[int], tuple[int, object]]:
        """Gives such memory for scratch arrays, as an address and what keeps it."""

    def begin_after(self, stream: int) -> None:
        """Replays come after what is queued on a stream that takes no part."""

    def join(self, stream: int) -> None:
        """Another stream takes part."""

    def use(self, array: Any, stream: int) -> None:
        """Work captured on `stream` uses an array: it stays as long as the graph."""

    def include(self, other: Any, stream: int) -> None:
        """Capture what another graph runs."""

    def launch(
        self, program: Any, arrays: Mapping[str, Any], values: Sequence[Any], plan: Any, steps: Sequence[Any], stream: int
    ) -> None:
        """Launch the steps of a program and note which nodes they became."""


@dataclass(frozen=True)
class _Capture:
    """A graph being recorded: the device in words, its id and its ordinal."""

    label: str
    device: str
    ordinal: int


class _CurrentStream(threading.local):
    def __init__(self) -> None:
        self.stacks: dict[int, list[int]] = {}
        self.queues: list[Any] = []
        self.captures: list[_Capture] = []
        self.host_recorder: Any = None


_current = _CurrentStream()
_lock = threading.Lock()
_before_use: dict[tuple[int, int], Callable[[], None]] = {}

recorders: dict[int, StreamRecorder] = {}
"""The graphs being captured, by the streams that take part. Empty nearly always, so that asking costs nothing."""


def current(ordinal: int) -> int | None:
    """The stream this thread uses on a device; None where it named none."""
    if not STREAM_NAMED.value:
        return None
    stack = _current.stacks.get(ordinal)
    handle = stack[-1] if stack else None
    if _before_use:
        held = _before_use.get((ordinal, handle or 0))
        if held is not None:
            held()
    return handle


def named(ordinal: int) -> int | None:
    """The same, without waiting for calls that are held back on it."""
    stack = _current.stacks.get(ordinal)
    return stack[-1] if stack else None


@contextmanager
def use(ordinal: int, handle: int) -> Iterator[None]:
    """Work of this thread on a device goes to the stream `handle` inside."""
    push(ordinal, handle)
    try:
        yield
    finally:
        pop(ordinal)


def push(ordinal: int, handle: int) -> None:
    _current.stacks.setdefault(ordinal, []).append(handle)
    with _lock:
        STREAM_NAMED.value += 1


def pop(ordinal: int) -> None:
    with _lock:
        STREAM_NAMED.value -= 1
    _current.stacks[ordinal].pop()


def queues() -> list[Any]:
    """The host queues this thread made current, the latest last."""
    return _current.queues


@contextmanager
def special() -> Iterator[None]:
    """Calls take the general path inside, on all threads."""
    with _lock:
        FAST_PATH_OFF.value += 1
    try:
        yield
    finally:
        with _lock:
            FAST_PATH_OFF.value -= 1


@contextmanager
def held_back(ordinal: int, handle: int, wait: Callable[[], None]) -> Iterator[None]:
    """Calls that go to this stream inside call `wait` first: earlier ones are still with the host."""
    with _lock:
        _before_use[ordinal, handle] = wait
        STREAM_NAMED.value += 1
    try:
        with special():
            yield
    finally:
        with _lock:
            STREAM_NAMED.value -= 1
            _before_use.pop((ordinal, handle), None)


# -- capture --------------------------------------------------------------------------------------------------------


@contextmanager
def capturing(label: str, device: str, ordinal: int = HOST, host_recorder: Any = None) -> Iterator[None]:
    """This thread records a graph of that device inside; one of the host is told what would have run."""
    before = _current.host_recorder
    _current.captures.append(_Capture(label, device, ordinal))
    _current.host_recorder = host_recorder
    try:
        with special():
            yield
    finally:
        _current.host_recorder = before
        _current.captures.pop()


def host_recorder() -> Any:
    """The graph of the CPU or the emulator this thread records, or None."""
    return _current.host_recorder


def is_capturing(ordinal: int | None = None) -> bool:
    """Whether this thread records a graph (of that device)."""
    return bool(FAST_PATH_OFF.value) and any(ordinal in (None, capture.ordinal) for capture in _current.captures)


def refuse_in_capture(what: str, ordinal: int | None = None, help: str = "") -> None:
    """Raise the error for `what` if this thread records a graph (of that device). The capture is not harmed."""
    if is_capturing(ordinal):
        raise capture_error(f"{what} is not possible while this thread captures a graph on {_current.captures[-1].label}", help)


def check_captured(device: str) -> None:
    """Refuse a call on another device than the one this thread records: no replay would make it again."""
    if _current.captures and _current.captures[-1].device != device:
        captured = _current.captures[-1].device
        raise capture_error(
            f"a call on '{device}' inside a capture on '{captured}' would not be recorded",
            "make it before the capture, or with the captured device",
        )


def capture_error(message: str, help: str = "") -> TilewrightError:
    """An error at the line of the program that called us; raises nothing."""
    return DeviceError.at("TW036", message, callers_line(), help)


def callers_line() -> Span:
    """The line of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or "contextlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    if not line:
        return NOWHERE
    content = Source(path, text).line(line)
    start = len(content) - len(content.lstrip()) + 1
    return Span(Source(path, text), line, start, line, max(start + 1, len(content) + 1))


def _after_fork() -> None:
    """What other threads had open stayed with the parent, and so did GPUs."""
    global _lock
    _lock = threading.Lock()
    _before_use.clear()
    recorders.clear()
    STREAM_NAMED.value = sum(map(len, _current.stacks.values()))
    FAST_PATH_OFF.value = len(_current.captures)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
