"""Attention that no kernel of its own computes becomes three kernels: scores, weights, weighted values. `Program -> Program`.

In: a program, the target and the sizes of the call. Out: the same, where attention (`analysis/attention.py`) is three calls. Its text computes a
score anew for the maximum, for the sums, and for each column of the values. Here scores and weights lie in scratch arrays:

    parallel (h, i) { m = max_j f(q . k); l = sum_j exp(f - m); for e { o = sum_j exp(f - m) * v; out = o / l } }
    -> parallel (h, i, j) { scores = q . k }
       parallel (h, i) { m = max_j f(scores); l = sum_j …; store m, l; for j { weights = exp(f(scores) - m) } }
       parallel (h, i, e) { out = (sum_j weights * v) / l }

The first and the last are products, and are multiplied in tiles where the target has them. What the text stores for each row is stored by the second.
Keys that a limit or a condition leaves out have a weight of 0. Attention stays one kernel where rows end at a number in memory (`split_attention` cuts those), where an
operand may be read only under the text's condition, and where the scratch arrays would be larger than a portable GPU promises to bind.

On GPUs without asynchronous copies that is all attention; on others, what matrix attention does not take: rows of more than 256 terms or columns, and rows
that do not lie at whole 16 bytes. On Hopper also wide rows of f32, whose products are those of terms (`terms/split_terms.py`): the second kernel writes weights as terms. Where rows end
early, a `select` in the first and a guard in the last say so, and tiles skip what is empty: scores that nothing reads need not be stored (`partial`), and weights are
zero where the guard does not hold (`zeros`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.dtypes import DType, f32
from tilewright.base.sizes import ONE, ZERO, Size, ceildiv, floordiv, maximum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray, ProgramCheck
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.choose.attention import attention_schedules
from tilewright.passes.choose.cpu.attention import has_few_rows
from tilewright.passes.program.widen_operands import operand_dtype
from tilewright.passes.terms.split_terms import BLOCK
from tilewright.passes.triangles.square_results import reaches

MOST_BYTES = 128 << 20
"""Of one scratch array: what every WebGPU device binds."""
VECTOR = 8
"""Elements of 16 bytes, where these have two."""
MOST_STREAMED = 16 << 30
"""The same of GPUs with asynchronous copies."""
WIDE = 128
"""Terms of a score, or columns, of f32 up to which one kernel computes attention as fast as three do."""
MOST_APART = 2 << 30
"""Bytes of scores for which memory is taken where one kernel would need none."""
_WAVES = ("mfma", "wmma3", "wmma4", "cp.async")
"""Matrix instructions that take weights in the dtype of the values."""


def stage_attention(program: Program, target: Target | None, sizes: Mapping[str, int]) -> Program:
    """The program with attention in three calls, where the target has no lowering of it as one."""
    if target is None or not target.simt:
        return program
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    for call in program.calls:
        staged = None if call.loops else _staged(call.kernel, target, sizes, program.checks, len(scratch))
        if staged is None:
            calls.append(call)
            continue
        scratch += [ProgramArray(str(p.name), _tensor_of(p), "scratch") for p in staged.arrays]
        names = dict(zip(call.kernel.params, call.args, strict=True)) | {p: str(p.name) for p in staged.arrays}
        for kernel in (staged.scores(), staged.weights(), staged.weighted()):
            calls.append(KernelCall(kernel, tuple(names[p] for p in kernel.params)))
    return replace(program, calls=tuple(calls), scratch=tuple(scratch))


def _staged(kernel: Kernel, target: Target, sizes: Mapping[str, int], checks: Sequence[ProgramCheck], number: int) -> _StagedKernels | None:
    if is_watched(kernel) or not any(op.opcode in ("exp", "exp2") for op in walk(kernel.body)):
        return None
    found = find_attention(kernel)
    if found is None or found.count is not None or not found.sums:
        return None
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    if any(op.opcode == "load" and op.operands[0] in written for op in walk(kernel.body)):
        return None
    streams = target.has("bf16", "cp.async")
    if streams and (None in (found.depth.constant, found.column_extent.constant) or has_few_rows(found, sizes)):
        return None
    keys = _keys(found)
    if streams and attention_schedules(kernel, target, sizes) and not _gains_apart(kernel, found, keys, target, sizes):
        return None
    if any(_score_in(op) is None for op in (found.maximum, *found.sums)) or not (_is_unguarded(found) or _all_inside(found, keys, checks)):
        return None
    shape = (*(found.extents[p] for p in found.batch), found.extents[found.row], keys)
    if product(shape).names <= sizes.keys() and product(shape).evaluate(sizes) * f32.itemsize > (MOST_STREAMED if streams else MOST_BYTES):
        return None
    own = dtype_of(found.value.result.type)
    in_terms = streams and operand_dtype(found) is f32 and "wgmma" in target.features
    rounded = own if own.itemsize == 2 and own.is_float and any(map(target.has, _WAVES)) else f32
    return _StagedKernels(kernel, replace(found, keys=keys), rounded, number, streams, in_terms)


def _gains_apart(kernel: Kernel, found: Attention, keys: Size, target: Target, sizes: Mapping[str, int]) -> bool:
    """Whether attention that one kernel could compute is faster as three. Of wide rows of f32 in parts a block has room for few keys, and its warps read them from
    shared memory more often than they multiply them; products of terms by warp groups are some times as fast."""
    depth, width = found.depth.constant, found.column_extent.constant
    assert depth is not None and width is not None
    if "wgmma" not in target.features or operand_dtype(found) is not f32 or kernel.attrs.get("precision") is not None or max(depth, width) <= WIDE:
        return False
    scores = product((*(found.extents[p] for p in found.batch), found.extents[found.row], keys)) * f32.itemsize
    return scores.names <= sizes.keys() and scores.evaluate(sizes) <= MOST_APART


def _tensor_of(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


def _score_in(reduction: Op) -> Op | None:
    """The one inner product in a reduction over the keys."""
    inner = [op for op in walk(reduction.regions[0]) if op.opcode == "reduce"]
    return inner[0] if len(inner) == 1 else None


def _keys(found: Attention) -> Size:
    """How many keys any row may read: where rows end by their number, as many as the last one has."""
    form = found.forms[found.maximum.operands[0]]
    if found.reach is None or not form.factors:
        return found.keys
    last = floordiv(found.extents[found.row] - 1, found.grain) * found.grain if found.grain > 1 else found.extents[found.row] - 1
    keys = last + found.reach
    return keys if found.grain == 1 and found.reach.constant is not None and found.reach.constant >= 1 else maximum(ZERO, keys)


def _is_unguarded(found: Attention) -> bool:
    """Whether the text reads all keys and values for some row."""
    extent, row = found.maximum.operands[0], found.indices[found.row]
    made = found.made.get(extent)
    if made is not None and made.opcode == "max" and found.forms[made.operands[1]].constant == ZERO:
        extent = made.operands[0]
    form = found.forms[extent]
    simple = not form.factors or (form.values == (row,) and form.factor(row) == ONE)
    return simple and not any(op.opcode == "if" for op in walk(found.maximum.regions[0]))


def _all_inside(found: Attention, keys: Size, checks: Sequence[ProgramCheck]) -> bool:
    """Whether keys and values are there for all terms of all rows, whatever the text leaves out."""
    extents = dict(zip(found.indices, found.extents, strict=True)) | {found.column: found.column_extent}
    extents |= {found.j: keys, found.weighted.regions[0].args[0]: keys, found.score.regions[0].args[0]: found.depth}
    for operand in (found.query, found.key, found.value):
        for load in found.loads(operand):
            memory = _tensor_of(load.operands[0])
            for index, size in zip(load.operands[1 : 1 + memory.rank], memory.shape, strict=True):
                form = found.forms[index]
                if form.factors and not any(form.is_just(v) and v in extents and reaches(size, extents[v], checks) for v in form.values):
                    return False
    return True


class _StagedKernels:
    """The three kernels of one. `arrays` are what passes between them: scores, weights, the maximum and the sums of each row."""

    def __init__(self, kernel: Kernel, found: Attention, rounded: DType, number: int, whole: bool, in_terms: bool) -> None:
        self.kernel, self.found = kernel, found
        self.in_terms = in_terms
        """Products are those of terms of bf16, perhaps: weights may be written so, and tiles skip what rows do not see."""
        self.reach = found.reach if in_terms and found.forms[found.maximum.operands[0]].factors else None
        """How many keys rows have beyond their number at most, where products skip the others."""
        self.whole = whole
        """Rows are whole vectors, read once for all that is made of them."""
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.outer = [found.extents[p] for p in found.batch]
        rows = (*self.outer, found.extents[found.row])
        lines = [Value(tensor(f32, *rows, align=16), f"{kernel.name}.row{number + 2 + place}") for place in range(1 + len(found.sums))]
        self.width = self._width()
        """Elements from row to row of scores and weights. Beyond the last key weights are 0."""
        self.score_memory = Value(tensor(f32, *rows, self.width, align=16), f"{kernel.name}.scores{number}")
        self.weight_memory = Value(tensor(rounded, *rows, self.width, align=16), f"{kernel.name}.weights{number + 1}")
        self.lines: dict[Value, Value] = dict(zip((op.result for op in (found.maximum, *found.sums)), lines, strict=True))
        used = self._used_last()
        self.lines = {result: memory for result, memory in self.lines.items() if result in used}
        self.arrays = [self.score_memory, self.weight_memory, *self.lines.values()]

    def _width(self) -> Size:
        """The number of keys, in whole vectors where only scores are read for a key: what else the text reads ends with them."""
        keys, (j,) = self.found.keys, self.found.sums[0].regions[0].args
        score = _score_in(self.found.sums[0])
        assert score is not None
        own = {id(op) for op in walk(score.regions[0])}
        others = [op for op in walk(self.found.sums[0].regions[0]) if op.opcode == "load" and id(op) not in own]
        vector = BLOCK if self.in_terms else VECTOR
        if not self.whole or keys.divisible_by(vector, self.kernel.facts) or any(j in self.found.forms[v].values for op in others for v in op.operands[1:]):
            return keys
        return ceildiv(keys, Size.of(vector)) * vector

    def _used_last(self) -> set[Value]:
        """Of the maximum and the sums, those that the last kernel needs."""
        found = self.found
        roots = [v for op in self._last_stores() for inner in (op, *(x for r in op.regions for x in walk(r))) for v in inner.operands]
        waiting, seen = [*roots, *(s.value for s in found.scales)], set[Value]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            op = self.made.get(value)
            if op is None or value in self.lines or op is found.weighted:
                continue
            waiting += [*op.operands, *(v for region in op.regions for x in walk(region) for v in x.operands)]
        return seen

    def _last_stores(self) -> list[Op]:
        """What the last kernel stores: what stands in the loop over columns, or all where columns are results of their own."""
        found = self.found
        block = found.parallel.regions[0] if found.loop is None else found.loop.regions[0]
        return [op for op in block.ops if has_effects(op) and op.opcode != "yield"]

    # -- values of the text ---------------------------------------------------------------------------------------------

    def _value(self, b: Builder, value: Value, env: dict[Value, Value]) -> Value:
        """A value of the text, computed anew from what is bound."""
        if value in env:
            return env[value]
        op = self.made.get(value)
        if op is None:
            return value
        self._clone(b, op, env)
        return env[value]

    def _clone(self, b: Builder, op: Op, env: dict[Value, Value]) -> None:
        """An op with all that it needs, scores read from memory."""
        inside = [x for region in op.regions for x in walk(region)]
        own = {r for x in inside for r in x.results} | {a for x in inside for r in x.regions for a in r.args} | {a for r in op.regions for a in r.args}
        for needed in (*op.operands, *(v for x in inside for v in x.operands)):
            if needed not in own:
                self._value(b, needed, env)
        clone_ops(b, [op], env)

    def _from_memory(self, reduction: Op) -> Op:
        """A reduction over the keys with scores read from memory."""
        score, (j,) = _score_in(reduction), reduction.regions[0].args
        place = [self.found.indices[p] for p in (*self.found.batch, self.found.row)]

        def changed(op: Op) -> Op:
            if op is score:
                return Op("load", (self.score_memory, *place, j), op.results, span=op.span)
            return replace(op, regions=tuple(Block(r.args, tuple(map(changed, r.ops))) for r in op.regions)) if op.regions else op

        return changed(reduction)

    def _over_rows(self, reduction: Op, width: Value) -> Op:
        """A reduction over whole rows of memory, in which terms beyond its end count as nothing: so a row is read once for all reductions and the weights."""
        extent, region = reduction.operands[0], reduction.regions[0]
        form = self.found.forms[extent]
        nothing = {"max": -math.inf, "add": 0.0}.get(str(reduction.attrs.get("kind")))
        if not self.whole or nothing is None or len(region.yields) != 1 or (not form.factors and form.constant == self.width):
            return reduction
        b = Builder(reduction.span)
        term = region.yields[0]
        counted = b.select(b.op("lt", region.args[0], extent), term, b.const(nothing, dtype_of(term.type)))
        ops = (*region.ops[:-1], *b.ops, replace(region.ops[-1], operands=(counted,)))
        return replace(reduction, operands=(width,), regions=(Block(region.args, ops),))

    # -- the kernels ----------------------------------------------------------------------------------------------------

    def scores(self) -> Kernel:
        found = self.found
        b = Builder(self.kernel.span)
        names = [*(found.indices[p].name for p in found.batch), found.indices[found.row].name, "j"]

        def body(inner: Builder, *indices: Value) -> list[Value]:
            *batch, row, j = indices
            env = {**self._rows(batch, row), found.j: j}
            score = self._value(inner, found.score.result, env)
            if self.reach is not None:
                score = inner.select(self._is_seen(inner, row, j), score, inner.const(0.0, f32))
            inner.multi("store", self.score_memory, *indices, score)
            return []

        with b.at(found.maximum.span):
            b.parallel([b.index(e) for e in (*self.outer, found.extents[found.row], found.keys)], body, names)
        first = self._finished(f"{self.kernel.name}.scores", b)
        return first if self.reach is None else replace(first, attrs=MappingProxyType({**first.attrs, "partial": True}))

    def weights(self) -> Kernel:
        found = self.found
        b = Builder(self.kernel.span)
        names = [*(found.indices[p].name for p in found.batch), found.indices[found.row].name]

        def body(inner: Builder, *indices: Value) -> list[Value]:
            *batch, row = indices
            env = self._rows(batch, row)
            for op in (found.maximum, *found.sums):
                self._clone(inner, self._over_rows(self._from_memory(op), inner.index(self.width)), env)
                if op.result in self.lines:
                    inner.multi("store", self.lines[op.result], *indices, env[op.result])
            if found.loop is not None:
                for op in found.parallel.regions[0].ops:
                    if has_effects(op) and op is not found.loop and op.opcode != "yield":
                        self._clone(inner, op, env)
            inner.for_(inner.index(0), inner.index(self.width), inner.index(1), [], lambda at, j: self._weight(at, indices, j, env), name="j", independent=True)
            return []

        with b.at(found.sums[0].span):
            b.parallel([b.index(e) for e in (*self.outer, found.extents[found.row])], body, names)
        return self._finished(f"{self.kernel.name}.weights", b)

    def _weight(self, b: Builder, indices: Sequence[Value], j: Value, env: Mapping[Value, Value]) -> list[Value]:
        """The term of the sum of exponentials, 0 beyond where it ends."""
        found, total = self.found, self.found.sums[0]
        region = self._from_memory(total).regions[0]
        own = {**env, region.args[0]: j}
        for op in region.ops:
            if op.opcode == "yield":
                break
            self._clone(b, op, own)
        weight = own.get(region.yields[0], region.yields[0])
        extent = found.forms[total.operands[0]]
        if extent.factors or extent.constant != self.width:
            weight = b.select(b.op("lt", j, self._value(b, total.operands[0], own)), weight, b.const(0.0, f32))
        b.multi("store", self.weight_memory, *indices, j, b.cast(weight, _tensor_of(self.weight_memory).dtype))
        return []

    def weighted(self) -> Kernel:
        found = self.found
        b = Builder(self.kernel.span)
        column = [] if found.loop is None else [found.column_extent]
        positions = range(len(found.indices))
        names = [*(found.indices[p].name for p in positions), *([found.column.name] if column else [])]

        def body(inner: Builder, *indices: Value) -> list[Value]:
            env = dict(zip((*found.indices, found.column) if column else found.indices, indices, strict=True))
            place = [env[found.indices[p]] for p in (*found.batch, found.row)]

            def term(at: Builder, j: Value) -> list[Value]:
                own = {**env, found.weighted.regions[0].args[0]: j}
                weight = at.cast(at.op("load", self.weight_memory, *place, j), f32)
                return [at.mul(weight, at.cast(self._value(at, found.value.result, own), f32))]

            def seen(at: Builder, j: Value) -> Sequence[Value]:
                return at.if_(self._is_seen(at, place[-1], j), lambda deep: term(deep, j), lambda deep: [deep.const(0.0, f32)])

            for result, memory in self.lines.items():
                env[result] = inner.op("load", memory, *place)
            with inner.at(found.weighted.span):
                total = inner.reduce("add", [inner.index(found.keys)], term if self.reach is None else seen, ["j"])[0]
            for scale in found.scales:
                total = inner.op("div" if scale.divides else "mul", total, self._value(inner, scale.value, env))
            env[found.weighted.result] = total
            for op in self._last_stores():
                self._clone(inner, op, env)
            return []

        with b.at(found.parallel.span):
            b.parallel([b.index(e) for e in (*(found.extents[p] for p in positions), *column)], body, names)
        last = self._finished(self.kernel.name, b)
        attrs: dict[str, Attr] = {**last.attrs, **({"zeros": True} if self.reach is not None else {}), **({"terms_of": self.weight_memory.name} if self.in_terms else {})}
        return replace(last, attrs=MappingProxyType(attrs))

    def _is_seen(self, b: Builder, row: Value, j: Value) -> Value:
        """Whether a row may read a key."""
        assert self.reach is not None
        return b.op("lt", j, b.add(row, b.index(self.reach)))

    def _rows(self, batch: Sequence[Value], row: Value) -> dict[Value, Value]:
        found = self.found
        return {found.indices[p]: v for p, v in zip((*found.batch, found.row), (*batch, row), strict=True)}

    def _finished(self, name: str, b: Builder) -> Kernel:
        whole = Kernel(name, Stage.LOOP, (), Block((), tuple(b.ops)), facts=self.kernel.facts, attrs=self.kernel.attrs, span=self.kernel.span)
        whole = eliminate_dead(whole)
        used = {v for op in walk(whole.body) for v in op.operands}
        return replace(whole, params=tuple(p for p in (*self.kernel.params, *self.arrays) if p in used))

