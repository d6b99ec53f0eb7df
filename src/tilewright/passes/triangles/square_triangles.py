"""Products of which a triangle counts become contractions that skip the rest. `Program -> Program`.

In: a program. Out: the same, where a sum of products whose length depends on the results, or whose condition compares the summed index with theirs, is a
contraction over all there is, whose factors have a guard each (`repaired`): tiles of the product skip what the guards leave empty
(`passes/windows/sum_ranges.py`). At a triangle's edge a tile multiplies with zeros, which is no number where the other factor is infinite. So a second
kernel looks at the results, and adds up those again, term by term, that are no number.

    parallel i, j { out[i, j] = reduce k in 0..max(j + 1 - i, 0) { a[i, i + k] * b[i + k, j] } }
    -> parallel i, j { out[i, j] = reduce k in 0..n { if k >= i and k < j + 1 { a[i, k] * b[k, j] } else { 0 } } }
       parallel i, j { bad = out[i, j] != out[i, j]; s = reduce k in 0..(max(j + 1 - i, 0) if bad else 0) { … }; if bad { out[i, j] = s } }
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.analysis.contraction import find_contraction, restates_bounds
from tilewright.base.dtypes import bf16, f16, f32, f64
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, SizeCall, minimum
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import INDEX, Tensor, dtype_of
from tilewright.passes.common.simplify import simplify
from tilewright.passes.windows.guards import emit, guard_tests
from tilewright.passes.windows.join_guards import is_sum
from tilewright.passes.windows.sum_ranges import sum_bounds


@record
class _Triangle:
    """A sum over `start..stop`; `place` is what loads have in place of its index, `whole` the extent of the axis that they walk."""

    reduction: Op
    start: Affine
    stop: Affine
    whole: Size


def square_triangles(program: Program) -> Program:
    """The program with such kernels as two."""
    calls: list[KernelCall] = []
    for call in program.calls:
        kernels = () if call.varies or is_watched(call.kernel) else as_product(call.kernel)
        calls += [KernelCall(kernel, call.args, call.loops) for kernel in kernels] or [call]
    return replace(program, calls=tuple(calls))


def as_product(kernel: Kernel) -> tuple[Kernel, ...]:
    """The product and what repairs it; none where the kernel is no such product."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1 or kernel.attrs.keys() & {"repaired", "padded"}:
        return ()
    (nest,) = parallels
    sums = [op for op in nest.regions[0].ops if op.regions]
    if len(sums) != 1 or not is_sum(sums[0]) or len(sums[0].operands) != 1 or has_effects(sums[0]):
        return ()
    (reduction,) = sums
    store = _plain_result(nest, reduction)
    if store is None or dtype_of(reduction.result.type) not in (f32, f64):
        return ()
    made = {result: op for op in walk(kernel.body) for result in op.results}
    triangle = _triangle(reduction, nest, made, analyse(kernel))
    product = _fitted(kernel if triangle is None else simplify(_squared(kernel, nest, triangle)))
    found = find_contraction(product)
    if found is None or found.batch or all(f.guard is None or restates_bounds(found, f) for f in (found.a, found.b)):
        return ()
    if any(f.load is None for f in (found.a, found.b)) or not sum_bounds(found):
        return ()
    marked = replace(product, attrs=MappingProxyType({**product.attrs, "repaired": True}))
    return marked, simplify(_repair(kernel, *_ranged(nest, reduction, made, analyse(kernel)), store))


def _ranged(nest: Op, reduction: Op, made: dict[Value, Op], forms: Forms) -> tuple[Op, Op]:
    """The nest and its sum with the terms that a condition leaves as a range, where it says no more than that: no term is tested then."""
    region = reduction.regions[0]
    (index,) = region.args
    branch = made.get(region.yields[0])
    if branch is None or branch.opcode != "if" or branch not in region.ops:
        return nest, reduction
    tests = [test.form for test in guard_tests(branch.operands[0], made, forms) if not test.divisor]
    bounds = [form for form in tests if form is not None and form.factor(index) in (ONE, -ONE)]
    if len(bounds) != len(guard_tests(branch.operands[0], made, forms)) or any(v not in (*nest.regions[0].args, index) for f in bounds for v in f.values):
        return nest, reduction
    top, b = Builder(reduction.span), Builder(reduction.span)
    low, high = top.index(0), reduction.operands[0]
    for form in bounds:
        rest = form.minus(Affine(((index, form.factor(index)),)))
        if form.factor(index) == ONE:
            low = top.op("max", low, emit(top, rest.times(-ONE)))
        else:
            high = top.op("min", high, top.add(emit(top, rest), top.index(1)))
    length = top.op("max", top.sub(high, low), top.index(0))
    step = Value(INDEX, index.name)
    mapping: dict[Value, Value] = {index: b.add(low, step)}
    clone_ops(b, [op for op in region.ops if op is not branch and op.opcode != "yield"], mapping)
    clone_ops(b, [op for op in branch.regions[0].ops if op.opcode != "yield"], mapping)
    b.multi("yield", mapping.get(branch.regions[0].yields[0], branch.regions[0].yields[0]))
    ranged = replace(reduction, operands=(length,), regions=(Block((step,), tuple(b.ops)),))
    ops = [op for old in nest.regions[0].ops for op in ((*top.ops, ranged) if old is reduction else (old,))]
    return replace(nest, regions=(Block(nest.regions[0].args, tuple(ops)),)), ranged


