"""How much a contraction does to each of its results once the sum is known: what its choice of schedule weighs against overlap.

In: a contraction. Out: `EpilogueWork`, instructions a result takes and arrays as large as the results that are read. Counted from the ops
after the sum, at the loop stage, where functions are still whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis.contraction import Contraction
from tilewright.base.record import record
from tilewright.ir.nodes import Op, Value
from tilewright.ir.ops import OPS

QUICK = 5
"""Instructions of a function of whose results few bits count."""
WHOLE = 25
"""Instructions of any other."""
_FREE = frozenset({"const", "size", "yield", "store", "load", "cast", "broadcast"})


@record
class EpilogueWork:
    """What one result takes, on average where a block has results of several products."""

    instructions: float
    arrays: float


def finishing_work(found: Contraction, reductions: Sequence[Op] = ()) -> EpilogueWork:
    """What happens to each sum before it is stored; `reductions` are all sums of a kernel that has several."""
    ops = found.parallel.regions[0].ops
    sums = reductions or (found.reduction,)
    after = ops[ops.index(sums[0]) + 1 :]
    late: set[Value] = {result for op in sums for result in op.results}
    instructions = 0
    for op in after:
        if op.opcode not in _FREE and any(v in late for v in op.operands):
            instructions += _instructions(op)
        if any(v in late for v in op.operands):
            late.update(op.results)
    arrays = sum(op.opcode == "load" and _is_large(found, ops, op) for op in ops if op not in sums)
    return EpilogueWork(instructions, arrays)


def _instructions(op: Op) -> int:
    if OPS[op.opcode].group != "function":
        return 1
    return QUICK if "narrow" in op.attrs else WHOLE


def _is_large(found: Contraction, ops: tuple[Op, ...], load: Op) -> bool:
    """Whether what it reads differs along both sides of the result."""
    made = {result: op for op in ops for result in op.results}
    reached: set[Value] = set()
    todo = list(load.operands[1:])
    while todo:
        value = todo.pop()
        if value not in reached:
            reached.add(value)
            todo += made[value].operands if value in made else ()
    sides = [{found.indices[p] for p in side} for side in (found.m, found.n)]
    return all(side & reached for side in sides)
