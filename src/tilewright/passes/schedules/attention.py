"""Schedules of attention: a maximum, sums and two products of a row, computed in one pass over its keys.

One record per family: `WgmmaAttention` (Hopper's instructions), `MmaAttention` (those of single warps), `CpuAttention`. `m` are rows of
a block, `n` the keys of one step, `k` the terms of a score.
"""

from __future__ import annotations

from typing import ClassVar

from tilewright.base.dtypes import DType, f32
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.layouts import MMA_LANES, Accumulator, Blocked
from tilewright.passes.schedules.matrix import WARPGROUP, MatrixSchedule

TERMS = 16
"""Terms of one matrix instruction, and rows of a warp's band."""
SWIZZLED = 64
"""Elements of two bytes that the copy engine swizzles together."""
OPERAND_TERMS = 3
"""Terms of bf16 that an f32 is."""
CHUNK = 8
"""Elements of 16 bytes where they have two: one copy of a thread, and a row of an 8x8 matrix."""


def pitch(columns: int, itemsize: int = 2) -> int:
    """Elements from one row of shared memory to the next, where warps read it: an odd number of chunks of 16 bytes."""
    return columns + 16 // itemsize


@record
class GpuAttention(MatrixSchedule):
    """What attention on a GPU has."""

    head_dim_v: int = 0
    """Columns of the values."""
    stages: int = 1
    """Steps whose keys and values are in shared memory at once."""
    raster: int = 8
    """Batch points that are walked together, where rows have limits."""
    persistent: bool = True
    """As many blocks as multiprocessors have room for, each computing many tiles."""

    @property
    def to_tile(self) -> str:
        return "lower_attention"

    @property
    def staged_bytes(self) -> int:
        return self.stages * (self.m + self.n) * self.k * 4


