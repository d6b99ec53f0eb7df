"""Products with few rows compute the norm of their rows themselves. `Program -> Program`, at the loop stage.

In: a program and its plans. Out: the same, where an array that a kernel makes row by row, from what the row's reductions give, and that only products
with few rows read (`family=gemv`), is never written: every block of the product reduces the row again. A row is some thousand numbers that lie in a cache by
then, and a launch less is worth more. Values are rounded to the dtype of the array they no longer pass through, so results stay what they were.

    parallel i { s = reduce k x[i, k]²; for k { h[i, k] = x[i, k] * f(s) * g[k] } }         parallel i, j { s = reduce k x[i, k]²
    parallel i, j { y[i, j] = reduce k h[i, k] * w[j, k] }                             ->       y[i, j] = reduce k (x[i, k] * f(s) * g[k]) * w[j, k] }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.affine import analyse
from tilewright.base.sizes import ONE, ZERO
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, has_effects, rewrite_block
from tilewright.passes.common.fusion_report import Fused, FusionReport, Refused
from tilewright.passes.program.fuse import cleaned, joined_facts, names_of, read_by, written_by
from tilewright.passes.program.fuse_horizontally import fuse_horizontally
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.passes.schedules.plans import Plans

MOST_WORK = 16
"""Operations on an element that a product may do again for every few rows of its weight."""


class NotRows(Exception):
    """These rows stay a kernel of their own; the text says why."""


def row_prologues(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with rows computed where products need them, and the plans of the calls that are left."""
    made, left, _, _ = with_prologues(program, plans)
    return made, left


def with_prologues(program: Program, plans: Plans) -> tuple[Program, Plans, tuple[Fused, ...], tuple[Refused, ...]]:
    """The same, with what was joined and what was not."""
    fused: list[Fused] = []
    refused: list[Refused] = []
    number = 0
    while number < len(program.calls):
        call = program.calls[number]
        arrays = written_by(call)
        readers = [n for n in range(number + 1, len(program.calls)) if set(arrays) & read_by(program.calls[n])]
        if isinstance(plans[number], MatrixSchedule) or program.loops or not readers or not all(isinstance(plans[n], Gemv) for n in readers):
            number += 1
            continue
        spans = call.kernel.span, program.calls[readers[0]].kernel.span
        try:
            rows = MadeRows(program, number, readers)
            if any(_units(plans, n) > 1 for n in readers):
                raise NotRows(f"packed weights are multiplied with '{rows.array}' as it lies in memory")
            calls = list(program.calls)
            for reader in readers:
                calls[reader] = rows.inside(calls[reader])
        except NotRows as no:
            if str(no):
                refused.append(Refused(arrays[0], *spans, str(no)))
            number += 1
            continue
        saved = program.array(arrays[0]).type
        bytes_ = ONE
        for extent in saved.shape:
            bytes_ = bytes_ * extent
        fused.append(Fused(arrays[0], "prologue", *spans, bytes_ * saved.dtype.itemsize * 2))
        program = cleaned(replace(program, calls=tuple(c for n, c in enumerate(calls) if n != number)))
        plans = tuple(plan for n, plan in enumerate(plans) if n != number)
    return program, plans, tuple(fused), tuple(refused)


def with_rows(report: FusionReport, program: Program, plans: Plans) -> FusionReport:
    """The report of fusion with the rows that products compute themselves, and with those that they do not and why."""
    joined, left = fuse_horizontally(program, plans)
    made, _, fused, refused = with_prologues(joined, left)
    gone = {f.array for f in fused}
    told = {r.array for r in refused}
    kept = tuple(r for r in report.refused if r.array not in gone and r.array not in told)
    if not fused and not refused:
        return report
    return FusionReport((*report.fused, *fused), (*kept, *refused), report.before, len(made.calls))


