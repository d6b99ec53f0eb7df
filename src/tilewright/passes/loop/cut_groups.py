"""An index of results that is divided by a length becomes two: groups, and results of a group. `Program -> Program`.

In: a program at the loop stage. Out: the same, where a product whose first factor is read by `o // k`, and whose second by `o`, or by `o // k` and `o % k`, has an axis
for each, as grouped convolutions and the heads of attention need; what is left over where `k` does not divide the axis is a kernel of its own, of plain loops, which has nothing to do in most calls. For CPUs.

    parallel o { y[o] = reduce c { x[o // k * n + c] * w[o, c] } }
    -> parallel g (of O // k), r (of k) { y[g k + r] = reduce c { x[g n + c] * w[g k + r, c] } }
       parallel r (of O - O // k * k)   { y[O // k * k + r] = reduce c { x[O // k * n + c] * w[O // k * k + r, c] } }
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Forms, analyse
from tilewright.base.intervals import surely_positive
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, floordiv, maximum, minimum, without_clamp
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, eliminate_dead, rewrite_block
from tilewright.ir.types import INDEX
from tilewright.passes.windows.join_guards import is_sum


@record
class _CutAxis:
    """The axis of a nest that is cut, its extent, and by what it is divided."""

    axis: int
    extent: Size
    length: Size


def cut_groups(program: Program, target: Target | None) -> Program:
    """The program with such axes cut; the very same one where there are none."""
    if target is None or target.simt:
        return program
    calls: list[KernelCall] = []
    changed = False
    for call in program.calls:
        kernels = [] if call.varies or is_watched(call.kernel) else _cut_kernels(call.kernel)
        calls += [replace(call, kernel=kernel, shared=None) for kernel in kernels] or [call]
        changed = changed or bool(kernels)
    return replace(program, calls=tuple(calls)) if changed else program


def _cut_kernels(kernel: Kernel) -> list[Kernel]:
    nests = [op for op in kernel.body.ops if op.regions]
    if len(nests) != 1 or nests[0].opcode != "parallel" or not {"floordiv", "mod"} & kernel.opcodes:
        return []
    (nest,) = nests
    cut = _cut(nest, analyse(kernel))
    if cut is None:
        return []
    # Divided by zero, all indices are in group 0, and none of a length is whole.
    some = ONE if surely_positive(cut.length) else maximum(ZERO, minimum(cut.length, ONE))
    groups = floordiv(cut.extent, maximum(cut.length, ONE)) * some
    rest = cut.extent - groups * cut.length
    found = [_of_groups(kernel, nest, cut, groups)]
    return [*found, _of_rest(kernel, nest, cut, groups, rest, some)] if rest != ZERO else found


def _cut(nest: Op, forms: Forms) -> _CutAxis | None:
    body = nest.regions[0]
    sums = [op for op in body.ops if op.regions]
    if len(sums) != 1 or not is_sum(sums[0]):
        return None
    inside = list(walk(sums[0].regions[0]))
    if not any(op.opcode in ("mul", "fma") for op in inside) or any(op.regions and not is_sum(op) and op.opcode != "if" for op in inside):
        return None
    divided = {op.operands for op in walk(body) if op.opcode in ("floordiv", "mod") and op.operands[0] in body.args}
    if len({(index, forms.get(length)) for index, length in divided}) != 1:
        return None
    (index, length), *_ = divided
    extent, by = forms.get(nest.operands[body.args.index(index)]), forms.get(length)
    if extent is None or by is None or extent.factors or by.factors or by.constant in (ZERO, ONE):
        return None
    quotients, rests = ({op.result for op in walk(body) if op.opcode == opcode and op.operands[0] is index} for opcode in ("floordiv", "mod"))
    parts = quotients | rests
    loads = [op for op in inside if op.opcode == "load"]
    summed = {arg for op in (sums[0], *inside) if op.opcode == "reduce" for arg in op.regions[0].args}
    # A group has a sum of its own, along the axis that it is a part of; without one, each result has its own image.
    by_part = {
        op.operands[0] for op in loads
        if any(v in forms and not parts.isdisjoint(forms[v].values) and not summed.isdisjoint(forms[v].values) for v in op.operands[1:])
    }
    by_index = {op.operands[0] for op in loads if any(v is index for v in op.operands[1:])}
    of_group, of_rest = ({op.operands[0] for op in loads if any(v in forms and not some.isdisjoint(forms[v].values) for v in op.operands[1:])} for some in (quotients, rests))
    # A product for each group: one factor is the group's, and the other has its results side by side, as the heads of attention do.
    apart = of_group - of_rest - by_index and of_group & of_rest - by_index
    return _CutAxis(body.args.index(index), without_clamp(extent.constant), by.constant) if (by_part and by_index - by_part) or apart else None


def _of_groups(kernel: Kernel, nest: Op, cut: _CutAxis, groups: Size) -> Kernel:
    old = nest.regions[0].args[cut.axis]
    group, own = Value(INDEX, f"{old.name}_group"), Value(INDEX, old.name)

    def index(b: Builder) -> tuple[Value, Value, Value]:
        return b.add(b.mul(group, b.index(cut.length)), own), group, own

    return _changed(kernel, nest, cut, ((group, groups), (own, cut.length)), index)


def _of_rest(kernel: Kernel, nest: Op, cut: _CutAxis, groups: Size, rest: Size, some: Size) -> Kernel:
    own = Value(INDEX, nest.regions[0].args[cut.axis].name)

    def index(b: Builder) -> tuple[Value, Value, Value]:
        return b.add(own, b.index(groups * cut.length)), b.index(groups), own if some == ONE else b.mul(own, b.index(some))

    found = _changed(kernel, nest, cut, ((own, rest),), index)
    return replace(found, name=f"{kernel.name}_rest", attrs=MappingProxyType({**found.attrs, "seldom": True}))


def _changed(
    kernel: Kernel, nest: Op, cut: _CutAxis, axes: Sequence[tuple[Value, Size]], index: Callable[[Builder], tuple[Value, Value, Value]]
) -> Kernel:
    """The kernel with these axes for the one that is cut. `index` makes the old index, its quotient and its rest."""
    old = nest.regions[0].args[cut.axis]
    top, inside = Builder(kernel.span), Builder(nest.span)
    mapping: dict[Value, Value] = {}
    clone_ops(top, [op for op in kernel.body.ops if op is not nest and op.opcode != "yield"], mapping)
    extents = [mapping.get(v, v) for v in nest.operands]
    extents[cut.axis : cut.axis + 1] = [top.index(extent) for _, extent in axes]
    args = [v if v is old else Value(v.type, v.name) for v in nest.regions[0].args]
    mapping.update(zip(nest.regions[0].args, args, strict=True))
    args[cut.axis : cut.axis + 1] = [v for v, _ in axes]
    whole, quotient, rest = index(inside)
    mapping[old] = whole
    clone_ops(inside, nest.regions[0].ops, mapping)
    parts = {"floordiv": quotient, "mod": rest}
    body = rewrite_block(Block((), tuple(inside.ops)), lambda _, op: (parts[op.opcode],) if op.opcode in parts and op.operands[0] is whole else None, {})
    top.append(replace(nest, operands=tuple(extents), regions=(Block(tuple(args), body.ops),)))
    return eliminate_dead(replace(kernel, body=Block(kernel.body.args, tuple(top.ops))))
