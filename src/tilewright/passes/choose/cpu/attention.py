"""Choose how attention is computed on a CPU: rows along SIMD registers, keys of a step, rows of a block.

In: a loop-stage kernel and the target. Out: schedules (`family=cpu_attention`), best first; none where the kernel is no attention.
One kernel serves all sizes, but for few rows with many keys: those are cut into parts of the keys, as many as keep all cores busy.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.attention import Attention
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, is_watched
from tilewright.ir.types import dtype_of
from tilewright.passes.common.split_form import find_split
from tilewright.passes.schedules.attention import CpuAttention

ROOM = 1024
"""Terms of a score and columns of the values there is room for."""
LARGE = 1 << 12
FEW_ROWS = 16
MANY_KEYS = 512
"""From which on few rows have their keys in parts."""


def numbers_of(found: Attention, hints: Mapping[str, int]) -> tuple[int, int, int]:
    """Batch points, rows and keys of the call."""

    def number(size: Size) -> int:
        return size.evaluate(hints) if size.names <= hints.keys() else LARGE

    batch = 1
    for position in found.batch:
        batch *= number(found.extents[position])
    return batch, number(found.extents[found.row]), number(found.keys)


def has_few_rows(found: Attention, hints: Mapping[str, int]) -> bool:
    """Whether blocks of whole rows would be few, and have few rows and many keys."""
    _, rows, keys = numbers_of(found, hints)
    return rows <= FEW_ROWS and keys >= MANY_KEYS and found.grain == 1


def cpu_attention_schedules(kernel: Kernel, found: Attention | None, target: Target, hints: Mapping[str, int]) -> tuple[CpuAttention, ...]:
    """The schedule for the attention the kernel is, as `find_attention` has it."""
    if target.vector_bytes < 16:
        return ()
    splits = 0
    only_in_parts = found is None or found.count is not None or found.gathers or is_watched(kernel)
    if found is None or only_in_parts or _leaves_cores_idle(found, target, hints):
        form = find_split(kernel)
        if form is None and only_in_parts:
            return ()
        if form is not None:
            found, splits = form.found, 4 * target.multiprocessors
    assert found is not None
    if any(dtype_of(op.result.type).itemsize > 4 for op in (found.query, found.key, found.value)):
        return ()
    many = target.vector_bytes == 64 or target.name.startswith("aarch64")
    vectors = 4 if many else 2  # of 32 registers, or 16
    nr, costs = vectors * (target.vector_bytes // 4), target.costs.caches
    strips = [CpuAttention(count * nr, costs.attention_step, ROOM, mr=6, nr=nr, vectors=vectors, splits=splits) for count in range(costs.attention_strips, 0, -1)]
    # A thread's memory is what the device gives it.
    return (next((s for s in strips if s.local_bytes <= (target.max_local or s.local_bytes)), strips[-1]),)


def _leaves_cores_idle(found: Attention, target: Target, hints: Mapping[str, int]) -> bool:
    return has_few_rows(found, hints) and numbers_of(found, hints)[0] < target.multiprocessors
