"""Schedules of contractions: the tile of one block, who computes it with which instructions, and how operands are brought in.

One record per family, each with its own fields: `Wgmma`, `Mma`, `Fma`, `Mfma`, `Wmma3`, `Wmma4` (GPUs), `CpuPanels`, `Amx` (CPUs). Those of attention are in
`attention.py`. A record says what its lowerings are (`to_tile`, `to_thread`), what layout its results have, whether it is legal for
operands of a dtype (`refusal`), and whether a target has room for it (`has_room`). `describe` prints it as `family=wgmma m=128 n=256 …`;
`text.py` parses that. How one is chosen is in `passes/choose`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields
from typing import ClassVar

from tilewright.base.dtypes import DType, f32
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.layouts import MMA_LANES, SIDE, WAVE_FORMS, WGMMA_WARPS, Accumulator, Blocked
from tilewright.ir.ops_matrix import PANEL, PANEL_STEP, ROW_BYTES

WARPGROUP = WGMMA_WARPS * MMA_LANES
"""Threads of a warp group."""


@record
class MatrixSchedule:
    """What all of them have: results of one block along m and n, and how much of the sum one step takes."""

    family: ClassVar[str] = ""
    """Its name in the text form."""
    to_thread: ClassVar[str] = "lower_tiles"
    """The pass that lowers the tile stage."""

    m: int
    n: int
    k: int

    def describe(self) -> str:
        """The family, the tile, and all that differs from the defaults, as `name=value` words."""
        words = [f"family={self.family}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("m", "n", "k") or value != field.default:
                words.append(f"{field.name}={int(value) if isinstance(value, bool) else value}")
        return " ".join(words)

    @property
    @abstractmethod
    def to_tile(self) -> str:
        """The pass that lowers the loop stage."""

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 1

    @property
    def tile_kind(self) -> tuple[int, int, bool, bool]:
        """What schedules share whose times are alike: m, n, whether warp groups take turns, whether factors are exchanged."""
        return self.m, self.n, False, False

    @property
    def data_path(self) -> tuple[object, ...]:
        """What schedules share that one kernel's operands and results serve alike: instructions, and how data moves."""
        return (self.family,)

    @property
    def staged_bytes(self) -> int:
        """Bytes of operands that a block holds at once, about."""
        return (self.m + self.n) * self.k * 4

    @abstractmethod
    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        """How results lie in the block's threads, for factors and sums of these dtypes."""

    def validate(self) -> None:
        """Raise a `UserError` where parts of the schedule contradict each other."""

    def refusal(self, target: Target, operand: DType) -> str:
        """Why no kernel with factors of this dtype can have it: what it needs. Empty where one can."""
        return ""

    @abstractmethod
    def has_room(self, target: Target) -> bool:
        """Whether it may work at all: registers and shared memory suffice and the parts fit together."""


# -- GPUs -----------------------------------------------------------------------------------------------------------


@record
class GpuProduct(MatrixSchedule):
    """What contractions on a GPU have."""

    stages: int = 1
    """Steps whose operands are in shared memory at once."""
    raster: int = 8
    """Tiles along m that are walked before the next one along n."""
    persistent: bool = True
    """As many blocks as multiprocessors, each computing many tiles."""
    inner: int = -1
    """Which of several summed indices is cut into steps, the others being walked around it; -1: all are walked as one."""
    apart: bool = False
    """Of several indices on a side only the innermost makes up tiles; the others are walked one by one."""
    swap_ab: bool = False
    """Exchange the factors: the tile's rows are the results' columns."""
    split_k: int = 1
    """Parts the sum is cut into, computed by different blocks and added up by a second kernel."""
    a_copy: str = "tma"
    b_copy: str = "tma"
    """How operands are brought: by the copy engine (`tma`; `im2col`: as the pixels of a convolution), packed first (`pack`), computed in
    registers from what the copy engine brings (`rs`, the first one), or by threads (`cp_async`, `threads`; `packed`, the second one: packed weights,
    unpacked on their way)."""
    horizontal: int = 1
    """Products of the same first factor that one block computes side by side, `n` results of each; `fuse_horizontally` makes them one kernel."""
    unpack: bool = False
    """A factor of packed weights is unpacked to scratch first, by a kernel of its own (`passes/packed/unpack_weights.py`)."""
    gather: bool = False
    """Results of a phase of a transposed convolution are written to scratch, and a last kernel puts those of all phases in their places
    (`passes/windows/gather_phases.py`)."""

    @property
    def to_tile(self) -> str:
        return "lower_contraction"

    @property
    def columns(self) -> int:
        """Columns of the second factors that one step brings."""
        return self.n * self.horizontal

    @property
    def tile_kind(self) -> tuple[int, int, bool, bool]:
        return self.m, self.n, False, self.swap_ab

    @property
    def data_path(self) -> tuple[object, ...]:
        return self.family, self.swap_ab, self.a_copy, self.b_copy

    @property
    def staged_bytes(self) -> int:
        return self.stages * (self.m + self.n) * self.k * 4


