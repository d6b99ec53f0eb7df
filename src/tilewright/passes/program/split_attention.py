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

Where no matrix unit takes the operands (f32 on a GPU), scores, the sums of parts and the weighted sums of parts are kernels of their own, in plain loops.

Query heads that share keys and values (`k[j, h // 4, d]`) become rows of one tile first (`group_heads`): the keys are read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Affine
from tilewright.base.affine import AffineForm
from tilewright.base.dtypes import f32
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE, Size, ceildiv, floordiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import tensor
from tilewright.passes.common.split_form import SplitForm, find_split, made_of, tensor_of
from tilewright.passes.schedules.attention import CpuAttention, MmaAttention
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.plans import Plan, Plans

SHORTEST = 256
"""Keys of a part, at least, on a CPU."""
SUM_COLUMNS, SUM_VECTOR = 32, 4
"""Columns that a block of a GPU adds up, and those of one thread."""
SUM_LANES = 2
"""Threads beside each other, at least: their columns are whole sectors of memory."""
SUM_ROWS = 32
"""Parts that a block reads side by side."""
SUM_FEW = 8
"""Parts below which there are many rows: blocks then have four times as many columns."""
LOOP_STEP = 64
"""Keys that parts of plain loops are made of."""


def split_attention(program: Program, plans: Plans, target: Target, hints: Mapping[str, int]) -> tuple[Program, Plans]:
    """The program with attention of few queries cut, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        if schedule is None and target.simt and not call.varies and (form := _loops_form(call.kernel, hints)) is not None:
            parts = _Parts(form, _loop_splits(form, target, hints), LOOP_STEP, len(scratch), target.simt)
            scores = Value(tensor(f32, *parts.outer, form.found.keys, form.found.extents[form.found.row], align=16), f"{call.kernel.name}.scores{len(scratch)}")
            arrays = [*parts.partials, scores]
            scratch += [ProgramArray(p.name, tensor_of(p), "scratch") for p in arrays]
            names = dict(zip(call.kernel.params, call.args, strict=True)) | {p: p.name for p in arrays}
            for kernel in (parts.scores(scores), parts.sums(scores), parts.weighted(scores), parts.second()):
                calls.append(KernelCall(kernel, tuple(names[p] for p in kernel.params), call.loops))
                schedules.append(None)
            continue
        if not isinstance(schedule, MmaAttention | CpuAttention) or not schedule.splits:
            calls.append(call)
            schedules.append(schedule)
            continue
        form = find_split(call.kernel)
        if form is None:
            raise CompilerBug.at("TW040", f"{call.kernel.name} is no attention that can be cut", call.kernel.span)
        parts = _Parts(form, _splits(form, schedule), schedule.n, len(scratch), target.simt)
        scratch += [ProgramArray(p.name, tensor_of(p), "scratch") for p in parts.partials]
        names = dict(zip(call.kernel.params, call.args, strict=True)) | {p: p.name for p in parts.partials}
        if form.watched:
            flags = Value(tensor(f32, *parts.outer, align=16), f"{call.kernel.name}.part{len(scratch)}")
            scratch.append(ProgramArray(flags.name, tensor_of(flags), "scratch"))
            names[flags] = flags.name
            kernel = parts.check(flags)
            calls.append(KernelCall(kernel, tuple(names[p] for p in kernel.params), call.loops))
            schedules.append(None)
        for kernel, own in ((parts.first(), replace(schedule, splits=0)), (parts.second(), parts.sum_schedule(target, hints))):
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


def _loops_form(kernel: Kernel, hints: Mapping[str, int]) -> SplitForm | None:
    """Attention that no matrix unit computes, with a length in memory: scores, and what is made of them, are kernels of their own."""
    if is_watched(kernel) or sum(1 for op in walk(kernel.body) if op.opcode in ("exp", "exp2")) == 0:
        return None
    form = find_split(kernel)
    return form if form is not None and form.found.count is not None else None


def _loop_splits(form: SplitForm, target: Target, hints: Mapping[str, int]) -> Size:
    def number(size: Size) -> int:
        return size.evaluate(hints) if size.names <= hints.keys() else 1 << 12

    found = form.found
    others = number(product([*(found.extents[p] for p in found.batch), found.extents[found.row]]))
    return Size.of(max(1, min(4 * target.multiprocessors // max(1, others), number(found.keys) // LOOP_STEP)))


class _Parts:
    """What is made of one kernel: `partials` are the maximum, the sum and the weighted sum of each part."""

    def __init__(self, form: SplitForm, splits: Size, step: int, number: int, simt: bool) -> None:
        self.simt = simt
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
            if self.row in made_of([value], self.made):
                positive = factor.constant is not None and factor.constant > 0
                last = b.index(self.found.extents[self.found.row] - 1) if positive else b.index(0)
                own = self.value(b, value, {**{v: k for v, k in env.items() if self.row not in made_of([v], self.made)}, self.row: last})
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

    def _share(self, b: Builder, part: Value, low: Value, length: Value) -> tuple[Value, Value]:
        """The first key of a part, and how many it has: whole steps, and as many for one part as for another, but for one step."""
        steps = b.op("floordiv", b.add(length, b.index(self.step - 1)), b.index(self.step))

        def begin(number: Value) -> Value:
            return b.mul(b.op("floordiv", b.mul(number, steps), b.index(self.splits)), b.index(self.step))

        skipped, until = begin(part), begin(b.add(part, b.index(1)))
        return b.add(low, skipped), b.sub(b.op("min", until, length), skipped)

    def _part(self, b: Builder, *indices: Value) -> list[Value]:
        found = self.found
        *batch, part, row = indices
        places = (*batch, row, part)
        env = self._indices([*batch, row])
        low, length = self._range(b, env)
        start, count = self._share(b, part, low, length)

        def reduction(at: Builder, kind: str, finish: Finish) -> Value:
            def term(inner: Builder, k: Value) -> list[Value]:
                return [self._counted(inner, inner.add(start, k), row, dict(env), kind, finish)]

            with at.at(found.maximum.span):
                return at.reduce(kind, [count], term, ["j"])[0]

        most = reduction(b, "max", lambda inner, score, j, own: score)
        shift = self._shift(b, most)

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

    # -- in plain loops -----------------------------------------------------------------------------------------------

    def scores(self, memory: Value) -> Kernel:
        """The kernel of the scores, -inf where there are none."""
        found = self.found
        b = Builder(self.kernel.span)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            *batch, j, row = indices
            env = self._indices([*batch, row])
            low, length = self._range(inner, env)
            inside = inner.logical_and(inner.op("ge", j, low), inner.op("lt", j, inner.add(low, length)))

            def some(at: Builder) -> list[Value]:
                return [self._counted(at, j, row, dict(env), "max", lambda deep, score, place, own: score)]

            (score,) = inner.if_(inside, some, lambda at: [at.const(-math.inf, f32)])
            inner.multi("store", memory, *batch, j, row, score)
            return []

        with b.at(found.maximum.span):
            extents = [b.index(e) for e in (*self.outer, found.keys, found.extents[found.row])]
            b.parallel(extents, body, [*(found.indices[p].name for p in found.batch), "j", self.row.name])
        return self._finished(f"{self.kernel.name}.scores", b, memory)

    def sums(self, memory: Value) -> Kernel:
        """The kernel of the maximum and the sum of each part, from the scores."""
        found = self.found
        b = Builder(self.kernel.span)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            *batch, row, part = indices
            start, chunk = self._stretch(inner, part)

            def score(at: Builder, k: Value) -> Value:
                j = at.add(start, k)
                there = at.op("lt", j, at.index(found.keys))
                return at.if_(there, lambda deep: [deep.op("load", memory, *batch, j, row)], lambda deep: [deep.const(-math.inf, f32)])[0]

            most = inner.reduce("max", [chunk], lambda at, k: [score(at, k)], ["j"])[0]
            shift = self._shift(inner, most)
            total = inner.reduce("add", [chunk], lambda at, k: [at.op(found.exponential, at.sub(score(at, k), shift))], ["j"])[0]
            inner.multi("store", self.partials[0], *indices, most)
            inner.multi("store", self.partials[1], *indices, total)
            return []

        with b.at(found.maximum.span):
            self._over_rows(b, body)
        return self._finished(f"{self.kernel.name}.sums", b, memory)

    def weighted(self, memory: Value) -> Kernel:
        """The kernel of the weighted sums of each part."""
        found = self.found
        b = Builder(self.kernel.span)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            *batch, row, part, e = indices
            env = self._indices([*batch, row])
            low, length = self._range(inner, env)
            start, chunk = self._stretch(inner, part)
            end = inner.add(low, length)
            shift = self._shift(inner, inner.op("load", self.partials[0], *batch, row, part))

            def term(at: Builder, k: Value) -> list[Value]:
                j = at.add(start, k)
                inside = at.logical_and(at.op("ge", j, low), at.op("lt", j, end))

                def some(deep: Builder) -> list[Value]:
                    score = deep.op("load", memory, *batch, j, row)
                    local = {**env, found.weighted.regions[0].args[0]: j, found.column: e}
                    value = deep.cast(self.value(deep, found.value.result, local), f32)
                    product = deep.mul(deep.op(found.exponential, deep.sub(score, shift)), value)
                    return [deep.select(deep.op("eq", score, deep.const(-math.inf, f32)), deep.const(0.0, f32), product)]

                return list(at.if_(inside, some, lambda deep: [deep.const(0.0, f32)]))

            inner.multi("store", self.partials[2], *indices, inner.reduce("add", [chunk], term, ["j"])[0])
            return []

        with b.at(found.weighted.span):
            self._over_rows(b, body, found.column_extent)
        return self._finished(f"{self.kernel.name}.weighted", b, memory)

    def _stretch(self, b: Builder, part: Value) -> tuple[Value, Value]:
        """The first key of a part and its keys, by the room there is: lengths that are known have better schedules."""
        chunk = ceildiv(ceildiv(self.found.keys, self.splits), Size.of(self.step)) * self.step
        return b.mul(part, b.index(chunk)), b.index(chunk)

    def _over_rows(self, b: Builder, body: Callable[..., list[Value]], *more: Size) -> None:
        extents = (*self.outer, self.found.extents[self.found.row], self.splits, *more)
        names = [*(self.found.indices[p].name for p in self.found.batch), self.row.name, "part", "e"]
        b.parallel([b.index(e) for e in extents], body, names[: len(extents)])

    def _shift(self, b: Builder, most: Value) -> Value:
        """What is subtracted in exponents: the maximum, or 0 where there is none."""
        return b.select(b.op("eq", most, b.const(-math.inf, f32)), b.const(0.0, f32), most)

    # -- the sum of the parts -----------------------------------------------------------------------------------------

    def second(self) -> Kernel:
        """The kernel that adds up the parts, and does what the text does with its sums."""
        found = self.found
        b = Builder(self.kernel.span)
        mapping: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op is not found.parallel], mapping)
        region = found.parallel.regions[0]

        kept, flat = self._kept, self._flat

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
        return self._finished(self.kernel.name, b, early=True, sums_parts=True)

    def sum_schedule(self, target: Target, hints: Mapping[str, int]) -> Plan:
        """How a GPU adds up the parts: a block has a few columns of a row, with lanes and warps down the parts, all of which are on their way at once. The fewer rows there are, the fewer columns it has:
        warps that meet take longer than what they read. None where any schedule will do."""
        splits, columns = self.splits.constant, self.found.column_extent.constant
        if not target.simt or not self._flat or splits is None or splits < 2 or columns is None or columns % SUM_VECTOR:
            return None
        step = 1 << splits.bit_length()  # more than there are: a step that is not full has no loop around it
        rows = min(step, SUM_ROWS if step <= 2 * SUM_ROWS else 2 * SUM_ROWS)
        lanes = (4 if splits < SUM_FEW and columns >= 4 * SUM_COLUMNS else 1) * SUM_COLUMNS // SUM_VECTOR
        count = product(tuple(self.found.extents[p] for p in self._kept))
        blocks = count.evaluate(hints) * -(-columns // (lanes * SUM_VECTOR)) if count.names <= hints.keys() else target.multiprocessors
        while lanes > SUM_LANES and 2 * blocks <= target.multiprocessors:
            lanes, blocks = lanes // 2, 2 * blocks
        rows = max(1, min(rows, target.max_threads // lanes), target.warp_size // lanes)
        rank = len(self._kept) + 1
        return Schedule((*(1,) * (rank - 1), lanes * SUM_VECTOR), max(step, rows), SUM_VECTOR, vector_index=rank - 1, threads=lanes * rows)

    @property
    def _kept(self) -> list[int]:
        """The parallel indices of the sums: a single row is no loop, since nothing is stored by its index."""
        found = self.found
        return [p for p in range(len(found.parallel.regions[0].args)) if p != found.row or found.extents[p] != ONE]

    @property
    def _flat(self) -> bool:
        """Whether the columns are results of their own: threads are many, nothing is stored beside them, and what is the same for all of them is little."""
        found = self.found
        return self.simt and found.loop is not None and not any(has_effects(op) for op in found.parallel.regions[0].ops if op is not found.loop and op.opcode != "yield")

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
        shift = self._shift(b, most)
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

    def _finished(self, name: str, b: Builder, *further: Value, **marks: bool) -> Kernel:
        attrs = MappingProxyType({**self.kernel.attrs, **marks})
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
