"""Loop stage -> tile stage for products with few rows (`schedules/gemv.py`).

In: a loop-stage kernel whose sums walk rows of one array, and a `Gemv`. Out: a tile-stage kernel. The nest is cut as any other is
(`lower_loops`): a block has `n` rows of w and `m` rows of x, and tiles along the sum. What is particular is how threads hold those tiles, which is
`lower_row_dots`' to say.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.lower_loops import lower_loops


def lower_gemv(kernel: Kernel, schedule: Gemv, target: Target) -> Kernel:
    """The tile-stage kernel."""
    parallel = next(op for op in kernel.body.ops if op.opcode == "parallel")
    tiles = [1] * len(parallel.operands)
    tiles[schedule.n_index] = schedule.n
    if schedule.m_index >= 0:
        tiles[schedule.m_index] = schedule.m
    cut = Schedule(tuple(tiles), schedule.k // schedule.unit, schedule.vector, vector_on_reduction=True, threads=schedule.threads)
    lowered = lower_loops(kernel, cut, target)
    attrs = {**lowered.attrs, "schedule": schedule.describe()}
    if schedule.resident:
        attrs["min_blocks"] = schedule.resident
    if schedule.stages > 1:
        attrs["row_stages"] = schedule.stages
    if schedule.is_row_matrix:
        attrs["row_matrix"] = True
    if schedule.pdl:
        attrs["early"] = True
    return replace(lowered, attrs=MappingProxyType(attrs))
