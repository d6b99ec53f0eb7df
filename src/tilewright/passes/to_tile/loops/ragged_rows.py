"""Rows of different lengths, in tiles: a reduction, or a loop of independent iterations, whose extent differs from row to row. Loop stage to tile stage, on a GPU.

In: the extents of a block's rows, a tile of them; what is done at an index; the lowering of the loops around. Out: ops of the tile stage. A group of lanes
walks each row of the block, all rows at once, masked where a row has ended. That goes on to the longest row, but no further than `SHARED_LENGTH`: the rest
of longer rows is walked by the whole block, one row after the other, with the lanes of all rows along it. So no group waits for one row for long.

    %s = reduce %length {kind = "add"} (%p) { … x[start + p] … }       a block has 16 rows, a step 32 elements of each
    -> for k in 0 .. min(max(%length), 256), 32 { %sum += x[start + k + iota], where k + iota < %length : tile<f32, [16, 32]> }
       if max(%length) > 256 { for row in 0 .. 16 { for k in 256 .. %length[row], 512 { %sum[row] += … the whole tile along the row } } }

What the terms need of a row (where it starts, say) is handed to the second walk through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from tilewright.base.dtypes import bool_, i32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Value, walk
from tilewright.ir.types import INDEX, dtype_of
from tilewright.passes.common.combine import identities
from tilewright.passes.common.nest_shapes import Condition, Shape, join, shape_of, widen
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering
from tilewright.passes.to_tile.loops.one_shape import combined

SHARED_STEPS, SHARED_LENGTH = 8, 64
"""Steps, and elements, that rows of a block walk together, the more of both. What is left of a longer row is walked by the whole block."""
LONG_TERMS = 8
"""Terms that a thread has in flight when its block walks one row."""


class RaggedRows:
    """One reduction (`kind`) or loop (no kind) over `extent` turns, of which `index_of(builder, number)` makes its index from the turn's number. A step has
    `terms` of each thread."""

    def __init__(
        self, lowering: NestLowering, region: Block, kind: str, position: int, step: int, terms: int, env: Mapping[Value, Value], masks: Sequence[Condition],
        index_of: Callable[[Builder, Value, Mapping[Value, Value]], Value], around: Sequence[Value] = (),
    ) -> None:  # fmt: skip
        self.lowering, self.region, self.kind, self.position, self.step = lowering, region, kind, position, step
        self.long_steps = max(1, LONG_TERMS // terms)
        self.env, self.masks, self.index_of = dict(env), list(masks), index_of
        self.around = tuple(around)
        """Values that `index_of` uses."""

    def run(self, b: Builder, extent: Value, start: Sequence[Value]) -> Sequence[Value]:
        """What the rows come to; nothing for a loop."""
        extent = self._of_active_rows(b, extent)
        varying = [axis for axis, size in enumerate(shape_of(extent)) if size > 1]
        nothing = self._nothing(b, start)
        shape = self._full_shape(b, extent, nothing)
        lanes = [widen(b, v, shape) for v in nothing]
        step = b.index(self.step)
        if len(varying) != 1 or not self._is_row_by_row(varying[0]):

            def to_the_end(inner: Builder, first: Value, *carried: Value) -> Sequence[Value]:
                number = self._iota(inner, self.position, self.step, first)
                return self._term(inner, number, self._before(inner, number, extent), self.env, carried)

            sums = b.for_(b.index(0), self.lowering.extreme(b, "max", extent, False), step, lanes, to_the_end, name="k")
            return self._joined(b, start, self._folded(b, sums, [self.position]))
        # Rows are walked together up to a place that 32 bits hold: comparisons are short there.
        most = b.index(max(SHARED_LENGTH, SHARED_STEPS * self.step))
        near = b.cast(b.op("min", extent, b.like(most, extent)), i32)
        end = b.cast(self.lowering.extreme(b, "max", near, not _meets_others(self.lowering.kernel, self.region)), INDEX.dtype)

        def along(inner: Builder, first: Value, *carried: Value) -> Sequence[Value]:
            places = inner.cast(self._iota(inner, self.position, self.step, None), i32)
            left = inner.sub(near, inner.like(inner.cast(first, i32), near))
            number = self._iota(inner, self.position, self.step, first)
            return self._term(inner, number, self._before(inner, places, left), self.env, carried)

        sums = b.for_(b.index(0), end, step, lanes, along, name="k")
        rows = self._folded(b, sums, [self.position])
        some = self.lowering.extreme(b, "max", b.cast(b.op("gt", extent, b.like(most, extent)), i32), False)

        def rest(inner: Builder) -> Sequence[Value]:
            return self._long_rows(inner, extent, most, varying[0], rows, shape)

        return self._joined(b, start, b.if_(b.op("ne", some, b.const(0, i32)), rest, lambda inner: rows))

    # -- the rest of long rows ----------------------------------------------------------------------------------

    def _long_rows(self, b: Builder, extent: Value, begin: Value, axis: int, rows: Sequence[Value], shape: Shape) -> Sequence[Value]:
        count = shape_of(extent)[axis]
        held = self._handed_over(b, extent, axis)

        def row(inner: Builder, number: Value, *sums: Value) -> Sequence[Value]:
            length = inner.op("load", held[extent][0], number)

            def walked(at: Builder) -> Sequence[Value]:
                env = {**self.env, **{value: self._taken(at, cell, number, kind) for value, (cell, kind) in held.items()}}
                lanes = [widen(at, v, shape) for v in self._nothing(at, sums)]

                def along(inmost: Builder, first: Value, *carried: Value) -> Sequence[Value]:
                    row = self._iota(inmost, axis, count, None)
                    row = inmost.mul(row, inmost.splat(self.step, row))
                    for step in range(self.long_steps):
                        places = self._iota(inmost, self.position, self.step, inmost.add(first, inmost.index(step * self.step * count)))
                        wide = join(shape_of(row), shape_of(places))
                        places = inmost.add(widen(inmost, row, wide), widen(inmost, places, wide))
                        carried = tuple(self._term(inmost, places, self._before(inmost, places, length), env, carried))
                    return carried

                lanes = list(at.for_(begin, length, at.index(self.long_steps * self.step * count), lanes, along, name="k"))
                totals = self._folded(at, lanes, [self.position, axis])
                found = []
                for total, old in zip(combined(at, self.kind, sums, totals) if self.kind else (), sums, strict=True):
                    own = self._iota(at, axis, count, None)
                    mine = widen(at, at.op("eq", own, at.like(number, own)), shape_of(old))
                    found.append(at.select(mine, widen(at, total, shape_of(old)), old))
                return found

            return inner.if_(inner.op("gt", length, begin), walked, lambda at: sums)

        return b.for_(b.index(0), b.index(count), b.index(1), rows, row, name="row")

    def _of_rows(self, axis: int) -> list[Value]:
        """What terms, or their index, use that differs from row to row."""
        used = dict.fromkeys(v for op in walk(self.region) for v in op.operands) | dict.fromkeys(self.around)
        return [v for v in used if v in self.env and shape_of(self.env[v]) and shape_of(self.env[v])[axis] > 1]

    def _is_row_by_row(self, axis: int) -> bool:
        """Whether all of it is one number for a row."""
        return all(prod(shape_of(self.env[v])) == shape_of(self.env[v])[axis] for v in self._of_rows(axis))

    def _handed_over(self, b: Builder, extent: Value, axis: int) -> dict[Value, tuple[Value, Value]]:
        """What terms need of their rows, in shared memory: for each value that differs from row to row, where it lies and what it was."""
        held: dict[Value, tuple[Value, Value]] = {}
        for value, tile in (*((v, self.env[v]) for v in self._of_rows(axis)), (extent, extent)):
            shape = shape_of(tile)
            stored = b.cast(tile, i32) if dtype_of(tile.type) is bool_ else tile
            cell = b.op("alloc", space="shared", shape=(shape[axis],), dtype=dtype_of(stored.type), name="row")
            b.multi("store", cell, self._iota(b, axis, shape[axis], None), stored)
            held[value] = (cell, tile)
        b.multi("barrier")
        return held

    def _taken(self, b: Builder, cell: Value, number: Value, was: Value) -> Value:
        value = b.op("load", cell, number)
        return b.op("ne", value, b.const(0, i32)) if dtype_of(was.type) is bool_ else value

    # -- terms --------------------------------------------------------------------------------------------------

    def _before(self, b: Builder, number: Value, end: Value) -> Value:
        """Which of the numbers lie before the end of their row."""
        wide = join(shape_of(number), shape_of(end))
        return b.op("lt", widen(b, number, wide), widen(b, end, wide))

    def _term(self, b: Builder, number: Value, active: Value, env: Mapping[Value, Value], carried: Sequence[Value]) -> Sequence[Value]:
        """What was carried and the terms of these turns. Rows under conditions that do not hold have no turns, so that nothing else is asked."""
        local = dict(env)
        local[self.region.args[-1]] = self.index_of(b, number, env)
        values = self.lowering.ops(b, self.region.ops, local, [Condition(active, edge=False)])
        if not self.kind:
            return []
        shape = join(shape_of(active), *(shape_of(v) for v in (*values, *carried)))
        keep = widen(b, active, shape)
        dtypes = [dtype_of(v.type) for v in values]
        terms = [
            b.select(keep, widen(b, v, shape), b.like(b.const(n, d), keep))
            for v, n, d in zip(values, identities(self.kind, dtypes), dtypes, strict=True)
        ]
        return combined(b, self.kind, carried, terms)

    def _of_active_rows(self, b: Builder, extent: Value) -> Value:
        """Rows beyond the edge, and those under a condition that does not hold, have no turns."""
        for mask in self.masks:
            shape = join(shape_of(mask.value), shape_of(extent))
            none = widen(b, b.index(0), shape) if shape else b.index(0)
            extent = b.select(widen(b, mask.value, shape), widen(b, extent, shape), none)
        return extent

    def _full_shape(self, b: Builder, extent: Value, nothing: Sequence[Value]) -> Shape:
        """The shape of the sums that lanes carry, once a step was taken."""
        trial = Builder(b.span)
        number = self._iota(trial, self.position, self.step, trial.index(0))
        values = self._term(trial, number, self._before(trial, number, extent), self.env, nothing)
        return join(shape_of(extent), shape_of(number), *(shape_of(v) for v in values))

    def _nothing(self, b: Builder, like: Sequence[Value]) -> list[Value]:
        dtypes = [dtype_of(v.type) for v in like]
        return [b.const(v, d) for v, d in zip(identities(self.kind, dtypes), dtypes, strict=True)] if self.kind else []

    def _folded(self, b: Builder, lanes: Sequence[Value], axes: Sequence[int]) -> Sequence[Value]:
        for axis in axes:
            lanes = b.multi("reduce_tile", *lanes, kind=self.kind, axis=axis) if self.kind else ()
        return lanes

    def _joined(self, b: Builder, start: Sequence[Value], rows: Sequence[Value]) -> Sequence[Value]:
        return combined(b, self.kind, start, rows) if self.kind else ()

    def _iota(self, b: Builder, axis: int, size: int, first: Value | None) -> Value:
        shape = tuple(size if a == axis else 1 for a in range(self.lowering.rank))
        iota = b.op("iota", shape=shape, axis=axis)
        return iota if first is None else b.add(b.op("broadcast", first, shape=shape), iota)


def _meets_others(kernel: Kernel, region: Block) -> bool:
    """Whether what is done there makes the threads of a block wait for each other: loops whose ends they have to agree on, and arrays through which
    elements change threads."""
    inside = list(walk(region))
    if any(op.regions and op.opcode != "if" for op in inside):
        return True
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "accumulate", "atomic")}
    read = {op.operands[0] for op in walk(kernel.body) if op.opcode == "load"}
    return any(op.opcode in ("load", "store", "accumulate") and op.operands[0] in written & read for op in inside)
