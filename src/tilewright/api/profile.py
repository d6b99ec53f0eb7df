"""`with tw.profile() as p:` what ran inside, how long, and how near to the hardware's limits.

In: the calls of kernels inside the block, on any device, and the launches they made on GPUs. Out: a `Profile`: `print(p)` is a table with one
line for each kernel on each device, `p.save("trace.json")` a timeline for chrome://tracing or ui.perfetto.dev, `p.calls` and
`p.launches` the events themselves.

Time on a GPU is measured by events around each launch, on the CPU by the clock around each call. While a profile is open calls take the general
way, which costs microseconds, so the gaps between kernels are longer than without. Operations are those of the program as written, bytes
those of the arguments and results, each once: a rate above the memory's means that caches helped.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tilewright.base.errors import UserError
from tilewright.base.forks import fork_safe_lock
from tilewright.execute.kernel import leave_direct_ways
from tilewright.execute.kinds import loaded_kinds
from tilewright.runtime.core import observe, streams
from tilewright.runtime.core.device import DeviceEvent
from tilewright.runtime.core.observe import Named
from tilewright.runtime.exchange.libraries import range_marks
from tilewright.runtime.memory.device_array import ArrayDevice

if TYPE_CHECKING:
    from tilewright.base.artifact import Artifact, Launch
    from tilewright.tree.syntax import Function


@dataclass
class ProfiledCall:
    """One call of a kernel. Times are seconds from the profile's start, as the host saw them."""

    name: str
    device: str
    start: float
    thread: int
    seconds: float = 0.0
    """Until the call returned: on a GPU that is before its work is done."""
    operations: int = 0
    bytes: int = 0
    compile: float = 0.0
    """Seconds of these in which code was compiled or read from the disk."""
    kernels: int = 0
    """Launches its code makes."""
    launches: list[ProfiledLaunch] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<call of {self.name} on {self.device}: {self.busy * 1e6:.1f} µs, {self.compile * 1e6:.1f} µs of compilation>"

    @property
    def busy(self) -> float:
        """Seconds the device worked on it."""
        return sum(launch.seconds for launch in self.launches) if self.launches else max(0.0, self.seconds - self.compile)


@dataclass
class ProfiledLaunch:
    """One kernel on a GPU. Times are seconds on the device, from the profile's start."""

    entry: str
    device: str
    stream: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    start: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class ProfileRow:
    """All calls of one kernel on one device."""

    name: str
    device: str
    calls: int
    launches: int
    seconds: float
    operations: int
    bytes: int
    compile: float = 0.0
    """Seconds of compilation, which are not in `seconds`."""


@dataclass
class _Timed:
    """A launch between two events."""

    clock: _Clock
    record: ProfiledLaunch
    start: DeviceEvent
    stop: DeviceEvent | None = None


class _Clock:
    """Events on one device, read when all is over."""

    def __init__(self, device: ArrayDevice) -> None:
        self.device = device
        self.began = time.perf_counter()
        self.base = self._event(0)
        self.timed: list[_Timed] = []

    def _event(self, stream: int) -> DeviceEvent:
        return self.device.event(timing=True).record(stream)

    def begin(self, record: ProfiledLaunch) -> _Timed:
        timed = _Timed(self, record, self._event(record.stream))
        self.timed.append(timed)
        return timed

    def end(self, timed: _Timed) -> None:
        timed.stop = self._event(timed.record.stream)

    def settle(self, origin: float) -> None:
        """Wait, and fill in the times."""
        try:
            self.device.synchronize()
            for timed in self.timed:
                if timed.stop is not None:
                    timed.record.start = self.began - origin + timed.start.milliseconds(self.base) / 1e3
                    timed.record.seconds = timed.stop.milliseconds(timed.start) / 1e3
        finally:
            self.timed.clear()  # the events go back to the device, which takes them again


