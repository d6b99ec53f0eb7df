"""What the first call of a slow kernel says, through Python's `warnings`.

In: the notes of a compiled program, or an array that had to be copied. Out: one `PerformanceWarning` for each note and process, at the line
of the caller. `TILEWRIGHT_WARN=error` raises instead, `off` is silent.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import numpy as np

from tilewright.base import environment
from tilewright.base.artifact import Artifact
from tilewright.base.errors import Diagnostic, Note, PerformanceWarning, UserError
from tilewright.base.source import NOWHERE, Span

VARIABLE = "TILEWRIGHT_WARN"
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_said: set[tuple[object, ...]] = set()
"""What was said: each once, for a process."""


def mode() -> str:
    """`on`, `off` or `error`. Raises UserError for anything else."""
    return environment.word(VARIABLE)


def announced(artifact: Artifact) -> Artifact:
    """The artifact, whose notes are said where they were not before."""
    if artifact.notes:
        announce(artifact.notes)
    return artifact


def announce(notes: Sequence[Note]) -> None:
    """Say what makes a program slow: once for each place, or always as an error. Kernels of the package itself are not the caller's to mend."""
    notes = [note for note in notes if not note.path.startswith(_PACKAGE)]
    chosen = mode()
    if chosen == "off":
        return
    if chosen == "error" and notes:
        raise UserError(*(replace(note.diagnostic, severity="error") for note in notes))
    for note in notes:
        _say((note.code, note.path, note.line, note.column), note.diagnostic)


def _say(key: tuple[object, ...], found: Diagnostic) -> None:
    if key in _said:
        return
    _said.add(key)
    path, line = caller()
    warnings.warn_explicit(PerformanceWarning(found.render()), None, path, line)


def caller() -> tuple[str, int]:
    """The line outside the package that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def forget() -> None:
    """Say everything again (tests)."""
    _said.clear()


# -- copies ---------------------------------------------------------------------------------------------------------------


def contiguous(name: str, array: np.ndarray, span: Span = NOWHERE) -> np.ndarray:
    """The array with its elements one after the other; a copy where they are not, which is said."""
    if array.flags.c_contiguous:
        return array
    copied(name, array, span, f"its strides are {array.strides} bytes")
    return np.ascontiguousarray(array)


_fields: ContextVar[bool] = ContextVar("fields of structs", default=False)


@contextmanager
def strided_fields() -> Iterator[None]:
    """Inside, copies of arrays that lie apart are not told: fields of structs do, and nobody can pass them otherwise."""
    token = _fields.set(True)
    try:
        yield
    finally:
        _fields.reset(token)


def copied(name: str, array: np.ndarray, span: Span, reason: str, help: str = "") -> None:
    """A call copies an array because of how it lies: say so."""
    chosen = mode()
    if chosen == "off" or _fields.get():
        return
    found = Diagnostic(
        "TW063", f"'{name}' ({array.dtype}, shape {list(array.shape)}) is copied at every call: {reason}", span,
        help or f"pass a contiguous array: np.ascontiguousarray({name}) once, before the calls", "warning",
    )  # fmt: skip
    if chosen == "error":
        raise UserError(replace(found, severity="error"))
    place = (span.path, span.line, span.column) if span.line else caller()
    _say(("TW063", name, *place), found)
