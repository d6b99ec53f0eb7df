"""Kernels for the rows about grids that stay: ten small products in a row, as one launch and as ten, and barriers with nothing
between.

`barriers` is a program at the thread stage, made by hand: as many barriers of the grid as its input has elements.
"""

from __future__ import annotations

import tilewright as tw
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import f32
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.compile.build import build_artifact
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.ir.verify import verify_program

STEPS = 10
THREADS = 128


@tw.kernel
def step(x: tw.Array, v: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for j in range(cols):
            total += x[i, j] * v[j]
        out[i] = tw.tanh(total)
    return out


@tw.kernel
def ten_launches(x: tw.Array, v: tw.Array) -> tw.Array:
    v1 = step(x, v)
    v2 = step(x, v1)
    v3 = step(x, v2)
    v4 = step(x, v3)
    v5 = step(x, v4)
    v6 = step(x, v5)
    v7 = step(x, v6)
    v8 = step(x, v7)
    v9 = step(x, v8)
    return step(x, v9)


@tw.kernel(launches=1)
def persistent_kernel(x: tw.Array, v: tw.Array) -> tw.Array:
    v1 = step(x, v)
    v2 = step(x, v1)
    v3 = step(x, v2)
    v4 = step(x, v3)
    v5 = step(x, v4)
    v6 = step(x, v5)
    v7 = step(x, v6)
    v8 = step(x, v7)
    v9 = step(x, v8)
    return step(x, v9)


def barriers(blocks: int) -> Program:
    """Every block meets all others n times, n being the extent of the input; the first says so at the end."""
    x, out = Value(tensor(f32, "n"), "x"), Value(tensor(f32, 1), "out")
    b = Builder()
    block, thread = b.op("program_id", axis=0), b.op("thread_id")

    def meet(inner: Builder, i: Value) -> list[Value]:
        inner.multi("grid_barrier")
        return []

    b.for_(b.index(0), b.index(Size.of("n")), b.index(1), [], meet)

    def say(inner: Builder) -> list[Value]:
        inner.multi("store", out, inner.index(0), inner.cast(inner.index(Size.of("n")), f32))
        return []

    first = b.op("eq", b.add(block, thread), b.index(0))
    b.if_(first, say, lambda inner: [])
    kernel = Kernel("barriers", Stage.THREAD, (x, out), Block((), tuple(b.ops)), (Size.of(blocks),), THREADS)
    assert isinstance(x.type, Tensor)
    assert isinstance(out.type, Tensor)
    inputs, outputs = (ProgramArray("x", x.type, "input"),), (ProgramArray("out", out.type, "output"),)
    program = Program("barriers", inputs, outputs, (), (KernelCall(kernel, ("x", "out")),))
    verify_program(program)
    return program


def barrier_artifact(blocks: int, target: Target) -> Artifact:
    return build_artifact(barriers(blocks), target)
