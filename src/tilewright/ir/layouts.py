"""Layouts: how a tile's elements are spread over the threads of a block. Each is one function.

`Blocked` is a product over the axes. Along axis `a` of extent `E` an element's coordinate is

    ((register * warps[a] + warp) * lanes[a] + lane) * vector[a] + v

with `register < E / (vector*lanes*warps)`. Lane and warp numbers are row-major over their tuples (last axis fastest). The warps may be
those of several blocks, a cluster of `blocks`: the tile is then the cluster's, and a block has every so many consecutive warps.
An axis of extent 1 is held by every thread along it: reduced and broadcast values need no layout of their own.
`Shared` describes a tile in shared memory, `Accumulator` and `Operand` the fragments of tensor-core instructions.

`WaveInstruction`: matrix instructions of AMD's waves. All multiply a 16 x k by a k x 16 matrix and add to 16 x 16 sums. Of the first operand lane l has row l % 16, of the second column l % 16;
`width` elements along k that follow one another, from `width` * (l / 16) on, or all of k where lanes 16 to 31 hold what 0 to 15 do
(`repeated`). Of the sums lane l has column l % 16, and in register r row `sums` * (l / 16) + r, or 2 r + l / 16 where operands are repeated.
Where along k a lane's elements stand matters to nobody, as long as both operands agree.

`WaveForm` is the same from the side of a tile. Operands are given the other way round, so that a lane holds neighbours along n, as memory does.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from tilewright.base.dtypes import DType, bf16, f16, f32, i8, i32, u8
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


# -- matrix instructions of AMD's waves ---------------------------------------------------------------------------------

SIDE = 16
"""Rows and columns of the sums."""


@record
class WaveForm:
    """How sums of one family lie in a wave: lane l has row l % 16; its columns begin at `column` * (l / 16), `vector` neighbours each, `step` apart."""

    lanes: int
    vector: int
    column: int
    step: int


WAVE_FORMS: Mapping[str, WaveForm] = MappingProxyType({
    "mfma": WaveForm(64, 4, 4, 16), "wmma3": WaveForm(32, 1, 1, 2), "wmma4": WaveForm(32, 8, 8, 16),
})  # fmt: skip
"""By family of schedules: CDNA, RDNA 3, RDNA 4."""


@record
class WaveInstruction:
    """One instruction."""

    name: str
    """LLVM's name of its intrinsic, after `llvm.amdgcn.`."""
    family: str
    feature: str
    """What a target must have."""
    dtype: DType
    total: DType
    k: int
    width: int
    """Elements along k that one lane has."""

    @property
    def lanes(self) -> int:
        return WAVE_FORMS[self.family].lanes

    @property
    def repeated(self) -> bool:
        """Whether both halves of a wave hold the same operands."""
        return self.width == self.k

    @property
    def sums(self) -> int:
        """Registers of the sums in each lane."""
        return SIDE * SIDE // self.lanes

    @property
    def pieces(self) -> int:
        """Values that an operand is given as: each has at most 16 bytes."""
        return max(1, self.width * self.dtype.itemsize // 16)

    def row(self, lane: int, register: int) -> int:
        """The row of the sums that a lane's register holds."""
        return 2 * register + lane // SIDE if self.repeated else self.sums * (lane // SIDE) + register


_MFMA, _WMMA3, _WMMA4 = ("mfma", "mfma"), ("wmma3", "wmma3"), ("wmma4", "wmma4")
INSTRUCTIONS: Mapping[str, WaveInstruction] = MappingProxyType({row.name: row for row in (
    WaveInstruction("mfma.f32.16x16x16f16", *_MFMA, f16, f32, 16, 4),
    WaveInstruction("mfma.f32.16x16x16bf16.1k", *_MFMA, bf16, f32, 16, 4),
    WaveInstruction("mfma.i32.16x16x16i8", "mfma", "mfma.i8k16", i8, i32, 16, 4),
    WaveInstruction("mfma.i32.16x16x32.i8", "mfma", "mfma.i8k32", i8, i32, 32, 8),
    WaveInstruction("wmma.f32.16x16x16.f16.v8f32.v16f16", *_WMMA3, f16, f32, 16, 16),
    WaveInstruction("wmma.f32.16x16x16.bf16.v8f32.v16i16", *_WMMA3, bf16, f32, 16, 16),
    WaveInstruction("wmma.i32.16x16x16.iu8.v8i32.v4i32", *_WMMA3, i8, i32, 16, 16),
    WaveInstruction("wmma.i32.16x16x16.iu8.v8i32.v4i32.u8", *_WMMA3, u8, i32, 16, 16),
    WaveInstruction("wmma.f32.16x16x16.f16.v8f32.v8f16", *_WMMA4, f16, f32, 16, 8),
    WaveInstruction("wmma.f32.16x16x16.bf16.v8f32.v8i16", *_WMMA4, bf16, f32, 16, 8),
    WaveInstruction("wmma.i32.16x16x16.iu8.v8i32.v2i32", *_WMMA4, i8, i32, 16, 8),
    WaveInstruction("wmma.i32.16x16x16.iu8.v8i32.v2i32.u8", *_WMMA4, u8, i32, 16, 8),
)})  # fmt: skip
"""By name. Unsigned bytes are the signed instruction with other flags: their names end in `.u8`."""


def wave_instruction(features: frozenset[str], dtype: DType, total: DType) -> WaveInstruction | None:
    """The instruction of a device with these features for such factors and sums; None where there is none."""
    return next((i for i in INSTRUCTIONS.values() if i.feature in features and i.dtype is dtype and i.total is total), None)


# -- NVIDIA's and all of them --------------------------------------------------------------------------------------------

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
    instruction's 64. Families of AMD's waves lie as `WAVE_FORMS` says.
    """

    family: str
    shape: tuple[int, int, int]
    warps: tuple[int, int]

    def __str__(self) -> str:
        return f"accumulator({self.family}, {list(self.shape)}, {list(self.warps)})"

    @property
    def wave(self) -> WaveForm | None:
        """How sums lie in a wave of AMD's; None for NVIDIA's families."""
        return WAVE_FORMS.get(self.family)

    @property
    def vector(self) -> tuple[int, int]:
        return (1, self.wave.vector if self.wave else 2)

    @property
    def lanes(self) -> tuple[int, int]:
        return (SIDE, self.wave.lanes // SIDE) if self.wave else (8, 4)

    @property
    def threads(self) -> int:
        if self.wave:
            return prod(self.warps) * self.wave.lanes
        return prod(self.warps) * (WGMMA_WARPS * MMA_LANES if self.family == "wgmma" else MMA_LANES)

    def part(self, axis: int, extent: int) -> int:
        """Rows or columns of the tile one warp group or warp has."""
        return extent // self.warps[axis]

    def registers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Register steps along each axis; 1 along axes of extent 1."""
        if self.wave:
            return (1 if shape[0] == 1 else self.part(0, shape[0]) // SIDE, 1 if shape[1] == 1 else self.part(1, shape[1]) // self.wave.step)
        rows = 1 if shape[0] == 1 else 2 * (self.part(0, shape[0]) // self.shape[0])
        return rows, 1 if shape[1] == 1 else self.part(1, shape[1]) // 8

    def offset(self, axis: int, register: int) -> int:
        """How far a register step lies from the thread's first coordinate."""
        if self.wave:
            return register * (self.wave.step if axis == 1 else SIDE)
        return 8 * register if axis == 1 else register // 2 * self.shape[0] + register % 2 * 8

    def start(self, shape: tuple[int, ...], warp: int, lane: int) -> tuple[int, int]:
        """The thread's first coordinate."""
        inner = 0
        if self.family == "wgmma":
            warp, inner = warp // WGMMA_WARPS, warp % WGMMA_WARPS
        row, column = _split(warp, self.warps)
        if self.wave:
            return row * self.part(0, shape[0]) + lane % SIDE, column * self.part(1, shape[1]) + self.wave.column * (lane // SIDE)
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