@record
class Wgmma(GpuProduct):
    """Hopper's warp-group instructions: one warp group copies, others multiply."""

    family: ClassVar[str] = "wgmma"
    to_thread: ClassVar[str] = "lower_wgmma"

    math_warpgroups: int = 1
    """Warp groups that compute, side by side along m or taking turns."""
    pingpong: bool = False
    """The warp groups take whole tiles in turns, so that one computes while the other stores."""
    mma_in_flight: int = 0
    """Groups of matrix instructions left running while the next step is started."""
    cluster: int = 1
    """Blocks that share operands by multicast, neighbours along n."""
    cluster_k: int = 1
    """Blocks of a cluster that share the sum of each tile, a stretch each; one of them adds up what the others send it."""
    stream_k: bool = False
    """Every block takes an equal stretch of all steps of all tiles; where a tile falls to several, one of them adds up what the
    others leave in memory for it."""
    epilogue_stages: int = 2
    """Pieces of the result on their way out of a warp group's shared memory."""
    store: str = "tma"
    """How results leave: through shared memory by the copy engine (`tma`), turned there and stored along rows of an image (`turned`), or from registers (`direct`)."""
    to_channels_last: str = ""
    """What is copied so that channels lie last: a convolution's input before it (`image`), its results after it (`result`), or `both`; `rows`, `rows32`: its input, such that
    the row of a window counts as channels (`passes/windows/window_rows.py`); `gather`: the same with places beside one another that lie apart, `image_gather`: from an image
    with channels first."""
    pixels: int = 0
    """With `gather`: scratch has all channels of a place side by side, and a block that gathers turns so many columns of results (`passes/windows/pixel_phases.py`); 0: scratch lies as
    results do."""
    stacked: bool = False
    """With `pixels`: phases that read the same windows are one convolution with the filters of all of them (`passes/windows/stacked_phases.py`)."""
    pdl: bool = False
    """Programmatic dependent launch: start before the kernel launched before has ended."""
    tf32_terms: int = 0
    """Products of the two parts of each factor of f32, which copies make first (`passes/windows/split_images.py`): 3, or 4 with that of the small parts;
    0: factors are multiplied as they are."""
    folded: int = 0
    """Axes of a convolution's image, a bit for each, whose places of the window lie beside the channels in such copies: few channels fill no step. With `gather` one axis; 0: the last."""
    bf16_terms: int = 0
    """Products of bf16 that one of f32 is: factors are written to scratch as three terms first (`passes/terms/split_terms.py`). 0: factors as they are."""
    chunk: int = 0
    """Terms of the sum that matrix units add up from zero before they are added to the rest; 0: all."""

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.math_warpgroups + 1)

    @property
    def sharing(self) -> int:
        """Warp groups that share a tile."""
        return 1 if self.pingpong else self.math_warpgroups

    @property
    def rows(self) -> int:
        """Rows of a tile that one warp group computes."""
        return self.m // self.sharing

    @property
    def skips(self) -> bool:
        """Whether tiles may have sums of different lengths: every block has one tile, all of its sum, and operands of its own."""
        shared = self.cluster > 1 or self.cluster_k > 1 or self.split_k > 1 or self.horizontal > 1 or self.stream_k
        return not (shared or self.persistent or self.pingpong or (self.chunk and not self.bf16_terms) or self.a_copy == "rs")

    @property
    def tile_kind(self) -> tuple[int, int, bool, bool]:
        return self.m, self.n, self.pingpong, self.swap_ab

    @property
    def data_path(self) -> tuple[object, ...]:
        return (*super().data_path, self.store)

    @property
    def staged_bytes(self) -> int:
        return self.stages * self.parts * (self.m + self.n) * ROW_BYTES

    @property
    def parts(self) -> int:
        """Tiles of each factor in a stage."""
        return 2 if self.tf32_terms else 1

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        return Accumulator("wgmma", (64, self.n, 32 // operand.itemsize), (self.sharing, 1))

    def refusal(self, target: Target, operand: DType) -> str:
        streamed = self.cluster == self.split_k == self.cluster_k == 1 and self.persistent and not self.pingpong
        shared = self.cluster_k > 1 or self.stream_k
        if self.cluster_k not in (1, 2, 4, 8) or (self.cluster_k > 1 and self.cluster > 1) or (self.stream_k and not streamed) or (
            shared and self.a_copy == "rs"
        ):
            return (
                "cluster_k is 2, 4 or 8; it, and stream_k, are for family=wgmma without cluster; "
                "stream_k also without pingpong, split_k and cluster_k, and persistent"
            )
        if self.tf32_terms not in (0, 3, 4) or (self.tf32_terms and operand is not f32):
            return "tf32_terms are 3 or 4, for convolutions of f32"
        if self.bf16_terms not in (0, 6) or (self.bf16_terms and operand is not f32):
            return "bf16_terms is 6, for factors of f32"
        if self.chunk < 0 or self.chunk % self.k or (self.chunk and (self.a_copy == "rs" or self.pingpong)):
            return f"a chunk is whole steps of k={self.k}, without pingpong and with both factors in shared memory"
        size = 2 if self.bf16_terms else operand.itemsize
        # Of parts of tf32 a step may be shorter than what copies bring.
        whole = self.k * size == ROW_BYTES or (self.tf32_terms > 0 and self.k % 8 == 0 and 0 < self.k * size < ROW_BYTES)
        legal = whole and self.m % 64 == 0 and self.n % 8 == 0 and self.n <= 256
        # Words of the next step are computed before this one is given back.
        if not legal or (self.a_copy == "rs" and (self.cluster > 1 or self.stages < 2)):
            return "a tile has m % 64 == 0, n % 8 == 0 up to 256, k of 128 bytes; factors that lie across the sum need whole blocks of 128 bytes"
        if self.math_warpgroups < 1 or self.m % (64 * self.sharing) or (self.pingpong and self.math_warpgroups != 2):
            return (
                f"math_warpgroups={self.math_warpgroups}: groups that share a tile compute 64 rows each, or more, so m is a multiple of "
                "64 * math_warpgroups; with pingpong there are 2, and each has a tile of its own"
            )
        return ""

    def has_room(self, target: Target) -> bool:
        if min(self.m, self.n, self.k, self.stages) < 1 or self.threads > target.max_threads or self.stages <= self.mma_in_flight:
            return False
        if self.a_copy == "rs" and (self.cluster > 1 or self.stages < 2):
            return False
        if self.m % (64 * self.sharing) or self.n % 64 or self.columns > 256 or self.stages < 2 or (self.pingpong and self.math_warpgroups != 2):
            return False
        registers = 192 if self.math_warpgroups < 3 else 112
        if self.chunk:
            registers = 96 if self.math_warpgroups < 3 else 64  # sums are there twice
        rings = self.stages * self.parts * (self.m + self.columns) * ROW_BYTES
        out = self.math_warpgroups * self.epilogue_stages * 64 * ROW_BYTES
        return self.rows * self.columns // WARPGROUP <= registers and rings + out + 16 * self.stages + 1024 <= target.max_shared


@record
class WarpProduct(GpuProduct):
    """What instructions of single warps and plain multiply-adds have."""

    to_thread: ClassVar[str] = "lower_mma"

    warps_m: int = 1
    warps_n: int = 1
    """How warps share the tile."""
    chunk: int = 0
    """Terms of the sum that are added up from zero before they are added to the rest; 0: all."""
    chunks: int = 1
    """Such sums that are added up from zero in turn."""

    @property
    def threads(self) -> int:
        return MMA_LANES * self.warps_m * self.warps_n

    def validate(self) -> None:
        for name in ("m", "n", "k", "warps_m", "warps_n"):
            if not self._is_shared(name):
                raise UserError.at("TW005", f"{name}={getattr(self, name)}: a schedule of family {self.family} has powers of two, and sides of 16 rows or columns for each warp")
        if self.chunk % self.k or self.chunk < 0 or self.chunks < 1:
            raise UserError.at("TW005", f"chunk={self.chunk} chunks={self.chunks}: a chunk is whole steps of k={self.k}")

    def _is_shared(self, name: str) -> bool:
        """Whether warps can share so many: a power of two, or a side of the tile with blocks of 16 for each warp."""
        value = int(getattr(self, name))
        sides = {"m": SIDE * max(1, self.warps_m), "n": SIDE * max(1, self.warps_n)}
        return value > 0 and (value & (value - 1) == 0 or (name in sides and value % sides[name] == 0))

    def has_room(self, target: Target) -> bool:
        if min(self.m, self.n, self.k, self.stages) < 1 or self.threads > target.max_threads:
            return False
        results = self.m * self.columns // self.threads
        whole = self.m % (16 * self.warps_m) == 0 and self.n % (8 * self.warps_n) == 0
        return whole and self._is_shared("m") and self._is_shared("n") and 16 <= results <= 128


@record
class Mma(WarpProduct):
    """Matrix instructions of single warps."""

    family: ClassVar[str] = "mma"

    tf32_terms: int = 3
    """Products of the two parts of each factor (precision `3xtf32`): 4 has that of the small parts too."""
    levels_held: int = -1
    """Levels of sums above the innermost that stay in registers; -1: those that registers are thought to have room for."""

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        return Accumulator("mma", (16, 8, 32 // operand.itemsize), (self.warps_m, self.warps_n))


@record
class Fma(WarpProduct):
    """Ordinary arithmetic on a GPU."""

    family: ClassVar[str] = "fma"

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        # A thread has patches that are one vector wide and as high.
        vector = 16 // total.itemsize
        return Blocked((vector, vector), (4, 8), (self.warps_m, self.warps_n))


@record
class WaveProduct(WarpProduct):
    """Matrix instructions of AMD's waves."""

    @property
    def threads(self) -> int:
        return WAVE_FORMS[self.family].lanes * self.warps_m * self.warps_n

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        return Accumulator(self.family, (SIDE, SIDE, SIDE), (self.warps_m, self.warps_n))

    def refusal(self, target: Target, operand: DType) -> str:
        return "" if target.has(self.family) else f"family={self.family} is for GPUs that have {self.family}"

    def has_room(self, target: Target) -> bool:
        if min(self.m, self.n, self.k, self.stages) < 1 or self.threads > target.max_threads:
            return False
        results = self.m * self.columns // self.threads
        return self.m % (SIDE * self.warps_m) == 0 and self.n % (SIDE * self.warps_n) == 0 and 4 <= results <= 128


@record
class Mfma(WaveProduct):
    """CDNA."""

    family: ClassVar[str] = "mfma"


@record
class Wmma3(WaveProduct):
    """RDNA 3."""

    family: ClassVar[str] = "wmma3"


@record
class Wmma4(WaveProduct):
    """RDNA 4."""

    family: ClassVar[str] = "wmma4"


# -- CPUs -----------------------------------------------------------------------------------------------------------


@record
class CpuProduct(MatrixSchedule):
    """What contractions on a CPU have."""

    mr: int = 0
    nr: int = 0
    """Rows and columns of results held in registers at once."""
    vectors: int = 1
    """SIMD registers along `nr`."""
    keep: str = "b"
    """The factor of which a block holds a copy of all it needs for a stretch of the sum; the other is copied panel by panel."""
    unpack: bool = False
    """As on a GPU; elements stay f32."""

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        return Blocked((1, self.nr // self.vectors), (1, 1), (1, 1))


def fit_registers(target: Target, rows: int, vectors: int) -> bool:
    """Whether a tile of sums, a row of the second factor and one element of the first are in a CPU's registers."""
    registers = 32 if target.vector_bytes == 64 or target.name.startswith("aarch64") or target.max_registers == 32 else 16
    return rows * vectors + vectors + 1 <= registers


@record
class CpuPanels(CpuProduct):
    """SIMD arithmetic on panels copied to the cache."""

    family: ClassVar[str] = "cpu"

    horizontal: int = 1
    """Products of the same first factor that one block computes side by side."""
    half: bool = False
    """The product is symmetric: tiles above the diagonal are not computed, but copied."""

    @property
    def to_tile(self) -> str:
        return "lower_products_cpu" if self.horizontal > 1 else "lower_symmetric_cpu" if self.half else "lower_contraction_cpu"

    def has_room(self, target: Target) -> bool:
        fits = fit_registers(target, self.mr, self.vectors) and self.k >= 32
        return fits and (self.keep == "b" or (self.horizontal == 1 and not self.half))


@record
class Amx(CpuProduct):
    """A CPU's matrix unit."""

    family: ClassVar[str] = "amx"

    @property
    def to_tile(self) -> str:
        return "lower_contraction_amx"

    def refusal(self, target: Target, operand: DType) -> str:
        panels = (self.mr, self.nr, self.vectors) == (PANEL, PANEL, 2) and min(self.m, self.n, self.k) > 0
        if panels and self.m % PANEL == self.n % PANEL == self.k % (PANEL_STEP // operand.itemsize) == 0:
            return ""
        return f"for the matrix unit mr and nr are {PANEL}, vectors is 2, m and n are multiples of them, and k of {PANEL_STEP} bytes"

    def has_room(self, target: Target) -> bool:
        return min(self.m, self.n) >= self.mr and self.k >= 128


def products_of(schedule: object) -> int:
    """Products that one block computes side by side by a schedule."""
    return int(getattr(schedule, "horizontal", 1))
