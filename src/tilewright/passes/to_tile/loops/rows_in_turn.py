"""Sums over several axes whose threads keep sums of their own through all of them. Loop stage to tile stage, on a GPU.

In: a reduction over rows and along them, the extents of its axes, and the lowering of the loops around. Out: ops of the tile stage. The threads of a block meet once, behind
all rows, and not once for each. Of short rows several are read at a time (`rows_in_turn` of the schedule): one alone would have few elements on their way.

    %s = reduce %n, %m {kind = "add"} (%i, %k) { … x[i, j, k] … }       two rows at a time, a step of 256 elements
    -> for i in 0 .. n, 2 { for k in 0 .. m, 256 { %sum += x[i, j, k + iota], where k + iota < m; %sum += x[i + 1, j, k + iota], where k + iota < (i + 1 < n ? m : 0) } }
       reduce_tile %sum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import INDEX, dtype_of
from tilewright.passes.common.combine import identities
from tilewright.passes.common.nest_shapes import Condition, join, shape_of
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering
from tilewright.passes.to_tile.loops.one_shape import carrying_loop, combined


class RowsInTurn:
    """One reduction over several axes, the last along the tile's axis `position`, in steps of `tile` elements, `together` rows at a time."""

    def __init__(
        self, lowering: NestLowering, op: Op, extents: Sequence[Value], env: Mapping[Value, Value], masks: Sequence[Condition], position: int, tile: int, together: int
    ) -> None:
        self.lowering, self.op, self.extents, self.masks = lowering, op, extents, list(masks)
        self.env, self.position, self.tile, self.together = dict(env), position, tile, together
        self.kind, self.args = str(op.attrs["kind"]), op.regions[0].args

    def run(self, b: Builder, start: Sequence[Value]) -> Sequence[Value]:
        """What all rows and `start` come to."""
        dtypes = [dtype_of(v.type) for v in start]
        nothing = [b.const(v, d) for v, d in zip(identities(self.kind, dtypes), dtypes, strict=True)]
        trial = self._terms(Builder(b.span), self.env | dict.fromkeys(self.args[:-1], Value(INDEX)), Value(INDEX), self.extents[-1], nothing)
        shape = join(*(shape_of(v) for v in trial))
        lanes = [self.lowering.widen(b, v, shape) for v in nothing]
        sums = self._along(b, 0, self.env, lanes)
        return combined(b, self.kind, start, self.lowering.folded(b, self.kind, sums))

    def _along(self, b: Builder, axis: int, env: Mapping[Value, Value], sums: Sequence[Value]) -> Sequence[Value]:
        """The sums with all that lies along an axis and those behind it."""
        extent, zero = self.extents[axis], b.index(0)
        if axis < len(self.extents) - 2:
            return self._loop(b, zero, extent, b.index(1), sums, lambda inner, i, c: self._along(inner, axis + 1, {**env, self.args[axis]: i}, c))
        return self._loop(b, zero, extent, b.index(self.together), sums, lambda inner, i, c: self._rows(inner, env, self.args[axis], i, c))

    def _rows(self, b: Builder, env: Mapping[Value, Value], index: Value, first: Value, sums: Sequence[Value]) -> Sequence[Value]:
        """The sums with rows from `first` on: the same step of each after another, so that their loads are on their way together. Rows that are not there have no elements."""
        extent = self.extents[-1]
        rows = [(first, extent)]
        for number in range(1, self.together):
            row = b.add(first, b.index(number))
            rows.append((row, b.mul(extent, b.cast(b.op("lt", row, self.extents[-2]), dtype_of(extent.type)))))

        def step(inner: Builder, k: Value, carried: Sequence[Value]) -> Sequence[Value]:
            for row, end in rows:
                carried = self._terms(inner, {**env, index: row}, k, end, carried)
            return carried

        return self._loop(b, b.index(0), extent, b.index(self.tile), sums, step)  # one step, as a rule

    def _terms(self, b: Builder, env: Mapping[Value, Value], first: Value, end: Value, sums: Sequence[Value]) -> Sequence[Value]:
        """The sums with the terms of a row from `first` on, before `end`."""
        index = self.lowering.index_tile(b, first, self.position, self.tile)
        edge = b.op("lt", index, b.like(end, index))
        values = self.lowering.ops(b, self.op.regions[0].ops, {**env, self.args[-1]: index}, [*self.masks, Condition(edge, edge=True)])
        shape = join(*(shape_of(v) for v in values), shape_of(index))
        inside, nothing = self.lowering.widen(b, edge, shape), identities(self.kind, [dtype_of(v.type) for v in values])
        terms = [b.select(inside, wide, b.splat(n, wide)) for wide, n in zip([self.lowering.widen(b, v, shape) for v in values], nothing, strict=True)]
        return combined(b, self.kind, sums, terms)

    def _loop(
        self, b: Builder, low: Value, high: Value, step: Value, sums: Sequence[Value], body: Callable[[Builder, Value, Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:
        return carrying_loop(b, low, high, step, sums, lambda inner, index, *carried: body(inner, index, carried), self.op)
