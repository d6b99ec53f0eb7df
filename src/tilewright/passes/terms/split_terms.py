"""Factors of f32 become three terms of bf16 each, written to scratch before the product. `Program -> Program`.

In: a program and the schedules of its contractions. Where one says `bf16_terms=6`, each factor, whatever it is computed from, is first written to scratch: an f32
is the sum of three bf16, which it is exactly, and a product is six products of these. What the six leave out is below 2^-24 of the product. The product is one of
bf16 with a sum six times as long, one stretch of which is that of one pair of terms, by the copy engine and warp-group instructions at full speed, wherever the
elements lie. Out: the program with a kernel more for each factor.

    parallel m, n { acc = reduce k { yield x[i, k] * w[k, j] }; … }
    -> parallel m, kk { x0, x1, x2 = terms(kk < k ? x[i, kk] : 0); store x.terms[i, 0, kk] = x0; store x.terms[i, 1, kk] = x1; … }
       parallel kk, n { w0, w1, w2 = terms(…); store w.terms[0, kk, j] = w0; store w.terms[1, kk, j] = w1; … }
       parallel m, n { acc = reduce pair in 0..6, kk { yield f32(x.terms[i, first(pair), kk]) * f32(w.terms[second(pair), kk, j]) }; … }

Where the sum is cut in parts (`split_k`), the scratch has the terms of one factor beside those that they are multiplied by, and the sum has one index, 0..6*kk.
A factor that the kernel's `terms_of` names is an array whose maker writes its terms in its place, and there is no kernel more for it.
Guards that end the sum (`windows/sum_ranges.py`) stay around the product, so that tiles skip what they leave empty; terms are zero there.

Small products come first: matrix units drop bits of large sums when they add. All terms of a number have its sign, and none is zero but those of zero, so that an
infinity gives what it gives in f32 (`common/tf32.py`): a number that leaves no rest leaves 2^-64 of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.contraction import Contraction, Factor, find_contraction
from tilewright.base.dtypes import bf16, f32, u32
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.common.rebuild_nest import Copies, copy_nest, copy_outside, finished
from tilewright.passes.program.repack import Packing
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.windows.sum_ranges import sum_bounds

PAIRS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
"""The terms of both factors that are multiplied, in order."""
TERMS = 3
BLOCK = 64
"""Elements of bf16 in a line of the cache, which copies bring whole."""
UPPER = 0xFFFF0000
"""The bits of an f32 that bf16 has."""
REST, LAST_REST = 2.0**-64, 2.0**-40
"""What a number that is a bf16 leaves of itself, and what a rest that is one leaves: far below what sums keep of a product."""


def split_terms(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with kernels that write terms, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, plan in zip(program.calls, plans, strict=True):
        if isinstance(plan, Wgmma) and plan.bf16_terms:
            form = terms_form(call.kernel, len(scratch), plan.split_k == 1)
            assert form is not None
            plan = replace(plan, inner=form.inner)
            names = dict(zip(call.kernel.params, call.args, strict=True)) | {memory: memory.name for memory, _ in form.scratch}
            by_name = {p.name: name for p, name in names.items()}
            for (memory, kernel), source in zip(form.scratch, form.sources, strict=True):
                assert isinstance(memory.type, Tensor)
                scratch.append(ProgramArray(memory.name, memory.type, "scratch"))
                if source is not None and _is_made_as_terms(calls, names[source], memory):
                    scratch = [array for array in scratch if array.name != names[source]]
                    continue
                calls.append(KernelCall(kernel, tuple(by_name[p.name] for p in kernel.params), call.loops))
                schedules.append(None)
            call = replace(call, kernel=form.kernel, args=tuple(names[p] for p in form.kernel.params))
        calls.append(call)
        schedules.append(plan)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _is_made_as_terms(calls: list[KernelCall], name: str, terms: Value) -> bool:
    """Whether the call that makes an array can write its terms instead; if so, it does from now on."""
    users = [number for number, call in enumerate(calls) if name in call.args]
    if len(users) != 1 or calls[users[0]].args.count(name) != 1:
        return False
    call = calls[users[0]]
    memory = call.kernel.params[call.args.index(name)]
    uses = [op for op in walk(call.kernel.body) if memory in op.operands]
    if len(uses) != 1 or uses[0].opcode != "store" or uses[0].attrs.get("masked"):
        return False
    own = Value(terms.type, terms.name)
    body = _with_terms(call.kernel.body, uses[0], own)
    params = tuple(own if p is memory else p for p in call.kernel.params)
    args = tuple(terms.name if p is memory else arg for p, arg in zip(call.kernel.params, call.args, strict=True))
    calls[users[0]] = replace(call, kernel=replace(call.kernel, params=params, body=body), args=args)
    return True


def _with_terms(block: Block, store: Op, terms: Value) -> Block:
    """A block in which three stores of terms stand for one of f32, whose indices are those of batches, row and place in the sum."""
    ops: list[Op] = []
    for op in block.ops:
        if op is not store:
            ops.append(replace(op, regions=tuple(_with_terms(region, store, terms) for region in op.regions)) if op.regions else op)
            continue
        b = Builder(op.span)
        memory, *batch, row, place, value = op.operands
        assert isinstance(memory.type, Tensor)
        number = b.index(0)
        for order, (index, extent) in enumerate(zip(batch, memory.type.shape, strict=False)):
            number = index if order == 0 else b.add(b.mul(number, b.index(extent)), index)
        for position, part in enumerate(three_terms(b, value)):
            b.multi("store", terms, number, row, b.index(position), place, b.cast(part, bf16))
        ops += b.ops
    return Block(block.args, tuple(ops))


@record
class TermsForm:
    """A product of terms in scratch, and what writes them."""

    kernel: Kernel
    scratch: tuple[tuple[Value, Kernel], ...]
    sources: tuple[Value | None, ...]
    """For each of these the array whose maker can write the terms instead."""
    inner: int
    """Which of the summed indices steps walk; -1: the only one."""


def has_terms(found: Contraction) -> bool:
    """Whether factors can be written as terms: f32, one index on each side, and one summed over."""
    return found.a.dtype is found.b.dtype is found.accumulator is f32 and len(found.m) == len(found.n) == len(found.k) == 1


def terms_form(kernel: Kernel, number: int = 0, once: bool = True) -> TermsForm | None:
    """The kernel with factors of terms, each of which lies in memory once, or once for each product; None where it is no product that can be computed so."""
    found = find_contraction(kernel)
    if found is None or not has_terms(found):
        return None
    return _Terms(kernel, once).form(number)


class _Terms(Packing):
    """What writes the terms of both factors, and what multiplies them."""

    def __init__(self, kernel: Kernel, once: bool) -> None:
        super().__init__(KernelCall(kernel, tuple(p.name for p in kernel.params), ()), Wgmma(64, 64, 64, a_copy="pack", b_copy="pack"))
        self.once = once
        self.stored = [tuple(range(TERMS))] * 2 if once else [tuple(pair[side] for pair in PAIRS) for side in range(2)]
        """The terms of each factor, as they lie in memory."""
        self.guards = list(dict.fromkeys(f.guard for f in (self.found.a, self.found.b) if f.guard is not None)) if once and sum_bounds(self.found) else []
        self.length = _in_blocks(self.found.reduce_extents[0], kernel)
        """Elements of one stretch of the sum."""

    def form(self, number: int) -> TermsForm:
        names = [f"{self.kernel.name}.terms{number + position}" for position in range(2)]
        factors = (self.found.a, self.found.b)
        packs = {id(f): Value(self._memory(f), name) for f, name in zip(factors, names, strict=True)}
        written = [(packs[id(f)], self._writing_kernel(f, names[side], side)) for side, f in enumerate(factors)]
        return TermsForm(self._multiplying_kernel(packs), tuple(written), tuple(map(self._source, factors)), 1 if self.once else -1)

    def _source(self, factor: Factor) -> Value | None:
        """The array that a factor is, where its maker may write terms, and where these lie as its elements do."""
        found, memory = self.found, factor.tensor
        if not self.once or factor.load is None or memory is None or factor.load.operands[0].name != self.kernel.attrs.get("terms_of"):
            return None
        positions = self._positions(factor)
        indices, extents = [*(found.indices[p] for p in positions), found.k[0]], (*(found.extents[p] for p in positions), self.length)
        straight = all(form.is_just(index) for form, index in zip(found.access(factor), indices, strict=True))
        return factor.load.operands[0] if straight and memory.shape == extents else None

    def _across(self, factor: Factor) -> bool:
        """Whether a factor's rows in memory run across the sum: its terms do so, too."""
        if factor.load is None:
            return False
        last = self.found.access(factor)[-1]
        row = self.found.indices[self._side(factor)[0]]
        return row in last.values and self.found.k[0] not in last.values

    def _extents(self, factor: Factor) -> tuple[Size, Size]:
        """Of all batches, and of the rows."""
        *batch, rows = (self.found.extents[p] for p in self._positions(factor))
        return product(batch), _in_blocks(rows, self.kernel) if self._across(factor) else rows

    def _memory(self, factor: Factor) -> Tensor:
        """The terms as the product reads them."""
        batch, rows = self._extents(factor)
        stretches = (Size.of(TERMS), self.length) if self.once else (self.length * len(PAIRS),)
        shape = (batch, *stretches, rows) if self._across(factor) else (batch, rows, *stretches)
        return tensor(bf16, *shape, align=16)

    def _batch(self, b: Builder, factor: Factor, local: dict[Value, Value]) -> Value:
        total = b.index(0)
        for order, p in enumerate(self._positions(factor)[:-1]):
            index = local[self.found.indices[p]]
            total = index if order == 0 else b.add(b.mul(total, b.index(self.found.extents[p])), index)
        return total

    def _writing_kernel(self, factor: Factor, name: str, side: int) -> Kernel:
        found, positions, across = self.found, self._positions(factor), self._across(factor)
        batch, rows = self._extents(factor)
        count = Size.of(len(self.stored[side]))
        shape = (batch, count, self.length, rows) if across else (batch, rows, count, self.length)
        memory = Value(tensor(bf16, *shape, align=16), name)
        b = Builder(self.kernel.span)
        mapping = copy_outside(b, self.kernel)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            *own, first, second = indices
            k, row = (first, second) if across else (second, first)
            local = dict(mapping) | dict(zip((found.indices[p] for p in positions), (*own, row), strict=True)) | {found.k[0]: k}
            inside = inner.op("lt", k, inner.index(found.reduce_extents[0]))
            if across:
                inside = inner.logical_and(inside, inner.op("lt", row, inner.index(found.extents[positions[-1]])))
            whole = self._element(inner, factor, local, inside, lambda deep: deep.const(0, f32))
            parts = [inner.cast(part, bf16) for part in three_terms(inner, whole)]
            place = self._batch(inner, factor, local)
            for position, term in enumerate(self.stored[side]):
                where = (inner.index(position), k, row) if across else (row, inner.index(position), k)
                inner.multi("store", memory, place, *where, parts[term])
            return []

        outer = [b.index(found.extents[p]) for p in positions[:-1]]
        ends = [b.index(self.length), b.index(rows)] if across else [b.index(rows), b.index(self.length)]
        names = [found.indices[p].name for p in positions]
        names = [*names[:-1], found.k[0].name, names[-1]] if across else [*names, found.k[0].name]
        with b.at(found.reduction.span):
            b.parallel([*outer, *ends], body, names)
        kernel = finished(self.kernel, f"{self.kernel.name}.terms", b, [memory])
        attrs = {key: attr for key, attr in kernel.attrs.items() if key != "precision"}
        facts = {key: divisor for key, divisor in kernel.facts.items() if key in kernel.size_names}
        return replace(kernel, attrs=MappingProxyType(attrs), facts=MappingProxyType(facts))

    def _multiplying_kernel(self, packs: dict[int, Value]) -> Kernel:
        found = self.found
        b = Builder(self.kernel.span)
        extents = (Size.of(len(PAIRS)), self.length) if self.once else (self.length * len(PAIRS),)
        names = (["pair"] if self.once else []) + [found.k[0].name]

        def reduce(inner: Builder, copies: Copies) -> Sequence[Value]:
            def products(deep: Builder, sums: Sequence[Value]) -> list[Value]:
                factors: list[Value] = []
                for side, factor in enumerate((found.a, found.b)):
                    row = copies[found.indices[self._side(factor)[0]]]
                    stretch = (_term_of(deep, sums[0], side), sums[1]) if self.once else sums
                    where = (*stretch, row) if self._across(factor) else (row, *stretch)
                    loaded = deep.op("load", packs[id(factor)], self._batch(deep, factor, copies), *where)
                    factors.append(deep.cast(loaded, f32))
                return [deep.mul(*factors)]

            def term(deep: Builder, *sums: Value) -> Sequence[Value]:
                return self.copier.where(deep, self.guards, copies | {found.k[0]: sums[-1]}, lambda region, inside: products(region, sums), f32)

            with inner.at(found.reduction.span):
                return inner.reduce("add", [inner.index(e) for e in extents], term, names)

        copy_nest(b, self.kernel, found.parallel, found.extents, found.reduction, reduce)
        return finished(self.kernel, self.kernel.name, b, list(packs.values()))


