"""Sums side by side are added up in one loop. Tile stage -> tile stage.

In: a tile-stage kernel of products with few rows (`lower_gemv`) or of sums across rows, simplified. Out: the same, where loops over the same range that need nothing of each other, and
conditions on the same value, are one. All loads of a step are then on their way together, and what both read is read once.

    %a = for %lo, %hi, %step, %0 (%k, %s) { … load %x … load %v … }        %a, %b = for %lo, %hi, %step, %0, %0 (%k, %s, %t) {
    %b = for %lo, %hi, %step, %0 (%k, %s) { … load %x … load %w … }   ->       … load %x … load %v … load %w … }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops
from tilewright.passes.common.simplify import simplify


def fuse_loops(kernel: Kernel) -> Kernel:
    """The kernel with loops side by side as one."""
    return simplify(replace(kernel, body=_fused(kernel.body)))


def _fused(block: Block) -> Block:
    ops = [replace(op, regions=tuple(_fused(region) for region in op.regions)) if op.regions else op for op in block.ops]
    first = 0
    while first < len(ops):
        partner = _partner(ops, first)
        if partner is None:
            first += 1
            continue
        needed = _needed(ops, first, partner)
        one, other = ops[first], ops[partner]
        between = [op for n, op in enumerate(ops) if first < n < partner]
        before = [op for op in between if id(op) in needed]
        after = [op for op in between if id(op) not in needed]
        ops[first : partner + 1] = [*before, _joined(one, other), *after]
        first += len(before)  # more may join it
    return Block(block.args, tuple(ops))


def _partner(ops: Sequence[Op], first: int) -> int | None:
    """The next op that may run together with one."""
    one = ops[first]
    if one.opcode not in ("for", "if") or _acts(one):
        return None
    depends = set(one.results)
    for place in range(first + 1, len(ops)):
        op = ops[place]
        if _is_like(one, op) and not _uses(op) & depends and not _acts(op):
            return place
        if _uses(op) & depends:
            depends |= set(op.results)
        if _acts(op):
            return None
    return None


def _is_like(one: Op, op: Op) -> bool:
    if one.opcode != op.opcode or one.attrs != op.attrs:
        return False
    count = 3 if one.opcode == "for" else 1
    return one.operands[:count] == op.operands[:count] and bool(one.results) and bool(op.results)


def _acts(op: Op) -> bool:
    """Whether it does more than to compute values."""
    return any(OPS[inner.opcode].effect not in ("pure", "read", "control") for inner in (op, *(i for region in op.regions for i in walk(region))))


def _uses(op: Op) -> set[Value]:
    return {*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)}


def _needed(ops: Sequence[Op], first: int, partner: int) -> set[int]:
    """The ops between two that the second one needs."""
    made = {result: op for op in ops[first + 1 : partner] for result in op.results}
    found: set[int] = set()
    waiting = [*_uses(ops[partner])]
    while waiting:
        op = made.get(waiting.pop())
        if op is not None and id(op) not in found:
            found.add(id(op))
            waiting += _uses(op)
    return found


def _joined(one: Op, other: Op) -> Op:
    results = (*one.results, *other.results)
    count = 1 if one.opcode == "for" else 0
    regions: list[Block] = []
    for mine, its in zip(one.regions, other.regions, strict=True):
        b = Builder(one.span)
        mapping: dict[Value, Value] = dict(zip(its.args[:count], mine.args[:count], strict=True))
        b.ops += mine.ops[:-1]
        clone_ops(b, its.ops[:-1], mapping)
        b.multi("yield", *mine.yields, *(mapping.get(v, v) for v in its.yields))
        regions.append(Block((*mine.args, *its.args[count:]), tuple(b.ops)))
    carried = other.operands[3:] if one.opcode == "for" else ()
    return replace(one, operands=(*one.operands, *carried), results=results, regions=tuple(regions))
