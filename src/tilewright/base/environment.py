"""Settings from environment variables: all of them are listed here, and read nowhere else.

In: the name of a setting. Out: its value, or a `UserError` (TW016) that names the variable, what it holds and what it may hold. An empty
variable is one that is not set. A variable that is spelled almost as one of these is most likely meant to be one: `slips` finds those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tilewright.base.errors import UserError, close_matches
from tilewright.base.record import record

VERSION = "0.1.0"
"""Of Tilewright."""

_ON = ("1", "on", "yes", "true")
_OFF = ("0", "off", "no", "false")


@record
class Setting:
    """One variable. `words` are all it may hold, `default` is what an unset one means; without words it is a number, a size or a path."""

    meaning: str
    words: tuple[str, ...] = ()
    default: str = ""


def _switch(meaning: str, default: str = "0") -> Setting:
    return Setting(meaning, (*_ON, *_OFF), default)


SETTINGS: Mapping[str, Setting] = {
    "TILEWRIGHT_WARN": Setting("`error`: slow kernels raise; `off`: they say nothing", ("on", "off", "error"), "on"),
    "TILEWRIGHT_CHECK": _switch("`1`: every index that is not proven is checked, on every device"),
    "TILEWRIGHT_WATCHDOG": Setting("seconds after which a GPU stops open-ended loops"),
    "TILEWRIGHT_NUM_THREADS": Setting("threads of the CPU"),
    "TILEWRIGHT_SPIN": Setting("microseconds that idle threads of the CPU wait awake"),
    "TILEWRIGHT_CACHE": _switch("`0`: nothing is read from or written to the cache on disk", "1"),
    "TILEWRIGHT_CACHE_DIR": Setting("where that cache is"),
    "TILEWRIGHT_CACHE_SIZE": Setting("how large it may grow"),
    "TILEWRIGHT_TUNING": _switch("`off`: measured schedules are not used", "1"),
    "TILEWRIGHT_ISOLATE": Setting("`always`, `never`: whether LLVM runs in a process of its own; `auto` for kernels that no test drives", ("auto", "always", "never"), "auto"),
    "TILEWRIGHT_OPTIMIZE": Setting("the optimisation level of kernels that name none", ("O0", "O1", "O2", "O3", "Os", "Olatency", "tiered"), "O2"),
    "TILEWRIGHT_VERIFY": Setting("`passes`: kernels are verified after every pass; `kernel`: after the last, and after every one where that fails", ("kernel", "passes"), "kernel"),
    "TILEWRIGHT_DUMP": Setting("a folder that gets the kernel after every pass"),
    "TILEWRIGHT_LOG": _switch("`1`: a line for every compilation"),
    "TILEWRIGHT_TRACE_MEMORY": _switch("`1`: remembers where device memory was taken"),
    "TILEWRIGHT_ROOTS": Setting("folders, besides the program's own, from which ZynML imports"),
    "TILEWRIGHT_DEBUG": _switch("`1`: errors show where in Tilewright they were raised"),
}


def text(name: str) -> str:
    """What a variable holds, without blanks around it; empty where it is not set."""
    assert name in SETTINGS, name
    return os.environ.get(name, "").strip()


def word(name: str) -> str:
    """One of the words that a setting has. Raises UserError for any other."""
    setting = SETTINGS[name]
    held = text(name) or setting.default
    found = next((word for word in setting.words if word.lower() == held.lower()), None)
    if found is None:
        words = ("1", "0") if setting.words == (*_ON, *_OFF) else setting.words
        raise refusal(name, f"set it to {', '.join(words[:-1])} or {words[-1]}, or not at all")
    return found


def is_on(name: str) -> bool:
    """Whether a switch is on. Raises UserError for what is no switch's word."""
    return word(name) in _ON


def whole(name: str, most: int) -> int | None:
    """The whole number a variable holds, None when it is not set. Raises UserError for others than 1 to `most`."""
    held = text(name)
    if not held:
        return None
    if not held.isdecimal() or len(held) > 18 or not 1 <= int(held) <= most:
        raise refusal(name, f"set it to a whole number from 1 to {most}, or not at all")
    return int(held)


def refusal(name: str, help: str) -> UserError:
    """The error of a variable that holds something it may not."""
    held = text(name)
    shown = held if len(held) <= 40 else f"{held[:40]}…"
    error = UserError.at("TW016", f"{name} is '{shown}'", help=help)
    assert isinstance(error, UserError)
    return error


def check() -> None:
    """Refuse every setting that holds a word it does not have, also those that nothing reads today."""
    for name, setting in SETTINGS.items():
        if setting.words:
            word(name)


def slips() -> list[str]:
    """What to say of variables whose names are almost those of settings."""
    found = []
    for name in sorted(os.environ):
        close = close_matches(name, SETTINGS, 1, 0.85) if name.startswith("TILEWR") and name not in SETTINGS else []
        if close:
            found.append(f"the environment variable {name} is no setting; did you mean {close[0]}?")
    return found
