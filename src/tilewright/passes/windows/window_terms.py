"""The sums of windows as a GPU's threads compute them: in which order, and which terms are zeros.

In: a loop-stage kernel whose schedule says `window`, and its sums. Out: `order_sums`, the kernel with sums whose last index slides along the index of which a
thread has several results: what these share is then read by one turn of the other indices, and its registers are free again after it. `zero_outside`, whether
the terms outside of an array are zeros by themselves, for masked loads give zeros.

    reduce k, m { if inside { x[i + k, j + m] * w[k, m] } else { 0 } }    a thread has several i
    -> reduce m, k { … }, whose terms are zeros outside where w is finite
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.loop_nest import nest_of
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import dtype_of
from tilewright.passes.schedules.loops import Schedule

REORDERED = ("add", "mul", "max", "min")
"""Kinds of reductions whose terms may come in any order."""


class Zeros(Enum):
    """When the terms of a sum are zeros outside of what it reads."""

    NEVER = 0
    IF_FINITE = 1
    ALWAYS = 2


def order_sums(kernel: Kernel, schedule: Schedule) -> Kernel:
    """The kernel with the index that slides along the thread's results last in its sums, where fewer elements are needed at a time then."""
    if schedule.along < 0:
        return kernel
    nest, forms = nest_of(kernel), analyse(kernel)
    own = nest.parallel.regions[0].args[schedule.along]
    changed: dict[Value, int] = {}
    for op in nest.reductions:
        position = sliding_along(op, own, forms)
        if position < 0 or len(op.results) != 1 or str(op.attrs["kind"]) not in REORDERED:
            continue
        turns, last = (forms[v].constant.constant or 1 for v in (op.operands[position], op.operands[-1]))
        # Either all elements of some columns are there at a time, or all of some rows.
        if schedule.vector * (turns - 1) < schedule.tiles[schedule.along] * (last - 1):
            changed[op.results[0]] = position
    if not changed:
        return kernel

    def ordered(b: Builder, op: Op) -> Sequence[Value] | None:
        position = changed.get(op.results[0]) if op.opcode == "reduce" else None
        if position is None:
            return None
        order = [*(p for p in range(len(op.operands)) if p != position), position]
        region = op.regions[0]
        return b.append(
            replace(op, operands=tuple(op.operands[p] for p in order), regions=(Block(tuple(region.args[p] for p in order), region.ops),))
        )

    return rewrite(kernel, ordered)


def sliding_along(op: Op, own: Value, forms: Forms) -> int:
    """Which index of a sum slides along that index of results; -1 for none."""
    args = op.regions[0].args
    for load in walk(op.regions[0]):
        for value in load.operands[1:] if load.opcode == "load" else ():
            used = forms[value].values if value in forms else ()
            if own in used and any(arg in used for arg in args):
                return next(p for p, arg in enumerate(args) if arg in used)
    return -1


def asks_along(kernel: Kernel, branch: Op | None, index: Value) -> bool:
    """Whether the condition of a branch depends on an index."""
    made = {result: op for op in walk(kernel.body) for result in op.results}
    pending, seen = list(branch.operands[:1]) if branch is not None else [], set[Value]()
    while pending:
        value = pending.pop()
        if value is index:
            return True
        if value not in seen:
            seen.add(value)
            pending += made[value].operands if value in made else ()
    return False


def zero_outside(op: Op, unmasked: set[int]) -> tuple[Op | None, Zeros]:
    """The branch of a sum whose terms are zeros where its condition does not hold, and when they are. `unmasked`: loads that are not under the condition."""
    region = op.regions[0]
    made = {result: inner for inner in walk(region) for result in inner.results}
    branch = made.get(region.yields[0])
    if op.attrs["kind"] != "add" or len(op.results) != 1 or branch is None or branch.opcode != "if":
        return None, Zeros.NEVER
    nothing = made.get(branch.regions[1].yields[0])
    if nothing is None or nothing.opcode != "const" or nothing.attrs["value"] != 0:
        return None, Zeros.NEVER
    inside = {result for inner in branch.regions[0].ops for result in inner.results}

    def zeros(value: Value) -> Zeros:
        maker = made.get(value)
        if maker is None or value not in inside:
            return Zeros.NEVER
        if maker.opcode == "load":
            return Zeros.NEVER if id(maker) in unmasked else Zeros.ALWAYS
        if maker.opcode in ("cast", "neg"):
            return zeros(maker.operands[0])
        if maker.opcode != "mul":
            return Zeros.NEVER
        first, second = sorted((zeros(v) for v in maker.operands), key=lambda z: z.value)
        if first is Zeros.NEVER and second is not Zeros.NEVER and dtype_of(value.type).is_float:
            return Zeros.IF_FINITE
        return second if first is Zeros.NEVER else first

    found = zeros(branch.regions[0].yields[0])
    return (None, found) if found is Zeros.NEVER else (branch, found)
