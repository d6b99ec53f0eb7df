"""Cut loops that are scans into parts that run side by side. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a kernel with too few parallel points whose loop carries one value that each turn combines
with a term (`s = s + x[i]`, also `*`, `min`, `max`) is three: what the terms of each part amount to, what is before each part, and the loop itself, for
each part from there on. The body stays as it is, so that it may do anything with the value it carries: a running sum, the sum before an
element, a running mean. Proven before: the term does not depend on what is carried, nothing that the kernel writes is read, and no two turns write the same
element. Sits after split_reductions, before schedules are chosen; the parts are ordinary kernels.

    parallel %p (%r) { for 0, %n, 1, %s0 (%i, %s) { %t = add %s, x[r, i]; store out[r, i], %t; yield %t } }
    -> parallel %p, %parts-1 (%r, %k) { %t = reduce begin(k+1) - begin(k) {add} (%j) { yield x[r, begin(k) + j] }; store total[r, k] }
       parallel %p (%r) { store before[r, 0], %s0; for 1, %parts, 1, %s0 (%k, %s) { %t = add %s, total[r, k-1]; store before[r, k], %t; yield %t } }
       parallel %p, %parts (%r, %k) { for 0, %n/%parts, 1, before[r, k] (%j, %s) { … as before, of turn begin(k) + j … }; one more turn of the longer parts }

On a GPU the threads of a block walk a line together where memory lies along it (`rows/scan_rows`): only lines that are few are cut then.

Sums of floats are added in another order, which depends on sizes and target only: the same call gives the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import address
from tilewright.analysis.loop_nest import Nest
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.common.scan_loops import ScanLoop, find_scans, guarded_terms, nothing, scanned_by_blocks
from tilewright.passes.schedules.plans import Plan, Plans


def split_scans(program: Program, plans: Plans, target: Target, hints: Mapping[str, int]) -> tuple[Program, Plans]:
    """The program with long scans cut."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        plain = replace(call, kernel=guarded_terms(call.kernel)) if schedule is None and not call.varies else None
        scan = _plan(plain.kernel, target, hints) if plain is not None else None
        if scan is None or plain is None:
            calls.append(plain if plain is not None and scanned_by_blocks(plain.kernel, target, hints) is not None else call)
            schedules.append(schedule)
            continue
        parts, arrays = _split(plain, scan, len(scratch))
        calls += parts
        schedules += [None] * len(parts)
        scratch += arrays
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def would_split_scan(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether a kernel's loop is cut into parts, or the threads of a block walk it together."""
    plain = guarded_terms(kernel)
    return scanned_by_blocks(plain, target, hints) is not None or _plan(plain, target, hints) is not None


@record
class _CutScan:
    """A loop that is a scan. `term`: what a turn adds (of an `fma`, its two factors); `slice`: the ops of the body that compute it."""

    nest: Nest
    loop: Op
    kind: str
    term: tuple[Value, ...]
    slice: tuple[Op, ...]
    low: Size
    extent: Size
    parts: Size
    crosswise: bool
    """Whether neighbours in memory belong to different lines: then parts come first, and lines stay neighbours."""
    by_blocks: bool = False
    """Whether the threads of a block scan a part together."""

    def at(self, part: Value, indices: Sequence[Value]) -> tuple[Value, ...]:
        """Where what belongs to a part of a line lies."""
        return (part, *indices) if self.crosswise else (*indices, part)

    def shape(self, parts: Size) -> tuple[Size, ...]:
        return (parts, *self.nest.extents) if self.crosswise else (*self.nest.extents, parts)

    def apart(self, indices: Sequence[Value]) -> tuple[Value, tuple[Value, ...]]:
        """The part and the line, of indices over all parts."""
        return (indices[0], tuple(indices[1:])) if self.crosswise else (indices[-1], tuple(indices[:-1]))

    @property
    def names(self) -> list[str]:
        lines = [a.name for a in self.nest.parallel.regions[0].args]
        return ["part", *lines] if self.crosswise else [*lines, "part"]


def _plan(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> _CutScan | None:
    """How a scan is cut, if it is."""
    scan = find_scans(kernel)
    if scan is None or len(scan.scans) != 1 or not _stands_alone(kernel, scan):
        return None
    nest, loop, forms, own = scan.nest, scan.loop, scan.forms, scan.scans[0]
    low, high = (forms[v] for v in loop.operands[:2])
    if low.factors or high.factors:
        return None
    extent = high.constant - low.constant
    accesses = [op for op in walk(loop.regions[0]) if op.opcode in ("load", "store")]
    crosswise = any(address(op, forms).factor(index) == ONE for op in accesses for index in nest.parallel.regions[0].args)
    by_blocks = scanned_by_blocks(kernel, target, hints) is not None
    parts = _parts(nest, extent, target, hints, crosswise and not by_blocks, by_blocks)
    return None if parts is None else _CutScan(nest, loop, own.kind, own.term, own.slice, low.constant, extent, parts, crosswise and not by_blocks, by_blocks)


def _stands_alone(kernel: Kernel, scan: ScanLoop) -> bool:
    """Whether nobody wants what the loop carries afterwards, nothing is written beside it, and nothing that is written is read."""
    region = scan.nest.parallel.regions[0]
    if any(result in op.operands for op in region.ops for result in scan.loop.results) or any(op.opcode == "store" for op in region.ops):
        return False
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode == "store"}
    return not any(op.opcode == "load" and op.operands[0] in written for op in walk(kernel.body))


def _parts(nest: Nest, extent: Size, target: Target, hints: Mapping[str, int], crosswise: bool, by_blocks: bool) -> Size | None:
    """Into how many parts the loop is cut; None where that is not worth it."""
    points = product(nest.extents)
    costs = target.costs.scans
    results = points.evaluate(hints) if points.names <= hints.keys() else 1
    if by_blocks:
        known = extent.evaluate(hints) if extent.names <= hints.keys() else 1 << 30
        wanted = target.multiprocessors * costs.blocks
        if 2 * results > wanted or known < 2 * costs.stretch:
            return None
        return maximum(ONE, minimum(ceildiv(extent, Size.of(costs.stretch)), ceildiv(Size.of(wanted), maximum(ONE, points))))
    if target.simt:
        # Of many lines each has few parts, and many threads learn at once what is before theirs.
        many = crosswise or results >= target.multiprocessors
        shortest, wanted = costs.rows if crosswise else costs.shortest, costs.threads_across if many else costs.threads
        wanted *= target.multiprocessors
    else:
        shortest, wanted = (costs.rows, costs.cpu_columns) if crosswise else (costs.cpu_stretch, costs.cpu_parts)
    # Code serves other lengths than that of the first call, so only a constant one is too short.
    turns = extent.constant if extent.constant is not None else 1 << 30
    if turns < 4 * shortest or results * 4 > wanted:
        return None
    return maximum(ONE, minimum(ceildiv(extent, Size.of(shortest)), ceildiv(Size.of(wanted), maximum(ONE, points))))


def _split(call: KernelCall, scan: _CutScan, number: int) -> tuple[list[KernelCall], list[ProgramArray]]:
    kernel = call.kernel
    shape = scan.shape(scan.parts)
    dtype = dtype_of(scan.loop.results[0].type)
    total, before = (Value(tensor(dtype, *shape, align=16), f"{kernel.name}.{name}{number}") for name in ("total", "before"))
    kernels = [_totals(kernel, scan, total), _prefixes(kernel, scan, total, before), _walks(kernel, scan, before)]
    names = dict(zip(kernel.params, call.args, strict=True)) | {v: v.name for v in (total, before)}
    arrays = [ProgramArray(v.name, v.type, "scratch") for v in (total, before) if isinstance(v.type, Tensor)]
    return [KernelCall(k, tuple(names[p] for p in k.params), call.loops) for k in kernels], arrays


_MULTIPLE = 1024
"""Turns of which a block's part is a multiple."""


def _around(scan: _CutScan) -> list[Op]:
    """The ops beside the loop."""
    return [op for op in scan.nest.parallel.regions[0].ops if op is not scan.loop and op.opcode != "yield"]


def _begun(kernel: Kernel) -> tuple[Builder, dict[Value, Value]]:
    b, mapping = Builder(kernel.span), dict[Value, Value]()
    clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)
    return b, mapping


