"""Elements of rows, picked by their places: `y[r, t] = x[r, places[r, t]]`. What follows a sort of places.

In: the dtype. Out: a program `x[rows, n], places[rows, m] -> y[rows, m]`. Places come from primitives and lie inside.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, i64
from tilewright.base.sizes import Size, ceildiv
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.parts import call

_ROWS, _N, _M = Size.of("rows"), Size.of("n"), Size.of("m")
_THREADS = 256
_CHUNK = 16384
"""Elements of a CPU's block."""


def gather_program(dtype: DType, target: Target) -> Program:
    x, places, y = tensor(dtype, _ROWS, _N), tensor(i64, _ROWS, _M), tensor(dtype, _ROWS, _M)
    chunk = _THREADS if target.is_gpu else _CHUNK
    chunks = ceildiv(_M, chunk)

    def body(c: Code, x: Mem, places: Mem, y: Mem) -> None:
        row, first = c.block() // c.size(chunks), c.block() % c.size(chunks) * chunk

        def one(t: Num) -> None:
            y.store((row, t), x.load((row, places[row, t])))

        if target.is_gpu:
            mine = first + c.thread()
            c.when(mine < c.size(_M), lambda: one(mine))
        else:
            c.loop(first, (first + chunk).min(c.size(_M)), 1, [], one)

    kernel = write_kernel("gather", _THREADS if target.is_gpu else 1, [_ROWS * chunks], [("x", x), ("places", places), ("y", y)], body)
    inputs = (ProgramArray("x", x, "input"), ProgramArray("places", places, "input"))
    return Program("gather", inputs, (ProgramArray("y", y, "output"),), (), (call(kernel),))
