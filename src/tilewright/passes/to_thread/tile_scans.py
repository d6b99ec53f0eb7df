"""Scans along an axis of a tile: in a thread's vector, then between lanes by shuffles, then between warps through shared memory.

In: a `scan_tile` over a tile in a blocked layout, whose vectors lie along the axis, and the registers it scans. Out: thread-stage ops, always in the same order: what is
before each element, and what there is after the last.

Along the axis an element is number ((register * warps + warp) * lanes + lane) * vector + v: each step of registers is scanned by all warps before the next one. What
each warp has in each step is left in shared memory; then every warp reads all of it, a lane each, and scans that in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, i32
from tilewright.base.errors import CompilerBug
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Vec, dtype_of
from tilewright.passes.common.registers import Cell, Registers, ThreadView, shape_of
from tilewright.passes.common.scan_loops import nothing


class TileScans:
    """Scans of tiles as `view` holds them."""

    def __init__(self, view: ThreadView) -> None:
        self.view = view

    def scan(self, b: Builder, op: Op, terms: Registers, first: Registers, in_loop: bool) -> tuple[Registers, Registers]:
        """The results of a `scan_tile`: what is before each element, and what is after the last. `in_loop`: it is done again and again."""
        axis, kind, dtype, shape = op.attrs["axis"], str(op.attrs["kind"]), dtype_of(op.operands[0].type), shape_of(op.operands[0])
        assert isinstance(axis, int)
        own = _Kind(kind, dtype)
        rest = shape_of(op.operands[1])
        lines: dict[Cell, list[Cell]] = {}
        for cell in self.view.cells(shape):
            lines.setdefault(self.view.collapsed(cell, rest), []).append(cell)
        warps = self.view.layout.warps[axis]
        steps, warp_size = len(next(iter(lines.values()))), self.view.target.warp_size
        if axis != self.view.axis or (warps > 1 and (len(lines) > 1 or self.view.layout.lanes[axis] != warp_size or steps * warps > warp_size)):
            raise CompilerBug.at("TW040", f"tile_scans: no lowering for lines along axis {axis} of {shape}", op.span)
        before: dict[Cell, Value] = {}
        last: dict[Cell, Value] = {}
        for line, cells in lines.items():
            inside = [self._in_thread(b, own, terms.cells[cell]) for cell in cells]
            lanes = [self._across_lanes(b, own, prefix[-1], axis) for prefix in inside]
            if warps > 1:
                starts, last[line] = self._across_warps(b, own, [total for _, total in lanes], first.cells[line], axis, in_loop)
            else:
                starts, last[line] = [], first.cells[line]
                for _, total in lanes:
                    starts.append(last[line])
                    last[line] = own.combine(b, last[line], total)
            for cell, prefix, (lane, _), start in zip(cells, inside, lanes, starts, strict=True):
                base = own.combine(b, start, lane)
                elements = [base, *(own.combine(b, base, part) for part in prefix[:-1])]
                before[cell] = b.op("pack", *elements) if len(elements) > 1 else base
        return Registers(shape, before), Registers(rest, last)

    def _in_thread(self, b: Builder, own: _Kind, value: Value) -> list[Value]:
        """What a thread's own elements of a step come to, one after the other."""
        if not isinstance(value.type, Vec):
            return [value]
        found: list[Value] = []
        for lane in range(value.type.width):
            element = b.op("extract", value, lane=lane)
            found.append(own.combine(b, found[-1], element) if found else element)
        return found

    def _across_lanes(self, b: Builder, own: _Kind, value: Value, axis: int) -> tuple[Value, Value]:
        """What is before each lane of a line, and what all have together."""
        lanes, stride = self.view.layout.lanes, 1
        for a in range(axis + 1, len(lanes)):
            stride *= lanes[a]
        digit = self.view.lane_digits[axis]
        last = b.add(self.view.lane, b.mul(b.sub(b.index(lanes[axis] - 1), digit), b.index(stride)))
        return self._lanes(b, own, value, digit, lanes[axis], stride, last)

    def _lanes(self, b: Builder, own: _Kind, value: Value, digit: Value, count: int, stride: int, last: Value) -> tuple[Value, Value]:
        """The same for lanes that have these numbers along a line, so many of them, of which `last` is the last."""
        identity = own.identity(b)
        distance = 1
        while distance < count:
            other = b.op("shuffle", value, b.const(distance * stride, i32), mode="up")
            there = b.op("ge", digit, b.index(distance))
            value = own.combine(b, b.select(there, other, identity), value)
            distance *= 2
        if count == 1:
            return identity, value
        before = b.select(b.op("ge", digit, b.index(1)), b.op("shuffle", value, b.const(stride, i32), mode="up"), identity)
        return before, b.op("shuffle", value, b.cast(last, i32), mode="idx")

    def _across_warps(self, b: Builder, own: _Kind, totals: Sequence[Value], first: Value, axis: int, in_loop: bool) -> tuple[list[Value], Value]:
        """Where each step of this warp begins, and what is after the last: shared[step][warp], which a lane each reads."""
        warps, warp_size = self.view.layout.warps[axis], self.view.target.warp_size
        count = len(totals) * warps
        array = b.op("alloc", dtype=own.dtype, shape=(count,), space="shared")
        warp = self.view.warp_digits[axis]

        def write(inner: Builder) -> list[Value]:
            for step, total in enumerate(totals):
                inner.multi("store", array, inner.add(warp, inner.index(step * warps)), total)
            return []

        b.if_(b.op("eq", self.view.lane, b.index(0)), write, lambda inner: [])
        b.multi("barrier")
        place = self.view.lane if count == warp_size else b.op("min", self.view.lane, b.index(count - 1))
        before, after = self._lanes(b, own, b.op("load", array, place), place, count, 1, b.index(count - 1))
        before = own.combine(b, first, before)
        starts = [b.op("shuffle", before, b.cast(b.add(warp, b.index(step * warps)), i32), mode="idx") for step in range(len(totals))]
        if in_loop:
            # The next round must not overwrite what a slower warp still reads.
            b.multi("barrier")
        return starts, own.combine(b, first, after)


class _Kind:
    """How two values are combined, of one dtype."""

    def __init__(self, kind: str, dtype: DType) -> None:
        self.kind, self.dtype = kind, dtype

    def combine(self, b: Builder, left: Value, right: Value) -> Value:
        return b.op(self.kind, left, right)

    def identity(self, b: Builder) -> Value:
        return b.const(nothing(self.kind, self.dtype), self.dtype)
