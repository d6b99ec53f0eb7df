"""Device memory by size class, reused in stream order. In: bytes and a stream; out: a `MemoryBlock`, which goes back by itself.

A block belongs to the stream it was taken for (its home). When its last holder drops it, it joins the free list of that stream,
and the next taker on the same stream may have it at once: the device runs a stream in order, so the new use comes after the old.
Where other streams used it too, the home stream is first made to wait for them. Giving back can happen anywhere, even inside this
module (the garbage collector decides), so it only appends to a list; what else is to be done is done by the next taker.

A `MemoryPool` is the policy: limit, growth, what is flushed, what an exhausted device is answered with. Its free lists are in an
*arena*: `native_memory` has one whose lists machine code reads and writes; the one below needs nothing but Python.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.base import memory_abi
from tilewright.base.errors import DeviceError, TilewrightError
from tilewright.base.forks import fork_safe_rlock
from tilewright.runtime.core.device import Buffer
from tilewright.runtime.memory.trace import caller, traced

if TYPE_CHECKING:
    from tilewright.base.dtypes import DType

Piece = tuple[int, int, int]
"""Address, bytes and home stream of free memory."""
Retire = Callable[[list[Piece]], None]
HOST = 1 << 62
"""The home of memory that the host uses, in place of a stream. No handle is so large, and machine code reads it as a number."""
EVERY_STREAM = -1
"""In place of a stream: nobody knows which ones used the memory."""


class RawMemory(Protocol):
    """What a pool needs of a device."""

    @property
    def label(self) -> str: ...

    def raw_allocate(self, nbytes: int) -> int:
        """A new pointer, or 0 when memory is exhausted."""

    def raw_free(self, pointers: list[int]) -> None:
        """Free memory that nothing uses any more."""

    def is_idle(self, stream: int) -> bool:
        """Whether all work queued on the stream is done."""

    def wait_for(self, stream: int) -> None:
        """Return when all work queued on the stream (`EVERY_STREAM`: on the device) is done."""

    def order(self, later: int, earlier: int) -> None:
        """Work queued on stream `later` from now on waits for what is queued on `earlier`."""

    def free_memory(self) -> tuple[int, int]:
        """Bytes free and in all."""

    def holders(self, pool: MemoryPool) -> list[str]:
        """The arrays that hold the pool's memory, the largest first, in words."""


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool holds, in bytes, and what it did since it was made."""

    in_use: int
    """Held by arrays, as size classes reserve it."""
    cached: int
    """Free and kept for later."""
    peak: int
    """The largest `in_use` there was."""
    limit: int | None
    allocations: int
    frees: int
    grown: int
    """How often the device was asked for memory; the other allocations were served from what was there."""
    fragmentation: float
    """The share of free memory that is not in its largest piece."""


class Owner(Protocol):
    """Whoever a block's memory comes from."""

    def note(self, pointer: int, stream: int) -> None:
        """A stream that is not the block's home uses it."""


class Arena(Owner, Protocol):
    """Free lists by size class and stream, and their accounts."""

    def take(self, nbytes: int, stream: int) -> MemoryBlock | None:
        """A block from the free list; None where that is empty or something has to be seen to first."""

    def adopt(self, pointer: int, size: int, stream: int) -> MemoryBlock:
        """New memory of the device, in use at once."""

    def settle(self, order: Callable[[int, int], None]) -> None:
        """See to what was given back: what other streams used is put in order."""

    def free_pieces(self) -> list[Piece]:
        """All that is free, as it is now."""

    def detach(self, stream: int) -> list[Piece]:
        """Take everything free of one stream out of the arena."""

    def rename(self, old: int, new: int) -> None:
        """What is free for one stream is free for another from now on, and so is what comes back later."""

    def set_bypass(self, on: bool) -> None:
        """While on, `take` gives nothing."""

    def counts(self) -> tuple[int, int, int, int, int]:
        """Bytes in use, cached and at the peak; blocks taken and returned."""

    def reset_peak(self) -> None:
        """The peak is what is in use now."""


