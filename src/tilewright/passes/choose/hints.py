"""What a kernel's attributes say about its contractions, held against the loops and the schedules there are.

`@kernel matmul` promises a contraction: loops that are none are an error at the attribute's kernel. `@tile(128, 256)`, `@workgroup(384)` and
`@shared(65536)` are wishes: the best schedule that has them is taken, or the best of those that have most of them; with `@strict` that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import f16
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.ir.program import Program
from tilewright.passes.choose.fates import MATRIX_FAMILIES, copies_asynchronously, has_tile
from tilewright.passes.schedules.attention import CpuAttention, MmaAttention, WgmmaAttention
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.tree.metadata import CONTRACTIONS, KernelKind, KernelMetadata


def check_kind(metadata: KernelMetadata, program: Program) -> None:
    """A kernel called a contraction must be one."""
    grouped = metadata.kind is KernelKind.CONV2D and "groups" in dict(metadata.params)
    if metadata.kind not in CONTRACTIONS or grouped or any(find_contraction(call.kernel) is not None for call in program.calls):
        return
    raise UserError.at(
        "TW012", f"@kernel {metadata.kind.value}, but the loops are no such thing: nothing adds up products of two factors, one that varies along "
        "some results and one along others", program.span, "add up a[i, k] * b[k, j] over k and store the sum, or name another @kernel kind",
    )  # fmt: skip


def preferred(found: Sequence[MatrixSchedule], metadata: KernelMetadata, target: Target, span: Span) -> MatrixSchedule:
    """The best schedule that has what the attributes ask for, or most of it."""
    known = (*found, *_retiled(found, metadata, target))
    lacking = [_lacking(s, metadata, target) for s in known]
    if metadata.strict and min(lacking):
        tiles = ", ".join(dict.fromkeys(f"{s.m}x{s.n}" for s in found))
        threads = ", ".join(dict.fromkeys(str(s.threads) for s in found))
        asked = ", ".join(line for line in metadata.lines() if line.startswith(("@tile", "@workgroup", "@shared", "@tensor_cores", "@async_copy")))
        raise TargetLimit.at(
            "TW020", f"no schedule for {target.name} has {asked}", span,
            f"tiles are {tiles}, threads {threads}; without @strict the best one is taken",
        )  # fmt: skip
    return known[lacking.index(min(lacking))]


def _retiled(found: Sequence[MatrixSchedule], metadata: KernelMetadata, target: Target) -> list[MatrixSchedule]:
    """Schedules of attention with the tile that `@tile(block_q=, block_kv=)` asks for, where the cost model lists none."""
    asked = dict(metadata.hints.tile)
    made: list[MatrixSchedule] = []
    for schedule in found if asked.keys() & {"block_q", "block_kv"} else ():
        rows, keys = asked.get("block_q", schedule.m), asked.get("block_kv", schedule.n)
        if isinstance(schedule, WgmmaAttention):
            new: MatrixSchedule = replace(schedule, m=rows, n=keys, math_warpgroups=max(1, rows // 64))
        elif isinstance(schedule, MmaAttention):
            new = replace(schedule, m=rows, n=keys, warps_m=max(1, rows * schedule.warps_m // schedule.m))
        elif isinstance(schedule, CpuAttention):
            new = replace(schedule, m=rows, n=keys)
        else:
            continue
        if not new.refusal(target, f16) and new.has_room(target):
            made.append(new)
    return made


def _lacking(schedule: MatrixSchedule, metadata: KernelMetadata, target: Target) -> int:
    """How many of the wishes a schedule does not have."""
    return sum((
        bool(metadata.hints.tile) and not has_tile(schedule, metadata),
        metadata.hints.use_tensor_cores and schedule.family not in MATRIX_FAMILIES,
        metadata.hints.async_copy and target.simt and not copies_asynchronously(schedule),
        metadata.workgroup_size is not None and prod(metadata.workgroup_size) != schedule.threads,
        bool(metadata.shared_memory_bytes) and schedule.staged_bytes > metadata.shared_memory_bytes,
    ))  # fmt: skip
