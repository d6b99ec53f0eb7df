"""Loops that look like a matrix product, a convolution or attention, whether or not they were recognised as one.

In: a loop-stage kernel, looked at (`NestFacts`). Out: a `Lookalike`, or None. The look is lenient: somewhere two factors made of array
elements are multiplied, one varies along some results and the other along others, both vary along an index that is summed over, and
none of these is short.
"""

from __future__ import annotations

from math import prod

from tilewright.analysis.nest_facts import UNKNOWN, NestFacts
from tilewright.base.record import record
from tilewright.base.source import Span
from tilewright.ir.nodes import Op, Value, walk

THIN = 16
"""A side or a sum shorter than this is left to plain loops."""
SMALL = 1 << 15
"""Products below which plain loops serve."""


@record
class Lookalike:
    """What the loops look like: `product`, `convolution` or `attention`."""

    kind: str
    span: Span
    sums: str
    """The indices summed over, by name."""


def lookalike(facts: NestFacts) -> Lookalike | None:
    """What a kernel looks like; None for most."""
    weighs = _weighs_by_exponentials(facts)
    found = next((look for op in walk(facts.kernel.body) if (look := _product(facts, op, weighs)) is not None), None)
    return Lookalike("attention", found.span, found.sums) if found is not None and weighs else found


def _product(facts: NestFacts, op: Op, inside_sums: bool) -> Lookalike | None:
    """The product that an op is the multiplication of; `inside_sums`: its results may be added up again, as scores are."""
    if op.opcode not in ("mul", "fma"):
        return None
    around = facts.inside[id(op)]
    loops = [loop for loop in around if loop.opcode in ("parallel", "reduce", "for")]
    summed = {i for loop in loops if _sums(loop) for i in facts.indices(loop)}
    if not summed:
        return None
    first, second = (facts.depends(v) for v in op.operands[:2])
    shared = first & second
    sums = shared & summed
    rows, columns = first - shared, second - shared
    indices = {i for loop in loops for i in facts.indices(loop)}
    own = {i for loop in {facts.owner[s] for s in sums} for i in facts.indices(loop)} if inside_sums else summed
    if not sums or not rows or not columns or not (rows | columns) <= indices - own:
        return None
    if not all(facts.reads(v) for v in op.operands[:2]):
        return None
    sides = [_length(facts, side) for side in (rows, columns, sums)]
    if min(sides) < THIN or min(prod(sides), UNKNOWN) < SMALL:
        return None
    slides = any(_slides(facts, op_, sums, rows | columns) for op_ in _loads(facts, op.operands[:2]))
    outer = next((loop for loop in loops if _sums(loop)), op)
    names = ", ".join(sorted(f"'{v.name.partition('.')[0]}'" for v in sums if v.name))
    return Lookalike("convolution" if slides else "product", outer.span if outer.span.line else op.span, names)


def _sums(loop: Op) -> bool:
    """Whether a loop adds up: a sum, or a loop in order that may be one."""
    return (loop.opcode == "reduce" and loop.attrs["kind"] == "add") or (loop.opcode == "for" and not loop.attrs.get("independent"))


def _length(facts: NestFacts, indices: frozenset[Value]) -> int:
    total = 1
    for index in indices:
        loop = facts.owner[index]
        if loop.opcode == "for":
            total *= facts.turns(loop)
        else:
            total *= facts.length(loop.operands[loop.regions[0].args.index(index)])
    return min(total, UNKNOWN)


def _loads(facts: NestFacts, values: tuple[Value, ...]) -> list[Op]:
    found: list[Op] = []
    waiting, seen = list(values), set()
    while waiting:
        op = facts.made.get(waiting.pop())
        if op is None or id(op) in seen:
            continue
        seen.add(id(op))
        if op.opcode == "load":
            found.append(op)
        waiting += [*op.operands, *(v for region in op.regions for v in region.yields)]
    return found


def _slides(facts: NestFacts, load: Op, sums: frozenset[Value], results: frozenset[Value]) -> bool:
    """Whether one subscript walks a window: it depends on a summed index and on one of a result."""
    return any(facts.depends(v) & sums and facts.depends(v) & results for v in load.operands[1:])


def _weighs_by_exponentials(facts: NestFacts) -> bool:
    """Whether a sum adds up elements of an array weighted by exponentials of what is itself a sum."""
    for op in walk(facts.kernel.body):
        if op.opcode not in ("mul", "fma"):
            continue
        for weight, other in (op.operands[:2], op.operands[1::-1]):
            if _has_exponential_of_sum(facts, weight) and facts.reads(other) and facts.depends(weight) & facts.depends(other):
                return True
    return False


def _has_exponential_of_sum(facts: NestFacts, value: Value) -> bool:
    waiting, seen = [(value, False)], set()
    while waiting:
        current, below = waiting.pop()
        op = facts.made.get(current)
        if op is None or (id(op), below) in seen:
            continue
        seen.add((id(op), below))
        if below and op.opcode in ("reduce", "for"):
            return True
        deeper = below or op.opcode in ("exp", "exp2")
        waiting += [(v, deeper) for v in (*op.operands, *(y for region in op.regions for y in region.yields if op.opcode == "if"))]
    return False
