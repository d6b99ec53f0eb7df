"""The four kinds of error, never mixed, and the sink that collects them.

    UserError    the program or its input is wrong
    TargetLimit  the program is right, but this target cannot do it
    DeviceError  a call of a device API failed, or the device is missing
    CompilerBug  we are wrong; the IR is saved to a file and named

A message reads `file:line:col: error[TW012]: what is wrong, with the values`, then the source line with a caret, then
`help:` with one action. Every code is listed in `CODES` and explained in `docs/errors.md`.

Errors leave the package through functions marked `public`: there a UserError becomes one of Python's own kinds as well, and the
lines of this package are taken out of its traceback. Inside, no `except TypeError` meets one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, TypeVar

from tilewright.base.record import record
from tilewright.base.source import NOWHERE, Source, Span

CODES: dict[str, str] = {
    "TW001": "syntax error",
    "TW002": "unknown name",
    "TW003": "wrong rank",
    "TW004": "size mismatch",
    "TW005": "unsupported construct",
    "TW006": "dtype would lose data",
    "TW007": "missing or unreadable file",
    "TW008": "missing or unexpected input",
    "TW009": "wrong argument type",
    "TW010": "loop index redeclared",
    "TW011": "unknown attribute",
    "TW012": "attribute contradicts the loops",
    "TW013": "index out of range",
    "TW014": "size not bound",
    "TW015": "write to something that is not an output",
    "TW016": "wrong number or form of arguments",
    "TW017": "output not written or read before written",
    "TW018": "output array not usable",
    "TW019": "result not used",
    "TW020": "target cannot do this",
    "TW021": "unknown target",
    "TW030": "device not present",
    "TW031": "out of memory",
    "TW032": "device call failed",
    "TW033": "device array misuse",
    "TW034": "device lost",
    "TW035": "kernel stopped by its watchdog",
    "TW036": "not possible while capturing a graph",
    "TW037": "assertion failed in a kernel",
    "TW040": "compiler bug",
    "TW041": "IR text does not parse",
    "TW042": "IR does not verify",
    "TW050": "emulator found a fault",
    "TW051": "race or divergent barrier that the text shows",
    "TW060": "runs on one thread or in one block",
    "TW061": "product, convolution or attention not recognised",
    "TW062": "scan runs in order",
    "TW063": "array copied because of how it lies",
}


@record
class Diagnostic:
    """One message, not yet raised."""

    code: str
    message: str
    span: Span = NOWHERE
    help: str = ""
    severity: str = "error"

    def render(self) -> str:
        place = f"{self.span.place()}: " if self.span.source or self.span.line else ""
        parts = [f"{place}{self.severity}[{self.code}]: {self.message}"]
        excerpt = self.span.excerpt()
        if excerpt:
            parts.append(excerpt)
        for call in self.span.calls():
            parts += [f"{call.place()}: called here", *([shown] if (shown := call.excerpt()) else [])]
        if self.help:
            parts.append(f"help: {self.help}")
        return "\n".join(parts)


@record
class Note:
    """A warning about speed as numbers and text, so that it survives in the artifact cache. `text` is the line of source that it is about; without a line it is about the whole kernel."""

    code: str
    message: str
    help: str = ""
    path: str = ""
    line: int = 0
    column: int = 0
    end_column: int = 0
    text: str = ""

    @property
    def diagnostic(self) -> Diagnostic:
        """The warning as messages are."""
        span = NOWHERE
        if self.path:
            span = Span(Source(self.path, self.text, self.line or 1), self.line, self.column, self.line, self.end_column)
        return Diagnostic(self.code, self.message, span, self.help, "warning")

    def render(self) -> str:
        """The whole message."""
        return self.diagnostic.render()


def note_of(found: Diagnostic) -> Note:
    """The diagnostic without its source."""
    span = found.span
    if span.source is None:
        return Note(found.code, found.message, found.help)
    text = span.source.line(span.line) if span.line else ""
    last = span.end_column if span.end_line == span.line else len(text) + 1
    return Note(found.code, found.message, found.help, span.path, span.line, span.column, last, text)


class TilewrightError(Exception):
    """Base of all errors of this package. `str(error)` is the full message."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        self.diagnostics = diagnostics
        super().__init__("\n".join(d.render() for d in diagnostics))

    @property
    def code(self) -> str:
        return self.diagnostics[0].code if self.diagnostics else ""

    @property
    def span(self) -> Span:
        return self.diagnostics[0].span if self.diagnostics else NOWHERE

    @classmethod
    def at(cls, code: str, message: str, span: Span = NOWHERE, help: str = "") -> TilewrightError:
        """Build the error from its parts; raises nothing."""
        assert code in CODES, code
        return cls(Diagnostic(code, message, span, help))


