"""Where memory was asked for. In: the call stack; out: the line of the program, as `file:line`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tilewright.base import environment

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


def traced() -> bool:
    """Whether the environment asks for tracing from the start."""
    return environment.is_on("TILEWRIGHT_TRACE_MEMORY")


def caller() -> str | None:
    """The innermost line outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None
