"""Transposing matrices on a GPU: through square tiles in shared memory, in vectors on both sides where rows allow it.

In: the dtype, and whether rows of the input and of the output are whole vectors apart. Out: a program `x[batch, rows, columns] ->
y[batch, columns, rows]`.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv
from tilewright.ir.nodes import Attr
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.parts import call

_ROWS, _COLUMNS, _BATCH = Size.of("rows"), Size.of("columns"), Size.of("batch")


@record
class Square:
    """A tile of `side` by `side` elements, moved by `threads`."""

    side: int = 64
    threads: int = 256


def transpose_program(dtype: DType, vectors_in: bool, vectors_out: bool, square: Square | None = None, hint: str = "cs") -> Program:
    square = square or Square(64, 256 if dtype.itemsize >= 4 else 128)
    side, threads = square.side, square.threads
    width = min(max(1, 16 // dtype.itemsize), 8)
    across, down = ceildiv(_COLUMNS, side), ceildiv(_ROWS, side)
    x, y = tensor(dtype, _BATCH, _ROWS, _COLUMNS, align=16 if vectors_in else 0), tensor(dtype, _BATCH, _COLUMNS, _ROWS, align=16)
    attrs: dict[str, Attr] = {"cache": hint} if hint else {}

    def body(c: Code, x: Mem, y: Mem) -> None:
        block, thread = c.block(), c.thread()
        per = c.size(across * down)
        image, inside = block // per, block % per
        row, column = inside // c.size(across) * side, inside % c.size(across) * side
        rows, columns = c.size(_ROWS), c.size(_COLUMNS)
        memory = c.shared(dtype, side, side + 1)

        def vectors() -> list[tuple[Num, Num]]:
            """Row and first column, in the tile, of each vector of the thread."""
            count = side * side // width // threads
            along = side // width
            return [(thread // along + k * (threads // along), thread % along * width) for k in range(count)]

        def load_whole() -> list[Num]:
            if vectors_in:
                loaded = [x.load((image, row + r, column + v), width, **attrs) for r, v in vectors()]
                return [e for vector in loaded for e in vector.lanes()]
            return [x.load((image, row + r, column + v + j)) for r, v in vectors() for j in range(width)]

        def load_edge() -> list[Num]:
            last_row, last_column = rows - 1, columns - 1
            return [
                x.load((image, (row + r).min(last_row), (column + v + j).min(last_column))) for r, v in vectors() for j in range(width)
            ]

        whole = (row + side <= rows) & (column + side <= columns)
        elements = c.either(whole, load_whole, load_edge)
        for k, (r, v) in enumerate(vectors()):
            for j in range(width):
                memory.store((r, v + j), elements[k * width + j])
        c.barrier()
        turned = [memory[v + j, r] for r, v in vectors() for j in range(width)]

        def store_whole() -> None:
            for k, (r, v) in enumerate(vectors()):
                items = turned[k * width : (k + 1) * width]
                if vectors_out:
                    y.store((image, column + r, row + v), c.pack(items), **attrs)
                    continue
                for j, item in enumerate(items):
                    y.store((image, column + r, row + v + j), item)

        def store_edge() -> None:
            for k, (r, v) in enumerate(vectors()):
                for j in range(width):
                    a, b = column + r, row + v + j
                    item = turned[k * width + j]
                    c.when((a < columns) & (b < rows), lambda a=a, b=b, item=item: y.store((image, a, b), item))  # type: ignore[misc]

        c.either(whole, store_whole, store_edge)

    kernel = write_kernel("transpose", threads, [across * down * _BATCH], [("x", x), ("y", y)], body)
    return Program("transpose", (ProgramArray("x", x, "input"),), (ProgramArray("y", y, "output"),), (), (call(kernel),))


_CPU_SIDE = 32


def transpose_program_cpu(dtype: DType) -> Program:
    """The same on a CPU: a block moves one strip of squares that fit the first-level cache."""
    down = ceildiv(_ROWS, _CPU_SIDE)
    x, y = tensor(dtype, _BATCH, _ROWS, _COLUMNS), tensor(dtype, _BATCH, _COLUMNS, _ROWS)

    def body(c: Code, x: Mem, y: Mem) -> None:
        image, row = c.block() // c.size(down), c.block() % c.size(down) * _CPU_SIDE
        columns = c.size(_COLUMNS)
        last_row = (row + _CPU_SIDE).min(c.size(_ROWS))

        def square(column: Num) -> None:
            def line(i: Num) -> None:
                c.loop(row, last_row, 1, [], lambda j: y.store((image, i, j), x[image, j, i]), unroll=4)

            c.loop(column, (column + _CPU_SIDE).min(columns), 1, [], line)

        c.loop(0, columns, _CPU_SIDE, [], square)

    kernel = write_kernel("transpose", 1, [down * _BATCH], [("x", x), ("y", y)], body)
    return Program("transpose", (ProgramArray("x", x, "input"),), (ProgramArray("y", y, "output"),), (), (call(kernel),))
