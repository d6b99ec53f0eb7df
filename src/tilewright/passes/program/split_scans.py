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

Sums of floats are added in another order, which depends on sizes and target only: the same call gives the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Affine, address, analyse
from tilewright.analysis.loop_nest import Nest, nest_of
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.schedules.plans import Plan, Plans

_KINDS = ("add", "mul", "min", "max")


def split_scans(program: Program, plans: Plans, target: Target, hints: Mapping[str, int]) -> tuple[Program, Plans]:
    """The program with long scans cut."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        scan = _plan(call.kernel, target, hints) if schedule is None else None
        if scan is None:
            calls.append(call)
            schedules.append(schedule)
            continue
        parts, arrays = _split(call, scan, len(scratch))
        calls += parts
        schedules += [None] * len(parts)
        scratch += arrays
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def would_split_scan(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> bool:
    """Whether a kernel's loop is cut into parts."""
    return _plan(kernel, target, hints) is not None


@record
class _Scan:
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


def _plan(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> _Scan | None:
    if not any(op.opcode == "parallel" for op in kernel.body.ops):
        return None
    nest = nest_of(kernel)
    loop = _only_loop(nest.parallel.regions[0])
    if loop is None or not _is_apart(kernel, loop):
        return None
    forms = analyse(kernel)
    low, high, step = (forms[v] for v in loop.operands[:3])
    if any(f.factors for f in (low, high, step)) or step.constant != ONE or not _writes_apart(loop, forms):
        return None
    found = _term(loop)
    if found is None:
        return None
    kind, term, needed = found
    extent = high.constant - low.constant
    accesses = [op for op in walk(loop.regions[0]) if op.opcode in ("load", "store")]
    crosswise = any(address(op, forms).factor(index) == ONE for op in accesses for index in nest.parallel.regions[0].args)
    parts = _parts(nest, extent, target, hints, crosswise)
    return None if parts is None else _Scan(nest, loop, kind, term, needed, low.constant, extent, parts, crosswise)


def _only_loop(region: Block) -> Op | None:
    """The one loop of a kernel that carries a value which nobody wants afterwards; beside it nothing is written."""
    loops = [op for op in region.ops if op.opcode == "for"]
    others = [op for op in region.ops if op.opcode not in ("for", "yield")]
    if len(loops) != 1 or len(loops[0].operands) != 4 or any(op.regions or has_effects(op) for op in others):
        return None
    (result,) = loops[0].results
    return None if any(result in op.operands for op in region.ops) else loops[0]


def _is_apart(kernel: Kernel, loop: Op) -> bool:
    """Whether the loop's body only reads what the kernel does not write, and has no loops of its own."""
    inside = list(walk(loop.regions[0]))
    if any(op.opcode in ("for", "while", "reduce") or (has_effects(op) and op.opcode not in ("store", "yield", "if")) for op in inside):
        return False
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode == "store"}
    return not any(op.opcode == "load" and op.operands[0] in written for op in walk(kernel.body))


def _writes_apart(loop: Op, forms: Mapping[Value, Affine]) -> bool:
    """Whether no two turns write the same element."""
    index = loop.regions[0].args[0]
    stores = [op for op in walk(loop.regions[0]) if op.opcode == "store"]
    arrays = [op.operands[0] for op in stores]
    if not stores or len(set(arrays)) != len(arrays):
        return False
    for store in stores:
        memory = store.operands[0].type
        assert isinstance(memory, Tensor)
        places = [forms.get(v) for v in store.operands[1 : 1 + len(memory.shape)]]
        if not any(form is not None and form.factor(index).constant not in (None, 0) for form in places):
            return False
    return True


