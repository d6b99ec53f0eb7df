"""How long a kernel's open-ended loops may turn. In: what a kernel or the environment says; out: nanoseconds, 0 for no limit."""

from __future__ import annotations

from tilewright.base import environment
from tilewright.base.errors import UserError

VARIABLE = "TILEWRIGHT_WATCHDOG"
_MOST = 3600.0


def watchdog_nanoseconds(seconds: float | None) -> int:
    """Of a kernel's own setting, or where it has none, of the environment's. Raises UserError for what is no time."""
    source = "watchdog="
    if seconds is None:
        text = environment.text(VARIABLE)
        if not text:
            return 0
        source = VARIABLE
        try:
            seconds = float(text)
        except ValueError:
            raise environment.refusal(VARIABLE, f"set it to seconds from 0 (no watchdog) to {_MOST:g}") from None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _MOST:
        raise UserError.at("TW005", f"{source} is {seconds!r}", help=f"give seconds from 0 (no watchdog) to {_MOST:g}")
    return round(seconds * 1e9)
