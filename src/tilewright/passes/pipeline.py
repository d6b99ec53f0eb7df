"""The table of contents of the compiler: every pass, in order, from the loop stage to what a code generator takes.

    program fuse                                                   kernels joined, arrays between them gone
    loop    simplify · unblock · hoist · uncarry · empty_rows · collapse · stabilise · contract · narrow      what to compute, merged and shared
    program clip_windows · pad_windows · turn_images · repack · widen_operands · split_reductions · stream_sums · add_counters · one_pass_spread      kernels added before or after
    loop    choose (schedule) · lower_loops                        -> tile
    tile    simplify · assign_layouts · lower_tiles                -> thread (window_sums and lower_windows where windows overlap)
    thread  simplify · narrow_extremes · expand_math · expand_casts · divide_alike · simplify
    program one_launch                                             kernels joined to one that stays, where the author asks for it

Contractions are planned before programs are cut (`plan_contractions`) and have lowerings of their own: lower_contraction, then lower_wgmma or
lower_mma; on a CPU lower_contraction_cpu or lower_contraction_amx. So have chains of a maximum, sums and products (attention): lower_attention,
lower_wgmma_chain or lower_mma_chain; on a CPU lower_attention_cpu. Nests of several products are cut after the first loop passes (part_products), and
products of the same rows joined before anything else is done by plan (join_products; on a CPU lower_products_cpu).

After every pass the kernel is verified; a failure names the pass. With a `Trace` each pass is timed and its output kept.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tilewright.base.errors import CompilerBug, TilewrightError, UserError
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program
from tilewright.ir.text import print_kernel, print_program
from tilewright.ir.verify import verify_kernel
from tilewright.passes.assign_layouts import assign_layouts
from tilewright.passes.centre_squares import centre_squares
from tilewright.passes.choose_attention import attention_schedules, forced_attention
from tilewright.passes.choose_beside import choose_beside, forced_beside, is_small_part, nest_schedules
from tilewright.passes.choose_matrix import forced, matrix_schedules
from tilewright.passes.clip_windows import clip_windows
from tilewright.passes.collapse import collapse
from tilewright.passes.contract import contract
from tilewright.passes.divide_alike import divide_alike
from tilewright.passes.empty_rows import empty_rows
from tilewright.passes.expand_casts import expand_casts
from tilewright.passes.expand_math import expand_math
from tilewright.passes.fuse import FusionReport, fuse
from tilewright.passes.hoist import hoist
from tilewright.passes.join_products import join_products
from tilewright.passes.lower_attention import lower_attention
from tilewright.passes.lower_attention_cpu import lower_attention_cpu
from tilewright.passes.lower_contraction import lower_contraction
from tilewright.passes.lower_contraction_amx import lower_contraction_amx
from tilewright.passes.lower_contraction_cpu import lower_contraction_cpu
from tilewright.passes.lower_loops import lower_loops
from tilewright.passes.lower_mma import lower_mma
from tilewright.passes.lower_mma_chain import lower_mma_chain
from tilewright.passes.lower_products_cpu import lower_products_cpu
from tilewright.passes.lower_tiles import lower_tiles
from tilewright.passes.lower_wgmma import lower_wgmma
from tilewright.passes.lower_wgmma_chain import lower_wgmma_chain
from tilewright.passes.lower_windows import lower_windows
from tilewright.passes.matrix_hints import preferred
from tilewright.passes.narrow import narrow
from tilewright.passes.narrow_extremes import narrow_extremes
from tilewright.passes.one_launch import one_launch
from tilewright.passes.one_pass_spread import one_pass_spread
from tilewright.passes.pad_windows import pad_windows
from tilewright.passes.part_axes import part_axes
from tilewright.passes.part_products import part_products
from tilewright.passes.plans import Plan, Plans
from tilewright.passes.repack import repack
from tilewright.passes.schedule import Schedule, choose, row_schedule
from tilewright.passes.schedule_matrix import ATTENTION, MatrixSchedule, parse_schedule
from tilewright.passes.schedule_windows import window_schedule
from tilewright.passes.simplify import simplify
from tilewright.passes.split_reductions import split_reductions
from tilewright.passes.stabilise import stabilise
from tilewright.passes.stream_sums import stream_sums
from tilewright.passes.tile_counter import add_counters
from tilewright.passes.turn_images import turn_images
from tilewright.passes.unblock import unblock
from tilewright.passes.uncarry import uncarry
from tilewright.passes.widen_operands import widen_operands
from tilewright.passes.window_sums import window_sums
from tilewright.tree.metadata import KernelMetadata


@dataclass
class Trace:
    """What happened: times per pass (seconds) and, when `dump` is a directory, the IR after each pass in files."""

    times: dict[str, float] = field(default_factory=dict)
    dump: str = ""
    count: int = 0

    def record(self, name: str, seconds: float, text: Callable[[], str]) -> None:
        self.times[name] = self.times.get(name, 0.0) + seconds
        if self.dump:
            os.makedirs(self.dump, exist_ok=True)
            with open(os.path.join(self.dump, f"{self.count:02d}-{name}.kir"), "w", encoding="utf-8") as file:
                file.write(text())
            self.count += 1


@record
class Stages:
    """The program after each stage; schedules one per kernel of `tile` and `thread`."""

    loop: Program
    tile: Program
    thread: Program
    schedules: tuple[Schedule | MatrixSchedule, ...]


def run_pass(name: str, kernel: Kernel, function: Callable[[Kernel], Kernel], trace: Trace) -> Kernel:
    """One pass on one kernel, timed and verified."""
    start = time.perf_counter()
    try:
        result = function(kernel)
        verify_kernel(result)
    except CompilerBug as error:
        raise _blame(name, kernel, str(error)) from error
    except TilewrightError:
        raise
    except Exception as error:  # a pass must never leak its own failure as something else
        raise _blame(name, kernel, f"{type(error).__name__}: {error}") from error
    trace.record(name, time.perf_counter() - start, lambda: print_kernel(result))
    return result


def _blame(name: str, kernel: Kernel, reason: str) -> CompilerBug:
    handle, path = tempfile.mkstemp(prefix=f"tilewright-{name}-", suffix=".kir")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(print_kernel(kernel))
    bug = CompilerBug.at(
        "TW040", f"pass {name} failed on kernel {kernel.name}: {reason}", kernel.span, f"please report this; the kernel is in {path}"
    )
    assert isinstance(bug, CompilerBug)
    return bug


def fuse_kernels(program: Program, trace: Trace) -> tuple[Program, FusionReport]:
    """The program as written with kernels joined where that saves memory traffic, and what was joined."""
    start = time.perf_counter()
    fused, report = program, FusionReport((), (), len(program.calls), len(program.calls))
    if len(program.calls) > 1:
        fused, report = fuse(_map_kernels(program, lambda kernel: uncarry(hoist(unblock(simplify(kernel))))))
        for call in fused.calls:
            verify_kernel(call.kernel)
    trace.record("fuse", time.perf_counter() - start, lambda: print_program(fused))
    return fused, report


def prepare(program: Program, trace: Trace) -> Program:
    """The loop stage's passes that need no schedule."""

    def each(kernel: Kernel) -> Kernel:
        kernel = run_pass("simplify", kernel, simplify, trace)
        kernel = run_pass("unblock", kernel, unblock, trace)
        kernel = run_pass("hoist", kernel, hoist, trace)
        kernel = run_pass("uncarry", kernel, uncarry, trace)
        kernel = run_pass("empty_rows", kernel, empty_rows, trace)
        kernel = run_pass("part_axes", kernel, part_axes, trace)
        kernel = run_pass("collapse", kernel, collapse, trace)
        kernel = run_pass("centre_squares", kernel, centre_squares, trace)
        kernel = run_pass("stabilise", kernel, stabilise, trace)
        kernel = run_pass("contract", kernel, contract, trace)
        return run_pass("narrow", kernel, narrow, trace)

    prepared = _map_kernels(program, each)
    start = time.perf_counter()
    parted = part_products(prepared)
    if len(parted.calls) > len(prepared.calls):
        for call in parted.calls:
            verify_kernel(call.kernel)
    trace.record("part_products", time.perf_counter() - start, lambda: print_program(parted))
    return parted


