"""Which stream work goes to. In: a device's ordinal; out: the handle of the stream that is current on this thread, or none.

A thread names a stream with `use`; calls on that thread go there until the block ends. Machine code that launches kernels looks at
`OPEN` first, a count of such blocks on all threads: while it is 0 nobody has to be asked.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OPEN = ctypes.c_int64(0)
"""How many `use` blocks are open in the process."""


class _Current(threading.local):
    def __init__(self) -> None:
        self.stacks: dict[int, list[int]] = {}


_current = _Current()
_lock = threading.Lock()


def current(ordinal: int) -> int | None:
    """The stream this thread uses on a device; None where it named none."""
    if not OPEN.value:
        return None
    stack = _current.stacks.get(ordinal)
    return stack[-1] if stack else None


@contextmanager
def use(ordinal: int, handle: int) -> Iterator[None]:
    """Work of this thread on a device goes to the stream `handle` inside."""
    stack = _current.stacks.setdefault(ordinal, [])
    stack.append(handle)
    with _lock:
        OPEN.value += 1
    try:
        yield
    finally:
        with _lock:
            OPEN.value -= 1
        stack.pop()
