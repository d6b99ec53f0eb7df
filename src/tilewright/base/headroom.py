"""Room for more memory, where the system limits a process: LLVM ends the process when it gets none, so it is asked for beforehand.

In: how many bytes something may take. Out: nothing, or a `DeviceError` (TW031) that says how much is left.
"""

from __future__ import annotations

import os

from tilewright.base.errors import DeviceError

COMPILE_BYTES = 96 << 20
"""What LLVM may take to compile the kernels of a call."""
LOAD_BYTES = 8 << 20
"""What linking them may take."""


def free_bytes() -> int | None:
    """Bytes that the process may still map; None where there is no limit, or nobody says."""
    try:
        import resource
    except ImportError:
        return None
    found: list[int] = []
    # The whole address space, and the part that is data: numbers 0 and 5 of /proc/self/statm.
    for limit, column in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        most = resource.getrlimit(limit)[0]
        if most == resource.RLIM_INFINITY:
            continue
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                used = int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            continue
        found.append(max(0, most - used))
    return min(found, default=None)


def require_room(wanted: int, what: str) -> None:
    """Refuse to begin what would not fit."""
    left = free_bytes()
    if left is not None and left < wanted:
        raise DeviceError.at(
            "TW031", f"not enough memory to {what}: this process may map {left >> 20} MiB more, and up to {wanted >> 20} MiB are needed",
            help="raise the limit (`ulimit -v`, `ulimit -d`), or free memory",
        )  # fmt: skip
