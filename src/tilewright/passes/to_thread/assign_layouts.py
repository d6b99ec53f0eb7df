"""Give every tile of a tile-stage kernel its layout: how its elements lie in the block's threads.

In: a tile-stage kernel and its schedule. Out: the same kernel with a `Blocked` layout on each tile type and `threads` set.
One layout serves all tiles of a nest: their shapes differ only in extents of 1, and such an axis is held by every thread.
Lanes go along the vector axis first, so that a warp reads neighbouring vectors; warps go along it too, or down the
reduction, as the schedule says. Sits right before the lowering to threads, after all tile-stage rewriting.
"""

from __future__ import annotations

from math import prod
from types import MappingProxyType

from tilewright.base.dtypes import f32
from tilewright.base.record import replace
from tilewright.base.target import Target
from tilewright.ir.layouts import Accumulator, Blocked, Layout, Shared
from tilewright.ir.nodes import Attrs, Block, Kernel, Value, walk
from tilewright.ir.types import Tile, dtype_of
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.matrix import MatrixSchedule

_LIGHT_LOADS = 8
"""Registers that a thread of a light kernel loads at once."""


def assign_layouts(kernel: Kernel, schedule: Schedule | MatrixSchedule, target: Target) -> Kernel:
    staged: set[Value] = set()
    layout: Layout | None
    if isinstance(schedule, MatrixSchedule):
        layout, threads = matrix_layout(kernel, schedule), schedule.threads
        staged = {v for op in walk(kernel.body) if op.opcode == "dot" for v in op.operands[:2]}
        from tilewright.passes.schedules.attention import GpuAttention

        if isinstance(schedule, GpuAttention):
            # The weights of the second product never leave their registers.
            staged &= {op.results[0] for op in walk(kernel.body) if op.opcode == "load"}
    else:
        shape = _whole_shape(kernel)
        layout = blocked_layout(shape, schedule, target) if shape else None
        threads = layout.threads if isinstance(layout, Blocked) else target.warp_size
    mapping: dict[Value, Value] = {}

    def value(old: Value) -> Value:
        if old not in mapping:
            own = Shared((0, 1), 128) if old in staged else layout
            typed = replace(old.type, layout=own) if isinstance(old.type, Tile) else old.type
            mapping[old] = old if typed == old.type else Value(typed, old.name)
        return mapping[old]

    def block(old: Block) -> Block:
        return Block(
            tuple(value(a) for a in old.args),
            tuple(
                replace(
                    op,
                    operands=tuple(value(v) for v in op.operands),
                    results=tuple(value(v) for v in op.results),
                    regions=tuple(block(r) for r in op.regions),
                )
                for op in old.ops
            ),
        )

    return replace(kernel, body=block(kernel.body), threads=threads, attrs=_crowded(kernel, threads, target))


def _crowded(kernel: Kernel, threads: int, target: Target) -> Attrs:
    """The attributes of a kernel whose tests need more registers than what it does: it gets as few as a full multiprocessor has for each thread."""
    attrs = {name: value for name, value in kernel.attrs.items() if name != "light"}
    if "light" not in kernel.attrs:
        return kernel.attrs
    tiles = [op.result.type for op in walk(kernel.body) if op.opcode == "load" and isinstance(op.result.type, Tile)]
    # Blocks at an edge have their loads once more.
    held = sum(prod(tile.shape) * -(-dtype_of(tile).bits // 32) for tile in tiles) // 2
    if held <= _LIGHT_LOADS * threads:
        attrs["min_blocks"] = max(1, min(target.blocks_per_sm, target.threads_per_sm // threads))
    return MappingProxyType(attrs)


def matrix_layout(kernel: Kernel, schedule: MatrixSchedule) -> Accumulator | Blocked:
    """The layout of a contraction's results; on a CPU, where there is no `dot`, that of SIMD registers."""
    product = next((op for op in walk(kernel.body) if op.opcode == "dot"), None)
    if product is None:
        return schedule.layout(f32, f32)
    return schedule.layout(dtype_of(product.operands[0].type), dtype_of(product.result.type))


def _whole_shape(kernel: Kernel) -> tuple[int, ...]:
    """The largest extent along each axis over all tiles."""
    shape: tuple[int, ...] = ()
    for op in walk(kernel.body):
        for result in op.results:
            if isinstance(result.type, Tile):
                shape = tuple(map(max, shape, result.type.shape)) if shape else result.type.shape
    return shape


def blocked_layout(shape: tuple[int, ...], schedule: Schedule, target: Target) -> Blocked:
    """Spread `shape` over the schedule's threads."""
    rank = len(shape)
    reduction = rank - 1 if schedule.reduce_tile > 1 else -1
    tiled = [p for p, t in enumerate(schedule.tiles) if t > 1]
    axis = reduction if schedule.vector_on_reduction else tiled.index(schedule.vector_index) if schedule.vector_index in tiled else rank - 1
    vector, lanes, warps = [1] * rank, [1] * rank, [1] * rank
    vector[axis] = min(schedule.vector, shape[axis])
    left = target.warp_size
    alone = tiled.index(schedule.along) if schedule.along in tiled else -1
    order = [axis, *(a for a in reversed(range(rank)) if a not in (axis, alone))]
    if schedule.row_lanes:
        lanes[reduction], left = schedule.row_lanes, left // schedule.row_lanes
        order = [a for a in order if a != reduction]
    if 1 < schedule.across <= left and rank == 2:
        lanes[axis], lanes[1 - axis], left = left // schedule.across, schedule.across, 1
    for a in order if left > 1 else []:
        lanes[a] = min(left, max(1, shape[a] // vector[a]))
        left //= lanes[a]
    # A warp never has idle lanes: what no axis could take repeats along the vector axis and is masked by the lowering.
    count = max(1, schedule.threads * schedule.cluster // target.warp_size)
    warp_order = order if schedule.vector_on_reduction and rank == 1 else _warp_order(order, axis, reduction, schedule)
    for a in warp_order:
        warps[a] = min(count, max(1, shape[a] // (vector[a] * lanes[a])))
        count //= warps[a]
    return Blocked(tuple(vector), tuple(lanes), tuple(warps), schedule.cluster)


def _warp_order(order: list[int], axis: int, reduction: int, schedule: Schedule) -> list[int]:
    """Rows of a block get warps of their own before a row is cut; columns are cut along the reduction."""
    if reduction < 0 or schedule.row_lanes:
        return order
    others = [a for a in order if a not in (axis, reduction)]
    if schedule.vector_on_reduction:
        return [*others, reduction]
    return [reduction, axis, *others]
