"""Join the conditions of a sum, and the sums that stand under them. `Kernel -> Kernel`.

In: a loop-stage kernel. Out: the same, where a sum of sums under conditions is one sum under one condition, whose tests are bounds of the very
indices that its loads have, as windows and contractions are recognised by:

    reduce q, r { y = i - r; if y >= 0 { reduce s { z = j - s; if not (z < 0) { x[y, z] * w[r, s] } else { 0 } } } else { 0 } }
    -> reduce q, r, s { y = i - r; z = j - s; if y >= 0 and z >= 0 { x[y, z] * w[r, s] } else { 0 } }

A factor that is zero where a condition does not hold says the same of its term. The kernel's attribute `padded` says that all conditions were such: terms without
them may be computed as products with zero, whatever the condition says.

So does the largest of largest numbers. Conditions may only speak of indices, and each of those above another sum must speak of an index that is summed over: one that speaks of results only
decides whether there is anything to add up at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import Forms, analyse, lowest
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import eliminate_dead, has_effects
from tilewright.ir.types import INDEX, Tensor, dtype_of
from tilewright.passes.common.combine import identities
from tilewright.passes.windows.guards import GuardTest, Made, emit, guard_tests


@record
class FlatSum:
    """A sum with the sums and conditions inside it taken apart: its indices with their extents, ops in order, the conditions, and the term."""

    extents: tuple[Value, ...]
    args: tuple[Value, ...]
    ops: tuple[Op, ...]
    conditions: tuple[Value, ...]
    term: Value
    levels: int
    """How many sums and conditions were joined."""
    padded: bool
    """Whether all conditions were those of factors, which are zero where they do not hold."""


def join_guards(kernel: Kernel) -> Kernel:
    """The kernel with the sums right inside its loops joined, or as it is."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1:
        return kernel
    (parallel,) = parallels
    region = parallel.regions[0]
    candidates = [op for op in region.ops if is_sum(op) or _is_extreme_of_extremes(op)]
    if not any(inner.opcode in ("if", "select") for op in candidates for inner in walk(op.regions[0])):
        return kernel
    forms = analyse(kernel)
    made = {result: op for op in walk(kernel.body) for result in op.results}
    changed: dict[Op, Op] = {}
    padded = False
    for op in candidates:
        flat = flattened(op, made)
        new = _joined(op, flat, made, forms) if flat is not None else None
        if new is not None and flat is not None:
            changed[op] = new
            padded = flat.padded
    if not changed:
        return kernel
    ops = tuple(changed.get(op, op) for op in region.ops)
    nest = replace(parallel, regions=(Block(region.args, ops),))
    attrs = MappingProxyType({**kernel.attrs, "padded": True}) if padded and len(candidates) == 1 else kernel.attrs
    return eliminate_dead(replace(kernel, attrs=attrs, body=Block(kernel.body.args, tuple(nest if op is parallel else op for op in kernel.body.ops))))


def is_sum(op: Op) -> bool:
    """Whether an op adds up one number."""
    return op.opcode == "reduce" and op.attrs["kind"] == "add" and len(op.results) == 1 and bool(op.operands)


def _is_extreme_of_extremes(op: Op) -> bool:
    """Whether an op is the largest or the smallest of several such numbers, as a window with a condition for each axis is."""
    return _is_extreme(op) and any(_is_extreme(inner) for inner in walk(op.regions[0]))


def _is_extreme(op: Op) -> bool:
    return op.opcode == "reduce" and op.attrs["kind"] in ("max", "min") and len(op.results) == 1 and bool(op.operands)


