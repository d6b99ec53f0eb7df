"""What became of every attribute that asks for something of a schedule.

In: the attributes, the schedules that were chosen and the kernels they were lowered to. Out: for each attribute whether it was followed, and
why not. `tilewright inspect` prints it; with `@strict` what was not followed is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.base import levels
from tilewright.base.errors import TargetLimit
from tilewright.base.record import record
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.program import Program
from tilewright.ir.types import dtype_of
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import GpuProduct, MatrixSchedule
from tilewright.tree.metadata import KernelMetadata

MATRIX_FAMILIES = frozenset({"wgmma", "mma", "attention", "attention_mma", "amx"})
"""Families of schedules with matrix instructions."""
_NOT_ON_CPU = "a CPU has no such thing"


@record
class Fate:
    """What became of one attribute."""

    attribute: str
    """As it was written."""
    followed: bool
    text: str


def fates(metadata: KernelMetadata, schedules: Sequence[object], program: Program, target: Target) -> tuple[Fate, ...]:
    """One line for each attribute that asks for something; `program` is at the thread stage."""
    found: list[Fate] = []
    matrix = [s for s in schedules if isinstance(s, MatrixSchedule)]
    loops = [s for s in schedules if isinstance(s, Schedule)]
    kernels = [call.kernel for call in program.calls]
    threads = ", ".join(dict.fromkeys(str(k.threads) for k in kernels))
    lines = {line.partition("(")[0][1:]: line for line in metadata.lines()}

    def add(name: str, followed: bool, text: str, gpu: bool = False) -> None:
        if gpu and not target.simt:
            followed, text = False, _NOT_ON_CPU
        found.append(Fate(lines[name], followed, text))

    if metadata.workgroup_size is not None:
        asked = prod(metadata.workgroup_size)
        kept = any(k.threads == asked for k in kernels)
        add("workgroup", kept, f"blocks have {threads} threads" + ("" if kept else f": of {asked} none can be made here"), gpu=True)
    if metadata.hints.tile:
        shown = ", ".join([*(s.describe() for s in matrix), *(s.describe() for s in loops)])
        add("tile", any(has_tile(s, metadata) for s in matrix) or any(_loop_tile(s, metadata) for s in loops), f"the schedule is {shown}")
    if metadata.shared_memory_bytes:
        most = max((s.staged_bytes for s in matrix), default=0)
        taken = f"operands take about {most} bytes" if matrix else "nothing is staged in shared memory but what threads of a block exchange"
        add("shared", most <= metadata.shared_memory_bytes, taken, gpu=True)
    if metadata.hints.vector_width is not None:
        widths = ", ".join(dict.fromkeys(str(s.vector) for s in loops))
        add("vector", any(s.vector == metadata.hints.vector_width for s in loops), f"vectors have {widths} elements" if loops else "matrix schedules have their own")
    if metadata.hints.unroll_factor is not None:
        count = sum(op.attrs.get("unroll") == metadata.hints.unroll_factor for k in kernels for op in walk(k.body))
        add("unroll", count > 0, f"{count} loop(s) of the code are unrolled so" if count else "no loop is left in the code")
    if metadata.max_registers:
        kept = all(k.attrs.get("max_registers") == metadata.max_registers for k in kernels)
        add("max_registers", kept, "the assembler is told" if kept else "warp groups of this schedule share out registers themselves", gpu=True)
    if metadata.optimize:
        add("optimize", *levels.fate(metadata.optimize, target))
    if metadata.hints.use_tensor_cores:
        used = any(s.family in MATRIX_FAMILIES for s in matrix)
        add("tensor_cores", used, f"the schedule is {matrix[0].describe()}" if used else _why_no_matrix(matrix, kernels, metadata))
    if metadata.hints.async_copy:
        used = any(copies_asynchronously(s) for s in matrix)
        add("async_copy", used, f"the schedule is {matrix[0].describe()}" if used else "only operands of contractions and attention are staged", gpu=True)
    return tuple(found)


def _why_no_matrix(matrix: Sequence[MatrixSchedule], kernels: Sequence[Kernel], metadata: KernelMetadata) -> str:
    floats = {dtype_of(p.type).name for k in kernels for p in k.params if dtype_of(p.type).is_float}
    if not matrix:
        return "nothing here is a sum of products that is computed by tiles"
    if "f32" in floats and metadata.precision == "ieee":
        return "@precision(ieee) keeps multiply-adds of f32: leave it out, or write @precision(tf32)"
    if "f32" in floats and not metadata.precision:
        return "multiply-adds of f32 are thought to be faster here than three products of tf32: write @precision(tf32) for one"
    return "no matrix instruction of this target takes these operands"


def has_tile(schedule: MatrixSchedule, metadata: KernelMetadata) -> bool:
    """Whether a matrix schedule has the tile that is asked for."""
    given = [number for _, number in metadata.hints.tile]
    names = {name: number for name, number in metadata.hints.tile if not name.isdigit()}
    own = {"m": schedule.m, "n": schedule.n, "k": schedule.k}
    if "attention" in schedule.family:
        own |= {"block_q": schedule.m, "block_kv": schedule.n}
    if names:
        return all(own.get(name) == number for name, number in names.items())
    return given == [schedule.m, schedule.n, schedule.k][: len(given)]


def _loop_tile(schedule: Schedule, metadata: KernelMetadata) -> bool:
    given = [number for name, number in metadata.hints.tile if name.isdigit()]
    return bool(given) and list(schedule.tiles[: len(given)]) == given


def copies_asynchronously(schedule: MatrixSchedule) -> bool:
    """Whether operands of a schedule come by the copy engine or by `cp.async`."""
    from tilewright.passes.schedules.attention import GpuAttention

    if isinstance(schedule, GpuAttention):
        return True
    return isinstance(schedule, GpuProduct) and schedule.stages > 1 and "threads" not in (schedule.a_copy, schedule.b_copy)


def check_strict(metadata: KernelMetadata, found: Sequence[Fate], target: Target, span: Span) -> None:
    """With `@strict` every wish is followed, or the kernel is refused."""
    for fate in found if metadata.strict else ():
        if not fate.followed:
            raise TargetLimit.at(
                "TW020", f"no schedule for {target.name} has {fate.attribute}", span, f"{fate.text}; without @strict the best one is taken"
            )