def _in_blocks(extent: Size, kernel: Kernel) -> Size:
    return extent if extent.divisible_by(BLOCK, kernel.facts) else ceildiv(extent, Size.of(BLOCK)) * BLOCK


def _term_of(b: Builder, pair: Value, side: int) -> Value:
    """Which term of a factor a pair multiplies."""
    number = b.index(0)
    for position, pairs in enumerate(PAIRS):
        if pairs[side]:
            number = b.select(b.op("eq", pair, b.index(position)), b.index(pairs[side]), number)
    return number


def three_terms(b: Builder, x: Value) -> list[Value]:
    """Three numbers of bf16, as f32, whose sum an f32 is."""
    first, rest, whole = _upper(b, x, REST)
    second, last, _ = _upper(b, rest, LAST_REST)
    last = b.select(whole, rest, last)  # what stands for a rest of nothing leaves itself
    third, _, _ = _upper(b, last, LAST_REST)
    return [first, second, third]


def _upper(b: Builder, x: Value, rest: float) -> tuple[Value, Value, Value]:
    """The upper half of an f32, what that leaves, and whether that is nothing, for which a small part of the number stands."""
    upper = b.bitcast(b.op("and", b.bitcast(x, u32), b.const(UPPER, u32)), f32)
    whole = b.op("eq", x, upper)
    return upper, b.select(whole, b.mul(x, b.const(rest, f32)), b.sub(x, upper)), whole
