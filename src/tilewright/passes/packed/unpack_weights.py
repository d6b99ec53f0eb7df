"""Packed weights of products with many rows are unpacked first, once for all rows. `Program -> Program`.

In: a program and the schedules of its contractions. Where one says `b_copy=packed`, the product unpacks on its way to shared memory
(`to_thread/mma/packed_operand.py`), and here its elements are rounded. Where one says `unpack`, the elements of its packed factor are written to scratch: on a GPU in the
dtype of the other factor where that is f16 or bf16, else in f32. Out: the program with a kernel more, which unpacks; the product's factor is now a plain load,
brought and multiplied like any other. Scratch is memory of the call: nothing unpacked is kept.

    parallel m, n { acc = reduce k { yield x[i, k] * (element of w at j, k) }; … }
    -> parallel n, blocks, groups { 16 elements of a block: store w.unpacked[j, b, …] }
       parallel m, n { acc = reduce k { yield x[i, k] * f32(w.unpacked[j, k]) }; … }

A thread of the first kernel has some bytes of one block that lie side by side, and the scales they share: `elements.py` is written out for each of its
elements, and what they have in common is computed once. Elements that are neighbours are stored together (`merge_stores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product as combinations
from math import prod
from types import MappingProxyType

from tilewright.analysis.contraction import Contraction, Factor, find_products
from tilewright.base.dtypes import DType, bf16, by_name, f16, f32, u8
from tilewright.base.record import record
from tilewright.base.sizes import Size, contiguous_strides
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, rewrite
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.common.simplify import simplify
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.loop.fuse_multiply_add import fuse_multiply_add
from tilewright.passes.packed.elements import element_at, hidden_zero, packed_element, radices
from tilewright.passes.packed.units import sources
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import CpuProduct, GpuProduct
from tilewright.passes.schedules.plans import Plan, Plans

THREADS = 256
"""Of a block that unpacks."""
RUN = 8
"""Neighbours that a thread stores at once."""


@record
class PackedFactor:
    """A factor of a product that is an element of packed blocks."""

    reduction: Op
    element: Op
    """What it is the result of."""
    tensor: Value
    """The bytes."""
    lead: tuple[Value, ...]
    """The indices of the row."""
    index: Value
    """The index along the row."""
    format: DType
    rows: tuple[int, ...]
    """The parallel indices that the row depends on."""
    other: DType
    """The dtype of the other factor."""


def unpack_weights(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with kernels that unpack, and its plans."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, plan in zip(program.calls, plans, strict=True):
        if isinstance(plan, GpuProduct | CpuProduct) and plan.unpack:
            on_gpu = isinstance(plan, GpuProduct)
            form = unpacked_form(call.kernel, len(scratch), rounds=on_gpu)
            assert form is not None
            names = dict(zip(call.kernel.params, call.args, strict=True))
            for factor, memory in form.scratch:
                assert isinstance(memory.type, Tensor)
                scratch.append(ProgramArray(memory.name, memory.type, "scratch"))
                kernel, schedule = _unpacking(call.kernel, factor, memory) if on_gpu else (_unpacking_loops(call.kernel, factor, memory), None)
                named = {p.name: name for p, name in names.items()} | {memory.name: memory.name}
                calls.append(KernelCall(kernel, tuple(named[p.name] for p in kernel.params), call.loops))
                schedules.append(schedule)
                names[memory] = memory.name
            call = replace(call, kernel=form.kernel, args=tuple(names[p] for p in form.kernel.params))
        elif isinstance(plan, GpuProduct) and plan.b_copy == "packed":
            call = replace(call, kernel=rounded_kernel(call.kernel))
        calls.append(call)
        schedules.append(plan)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


@record
class UnpackedForm:
    """A kernel whose packed factors are plain loads, and what these are loaded from."""

    kernel: Kernel
    scratch: tuple[tuple[PackedFactor, Value], ...]


def unpacked_form(kernel: Kernel, number: int = 0, rounds: bool = True) -> UnpackedForm | None:
    """The kernel with its packed factors loaded from scratch; None where it has none, or one that cannot be unpacked by itself. `rounds`: to the dtype of
    the other factor."""
    factors = packed_factors(kernel)
    if not factors:
        return None
    memories: dict[tuple[object, ...], tuple[PackedFactor, Value]] = {}
    by_element: dict[Op, Value] = {}
    (parallel,) = (op for op in kernel.body.ops if op.opcode == "parallel")
    for factor in factors:
        dtype = dtype_of_copy(factor) if rounds else f32
        key = (factor.tensor, factor.lead, dtype)
        if key not in memories:
            packed = factor.tensor.type
            assert isinstance(packed, Tensor)
            extents = [_extent(kernel, parallel.operands[p]) for p in factor.rows]
            shape = (*extents, packed.shape[-2] * factor.format.block)
            memories[key] = factor, Value(tensor(dtype, *shape, align=16), f"{kernel.name}.unpacked{number + len(memories)}")
        by_element[factor.element] = memories[key][1]
    region = parallel.regions[0]

    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        factor = elements.get(op.results[0]) if op.results else None
        if factor is None:
            return None
        return [b.cast(b.op("load", by_element[factor.element], *(region.args[p] for p in factor.rows), factor.index), f32)]

    elements = {factor.element.results[0]: factor for factor in factors}
    made = eliminate_dead(rewrite(kernel, one))
    used = {v for op in walk(made.body) for v in op.operands}
    params = (*(p for p in kernel.params if p in used or not isinstance(p.type, Tensor)), *(memory for _, memory in memories.values()))
    return UnpackedForm(replace(made, params=params), tuple(memories.values()))


def rounded_kernel(kernel: Kernel) -> Kernel:
    """The kernel with its packed factors rounded to what they are multiplied in, where they stand."""
    elements = {factor.element.results[0]: dtype_of_copy(factor) for factor in packed_factors(kernel)}

    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        dtype = elements.get(op.results[0]) if len(op.results) == 1 else None
        if dtype is None or dtype is f32:
            return None
        b.append(op)
        return [b.cast(b.cast(op.results[0], dtype), f32)]

    return rewrite(kernel, one)


def dtype_of_copy(factor: PackedFactor) -> DType:
    """What elements are rounded to: the dtype that matrix units multiply the other factor in."""
    return factor.other if factor.other in (f16, bf16) else f32


def packed_factors(kernel: Kernel) -> tuple[PackedFactor, ...]:
    """The packed factors of the products a kernel computes, one for each; none where a product has no such factor, or any other."""
    if not any("packed" in op.attrs for op in walk(kernel.body)):
        return ()
    products = find_products(kernel)
    found = [_packed(kernel, one) for one in products]
    return tuple(f for f in found if f is not None) if all(found) else ()


def _packed(kernel: Kernel, product: Contraction) -> PackedFactor | None:
    made = {result: op for op in walk(product.parallel.regions[0]) for result in op.results}
    marked = [f for f in (product.a, product.b) if f.value in made and "packed" in made[f.value].attrs]
    if len(marked) != 1 or product.accumulator is not f32 or any(f.guard is not None for f in (product.a, product.b)):
        return None
    factor = marked[0]
    other = product.b if factor is product.a else product.a
    return _place(kernel, product, factor, made, other.dtype)


def _place(kernel: Kernel, product: Contraction, factor: Factor, made: dict[Value, Op], other: DType) -> PackedFactor | None:
    """Where the element lies: all bytes it is made of are those of one block of one row."""
    element, region = made[factor.value], product.parallel.regions[0]
    inner = {result: op for op in product.reduction.regions[0].ops for result in op.results}
    if factor.value not in inner:
        return None
    loads = [inner[v] for v in sources(factor.value, inner) if v in inner and inner[v].opcode == "load"]
    places = {(op.operands[:-1]) for op in loads}
    if len(places) != 1 or any(dtype_of(op.results[0].type) is not u8 or op.attrs.get("masked") or op.attrs.get("watch") for op in loads):
        return None
    (tensor_of, *lead, block), *_ = places
    divided = inner.get(block)
    if divided is None or divided.opcode not in ("floordiv", "shr"):
        return None
    needed = {v for index in lead for v in sources(index, made)}
    if any(v in needed for v in product.k) or any(r in needed for op in region.ops if op.regions for r in op.results):
        return None  # the row is another one for each term, or depends on a sum
    rows = tuple(p for p, arg in enumerate(region.args) if arg in needed)
    within = sources(divided.operands[0], made)
    if any(region.args[p] in within for p in (*product.m, *product.n, *product.batch) if p not in rows):
        return None
    return PackedFactor(
        product.reduction, element, tensor_of, tuple(lead), divided.operands[0], by_name(str(element.attrs["packed"])), rows, other,
    )  # fmt: skip


def _extent(kernel: Kernel, value: Value) -> Size:
    op = next(op for op in kernel.body.ops if value in op.results)
    found = op.attrs["value"]
    assert isinstance(found, Size | int)
    return Size.of(found)


# -- the kernel that unpacks ------------------------------------------------------------------------------------------------


def counts(format_: DType) -> tuple[int, ...]:
    """Of each digit of a place, as many values as one thread has: the same bytes, and those beside them."""
    digits = radices(format_)
    if format_.scale and format_.bits == 4:
        return RUN, 2
    if len(digits) == 1:
        return (2 * RUN,)
    if format_.name == "q6_k":
        return 1, 4, 1, RUN
    return (*(1,) * (len(digits) - 2), 2, RUN)


def fits_step(format_: DType, step: int) -> bool:
    """Whether steps of so many elements can be unpacked by units."""
    weights = weights_of(format_)
    whole = step % format_.block == 0 or (format_.block % step == 0 and step % weights[0] == 0)
    first = min(radices(format_)[0], max(1, step // weights[0]))
    return whole and first % counts(format_)[0] == 0


def weights_of(format_: DType) -> list[int]:
    """What each digit of a place counts."""
    digits = radices(format_)
    return [prod(digits[number + 1 :]) for number in range(len(digits))]


def _unpacking(kernel: Kernel, factor: PackedFactor, memory: Value) -> tuple[Kernel, Schedule]:
    """The kernel that fills the scratch, and how it is cut into blocks."""
    (parallel,) = (op for op in kernel.body.ops if op.opcode == "parallel")
    region, format_ = parallel.regions[0], factor.format
    digits, own = radices(format_), counts(format_)
    groups = [digit // count for digit, count in zip(digits, own, strict=True)]
    whole, packed = memory.type, factor.tensor.type
    assert isinstance(whole, Tensor) and isinstance(packed, Tensor)
    # The bytes and the elements, both in blocks.
    shape = (*whole.shape[:-1], packed.shape[-2], Size.of(format_.block))
    blocks = Value(replace(whole, shape=shape, strides=contiguous_strides(shape)), memory.name)
    known = [*(op for op in region.ops if not op.regions), *factor.reduction.regions[0].ops]
    made = {result: op for op in known for result in op.results}
    needed = {v for index in factor.lead for v in sources(index, made)}
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        *rows, block, group = indices
        local = dict(mapping) | {region.args[p]: row for p, row in zip(factor.rows, rows, strict=True)}
        clone_ops(inner, [op for op in known if any(r in needed for r in op.results)], local)
        lead = [local.get(v, v) for v in factor.lead]
        first: list[Value] = []
        rest, size = group, prod(groups)
        for count in groups:
            size //= count
            first.append(inner.op("floordiv", rest, inner.index(size)) if count > 1 else inner.index(0))
            rest = inner.op("mod", rest, inner.index(size)) if count > 1 else rest
        nothing = hidden_zero(inner, factor.tensor)
        start = _join(inner, [inner.mul(digit, inner.index(count)) for digit, count in zip(first, own, strict=True)], digits)
        for places in combinations(*map(range, own)):
            at = [
                inner.add(inner.mul(digit, inner.index(count)), inner.index(place)) if count > 1 else digit
                for digit, count, place in zip(first, own, places, strict=True)
            ]  # fmt: skip
            value = element_at(inner, factor.tensor, lead, block, at, format_, nothing)
            offset = 0
            for radix, place in zip(digits, places, strict=True):
                offset = offset * radix + place
            place_in_block = inner.add(start, inner.index(offset))
            inner.multi("store", blocks, *rows, block, place_in_block, inner.cast(value, whole.dtype))
        return []

    with b.at(factor.reduction.span):
        extents = [*(b.index(size) for size in shape[:-1]), b.index(prod(groups))]
        b.parallel(extents, body, [*(region.args[p].name for p in factor.rows), "b", "g"])
    attrs: dict[str, Attr] = {"unpacks": format_.name, "early": True}
    found = eliminate_dead(Kernel(f"{kernel.name}.unpack", Stage.LOOP, (), Block((), tuple(b.ops)), attrs=MappingProxyType(attrs), span=kernel.span))
    used = {v for op in walk(found.body) for v in op.operands}
    found = replace(found, params=(*(p for p in kernel.params if p in used), blocks))
    facts = {name: divisor for name, divisor in kernel.facts.items() if name in found.size_names}
    found = fuse_multiply_add(simplify(collapse(replace(found, facts=MappingProxyType(facts)))))
    rank = len(next(op for op in found.body.ops if op.opcode == "parallel").operands)
    tiles = (*(1,) * (rank - 2), THREADS // prod(groups), prod(groups))
    return found, Schedule(tiles, threads=THREADS)


def _unpacking_loops(kernel: Kernel, factor: PackedFactor, memory: Value) -> Kernel:
    """The same for a CPU, in plain loops: `split_blocks` makes loops over blocks and vectors of them."""
    (parallel,) = (op for op in kernel.body.ops if op.opcode == "parallel")
    region, whole = parallel.regions[0], memory.type
    assert isinstance(whole, Tensor)
    known = [*(op for op in region.ops if not op.regions), *factor.reduction.regions[0].ops]
    made = {result: op for op in known for result in op.results}
    needed = {v for index in factor.lead for v in sources(index, made)}
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        *rows, place = indices
        local = dict(mapping) | {region.args[p]: row for p, row in zip(factor.rows, rows, strict=True)}
        clone_ops(inner, [op for op in known if any(r in needed for r in op.results)], local)
        value = packed_element(inner, factor.tensor, [local.get(v, v) for v in factor.lead], place, factor.format)
        inner.multi("store", memory, *indices, inner.cast(value, whole.dtype))
        return []

    with b.at(factor.reduction.span):
        b.parallel([b.index(size) for size in whole.shape], body, [*(region.args[p].name for p in factor.rows), "k"])
    attrs: dict[str, Attr] = {"unpacks": factor.format.name}
    found = eliminate_dead(Kernel(f"{kernel.name}.unpack", Stage.LOOP, (), Block((), tuple(b.ops)), attrs=MappingProxyType(attrs), span=kernel.span))
    used = {v for op in walk(found.body) for v in op.operands}
    found = replace(found, params=(*(p for p in kernel.params if p in used), memory))
    facts = {name: divisor for name, divisor in kernel.facts.items() if name in found.size_names}
    return fuse_multiply_add(simplify(replace(found, facts=MappingProxyType(facts))))


def _join(b: Builder, values: Sequence[Value], digits: Sequence[int]) -> Value:
    """The number with these digits."""
    total: Value | None = None
    for value, radix in zip(values, digits, strict=True):
        total = value if total is None else b.add(b.mul(total, b.index(radix)), value)
    assert total is not None
    return total
