"""Pass: numbers of a call that are f64 only until a kernel rounds them are passed as f32, where a target has no f64.

In: a thread-stage program. Out: the same. A Python float is f64; a kernel over f32 arrays rounds it before it computes with it, and the host can do
that as well. A number with another use stays f64, and the check of the target refuses it.

    param %scale: f64;  %s = cast %scale {dtype = f32}   ->   param %scale: f32
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.dtypes import f32, f64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.program import Program, ScalarInput
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Scalar


def short_numbers(program: Program) -> Program:
    """The program with f32 for every number that nobody computes with as f64."""
    wanted = {p.name for p in program.inputs if isinstance(p, ScalarInput) and p.dtype is f64}
    for call in program.calls:
        for param, name in zip(call.kernel.params, call.args, strict=True):
            if name in wanted and not _is_rounded(call.kernel, param):
                wanted.discard(name)
    if not wanted:
        return program
    inputs = tuple(replace(p, dtype=f32) if isinstance(p, ScalarInput) and p.name in wanted else p for p in program.inputs)
    calls = tuple(replace(call, kernel=_short(call.kernel, {p for p, name in zip(call.kernel.params, call.args, strict=True) if name in wanted})) for call in program.calls)
    return replace(program, inputs=inputs, calls=calls)


def _is_rounded(kernel: Kernel, param: Value) -> bool:
    return all(op.opcode == "cast" and op.attrs["dtype"] is f32 for op in walk(kernel.body) if param in op.operands)


def _short(kernel: Kernel, params: set[Value]) -> Kernel:
    fresh = {p: Value(Scalar(f32), p.name) for p in params}

    def one(b: Builder, op: Op) -> list[Value] | None:
        return [fresh[op.operands[0]]] if op.opcode == "cast" and op.operands[0] in fresh else None

    return replace(rewrite(kernel, one), params=tuple(fresh.get(p, p) for p in kernel.params))
