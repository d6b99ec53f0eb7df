"""Accesses whose index is not proven to lie inside get an attribute `watch`: the axes that are checked when the kernel runs. `Program -> Program`.

In: a program as the tree says, and what to check: `all` accesses or only `stores`. Out: the same with `watch` on some loads and stores.
Passes carry the attribute along. `check_indices` makes tests of it once accesses are those of tiles.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.index_proofs import unproven_accesses
from tilewright.ir.nodes import Block, Op
from tilewright.ir.program import KernelCall, Program, ProgramCheck
from tilewright.tree.metadata import KernelMetadata

WATCHED = {"all": ("load", "store", "accumulate"), "stores": ("store", "accumulate")}


def watch_indices(program: Program, checks: str, metadata: KernelMetadata | None = None) -> Program:
    """The program with marks; the very same one where all is proven. Kernels whose metadata say so are left alone."""
    opcodes = WATCHED[checks]

    def one(call: KernelCall) -> KernelCall:
        own = metadata.of(call.kernel.name) if metadata is not None else None
        return call if own is not None and own.constraints.unsafe_unchecked else _watched(call, opcodes, program.checks)

    calls = tuple(map(one, program.calls))
    return replace(program, calls=calls) if any(a is not b for a, b in zip(calls, program.calls, strict=True)) else program


def _watched(call: KernelCall, opcodes: tuple[str, ...], checks: tuple[ProgramCheck, ...]) -> KernelCall:
    marks = {id(op): axes for op, axes in unproven_accesses(call.kernel, checks) if op.opcode in opcodes}
    return replace(call, kernel=replace(call.kernel, body=_marked(call.kernel.body, marks))) if marks else call


def _marked(block: Block, marks: dict[int, tuple[int, ...]]) -> Block:
    ops: list[Op] = []
    for op in block.ops:
        if id(op) in marks:
            op = replace(op, attrs=MappingProxyType({**op.attrs, "watch": marks[id(op)]}))
        ops.append(replace(op, regions=tuple(_marked(r, marks) for r in op.regions)) if op.regions else op)
    return Block(block.args, tuple(ops))
