"""The steps of an ordered loop as control flow of a thread-stage kernel. In: the loop, and what builds one step; out: `for`, `while` and `if`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.program import LoopTurn, OrderedLoop
from tilewright.ir.types import dtype_of
from tilewright.passes.common.size_values import size_value


def each_step(
    b: Builder, loop: OrderedLoop, indices: Mapping[str, Value], cell: Value | None, body: Callable[[Builder, Value], Sequence[Value]]
) -> None:
    """The steps of an ordered loop: `body` builds one of them, given its number."""
    if loop.count is not None:
        b.for_(b.index(0), size_value(b, loop.count, indices), b.index(1), [], body, name=loop.name)
        return
    assert cell is not None
    if not dtype_of(cell.type).is_bool:
        b.for_(b.index(0), b.op("load", cell), b.index(1), [], body, name=loop.name)
        return

    def test(inner: Builder, step: Value) -> Sequence[Value]:
        return [inner.op("load", cell), step]

    def following(inner: Builder, step: Value) -> Sequence[Value]:
        body(inner, step)
        return [inner.add(step, inner.index(1))]

    first = b.index(0)
    regions = b.region([first.type], [loop.name], test), b.region([first.type], [loop.name], following)
    b.append(Op("while", (first,), (Value(first.type, loop.name),), regions=regions, span=b.span))


def in_turn(b: Builder, turn: LoopTurn, step: Value, body: Callable[[Builder], Sequence[Value]]) -> None:
    """What `body` builds, in the steps of a turn."""
    if turn.period == 1:
        body(b)
        return
    mine = b.op("eq", b.op("mod", step, b.index(turn.period)), b.index(turn.turn))
    b.if_(mine, body, lambda inner: [])
