"""Streams, events and timing: in what order work runs, and how long it takes.

A stream is a queue: what is put on one runs in order, what is on different ones may run at once. On a GPU it is one of the
driver's, or one of another library; for the CPU and the emulator it is a queue of asynchronous calls served by threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.base.errors import UserError, public_methods
from tilewright.execute.devices import Device, array_device, find_device
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import DeviceEvent
from tilewright.runtime.core.futures import Future
from tilewright.runtime.core.host_event import HostEvent
from tilewright.runtime.core.host_queue import HostQueue
from tilewright.runtime.exchange.libraries import SharedStream, foreign_stream


@public_methods("__init__")
class Stream(SharedStream):
    """A queue of work on a device. `with stream:` sends the work of this thread there.

    `device` is a name such as `cpu` or `auto`. Of two streams of a GPU that both have work, that with the lower
    `priority` goes first; 0 is the usual one. A stream may be dropped while work is on it: that still runs.
    """

    def __init__(self, device: str = "auto", priority: int = 0) -> None:
        chosen = find_device(device)
        self.device = chosen.id
        self.priority = _checked_priority(priority, chosen)
        self._gpu = gpu = array_device(chosen)
        self._queue: HostQueue | None = None
        self.handle = 0
        """What the driver calls it; 0 for queues of the host and the default stream."""
        if gpu is not None:
            self.handle = gpu.take_stream(priority)
            self._close = weakref.finalize(self, gpu.return_stream, self.handle, priority)
            self._close.atexit = False
        else:
            self._queue = HostQueue(chosen.id)

    @classmethod
    def of(cls, stream: object, device: str = "auto") -> Stream:
        """A stream of another library (PyTorch, CuPy, anything with the protocol for it), or a handle of the driver's."""
        if isinstance(stream, Stream):
            return stream
        handle, place = foreign_stream(stream)
        chosen = find_device(place or device)
        gpu = array_device(chosen)
        if gpu is None:
            raise UserError.at(
                "TW009", f"a {type(stream).__name__} was given as a stream of '{chosen.id}'", help="name the GPU with device="
            )
        made = cls.__new__(cls)
        made.device, made.priority = chosen.id, 0
        made._gpu, made._queue = gpu, None
        made.handle = gpu.checked_stream(handle)
        # The handle is good as long as the object is.
        made._foreign = stream
        return made

    _foreign: object = None

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        """Whether other libraries take it."""
        return self._gpu is not None and self._gpu.shares_with_libraries

    @property
    def queue(self) -> HostQueue | None:
        """What it is on the host; None for a stream of a device with memory of its own."""
        return self._queue

    @classmethod
    def of_queue(cls, device: str, queue: HostQueue) -> Stream:
        made = cls.__new__(cls)
        made.device, made.priority, made.handle = device, 0, 0
        made._gpu, made._queue = None, queue
        return made

    def __enter__(self) -> Stream:
        if self._gpu is not None:
            streams.push(self._gpu.ordinal, self.handle)
        else:
            streams.queues().append((self.device, self._queue))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._gpu is not None:
            streams.pop(self._gpu.ordinal)
        else:
            streams.queues().pop()

    def synchronize(self) -> None:
        """Wait until all work queued on it is done. Raises what went wrong on a GPU; on the host the futures do."""
        if self._gpu is not None:
            if streams.FAST_PATH_OFF.value:
                self.settle_held()
            self._gpu.synchronize(self.handle)
        else:
            assert self._queue is not None
            self._queue.synchronize()

    def done(self) -> bool:
        """Whether all work queued on it is done."""
        if self._gpu is None:
            assert self._queue is not None
            return self._queue.idle()
        streams.refuse_in_capture("done()", self._gpu.ordinal)
        return not _is_holding(self._gpu.ordinal, self.handle) and self._gpu.stream_done(self.handle)

    def record(self, timing: bool = True) -> Event:
        """An event behind the work queued on it."""
        return Event(self.device, timing).record(self)

    def wait(self, what: Event | Stream | Future[Any]) -> None:
        """Later work waits for an event, for all that another stream has now, or for a future. This thread does not."""
        if isinstance(what, Stream):
            what = what.record(timing=False)
        if isinstance(what, Event):
            found: DeviceEvent | Future[Any] | None = what.point()
            if found is None:
                return
        elif isinstance(what, Future):
            part = what.on_device()
            found = part.event if part is not None and isinstance(part.event, DeviceEvent) else what
        else:
            raise UserError.at("TW009", f"a stream waits for events, streams and futures, not for {type(what).__name__}")
        if isinstance(found, DeviceEvent) and self._gpu is not None and type(found.device) is type(self._gpu):
            _join_capture(found, self.handle)
            self._gpu.hold(self.handle, found)
        elif self._gpu is not None:
            self._wait_for_host(_as_future(found) if isinstance(found, DeviceEvent) else found)
        else:
            assert self._queue is not None
            self._queue.submit(
                found.synchronize if isinstance(found, DeviceEvent) else _nothing, () if isinstance(found, DeviceEvent) else (found,)
            )

    def _wait_for_host(self, future: Future[Any]) -> None:
        from tilewright.runtime.core import pending_launches as held_calls

        assert self._gpu is not None
        streams.refuse_in_capture("waiting for the host", self._gpu.ordinal)
        if not future.done() or held_calls.is_holding(self._gpu.ordinal, self.handle):
            held_calls.hold(self._gpu.ordinal, self.handle, lambda: None, (future,))

    def settle_held(self) -> None:
        """Wait until calls that the host holds back for it were made."""
        assert self._gpu is not None
        with self:
            streams.current(self._gpu.ordinal)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.handle, self._queue) == (other.device, other.handle, other._queue)

    def __hash__(self) -> int:
        return hash((self.device, self.handle, id(self._queue)))

    def __repr__(self) -> str:
        shown = f", handle {self.handle:#x}" if self._gpu is not None else ""
        return f"Stream({self.device}{shown}{f', priority {self.priority}' if self.priority else ''})"