def _term(loop: Op) -> tuple[str, tuple[Value, ...], tuple[Op, ...]] | None:
    """By what a turn combines the value it carries with what term, and the ops that compute the term."""
    body = loop.regions[0]
    _, carried = body.args
    (update,) = body.yields
    made = {result: op for op in body.ops for result in op.results}
    step = made.get(update)
    if step is None:
        return None
    kind, dtype = ("add" if step.opcode == "fma" else step.opcode), dtype_of(carried.type)
    # A narrow float is rounded at every step: parts would be rounded elsewhere.
    if kind not in _KINDS or dtype.is_bool or (dtype.is_float and dtype.bits < 32 and kind in ("add", "mul")):
        return None
    operands = step.operands
    if step.opcode == "fma":
        term = operands[:2] if operands[2] is carried else ()
    else:
        term = tuple(v for v in operands if v is not carried) if sum(v is carried for v in operands) == 1 else ()
    if not term:
        return None
    needed: set[int] = set()
    waiting = list(term)
    while waiting:
        value = waiting.pop()
        if value is carried:
            return None
        op = made.get(value)
        if op is not None and id(op) not in needed:
            needed.add(id(op))
            waiting += [v for inner in (op, *(o for region in op.regions for o in walk(region))) for v in inner.operands]
            if any(inner.opcode == "store" for region in op.regions for inner in walk(region)):
                return None
    return kind, term, tuple(op for op in body.ops if id(op) in needed)


def _parts(nest: Nest, extent: Size, target: Target, hints: Mapping[str, int], crosswise: bool) -> Size | None:
    """Into how many parts the loop is cut; None where that is not worth it."""
    points = product(nest.extents)
    costs = target.costs.scans
    if target.simt:
        shortest, wanted = (costs.rows, costs.threads_across) if crosswise else (costs.shortest, costs.threads)
        wanted *= target.multiprocessors
    else:
        shortest, wanted = (costs.rows, costs.cpu_columns) if crosswise else (costs.cpu_stretch, costs.cpu_parts)
    # Code serves other lengths than that of the first call, so only a constant one is too short.
    turns = extent.constant if extent.constant is not None else 1 << 30
    results = points.evaluate(hints) if points.names <= hints.keys() else 1
    if turns < 4 * shortest or results * 4 > wanted:
        return None
    return maximum(ONE, minimum(ceildiv(extent, Size.of(shortest)), ceildiv(Size.of(wanted), maximum(ONE, points))))


def _split(call: KernelCall, scan: _Scan, number: int) -> tuple[list[KernelCall], list[ProgramArray]]:
    kernel = call.kernel
    shape = scan.shape(scan.parts)
    dtype = dtype_of(scan.loop.results[0].type)
    total, before = (Value(tensor(dtype, *shape, align=16), f"{kernel.name}.{name}{number}") for name in ("total", "before"))
    kernels = [_totals(kernel, scan, total), _prefixes(kernel, scan, total, before), _walks(kernel, scan, before)]
    names = dict(zip(kernel.params, call.args, strict=True)) | {v: v.name for v in (total, before)}
    arrays = [ProgramArray(v.name, v.type, "scratch") for v in (total, before) if isinstance(v.type, Tensor)]
    return [KernelCall(k, tuple(names[p] for p in k.params)) for k in kernels], arrays


def _around(scan: _Scan) -> list[Op]:
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


def _bounds(b: Builder, scan: _Scan, part: Value) -> tuple[Value, Value]:
    """The first turn of a part, and that of the next one: lengths of parts differ by one at most."""
    low, extent, parts = b.index(scan.low), b.index(scan.extent), b.index(scan.parts)
    start, end = (b.op("floordiv", b.mul(k, extent), parts) for k in (part, b.add(part, b.index(1))))
    return b.add(low, start), b.add(low, end)


def _totals(kernel: Kernel, scan: _Scan, total: Value) -> Kernel:
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


def _prefixes(kernel: Kernel, scan: _Scan, total: Value, before: Value) -> Kernel:
    """What each part begins with."""
    region = scan.nest.parallel.regions[0]
    b, mapping = _begun(kernel)

    def points(inner: Builder, *indices: Value) -> list[Value]:
        local = dict(mapping) | dict(zip(region.args, indices, strict=True))
        clone_ops(inner, _around(scan), local)
        first = local.get(scan.loop.operands[3], scan.loop.operands[3])
        zero, one = inner.index(0), inner.index(1)
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


def _walks(kernel: Kernel, scan: _Scan, before: Value) -> Kernel:
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
    return replace(made, attrs=MappingProxyType({**made.attrs, "in_order": "lines" if scan.crosswise else "parts"}))
