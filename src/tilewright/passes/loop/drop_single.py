"""A nest of two loops of which one has a single turn becomes one loop: a product with one row is a matrix times a vector.

In: a loop-stage kernel. Out: the same; the index of the loop that is dropped is 0. Schedules are chosen by what the indices of a nest are: with an index for the
row, memory seems to be walked along the sum, as the row is, and not along the columns of the matrix. Runs once sizes are constants, before loops are merged.

    parallel 1, %n (%i, %j) { %s = reduce %k (%p) { yield x[i, p] * w[p, j] }; store %y, %i, %j, %s }
    -> parallel %n (%j) { %s = reduce %k (%p) { yield x[0, p] * w[p, j] }; store %y, 0, %j, %s }
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.affine import analyse
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op
from tilewright.ir.rewrite import clone_ops

_BY_POSITION = frozenset(("blocks", "dots", "in_order", "reduce_extent"))
"""Attributes of kernels that speak of loops by their number, or of how they are walked."""


def drop_single(kernel: Kernel) -> Kernel:
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1 or len(parallels[0].operands) != 2 or kernel.attrs.keys() & _BY_POSITION:
        return kernel
    (parallel,) = parallels
    forms = analyse(kernel)
    single = [
        p
        for p, extent in enumerate(parallel.operands)
        if extent in forms and not forms[extent].factors and forms[extent].constant == ONE
    ]
    if len(single) != 1:
        return kernel
    b = Builder(parallel.span)
    (position,) = single
    region = parallel.regions[0]
    zero = b.index(0)
    other = 1 - position
    inner = Builder(parallel.span)
    clone_ops(inner, region.ops, {region.args[position]: zero})
    nest = replace(
        parallel, operands=(parallel.operands[other],), regions=(Block((region.args[other],), tuple(inner.ops)),)
    )
    ops: list[Op] = []
    for op in kernel.body.ops:
        ops += [*b.ops, nest] if op is parallel else [op]
    return replace(kernel, body=replace(kernel.body, ops=tuple(ops)))