@public_methods("__init__")
class Event:
    """A point in a stream: `record` sets it, `done` and `synchronize` ask for it, `elapsed` measures to a later one."""

    def __init__(self, device: str = "auto", timing: bool = True) -> None:
        chosen = find_device(device)
        self.device, self.timing = chosen.id, timing
        self._gpu = array_device(chosen)
        self._event: DeviceEvent | HostEvent | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Put it behind the work queued on `stream`, else on the current one of its device. Doing so again moves it."""
        chosen = current_stream(self.device) if stream is None else Stream.of(stream, self.device)
        if chosen.device != self.device:
            raise UserError.at("TW009", f"an event of '{self.device}' cannot be recorded on a stream of '{chosen.device}'")
        if self._gpu is not None:
            if streams.FAST_PATH_OFF.value:
                chosen.settle_held()
            event = self._gpu.event(self.timing)
            event.record(chosen.handle)
            self._event = event
        else:
            assert chosen.queue is not None
            self._event = HostEvent(self.timing).record(chosen.queue)
        return self

    def done(self) -> bool:
        """Whether the work before it is done; so is an event that was never recorded."""
        return self._event is None or self._outside_capture(self._event).done()

    def synchronize(self) -> None:
        """Wait for the work before it."""
        if self._event is not None:
            self._outside_capture(self._event).synchronize()

    def elapsed(self, end: Event) -> float:
        """Milliseconds from this event to `end`, which is waited for."""
        first, last = self._event, end._event
        if first is None or last is None:
            raise UserError.at("TW033", f"the {'first' if first is None else 'second'} event was not recorded")
        if self.device != end.device:
            raise UserError.at("TW033", f"the events are on '{self.device}' and '{end.device}'", help="measure on one device")
        first.synchronize()
        self._outside_capture(last).synchronize()
        if isinstance(last, DeviceEvent):
            assert isinstance(first, DeviceEvent)
            return last.milliseconds(first)
        assert isinstance(first, HostEvent)
        return last.milliseconds(first)

    def _outside_capture(self, event: DeviceEvent | HostEvent) -> DeviceEvent | HostEvent:
        if isinstance(event, DeviceEvent) and event.captured:
            raise streams.capture_error("an event recorded inside a captured graph has no time of its own")
        return event

    def point(self) -> DeviceEvent | Future[Any] | None:
        """What a stream can wait for; None where it was never recorded."""
        return self._event.future() if isinstance(self._event, HostEvent) else self._event

    def __repr__(self) -> str:
        return f"Event({self.device}, {'recorded' if self._event is not None else 'not recorded'})"


def stream(what: object, device: str = "auto") -> Stream:
    """`with tw.stream(s):` work of this thread goes to `s`: a `Stream`, one of PyTorch or CuPy, or the handle of one."""
    return Stream.of(what, device)


_default_queues: dict[str, HostQueue] = {}


def current_stream(device: str = "auto") -> Stream:
    """The stream this thread's work on a device goes to."""
    chosen = find_device(device)
    gpu = array_device(chosen)
    if gpu is not None:
        return Stream.of(streams.current(gpu.ordinal) or 0, chosen.id)
    return Stream.of_queue(chosen.id, host_queue(chosen))