@record
class WgmmaAttention(GpuAttention):
    """Hopper's warp-group instructions."""

    family: ClassVar[str] = "attention"
    to_thread: ClassVar[str] = "lower_wgmma_attention"

    a_copy: str = "tma"
    """Where queries are: in shared memory (`tma`), or in registers (`rs`)."""
    math_warpgroups: int = 1
    """Warp groups that compute, 64 rows each."""
    epilogue_stages: int = 2
    """Pieces of the result on their way out of a warp group's shared memory."""
    store: str = "tma"
    """How results leave: through shared memory by the copy engine (`tma`), or from registers (`direct`)."""
    blocks: int = 1
    """Blocks that a multiprocessor has at once."""
    dynamic: bool = False
    """Blocks fetch the number of their next tile from a counter, so that tiles may take different times."""
    pdl: bool = False
    """Programmatic dependent launch: start before the kernel launched before has ended."""
    bf16_terms: int = 0
    """Of operands of f32: products of the three terms of bf16 that each is, 6. 0: operands have two bytes."""

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.math_warpgroups + 1)

    @property
    def data_path(self) -> tuple[object, ...]:
        return self.family, self.k, self.head_dim_v, self.a_copy, self.store, self.bf16_terms

    @property
    def key_columns(self) -> int:
        """Elements of a row of queries or keys in shared memory, whole blocks: of terms, one behind the other."""
        return -(-(OPERAND_TERMS if self.bf16_terms else 1) * self.k // SWIZZLED) * SWIZZLED

    @property
    def value_pitch(self) -> int:
        """Elements from a term of a value to the next: each begins a block of its own."""
        return -(-self.head_dim_v // SWIZZLED) * SWIZZLED

    @property
    def value_columns(self) -> int:
        """The same of values."""
        return OPERAND_TERMS * self.value_pitch if self.bf16_terms else self.head_dim_v

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a copying and of a computing thread: those of a block's launch, shared out anew."""
        groups = self.math_warpgroups
        launched = (1 << 16) // (WARPGROUP * (groups + 1) * self.blocks) // 8 * 8
        copying = 24 if groups < 3 else 32
        return copying, min(240, (launched * (groups + 1) - copying) // groups // 8 * 8)

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        return Accumulator("wgmma", (64, self.n, 32 // operand.itemsize), (self.math_warpgroups, 1))

    def refusal(self, target: Target, operand: DType) -> str:
        fits = self.m == 64 * self.math_warpgroups and 1 <= self.math_warpgroups <= 4 and self.n % TERMS == 0 and 16 <= self.n <= 256
        if self.bf16_terms and (self.bf16_terms != 6 or self.a_copy != "tma" or self.k % TERMS or self.head_dim_v % 32):
            return "bf16_terms=6 is for operands of f32, with a_copy=tma, k a multiple of 16 and head_dim_v one of 32"
        if fits and (self.blocks == 1 or (self.math_warpgroups == 1 and 1 < self.blocks <= 4)):
            return ""
        return (
            "m = 64 * math_warpgroups, up to 4 of them, and n a multiple of 16 up to 256; several blocks at once have one group, up to 4 blocks"
        )

    def has_room(self, target: Target) -> bool:
        if min(self.m, self.k) < 1 or self.threads > target.max_threads:
            return False
        if self.stages < 2 or self.n % TERMS or not 16 <= self.n <= 256 or (self.blocks > 1 and self.math_warpgroups > 1):
            return False
        # Sums, scores, and the weights of the step before are in registers.
        most = min(180, self.registers[1] - 30)
        out = self.math_warpgroups * self.epilogue_stages * 64 * 128
        operands = 2 * (self.m * self.key_columns + self.stages * self.n * (self.key_columns + self.value_columns))
        # Of terms there are three words for two weights, and sums of one step besides those of all.
        held = self.head_dim_v + self.n * 5 // 4 if self.bf16_terms else self.head_dim_v // 2 + self.n * 3 // 4
        fits = held <= most
        return fits and self.blocks * (operands + out + 2048) <= target.max_shared


@record
class MmaAttention(GpuAttention):
    """Matrix instructions of single warps."""

    family: ClassVar[str] = "attention_mma"
    to_thread: ClassVar[str] = "lower_mma_attention"

    a_copy: str = "cp_async"
    """Where queries are: in shared memory (`cp_async`), or in registers (`rs`)."""
    warps_m: int = 1
    """Warps of a block, each with 16 or 32 rows."""
    splits: int = 0
    """Parts of the keys that are computed side by side, for few rows, and then added up; 0: all keys of a row in one block."""
    prefetch: int = 0
    """Bytes around each copy that come to the second-level cache with it: 0, 128 or 256."""
    tf32_terms: int = 0
    """Of operands of f32: products of the parts that each is cut into. 1: it is rounded to tf32; 3: two parts each; 4: with the product of the small ones.
    0: operands have two bytes."""

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return 4 if self.tf32_terms else 2

    @property
    def threads(self) -> int:
        return MMA_LANES * self.warps_m

    @property
    def data_path(self) -> tuple[object, ...]:
        return self.family, self.k, self.head_dim_v, self.a_copy

    @property
    def bands(self) -> int:
        """Times 16 rows of a warp."""
        return self.m // (TERMS * self.warps_m)

    @property
    def slot(self) -> int:
        """Elements of one stage: keys and values of a step."""
        return self.n * (pitch(self.k, self.itemsize) + pitch(self.head_dim_v, self.itemsize))

    @property
    def shared_elements(self) -> int:
        """Elements of shared memory a block has."""
        queries = self.m * pitch(self.k, self.itemsize)
        if self.a_copy != "rs":
            return self.stages * self.slot + queries
        return (self.stages - 1) * self.slot + max(self.slot, queries)

    @property
    def shared_bytes(self) -> int:
        return self.itemsize * self.shared_elements

    @property
    def registers(self) -> int:
        """About how many registers a thread needs: sums, scores, queries, and all else."""
        if self.tf32_terms:
            # Both parts of 16 terms of the first operand, and sums of those alone, are there besides; of queries in registers both parts are.
            return self.bands * (self.head_dim_v // 2 + self.n // 2 + (self.k if self.a_copy == "rs" else 0) + 24) + 100
        return self.bands * (self.head_dim_v // 2 + self.n // 2 + (self.k // 4 if self.a_copy == "rs" else 8)) + 72

    def blocks_at_once(self, target: Target) -> int:
        """Blocks of one multiprocessor."""
        if self.persistent:
            return 1
        by_registers = target.registers_per_sm // (self.threads * min(255, self.registers))
        by_memory = target.shared_per_sm // (self.shared_bytes + 1024)
        return max(1, min(by_registers, by_memory, target.threads_per_sm // self.threads))

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        return Accumulator("mma", (16, 8, 32 // operand.itemsize), (self.warps_m, 1))

    def refusal(self, target: Target, operand: DType) -> str:
        fits = self.warps_m in (1, 2, 4, 8, 16) and self.m in (TERMS * self.warps_m, 2 * TERMS * self.warps_m)
        if not fits or self.stages not in (2, 3, 4) or self.n % TERMS or not 16 <= self.n <= 256 or self.prefetch not in (0, 128, 256):
            return "m = 16 or 32 * warps_m, which is a power of two, 2 to 4 stages, n a multiple of 16, and prefetch 0, 128 or 256"
        return "" if self.tf32_terms in (0, 1, 3, 4) else "tf32_terms is 0 for elements of two bytes, 1, 3 or 4 for f32"

    def has_room(self, target: Target) -> bool:
        if min(self.m, self.k) < 1 or self.threads > target.max_threads or not 2 <= self.stages <= 4:
            return False
        fits = self.n % TERMS == 0 and 16 <= self.n <= 256
        return fits and self.shared_bytes <= target.max_shared and self.registers <= target.max_registers


@record
class CpuAttention(MatrixSchedule):
    """SIMD arithmetic: rows along registers. `k` is what there is room for of terms and columns."""

    family: ClassVar[str] = "cpu_attention"

    mr: int = 0
    nr: int = 0
    """Keys, and rows, of scores held in registers at once."""
    vectors: int = 1
    """SIMD registers along `nr`."""
    splits: int = 0
    """Blocks to have at once, for few rows: those of one row have parts of the keys, which are then added up; 0: all keys of a row in one block."""

    @property
    def to_tile(self) -> str:
        return "lower_attention_cpu"

    @property
    def local_bytes(self) -> int:
        """Memory of a thread: rows and their sums, keys and values of a step, and its weights."""
        return 4 * (2 * self.m * self.k + 2 * self.m + 2 * self.n * self.k + self.n * self.nr)

    def layout(self, operand: DType, total: DType) -> Accumulator | Blocked:
        return Blocked((1, self.nr // self.vectors), (1, 1), (1, 1))

    def refusal(self, target: Target, operand: DType) -> str:
        lanes = target.vector_bytes // 4
        fits = min(self.m, self.n, self.k, self.mr, self.vectors) > 0 and self.nr == self.vectors * lanes
        if fits and self.m % self.nr == 0 and self.n % (2 * self.mr) == 0:
            return ""
        return f"nr = {lanes} * vectors, m a multiple of nr and n one of 2 * mr"

    def has_room(self, target: Target) -> bool:
        return not self.refusal(target, f32)


AttentionSchedule = WgmmaAttention | MmaAttention | CpuAttention
