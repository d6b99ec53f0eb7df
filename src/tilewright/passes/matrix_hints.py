"""What a kernel's attributes say about its contractions, held against the loops and the schedules there are.

`@kernel matmul` promises a contraction: loops that are none are an error at the attribute's kernel. `@tile(128, 256)`, `@workgroup(384)` and
`@shared(65536)` are wishes: the best schedule that has them is taken, or the best of all where none has; with `@strict` that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.analysis.contraction import find_contraction
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.ir.program import Program
from tilewright.passes.schedule_matrix import MatrixSchedule
from tilewright.tree.metadata import CONTRACTIONS, KernelMetadata


def check_kind(metadata: KernelMetadata, program: Program) -> None:
    """A kernel called a contraction must be one."""
    if metadata.kind not in CONTRACTIONS or any(find_contraction(call.kernel) is not None for call in program.calls):
        return
    raise UserError.at(
        "TW012", f"@kernel {metadata.kind.value}, but the loops are no such thing: nothing adds up products of two factors, one that varies along "
        "some results and one along others", program.span, "add up a[i, k] * b[k, j] over k and store the sum, or name another @kernel kind",
    )  # fmt: skip


def preferred(found: Sequence[MatrixSchedule], metadata: KernelMetadata, target: Target, span: Span) -> MatrixSchedule:
    """The best schedule that has what the attributes ask for."""
    fitting = [s for s in found if _fits(s, metadata)]
    if fitting:
        return fitting[0]
    if metadata.strict:
        tiles = ", ".join(dict.fromkeys(f"{s.m}x{s.n}" for s in found))
        threads = ", ".join(dict.fromkeys(str(s.threads) for s in found))
        asked = ", ".join(line for line in metadata.lines() if line.startswith(("@tile", "@workgroup", "@shared")))
        raise TargetLimit.at(
            "TW020", f"no schedule for {target.name} has {asked}", span,
            f"tiles are {tiles}, threads {threads}; without @strict the best one is taken",
        )  # fmt: skip
    return found[0]


def _fits(schedule: MatrixSchedule, metadata: KernelMetadata) -> bool:
    given = [number for _, number in metadata.hints.tile]
    names = {name: number for name, number in metadata.hints.tile if not name.isdigit()}
    own = {"m": schedule.m, "n": schedule.n, "k": schedule.k}
    if any(own.get(name) != number for name, number in names.items()):
        return False
    if given and not names and given != [schedule.m, schedule.n, schedule.k][: len(given)]:
        return False
    if metadata.workgroup_size is not None and prod(metadata.workgroup_size) != schedule.threads:
        return False
    limit = metadata.shared_memory_bytes
    # A step of warp-group instructions is a row of 128 bytes.
    step = 128 if schedule.family == "wgmma" else schedule.k * 4
    return not limit or schedule.stages * (schedule.m + schedule.n) * step <= limit
