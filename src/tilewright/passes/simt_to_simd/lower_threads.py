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

from tilewright.base.errors import TargetLimit
from tilewright.base.sizes import Size, ceildiv, product
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.needs import only_gpus
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import eliminate_dead, rewrite
from tilewright.ir.types import INDEX, Vec
from tilewright.passes.simt_to_simd.block_code import Rows
from tilewright.passes.simt_to_simd.block_control import BlockControl
from tilewright.passes.simt_to_simd.lane_warps import LANE_OPS
from tilewright.passes.simt_to_simd.split_vectors import split_vectors

_APART = frozenset({"grid_size", "assert", "barrier_reduce", "nanosleep", "atomic_load", "atomic_store"})
_BESIDE = 16
"""Blocks that walk their rows together."""


def simt_to_simd(kernel: Kernel, target: Target) -> Kernel:
    """The kernel for a CPU. One that already is for single threads stays as it is."""
    if kernel.stage is not Stage.THREAD or (kernel.threads == 1 and len(kernel.grid) == 1 and not _needs_lanes(kernel)):
        return kernel
    _refuse(kernel, target)
    plain = _exact(split_vectors(kernel))
    width = lane_count(plain, target)
    if _has_short_rows(plain, width):
        return eliminate_dead(_along_rows(plain, width, target.simt_warp))
    return eliminate_dead(BlockControl(_flat_grid(plain), width, target.simt_warp).run())


def _refuse(kernel: Kernel, target: Target) -> None:
    """Say what the kernel has that only GPUs do."""
    for op in walk(kernel.body):
        what = only_gpus(op.opcode)
        if not what and op.opcode.startswith("atomic"):
            wide = any(isinstance(v.type, Vec) for v in (*op.operands, *op.results)) and op.attrs.get("kind") != "add"
            what = "an atomic access of several numbers at once" if wide else ""
        if what:
            raise TargetLimit.at(
                "TW020", f"{op.opcode}, {what}, is not available on {target.name}: only GPUs have it", _place(kernel, op),
                "run the kernel on a GPU or on the emulator",
            )  # fmt: skip


def _place(kernel: Kernel, op: Op) -> Span:
    """Where an op is written. What is computed once at the start of a kernel stands where it is used first."""
    made = set(op.results)
    for other in walk(kernel.body):
        if op.span != kernel.span or not made:
            break
        if made.intersection(other.operands):
            if other.span != kernel.span:
                return other.span
            made.update(other.results)
    return op.span


def _needs_lanes(kernel: Kernel) -> bool:
    """Whether even a single thread has ops that a CPU's code generator does not take."""
    return any(OPS[op.opcode].group == "warp" or op.opcode in _APART for op in walk(kernel.body))


def _exact(kernel: Kernel) -> Kernel:
    """The kernel with true functions for those that are instructions of GPUs."""

    def exact(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode == "rcp_approx":
            return [b.op("div", b.splat(1.0, op.operands[0]), op.operands[0])]
        name = op.opcode.removesuffix("_approx")
        return None if name == op.opcode else [b.op(name, *op.operands)]

    return rewrite(kernel, exact)


def lane_count(kernel: Kernel, target: Target) -> int:
    """How many threads are the lanes of one vec: a warp where its lanes talk, else as many as have neighbouring indices."""
    if any(op.opcode in LANE_OPS for op in walk(kernel.body)):
        return target.simt_warp
    most = 1
    while most * 2 <= min(target.simt_warp, kernel.threads):
        most *= 2
    natural = max(4, min(target.vector_bytes // 4, most))
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
    ids = _coordinates(head, head.op("program_id", axis=0, name="block"), kernel.grid)
    body = _placed(kernel, ids)
    return replace(kernel, grid=(product(kernel.grid),), body=Block((), (*head.ops, *body.ops)))


def _coordinates(head: Builder, number: Value, grid: Sequence[Size]) -> list[Value]:
    """A block's place along each axis, from its number."""
    ids: list[Value] = []
    for extent in grid[:-1]:
        size = head.index(extent)
        ids.append(head.op("mod", number, size))
        number = head.op("floordiv", number, size)
    return [*ids, number]


def _placed(kernel: Kernel, ids: Sequence[Value]) -> Block:
    """The body for blocks with these coordinates."""

    def placed(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in ("program_id", "grid_size"):
            return None
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        return [ids[axis]] if op.opcode == "program_id" else [b.index(kernel.grid[axis])]

    return rewrite(kernel, placed).body


# -- blocks beside each other ---------------------------------------------------------------------------------------


def _has_short_rows(kernel: Kernel, width: int) -> bool:
    """Whether blocks are several rows of threads that need not wait for each other: then neighbouring blocks walk their rows together,
    along memory, rather than each its own."""
    block = kernel.attrs.get("block")
    if not isinstance(block, tuple) or not isinstance(block[0], int) or len(kernel.grid) < 2:
        return False
    alone = not any(op.opcode == "barrier" or (op.opcode == "alloc" and op.attrs["space"] == "shared") for op in walk(kernel.body))
    return alone and block[0] % width == 0 and block[0] < kernel.threads and kernel.threads % width == 0


def _along_rows(kernel: Kernel, width: int, warp_size: int) -> Kernel:
    """One CPU block for several neighbouring blocks of the kernel's own, which runs the first row of each, then the second, and so on."""
    head = Builder(kernel.span)
    across = ceildiv(kernel.grid[0], _BESIDE)
    part, others = _coordinates(head, head.op("program_id", axis=0, name="block"), (across, product(kernel.grid[1:])))
    ids = _coordinates(head, others, kernel.grid[1:])
    first = head.mul(part, head.index(_BESIDE))
    last = head.op("min", head.add(first, head.index(_BESIDE)), head.index(kernel.grid[0]))
    place = Value(INDEX, "block")
    body = _placed(kernel, [place, *ids])
    whole = replace(kernel, grid=(product((across, *kernel.grid[1:])),), body=Block((), (*head.ops, *body.ops)))
    block = kernel.attrs["block"]
    assert isinstance(block, tuple) and isinstance(block[0], int)
    return BlockControl(whole, width, warp_size).run(Rows(len(head.ops), place, first, last, kernel.threads // block[0], kernel.grid[0], others))
