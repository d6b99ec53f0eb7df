"""Checks for loads under a condition: the loops around them must fit their arrays. `Program -> Program`.

In: a program as the tree says. Out: the same with the checks; a call whose sizes break one is refused. A condition that speaks of other
indices than the load's own leaves these their loops. One that compares a load's index with others says how far it goes.

    for q in range(c): if 0 <= y and y < h: total += x[y, q] * w[q]     ->     the same, and a check that c is no more than w has
    for j in range(n): if j != i: total += p[j, 2] * p[i, 2]            ->     the same, and a check that p has three columns
    for i in grid(s): for j in range(t): if j <= i: total += v[j]       ->     the same, and a check that min(t, s) is no more than v has
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.guarded import guarded_loads
from tilewright.analysis.index_proofs import reaches
from tilewright.base.intervals import clamped, surely_positive
from tilewright.base.sizes import ONE, ZERO, Size, minimum, product
from tilewright.ir.program import KernelCall, Program, ProgramCheck
from tilewright.ir.types import Tensor
from tilewright.passes.program.watch_indices import steps_inside


def guard_checks(program: Program) -> Program:
    """The program with those checks; the very same one where it needs none."""
    checks = dict.fromkeys(program.checks)
    for call in program.calls:
        names = dict(zip(call.kernel.params, call.args, strict=True))
        for guarded in guarded_loads(call.kernel):
            memory = guarded.load.operands[0]
            for axis, index, extent in guarded.plain:
                message = (
                    f"a loop over {{left}} elements (index '{index.name}') reads '{names[memory]}', whose axis {axis} has extent {{right}}"
                )
                assert isinstance(memory.type, Tensor)
                for end in _in_all_steps(program, call, extent):
                    checks[ProgramCheck(end, "le", memory.type.shape[axis], message, guarded.load.span, "TW013")] = None
            for axis, number in guarded.numbered:
                assert isinstance(memory.type, Tensor)
                end = product((Size.of(number + 1), *(minimum(clamped(turn), ONE) for turn in dict.fromkeys(guarded.turns) if not surely_positive(turn))))
                message = f"'{names[memory]}' is read at index {{left}}, but its axis {axis} has extent {{right}}"
                for stop in _in_all_steps(program, call, end):
                    checks[ProgramCheck(stop - 1, "lt", memory.type.shape[axis], message, guarded.load.span, "TW013")] = None
        for load, axis, end in reaches(call.kernel, (*steps_inside(program, call), *checks)):
            memory = load.operands[0]
            assert isinstance(memory.type, Tensor)
            message = f"'{names[memory]}' is read at indices up to {{left}}, but its axis {axis} has extent {{right}}"
            for stop in _in_all_steps(program, call, end):
                checks[ProgramCheck(stop - 1, "lt", memory.type.shape[axis], message, load.span, "TW013")] = None
    return replace(program, checks=tuple(checks)) if len(checks) > len(program.checks) else program


def _in_all_steps(program: Program, call: KernelCall, size: Size) -> list[Size]:
    """A size in the first and in the last step of the ordered loops around a call; none where the number of steps is not known then. Sizes that
    grow or shrink from step to step lie between the two."""
    ends = [size]
    for turn in reversed(call.loops):  # how often an inner loop runs may be the step of an outer one
        loop = program.ordered(turn.loop)
        if not any(loop.name in end.names for end in ends):
            continue
        if loop.count is None:
            return []
        some = minimum(loop.count, ONE)  # without steps nothing is read
        ends = [end.substitute({loop.name: step}) * some for end in ends for step in (ZERO, loop.count - 1)]
    return ends