class _Told(TilewrightError):
    """An error whose message is all there is to know: notebooks show it without the lines of this package."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints: where the caller's own code was, and the message. With TILEWRIGHT_DEBUG, everything."""
        if _debugs():
            return traceback.format_exception(self)
        frames = traceback.extract_tb(_without_ours(self.__traceback__))
        place = [f'  File "{frames[-1].filename}", line {frames[-1].lineno}', f"    {frames[-1].line}"] if frames else []
        return [*place, f"{type(self).__name__}: {self}"]


class UserError(_Told):
    """The program, or what it was given, is wrong."""


class UserTypeError(UserError, TypeError):
    """Something of the wrong type was given, or something is missing."""


class UserValueError(UserError, ValueError):
    """A value does not fit: a rank, a size, a dtype, a device, an array for results."""


class UserIndexError(UserError, IndexError):
    """An index lies outside."""


class UserCallError(UserError, TypeError, ValueError):
    """Arguments whose number or form is wrong."""


class TargetLimit(_Told):
    """The program is right but the target cannot run it."""


class DeviceError(_Told):
    """A device API call failed, or the device is not there."""


class CompilerBug(TilewrightError):
    """Tilewright itself is wrong. The message names the pass and the file that holds the IR."""


class DeviceWarning(UserWarning):
    """A device or its driver does something wrong that nobody else would say."""


class PerformanceWarning(UserWarning):
    """A kernel is right and far slower than its text suggests. `str(warning)` has the place, the reason and what to write instead."""


