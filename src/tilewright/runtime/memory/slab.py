"""A pool of a fixed size: one large piece of a device's memory, cut up. In: a block; out: what a `MemoryPool` asks of a device."""

from __future__ import annotations

from tilewright.runtime.memory.device_memory import MemoryBlock, Piece, RawMemory


class Slab:
    """One large piece of a device's memory, cut up for a pool: what the pool calls `raw_` is served from it.

    Freed pieces join their neighbours. The whole goes back to the device's own pool with the slab.
    """

    def __init__(self, memory: RawMemory, block: MemoryBlock) -> None:
        self._memory = memory
        self._block = block
        self._free: list[tuple[int, int]] = [(block.pointer, block.nbytes)]
        self._sizes: dict[int, int] = {}
        self.label = memory.label
        self.is_idle, self.wait_for = memory.is_idle, memory.wait_for
        self.order, self.holders = memory.order, memory.holders

    def retire(self, pieces: list[Piece]) -> None:
        """The pool is gone: the slab goes back as memory that all those streams used."""
        for _, _, stream in pieces:
            self._block.use_on(stream)

    def raw_allocate(self, nbytes: int) -> int:
        fitting = [(size, start) for start, size in self._free if size >= nbytes]
        if not fitting:
            return 0
        size, start = min(fitting)
        at = self._free.index((start, size))
        self._free[at : at + 1] = [(start + nbytes, size - nbytes)] if size > nbytes else []
        self._sizes[start] = nbytes
        return start

    def raw_free(self, pointers: list[int]) -> None:
        pieces = sorted([*self._free, *((pointer, self._sizes.pop(pointer)) for pointer in pointers)])
        joined: list[tuple[int, int]] = []
        for start, size in pieces:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined

    def free_memory(self) -> tuple[int, int]:
        return sum(size for _, size in self._free), self._block.nbytes
