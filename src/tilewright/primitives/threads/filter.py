"""Filter on a GPU whose blocks cannot wait for each other: count, add up, move.

In: the dtype of the data and the predicate (None: a mask comes with the data). Out: a program of three kernels that gives room for all elements, of which the
first `count` are the result, and that count. A thread walks a few neighbours: it counts those that stay, and later moves them to behind what threads before it keep.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, bool_, i64, u32, u64
from tilewright.base.sizes import Size, ceildiv
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import Type, tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.filter import differs
from tilewright.primitives.functions import ScalarFunction
from tilewright.primitives.parts import call, scratch
from tilewright.primitives.threads.sort import sums_before

N = Size.of("n")
_THREADS = 64
_ITEMS = 64
"""Elements of one thread."""


def threads_filter_program(dtype: DType, predicate: ScalarFunction | None, heads: bool = False, trues: bool = False, wide: bool = False) -> Program:
    """The program `x, mask? -> y, count`; with `heads` or `trues` as `filter.filter_program`. `wide`: there are 2^32 elements or more."""
    positions = heads or trues
    walkers = ceildiv(N, _ITEMS)
    counts = scratch("counts", u64 if wide else u32, 1, walkers)
    x, y, count = tensor(dtype, N), tensor(i64 if positions else dtype, N), tensor(i64, 1)
    given: list[tuple[str, Type]] = [("x", x)]
    if predicate is None and not positions:
        given.append(("mask", tensor(bool_, N)))

    def stays(x: Mem, masks: list[Mem], i: Num) -> Num:
        if heads:
            return differs(x.code, x.load((i - 1).max(0)), x.load(i)) | i.eq(0)
        if trues:
            return x.load(i)
        return masks[0].load(i) if predicate is None else predicate.apply(x.code, x.load(i))

    def bounds(c: Code) -> tuple[Num, Num, Num]:
        walker, size = c.block() * _THREADS + c.thread(), c.size(N)
        low = (walker * _ITEMS).min(size)
        return walker, low, (low + _ITEMS).min(size)

    def count_body(c: Code, x: Mem, *rest: Mem) -> None:
        *masks, counts = rest
        walker, low, high = bounds(c)
        (kept,) = c.loop(low, high, 1, [c.const(0, counts.dtype)], lambda i, now: now + stays(x, masks, i).to(counts.dtype))
        c.when(low < high, lambda: counts.store((0, walker), kept))

    def body(c: Code, x: Mem, *rest: Mem) -> None:
        *masks, y, counts = rest
        walker, low, high = bounds(c)
        first = counts[0, walker.min(c.size(walkers) - 1)].to(i64)

        def step(i: Num, place: Num) -> Num:
            keep = stays(x, masks, i)
            c.when(keep, lambda: y.store(place, i if positions else x.load(i)))
            return place + keep.to(i64)

        c.loop(low, high, 1, [first], step)

    blocks = [ceildiv(walkers, _THREADS)]
    kernels = [
        write_kernel("filter_count", _THREADS, blocks, [*given, ("counts", counts.type)], count_body),
        sums_before("filter_starts", counts.name, counts.type, ("count", count)),
        write_kernel("filter", _THREADS, blocks, [*given, ("y", y), ("counts", counts.type)], body),
    ]
    inputs = tuple(ProgramArray(name, type_, "input") for name, type_ in given)  # type: ignore[arg-type]
    outputs = (ProgramArray("y", y, "output"), ProgramArray("count", count, "output"))
    return Program("filter", inputs, outputs, (counts,), tuple(map(call, kernels)))
