"""No garbage collection while something is loaded or compiled.

In: a block of code. Out: the same, during which Python's collector of cycles rests. Loading a compiler makes a hundred thousand objects that all stay; the
collector would walk over them again and again, an eighth of the time. After a block that loaded many modules it does not even walk over them once: all
objects count as old from then on, and the next collection of old ones looks at them. Blocks nest, and several threads may be inside. A collector that the
program itself has switched off stays off.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tilewright.base.forks import fork_safe_lock

_lock = fork_safe_lock()
_inside: dict[int, int] = {}
"""By thread: how many blocks it is inside."""
_resumes = False
"""Whether the collector goes on when the last thread leaves."""
_modules = 0
"""How many modules there were when the first thread came."""
MANY = 50
"""From so many new modules on, most of what was made is there to stay. What other blocks make is mostly let go of, and is collected as ever."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, nothing is collected."""
    global _resumes, _modules
    me = threading.get_ident()
    with _lock:
        if not _inside:
            _resumes = gc.isenabled()
            gc.disable()
            _modules = len(sys.modules)
        _inside[me] = _inside.get(me, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _leave(me)


def _leave(thread: int) -> None:
    _inside[thread] -= 1
    if not _inside[thread]:
        del _inside[thread]
        if not _inside and _resumes:
            if len(sys.modules) - _modules >= MANY:
                _grow_old()
            gc.enable()


def _grow_old() -> None:
    """All objects count as old. A program that keeps some of them from the collector for good is left alone."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def _after_fork() -> None:
    """The child has one thread: the others' blocks will never end here."""
    me = threading.get_ident()
    for thread in [thread for thread in _inside if thread != me]:
        _inside[thread] = 1
        _leave(thread)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
