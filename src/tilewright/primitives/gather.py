"""Elements and slices, picked by their places, and what slices are sorted by and told apart by. What follows a sort of places, or a filter of them.

In: dtypes. Out: programs, for GPUs and for CPUs. Places come from primitives and lie inside.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.base.dtypes import DType, bool_, i64, u8, u16, u32, u64
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.keys import key_dtype, raw, to_key
from tilewright.primitives.parts import call

_ROWS, _N, _M = Size.of("rows"), Size.of("n"), Size.of("m")
_OUTER, _INNER = Size.of("outer"), Size.of("inner")
_THREADS = 256
_CHUNK = 16384
"""Elements of a CPU's block."""


def gather_program(dtype: DType, target: Target) -> Program:
    """The program `x[rows, n], places[rows, m] -> y[rows, m]`: `y[r, t] = x[r, places[r, t]]`."""
    x, places, y = tensor(dtype, _ROWS, _N), tensor(i64, _ROWS, _M), tensor(dtype, _ROWS, _M)

    def one(c: Code, row: Num, t: Num, x: Mem, places: Mem, y: Mem) -> None:
        y.store((row, t), x.load((row, places[row, t])))

    return _by_rows("gather", target, _ROWS, _M, [("x", x), ("places", places), ("y", y)], one)


def _by_rows(name: str, target: Target, rows: Size | int, columns: Size, params: list[tuple[str, Tensor]], one: Callable[..., None]) -> Program:
    """A program of one kernel that does `one(code, row, column, *memory)` at every place. The last of its arrays is what it makes."""
    chunk = _THREADS if target.simt else _CHUNK
    chunks = ceildiv(columns, chunk)

    def body(c: Code, *memory: Mem) -> None:
        row, first = c.block() // c.size(chunks), c.block() % c.size(chunks) * chunk
        if target.simt:
            mine = first + c.thread()
            c.when(mine < c.size(columns), lambda: one(c, row, mine, *memory))
        else:
            c.loop(first, (first + chunk).min(c.size(columns)), 1, [], lambda t: one(c, row, t, *memory))

    kernel = write_kernel(name, _THREADS if target.simt else 1, [Size.of(rows) * chunks], params, body)
    *inputs, output = params
    made = ProgramArray(*output, "output")
    return Program(name, tuple(ProgramArray(*p, "input") for p in inputs), (made,), (), (call(kernel),))


# -- slices ---------------------------------------------------------------------------------------------------------


