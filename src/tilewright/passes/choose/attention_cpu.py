"""Choose how attention is computed on a CPU: rows along SIMD registers, keys of a step, rows of a block.

In: a loop-stage kernel and the target. Out: schedules (`family=cpu_attention`), best first; none where the kernel is no attention.
One kernel serves all sizes, so nothing here depends on them.
"""

from __future__ import annotations

from tilewright.analysis.attention import find_attention
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.types import dtype_of
from tilewright.passes.schedules.attention import CpuAttention

ROOM = 1024
"""Terms of a score and columns of the values there is room for."""


def cpu_attention_schedules(kernel: Kernel, target: Target) -> tuple[CpuAttention, ...]:
    """The schedule for the attention the kernel is."""
    found = find_attention(kernel)
    if found is None or target.vector_bytes < 16:
        return ()
    if any(dtype_of(op.result.type).itemsize > 4 for op in (found.query, found.key, found.value)):
        return ()
    many = target.vector_bytes == 64 or target.name.startswith("aarch64")
    vectors = 4 if many else 2  # of 32 registers, or 16
    nr, costs = vectors * (target.vector_bytes // 4), target.costs.caches
    return (CpuAttention(costs.attention_strips * nr, costs.attention_step, ROOM, mr=6, nr=nr, vectors=vectors),)
