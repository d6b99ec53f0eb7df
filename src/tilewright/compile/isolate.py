"""Compilation in another process: LLVM ends its process on a backend error, and that must not be the user's.

In: the name of a function of this package and its arguments; out: the bytes it returns. A worker process is started on first
use and then kept warm, so a request costs two pipe transfers, not an import. When the function ends the worker's process, or
takes too long, that comes back as an error here and the next request gets a new worker. A Python error of the function is raised
here as it was there. Where no process can be started at all, the function runs in this one.

One request at a time; the lock makes it safe from threads. A forked child of ours starts a worker of its own.

Frames on the pipes: the number of fields (u32), then per field a kind (`s` text, `b` bytes), its length (u64) and its bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import logging
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from tilewright.base import errors
from tilewright.base.errors import CompilerBug, Diagnostic, TilewrightError
from tilewright.base.forks import fork_safe_lock
from tilewright.base.llvm_library import LlvmModule, TargetMachine, process_triple

TIMEOUT_SECONDS = 60.0
_START_SECONDS = 60.0
_REQUESTS_PER_WORKER = 2000
"""LLVM keeps some of what each compilation made; a fresh worker now and then bounds that."""
_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from tilewright.compile.isolate import serve; serve()"
"""The worker imports from where we do, and not from its current directory."""
_COUNT = struct.Struct("<I")
_FIELD = struct.Struct("<cQ")
_PRINTED_KEPT = 8 << 10
_ERROR_KINDS: dict[str, type[TilewrightError]] = {
    kind.__name__: kind for kind in (errors.UserError, errors.TargetLimit, errors.DeviceError, errors.CompilerBug)
}
_log = logging.getLogger("tilewright")

Field = str | bytes


@dataclass(frozen=True)
class _Ending:
    """How a worker ended instead of answering."""

    sentence: str
    printed: bytes
    from_outside: bool = False


class _WorkerLost(Exception):
    """The worker's end of the pipe is closed."""


class _WorkerLate(Exception):
    """The worker did not answer in time."""


def emit_assembly(text: str, triple: str, cpu: str, features: str) -> bytes:
    """LLVM text to assembly (PTX for NVPTX), without optimisation; the plainest thing to run isolated."""
    machine = TargetMachine(triple, cpu, features, opt=3, code_model="default")
    try:
        module = LlvmModule(text)
    except RuntimeError as error:
        raise CompilerBug.at("TW040", f"LLVM refused its input: {error}") from error
    try:
        return machine.emit(module, as_object=False)
    finally:
        module.close()


# -- the caller's side ----------------------------------------------------------------------------------------------


def compile_isolated(function: str, *arguments: Field, timeout: float = TIMEOUT_SECONDS) -> bytes:
    """Run `module:function` of this package on `arguments` in another process; the bytes it returns.

    An error it raises is raised here. If its process dies or takes longer than `timeout` seconds, that is a CompilerBug with
    what it printed, and the arguments are saved to a file that the message names.
    """
    return _shared.request(function, arguments, timeout)


