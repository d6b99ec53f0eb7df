"""Filter on a GPU: the elements for which a predicate holds, or a mask is true, in order, in one pass (see `lookback`).

In: the dtype of the data and the predicate (None: a mask of bytes comes with the data). Out: a program of two kernels that
gives room for all elements, of which the first `count` are the result, and that count. A block gathers what it keeps in shared
memory first, so that it leaves in whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tilewright.base.dtypes import DType, bool_, compute_dtype, i64, u32
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.functions import ScalarFunction
from tilewright.primitives.lookback import count_before, states_array, ticket
from tilewright.primitives.parts import (
    BlockShape,
    LaneNumbers,
    call,
    clear,
    data_type,
    lanes,
    load_tile,
    tile_index,
    warp_total_parts,
)

N = Size.of("n")


def filter_shape(dtype: DType, target: Target, kept: DType | None = None) -> BlockShape:
    """Of elements of that dtype, of which `kept` is staged in shared memory."""
    fits = 256 * 8 * 4 * (kept or dtype).itemsize < target.max_shared
    return BlockShape(256, 8, 4 if dtype.itemsize <= 4 and target.warp_size < 64 and fits else 2, target.warp_size)


def filter_program(
    dtype: DType, predicate: ScalarFunction | None, target: Target, aligned: bool = True, heads: bool = False, shape: BlockShape | None = None,
    hint: str = "cs", look: int = 1, trues: bool = False,
) -> Program:  # fmt: skip
    """The program `x, mask? -> y, count`. With `heads` there is no predicate: the places, as i64, are kept of elements that differ
    from the one before. With `trues` the data are bools, and the places of true ones are kept."""
    positions = heads or trues
    kept = i64 if positions else dtype
    shape = shape or filter_shape(dtype, target, kept)
    assert shape.width * shape.warp_size < 256, "counts of a step are bytes"
    tiles = ceildiv(N, shape.tile)
    states = states_array(tiles)
    x, y, count = data_type(dtype, N, aligned), tensor(kept, N, align=16), tensor(i64, 1, align=8)

    def body(c: Code, x: Mem, *others: Mem) -> None:
        mask = others[0] if predicate is None and not positions else None
        y, count, states = others[-3:]
        at, size = lanes(c, target.warp_size), c.size(N)
        totals = c.shared(u32, shape.warps)
        staged = c.shared(kept, shape.tile, align=16)
        tile = ticket(c, states, at.thread)
        values = load_tile(c, x, at, tile, shape, size, aligned, hint)
        if heads:
            flags = _heads(c, x, at, tile, shape, size, values)
        elif trues:
            flags = values
        elif mask is not None:
            flags = load_tile(c, mask, at, tile, shape, size, aligned)
        else:
            assert predicate is not None
            flags = [[predicate.apply(c, v) for v in vector] for vector in values]
        keep = _kept(c, at, tile, shape, size, flags)
        ranks, total = _ranks(c, at, keep)
        c.when(at.lane.eq(0), lambda: totals.store(at.warp, total))
        c.barrier()
        warp_before, block_count = warp_total_parts(c, totals, shape.warps, at.warp)
        for step, vector in enumerate(values):
            place = warp_before + ranks[step].to(i64)
            for j, value in enumerate(vector):
                item = tile_index(c, at, tile, shape, step) + j if positions else value
                _put(c, staged, place, item, keep[step][j])
                place = place + keep[step][j].to(i64)
        before = count_before(c, states, tile, at, min(shape.warps, look), block_count)
        is_last = ((tile + 1) * shape.tile >= size) & at.thread.eq(0)
        c.when(is_last, lambda: count.store(0, before + block_count))
        c.barrier()
        copy_out(c, y, before, staged, block_count, at.thread, shape.threads, hint)

    params = [("x", x)]
    if predicate is None and not positions:
        params.append(("mask", data_type(bool_, N, aligned)))
    params += [("y", y), ("count", count), ("states", states.type)]
    kernel = write_kernel("filter", shape.threads, [tiles], params, body)
    inputs = tuple(ProgramArray(name, type_, "input") for name, type_ in params[:-3])
    outputs = (ProgramArray("y", y, "output"), ProgramArray("count", count, "output"))
    return Program("filter", inputs, outputs, (states,), (clear("clear_states", states), call(kernel)))


def _put(c: Code, memory: Mem, place: Num, value: Num, cond: Num) -> None:
    c.when(cond, lambda: memory.store(place, value))


def _heads(c: Code, x: Mem, at: LaneNumbers, tile: Num, shape: BlockShape, size: Num, values: list[list[Num]]) -> list[list[Num]]:
    """Whether each element differs from the one before it; the first of all does."""
    flags: list[list[Num]] = []
    for step, vector in enumerate(values):
        first = tile_index(c, at, tile, shape, step)
        before = x.load((first - 1).max(0).min(size - 1))
        begins = differs(c, before, vector[0]) | first.eq(0)
        flags.append([begins, *(differs(c, a, b) for a, b in pairwise(vector))])
    return flags


def differs(c: Code, a: Num, b: Num) -> Num:
    """Whether they are different numbers; all NaN are alike."""
    if not a.dtype.is_float:
        return a.ne(b)
    wide = compute_dtype(a.dtype)
    a, b = a.to(wide), b.to(wide)
    return a.ne(b) & ~(c.op("isnan", a) & c.op("isnan", b))


def _kept(c: Code, at: LaneNumbers, tile: Num, shape: BlockShape, size: Num, flags: list[list[Num]]) -> list[list[Num]]:
    """Whether each element stays; none behind the end does."""
    whole = (tile + 1) * shape.tile <= size

    def edge() -> list[Num]:
        return [
            flag & (tile_index(c, at, tile, shape, step) + j < size) for step, vector in enumerate(flags) for j, flag in enumerate(vector)
        ]

    flat = c.either(whole, lambda: [f for vector in flags for f in vector], edge)
    return [flat[k * shape.width : (k + 1) * shape.width] for k in range(shape.steps)]


def _ranks(c: Code, at: LaneNumbers, keep: list[list[Num]]) -> tuple[list[Num], Num]:
    """For each step, how many the warp keeps before this thread's vector; and how many it keeps. The counts of four steps, each at
    most 255, are bytes of one word, which the warp scans once."""
    ranks: list[Num] = []
    count = c.const(0, u32)
    for first in range(0, len(keep), 4):
        steps = keep[first : first + 4]
        word = c.const(0, u32)
        for step, vector in enumerate(steps):
            for flag in vector:
                word = word + (flag.to(u32) << (8 * step))
        running = word
        for distance in at.distances:
            other = c.shuffle(running, distance, "up")
            running = c.select(at.lane >= distance, running + other, running)
        totals = c.shuffle(running, at.warp_size - 1)
        running = running - word
        for step in range(len(steps)):
            ranks.append(count + ((running >> (8 * step)) & 255))
            count = count + ((totals >> (8 * step)) & 255)
    return ranks, count


def copy_out(c: Code, y: Mem, start: Num, staged: Mem, count: Num, thread: Num, threads: int, hint: str = "") -> None:
    """`count` elements of shared memory to `y` from `start` on: whole aligned vectors but at both ends."""
    width = max(1, 16 // y.dtype.itemsize)
    attrs = {"cache": hint} if hint else {}
    if width == 1:
        c.loop(thread, count, threads, [], lambda i: y.store(start + i, staged[i], **attrs))
        return
    head = ((c.const(0, i64) - start) & (width - 1)).min(count)
    vectors = (count - head) >> (width.bit_length() - 1)
    tail = head + vectors * width

    def vector(i: Num) -> None:
        first = head + i * width
        y.store(start + first, c.pack([staged[first + j] for j in range(width)]), **attrs)

    _for_threads(c, thread, head, lambda i: y.store(start + i, staged[i]))
    c.loop(thread, vectors, threads, [], vector)
    _for_threads(c, thread, count - tail, lambda i: y.store(start + tail + i, staged[tail + i]))


def _for_threads(c: Code, thread: Num, count: Num, body: Callable[[Num], None]) -> None:
    """For a count below the number of threads."""
    c.when(thread < count, lambda: body(thread))


def runs_program(dtype: DType) -> Program:
    """The program `x, places -> values, lengths`: of runs that begin at these places, the value and the length."""
    count = Size.of("m")
    x, places = tensor(dtype, N), tensor(i64, count)
    values, lengths = tensor(dtype, count), tensor(i64, count)

    def body(c: Code, x: Mem, places: Mem, values: Mem, lengths: Mem) -> None:
        i, number = c.block() * _RUN_THREADS + c.thread(), c.size(count)

        def one() -> None:
            here, last = places[i], number - 1
            after = c.select(i < last, places[(i + 1).min(last)], c.size(N))
            values.store(i, x[here])
            lengths.store(i, after - here)

        c.when(i < number, one)

    params = [("x", x), ("places", places), ("values", values), ("lengths", lengths)]
    kernel = write_kernel("runs", _RUN_THREADS, [ceildiv(count, _RUN_THREADS)], params, body)
    arrays = [ProgramArray(name, type_, "input" if k < 2 else "output") for k, (name, type_) in enumerate(params)]
    return Program("runs", tuple(arrays[:2]), tuple(arrays[2:]), (), (call(kernel),))


_RUN_THREADS = 256
