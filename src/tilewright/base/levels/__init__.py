"""Optimisation levels: what each means, and which one holds for a kernel.

In: the level that a kernel names, if any. Out: a `Target` whose `level` code generators read. A level that the command line names comes first,
then the kernel's own, then that of the environment (`TILEWRIGHT_OPTIMIZE`), then `O2`. Levels say how much work goes into machine code; they
never allow arithmetic to be rounded in other places. `Os` takes narrower vectors, so declared sums are added up in another order there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tilewright.base import environment
from tilewright.base.errors import UserError, close_matches
from tilewright.base.record import record
from tilewright.base.source import NOWHERE, Span
from tilewright.base.target import Target


@record
class Level:
    """One level, as far as code generators ask."""

    name: str
    meaning: str
    passes: int
    """LLVM's pipeline of passes, 0 to 3."""
    machine: int
    """LLVM's level of instruction selection and register allocation, 0 to 3."""
    size: int = 0
    """Whether small code is worth more than fast code."""
    unroll: bool = False
    """Whether LLVM may unroll loops that nothing is said about."""
    align: int = 0
    """Bytes to which innermost loops are aligned; 0: as the code generator sees fit."""
    prefetch: bool = False
    """Whether a kernel asks for the first line of every array as it begins."""


DEFAULT = "O2"
TIERED = "tiered"
"""The word for kernels that begin with quickly compiled code and go on with that of the default level."""
LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("O0", "the quickest to compile: no passes of LLVM, its fastest code generator", 0, 0),
        Level("O1", "quick to compile: no passes of LLVM, registers are allocated with care", 0, 1),
        Level("O2", "the default: a short pipeline, the best code generator", 1, 3),
        Level("O3", "LLVM's longest pipeline, with loops unrolled: more code, seldom faster", 3, 3, unroll=True),
        Level("Os", "small code: one register to a step, nothing unrolled or duplicated", 2, 2, size=1),
        Level("Olatency", "short calls: loops and functions are aligned, arrays are asked for as the kernel begins", 1, 3, align=64, prefetch=True),
    )
}
"""All levels, in the order of the documents."""
WORDS = (*LEVELS, TIERED)
"""What `optimize=` takes."""
_ON_GPUS = ("O0", "O1")
"""Levels at which LLVM makes other code for a GPU; that of the others is the same."""

_given = ""
"""What the command line names."""


def checked(value: object, span: Span = NOWHERE, words: tuple[str, ...] = WORDS) -> str:
    """The level that a user names, or nothing. Raises UserError."""
    if value is None or value == "":
        return ""
    if not isinstance(value, str):
        raise UserError.at("TW009", f"optimize is {value!r}", span, f"give one of {', '.join(words)}")
    if value not in words:
        close = close_matches(value, words, 1)
        raise UserError.at("TW016", f"optimize is {value!r}", span, (f"did you mean '{close[0]}'? " if close else "") + f"choose one of {', '.join(words)}")
    return value


@contextmanager
def given(name: str) -> Iterator[None]:
    """Inside, this level holds whatever kernels say: that of the command line."""
    global _given
    before, _given = _given, checked(name)
    try:
        yield
    finally:
        _given = before


def is_given() -> bool:
    """Whether the command line names a level."""
    return bool(_given)


def holds(said: str) -> str:
    """The word that holds for a kernel that says so, or says nothing."""
    return _given or said or environment.word("TILEWRIGHT_OPTIMIZE")


def holds_now() -> tuple[str, str]:
    """What the command line and the environment say, as it stands there."""
    return _given, environment.text("TILEWRIGHT_OPTIMIZE")


def acts(name: str, target: Target) -> bool:
    """Whether a level makes other code for a target than the default one does."""
    return LEVELS[name] is not LEVELS[DEFAULT] and (target.is_host or (target.kind in ("nvptx", "amdgpu") and name in _ON_GPUS))


def at(target: Target, said: str) -> Target:
    """The target at the level that holds for a kernel that says so."""
    name = holds(said)
    level = name if name in LEVELS and acts(name, target) else ""
    return target if target.level == level else replace(target, level=level)


def level_of(target: Target) -> Level:
    """What a target's level means."""
    return LEVELS[target.level or DEFAULT]


def fate(said: str, target: Target) -> tuple[bool, str]:
    """Whether a kernel gets the level it names, and what that means there."""
    name = holds(said)
    if name != said:
        return False, f"the command line says {name}"
    if name == TIERED:
        kind = "quickly compiled code runs first, and is exchanged for that of the default level" if target.is_host else "code for a GPU is compiled once"
        return target.is_host, kind
    if name != DEFAULT and not acts(name, target):
        what = "the code is the same as at O2" if target.kind in ("nvptx", "amdgpu") else "the device's own compiler decides"
        return name in ("O2", "O3"), what
    return True, LEVELS[name].meaning
