"""Device memory by size class, reused in stream order. In: bytes and a stream; out: a `Block`, which goes back by itself.

A block belongs to the stream it was taken for (its home). When its last holder drops it, it joins the free list of that stream,
and the next taker on the same stream may have it at once: the device runs a stream in order, so the new use comes after the old.
Where other streams used it too, the home stream is first made to wait for them. A block is given back from `__del__`, which can
run anywhere, even inside this module; so giving back only appends to a queue, and the work is done by the next taker.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from tilewright.base.errors import DeviceError, TilewrightError

_SMALLEST = 512
_HUGE = 1 << 30
_HUGE_STEP = 2 << 20


class RawMemory(Protocol):
    """What the pool needs of a device."""

    def raw_allocate(self, nbytes: int) -> int:
        """A new pointer, or 0 when memory is exhausted."""

    def raw_free(self, pointers: list[int]) -> None:
        """Wait until the device is idle, then free."""

    def order(self, later: int, earlier: int) -> None:
        """Work queued on stream `later` from now on waits for what is queued on `earlier`."""

    def exhausted(self, nbytes: int, pool: MemoryPool) -> TilewrightError:
        """The error to raise when `nbytes` cannot be had."""


@dataclass(frozen=True)
class _Returned:
    pointer: int
    nbytes: int
    stream: int
    users: tuple[int, ...]


class Block:
    """One piece of device memory. Freed when dropped, or by `free`; a library it was lent to keeps it alive until done."""

    # Machine code of `runtime.cuda_launcher` reads `freed`, `stream` and `recent`.
    __slots__ = ("_exports", "_pool", "freed", "nbytes", "pointer", "recent", "stream", "users")

    def __init__(self, pointer: int, nbytes: int, stream: int, pool: MemoryPool | None) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.stream = stream
        self.users: set[int] = set()
        self.recent = stream
        """The user noted last, or the home stream."""
        self.freed = False
        self._exports = 0
        self._pool = pool

    def use_on(self, stream: int) -> None:
        """Note that work on `stream` touches it."""
        if stream != self.stream:
            self.users.add(stream)
            self.recent = stream

    def free(self) -> None:
        """Give it back now. Doing so twice is harmless."""
        if not self.freed:
            self.freed = True
            if not self._exports:
                self._give_back()

    def lend(self) -> None:
        """Another library holds the pointer from here on."""
        self._exports += 1

    def end_loan(self) -> None:
        self._exports -= 1
        if self.freed and not self._exports:
            self._give_back()

    def _give_back(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self.nbytes:
            pool.returned.append(_Returned(self.pointer, self.nbytes, self.stream, tuple(self.users)))

    def __del__(self) -> None:
        self._give_back()


def size_class(nbytes: int) -> int:
    """Bytes reserved for a request: eight classes per power of two, multiples of 512; fine steps for huge ones."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = _HUGE_STEP if nbytes > _HUGE else max(_SMALLEST, 1 << ((nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


class MemoryPool:
    """The allocator of one device. `limit` bounds the bytes it holds, in use and cached."""

    def __init__(self, memory: RawMemory, limit: int | None = None) -> None:
        self._memory = memory
        # Reentrant: the garbage collector may run a finaliser that takes memory while this thread holds it.
        self._lock = threading.RLock()
        self._free: dict[tuple[int, int], list[int]] = {}
        self.limit = limit
        self.returned: deque[_Returned] = deque()
        self.in_use = 0
        self.cached = 0
        self.peak = 0

    def take(self, nbytes: int, stream: int = 0) -> Block:
        """A block of at least `nbytes`, at a multiple of 256 bytes (of 512 within reused memory), for work on `stream`."""
        if nbytes <= 0:
            return Block(0, 0, stream, None)
        size = size_class(nbytes)
        with self._lock:
            self._collect()
            ready = self._free.get((size, stream))
            if ready:
                pointer = ready.pop()
                self.cached -= size
            else:
                pointer = self._grow(size)
            self.in_use += size
            self.peak = max(self.peak, self.in_use)
        return Block(pointer, size, stream, self)

    def flush(self) -> int:
        """Hand cached memory back to the device; how many bytes that was."""
        with self._lock:
            return self._flush()

    def forget_stream(self, stream: int) -> None:
        """The stream is idle and ends: its free blocks serve the default stream from now on."""
        with self._lock:
            self._collect()
            for size, home in [key for key in self._free if key[1] == stream]:
                self._free.setdefault((size, 0), []).extend(self._free.pop((size, home)))

    def usage(self) -> tuple[int, int]:
        """Bytes in use and bytes cached, counting what was given back a moment ago."""
        with self._lock:
            self._collect()
            return self.in_use, self.cached

    def _grow(self, size: int) -> int:
        if self.limit is not None and self.in_use + self.cached + size > self.limit:
            self._reclaim()
            if self.in_use + size > self.limit:
                raise self._memory.exhausted(size, self)
        pointer = self._memory.raw_allocate(size)
        if not pointer:
            self._reclaim()
            pointer = self._memory.raw_allocate(size)
        if not pointer:
            raise self._memory.exhausted(size, self)
        return pointer

    def _reclaim(self) -> None:
        # Arrays in reference cycles hold memory until the collector runs.
        gc.collect()
        self._flush()

    def _flush(self) -> int:
        self._collect()
        pointers = [pointer for ready in self._free.values() for pointer in ready]
        freed, self.cached = self.cached, 0
        self._free.clear()
        if pointers:
            self._memory.raw_free(pointers)
        return freed

    def _collect(self) -> None:
        """Move what was given back to the free lists."""
        while self.returned:
            item = self.returned.popleft()
            for user in item.users:
                self._memory.order(item.stream, user)
            self.in_use -= item.nbytes
            self.cached += item.nbytes
            self._free.setdefault((item.nbytes, item.stream), []).append(item.pointer)


def stream_handle(stream: int) -> int:
    """The stream a caller means: 1 is another name of the default stream; 2 has no fixed order and cannot be used."""
    if stream == 1:
        return 0
    if stream == 2 or stream < 0:
        raise DeviceError.at(
            "TW033",
            f"stream {stream} is not usable" + (": the per-thread default stream has no one order" if stream == 2 else ""),
            help="pass 0 for the default stream, or the handle of a stream you created",
        )
    return stream
