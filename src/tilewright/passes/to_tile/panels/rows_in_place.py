"""Rows of a contraction's first factor that are read where they lie, as those of pixels with channels last are: one tile has all columns, so a copy would be read once.

In: the factors (`sides.py`), where the tile of results begins, and a stretch of the sum. Out: tile-stage ops that add up the stretch, run by run of elements that
follow one another in all rows alike:

    for %part { for %run { for %t { %c = load columns[0, k, 0..nr]; %sum_r = fma (load x[row r, %run, %t]), %c, %sum_r } } }

`lower_contraction_cpu.py` builds the kernel around this.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.sizes import product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.to_tile.panels.active_steps import ActiveRuns
from tilewright.passes.to_tile.panels.columns_in_place import LINE
from tilewright.passes.to_tile.panels.copies import PanelCopies
from tilewright.passes.to_tile.panels.count_up import count_up

AHEAD = 16
"""Steps of the innermost loop from when a row of columns is fetched to its use."""
LONG_RUN = 32
"""Elements of a run from which on its rows are read where they lie: addresses are computed for every run."""


class RowsInPlace(PanelCopies):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    def _run_length(self, b: Builder) -> Value:
        return b.index(product(self.k_extents[-self.a.run :]))

    def _multiply_rows(
        self, b: Builder, env: dict[Value, Value], down: tuple[Value, Value], start: Value, count: Value, active: tuple[ActiveRuns, Value] | None
    ) -> list[Value]:
        """The sums of a tile over a stretch, of parts as long as stretches of copied rows are: a longer chain of sums is less accurate. Behind the last row it is
        read again. `active`: the runs of steps that count, and their number; None: all do."""
        s, side, load = self.matrix, self.a, self.a.factor.load
        assert load is not None
        zero, one, across = b.index(0), b.index(1), self.index_tile(b, b.index(0), 1, s.nr)
        nothing = b.op("broadcast", b.const(0, self.dtype), shape=(1, s.nr))
        outer = self.k_extents[: -side.run]
        length, rows = self._run_length(b), self._numbers(b, down)

        def run(at: Builder, number: Value, first: Value, end: Value, sums: Sequence[Value]) -> list[Value]:
            base = at.mul(number, length)
            digits = dict(zip(self.k_indices[: len(outer)], self._apart(at, number, outer), strict=True)) if outer else {}
            still = {**env, **dict.fromkeys(self.k_indices[len(outer) :], zero), **digits}
            shift = at.sub(base, start)

            def step(inner: Builder, place: Value, *before: Value) -> list[Value]:
                c = inner.op("load", self.columns, zero, inner.add(shift, place), across)
                ahead = inner.add(inner.add(shift, place), inner.index(AHEAD))
                for column in range(0, s.nr, LINE // self.dtype.itemsize) if self.target.vector_bytes == LINE else ():
                    inner.multi("prefetch", self.columns, zero, ahead, inner.index(column))
                following: list[Value] = []
                for row, total in zip(rows, before, strict=True):
                    local = {**still, **row, self.k_indices[-1]: place}
                    self.ops(inner, [op for op in side.ops if op is not load], local, [])
                    a = inner.op("load", load.operands[0], *(local[v] for v in load.operands[1:]))
                    following.append(inner.fma(inner.like(a, c), c, total))
                return following

            low, high = at.op("max", at.sub(first, base), zero), at.op("min", at.sub(end, base), length)
            return list(at.for_(low, high, one, list(sums), step, name="k"))

        def part(at: Builder, offset: Value, stop: Value, *totals: Value) -> list[Value]:
            first, end = at.add(start, offset), at.add(start, at.op("min", at.add(offset, most), stop))
            last = at.op("floordiv", at.sub(at.add(end, length), one), length)
            begun = at.op("floordiv", first, length)
            own = at.for_(begun, last, one, [nothing] * s.mr, lambda inner, number, *sums: run(inner, number, first, end, sums), name="run")
            return [at.add(total, sums) for total, sums in zip(totals, own, strict=True)]

        def parts(at: Builder, low: Value, stop: Value, totals: Sequence[Value]) -> list[Value]:
            return list(at.for_(low, stop, most, list(totals), lambda inner, offset, *values: part(inner, offset, stop, *values), name="part"))

        most = b.index(self.target.costs.caches.window_depth)
        if active is None:
            return parts(b, zero, count, [nothing] * s.mr)
        runs, number = active
        return runs.over(b, number, [nothing] * s.mr, parts)

    def _numbers(self, b: Builder, down: tuple[Value, Value]) -> list[dict[Value, Value]]:
        """The indices that make up each row of a tile, counted up from the first."""
        side, (top, bottom) = self.a, down
        digits = self._apart(b, top, side.extents)
        rows = [digits]
        for number in range(1, self.matrix.mr):
            there = b.op("lt", b.add(top, b.index(number)), bottom)
            following = count_up(b, rows[-1], side.extents)
            rows.append([b.select(there, new, old) for new, old in zip(following, rows[-1], strict=True)])
        return [dict(zip(side.indices, row, strict=True)) for row in rows]
