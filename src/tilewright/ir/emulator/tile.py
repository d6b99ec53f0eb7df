"""The tile stage: lanes are the blocks of the grid, values carry a block's whole tile.

Blocks run together, as many as keep the largest tile of the kernel within `ELEMENTS`. Nothing orders blocks, so control flow
that differs between them runs under masks. Layouts do not change what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tilewright.base.dtypes import f32
from tilewright.base.sizes import Size
from tilewright.ir.emulator.frames import BLOCK, LANE, SLOT, Frame, align
from tilewright.ir.emulator.machine import Machine, Results, drain
from tilewright.ir.emulator.memory.memory import Memory
from tilewright.ir.emulator.memory.packed_dots import PackedDots
from tilewright.ir.emulator.memory.panels import Panels
from tilewright.ir.emulator.reductions import combine, scan
from tilewright.ir.nodes import Attr, Attrs, Kernel, Op, walk
from tilewright.ir.numerics import convert
from tilewright.ir.types import Tensor, Tile, dtype_of

Array = np.ndarray
ELEMENTS = 1 << 21
"""Most elements of one value, over all blocks that run together."""


def integers(attrs: Attrs, name: str) -> tuple[int, ...]:
    """An attribute that lists integers."""
    items = attrs[name]
    assert isinstance(items, tuple)
    return tuple(i for i in items if isinstance(i, int))


def to_tf32(values: Array) -> Array:
    """f32 rounded to tf32's 10 bits of mantissa: nearest, ties away from zero."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


