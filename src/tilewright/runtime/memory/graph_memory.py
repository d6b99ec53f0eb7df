"""Memory of a captured graph. In: requests made while it is captured; out: blocks whose addresses stay the graph's as long as
it lives.

A replay writes to the same addresses every time, so nobody else may get them, even when the array they were taken for is gone.
The arena takes blocks from the device's pool and keeps them. Inside the capture they are reused in stream order. Whoever holds
a result holds the arena; when graph and results are gone, the blocks go back to the pool, after the streams the graph was
replayed on.

Captured again, for other arguments, a graph asks for the same sizes in the same order, and gets the same addresses: results
stay where they were.
"""

from __future__ import annotations

from collections import deque

from tilewright.base.forks import fork_safe_rlock
from tilewright.runtime.core.device import Buffer
from tilewright.runtime.memory.device_memory import MemoryBlock, MemoryPool, size_class


class _GraphToken:
    """Gives a block back to the arena when it goes."""

    __slots__ = ("_arena", "_piece", "mixed")

    def __init__(self, arena: GraphArena, piece: tuple[int, int, int]) -> None:
        self._arena, self._piece = arena, piece
        self.mixed = False
        """Several streams of the capture used it."""

    def __del__(self) -> None:
        if not self.mixed:
            self._arena.returned.append(self._piece)

    @property
    def stream(self) -> int:
        """The stream it was taken for."""
        return self._piece[2]


class _Users(set[int]):
    """The streams that use memory of a graph, the same set for all its blocks. A new one is told to all that is reserved."""

    def __init__(self, reserved: dict[int, MemoryBlock]) -> None:
        super().__init__()
        self._reserved = reserved

    def add(self, stream: int) -> None:
        super().add(stream)
        for block in list(self._reserved.values()):
            block.use_on(stream)


class GraphArena:
    """The memory of one graph. `origin` is the stream that was current when it was captured."""

    def __init__(self, pool: MemoryPool, origin: int) -> None:
        self._pool, self.origin = pool, origin
        self._lock = fork_safe_rlock()
        self._blocks: dict[int, MemoryBlock] = {}
        self._free: dict[tuple[int, int], list[int]] = {}
        self._live: set[int] = set()
        self._given: list[tuple[int, int]] = []
        self._before: list[tuple[int, int]] = []
        self.diverged = False
        """A repeated capture asked for other memory than the one before."""
        self.returned: deque[tuple[int, int, int]] = deque()
        self.users = _Users(self._blocks)
        """Streams the graph was replayed on, and others that used a result."""

    def take(self, nbytes: int, stream: int) -> MemoryBlock:
        if nbytes <= 0:
            return MemoryBlock(0, 0, self.origin, None)
        size = size_class(nbytes)
        with self._lock:
            self._collect()
            pointer = self._same_again(size) or self._reused(size, stream) or self._new(size)
            self._live.add(pointer)
            self._given.append((size, pointer))
        token = _GraphToken(self, (pointer, size, stream))
        block = MemoryBlock(pointer, size, self.origin, None, token)
        # Replays are noted once, for all blocks.
        block.users = self.users
        return block

    def owns(self, block: Buffer) -> bool:
        return block.users is self.users

    def used_on(self, block: Buffer, stream: int) -> None:
        """A launch captured on `stream` uses a block of the arena."""
        token = block.token
        if isinstance(token, _GraphToken) and stream != token.stream:
            token.mixed = True

    def _same_again(self, size: int) -> int:
        """What the capture before this one got at this point; 0 where it asked for something else."""
        if self.diverged or not self._before:
            return 0
        position = len(self._given)
        if position < len(self._before) and self._before[position][0] == size and self._before[position][1] not in self._live:
            return self._before[position][1]
        self.diverged = True
        return 0

    def _reused(self, size: int, stream: int) -> int:
        ready = self._free.get((size, stream))
        return ready.pop() if ready and not self._before else 0

    def _new(self, size: int) -> int:
        block = self._pool.take(size, self.origin)
        self._blocks[block.pointer] = block
        for stream in self.users:
            block.use_on(stream)
        return block.pointer

    def _collect(self) -> None:
        while self.returned:
            pointer, size, stream = self.returned.popleft()
            self._live.discard(pointer)
            self._free.setdefault((size, stream), []).append(pointer)

    def begin(self) -> None:
        """A capture begins."""
        with self._lock:
            self._collect()
            self._before, self._given = self._given, []
            self._live, self._free = set(), {}
            self.diverged = False

    def abort(self) -> None:
        """It came to nothing: the one before counts."""
        with self._lock:
            self._given, self.diverged = self._before, False

    def replayed_on(self, stream: int) -> None:
        """Work on `stream` uses all of it from now on."""
        with self._lock:
            if stream != self.origin:
                self.users.add(stream)

    @property
    def reserved(self) -> int:
        """Bytes held for the graph."""
        return sum(block.nbytes for block in self._blocks.values())