def take_program(dtype: DType, target: Target, width: int, wide: bool, single: bool = False) -> Program:
    """The program `x[outer, n, inner], places[m] -> y[outer, m, inner]`: `y[o, t, i] = x[o, places[t], i]`.

    A GPU moves vectors of `width` elements, of which `inner` is a multiple; `wide` says that their number takes more than 31 bits. On a
    CPU, `single` says that `inner` is 1.
    """
    align = 16 if width > 1 else 0
    x, places, y = tensor(dtype, _OUTER, _N, _INNER, align=align), tensor(i64, _M), tensor(dtype, _OUTER, _M, _INNER, align=align)
    whole = _OUTER * _M * _INNER

    def vectors(c: Code, x: Mem, places: Mem, y: Mem) -> None:
        number = i64 if wide else u32
        mine, per, count = c.block() * _THREADS + c.thread(), c.size(_INNER) // width, c.size(_M)

        def move() -> None:
            here = mine.to(number)
            row = here // per.to(number)
            o = row // count.to(number)
            i, t = ((here - row * per.to(number)).to(i64)) * width, (row - o * count.to(number)).to(i64)
            y.store((o.to(i64), t, i), x.load((o.to(i64), places[t], i), width))

        c.when(mine * width < c.size(whole), move)

    def chunk(c: Code, x: Mem, places: Mem, y: Mem) -> None:
        low, inner, count = c.block() * _CHUNK, c.size(_INNER), c.size(_M)
        high = (low + _CHUNK).min(c.size(whole))
        first = low // inner

        def slice_(row: Num, o: Num, t: Num) -> list[Num]:
            here, base = places[t], row * inner
            c.loop((low - base).max(0), (high - base).min(inner), 1, [], lambda i: y.store((o, t, i), x.load((o, here, i))))
            ends = (t + 1).eq(count)
            return [c.select(ends, o + 1, o), c.select(ends, 0, t + 1)]

        c.loop(first, (high - 1) // inner + 1, 1, [first // count, first % count], slice_)

    def elements(c: Code, x: Mem, places: Mem, y: Mem) -> None:
        low, count = c.block() * _CHUNK, c.size(_M)
        high = (low + _CHUNK).min(c.size(_OUTER * _M))

        def row(o: Num) -> None:
            base = o * count
            c.loop((low - base).max(0), (high - base).min(count), 1, [], lambda t: y.store((o, t, 0), x.load((o, places[t], 0))), unroll=4)

        c.loop(low // count, (high - 1) // count + 1, 1, [], row)

    params = [("x", x), ("places", places), ("y", y)]
    if target.simt:
        kernel = write_kernel("take", _THREADS, [ceildiv(whole, _THREADS * width)], params, vectors)
    else:
        kernel = write_kernel("take", 1, [ceildiv(whole, _CHUNK)], params, elements if single else chunk)
    inputs = (ProgramArray("x", x, "input"), ProgramArray("places", places, "input"))
    return Program("take", inputs, (ProgramArray("y", y, "output"),), (), (call(kernel),))


def word_dtype(dtype: DType, columns: int) -> DType:
    """The smallest word that holds the keys of so many numbers, or else the largest there is."""
    bits = key_dtype(dtype).bits * columns
    return next((word for word in (u8, u16, u32) if word.bits >= bits), u64)


def words_program(dtype: DType, word: DType, target: Target) -> Program:
    """The program `x[columns, n] -> words[groups, n]`: the keys (`keys.to_key`) of a few columns as one word, the first one in its highest bits, so that
    the order of words is that of the columns one after the other. Two zeros are alike, and so are all NaN."""
    bits = key_dtype(dtype).bits
    several = word.bits // bits
    columns, groups = Size.of("columns"), Size.of("groups")
    x, words = tensor(dtype, columns, _N), tensor(word, groups, _N)

    def one(c: Code, group: Num, t: Num, x: Mem, words: Mem) -> None:
        joined: Num | None = None
        for k in range(several):
            column, last = group * several + k, c.size(columns) - 1
            key = to_key(c, raw(x.load((column.min(last), t))), dtype, False, True).to(word)
            if k:
                key = c.select(column <= last, key, 0)
            joined = key if joined is None else (joined << bits) | key
        assert joined is not None
        words.store((group, t), joined)

    return _by_rows("words", target, groups, _N, [("x", x), ("words", words)], one)


def heads_program(dtype: DType, word: DType, target: Target) -> Program:
    """The program `words[groups, n], order[n] -> flags[n]`: whether the slice at a place of that order differs from the one before it. A slice with a NaN
    differs from all others."""
    groups = Size.of("groups")
    words, order, flags = tensor(word, groups, _N), tensor(i64, _N), tensor(bool_, _N)

    def one(c: Code, _row: Num, t: Num, words: Mem, order: Mem, flags: Mem) -> None:
        here, before = order[t], order[(t - 1).max(0)]

        def compare(group: Num, _: Num) -> list[Num]:
            mine = words.load((group, here))
            other = mine.ne(words.load((group, before)))
            return [group + 1, other | _has_nan(c, mine, dtype) if dtype.is_float else other]

        _, found = c.loop_while([c.index(0), t.eq(0)], lambda group, found: (group < c.size(groups)) & ~found, compare)
        flags.store(t, found)

    return _by_rows("heads", target, 1, _N, [("words", words), ("order", order), ("flags", flags)], one)


def _has_nan(c: Code, word: Num, dtype: DType) -> Num:
    """Whether one of the keys in the word is that of NaN: all its bits are set."""
    key = key_dtype(dtype)
    found = c.const(False, bool_)
    for k in range(word.dtype.bits // key.bits):
        found = found | (word >> (k * key.bits) if k else word).to(key).eq((1 << key.bits) - 1)
    return found