class TileMachine(Machine):
    def __init__(self, kernel: Kernel, sizes: Mapping[str, int]) -> None:
        super().__init__(kernel, sizes)
        self.simple |= {
            "iota": self._iota, "reduce_tile": self._reduce_tile, "scan_tile": self._scan_tile,
            "item": self._item, "dot": self._dot, "transpose": self._transpose, "reshape": self._reshape,
            "slice": self._slice, "convert_layout": self._convert_layout, "alloc": self._alloc,
            "prefetch": lambda op, frame: (), "inside": self._inside, "barrier": lambda op, frame: (), "within": lambda op, frame: (), "load_image": self._load_image,
        }  # fmt: skip
        Panels(self)
        PackedDots(self)

    def launch(self, arguments: Sequence[Array | int | float | bool]) -> None:
        largest = 1
        for op in walk(self.kernel.body):
            for value in op.results:
                if isinstance(value.type, Tile):
                    largest = max(largest, prod(value.type.shape))
        blocks = prod(self.grid)
        at_once = max(1, ELEMENTS // largest)
        for first in range(0, blocks, at_once):
            frame = Frame(min(at_once, blocks - first))
            frame.values[LANE] = frame.values[SLOT] = np.arange(frame.lanes)
            frame.values[BLOCK] = first + np.arange(frame.lanes)
            for param, argument in zip(self.kernel.params, arguments, strict=True):
                self.bind(param, argument, frame)
            drain(self.run(self.kernel.body, frame))

    def describe(self, frame: Frame, lane: int) -> str:
        return self.block_text(int(frame.full(BLOCK)[lane]))

    def _iota(self, op: Op, frame: Frame) -> Results:
        shape = integers(op.attrs, "shape")
        return (np.arange(prod(shape), dtype=np.int64).reshape(1, *shape),)

    def _load_image(self, op: Op, frame: Frame) -> Results:
        memory = self.memories[op.operands[0]]
        row, *offsets, channel = (frame.get(v).astype(np.int64)[:, None] for v in op.operands[1:])
        m, k = integers(op.attrs, "shape")
        counts = [self._size_of(op.attrs[name]) for name in ("planes", "rows", "columns") if name in op.attrs]
        lower = op.attrs["lower"]
        assert isinstance(lower, tuple)
        number = row + np.arange(m)
        places: list[np.ndarray] = []
        for count, offset, first, step in zip(counts[::-1], offsets[::-1], lower[::-1], integers(op.attrs, "steps")[::-1], strict=True):
            # A kernel over images without any position runs no block; the division must not fail all the same.
            number, place = np.divmod(number, max(count, 1))
            places.insert(0, place * step + self._size_of(first) + offset)
        places.insert(0, number)
        indices = [*(place[:, :, None] for place in places), (channel + np.arange(k))[:, None, :]]
        inside = np.asarray(True)
        for index, extent in zip(indices, memory.shape, strict=True):
            inside = inside & (index >= 0) & (index < extent)
        if memory.flat.size == 0:
            return (np.zeros(inside.shape, memory.dtype.numpy),)
        found = memory.read(np.where(inside, memory.offsets(indices, None), 0))
        return (np.where(inside, found, np.zeros((), found.dtype)),)

    def _size_of(self, size: Attr) -> int:
        assert isinstance(size, int | Size)
        return Size.of(size).evaluate(self.sizes)

    def _reduce_tile(self, op: Op, frame: Frame) -> Results:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        values = [frame.get(v) for v in op.operands]
        if len(values) == 2 and values[0].shape != values[1].shape:
            values = list(np.broadcast_arrays(*values))
        return combine(str(op.attrs["kind"]), values, [dtype_of(v.type) for v in op.results], axis + 1)

    def _inside(self, op: Op, frame: Frame) -> Results:
        index, extent = frame.full(op.operands[0]), frame.full(op.operands[1])
        right = (index >= 0) & (index < align(extent, index.ndim - 1))
        return (np.all(right.reshape(frame.lanes, -1), axis=1),)

    def _scan_tile(self, op: Op, frame: Frame) -> Results:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        terms, first = frame.full(op.operands[0]), frame.full(op.operands[1])
        found = scan(str(op.attrs.get("kind", "add")), np.concatenate([first, terms], axis + 1), dtype_of(op.results[0].type), axis + 1)
        before, after = np.split(found, [terms.shape[axis + 1]], axis + 1)
        return before, after

    def _item(self, op: Op, frame: Frame) -> Results:
        return (frame.get(op.operands[0]).reshape(-1),)

    def _dot(self, op: Op, frame: Frame) -> Results:
        a, b, accumulator = (frame.get(v) for v in op.operands)
        dtype = dtype_of(op.operands[0].type)
        result = dtype_of(op.result.type)
        with np.errstate(all="ignore"):
            if result.is_small_float:
                wide, start = np.matmul(a.astype(np.float32), b.astype(np.float32)), accumulator.astype(np.float32)
                return (convert(wide + start, f32, result),)
            if dtype is f32 and op.attrs.get("precision") == "tf32":
                a, b = to_tf32(a), to_tf32(b)
            return (np.matmul(a.astype(result.numpy), b.astype(result.numpy)) + accumulator,)

    def _transpose(self, op: Op, frame: Frame) -> Results:
        order = integers(op.attrs, "order")
        return (frame.get(op.operands[0]).transpose(0, *(o + 1 for o in order)),)

    def _reshape(self, op: Op, frame: Frame) -> Results:
        value = frame.get(op.operands[0])
        return (value.reshape(value.shape[0], *integers(op.attrs, "shape")),)

    def _slice(self, op: Op, frame: Frame) -> Results:
        start, shape = integers(op.attrs, "start"), integers(op.attrs, "shape")
        parts = tuple(slice(s, s + e) for s, e in zip(start, shape, strict=True))
        return (frame.get(op.operands[0])[(slice(None), *parts)],)

    def _convert_layout(self, op: Op, frame: Frame) -> Results:
        return (frame.get(op.operands[0]),)

    def _alloc(self, op: Op, frame: Frame) -> Results:
        type_ = op.result.type
        assert isinstance(type_, Tensor)
        self.memories[op.result] = Memory.allocate(op.result.name, type_, integers(op.attrs, "shape"), frame.lanes)
        return ()