def _finished(kernel: Kernel, name: str, b: Builder, own: Sequence[Value]) -> Kernel:
    made = eliminate_dead(Kernel(name, Stage.LOOP, (), Block((), tuple(b.ops)), facts=kernel.facts, attrs=kernel.attrs, span=kernel.span))
    used = {v for op in walk(made.body) for v in op.operands}
    return replace(made, params=(*(p for p in kernel.params if p in used), *own))


def _bounds(b: Builder, scan: _CutScan, part: Value) -> tuple[Value, Value]:
    """The first turn of a part, and that of the next one: lengths of parts differ by one at most. Those of blocks begin at multiples, as vectors do."""
    if scan.by_blocks:
        chunk = b.index(ceildiv(ceildiv(scan.extent, scan.parts), Size.of(_MULTIPLE)) * _MULTIPLE)
        start = b.add(b.index(scan.low), b.mul(part, chunk))
        return start, b.op("max", start, b.op("min", b.add(start, chunk), b.index(scan.low + scan.extent)))
    low, extent, parts = b.index(scan.low), b.index(scan.extent), b.index(scan.parts)
    start, end = (b.op("floordiv", b.mul(k, extent), parts) for k in (part, b.add(part, b.index(1))))
    return b.add(low, start), b.add(low, end)


