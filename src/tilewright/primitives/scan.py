"""Scan on a GPU: every element becomes the combination of all up to it, in one pass over the data (see `lookback`).

In: the dtype of the data, an associative function, whether it is exclusive, whether there is a first value. Out: a program of
two kernels, which clear the states of the tiles and scan. Order is kept, so the function need not be commutative; without a
number that changes nothing, whatever has nothing before it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import DType, bool_
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, tensor
from tilewright.primitives.code import Code, Mem, Num, Param, write_kernel
from tilewright.primitives.functions import Monoid
from tilewright.primitives.lookback import exclusive_prefix, states_array, ticket, words_of
from tilewright.primitives.parts import (
    BlockShape,
    LaneNumbers,
    call,
    clear,
    data_type,
    lanes,
    load_tile,
    store_tile,
)

N = Size.of("n")


@record
class ScanPart:
    """A number that may be missing: `there` says whether it is (None: always)."""

    value: Num
    there: Num | None = None


LARGE = 1 << 25
"""From so many elements on tiles are as large as registers allow: looking back costs time for each tile, and only their number counts."""


def scan_shape(dtype: DType, monoid: Monoid, large: bool, target: Target) -> BlockShape:
    width = max(1, min(16 // dtype.itemsize, 4))
    if not large:
        return BlockShape(256, 8 if monoid.dtype.bits <= 32 else 4, width, target.warp_size)
    steps = 20 if monoid.dtype.bits <= 32 and monoid.function is None else 16
    return BlockShape(min(512, target.max_threads), steps, width, target.warp_size)


def scan_program(
    dtype: DType, monoid: Monoid, result: DType, target: Target, exclusive: bool = False, init: bool = False, aligned: bool = True, large: bool = False,
    shape: BlockShape | None = None, hint: str = "cs", look: int = 1,
) -> Program:  # fmt: skip
    """The program `x, init? -> y`, for data of any length of at least 1."""
    shape = shape or scan_shape(dtype, monoid, large, target)
    assert init or not exclusive, "an exclusive scan begins with a value"
    tiles = ceildiv(N, shape.tile)
    states = states_array(tiles, words_of(monoid.dtype))
    x, y = data_type(dtype, N, aligned), tensor(result, N, align=16)

    def body(c: Code, x: Mem, y: Mem, states: Mem, *initial: Num) -> None:
        at, size = lanes(c, target.warp_size), c.size(N)
        totals = c.shared(monoid.dtype, shape.warps)
        tile = ticket(c, states, at.thread)
        values = load_tile(c, x, at, tile, shape, size, aligned, hint)
        values = [[v.to(monoid.dtype) for v in vector] for vector in values]
        join = _joiner(c, monoid)
        inside = [_running(monoid, vector) for vector in values]
        before, total = _across_warp(c, join, monoid, [v[-1] for v in inside], at)
        c.when(at.is_last_lane, lambda: totals.store(at.warp, total))
        c.barrier()
        aggregate, warp_before = totals[0], _nothing(c, monoid)
        for w in range(shape.warps - 1):
            warp_before = _where(c, monoid, at.warp > w, aggregate, warp_before)
            aggregate = monoid(aggregate, totals[w + 1])
        found = exclusive_prefix(c, states, tile, at, min(shape.warps, look), aggregate, monoid, initial[0] if initial else None)
        prefix = ScanPart(found) if initial else _where(c, monoid, tile > 0, found, _nothing(c, monoid))
        start = join(prefix, warp_before)
        out = [_finished(c, join, join(start, ahead), vector, exclusive) for ahead, vector in zip(before, inside, strict=True)]
        store_tile(c, y, at, tile, shape, size, [[v.to(result) for v in vector] for vector in out], hint)

    params: list[Param] = [("x", x), ("y", y), ("states", states.type)]
    params += [("init", Scalar(monoid.dtype))] if init else []
    kernel = write_kernel("scan", shape.threads, [tiles], params, body)
    inputs: list[ProgramArray | ScalarInput] = [ProgramArray("x", x, "input")]
    inputs += [ScalarInput("init", monoid.dtype)] if init else []
    calls = (clear("clear_states", states), call(kernel))
    return Program("scan", tuple(inputs), (ProgramArray("y", y, "output"),), (states,), calls)


def _nothing(c: Code, monoid: Monoid) -> ScanPart:
    if monoid.identity is None:
        return ScanPart(c.const(0, monoid.dtype), c.const(False, bool_))
    return ScanPart(c.const(monoid.identity, monoid.dtype))


def _where(c: Code, monoid: Monoid, cond: Num, value: Num, other: ScanPart) -> ScanPart:
    """`value` where the condition holds, else what `other` is."""
    chosen = c.select(cond, value, other.value)
    return ScanPart(chosen) if other.there is None else ScanPart(chosen, cond | other.there)


Join = Callable[[ScanPart, ScanPart], ScanPart]


def _joiner(c: Code, monoid: Monoid) -> Join:
    def join(a: ScanPart, b: ScanPart) -> ScanPart:
        """Both, in this order, as far as they are there."""
        both = monoid(a.value, b.value)
        if a.there is None and b.there is None:
            return ScanPart(both)
        if b.there is None:
            assert a.there is not None
            return ScanPart(c.select(a.there, both, b.value))
        if a.there is None:
            return ScanPart(c.select(b.there, both, a.value))
        value = c.select(a.there, c.select(b.there, both, a.value), b.value)
        return ScanPart(value, a.there | b.there)

    return join


def _running(monoid: Monoid, vector: list[Num]) -> list[Num]:
    out = [vector[0]]
    for value in vector[1:]:
        out.append(monoid(out[-1], value))
    return out


def _across_warp(c: Code, join: Join, monoid: Monoid, ends: list[Num], at: LaneNumbers) -> tuple[list[ScanPart], Num]:
    """For each step, what the warp has before this lane's vector; and what the whole warp amounts to."""
    sums = list(ends)
    lane = at.lane
    for distance in at.distances:
        others = [c.shuffle(s, distance, "up") for s in sums]
        inside = lane >= distance
        sums = [c.select(inside, monoid(o, s), s) for o, s in zip(others, sums, strict=True)]
    before: list[ScanPart] = []
    carry: Num | None = None
    for total in sums:
        ahead = _where(c, monoid, lane > 0, c.shuffle(total, 1, "up"), _nothing(c, monoid))
        before.append(ahead if carry is None else join(ScanPart(carry), ahead))
        whole = c.shuffle(total, at.warp_size - 1)
        carry = whole if carry is None else monoid(carry, whole)
    assert carry is not None
    return before, carry


def _finished(c: Code, join: Join, ahead: ScanPart, inside: list[Num], exclusive: bool) -> list[Num]:
    if exclusive:
        return [ahead.value, *(join(ahead, ScanPart(v)).value for v in inside[:-1])]
    return [join(ahead, ScanPart(v)).value for v in inside]
