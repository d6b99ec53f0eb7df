"""One process at a time. In: a directory; out: a block inside which no other process holds that directory's lock.

The lock is the operating system's, on the open directory: it leaves no file, and goes when its holder ends, however that comes. Where
there are no such locks the block runs without one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def directory_lock(path: Path) -> Iterator[None]:
    """Wait for the lock and hold it inside."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
