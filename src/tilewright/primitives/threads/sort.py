"""Radix sort on a GPU whose blocks cannot wait for each other: 4 bits at a time, three kernels for each pass.

In: as for other GPUs (`sort.SortPlan`). Out: a program that sorts each row: it counts, for each digit from the lowest on, how often it occurs in each tile, adds up
these counts to where each tile's digits go, and moves. A thread walks a few neighbours of a tile one after the other and has counters of its own for each digit,
in shared memory: equal digits keep their order, and no thread waits for another but at the barriers of its block. Passes between the first, which reads keys as
they are, and the last, which writes them so, are the same kernels: which digit it is lies in memory, and is counted up between counts and moves.
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.dtypes import i64, u32, u64
from tilewright.base.sizes import Size, ceildiv
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.types import Tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.keys import cooked, from_key, key_dtype, raw, to_key
from tilewright.primitives.parts import scratch
from tilewright.primitives.sort import Move, SortPlan, moves

ROWS, N = Size.of("rows"), Size.of("n")
_BITS = 4
DIGITS = 1 << _BITS
_THREADS = 64
_ITEMS = 16
"""Keys of one thread."""
TILE = _THREADS * _ITEMS
_ADDERS = 256
"""Threads of the block that adds up counts."""


def threads_sort_program(plan: SortPlan) -> Program:
    """The program `keys, values? -> sorted?, moved?`, all of shape [rows, n]."""
    passes = key_dtype(plan.dtype).bits // _BITS
    tiles = ceildiv(N, TILE)
    steps, inputs, outputs, held = moves(replace(plan, aligned=False), passes, (ROWS, N))
    counts = scratch("counts", u64 if plan.wide else u32, ROWS, tiles * DIGITS)
    held.append(counts)
    types = {a.name: a.type for a in (*inputs, *outputs, *held)}
    digit = scratch("digit", u32, 1)
    held.append(digit)
    types[digit.name] = digit.type
    common = (counts.name, digit.name)
    first_adder, adder = (sums_before(name, counts.name, counts.type, digit=(digit.name, digit.type, first)) for name, first in (("sort_first", True), ("sort_starts", False)))
    made: dict[object, Kernel] = {}
    calls: list[KernelCall] = []
    for number, move in enumerate(steps):
        first, last = number == 0, number == passes - 1
        names = (*move.names, *common)
        kinds = [types[name] for name in names]
        count_key, move_key = (first, types[move.keys]), (first, last, bool(move.values), *kinds)
        if count_key not in made:
            made[count_key] = _count_kernel(plan, first, tiles, types[move.keys], counts.type, digit.type)
        if move_key not in made:
            made[move_key] = _move_kernel(plan, first, last, tiles, move, list(zip(names, kinds, strict=True)))
        calls += [KernelCall(made[count_key], (move.keys, *common)), KernelCall(first_adder if first else adder, common), KernelCall(made[move_key], names)]
    return Program("sort", tuple(inputs), tuple(outputs), tuple(held), tuple(calls))


def sums_before(name: str, array: str, type_: Tensor, total: tuple[str, Tensor] | None = None, digit: tuple[str, Tensor, bool] | None = None) -> Kernel:
    """A kernel that makes of each number the sum of all before it in its row, a block for each row; `total`: an array that gets the sum of each row;
    `digit`: one whose only number is counted up, from 0 where it has none yet."""
    rows, extent = type_.shape
    dtype = type_.dtype

    def body(c: Code, numbers: Mem, *more: Mem) -> None:
        whole = more if digit is None else ()
        row, thread, size = c.block(), c.thread(), c.size(extent)
        each = c.size(ceildiv(extent, _ADDERS))
        low = (thread * each).min(size)
        high = (low + each).min(size)
        zero = c.const(0, dtype)
        (mine,) = c.loop(low, high, 1, [zero], lambda i, now: now + numbers[row, i])
        sums = c.shared(dtype, _ADDERS)
        sums.store(thread, mine)
        c.barrier()
        # Threads behind the last number have none.
        (before,) = c.loop(0, thread.min(size), 1, [zero], lambda k, now: now + sums[k])

        def step(i: Num, now: Num) -> Num:
            own = numbers[row, i]
            numbers.store((row, i), now)
            return now + own

        (end,) = c.loop(low, high, 1, [before], step)
        for memory in whole:
            c.when(thread.eq(_ADDERS - 1), lambda memory=memory: memory.store(row, end.to(memory.dtype)))  # type: ignore[misc]

        if digit is not None:
            (number,) = more
            one = c.const(1, number.dtype)
            c.when(row.eq(0) & thread.eq(0), lambda: number.store(0, one if digit[2] else number[0] + one))

    return write_kernel(name, _ADDERS, [rows], [(array, type_), *([total] if total else []), *([digit[:2]] if digit else [])], body)


class _WalkedTile:
    """The keys of a block, as its threads walk them."""

    def __init__(self, c: Code, plan: SortPlan, digit: Num | None, tiles: Size, keys: Mem) -> None:
        """`digit`: which one it is; None for the lowest, whose keys are as they were given."""
        self.c, self.plan, self.keys = c, plan, keys
        self.shift = None if digit is None else (digit * _BITS).to(key_dtype(plan.dtype))
        self.thread, size, several = c.thread(), c.size(N), c.size(tiles)
        self.row, tile = c.block() // several, c.block() % several
        self.count = (self.row, self.thread * several + tile)
        """Where the tile's count is of the digit that is the thread's number."""
        self.low = (tile * TILE + self.thread * _ITEMS).min(size)
        self.high = (self.low + _ITEMS).min(size)

    def key(self, i: Num) -> Num:
        bits = raw(self.keys.load((self.row, i)))
        return bits if self.shift is not None else to_key(self.c, bits, self.plan.dtype, self.plan.descending, self.plan.places)

    def cell(self, key: Num) -> Num:
        """Where the thread's counter of a key's digit is: the counters of one digit are neighbours."""
        shifted = key if self.shift is None else key >> self.shift
        return (shifted & (DIGITS - 1)).to(i64) * _THREADS + self.thread

    def counted(self, table: Mem) -> None:
        """Count the digits of all threads."""
        c, zero = self.c, self.c.const(0, table.dtype)
        c.loop(0, DIGITS, 1, [], lambda d: table.store(d * _THREADS + self.thread, zero))

        def one(i: Num) -> None:
            cell = self.cell(self.key(i))
            table.store(cell, table[cell] + 1)

        c.loop(self.low, self.high, 1, [], one)
        c.barrier()


def _count_kernel(plan: SortPlan, first: bool, tiles: Size, x: Tensor, counts: Tensor, digit: Tensor) -> Kernel:
    def body(c: Code, keys: Mem, counts: Mem, digit: Mem) -> None:
        tile = _WalkedTile(c, plan, None if first else digit[0], tiles, keys)
        table = c.shared(counts.dtype, DIGITS * _THREADS)
        tile.counted(table)

        def tell() -> None:
            first = tile.thread * _THREADS
            (whole,) = c.loop(0, _THREADS, 1, [c.const(0, counts.dtype)], lambda k, now: now + table[first + k])
            counts.store(tile.count, whole)

        c.when(tile.thread < DIGITS, tell)

    return write_kernel("sort_count", _THREADS, [tiles * ROWS], [("keys", x), ("counts", counts), ("digit", digit)], body)


def _move_kernel(plan: SortPlan, first: bool, last: bool, tiles: Size, move: Move, params: list[tuple[str, Tensor]]) -> Kernel:
    def body(c: Code, *memory: Mem) -> None:
        by_name, (starts, digit) = dict(zip(move.names, memory)), memory[-2:]
        out, moved = by_name.get(move.sorted), by_name.get(move.moved)
        tile = _WalkedTile(c, plan, None if first else digit[0] - 1, tiles, by_name[move.keys])
        table = c.shared(starts.dtype, DIGITS * _THREADS)
        tile.counted(table)

        def begin() -> None:
            first = tile.thread * _THREADS

            def step(k: Num, now: Num) -> Num:
                own = table[first + k]
                table.store(first + k, now)
                return now + own

            c.loop(0, _THREADS, 1, [starts[tile.count]], step)

        c.when(tile.thread < DIGITS, begin)
        c.barrier()

        def one(i: Num) -> None:
            key = tile.key(i)
            cell = tile.cell(key)
            goes = table[cell]
            table.store(cell, goes + 1)
            place = goes.to(i64)
            if out is not None:
                out.store((tile.row, place), cooked(from_key(c, key, plan.dtype, plan.descending) if last else key, plan.dtype))
            if moved is not None:
                moved.store((tile.row, place), (by_name[move.values].load((tile.row, i)) if move.values else i).to(moved.dtype))

        c.loop(tile.low, tile.high, 1, [], one)

    return write_kernel("sort_move", _THREADS, [tiles * ROWS], params, body)
