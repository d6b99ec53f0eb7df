"""CPU: tests of indices that stand before a loop instead of in it.

In: accesses with `watch`. Out: `within` ops before the loop, and which axes of which accesses they cover.

    for %k in 0..n { load %x, %i, %k {watch = (0, 1)} }  ->  within %x, %i, %i; within %x, 0, n - 1; for %k in 0..n { load %x, %i, %k }
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.affine import Affine
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value, walk, watched_axes
from tilewright.ir.ops import OPS
from tilewright.passes.common.nest_shapes import shape_of
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering


def test_reduction(lowering: NestLowering, b: Builder, op: Op, extent: Value, env: Mapping[Value, Value]) -> None:
    """Indices that walk with a reduction are tested before it, the first and the last."""
    region = op.regions[0]
    inner = {v for o in walk(region) for v in o.results}
    found: list[tuple[Op, int, Affine]] = []
    for access in region.ops:
        for axis in watched_axes(access):
            form = lowering.forms.get(access.operands[1 + axis])
            others = [v for v in form.values if v is not region.args[0]] if form is not None else []
            known = all(v in env and v not in inner and not shape_of(env[v]) for v in others)
            if form is not None and known and form.factor(region.args[0]) == ONE:
                found.append((access, axis, form))

    def tests(at: Builder) -> list[Value]:
        for access, axis, form in found:
            first = at.index(form.constant)
            for value, factor in form.factors:
                if value is not region.args[0]:
                    first = at.add(first, env[value] if factor == ONE else at.mul(env[value], at.index(factor)))
            last = at.add(first, at.sub(extent, at.index(1)))
            with at.at(access.span):
                at.multi("within", access.operands[0], first, last, axis=axis, access="load" if access.opcode == "load" else "store")
        return []

    if found:
        b.if_(b.op("gt", extent, b.index(0)), tests, lambda at: [])
        lowering.tested |= {(id(access), axis) for access, axis, _ in found}


def test_rows(lowering: NestLowering, b: Builder, env: dict[Value, Value], moving: Value) -> None:
    """Indices that stay the same along a row of a block are tested before it. A block has an element at least."""
    made = {result: op for op in lowering.region.ops for result in op.results}

    def still(value: Value) -> bool:
        op = made.get(value)
        if op is None:
            return value is not moving
        plain = not op.regions and (OPS[op.opcode].is_pure or (op.opcode == "load" and not watched_axes(op)))
        return plain and all(map(still, op.operands))

    def lowered(value: Value) -> Value:
        op = made.get(value)
        if op is not None and value not in env:
            for operand in op.operands:
                lowered(operand)
            env.update(zip(op.results, lowering.lower_op(b, op, env, []), strict=True))
        return env[value]

    for access in lowering.region.ops:
        for axis in watched_axes(access):
            index = access.operands[1 + axis]
            if still(index) and not shape_of(place := lowered(index)):
                with b.at(access.span):
                    b.multi("within", access.operands[0], place, place, axis=axis, access="load" if access.opcode == "load" else "store")
                lowering.tested.add((id(access), axis))
