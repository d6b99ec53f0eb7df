"""Cut nests with several products that one kernel cannot compute side by side. `Program -> Program`.

In: a prepared program. Out: the same, where a nest of several contractions of different rows (`x @ w + h @ u`, as gated cells have them) is one
kernel for each: all but the last write their sums, as they are, to scratch that the last one reads where it finishes its own.

    parallel (i, j) { a = reduce x[i, k] * w[k, j]; b = reduce h[i, k] * u[k, j]; store out[i, j], f(a, b) }
    -> parallel (i, j) { a = reduce x[i, k] * w[k, j]; store sum[i, j], a }
       parallel (i, j) { b = reduce h[i, k] * u[k, j]; store out[i, j], f(load sum[i, j], b) }

Which of them are then joined again, two of three perhaps, is chosen later (`horizontal_fusion.py`); where the sizes of a call leave all of them to
plain loops, `fuse_horizontally` makes the nest whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.contraction import Contraction, find_products
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.program.fuse_horizontally import side_by_side


def fission_products(program: Program) -> Program:
    """The program with such nests cut."""
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    for call in program.calls:
        products = find_products(call.kernel)
        if len(products) < 2 or call.varies or side_by_side(call.kernel) or not all(_is_matrix(found) for found in products):
            calls.append(call)
            continue
        made, arrays = _parted(call, products, len(scratch))
        calls += made
        scratch += arrays
    return replace(program, calls=tuple(calls), scratch=tuple(scratch))


def _is_matrix(found: Contraction) -> bool:
    """Whether both factors are plain loads, so that something better than plain loops is likely to multiply them."""
    return all(factor.load is not None and factor.guard is None for factor in (found.a, found.b))


def _parted(call: KernelCall, products: Sequence[Contraction], number: int) -> tuple[list[KernelCall], list[ProgramArray]]:
    names = dict(zip(call.kernel.params, call.args, strict=True))
    kernel = replace(call.kernel, attrs=MappingProxyType({**call.kernel.attrs, "parted": call.kernel.name}))
    sums: dict[Op, Value] = {}
    calls: list[KernelCall] = []
    for place, found in enumerate(products[:-1]):
        # Side by side along the columns, as the results are.
        order = (*found.batch, *found.m, *found.n)
        memory = Value(tensor(found.accumulator, *(found.extents[p] for p in order), align=16), f"{kernel.name}.sum{number + place}")
        sums[found.reduction] = memory
        names[memory] = str(memory.name)
        calls.append(_call(_of_one(kernel, found, memory, order, place), names, call))
    last = products[-1]
    order = (*last.batch, *last.m, *last.n)
    calls.append(_call(_of_last(kernel, last, sums, order), names, call))
    return calls, [ProgramArray(names[m], _tensor(m), "scratch") for m in sums.values()]


def _tensor(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


def _call(kernel: Kernel, names: dict[Value, str], of: KernelCall) -> KernelCall:
    used = {v for op in walk(kernel.body) for v in op.operands}
    params = tuple(p for p in names if p in used)
    return KernelCall(replace(kernel, params=params), tuple(names[p] for p in params), of.loops)


def _of_one(kernel: Kernel, found: Contraction, memory: Value, order: Sequence[int], place: int) -> Kernel:
    """The kernel that writes one sum."""

    def body(b: Builder, mapping: dict[Value, Value]) -> None:
        region = found.parallel.regions[0]
        before = region.ops[: region.ops.index(found.reduction)]
        made = {result for op in before if op.regions or op.opcode == "store" for result in op.results}
        for op in before:
            # What hangs on other sums is no part of this one.
            if op.regions or op.opcode == "store" or any(v in made for v in op.operands):
                made.update(op.results)
            else:
                clone_ops(b, [op], mapping)
        clone_ops(b, [found.reduction], mapping)
        b.multi("store", memory, *(mapping[found.indices[p]] for p in order), mapping[found.reduction.result])

    return _rebuilt(replace(kernel, name=f"{kernel.name}.sum{place}"), found, body)


def _of_last(kernel: Kernel, found: Contraction, sums: dict[Op, Value], order: Sequence[int]) -> Kernel:
    """The kernel that adds up the last one and finishes all."""

    def body(b: Builder, mapping: dict[Value, Value]) -> None:
        for op in found.parallel.regions[0].ops:
            if op in sums:
                with b.at(op.span):
                    mapping[op.result] = b.op("load", sums[op], *(mapping[found.indices[p]] for p in order))
            elif op.opcode != "yield":
                clone_ops(b, [op], mapping)

    return _rebuilt(kernel, found, body)


def _rebuilt(kernel: Kernel, found: Contraction, body: Callable[[Builder, dict[Value, Value]], None]) -> Kernel:
    """The kernel with another body of its nest."""
    top, inner = Builder(kernel.span), Builder(found.parallel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(top, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)
    region = found.parallel.regions[0]
    args = tuple(Value(arg.type, arg.name) for arg in region.args)
    mapping.update(zip(region.args, args, strict=True))
    body(inner, mapping)
    inner.multi("yield")
    extents = tuple(mapping.get(v, v) for v in found.parallel.operands)
    parallel = replace(found.parallel, operands=extents, regions=(Block(args, tuple(inner.ops)),))
    return eliminate_dead(replace(kernel, body=Block((), (*top.ops, parallel))))
