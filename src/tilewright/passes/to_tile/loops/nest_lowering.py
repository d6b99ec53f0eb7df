"""What all parts of the lowering of a nest know of it: the kernel, its schedule, where in a row the code at hand is.

In: a loop-stage kernel and its schedule. Out: `NestLowering`, of which `lower_loops` is the one that lowers ops; the parts beside this file ask it for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from tilewright.analysis.affine import analyse
from tilewright.analysis.guarded import guarded_loads
from tilewright.analysis.loop_nest import inner_walks, nest_of
from tilewright.base.dtypes import i64, u32
from tilewright.base.sizes import ONE, Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Kernel, Op, Value, is_watched, watched_axes
from tilewright.passes.common.nest_shapes import Condition, Shape, shape_of, widen
from tilewright.passes.common.shift_rows import aligned_accesses, row_start
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.loops.borders import Borders

if TYPE_CHECKING:
    from tilewright.analysis.recomputed import Recomputed
    from tilewright.passes.common.scan_loops import ScanLoop


class RowPart(Enum):
    """Where in a row code is: among its borders, in the middle of any row, or in the middle of a row that is no border itself."""

    BORDER = 0
    MIDDLE = 1
    INNER = 2


class NestLowering(ABC):
    """The lowering of one kernel. Parts of it change where the code at hand is."""

    def __init__(self, kernel: Kernel, schedule: Schedule, target: Target) -> None:
        self.kernel, self.schedule, self.target = kernel, schedule, target
        self.nest = nest_of(kernel)
        self.forms = analyse(kernel)
        self.region = self.nest.parallel.regions[0]
        self.tiled = [p for p, t in enumerate(schedule.tiles) if t > 1]
        self.rank = len(self.tiled) + (1 if schedule.reduce_tile > 1 else 0)
        self.reduce_position = self.rank - 1 if schedule.reduce_tile > 1 else None
        self.inside_reduction = False
        """Whether the code at hand belongs to a reduction, sweep or scan; loops in those are serial."""
        inner = () if target.simt or schedule.reduce_tile == 1 else inner_walks(kernel, self.nest)
        self.inner_walks = {id(op) for op in inner}
        """CPU: reductions and sweeps in serial loops that vectors go along, where there are none at the top."""
        self.unguarded = {id(g.load) for g in guarded_loads(kernel) if g.needs_no_guard and not watched_axes(g.load)}
        """Loads under conditions that stay inside anyway."""
        rows = not target.simt and schedule.reduce_tile > 1 and schedule.vector_on_reduction
        self.recomputed = self._find_recomputed() if rows and not is_watched(kernel) else None
        walks = (*self.nest.reductions, *self.nest.sweeps)
        self.row_start = row_start(kernel, self.nest.parallel, walks, schedule.vector) if schedule.shifted and walks else None
        self.aligned = aligned_accesses(kernel, walks, self.row_start, schedule.vector) if self.row_start is not None else set()
        self.tested: set[tuple[int, int]] = set()
        """Accesses, and axes of them, whose indices were tested before the loop they stand in."""
        self.shift: Value | None = None
        """How many elements a row's tile begins before the row."""
        self.scan: ScanLoop | None = None
        """The loop that the threads of a block walk together."""
        if schedule.scan:
            from tilewright.passes.common.scan_loops import find_scans, loads_inside

            self.scan = find_scans(kernel)
            if self.scan is not None:
                self.unguarded |= loads_inside(kernel, self.scan)
        self.borders = self._find_borders()
        self.place: RowPart | None = None
        """Where in a row the code at hand is, where rows have borders."""
        self.clips: dict[Value, Value] = {}
        """Indices of sums that begin later, at a border, and where."""
        self.clipped: set[int] = set()
        """Comparisons that hold since sums end at the border."""
        self.groups_rows = not target.simt and schedule.row_axis >= 0 and schedule.tiles[schedule.row_axis] > 1
        """CPU: whether several rows are done together."""
        self.unchosen: set[int] = set()
        """GPU: branches whose terms are nothing where their condition does not hold."""

    def _find_recomputed(self) -> Recomputed | None:
        from tilewright.analysis.recomputed import find_recomputed

        return find_recomputed(self.kernel)

    def _find_borders(self) -> Borders | None:
        axis = self.schedule.vector_index
        if self.target.simt or axis < 0 or len(self.tiled) != 1 or self.reduce_position is not None or self.kernel.attrs.get("frames"):
            return None
        borders = Borders(self.kernel, self.nest.parallel, self.forms, axis)
        return borders if borders.any else None

    @abstractmethod
    def ops(self, b: Builder, ops: Sequence[Op], env: dict[Value, Value], masks: list[Condition]) -> tuple[Value, ...]:
        """Lower ops in order; returns what the block yields."""

    @abstractmethod
    def lower_op(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        """Lower one op; returns its results."""

    @abstractmethod
    def rescheduled(self, schedule: Schedule) -> NestLowering:
        """The same kernel with another schedule."""

    @contextmanager
    def within_reduction(self) -> Iterator[None]:
        """The code of a reduction, sweep or scan."""
        before, self.inside_reduction = self.inside_reduction, True
        try:
            yield
        finally:
            self.inside_reduction = before

    @contextmanager
    def at_place(self, place: RowPart) -> Iterator[None]:
        """The code for a part of a row."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    @contextmanager
    def clipping(self, lows: Mapping[Value, Value], tests: set[int]) -> Iterator[None]:
        """The code of a sum that ends at the border: its indices begin there, and these comparisons hold."""
        before = self.clips, self.clipped
        self.clips, self.clipped = {**self.clips, **lows}, self.clipped | tests
        try:
            yield
        finally:
            self.clips, self.clipped = before

    def block_indices(self, b: Builder, steps: Sequence[int | Size], extents: Sequence[Size] = ()) -> tuple[Size, list[Value]]:
        """The number of blocks when index p advances by steps[p] per block, and this block's first index along each. `extents`, if not those of the nest."""
        counts = [ceildiv(extent, Size.of(step) if isinstance(step, int) else step) for extent, step in zip(extents or self.nest.extents, steps, strict=True)]
        blocks = ONE
        for count in counts:
            blocks = blocks * count
        pid = b.op("program_id", axis=0)
        if len(counts) == 1:
            positions = [pid]
        else:
            # Block numbers fit 32 bits, where division is cheap.
            positions = []
            rest = b.cast(pid, u32)
            for position in reversed(range(len(counts))):
                if position == 0 or all(c == ONE for c in counts[:position]):
                    positions.append(b.cast(rest, i64))
                    positions += [b.index(0)] * position
                    break
                divisor = b.cast(b.index(counts[position]), u32)
                quotient = b.op("floordiv", rest, divisor)
                positions.append(b.cast(b.sub(rest, b.mul(quotient, divisor)), i64))
                rest = quotient
            positions.reverse()
        starts = [p if s == 1 else b.mul(p, b.index(s)) for p, s in zip(positions, steps, strict=True)]
        return blocks, starts

    def widen(self, b: Builder, value: Value, shape: Shape) -> Value:
        """The value in that shape."""
        return widen(b, value, shape)

    def row_terms(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition], inside: Value | None) -> Sequence[Value]:
        """What a reduction's body yields; at the edge of a row, for the indices inside of it."""
        return self.ops(b, op.regions[0].ops, env, masks if inside is None else [*masks, Condition(inside, edge=True)])

    def index_tile(self, b: Builder, start: Value, position: int, extent: int) -> Value:
        """`start + 0, 1, 2…` along a tile axis."""
        shape = tuple(extent if a == position else 1 for a in range(self.rank))
        iota = b.op("iota", shape=shape, axis=position)
        return b.add(b.op("broadcast", start, shape=shape), iota)

    def whole_row(self, b: Builder, extent: Value) -> tuple[Value, Value]:
        """The indices of a row that one tile holds, and which of them are the row's."""
        position, tile = self.reduce_position, self.schedule.reduce_tile
        assert position is not None
        if self.shift is None:
            index = self.index_tile(b, b.index(0), position, tile)
            return index, b.op("lt", index, b.like(extent, index))
        first = b.sub(b.index(0), self.shift)
        index = self.index_tile(b, first, position, tile)
        return index, self.within_row(b, first, index, extent)

    def within_row(self, b: Builder, first: Value, index: Value, extent: Value) -> Value:
        """Which indices of a tile that begins at `first`, maybe before the row, are the row's."""
        assert self.reduce_position is not None
        places = self.index_tile(b, b.index(0), self.reduce_position, self.schedule.reduce_tile)
        before = b.sub(b.index(0), first)
        begun = b.op("lt", b.sub(b.like(before, places), places), b.splat(1, places))  # index > -1
        return b.logical_and(begun, b.op("lt", index, b.like(extent, index)))

    def extreme(self, b: Builder, kind: str, value: Value, by_warp: bool = False) -> Value:
        """The least or greatest of a tile; of what a warp has of it, for each warp, where a warp's own will do."""
        if not shape_of(value):
            return value
        for axis in range(self.rank):
            attrs: dict[str, Attr] = {"kind": kind, "axis": axis}
            if shape_of(value)[axis] > 1 or not by_warp:
                value = b.emit("reduce_tile", [value], attrs | ({"by_warp": True} if by_warp else {}))[0]
        return b.op("item", value)

    def folded(self, b: Builder, kind: str, lanes: Sequence[Value]) -> Sequence[Value]:
        """Lanes combined along the reduction's axis; scalars where nothing else is left."""
        assert self.reduce_position is not None
        results: Sequence[Value] = b.multi("reduce_tile", *lanes, kind=kind, axis=self.reduce_position)
        return [b.op("item", v) for v in results] if all(s == 1 for s in shape_of(results[0])) else results