class Profile:
    """What ran; complete when its block has ended."""

    def __init__(self, nvtx: bool = False) -> None:
        self.calls: list[ProfiledCall] = []
        self.seconds = 0.0
        self.memory: dict[str, int] = {}
        """The most bytes arrays of Tilewright held on each GPU meanwhile."""
        self._clocks: dict[int, _Clock] = {}
        self._current = threading.local()
        self._lock = fork_safe_lock()
        self._origin = 0.0
        self._work: dict[tuple[int, object], tuple[Any, Any]] = {}
        self._nvtx = range_marks() if nvtx else None

    def __repr__(self) -> str:
        kernels = len({(call.name, call.device) for call in self.calls})
        return f"<profile: {len(self.calls)} calls of {kernels} kernels, {sum(call.busy for call in self.calls) * 1e3:.3f} ms of work; print() shows the table>"

    @property
    def launches(self) -> list[ProfiledLaunch]:
        """Every kernel that ran on a GPU, in the order they were queued."""
        return [launch for call in self.calls for launch in call.launches]

    # -- the block ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Profile:
        if observe.observer is not None:
            raise UserError.at("TW005", "a profile is open already", help="end its block first")
        self._origin = time.perf_counter()
        self._held: dict[str, int] = {}
        for known in loaded_kinds():
            for device in known.in_use():
                device.reset_peak_memory()
                self._held[device.id] = device.peak_memory()
        self._closing = ExitStack()
        self._closing.enter_context(streams.special())
        leave_direct_ways()
        observe.observer = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        observe.observer = None
        self._closing.close()
        try:
            for clock in self._clocks.values():
                clock.settle(self._origin)
        except Exception:
            # Something already went wrong inside: that is what the user should see.
            if error is None:
                raise
        used = {call.device for call in self.calls}
        for device in (device for known in loaded_kinds() for device in known.in_use()):
            # What somebody else holds on a device that nobody used here is no news.
            if device.id in used or device.peak_memory() > self._held.get(device.id, 0):
                self.memory[device.id] = device.peak_memory()
        self.seconds = time.perf_counter() - self._origin

    # -- what runtimes tell -------------------------------------------------------------------------------------

    @contextmanager
    def call(self, function: Named, device: str) -> Iterator[ProfiledCall]:
        """A call of a kernel, to be given its `work` inside."""
        record = ProfiledCall(function.name, device, time.perf_counter() - self._origin, threading.get_ident())
        outer, self._current.call = getattr(self._current, "call", None), record
        if self._nvtx is not None:
            self._nvtx[0](function.name)
        began = time.perf_counter()
        try:
            yield record
        finally:
            record.seconds = time.perf_counter() - began
            self._current.call = outer
            if self._nvtx is not None:
                self._nvtx[1]()
            with self._lock:
                self.calls.append(record)

    def compiled(self, seconds: float) -> None:
        """Code was compiled, or read from the disk, in this thread."""
        call = getattr(self._current, "call", None)
        if call is not None:
            call.compile += seconds

    def before_launch(self, device: ArrayDevice, launch: Launch, grid: tuple[int, int, int], stream: int) -> _Timed:
        with self._lock:
            clock = self._clocks.get(device.ordinal)
            if clock is None:
                clock = self._clocks[device.ordinal] = _Clock(device)
        record = ProfiledLaunch(launch.entry, device.id, stream, grid, launch.threads, launch.shared_bytes)
        call = getattr(self._current, "call", None)
        if call is not None:
            call.launches.append(record)
        return clock.begin(record)

    def after_launch(self, token: object) -> None:
        assert isinstance(token, _Timed)
        token.clock.end(token)

    def count(self, record: ProfiledCall, function: Function, artifact: Artifact, values: Mapping[str, Any]) -> None:
        """Operations and bytes of a call."""
        record.kernels = len(record.launches) or len(artifact.launches)
        key = (id(function), artifact.inputs)
        if key not in self._work:
            began = time.perf_counter()
            self._work[key] = (_work(function, artifact), function)  # the function is kept: its address is the key
            if getattr(self._current, "call", None) is record:
                record.compile += time.perf_counter() - began
        operations, _ = self._work[key]
        shapes = {name: value.shape for name, value in values.items() if hasattr(value, "shape")}
        sizes = {name: int(value) for name, value in values.items() if isinstance(value, int)}
        for binding in artifact.bindings:
            if binding.array in shapes and not binding.stride:
                sizes[binding.name] = int(shapes[binding.array][binding.axis])
        try:
            record.operations = max(0, operations.evaluate(sizes))
        except KeyError:
            record.operations = 0  # it depends on a size only the call's strides tell
        record.bytes = sum(prod(s) * _itemsize(artifact, name) for name, s in shapes.items())
        for output in artifact.outputs:
            if output.name not in shapes:
                record.bytes += prod(s.evaluate(sizes) for s in output.shape) * output.dtype.itemsize

    # -- looking at it ------------------------------------------------------------------------------------------

    def rows(self) -> list[ProfileRow]:
        """One for each kernel on each device, those that took longest first."""
        groups: dict[tuple[str, str], list[ProfiledCall]] = {}
        for call in self.calls:
            groups.setdefault((call.name, call.device), []).append(call)
        rows = [
            ProfileRow(
                name, device, len(calls), sum(c.kernels for c in calls), sum(c.busy for c in calls),
                sum(c.operations for c in calls), sum(c.bytes for c in calls),
                sum(c.compile for c in calls),
            )
            for (name, device), calls in groups.items()
        ]  # fmt: skip
        return sorted(rows, key=lambda row: -row.seconds)

    def table(self) -> str:
        """The rows as text, with the part each has of the time, and the launches of kernels that make several."""
        rows = self.rows()
        total = sum(row.seconds for row in rows) or 1.0
        head = ("kernel", "device", "calls", "launches", "compile", "time", "part", "each", "GB/s", "GFLOP/s")
        lines: list[tuple[str, ...]] = [head]
        for row in rows:
            rate = [f"{n / row.seconds / 1e9:.1f}" if row.seconds and n else "-" for n in (row.bytes, row.operations)]
            part = f"{100 * row.seconds / total:.1f} %"
            lines.append(
                (row.name, row.device, str(row.calls), str(row.launches), _time(row.compile) if row.compile else "-", _time(row.seconds), part, _time(row.seconds / row.calls), *rate)
            )
            lines += self._parts(row, total)
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        texts = ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip() for line in lines]
        for device, peak in self.memory.items():
            texts.append(f"{device}: at most {peak} bytes of memory were held")
        return "\n".join(texts)

    def _parts(self, row: ProfileRow, total: float) -> list[tuple[str, ...]]:
        entries: dict[str, list[float]] = {}
        for call in self.calls:
            if (call.name, call.device) == (row.name, row.device):
                for launch in call.launches:
                    entries.setdefault(launch.entry, []).append(launch.seconds)
        if len(entries) < 2:
            return []
        return [
            (f"  {entry}", "", "", str(len(times)), "", _time(sum(times)), f"{100 * sum(times) / total:.1f} %", _time(sum(times) / len(times)), "", "")
            for entry, times in entries.items()
        ]

    def __str__(self) -> str:
        return self.table()

    def trace(self) -> dict[str, Any]:
        """The timeline in Chrome's format: calls by thread on the host, launches by stream on each GPU."""
        events: list[dict[str, Any]] = []
        host = os.getpid()
        for call in self.calls:
            rates = {"device": call.device, "operations": call.operations, "bytes": call.bytes}
            events.append(_event(call.name, "call", call.start, call.seconds, host, call.thread, rates))
            for launch in call.launches:
                form = {"grid": list(launch.grid), "threads": launch.threads, "shared_bytes": launch.shared_bytes, "call": call.name}
                events.append(_event(launch.entry, "kernel", launch.start, launch.seconds, launch.device, launch.stream, form))
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def save(self, path: str | Path) -> None:
        """Write the timeline as a file."""
        try:
            Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")
        except OSError as error:
            raise UserError.at("TW007", f"'{path}' cannot be written: {error.strerror or error}") from None


