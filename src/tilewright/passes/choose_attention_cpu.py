"""Choose how a chain of reductions around two products is computed on a CPU: rows along SIMD registers, keys of a step, rows of a block.

In: a loop-stage kernel and the target. Out: schedules (`family=cpu_attention`), best first; none where the kernel is no such chain.
One kernel serves all sizes, so nothing here depends on them.
"""

from __future__ import annotations

from tilewright.analysis.online import find_online
from tilewright.base.errors import UserError
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.types import dtype_of
from tilewright.passes.schedule_matrix import MatrixSchedule

ROOM = 1024
"""Terms of a score and columns of the values there is room for."""
STEP = 48
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


def forced_on_cpu(asked: MatrixSchedule, like: MatrixSchedule, text: str, kernel: Kernel) -> MatrixSchedule:
    """The schedule somebody asked for, where it can be used; `like` is one that can."""
    lanes = like.nr // like.vectors
    parts = (asked.m, asked.n, asked.k, asked.mr, asked.vectors)
    fits = min(parts) > 0 and asked.nr == asked.vectors * lanes and asked.m % asked.nr == 0 and asked.n % (2 * asked.mr) == 0
    if not fits or asked.family != like.family:
        raise UserError.at(
            "TW020", f"schedule '{text}' does not fit {kernel.name}", kernel.span,
            f"it needs family={like.family}, nr = {lanes} * vectors, m a multiple of nr and n one of 2 * mr",
        )  # fmt: skip
    return asked
