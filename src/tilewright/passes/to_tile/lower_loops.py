"""Loop stage -> tile stage: what one block of the grid computes.

In: a loop-stage kernel and its schedule. Out: a tile-stage kernel. Each parallel index becomes a scalar of the block or a
tile of indices; every value becomes a tile of the shape it depends on, so work that does not vary along an axis is done
once. Reductions are carried in tiles and combined across the tile at their end. Conditions that vary inside a tile become
masks and selects; uniform ones stay control flow.

Edges: on a GPU a block that is not full runs a masked twin of its code; on a CPU a block walks its chunk in full tiles and
finishes element by element, so that no masked access exists there.

    parallel %n (%i) { %v = load %x, %i; … }            tiles=(1024,)
    -> grid [ceildiv(n, 1024)]:  %lo = program_id * 1024
       if %lo + 1024 <= n { %i = %lo + iota; %v = load %x, %i : tile<f32, [1024]> … } else { the same, masked }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.analysis.loop_nest import has_long_loops, returns_to_elements
from tilewright.base.dtypes import bool_
from tilewright.base.sizes import ONE, Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Attrs, Block, Kernel, Op, Stage, Value, watched_axes
from tilewright.ir.rewrite import clone_ops
from tilewright.passes.common.nest_shapes import Condition, Shape, item, join, shape_of, widen
from tilewright.passes.common.shift_rows import shift_of
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.to_tile.loops.nest_lowering import NestLowering, RowPart

if TYPE_CHECKING:
    from tilewright.passes.to_tile.loops.control_flow import ControlFlow
    from tilewright.passes.to_tile.loops.reductions import Reductions

LOOP_WEIGHT = 16
"""How many elements of a CPU's work a point counts as that runs through a loop of its own."""


def lower_loops(kernel: Kernel, schedule: Schedule, target: Target) -> Kernel:
    """The tile-stage kernel."""
    if schedule.window:
        from tilewright.passes.windows.window_terms import order_sums

        kernel = order_sums(kernel, schedule)
    return LoopLowering(kernel, schedule, target).run()


