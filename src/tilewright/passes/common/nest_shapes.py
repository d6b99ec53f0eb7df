"""Shapes of values while loops become tiles, and the conditions code runs under.

In: values of the tile stage. Out: the shape of each, () for a scalar, and the shape that holds several.
"""

from __future__ import annotations

from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tile

Shape = tuple[int, ...]


@record
class Condition:
    """A condition under which code runs. `edge` conditions guard an axis: accesses that do not use the axis ignore them."""

    value: Value
    edge: bool


def shape_of(value: Value) -> Shape:
    return value.type.shape if isinstance(value.type, Tile) else ()


def join(*shapes: Shape) -> Shape:
    """The shape that holds all of them; () is a scalar."""
    result: Shape = ()
    for shape in shapes:
        if shape:
            result = tuple(max(a, b) for a, b in zip(result, shape, strict=True)) if result else shape
    return result


def widen(b: Builder, value: Value, shape: Shape) -> Value:
    """The value in that shape; as it is where the shape is a scalar's."""
    return value if shape_of(value) == shape or not shape else b.op("broadcast", value, shape=shape)


def item(b: Builder, value: Value) -> Value:
    """The number that a tile of one element holds."""
    return b.op("item", value) if isinstance(value.type, Tile) else value