class MemoryBlock(Buffer):
    """One piece of memory of a device with addresses. Freed when dropped, or by `free`; a library it was lent to keeps it alive until done.

    The memory goes back when `_token` goes: a capsule, or any object whose end does so. `host` is where the host sees the memory,
    0 where it does not. Machine code makes these objects too, so their slots are part of `base.memory_abi`; that of
    `runtime.cuda.launcher` reads `freed`, `stream` and `recent`.
    """

    __slots__ = memory_abi.BLOCK_SLOTS

    has_addresses = True
    _exports: int
    _token: object
    arena: Owner | None
    freed: bool
    host: int
    nbytes: int
    pointer: int
    recent: int
    """The user noted last, or the home stream."""
    stream: int
    trace: str | None
    users: Collection[int]

    def __init__(
        self, pointer: int, nbytes: int, stream: int, arena: Owner | None, token: object = None, host: int = 0
    ) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.stream = self.recent = stream
        self.arena = arena
        self.users = ()
        self.freed = False
        self.host = host
        self.trace = None
        self._exports = 0
        self._token = token

    @property
    def base(self) -> int:
        return self.pointer

    @property
    def token(self) -> object:
        return self._token

    def use_on(self, stream: int) -> None:
        """Note that work on `stream` touches it."""
        if stream == self.stream:
            return
        if stream not in self.users:
            if self.arena is not None and not self.freed:
                self.arena.note(self.pointer, stream)
            if isinstance(self.users, set):
                self.users.add(stream)
            else:
                self.users = {stream}
        self.recent = stream

    def note_line(self, line: str) -> None:
        self.trace = line

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
        if self.arena is self._token:
            self.arena = None
        self._token = None


def size_class(nbytes: int) -> int:
    """Bytes reserved for a request: eight classes per power of two, multiples of 512; fine steps for huge ones."""
    return memory_abi.size_class(max(1, nbytes)).nbytes


class _PoolToken:
    """Gives a block back to a `PythonArena` when it goes."""

    __slots__ = ("pointer", "returned")

    def __init__(self, pointer: int, returned: deque[int]) -> None:
        self.pointer = pointer
        self.returned = returned

    def __del__(self) -> None:
        self.returned.append(self.pointer)


class PythonArena:
    """Free lists as Python lists; for interpreters whose objects machine code cannot read, and for devices whose calls are Python's. The pool's lock
    protects it."""

    block: type[MemoryBlock] = MemoryBlock
    """What it gives."""

    def __init__(self, retire: Retire) -> None:
        self._retire = retire
        self._pieces: dict[int, tuple[int, int]] = {}
        """Size and home stream of every piece, by address."""
        self._free: dict[tuple[int, int], list[int]] = {}
        self._users: dict[int, set[int]] = {}
        self._returned: deque[int] = deque()
        self._bypass = False
        self._in_use = self._cached = self._peak = self._taken = self._back = 0

    def take(self, nbytes: int, stream: int) -> MemoryBlock | None:
        if nbytes <= 0 or self._bypass or self._returned:
            return None
        size = size_class(nbytes)
        ready = self._free.get((size, stream))
        if not ready:
            return None
        self._cached -= size
        return self._hold(ready.pop(), size, stream)

    def adopt(self, pointer: int, size: int, stream: int) -> MemoryBlock:
        self._pieces[pointer] = (size, stream)
        return self._hold(pointer, size, stream)

    def _hold(self, pointer: int, size: int, stream: int) -> MemoryBlock:
        self._in_use += size
        self._taken += 1
        self._peak = max(self._peak, self._in_use)
        return self.block(pointer, size, stream, self, _PoolToken(pointer, self._returned))

    def settle(self, order: Callable[[int, int], None]) -> None:
        while self._returned:
            pointer = self._returned.popleft()
            size, stream = self._pieces[pointer]
            try:
                for user in self._users.get(pointer, ()):
                    order(stream, user)
            except BaseException:
                self._returned.append(pointer)
                raise
            self._users.pop(pointer, None)
            self._in_use -= size
            self._cached += size
            self._back += 1
            self._free.setdefault((size, stream), []).append(pointer)

    def note(self, pointer: int, stream: int) -> None:
        self._users.setdefault(pointer, set()).add(stream)

    def free_pieces(self) -> list[Piece]:
        return [(pointer, size, stream) for (size, stream), ready in self._free.items() for pointer in ready]

    def detach(self, stream: int) -> list[Piece]:
        found: list[Piece] = []
        for key in [key for key in self._free if key[1] == stream]:
            found += [(pointer, *key) for pointer in self._free.pop(key)]
        for pointer, size, _ in found:
            del self._pieces[pointer]
            self._cached -= size
        return found

    def rename(self, old: int, new: int) -> None:
        for size, stream in [key for key in self._free if key[1] == old]:
            self._free.setdefault((size, new), []).extend(self._free.pop((size, stream)))
        for pointer, (size, stream) in self._pieces.items():
            if stream == old:
                self._pieces[pointer] = (size, new)

    def set_bypass(self, on: bool) -> None:
        self._bypass = on

    def counts(self) -> tuple[int, int, int, int, int]:
        return self._in_use, self._cached, self._peak, self._taken, self._back

    def reset_peak(self) -> None:
        self._peak = self._in_use

    def __del__(self) -> None:
        known = self._pieces.items()
        self._retire([(at, size, EVERY_STREAM if self._users.get(at) else home) for at, (size, home) in known])


