"""What the null driver knows: devices, contexts, handles, who called what. In: calls by name; out: status codes, a log, a leak report.

Every function of the driver is a method `cu…` of a mixin; it returns its results or raises `Refused` with the code of the real
driver. `State` wraps them: the result is a tuple as the bindings give it, calls are counted and logged, faults are injected, and
what holds for all functions is checked first: that the driver was initialised in this very process, that the thread has a context,
that the context is alive and that no capture forbids the call.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import TypeVar

from null_cuda.constants import PLAIN, enumerations
from null_cuda.work import Op, Queue

ENUMERATIONS = enumerations()
CUresult = ENUMERATIONS["CUresult"]
CONTEXT, FOREIGN_CONTEXT = 0xC0, 0xF0
"""Handles of the first device's primary context, and of a context that another library made on it."""

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, DEVICE_UNAVAILABLE = 1, 2, 3, 46
NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE = 100, 101, 201, 400
NOT_READY, ILLEGAL_ADDRESS, NOT_PERMITTED, NOT_SUPPORTED = 600, 700, 800, 801
CONTEXT_DESTROYED = 709

NO_INIT = frozenset({"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuGetProcAddress"})
NO_CONTEXT = frozenset({
    "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceTotalMem", "cuDeviceGetAttribute", "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxGetState", "cuCtxGetCurrent",
    "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuDeviceCanAccessPeer", "cuDeviceGetP2PAttribute", "cuTensorMapEncodeTiled",
    "cuTensorMapEncodeIm2col", "cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool", "cuDeviceGetPCIBusId", "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetDevice", "cuGraphCreate", "cuGraphDestroy", "cuGraphExecDestroy", "cuGraphGetNodes", "cuGraphNodeGetType", "cuPointerGetAttribute",
})  # fmt: skip
"""Functions that work without a current context, and on one that is lost."""
UNSAFE = frozenset({
    "cuMemAlloc", "cuMemFree", "cuMemAllocHost", "cuMemHostAlloc", "cuMemFreeHost", "cuMemAllocManaged", "cuMemHostRegister",
    "cuMemHostUnregister", "cuStreamSynchronize", "cuModuleUnload",
})  # fmt: skip
"""Functions a capture forbids while it runs, unless it is relaxed."""


class Refused(Exception):
    """A call that fails, with the driver's code."""

    def __init__(self, code: int, why: str = "") -> None:
        super().__init__(f"{code} {why}".strip())
        self.code = code
        self.why = why


class Fault(Exception):
    """A kernel raises it to fault as a real one would: the context is lost with this code."""

    def __init__(self, code: int = ILLEGAL_ADDRESS) -> None:
        super().__init__(str(code))
        self.code = code


class Handle:
    """Something the driver made and the caller must destroy."""

    kind = "handle"

    def __init__(self, context: Context | None, number: int) -> None:
        self.context = context
        self.number = number

    def __repr__(self) -> str:
        return f"{self.kind} {self.number:#x}"


class Stream(Handle):
    kind = "stream"

    def __init__(self, context: Context, number: int, blocking: bool, priority: int = 0) -> None:
        super().__init__(context, number)
        self.blocking = blocking
        self.priority = priority
        self.tail: Op | None = None
        self.capture: object = None
        self.last_nodes: tuple[object, ...] = ()
        """While capturing: the nodes the next one comes after."""


class Context(Handle):
    kind = "context"

    def __init__(self, number: int, ordinal: int) -> None:
        super().__init__(None, number)
        self.ordinal = ordinal
        self.error = 0
        """The code of the kernel fault that ended it."""
        self.retained = 0
        self.reset = False
        """It was reset after a fault, and cannot be made again in this process."""
        self.default = Stream(self, 0, True)
        self.streams: dict[int, Stream] = {}
        self.peers: set[int] = set()


H = TypeVar("H", bound=Handle)
Inject = dict[str, dict[int, int]]


