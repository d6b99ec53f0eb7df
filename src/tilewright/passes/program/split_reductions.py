"""Cut long reductions with few results in two kernels, so that the whole device takes part. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a kernel `parallel P { r = reduce n {…}; rest(r) }` with too few
points in P is two: the first reduces `parts` stretches of the range side by side into scratch, the second reduces those.
The number of parts depends on sizes and target only, and each part is summed in a fixed order: the same call gives the same
bits on every run. Sits before schedules are chosen; the halves are ordinary kernels.

On a CPU a reduction over several indices is cut along the first of them.

    parallel %p (%i) { %r = reduce %n {add} (%k) { yield x[i, k] }; store out[i] }
    -> parallel %p, %parts (%i, %s) { %r = reduce %chunk {add} (%k) { yield x[i, s*chunk + k] }; store part[i, s] }
       parallel %p (%i) { %r = reduce %parts {add} (%s) { yield part[i, s] }; store out[i] }

Where a CPU runs the threads of a block one after another, each part is a thread's. All parts are equally long then, so that threads walk in vectors and without
conditions, and one more kernel reduces what is left behind the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.analysis.loop_nest import Nest, nest_of, pairs_of_rows, vector_index, view_index
from tilewright.base.dtypes import DType
from tilewright.base.sizes import ONE, Size, ceildiv, floordiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, has_effects
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.choose.loops import PARTS_RESIDENT, column_tile, part_tile
from tilewright.passes.common.rebuild_nest import Copies, copy_nest, copy_outside, finished
from tilewright.passes.common.simplify import simplify
from tilewright.passes.loop.collapse import collapse
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
        (*first, second), arrays = _split(call, plan, len(scratch))
        if not target.simt or plan.guarded:
            second = replace(second, kernel=collapse(simplify(second.kernel)))  # partial results of short rows lie side by side
        calls += [*first, second]
        schedules += [schedule, *[None] * len(first)]
        scratch += arrays
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def would_split(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether a kernel without a plan is cut in two."""
    return _plan(kernel, target, hints) is not None


