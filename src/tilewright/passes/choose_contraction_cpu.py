"""Choose how a contraction is computed on a CPU: the tile of results in registers, and the blocks that stay in the caches."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.contraction import Contraction, Factor
from tilewright.base.dtypes import f32, f64, i32, i64, u32, u64
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.passes.lower_contraction_cpu import needed_ops
from tilewright.passes.schedule_matrix import MatrixSchedule

ACCUMULATORS = (f32, f64, i32, i64, u32, u64)
DEPTH = 256
"""How much of the sum is done before its results go back to memory."""
PANEL_BYTES = 3 << 18
"""How much of the second factor lies in the second-level cache at once."""
ROW_COST = 0.3
"""What a tile costs beside its rows, in rows."""
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
    rows, vectors = _register_tile(target, found.size(found.m), found.size(found.n) * found.size(found.batch), hints)
    nr = vectors * lanes
    depth = DEPTH
    columns = max(1, PANEL_BYTES // (depth * dtype.itemsize * nr)) * nr
    height = max(1, SUM_BYTES // (columns * dtype.itemsize * rows)) * rows
    return (MatrixSchedule("cpu", height, columns, depth, mr=rows, nr=nr, vectors=vectors),)


def _copyable(found: Contraction, factor: Factor) -> bool:
    wanted = [factor.value] if factor.guard is None else [factor.value, factor.guard]
    return needed_ops(found, wanted) is not None


def _register_tile(target: Target, m: Size, rest: Size, hints: Mapping[str, int]) -> tuple[int, int]:
    """Rows, and registers along a row: all registers but those for the operands, or a few rows less where that leaves fewer empty."""
    if target.vector_bytes == 64:
        most, vectors = 14, 2  # 32 registers
    elif target.name.startswith("aarch64"):
        most, vectors = 8, 3  # 32 registers
    else:
        most, vectors = 6, 2  # 16 registers
    if not m.names <= hints.keys():
        return most, vectors
    height = m.evaluate(hints)
    if rest.names <= hints.keys() and rest.evaluate(hints) <= 512:
        height = -(-height // target.multiprocessors)
    if height < 64:
        return most, vectors  # a kernel is compiled for the first sizes it sees: small ones say little
    return min(range(most, most * 3 // 4, -1), key=lambda rows: -(-height // rows) * (rows + ROW_COST)), vectors
