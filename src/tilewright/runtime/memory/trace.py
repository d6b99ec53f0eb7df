"""Where memory was asked for. In: the call stack; out: the line of the program, as `file:line`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tilewright.base.errors import UserError

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


def traced() -> bool:
    """Whether the environment asks for tracing from the start."""
    text = os.environ.get("TILEWRIGHT_TRACE_MEMORY", "").strip()
    if text not in ("", "0", "1"):
        raise UserError.at("TW016", f"TILEWRIGHT_TRACE_MEMORY is '{text}'", help="set it to 1, or not at all")
    return text == "1"


def caller() -> str | None:
    """The innermost line outside this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None
