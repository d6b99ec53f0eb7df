"""Accesses whose index is not proven to lie inside get an attribute `watch`: the axes that are checked when the kernel runs. `Program -> Program`.

In: a program as the tree says, and what to check: `all` accesses or only `stores`. Out: the same with `watch` on some loads and stores.
With `stores`, what is read where something is then written (`out[at[i]] += 1`) is checked, too: that takes no test of its own.
Passes carry the attribute along. `check_indices` makes tests of it once accesses are those of tiles.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.index_proofs import unproven_accesses
from tilewright.base.sizes import Size
from tilewright.ir.nodes import Block, Op, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramCheck
from tilewright.ir.types import Tensor
from tilewright.tree.metadata import KernelMetadata

WATCHED = {"all": ("load", "store", "accumulate"), "stores": ("store", "accumulate")}


def watch_indices(program: Program, checks: str, metadata: KernelMetadata | None = None) -> Program:
    """The program with marks; the very same one where all is proven. Kernels whose metadata say so are left alone."""
    opcodes = WATCHED[checks]

    def one(call: KernelCall) -> KernelCall:
        own = metadata.of(call.kernel.name) if metadata is not None else None
        return call if own is not None and own.constraints.unsafe_unchecked else _watched(call, opcodes, (*steps_inside(program, call), *program.checks))

    calls = tuple(map(one, program.calls))
    return replace(program, calls=calls) if any(a is not b for a, b in zip(calls, program.calls, strict=True)) else program


def steps_inside(program: Program, call: KernelCall) -> tuple[ProgramCheck, ...]:
    """What holds of the numbers of the steps that a call runs in: each is below the number of steps.

    These stand before the checks of the program, which speak of loops that have turns: here they have."""
    loops = [program.ordered(turn.loop) for turn in call.loops]
    return tuple(ProgramCheck(Size.of(loop.name), "lt", loop.count, "") for loop in loops if loop.count is not None)


def _watched(call: KernelCall, opcodes: tuple[str, ...], checks: tuple[ProgramCheck, ...]) -> KernelCall:
    unproven = list(unproven_accesses(call.kernel, checks))
    marks = {id(op): axes for op, axes in unproven if op.opcode in opcodes}
    if marks and "load" not in opcodes:
        places = _Places(call.kernel.body)
        written = {places.of(op) for op, _ in unproven if id(op) in marks}
        marks |= {id(op): axes for op, axes in unproven if op.opcode == "load" and places.of(op) in written}
    return replace(call, kernel=replace(call.kernel, body=_marked(call.kernel.body, marks))) if marks else call


def _marked(block: Block, marks: dict[int, tuple[int, ...]]) -> Block:
    ops: list[Op] = []
    for op in block.ops:
        if id(op) in marks:
            op = replace(op, attrs=MappingProxyType({**op.attrs, "watch": marks[id(op)]}))
        ops.append(replace(op, regions=tuple(_marked(r, marks) for r in op.regions)) if op.regions else op)
    return Block(block.args, tuple(ops))


class _Places:
    """Where accesses go, so that two that are written alike compare equal."""

    def __init__(self, body: Block) -> None:
        self._made = {result: op for op in walk(body) for result in op.results}
        self._known: dict[Value, object] = {}

    def of(self, op: Op) -> object:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        return memory, tuple(map(self._form, op.operands[1 : 1 + memory.type.rank]))

    def _form(self, value: Value) -> object:
        if value not in self._known:
            op = self._made.get(value)
            plain = op is not None and len(op.results) == 1 and not op.regions
            self._known[value] = (op.opcode, tuple(sorted(map(str, op.attrs.items()))), *map(self._form, op.operands)) if plain and op else value
        return self._known[value]
