"""What packed rows are multiplied with is laid out for the lanes that read it. In: a program and its plans; out: the same, with a kernel more for
each product whose plan says `stage_x`.

A lane takes a unit of many neighbouring elements, so the lanes of a warp read far apart: 64 elements of x from one lane to the next. The first kernel
writes x so that what lanes read at once lies side by side:

    x(64*u + t)   ->   staged[u / 32, t / 8, u % 32, t % 8]        bf16; f32 four at a time

It computes whatever the factor is, rounded or not: the product then only loads it. Sits before `packed_units`, which finds a plain load there.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType
from tilewright.base.sizes import Size, ceildiv, contiguous_strides, floordiv
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.packed.units import UNITS, PackedTerm, packed_terms, sources
from tilewright.passes.schedules.gemv import Gemv
from tilewright.passes.schedules.plans import Plan, Plans

LANES = 32


def stage_units(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with factors laid out, and its plans."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, plan in zip(program.calls, plans, strict=True):
        terms = packed_terms(call.kernel) if isinstance(plan, Gemv) and plan.stage_x else ()
        if len(terms) == 1:
            first, second, array = _staged(call, terms[0], len(scratch))
            calls.append(first)
            schedules.append(None)
            scratch.append(array)
            call = second
        calls.append(call)
        schedules.append(plan)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def can_stage(kernel: Kernel) -> bool:
    """Whether units are neighbours, and the factor depends on nothing that differs between the rows of w."""
    terms = packed_terms(kernel)
    return len(terms) == 1 and terms[0].format in UNITS and UNITS[terms[0].format].whole and _factor(kernel, terms[0]) is not None


def _factor(kernel: Kernel, term: PackedTerm) -> tuple[Value, tuple[Op, ...], tuple[Value, ...]] | None:
    """What is stored, the ops of the reduction that compute it, and the parallel indices that it depends on; None where it needs more."""
    parallel = next(op for op in kernel.body.ops if op.opcode == "parallel")
    region = term.reduction.regions[0]
    made = {result: op for op in region.ops for result in op.results}
    outer = {result: op for op in parallel.regions[0].ops for result in op.results}
    value = term.other
    needed = sources(value, made)
    if any(v in outer for v in needed) or any(v in term.lead for v in needed):
        return None
    ops = tuple(op for op in region.ops if any(r in needed for r in op.results))
    return value, ops, tuple(v for v in parallel.regions[0].args if v in needed)


def _staged(call: KernelCall, term: PackedTerm, number: int) -> tuple[KernelCall, KernelCall, ProgramArray]:
    kernel = call.kernel
    found = _factor(kernel, term)
    assert found is not None
    value, ops, indices = found
    parallel = next(op for op in kernel.body.ops if op.opcode == "parallel")
    sizes = {op.results[0]: op.attrs["value"] for op in kernel.body.ops if op.opcode in ("size", "const")}
    extents = [_size(sizes[parallel.operands[parallel.regions[0].args.index(v)]]) for v in indices]
    length, unit, dtype = _size(sizes[term.reduction.operands[0]]), UNITS[term.format].elements, dtype_of(value.type)
    width = max(1, 16 // dtype.itemsize)
    units = floordiv(length, Size.of(unit))
    shape = (*extents, ceildiv(units, Size.of(LANES)), Size.of(unit // width), Size.of(LANES), Size.of(width))
    array = Value(Tensor(dtype, shape, contiguous_strides(shape), align=16), f"{kernel.name}.staged{number}")
    names = {**dict(zip(kernel.params, call.args, strict=True)), array: array.name}
    first = _first(kernel, term, array, ops, value, indices, (*extents, units, Size.of(unit)))
    second = _second(kernel, term, array, value, indices)
    assert isinstance(array.type, Tensor)
    return (
        KernelCall(first, tuple(names[p] for p in first.params), call.loops),
        KernelCall(second, tuple(names[p] for p in second.params), call.loops),
        ProgramArray(array.name, array.type, "scratch"),
    )


def _size(value: object) -> Size:
    return value if isinstance(value, Size) else Size.of(int(value))  # type: ignore[call-overload]


def places(b: Builder, number: Value, place: Value, dtype: DType) -> list[Value]:
    """Where the element `place` of a unit lies."""
    lanes, width = b.index(LANES), b.index(max(1, 16 // dtype.itemsize))
    return [b.op("floordiv", number, lanes), b.op("floordiv", place, width), b.op("mod", number, lanes), b.op("mod", place, width)]


def _first(
    kernel: Kernel, term: PackedTerm, array: Value, ops: tuple[Op, ...], value: Value, indices: tuple[Value, ...], extents: tuple[Size, ...]
) -> Kernel:
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)

    def body(inner: Builder, *at: Value) -> list[Value]:
        *own, number, place = at
        local = dict(mapping) | dict(zip(indices, own, strict=True))
        local[term.reduction.regions[0].args[0]] = inner.add(inner.mul(number, inner.index(UNITS[term.format].elements)), place)
        clone_ops(inner, ops, local)
        inner.multi("store", array, *own, *places(inner, number, place, dtype_of(value.type)), local.get(value, value))
        return []

    with b.at(term.reduction.span):
        b.parallel([b.index(e) for e in extents], body, [*(v.name for v in indices), "u", "t"])
    attrs = MappingProxyType({k: v for k, v in kernel.attrs.items() if k != "schedule"} | {"early": True})
    made = eliminate_dead(Kernel(f"{kernel.name}.staged", Stage.LOOP, (), Block((), tuple(b.ops)), facts=kernel.facts, attrs=attrs, span=kernel.span))
    return replace(made, params=(*_used(kernel, made.body, ()), array))


def _second(kernel: Kernel, term: PackedTerm, array: Value, value: Value, indices: tuple[Value, ...]) -> Kernel:
    """The product, with the factor loaded from where the first kernel left it."""
    region = term.reduction.regions[0]
    unit = UNITS[term.format].elements
    b = Builder(term.reduction.span)
    k = region.args[0]
    number, place = b.op("floordiv", k, b.index(unit)), b.op("mod", k, b.index(unit))
    loaded = b.op("load", array, *indices, *places(b, number, place, dtype_of(value.type)))
    b.ops[-1] = replace(b.ops[-1], attrs=MappingProxyType({**b.ops[-1].attrs, "staged": True}))
    changed = tuple(replace(op, operands=tuple(loaded if v is value else v for v in op.operands)) for op in region.ops)
    reduction = replace(term.reduction, regions=(Block(region.args, (*b.ops, *changed)),))
    parallel = next(op for op in kernel.body.ops if op.opcode == "parallel")
    inner = parallel.regions[0]
    body = Block(inner.args, tuple(reduction if op is term.reduction else op for op in inner.ops))
    whole = replace(kernel, body=Block((), tuple(replace(op, regions=(body,)) if op is parallel else op for op in kernel.body.ops)))
    whole = eliminate_dead(whole)
    return replace(whole, params=(*_used(kernel, whole.body, ()), array))


def _used(kernel: Kernel, body: Block, more: tuple[Value, ...]) -> tuple[Value, ...]:
    used = {v for op in walk(body) for v in op.operands}
    return tuple(p for p in (*kernel.params, *more) if p in used)