def plan_contractions(
    program: Program, target: Target, sizes: Mapping[str, int], given: str = "", metadata: KernelMetadata | None = None
) -> Plans:
    """The schedule of each call of a prepared program that is a contraction; None for all others. `given`: use that one; `metadata` has
    the author's wishes."""
    plans: list[Plan] = []
    beside, whole = given, bool(given) and parse_schedule(given).beside > 1
    given = "" if whole else given
    wished: set[int] = set()
    for number, call in enumerate(program.calls):
        found = matrix_schedules(call.kernel, target, sizes) or attention_schedules(call.kernel, target, sizes)
        if found and not given and is_small_part(call.kernel, target, sizes):
            found = ()
        several = () if found else nest_schedules(call.kernel, target, sizes)
        if several:
            plans.append(several[0][1])
        elif not found:
            plans.append(row_schedule(call.kernel, target, sizes))
        elif given and found[0].family in (*ATTENTION, "cpu_attention"):
            plans.append(forced_attention(given, found, call.kernel))
        elif given:
            plans.append(forced(given, found, call.kernel))
        elif metadata is not None:
            plans.append(preferred(found, metadata.of(call.kernel.name), target, call.kernel.span))
            if plans[-1] is not found[0]:
                wished.add(number)
        else:
            plans.append(found[0])
    if whole:
        return forced_beside(beside, program, tuple(plans), target, sizes)
    if given and not any(isinstance(plan, MatrixSchedule) for plan in plans):
        raise UserError.at(
            "TW020", f"schedule '{given}': nothing in {program.name} is computed by tiles of a matrix here", program.span,
            "leave schedule= out; thin and tiny products, and what is no contraction, have none",
        )  # fmt: skip
    if given or wished or len(program.calls) == 1:
        return tuple(plans)
    return choose_beside(program, tuple(plans), target, sizes)[0]


