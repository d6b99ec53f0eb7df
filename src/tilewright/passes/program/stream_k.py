"""Give contractions whose schedule says `stream_k` the memory by which blocks hand partial sums on. `Program -> Program`.

In: a program of loop-stage kernels and the plans of its calls. Out: the same, where such a kernel has two more parameters, used
by `lower_wgmma` alone: `partials` [blocks, m * n], of which each block writes its own row at most once, and `flags`, one for each
block and warp group. A kernel before it makes the flags 0. The contraction is launched early (see `wait_previous`): it computes
while the flags are cleared.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import u32
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.schedules.plans import Plan, Plans


def stream_k(program: Program, plans: Plans, target: Target) -> tuple[Program, Plans]:
    """The program with memory for sums in a stream."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        if isinstance(schedule, Wgmma) and schedule.stream_k:
            partials, flags = _memory(call.kernel, schedule, target, len(scratch))
            scratch += [_scratch(partials), _scratch(flags)]
            calls.append(KernelCall(_clearing(call.kernel, flags), (flags.name,), call.loops))
            schedules.append(None)
            kernel = replace(call.kernel, params=(*call.kernel.params, partials, flags))
            call = replace(call, kernel=kernel, args=(*call.args, partials.name, flags.name))
        calls.append(call)
        schedules.append(schedule)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _memory(kernel: Kernel, schedule: Wgmma, target: Target, number: int) -> tuple[Value, Value]:
    found = find_contraction(kernel)
    assert found is not None
    blocks = target.multiprocessors
    return (
        Value(tensor(found.accumulator, blocks, schedule.m * schedule.n, align=16), f"{kernel.name}.partials{number}"),
        Value(tensor(u32, blocks * schedule.math_warpgroups, align=16), f"{kernel.name}.flags{number}"),
    )


def _scratch(value: Value) -> ProgramArray:
    assert isinstance(value.type, Tensor)
    return ProgramArray(value.name, value.type, "scratch")


def _clearing(kernel: Kernel, flags: Value) -> Kernel:
    assert isinstance(flags.type, Tensor)
    b = Builder(kernel.span)

    def body(inner: Builder, index: Value) -> list[Value]:
        inner.multi("store", flags, index, inner.const(0, u32))
        return []

    b.parallel([b.index(flags.type.shape[0])], body, ["i"])
    return Kernel(f"{kernel.name}.clear", Stage.LOOP, (flags,), Block((), tuple(b.ops)), facts=kernel.facts, span=kernel.span)
