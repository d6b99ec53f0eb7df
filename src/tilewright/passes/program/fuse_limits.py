"""What joined kernels would need of a thread and of a block: fusion stops where that is too much.

In: programs before and after two of their kernels were joined, and an array that one makes and another reads. Out: whether too many values are
live at once in one iteration; how much of the array one result needs. Values are counted in the order the text has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilewright.analysis.affine import analyse
from tilewright.base.sizes import Size, product
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.program import Program
from tilewright.ir.types import Scalar
from tilewright.passes.common.simplify import simplify

MOST_LIVE = 64
"""Values of one iteration: with a vector of four elements for each, a thread's 255 registers are full."""
_FREE = ("const", "size")
"""Ops whose results are made where they are used."""


def live_values(kernel: Kernel) -> int:
    """The most values that are needed at one place of an iteration, counted in registers of 32 bits."""
    return max((_most(op.regions[0], {}) for op in kernel.body.ops if op.opcode == "parallel"), default=0)


def _most(block: Block, outer: Mapping[Value, int]) -> int:
    """The most live values inside a block, those that live across it included."""
    last: dict[Value, int] = {}
    for position, op in enumerate(block.ops):
        for value in _used(op):
            last[value] = position
    live = dict(outer)
    most = sum(live.values())
    for position, op in enumerate(block.ops):
        for region in op.regions:
            most = max(most, _most(region, live))
        live |= {r: _registers(r) for r in op.results if op.opcode not in _FREE and last.get(r, -1) > position}
        most = max(most, sum(live.values()))
        for value in [v for v in live if v not in outer and last.get(v, -1) <= position]:
            del live[value]
    return most


def _used(op: Op) -> Iterable[Value]:
    yield from op.operands
    for region in op.regions:
        for inner in walk(region):
            yield from inner.operands


def _registers(value: Value) -> int:
    return -(-value.type.dtype.bits // 32) if isinstance(value.type, Scalar) else 0


def over_registers(before: Program, made: Program) -> str:
    """Why joined kernels do not fit in the registers of a thread; empty where they do, or where a part of them did not before."""
    known = {id(call) for call in before.calls}
    new = [call.kernel for call in made.calls if id(call) not in known]
    most = max((live_values(kernel) for kernel in new), default=0)
    if most <= MOST_LIVE // 2:
        return ""
    # What both have loaded or computed is shared, and lives longer.
    most = max(live_values(simplify(kernel)) for kernel in new)
    if most <= max(MOST_LIVE, *(live_values(call.kernel) for call in before.calls)):
        return ""
    return f"together they keep {most} values in registers at once, and a thread has room for {MOST_LIVE}"


def needed_of(program: Program, array: str) -> Size | None:
    """The most bytes of an array that one result of a kernel reading it needs: along axes whose index is none of the result's own, all
    of it. None where that is one element."""
    memory = program.array(array).type
    most: Size | None = None
    for call in program.calls:
        params = [p for p, name in zip(call.kernel.params, call.args, strict=True) if name == array]
        loads = [op for op in walk(call.kernel.body) if op.opcode == "load" and op.operands[0] in params]
        own = {arg for op in call.kernel.body.ops if op.opcode == "parallel" for arg in op.regions[0].args}
        forms = analyse(call.kernel) if loads else {}
        for load in loads:
            indices = load.operands[1 : 1 + memory.rank]
            free = [e for e, i in zip(memory.shape, indices, strict=True) if not {v for v, _ in forms[i].factors} <= own]
            size = product(free) * memory.dtype.itemsize
            if free and (most is None or len(size.names) > len(most.names)):
                most = size
    return most