def profile(nvtx: bool = False) -> Profile:
    """Watch all calls of kernels in a `with` block. `nvtx` also marks them for NVIDIA's tools."""
    return Profile(nvtx)


def _event(name: str, kind: str, start: float, seconds: float, process: object, thread: object, more: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "ts": start * 1e6, "dur": seconds * 1e6, "pid": process, "tid": thread, "args": more}


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _work(function: Function, artifact: Artifact) -> Any:
    """Operations of a call, in its sizes: those of the program as written, for arguments of these dtypes and ranks."""
    from tilewright.analysis.work import work_of
    from tilewright.base.artifact import ArrayParam
    from tilewright.base.sizes import ZERO
    from tilewright.compile.driver import Signature, front_end
    from tilewright.tree.typed import ArrayArg, ScalarArg

    args = [ArrayArg(p.dtype, len(p.shape), None, 0) if isinstance(p, ArrayParam) else ScalarArg(p.dtype) for p in artifact.inputs]
    _, program = front_end(function, Signature(tuple(args)))
    return sum((work_of(call.kernel).operations for call in program.calls), ZERO)


def _itemsize(artifact: Artifact, name: str) -> int:
    return next((p.dtype.itemsize for p in (*artifact.inputs, *artifact.outputs) if p.name == name), 0)
