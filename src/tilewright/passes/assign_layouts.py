"""Give every tile of a tile-stage kernel its layout: how its elements lie in the block's threads.

In: a tile-stage kernel and its schedule. Out: the same kernel with a `Blocked` layout on each tile type and `threads` set.
One layout serves all tiles of a nest: their shapes differ only in extents of 1, and such an axis is held by every thread.
Lanes go along the vector axis first, so that a warp reads neighbouring vectors; warps go along it too, or down the
reduction, as the schedule says. Sits right before the lowering to threads, after all tile-stage rewriting.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.target import Target
from tilewright.ir.layouts import Blocked
from tilewright.ir.nodes import Block, Kernel, Value, walk
from tilewright.ir.types import Tile
from tilewright.passes.schedule import Schedule


def assign_layouts(kernel: Kernel, schedule: Schedule, target: Target) -> Kernel:
    shape = _whole_shape(kernel)
    layout = blocked_layout(shape, schedule, target) if shape else None
    threads = layout.threads if layout else target.warp_size
    mapping: dict[Value, Value] = {}

    def value(old: Value) -> Value:
        if old not in mapping:
            typed = replace(old.type, layout=layout) if isinstance(old.type, Tile) else old.type
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

    return replace(kernel, body=block(kernel.body), threads=threads)


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
    order = [axis, *(a for a in reversed(range(rank)) if a != axis)]
    for a in order:
        lanes[a] = min(left, max(1, shape[a] // vector[a]))
        left //= lanes[a]
    # A warp never has idle lanes: what no axis could take repeats along the vector axis and is masked by the lowering.
    count = max(1, schedule.threads // target.warp_size)
    warp_order = order if schedule.vector_on_reduction and rank == 1 else _warp_order(order, axis, reduction, schedule)
    for a in warp_order:
        warps[a] = min(count, max(1, shape[a] // (vector[a] * lanes[a])))
        count //= warps[a]
    return Blocked(tuple(vector), tuple(lanes), tuple(warps))


def _warp_order(order: list[int], axis: int, reduction: int, schedule: Schedule) -> list[int]:
    """Rows of a block get warps of their own before a row is cut; columns are cut along the reduction."""
    if reduction < 0:
        return order
    others = [a for a in order if a not in (axis, reduction)]
    if schedule.vector_on_reduction:
        return [*others, reduction]
    return [reduction, axis, *others]
