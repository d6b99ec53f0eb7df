"""Schedules of contractions for warp-level matrix instructions (`mma`) and plain multiply-adds (`fma`), on any NVIDIA GPU.

In: a contraction, its sizes and the target. Out: schedules, best first by a model that counts rounds of tiles: a
multiprocessor that has several blocks finishes them together, and the last round costs as much as a full one. Thin products
(a side of eight or fewer) are left to the reductions, which read each operand once.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis import divisors
from tilewright.analysis.contraction import Contraction, Factor, plane
from tilewright.base.dtypes import DType, f32, f64
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.ops_matrix import MMA_SHAPES, accumulator_dtype
from tilewright.passes.schedule_matrix import MatrixSchedule

THIN = 8
"""The longest side of a product that is left to the reductions."""
_SMALL = 1 << 12
"""Products below which nothing is gained by tiles."""


def mma_schedules(
    kernel: Kernel, found: Contraction, target: Target, batch: int, m: int, n: int, k: int
) -> tuple[MatrixSchedule, ...]:
    """Schedules, best first; none where ordinary loops serve the product as well."""
    if target.kind != "nvptx" or min(m, n) <= THIN or batch * m * n * k < _SMALL or found.accumulator.is_small_float:
        return ()
    precision = str(kernel.attrs.get("precision", "ieee"))
    operand = found.a.dtype if found.a.dtype is found.b.dtype else found.accumulator
    if by_matrix(operand, found.accumulator, precision, target):
        in_vectors = all(reads_vectors(kernel, found, factor) for factor in (found.a, found.b))
        candidates = _mma(operand, precision, in_vectors)
    else:
        lies = plane(found, found.b)
        along = lies is not None and found.b.tensor is not None and lies.k == found.b.tensor.rank - 1
        candidates = _fma(found.accumulator, along)
    fitting = [s for s in candidates if shared_bytes(s, operand, found.accumulator) <= target.max_shared]
    return tuple(sorted(fitting, key=lambda s: cost(s, target, batch, m, n, k)))


def reads_vectors(kernel: Kernel, found: Contraction, factor: Factor) -> bool:
    """Whether a factor is a plain load whose neighbours in memory can be read 16 bytes at a time."""
    tensor = factor.tensor
    if tensor is None or tensor.align < 16 or tensor.strides[-1] != ONE:
        return False
    size = tensor.dtype.itemsize
    if any(divisors.of_size(stride, kernel.facts) * size % 16 for stride in tensor.strides[:-1]):
        return False
    last = found.access(factor)[-1]
    side = found.m if factor is found.a else found.n
    moving = [v for v in last.values if v in found.indices or v in found.k]
    if len(moving) != 1 or last.factor(moving[0]) != ONE:
        return False
    sides = (
        ([found.indices[p] for p in side], [found.extents[p] for p in side]),
        (list(found.k), list(found.reduce_extents)),
    )
    # Of several indices walked as one, neighbours are those along the innermost, as far as it goes.
    return any(
        moving == indices[-1:] and (len(indices) == 1 or divisors.of_size(extents[-1], kernel.facts) * size % 16 == 0)
        for indices, extents in sides
    )


def by_matrix(operand: DType, total: DType, precision: str, target: Target) -> bool:
    """Whether there is a matrix instruction that is faster than arithmetic."""
    if "bf16" not in target.features or operand.name not in MMA_SHAPES or accumulator_dtype(operand) is not total:
        return False
    if operand is f64:
        # Where there are few units for f64, matrix instructions have no more of them.
        return target.sm in (80, 90, 100)
    return operand is not f32 or precision != "ieee"


def shared_bytes(schedule: MatrixSchedule, operand: DType, total: DType) -> int:
    """Shared memory of the rings, with their padding, in whichever way the operands lie."""
    size = total.itemsize if schedule.family == "fma" else operand.itemsize
    rows = max(
        (schedule.m + schedule.n) * (schedule.k * size + 16), schedule.k * ((schedule.m + schedule.n) * size + 64)
    )
    return schedule.stages * rows


_MMA = (
    MatrixSchedule("mma", 128, 256, 32, stages=3, warps_m=2, warps_n=4, persistent=False),
    MatrixSchedule("mma", 128, 128, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    MatrixSchedule("mma", 128, 64, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    MatrixSchedule("mma", 64, 128, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    MatrixSchedule("mma", 64, 64, 32, stages=4, warps_m=2, warps_n=2, persistent=False),
    MatrixSchedule("mma", 32, 32, 32, stages=4, warps_m=1, warps_n=2, persistent=False),
)
"""For elements of two bytes; `k` shrinks or grows with the element."""

_MMA_F64 = (
    MatrixSchedule("mma", 128, 64, 16, stages=3, warps_m=4, warps_n=2, persistent=False),
    MatrixSchedule("mma", 64, 64, 16, stages=4, warps_m=2, warps_n=2, persistent=False),
    MatrixSchedule("mma", 32, 32, 16, stages=4, warps_m=1, warps_n=2, persistent=False),
)

_LOOSE = (
    MatrixSchedule("mma", 128, 128, 16, stages=3, warps_m=2, warps_n=4, persistent=False),
    MatrixSchedule("mma", 128, 64, 32, stages=3, warps_m=4, warps_n=2, persistent=False),
    MatrixSchedule("mma", 64, 64, 32, stages=3, warps_m=4, warps_n=2, persistent=False),
    MatrixSchedule("mma", 32, 32, 32, stages=3, warps_m=1, warps_n=2, persistent=False),
)
"""Where elements are brought one at a time: fewer for each thread."""

_FMA = (
    MatrixSchedule("fma", 128, 128, 16, stages=2, warps_m=2, warps_n=2, persistent=False),
    MatrixSchedule("fma", 64, 128, 8, stages=3, warps_m=2, warps_n=2, persistent=False),
    MatrixSchedule("fma", 64, 64, 8, stages=3, warps_m=2, warps_n=1, persistent=False),
    MatrixSchedule("fma", 32, 32, 8, stages=3, warps_m=1, warps_n=1, persistent=False),
)


def _mma(operand: DType, precision: str, in_vectors: bool) -> list[MatrixSchedule]:
    if operand is f64:
        return list(_MMA_F64)
    tiles: tuple[MatrixSchedule, ...] = _MMA if in_vectors else _LOOSE
    if operand is f32 and precision == "3xtf32":
        # Parts of both operands are in registers too: no room for the largest tile.
        tiles = tuple(s for s in tiles if s.n <= 128)
    return [replace(s, k=2 * s.k // operand.itemsize) for s in tiles]


def _fma(total: DType, along: bool) -> list[MatrixSchedule]:
    """`along`: the second factor's rows run along the sum, so that its elements are turned on their way."""
    if total.itemsize == 8:
        wide = MatrixSchedule("fma", 128, 128, 8, stages=3, warps_m=4, warps_n=2, persistent=False)
        return [replace(s, m=s.m // 2) if s.m > 32 else s for s in (wide, *_FMA[1:])]
    return [replace(_FMA[0], k=8, stages=3), *_FMA[1:]] if along else list(_FMA)


def cost(schedule: MatrixSchedule, target: Target, batch: int, m: int, n: int, k: int) -> float:
    """Estimated time, in arbitrary units."""
    tiles = batch * -(-m // schedule.m) * -(-n // schedule.n)
    area = schedule.m * schedule.n
    together = max(1, 256 * 128 // area)
    # Small tiles read their operands more often.
    rate = 1 / (1 + 24 * (1 / schedule.m + 1 / schedule.n))
    rounds = -(-tiles // (target.multiprocessors * together))
    filled = min(together, -(-tiles // target.multiprocessors)) if rounds == 1 else together
    return rounds * filled * area * (k + 64) / rate