class IsolatedCompiler:
    """The client of one worker. `package` is the only one whose functions it may call."""

    def __init__(self, package: str = "tilewright") -> None:
        self.package = package
        self._lock = fork_safe_lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: IO[bytes] | None = None
        self._served = 0
        # In a frozen application `sys.executable` is the application, not Python.
        self._in_process = bool(getattr(sys, "frozen", False)) or not sys.executable

    @property
    def worker_id(self) -> int | None:
        """Process id of the running worker."""
        return self._process.pid if self._process else None

    def request(self, function: str, arguments: Sequence[Field], timeout: float = TIMEOUT_SECONDS) -> bytes:
        """See `compile_isolated`."""
        module = function.partition(":")[0]
        if module != self.package and not module.startswith(self.package + "."):
            raise CompilerBug.at("TW040", f"'{function}' is not a function of {self.package} and is not run isolated")
        with self._lock:
            if not self._ensure_worker():
                return _as_bytes(_resolve(function)(*arguments))
            frame = _pack([function, *arguments])
            answer = self._ask(frame, timeout)
            if isinstance(answer, _Ending) and answer.from_outside and self._ensure_worker():
                # An operator, or the system short of memory, killed it: the request deserves a second chance.
                answer = self._ask(frame, timeout)
            elif not isinstance(answer, _Ending) and answer[0] == "raised" and "TW031" in str(answer[1]):
                # Out of memory. A process keeps the limits that it was started under; a new one gets those of now, and all of the room.
                self._end_worker()
                if self._ensure_worker():
                    answer = self._ask(frame, timeout)
        if isinstance(answer, _Ending):
            printed = answer.printed.decode(errors="replace").strip()
            raise CompilerBug.at(
                "TW040",
                f"{function} {answer.sentence}"
                + (f":\n{printed}\n" if printed else "; it printed nothing; ")
                + f"its input is in {_save(function, arguments)}",
                help="please report this with that file",
            )
        status, payload = answer
        if status == "ok":
            return _as_bytes(payload)
        raise _decode_error(str(payload))

    def close(self) -> None:
        """End the worker and wait for it. A later request starts another."""
        # A daemon thread may be inside a request and never let go of the lock; then the worker is ended under it.
        taken = self._lock.acquire(timeout=0.5)
        try:
            self._end_worker()
        finally:
            if taken:
                self._lock.release()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's worker without ending it."""
        process, self._process, self._printed = self._process, None, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            # It is no child of ours; Popen must neither wait for it nor warn about it.
            process.returncode = 0

    # -- inside; the lock is held -------------------------------------------------------------------------------

    def _ensure_worker(self) -> bool:
        """Whether there is a worker, which may be a new one; if none can be started, there will be none."""
        if self._process is not None and (self._served >= _REQUESTS_PER_WORKER or self._process.poll() is not None):
            self._end_worker()
        if self._process is None and not self._in_process:
            try:
                self._start_worker()
            except (OSError, _WorkerLost, _WorkerLate) as error:
                self._end_worker()
                self._in_process = True
                _log.warning("compiling inside this process, since another one cannot be started: %s", error)
            except BaseException:
                self._end_worker()
                raise
        return self._process is not None

    def _start_worker(self) -> None:
        self._served = 0
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the worker)
        # A session of its own, so that Ctrl-C reaches us alone. Unbuffered, since a buffer would be written twice after a
        # fork of ours.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._receive(_START_SECONDS)
        except _WorkerLost as error:
            raise _WorkerLost(f"{error}: {self._printed_since(0).decode(errors='replace').strip()}") from error

    def _ask(self, frame: bytes, timeout: float) -> list[Field] | _Ending:
        """Send a request; the answer, or how the worker ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._printed is not None
        self._served += 1
        start = os.fstat(self._printed.fileno()).st_size
        try:
            try:
                _write(self._process.stdin.fileno(), frame)
                return self._receive(timeout)
            except OSError as error:
                raise _WorkerLost(str(error)) from error
        except _WorkerLate:
            printed = self._printed_since(start)
            self._end_worker()
            return _Ending(f"did not finish within {timeout:g} s", printed)
        except _WorkerLost:
            code = self._process.wait()
            printed = self._printed_since(start)
            self._end_worker()
            if os.name == "posix" and code < 0:
                sentence = f"ended its process by signal {-code} ({signal.strsignal(-code)})"
                return _Ending(sentence, printed, -code in (signal.SIGKILL, signal.SIGTERM))
            return _Ending(f"ended its process with code {code}", printed)
        except BaseException:
            # Interrupted between request and answer: what comes next on the pipe is not for the next request.
            self._end_worker()
            raise

    def _receive(self, timeout: float) -> list[Field]:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if os.name == "posix":
            return _read_frame(_reader(descriptor, time.monotonic() + timeout))
        # Pipes cannot be waited for with a time limit on Windows; there a timer ends the process, which ends the pipe.
        timer = threading.Timer(timeout, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            return _read_frame(_reader(descriptor, None))
        except _WorkerLost:
            if timer.finished.is_set():
                raise _WorkerLate from None
            raise
        finally:
            timer.cancel()

    def _printed_since(self, start: int) -> bytes:
        assert self._printed is not None
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(start, size - _PRINTED_KEPT))
        return self._printed.read()

    def _end_worker(self) -> None:
        process, self._process = self._process, None
        printed, self._printed = self._printed, None
        if process is not None:
            # It holds nothing worth a farewell, and may be deep in LLVM.
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if printed is not None:
            printed.close()


def _save(function: str, arguments: Sequence[Field]) -> str:
    """Write the input of a failed request to a file: short arguments as comments, the long ones as they are."""
    with tempfile.NamedTemporaryFile("wb", prefix="tilewright-crash-", suffix=".ll", delete=False) as file:
        file.write(f"; input of {function}\n".encode())
        for argument in arguments:
            if isinstance(argument, str) and "\n" not in argument:
                file.write(f"; argument: {argument}\n".encode())
        for argument in arguments:
            if isinstance(argument, bytes):
                file.write(argument + b"\n")
            elif "\n" in argument:
                file.write(argument.encode() + b"\n")
    return file.name


# -- frames and errors ----------------------------------------------------------------------------------------------


def _pack(fields: Sequence[Field]) -> bytes:
    parts = [_COUNT.pack(len(fields))]
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        parts += (_FIELD.pack(b"s" if isinstance(field, str) else b"b", len(data)), data)
    return b"".join(parts)


def _read_frame(read: Callable[[int], bytes]) -> list[Field]:
    (count,) = _COUNT.unpack(read(_COUNT.size))
    fields: list[Field] = []
    for _ in range(count):
        kind, length = _FIELD.unpack(read(_FIELD.size))
        data = read(length)
        fields.append(data.decode() if kind == b"s" else data)
    return fields


def _reader(descriptor: int, deadline: float | None) -> Callable[[int], bytes]:
    """A function that reads exactly so many bytes; _WorkerLost at the end of input, _WorkerLate after the deadline."""

    def read(count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            if deadline is not None:
                with selectors.DefaultSelector() as waiting:
                    waiting.register(descriptor, selectors.EVENT_READ)
                    if not waiting.select(max(0.0, deadline - time.monotonic())):
                        raise _WorkerLate
            part = os.read(descriptor, min(count, 1 << 20))
            if not part:
                raise _WorkerLost("it left without an answer")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    return read


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _encode_error(error: BaseException) -> str:
    """One of our errors by kind and parts; any other as a CompilerBug with its traceback. Source positions become text."""
    if isinstance(error, TilewrightError):
        items = [
            (d.code, (f"{d.span.place()}: " if d.span.line else "") + d.message, d.help, d.severity) for d in error.diagnostics
        ]
        kind = next((name for name, kind in _ERROR_KINDS.items() if isinstance(error, kind)), "CompilerBug")
        return json.dumps([kind, items])
    text = "".join(traceback.format_exception(error)).rstrip()
    return json.dumps(["CompilerBug", [("TW040", f"an unexpected error in an isolated compilation:\n{text}", "", "error")]])


def _decode_error(text: str) -> TilewrightError:
    kind, items = json.loads(text)
    diagnostics = [Diagnostic(code, message, help=help_text, severity=severity) for code, message, help_text, severity in items]
    return _ERROR_KINDS.get(kind, CompilerBug)(*diagnostics)


# -- the worker's side ----------------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests on standard input until it ends."""
    # The pipes move away from 0 and 1, so that whatever prints or reads does not disturb the frames.
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if os.name == "posix":
        import resource

        # A crash is expected here now and then; it is no reason to leave a core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # What is slow, done before the first request asks for it.
    process_triple()
    _write(answers, _pack(["ready"]))
    read = _reader(requests, None)
    while True:
        try:
            function, *arguments = _read_frame(read)
        except _WorkerLost:
            return
        try:
            answer: list[Field] = ["ok", _as_bytes(_resolve(str(function))(*arguments))]
        except Exception as error:
            answer = ["raised", _encode_error(error)]
        sys.stderr.flush()
        _write(answers, _pack(answer))


def _resolve(function: str) -> Callable[..., str | bytes]:
    module, _, name = function.partition(":")
    found: Callable[..., str | bytes] = getattr(importlib.import_module(module), name)
    return found


_shared = IsolatedCompiler()
atexit.register(_shared.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.abandon)

if __name__ == "__main__":
    serve()
