"""Code beside a loop that fills the registers becomes a function of its own. In and out: a thread-stage kernel for a CPU.

The innermost loop of a product keeps its sums in nearly all vector registers. LLVM moves the constants of what follows the sum (those of `tanh`, say) out of all
loops around, where they stay in registers, and the innermost loop then spills its sums. A function has registers of its own.

    for … { %sums = for … -> 27 vectors {…}; if %last { … exp … } }
    ->   for … { %sums = for … -> 27 vectors {…}; if %last {outlined} { … exp … } }

Only code without results is marked, as far out as it has no such loop in it. The code generator writes the function.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.target import Target
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Vec, dtype_of

MANY = 4
"""Vectors of one number that code may have before it becomes a function."""


def outline(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with marks on what becomes a function."""
    full = {op for op in walk(kernel.body) if _fills_registers(op, target)}
    return replace(kernel, body=_marked(kernel.body, full)) if full else kernel


def _fills_registers(op: Op, target: Target) -> bool:
    """Whether a loop carries vectors that take more than half of the registers."""
    if op.opcode != "for" or len(op.results) < 8:
        return False
    taken = sum(-(-v.type.width * dtype_of(v.type).itemsize // target.vector_bytes) for v in op.results if isinstance(v.type, Vec))
    return 2 * taken > target.vector_registers


def _marked(block: Block, full: set[Op]) -> Block:
    return replace(block, ops=tuple(_marked_op(op, full) if op.regions else op for op in block.ops))


def _marked_op(op: Op, full: set[Op]) -> Op:
    if op in full:
        return op
    if any(inner in full for region in op.regions for inner in walk(region)):
        return replace(op, regions=tuple(_marked(region, full) for region in op.regions))
    if op.results or len(_repeated(op)) <= MANY:
        return op
    return replace(op, attrs=MappingProxyType({**op.attrs, "outlined": True}))


def _repeated(op: Op) -> set[object]:
    """The numbers that vectors of one number are made of."""
    constants: dict[Value, object] = {}
    found: set[object] = set()
    for region in op.regions:
        for inner in walk(region):
            if inner.opcode == "const":
                constants[inner.results[0]] = inner.attrs["value"]
            elif inner.opcode == "broadcast" and dtype_of(inner.result.type).is_float:
                found.add(constants.get(inner.operands[0], inner.operands[0]))
    return found
