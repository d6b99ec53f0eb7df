"""A `while` of the loop stage over tiles: elements leave it one by one, and it ends when the last one has.

In: the op, and the lowering of the loops around it. Out: a `while` of the tile stage. Where the condition is the same for a
whole block it stays as it is; else the tile carries which elements go on, and what the body changes is kept for the others:

    while %v (%c) { yield %c > 1, %c } { yield %c / 2 }
    -> %on = mask & (%v > 1)
       while %on, %v (%o, %c) { yield any(%o), %o, %c } { %n = select %o, %c / 2, %c; yield %o & (%n > 1), %n }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.base.dtypes import i32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.passes.common.nest_shapes import Condition, Shape, join, shape_of, widen
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering


class WhileLowering:
    """One loop. `tests` and `changes` are its two regions."""

    def __init__(self, lowering: NestLowering, op: Op, env: Mapping[Value, Value], masks: Sequence[Condition]) -> None:
        self.lowering, self.op, self.env, self.masks = lowering, op, env, list(masks)
        self.tests, self.changes = op.regions

    def run(self, b: Builder, start: Sequence[Value]) -> Sequence[Value]:
        current, varying = self._settled(b, list(start))
        if not varying:
            return self._uniform(b, current)
        on = self._inside(b, varying)
        first = self._holds(b, current, on)
        on = first if on is None else b.logical_and(on, first)

        def test(inner: Builder, on: Value, *carried: Value) -> list[Value]:
            return [self._any(inner, on), on, *carried]

        def body(inner: Builder, on: Value, *carried: Value) -> list[Value]:
            kept = self._kept(inner, carried, on)
            return [inner.logical_and(on, self._holds(inner, kept, on)), *kept]

        return self._append(b, [on, *current], test, body)[1:]

    def _append(self, b: Builder, start: Sequence[Value], test: object, body: object) -> tuple[Value, ...]:
        types, names = [v.type for v in start], [v.name for v in start]
        regions = b.region(types, names, test), b.region(types, names, body)  # type: ignore[arg-type]
        results = tuple(Value(t, n) for t, n in zip(types, names, strict=True))
        return b.append(Op("while", tuple(start), results, regions=regions, span=self.op.span))

    def _uniform(self, b: Builder, start: Sequence[Value]) -> tuple[Value, ...]:
        def test(inner: Builder, *carried: Value) -> list[Value]:
            return [self._condition(inner, carried, self.masks), *carried]

        def body(inner: Builder, *carried: Value) -> list[Value]:
            values = self._values(inner, carried, self.masks)
            return [widen(inner, v, shape_of(c)) for v, c in zip(values, carried, strict=True)]

        return self._append(b, start, test, body)

    def _settled(self, b: Builder, current: list[Value]) -> tuple[list[Value], Shape]:
        """What is carried, widened until its shapes hold still, and the shape of the condition: () where a block has one."""
        while True:
            trial = Builder(b.span)
            carried = [Value(v.type, v.name) for v in current]
            condition = shape_of(self._condition(trial, carried, self.masks))
            varying = join(condition, *(shape_of(m.value) for m in self.masks)) if condition else ()
            values = self._values(trial, carried, self.masks)
            grown = [join(varying, shape_of(c), shape_of(v)) for c, v in zip(current, values, strict=True)]
            if grown == [shape_of(v) for v in current]:
                return current, varying
            current = [widen(b, v, s) for v, s in zip(current, grown, strict=True)]

    def _condition(self, b: Builder, carried: Sequence[Value], masks: list[Condition]) -> Value:
        local = {**self.env, **dict(zip(self.tests.args, carried, strict=True))}
        return self.lowering.ops(b, self.tests.ops, local, masks)[0]

    def _values(self, b: Builder, carried: Sequence[Value], masks: list[Condition]) -> Sequence[Value]:
        local = {**self.env, **dict(zip(self.changes.args, carried, strict=True))}
        return self.lowering.ops(b, self.changes.ops, local, masks)

    def _inside(self, b: Builder, shape: Shape) -> Value | None:
        """Which elements there are at all: those outside would never leave the loop, perhaps."""
        total: Value | None = None
        for mask in self.masks:
            wide = widen(b, mask.value, shape)
            total = wide if total is None else b.logical_and(total, wide)
        return total

    def _masks(self, on: Value | None) -> list[Condition]:
        return self.masks if on is None else [*self.masks, Condition(on, edge=False)]

    def _holds(self, b: Builder, carried: Sequence[Value], on: Value | None) -> Value:
        found = self._condition(b, carried, self._masks(on))
        return found if on is None else widen(b, found, shape_of(on))

    def _kept(self, b: Builder, carried: Sequence[Value], on: Value) -> list[Value]:
        kept = []
        for new, old in zip(self._values(b, carried, self._masks(on)), carried, strict=True):
            shape = shape_of(old)
            kept.append(b.select(*(widen(b, v, shape) for v in (on, new, old))))
        return kept

    def _any(self, b: Builder, on: Value) -> Value:
        """Whether an element of the tile goes on: the same answer for all threads of a block."""
        found = b.cast(on, i32)
        for axis in range(len(shape_of(on))):
            found = b.op("reduce_tile", found, kind="max", axis=axis)
        return b.op("gt", b.op("item", found), b.const(0, i32))
