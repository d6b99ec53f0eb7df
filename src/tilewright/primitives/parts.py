"""Pieces that several primitives share: clearing scratch memory, and tiles of an array in the registers of a block's threads.

A block's tile is cut into one part per warp, each part into steps of a vector for each lane that follow one another in memory: every access
of a warp is one run of addresses, and the order of elements is (warp, step, lane, element of the vector).
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, i64
from tilewright.base.record import record
from tilewright.base.sizes import Size, ceildiv
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import KernelCall, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel

_CLEAR_THREADS = 256


@record
class BlockShape:
    """How a block's tile lies in its threads: `steps` vectors of `width` elements in each of `threads`."""

    threads: int
    steps: int
    width: int
    warp_size: int

    @property
    def tile(self) -> int:
        return self.threads * self.steps * self.width

    @property
    def warps(self) -> int:
        return self.threads // self.warp_size


@record
class LaneNumbers:
    """Where a thread is in its block."""

    thread: Num
    lane: Num
    warp: Num
    warp_size: int

    @property
    def distances(self) -> tuple[int, ...]:
        """The powers of two below the lanes of a warp: how far apart lanes are that join in the steps of a tree."""
        return tuple(1 << k for k in range(self.warp_size.bit_length() - 1))

    @property
    def is_last_lane(self) -> Num:
        return self.lane.eq(self.warp_size - 1)


def lanes(c: Code, warp_size: int) -> LaneNumbers:
    thread = c.thread()
    return LaneNumbers(thread, thread & (warp_size - 1), thread >> (warp_size.bit_length() - 1), warp_size)


def clear(name: str, array: ProgramArray) -> KernelCall:
    """Zeros in a one-dimensional array that is aligned to vectors."""
    (extent,) = array.type.shape
    dtype = array.type.dtype
    width = 16 // dtype.itemsize
    per_block = _CLEAR_THREADS * width

    def body(c: Code, words: Mem) -> None:
        place = (c.block() * _CLEAR_THREADS + c.thread()) * width
        size = c.size(extent)
        zero = c.const(0, dtype)

        def single() -> None:
            for j in range(width - 1):
                c.when(place + j < size, lambda j=j: words.store(place + j, zero))  # type: ignore[misc]

        c.either(place + width <= size, lambda: words.store(place, c.op("broadcast", zero, width=width)), single)

    kernel = write_kernel(name, _CLEAR_THREADS, [ceildiv(extent, per_block)], [(array.name, array.type)], body)
    return KernelCall(kernel, (array.name,))


def scratch(name: str, dtype: DType, *shape: Size | int) -> ProgramArray:
    return ProgramArray(name, tensor(dtype, *shape, align=16), "scratch")


def call(kernel: Kernel) -> KernelCall:
    """A call whose arrays have the names of the parameters."""
    return KernelCall(kernel, tuple(p.name for p in kernel.params))


def data_type(dtype: DType, extent: Size | int | str, aligned: bool) -> Tensor:
    return tensor(dtype, extent, align=16 if aligned else 0)


def tile_index(c: Code, at: LaneNumbers, tile: Num, shape: BlockShape, step: int) -> Num:
    """Where the thread's vector of that step begins."""
    inside = at.warp * (shape.steps * shape.width * shape.warp_size) + at.lane * shape.width + step * shape.width * shape.warp_size
    return tile * shape.tile + inside


def load_tile(
    c: Code, data: Mem, at: LaneNumbers, tile: Num, shape: BlockShape, size: Num, aligned: bool, hint: str = "", reverse: bool = False
) -> list[list[Num]]:
    """The thread's elements, step by step; behind the end of the data the last element stands. `reverse`: tiles are counted from the data's end, and
    `aligned` says that they begin where vectors may all the same."""
    attrs = {"cache": hint} if hint else {}

    def vector(step: int) -> list[Num]:
        place = tile_index(c, at, tile, shape, step)
        if reverse:
            return data.load(size - shape.width - place, shape.width, **attrs).lanes()[::-1]
        return data.load(place, shape.width, **attrs).lanes()

    def whole() -> list[Num]:
        if not aligned:
            places = [tile_index(c, at, tile, shape, k) + j for k in range(shape.steps) for j in range(shape.width)]
            return [data.load(size - 1 - p if reverse else p) for p in places]
        return [x for v in [vector(k) for k in range(shape.steps)] for x in v]

    def edge() -> list[Num]:
        last = size - 1
        places = [(tile_index(c, at, tile, shape, k) + j).min(last) for k in range(shape.steps) for j in range(shape.width)]
        return [data.load(last - p if reverse else p) for p in places]

    flat = c.either((tile + 1) * shape.tile <= size, whole, edge)
    return [flat[k * shape.width : (k + 1) * shape.width] for k in range(shape.steps)]


def store_tile(
    c: Code, out: Mem, at: LaneNumbers, tile: Num, shape: BlockShape, size: Num, values: Sequence[Sequence[Num]], hint: str = "", reverse: bool = False,
    aligned: bool = True,
) -> None:  # fmt: skip
    """The reverse. The output is aligned; a tile of it that is counted from the end only where `aligned` says so."""
    attrs = {"cache": hint} if hint else {}

    def whole() -> None:
        for k, vector in enumerate(values):
            place = tile_index(c, at, tile, shape, k)
            if not reverse:
                out.store(place, c.pack(vector), **attrs)
            elif aligned:
                out.store(size - shape.width - place, c.pack(list(vector)[::-1]), **attrs)
            else:
                for j, value in enumerate(vector):
                    out.store(size - 1 - place - j, value)

    def edge() -> None:
        for k, vector in enumerate(values):
            for j, value in enumerate(vector):
                place = tile_index(c, at, tile, shape, k) + j
                target = size - 1 - place if reverse else place
                c.when(place < size, lambda target=target, value=value: out.store(target, value))  # type: ignore[misc]

    c.either((tile + 1) * shape.tile <= size, whole, edge)


def warp_total_parts(c: Code, totals: Mem, count: int, warp: Num) -> tuple[Num, Num]:
    """Of one integer per warp in shared memory: the sum of those before this warp, and the sum of all."""
    before, whole = c.const(0, i64), c.const(0, i64)
    for other in range(count):
        value = totals[other].to(i64)
        before = c.select(warp > other, before + value, before)
        whole = whole + value
    return before, whole