class LoopLowering(NestLowering):
    """Lowers the ops of a nest; `loops/` has the rows of a CPU, control flow and reductions."""

    @cached_property
    def _control_flow(self) -> ControlFlow:
        from tilewright.passes.to_tile.loops.control_flow import ControlFlow

        return ControlFlow(self)

    @cached_property
    def _reductions(self) -> Reductions:
        from tilewright.passes.to_tile.loops.reductions import Reductions

        return Reductions(self)

    @cached_property
    def _enclosing(self) -> dict[int, tuple[Value, ...]]:
        """For each `accumulate`, the indices of the loops that it stands in."""
        return _loops_around(self.nest.parallel, ())

    def rescheduled(self, schedule: Schedule) -> LoopLowering:
        return LoopLowering(self.kernel, schedule, self.target)

    # -- the whole kernel ---------------------------------------------------------------------------------------

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        env: dict[Value, Value] = {p: p for p in self.kernel.params}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], env)
        blocks = self._gpu(b, env) if self.target.simt else self._cpu(b, env)
        attrs = dict(self.kernel.attrs)
        attrs["schedule"] = self.schedule.describe()
        if not self.target.simt and has_long_loops(self.kernel, self.nest) and returns_to_elements(self.kernel, self.nest):
            attrs["weight"] = LOOP_WEIGHT
        if self.schedule.whole:
            attrs["early"] = True  # such kernels are short: what starts them overlaps the end of the kernel before
        if self.schedule.flat:
            attrs["short_rows"] = True  # a row that registers hold has indices of 32 bits
        if self.schedule.turned:
            attrs["turned"] = self.schedule.turned
        if self.schedule.resident:
            attrs["min_blocks"] = self.schedule.resident
        name = self.nest.reduce_extent.product_name
        if self.schedule.whole and name is not None:
            # The schedule was made for rows that need all registers of a thread.
            least = self.schedule.reduce_tile - self.schedule.row_step + (0 if self.schedule.shifted else 1)
            attrs["least"] = ((name, least),) if self.schedule.reduce_tile > self.schedule.row_step else ()
        if self.schedule.window:
            attrs["tiled"] = tuple(self.nest.extents[p] for p in self.tiled)
        return replace(
            self.kernel, stage=Stage.TILE, body=Block((), tuple(b.ops)), grid=(blocks,), attrs=MappingProxyType(attrs)
        )

    def _gpu(self, b: Builder, env: dict[Value, Value]) -> Size:
        if self.schedule.shifted and self.row_start is None:
            from tilewright.passes.to_tile.loops.shifted_maps import ShiftedMap

            return ShiftedMap(self).lower(b, env)
        tiles = self.schedule.tiles
        blocks, starts = self.block_indices(b, tiles)
        extents = [b.index(e) for e in self.nest.extents]
        full: Value | None = None
        for p in self.tiled:
            if self.nest.extents[p] == ONE or self.nest.extents[p].divisible_by(tiles[p], self.kernel.facts):
                continue
            if self.schedule.window and (p != self.schedule.along or self.schedule.masked):
                continue  # a thread's own results are all there or none is
            inside = b.op("le", b.add(starts[p], b.index(tiles[p])), extents[p])
            full = inside if full is None else b.logical_and(full, inside)

        def body(inner: Builder, masked: bool) -> list[Value]:
            local, masks = dict(env), []
            for p, index in enumerate(self.region.args):
                if tiles[p] == 1 or self.nest.extents[p] == ONE:
                    local[index] = starts[p]  # of an index that is always 0 there is one element, whatever the tile: stores need not name it
                    continue
                local[index] = self.index_tile(inner, starts[p], self.tiled.index(p), tiles[p])
                cut = masked or (self.schedule.window and (p != self.schedule.along or self.schedule.masked))
                if cut and not self.nest.extents[p].divisible_by(tiles[p], self.kernel.facts):
                    limit = inner.like(extents[p], local[index])
                    masks.append(Condition(inner.op("lt", local[index], limit), edge=True))
            if self.row_start is not None:
                self.shift = shift_of(inner, self.row_start, local, self.schedule.vector)
            self.ops(inner, self.region.ops, local, masks)
            return []

        if full is None:
            body(b, False)
        elif self.schedule.row_lanes:
            body(b, True)  # rows that end at different places are masked anyway
        else:
            b.if_(full, lambda inner: body(inner, False), lambda inner: body(inner, True))
        return blocks

    def _cpu(self, b: Builder, env: dict[Value, Value]) -> Size:
        from tilewright.passes.to_tile.loops.cpu_blocks import CpuBlocks

        return CpuBlocks(self).lower(b, env)

    # -- one body -----------------------------------------------------------------------------------------------

    def ops(self, b: Builder, ops: Sequence[Op], env: dict[Value, Value], masks: list[Condition]) -> tuple[Value, ...]:
        for op in ops:
            with b.at(op.span):
                if op.opcode == "yield":
                    return tuple(env[v] for v in op.operands)
                results = self.lower_op(b, op, env, masks)
                env.update(zip(op.results, results, strict=True))
        return ()

    def lower_op(self, b: Builder, op: Op, env: dict[Value, Value], masks: list[Condition]) -> Sequence[Value]:
        twice = self.recomputed
        if twice is not None and op is twice.again:
            return [self._load(b, [env[v] for v in twice.store.operands[:-1]], masks, {})]
        if twice is not None and op is twice.first:
            self.recomputed = None  # so that this one is computed here
            (value,) = self.lower_op(b, op, env, masks)
            self.recomputed = twice
            local = {**env, twice.loop.regions[0].args[0]: env[twice.sum.regions[0].args[0]]}
            self._store(b, [*(local[v] for v in twice.store.operands[:-1]), value], masks, {})
            return [value]
        if id(op) in self.clipped:
            return [b.const(True, bool_)]
        if self.borders is not None and self.place in (RowPart.MIDDLE, RowPart.INNER):
            known = self.borders.known(b, op, env, self.place is RowPart.INNER)
            if known is not None:
                return [known]
        operands = [env[v] for v in op.operands]
        if op.opcode == "load":
            attrs = self._access_attrs(op)
            return [self._load(b, operands, [m for m in masks if m.edge] if id(op) in self.unguarded else masks, attrs)]
        if op.opcode == "store":
            self._store(b, operands, masks, self._access_attrs(op))
            return []
        if op.opcode == "accumulate":
            self._accumulate(b, op, operands, env, masks)
            return []
        if op.opcode == "if":
            return self._control_flow.lower_if(b, op, operands[0], env, masks)
        if op.opcode == "for":
            return self._control_flow.lower_for(b, op, operands, env, masks)
        if op.opcode == "reduce":
            return self._reductions.lower(b, op, operands, env, masks)
        if op.opcode == "while":
            from tilewright.passes.to_tile.loops.lower_while import WhileLowering

            return WhileLowering(self, op, env, masks).run(b, operands)
        if op.opcode == "parallel":
            from tilewright.base.errors import UserError

            what = "a parallel loop inside a parallel loop"
            raise UserError.at("TW005", f"{what} is not available in kernels yet", op.span, "use for with a fixed number of turns")
        shape = join(*(shape_of(v) for v in operands))
        return b.emit(op.opcode, [widen(b, v, shape) for v in operands], op.attrs)

    def _access_attrs(self, op: Op) -> Attrs:
        """What a tile's access says beside its indices."""
        attrs: dict[str, Attr] = {"aligned": self.schedule.vector} if id(op) in self.aligned else {}
        watch = tuple(axis for axis in watched_axes(op) if (id(op), axis) not in self.tested)
        return attrs | {"watch": watch} if watch else attrs

    def _mask_for(self, b: Builder, shape: Shape, masks: list[Condition]) -> tuple[Shape, Value | None]:
        """The condition an access of that shape runs under, and the shape it then has."""
        relevant: list[Value] = []
        # A guard that varies is asked by elements beyond the edge, too: what they make of it counts for nothing.
        full = join(shape, *(shape_of(mask.value) for mask in masks if not mask.edge))
        for mask in masks:
            mine = shape_of(mask.value)
            if mask.edge and not (full and all(m == 1 or s > 1 for m, s in zip(mine, full, strict=True))):
                continue
            relevant.append(mask.value)
        if not relevant:
            return shape, None
        shape = join(shape, *(shape_of(v) for v in relevant))
        total = widen(b, relevant[0], shape)
        for value in relevant[1:]:
            total = b.logical_and(total, widen(b, value, shape))
        return shape, total

    def _load(self, b: Builder, operands: Sequence[Value], masks: list[Condition], attrs: Attrs) -> Value:
        memory, indices = operands[0], list(operands[1:])
        shape = join(*(shape_of(v) for v in indices))
        if not indices:
            return b.op("load", memory)
        access, mask = self._mask_for(b, shape, masks)
        if mask is None:
            return b.emit("load", [memory, *indices], attrs)[0]
        if access != shape:
            indices[0] = widen(b, indices[0], access)
        return b.emit("load", [memory, *indices, mask], {"masked": True, **attrs})[0]

    def _store(self, b: Builder, operands: Sequence[Value], masks: list[Condition], attrs: Attrs) -> None:
        memory, indices, value = operands[0], list(operands[1:-1]), operands[-1]
        shape = join(*(shape_of(v) for v in indices))
        if not shape and shape_of(value):
            # All indices are scalars of the block: the value is a tile of one element.
            value = item(b, value)
        access, mask = self._mask_for(b, shape, masks)
        if shape and access != shape:
            indices[0] = widen(b, indices[0], access)
        value = widen(b, value, access)
        if mask is None:
            b.emit("store", [memory, *indices, value], attrs)
        elif not access:
            b.if_(mask, lambda inner: inner.emit("store", [memory, *indices, value], attrs), lambda inner: [])
        else:
            b.emit("store", [memory, *indices, value, mask], {"masked": True, **attrs})

    def _accumulate(self, b: Builder, op: Op, operands: Sequence[Value], env: Mapping[Value, Value], masks: list[Condition]) -> None:
        """Every point combines once, also where neither place nor value tell points apart."""
        memory, indices, value = operands[0], list(operands[1:-1]), operands[-1]
        points = join(*(shape_of(v) for v in (*operands[1:], *(env[index] for index in self._enclosing[id(op)]))))
        access, mask = self._mask_for(b, points, masks)
        attrs: dict[str, Attr] = {**{k: v for k, v in op.attrs.items() if k != "watch"}, **self._access_attrs(op)}
        if access and indices:
            indices[0] = widen(b, indices[0], access)
        value = widen(b, value, access)
        if mask is None:
            b.emit("accumulate", [memory, *indices, value], attrs)
        elif not access:
            b.if_(mask, lambda inner: inner.emit("accumulate", [memory, *indices, value], attrs), lambda inner: [])
        else:
            b.emit("accumulate", [memory, *indices, value, mask], {"masked": True, **attrs})


def _loops_around(op: Op, outer: tuple[Value, ...]) -> dict[int, tuple[Value, ...]]:
    found: dict[int, tuple[Value, ...]] = {}
    for region in op.regions:
        own = (*outer, *region.args) if op.opcode == "parallel" else (*outer, *region.args[:1]) if op.opcode == "for" else outer
        for inner in region.ops:
            if inner.opcode == "accumulate":
                found[id(inner)] = own
            found |= _loops_around(inner, own)
    return found
