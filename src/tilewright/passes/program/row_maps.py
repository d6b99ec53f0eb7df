"""Maps of few rows compute the norm of their rows themselves. `Program -> Program`, at the loop stage.

In: a program, its plans, and the sizes of the call. Out: the same, where an array that a kernel makes row by row, from what the row's reductions give, and that only maps read, each at places of
the row that it writes, is never written: the map becomes a loop over the row, behind the reductions. Queries and keys of a decode step are normed, turned and appended by one kernel.
Values are rounded to the dtype of the array they no longer pass through, so results stay what they were.

    parallel i { s = reduce k x[i, k]²; for k { h[i, k] = x[i, k] * f(s) } }         parallel i { s = reduce k x[i, k]²
    parallel i, j { y[i, j] = h[i, j] * c[j] + h[i, j - n] * d[j] }             ->       for j { y[i, j] = x[i, j] * f(s) * c[j] + x[i, j - n] * f(s) * d[j] } }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, rewrite_block
from tilewright.passes.program.fuse import cleaned, joined_facts, names_of, read_by, written_by
from tilewright.passes.program.fuse_horizontally import nest_extents
from tilewright.passes.program.row_prologues import MadeRows, NotRows
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import MatrixSchedule
from tilewright.passes.schedules.plans import Plans

FEW = 1 << 15
"""Elements of the rows, at most: a row is walked by few threads, and each element of it is computed for every place that needs it."""
MOST_THREADS = 256
"""Of a block that walks a row."""


def row_maps(program: Program, plans: Plans, target: Target, hints: Mapping[str, int]) -> tuple[Program, Plans]:
    """The program with rows computed where maps need them, and the plans of the calls that are left."""
    if not target.simt or program.loops:
        return program, plans
    number = 0
    while number < len(program.calls):
        call = program.calls[number]
        arrays = written_by(call)
        readers = [n for n in range(number + 1, len(program.calls)) if set(arrays) & read_by(program.calls[n])]
        try:
            if not readers or any(isinstance(plans[n], MatrixSchedule) for n in (number, *readers)):
                raise NotRows("")
            rows = MadeRows(program, number, readers)
            length_of_row = program.array(rows.array).type.shape[rows.axis]
            extent = product(program.array(rows.array).type.shape)
            if not extent.names <= hints.keys() or extent.evaluate(hints) > FEW:
                raise NotRows("")
            calls = list(program.calls)
            for reader in readers:
                calls[reader] = _walked(rows, calls[reader])
        except NotRows:
            number += 1
            continue
        program = cleaned(replace(program, calls=tuple(c for n, c in enumerate(calls) if n != number)))
        plans = tuple(_schedule(calls[n], length_of_row.evaluate(hints)) if n in readers else plan for n, plan in enumerate(plans) if n != number)
    return program, plans


def _schedule(call: KernelCall, length: int) -> Schedule:
    """A thread for each element of a row, as far as a block has as many: what is computed of an element takes longer than what threads tell each other."""
    (nest,) = (op for op in call.kernel.body.ops if op.opcode == "parallel")
    whole = 1 << max(0, length - 1).bit_length()
    threads = min(MOST_THREADS, max(32, whole))
    return Schedule((1,) * len(nest.operands), max(threads, whole), 1, vector_on_reduction=True, threads=threads)


def _walked(rows: MadeRows, call: KernelCall) -> KernelCall:
    """A map with a loop over the row in place of its last index, behind the reductions of the row."""
    kernel = call.kernel
    values = {name: param for param, name in names_of(call).items()}
    memory = values[rows.array]
    nests = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(nests) != 1 or any(op.opcode in ("reduce", "for", "while", "parallel", "atomic", "accumulate") for op in walk(nests[0].regions[0])):
        raise NotRows("")
    (nest,) = nests
    region = nest.regions[0]
    *lead, last = region.args
    loads = [op for op in walk(kernel.body) if op.opcode == "load" and op.operands[0] is memory]
    uses = [op for op in walk(kernel.body) if memory in op.operands]
    if not loads or len(uses) != len(loads) or any(op.attrs.get("masked") or len(op.operands) != 2 + len(rows.rows) for op in loads):
        raise NotRows("")
    wanted = [tuple(load.operands[1 + axis] for axis in rows.rows) for load in loads]
    before = _free_of(region.ops, last)
    known = {*lead, *(r for op in before for r in op.results), *(r for op in kernel.body.ops for r in op.results)}
    if any(w != wanted[0] for w in wanted) or any(v not in known for v in wanted[0]):
        raise NotRows("")
    if nest_extents(kernel, nest)[-1] != rows.program.array(rows.array).type.shape[rows.axis]:
        raise NotRows("")
    mapping: dict[Value, Value] = {}
    for param, name in names_of(rows.call).items():
        if name != rows.array:
            mapping[param] = values.setdefault(name, param)
    top = Builder(kernel.span)
    clone_ops(top, rows.head, mapping)
    extents = nest.operands[:-1]
    if not lead:  # one row
        extents = (top.index(1),)
        lead = [Value(extents[0].type, "row")]
    inner = Builder(rows.parallel.span)
    inner.ops += before
    mapping.update(zip(rows.region.args, wanted[0], strict=True))
    clone_ops(inner, [op for op in rows.region.ops if op is not rows.sweep and op.opcode != "yield"], mapping)

    def at_load(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "load" or op.operands[0] is not memory:
            return None
        local = dict(mapping) | {rows.index: op.operands[1 + rows.axis]}
        clone_ops(b, rows.element, local)
        value = rows.store.operands[-1]
        return (local.get(value, value),)

    rest = rewrite_block(Block((), tuple(op for op in region.ops if op not in before)), at_load, {})
    low, step = inner.index(0), inner.index(1)
    sweep = Op("for", (low, nest.operands[-1], step), (), MappingProxyType({**rows.sweep.attrs}), (Block((last,), rest.ops),), nest.span)
    inner.append(sweep)
    inner.multi("yield")
    parallel = replace(nest, operands=extents, regions=(Block(tuple(lead), tuple(inner.ops)),))
    body = [parallel if op is nest else op for op in kernel.body.ops]
    made = replace(kernel, params=tuple(values.values()), body=Block((), (*top.ops, *body)), facts=joined_facts(rows.call.kernel, kernel))
    return KernelCall(made, tuple(values), call.loops)


def _free_of(ops: Sequence[Op], index: Value) -> list[Op]:
    """The pure ops that an index has no part in."""
    late = {index}
    found: list[Op] = []
    for op in ops:
        if op.opcode != "yield" and not op.regions and OPS[op.opcode].effect == "pure" and not any(v in late for v in op.operands):
            found.append(op)
        else:
            late.update(op.results)
    return found