def _totals(kernel: Kernel, scan: _CutScan, total: Value) -> Kernel:
    """What the terms of each part but the last amount to."""
    region, body = scan.nest.parallel.regions[0], scan.loop.regions[0]
    b, mapping = _begun(kernel)

    def points(inner: Builder, *indices: Value) -> list[Value]:
        part, line = scan.apart(indices)
        local = dict(mapping) | dict(zip(region.args, line, strict=True))
        clone_ops(inner, _around(scan), local)
        start, end = _bounds(inner, scan, part)
        length = inner.sub(end, start)

        def term(deep: Builder, k: Value) -> list[Value]:
            deepest = dict(local)
            deepest[body.args[0]] = deep.add(start, k)
            clone_ops(deep, scan.slice, deepest)
            values = [deepest.get(v, v) for v in scan.term]
            return [deep.mul(*values) if len(values) > 1 else values[0]]

        (result,) = inner.reduce(scan.kind, [length], term, ["k"])
        inner.multi("store", total, *indices, result)
        return []

    with b.at(scan.loop.span):
        b.parallel([b.index(e) for e in scan.shape(scan.parts - 1)], points, scan.names)
    made = _finished(kernel, f"{kernel.name}.totals", b, [total])
    return replace(made, attrs=MappingProxyType({**made.attrs, "reduce_extent": ceildiv(scan.extent, scan.parts)}))


def _prefixes(kernel: Kernel, scan: _CutScan, total: Value, before: Value) -> Kernel:
    """What each part begins with."""
    region = scan.nest.parallel.regions[0]
    b, mapping = _begun(kernel)

    def handed_on(indices: Sequence[Value]) -> Callable[..., list[Value]]:
        """A turn of a loop that is a scan itself."""

        def step(deep: Builder, k: Value, now: Value) -> list[Value]:
            deep.multi("store", before, *scan.at(k, indices), now)
            dtype = dtype_of(now.type)
            there = deep.op("lt", k, deep.index(scan.parts - 1))
            (own,) = deep.if_(there, lambda at: [at.op("load", total, *scan.at(k, indices))], lambda at: [at.const(nothing(scan.kind, dtype), dtype)])
            return [deep.op(scan.kind, now, own)]

        return step

    def points(inner: Builder, *indices: Value) -> list[Value]:
        local = dict(mapping) | dict(zip(region.args, indices, strict=True))
        clone_ops(inner, _around(scan), local)
        first = local.get(scan.loop.operands[3], scan.loop.operands[3])
        zero, one = inner.index(0), inner.index(1)
        if scan.by_blocks:
            inner.for_(zero, inner.index(scan.parts), one, [first], handed_on(indices), "part")
            return []
        inner.multi("store", before, *scan.at(zero, indices), first)

        def step(deep: Builder, k: Value, now: Value) -> list[Value]:
            joined = deep.op(scan.kind, now, deep.op("load", total, *scan.at(deep.sub(k, deep.index(1)), indices)))
            deep.multi("store", before, *scan.at(k, indices), joined)
            return [joined]

        inner.for_(one, inner.index(scan.parts), one, [first], step, "part")
        return []

    with b.at(scan.loop.span):
        b.parallel([b.index(e) for e in scan.nest.extents], points, [a.name for a in region.args])
    return _finished(kernel, f"{kernel.name}.before", b, [total, before])


def _walks(kernel: Kernel, scan: _CutScan, before: Value) -> Kernel:
    """The loop itself, part by part."""
    region, body = scan.nest.parallel.regions[0], scan.loop.regions[0]
    b, mapping = _begun(kernel)

    def points(inner: Builder, *indices: Value) -> list[Value]:
        part, line = scan.apart(indices)
        local = dict(mapping) | dict(zip(region.args, line, strict=True))
        clone_ops(inner, _around(scan), local)
        start, end = _bounds(inner, scan, part)
        first = inner.op("load", before, *indices)

        def turn(deep: Builder, i: Value, now: Value) -> list[Value]:
            own = dict(local) | {body.args[0]: i, body.args[1]: now}
            clone_ops(deep, body.ops[:-1], own)
            return [own.get(v, v) for v in body.yields]

        if scan.by_blocks:
            inner.for_(start, end, inner.index(1), [first], turn, body.args[0].name)
            return []
        # All parts take the same turns, and then the longer ones one more.
        turns = inner.index(scan.extent // scan.parts)
        (carried,) = inner.for_(
            inner.index(0), turns, inner.index(1), [first], lambda deep, j, now: turn(deep, deep.add(start, j), now), body.args[0].name
        )
        last = inner.add(start, turns)

        def one_more(deep: Builder) -> list[Value]:
            turn(deep, last, carried)
            return []

        inner.if_(inner.op("lt", last, end), one_more, lambda _: [])
        return []

    with b.at(scan.loop.span):
        b.parallel([b.index(e) for e in scan.shape(scan.parts)], points, scan.names)
    made = _finished(kernel, kernel.name, b, [before])
    if scan.by_blocks:
        lengths = {"reduce_extent": ceildiv(scan.extent, scan.parts), "line_extent": scan.low + scan.extent}
        return replace(made, attrs=MappingProxyType({**made.attrs, **lengths}))
    return replace(made, attrs=MappingProxyType({**made.attrs, "in_order": "lines" if scan.crosswise else "parts"}))
