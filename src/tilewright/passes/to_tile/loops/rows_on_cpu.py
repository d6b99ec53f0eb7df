"""Sums and the like along rows on a CPU, which may be short and many: whole tiles, whole registers, and what is left under a mask or element by element.

Part of `lower_loops`: in comes a reduction, over one dimension or several, the innermost along a vector axis; out come tile-stage loops.

    %t, %r = for %outer { for %k tiles { %t = add(%t, x[%k…]) }; for %k registers { %r = add(%r, x[%k…]) } }
    fold(%t) + fold(%r)

Partial results stay in registers through all dimensions, and are folded once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import dtype_of
from tilewright.passes.common.combine import combine, identities
from tilewright.passes.common.nest_shapes import Condition, shape_of, widen
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering


class RowsOnCpu:
    """One reduction along the tile axis `position`, by tiles and registers of so many elements. `masked`: what is left of a row is one register, of which lanes are left out."""

    def __init__(
        self, lowering: NestLowering, op: Op, env: dict[Value, Value], masks: list[Condition], position: int, widths: tuple[int, int], masked: bool
    ) -> None:
        self.lowering, self.op, self.env, self.masks, self.position, self.masked = lowering, op, dict(env), masks, position, masked
        self.kind = str(op.attrs["kind"])
        self.tile, self.register = widths
        self.args = op.regions[0].args

    def run(self, b: Builder, extents: Sequence[Value], start: Sequence[Value]) -> Sequence[Value]:
        dtypes = [dtype_of(v.type) for v in start]
        nothing = [b.const(v, d) for v, d in zip(identities(self.kind, dtypes), dtypes, strict=True)]
        wide, narrow = ([self._widen(b, v, width) for v in nothing] for width in (self.tile, self.register))
        count = len(start)
        sums = self._dimension(b, extents, 0, [*wide, *narrow, *start])
        fold = self.lowering.folded
        total = combine(b, self.kind, list(sums[2 * count :]), list(fold(b, self.kind, sums[:count])))
        return combine(b, self.kind, list(total), list(fold(b, self.kind, sums[count : 2 * count])))

    def _widen(self, b: Builder, value: Value, width: int) -> Value:
        shape = tuple(width if a == self.position else 1 for a in range(self.lowering.rank))
        return widen(b, value, shape)

    def _dimension(self, b: Builder, extents: Sequence[Value], number: int, sums: Sequence[Value]) -> Sequence[Value]:
        if number == len(extents) - 1:
            return self._row(b, extents[number], sums)

        def body(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            self.env[self.args[number]] = index
            return self._dimension(inner, extents, number + 1, carried)

        return b.for_(b.index(0), extents[number], b.index(1), list(sums), lambda inner, index, *carried: list(body(inner, index, *carried)), name="k")

    def _row(self, b: Builder, extent: Value, sums: Sequence[Value]) -> Sequence[Value]:
        """Add a row to the partial results."""
        count = len(sums) // 3
        wide, narrow, one = b.index(self.tile), b.index(self.register), b.index(1)
        middle = b.mul(b.op("floordiv", extent, wide), wide)
        tiles = b.for_(b.index(0), middle, wide, list(sums[:count]), lambda inner, k, *carried: self._add(inner, k, self.tile, carried))
        if self.masked:
            rest = b.for_(middle, extent, narrow, list(sums[count : 2 * count]), lambda inner, k, *carried: self._add(inner, k, self.register, carried, extent))
            return [*tiles, *rest, *sums[2 * count :]]
        last = b.mul(b.op("floordiv", extent, narrow), narrow)
        rest = b.for_(middle, last, narrow, list(sums[count : 2 * count]), lambda inner, k, *carried: self._add(inner, k, self.register, carried))
        singles = b.for_(last, extent, one, list(sums[2 * count :]), self._single)
        return [*tiles, *rest, *singles]

    def _add(self, b: Builder, first: Value, width: int, carried: Sequence[Value], extent: Value | None = None) -> list[Value]:
        """Add the terms from `first` on; those from `extent` on count for nothing."""
        index = self.lowering.index_tile(b, first, self.position, width)
        inside = None if extent is None else b.op("lt", index, b.like(extent, index))
        values = self.lowering.row_terms(b, self.op, {**self.env, self.args[-1]: index}, self.masks, inside)
        values = [widen(b, v, shape_of(index)) for v in values]
        if inside is not None:
            dtypes = [dtype_of(v.type) for v in values]
            values = [b.select(inside, v, b.splat(n, v)) for v, n in zip(values, identities(self.kind, dtypes), strict=True)]
        return list(combine(b, self.kind, list(carried), values))

    def _single(self, b: Builder, index: Value, *carried: Value) -> list[Value]:
        values = self.lowering.row_terms(b, self.op, {**self.env, self.args[-1]: index}, self.masks, None)
        return list(combine(b, self.kind, list(carried), list(values)))
