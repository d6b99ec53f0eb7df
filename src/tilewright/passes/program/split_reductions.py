"""Cut long reductions with few results in two kernels, so that the whole device takes part. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a kernel `parallel P { r = reduce n {…}; rest(r) }` with too few
points in P is two: the first reduces `parts` stretches of the range side by side into scratch, the second reduces those.
The number of parts depends on sizes and target only, and each part is summed in a fixed order: the same call gives the same
bits on every run. Sits before schedules are chosen; the halves are ordinary kernels.

    parallel %p (%i) { %r = reduce %n {add} (%k) { yield x[i, k] }; store out[i] }
    -> parallel %p, %parts (%i, %s) { %r = reduce %chunk {add} (%k) { yield x[i, s*chunk + k] }; store part[i, s] }
       parallel %p (%i) { %r = reduce %parts {add} (%s) { yield part[i, s] }; store out[i] }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.analysis.loop_nest import Nest, nest_of
from tilewright.base.dtypes import DType
from tilewright.base.sizes import ONE, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.schedules.matrix import GpuProduct
from tilewright.passes.schedules.plans import Plan, Plans


def split_reductions(program: Program, plans: Plans, target: Target, hints: Mapping[str, int]) -> tuple[Program, Plans]:
    """The program with long reductions cut. `plans` says which calls are contractions, and is returned for the calls there are then."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        plan = _plan(call.kernel, target, hints) if schedule is None and not call.varies and "apart" not in call.kernel.attrs else None
        if isinstance(schedule, GpuProduct):
            plan = _contraction_plan(call.kernel, schedule)
        if plan is None:
            calls.append(call)
            schedules.append(schedule)
            continue
        first, second, arrays = _split(call, plan, len(scratch))
        calls += [first, second]
        schedules += [schedule, None]
        scratch += arrays
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def would_split(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether a kernel without a plan is cut in two."""
    return _plan(kernel, target, hints) is not None


class _Plan:
    """How to cut one kernel. `crosswise`: partial results lie part by part. `beside` are the ops next to the reduction whose
    results its body uses. `guarded`: all parts are equally long, and what lies behind the end is left out by a condition."""

    def __init__(
        self, nest: Nest, extent: Size, parts: Size, chunk: Size, crosswise: bool, beside: tuple[Op, ...], guarded: bool = False
    ) -> None:
        self.nest, self.extent, self.parts, self.chunk, self.crosswise, self.beside = nest, extent, parts, chunk, crosswise, beside
        self.guarded = guarded


def _contraction_plan(kernel: Kernel, schedule: GpuProduct) -> _Plan | None:
    """A contraction is cut where its schedule says so, in whole steps; every part is a contraction again."""
    if schedule.split_k == 1:
        return None
    nest = nest_of(kernel)
    reduction = nest.reductions[0]
    beside = _beside(nest.parallel.regions[0], reduction)
    if len(reduction.operands) != 1 or beside is None:
        return None
    extent = analyse(kernel)[reduction.operands[0]].constant
    chunk = ceildiv(ceildiv(extent, Size.of(schedule.split_k)), Size.of(schedule.k)) * schedule.k
    return _Plan(nest, extent, Size.of(schedule.split_k), chunk, True, beside, guarded=True)


def _plan(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> _Plan | None:
    nest = nest_of(kernel)
    region = nest.parallel.regions[0]
    if len(nest.reductions) != 1 or len(nest.reductions[0].operands) != 1:
        return None
    if any(has_effects(op) for op in region.ops if op.opcode not in ("store", "yield")):
        return None
    reduction = nest.reductions[0]
    if "packed" in reduction.attrs and not target.simt:
        return None  # rows of integers are short work; their loop wants to be whole
    forms = analyse(kernel)
    form = forms[reduction.operands[0]]
    beside = _beside(region, reduction)
    if form.factors or beside is None:
        return None
    extent = form.constant
    points = product(nest.extents)
    crosswise = nest.reduce_stride_one < max(nest.stride_one, default=0)
    costs = target.costs.reductions
    if target.simt:
        known = extent.evaluate(hints) if extent.names <= hints.keys() else 1 << 30
        results = points.evaluate(hints) if points.names <= hints.keys() else 1
        blocks = max(1, results // (4 * target.warp_size)) if crosswise else results
        narrow = nest.narrowest < 4
        wanted = target.multiprocessors * (costs.blocks_across if crosswise else costs.blocks) * (2 if narrow else 1)
        shortest = costs.fewest_rows if crosswise else costs.shortest
        if blocks * 2 > target.multiprocessors * 2 or known <= shortest:
            return None
        busy = ceildiv(points, Size.of(4 * target.warp_size)) if crosswise else points
        parts = maximum(ONE, minimum(ceildiv(extent, Size.of(shortest)), ceildiv(Size.of(wanted), maximum(ONE, busy))))
        step = 64 if crosswise else 4096
        chunk = ceildiv(ceildiv(extent, parts), Size.of(step)) * step
        return _Plan(nest, extent, parts, chunk, crosswise, beside)
    if not nest.extents:
        return _Plan(nest, extent, maximum(ONE, ceildiv(extent, Size.of(costs.cpu_stretch))), Size.of(costs.cpu_stretch), False, beside)
    if crosswise:
        # A block takes a few whole rows: few enough for the hardware to follow each as a stream.
        chunk = maximum(Size.of(costs.cpu_rows), ceildiv(Size.of(costs.cpu_stretch), maximum(ONE, points)))
        return _Plan(nest, extent, maximum(ONE, ceildiv(extent, chunk)), chunk, True, beside)
    # With results to share out among the cores, only cut where these are few. Partial results lie part by part, so that
    # adding up a single part, the usual case, is a plain copy.
    few = ceildiv(Size.of(costs.cpu_results), maximum(ONE, points))
    parts = maximum(ONE, minimum(ceildiv(extent, Size.of(costs.cpu_stretch)), few))
    return _Plan(nest, extent, parts, ceildiv(extent, parts), True, beside)


def _beside(region: Block, reduction: Op) -> tuple[Op, ...] | None:
    """The ops beside the reduction that its body needs, in order: both kernels compute them. None where one of them may not be
    computed twice: it has effects or regions of its own, depends on the reduction, or reads what the kernel writes."""
    made = {result: op for op in region.ops for result in op.results}
    written = {op.operands[0] for op in region.ops if op.opcode == "store"}
    needed: set[int] = set()
    waiting = [v for op in walk(reduction.regions[0]) for v in op.operands]
    while waiting:
        op = made.get(waiting.pop())
        if op is None or id(op) in needed:
            continue
        if op.regions or has_effects(op) or (op.opcode == "load" and op.operands[0] in written):
            return None
        needed.add(id(op))
        waiting += op.operands
    return tuple(op for op in region.ops if id(op) in needed)


def _split(call: KernelCall, plan: _Plan, number: int) -> tuple[KernelCall, KernelCall, list[ProgramArray]]:
    kernel, nest = call.kernel, plan.nest
    reduction = nest.reductions[0]
    shape = (plan.parts, *nest.extents) if plan.crosswise else (*nest.extents, plan.parts)
    dtypes: list[DType] = [dtype_of(r.type) for r in reduction.results]
    partials = [Value(tensor(d, *shape, align=16), f"{kernel.name}.part{number + k}") for k, d in enumerate(dtypes)]
    arrays = [ProgramArray(p.name, _tensor(p), "scratch") for p in partials]
    first = _first_kernel(kernel, plan, partials)
    second = _second_kernel(kernel, plan, partials)
    names = dict(zip(kernel.params, call.args, strict=True)) | {p: p.name for p in partials}
    return (
        KernelCall(first, tuple(names[p] for p in first.params), call.loops),
        KernelCall(second, tuple(names[p] for p in second.params), call.loops),
        arrays,
    )


def _tensor(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


def _first_kernel(kernel: Kernel, plan: _Plan, partials: list[Value]) -> Kernel:
    nest, reduction = plan.nest, plan.nest.reductions[0]
    dtypes = [dtype_of(r.type) for r in reduction.results]
    region = nest.parallel.regions[0]
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        part, own = (indices[0], indices[1:]) if plan.crosswise else (indices[-1], indices[:-1])
        local = dict(mapping) | dict(zip(region.args, own, strict=True))
        clone_ops(inner, plan.beside, local)
        start = inner.mul(part, inner.index(plan.chunk))
        length = inner.index(plan.chunk)
        if not plan.guarded:
            left = inner.op("max", inner.sub(inner.index(plan.extent), start), inner.index(0))
            length = inner.op("min", left, length)

        def at(deep: Builder, position: Value) -> tuple[Value, ...]:
            deepest = dict(local)
            deepest[reduction.regions[0].args[0]] = position
            clone_ops(deep, reduction.regions[0].ops[:-1], deepest)
            return tuple(deepest.get(v, v) for v in reduction.regions[0].yields)

        def term(deep: Builder, k: Value) -> tuple[Value, ...]:
            position = deep.add(start, k)
            if not plan.guarded:
                return at(deep, position)
            inside = deep.op("lt", position, deep.index(plan.extent))
            zero = deep.const(0, dtypes[0])
            return deep.if_(inside, lambda region: at(region, position), lambda region: [zero])

        results = inner.reduce(str(reduction.attrs["kind"]), [length], term, ["k"])
        for partial, result in zip(partials, results, strict=True):
            inner.multi("store", partial, *indices, result)
        return []

    extents = [b.index(e) for e in ((plan.parts, *nest.extents) if plan.crosswise else (*nest.extents, plan.parts))]
    names = [a.name for a in region.args]
    with b.at(nest.parallel.span):
        b.parallel(extents, body, ["part", *names] if plan.crosswise else [*names, "part"])
    used = _used(Block((), tuple(b.ops)))
    params = (*(p for p in kernel.params if p in used), *partials)
    attrs = MappingProxyType({**kernel.attrs, "reduce_extent": plan.chunk})
    return Kernel(f"{kernel.name}.parts", Stage.LOOP, params, Block((), tuple(b.ops)), facts=kernel.facts, attrs=attrs, span=kernel.span)


def _second_kernel(kernel: Kernel, plan: _Plan, partials: list[Value]) -> Kernel:
    nest, reduction = plan.nest, plan.nest.reductions[0]
    region = nest.parallel.regions[0]
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        local = dict(mapping) | dict(zip(region.args, indices, strict=True))
        parts = inner.index(plan.parts)

        def term(deep: Builder, s: Value) -> list[Value]:
            where = (s, *indices) if plan.crosswise else (*indices, s)
            return [deep.op("load", partial, *where) for partial in partials]

        for op in region.ops[:-1]:
            if op is reduction:
                results = inner.reduce(str(reduction.attrs["kind"]), [parts], term, ["s"])
                local.update(zip(op.results, results, strict=True))
            else:
                clone_ops(inner, [op], local)
        return []

    with b.at(nest.parallel.span):
        b.parallel([b.index(e) for e in nest.extents], body, [a.name for a in region.args])
    # After a contraction's parts the second kernel is launched early and waits itself.
    attrs = MappingProxyType({**kernel.attrs, "early": True}) if plan.guarded else kernel.attrs
    whole = eliminate_dead(
        Kernel(kernel.name, Stage.LOOP, (), Block((), tuple(b.ops)), facts=kernel.facts, attrs=attrs, span=kernel.span)
    )
    used = _used(whole.body)
    return replace(whole, params=(*(p for p in kernel.params if p in used), *partials))


def _used(block: Block) -> set[Value]:
    return {v for op in walk(block) for v in op.operands}
