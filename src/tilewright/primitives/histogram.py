"""Histogram on a GPU: how many elements fall into each of `bins` equal parts of a range.

In: the dtype of the data, the number of bins and what the target has. Out: a program `x, low, high, scale -> counts` (i64). Blocks
count in shared memory, in tables of their own as far as those fit, and add them up in memory at the end:

    few bins             a table for every warp; of bytes one for every lane, which never meet
    up to some thousand  a table for every block
    more                 a table of 16-bit counts, two in a word; what overflows goes to memory at once
    still more           no table
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import DType, f32, f64, i32, i64, u32
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv, minimum
from tilewright.base.target import Target
from tilewright.ir.nodes import Attr
from tilewright.ir.program import Array, Program, ScalarInput
from tilewright.ir.types import Scalar, tensor
from tilewright.primitives.code import Code, Mem, Num, Param, write_kernel
from tilewright.primitives.parts import call, clear, data_type

N = Size.of("n")
_HALF = 0xFFFF


@record
class Table:
    """Where a block counts: `kind` lane, warp, block, half or none."""

    kind: str
    threads: int
    blocks: int
    """Blocks on a multiprocessor."""
    unroll: int = 4


def histogram_table(dtype: DType, bins: int, target: Target) -> Table:
    room = target.max_shared
    if dtype.itemsize == 1 and bins <= 256:
        return Table("lane", 512, 2)
    if bins * 32 * 4 <= 96 << 10:
        return Table("warp", 1024, 2, 2)
    if bins * 4 <= 48 << 10:
        return Table("block", 512, 4)
    if bins * 4 <= room // 2 - 1024:
        return Table("block", 1024, 2)
    if (bins + 1) // 2 * 4 <= room - 1024:
        return Table("half", 1024, 1)
    return Table("none", 512, 4)


def number_dtype(dtype: DType) -> DType:
    """The dtype in which the bin of an element is computed."""
    return f32 if dtype.is_float and dtype.bits <= 32 else f64


def histogram_program(
    dtype: DType, bins: int, target: Target, unit: bool, aligned: bool = True, table: Table | None = None, hint: str = "cs"
) -> Program:
    """With `unit` the data are integers, each bin one of them, and `low` is one as well; `scale` is bins / (high - low)."""
    table = table or histogram_table(dtype, bins, target)
    width = max(1, 16 // dtype.itemsize) if aligned else 1
    number = i64 if unit else number_dtype(dtype)
    most = target.multiprocessors * table.blocks
    grid = minimum(ceildiv(N, table.threads * width * table.unroll), most)
    x, counts = data_type(dtype, N, aligned), tensor(i64, bins, align=16)
    attrs: dict[str, Attr] = {"cache": hint} if hint and width > 1 else {}

    def body(c: Code, x: Mem, counts: Mem, low: Num, high: Num, scale: Num) -> None:
        thread, size = c.thread(), c.size(N)
        counter = _COUNTERS[table.kind](c, counts, bins, table, thread)

        def one(value: Num) -> None:
            given = value.to(number)
            if unit:
                inside = (given >= low) & (given <= high)
                place = (given - low).min(bins - 1)
            else:
                inside = (given >= low) & (given <= high)
                place = ((given - low) * scale).to(i32).min(bins - 1).to(i64)
            c.when(inside, lambda: counter.add(place))

        def vector(i: Num) -> list[Num]:
            return x.load(i * width, width, **attrs).lanes()

        def count(values: list[Num]) -> None:
            for value in values:
                one(value)

        stride = c.blocks() * table.threads
        first = c.block() * table.threads + thread
        vectors = size // width
        reach = vectors - stride * (table.unroll - 1)

        def several(i: Num, _: Num) -> Num:
            loaded = [vector(i + stride * k) for k in range(table.unroll)]
            for values in loaded:
                count(values)
            return i + stride * table.unroll

        (rest,) = c.loop(first, reach, stride * table.unroll, [first], several)
        c.loop(rest, vectors, stride, [], lambda i: count(vector(i)))
        if width > 1:
            last = vectors * width + first
            c.when(last < size, lambda: one(x[last]))
        counter.finish()

    bounds = ("low", "high", "scale")
    params: list[Param] = [("x", x), ("counts", counts), *((name, Scalar(number)) for name in bounds)]
    kernel = write_kernel("histogram", table.threads, [grid], params, body)
    inputs: list[Array | ScalarInput] = [Array("x", x, "input"), *(ScalarInput(name, number) for name in bounds)]
    out = Array("counts", counts, "output")
    return Program("histogram", tuple(inputs), (out,), (), (clear("clear_counts", out), call(kernel)))


@record
class _Counter:
    """`add` counts an element of a bin; `finish` brings the block's counts to memory."""

    add: Callable[[Num], None]
    finish: Callable[[], None]


