"""Reductions of a nest: serial loops outside, tiles along the innermost dimension, and what is done where rows end or have borders.

In: a `reduce` of the loop stage. Out: tile-stage loops that carry tiles, combined across the tile at their end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value, walk
from tilewright.ir.types import INDEX, dtype_of
from tilewright.passes.common.combine import combine_later, identities
from tilewright.passes.common.nest_shapes import Condition, Shape, join, shape_of, widen
from tilewright.passes.to_tile.loops.index_tests import test_reduction
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering, RowPart
from tilewright.passes.to_tile.loops.one_shape import branches, carrying_loop, combined, within_edges
from tilewright.passes.to_tile.loops.strips import aligned_head, strips

if TYPE_CHECKING:
    from tilewright.passes.to_tile.loops.extreme_on_cpu import ExtremeOnCpu
    from tilewright.passes.to_tile.loops.rows_on_cpu import RowsOnCpu

SHORT_LOOP = 8
"""Turns of a short loop inside a reduction that are written out."""
WRITTEN_OUT = 64
"""Terms of a short sum that are."""
GROUP_TERMS = 16
"""The same where several rows are done together: what they are multiplied with stays in registers beside their sums."""


class Reductions:
    """The reductions of one kernel."""

    def __init__(self, lowering: NestLowering) -> None:
        self.lowering, self.kernel, self.schedule, self.target = lowering, lowering.kernel, lowering.schedule, lowering.target
        self.region, self.forms, self.reduce_position = lowering.region, lowering.forms, lowering.reduce_position
        self.again = False
        """GPU: whether a window's sum is added up once more, term by term."""

    def lower(self, b: Builder, op: Op, operands: Sequence[Value], env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        """What the reduction comes to."""
        kind = str(op.attrs["kind"])
        dtypes = [dtype_of(r.type) for r in op.results]
        start = [b.const(v, d) for v, d in zip(identities(kind, dtypes), dtypes, strict=True)]
        tiled = self.reduce_position is not None and not self.lowering.inside_reduction and bool(operands) and (not self.lowering.inner_walks or id(op) in self.lowering.inner_walks)
        if not self.target.simt and "dots" in self.kernel.attrs and not masks:
            if any(inner.opcode == "reduce" for inner in op.regions[0].ops):
                return self._along(b, op, kind, operands, 0, env, masks, start, False)
            turns = self._turns(op.operands[0]) if len(operands) == 1 else None
            if tiled and turns == self.schedule.reduce_tile and kind == "add" and dtypes[0].is_int:
                return self._dot(b, op, env)
        if not self.target.simt and not masks and len(operands) == 1 and not shape_of(operands[0]):
            test_reduction(self.lowering, b, op, operands[0], env)
        if self.lowering.place in (RowPart.MIDDLE, RowPart.BORDER) and not masks:
            return self._clipped_sum(b, op, kind, operands, env, start)
        if self.schedule.window and not self.again:
            return self._window_sum(b, op, kind, operands, env, masks, start)
        with self.lowering.within_reduction():
            if tiled and self._in_blocks(op, kind, operands, masks):
                return self._blocks(b, op, kind, operands, env, start)
            return self._along(b, op, kind, operands, 0, env, masks, start, tiled)

    def _window_sum(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], env: dict[Value, Value], masks: list[Condition], start: Sequence[Value]
    ) -> Sequence[Value]:  # fmt: skip
        """A sum over a window. Terms outside are zeros that need no choice; where one is multiplied with what is no finite number, the sum is no number, and is
        added up again by the threads of its warp, which then choose."""
        from tilewright.passes.windows.window_terms import Zeros, asks_along, zero_outside

        branch, zeros = zero_outside(op, self.lowering.unguarded)
        if zeros is Zeros.IF_FINITE and not self.schedule.masked and not asks_along(self.kernel, branch, self.region.args[self.schedule.vector_index]):
            branch, zeros = None, Zeros.NEVER  # `window_sums` chooses weights, which several results share
        if branch is not None:
            self.lowering.unchosen.add(id(branch))
        sums = self._along(b, op, kind, extents, 0, dict(env), masks, start, False)
        if branch is not None:
            self.lowering.unchosen.discard(id(branch))
        if zeros is not Zeros.IF_FINITE or not shape_of(sums[0]):
            return sums
        wrong = b.op("ne", sums[0], sums[0])
        for axis in range(self.lowering.rank):
            if shape_of(wrong)[axis] > 1:
                wrong = b.op("reduce_tile", wrong, kind="or", axis=axis, by_warp=True)

        def exact(inner: Builder) -> tuple[Value, ...]:
            self.again = True
            found = tuple(self._along(inner, op, kind, extents, 0, dict(env), masks, start, False))
            self.again = False
            return found

        return branches(b, b.op("item", wrong), exact, lambda inner: tuple(sums))

    def _clipped_sum(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], env: dict[Value, Value], start: Sequence[Value]
    ) -> Sequence[Value]:  # fmt: skip
        """A sum near a border, which ends where what it reads does."""
        assert self.lowering.borders is not None
        made = {result: inner for inner in walk(self.region) for result in inner.results}
        tests = self.lowering.borders.clipped(op, made, self.lowering.place is RowPart.MIDDLE)
        args = op.regions[0].args
        lows, highs = {arg: b.index(0) for arg in args}, dict(zip(args, extents, strict=True))
        for form in tests.values():
            (own,) = (v for v in form.values if v in args)
            rest = b.index(form.constant)
            for value, factor in form.factors:
                if value is not own:
                    rest = b.add(rest, env[value] if factor == ONE else b.mul(env[value], b.index(factor)))
            if form.factor(own) == ONE:
                lows[own] = b.op("max", lows[own], b.sub(b.index(0), rest))
            else:
                highs[own] = b.op("min", highs[own], b.add(rest, b.index(1)))
        cut = {own for form in tests.values() for own in form.values if own in args}
        bounds = [b.op("max", b.sub(highs[arg], lows[arg]), b.index(0)) if arg in cut else extent for arg, extent in zip(args, extents, strict=True)]
        with self.lowering.within_reduction(), self.lowering.clipping({arg: lows[arg] for arg in cut}, set(tests)):
            return self._along(b, op, kind, bounds, 0, env, [], start, False)

    def _dot(self, b: Builder, op: Op, env: dict[Value, Value]) -> Sequence[Value]:
        """A sum of integers as long as a vector: LLVM makes one of the CPU's dot products of it."""
        assert self.reduce_position is not None
        index = self.lowering.index_tile(b, b.index(0), self.reduce_position, self.schedule.reduce_tile)
        (value,) = self.lowering.ops(b, op.regions[0].ops, {**env, op.regions[0].args[0]: index}, [])
        whole = widen(b, value, join(shape_of(value), shape_of(index)))
        return [b.op("item", b.op("reduce_tile", whole, kind="add", axis=self.reduce_position, together=True))]

    def _in_blocks(self, op: Op, kind: str, extents: Sequence[Value], masks: list[Condition]) -> bool:
        """Whether a sum walks packed blocks, and its innermost loop is whole vectors."""
        if self.target.simt or not self.kernel.attrs.get("blocks") or kind not in ("add", "mul") or masks or len(extents) < 2 or any(map(shape_of, extents)):
            return False
        turns = self._turns(op.operands[-1])
        return turns is not None and turns > 0 and turns % self.schedule.reduce_tile == 0

    def _blocks(self, b: Builder, op: Op, kind: str, extents: Sequence[Value], env: dict[Value, Value], start: Sequence[Value]) -> Sequence[Value]:
        """A sum over blocks: vectors of sums go through all loops, and are added up once at the end."""
        position, tile, args = self.reduce_position, self.schedule.reduce_tile, op.regions[0].args
        assert position is not None

        def terms(inner: Builder, first: Value, local: dict[Value, Value], carried: Sequence[Value]) -> Sequence[Value]:
            index = self.lowering.index_tile(inner, first, position, tile)
            values = self.lowering.ops(inner, op.regions[0].ops, {**local, args[-1]: index}, [])
            return combined(inner, kind, carried, [widen(inner, v, join(shape_of(v), shape_of(index))) for v in values])

        def along(inner: Builder, dimension: int, local: dict[Value, Value], carried: Sequence[Value]) -> Sequence[Value]:
            turns = self._turns(op.operands[dimension])
            if dimension == len(extents) - 1:
                assert turns is not None
                for first in range(0, turns, tile):
                    carried = terms(inner, inner.index(first), local, carried)
                return carried
            if turns is not None and 0 < turns <= SHORT_LOOP:
                for turn in range(turns):
                    carried = along(inner, dimension + 1, {**local, args[dimension]: inner.index(turn)}, carried)
                return carried

            def body(deeper: Builder, index: Value, *sums: Value) -> Sequence[Value]:
                return along(deeper, dimension + 1, {**local, args[dimension]: index}, sums)

            return carrying_loop(inner, inner.index(0), extents[dimension], inner.index(1), carried, body, op)

        trial = {**env, **dict.fromkeys(args[:-1], Value(INDEX))}
        shape = self._reduced_shape(b, lambda at, first, _, sums: terms(at, first, trial, sums), start, position, tile)
        lanes = [widen(b, v, shape) for v in start]
        return combined(b, kind, start, self.lowering.folded(b, kind, along(b, 0, env, lanes)))

    def _along(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], dimension: int, env: dict[Value, Value],
        masks: list[Condition], start: Sequence[Value], tiled: bool,
    ) -> Sequence[Value]:  # fmt: skip
        """Combine over dimensions `dimension`… into `start`: serial loops outside, the innermost tiled when asked."""
        last = dimension == len(extents) - 1
        if last and tiled and shape_of(extents[-1]) and not self.schedule.row_lanes:
            return self._ragged(b, op, kind, extents, dimension, {**env}, masks, start)
        rows = self._rows_on_cpu(op, kind, env, masks) if tiled and not dimension and len(extents) > 1 else None
        plain = not any(shape_of(extent) for extent in extents) and not self.lowering.clips.keys() & set(op.regions[0].args)
        if rows is not None and plain:
            return rows.run(b, extents, start)
        if tiled and plain and not dimension and len(extents) > 1 and kind in ("min", "max") and not self.target.simt and not self.schedule.whole:
            return self._extreme_on_cpu(op, env, masks).lower(b, extents[-1], start, extents[:-1])
        if tiled and plain and not dimension and self._keeps_lanes(op, kind):
            from tilewright.passes.to_tile.loops.rows_in_turn import RowsInTurn

            assert self.reduce_position is not None
            return RowsInTurn(self.lowering, op, extents, env, masks, self.reduce_position, self.schedule.reduce_tile, self.schedule.rows_in_turn).run(b, start)
        if last and tiled and dimension:
            # Every element of a tile starts from the identity; what came before joins once, not once per element.
            dtypes = [dtype_of(r.type) for r in op.results]
            fresh = [b.const(v, d) for v, d in zip(identities(kind, dtypes), dtypes, strict=True)]
            return combined(b, kind, start, self._tiled(b, op, kind, extents[-1], env, masks, fresh))
        if last and tiled:
            return self._tiled(b, op, kind, extents[-1], env, masks, start)
        zero, one = b.index(0), b.index(1)

        arg = op.regions[0].args[dimension] if extents else None

        def body(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            env[op.regions[0].args[dimension]] = inner.add(self.lowering.clips[arg], index) if arg in self.lowering.clips else index
            if last:
                values = self.lowering.ops(inner, op.regions[0].ops, dict(env), masks)
                return combined(inner, kind, carried, values)
            return self._along(inner, op, kind, extents, dimension + 1, env, masks, carried, tiled)

        if not extents:
            return combined(b, kind, start, self.lowering.ops(b, op.regions[0].ops, dict(env), masks))
        extent = extents[dimension]
        if shape_of(extent):
            return self._ragged(b, op, kind, extents, dimension, env, masks, start)
        turns = self._turns(op.operands[dimension])
        if turns is not None and self._is_written_out(op, dimension, turns):
            # A few turns stand one after another: what they load is on its way together.
            values: Sequence[Value] = start
            for turn in range(turns):
                values = body(b, b.index(turn), *values)
            return values
        if not self.target.simt and kind.startswith("arg") and len(extents) == 1 and arg not in self.lowering.clips and self._rises(op):
            return self._first_of_equals(b, op, kind, extent, env, masks, start)
        return carrying_loop(b, zero, extent, one, start, body, op)

    def _keeps_lanes(self, op: Op, kind: str) -> bool:
        """Whether the threads of a block have sums of their own through all axes of a reduction."""
        return self.target.simt and self.schedule.rows_in_turn > 0 and len(op.operands) > 1 and not kind.startswith("arg")

    def _first_of_equals(
        self, b: Builder, op: Op, kind: str, extent: Value, env: dict[Value, Value], masks: list[Condition], start: Sequence[Value]
    ) -> Sequence[Value]:
        """argmin or argmax term by term, where later terms have larger indices: one comparison for each."""
        index = op.regions[0].args[-1]
        dtypes = [dtype_of(v.type) for v in start]
        nothing = identities(kind, dtypes)

        def body(inner: Builder, number: Value, *carried: Value) -> Sequence[Value]:
            values = self.lowering.ops(inner, op.regions[0].ops, {**env, index: number}, masks)
            shape = join(*(shape_of(v) for v in (*carried, *values)))
            return combine_later(inner, kind, [widen(inner, v, shape) for v in carried], [widen(inner, v, shape) for v in values])

        best, place = carrying_loop(b, b.index(0), extent, b.index(1), [b.const(v, d) for v, d in zip(nothing, dtypes, strict=True)], body, op)
        # Nothing beat the identity: all values are equal to it, and the first one is the place.
        first = self.lowering.ops(b, op.regions[0].ops, {**env, index: b.index(0)}, masks)[1]
        kept = shape_of(place)
        lost = b.op("and", b.op("eq", place, b.splat(nothing[1], place)), widen(b, b.op("gt", extent, b.index(0)), kept))
        return combined(b, kind, start, [best, b.select(lost, widen(b, first, kept), place)])

    def _is_written_out(self, op: Op, dimension: int, turns: int) -> bool:
        """Whether the turns of a reduction's dimension stand one after another."""
        if turns < 1 or self.lowering.place is RowPart.BORDER or op.regions[0].args[dimension] in self.lowering.clips:
            return False
        if self.lowering.groups_rows:
            return self._number_of_terms(op, dimension) <= GROUP_TERMS
        if self.schedule.window:
            return not self.again and self._number_of_terms(op, dimension) <= self.schedule.written
        if not self.schedule.short:
            return turns <= SHORT_LOOP and len(op.operands) > 1
        return turns <= 2 * SHORT_LOOP and self._number_of_terms(op, dimension) <= WRITTEN_OUT

    def _number_of_terms(self, op: Op, dimension: int) -> int:
        """Terms of a sum over its dimensions from this one on; many where a call says how many."""
        return prod(self._turns(extent) or 2 * WRITTEN_OUT for extent in op.operands[dimension:])

    def _turns(self, extent: Value) -> int | None:
        """How many turns a dimension has, where the code says so."""
        return self.forms[extent].constant.constant if extent in self.forms else None

    def _ragged(
        self, b: Builder, op: Op, kind: str, extents: Sequence[Value], dimension: int, env: dict[Value, Value],
        masks: list[Condition], start: Sequence[Value],
    ) -> Sequence[Value]:  # fmt: skip
        """A serial reduction whose extent differs inside the tile: walk to the longest, masked."""
        extent = within_edges(b, extents[dimension], b.index(0), masks)

        def body(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            env[op.regions[0].args[dimension]] = index
            active = inner.op("lt", widen(inner, index, shape_of(extent)), extent)
            inner_masks = [*masks, Condition(active, edge=False)]
            new: Sequence[Value]
            if dimension == len(extents) - 1:
                values = self.lowering.ops(inner, op.regions[0].ops, dict(env), inner_masks)
                new = combined(inner, kind, carried, values)
            else:
                new = self._along(inner, op, kind, extents, dimension + 1, env, inner_masks, carried, False)
            kept = []
            for value, old in zip(new, carried, strict=True):
                shape = join(shape_of(active), shape_of(value), shape_of(old))
                kept.append(inner.select(*(widen(inner, v, shape) for v in (active, value, old))))
            return kept

        return carrying_loop(b, b.index(0), self.lowering.extreme(b, "max", extent), b.index(1), start, body, op)

    def _tiled(
        self, b: Builder, op: Op, kind: str, extent: Value, env: dict[Value, Value], masks: list[Condition], start: Sequence[Value]
    ) -> Sequence[Value]:
        position, tile = self.reduce_position, self.schedule.reduce_tile
        assert position is not None
        if shape_of(extent):
            from tilewright.passes.to_tile.loops.ragged_rows import RaggedRows

            rows = RaggedRows(self.lowering, op.regions[0], kind, position, tile, tile // self.schedule.row_lanes, env, masks, lambda inner, number, local: number)
            return rows.run(b, extent, start)
        index_arg = op.regions[0].args[-1]
        rising = self.target.simt and self._rises(op)

        def values_at(inner: Builder, first: Value | None, masked: bool) -> list[Value]:
            """The terms from `first` on; of a whole row where there is none."""
            local = dict(env)
            edge = []
            if first is None:
                local[index_arg], inside = self.lowering.whole_row(inner, extent)
                edge = [Condition(inside, edge=True)]
            else:
                local[index_arg] = self.lowering.index_tile(inner, first, position, tile)
            if masked and first is not None and self.lowering.shift is not None:
                edge = [Condition(self.lowering.within_row(inner, first, local[index_arg], extent), edge=True)]
            elif masked:
                limit = inner.like(extent, local[index_arg])
                edge = [Condition(inner.op("lt", local[index_arg], limit), edge=True)]
            values = list(self.lowering.ops(inner, op.regions[0].ops, local, [*masks, *edge]))
            shape = join(*(shape_of(v) for v in values), shape_of(local[index_arg]))
            values = [widen(inner, v, shape) for v in values]
            if edge:
                keep = widen(inner, edge[0].value, shape)
                dtypes = [dtype_of(v.type) for v in values]
                values = [
                    inner.select(keep, v, inner.splat(n, v))
                    for v, n in zip(values, identities(kind, dtypes), strict=True)
                ]
            return values

        def step(inner: Builder, first: Value, masked: bool, carried: Sequence[Value]) -> Sequence[Value]:
            values = values_at(inner, first, masked)
            if rising:
                full = join(*(shape_of(v) for v in (*carried, *values)))
                return combine_later(
                    inner, kind, [widen(inner, v, full) for v in carried], [widen(inner, v, full) for v in values]
                )
            return combined(inner, kind, carried, values)

        if self.schedule.whole:
            return combined(b, kind, start, self.lowering.folded(b, kind, values_at(b, None, False)))
        if not self.target.simt and kind in ("min", "max", "argmin", "argmax"):
            return self._extreme_on_cpu(op, env, masks).lower(b, extent, start)
        # Lanes start from nothing: what was reduced before joins once, at the end.
        dtypes = [dtype_of(v.type) for v in start]
        nothing = [b.const(v, d) for v, d in zip(identities(kind, dtypes), dtypes, strict=True)]
        shape = self._reduced_shape(b, step, nothing, position, tile)
        lanes = [widen(b, v, shape) for v in nothing]
        if not self.target.simt:
            return self._on_cpu(b, op, kind, extent, env, masks, start, step, lanes)
        if self.lowering.shift is not None:
            return combined(b, kind, start, self.lowering.folded(b, kind, self._shifted_steps(b, op, extent, self.lowering.shift, lanes, step)))
        whole = b.mul(b.op("floordiv", extent, b.index(tile)), b.index(tile))
        sums: Sequence[Value] = carrying_loop(
            b, b.index(0), whole, b.index(tile), lanes, lambda inner, k, *c: step(inner, k, False, c), op
        )
        remainder = b.op("lt", whole, extent)
        sums = b.if_(
            remainder,
            lambda inner: [widen(inner, v, shape) for v in step(inner, whole, True, sums)],
            lambda inner: sums,
        )
        results = self.lowering.folded(b, kind, sums)
        if rising:
            # Nothing beat the identity: all values are equal to it, and the first one is the place.
            first = self.lowering.ops(b, op.regions[0].ops, {**env, index_arg: b.index(0)}, masks)[1]
            kept = shape_of(results[1])
            lost = b.op("eq", results[1], b.splat(identities(kind, dtypes)[1], results[1]))
            some = widen(b, b.op("gt", extent, b.index(0)), kept)
            results = [results[0], b.select(b.op("and", lost, some), widen(b, first, kept), results[1])]
        return combined(b, kind, start, results)

    def _shifted_steps(
        self, b: Builder, op: Op, extent: Value, shift: Value, lanes: Sequence[Value], step: Callable[[Builder, Value, bool, Sequence[Value]], Sequence[Value]]
    ) -> Sequence[Value]:  # fmt: skip
        """The sums of a row's lanes, in tiles that begin up to a vector before the row: first those that lie wholly inside of it, several at a time, and then, under masks, its
        beginning and what is left."""
        tile, stride = b.index(self.schedule.reduce_tile), b.index(self.schedule.reduce_tile * self.schedule.together)
        first = b.sub(b.index(0), shift)
        second = b.add(first, tile)
        end = b.add(second, b.mul(b.op("max", b.op("floordiv", b.sub(extent, second), stride), b.index(0)), stride))
        last = b.sub(end, tile)

        def inside(inner: Builder, k: Value, *carried: Value) -> Sequence[Value]:
            for number in range(self.schedule.together):
                carried = tuple(step(inner, inner.add(k, inner.index(number * self.schedule.reduce_tile)) if number else k, False, carried))
            inner.ops[:] = _loads_first(inner.ops)
            return carried

        def border(inner: Builder, k: Value, *carried: Value) -> Sequence[Value]:
            return step(inner, inner.select(inner.op("eq", k, last), first, k), True, carried)

        sums = carrying_loop(b, second, end, stride, lanes, inside, op)
        return carrying_loop(b, last, extent, tile, sums, border, op)

    def _on_cpu(
        self, b: Builder, op: Op, kind: str, extent: Value, env: dict[Value, Value], masks: list[Condition], start: Sequence[Value],
        step: Callable[..., Sequence[Value]], lanes: Sequence[Value],
    ) -> Sequence[Value]:  # fmt: skip
        """Vectors from an aligned address on, single elements before and after."""
        index_arg = op.regions[0].args[-1]

        def single(inner: Builder, index: Value, *carried: Value) -> Sequence[Value]:
            values = self.lowering.ops(inner, op.regions[0].ops, {**env, index_arg: index}, masks)
            return combined(inner, kind, carried, values)

        rows = self._rows_on_cpu(op, kind, env, masks)
        if rows is not None:
            return rows.run(b, [extent], start)
        # Sums of floats are taken in an order that does not depend on where the array lies.
        exact = kind not in ("add", "mul") or not dtype_of(start[0].type).is_float
        head = aligned_head(self.lowering, b, op.regions[0].ops, {**env, index_arg: b.index(0)}, index_arg) if exact else None
        wides, singles = strips(
            b, b.index(0), extent, self.schedule.reduce_tile, head, lanes, start,
            lambda inner, k, *carried: step(inner, k, False, carried), single,
        )  # fmt: skip
        return combined(b, kind, singles, self.lowering.folded(b, kind, wides))

    def _rows_on_cpu(self, op: Op, kind: str, env: dict[Value, Value], masks: list[Condition]) -> RowsOnCpu | None:
        """Rows that may be short: whole tiles, whole registers, and what is left of them. None where the schedule knows no registers."""
        from tilewright.passes.to_tile.loops.rows_on_cpu import RowsOnCpu

        if self.target.simt or self.schedule.whole or not 1 < self.schedule.vector < self.schedule.reduce_tile or kind in ("min", "max", "argmin", "argmax"):
            return None
        assert self.reduce_position is not None
        widths = self.schedule.reduce_tile, self.schedule.vector
        return RowsOnCpu(self.lowering, op, env, masks, self.reduce_position, widths, self.target.has_lane_masks and not self.lowering.inner_walks)

    def _rises(self, op: Op) -> bool:
        """Whether an argmin's or argmax's index grows with the reduction's own."""
        if len(op.results) != 2:
            return False
        step = self.forms[op.regions[0].yields[1]].factor(op.regions[0].args[-1]).constant
        return step is not None and step > 0

    def _extreme_on_cpu(self, op: Op, env: dict[Value, Value], masks: list[Condition]) -> ExtremeOnCpu:
        from tilewright.passes.to_tile.loops.extreme_on_cpu import ExtremeOnCpu, ReductionBody

        rising = self._rises(op)
        assert self.reduce_position is not None
        body = ReductionBody(self.lowering, env, masks)
        tile, run = self.schedule.reduce_tile, self.schedule.block_search
        register = self.schedule.vector if 1 < self.schedule.vector < tile and not self.lowering.inner_walks else 0
        masked = bool(register) and self.target.has_lane_masks
        return ExtremeOnCpu(body, op, self.reduce_position, tile, run, rising, self.target.has_ieee_maximum, register, masked)

    def _reduced_shape(
        self, b: Builder, step: Callable[..., Sequence[Value]], sums: Sequence[Value], position: int, tile: int
    ) -> Shape:
        """The shape the accumulators have once a step was taken (the loop may have run no time)."""
        trial = Builder(b.span)
        values = step(trial, Value(INDEX), False, [Value(v.type) for v in sums])
        full = tuple(tile if a == position else 1 for a in range(self.lowering.rank))
        return join(full, *(shape_of(v) for v in (*values, *sums)))


def _loads_first(ops: Sequence[Op]) -> list[Op]:
    """Ops without effects, loads and what they need before the others: what is loaded is on its way while the rest is computed."""
    made = {result: op for op in ops for result in op.results}
    early: set[int] = set()
    pending = [op for op in ops if op.opcode == "load"]
    while pending:
        op = pending.pop()
        if id(op) not in early:
            early.add(id(op))
            pending += [made[v] for one in (op, *(inner for region in op.regions for inner in walk(region))) for v in one.operands if v in made]
    return [op for op in ops if id(op) in early] + [op for op in ops if id(op) not in early]
