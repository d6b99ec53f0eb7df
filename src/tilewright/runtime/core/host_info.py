"""What the host has: memory, caches, clock. In: files of the system; out: numbers, 0 or nothing where the system does not say."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from tilewright.base.limits import Cache

_CPUS = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@functools.cache
def total_memory() -> int:
    """Bytes of the host's memory."""
    return _pages("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that programs can still have without the system paging."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return _pages("SC_AVPHYS_PAGES")
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    return int(found) << 10


def _pages(name: str) -> int:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def listed_cores(text: str) -> int:
    """How many numbers a list such as `0-3,8` has."""
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)


@functools.cache
def caches(core: int) -> tuple[Cache, ...]:
    """The caches of a core, the nearest first."""
    found: list[Cache] = []
    for folder in sorted((_CPUS / f"cpu{core}" / "cache").glob("index*")):
        try:
            size, level, kind, shared = (
                (folder / name).read_text().strip() for name in ("size", "level", "type", "shared_cpu_list")
            )
        except OSError:
            continue
        number = int(size.rstrip("KMG")) * _UNITS.get(size[-1], 1)
        found.append(Cache(int(level), kind.lower(), number, listed_cores(shared)))
    return tuple(found)


@functools.cache
def clock(core: int) -> int:
    """The highest clock of a core in Hz, as the system knows it, else the current one."""
    try:
        return int((_CPUS / f"cpu{core}" / "cpufreq" / "cpuinfo_max_freq").read_text()) * 1000
    except (OSError, ValueError):
        pass
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    found = next((line.split(":")[1] for line in lines if line.startswith("cpu MHz")), "0")
    return int(float(found) * 1e6)


@functools.cache
def model() -> str:
    """The CPU's name; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
