"""Radix sort on a CPU: 8 bits at a time from the lowest on, in chunks that threads share out.

In: as for GPUs (`sort.SortPlan`). Out: a program with three kernels for each pass: how often each digit occurs in each chunk; where
each chunk's digits go; and the move. Keys on their way are gathered to whole cache lines first, one for each digit, so that memory
sees lines and not single keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilewright.base.dtypes import DType, i64, u32
from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.types import Tensor, Type
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.keys import cooked, from_key, key_dtype, raw, to_key
from tilewright.primitives.parts import scratch
from tilewright.primitives.sort import Move, SortPlan, moves

N = Size.of("n")
RADIX = 256
_LEAST = 8192
"""Elements of the smallest chunk."""
_LINE = 64


def chunk_count(chunks: int) -> Size:
    return minimum(ceildiv(N, _LEAST), chunks)


def sort_program_cpu(plan: SortPlan, chunks: int = 16, combine: bool = True) -> Program:
    """The program `keys, values? -> sorted, moved?`."""
    count = chunk_count(chunks)
    steps, inputs, outputs, held = moves(replace(plan, aligned=False))
    held.append(scratch("counts", i64, count * RADIX))
    types = {a.name: a.type for a in (*inputs, *outputs, *held)}
    calls: list[KernelCall] = []
    for number, move in enumerate(steps):
        calls += _pass(plan, number, move, count, types, combine)
    return Program("sort", tuple(inputs), tuple(outputs), tuple(held), tuple(calls))


def _pass(plan: SortPlan, number: int, move: Move, count: Size, types: dict[str, Tensor], combine: bool) -> list[KernelCall]:
    first, last = number == 0, number == plan.passes - 1
    names = [*move.names, "counts"]

    def key_of(c: Code, value: Num) -> Num:
        bits = raw(value)
        return to_key(c, bits, plan.dtype, plan.descending, plan.places) if first else bits

    def digit(key: Num) -> Num:
        return ((key >> (8 * number) if number else key) & 0xFF).to(i64)

    def count_body(c: Code, keys: Mem, counts: Mem) -> None:
        low, high = bounds(c, count)
        tables = 4
        table = c.alloc("local", u32, RADIX * tables, align=_LINE)
        zero = c.op("broadcast", c.const(0, u32), width=16)
        c.loop(0, RADIX * tables, 16, [], lambda i: table.store(i, zero))

        def add(i: Num, k: int) -> None:
            where = digit(key_of(c, keys.load(i))) + k * RADIX
            table.store(where, table[where] + 1)

        def several(i: Num) -> None:
            for k in range(tables):
                add(i + k, k)

        middle = low + (high - low) // tables * tables
        c.loop(low, middle, tables, [], several)
        c.loop(middle, high, 1, [], lambda i: add(i, 0))
        base = c.block() * RADIX

        def flush(i: Num) -> None:
            total = table[i]
            for k in range(1, tables):
                total = total + table[i + k * RADIX]
            counts.store(base + i, total.to(i64))

        c.loop(0, RADIX, 1, [], flush)

    def starts_body(c: Code, counts: Mem) -> None:
        def one(i: Num, before: Num) -> Num:
            def chunk(j: Num, now: Num) -> Num:
                where = j * RADIX + i
                mine = counts[where]
                counts.store(where, now)
                return now + mine

            return c.loop(0, c.size(count), 1, [before], chunk)[0]

        c.loop(0, RADIX, 1, [c.const(0, i64)], one)

    def move_body(c: Code, *memory: Mem) -> None:
        by_name, counts = dict(zip(move.names, memory)), memory[-1]
        keys, out, moved = by_name[move.keys], by_name.get(move.sorted), by_name.get(move.moved)
        low, high = bounds(c, count)
        where = c.alloc("local", i64, RADIX, align=_LINE)
        base = c.block() * RADIX
        c.loop(0, RADIX, 1, [], lambda i: where.store(i, counts[base + i]))
        if combine and out is not None and moved is None:
            _move_lines(c, plan, keys, out, where, counts, base, low, high, key_of, digit, last)
            return

        def one(i: Num) -> None:
            key = key_of(c, keys.load(i))
            d = digit(key)
            place = where[d]
            where.store(d, place + 1)
            if out is not None:
                out.store(place, cooked(from_key(c, key, plan.dtype, plan.descending) if last else key, plan.dtype))
            if moved is not None:
                moved.store(place, (by_name[move.values].load(i) if move.values else i).to(moved.dtype))

        unrolled(c, low, high, 4, one)

    def params(*wanted: str) -> list[tuple[str, Type]]:
        return [(name, types[name]) for name in wanted]

    return [
        KernelCall(write_kernel(f"sort_count{number}", 1, [count], params(move.keys, "counts"), count_body), (move.keys, "counts")),
        KernelCall(write_kernel(f"sort_starts{number}", 1, [1], params("counts"), starts_body), ("counts",)),
        KernelCall(write_kernel(f"sort_move{number}", 1, [count], params(*names), move_body), tuple(names)),
    ]


def bounds(c: Code, count: Size) -> tuple[Num, Num]:
    size, chunks = c.size(N), c.size(count)
    each = (size + chunks - 1) // chunks
    low = c.block() * each
    return low.min(size), (low + each).min(size)


def unrolled(c: Code, low: Num, high: Num, times: int, one: Callable[[Num], None]) -> None:
    middle = low + (high - low) // times * times

    def several(i: Num) -> None:
        for k in range(times):
            one(i + k)

    c.loop(low, middle, times, [], several)
    c.loop(middle, high, 1, [], one)


def _move_lines(
    c: Code, plan: SortPlan, keys: Mem, out: Mem, where: Mem, counts: Mem, base: Num, low: Num, high: Num,
    key_of: Callable[[Code, Num], Num], digit: Callable[[Num], Num], last: bool,
) -> None:  # fmt: skip
    """Move keys by way of a line for each digit: a key waits at the slot that its place has in its line."""
    unsigned: DType = key_dtype(plan.dtype)
    width = _LINE // unsigned.itemsize
    lines = c.alloc("local", plan.dtype, RADIX * width, align=_LINE)

    def finished(key: Num) -> Num:
        return cooked(from_key(c, key, plan.dtype, plan.descending) if last else key, plan.dtype)

    def one(i: Num) -> None:
        key = key_of(c, keys.load(i))
        d = digit(key)
        place = where[d]
        where.store(d, place + 1)
        slot = place & (width - 1)
        lines.store(d * width + slot, finished(key))

        def flush() -> None:
            # The chunk's first line of a digit may begin in the middle: before that it is somebody else's.
            start = place - (width - 1)
            mine = counts[base + d]
            if plan.dtype.is_bool:
                c.loop(mine.max(start), place + 1, 1, [], lambda p: out.store(p, lines[d * width + (p & (width - 1))]))
                return
            c.either(
                start >= mine,
                lambda: out.store(start, lines.load(d * width, width), unaligned=True),
                lambda: _nothing(c.loop(mine, place + 1, 1, [], lambda p: out.store(p, lines[d * width + (p & (width - 1))]))),
            )

        c.when(slot.eq(width - 1), flush)

    unrolled(c, low, high, 4, one)

    def rest(d: Num) -> None:
        end = where[d]
        begin = counts[base + d].max(end - (end & (width - 1)))
        c.loop(begin, end, 1, [], lambda p: out.store(p, lines[d * width + (p & (width - 1))]))

    c.loop(0, RADIX, 1, [], rest)


def _nothing(_: object) -> None: ...
