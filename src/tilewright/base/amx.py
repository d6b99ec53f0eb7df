"""Leave to use a CPU's matrix unit (AMX).

In: nothing. Out: whether this process may use it. Linux gives each process room for the unit's registers only when it asks; without, the first
instruction ends the process. Threads share the answer, and children made by fork inherit it.
"""

from __future__ import annotations

import functools
import sys

_ARCH_PRCTL = 158
_REQUEST = 0x1023
_TILE_DATA = 18


@functools.cache
def may_use_amx() -> bool:
    """Ask, once. The CPU must have the unit."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    syscall = ctypes.CDLL(None).syscall
    return int(syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST), ctypes.c_long(_TILE_DATA))) == 0
