"""Undo blocking by hand: an index of blocks and one inside a block become the index they count together.

In and out: a loop-stage kernel. Texts over tiles come as loops over blocks, a loop inside, and tests that keep the last block
inside its array. Blocks are chosen later, from a model of the target, so the author's are taken apart first: a product of tiles
is then the contraction that plain loops are.

    parallel %blocks (%q) { for min(64, n - 64*q) (%t) { … store %out, 64*q + t … } }   ->  parallel %n (%i) { … store %out, %i … }
    parallel %blocks, 64 (%q, %t) { if t < n - 64*q { … store %out, 64*q + t … } }      ->  parallel %n (%i) { … store %out, %i … }
    reduce %blocks (%p) { yield reduce min(32, k - 32*p) (%t) { … 32*p + t … } }        ->  reduce %k (%j) { … %j … }

All need that the two indices are used only together, as `size * block + inside` (a multiple of that, or anything added to it), and that
nothing is written outside of the test. Only where loops end may depend on the block alone (keys up to the end of a block of queries):
that is `i // size` then. A kernel that uses them in any other way stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, analyse, gap
from tilewright.base.dtypes import bool_
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, SizeCall, ceildiv
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import eliminate_dead, has_effects, rewrite_block
from tilewright.ir.types import INDEX
from tilewright.passes.common.simplify import simplify

MINUS = Size.of(-1)
_KINDS = frozenset({"add", "mul", "max", "min"})
Gap = tuple[frozenset[tuple[Value, Size]], Size]
"""A condition as 0 <= gap: its factors and its constant."""


@record
class BlockedIndex:
    """Two indices that count together: `size * outer + inner`, below `extent`."""

    outer: Value
    inner: Value
    size: Size
    extent: Size

    def whole(self, form: Affine) -> bool:
        """Whether a form uses the two only together."""
        return form.factor(self.outer) == form.factor(self.inner) * self.size

    def touches(self, form: Affine) -> bool:
        return form.factor(self.outer) != ZERO or form.factor(self.inner) != ZERO


def untile(kernel: Kernel) -> Kernel:
    """The kernel without blocks that only its text has."""
    while True:
        found = _parallel(kernel) or _inside(kernel) or _reduction(kernel)
        if found is None:
            return kernel
        kernel = simplify(found)


# -- indices of the nest ----------------------------------------------------------------------------------------------


def _parallel(kernel: Kernel) -> Kernel | None:
    """The kernel with one pair of parallel indices made one."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return None
    (parallel,) = parallels
    forms = analyse(kernel)
    guards = _common_guards(parallel.regions[0], forms)
    for pair in (*_guarded(parallel, guards, forms), *_even(parallel, kernel, forms)):
        merged = _merge_parallel(kernel, parallel, pair, forms)
        if merged is not None:
            return merged
    return None


def _guarded(parallel: Op, guards: Sequence[Gap], forms: Forms) -> Iterator[BlockedIndex]:
    """Pairs held inside an extent by a test around everything that is written."""
    extents = dict(zip(parallel.regions[0].args, (forms[v] for v in parallel.operands), strict=True))
    for factors, constant in guards:
        by_value = dict(factors)
        if len(by_value) != 2 or not by_value.keys() <= extents.keys():
            continue
        for outer, inner in (tuple(by_value), tuple(by_value)[::-1]):
            size, extent = -by_value[outer], constant + 1
            if by_value[inner] == MINUS and _is(extents[inner], size) and _is(extents[outer], ceildiv(extent, size)):
                yield BlockedIndex(outer, inner, size, extent)


def _even(parallel: Op, kernel: Kernel, forms: Forms) -> Iterator[BlockedIndex]:
    """Pairs that need no test."""
    args = parallel.regions[0].args
    extents = [forms[v] for v in parallel.operands]
    for op in walk(parallel.regions[0]):
        if op.opcode != "store":
            continue
        for index in op.operands[1:-1]:
            form = forms.get(index, Affine())
            for inner, inner_extent in zip(args, extents, strict=True):
                size = inner_extent.constant
                for outer, outer_extent in zip(args, extents, strict=True):
                    together = form.factor(inner) == ONE and form.factor(outer) == size and size != ONE
                    if outer is not inner and together and not inner_extent.factors and not outer_extent.factors:
                        yield BlockedIndex(outer, inner, size, total(outer_extent.constant, size, kernel))


