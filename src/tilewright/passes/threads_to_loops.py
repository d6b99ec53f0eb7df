"""Pass: an explicit kernel of blocks of threads becomes one of single threads with vectors, as the CPU's code generator takes it.

    grid=[bx, by] threads=256            grid=[by*bx] threads=1
    %t = thread_id                       %a = alloc shared …
    A                                    for %g = 0, 16 { A for threads 16*%g … as vecs of 16 }
    barrier                 becomes      for %g = 0, 16 { B … }
    B

One CPU thread runs one block at a time. Neighbouring threads are the lanes of vecs (`lane_ops.py`); loops over the groups of lanes are cut at
every barrier (`block_code.py`). What lives across a cut is computed again where that is cheap, else kept in an array over the threads. Values that are the
same for the whole block (`analysis.uniform`) are scalars outside these loops, and so is control flow around barriers (`block_control.py`): a loop with a barrier in
it stays outside, and each part of its body is a loop over groups. Where not all threads of a block go one way around a barrier, each part
runs under a mask that is kept over the threads too: threads that have left are not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.rewrite import eliminate_dead, rewrite
from tilewright.passes.block_control import BlockControl
from tilewright.passes.lane_memory import WARP
from tilewright.passes.split_vectors import split_vectors

_WARP_OPS = frozenset({"shuffle", "vote"})


def threads_to_loops(kernel: Kernel, target: Target) -> Kernel:
    """The kernel for a CPU. One that already is for single threads stays as it is."""
    if kernel.stage is not Stage.THREAD or (kernel.threads == 1 and len(kernel.grid) == 1 and not _needs_lanes(kernel)):
        return kernel
    flat = _flat_grid(split_vectors(kernel))
    return eliminate_dead(BlockControl(flat, lane_count(flat, target)).run())


def _needs_lanes(kernel: Kernel) -> bool:
    return any(op.opcode in _WARP_OPS or op.opcode == "grid_size" for op in walk(kernel.body))


def lane_count(kernel: Kernel, target: Target) -> int:
    """How many threads are the lanes of one vec: a warp where its lanes talk, else as many as have neighbouring indices."""
    if any(op.opcode in _WARP_OPS for op in walk(kernel.body)):
        return WARP
    most = 1
    while most * 2 <= min(WARP, kernel.threads):
        most *= 2
    natural = min(max(4, target.vector_bytes // 4), most)
    period = _period(kernel)
    for width in (natural, natural // 2):
        if width >= 4 and period % width == 0:
            return width
    return natural


def _period(kernel: Kernel) -> int:
    """What divides every number by which threads are counted along the axes of the block."""
    constants: dict[Value, int] = {}
    threads: set[Value] = set()
    found = 0
    for op in walk(kernel.body):
        if op.opcode == "thread_id":
            threads.add(op.result)
        elif op.opcode == "const" and isinstance(op.attrs["value"], int):
            constants[op.result] = op.attrs["value"]
        elif op.opcode in ("floordiv", "mod") and op.operands[0] in threads:
            found = gcd(found, constants.get(op.operands[1], 1))
    return found


def _flat_grid(kernel: Kernel) -> Kernel:
    """The kernel with a grid of one axis, and the block's coordinates computed at its start."""
    head = Builder(kernel.span)
    block = head.op("program_id", axis=0, name="block")
    ids: list[Value] = []
    rest = block
    for extent in kernel.grid[:-1]:
        size = head.index(extent)
        ids.append(head.op("mod", rest, size))
        rest = head.op("floordiv", rest, size)
    ids.append(rest)

    def placed(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in ("program_id", "grid_size"):
            return None
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        return [ids[axis]] if op.opcode == "program_id" else [b.index(kernel.grid[axis])]

    body = rewrite(kernel, placed).body
    return replace(kernel, grid=(product(kernel.grid),), body=Block((), (*head.ops, *body.ops)))
