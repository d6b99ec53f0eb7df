"""A loop over blocks that carries running maxima and sums becomes the reductions it computes.

In and out: a loop-stage kernel, after `untile`. The loop of an online softmax, as tiled attention is written,

    for block { m' = max(m, max_t s); l' = exp(m - m') * l + sum_t exp(s - m'); o' = exp(m - m') * o + sum_t exp(s - m') * v }

from m = -inf and l = o = 0, is by algebra

    m = max_j s; l = sum_j exp(s - m); o = sum_j exp(s - m) * v          j over all blocks

because each factor exp(m - m') takes every earlier term from the old maximum to the new one. That is attention in plain loops, for
which there are lowerings (`analysis/attention.py`), with a running maximum of their own and blocks that fit the target. What is carried
may be running maxima, sums, and sums that follow a maximum, whose terms are products with one exponential below it. A loop
that carries anything else stays as it is. Results are the same numbers but for rounding; only where a text divides by zero
on its way do they differ: blocks all of whose scores are -inf before the first other give NaN as written (-inf - -inf), and no
longer do.

An index that only some of the sums have (the columns of the values) becomes a loop after the others, so that the rest is computed
once for all of them, as plain loops say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.base.intervals import clamped
from tilewright.base.record import replace
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.base.source import Span
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import clone_ops, has_effects, replace_values
from tilewright.ir.types import INDEX
from tilewright.passes.common.simplify import simplify
from tilewright.passes.loop.untile import BlockedIndex, blocked, limited, with_index, without_dead

Key = tuple[object, ...]
_COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or"})


@dataclass(frozen=True, eq=False)
class _CarriedPart:
    """One carried value, as a reduction over all blocks."""

    place: int
    kind: str
    extent: Size
    ends: tuple[Affine, ...]
    """Where it ends before that."""
    region: Block
    follows: int
    """The place of the maximum that a sum is scaled by, or -1."""
    maximum: Value
    """What `region` has in that maximum's place."""


@dataclass
class _Made:
    """Reductions made: maxima, sums that follow one, and others."""

    maxima: list[Value] = field(default_factory=list)
    sums: list[Value] = field(default_factory=list)
    others: list[Value] = field(default_factory=list)


def recover_reductions(kernel: Kernel) -> Kernel:
    """The kernel with reductions for loops that carry them."""
    if not any(op.opcode == "for" for op in walk(kernel.body)):
        return kernel
    made = _Made()
    body = _block(kernel.body, kernel, analyse(kernel), {r: op for op in walk(kernel.body) for r in op.results}, made, {})
    if not (made.maxima or made.others):
        return kernel
    kernel = replace(kernel, body=body)
    return simplify(_columns_inside(kernel, made))


def _block(
    block: Block, kernel: Kernel, forms: Forms, defined: dict[Value, Op], made: _Made, mapping: dict[Value, Value]
) -> Block:
    builder = Builder()
    for op in block.ops:
        parts = _Loop(op, kernel, forms, defined).parts() if op.opcode == "for" else None
        if parts is not None:
            with builder.at(op.span):
                _emit(builder, replace(op, operands=tuple(mapping.get(v, v) for v in op.operands)), parts, defined, made, mapping)
            continue
        regions = tuple(_block(r, kernel, forms, defined, made, mapping) for r in op.regions)
        builder.append(replace(op, operands=tuple(mapping.get(v, v) for v in op.operands), regions=regions))
    return Block(block.args, tuple(builder.ops))


# -- what a loop carries ----------------------------------------------------------------------------------------------


