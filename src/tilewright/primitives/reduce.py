"""Reduction on a GPU with any associative function: all elements, after a first value, become one.

In: the dtype of the data and the function. Out: a program `x, init -> y` of two kernels: each block combines one stretch of the
data, then one block combines what they have. A function that is known to be commutative is applied down the stretch by each
thread on its own; of any other the order of the elements is kept.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, bool_
from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.base.target import Target
from tilewright.ir.nodes import Attr, Op, Value
from tilewright.ir.program import Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, tensor
from tilewright.primitives.code import Code, Mem, Num, Param, write_kernel
from tilewright.primitives.functions import Monoid
from tilewright.primitives.parts import BlockShape, LaneNumbers, call, data_type, lanes, load_tile, scratch, tile_index

N = Size.of("n")
_COMMUTATIVE = ("add", "mul", "min", "max", "and", "or", "xor", "eq", "ne")
_LAST_THREADS = 256


def is_commutative(monoid: Monoid) -> bool:
    """Whether exchanging the operands provably changes nothing, not even a bit."""
    if monoid.function is None:
        return True
    first, second = monoid.function.arguments
    numbered: dict[tuple[object, ...], int] = {}

    def form(ops: tuple[Op, ...], names: dict[Value, object]) -> object:
        for op in ops:
            if op.regions:
                return object()
            operands = [names[o] for o in op.operands]
            if op.opcode in _COMMUTATIVE:
                operands.sort(key=repr)
            key = (op.opcode, tuple(operands), tuple(sorted((k, str(v)) for k, v in op.attrs.items())))
            names[op.results[0]] = numbered.setdefault(key, len(numbered))
        return names[monoid.function.value] if monoid.function else None

    straight = form(monoid.function.ops, {first: "a", second: "b"})
    return straight == form(monoid.function.ops, {first: "b", second: "a"})


def reduce_shape(dtype: DType, target: Target) -> BlockShape:
    return BlockShape(min(512, target.max_threads), 4, max(1, min(16 // dtype.itemsize, 8)), target.warp_size)


def reduce_program(
    dtype: DType, monoid: Monoid, result: DType, target: Target, aligned: bool = True, shape: BlockShape | None = None, blocks: int = 0, hint: str = ""
) -> Program:
    shape = shape or reduce_shape(dtype, target)
    most = blocks or target.multiprocessors * 4
    tiles = ceildiv(N, shape.tile)
    grid = minimum(tiles, most)
    parts = scratch("parts", monoid.dtype, grid)
    x, y = data_type(dtype, N, aligned), tensor(result, 1, align=8)
    ordered = not is_commutative(monoid)

    def body(c: Code, x: Mem, parts: Mem) -> None:
        at, size = lanes(c, target.warp_size), c.size(N)
        count = c.size(tiles)
        first, last = c.block() * count // c.blocks(), (c.block() + 1) * count // c.blocks()
        attrs: dict[str, Attr] = {"cache": hint} if hint else {}

        def whole_tile(tile: Num) -> list[list[Num]]:
            if not aligned:
                return load_tile(c, x, at, tile, shape, size, aligned)
            vectors = [x.load(tile_index(c, at, tile, shape, k), shape.width, **attrs) for k in range(shape.steps)]
            return [[v.to(monoid.dtype) for v in vector.lanes()] for vector in vectors]

        def joined(values: list[list[Num]]) -> Num:
            """What the thread, or in order the warp, has of the tile."""
            flat = [_tree(monoid, vector) for vector in values]
            if not ordered:
                return _tree(monoid, flat)
            return _tree(monoid, [_warp_in_order(c, monoid, v, at) for v in flat])

        def edge(tile: Num, before: Num, there: Num) -> list[Num]:
            """The last tile: element by element, in the order of their places."""
            now, has = before, there
            for k in range(shape.steps):
                start = tile_index(c, at, tile, shape, k)
                mine, any_ = c.const(0, monoid.dtype), c.const(False, bool_)
                for j in range(shape.width):
                    inside = start + j < size
                    value = x.load((start + j).min(size - 1)).to(monoid.dtype)
                    mine = c.select(inside, c.select(any_, monoid(mine, value), value), mine)
                    any_ = any_ | inside
                if ordered:
                    mine, any_ = _warp_as_far(c, monoid, mine, any_, at)
                now, has = c.select(any_, c.select(has, monoid(now, mine), mine), now), has | any_
            return [now, has]

        full = c.select(last * shape.tile <= size, last, last - 1)

        def step(tile: Num, before: Num, there: Num) -> list[Num]:
            value = joined(whole_tile(tile))
            return [c.select(there, monoid(before, value), value), c.const(True, bool_)]

        start = [c.const(0, monoid.dtype), c.const(False, bool_)]
        if ordered:
            # Warps have neighbouring parts of every tile: what they have of one tile must meet before the next.
            totals = c.shared(monoid.dtype, shape.warps)

            def meet(tile: Num, before: Num, there: Num) -> list[Num]:
                value = joined(whole_tile(tile))
                c.when(at.lane.eq(0), lambda: totals.store(at.warp, value))
                c.barrier()
                whole = _tree(monoid, [totals[w] for w in range(shape.warps)])
                c.barrier()
                return [c.select(there, monoid(before, whole), whole), c.const(True, bool_)]

            now, has = c.loop(first, full, 1, start, meet)
            outer_now, outer_has = now, has
            now, has = c.either(full < last, lambda: edge(full, *start), lambda: list(start))
            now, has = _block_as_far(c, monoid, now, has, at, shape.warps, in_warp=False)
            both = c.select(outer_has, c.select(has, monoid(outer_now, now), outer_now), now)
            c.when(at.thread.eq(0), lambda: parts.store(c.block(), both))
            return
        now, has = c.loop(first, full, 1, start, step)
        now, has = c.either(full < last, lambda: edge(full, now, has), lambda: [now, has])
        now, has = _block_as_far(c, monoid, now, has, at, shape.warps)
        c.when(at.thread.eq(0), lambda: parts.store(c.block(), now))

    def last_body(c: Code, parts: Mem, y: Mem, init: Num) -> None:
        at = lanes(c, target.warp_size)
        count = c.size(grid)
        each = (count + (_LAST_THREADS - 1)) // _LAST_THREADS
        low = (at.thread * each).min(count)
        high = (low + each).min(count)

        def step(i: Num, before: Num, there: Num) -> list[Num]:
            value = parts[i]
            return [c.select(there, monoid(before, value), value), c.const(True, bool_)]

        now, has = c.loop(low, high, 1, [c.const(0, monoid.dtype), c.const(False, bool_)], step)
        now, has = _block_as_far(c, monoid, now, has, at, _LAST_THREADS // target.warp_size)
        c.when(at.thread.eq(0), lambda: y.store(0, monoid(init, now).to(result)))

    kernel = write_kernel("reduce", shape.threads, [grid], [("x", x), ("parts", parts.type)], body)
    params: list[Param] = [("parts", parts.type), ("y", y), ("init", Scalar(monoid.dtype))]
    last = write_kernel("reduce_parts", _LAST_THREADS, [1], params, last_body)
    inputs = (ProgramArray("x", x, "input"), ScalarInput("init", monoid.dtype))
    return Program("reduce", inputs, (ProgramArray("y", y, "output"),), (parts,), (call(kernel), call(last)))


def _tree(monoid: Monoid, values: list[Num]) -> Num:
    """All values in order, combined pairwise."""
    while len(values) > 1:
        pairs = [monoid(values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]


def _warp_in_order(c: Code, monoid: Monoid, value: Num, at: LaneNumbers) -> Num:
    """What the warp's lanes amount to, in order; right in lane 0."""
    for distance in at.distances:
        value = monoid(value, c.shuffle(value, distance, "down"))
    return value


