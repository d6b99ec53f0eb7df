"""Starting a driver of the system. In: a piece of code that starts one, the driver's name; out: no complaints about windows, which kernels do not need, and what
is known of the driver's faults.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_windows() -> Iterator[None]:
    """Mesa's drivers look for a desktop's folder, and print an error for each one that starts where there is none, as on servers."""
    if "XDG_RUNTIME_DIR" in os.environ:
        yield
        return
    os.environ["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        os.environ.pop("XDG_RUNTIME_DIR", None)


def most_turns(name: str) -> int:
    """Iterations of a thread's loops after which a driver leaves them; 0 where it does not. Mesa's llvmpipe counts them over all loops of a thread."""
    return 65535 if name.startswith("llvmpipe") else 0
