"""Independent loops right inside a parallel loop, around a product, become axes of it. Kernel to kernel, loop stage, for CPUs.

    parallel i, j { for p in 0..2 { for q in 0..2 { s = reduce k { x[i, j, k] * w[k, p, q] }; store y[2 i + p, 2 j + q], s } } }
    -> parallel i, j, p, q { s = reduce k { x[i, j, k] * w[k, p, q] }; store y[2 i + p, 2 j + q], s }

All that recognises products and convolutions looks at the sums of a parallel loop.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.affine import Forms, analyse
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import INDEX
from tilewright.passes.windows.join_guards import is_sum


def promote_loops(kernel: Kernel, target: Target | None) -> Kernel:
    """The kernel with such loops as axes; the very same one where there are none."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if target is None or target.simt or len(parallels) != 1 or not parallels[0].operands or is_watched(kernel):
        return kernel
    (nest,) = parallels
    forms = analyse(kernel)
    loops: list[tuple[Op, Size]] = []
    ops: list[Op] = []
    body = nest.regions[0]
    while (found := _only_loop(body, forms)) is not None:
        ops += [op for op in body.ops if op is not found[0] and op.opcode != "yield"]
        loops.append(found)
        body = found[0].regions[0]
    if not loops or not _is_product(body):
        return kernel
    top, inner = Builder(kernel.span), Builder(nest.span)
    mapping: dict[Value, Value] = {}
    clone_ops(top, [op for op in kernel.body.ops if op is not nest and op.opcode != "yield"], mapping)
    operands = [*(mapping.get(v, v) for v in nest.operands), *(top.index(count) for _, count in loops)]
    args = [*nest.regions[0].args]
    for loop, _ in loops:
        own = Value(INDEX, loop.regions[0].args[0].name)
        mapping[loop.regions[0].args[0]] = own
        args.append(own)
    clone_ops(inner, [*ops, *body.ops], mapping)
    top.append(replace(nest, operands=tuple(operands), regions=(Block(tuple(args), tuple(inner.ops)),)))
    return eliminate_dead(replace(kernel, body=Block(kernel.body.args, tuple(top.ops))))


def _only_loop(body: Block, forms: Forms) -> tuple[Op, Size] | None:
    """The one loop of a body that has nothing else in it but numbers, with how often it runs."""
    loops = [op for op in body.ops if op.regions]
    if len(loops) != 1 or any(has_effects(op) or op.opcode == "load" for op in body.ops if op is not loops[0] and op.opcode != "yield"):
        return None
    (loop,) = loops
    if loop.opcode != "for" or not loop.attrs.get("independent") or loop.results or len(loop.operands) != 3:
        return None
    low, high, step = (forms.get(v) for v in loop.operands)
    if low is None or high is None or step is None or low.factors or high.factors or step.factors or low.constant != ZERO or step.constant != ONE:
        return None
    return loop, high.constant


def _is_product(body: Block) -> bool:
    """Whether a body has one sum, of products of two elements."""
    sums = [op for op in body.ops if op.regions]
    if len(sums) != 1 or not is_sum(sums[0]):
        return False
    inside = list(walk(sums[0].regions[0]))
    return len({op.operands[0] for op in inside if op.opcode == "load"}) > 1 and any(op.opcode in ("mul", "fma") for op in inside)
