"""Choose how a chain of reductions around two products is computed on a CPU: rows along SIMD registers, keys of a step, rows of a block.

In: a loop-stage kernel and the target. Out: schedules (`family=cpu_attention`), best first; none where the kernel is no such chain.
One kernel serves all sizes, so nothing here depends on them.
"""

from __future__ import annotations

from tilewright.analysis.online import find_online
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.types import dtype_of
from tilewright.passes.schedule_matrix import MatrixSchedule

ROOM = 1024
"""Terms of a score and columns of the values there is room for."""
STEP = 60
"""Keys of a step: the weights of a strip, and the values, stay in the nearest cache."""
STRIPS = 2
"""Strips of a block, which share copies of keys and values."""


def cpu_attention_schedules(kernel: Kernel, target: Target) -> tuple[MatrixSchedule, ...]:
    """The schedule for the chain the kernel is."""
    found = find_online(kernel)
    if found is None or target.vector_bytes < 16:
        return ()
    if any(dtype_of(op.result.type).itemsize > 4 for op in (found.query, found.key, found.value)):
        return ()
    many = target.vector_bytes == 64 or target.name.startswith("aarch64")
    vectors = 4 if many else 2  # of 32 registers, or 16
    nr = vectors * (target.vector_bytes // 4)
    return (MatrixSchedule("cpu_attention", STRIPS * nr, STEP, ROOM, mr=6, nr=nr, vectors=vectors),)
