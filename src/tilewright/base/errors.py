"""The four kinds of error, never mixed, and the sink that collects them.

    UserError    the program or its input is wrong
    TargetLimit  the program is right, but this target cannot do it
    DeviceError  a call of a device API failed, or the device is missing
    CompilerBug  we are wrong; the IR is saved to a file and named

A message reads `file:line:col: error[TW012]: what is wrong, with the values`, then the source line with a caret, then
`help:` with one action. Every code is listed in `CODES` and explained in `docs/errors.md`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
        if os.environ.get("TILEWRIGHT_DEBUG", "").strip() not in ("", "0"):
            return traceback.format_exception(self)
        package = str(Path(__file__).resolve().parents[1]) + os.sep
        frames = [f for f in traceback.extract_tb(self.__traceback__) if not f.filename.startswith(package)]
        place = [f'  File "{frames[-1].filename}", line {frames[-1].lineno}', f"    {frames[-1].line}"] if frames else []
        return [*place, f"{type(self).__name__}: {self}"]


class UserError(_Told):
    """The program, or what it was given, is wrong."""


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
