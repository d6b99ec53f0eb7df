"""Layouts: how a tile's elements are spread over the threads of a block. Each is one function.

`Blocked` is a product over the axes. Along axis `a` of extent `E` an element's coordinate is

    ((register * warps[a] + warp) * lanes[a] + lane) * vector[a] + v

with `register < E / (vector*lanes*warps)`. Lane and warp numbers are row-major over their tuples (last axis fastest). The warps may be
those of several blocks, a cluster of `blocks`: the tile is then the cluster's, and a block has every so many consecutive warps.
An axis of extent 1 is held by every thread along it: reduced and broadcast values need no layout of their own.
`Shared` describes a tile in shared memory, `Accumulator` and `Operand` the fragments of tensor-core instructions.
"""

from __future__ import annotations

from math import prod

from tilewright.base.record import record


def _split(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major digits of `number` in mixed radix `sizes`."""
    digits: list[int] = []
    for size in reversed(sizes):
        digits.append(number % size)
        number //= size
    return tuple(reversed(digits))


@record
class Blocked:
    vector: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    blocks: int = 1

    def __str__(self) -> str:
        together = f", {self.blocks}" if self.blocks > 1 else ""
        return f"blocked({list(self.vector)}, {list(self.lanes)}, {list(self.warps)}{together})"

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return prod(self.lanes) * prod(self.warps) // self.blocks

    def span(self, axis: int) -> int:
        """Elements one register step covers along an axis."""
        return self.vector[axis] * self.lanes[axis] * self.warps[axis]

    def registers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Register steps along each axis; 1 along axes of extent 1."""
        return tuple(1 if e == 1 else max(1, e // self.span(a)) for a, e in enumerate(shape))

    def offset(self, axis: int, register: int) -> int:
        """How far a register step lies from the thread's first coordinate."""
        return register * self.span(axis)

    def coordinate(
        self, shape: tuple[int, ...], warp: int, lane: int, register: tuple[int, ...], v: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The tile coordinate held by that thread in that register slot."""
        lanes, warps = _split(lane, self.lanes), _split(warp, self.warps)
        return tuple(
            0
            if extent == 1
            else ((register[a] * self.warps[a] + warps[a]) * self.lanes[a] + lanes[a]) * self.vector[a] + v[a]
            for a, extent in enumerate(shape)
        )


@record
class Shared:
    """A tile in shared memory: `order` lists axes from slowest to fastest, `swizzle` bytes (0, 32, 64 or 128)."""

    order: tuple[int, ...]
    swizzle: int = 0

    def __str__(self) -> str:
        return f"shared({list(self.order)}, {self.swizzle})"


MMA_LANES = 32
"""Lanes that execute one `mma` instruction of NVIDIA's: a warp of such a GPU."""
WGMMA_WARPS = 4
"""Warps that execute one `wgmma` instruction of NVIDIA's together: a warp group."""


@record
class Accumulator:
    """The result of matrix instructions, spread over warps. `shape` is m, n, k of one instruction; `warps` are the warp groups
    (wgmma) or warps (mma) along m and n, each with its own part of the tile.

    Lane l holds, of every 8 columns, columns 2 (l % 4) and the next; of every 8 rows, row l / 4. Registers walk first the two halves of
    16 rows, then the instructions along m; along n eight columns at a time. The four warps of a warp group have 16 rows each of an
    instruction's 64.
    """

    family: str
    shape: tuple[int, int, int]
    warps: tuple[int, int]

    def __str__(self) -> str:
        return f"accumulator({self.family}, {list(self.shape)}, {list(self.warps)})"

    @property
    def vector(self) -> tuple[int, int]:
        return (1, 2)

    @property
    def lanes(self) -> tuple[int, int]:
        return (8, 4)

    @property
    def threads(self) -> int:
        return prod(self.warps) * (WGMMA_WARPS * MMA_LANES if self.family == "wgmma" else MMA_LANES)

    def part(self, axis: int, extent: int) -> int:
        """Rows or columns of the tile one warp group or warp has."""
        return extent // self.warps[axis]

    def registers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Register steps along each axis; 1 along axes of extent 1."""
        rows = 1 if shape[0] == 1 else 2 * (self.part(0, shape[0]) // self.shape[0])
        return rows, 1 if shape[1] == 1 else self.part(1, shape[1]) // 8

    def offset(self, axis: int, register: int) -> int:
        """How far a register step lies from the thread's first coordinate."""
        return 8 * register if axis == 1 else register // 2 * self.shape[0] + register % 2 * 8

    def start(self, shape: tuple[int, ...], warp: int, lane: int) -> tuple[int, int]:
        """The thread's first coordinate."""
        inner = 0
        if self.family == "wgmma":
            warp, inner = warp // WGMMA_WARPS, warp % WGMMA_WARPS
        row, column = _split(warp, self.warps)
        return row * self.part(0, shape[0]) + 16 * inner + lane // 4, column * self.part(1, shape[1]) + 2 * (lane % 4)

    def coordinate(
        self, shape: tuple[int, ...], warp: int, lane: int, register: tuple[int, ...], v: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The tile coordinate held by that thread in that register slot."""
        start = self.start(shape, warp, lane)
        return tuple(0 if e == 1 else start[a] + self.offset(a, register[a]) + v[a] for a, e in enumerate(shape))


@record
class Operand:
    """Operand `side` ('a' or 'b') of the matrix instruction whose result has layout `parent`."""

    side: str
    parent: Accumulator

    def __str__(self) -> str:
        return f"operand({self.side}, {self.parent})"


Layout = Blocked | Shared | Accumulator | Operand
