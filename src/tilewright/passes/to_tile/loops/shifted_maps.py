"""Maps whose rows begin anywhere, on a GPU: tiles along a row begin before it, at whole vectors (`common/shift_rows.py`).

In: a nest without reductions, whose schedule says `shifted`. Out: the code of one block. A tile of a single row that lies wholly inside of it needs no masks; of several
rows, which are short, each has its ends in the tile, and a thread has a vector of one row.

    out[i, j] = x[i, j] * s[i], rows of 197, vectors of 8
    -> shift = i * 197 mod 8;  j = 256 * block + iota - shift;  where 0 <= j < 197 { store out, i, j … }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.common.nest_shapes import Condition, join, shape_of
from tilewright.passes.common.shift_rows import aligned_in_map, map_start, shift_of
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering


class ShiftedMap:
    """One block of such a map."""

    def __init__(self, nest: NestLowering) -> None:
        self.nest = nest
        self.axis, self.vector, self.tiles = nest.schedule.vector_index, nest.schedule.vector, nest.schedule.tiles
        start = map_start(nest.kernel, nest.nest.parallel, self.axis, self.vector)
        assert start is not None
        self.start = start
        nest.aligned |= aligned_in_map(nest.kernel, nest.nest.parallel, self.axis, start, self.vector)
        self.place = nest.tiled.index(self.axis)
        self.alone = len(nest.tiled) == 1

    def lower(self, b: Builder, env: Mapping[Value, Value]) -> Size:
        nest, axis = self.nest, self.axis
        reach = [extent + (self.vector - 1) if p == axis else extent for p, extent in enumerate(nest.nest.extents)]
        blocks, starts = nest.block_indices(b, self.tiles, reach)
        extents = [b.index(e) for e in nest.nest.extents]
        local, masks = dict(env), list[Condition]()
        for p, index in enumerate(nest.region.args):
            local[index] = starts[p]
            if p != axis and self.tiles[p] > 1:
                local[index] = nest.index_tile(b, starts[p], nest.tiled.index(p), self.tiles[p])
                masks.append(Condition(b.op("lt", local[index], b.like(extents[p], local[index])), edge=True))
        shift = shift_of(b, self.start, local, self.vector)
        if not self.alone:
            self._tile(b, local, self._shifted(b, starts[axis], shift), extents[axis], masks, True)
            return blocks
        first = b.sub(starts[axis], shift)
        full = b.logical_and(b.op("ge", first, b.index(0)), b.op("le", b.add(first, b.index(self.tiles[axis])), extents[axis]))

        def body(inner: Builder, masked: bool) -> list[Value]:
            index = nest.index_tile(inner, first, self.place, self.tiles[axis])
            return self._tile(inner, local, index, extents[axis], masks, masked)

        b.if_(full, lambda inner: body(inner, False), lambda inner: body(inner, True))
        return blocks

    def _shifted(self, b: Builder, start: Value, shift: Value) -> Value:
        """The indices along rows of which each is shifted on its own."""
        index = self.nest.index_tile(b, start, self.place, self.tiles[self.axis])
        shape = join(shape_of(index), shape_of(shift))
        return b.sub(self.nest.widen(b, index, shape), self.nest.widen(b, shift, shape))

    def _tile(self, b: Builder, local: Mapping[Value, Value], index: Value, extent: Value, masks: Sequence[Condition], masked: bool) -> list[Value]:
        own = list(masks)
        if masked:
            begun = b.op("lt", b.sub(b.splat(0, index), index), b.splat(1, index))  # index > -1
            own.append(Condition(b.logical_and(begun, b.op("lt", index, b.like(extent, index))), edge=True))
        self.nest.ops(b, self.nest.region.ops, {**local, self.nest.region.args[self.axis]: index}, own)
        return []