class MadeRows:
    """A kernel that makes an array row by row: reductions of the row, then one loop that writes its elements."""

    def __init__(self, program: Program, number: int, readers: Sequence[int]) -> None:
        self.program, self.call = program, program.calls[number]
        kernel = self.call.kernel
        nests = [op for op in kernel.body.ops if op.opcode == "parallel"]
        stores = [op for op in walk(kernel.body) if OPS[op.opcode].effect == "write"]
        if len(nests) != 1 or len(stores) != 1 or stores[0].opcode != "store":
            raise NotRows("")
        self.parallel, self.store = nests[0], stores[0]
        self.array = names_of(self.call)[self.store.operands[0]]
        self.region = self.parallel.regions[0]
        self.head = [op for op in kernel.body.ops if op is not self.parallel]
        sweeps = [op for op in self.region.ops if op.opcode == "for" and self.store in op.regions[0].ops]
        if len(sweeps) != 1 or not sweeps[0].attrs.get("independent") or len(sweeps[0].operands) != 3:
            raise NotRows("")
        (self.sweep,) = sweeps
        if any(op.opcode in ("for", "while", "if") for op in self.region.ops if op is not self.sweep):
            raise NotRows("")
        self.check(number, readers)

    def check(self, number: int, readers: Sequence[int]) -> None:
        program, type_ = self.program, self.program.array(self.array).type
        if all(a.name != self.array for a in program.scratch):
            raise NotRows(f"'{self.array}' is a result, so it is written anyway")
        if self.call.loops or any(program.calls[n].loops for n in readers):
            raise NotRows("calls of an ordered loop stay apart")
        reads = read_by(self.call)
        for n in range(number + 1, readers[-1] + 1):
            if changed := reads & set(written_by(program.calls[n])):
                raise NotRows(f"'{min(changed)}' is written between the two")
        indices = self.store.operands[1 : 1 + type_.rank]
        self.index = self.sweep.regions[0].args[0]
        if len(indices) != type_.rank or {*indices} != {self.index, *self.region.args} or len(indices) != len(self.region.args) + 1:
            raise NotRows(f"'{self.array}' is not written at the loops' own indices")
        self.axis = indices.index(self.index)
        forms = analyse(self.call.kernel)
        low, high, step = (forms[v].constant if not forms[v].factors else None for v in self.sweep.operands)
        if (low, high, step) != (ZERO, type_.shape[self.axis], ONE):
            raise NotRows(f"the loop does not walk all of '{self.array}'")
        self.rows = [next(i for i, v in enumerate(indices) if v is arg) for arg in self.region.args]
        """For each of its indices, the axis of the array."""
        self.element = [op for op in self.sweep.regions[0].ops[:-1] if op is not self.store]
        if any(has_effects(op) or op.regions for op in self.element):
            raise NotRows("the loop that makes it has loops inside, or writes other things too")
        work = sum(1 for op in self.element if op.opcode not in ("const", "size", "cast", "load"))
        if work > MOST_WORK or any(OPS[op.opcode].group == "function" for op in self.element):
            raise NotRows(f"every element would be computed many times over ({work} operations)")

    def inside(self, call: KernelCall) -> KernelCall:
        """A reader with the rows computed in it."""
        kernel = call.kernel
        values = {name: param for param, name in names_of(call).items()}
        memory = values[self.array]
        (nest,) = (op for op in kernel.body.ops if op.opcode == "parallel")
        loads = [op for op in walk(kernel.body) if op.opcode == "load" and op.operands[0] is memory]
        rank = len(self.rows) + 1
        outer = {*nest.regions[0].args, *(r for op in kernel.body.ops for r in op.results)}
        wanted = [tuple(load.operands[1 + axis] for axis in self.rows) for load in loads]
        if any(w != wanted[0] for w in wanted) or any(v not in outer for v in wanted[0]) or any(len(load.operands) != 1 + rank for load in loads):
            raise NotRows(f"'{self.array}' is needed in other rows than where it is made")
        mapping: dict[Value, Value] = {}
        for param, name in names_of(self.call).items():
            if name != self.array:
                mapping[param] = values.setdefault(name, param)
        top = Builder(kernel.span)
        clone_ops(top, self.head, mapping)
        inner = Builder(self.parallel.span)
        mapping.update(zip(self.region.args, wanted[0], strict=True))
        clone_ops(inner, [op for op in self.region.ops if op is not self.sweep and op.opcode != "yield"], mapping)

        def at_load(b: Builder, op: Op) -> Sequence[Value] | None:
            if op.opcode != "load" or op.operands[0] is not memory:
                return None
            local = dict(mapping) | {self.index: op.operands[1 + self.axis]}
            clone_ops(b, self.element, local)
            value = self.store.operands[-1]
            return (local.get(value, value),)

        body: list[Op] = []
        for op in kernel.body.ops:
            if op is not nest:
                body.append(op)
                continue
            region = nest.regions[0]
            rewritten = rewrite_block(Block((), region.ops), at_load, {})
            body.append(replace(nest, regions=(Block(region.args, (*inner.ops, *rewritten.ops)),)))
        made = replace(kernel, params=tuple(values.values()), body=Block((), (*top.ops, *body)), facts=joined_facts(self.call.kernel, kernel))
        return KernelCall(made, tuple(values), call.loops)


def _units(plans: Plans, number: int) -> int:
    plan = plans[number]
    return plan.unit if isinstance(plan, Gemv) else 1
