"""What a contraction on a CPU does with its sums: the rest of the kernel, on a tile of registers or row by row.

In: tiles of sums, in registers or in local memory, and where in the result they are. Out: tile-stage ops that run what follows the sum. `lower_contraction_cpu.py`
builds the sums from panels, `in_place.py` from factors where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis.affine import address
from tilewright.analysis.contraction import Contraction
from tilewright.base.dtypes import bool_
from tilewright.base.sizes import ONE, ZERO, Size, contiguous_strides, product, without_clamp
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.ops import OPS
from tilewright.ir.types import INDEX
from tilewright.passes.common.nest_shapes import Condition, shape_of
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import CpuProduct
from tilewright.passes.to_tile.panels.count_up import count_up
from tilewright.passes.to_tile.panels.rows_in_place import RowsInPlace
from tilewright.passes.to_tile.panels.sides import Side, order

SHORT = 6
"""Ops of an epilogue that is written out for a whole tile of registers; a longer one is a loop over its rows."""


class PanelResults(RowsInPlace):
    """Bodies are lowered as for loops, over tiles of rank 2."""

    sums: Value
    """Tiles of sums."""

    def __init__(self, kernel: Kernel, found: Contraction, schedule: CpuProduct, target: Target, gaps: bool = True) -> None:
        super().__init__(kernel, Schedule((1,) * len(found.extents)), target)
        self.found, self.matrix = found, schedule
        self.rank = 2
        self.dtype = found.accumulator
        self.lanes = schedule.nr // schedule.vectors
        self.k_order = order(found, range(len(found.k)), [found.a, found.b])
        self.a = Side(found, found.a, order(found, found.m, [found.a]), self.k_order)
        self.b = Side(found, found.b, order(found, found.n, [found.b], stores=True), self.k_order, gaps)
        self.k_extents = tuple(found.reduce_extents[p] for p in self.k_order)
        self.k_indices = tuple(found.k[p] for p in self.k_order)
        self.written, self.limit = self._written()
        """What numbers of columns are made of where results are written, and how far the innermost counts: rows that follow one another are one."""

    def _written(self) -> tuple[tuple[Size, ...], Size]:
        side, rest = self.b, self._rest()
        # Where gaps between rows may be numbered, whether they are is a long formula, and code for both takes long to compile.
        for first in range(len(side.indices) - 1 if side.numbered == side.extents else 0):
            if self._are_places(rest, side.indices[first:], side.extents[first:]):
                together = product(side.extents[first:])
                return (*side.extents[:first], *(ONE for _ in side.extents[first:-1]), together), together
        return side.numbered, side.limit

    def _keep_or_finish(
        self, b: Builder, env: dict[Value, Value], sums: Sequence[Value], where: Value, last: Value, down: tuple[Value, Value],
        across: tuple[Value, Value],
    ) -> Value:  # fmt: skip
        """Keep a tile of sums, or do the rest of the kernel on it: from registers where that is short code. Whether the rest is to be done now on what was
        kept."""
        s = self.matrix

        def keep(at: Builder) -> list[Value]:
            self._keep(at, sums, where)
            return [last]

        def finish(at: Builder) -> list[Value]:
            self._finish_registers(at, env, sums, down[0], across[0], across[1] if self._masks_results() else None)
            return [at.const(False, bool_)]

        if not self._is_short():
            return keep(b)[0]
        digit = self._apart(b, across[0], self.written)[-1]
        full = b.op("le", b.add(down[0], b.index(s.mr)), down[1])
        if not self._masks_results():
            full = b.logical_and(full, b.op("le", b.add(across[0], b.index(s.nr)), across[1]))
        if len(self.written) > 1:
            full = b.logical_and(full, b.op("le", b.add(digit, b.index(s.nr)), b.index(self.limit)))
        return b.if_(b.logical_and(last, full), finish, keep)[0]

    def _rest(self) -> list[Op]:
        """The ops of the kernel that follow its sum."""
        return [op for op in self.found.parallel.regions[0].ops if op is not self.found.reduction]

    def _is_short(self) -> bool:
        """Whether the rest of the kernel can be written out for a whole tile."""
        rest = self._rest()
        places = {id(op) for op in rest if op.results and op.result.type == INDEX}
        return (
            self._are_places(rest, self.a.indices, self.a.extents)
            and self._writes_vectors(rest)
            and not has_functions(rest)
            and sum(op.opcode not in ("const", "yield") and id(op) not in places for op in rest) <= SHORT
        )

    def _are_places(self, rest: Sequence[Op], rows: Sequence[Value], extents: Sequence[Size]) -> bool:
        """Whether the rest of the kernel uses the number of a row (or of a column) only, not the indices it is made of."""
        forms = self.found.forms
        if len(rows) == 1:
            return True
        steps = contiguous_strides(tuple(map(without_clamp, extents)))  # where there is a row, no extent is 0
        for op in rest:
            if op.regions:
                return False
            if op.results and op.result in forms:
                continue  # part of a place
            used = [[forms[v].factor(row) for row in rows] for v in op.operands if v in forms]
            moving = [own for own in used if any(step != ZERO for step in own)]
            if moving and (op.opcode not in ("load", "store") or any(own != list(steps) for own in moving)):
                return False
        return True

    def _keep(self, b: Builder, sums: Sequence[Value], where: Value) -> None:
        columns = self.index_tile(b, b.index(0), 1, shape_of(sums[0])[-1])
        for number, row in enumerate(sums):
            b.multi("store", self.sums, where, b.index(number), columns, row)

    def _masks_results(self) -> bool:
        """Whether a tile that has columns behind the last is written from registers, too: filters side by side seldom fill the last tile, and short sums take no
        longer than to keep it."""
        return self.target.has_lane_masks and self.matrix.keep == "b" and len(self.written) == 1

    def _masks_rows(self, rest: Sequence[Op]) -> bool:
        """Whether the few results that a short row has of a tile are written as a vector with a mask. Where all columns are one row, there is at most one such piece of a block:
        its masks would take registers from the innermost loop."""
        return self.target.has_lane_masks and len(self.written) > 1 and self._writes_vectors(rest) and not has_functions(rest) and not any(op.regions for op in rest)

    def _finish_registers(
        self, b: Builder, env: dict[Value, Value], sums: Sequence[Value], top: Value, left: Value, end: Value | None = None
    ) -> list[Value]:
        """The rest of the kernel on a whole tile of sums, or on its columns before `end`."""
        local = dict(env)
        digit = self._bind(b, local, self.b.indices, self.written, left)
        columns = local[self.b.indices[-1]] = self.index_tile(b, digit, 1, self.matrix.nr)
        masks = [Condition(b.op("lt", columns, b.like(end, columns)), edge=True)] if end is not None else []
        local.update(dict.fromkeys(self.a.indices, b.index(0)))
        for number, row in enumerate(sums):
            own = {**local, self.a.indices[-1]: b.add(top, b.index(number)), self.found.reduction.results[0]: row}
            self.ops(b, self._rest(), own, list(masks))
        return []

    def _writes_vectors(self, rest: Sequence[Op]) -> bool:
        """Whether results that are columns side by side lie side by side in memory. Those of a phase do not: a tile of them is an instruction for each."""
        stores = [op for op in rest if op.opcode == "store"]
        return all(address(op, self.found.forms).factor(self.b.indices[-1]) in (ZERO, ONE) for op in stores)

    def _finish(
        self, b: Builder, env: dict[Value, Value], where: Value, down: tuple[Value, Value], across: tuple[Value, Value]
    ) -> list[Value]:
        """The rest of the kernel on one tile of sums, row by row."""
        s = self.matrix
        sums = self._tiles_of(b, where)
        rest = [op for op in self.found.parallel.regions[0].ops if op not in sums]
        written = {op.operands[0] for op in rest if op.opcode == "store"}
        again = not any(op.opcode == "load" and op.operands[0] in written for op in rest)
        end = b.op("min", b.add(across[0], b.index(s.nr)), across[1])
        rows = b.op("min", b.sub(down[1], down[0]), b.index(s.mr))
        # Functions are long chains of ops: several vectors side by side keep a CPU busy.
        widths = (s.nr, self.lanes) if s.nr > self.lanes and has_functions(rest) else (self.lanes,)

        extents = self.a.extents
        if self._are_places(rest, self.a.indices, extents):
            extents = (*(ONE for _ in extents[1:]), product(extents))

        def segment(at: Builder, digits: Sequence[Value], low: Value, high: Value, base: Value) -> None:
            shift = at.sub(base, across[0])

            def by_row(inner: Builder, row: Value, *place: Value) -> list[Value]:
                local = {**env, **dict(zip(self.b.indices, digits, strict=False)), **dict(zip(self.a.indices, place, strict=True))}

                def some(deep: Builder, place: Value, width: int) -> list[Value]:
                    own = {**local, self.b.indices[-1]: self._several(deep, place, width)}
                    where_in = self._several(deep, deep.add(shift, place), width)
                    own.update((op.result, self._sums_at(deep, tile, row, where_in)) for op, tile in sums.items())
                    self.ops(deep, rest, own, [])
                    return []

                def few(deep: Builder, place: Value) -> list[Value]:
                    columns = self.index_tile(deep, place, 1, self.lanes)
                    inside = deep.op("lt", columns, deep.like(high, columns))
                    own = {**local, self.b.indices[-1]: columns}
                    where_in = self.index_tile(deep, deep.add(shift, place), 1, self.lanes)
                    own.update((op.result, self._sums_at(deep, tile, row, where_in, inside)) for op, tile in sums.items())
                    self.ops(deep, rest, own, [Condition(inside, edge=True)])
                    return []

                self._strips_of(inner, low, high, widths, some, again, few if self._masks_rows(rest) else None)
                return count_up(inner, place, extents)

            at.for_(at.index(0), rows, at.index(1), self._apart(at, down[0], extents), by_row, name="row")

        self._segments(b, self.written, self.limit, across[0], end, segment)
        return []

    def _tiles_of(self, b: Builder, where: Value) -> dict[Op, Value]:
        """Each sum of the kernel, and where its tile is; `where` is that of the first."""
        return {self.found.reduction: where}

    def _sums_at(self, b: Builder, tile: Value, row: Value, columns: Value, inside: Value | None = None) -> Value:
        """Sums of a row of the tile at `tile`; nothing is read but what is `inside`."""
        return b.op("load", self.sums, tile, row, columns) if inside is None else b.op("load", self.sums, tile, row, columns, inside, masked=True)


def has_functions(ops: Sequence[Op]) -> bool:
    """Whether some op becomes a long chain of arithmetic."""
    return any(OPS[op.opcode].group == "function" for op in ops)
