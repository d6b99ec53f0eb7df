"""How many elements one unit of work of a CPU's primitive has, where tuning says another number than usual.

`chunk` is asked while a primitive's program is built; `said` while its code is looked for. `watched` notes the programs that a call asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_said: ContextVar[int | None] = ContextVar("tilewright_chunk", default=None)
_seen: ContextVar[dict[str, Callable[[], object]] | None] = ContextVar("tilewright_programs", default=None)


def chunk(usual: int) -> int:
    """Elements of one unit of work."""
    return _said.get() or usual


def said() -> int | None:
    """The number that is in force; 0 is the usual one, and None leaves it to the tables."""
    return _said.get()


@contextmanager
def with_chunk(number: int) -> Iterator[None]:
    """Programs that are built and asked for in this context have units of work of so many elements; 0: as many as usual."""
    token = _said.set(number)
    try:
        yield
    finally:
        _said.reset(token)


@contextmanager
def watched() -> Iterator[dict[str, Callable[[], object]]]:
    """What programs are asked for in this context, with what builds them."""
    found: dict[str, Callable[[], object]] = {}
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


def note(what: str, build: Callable[[], object]) -> None:
    """A program is asked for."""
    seen = _seen.get()
    if seen is not None:
        seen[what] = build