def _zeroed(c: Code, words: int, thread: Num, threads: int) -> Mem:
    memory = c.shared(u32, words)
    c.loop(thread, words, threads, [], lambda i: memory.store(i, 0))
    c.barrier()
    return memory


def _several(copies: int, place: Callable[[Num, Num, int], Num], mine: Callable[[Num], Num]) -> Callable[..., _Counter]:
    """Tables of 32-bit counts; `place(bin, copy, bins)` is where a copy counts it."""

    def make(c: Code, counts: Mem, bins: int, table: Table, thread: Num) -> _Counter:
        number = copies or table.threads // 32
        memory = _zeroed(c, bins * number, thread, table.threads)
        copy = mine(thread)

        def finish() -> None:
            c.barrier()

            def flush(b: Num) -> None:
                total = c.const(0, u32)
                for other in range(number):
                    # Lanes begin with different copies: those of one bin are neighbours, or a multiple of the banks apart.
                    total = total + memory[place(b, (b + other) % number if number > 1 else c.index(0), bins)]
                c.when(total.ne(0), lambda: _discard(counts.atomic("add", b, total.to(i64))))

            c.loop(thread, bins, table.threads, [], flush)

        return _Counter(lambda b: _discard(memory.atomic("add", place(b, copy, bins), 1, scope="block")), finish)

    return make


def _halves(c: Code, counts: Mem, bins: int, table: Table, thread: Num) -> _Counter:
    """16-bit counts, two in a word. The word counts on when the lower one overflows, which takes one from the upper; each overflow is
    seen by exactly one addition, which tells memory of it."""
    words = (bins + 1) // 2
    memory = _zeroed(c, words, thread, table.threads)

    def add(b: Num) -> None:
        upper = (b & 1).ne(0)
        shift = (b & 1).to(u32) << 4
        old = memory.atomic("add", b >> 1, c.const(1, u32) << shift, scope="block")

        def overflow() -> None:
            _discard(counts.atomic("add", b, _HALF + 1))

            def carried() -> None:
                _discard(counts.atomic("add", b + 1, c.select(old.eq(0xFFFFFFFF), c.const(_HALF, i64), c.const(-1, i64))))

            c.when(~upper & (b + 1 < bins), carried)

        c.when(((old >> shift) & _HALF).eq(_HALF), overflow)

    def finish() -> None:
        c.barrier()

        def flush(w: Num) -> None:
            word = memory[w]
            for half in (0, 1):
                count = ((word >> (16 * half)) & _HALF).to(i64)
                place = w * 2 + half
                c.when(count.ne(0) & (place < bins), lambda p=place, v=count: _discard(counts.atomic("add", p, v)))  # type: ignore[misc]

        c.loop(thread, words, table.threads, [], flush)

    return _Counter(add, finish)


def _in_memory(c: Code, counts: Mem, bins: int, table: Table, thread: Num) -> _Counter:
    return _Counter(lambda b: _discard(counts.atomic("add", b, 1)), lambda: None)


def _discard(_: Num) -> None: ...


_COUNTERS: dict[str, Callable[..., _Counter]] = {
    "lane": _several(32, lambda b, copy, bins: b * 32 + copy, lambda thread: thread & 31),
    "warp": _several(0, lambda b, copy, bins: copy * bins + b, lambda thread: thread >> 5),
    "block": _several(1, lambda b, copy, bins: b, lambda thread: thread),
    "half": _halves,
    "none": _in_memory,
}
