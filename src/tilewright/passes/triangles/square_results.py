"""Products of which some results are wanted become products of all, and a kernel that takes those that count. `Program -> Program`.

In: a program. Out: the same, where the sum of a product stands in a loop over the columns whose ends depend on the row, or under a condition that
compares row and column, and is a contraction once it is computed for all columns: it then writes scratch, and the rest of the kernel reads that.

    parallel i { for j in 0..i + 1 { s = reduce k { a[i, k] * a[j, k] }; out[i, j] = f(s) } }
    -> parallel i, j { sum[i, j] = reduce k { a[i, k] * a[j, k] } }
       parallel i { for j in 0..i + 1 { out[i, j] = f(sum[i, j]) } }

A sum that is there for all results, some of which a condition stores, is a product of its own in the same way. Sums outside of a triangle read what is there and are dropped. Tiles without terms are skipped (`square_triangles`), and of symmetric products half
is computed on a CPU (`lower_symmetric_cpu`). Of conditions around sums only those that leave a triangle are taken: a band would be few of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.contraction import find_contraction
from tilewright.base.dtypes import f32, f64
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, SizeCall, without_clamp
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray, ProgramCheck
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import INDEX, Tensor, dtype_of, tensor
from tilewright.passes.common.simplify import simplify
from tilewright.passes.triangles.square_triangles import as_product
from tilewright.passes.windows.guards import guard_tests
from tilewright.passes.windows.join_guards import is_sum


@record
class _SomeResults:
    """A nest, the indices of its sums with their extents, and the ops that each sum needs."""

    nest: Op
    indices: tuple[Value, ...]
    extents: tuple[Size, ...]
    before: tuple[Op, ...]
    reduction: Op
    all: bool = False
    """All sums were computed before."""


def square_results(program: Program) -> Program:
    """The program with such kernels as two."""
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    for call in program.calls:
        found = None if call.varies or call.loops else _triangle(call.kernel)
        product = None if found is None else _product(call.kernel, found, f"{call.kernel.name}.sums{len(scratch)}", program.checks)
        if found is None or product is None:
            calls.append(call)
            continue
        kernel, memory = product
        assert isinstance(memory.type, Tensor)
        scratch.append(ProgramArray(str(memory.name), memory.type, "scratch"))
        names = {**dict(zip(call.kernel.params, call.args, strict=True)), memory: str(memory.name)}
        calls += [_call(kernel, names, call), _call(_taken(call.kernel, found, memory), names, call)]
    return replace(program, calls=tuple(calls), scratch=tuple(scratch))


def _call(kernel: Kernel, names: dict[Value, str], of: KernelCall) -> KernelCall:
    used = {v for op in walk(kernel.body) for v in op.operands}
    params = tuple(p for p in names if p in used)
    return KernelCall(replace(kernel, params=params), tuple(names[p] for p in params), of.loops)


# -- what is recognised ---------------------------------------------------------------------------------------------


def _triangle(kernel: Kernel) -> _SomeResults | None:
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return None
    (nest,) = parallels
    region = nest.regions[0]
    inner = [op for op in region.ops if op.regions]
    if len(inner) > 1:
        return _stored_by_condition(nest, inner, analyse(kernel))
    if len(inner) != 1 or any(has_effects(op) and op.opcode != "store" for op in region.ops if op is not inner[0] and op.opcode != "yield"):
        return None
    forms = analyse(kernel)
    made = {result: op for op in walk(kernel.body) for result in op.results}
    if inner[0].opcode == "for":
        return _in_loop(nest, inner[0], forms) if _is_alone(inner[0].regions[0]) else None
    return _under_condition(nest, inner[0], made, forms) if inner[0].opcode == "if" and _is_alone(inner[0].regions[0]) else None


def _is_alone(body: Block) -> bool:
    """Whether nothing but one op has a region."""
    return sum(bool(op.regions) for op in body.ops) == 1


def _stored_by_condition(nest: Op, inner: Sequence[Op], forms: Forms) -> _SomeResults | None:
    """`parallel i, j { s = reduce …; if … { store } }`."""
    region = nest.regions[0]
    sums, branches = [op for op in inner if is_sum(op)], [op for op in inner if op.opcode == "if"]
    extents = [forms[v] for v in nest.operands]
    if len(sums) != 1 or len(sums) + len(branches) != len(inner) or any(e.factors for e in extents) or not any(map(has_effects, branches)):
        return None
    if any(op.regions and op.opcode != "if" for branch in branches for side in branch.regions for op in walk(side)):
        return None
    found = _found(nest, tuple(region.args), tuple(e.constant for e in extents), region.ops, ())
    return None if found is None else replace(found, all=True)


def _in_loop(nest: Op, loop: Op, forms: Forms) -> _SomeResults | None:
    """`parallel i { for j in … }`, one end of which depends on i."""
    rows = nest.regions[0].args
    if len(rows) != 1 or not loop.attrs.get("independent") or len(loop.operands) != 3 or loop.results:
        return None
    low, high, step = (forms[v] for v in loop.operands)
    (row,), (column,) = rows, loop.regions[0].args
    moving = [end for end in (low, high) if end.factors]
    if step.factors or step.constant != ONE or len(moving) != 1 or moving[0].values != (row,) or moving[0].factor(row) != ONE:
        return None
    extent = forms[nest.operands[0]]
    if extent.factors:
        return None
    height, width = extent.constant, high.constant + (extent.constant - 1 if high.factors else 0)
    if high.factors and high.constant == ZERO:
        width = height  # rows that end before the diagonal: with it, the product is square
    elif low.factors and low.constant == ONE and without_clamp(height) == width - 1:
        height = width  # so it is with the row after the last, which has no column behind the diagonal
    return _found(nest, (row, column), (height, width), loop.regions[0].ops, tuple(op for op in nest.regions[0].ops if op is not loop))


def _under_condition(nest: Op, branch: Op, made: dict[Value, Op], forms: Forms) -> _SomeResults | None:
    """`parallel i, j { if j <= i { … } }`."""
    indices = nest.regions[0].args
    if len(indices) != 2 or branch.results or any(op.opcode != "yield" for op in branch.regions[1].ops):
        return None
    tests = guard_tests(branch.operands[0], made, forms)
    if len(tests) != 1 or tests[0].form is None or tests[0].divisor:
        return None
    if sorted(str(tests[0].form.factor(v)) for v in indices) != ["-1", "1"] or len(tests[0].form.factors) != 2:
        return None
    extents = [forms[v] for v in nest.operands]
    if any(e.factors for e in extents):
        return None
    before = tuple(op for op in nest.regions[0].ops if op is not branch)
    return _found(nest, tuple(indices), tuple(e.constant for e in extents), branch.regions[0].ops, before)


def _found(nest: Op, indices: tuple[Value, ...], extents: tuple[Size, ...], body: Sequence[Op], before: Sequence[Op]) -> _SomeResults | None:
    """What `body` computes, where it is one sum that reads nothing of what is written."""
    sums = [op for op in body if is_sum(op)]
    if len(sums) != 1 or has_effects(sums[0]) or dtype_of(sums[0].result.type) not in (f32, f64):
        return None
    early = body[: list(body).index(sums[0])]
    rest = [op for op in walk(Block((), (*before, *body))) if op.opcode in ("store", "atomic", "accumulate")]
    if any(op.regions or has_effects(op) for op in early) or any(op.opcode != "store" for op in rest):
        return None
    written = {op.operands[0] for op in rest}
    values = tuple(op for op in (*before, *early) if op.opcode not in ("yield", "store"))
    if any(not written.isdisjoint(op.operands) for op in walk(Block((), (*values, sums[0])))):
        return None
    return _SomeResults(nest, indices, extents, values, sums[0])


# -- the two kernels ------------------------------------------------------------------------------------------------


def _product(kernel: Kernel, found: _SomeResults, name: str, checks: Sequence[ProgramCheck]) -> tuple[Kernel, Value] | None:
    """The kernel of all sums and where it writes them; None where it is no contraction, or may read outside of its arrays."""
    memory = Value(tensor(dtype_of(found.reduction.result.type), *found.extents, align=16), name)
    top, b = Builder(kernel.span), Builder(found.nest.span)
    mapping: dict[Value, Value] = {}
    clone_ops(top, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)
    args = tuple(Value(INDEX, index.name) for index in found.indices)
    mapping.update(zip(found.indices, args, strict=True))
    clone_ops(b, [*found.before, found.reduction], mapping)
    b.multi("store", memory, *args, mapping[found.reduction.result])
    b.multi("yield")
    extents = tuple(top.index(size) for size in found.extents)
    parallel = replace(found.nest, operands=extents, regions=(Block(args, tuple(b.ops)),))
    product = simplify(eliminate_dead(replace(kernel, name=f"{kernel.name}.sums", body=Block((), (*top.ops, parallel)))))
    triangles = as_product(product)
    contraction = find_contraction(triangles[0] if triangles else product)
    if contraction is None or is_watched(product):
        return None
    if found.all:
        return product, memory
    if len(contraction.m) != 1 or len(contraction.n) != 1:
        return None
    for load in (op for op in walk(contraction.reduction.regions[0]) if op.opcode == "load"):
        tensor_type = load.operands[0].type
        assert isinstance(tensor_type, Tensor)
        for place, size in zip(load.operands[1:], tensor_type.shape, strict=False):
            form = contraction.forms.get(place)
            if form is None:
                return None
            for index, extent in zip(contraction.indices, contraction.extents, strict=True):
                if index in form.values and not (form.is_just(index) and reaches(size, extent, checks)):
                    return None
    return product, memory


def reaches(size: Size, extent: Size, checks: Sequence[ProgramCheck]) -> bool:
    """Whether an axis is as long as a loop along it, where the loop has turns at all: calls check that."""
    return size == extent or any(c.relation == "lt" and c.right == size and _without_ones(c.left + 1) == extent for c in checks)


def _without_ones(size: Size) -> Size:
    """A product without factors `min(1, n)`, which are 1 where there is anything to compute."""
    if len(size.terms) != 1:
        return size
    ((atoms, factor),) = size.terms
    return Size(((tuple(a for a in atoms if not (isinstance(a, SizeCall) and a.op == "min" and ONE in (a.a, a.b))), factor),))


def _taken(kernel: Kernel, found: _SomeResults, memory: Value) -> Kernel:
    """The kernel with sums read from memory."""

    def changed(op: Op) -> Op:
        if op is found.reduction:
            return Op("load", (memory, *found.indices), op.results, span=op.span)
        return replace(op, regions=tuple(Block(r.args, tuple(changed(o) for o in r.ops)) for r in op.regions)) if op.regions else op

    body = Block(kernel.body.args, tuple(changed(op) for op in kernel.body.ops))
    return simplify(eliminate_dead(replace(kernel, body=body)))
