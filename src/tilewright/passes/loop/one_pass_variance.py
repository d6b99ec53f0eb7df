"""Pass: a sum along a row, and then the squares of what the row is away from something made of it, are found in one pass over
memory.

    s = sum_j x(i, j);  m = s / n;  v = sum_j (x(i, j) - m)^2
    -> mean, v' = for each stretch of the row, which is in the nearest cache when it is walked again {
           t = sum x;  u = t / length;  q = sum (x - u)^2
           v' += q + (u - mean)^2 * before * length / (before + length);  mean += (u - mean) * length / (before + length) }
       s = mean * n;  m = s / n;  v = v' + n (m - mean)^2

In: a loop-stage kernel whose rows do not stay in registers. Out: the same kernel with such pairs as above for rows that are
long; shorter ones keep their two passes. It is Chan's way to combine spreads: nothing is ever squared that is not near its
own stretch's mean, and no sum grows long, so an offset of all numbers costs no digits. m may be anything: the last formula
holds for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.loop_nest import is_sweep, nest_of
from tilewright.analysis.recomputed import Keys
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, dtype_of

CPU_STRETCH, GPU_STRETCH = 4096, 8192
"""Elements walked twice at a time: 16 KiB of four bytes each, or what the threads of a block load together."""
SHORT = 8192
"""Rows up to this long stay in the nearest cache, and their sums are short."""


@record
class _SumPair:
    """A sum and the squares of what its terms are away from a value that depends on it."""

    total: Op
    squares: Op
    centre: Value


def one_pass_variance(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with its pairs joined for rows that are long."""
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(parallels) != 1 or not any(is_sweep(op) for op in parallels[0].regions[0].ops):
        return kernel
    region = parallels[0].regions[0]
    pairs = _pairs(kernel, region)
    nest = nest_of(kernel) if pairs else None
    if nest is None or not nest.reduces_along:
        return kernel
    if (nest.reduce_extent.constant or SHORT + 1) <= SHORT:
        return kernel
    joined = replace(parallels[0], regions=(_joined(region, pairs, GPU_STRETCH if target.simt else CPU_STRETCH),))
    ops = tuple(joined if op is parallels[0] else op for op in kernel.body.ops)
    return eliminate_dead(replace(kernel, body=replace(kernel.body, ops=ops)))


def _pairs(kernel: Kernel, region: Block) -> list[_SumPair]:
    forms = analyse(kernel)
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    sums = [op for op in region.ops if op.opcode == "reduce" and op.attrs["kind"] == "add" and len(op.operands) == 1]
    found: list[_SumPair] = []
    for squares in sums:
        centre = _centre(squares)
        if centre is None:
            continue
        term, middle = centre
        for total in sums[: sums.index(squares)]:
            if _same_walk(total, term, squares, written, forms) and _depends(region, middle, total.results[0]):
                found.append(_SumPair(total, squares, middle))
                break
    return [pair for pair in found if sum(pair.total is other.total for other in found) == 1]


def _centre(squares: Op) -> tuple[Value, Value] | None:
    """x and m where the terms of the sum are (x - m)^2, m being from outside."""
    made = {result: op for op in squares.regions[0].ops for result in op.results}
    product = made.get(squares.regions[0].yields[0])
    if product is None or product.opcode != "mul" or product.operands[0] is not product.operands[1]:
        return None
    away = made.get(product.operands[0])
    if away is None or away.opcode != "sub" or not dtype_of(product.results[0].type).is_float:
        return None
    first, second = away.operands
    if first in made and second not in made and second not in squares.regions[0].args:
        return first, second
    return (second, first) if second in made and first not in made and first not in squares.regions[0].args else None


def _same_walk(total: Op, term: Value, squares: Op, written: set[Value], forms: Forms) -> bool:
    """Whether the first sum is over the same numbers, and no step of it has an effect."""
    extents = [forms.get(op.operands[0]) for op in (total, squares)]
    if extents[0] is None or extents[0] != extents[1] or total.results[0].type != squares.results[0].type:
        return False
    if any(op.regions or op.opcode in ("store", "atomic", "accumulate") for op in (*total.regions[0].ops, *squares.regions[0].ops)):
        return False
    loaded = Keys(total.regions[0].args[0], total, written).of(total.regions[0].yields[0])
    return loaded is not None and _reads(total) and loaded == Keys(squares.regions[0].args[0], squares, written).of(term)