def flattened(sum_: Op, made: Made) -> FlatSum | None:
    """A sum taken apart; None where it is no sum under conditions, or something in it has to stay where it is."""
    extents, args = list(sum_.operands), list(sum_.regions[0].args)
    ops = list(sum_.regions[0].ops[:-1])
    term = sum_.regions[0].yields[0]
    conditions: list[Value] = []
    pending: list[Value] = []
    levels, padding = 1, 0
    while True:
        op = made.get(term)
        padded = _padded_factor(op, ops, sum_, made) if op is not None and op in ops else None
        if op is not None and padded is not None:
            ops.remove(op)
            ops.remove(padded)
            ops += padded.regions[0].ops[:-1] if padded.regions else ()
            pending.append(padded.operands[0])
            value = padded.regions[0].yields[0] if padded.regions else padded.operands[1]
            ops.append(Op(op.opcode, tuple(value if v is padded.result else v for v in op.operands), op.results, op.attrs, (), op.span))
            levels, padding = levels + 2, padding + 1  # a condition moves from the factor to the term
            continue
        if op is None or op not in ops or any(other is not op and (other.regions or has_effects(other)) for other in ops):
            break
        if op.opcode == "if" and len(op.results) == 1 and _is_nothing(op.regions[1].yields[0], sum_, made) and not has_effects(op):
            ops.remove(op)
            ops += op.regions[0].ops[:-1]
            pending.append(op.operands[0])
            term = op.regions[0].yields[0]
        elif op.opcode == "select" and _is_nothing(op.operands[2], sum_, made):
            ops.remove(op)
            pending.append(op.operands[0])
            term = op.operands[1]
        elif _is_alike(op, sum_) and not _made_in(op.operands, ops, args):
            if not all(_speaks_of(c, args, made) for c in pending):
                break
            ops.remove(op)
            ops += op.regions[0].ops[:-1]
            extents += op.operands
            args += op.regions[0].args
            conditions, pending = [*conditions, *pending], []
            term = op.regions[0].yields[0]
        else:
            break
        levels += 1
    conditions += pending
    if not conditions or any(op.regions or has_effects(op) for op in ops):
        return None
    if not all(_is_arithmetic(c, made, set(ops)) for c in conditions):
        return None
    return FlatSum(tuple(extents), tuple(args), tuple(ops), tuple(conditions), term, levels, padding == len(conditions))


def _padded_factor(op: Op, ops: Sequence[Op], sum_: Op, made: Made) -> Op | None:
    """What makes a factor of a term, or zero where a condition does not hold: that says of the condition what a sum of terms under it does."""
    if op.opcode != "mul" or sum_.attrs["kind"] != "add" or not dtype_of(op.result.type).is_float:
        return None
    for factor in op.operands:
        found = made.get(factor)
        if found is None or found not in ops or factor in [v for other in ops if other is not op for v in other.operands]:
            continue
        if found.opcode == "if" and len(found.results) == 1 and _is_nothing(found.regions[1].yields[0], sum_, made) and not has_effects(found):
            return found
        if found.opcode == "select" and _is_nothing(found.operands[2], sum_, made):
            return found
    return None


def _is_alike(op: Op, sum_: Op) -> bool:
    """Whether an op reduces one number in the same way."""
    if op.opcode != "reduce" or len(op.results) != 1 or not op.operands or op.attrs["kind"] != sum_.attrs["kind"]:
        return False
    return dtype_of(op.results[0].type) is dtype_of(sum_.results[0].type)


def _is_nothing(value: Value, sum_: Op, made: Made) -> bool:
    """Whether a value is what terms that do not count are."""
    op = made.get(value)
    (nothing,) = identities(str(sum_.attrs["kind"]), [dtype_of(sum_.results[0].type)])
    return op is not None and op.opcode == "const" and op.attrs["value"] == nothing


def _made_in(values: Sequence[Value], ops: Sequence[Op], args: Sequence[Value]) -> bool:
    """Whether some value changes inside a sum. Numbers that it writes down do not."""
    own = {result for op in ops for result in op.results} | set(args)
    return any(v in own for v in values)


def _closure(value: Value, made: Made) -> set[Value]:
    seen: set[Value] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            op = made.get(current)
            waiting += op.operands if op is not None else ()
    return seen


def _speaks_of(condition: Value, args: Sequence[Value], made: Made) -> bool:
    return not _closure(condition, made).isdisjoint(args)


def _is_arithmetic(condition: Value, made: Made, inside: set[Op]) -> bool:
    """Whether a condition reads no array inside the sum and has no regions there: it can be tested before anything else."""
    return all(op.opcode != "load" and not op.regions for v in _closure(condition, made) if (op := made.get(v)) is not None and op in inside)


