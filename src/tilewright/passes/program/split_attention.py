"""Attention of few queries over many keys becomes two kernels: parts of the keys side by side, then their sum. `Program -> Program`.

In: a program and the schedules of its calls. Out: the same, where attention whose schedule has `splits` is two calls. The first computes, for each
part of the keys, the maximum of the scores, the sum of the exponentials below it and the weighted sum of the values, in f32. The second
adds the parts up, in their order, and does what the text does with its sums.

    parallel (h, i) { m = max_j f; l = sum_j exp(f - m); for e { o = sum_j exp(f - m) * v; out = o / l } }
    -> parallel (h, s, i) { m, l, o over j in start(s) .. start(s) + count(s); store part.max, part.sum, part.out }
       parallel (h, i) { m = max_s part.max; l = sum_s part.sum * exp(part.max - m); for e { o = …; out = o / l } }

The number of parts is fixed with the code. Where a part begins and ends is computed in the kernel, from what the text says of the keys that count:
a length in memory, `j <= pos[0] + i`, a window. All parts are equally long, but for one step, and what lies behind the end is not read. The same numbers
in memory give the same parts, so that a replayed graph gives the same bits as a call.

Query heads that share keys and values (`k[j, h // 4, d]`) become rows of one tile first (`group_heads`): the keys are read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Affine, analyse, gap
from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.affine import AffineForm
from tilewright.base.dtypes import f32
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, floordiv, maximum, minimum, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk, watched_axes
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects, rewrite
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.schedules.attention import CpuAttention, MmaAttention
from tilewright.passes.schedules.plans import Plan, Plans

SHORTEST = 256
"""Keys of a part, at least, on a CPU."""


def split_attention(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with attention of few queries cut, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        if not isinstance(schedule, MmaAttention | CpuAttention) or not schedule.splits:
            calls.append(call)
            schedules.append(schedule)
            continue
        form = find_split(call.kernel)
        if form is None:
            raise CompilerBug.at("TW040", f"{call.kernel.name} is no attention that can be cut", call.kernel.span)
        parts = _Parts(form, _splits(form, schedule), schedule.n, len(scratch))
        scratch += [ProgramArray(p.name, _tensor(p), "scratch") for p in parts.partials]
        names = dict(zip(call.kernel.params, call.args, strict=True)) | {p: p.name for p in parts.partials}
        if form.watched:
            flags = Value(tensor(f32, *parts.outer, align=16), f"{call.kernel.name}.part{len(scratch)}")
            scratch.append(ProgramArray(flags.name, _tensor(flags), "scratch"))
            names[flags] = flags.name
            kernel = parts.check(flags)
            calls.append(KernelCall(kernel, tuple(names[p] for p in kernel.params), call.loops))
            schedules.append(None)
        for kernel, own in ((parts.first(), replace(schedule, splits=0)), (parts.second(), None)):
            calls.append(KernelCall(kernel, tuple(names[p] for p in kernel.params), call.loops))
            schedules.append(own)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _splits(form: SplitForm, schedule: MmaAttention | CpuAttention) -> Size:
    """How many parts there are: by sizes only, never by what is in memory. On a CPU, where code serves all sizes, batch points and rows share the blocks."""
    if isinstance(schedule, MmaAttention):
        return Size.of(schedule.splits)
    found = form.found
    others = product([*(found.extents[p] for p in found.batch), ceildiv(found.extents[found.row], schedule.m)])
    fitting = minimum(ceildiv(Size.of(schedule.splits), maximum(ONE, others)), floordiv(found.keys, SHORTEST))
    return maximum(ONE, fitting)


def _tensor(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


# -- query heads that share keys --------------------------------------------------------------------------------------


def group_heads(kernel: Kernel, known: bool = True) -> Kernel:
    """The kernel with an index `h` that is also read as `h // G` as two, `G * outer + inner`; the same kernel where there is none. `known`: only
    where the extent is a multiple of G for sure."""
    parallel = _only_nest(kernel)
    if parallel is None:
        return kernel
    forms = analyse(kernel)
    region = parallel.regions[0]
    for position, index in enumerate(region.args):
        by = [forms[op.operands[1]] for op in walk(region) if op.opcode == "floordiv" and op.operands[0] is index]
        extent = forms[parallel.operands[position]]
        if not by or any(form != by[0] or form.factors for form in by) or extent.factors:
            continue
        group, total = by[0].constant, extent.constant
        outer = _groups(region, index, group, total)
        if outer is not None or not known:
            return _two_indices(kernel, parallel, position, group, outer if outer is not None else total // group)
    return kernel


def _groups(region: Block, index: Value, group: Size, total: Size) -> Size | None:
    """How many groups there are, where they are all of one size: both sizes are numbers; or `index // (total // X)` is read along an axis of extent X,
    which is only inside for all indices if X divides the total."""
    each, number = group.constant, total.constant
    if each is not None and number is not None:
        return Size.of(number // each) if each > 0 and number % each == 0 else None
    quotients = {op.result for op in walk(region) if op.opcode == "floordiv" and op.operands[0] is index}
    for op in walk(region):
        memory = op.operands[0].type if op.opcode == "load" else None
        if isinstance(memory, Tensor):
            for extent, place in zip(memory.shape, op.operands[1:], strict=False):
                if place in quotients and group == floordiv(total, extent):
                    return extent
    return None


def _only_nest(kernel: Kernel) -> Op | None:
    found = [op for op in kernel.body.ops if op.opcode == "parallel"]
    return found[0] if len(found) == 1 else None


def _two_indices(kernel: Kernel, parallel: Op, position: int, group: Size, outer: Size) -> Kernel:
    region = parallel.regions[0]
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op is not parallel], mapping)
    extents = [mapping.get(v, v) for v in parallel.operands]
    extents[position : position + 1] = [b.index(outer), b.index(group)]
    pair: list[Value] = []

    def body(inner: Builder, *indices: Value) -> list[Value]:
        high, low = indices[position : position + 2]
        whole = inner.add(inner.mul(high, inner.index(group)), low)
        pair.extend((whole, high, low))
        local = dict(mapping) | dict(zip(region.args, (*indices[:position], whole, *indices[position + 2 :]), strict=True))
        clone_ops(inner, region.ops[:-1], local)
        return []

    names = [a.name for a in region.args]
    names[position : position + 1] = [f"{names[position]}.group", names[position]]
    with b.at(parallel.span):
        b.parallel(extents, body, names)
    whole, high, low = pair

    def change(builder: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in ("floordiv", "mod") or op.operands[0] is not whole:
            return None
        return [high if op.opcode == "floordiv" else low]

    return eliminate_dead(rewrite(replace(kernel, body=Block((), tuple(b.ops))), change))


def _with_row(kernel: Kernel) -> Kernel | None:
    """The kernel with a row of its own, of extent 1, where each query has its keys to itself; None where no query is found."""
    parallel = _only_nest(kernel)
    if parallel is None:
        return None
    forms = analyse(kernel)
    region = parallel.regions[0]
    queries: dict[Op, int] = {}
    for outer in (op for op in walk(region) if op.opcode == "reduce"):
        for inner in (op for op in walk(outer.regions[0]) if op.opcode == "reduce"):
            for load in (op for op in inner.regions[0].ops if op.opcode == "load"):
                indices = load.operands[1 : 1 + _tensor(load.operands[0]).rank]
                moving = any(forms[v].factor(outer.regions[0].args[0]) != ZERO for v in indices)
                places = [axis for axis, v in enumerate(indices) if any(forms[v].factor(i) == ONE for i in region.args)]
                if not moving and places:
                    queries[load] = places[-1]
    if not queries:
        return None
    b = Builder(kernel.span)
    extents = [*parallel.operands, b.index(1)]
    row = Value(region.args[0].type, "row")

    def change(builder: Builder, op: Op) -> Sequence[Value] | None:
        axis = queries.get(op)
        if axis is None:
            return None
        operands = list(op.operands)
        operands[1 + axis] = builder.add(operands[1 + axis], row)
        return builder.emit("load", operands, op.attrs)

    inside = rewrite(replace(kernel, body=Block((), region.ops)), change).body.ops
    nest = replace(parallel, operands=tuple(extents), regions=(Block((*region.args, row), inside),))
    before = [op for op in kernel.body.ops if op is not parallel]
    return replace(kernel, body=Block((), (*before, *b.ops, nest)))


def _other_row(kernel: Kernel, found: Attention) -> int | None:
    """A further parallel index that keys and values do not know: that of tokens, beside the one of heads."""
    made = {result: op for op in walk(kernel.body) for result in op.results}
    known = _made_of([*found.key.operands, *found.value.operands], made)
    queries = _made_of(found.query.operands, made)
    rows = [p for p in found.batch if found.indices[p] in queries and found.indices[p] not in known]
    return rows[-1] if rows and found.indices[found.row] in queries else None


def _made_of(values: Sequence[Value], made: dict[Value, Op]) -> set[Value]:
    """All that values are made of, indices among it."""
    seen: set[Value] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            op = made.get(value)
            waiting += op.operands if op is not None else ()
    return seen


def _one_row(kernel: Kernel, found: Attention, other: int) -> Kernel:
    """The kernel with two parallel indices as one, the last: rows are the pairs of them. The one that says where keys end counts rows slowly: it grows
    with them."""
    parallel, region = found.parallel, found.parallel.regions[0]
    made = {result: op for op in walk(kernel.body) for result in op.results}
    ends = _made_of([*found.conditions, *([found.count] if found.count is not None else [])], made)
    slow, fast = (found.row, other) if found.reach is not None or found.indices[found.row] in ends else (other, found.row)
    b = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, [op for op in kernel.body.ops if op is not parallel], mapping)
    kept = [p for p in range(len(region.args)) if p not in (other, found.row)]
    inner_extent = found.extents[fast]
    extents = [mapping.get(parallel.operands[p], parallel.operands[p]) for p in kept]

    def body(inner: Builder, *indices: Value) -> list[Value]:
        by = inner.index(inner_extent)
        local = dict(mapping) | {region.args[p]: v for p, v in zip(kept, indices[:-1], strict=True)}
        local[region.args[slow]] = inner.op("floordiv", indices[-1], by)
        local[region.args[fast]] = inner.op("mod", indices[-1], by)
        clone_ops(inner, region.ops[:-1], local)
        return []

    with b.at(parallel.span):
        names = [*(region.args[p].name for p in kept), "row"]
        b.parallel([*extents, b.index(found.extents[slow] * inner_extent)], body, names)
    return eliminate_dead(replace(kernel, body=Block((), tuple(b.ops))))


# -- where the keys begin and end -------------------------------------------------------------------------------------


@record
class SplitForm:
    """Attention with its query heads grouped. `highs` and `lows` are limits of j, all of which hold: j < high, low <= j. `guards` are the
    conditions that they do not say already, since they differ from row to row."""

    kernel: Kernel
    found: Attention
    highs: tuple[Affine, ...]
    lows: tuple[Affine, ...]
    guards: tuple[Value, ...]
    guards_reach: bool
    """`found.reach` is one of them."""
    guards_count: bool
    """So is the number of terms."""
    rooms: tuple[Size, ...]
    """Rows that keys and values have, where a length in memory may be more than that: none beyond them is read."""
    watched: tuple[Op, ...]
    """Loads whose index along j is checked as the kernel runs."""


def find_split(kernel: Kernel, known: bool = True) -> SplitForm | None:
    """How attention can be cut; None where a kernel is none, or where its keys end is not known before they are read. `known`: as for `group_heads`."""
    grouped = group_heads(kernel, known)
    found = find_attention(grouped)
    if found is not None and (other := _other_row(grouped, found)) is not None:
        flat = _one_row(grouped, found, other)
        rows = find_attention(flat)
        form = _limits(flat, rows) if rows is not None and rows.grain == 1 else None
        if form is not None:
            return form
    if found is None:
        single = _with_row(grouped)
        grouped, found = (single, find_attention(single)) if single is not None else (grouped, None)
    if found is None or found.grain != 1:
        return None
    return _limits(grouped, found)


def _limits(kernel: Kernel, found: Attention) -> SplitForm | None:
    made = {result: op for op in walk(kernel.body) for result in op.results}
    row = found.indices[found.row]
    late = {a for op in walk(found.parallel.regions[0]) for region in op.regions for a in region.args}

    def follows(value: Value) -> bool:
        """Whether a value grows with the row: it is the row, or the row divided by a number."""
        op = made.get(value)
        return value is row or (op is not None and op.opcode == "floordiv" and op.operands[0] is row and not found.forms[op.operands[1]].factors)

    def fits(form: Affine) -> bool:
        """Whether a limit is a number before the keys are read: what it is made of depends on no row, but for the row itself."""
        for value, factor in form.factors:
            if follows(value) and factor.constant is not None:
                continue
            waiting = [value]
            while waiting:
                one = waiting.pop()
                if one is row or one in late or one is found.column:
                    return False
                op = made.get(one)
                if op is not None and op.regions:
                    return False
                waiting += op.operands if op is not None else ()
        return True

    def by_row(form: Affine) -> bool:
        return any(follows(value) for value in form.values)

    watched = _watched(kernel, found)
    if watched is None:
        return None
    rooms: list[Size] = []
    for load, j in ((found.key, found.j), (found.value, found.weighted.regions[0].args[0])):
        axis = found.axis(load, j)
        if axis >= 0 and found.forms[load.operands[1 + axis]].is_just(j):
            rooms.append(_tensor(load.operands[0]).shape[axis])
    highs: list[Affine] = [AffineForm((), found.keys)] if found.count is None else []
    lows: list[Affine] = []
    guards: list[Value] = []
    guards_reach = guards_count = False
    if found.count is not None:
        waiting = [found.count]
        while waiting:
            value = waiting.pop()
            op = made.get(value)
            if op is not None and op.opcode == "max" and _is_zero(op.operands[1], made):
                waiting.append(op.operands[0])
            elif op is not None and op.opcode == "min":
                waiting += op.operands
            elif fits(found.forms[value]):
                highs.append(found.forms[value])
                guards_count = guards_count or by_row(found.forms[value])
            else:
                return None
    if found.reach is not None:
        highs.append(AffineForm(((row, ONE),), found.reach))
        guards_reach = True
    for condition in found.conditions:
        distance = gap(made[condition], found.forms) if condition in made else None
        step = distance.factor(found.j) if distance is not None else ZERO
        if distance is None or step not in (ONE, Size.of(-1)):
            guards.append(condition)
            continue
        rest = AffineForm(tuple((v, f) for v, f in distance.factors if v is not found.j), distance.constant)
        if not fits(rest):
            guards.append(condition)
            continue
        if by_row(rest):
            guards.append(condition)
        if step == ONE:
            lows.append(rest.times(Size.of(-1)))
        else:
            highs.append(rest.plus(AffineForm((), ONE)))
    return SplitForm(kernel, found, tuple(highs), tuple(lows), tuple(guards), guards_reach, guards_count, tuple(dict.fromkeys(rooms)), watched)


def _watched(kernel: Kernel, found: Attention) -> tuple[Op, ...] | None:
    """One load of each array whose index along j is checked; None where something else is."""
    loads: dict[Value, Op] = {}
    known = ((found.key, found.j), (found.value, found.weighted.regions[0].args[0]))
    axes = {load.operands[0]: found.axis(load, j) for load, j in known}
    for op in walk(kernel.body):
        if op.opcode == "within" or (watched_axes(op) and (op.opcode != "load" or axes.get(op.operands[0]) not in watched_axes(op))):
            return None
        if watched_axes(op) and len(watched_axes(op)) > 1:
            return None
    for load, _ in known:
        if watched_axes(load):
            loads[load.operands[0]] = load
    return tuple(loads.values())


def _is_zero(value: Value, made: dict[Value, Op]) -> bool:
    op = made.get(value)
    return op is not None and op.opcode == "const" and op.attrs["value"] == 0


# -- the two kernels --------------------------------------------------------------------------------------------------


class _Parts:
    """What is made of one kernel: `partials` are the maximum, the sum and the weighted sum of each part."""

    def __init__(self, form: SplitForm, splits: Size, step: int, number: int) -> None:
        self.form, self.found, self.kernel = form, form.found, form.kernel
        self.splits, self.step = splits, step
        found = self.found
        self.made = {result: op for op in walk(self.kernel.body) for result in op.results}
        self.row = found.indices[found.row]
        self.outer = [found.extents[p] for p in found.batch]
        lines = (*self.outer, found.extents[found.row], splits)
        shapes = (lines, lines, (*lines, found.column_extent))
        self.partials = [
            Value(tensor(f32, *shape, align=16), f"{self.kernel.name}.part{number + place}") for place, shape in enumerate(shapes)
        ]

    def value(self, b: Builder, value: Value, env: dict[Value, Value]) -> Value:
        """A value of the text, computed anew from what is bound."""
        if value in env:
            return env[value]
        op = self.made.get(value)
        if op is None:
            return value
        inside = {id(r) for region in op.regions for x in walk(region) for r in x.results}
        inside |= {id(a) for region in op.regions for x in walk(region) for r in x.regions for a in r.args}
        inside |= {id(a) for region in op.regions for a in region.args}
        for needed in (*op.operands, *(v for region in op.regions for x in walk(region) for v in x.operands if id(v) not in inside)):
            self.value(b, needed, env)
        clone_ops(b, [_unwatched(op)], env)
        return env[value]

    def _affine(self, b: Builder, form: Affine, env: dict[Value, Value]) -> Value:
        """A limit of j, for the row that makes it the largest."""
        total = b.index(form.constant)
        for value, factor in form.factors:
            if self.row in _made_of([value], self.made):
                positive = factor.constant is not None and factor.constant > 0
                last = b.index(self.found.extents[self.found.row] - 1) if positive else b.index(0)
                own = self.value(b, value, {**{v: k for v, k in env.items() if self.row not in _made_of([v], self.made)}, self.row: last})
            else:
                own = self.value(b, value, env)
            total = b.add(total, own if factor == ONE else b.mul(own, b.index(factor)))
        return total

    def _range(self, b: Builder, env: dict[Value, Value], inside: bool = True) -> tuple[Value, Value]:
        """The first key that counts for any row, and how many there are from it on. `inside`: not more than there are to read."""
        zero = b.index(0)
        low = zero
        for form in self.form.lows:
            # The smallest of all rows: the largest of what it is the negative of.
            least = b.sub(zero, self._affine(b, form.times(Size.of(-1)), env))
            low = b.op("max", low, least)
        high: Value | None = None
        rooms = [AffineForm[Value]((), size) for size in self.form.rooms] if inside else []
        for form in (*rooms, *self.form.highs):
            own = self._affine(b, form, env)
            high = own if high is None else b.op("min", high, own)
        assert high is not None
        return low, b.op("max", b.sub(high, low), zero)

    def _indices(self, indices: Sequence[Value]) -> dict[Value, Value]:
        positions = (*self.found.batch, self.found.row)
        return {self.found.indices[p]: v for p, v in zip(positions, indices, strict=True)}

    def check(self, flags: Value) -> Kernel:
        """The kernel that reads the last key and value there are by the text, with their indices checked."""
        found = self.found
        b = Builder(self.kernel.span)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            env = self._indices([*indices, inner.index(0)])
            low, length = self._range(inner, env, inside=False)
            last = inner.sub(inner.add(low, length), inner.index(1))
            env |= {found.j: last, found.weighted.regions[0].args[0]: last, found.column: inner.index(0), found.score.regions[0].args[0]: inner.index(0)}

            def some(at: Builder) -> list[Value]:
                total = at.const(0.0, f32)
                for load in self.form.watched:
                    for needed in load.operands:
                        self.value(at, needed, env)
                    with at.at(load.span):
                        (read,) = at.emit("load", [env.get(v, v) for v in load.operands], load.attrs)
                        total = at.add(total, at.cast(read, f32))
                return [total]

            (read,) = inner.if_(inner.op("gt", length, inner.index(0)), some, lambda at: [at.const(0.0, f32)])
            inner.multi("store", flags, *indices, read)
            return []

        with b.at(found.parallel.span):
            b.parallel([b.index(e) for e in self.outer], body, [found.indices[p].name for p in found.batch])
        return self._finished(f"{self.kernel.name}.last", b, flags)

    def first(self) -> Kernel:
        """The kernel of the parts."""
        found = self.found
        b = Builder(self.kernel.span)
        extents = [b.index(e) for e in (*self.outer, self.splits, found.extents[found.row])]
        names = [*(found.indices[p].name for p in found.batch), "part", self.row.name]
        with b.at(found.parallel.span):
            b.parallel(extents, self._part, names)
        return self._finished(f"{self.kernel.name}.parts", b, early=True)

    def _part(self, b: Builder, *indices: Value) -> list[Value]:
        found = self.found
        *batch, part, row = indices
        places = (*batch, row, part)
        env = self._indices([*batch, row])
        low, length = self._range(b, env)
        # Whole steps for each part, and as many for one as for another, but for one step.
        steps = b.op("floordiv", b.add(length, b.index(self.step - 1)), b.index(self.step))

        def begin(number: Value) -> Value:
            return b.mul(b.op("floordiv", b.mul(number, steps), b.index(self.splits)), b.index(self.step))

        skipped, until = begin(part), begin(b.add(part, b.index(1)))
        start = b.add(low, skipped)
        count = b.sub(b.op("min", until, length), skipped)

        def reduction(at: Builder, kind: str, finish: Finish) -> Value:
            def term(inner: Builder, k: Value) -> list[Value]:
                return [self._counted(inner, inner.add(start, k), row, dict(env), kind, finish)]

            with at.at(found.maximum.span):
                return at.reduce(kind, [count], term, ["j"])[0]

        most = reduction(b, "max", lambda inner, score, j, own: score)
        empty = b.op("eq", most, b.const(-math.inf, f32))
        shift = b.select(empty, b.const(0.0, f32), most)

        def weight(inner: Builder, score: Value) -> Value:
            return inner.op(found.exponential, inner.sub(score, shift))

        total = reduction(b, "add", lambda inner, score, j, own: weight(inner, score))
        b.multi("store", self.partials[0], *places, most)
        b.multi("store", self.partials[1], *places, total)

        def column(at: Builder, e: Value) -> list[Value]:
            def weighted(inner: Builder, score: Value, j: Value, own: dict[Value, Value]) -> Value:
                local = {**own, found.weighted.regions[0].args[0]: j, found.column: e}
                return inner.mul(weight(inner, score), inner.cast(self.value(inner, found.value.result, local), f32))

            at.multi("store", self.partials[2], *places, e, reduction(at, "add", weighted))
            return []

        b.for_(b.index(0), b.index(found.column_extent), b.index(1), [], column, name="e", independent=True)
        return []

    def _counted(self, b: Builder, j: Value, row: Value, env: dict[Value, Value], kind: str, finish: Finish) -> Value:
        """One term, where it counts; what a reduction ignores elsewhere."""
        found = self.found
        env[found.j] = j
        keep: list[Value] = []
        if self.form.guards_count:
            assert found.count is not None
            keep.append(b.op("lt", j, self.value(b, found.count, env)))
        if self.form.guards_reach:
            assert found.reach is not None
            keep.append(b.op("lt", j, b.add(row, b.index(found.reach))))
        if not found.strict:
            keep += [self.value(b, condition, env) for condition in self.form.guards]
            score = self.value(b, found.term, env)
            if keep:
                score = b.select(_all(b, keep), score, b.const(-math.inf, f32))
            return finish(b, score, j, env)

        def under(at: Builder, waiting: Sequence[Value], own: dict[Value, Value]) -> Value:
            """A condition may stand for loads of the next: one after the other."""
            if not waiting:
                return finish(at, self.value(at, found.term, own), j, own)
            condition = self.value(at, waiting[0], own)
            otherwise = at.const(-math.inf if kind == "max" else 0.0, f32)
            return at.if_(condition, lambda inner: [under(inner, waiting[1:], dict(own))], lambda inner: [otherwise])[0]

        if not keep:
            return under(b, self.form.guards, env)
        otherwise = b.const(-math.inf if kind == "max" else 0.0, f32)
        return b.if_(_all(b, keep), lambda inner: [under(inner, self.form.guards, dict(env))], lambda inner: [otherwise])[0]

    def second(self) -> Kernel:
        """The kernel that adds up the parts, and does what the text does with its sums."""
        found = self.found
        b = Builder(self.kernel.span)
        mapping: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op is not found.parallel], mapping)
        region = found.parallel.regions[0]

        # A single row is no loop: nothing is stored by its index.
        kept = [p for p in range(len(region.args)) if p != found.row or found.extents[p] != ONE]
        # The columns are results of their own, where nothing is stored beside them: what is the same for all of them is little.
        flat = found.loop is not None and not any(has_effects(op) for op in region.ops if op is not found.loop and op.opcode != "yield")

        def body(inner: Builder, *indices: Value) -> list[Value]:
            env = {**mapping, self.row: inner.index(0)} | dict(zip([region.args[p] for p in kept], indices, strict=False))
            if flat and found.loop is not None:
                env[found.column] = indices[-1]
                self._sums(inner, [op for op in region.ops if op is not found.loop], env)
                self._sums(inner, found.loop.regions[0].ops, env)
            else:
                self._sums(inner, region.ops, env)
            return []

        extents = [mapping.get(found.parallel.operands[p], found.parallel.operands[p]) for p in kept]
        names = [region.args[p].name for p in kept]
        if flat:
            extents, names = [*extents, b.index(found.column_extent)], [*names, found.column.name]
        with b.at(found.parallel.span):
            b.parallel(extents, body, names)
        return self._finished(self.kernel.name, b, early=True)

    def _sums(self, b: Builder, ops: Sequence[Op], env: dict[Value, Value]) -> None:
        found = self.found
        for op in ops:
            if op.opcode == "yield":
                continue
            if op is found.loop:
                bounds = [env[v] for v in op.operands]

                def inside(inner: Builder, index: Value, loop: Op = op) -> list[Value]:
                    self._sums(inner, loop.regions[0].ops, {**env, loop.regions[0].args[0]: index})
                    return []

                with b.at(op.span):
                    b.for_(bounds[0], bounds[1], bounds[2], [], inside, name=op.regions[0].args[0].name, independent=True)
            elif op is found.maximum:
                with b.at(op.span):
                    env[op.result] = self._over_parts(b, "max", lambda at, places: at.op("load", self.partials[0], *places), env)
            elif op in found.sums or op is found.weighted:
                with b.at(op.span):
                    env[op.result] = self._sum(b, op, env)
            else:
                clone_ops(b, [_unwatched(op)], env)

    def _over_parts(self, b: Builder, kind: str, term: PartTerm, env: dict[Value, Value]) -> Value:
        batch = [env[self.found.indices[p]] for p in self.found.batch]
        row = env[self.row]
        return b.reduce(kind, [b.index(self.splits)], lambda inner, s: [term(inner, [*batch, row, s])], ["s"])[0]

    def _sum(self, b: Builder, op: Op, env: dict[Value, Value]) -> Value:
        found = self.found
        most = env[found.maximum.result]
        shift = b.select(b.op("eq", most, b.const(-math.inf, f32)), b.const(0.0, f32), most)
        lines, extra = (self.partials[2], [env[found.column]]) if op is found.weighted else (self.partials[1], [])

        def term(inner: Builder, places: list[Value]) -> Value:
            shrink = inner.op(found.exponential, inner.sub(inner.op("load", self.partials[0], *places), shift))
            return inner.mul(inner.op("load", lines, *places, *extra), shrink)

        total = self._over_parts(b, "add", term, env)
        if not found.shifted:
            # A row of scores that are all -inf is exp(-inf - -inf), NaN, by the text.
            _, length = self._range(b, dict(env))
            lost = b.logical_and(b.op("eq", most, b.const(-math.inf, f32)), b.op("gt", length, b.index(0)))
            total = b.select(lost, b.const(math.nan, f32), total)
        for scale in found.scales if op is found.weighted else ():
            total = b.op("div" if scale.divides else "mul", total, self.value(b, scale.value, env))
        return total

    def _finished(self, name: str, b: Builder, *further: Value, early: bool = False) -> Kernel:
        attrs = MappingProxyType({**self.kernel.attrs, "early": True}) if early else self.kernel.attrs
        whole = eliminate_dead(Kernel(name, Stage.LOOP, (), Block((), tuple(b.ops)), facts=self.kernel.facts, attrs=attrs, span=self.kernel.span))
        used = {v for op in walk(whole.body) for v in op.operands}
        return replace(whole, params=tuple(p for p in (*self.kernel.params, *self.partials, *further) if p in used))


def _unwatched(op: Op) -> Op:
    """The op without checks of indices: those of the parts are inside."""
    attrs = {name: value for name, value in op.attrs.items() if name != "watch"}
    regions = tuple(Block(region.args, tuple(map(_unwatched, region.ops))) for region in op.regions)
    return replace(op, attrs=MappingProxyType(attrs), regions=regions)


def _all(b: Builder, conditions: Sequence[Value]) -> Value:
    total = conditions[0]
    for condition in conditions[1:]:
        total = b.logical_and(total, condition)
    return total


Finish = Callable[[Builder, Value, Value, dict[Value, Value]], Value]
PartTerm = Callable[[Builder, list[Value]], Value]