def host_queue(device: Device) -> HostQueue:
    """The queue asynchronous calls of this thread for the CPU or the emulator go to."""
    for name, found in reversed(streams.queues()):
        if name == device.id:
            queue: HostQueue = found
            return queue
    # setdefault, so that two threads get the same one.
    return _default_queues.get(device.id) or _default_queues.setdefault(device.id, HostQueue(device.id))


class Timer:
    """What `timed` measures. Asking waits for the end."""

    def __init__(self) -> None:
        self._start: Event | None = None
        self._stop: Event | None = None

    @property
    def milliseconds(self) -> float:
        if self._start is None or self._stop is None:
            raise UserError.at("TW033", "the time is known after the 'with' block")
        return self._start.elapsed(self._stop)

    @property
    def seconds(self) -> float:
        return self.milliseconds / 1e3

    def __repr__(self) -> str:
        return f"Timer({self.milliseconds:.6f} ms)" if self._stop is not None else "Timer(running)"


@contextmanager
def timed(device: str = "auto") -> Iterator[Timer]:
    """`with tw.timed() as t:` measures the work queued inside on the current stream, on the device; then `t.milliseconds`."""
    timer = Timer()
    chosen = find_device(device)
    gpu = array_device(chosen)
    if gpu is not None:
        streams.refuse_in_capture("timed()", gpu.ordinal)
    timer._start = Event(chosen.id).record()
    yield timer
    timer._stop = Event(chosen.id).record()


def _as_future(event: DeviceEvent) -> Future[Any]:
    """An event of a device of another kind: the host waits for it."""
    return HostQueue("events").submit(event.synchronize)


def _nothing() -> None:
    return None


def _is_holding(ordinal: int, handle: int) -> bool:
    if not streams.FAST_PATH_OFF.value:
        return False
    from tilewright.runtime.core import pending_launches as held_calls

    return held_calls.is_holding(ordinal, handle)


def _join_capture(event: DeviceEvent, handle: int) -> None:
    """A stream that waits for one that is captured belongs to the graph from then on."""
    recorder = streams.recorders.get(event.stream) if event.captured else None
    if recorder is not None and handle not in streams.recorders:
        recorder.join(handle)


def _checked_priority(priority: int, device: Device) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise UserError.at("TW009", f"priority is {priority!r}", help="give a whole number")
    gpu = array_device(device) if priority else None
    if priority and gpu is None:
        raise UserError.at("TW016", f"priority is {priority}, but streams of '{device.id}' have no priorities")
    if gpu is not None:
        least, greatest = gpu.priorities()
        if not greatest <= priority <= least:
            raise UserError.at("TW016", f"priority is {priority}, but '{device.id}' has {greatest} (first) to {least} (last)")
    return priority