def _fitted(kernel: Kernel) -> Kernel:
    """The sum ends where the arrays end that it walks: the condition leaves out what is behind, which tiles would read."""
    nest = next(op for op in kernel.body.ops if op.opcode == "parallel")
    reduction = next(op for op in nest.regions[0].ops if is_sum(op))
    forms = analyse(kernel)
    (index,) = reduction.regions[0].args
    extent = forms[reduction.operands[0]]
    if extent.factors:
        return kernel
    size = extent.constant
    for op in walk(reduction.regions[0]):
        if op.opcode == "load":
            type_ = op.operands[0].type
            assert isinstance(type_, Tensor)
            for place, axis in zip(op.operands[1 : 1 + type_.rank], type_.shape, strict=True):
                size = minimum(size, axis) if forms[place].is_just(index) and axis not in _operands(size) else size
    b = Builder(reduction.span)
    length = b.index(size)
    ops = [op for old in nest.regions[0].ops for op in ((*b.ops, replace(old, operands=(length,))) if old is reduction else (old,))]
    changed = replace(nest, regions=(Block(nest.regions[0].args, tuple(ops)),))
    return eliminate_dead(replace(kernel, body=Block(kernel.body.args, tuple(changed if op is nest else op for op in kernel.body.ops))))


def _operands(size: Size) -> tuple[Size, ...]:
    """The sizes whose smallest it is."""
    if len(size.terms) == 1 and size.terms[0][1] == 1 and len(size.terms[0][0]) == 1:
        atom = size.terms[0][0][0]
        if isinstance(atom, SizeCall) and atom.op == "min":
            return (*_operands(atom.a), *_operands(atom.b))
    return (size,)


_LINEAR = frozenset({"add", "sub", "mul", "fma", "neg"})
"""Ops that make no number of what is none."""


def _plain_result(nest: Op, reduction: Op) -> Op | None:
    """The only store, where it writes no number if the sum is none, and nothing reads the array."""
    effects = [op for op in nest.regions[0].ops if op.opcode != "yield" and has_effects(op)]
    if len(effects) != 1 or effects[0].opcode != "store" or effects[0].attrs.get("masked"):
        return None
    (store,) = effects
    memory = store.operands[0]
    if any(memory in op.operands for op in walk(nest.regions[0]) if op is not store):
        return None
    made = {result: op for op in nest.regions[0].ops for result in op.results}
    value, hangs = store.operands[-1], False
    waiting = [value]
    while waiting:
        op = made.get(waiting.pop())
        if op is reduction:
            hangs = True
        elif op is not None and (op.opcode in _LINEAR or (op.opcode == "cast" and dtype_of(op.result.type) in (f16, bf16, f32, f64))):
            waiting += op.operands
    return store if hangs and dtype_of(value.type) in (f16, bf16, f32, f64) else None