class _Plan:
    """How to cut one kernel. `crosswise`: partial results lie part by part. `beside` are the ops next to the reduction whose
    results its body uses. `guarded`: all parts are equally long, and what lies behind the end is left out by a condition. `even`: all parts but the last are
    equally long, and the last is what is left."""

    def __init__(
        self, nest: Nest, extent: Size, parts: Size, chunk: Size, crosswise: bool, beside: tuple[Op, ...], guarded: bool = False, even: bool = False
    ) -> None:
        self.nest, self.extent, self.parts, self.chunk, self.crosswise, self.beside = nest, extent, parts, chunk, crosswise, beside
        self.guarded, self.even = guarded, even


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
    if len(nest.reductions) != 1 or not nest.reductions[0].operands or (target.simt and len(nest.reductions[0].operands) > 1):
        return None
    if any(has_effects(op) for op in region.ops if op.opcode not in ("store", "yield")):
        return None
    reduction = nest.reductions[0]
    if "packed" in reduction.attrs and not target.simt:
        return None  # rows of integers are short work; their loop wants to be whole
    forms = analyse(kernel)
    beside = _beside(region, reduction)
    if any(forms[extent].factors for extent in reduction.operands) or beside is None:
        return None
    extent, *deeper = (forms[v].constant for v in reduction.operands)
    inner = product(tuple(deeper))
    points = product(nest.extents)
    across = max(nest.stride_one, default=0)
    crosswise = across > 0 and not nest.reduces_along if target.simt else nest.reduce_streamed < across
    costs = target.costs.reductions
    view = view_index(kernel, nest) if target.simt else -1
    if target.simt and (crosswise or view >= 0):
        return _across_plan(kernel, nest, extent, target, hints, beside, view)
    if target.simt:
        known = extent.evaluate(hints) if extent.names <= hints.keys() else 1 << 30
        results = points.evaluate(hints) if points.names <= hints.keys() else 1
        wanted = target.multiprocessors * costs.blocks * (2 if nest.narrowest < 4 else 1)
        if (results > target.multiprocessors or known <= costs.shortest) and known <= _longest(target, False):
            return None
        if target.has("serial"):
            stretches = ceildiv(extent + 1, Size.of(_THREADS * _LEAST))
            chunk = (minimum(stretches, Size.of(_stretch(target) // _LEAST)) if target.max_turns else stretches) * _LEAST
            return _Plan(nest, extent, floordiv(extent, chunk) + 1, chunk, False, beside, even=True)
        parts = maximum(ONE, minimum(ceildiv(extent, Size.of(4096)), ceildiv(Size.of(wanted), maximum(ONE, points))))
        if target.max_turns:
            parts = maximum(parts, ceildiv(extent, Size.of(_stretch(target))))
        return _Plan(nest, extent, parts, ceildiv(ceildiv(extent, parts), Size.of(4096)) * 4096, False, beside)
    if deeper and (nest.extents or (extent * inner).constant is not None):
        return None  # a window, say: results are work to share out
    if not nest.extents:
        chunk = ceildiv(Size.of(costs.cpu_stretch), maximum(ONE, inner)) if deeper else Size.of(costs.cpu_stretch)
        return _Plan(nest, extent, maximum(ONE, ceildiv(extent, chunk)), chunk, False, beside)
    if crosswise and extent.constant is not None and extent.constant <= costs.cpu_rows:
        return None
    if crosswise:
        # A block takes a few whole rows: few enough for the hardware to follow each as a stream.
        chunk = maximum(Size.of(costs.cpu_rows), ceildiv(Size.of(costs.cpu_stretch), maximum(ONE, points)))
        return _Plan(nest, extent, maximum(ONE, ceildiv(extent, chunk)), chunk, True, beside)
    # With results to share out among the cores, only cut where these are few. Partial results lie part by part, so that
    # adding up a single part, the usual case, is a plain copy.
    if (extent.constant is not None and extent.constant <= costs.cpu_stretch) or pairs_of_rows(nest, forms) is not None:
        return None
    few = ceildiv(Size.of(costs.cpu_results), maximum(ONE, points))
    parts = maximum(ONE, minimum(ceildiv(extent, Size.of(costs.cpu_stretch)), few))
    return _Plan(nest, extent, parts, ceildiv(extent, parts), True, beside)


def _across_plan(kernel: Kernel, nest: Nest, extent: Size, target: Target, hints: Mapping[str, int], beside: tuple[Op, ...], view: int = -1) -> _Plan | None:
    """On a GPU, sums across rows: blocks have a few columns each, and all rows of a part. `view`: the index of columns that lie a few elements apart."""
    costs, axis = target.costs.reductions, view if view >= 0 else vector_index(nest)
    width = target.warp_size * max(1, min(8, target.vector_bytes // nest.narrowest))
    columns = column_tile(nest, axis, width, hints) if view < 0 else target.warp_size
    busy = ceildiv(nest.extents[axis], Size.of(columns)) * product([e for p, e in enumerate(nest.extents) if p != axis])
    known = extent.evaluate(hints) if extent.names <= hints.keys() else 1 << 30
    blocks = busy.evaluate(hints) if busy.names <= hints.keys() else 1
    # A part of short rows has more of them: it is as much to read.
    rows = costs.fewest_rows * (width // columns)
    few = blocks > target.multiprocessors and known <= 4 * rows  # a second launch would take longer
    if (blocks > target.multiprocessors * costs.enough_across or few or known <= rows) and known <= _longest(target, True):
        return None
    wide, step, wanted = part_tile(kernel, nest, axis, target, hints) if view < 0 else None, 64, ceildiv(Size.of(target.multiprocessors * costs.blocks_across), maximum(ONE, busy))
    if wide is not None:
        # All blocks run at once: a few that come later would leave most of the device without work. Where these would leave a sixth of the device without work, three
        # rounds of shorter blocks leave less.
        slots = target.multiprocessors * PARTS_RESIDENT
        busy = maximum(ONE, ceildiv(nest.extents[axis], Size.of(wide[0])) * product([e for p, e in enumerate(nest.extents) if p != axis]))
        filled = minimum(ONE, floordiv(floordiv(Size.of(slots), busy) * busy * 6, Size.of(slots * 5)))
        step, wanted = wide[1], floordiv((Size.of(3) - filled * 2) * slots, busy)
    parts = maximum(ONE, minimum(ceildiv(extent, Size.of(rows)), wanted))
    if target.max_turns:
        parts = maximum(parts, ceildiv(extent, Size.of(_stretch(target))))
    return _Plan(nest, extent, parts, ceildiv(ceildiv(extent, parts), Size.of(step)) * step, True, beside)


_THREADS, _LEAST = 256, 1024
"""Parts that threads walk one after another, and the elements of each at least."""


def _stretch(target: Target) -> int:
    """Elements of a part at most, where a driver limits the iterations of a thread: a quarter of them, in whole steps, as a kernel has more loops than one."""
    return max(1, target.max_turns // 4 // 4096) * 4096


def _longest(target: Target, crosswise: bool) -> int:
    """Elements above which a reduction is cut though there are results enough. The threads of a block share a row, and one thread walks along a column."""
    if not target.max_turns:
        return 1 << 62
    return _stretch(target) * (1 if crosswise else 16)


def _beside(region: Block, reduction: Op) -> tuple[Op, ...] | None:
    """The ops beside the reduction that its body needs, in order: both kernels compute them. None where one of them may not be
    computed twice: it has effects or regions of its own, depends on the reduction, or reads what the kernel writes."""
    made = {result: op for op in region.ops for result in op.results}
    written = {op.operands[0] for op in region.ops if op.opcode == "store"}
    needed: set[int] = set()
    waiting = [*reduction.operands[1:], *(v for op in walk(reduction.regions[0]) for v in op.operands)]
    while waiting:
        op = made.get(waiting.pop())
        if op is None or id(op) in needed:
            continue
        if op.regions or has_effects(op) or (op.opcode == "load" and op.operands[0] in written):
            return None
        needed.add(id(op))
        waiting += op.operands
    return tuple(op for op in region.ops if id(op) in needed)


def _split(call: KernelCall, plan: _Plan, number: int) -> tuple[list[KernelCall], list[ProgramArray]]:
    kernel, nest = call.kernel, plan.nest
    reduction = nest.reductions[0]
    shape = (plan.parts, *nest.extents) if plan.crosswise else (*nest.extents, plan.parts)
    dtypes: list[DType] = [dtype_of(r.type) for r in reduction.results]
    partials = [Value(tensor(d, *shape, align=16), f"{kernel.name}.part{number + k}") for k, d in enumerate(dtypes)]
    arrays = [ProgramArray(p.name, _tensor(p), "scratch") for p in partials]
    made = [_first_kernel(kernel, plan, partials), *([_rest_kernel(kernel, plan, partials)] if plan.even else []), _second_kernel(kernel, plan, partials)]
    names = dict(zip(kernel.params, call.args, strict=True)) | {p: p.name for p in partials}
    return [KernelCall(one, tuple(names[p] for p in one.params), call.loops) for one in made], arrays


def _tensor(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


def _first_kernel(kernel: Kernel, plan: _Plan, partials: list[Value]) -> Kernel:
    """The parts, or all but the last where they are even."""
    nest = plan.nest
    parts = plan.parts - 1 if plan.even else plan.parts

    def bounds(b: Builder, part: Value) -> tuple[Value, Value]:
        start, length = b.mul(part, b.index(plan.chunk)), b.index(plan.chunk)
        if not (plan.guarded or plan.even):
            left = b.op("max", b.sub(b.index(plan.extent), start), b.index(0))
            length = b.op("min", left, length)
        return start, length

    b = Builder(kernel.span)
    mapping = copy_outside(b, kernel)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        part, own = (indices[0], indices[1:]) if plan.crosswise else (indices[-1], indices[:-1])
        _store_part(inner, plan, partials, indices, own, bounds(inner, part), mapping)
        return []

    extents = [b.index(e) for e in ((parts, *nest.extents) if plan.crosswise else (*nest.extents, parts))]
    names = [a.name for a in nest.parallel.regions[0].args]
    with b.at(nest.parallel.span):
        b.parallel(extents, body, ["part", *names] if plan.crosswise else [*names, "part"])
    return _finished(f"{kernel.name}.parts", kernel, b, partials, plan)


def _rest_kernel(kernel: Kernel, plan: _Plan, partials: list[Value]) -> Kernel:
    """The last part, of what even ones leave."""
    nest, last = plan.nest, plan.parts - 1
    b = Builder(kernel.span)
    mapping = copy_outside(b, kernel)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        bounds = inner.index(last * plan.chunk), inner.index(plan.extent - last * plan.chunk)
        _store_part(inner, plan, partials, (*indices, inner.index(last)), indices, bounds, mapping)
        return []

    with b.at(nest.parallel.span):
        b.parallel([b.index(e) for e in nest.extents], body, [a.name for a in nest.parallel.regions[0].args])
    return _finished(f"{kernel.name}.rest", kernel, b, partials, plan)


def _store_part(
    b: Builder, plan: _Plan, partials: list[Value], place: Sequence[Value], own: Sequence[Value], bounds: tuple[Value, Value], outside: Mapping[Value, Value]
) -> None:  # fmt: skip
    """Reduce a stretch of the range for one point, and store what comes out at its place."""
    reduction, region = plan.nest.reductions[0], plan.nest.parallel.regions[0]
    local = dict(outside) | dict(zip(region.args, own, strict=True))
    clone_ops(b, plan.beside, local)
    start, length = bounds

    def at(deep: Builder, *places: Value) -> tuple[Value, ...]:
        deepest = dict(local)
        deepest.update(zip(reduction.regions[0].args, places, strict=True))
        clone_ops(deep, reduction.regions[0].ops[:-1], deepest)
        return tuple(deepest.get(v, v) for v in reduction.regions[0].yields)

    def term(deep: Builder, k: Value, *others: Value) -> tuple[Value, ...]:
        position = deep.add(start, k)
        if not plan.guarded:
            return at(deep, position, *others)
        inside = deep.op("lt", position, deep.index(plan.extent))
        zero = deep.const(0, dtype_of(reduction.results[0].type))
        return deep.if_(inside, lambda region: at(region, position), lambda region: [zero])

    deeper = [local.get(v, v) for v in reduction.operands[1:]]
    names = ["k", *(arg.name for arg in reduction.regions[0].args[1:])]
    results = b.reduce(str(reduction.attrs["kind"]), [length, *deeper], term, names)
    for partial, result in zip(partials, results, strict=True):
        b.multi("store", partial, *place, result)


def _finished(name: str, kernel: Kernel, b: Builder, partials: list[Value], plan: _Plan) -> Kernel:
    body = Block((), tuple(b.ops))
    used = {v for op in walk(body) for v in op.operands}
    several = len(plan.nest.reductions[0].operands) > 1
    attrs = MappingProxyType(kernel.attrs if several else {**kernel.attrs, "reduce_extent": plan.chunk})
    return Kernel(name, Stage.LOOP, (*(p for p in kernel.params if p in used), *partials), body, facts=kernel.facts, attrs=attrs, span=kernel.span)


def _second_kernel(kernel: Kernel, plan: _Plan, partials: list[Value]) -> Kernel:
    nest, reduction = plan.nest, plan.nest.reductions[0]
    b = Builder(kernel.span)

    def reduce(inner: Builder, copies: Copies) -> Sequence[Value]:
        indices = [copies[arg] for arg in nest.parallel.regions[0].args]

        def term(deep: Builder, s: Value) -> list[Value]:
            where = (s, *indices) if plan.crosswise else (*indices, s)
            return [deep.op("load", partial, *where) for partial in partials]

        return inner.reduce(str(reduction.attrs["kind"]), [inner.index(plan.parts)], term, ["s"])

    copy_nest(b, kernel, nest.parallel, nest.extents, reduction, reduce)
    # After a contraction's parts the second kernel is launched early and waits itself.
    return finished(kernel, kernel.name, b, partials, {"early": True} if plan.guarded else None)
