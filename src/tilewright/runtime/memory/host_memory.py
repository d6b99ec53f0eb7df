"""A memory pool of the host: NumPy arrays whose memory is kept for the next ones when nobody holds them any more.

In: shapes and dtypes. Out: arrays at multiples of 64 bytes. Memory is handed out in size classes. It comes back when an array and all its
views are gone, whether or not the array was freed before: no two arrays that somebody holds share memory.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.memory.device_memory import PoolStatistics

_ALIGN = 64
_pools = threading.local()


@dataclass
class _Lease:
    """Memory that an array has."""

    memory: np.ndarray
    size: int
    freed: bool = False


class HostMemory:
    """What one pool of the host holds."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._lock = threading.RLock()
        self._kept: dict[int, list[np.ndarray]] = {}
        self._held: dict[int, _Lease] = {}
        """By address."""
        self._in_use = self._peak = self._allocations = self._frees = self._grown = 0

    def make(self, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        """A new array with undefined contents."""
        if any(extent < 0 for extent in shape):
            raise UserError.at("TW004", f"an array cannot have shape {shape}")
        count = 1
        for extent in shape:
            count *= extent
        wanted = count * dtype.numpy.itemsize
        size = _size_class(wanted)
        with self._lock:
            memory = self._take(size, shape, dtype)
            address = int(memory.ctypes.data)
            self._held[address] = _Lease(memory, size)
            self._in_use += size
            self._peak = max(self._peak, self._in_use)
            self._allocations += 1
        # Every view of the array keeps this object alive; the memory itself stays.
        lease = (ctypes.c_char * size).from_address(address)
        weakref.finalize(lease, self._back, address).atexit = False
        made: np.ndarray = np.frombuffer(memoryview(lease), np.uint8)[:wanted].view(dtype.numpy).reshape(shape)
        return made

    def _take(self, size: int, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        kept = self._kept.get(size)
        if kept:
            return kept.pop()
        if self.limit is not None and self._total() + size > self.limit:
            self._kept.clear()
            if self._total() + size > self.limit:
                raise DeviceError.at(
                    "TW031", f"no memory for an array of shape {list(shape)} and {dtype}: {size} bytes, and {self._total()} of the pool's {self.limit} are in use",
                    help="drop arrays of the pool, or give it a larger limit",
                )  # fmt: skip
        try:
            whole = np.empty(size + _ALIGN, np.uint8)
        except MemoryError as error:
            raise DeviceError.at("TW031", f"no memory for an array of shape {list(shape)} and {dtype}: {error}") from None
        self._grown += 1
        start = -int(whole.ctypes.data) % _ALIGN
        return whole[start : start + size]

    def _total(self) -> int:
        return sum(lease.size for lease in self._held.values()) + self._cached()

    def _cached(self) -> int:
        return sum(size * len(kept) for size, kept in self._kept.items())

    def _back(self, address: int) -> None:
        """Nobody has the array any more."""
        with self._lock:
            lease = self._held.pop(address)
            if not lease.freed:
                self._count_free(lease)
            self._kept.setdefault(lease.size, []).append(lease.memory)

    def _count_free(self, lease: _Lease) -> None:
        lease.freed = True
        self._in_use -= lease.size
        self._frees += 1

    def free(self, array: object) -> None:
        """The array is no longer counted; its memory comes back when nobody holds it."""
        if not isinstance(array, np.ndarray):
            raise UserError.at("TW009", f"a {type(array).__name__} is no array of a pool of the host")
        with self._lock:
            lease = self._held.get(int(array.ctypes.data))
            if lease is None:
                raise DeviceError.at("TW033", f"the array of shape {list(array.shape)} is not of this pool", help="free it with the pool it was allocated from")
            if lease.freed:
                raise DeviceError.at("TW033", f"the array of shape {list(array.shape)} was freed before", help="free an array once")
            self._count_free(lease)

    def reset(self) -> None:
        """Count every array as freed."""
        with self._lock:
            for lease in self._held.values():
                if not lease.freed:
                    self._count_free(lease)

    def flush(self) -> int:
        """Give back what is kept; how many bytes that was."""
        with self._lock:
            cached = self._cached()
            self._kept.clear()
            return cached

    def usage(self) -> tuple[int, int]:
        with self._lock:
            return self._in_use, self._cached()

    def statistics(self) -> PoolStatistics:
        with self._lock:
            cached, largest = self._cached(), max((size for size, kept in self._kept.items() if kept), default=0)
            return PoolStatistics(
                self._in_use, cached, self._peak, self.limit, self._allocations, self._frees, self._grown, 1 - largest / cached if cached else 0.0
            )

    # -- the pool of a thread -------------------------------------------------------------------------------------

    def push(self) -> None:
        """New arrays of this thread come from here."""
        _stack().append(self)

    def pop(self) -> None:
        _stack().pop()


def _stack() -> list[HostMemory]:
    if not hasattr(_pools, "stack"):
        _pools.stack = []
    found: list[HostMemory] = _pools.stack
    return found


def current_host_memory() -> HostMemory | None:
    """The pool that new arrays of this thread on the host come from; None where NumPy makes them."""
    stack = _stack()
    return stack[-1] if stack else None


def _size_class(size: int) -> int:
    """At least one line of a cache; above that four classes for each doubling."""
    size = max(size, _ALIGN)
    step = max(_ALIGN, 1 << (size.bit_length() - 3))
    return -(-size // step) * step
