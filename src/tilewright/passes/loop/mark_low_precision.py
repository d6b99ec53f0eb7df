"""Say where only few bits of a function's result count, so that a GPU's own instructions will do.

In: a loop-stage kernel. Out: the same, with `narrow = f16` on exponentials, sigmoids and quotients of f32 whose results are only used, through
arithmetic and reductions, in values that are rounded to f16, bf16 or smaller: the end of a fused matrix product, say. Their error is then below 2^-16 of
the result (`expand_math`), where the rounding that follows costs 2^-11 or more. Sits after all rewriting of the loop stage.

    %e = exp %x : f32;  %p = mul %e, %y;  %r = cast %p {dtype = bf16}   ->   %e = exp %x {narrow = f16} …
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f16, f32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import dtype_of

_FUNCTIONS = frozenset({"exp", "exp2", "sigmoid", "div"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "fma", "neg", "min", "max", "abs", "div"})
_REDUCTIONS = frozenset({"add", "min", "max"})


def mark_low_precision(kernel: Kernel) -> Kernel:
    users: dict[Value, list[Op]] = {}
    functions = False
    reductions: dict[Op, Op] = {}
    for op in walk(kernel.body):
        functions = functions or op.opcode in _FUNCTIONS
        if op.opcode == "reduce" and op.attrs["kind"] in _REDUCTIONS:
            reductions[op.regions[0].ops[-1]] = op
        for value in op.operands:
            users.setdefault(value, []).append(op)
    if not functions:
        return kernel
    known: dict[Value, bool] = {}

    def ends_narrow(value: Value) -> bool:
        """Whether every use of the value ends in a rounding to few bits."""
        if value not in known:
            known[value] = False
            uses = users.get(value, [])
            known[value] = bool(uses) and all(fits(op, value) for op in uses)
        return known[value]

    def fits(op: Op, value: Value) -> bool:
        if op.opcode == "cast":
            return dtype_of(op.results[0].type).is_small_float
        if op in reductions:
            return ends_narrow(reductions[op].results[0])
        if op.opcode == "select":
            return value is not op.operands[0] and ends_narrow(op.results[0])
        return op.opcode in _ARITHMETIC and ends_narrow(op.results[0])

    chosen = {
        op.results[0] for op in walk(kernel.body)
        if op.opcode in _FUNCTIONS and "narrow" not in op.attrs and dtype_of(op.results[0].type) is f32 and ends_narrow(op.results[0])
    }  # fmt: skip

    def mark(b: Builder, op: Op) -> Sequence[Value] | None:
        if not op.results or op.results[0] not in chosen:
            return None
        return b.emit(op.opcode, op.operands, {**op.attrs, "narrow": f16})

    return rewrite(kernel, mark) if chosen else kernel
