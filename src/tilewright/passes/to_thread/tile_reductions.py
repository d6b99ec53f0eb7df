"""Reductions along an axis of a tile: in registers, then between lanes by shuffles, then between warps through shared memory, then between blocks.

In: `reduce_tile` ops over tiles in blocked layouts, and the registers they reduce. Out: thread-stage ops, always in the same order, and the
registers of the results.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import i32
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Blocked
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Vec, dtype_of
from tilewright.passes.common.combine import combine
from tilewright.passes.common.registers import Cell, Held, Registers, ThreadView, shape_of

_TWO_STEPS = 32
"""Threads along an axis from which on a block without warps combines in two steps."""


class TileReductions:
    """Reductions of tiles as `view` holds them."""

    def __init__(self, view: ThreadView) -> None:
        self.view = view
        self.blocks = view.layout.blocks if isinstance(view.layout, Blocked) else 1
        """Blocks that share a tile."""

    def reduce(self, b: Builder, op: Op, sources: Sequence[Registers], in_loop: bool) -> list[Registers]:
        """The results of a `reduce_tile` of these tiles. `in_loop`: it is done again and again."""
        axis, kind = op.attrs["axis"], str(op.attrs["kind"])
        assert isinstance(axis, int)
        shape = shape_of(op.operands[0])
        result_shape = tuple(1 if a == axis else e for a, e in enumerate(shape))
        # Along the reduced axis: registers, then the elements of the vector, then lanes, then warps.
        partial: dict[Cell, tuple[Value, ...]] = {}
        for cell in self.view.cells(shape):
            target = self.view.collapsed(cell, result_shape)
            values = tuple(s.cells[cell] for s in sources)
            partial[target] = combine(b, kind, partial[target], values) if target in partial else values
        for cell, values in partial.items():
            if axis == self.view.axis and shape[axis] > 1:
                whole = op.attrs.get("together") and isinstance(values[0].type, Vec)
                values = (b.op("fold", values[0], kind=kind, together=True),) if whole else self._across_vector(b, kind, values)
            partial[cell] = self._across_lanes(b, kind, values, axis) if shape[axis] > 1 else values
        if shape[axis] > 1 and self.view.layout.warps[axis] > 1 and not op.attrs.get("by_warp"):
            partial = self._across_warps(b, kind, partial, axis, in_loop)
        return [
            Registers(result_shape, {cell: values[position] for cell, values in partial.items()}) for position in range(len(op.results))
        ]

    def of_sums(self, b: Builder, op: Op, sums: Registers, in_loop: bool) -> Registers:
        """The result of a `reduce_tile` along the last axis, where a thread's own elements are one number already."""
        axis, kind = op.attrs["axis"], str(op.attrs["kind"])
        assert isinstance(axis, int)
        partial = {cell: self._across_lanes(b, kind, (value,), axis) for cell, value in sums.cells.items()}
        if self.view.layout.warps[axis] > 1:
            partial = self._across_warps(b, kind, partial, axis, in_loop)
        return Registers(sums.shape, {cell: values[0] for cell, values in partial.items()})

    def _across_vector(self, b: Builder, kind: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """Fold a vec onto itself, half by half."""
        while isinstance(values[0].type, Vec):
            halves = [b.multi("split", v) for v in values]
            values = combine(b, kind, [h[0] for h in halves], [h[1] for h in halves])
        return values

    def _across_lanes(self, b: Builder, kind: str, values: tuple[Value, ...], axis: int) -> tuple[Value, ...]:
        stride = 1
        for a in range(axis + 1, len(self.view.layout.lanes)):
            stride *= self.view.layout.lanes[a]
        distance = self.view.layout.lanes[axis] // 2
        while distance:
            offset = b.const(distance * stride, i32)
            others = tuple(self._shuffled(b, v, offset) for v in values)
            values = combine(b, kind, values, others)
            distance //= 2
        return values

    def _shuffled(self, b: Builder, value: Value, offset: Value) -> Value:
        if isinstance(value.type, Vec):
            lanes = [b.op("extract", value, lane=lane) for lane in range(value.type.width)]
            return b.op("pack", *(b.op("shuffle", v, offset, mode="xor") for v in lanes))
        return b.op("shuffle", value, offset, mode="xor")

    def _across_warps(
        self, b: Builder, kind: str, partial: dict[Cell, tuple[Value, ...]], axis: int, in_loop: bool
    ) -> dict[Cell, tuple[Value, ...]]:
        """Each warp writes what it has; after a barrier every thread combines all warps' parts in order. Where threads have no warps, and there are many, in
        two steps.

        shared[warp along the axis][cell][element][slot], a slot for each thread position off the axis.
        """
        if self.blocks > 1:
            return self._across_blocks(b, kind, partial, axis)
        warps = self.view.layout.warps[axis]
        slots, slot = 1, b.index(0)
        for a in range(len(self.view.layout.lanes)):
            if a != axis:
                count = self.view.layout.lanes[a] * self.view.layout.warps[a]
                position = b.add(b.mul(self.view.warp_digits[a], b.index(self.view.layout.lanes[a])), self.view.lane_digits[a])
                slot = b.add(b.mul(slot, b.index(count)), position)
                slots *= count
        cells = list(partial)
        arrays: list[Value] = []
        writer = b.op("eq", self.view.lane_digits[axis], b.index(0))
        width = 1
        for value in partial[cells[0]]:
            width = value.type.width if isinstance(value.type, Vec) else 1
            arrays.append(b.op("alloc", dtype=dtype_of(value.type), shape=(warps, len(cells), width, slots), space="shared"))

        def write(inner: Builder) -> list[Value]:
            for number, cell in enumerate(cells):
                for array, value in zip(arrays, partial[cell], strict=True):
                    for lane in range(width):
                        one = inner.op("extract", value, lane=lane) if isinstance(value.type, Vec) else value
                        where = (self.view.warp_digits[axis], inner.index(number), inner.index(lane), slot)
                        inner.multi("store", array, *where, one)
            return []

        b.if_(writer, write, lambda inner: [])
        b.multi("barrier")

        def combined(b: Builder, arrays: Sequence[Value], parts: Sequence[Value], number: int, lane: int) -> tuple[Value, ...]:
            """These parts of one element of a cell, in order."""
            total: tuple[Value, ...] | None = None
            for part in parts:
                values = tuple(b.op("load", array, part, b.index(number), b.index(lane), slot) for array in arrays)
                total = values if total is None else combine(b, kind, total, values)
            assert total is not None
            return total

        if not self.view.target.has_warps and warps >= _TWO_STEPS:
            # Every thread is a warp of its own: the first of them combine neighbours, so that nobody reads what all have.
            each = 1 << (warps.bit_length() // 2)
            first, arrays, warps = arrays, [b.op("alloc", dtype=dtype_of(a.type), shape=(warps // each, len(cells), width, slots), space="shared") for a in arrays], warps // each

            def gather(inner: Builder) -> list[Value]:
                low = inner.mul(self.view.warp_digits[axis], inner.index(each))
                parts = [inner.add(low, inner.index(k)) for k in range(each)]
                for number in range(len(cells)):
                    for lane in range(width):
                        for array, value in zip(arrays, combined(inner, first, parts, number, lane), strict=True):
                            inner.multi("store", array, self.view.warp_digits[axis], inner.index(number), inner.index(lane), slot, value)
                return []

            b.if_(b.op("lt", self.view.warp_digits[axis], b.index(warps)), gather, lambda inner: [])
            b.multi("barrier")
            in_loop = False  # the next round writes the second array behind its first barrier, which all come to after they have read
        results: dict[Cell, tuple[Value, ...]] = {}
        for number, cell in enumerate(cells):
            lanes = [combined(b, arrays, [b.index(warp) for warp in range(warps)], number, lane) for lane in range(width)]
            if width == 1:
                results[cell] = lanes[0]
            else:
                results[cell] = tuple(b.op("pack", *(part[k] for part in lanes)) for k in range(len(arrays)))
        if in_loop:
            # The next round must not overwrite what a slower warp still reads.
            b.multi("barrier")
        return results

    def own_part(self, b: Builder, op: Op, held: Held) -> tuple[Cell, Value]:
        """What this thread's own elements of a row, `held`, come to, and the cell it is in."""
        kind = str(op.attrs["kind"])
        shape = shape_of(op.operands[0])
        source = self.view.registers(b, held, shape)
        total: tuple[Value, ...] | None = None
        for cell in self.view.cells(shape):
            values = (source.cells[cell],)
            total = values if total is None else combine(b, kind, total, values)
        assert total is not None
        return self.view.collapsed(self.view.cells(shape)[0], shape_of(op.results[0])), self._across_vector(b, kind, total)[0]

    def across_lanes(self, b: Builder, kind: str, value: Value) -> Value:
        """What the lanes of a warp have along the last axis, combined."""
        return self._across_lanes(b, kind, (value,), len(self.view.layout.lanes) - 1)[0]

    def exchanged_pairs(self, b: Builder, values: Sequence[Value]) -> list[tuple[Value, ...]]:
        """What the warps of the cluster have, a lane for each; several where there are more warps than lanes."""
        axis = len(self.view.layout.lanes) - 1
        total = self.view.layout.warps[axis]
        own = total // self.blocks
        arrays = [b.op("alloc", dtype=dtype_of(v.type), shape=(own,), space="shared") for v in values]

        def write(inner: Builder) -> list[Value]:
            for array, value in zip(arrays, values, strict=True):
                inner.multi("store", array, self.view.own_warp, value)
            return []

        b.if_(b.op("eq", self.view.lane_digits[axis], b.index(0)), write, lambda inner: [])
        b.multi("cluster_sync")
        lane = self.view.lane_digits[axis]
        pairs: list[tuple[Value, ...]] = []
        for first in range(0, total, self.view.target.warp_size):
            warp = b.add(lane, b.index(first)) if total >= self.view.target.warp_size else b.op("and", lane, b.index(total - 1))
            rank = b.op("shr", warp, b.index(own.bit_length() - 1))
            place = b.op("and", warp, b.index(own - 1))
            pairs.append(tuple(b.op("load_remote", array, place, rank) for array in arrays))
        return pairs

    def across_warps_read(self, b: Builder, kind: str, value: Value) -> Value:
        """Lanes that hold what a warp each has, combined."""
        distance = 1
        while distance < min(self.view.layout.warps[-1], self.view.target.warp_size):
            (value,) = combine(b, kind, (value,), (b.op("shuffle", value, b.const(distance, i32), mode="xor"),))
            distance *= 2
        return value

    def _across_blocks(
        self, b: Builder, kind: str, partial: dict[Cell, tuple[Value, ...]], axis: int
    ) -> dict[Cell, tuple[Value, ...]]:
        """One row for the whole cluster: each warp writes what it has; after a barrier of the cluster a lane for each warp, be it in this
        block or another, fetches that, and lanes combine as ever."""
        ((cell, values),) = partial.items()
        first, *others = self.exchanged_pairs(b, values)
        for more in others:
            first = combine(b, kind, first, more)
        distance = 1
        while distance < min(self.view.layout.warps[axis], self.view.target.warp_size):
            first = combine(b, kind, first, tuple(b.op("shuffle", v, b.const(distance, i32), mode="xor") for v in first))
            distance *= 2
        return {cell: first}