def _repair(kernel: Kernel, nest: Op, reduction: Op, store: Op) -> Kernel:
    """Results that are no number are computed again."""
    b = Builder(nest.span)
    region = nest.regions[0]
    mapping: dict[Value, Value] = {}
    args = tuple(Value(a.type, a.name) for a in region.args)
    mapping.update(zip(region.args, args, strict=True))
    place = region.ops.index(reduction)
    before = region.ops[:place]
    after = [op for op in region.ops[place + 1 :] if op.opcode != "yield"]
    # Where a result lies must be known before it is computed.
    early = [op for op in after if len(op.results) == 1 and op.results[0].type == INDEX]
    clone_ops(b, [*before, *early], mapping)
    memory = store.operands[0]
    assert isinstance(memory.type, Tensor)
    there = [mapping.get(v, v) for v in store.operands[1 : 1 + memory.type.rank]]
    with b.at(store.span):
        result = b.op("load", memory, *there)
        result = b.cast(result, f32) if dtype_of(result.type) in (f16, bf16) else result
        bad = b.op("ne", result, result)
    length = mapping.get(reduction.operands[0], reduction.operands[0])
    mapping[reduction.operands[0]] = b.select(bad, length, b.index(0))
    clone_ops(b, [reduction], mapping)
    mapping[reduction.operands[0]] = length

    def again(inner: Builder) -> list[Value]:
        clone_ops(inner, [op for op in after if op not in early], mapping)
        return []

    b.if_(bad, again, lambda inner: [])
    b.multi("yield")
    changed = replace(nest, regions=(Block(args, tuple(b.ops)),))
    body = Block(kernel.body.args, tuple(changed if op.opcode == "parallel" else op for op in kernel.body.ops))
    return eliminate_dead(replace(kernel, name=f"{kernel.name}.repair", body=body, attrs=MappingProxyType({**kernel.attrs, "repairs": True})))


def _triangle(reduction: Op, nest: Op, made: dict[Value, Op], forms: Forms) -> _Triangle | None:
    extent = made.get(reduction.operands[0])
    if extent is None or extent.opcode != "max":
        return None
    lengths = [forms[v] for v in extent.operands if forms[v].factors or forms[v].constant != ZERO]
    indices = nest.regions[0].args
    if len(lengths) != 1 or not lengths[0].factors or any(v not in indices or f not in (ONE, -ONE) for v, f in lengths[0].factors):
        return None
    index = reduction.regions[0].args[0]
    start: Affine | None = None
    whole: Size | None = None
    for op in walk(reduction.regions[0]):
        if op.opcode != "load":
            continue
        type_ = op.operands[0].type
        assert isinstance(type_, Tensor)
        for place, size in zip(op.operands[1 : 1 + type_.rank], type_.shape, strict=True):
            form = forms[place]
            if index not in form.values:
                continue
            own = form.minus(Affine(((index, ONE),)))
            if form.factor(index) != ONE or (start is not None and (own.minus(start).factors or own.constant != start.constant)):
                return None
            start, whole = own, size if whole is None else whole
    if start is None or whole is None or any(v not in indices for v in start.values):
        return None
    return _Triangle(reduction, start, start.plus(lengths[0]), whole)


def _squared(kernel: Kernel, nest: Op, triangle: _Triangle) -> Kernel:
    reduction = triangle.reduction
    region = reduction.regions[0]
    term = region.yields[0]
    b = Builder(reduction.span)
    place = Value(INDEX, region.args[0].name)
    mapping: dict[Value, Value] = {region.args[0]: emit(b, Affine(((place, ONE),)).minus(triangle.start))}
    tests: list[Value] = []
    if triangle.start.factors or triangle.start.constant != ZERO:
        tests.append(b.op("ge", place, emit(b, triangle.start)))
    if triangle.stop.factors or triangle.stop.constant != triangle.whole:
        tests.append(b.op("lt", place, emit(b, triangle.stop)))
    condition = tests[0]
    for test in tests[1:]:
        condition = b.logical_and(condition, test)
    forms = analyse(kernel)

    def then(inner: Builder) -> list[Value]:
        for op in region.ops[:-1]:
            result = op.results[0] if len(op.results) == 1 else None
            if result is not None and result.type == INDEX and op.operands and _same(forms[result], region.args[0], triangle.start):
                mapping[result] = place  # start + index is the place itself
                continue
            clone_ops(inner, [op], mapping)
        return [mapping[term]]

    def otherwise(inner: Builder) -> list[Value]:
        return [inner.const(0, dtype_of(term.type))]

    (value,) = b.if_(condition, then, otherwise)
    b.multi("yield", value)
    ops: list[Op] = []
    for op in nest.regions[0].ops:
        if op is reduction:
            top = Builder(op.span)
            length = top.index(triangle.whole)
            ops += [*top.ops, replace(op, operands=(length,), regions=(Block((place,), tuple(b.ops)),))]
        else:
            ops.append(op)
    changed = replace(nest, regions=(Block(nest.regions[0].args, tuple(ops)),))
    return eliminate_dead(replace(kernel, body=Block(kernel.body.args, tuple(changed if op is nest else op for op in kernel.body.ops))))


def _same(form: Affine, index: Value, start: Affine) -> bool:
    difference = form.minus(Affine(((index, ONE),))).minus(start)
    return not difference.factors and difference.constant == ZERO
