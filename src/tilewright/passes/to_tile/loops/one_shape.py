"""Branches, loops and terms whose values differ in shape, brought to one.

In: tile-stage values, scalars or tiles, and what is done with them. Out: values of the shape that holds all of them.

    %s = 0; for %k { %s = add(%s, load %x, %i…, %k) }    -> what is carried is a tile from the start
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value
from tilewright.ir.types import INDEX
from tilewright.passes.common.combine import combine
from tilewright.passes.common.nest_shapes import Condition, join, shape_of, widen


def combined(b: Builder, kind: str, left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
    """What two sets of terms come to."""
    shape = join(*(shape_of(v) for v in (*left, *right)))
    return combine(b, kind, [widen(b, v, shape) for v in left], [widen(b, v, shape) for v in right])


def branches(
    b: Builder, cond: Value, then: Callable[[Builder], tuple[Value, ...]], otherwise: Callable[[Builder], tuple[Value, ...]]
) -> Sequence[Value]:
    """An `if` on a number; what its branches give has the same shapes."""
    builders = [Builder(b.span), Builder(b.span)]
    yields = [side(inner) for inner, side in zip(builders, (then, otherwise), strict=True)]
    shapes = [join(shape_of(x), shape_of(y)) for x, y in zip(*yields, strict=True)]
    for inner, values in zip(builders, yields, strict=True):
        inner.multi("yield", *(widen(inner, v, s) for v, s in zip(values, shapes, strict=True)))
    types = [v.type for v in builders[0].ops[-1].operands]
    blocks = tuple(Block((), tuple(inner.ops)) for inner in builders)
    return b.append(Op("if", (cond,), tuple(Value(t) for t in types), regions=blocks, span=b.span))


def carrying_loop(
    b: Builder, low: Value, high: Value, step: Value, init: Sequence[Value], body: Callable[..., Sequence[Value]],
    op: Op,
) -> tuple[Value, ...]:  # fmt: skip
    """A serial loop whose carried values may grow from scalars to tiles: widen them until the shapes hold still."""
    attrs = {k: v for k, v in op.attrs.items() if k in ("unroll", "stages")}
    current = list(init)
    while True:
        shapes = [shape_of(v) for v in current]
        trial = Builder(b.span)
        values = body(trial, Value(INDEX), *(Value(v.type) for v in current))
        grown = [join(s, shape_of(v)) for s, v in zip(shapes, values, strict=True)]
        if grown == shapes:
            break
        current = [widen(b, v, s) for v, s in zip(current, grown, strict=True)]

    def widened(inner: Builder, index: Value, *carried: Value) -> list[Value]:
        values = body(inner, index, *carried)
        return [widen(inner, v, shape_of(c)) for v, c in zip(values, carried, strict=True)]

    return b.for_(low, high, step, current, widened, name="k", **attrs)


def within_edges(b: Builder, value: Value, otherwise: Value, masks: list[Condition]) -> Value:
    """A bound that differs inside the tile; elements beyond the edge have none of their own."""
    for mask in masks:
        if mask.edge:
            shape = join(shape_of(mask.value), shape_of(value), shape_of(otherwise))
            value = b.select(*(widen(b, v, shape) for v in (mask.value, value, otherwise)))
    return value
