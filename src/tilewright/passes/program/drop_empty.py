"""Kernels that write nothing are dropped, with the scratch arrays that no kernel has to do with then.

In and out: a program at the loop stage, after `simplify`: conditions that are known are gone, and what stood under false ones with them.

    for i in tw.grid(n):            kernel @k {                         (no kernel)
        if DEBUG > 1:        ->       parallel %n (%i: i64) {    ->
            out[i] = x[i]             }
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir.program import Program
from tilewright.ir.rewrite import has_effects


def drop_empty(program: Program) -> Program:
    """The program without kernels that do nothing."""
    calls = tuple(call for call in program.calls if any(has_effects(op) for op in call.kernel.body.ops))
    if len(calls) == len(program.calls):
        return program
    used = {name for call in calls for name in call.args}
    return replace(program, calls=calls, scratch=tuple(array for array in program.scratch if array.name in used))