def _joined(sum_: Op, flat: FlatSum, made: Made, forms: Forms) -> Op | None:
    """The sum as one, under one condition; None where it is that already."""
    tests = [test for c in flat.conditions for test in guard_tests(c, made, forms)]
    first, inside = _apart(flat)
    late = {result for op in inside for result in op.results}
    if any(test.value in late for test in tests):
        return None  # a condition of numbers that are computed with the term
    loads = [op for op in inside if op.opcode == "load"]
    known = [v for op in loads for v in op.operands[1 : 1 + _rank(op)] if v.type == INDEX and not any(v in o.results for o in inside)]
    if flat.levels <= 2 and _is_written_so(flat, made, known, forms):
        return None
    b = Builder(sum_.span)
    for op in first:
        b.append(op)
    found: list[Value] = []
    seen: set[object] = set()
    for test in tests:
        condition = _written(b, test, known, forms, seen)
        if condition is not None:
            found.append(condition)
    if not found:
        return None
    whole = found[0]
    for condition in found[1:]:
        whole = b.logical_and(whole, condition)

    (nothing,) = identities(str(sum_.attrs["kind"]), [dtype_of(flat.term.type)])

    def then(inner: Builder) -> list[Value]:
        for op in inside:
            inner.append(op)
        return [flat.term]

    def otherwise(inner: Builder) -> list[Value]:
        return [inner.const(nothing, dtype_of(flat.term.type))]

    (term,) = b.if_(whole, then, otherwise)
    b.multi("yield", term)
    return replace(sum_, operands=flat.extents, regions=(Block(flat.args, tuple(b.ops)),))


def _rank(load: Op) -> int:
    type_ = load.operands[0].type
    assert isinstance(type_, Tensor)
    return type_.rank


def _apart(flat: FlatSum) -> tuple[list[Op], list[Op]]:
    """Ops that compute indices and conditions, and those that stay under the condition."""
    first: list[Op] = []
    inside: list[Op] = []
    late: set[Value] = set()
    for op in flat.ops:
        scalar = len(op.results) == 1 and (op.results[0].type == INDEX or dtype_of(op.results[0].type).is_bool)
        if scalar and OPS[op.opcode].is_pure and not any(v in late for v in op.operands):
            first.append(op)
        else:
            inside.append(op)
            late.update(op.results)
    return first, inside


def _written(b: Builder, test: GuardTest, known: Sequence[Value], forms: Forms, seen: set[object]) -> Value | None:
    """The test as a comparison of an index that a load has, where it is one of those; None where it was there before."""
    if test.form is None:
        assert test.value is not None
        key: object = (id(test.value), test.opposite)
        if key in seen:
            return None
        seen.add(key)
        return b.op("not", test.value) if test.opposite else test.value
    if test.divisor:
        key = (frozenset((id(v), f) for v, f in test.form.factors), test.form.constant, test.divisor)
        if key in seen:
            return None
        seen.add(key)
        return b.op("eq", b.op("mod", emit(b, test.form), b.index(test.divisor)), b.index(0))
    gap = lowest(test.form)
    key = (frozenset((id(v), f) for v, f in gap.factors), gap.constant)
    if key in seen:
        return None
    seen.add(key)
    for value in known:
        above, below = gap.minus(forms[value]), gap.plus(forms[value])
        if not above.factors:
            return b.op("ge", value, b.index(-above.constant))
        if not below.factors:
            return b.op("lt", value, b.index(below.constant + 1))
    return b.op("ge", emit(b, gap), b.index(0))


def _is_written_so(flat: FlatSum, made: Made, known: Sequence[Value], forms: Forms) -> bool:
    """Whether a single condition already compares what loads have as windows do."""
    waiting = list(flat.conditions)
    while waiting:
        op = made.get(waiting.pop())
        if op is not None and op.opcode == "and":
            waiting += op.operands
            continue
        if op is not None and op.opcode in ("not", "or"):
            return False
        if op is None or op.opcode not in ("lt", "le", "gt", "ge") or any(v.type != INDEX for v in op.operands):
            continue
        test = guard_tests(op.results[0], made, forms)[0]
        assert test.form is not None
        gap = lowest(test.form)
        bounds = [v for v in known if not gap.minus(forms[v]).factors or not gap.plus(forms[v]).factors]
        if bounds and not (op.opcode in ("ge", "lt") and op.operands[0] in bounds):
            return False
    return True
