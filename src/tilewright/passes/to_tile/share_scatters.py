"""Scatters of a block meet in its shared memory first. Tile stage to tile stage, on a GPU.

In: a kernel whose `accumulate`s may have an attribute `shared`: the elements that a copy in shared memory may have. Out: the kernel with such copies. Each
block fills its copies, combines its points into them, and combines each element of a copy into the array once. A call whose array is larger than the copies
combines into the array at once.

    accumulate %out, %k, %w {kind = "add", shared = 256}
    =>
    %copy = alloc {space = "shared", shape = [256]};  store %copy, 0 … 255, 0;  barrier
    if m <= 256 { accumulate %copy, %k, %w } { accumulate %out, %k, %w }
    barrier;  accumulate %out, 0 … m - 1, load %copy

It runs after `check_indices`: indices are those of the array there, and tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import bool_, i64
from tilewright.base.sizes import product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import rewrite_block
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.nest_shapes import shape_of
from tilewright.passes.from_tree.lower_body import unchanging
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.plans import Plan
from tilewright.passes.to_tile.index_sites import inside_of


def share_scatters(kernel: Kernel, schedule: Plan) -> Kernel:
    """The kernel with copies in shared memory; the very same one where none are asked for."""
    asked: dict[Value, Op] = {op.operands[0]: op for op in walk(kernel.body) if op.opcode == "accumulate" and "shared" in op.attrs}
    if not asked:
        return kernel
    assert isinstance(schedule, Schedule)
    return _Sharing(kernel, schedule, asked).run()


class _Sharing:
    def __init__(self, kernel: Kernel, schedule: Schedule, asked: dict[Value, Op]) -> None:
        self.kernel, self.tile, self.asked = kernel, schedule.reduce_tile, asked
        self.copies: dict[Value, Value] = {}
        self.fits: Value | None = None

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        for memory, op in self.asked.items():
            room = op.attrs["shared"]
            assert isinstance(room, int)
            self.copies[memory] = b.op("alloc", space="shared", shape=(room,), dtype=dtype_of(memory.type), name=f"{memory.name}.shared")
            fits = b.op("le", b.index(product(_tensor(memory).shape)), b.index(room))
            self.fits = fits if self.fits is None else b.logical_and(self.fits, fits)
        assert self.fits is not None
        b.if_(self.fits, self._fill, lambda inner: [])
        for op in rewrite_block(self.kernel.body, self._changed, {}).ops:
            b.append(op)
        b.if_(self.fits, self._merge, lambda inner: [])
        return replace(self.kernel, body=Block((), tuple(b.ops)))

    def _changed(self, b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "accumulate" or op.operands[0] not in self.copies:
            return None
        assert self.fits is not None
        memory = op.operands[0]
        rank = _tensor(memory).rank
        attrs = {name: value for name, value in op.attrs.items() if name != "shared"}

        def near(inner: Builder) -> list[Value]:
            value = op.operands[1 + rank]
            place = _flat(inner, memory, op.operands[1 : 1 + rank], value)
            if op.attrs.get("checked"):
                return list(inner.emit("accumulate", [self.copies[memory], place, *op.operands[1 + rank :]], attrs))
            # Copies have a few elements more than the array: what lies outside is left to the array, where it is found.
            inside = _inside(inner, memory, op.operands[1 : 1 + rank], value)
            outside = inner.op("not", inside)
            if op.attrs.get("masked"):
                mask = op.operands[-1] if shape_of(op.operands[-1]) == shape_of(inside) else inner.like(op.operands[-1], inside)
                inside, outside = inner.logical_and(mask, inside), inner.logical_and(mask, outside)
            inner.emit("accumulate", [self.copies[memory], place, value, inside], {**attrs, "masked": True})
            return list(inner.emit("accumulate", [*op.operands[: 2 + rank], outside], {**attrs, "masked": True}))

        b.if_(self.fits, near, lambda inner: inner.emit("accumulate", op.operands, attrs))
        return []

    def _steps(self, b: Builder, room: int, body: object) -> None:
        """All places of a copy, a tile at a time: `body(builder, places, inside)`."""
        assert callable(body)

        def step(inner: Builder, first: Value) -> list[Value]:
            places = inner.add(inner.op("broadcast", first, shape=(self.tile,)), inner.op("iota", shape=(self.tile,), axis=0))
            body(inner, places, None if room % self.tile == 0 else inner.op("lt", places, inner.splat(room, places)))
            return []

        b.for_(b.index(0), b.index(room), b.index(self.tile), [], step, name="place")

    def _fill(self, b: Builder) -> list[Value]:
        for memory, copy in self.copies.items():
            kind, dtype = str(self.asked[memory].attrs["kind"]), dtype_of(memory.type)

            def store(inner: Builder, places: Value, inside: Value | None, copy: Value = copy, start: object = unchanging(kind, dtype)) -> None:
                assert isinstance(start, int | float)
                value = inner.like(inner.const(start, dtype_of(copy.type)), places)
                operands = [copy, places, value]
                inner.emit("store", operands if inside is None else [*operands, inside], {} if inside is None else {"masked": True})

            self._steps(b, _tensor(copy).shape[0].constant or 1, store)
        b.multi("barrier")
        return []

    def _merge(self, b: Builder) -> list[Value]:
        b.multi("barrier")
        for memory, copy in self.copies.items():
            attrs: dict[str, Attr] = {"kind": str(self.asked[memory].attrs["kind"]), "masked": True}

            def combine(inner: Builder, places: Value, inside: Value | None, memory: Value = memory, copy: Value = copy, attrs: object = attrs) -> None:
                assert isinstance(attrs, dict)
                size = inner.like(inner.index(product(_tensor(memory).shape)), places)
                mask = inner.op("lt", places, size)
                mask = mask if inside is None else inner.logical_and(mask, inside)
                value = inner.emit("load", [copy, places, mask], {"masked": True})[0]
                inner.emit("accumulate", [memory, *_unravelled(inner, memory, places), value, mask], MappingProxyType(attrs))

            self._steps(b, _tensor(copy).shape[0].constant or 1, combine)
        return []


def _tensor(value: Value) -> Tensor:
    assert isinstance(value.type, Tensor)
    return value.type


def _flat(b: Builder, memory: Value, indices: Sequence[Value], value: Value) -> Value:
    """The number of an element in the order of rows."""
    shape = shape_of(value)
    total: Value | None = None
    for index, extent in zip(indices, _tensor(memory).shape, strict=True):
        if shape and shape_of(index) != shape:
            index = b.op("broadcast", index, shape=shape)
        if total is not None:
            total = b.mul(total, b.like(b.index(extent), index))
        total = index if total is None else b.add(total, index)
    if total is None:
        return b.op("broadcast", b.index(0), shape=shape) if shape else b.index(0)
    return total


def _inside(b: Builder, memory: Value, indices: Sequence[Value], value: Value) -> Value:
    """Whether an element lies in the array."""
    shape = shape_of(value)
    total = b.like(b.const(True, bool_), value) if shape else b.const(True, bool_)
    for index, extent in zip(indices, _tensor(memory).shape, strict=True):
        if shape and shape_of(index) != shape:
            index = b.op("broadcast", index, shape=shape)
        total = b.logical_and(total, inside_of(b, b.cast(index, i64), b.index(extent)))
    return total


def _unravelled(b: Builder, memory: Value, places: Value) -> list[Value]:
    indices: list[Value] = []
    rest = places
    for axis, extent in reversed(list(enumerate(_tensor(memory).shape))):
        if axis == 0:
            indices.append(rest)
            break
        size = b.like(b.op("max", b.index(extent), b.index(1)), places)
        indices.append(b.op("mod", rest, size))
        rest = b.op("floordiv", rest, size)
    return indices[::-1]


