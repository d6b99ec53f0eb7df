"""Histogram on a GPU: how many elements fall into each of `bins` equal parts of a range.

In: the dtype of the data, the number of bins and what the target has. Out: a program `x, low, high, scale -> counts` (i64). Blocks
count in shared memory, in tables of their own as far as those fit, and add them up in memory at the end:

    few bins             a table for every warp; of bytes one for every lane, which never meet
    up to some thousand  a table for every block
    more                 a table of 16-bit counts, two in a word; what overflows goes to memory at once
    still more           no table

Where a target adds to no 64 bits at once, blocks add up words of 32 bits, and one more kernel widens them: data have fewer than 2^32 elements there.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import DType, f32, f64, i32, i64, u32
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv, minimum, product
from tilewright.base.target import Target
from tilewright.ir.nodes import Attr, Kernel
from tilewright.ir.program import Program, ProgramArray, ScalarInput
from tilewright.ir.types import Scalar, Tensor, tensor
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
    half, most = min(512, target.max_threads), min(1024, target.max_threads)
    if not target.has_warps:
        return Table("block" if bins * 4 <= room // 2 else "none", min(256, target.max_threads), 4, 1)
    if dtype.itemsize == 1 and bins <= 256 and bins * target.warp_size * 4 <= room:
        return Table("lane", half, 2)
    if bins * (most // target.warp_size) * 4 <= min(96 << 10, room):
        return Table("warp", most, 2, 2)
    if bins * 4 <= min(48 << 10, room):
        return Table("block", half, 4)
    if bins * 4 <= room // 2 - 1024:
        return Table("block", most, 2)
    if (bins + 1) // 2 * 4 <= room - 1024:
        return Table("half", most, 1)
    return Table("none", half, 4)


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
    narrow = 64 not in target.atomic_bits
    x, counts = data_type(dtype, N, aligned), tensor(u32 if narrow else i64, bins, align=16)
    attrs: dict[str, Attr] = {"cache": hint} if hint and width > 1 else {}

    def body(c: Code, x: Mem, counts: Mem, low: Num, high: Num, scale: Num) -> None:
        thread, size = c.thread(), c.size(N)
        counter = _COUNTERS[table.kind](c, counts, bins, table, thread, target.warp_size)

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

        (rest,) = c.loop(first, reach, stride * table.unroll, [first], several) if table.unroll > 1 else [first]
        c.loop(rest, vectors, stride, [], lambda i: count(vector(i)))
        if width > 1:
            last = vectors * width + first
            c.when(last < size, lambda: one(x[last]))
        counter.finish()

    bounds = ("low", "high", "scale")
    counted = "words" if narrow else "counts"
    params: list[Param] = [("x", x), (counted, counts), *((name, Scalar(number)) for name in bounds)]
    kernel = write_kernel("histogram", table.threads, [grid], params, body)
    inputs: list[ProgramArray | ScalarInput] = [ProgramArray("x", x, "input"), *(ScalarInput(name, number) for name in bounds)]
    if narrow:
        words, wide = ProgramArray("words", counts, "scratch"), ProgramArray("counts", tensor(i64, bins, align=16), "output")
        calls = (clear("clear_counts", words), call(kernel), call(widened("words", counts, "counts", wide.type)))
        return Program("histogram", tuple(inputs), (wide,), (words,), calls)
    out = ProgramArray("counts", counts, "output")
    return Program("histogram", tuple(inputs), (out,), (), (clear("clear_counts", out), call(kernel)))


def widened(source: str, words: Tensor, target: str, counts: Tensor) -> Kernel:
    """A kernel that copies counts to wider ones of the same shape."""
    whole = product(words.shape)

    def body(c: Code, words: Mem, counts: Mem) -> None:
        place = c.block() * _WIDEN_THREADS + c.thread()
        index = (place // c.size(shape[1]), place % c.size(shape[1])) if len(shape) == 2 else (place,)
        c.when(place < c.size(whole), lambda: counts.store(index, words.load(index).to(counts.dtype)))

    shape = words.shape
    return write_kernel("widen_counts", _WIDEN_THREADS, [ceildiv(whole, _WIDEN_THREADS)], [(source, words), (target, counts)], body)


_WIDEN_THREADS = 256


@record
class _Bins:
    """`add` counts an element of a bin; `finish` brings the block's counts to memory."""

    add: Callable[[Num], None]
    finish: Callable[[], None]


def _zeroed(c: Code, words: int, thread: Num, threads: int) -> Mem:
    memory = c.shared(u32, words)
    c.loop(thread, words, threads, [], lambda i: memory.store(i, 0))
    c.barrier()
    return memory


def _several(
    copies: Callable[[int, int], int], place: Callable[[Num, Num, int, int], Num], mine: Callable[[Num, int], Num]
) -> Callable[..., _Bins]:
    """`copies(threads, warp_size)` tables of 32-bit counts; `place(bin, copy, bins, copies)` is where a copy counts it, `mine(thread,
    warp_size)` the copy of a thread."""

    def make(c: Code, counts: Mem, bins: int, table: Table, thread: Num, warp_size: int) -> _Bins:
        number = copies(table.threads, warp_size)
        memory = _zeroed(c, bins * number, thread, table.threads)
        copy = mine(thread, warp_size)

        def finish() -> None:
            c.barrier()

            def flush(b: Num) -> None:
                total = c.const(0, u32)
                for other in range(number):
                    # Lanes begin with different copies: those of one bin are neighbours, or a multiple of the banks apart.
                    total = total + memory[place(b, (b + other) % number if number > 1 else c.index(0), bins, number)]
                c.when(total.ne(0), lambda: _discard(counts.atomic("add", b, total.to(counts.dtype))))

            c.loop(thread, bins, table.threads, [], flush)

        return _Bins(lambda b: _discard(memory.atomic("add", place(b, copy, bins, number), 1, scope="block")), finish)

    return make


def _halves(c: Code, counts: Mem, bins: int, table: Table, thread: Num, warp_size: int) -> _Bins:
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
                _discard(counts.atomic("add", b + 1, c.select(old.eq(0xFFFFFFFF), c.const(_HALF, counts.dtype), c.const(-1, counts.dtype))))

            c.when(~upper & (b + 1 < bins), carried)

        c.when(((old >> shift) & _HALF).eq(_HALF), overflow)

    def finish() -> None:
        c.barrier()

        def flush(w: Num) -> None:
            word = memory[w]
            for half in (0, 1):
                count = ((word >> (16 * half)) & _HALF).to(counts.dtype)
                place = w * 2 + half
                c.when(count.ne(0) & (place < bins), lambda p=place, v=count: _discard(counts.atomic("add", p, v)))  # type: ignore[misc]

        c.loop(thread, words, table.threads, [], flush)

    return _Bins(add, finish)


def _in_memory(c: Code, counts: Mem, bins: int, table: Table, thread: Num, warp_size: int) -> _Bins:
    return _Bins(lambda b: _discard(counts.atomic("add", b, 1)), lambda: None)


def _discard(_: Num) -> None: ...


_COUNTERS: dict[str, Callable[..., _Bins]] = {
    "lane": _several(lambda _, warp: warp, lambda b, copy, bins, copies: b * copies + copy, lambda thread, warp: thread & (warp - 1)),
    "warp": _several(
        lambda threads, warp: threads // warp, lambda b, copy, bins, _: copy * bins + b, lambda thread, warp: thread >> (warp.bit_length() - 1)
    ),
    "block": _several(lambda *_: 1, lambda b, *_: b, lambda thread, _: thread),
    "half": _halves,
    "none": _in_memory,
}
