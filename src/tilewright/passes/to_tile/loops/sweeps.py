"""Inner loops of independent iterations, along the axis that reductions use: tiles, then the rest.

In: such a loop. Out: tile-stage loops.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.row_arrays import row_arrays
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor
from tilewright.passes.common.nest_shapes import Condition, join, shape_of, widen
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering

LINE = 64
"""Bytes that a CPU fetches together."""
FETCHED = 4096
"""Elements by which what a CPU fetches lies ahead, if rows are not shorter."""


class Sweeps:
    """The sweeps of one kernel."""

    def __init__(self, lowering: NestLowering) -> None:
        self.lowering, self.schedule, self.target = lowering, lowering.schedule, lowering.target
        rows = not self.target.simt and self.schedule.reduce_tile > 1 and self.schedule.vector_on_reduction
        self.fetched = row_arrays(lowering.region) if rows else {}
        """Arrays whose next rows are fetched, with an access to each; not a result in which a sum leaves something, for that is there already."""
        if lowering.recomputed is not None:
            self.fetched.pop(lowering.recomputed.store.operands[0], None)

    def lower(
        self, b: Builder, op: Op, low: Value, high: Value, step: Value, env: dict[Value, Value], masks: list[Condition]
    ) -> None:
        """An inner loop of independent iterations, along the axis reductions use: tiles, then the rest."""
        position, tile = self.lowering.reduce_position, self.schedule.reduce_tile
        assert position is not None
        if self.schedule.whole:
            index, inside = self.lowering.whole_row(b, high)
            self.lowering.ops(b, op.regions[0].ops, {**env, op.regions[0].args[0]: index}, [*masks, Condition(inside, edge=True)])
            return
        zero, width = b.index(0), b.index(tile)
        count = b.op("max", b.op("floordiv", b.add(b.sub(high, low), b.sub(step, b.index(1))), step), zero)
        whole = b.mul(b.op("floordiv", count, width), width)

        def body(inner: Builder, number: Value, masked: bool) -> list[Value]:
            """Iterations `number`, `number + 1`…: one, or a tile of them."""
            local, edge = dict(env), []
            if shape_of(number) and masked:
                edge = [Condition(inner.op("lt", number, inner.like(count, number)), edge=True)]
            index = inner.add(inner.like(low, number), inner.mul(number, inner.like(step, number)))
            local[op.regions[0].args[0]] = index
            self.lowering.ops(inner, op.regions[0].ops, local, [*masks, *edge])
            return []

        ahead = b.op("min", count, b.index(FETCHED)) if self.fetched else count

        def step_along(inner: Builder, k: Value) -> list[Value]:
            self._fetch_ahead(inner, inner.add(k, ahead), env)
            return body(inner, self.lowering.index_tile(inner, k, position, tile), False)

        b.for_(zero, whole, width, [], step_along)
        if self.target.simt:
            b.if_(
                b.op("lt", whole, count),
                lambda inner: body(inner, self.lowering.index_tile(inner, whole, position, tile), True),
                lambda inner: [],
            )
        else:
            narrow = self.schedule.vector
            if 1 < narrow < tile and self.target.has_lane_masks and not self.lowering.inner_walks:
                b.for_(whole, count, b.index(narrow), [], lambda inner, k: body(inner, self.lowering.index_tile(inner, k, position, narrow), True))
                whole = count
            elif 1 < narrow < tile:
                last = b.mul(b.op("floordiv", count, b.index(narrow)), b.index(narrow))
                b.for_(whole, last, b.index(narrow), [], lambda inner, k: body(inner, self.lowering.index_tile(inner, k, position, narrow), False))
                whole = last
            if whole is not count:
                b.for_(whole, count, b.index(1), [], lambda inner, k: body(inner, k, False))

    def lower_ragged(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition]) -> None:
        """An inner loop of independent iterations that has bounds of its own in each row of the tile."""
        from tilewright.passes.to_tile.loops.ragged_rows import RaggedRows

        assert self.lowering.reduce_position is not None
        ends = [env[v] for v in op.operands[:3]]
        shape = join(*(shape_of(v) for v in ends))
        low, high, step = (widen(b, v, shape) for v in ends)
        count = b.op("floordiv", b.add(b.sub(high, low), b.sub(step, b.splat(1, step))), step)

        def index_of(inner: Builder, number: Value, local: Mapping[Value, Value]) -> Value:
            first, by = local[op.operands[0]], local[op.operands[2]]
            wide = join(shape_of(number), shape_of(first), shape_of(by))
            return inner.add(widen(inner, first, wide), inner.mul(widen(inner, number, wide), widen(inner, by, wide)))

        tile = self.schedule.reduce_tile
        rows = RaggedRows(self.lowering, op.regions[0], "", self.lowering.reduce_position, tile, tile // self.schedule.row_lanes, env, masks, index_of, op.operands[:3])
        rows.run(b, count, [])

    def _fetch_ahead(self, b: Builder, place: Value, env: Mapping[Value, Value]) -> None:
        """What the next rows read and write, a tile of it: rows follow one another in memory."""
        for memory, access in self.fetched.items():
            tensor = memory.type
            assert isinstance(tensor, Tensor)
            size = tensor.dtype.itemsize
            row = [env[v] for v in access.operands[1 : tensor.rank]]
            for line in range(0, self.schedule.reduce_tile * size, LINE):
                b.multi("prefetch", env[memory], *row, b.add(place, b.index(line // size)))
