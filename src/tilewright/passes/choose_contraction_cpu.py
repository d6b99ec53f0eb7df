"""Choose how a contraction is computed on a CPU: the tile of results in registers, and the blocks that stay in the caches."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.contraction import Contraction, Factor
from tilewright.base.dtypes import f32, f64, i32, i64, u32, u64
from tilewright.base.target import Target
from tilewright.passes.lower_contraction_cpu import needed_ops
from tilewright.passes.schedule_matrix import MatrixSchedule

ACCUMULATORS = (f32, f64, i32, i64, u32, u64)
PANEL_BYTES = 1 << 20
"""How much of the second factor lies in the second-level cache at once."""
SUM_BYTES = 9 << 19
"""How much of the result is kept between two stretches of the sum."""


def cpu_schedules(found: Contraction, target: Target, hints: Mapping[str, int]) -> tuple[MatrixSchedule, ...]:
    """The schedule for a contraction, or none where plain loops serve it."""
    dtype = found.accumulator
    if dtype not in ACCUMULATORS or target.vector_bytes < 16 or not all(_copyable(found, f) for f in (found.a, found.b)):
        return ()
    if any(op.opcode == "atomic" for op in found.parallel.regions[0].ops):
        return ()
    lanes = target.vector_bytes // dtype.itemsize
    rows, vectors = _register_tile(target)
    nr = vectors * lanes
    depth = 512 * 4 // max(4, dtype.itemsize)
    columns = max(1, PANEL_BYTES // (depth * dtype.itemsize * nr)) * nr
    height = max(1, SUM_BYTES // (columns * dtype.itemsize * rows)) * rows
    return (MatrixSchedule("cpu", height, columns, depth, mr=rows, nr=nr, vectors=vectors),)


def _copyable(found: Contraction, factor: Factor) -> bool:
    wanted = [factor.value] if factor.guard is None else [factor.value, factor.guard]
    return needed_ops(found, wanted) is not None


def _register_tile(target: Target) -> tuple[int, int]:
    """Rows, and registers along a row: all registers but those for the operands."""
    if target.vector_bytes == 64:
        return 14, 2  # 32 registers
    if target.name.startswith("aarch64"):
        return 8, 3  # 32 registers
    return 6, 2  # 16 registers
