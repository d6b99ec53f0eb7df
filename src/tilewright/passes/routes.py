"""The ways through the orders of passes: from a tree, blocks, explicit kernels or primitives to the thread stage.

In: what a front end or a primitive built, and a target. Out: programs of thread-stage kernels, which code generators take. `pipeline.py` holds the
orders themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.ir.verify import verify_program
from tilewright.passes.common.fusion_report import FusionReport
from tilewright.passes.pipeline import ORDERS, PART_PHASES
from tilewright.passes.runner import PassContext, Trace, run_on_program, run_order
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.passes.schedules.plans import Plans
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.metadata import KernelMetadata
from tilewright.tree.typed import TypedKernel

if TYPE_CHECKING:
    from tilewright.passes.late.bounds_checks import Site


@record
class Stages:
    """The program after each stage; schedules one per kernel of `tile`. One of `thread` may be several of these (`launch_together`)."""

    loop: Program
    tile: Program
    thread: Program
    schedules: tuple[Schedule | MatrixSchedule, ...]


def from_tree(typed: TypedKernel, trace: Trace, order: str = "kernel") -> Program:
    """The loop-stage program of a checked kernel."""
    first, *rest = ORDERS[order]
    program, context = run_on_program(first.only_pass, typed, PassContext(metadata=typed.metadata), trace)
    return run_order(rest, program, context, trace)[0]


def from_block(typed: TypedKernel, trace: Trace) -> Program:
    """The loop-stage program of one block of a graph."""
    return run_on_program(ORDERS["blocks"][0].only_pass, typed, PassContext(), trace)[0]


def join_blocks(graph: BlockGraph, programs: tuple[Program, ...], trace: Trace, metadata: KernelMetadata | None = None) -> Program:
    """The loop-stage program of a graph of blocks, from those of its blocks."""
    _, link, *rest = ORDERS["blocks"]
    program, context = run_on_program(link.only_pass, graph, PassContext(programs=programs, metadata=metadata), trace)
    return run_order(rest, program, context, trace)[0]


def check_accesses(program: Program, checks: str, metadata: KernelMetadata | None, trace: Trace) -> Program:
    """The program as written, with marks on what is checked as it runs: `all` accesses or only `stores`, but for kernels that say `@unchecked`."""
    return run_order(ORDERS["index checks"], program, PassContext(checks=checks, metadata=metadata), trace)[0]


def fuse_kernels(program: Program, trace: Trace) -> tuple[Program, FusionReport]:
    """The program as written with kernels joined where that saves memory traffic, and what was joined."""
    nothing = FusionReport((), (), len(program.calls), len(program.calls))
    if len(program.calls) == 1:
        return program, nothing
    fused, context = run_order(ORDERS["fusion"], program, PassContext(), trace)
    return fused, context.fusion or nothing


def specialise(program: Program, sizes: Mapping[str, int], trace: Trace) -> Program:
    """The program with these sizes as constants."""
    return run_order(ORDERS["sizes"], program, PassContext(sizes=sizes), trace)[0] if sizes else program


def prepare(
    program: Program, trace: Trace, target: Target | None = None, sizes: Mapping[str, int] | None = None, later: frozenset[str] = frozenset(), given: str = ""
) -> Program:
    """The loop stage's passes that need no schedule; without a target, as far as all targets have them. `later`: sizes with whose numbers all of them run again."""
    return run_order(ORDERS["loop"], program, PassContext(target, sizes=sizes or {}, later=later, given=given), trace)[0]


def plan_calls(
    program: Program, target: Target, sizes: Mapping[str, int], trace: Trace, given: str = "", metadata: KernelMetadata | None = None
) -> Plans:
    """The schedule of each call of a prepared program that is planned for its sizes; None for all others."""
    context = PassContext(target, sizes=sizes, given=given, metadata=metadata)
    return run_order(ORDERS["plan"], program, context, trace)[1].plans