def _reads(total: Op) -> bool:
    return any(op.opcode == "load" and isinstance(op.operands[0].type, Tensor) for op in total.regions[0].ops)


def _depends(region: Block, value: Value, on: Value) -> bool:
    made = {result: op for op in region.ops for result in op.results}
    pending, seen = [value], set[Value]()
    while pending:
        current = pending.pop()
        if current is on:
            return True
        if current in made and current not in seen:
            seen.add(current)
            pending += made[current].operands
            pending += [v for inner in made[current].regions for op in walk(inner) for v in op.operands]
    return False


def _joined(region: Block, pairs: Sequence[_SumPair], stretch: int) -> Block:
    b = Builder()
    mapping: dict[Value, Value] = {}
    found: dict[Op, tuple[Value, Value]] = {}

    def plainly(inner: Builder, op: Op) -> Value:
        clone_ops(inner, [op], own := dict(mapping))
        return own[op.results[0]]

    for op in region.ops:
        with b.at(op.span):
            first = next((pair for pair in pairs if pair.total is op), None)
            second = next((pair for pair in pairs if pair.squares is op), None)
            if first is None and second is None:
                clone_ops(b, [op], mapping)
                continue
            extent = mapping.get(op.operands[0], op.operands[0])
            long = b.op("gt", extent, b.index(SHORT))
            if first is not None:
                zero = b.const(0.0, dtype_of(op.results[0].type))
                total, mean, spread = b.if_(
                    long,
                    lambda inner, op=op, extent=extent: _stretches(inner, op, extent, mapping, stretch),
                    lambda inner, op=op, zero=zero: [plainly(inner, op), zero, zero],
                )
                mapping[op.results[0]], found[first.squares] = total, (mean, spread)
            elif second is not None:
                centre = mapping.get(second.centre, second.centre)
                (mapping[op.results[0]],) = b.if_(
                    long,
                    lambda inner, op=op, extent=extent, centre=centre: [_about(inner, extent, centre, *found[op])],
                    lambda inner, op=op: [plainly(inner, op)],
                )
    return Block(region.args, tuple(b.ops))


def _stretches(b: Builder, total: Op, extent: Value, outer: Mapping[Value, Value], stretch: int) -> list[Value]:
    """The sum of a row, its mean, and the squares of what it is away from that. The mean has more digits than a long sum; where it is not
    finite, the sum says why."""
    dtype = dtype_of(total.results[0].type)
    zero = b.const(0.0, dtype)

    def terms(inner: Builder, start: Value, count: Value, centre: Value | None) -> Value:
        def term(deep: Builder, k: Value) -> list[Value]:
            own = {**outer, total.regions[0].args[0]: deep.add(start, k)}
            clone_ops(deep, total.regions[0].ops[:-1], own)
            value = own[total.regions[0].yields[0]]
            if centre is None:
                return [value]
            away = deep.sub(value, centre)
            return [deep.mul(away, away)]

        return inner.reduce("add", [count], term, names=["k"])[0]

    def step(inner: Builder, start: Value, *carried: Value) -> list[Value]:
        total_before, mean, spread = carried
        count = inner.op("min", inner.index(stretch), inner.sub(extent, start))
        length, before = inner.cast(count, dtype), inner.cast(start, dtype)
        own = terms(inner, start, count, None)
        centre = inner.op("div", own, length)
        squares = terms(inner, start, count, centre)
        part = inner.op("div", length, inner.add(before, length))
        apart = inner.sub(centre, mean)
        moved = inner.op("fma", inner.mul(apart, apart), inner.mul(before, part), squares)
        return [inner.add(total_before, own), inner.op("fma", apart, part, mean), inner.add(spread, moved)]

    summed, mean, spread = b.for_(b.index(0), extent, b.index(stretch), [zero, zero, zero], step, name="start")
    finite = b.op("lt", b.op("abs", mean), b.const(float("inf"), dtype))
    return [b.select(finite, b.mul(mean, b.cast(extent, dtype)), summed), mean, spread]


def _about(b: Builder, extent: Value, centre: Value, mean: Value, spread: Value) -> Value:
    """The squares about the text's own centre."""
    apart = b.sub(centre, mean)
    return b.op("fma", b.mul(apart, apart), b.cast(extent, dtype_of(spread.type)), spread)
