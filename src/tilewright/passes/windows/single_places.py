"""Windows of one place are none: a convolution with a window of 1x1 is a product of matrices. `Kernel -> Kernel`.

In: a loop-stage kernel. Out: the same, where of a sum over channels and the places of a window those with a single turn are left out, if no other index slides over an image,
all pixels are read, and all tests of places hold wherever the loops go. What is left is a plain sum, whose loops over places may then be one; arrays are seen without their axes
of a single place. Windows that leave pixels out stay as they are: the copy engine walks them. So do elements of f32, which are multiplied in parts either way.

    parallel n, i, j, k { reduce c, r: 1, s: 1 { y = i + r; z = j + s; if 0 <= y < h and 0 <= z < w { x[n, y, z, c] * w[k, r, s, c] } else { 0 } } }
    -> parallel n, i, j, k { reduce c { x[n, i, j, c] * w[k, c] } }
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.base.sizes import ONE, Size, times_at_least, without_clamp
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.simplify import simplify
from tilewright.passes.windows.guards import guard_tests
from tilewright.passes.windows.join_guards import flattened, is_sum

_BY_POSITION = frozenset(("blocks", "dots", "in_order", "reduce_extent"))
"""Attributes of kernels that speak of loops by their number, or of how they are walked."""


def single_places(kernel: Kernel) -> Kernel:
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1 or kernel.attrs.keys() & _BY_POSITION:
        return kernel
    (parallel,) = parallels
    region = parallel.regions[0]
    forms = analyse(kernel)
    changed = {op: _plain(op, parallel, kernel, forms) for op in region.ops if is_sum(op)}
    if not any(changed.values()):
        return kernel
    ops = [op for old in region.ops for op in (changed.get(old) or (old,))]
    b = Builder(parallel.span)
    extents = [_unclamped(b, extent, kernel, forms) for extent in parallel.operands]
    nest = replace(parallel, operands=tuple(extents), regions=(Block(region.args, tuple(ops)),))
    around = [other for op in kernel.body.ops for other in ((*b.ops, nest) if op is parallel else (op,))]
    return simplify(_flatter(eliminate_dead(replace(kernel, body=Block(kernel.body.args, tuple(around))))))


def _flatter(kernel: Kernel) -> Kernel:
    """The kernel with arrays that are only read seen without their axes of extent 1."""
    uses = {p: [op for op in walk(kernel.body) if p in op.operands] for p in kernel.params if isinstance(p.type, Tensor) and p.type.rank > 1}
    seen: dict[Value, Value] = {}
    for memory, ops in uses.items():
        tensor = memory.type
        assert isinstance(tensor, Tensor)
        kept = _kept(tensor)
        if len(kept) < tensor.rank and all(op.opcode == "load" and len(op.operands) == 1 + tensor.rank for op in ops):
            type_ = replace(tensor, shape=tuple(tensor.shape[axis] for axis in kept), strides=tuple(tensor.strides[axis] for axis in kept))
            seen[memory] = Value(type_, memory.name)

    def one(op: Op) -> Op:
        regions = tuple(Block(region.args, tuple(one(inner) for inner in region.ops)) for region in op.regions)
        if op.opcode != "load" or op.operands[0] not in seen:
            return replace(op, regions=regions) if regions else op
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        return replace(op, operands=(seen[memory], *(op.operands[1 + axis] for axis in _kept(memory.type))))

    body = Block(kernel.body.args, tuple(one(op) for op in kernel.body.ops))
    return replace(kernel, params=tuple(seen.get(p, p) for p in kernel.params), body=body)


def _kept(tensor: Tensor) -> list[int]:
    """The axes that have several places; the first, where none has."""
    return [axis for axis, extent in enumerate(tensor.shape) if extent != ONE] or [0]


def _unclamped(b: Builder, extent: Value, kernel: Kernel, forms: Forms) -> Value:
    """An extent that is at least 0 without saying so, since some array has it, so that loops are seen to be as long as the arrays they walk."""
    form = forms.get(extent)
    size = without_clamp(form.constant) if form is not None and not form.factors else None
    arrays = [p.type for p in kernel.params if isinstance(p.type, Tensor)]
    return b.index(size) if size is not None and any(size in array.shape for array in arrays) else extent


def _plain(sum_: Op, parallel: Op, kernel: Kernel, forms: Forms) -> list[Op] | None:
    """A sum without its indices of a single turn, and without its condition; None where that is not all there is of a window."""
    made = {result: op for op in walk(kernel.body) for result in op.results}
    flat = flattened(sum_, made)
    if flat is None or any(op.opcode == "load" and dtype_of(op.results[0].type).itemsize != 2 for op in flat.ops):
        return None
    extents = [forms.get(extent) for extent in flat.extents]
    single = [arg for arg, extent in zip(flat.args, extents, strict=True) if extent is not None and not extent.factors and extent.constant == ONE]
    left = [(extent, arg) for extent, arg in zip(flat.extents, flat.args, strict=True) if arg not in single]
    results = set(parallel.regions[0].args)
    if not single or not left or any(_slides(op, {arg for _, arg in left}, results, forms) for op in flat.ops):
        return None
    limits = {arg: forms.get(extent) for arg, extent in (*zip(parallel.regions[0].args, parallel.operands, strict=True), *((arg, extent) for extent, arg in left))}
    known = {arg: limit.constant for arg, limit in limits.items() if limit is not None and not limit.factors}
    tests = [test for condition in flat.conditions for test in guard_tests(condition, made, forms)]
    if not all(test.form is not None and not test.divisor and _holds(test.form, known, set(single)) for test in tests):
        return None
    b = Builder(sum_.span)
    zero = b.index(0)
    inner = Builder(sum_.span)
    mapping = dict.fromkeys(single, zero)
    clone_ops(inner, flat.ops, mapping)
    inner.multi("yield", mapping.get(flat.term, flat.term))
    term = Block(tuple(arg for _, arg in left), tuple(inner.ops))
    return [*b.ops, replace(sum_, operands=tuple(extent for extent, _ in left), regions=(term,))]


def _slides(op: Op, sums: set[Value], results: set[Value], forms: Forms) -> bool:
    """Whether an index of a load is made of one that is summed over and of one of results, or walks in steps."""
    used = [forms[v] for v in op.operands[1:] if v in forms] if op.opcode == "load" else []
    return any((set(form.values) & sums and set(form.values) & results) or any(form.factor(v) != ONE for v in form.values if v in results) for form in used)


def _holds(form: Affine, extents: dict[Value, Size], zeros: set[Value]) -> bool:
    """Whether a form is at least 0 wherever its indices go: it is least where those that it falls with are largest."""
    least = form.constant
    for value, factor in form.factors:
        step = factor.constant
        if value in zeros:
            continue
        if step is None or value not in extents:
            return False
        if step < 0:
            least = least + times_at_least(without_clamp(extents[value]) - 1, step)
    return least.constant is not None and least.constant >= 0
