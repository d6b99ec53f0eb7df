"""Sums over several axes whose threads keep sums of their own through all of them. Loop stage to tile stage, on a GPU.

In: a reduction over rows and along them, the extents of its axes, and the lowering of the loops around. Out: ops of the tile stage. The threads of a block meet once, behind
all rows, and not once for each. Of short rows several are read at a time (`rows_in_turn` of the schedule): one alone would have few elements on their way.

    %s = reduce %n, %m {kind = "add"} (%i, %k) { … x[i, j, k] … }       two rows at a time, a step of 256 elements
    -> for i in 0 .. n, 2 { for k in 0 .. m, 256 { %sum += x[i, j, k + iota]; %sum += x[i + 1, j, k + iota], where k + iota < m : tile<f32, [256]> } }
       the last row, where n is odd; reduce_tile %sum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import INDEX, dtype_of
from tilewright.passes.common.combine import identities
from tilewright.passes.common.nest_shapes import Condition, Shape, join, shape_of


class TileLowering(Protocol):
    """Lowers what is done at a tile of indices."""

    rank: int

    def ops(self, b: Builder, ops: Sequence[Op], env: dict[Value, Value], masks: list[Condition]) -> tuple[Value, ...]:
        """The ops in order; returns what they yield."""

    def widen(self, b: Builder, value: Value, shape: Shape) -> Value:
        """The value as a tile of that shape."""

    def combined(self, b: Builder, kind: str, left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
        """What two sets of terms come to."""

    def carried(self, b: Builder, low: Value, high: Value, step: Value, init: Sequence[Value], body: Callable[..., Sequence[Value]], op: Op) -> tuple[Value, ...]:
        """A serial loop."""

    def index_tile(self, b: Builder, start: Value, position: int, extent: int) -> Value:
        """`start + 0, 1, 2…` along a tile axis."""

    def folded(self, b: Builder, kind: str, lanes: Sequence[Value]) -> Sequence[Value]:
        """What the elements of a tile come to along the reduction's axis."""


class RowsInTurn:
    """One reduction over several axes, the last along the tile's axis `position`, in steps of `tile` elements, `together` rows at a time."""

    def __init__(
        self, lowering: TileLowering, op: Op, extents: Sequence[Value], env: Mapping[Value, Value], masks: Sequence[Condition], position: int, tile: int, together: int
    ) -> None:
        self.lowering, self.op, self.extents, self.masks = lowering, op, extents, list(masks)
        self.env, self.position, self.tile, self.together = dict(env), position, tile, together
        self.kind, self.args = str(op.attrs["kind"]), op.regions[0].args

    def run(self, b: Builder, start: Sequence[Value]) -> Sequence[Value]:
        """What all rows and `start` come to."""
        dtypes = [dtype_of(v.type) for v in start]
        nothing = [b.const(v, d) for v, d in zip(identities(self.kind, dtypes), dtypes, strict=True)]
        trial = self._terms(Builder(b.span), self.env | dict.fromkeys(self.args[:-1], Value(INDEX)), Value(INDEX), True, nothing)
        shape = join(*(shape_of(v) for v in trial))
        lanes = [self.lowering.widen(b, v, shape) for v in nothing]
        sums = self._along(b, 0, self.env, lanes)
        return self.lowering.combined(b, self.kind, start, self.lowering.folded(b, self.kind, sums))

    def _along(self, b: Builder, axis: int, env: Mapping[Value, Value], sums: Sequence[Value]) -> Sequence[Value]:
        """The sums with all that lies along an axis and those behind it."""
        extent, zero, one = self.extents[axis], b.index(0), b.index(1)
        if axis < len(self.extents) - 2:
            return self._loop(b, zero, extent, one, sums, lambda inner, i, c: self._along(inner, axis + 1, {**env, self.args[axis]: i}, c))

        def rows(inner: Builder, first: Value, count: int, carried: Sequence[Value]) -> Sequence[Value]:
            return self._rows(inner, [{**env, self.args[axis]: inner.add(first, inner.index(r)) if r else first} for r in range(count)], carried)

        if self.together == 1:
            return self._loop(b, zero, extent, one, sums, lambda inner, i, c: rows(inner, i, 1, c))
        step = b.index(self.together)
        full = b.mul(b.op("floordiv", extent, step), step)
        sums = self._loop(b, zero, full, step, sums, lambda inner, i, c: rows(inner, i, self.together, c))
        return self._loop(b, full, extent, one, sums, lambda inner, i, c: rows(inner, i, 1, c))

    def _rows(self, b: Builder, rows: Sequence[Mapping[Value, Value]], sums: Sequence[Value]) -> Sequence[Value]:
        """The sums with some rows: the same step of each after another, so that their loads are on their way together."""
        extent, zero, tile = self.extents[-1], b.index(0), b.index(self.tile)

        def step(inner: Builder, first: Value, masked: bool, carried: Sequence[Value]) -> Sequence[Value]:
            for env in rows:
                carried = self._terms(inner, env, first, masked, carried)
            return carried

        if self.together > 1:
            return self._loop(b, zero, extent, tile, sums, lambda inner, k, c: step(inner, k, True, c))  # one step, as a rule
        whole = b.mul(b.op("floordiv", extent, tile), tile)
        sums = self._loop(b, zero, whole, tile, sums, lambda inner, k, c: step(inner, k, False, c))
        return b.if_(b.op("lt", whole, extent), lambda inner: list(step(inner, whole, True, sums)), lambda inner: list(sums))

    def _terms(self, b: Builder, env: Mapping[Value, Value], first: Value, masked: bool, sums: Sequence[Value]) -> Sequence[Value]:
        """The sums with the terms of a row from `first` on."""
        index = self.lowering.index_tile(b, first, self.position, self.tile)
        edge = [Condition(b.op("lt", index, b.like(self.extents[-1], index)), edge=True)] if masked else []
        values = self.lowering.ops(b, self.op.regions[0].ops, {**env, self.args[-1]: index}, [*self.masks, *edge])
        shape = join(*(shape_of(v) for v in values), shape_of(index))
        terms = [self.lowering.widen(b, v, shape) for v in values]
        if masked:
            inside = self.lowering.widen(b, edge[0].value, shape)
            nothing = identities(self.kind, [dtype_of(v.type) for v in terms])
            terms = [b.select(inside, v, b.splat(n, v)) for v, n in zip(terms, nothing, strict=True)]
        return self.lowering.combined(b, self.kind, sums, terms)

    def _loop(
        self, b: Builder, low: Value, high: Value, step: Value, sums: Sequence[Value], body: Callable[[Builder, Value, Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:
        return self.lowering.carried(b, low, high, step, sums, lambda inner, index, *carried: body(inner, index, carried), self.op)
