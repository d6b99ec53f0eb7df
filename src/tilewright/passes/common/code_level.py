"""Optimisation levels: marks that code generators read.

In: a program at the thread stage, and a target with a level (`base/levels.py`). Out: the same with the level's name on its kernels and, where the
level aligns loops, `align` on innermost ones. Only CPU code has such marks; what a level means for LLVM itself is the target's.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.levels import Level, level_of
from tilewright.base.target import Target
from tilewright.ir.nodes import Block, Kernel, Op, walk
from tilewright.ir.program import Program


def with_level(program: Program, target: Target) -> Program:
    """The program with marks; the very same one at the default level."""
    if not any("optimize" in call.kernel.attrs for call in program.calls) and not (target.is_host and target.level):
        return program
    return replace(program, calls=tuple(replace(call, kernel=_marked(call.kernel, target)) for call in program.calls))


def _marked(kernel: Kernel, target: Target) -> Kernel:
    attrs = {name: value for name, value in kernel.attrs.items() if name != "optimize"}
    if not target.is_host or not target.level:
        return replace(kernel, attrs=MappingProxyType(attrs))
    level = level_of(target)
    body = _block(kernel.body, level) if level.align else kernel.body
    return replace(kernel, attrs=MappingProxyType({**attrs, "optimize": target.level}), body=body)


def _block(block: Block, level: Level) -> Block:
    return replace(block, ops=tuple(_op(op, level) if op.regions else op for op in block.ops))


def _op(op: Op, level: Level) -> Op:
    regions = tuple(_block(region, level) for region in op.regions)
    innermost = op.opcode == "for" and not any(inner.opcode in ("for", "while") for region in op.regions for inner in walk(region))
    attrs = MappingProxyType({**op.attrs, "align": level.align}) if innermost else op.attrs
    return replace(op, regions=regions, attrs=attrs)
