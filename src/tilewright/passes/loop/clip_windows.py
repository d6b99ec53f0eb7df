"""Cut sums at the borders of what they read, for CPUs. `Kernel -> Kernel`, loop stage.

In: a kernel with a sum whose terms stand under conditions that bound the sum's own indices. Out: the same with shorter loops and no condition:

    reduce r < 3 { y = i + r - 1; if y >= 0 and y < h { x[y, c] } else { 0 } }
    reduce r < min(3, h + 1 - i) - max(0, 1 - i) { y = i + (r + max(0, 1 - i)) - 1; x[y, c] }

Only where the bounds are the same for all elements of a vector: conditions that test the index along which memory is walked are left to
`pad_windows`, which comes after. What is left out was zero, so results do not change.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.analysis.loop_nest import nest_of, vector_index
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead


@record
class _Bound:
    """A sum's index `index` stays at or above `limit` (`low`), or below it."""

    index: Value
    limit: Affine
    low: bool


def clip_windows(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with the first such sum's loops cut, or as it is."""
    if target.simt or sum(op.opcode == "parallel" for op in kernel.body.ops) != 1:
        return kernel
    nest = nest_of(kernel)
    if not nest.reductions or vector_index(nest) < 0:
        return kernel
    vector = nest.parallel.regions[0].args[vector_index(nest)]
    forms = analyse(kernel)
    made = {result: op for op in walk(kernel.body) for result in op.results}
    for reduction in nest.reductions:
        guarded = made.get(reduction.regions[0].yields[0])
        if reduction.attrs["kind"] != "add" or len(reduction.results) != 1 or guarded not in reduction.regions[0].ops:
            continue
        if guarded is None or guarded.opcode != "if" or len(guarded.results) != 1 or not _is_zero(made.get(guarded.regions[1].yields[0])):
            continue
        bounds = _bounds(guarded.operands[0], made, forms, reduction, nest.parallel, vector)
        if bounds:
            return eliminate_dead(_cut(kernel, nest.parallel, reduction, guarded, bounds))
    return kernel


def _is_zero(op: Op | None) -> bool:
    return op is not None and op.opcode == "const" and op.attrs["value"] == 0


def _bounds(
    condition: Value, made: dict[Value, Op], forms: Forms, reduction: Op, parallel: Op, vector: Value
) -> list[_Bound] | None:
    """What the condition says about the sum's indices; None where it says anything else."""
    op = made.get(condition)
    if op is not None and op.opcode == "and":
        first, second = (_bounds(v, made, forms, reduction, parallel, vector) for v in op.operands)
        return None if first is None or second is None else first + second
    if op is None or op.opcode not in ("ge", "lt") or any(v not in forms for v in op.operands):
        return None
    form = forms[op.operands[0]].plus(forms[op.operands[1]], -ONE)
    own = [v for v in form.values if v in reduction.regions[0].args]
    outside = [v for v in form.values if v not in own]
    if len(own) != 1 or form.factor(own[0]) != ONE or not all(v in parallel.regions[0].args and v is not vector for v in outside):
        return None
    return [_Bound(own[0], Affine(((own[0], ONE),)).plus(form, -ONE), op.opcode == "ge")]


def _value(b: Builder, form: Affine) -> Value:
    total = b.index(form.constant)
    for value, factor in form.factors:
        total = b.add(total, value if factor == ONE else b.mul(value, b.index(factor)))
    return total


def _cut(kernel: Kernel, parallel: Op, reduction: Op, guarded: Op, bounds: list[_Bound]) -> Kernel:
    b = Builder(reduction.span)
    indices = reduction.regions[0].args
    lows: list[Value] = []
    extents: list[Value] = []
    for index, extent in zip(indices, reduction.operands, strict=True):
        own = [bound for bound in bounds if bound.index is index]
        low, high = b.index(ZERO), extent
        for bound in own:
            limit = _value(b, bound.limit)
            low, high = (b.op("max", low, limit), high) if bound.low else (low, b.op("min", high, limit))
        lows.append(low)
        extents.append(b.op("max", b.sub(high, low), b.index(0)) if own else extent)

    def body(at: Builder, *numbers: Value) -> list[Value]:
        env = {index: at.add(low, number) for index, low, number in zip(indices, lows, numbers, strict=True)}
        for op in reduction.regions[0].ops[:-1]:
            inner = guarded.regions[0].ops[:-1] if op is guarded else (op,)
            clone_ops(at, inner, env)
            if op is guarded:
                env[op.results[0]] = env.get(guarded.regions[0].yields[0], guarded.regions[0].yields[0])
        return [env[reduction.regions[0].yields[0]]]

    with b.at(reduction.span):
        (result,) = b.reduce("add", extents, body, [v.name for v in indices])
    # The new sum takes the old one's name, so that what follows stays as it is.
    last = replace(b.ops[-1], results=reduction.results)
    assert b.ops[-1].results == (result,)
    region = parallel.regions[0]
    ops: list[Op] = []
    for op in region.ops:
        ops += [*b.ops[:-1], last] if op is reduction else [op]
    cut = replace(parallel, regions=(Block(region.args, tuple(ops)),))
    return replace(kernel, body=Block(kernel.body.args, tuple(cut if op is parallel else op for op in kernel.body.ops)))
