"""Give kernels whose blocks fetch their tiles from a counter that counter. `Program -> Program`.

In: a program and the schedules of its calls. Where one is `dynamic`, blocks that are done with a tile take the next that nobody
has: tiles may then take different times without anybody waiting. Out: the program with a counter in scratch for each such
kernel, its last parameter, and a kernel before it that sets it to zero.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.dtypes import u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.schedules.attention import WgmmaAttention
from tilewright.passes.schedules.plans import Plan, Plans


def add_counters(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with its counters, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        if isinstance(schedule, WgmmaAttention) and schedule.dynamic:
            counter = Value(tensor(u32, 1, align=16), f"{call.kernel.name}.counter{len(scratch)}")
            assert isinstance(counter.type, Tensor)
            scratch.append(ProgramArray(counter.name, counter.type, "scratch"))
            calls.append(KernelCall(_zero(call.kernel, counter), (counter.name,), call.loops))
            schedules.append(None)
            kernel = replace(call.kernel, params=(*call.kernel.params, counter))
            call = replace(call, kernel=kernel, args=(*call.args, counter.name))
        calls.append(call)
        schedules.append(schedule)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _zero(kernel: Kernel, counter: Value) -> Kernel:
    b = Builder(kernel.span)
    b.parallel([b.index(1)], lambda at, i: at.multi("store", counter, i, at.const(0, u32)))
    return Kernel(f"{kernel.name}.zero", Stage.LOOP, (counter,), Block((), tuple(b.ops)), span=kernel.span)