def lower(program: Program, target: Target, hints: Mapping[str, int] | None = None, trace: Trace | None = None) -> Stages:
    """All the way from the loop stage to the thread stage."""
    trace = trace or Trace(dump=os.environ.get("TILEWRIGHT_DUMP", ""))
    loop = prepare(fuse_kernels(program, trace)[0], trace)
    return lower_planned(loop, plan_contractions(loop, target, hints or {}), target, hints or {}, trace)


def lower_planned(
    program: Program, plan: Plans, target: Target, hints: Mapping[str, int], trace: Trace
) -> Stages:
    """From the prepared loop stage to the thread stage."""
    start = time.perf_counter()
    program, plan = join_products(program, plan)
    trace.record("join_products", time.perf_counter() - start, lambda: print_program(program))
    program = _clip(program, plan, target, trace)
    start = time.perf_counter()
    program, plan = pad_windows(program, plan, target)
    trace.record("pad_windows", time.perf_counter() - start, lambda: print_program(program))
    start = time.perf_counter()
    program, plan = turn_images(program, plan)
    trace.record("turn_images", time.perf_counter() - start, lambda: print_program(program))
    start = time.perf_counter()
    program, plan = repack(program, plan)
    trace.record("repack", time.perf_counter() - start, lambda: print_program(program))
    start = time.perf_counter()
    program, plan = widen_operands(program, plan)
    trace.record("widen_operands", time.perf_counter() - start, lambda: print_program(program))
    start = time.perf_counter()
    program, plan = split_reductions(program, plan, target, hints)
    trace.record("split_reductions", time.perf_counter() - start, lambda: print_program(program))
    start = time.perf_counter()
    program, plan = stream_sums(program, plan, target)
    trace.record("stream_sums", time.perf_counter() - start, lambda: print_program(program))
    program, plan = add_counters(program, plan)
    program = _one_pass(program, plan, target, trace)
    loop = _map_kernels(program, lambda kernel: run_pass("simplify", kernel, simplify, trace))
    schedules = [
        own or window_schedule(call.kernel, target, hints) or choose(call.kernel, target, hints)
        for call, own in zip(loop.calls, plan, strict=True)
    ]
    chosen = iter(schedules)

    def to_tile(kernel: Kernel) -> Kernel:
        schedule = next(chosen)
        if isinstance(schedule, MatrixSchedule) and schedule.family == "amx":
            kernel = run_pass("lower_contraction_amx", kernel, lambda k: lower_contraction_amx(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule) and schedule.family == "cpu_attention":
            kernel = run_pass("lower_attention_cpu", kernel, lambda k: lower_attention_cpu(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule) and not target.is_gpu and schedule.beside > 1:
            kernel = run_pass("lower_products_cpu", kernel, lambda k: lower_products_cpu(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule) and not target.is_gpu:
            kernel = run_pass("lower_contraction_cpu", kernel, lambda k: lower_contraction_cpu(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule) and schedule.family in ATTENTION:
            kernel = run_pass("lower_attention", kernel, lambda k: lower_attention(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule):
            kernel = run_pass("lower_contraction", kernel, lambda k: lower_contraction(k, schedule, target), trace)
        else:
            kernel = run_pass("lower_loops", kernel, lambda k: lower_loops(k, schedule, target), trace)
        kernel = run_pass("simplify", kernel, simplify, trace)
        if isinstance(schedule, Schedule) and schedule.window:
            axis = sum(tile > 1 for tile in schedule.tiles[: schedule.vector_index])
            kernel = run_pass("window_sums", kernel, lambda k: window_sums(k, axis), trace)
        return run_pass("assign_layouts", kernel, lambda k: assign_layouts(k, schedule, target), trace)

    remaining = iter(schedules)

    def to_thread(kernel: Kernel) -> Kernel:
        schedule = next(remaining)
        if isinstance(schedule, MatrixSchedule) and schedule.family == "wgmma":
            kernel = run_pass("lower_wgmma", kernel, lambda k: lower_wgmma(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule) and schedule.family == "attention":
            kernel = run_pass("lower_wgmma_chain", kernel, lambda k: lower_wgmma_chain(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule) and schedule.family == "attention_mma":
            kernel = run_pass("lower_mma_chain", kernel, lambda k: lower_mma_chain(k, schedule, target), trace)
        elif isinstance(schedule, MatrixSchedule) and target.is_gpu:
            kernel = run_pass("lower_mma", kernel, lambda k: lower_mma(k, schedule, target), trace)
        elif isinstance(schedule, Schedule) and schedule.window:
            kernel = run_pass("lower_windows", kernel, lambda k: lower_windows(k, target), trace)
        else:
            kernel = run_pass("lower_tiles", kernel, lambda k: lower_tiles(k, target), trace)
        kernel = run_pass("simplify", kernel, simplify, trace)
        kernel = run_pass("narrow_extremes", kernel, lambda k: narrow_extremes(k, target), trace)
        kernel = run_pass("expand_math", kernel, lambda k: expand_math(k, target), trace)
        kernel = run_pass("expand_casts", kernel, lambda k: expand_casts(k, target), trace)
        kernel = run_pass("divide_alike", kernel, lambda k: divide_alike(k, target), trace)
        return run_pass("simplify", kernel, simplify, trace)

    tile = _map_kernels(loop, to_tile)
    return Stages(loop, tile, _map_kernels(tile, to_thread), tuple(schedules))


def merge_launches(program: Program, trace: Trace) -> Program:
    """The thread stage's kernels as one."""
    start = time.perf_counter()
    merged = one_launch(program)
    for call in merged.calls:
        verify_kernel(call.kernel)
    trace.record("one_launch", time.perf_counter() - start, lambda: print_program(merged))
    return merged


def _one_pass(program: Program, plan: Plans, target: Target, trace: Trace) -> Program:
    """Spreads of rows that are in no cache when they are walked again."""
    own = iter(plan)
    return _map_kernels(
        program, lambda k: k if next(own) else run_pass("one_pass_spread", k, lambda k: one_pass_spread(k, target), trace)
    )


def _clip(program: Program, plan: Plans, target: Target, trace: Trace) -> Program:
    """Sums of a CPU's plain loops, cut where they would read outside."""
    own = iter(plan)
    return _map_kernels(program, lambda k: run_pass("clip_windows", k, lambda k: clip_windows(k, target), trace) if next(own) is None else k)


def _map_kernels(program: Program, function: Callable[[Kernel], Kernel]) -> Program:
    return replace(program, calls=tuple(replace(call, kernel=function(call.kernel)) for call in program.calls))
