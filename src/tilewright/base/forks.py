"""Forks while other threads compile: a child must not inherit a lock that nobody opens, nor LLVM in the middle of something.

A thread that compiles or links is inside `at_work()`. A fork waits until all others have left it, at most `_MOST_SECONDS`; who comes
meanwhile waits for the fork. Locks are made by `fork_safe_lock()` and `fork_safe_rlock()`: whoever held them, they are open in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MOST_SECONDS = 60.0
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_changed = threading.Condition()
_busy: dict[int, int] = {}
"""By thread: how many blocks of `at_work` it is inside."""
_forking: int | None = None
"""The thread that is about to fork."""


def fork_safe_lock() -> threading.Lock:
    """A lock that is open in a forked child."""
    made = threading.Lock()
    _locks.add(made)
    return made


def fork_safe_rlock() -> threading.RLock:
    """The same, which its holder may take again."""
    made = threading.RLock()
    _locks.add(made)
    return made


@contextmanager
def at_work() -> Iterator[None]:
    """Inside, no other thread forks."""
    me = threading.get_ident()
    with _changed:
        if me not in _busy:
            _changed.wait_for(lambda: _forking in (None, me), _MOST_SECONDS)
        _busy[me] = _busy.get(me, 0) + 1
    try:
        yield
    finally:
        with _changed:
            _busy[me] -= 1
            if not _busy[me]:
                del _busy[me]
                _changed.notify_all()


def _before_fork() -> None:
    global _forking
    me = threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: _forking is None, _MOST_SECONDS)
        _forking = me
        _changed.wait_for(lambda: not _busy.keys() - {me}, _MOST_SECONDS)


def _after_in_parent() -> None:
    global _forking
    with _changed:
        _forking = None
        _changed.notify_all()


def _after_in_child() -> None:
    global _changed, _forking
    _changed = threading.Condition()
    me = threading.get_ident()
    for other in _busy.keys() - {me}:
        del _busy[other]
    _forking = None
    for lock in list(_locks):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
