"""Divisions of indices that are never negative become unsigned, which is several times shorter on a GPU.

In and out: a thread-stage kernel. What is surely not negative follows from its ops alone: sizes, numbers of threads and
blocks, loops that start at such, and sums, products and quotients of them. Sits after a lowering that takes indices apart.

    %q = floordiv %i, %n : i64   ->   %q = cast (floordiv (cast %i : u64), (cast %n : u64)) : i64
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import i64, u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import dtype_of

_KEEPING = frozenset(
    {"add", "mul", "floordiv", "min", "max", "and", "or", "shr", "broadcast", "pack", "extract", "split"}
)
"""Ops that give nothing negative of operands that are not."""


def unsigned_divisions(kernel: Kernel) -> Kernel:
    if not any(op.opcode in ("floordiv", "mod") for op in walk(kernel.body)):
        return kernel
    positive = never_negative(kernel)

    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in ("floordiv", "mod") or dtype_of(op.results[0].type) is not i64:
            return None
        if not all(v in positive for v in op.operands):
            return None
        result = b.cast(b.op(op.opcode, *(b.cast(v, u64) for v in op.operands)), i64)
        positive.add(result)
        return [result]

    return rewrite(kernel, one)


def never_negative(kernel: Kernel) -> set[Value]:
    """Integer values that surely are not below zero."""
    known: set[Value] = set()
    for op in walk(kernel.body):
        if op.opcode == "for" and op.operands[0] in known:
            known.add(op.regions[0].args[0])
        value = op.attrs.get("value")
        sure = op.opcode in ("size", "thread_id", "program_id")
        sure = sure or (op.opcode == "const" and isinstance(value, int) and value >= 0)
        sure = sure or (op.opcode == "cast" and (dtype_of(op.operands[0].type).kind == "u" or op.operands[0] in known))
        sure = sure or (op.opcode in _KEEPING and all(v in known for v in op.operands))
        sure = sure or (op.opcode == "select" and all(v in known for v in op.operands[1:]))
        if sure:
            known.update(op.results)
    return known