def lower(program: Program, target: Target, hints: Mapping[str, int] | None = None, trace: Trace | None = None) -> Stages:
    """All the way from the loop stage to the thread stage."""
    trace, sizes = trace or Trace(), hints or {}
    loop = prepare(fuse_kernels(program, trace)[0], trace, target, sizes)
    return lower_planned(loop, plan_calls(loop, target, sizes, trace), target, sizes, trace)


def lower_planned(
    program: Program, plans: Plans, target: Target, hints: Mapping[str, int], trace: Trace, metadata: KernelMetadata | None = None
) -> Stages:
    """From the prepared loop stage to the thread stage."""
    loop, context = run_order(ORDERS["program"], program, PassContext(target, plans=plans, hints=hints, metadata=metadata), trace)
    tile, context = run_order(ORDERS["tile"], loop, context, trace)
    thread, context = run_order(ORDERS["thread"], tile, context, trace)
    if context.phases:
        tile, _ = run_on_program(PART_PHASES, tile, context, trace)
    return Stages(loop, tile, thread, tuple(schedule for schedule in context.plans if schedule is not None))


def arrange_launches(program: Program, target: Target, hints: Mapping[str, int], sizes: Mapping[str, int], trace: Trace) -> Program:
    """The thread stage's kernels with short ones launched together, and early; `sizes` are those of the call where code is made for these."""
    if not target.simt or len(program.calls) < 2 or program.loops:
        return program
    return run_order(ORDERS["launches"], program, PassContext(target, hints={**hints, **sizes}, sizes=sizes), trace)[0]


def merge_steps(program: Program, target: Target, trace: Trace, loop: Program | None = None, hints: Mapping[str, int] | None = None) -> Program:
    """The thread stage's kernels with those of an ordered loop as one; `loop` is the same program at the loop stage."""
    context = PassContext(target, loop=loop, hints=hints or {})
    return run_order(ORDERS["ordered loops"], program, context, trace)[0] if program.loops else program


def merge_launches(program: Program, trace: Trace) -> Program:
    """The thread stage's kernels as one."""
    return run_order(ORDERS["one launch"], program, PassContext(), trace)[0]


def share_memory(thread: Program, loop: Program, trace: Trace) -> Program:
    """The thread-stage program with scratch arrays in common memory; `loop` is the same at the loop stage."""
    return run_order(ORDERS["memory"], thread, PassContext(loop=loop), trace)[0] if thread.scratch else thread


def watch_accesses(program: Program, trace: Trace) -> tuple[Program, tuple[Site, ...]]:
    """An explicit kernel with bounds checks, and the accesses they watch."""
    checked, context = run_order(ORDERS["explicit checks"], program, PassContext(), trace)
    return checked, context.sites


def lower_explicit(program: Program, target: Target, trace: Trace) -> Program:
    """An explicit kernel as it becomes code for the target, and as the emulator runs it."""
    verify_program(program)
    return run_order(ORDERS["explicit"], program, PassContext(target), trace)[0]


def lower_critical(program: Program, target: Target, trace: Trace) -> Program:
    """A critical function as its code generator takes it."""
    verify_program(program)
    return run_order(ORDERS["critical"], program, PassContext(target), trace)[0]


def address_explicit(program: Program, target: Target, trace: Trace) -> Program:
    """An explicit kernel for a GPU after the last step before code: how addresses and indices are computed."""
    return run_order(ORDERS["explicit addresses"], program, PassContext(target), trace)[0] if target.simt else program


def lower_primitive(program: Program, target: Target, trace: Trace) -> Program:
    """The program of a primitive as code generators and the emulator take it."""
    verify_program(program)
    return run_order(ORDERS["primitives"], program, PassContext(target), trace)[0]


def legalise(program: Program, target: Target, trace: Trace) -> Program:
    """A thread-stage program with nothing that a portable GPU lacks."""
    _, *rest = ORDERS["portable"]
    order = ORDERS["portable"] if "f64" in target.missing_dtypes else rest
    return run_order(order, program, PassContext(target), trace)[0]


def lower_function(typed: TypedKernel, trace: Trace) -> Kernel:
    """A function that is given to a primitive, as a loop-stage kernel over arrays."""
    (call,) = from_tree(typed, trace, "functions").calls
    return call.kernel