class MemoryPool:
    """The allocator of one device, or a part of its memory. `limit` bounds the bytes it holds, in use and cached."""

    def __init__(
        self,
        memory: RawMemory,
        limit: int | None = None,
        arena: Callable[[Retire], Arena] | None = None,
        retire: Retire | None = None,
    ) -> None:
        self._memory = memory
        # Reentrant: the garbage collector may run a finaliser that takes memory while this thread holds it.
        self._lock = fork_safe_rlock()
        self._retired: deque[Piece] = deque()
        self.forgotten: set[int] = set()
        """Streams that ended; all they did is done."""
        self.arena: Arena = (arena or PythonArena)(retire or self.retire)
        self._take: Callable[[int, int], MemoryBlock | None] = self._locked_take if isinstance(self.arena, PythonArena) else self.arena.take
        self.make: Callable[[tuple[int, ...], DType, int], Any] = _make_nothing
        """A `DeviceArray` in a block just taken, where machine code can make it; else None."""
        self.limit = limit
        self.grown = 0
        self.tracing = False
        if traced():
            self.trace()

    # -- taking -------------------------------------------------------------------------------------------------

    def take(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        """A block of at least `nbytes`, at a multiple of 256 bytes (of 512 within reused memory), for work on `stream`."""
        return self._take(nbytes, stream) or self._general_take(nbytes, stream)

    def _locked_take(self, nbytes: int, stream: int) -> MemoryBlock | None:
        with self._lock:
            return self.arena.take(nbytes, stream)

    def _general_take(self, nbytes: int, stream: int) -> MemoryBlock:
        if nbytes <= 0:
            return MemoryBlock(0, 0, stream, None)
        size = size_class(nbytes)
        with self._lock:
            self.forgotten.discard(stream)
            self.arena.settle(self._memory.order)
            block = self._take_settled(size, stream)
            if block is None:
                block = self._new_block(size, stream)
        if self.tracing:
            block.trace = caller()
        return block

    def _new_block(self, size: int, stream: int) -> MemoryBlock:
        pointer = self._grow(size)
        try:
            block = self.arena.adopt(pointer, size, stream)
        except BaseException:
            self._memory.raw_free([pointer])
            raise
        self.grown += 1
        return block

    def _take_settled(self, size: int, stream: int) -> MemoryBlock | None:
        if not self.tracing:
            return self.arena.take(size, stream)
        self.arena.set_bypass(False)
        try:
            return self.arena.take(size, stream)
        finally:
            self.arena.set_bypass(True)

    def _grow(self, size: int) -> int:
        self._free_retired()
        if self.limit is not None and self._held() + size > self.limit:
            self._reclaim()
            if self._held() + size > self.limit:
                raise self.exhausted(size)
        pointer = self._memory.raw_allocate(size)
        if not pointer:
            self._reclaim()
            pointer = self._memory.raw_allocate(size)
        if not pointer:
            raise self.exhausted(size)
        return pointer

    def _held(self) -> int:
        in_use, cached, *_ = self.arena.counts()
        return in_use + cached

    # -- giving back --------------------------------------------------------------------------------------------

    def flush(self, wait: bool = False) -> int:
        """Hand cached memory that no stream still works on back to the device; with `wait`, all of it. How many bytes that was."""
        with self._lock:
            self.arena.settle(self._memory.order)
            self._free_retired()
            freed = 0
            for stream in sorted({piece[2] for piece in self.arena.free_pieces()}):
                if wait:
                    self._memory.wait_for(stream)
                elif not self._memory.is_idle(stream):
                    continue
                freed += self._free(self.arena.detach(stream))
            return freed

    def _free(self, pieces: list[Piece]) -> int:
        if pieces:
            self._memory.raw_free([pointer for pointer, _, _ in pieces])
        return sum(size for _, size, _ in pieces)

    def _free_retired(self) -> None:
        """Free what was left by arenas whose pool is gone."""
        while self._retired:
            piece = self._retired.popleft()
            self._memory.wait_for(piece[2])
            self._free([piece])

    def _reclaim(self) -> None:
        # Arrays in reference cycles hold memory until the collector runs.
        gc.collect()
        self.flush(wait=True)

    def retire(self, pieces: list[Piece]) -> None:
        """What is left of an arena whose pool is gone: this pool frees it when it next grows or is flushed."""
        self._retired.extend(pieces)

    def forget_stream(self, stream: int) -> None:
        """The stream is idle and ends: its blocks serve the default stream from now on."""
        with self._lock:
            self.arena.settle(self._memory.order)
            self.arena.rename(stream, 0)
            self.forgotten.add(stream)

    def reset(self) -> None:
        """Free every array of the pool, also those somebody still holds: using one is an error from now on."""
        for block in self.blocks():
            block.free()
        with self._lock:
            self.arena.settle(self._memory.order)

    def blocks(self) -> list[MemoryBlock]:
        """The blocks in use. Looks at every object of the process, so it takes its time."""
        return [item for item in gc.get_objects() if isinstance(item, MemoryBlock) and item.arena is self.arena and not item.freed]

    # -- asking -------------------------------------------------------------------------------------------------

    def usage(self) -> tuple[int, int]:
        """Bytes in use and bytes cached, counting what was given back a moment ago."""
        with self._lock:
            self.arena.settle(self._memory.order)
            in_use, cached, *_ = self.arena.counts()
            return in_use, cached

    @property
    def in_use(self) -> int:
        return self.usage()[0]

    @property
    def cached(self) -> int:
        return self.usage()[1]

    @property
    def peak(self) -> int:
        return self.arena.counts()[2]

    def reset_peak(self) -> None:
        """Count the peak from here on."""
        with self._lock:
            self.arena.reset_peak()

    def statistics(self) -> PoolStatistics:
        """Accounts of the pool."""
        with self._lock:
            self.arena.settle(self._memory.order)
            in_use, cached, peak, taken, returned = self.arena.counts()
            largest = max((size for _, size, _ in self.arena.free_pieces()), default=0)
        fragmentation = 1 - largest / cached if cached else 0.0
        return PoolStatistics(in_use, cached, peak, self.limit, taken, returned, self.grown, fragmentation)

    def trace(self, on: bool = True) -> None:
        """Keep the source line of every allocation from now on, which makes allocating slower."""
        self.tracing = on
        self.arena.set_bypass(on)

    def exhausted(self, nbytes: int) -> TilewrightError:
        """The error for memory that cannot be had: who holds it."""
        free, total = self._memory.free_memory()
        limit = f", of a limit of {self.limit} bytes" if self.limit is not None else ""
        lines = self._memory.holders(self)
        listed = "".join(f"\n  {line}" for line in lines)
        traced = "" if self.tracing or not lines else "; TILEWRIGHT_TRACE_MEMORY=1 adds where arrays were made"
        return DeviceError.at(
            "TW031",
            f"out of memory on {self._memory.label}: asked for {nbytes} bytes, {free} bytes are free of {total}; "
            f"Tilewright arrays hold {self.in_use} bytes{limit}" + (f", the largest:{listed}" if lines else ""),
            help=f"drop arrays that are not needed, or work on smaller pieces{traced}",
        )


def _make_nothing(shape: tuple[int, ...], dtype: DType, stream: int) -> Any:
    return None


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
