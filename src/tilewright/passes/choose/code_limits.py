"""`@unroll` and `@max_registers`: what attributes say about code, not about schedules.

In: a program at the thread stage, and the attributes. Out: the same with marks on its loops and kernels, which code generators read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.target import Target
from tilewright.ir.nodes import Block, Kernel, Op
from tilewright.ir.program import Program
from tilewright.tree.metadata import KernelMetadata


def with_limits(program: Program, metadata: KernelMetadata, schedules: Sequence[object], target: Target) -> Program:
    """The program with what attributes say about its code."""
    unroll, registers = metadata.hints.unroll_factor, metadata.max_registers if target.simt else 0
    if registers and _have_warp_groups(schedules):
        registers = 0  # warp groups share out registers themselves
    if unroll is None and not registers:
        return program
    calls = []
    for call in program.calls:
        kernel = call.kernel
        if unroll is not None:
            kernel = replace(kernel, body=_unrolled(kernel.body, unroll))
        calls.append(replace(call, kernel=_limited(kernel, registers) if registers else kernel))
    return replace(program, calls=tuple(calls))


def _have_warp_groups(schedules: Sequence[object]) -> bool:
    from tilewright.passes.schedules.attention import WgmmaAttention
    from tilewright.passes.schedules.matrix import Wgmma

    return any(isinstance(schedule, Wgmma | WgmmaAttention) for schedule in schedules)


def _limited(kernel: Kernel, registers: int) -> Kernel:
    # The assembler takes a number of registers or of blocks, not both.
    attrs = {name: value for name, value in kernel.attrs.items() if name != "min_blocks"}
    return replace(kernel, attrs=MappingProxyType({**attrs, "max_registers": registers}))


def _unrolled(block: Block, factor: int) -> Block:
    return replace(block, ops=tuple(_op(op, factor) for op in block.ops))


def _op(op: Op, factor: int) -> Op:
    if not op.regions:
        return op
    regions = tuple(_unrolled(region, factor) for region in op.regions)
    attrs = MappingProxyType({**op.attrs, "unroll": factor}) if op.opcode == "for" else op.attrs
    return replace(op, regions=regions, attrs=attrs)