class State(SimpleNamespace):
    """The driver's memory of what happened. See `NullCuda` for what the arguments mean."""

    def __init__(self, memory: int, count: int, mode: str, seed: int, version: int, capability: tuple[int, int], record: bool) -> None:
        super().__init__()
        self.total, self.count, self.version, self.capability = memory, count, version, capability
        self.recording = record
        self.log: list[tuple[object, ...]] = []
        self.counts: Counter[str] = Counter()
        self.fail: dict[str, int] = {}
        """The status the named function gives from now on."""
        self.inject: Inject = {}
        """Per function: the status of its n-th call, counted from 1 over the driver's life."""
        self.violations: list[str] = []
        """What broke the contract: wrong handles, double frees, calls in the wrong order."""
        self.queue = Queue(mode, seed)
        self.handles: dict[int, Handle] = {}
        self.destroyed: dict[int, str] = {}
        self.contexts = {CONTEXT + i: Context(CONTEXT + i, i) for i in range(count)}
        self.contexts[FOREIGN_CONTEXT] = Context(FOREIGN_CONTEXT, 0)
        self.thread = threading.local()
        self.compute_mode = 0
        self.process = 0
        """The process that called cuInit."""
        self._next = 0x1000
        for name, enumeration in ENUMERATIONS.items():
            setattr(self, name, enumeration)
        for name, value in PLAIN.items():
            setattr(self, name, value)
        for name in dir(type(self)):
            if name.startswith("cu") and name[2:3].isupper():
                setattr(self, name, self._wrapped(name, getattr(self, name)))

    def _wrapped(self, name: str, function: Callable[..., object]) -> Callable[..., tuple[object, ...]]:
        def call(*arguments: object) -> tuple[object, ...]:
            with self.queue.lock:
                self.counts[name] += 1
                if self.recording:
                    self.log.append((name, *map(self._readable, arguments)))
                status = self.inject.get(name, {}).get(self.counts[name], 0) or self.fail.get(name, 0)
                if status:
                    self.failing(name, arguments)
                    return self._code(status), None
                try:
                    self._admit(name)
                    result = function(*arguments)
                except Refused as refused:
                    if refused.why:
                        self.violations.append(f"{name}: {refused.why}")
                    return self._code(refused.code), None
                return self._code(0), *(result if isinstance(result, tuple) else () if result is None else (result,))

        call.__name__ = name
        return call

    def failing(self, name: str, arguments: tuple[object, ...]) -> None:
        """Hear of a call that was made to fail."""

    def _code(self, status: int) -> int:
        try:
            return CUresult(status)
        except ValueError:
            return status

    def _readable(self, argument: object) -> object:
        """Enumerations and functions by their names, so that a log can be read and compared."""
        if isinstance(argument, IntEnum):
            return argument.name
        if type(argument) is int and argument in self.handles:
            return getattr(self.handles[argument], "log_name", argument)
        return argument

    def _admit(self, name: str) -> None:
        if name in NO_INIT:
            return
        if self.process != os.getpid():
            raise Refused(NOT_INITIALIZED, "" if self.process else "called before cuInit")
        if self.queue.inside():
            raise Refused(NOT_PERMITTED, "called from a host function")
        if name in NO_CONTEXT:
            return
        context = self.current()
        if context.error:
            raise Refused(context.error)
        if name in UNSAFE:
            self.forbid_in_capture(context)

    def forbid_in_capture(self, context: Context) -> None:
        """Raise where a capture that is under way forbids calls that are not recorded."""

    def calls(self, name: str) -> list[tuple[object, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == name]

    # -- handles ------------------------------------------------------------------------------------------------

    def new_number(self) -> int:
        self._next += 0x40
        return 0x55_0000_0000 + self._next

    def keep(self, handle: H) -> H:
        self.handles[handle.number] = handle
        return handle

    def find(self, kind: type[H], number: object) -> H:
        """The live handle, or INVALID_HANDLE."""
        value = int(number or 0)  # type: ignore[call-overload]
        found = self.handles.get(value)
        if isinstance(found, kind):
            return found
        if value in self.destroyed:
            code = {"stream": INVALID_CONTEXT, "event": CONTEXT_DESTROYED}.get(self.destroyed[value], INVALID_HANDLE)
            raise Refused(code, f"{value:#x} is no {kind.kind}, a destroyed {self.destroyed[value]}")
        # A real driver may just as well crash.
        raise Refused(INVALID_HANDLE, f"{value:#x} is no {kind.kind}" + (f", a {found.kind}" if found else ""))

    def drop(self, handle: Handle) -> None:
        del self.handles[handle.number]
        self.destroyed[handle.number] = handle.kind

    # -- contexts -----------------------------------------------------------------------------------------------

    def stack(self) -> list[int]:
        """The contexts of this thread, the current one last."""
        if not hasattr(self.thread, "stack"):
            self.thread.stack = [0]
        stack: list[int] = self.thread.stack
        return stack

    def current(self) -> Context:
        number = self.stack()[-1]
        if not number:
            raise Refused(INVALID_CONTEXT, "no context is current on this thread")
        return self.contexts[number]

    def stream(self, number: object) -> Stream:
        """The stream a caller means, of the current context."""
        value = int(number or 0)  # type: ignore[call-overload]
        context = self.current()
        if value in (0, 1):
            return context.default
        if value == 2:
            if not hasattr(self.thread, "defaults"):
                self.thread.defaults = {}
            own: Stream = self.thread.defaults.setdefault(context.number, Stream(context, 2, True))
            context.streams[id(own)] = own
            return own
        found = self.find(Stream, value)
        if found.context is not context:
            raise Refused(INVALID_HANDLE, f"{found!r} belongs to another context than the current one")
        return found

    # -- leaks --------------------------------------------------------------------------------------------------

    def leaks(self) -> dict[str, int]:
        """How many of each kind of thing are alive: streams, events, modules, graphs, executable graphs, pools, memory by kind."""
        found = Counter(handle.kind for handle in self.handles.values() if handle.kind not in ("function", "node"))
        found.update(f"{a.kind} memory" for a in self.allocations.values() if not a.adopted)
        return dict(found)

    def check(self) -> None:
        """Fail where the contract was broken or something is left over."""
        assert not self.violations, "\n".join(self.violations)
        assert not self.leaks(), f"left over: {self.leaks()}"