class _Loop:
    def __init__(self, op: Op, kernel: Kernel, forms: Forms, defined: dict[Value, Op]) -> None:
        self.op, self.kernel, self.forms, self.defined = op, kernel, forms, defined
        self.body = op.regions[0]
        self.carried = self.body.args[1:]
        self.tainted = _tainted(self.body, set(self.carried))
        self.keys: dict[Value, Key] = {}
        self.names: dict[Value, int] = {}
        self.varies = False
        """Where it ends depends on indices around it."""

    def parts(self) -> tuple[_CarriedPart, ...] | None:
        """How each carried value goes on, or None where one does so in another way."""
        low, high, step = (self.forms[v] for v in self.op.operands[:3])
        counted = not low.factors and low.constant == ZERO and not step.factors and step.constant == ONE
        self.varies = bool(high.factors)
        if not counted or not self.carried or any(has_effects(o) for o in self.body.ops if o.opcode != "yield"):
            return None
        maxima = {place: part for place in range(len(self.carried)) if (part := self._maximum(place)) is not None}
        found: list[_CarriedPart] = []
        for place in range(len(self.carried)):
            part = maxima.get(place) or self._sum(place, tuple(maxima))
            if part is None:
                return None
            found.append(part)
        return tuple(found)

    def _maximum(self, place: int) -> _CarriedPart | None:
        op = self.defined.get(self.body.yields[place])
        if op is None or op.opcode != "max" or self.carried[place] not in op.operands:
            return None
        joined = op.operands[1] if op.operands[0] is self.carried[place] else op.operands[0]
        return None if joined in self.tainted else self._part(place, joined, "max")

    def _sum(self, place: int, maxima: Sequence[int]) -> _CarriedPart | None:
        op = self.defined.get(self.body.yields[place])
        if op is None or op.opcode != "add" or not self._is_zero(self.op.operands[3 + place]):
            return None
        for before, joined in (op.operands, op.operands[::-1]):
            if before is self.carried[place] and joined not in self.tainted:
                return self._part(place, joined, "add")
            factor = self._other(before, self.carried[place])
            for maximum in maxima:
                exponential = self._moves(factor, maximum) if factor is not None else ""
                total = self._total(joined, "add")
                term = joined if total is None else total.regions[0].yields[0]
                if exponential and self._follows(term, maximum, exponential):
                    return self._part(place, joined, "add", maximum)
        return None

    def _total(self, value: Value, kind: str) -> Op | None:
        """The reduction of a block that a value is."""
        op = self.defined.get(value)
        if op is None or op.opcode != "reduce" or op.attrs["kind"] != kind or len(op.operands) != 1 or op not in self.body.ops:
            return None
        return op

    def _part(self, place: int, joined: Value, kind: str, follows: int = -1) -> _CarriedPart | None:
        """A carried value that another joins, where all it needs is known without what is carried."""
        block, blocks = self.body.args[0], self.forms[self.op.operands[1]].constant
        maximum = Value(self.carried[max(follows, 0)].type)
        new = {o.result: maximum for o in self.body.ops if o.opcode == "max" and follows >= 0 and self._is_new(o.result, follows)}
        total = self._total(joined, kind)
        region: Block | None
        ends: tuple[Affine, ...] = ()
        if total is None and self.varies:
            return None
        if total is None:
            # Blocks of one.
            index, extent = block, blocks
            ops = (*self.body.ops[:-1], Op("yield", (joined,), span=self.op.span))
            region = without_dead(replace_values(Block((), ops), new))
        else:
            inside = total.regions[0].args[0]
            if self.varies:
                found = self._limited(block, inside, total.operands[0])
                pair, ends = found if found is not None else (None, ())
            else:
                pair = blocked(block, blocks, inside, total.operands[0], self.kernel, self.defined, self.forms)
            if pair is None:
                return None
            index, extent = Value(INDEX, inside.name), pair.extent
            joint = replace_values(Block((), (*self.body.ops[:-1], *total.regions[0].ops)), new)
            region = with_index(joint, pair, index, self.forms, set())
        if region is None or _used(region) & set(self.carried):
            return None
        return _CarriedPart(place, kind, clamped(extent), ends, Block((index,), region.ops), follows, maximum)

    def _limited(self, block: Value, inside: Value, extent: Value) -> tuple[BlockedIndex, tuple[Affine, ...]] | None:
        """As `blocked`, of blocks whose number depends on indices around the loop: the pair, and where the two end together."""
        found = limited(block, inside, extent, self.defined, self.forms)
        if found is None or (size := found.size.constant) is None:
            return None
        count = self.defined.get(self.op.operands[1])
        if count is not None and count.opcode == "max" and self._is_zero(count.operands[1]):
            count = self.defined.get(count.operands[0])
        if count is None or count.opcode != "floordiv" or self.forms[count.operands[1]] != Affine((), found.size):
            return None
        ends: list[Affine] = []
        for form in self._least(count.operands[0]):
            rest = form.constant.constant
            if not form.factors and form.constant == found.extent + (size - 1):
                continue  # the end of the array
            if rest is None or any(f.constant is None or f.constant % size for _, f in form.factors):
                return None
            ends.append(Affine(form.factors, Size.of(rest // size * size)))
        return found, tuple(ends)

    def _least(self, value: Value) -> list[Affine]:
        """Forms of which a value is the least."""
        op = self.defined.get(value)
        if op is not None and op.opcode == "min":
            return [form for v in op.operands for form in self._least(v)]
        if op is not None and op.opcode in ("add", "sub") and not (added := self.forms[op.operands[1]]).factors:
            sign = ONE if op.opcode == "add" else Size.of(-1)
            return [form.plus(added, sign) for form in self._least(op.operands[0])]
        return [self.forms[value]]

    def _other(self, value: Value, factor: Value) -> Value | None:
        """What a factor is multiplied with."""
        op = self.defined.get(value)
        if op is None or op.opcode != "mul" or op.operands[0] is op.operands[1] or factor not in op.operands:
            return None
        return op.operands[1] if op.operands[0] is factor else op.operands[0]

    def _moves(self, value: Value, maximum: int) -> str:
        """The function where a value is exp(m - m'), or nothing."""
        op = self.defined.get(value)
        if op is None or op.opcode not in ("exp", "exp2"):
            return ""
        terms = self._terms(op.operands[0], 1)
        if len(terms) != 2:
            return ""
        for (old, plus), (new, minus) in (terms, terms[::-1]):
            if old is self.carried[maximum] and plus == 1 and self._is_new(new, maximum) and minus == -1:
                return op.opcode
        return ""

    def _is_new(self, value: Value, maximum: int) -> bool:
        """Whether a value is m'."""
        new = self.body.yields[maximum]
        op = self.defined.get(value)
        return value is new or (op is not None and op.opcode == "max" and op in self.body.ops and self.key(value) == self.key(new))

    def _follows(self, value: Value, maximum: int, exponential: str) -> bool:
        """Whether a term is exp(-m') times something that nothing carried is part of."""
        if value not in self.tainted:
            return self._is_zero(value)
        op = self.defined.get(value)
        if op is None:
            return False
        if op.opcode == "mul":
            first, second = (v not in self.tainted for v in op.operands)
            if first == second:
                return False
            return self._follows(op.operands[1 if first else 0], maximum, exponential)
        if op.opcode == "div":
            return op.operands[1] not in self.tainted and self._follows(op.operands[0], maximum, exponential)
        if op.opcode == "select":
            return op.operands[0] not in self.tainted and all(self._follows(v, maximum, exponential) for v in op.operands[1:])
        if op.opcode == "if":
            place = op.results.index(value)
            own = all(self._follows(region.yields[place], maximum, exponential) for region in op.regions)
            return op.operands[0] not in self.tainted and own
        if op.opcode in ("add", "sub"):
            return all(self._follows(v, maximum, exponential) for v in op.operands)
        if op.opcode == exponential:
            moving = [(v, sign) for v, sign in self._terms(op.operands[0], 1) if v in self.tainted]
            return len(moving) == 1 and moving[0][1] == -1 and self._is_new(moving[0][0], maximum)
        return False

    def _is_zero(self, value: Value) -> bool:
        op = self.defined.get(value)
        return op is not None and op.opcode == "const" and op.attrs["value"] == 0

    def _terms(self, value: Value, sign: int) -> list[tuple[Value, int]]:
        """The terms of a sum and their signs."""
        op = self.defined.get(value)
        if op is not None and op.opcode in ("add", "sub"):
            second = sign if op.opcode == "add" else -sign
            return [*self._terms(op.operands[0], sign), *self._terms(op.operands[1], second)]
        if op is not None and op.opcode == "neg":
            return self._terms(op.operands[0], -sign)
        return [(value, sign)]

    def key(self, value: Value) -> Key:
        """Equal for values that are computed in the same way."""
        if value in self.names:
            return ("index", self.names[value])
        op = self.defined.get(value)
        if op is None or op.opcode in ("for", "while"):
            return ("value", id(value))
        if value in self.keys:
            return self.keys[value]
        parts = [self.key(v) for v in op.operands]
        if op.opcode in _COMMUTATIVE:
            parts.sort(key=repr)
        for region in op.regions:
            for arg in region.args:
                self.names[arg] = len(self.names)
        parts += [self.key(v) for region in op.regions for v in region.yields]
        for region in op.regions:
            for arg in region.args:
                del self.names[arg]
        key: Key = (op.opcode, op.results.index(value), *sorted((n, repr(a)) for n, a in op.attrs.items()), *parts)
        if not self.names:
            self.keys[value] = key
        return key


def _tainted(block: Block, tainted: set[Value]) -> set[Value]:
    """All values in a block that some are part of; `tainted` is extended."""
    for op in block.ops:
        direct = any(v in tainted for v in op.operands)
        for region in op.regions:
            tainted.update(region.args if direct else ())
            _tainted(region, tainted)
        if direct or any(v in tainted for region in op.regions for v in _used(region)):
            tainted.update(op.results)
    return tainted


def _used(block: Block) -> set[Value]:
    return {v for op in walk(block) for v in op.operands}


# -- the reductions instead -------------------------------------------------------------------------------------------


def _emit(builder: Builder, loop: Op, parts: Sequence[_CarriedPart], defined: dict[Value, Op], made: _Made, mapping: dict[Value, Value]) -> None:
    """Reductions in place of a loop; `mapping` learns what its results are."""
    results: dict[int, Value] = {}
    for part in sorted(parts, key=lambda p: p.follows >= 0):
        known = dict(mapping)
        if part.follows >= 0:
            known[part.maximum] = results[part.follows]
        inner = Builder(loop.span)
        index = Value(INDEX, part.region.args[0].name)
        known[part.region.args[0]] = index
        clone_ops(inner, part.region.ops, known)
        result = Value(loop.results[part.place].type, loop.results[part.place].name)
        extent = _extent(builder, part, mapping)
        builder.append(Op("reduce", (extent,), (result,), {"kind": part.kind}, (Block((index,), tuple(inner.ops)),), loop.span))
        is_maximum = part.kind == "max"
        (made.maxima if is_maximum else made.sums if part.follows >= 0 else made.others).append(result)
        start = loop.operands[3 + part.place]
        first = defined.get(start)
        if is_maximum and (first is None or first.opcode != "const" or first.attrs["value"] != -math.inf):
            result = builder.op("max", start, result)
        results[part.place] = mapping[loop.results[part.place]] = result


def _extent(builder: Builder, part: _CarriedPart, mapping: dict[Value, Value]) -> Value:
    extent = builder.index(part.extent)
    for end in part.ends:
        own = builder.index(end.constant)
        for value, factor in end.factors:
            own = builder.add(builder.mul(mapping.get(value, value), builder.index(factor)), own)
        extent = builder.op("min", own, extent)
    return builder.op("max", extent, builder.index(0)) if part.ends else extent


# -- columns of the values --------------------------------------------------------------------------------------------


def _columns_inside(kernel: Kernel, made: _Made) -> Kernel:
    """The kernel with a parallel index that only some of the sums depend on as a loop inside, and with such a loop around only
    what depends on it."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1 or not made.sums:
        return kernel
    (parallel,) = parallels
    region = parallel.regions[0]
    defined = {r: op for op in walk(kernel.body) for r in op.results}
    for place, index in reversed(list(enumerate(region.args))):
        split = _split(region.ops[:-1], index, made, defined)
        if split is not None:
            args = (*region.args[:place], *region.args[place + 1 :])
            operands = (*parallel.operands[:place], *parallel.operands[place + 1 :])
            ops = (*_looped(split, index, parallel.operands[place], parallel.span), region.ops[-1])
            return _with(kernel, parallel, replace(parallel, operands=operands, regions=(Block(args, ops),)))
    loops = [op for op in region.ops if op.opcode == "for" and len(op.operands) == 3]
    forms = analyse(kernel)
    for loop in loops:
        low, _, step = (forms[v] for v in loop.operands)
        split = _split(loop.regions[0].ops[:-1], loop.regions[0].args[0], made, defined)
        counted = not low.factors and low.constant == ZERO and not step.factors and step.constant == ONE
        if counted and split is not None and _apart(split[1], loop.regions[0].args[0], forms):
            new = _looped(split, loop.regions[0].args[0], loop.operands[1], loop.span)
            ops = tuple(n for op in region.ops for n in (new if op is loop else [op]))
            return _with(kernel, parallel, replace(parallel, regions=(Block(region.args, ops),)))
    return kernel


def _with(kernel: Kernel, old: Op, new: Op) -> Kernel:
    return replace(kernel, body=Block(kernel.body.args, tuple(new if op is old else op for op in kernel.body.ops)))


def _split(ops: Sequence[Op], index: Value, made: _Made, defined: dict[Value, Op]) -> tuple[list[Op], list[Op]] | None:
    """What is the same for all of an index, and what is not; None where the index does not divide the reductions so. What a text over
    tiles does once for the first of the index is the same for all."""
    block = Block((index,), tuple(ops))
    varying = _tainted(block, {index})
    if not any(v in varying for v in made.sums) or any(v in varying for v in made.maxima) or _reads_back(block):
        return None
    same: list[Op] = []
    once: list[Op] = []
    inside: list[Op] = []
    for op in ops:
        if _is_first(op, index, defined) and not _used(op.regions[0]) & varying:
            once += op.regions[0].ops[:-1]
        elif has_effects(op) or any(r in varying for r in op.results):
            inside.append(op)
        else:
            same.append(op)
    if any(has_effects(op) and not _mentions(op, varying) for op in inside) or _written(once) & _written(inside):
        return None
    return [*same, *once], inside


def _is_first(op: Op, index: Value, defined: dict[Value, Op]) -> bool:
    """Whether an op does something only where an index is 0."""
    condition = defined.get(op.operands[0]) if op.opcode == "if" and not op.results else None
    if condition is None or condition.opcode != "eq" or index not in condition.operands or len(op.regions[1].ops) != 1:
        return False
    other = defined.get(condition.operands[1] if condition.operands[0] is index else condition.operands[0])
    return other is not None and other.opcode == "const" and other.attrs["value"] == 0


def _looped(split: tuple[list[Op], list[Op]], index: Value, extent: Value, span: Span) -> list[Op]:
    """What is the same for all of an index, then a loop around the rest."""
    builder = Builder(span)
    for op in split[0]:
        builder.append(op)
    low, step = builder.index(0), builder.index(1)
    body = Block((index,), (*split[1], Op("yield", span=span)))
    builder.append(Op("for", (low, extent, step), (), {"independent": True}, (body,), span))
    return builder.ops


def _apart(ops: Sequence[Op], index: Value, forms: Forms) -> bool:
    """Whether what is written differs from one value of an index to the next: each array once, along one axis by that index."""
    stores = [op for op in ops if has_effects(op)]
    varying = _tainted(Block((index,), tuple(ops)), {index})
    for op in stores:
        if op.opcode != "store":
            return False
        indices = [forms[v] for v in op.operands[1:-1] if v in forms]
        if not any(f.factor(index) != ZERO and not (set(f.values) - {index}) & varying for f in indices):
            return False
    return len(_written(stores)) == len(stores)


def _written(ops: Sequence[Op]) -> set[Value]:
    return {op.operands[0] for op in walk(Block((), tuple(ops))) if not op.regions and op.operands and has_effects(op)}


def _mentions(op: Op, values: set[Value]) -> bool:
    return any(v in values for v in (*op.operands, *(v for region in op.regions for v in _used(region))))


def _reads_back(block: Block) -> bool:
    """Whether something is read that is written as well."""
    written = _written(block.ops)
    return any(op.opcode == "load" and op.operands[0] in written for op in walk(block))