def _warp_as_far(c: Code, monoid: Monoid, value: Num, there: Num, at: LaneNumbers) -> tuple[Num, Num]:
    """The same where only some lanes have a value: right in lane 0."""
    for distance in at.distances:
        other = c.shuffle(value, distance, "down")
        has = c.shuffle(there, distance, "down") & (at.lane + distance < at.warp_size)
        value = c.select(has, c.select(there, monoid(value, other), other), value)
        there = there | has
    return value, there


def _block_as_far(c: Code, monoid: Monoid, value: Num, there: Num, at: LaneNumbers, warps: int, in_warp: bool = True) -> tuple[Num, Num]:
    """What the block's threads (or, already joined, its warps) have, in order: right in thread 0."""
    if in_warp:
        value, there = _warp_as_far(c, monoid, value, there, at)
    values, flags = c.shared(monoid.dtype, warps), c.shared(bool_, warps)

    def tell() -> None:
        values.store(at.warp, value)
        flags.store(at.warp, there)

    c.when(at.lane.eq(0), tell)
    c.barrier()
    now, has = values[0], flags[0]
    for warp in range(1, warps):
        other, other_has = values[warp], flags[warp]
        now = c.select(other_has, c.select(has, monoid(now, other), other), now)
        has = has | other_has
    return now, has