def close_matches(word: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """What somebody may have meant: known words that are spelled almost so, the closest first."""
    import difflib  # nobody needs it as long as all words are right

    return difflib.get_close_matches(word, list(known), n, cutoff)


def in_order(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Messages by place."""
    return sorted(found, key=lambda d: (d.span.path, d.span.line, d.span.column))


class Diagnostics:
    """A sink: report many, raise once, so that all errors of a stage come together."""

    def __init__(self) -> None:
        self.items: list[Diagnostic] = []

    def error(self, code: str, message: str, span: Span = NOWHERE, help: str = "") -> None:
        assert code in CODES, code
        item = Diagnostic(code, message, span, help)
        if item not in self.items:
            self.items.append(item)

    def warn(self, code: str, message: str, span: Span = NOWHERE, help: str = "") -> None:
        assert code in CODES, code
        self.items.append(Diagnostic(code, message, span, help, "warning"))

    @property
    def errors(self) -> list[Diagnostic]:
        return [d for d in self.items if d.severity == "error"]

    def raise_if_errors(self) -> None:
        errors = in_order(self.errors)
        if errors:
            raise UserError(*errors)

    @contextmanager
    def collecting(self) -> Iterator[Diagnostics]:
        """`with sink.collecting():` raises everything reported inside at its end."""
        yield self
        self.raise_if_errors()


# -- where errors leave the package ---------------------------------------------------------------------------------

_KINDS: dict[str, type[UserError]] = {
    **dict.fromkeys(("TW003", "TW004", "TW006", "TW011", "TW012", "TW018", "TW020", "TW021", "TW030", "TW033"), UserValueError),
    **dict.fromkeys(("TW008", "TW009"), UserTypeError), "TW013": UserIndexError, "TW016": UserCallError,
}  # fmt: skip
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_THROUGH = (os.path.realpath(contextlib.__file__), "<recorded calls>")
"""Code that runs between ours and ours."""

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def _debugs() -> bool:
    return os.environ.get("TILEWRIGHT_DEBUG", "").strip().lower() not in ("", "0", "off", "no", "false")


def _is_ours(entry: TracebackType) -> bool:
    name = entry.tb_frame.f_code.co_filename
    return name.startswith(_OURS) or name in _THROUGH


def _without_ours(entry: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package."""
    kept: list[TracebackType] = []
    while entry is not None:
        kept += [] if _is_ours(entry) else [entry]
        entry = entry.tb_next
    result: TracebackType | None = None
    for one in reversed(kept):
        result = TracebackType(result, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return result


def leave(error: BaseException) -> None:
    """Make an error that leaves the package one for its caller: of Python's kind, without frames of ours. Raise it again with a bare `raise`, which adds none.

    Bugs of the compiler keep all their frames, and so does everything under TILEWRIGHT_DEBUG=1.
    """
    if isinstance(error, UserError) and type(error) is UserError:
        kinds = {_KINDS.get(d.code) for d in error.diagnostics}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            error.__class__ = kind
    if _debugs():
        return
    if not isinstance(error, _Told):
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            error.__traceback__ = None  # arguments that the function itself does not take
        return
    error.__traceback__ = _without_ours(error.__traceback__)
    seen: BaseException = error
    while (inner := seen.__cause__ or seen.__context__) is not None:
        if inner is seen.__context__ is not seen.__cause__ and inner.__traceback__ is not None and _is_ours(inner.__traceback__):
            seen.__context__ = inner.__context__  # what we met on the way, and nobody asked about
            continue
        if inner is seen.__cause__:
            inner.__traceback__ = _without_ours(inner.__traceback__)
        seen = inner


class PublicContext(contextlib.ContextDecorator):
    """A context manager whose errors are for the caller."""

    def __init__(self, inner: contextlib.AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> Any:
        try:
            return self._inner.__enter__()
        except BaseException as error:
            leave(error)
            raise

    def __exit__(self, *details: Any) -> bool | None:
        try:
            return self._inner.__exit__(*details)
        except BaseException as error:
            leave(error)
            raise


def entered(function: F) -> F:
    """A function that users call and that calls `leave` itself: one call less where calls are counted in tenths of a microsecond."""
    function.__public__ = function.__called__ = function  # type: ignore[attr-defined]
    return function


def public(function: F) -> F:
    """The function as users call it, the same one for all its names. What a function such as `kernel(...)` returns, a decorator, is public too."""
    known = vars(function).get("__called__")
    if known is not None:
        return known  # type: ignore[no-any-return]

    @functools.wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        try:
            result = function(*args, **keywords)
        except BaseException as error:
            leave(error)
            raise
        if type(result) is FunctionType and "<locals>" in result.__qualname__ and result.__module__.startswith("tilewright.") and not hasattr(result, "__public__"):
            return public(result)
        return PublicContext(result) if type(result) is contextlib._GeneratorContextManager else result

    called.__public__ = True  # type: ignore[attr-defined]
    function.__called__ = called  # type: ignore[attr-defined]
    return called  # type: ignore[return-value]


def public_methods(*special: str) -> Callable[[C], C]:
    """Of a class: its methods without an underscore, and those named, are for users."""

    def marked(cls: C) -> C:
        for name, value in list(vars(cls).items()):
            if (not name.startswith("_") or name in special) and type(value) is FunctionType:
                setattr(cls, name, public(value))
        return cls

    return marked