def _merge_parallel(kernel: Kernel, parallel: Op, pair: BlockedIndex, forms: Forms, body: Block | None = None) -> Kernel | None:
    """The kernel with one index for a pair; `body`: what the nest does, where that is not just its region."""
    index = Value(INDEX, pair.outer.name)
    guard = _as_gap(Affine(((pair.outer, -pair.size), (pair.inner, MINUS)), pair.extent - 1))
    body = body or parallel.regions[0]
    region = with_index(body, pair, index, forms, {op.result for op in walk(body) if _gap(op, forms) == guard})
    if region is None:
        return None
    builder = Builder(parallel.span)
    extent = builder.index(pair.extent)
    args, operands = [], []
    for arg, operand in zip(parallel.regions[0].args, parallel.operands, strict=True):
        if arg is not pair.inner:
            args.append(index if arg is pair.outer else arg)
            operands.append(extent if arg is pair.outer else operand)
    builder.append(replace(parallel, operands=tuple(operands), regions=(Block(tuple(args), region.ops),)))
    ops = [new for op in kernel.body.ops for new in (builder.ops if op is parallel else [op])]
    return eliminate_dead(replace(kernel, body=Block(kernel.body.args, tuple(ops))))


def _inside(kernel: Kernel) -> Kernel | None:
    """The kernel with a parallel index and the loop over what is in a block made one parallel index."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return None
    (parallel,) = parallels
    region = parallel.regions[0]
    effects = [op for op in region.ops[:-1] if has_effects(op)]
    if len(effects) != 1 or effects[0].opcode != "for" or not effects[0].attrs.get("independent") or effects[0].results:
        return None
    (loop,) = effects
    forms = analyse(kernel)
    low, _, step = (forms[v] for v in loop.operands)
    if not _is(low, ZERO) or not _is(step, ONE):
        return None
    before = [op for op in region.ops[:-1] if op is not loop]
    written = {op.operands[0] for op in walk(loop.regions[0]) if op.operands and not op.regions and has_effects(op)}
    if any(op.opcode == "load" and op.operands[0] in written for op in walk(Block((), tuple(before)))):
        return None
    made = {result: op for op in walk(kernel.body) for result in op.results}
    body = Block(region.args, (*before, *loop.regions[0].ops))
    for outer, operand in zip(region.args, parallel.operands, strict=True):
        blocks = forms[operand]
        pair = None if blocks.factors else blocked(outer, blocks.constant, loop.regions[0].args[0], loop.operands[1], kernel, made, forms)
        merged = None if pair is None else _merge_parallel(kernel, parallel, pair, forms, body)
        if merged is not None:
            return merged
    return None


def _common_guards(region: Block, forms: Forms) -> list[Gap]:
    """Conditions that hold wherever something is written."""
    common: list[Gap] | None = None
    made = {result: op for op in walk(region) for result in op.results}
    for path in _paths(region, (), made, forms):
        common = list(path) if common is None else [gap for gap in common if gap in path]
    return common or []


def _paths(block: Block, path: tuple[Gap, ...], made: dict[Value, Op], forms: Forms) -> Iterator[tuple[Gap, ...]]:
    """For everything with effects in a block: the conditions around it."""
    for op in block.ops:
        if not op.regions and has_effects(op) and op.opcode != "yield":
            yield path
        for number, region in enumerate(op.regions):
            more = tuple(_conditions(op.operands[0], made, forms)) if op.opcode == "if" and number == 0 else ()
            yield from _paths(region, (*path, *more), made, forms)


def _conditions(value: Value, made: dict[Value, Op], forms: Forms) -> Iterator[Gap]:
    op = made.get(value)
    if op is not None and op.opcode == "and":
        for operand in op.operands:
            yield from _conditions(operand, made, forms)
    elif op is not None and (gap := _gap(op, forms)) is not None:
        yield gap


def _gap(op: Op, forms: Forms) -> Gap | None:
    """A comparison of indices as 0 <= gap."""
    form = gap(op, forms)
    return None if form is None else _as_gap(form)


def _as_gap(form: Affine) -> Gap:
    return frozenset(form.factors), form.constant


# -- sums of sums -----------------------------------------------------------------------------------------------------


def _reduction(kernel: Kernel) -> Kernel | None:
    """The kernel with one reduction over blocks, of reductions inside them, made one."""
    forms = analyse(kernel)
    for op in walk(kernel.body):
        if op.opcode != "reduce" or op.attrs["kind"] not in _KINDS or len(op.results) != 1:
            continue
        region = op.regions[0]
        inner = next((o for o in region.ops if o.results == region.yields), None)
        if inner is None or inner.opcode != "reduce" or inner.attrs["kind"] != op.attrs["kind"]:
            continue
        merged = _merge_reduction(kernel, op, inner, forms)
        if merged is not None:
            return merged
    return None


def _merge_reduction(kernel: Kernel, outer: Op, inner: Op, forms: Forms) -> Kernel | None:
    region, body = outer.regions[0], inner.regions[0]
    made = {result: op for op in walk(kernel.body) for result in op.results}
    for place, block in enumerate(region.args):
        extent = forms[outer.operands[place]]
        for number, inside in enumerate(body.args):
            pair = None if extent.factors else blocked(block, extent.constant, inside, inner.operands[number], kernel, made, forms)
            if pair is None:
                continue
            index = Value(INDEX, block.name)
            joined = Block((), (*(op for op in region.ops[:-1] if op is not inner), *body.ops))
            new = with_index(joined, pair, index, forms, set())
            rest = [*inner.operands[:number], *inner.operands[number + 1 :]]
            here = {*region.args, *(r for op in region.ops for r in op.results)}
            if new is None or any(v in here for v in rest):
                continue
            args = (*region.args[:place], index, *region.args[place + 1 :], *(a for a in body.args if a is not inside))
            return _replaced(kernel, outer, place, pair.extent, rest, Block(args, new.ops))
    return None


def _replaced(kernel: Kernel, outer: Op, place: int, extent: Size, rest: Sequence[Value], region: Block) -> Kernel:
    """The kernel with a reduction over other indices."""
    before = Builder(outer.span)
    size = before.index(extent)
    operands = (*outer.operands[:place], size, *outer.operands[place + 1 :], *rest)
    new = replace(outer, operands=operands, regions=(region,))

    def block(old: Block) -> Block:
        ops = (new if op is outer else replace(op, regions=tuple(block(r) for r in op.regions)) if op.regions else op for op in old.ops)
        return Block(old.args, tuple(ops))

    body = block(kernel.body)
    first = next(number for number, op in enumerate(body.ops) if op.regions)
    ops = (*body.ops[:first], *before.ops, *body.ops[first:])
    return eliminate_dead(replace(kernel, body=Block(body.args, ops)))


# -- what both need ---------------------------------------------------------------------------------------------------


def blocked(
    outer: Value, blocks: Size, inner: Value, extent: Value, kernel: Kernel, made: dict[Value, Op], forms: Forms
) -> BlockedIndex | None:
    """The pair an index of `blocks` blocks and an index below `extent` are: `min(size, n - size * outer)`, or the same for all blocks."""
    form = forms[_without(extent, "max", ZERO, made, forms) or extent]
    if not form.factors:
        return BlockedIndex(outer, inner, form.constant, total(blocks, form.constant, kernel))
    found = limited(outer, inner, extent, made, forms)
    return found if found is not None and blocks == ceildiv(found.extent, found.size) else None


def limited(outer: Value, inner: Value, extent: Value, made: dict[Value, Op], forms: Forms) -> BlockedIndex | None:
    """The pair an index of blocks and an index below `min(size, n - size * outer)` are, where there are enough blocks."""
    op = made.get(_without(extent, "max", ZERO, made, forms) or extent)
    if op is None or op.opcode != "min":
        return None
    for size, rest in ((forms[a], forms[b]) for a, b in (op.operands, op.operands[::-1])):
        if not size.factors and rest.values == (outer,) and rest.factor(outer) == -size.constant:
            return BlockedIndex(outer, inner, size.constant, rest.constant)
    return None


def _without(value: Value, opcode: str, constant: Size, made: dict[Value, Op], forms: Forms) -> Value | None:
    """The other operand of an op that has a constant one."""
    op = made.get(value)
    if op is not None and op.opcode == opcode:
        for own, other in (op.operands, op.operands[::-1]):
            if _is(forms[other], constant):
                return own
    return None


def total(blocks: Size, size: Size, kernel: Kernel) -> Size:
    """What a number of whole blocks hold."""
    width = size.constant
    if width and len(blocks.terms) == 1 and blocks.terms[0][1] == 1 and len(blocks.terms[0][0]) == 1:
        atom = blocks.terms[0][0][0]
        if isinstance(atom, SizeCall) and atom.op == "ceildiv" and atom.b == size and atom.a.divisible_by(width, kernel.facts):
            return atom.a
    return blocks * size


def with_index(block: Block, pair: BlockedIndex, index: Value, forms: Forms, proven: set[Value]) -> Block | None:
    """The ops of a block with `index` for the pair and `proven` conditions true; None where either is used in another way."""

    def function(builder: Builder, op: Op) -> Sequence[Value] | None:
        if len(op.results) != 1:
            return None
        (result,) = op.results
        if result in proven:
            return (builder.const(True, bool_),)
        form = forms.get(result)
        if form is None or not pair.touches(form):
            return None
        if pair.whole(form):
            return (_materialised(builder, form, pair, index),)
        if result in ends:
            return (_materialised(builder, form, pair, builder.op("floordiv", index, builder.index(pair.size))),)
        return None

    ends = _ends(block, pair, forms)
    new = rewrite_block(block, function, {})
    kept = without_dead(new)
    return None if any(v in (pair.outer, pair.inner) for op in walk(kept) for v in op.operands) else kept


def _ends(block: Block, pair: BlockedIndex, forms: Forms) -> set[Value]:
    """Values made of the block's index alone that only say, with others like them, where loops end."""
    users: dict[Value, list[Op]] = {}
    for op in walk(block):
        for value in op.operands:
            users.setdefault(value, []).append(op)
    known: dict[Value, bool] = {}

    def is_end(value: Value) -> bool:
        if value not in known:
            known[value] = all(_ends_at(op, value) or (not op.regions and passes(op)) for op in users.get(value, []))
        return known[value]

    def passes(op: Op) -> bool:
        if len(op.results) != 1 or op.result not in forms:
            return False
        form = forms[op.result]
        return (pair.touches(form) and pair.whole(form)) or is_end(op.result)

    alone = [v for op in walk(block) for v in op.results if v in forms and forms[v].factor(pair.inner) == ZERO]
    return {v for v in alone if forms[v].factor(pair.outer) != ZERO and is_end(v)}


def _ends_at(op: Op, value: Value) -> bool:
    """Whether a value is where a loop that carries something ends, and nothing else in it."""
    return op.opcode == "for" and len(op.operands) > 3 and op.operands[1] is value and op.operands.count(value) == 1


def _materialised(builder: Builder, form: Affine, pair: BlockedIndex, index: Value) -> Value:
    """A form computed anew, with `index` for the pair."""
    scale = form.factor(pair.inner) if form.factor(pair.inner) != ZERO else form.factor(pair.outer)
    factors = [(v, f) for v, f in form.factors if v not in (pair.outer, pair.inner)] + [(index, scale)]
    found: Value | None = None
    for value, factor in factors:
        part = value if factor == ONE else builder.mul(value, builder.index(factor))
        found = part if found is None else builder.add(found, part)
    assert found is not None
    return found if form.constant == ZERO else builder.add(found, builder.index(form.constant))


def without_dead(block: Block) -> Block:
    """A block without ops that nothing in it needs."""
    return eliminate_dead(Kernel("", Stage.LOOP, (), block)).body


def _is(form: Affine, size: Size) -> bool:
    return not form.factors and form.constant == size
