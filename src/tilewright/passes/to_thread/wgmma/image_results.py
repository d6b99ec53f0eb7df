"""Results that are places of an image, as those of a convolution with channels first: neighbours in memory along a tile's rows. Part of `epilogue`.

Registers would give eight places of four channels at a time, two bytes each. So a piece of 64 places and up to 64 channels is turned in shared memory, and each
warp stores whole channels, with its lanes along the places. Rows of a tile are several indices walked as one, found by division: every thread notes them for its own
rows, and reads those of the places that it stores:

    registers -> out[channel][place], swizzled;   indices of a thread's rows -> places[axis][place];   barrier;   out -> result[.., channel, place..]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from typing import Protocol

from tilewright.analysis import divisors
from tilewright.base.dtypes import i32
from tilewright.base.sizes import ONE, Size
from tilewright.ir.build import Builder
from tilewright.ir.layouts import MMA_LANES, WGMMA_WARPS
from tilewright.ir.nodes import Op, Value, walk
from tilewright.ir.types import Tensor, Tile, dtype_of
from tilewright.passes.common.registers import Held, Mask, RegisterIndex, Registers
from tilewright.passes.to_thread.lower_tiles import TileLowering

PLACES = 64
"""Places of a piece, and its channels at most."""
CHUNK = 8
"""Elements of 16 bytes."""


class TileSides(Protocol):
    """What is asked of a tile of results."""

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def warpgroups(self) -> int: ...
    @property
    def pingpong(self) -> bool: ...
    @property
    def bands(self) -> int: ...


class ImageEpilogue(TileLowering, ABC):
    """What is asked of the lowering whose results these are (`epilogue.py`)."""

    rows: int
    out: Value
    own: Value
    warp: Value
    lane: Value

    @property
    @abstractmethod
    def sides(self) -> TileSides:
        """The tile of results."""

    @abstractmethod
    def outgoing_buffers(self, b: Builder, size: int) -> None:
        """Make room in shared memory for results on their way."""

    @abstractmethod
    def buffer_of(self, b: Builder, number: int) -> Value:
        """Where the piece of this number lies."""

    @abstractmethod
    def meet(self, b: Builder) -> None:
        """The warps of a group wait for one another."""

    @abstractmethod
    def fill_turned(self, b: Builder, registers: Registers, buffer: Value) -> None:
        """Write registers to a buffer with rows and columns exchanged."""

    @abstractmethod
    def origin(self, held: Held) -> Value:
        """Where the tile begins along an index."""


class ImageResults:
    """One store of all results of a tile."""

    def __init__(self, outer: ImageEpilogue, op: Op, places: list[int], channel: int) -> None:
        self.outer, self.op = outer, op
        self.axes, self.channel = places, channel
        self.together = 2 if self._in_pairs() else 1
        """Places that a lane stores at once."""

    @property
    def tensor(self) -> Tensor:
        type_ = self.op.operands[0].type
        assert isinstance(type_, Tensor)
        return type_

    def allocate(self, b: Builder) -> None:
        groups = self.outer.sides.warpgroups
        self.outer.outgoing_buffers(b, PLACES * PLACES)
        self.places = b.op("alloc", dtype=i32, shape=(groups * len(self.axes) * PLACES,), space="shared", align=16, name="places")

    def _in_pairs(self) -> bool:
        """Whether two places, of which the first has an even number, are neighbours in a row of the image and begin at whole words."""
        tensor, facts = self.tensor, self.outer.kernel.facts
        length = self._row_length()
        if length is None or divisors.of_size(length, facts) % 2 or tensor.align < 4:
            return False
        return all(divisors.of_size(stride, facts) % 2 == 0 for stride in tensor.strides[:-1])

    def _row_length(self) -> Size | None:
        """Places of a row of the image, where the last index is the rest that the number of a place leaves: `p - p // length * length`."""
        made = {result: op for op in walk(self.outer.kernel.body) for result in op.results}
        rest = made.get(self.op.operands[self.tensor.rank])
        whole = made.get(rest.operands[1]) if rest is not None and rest.opcode == "sub" else None
        quotient = made.get(whole.operands[0]) if whole is not None and whole.opcode == "mul" else None
        if rest is None or whole is None or quotient is None or quotient.opcode != "floordiv" or quotient.operands != (rest.operands[0], whole.operands[1]):
            return None
        spread = made.get(whole.operands[1])
        source = made.get(spread.operands[0]) if spread is not None and spread.opcode == "broadcast" else None
        value = source.attrs.get("value") if source is not None and source.opcode == "size" else None
        return value if isinstance(value, Size) else None

    def store(self, b: Builder) -> bool:
        """A piece. False where more than edges is masked."""
        outer, op, tensor = self.outer, self.op, self.tensor
        mask = outer.env[op.operands[-1]] if op.attrs.get("masked") else None
        if mask is not None and (not isinstance(mask, Mask) or mask.others or any(list(index.factors.items()) not in ([(0, 1)], [(1, 1)]) for index, _ in mask.edges)):
            return False
        edges = mask.edges if isinstance(mask, Mask) else []
        assert outer.window is not None
        registers = outer.registers(b, outer.env[op.operands[1 + tensor.rank]], (outer.sides.m, outer.sides.n))
        buffer = outer.buffer_of(b, 0)
        outer.meet(b)  # others may still read what was there
        table = b.mul(outer.own, b.index(len(self.axes) * PLACES))
        self._note(b, table)
        outer.fill_turned(b, registers, buffer)
        outer.meet(b)
        start = b.index(outer.layout.offset(0, outer.window[0].start))
        if not outer.sides.pingpong:
            start = b.add(start, b.mul(outer.own, b.index(outer.rows)))
        column = b.index(outer.layout.offset(1, outer.window[1].start))
        for slot in range(PLACES // MMA_LANES // self.together):
            place = b.add(b.mul(outer.lane, b.index(self.together)), b.index(slot * MMA_LANES))
            inside = [b.op("lt", b.add(b.add(index.base, start), place), bound) for index, bound in edges if 0 in index.factors]
            indices = self._indices(b, table, place)

            def some(inner: Builder, place: Value = place, indices: list[Value] = indices) -> list[Value]:
                self._channels(inner, buffer, place, indices, column, [edge for edge in edges if 1 in edge[0].factors])
                return []

            if inside:
                b.if_(reduce(b.logical_and, inside), some, lambda inner: [])
            else:
                some(b)
        return True

    def _note(self, b: Builder, table: Value) -> None:
        """Write the indices of a thread's own rows: one lane of the four that have the same."""
        outer = self.outer
        assert outer.window is not None
        values = [outer.registers(b, outer.env[self.op.operands[1 + axis]], self._shape(axis)) for axis in self.axes]
        rows = outer.window[0]

        def note(inner: Builder) -> list[Value]:
            row = inner.add(inner.mul(outer.warp, inner.index(16)), inner.op("shr", outer.lane, inner.index(2)))
            for number, held in enumerate(values):
                for half, register in enumerate(rows):
                    at = inner.add(inner.add(table, row), inner.index(number * PLACES + CHUNK * half))
                    inner.multi("store", self.places, at, inner.cast(held.cells[register, 0], i32))
            return []

        b.if_(b.op("eq", b.op("and", outer.lane, b.index(3)), b.index(0)), note, lambda inner: [])

    def _shape(self, axis: int) -> tuple[int, ...]:
        type_ = self.op.operands[1 + axis].type
        assert isinstance(type_, Tile)
        return type_.shape

    def _indices(self, b: Builder, table: Value, place: Value) -> list[Value]:
        """The indices of a place; that of the channel is still missing."""
        outer, tensor = self.outer, self.tensor
        found: list[Value] = []
        for axis, index in enumerate(self.op.operands[1 : 1 + tensor.rank]):
            held = outer.env[index]
            if axis in self.axes:
                at = b.add(b.add(table, place), b.index(self.axes.index(axis) * PLACES))
                found.append(b.cast(b.op("load", self.places, at), dtype_of(outer.lane.type)))
            else:
                found.append(outer.origin(held))
        return found

    def _channels(self, b: Builder, buffer: Value, place: Value, indices: list[Value], column: Value, edges: list[tuple[RegisterIndex, Value]]) -> None:
        """Store a warp's channels at a place, or at two."""
        outer = self.outer
        assert outer.window is not None
        chunk, along = b.op("shr", place, b.index(3)), b.op("and", place, b.index(CHUNK - 1))
        for first in range(0, 8 * len(outer.window[1]), WGMMA_WARPS):
            own = b.add(outer.warp, b.index(first))
            line = b.add(buffer, b.mul(own, b.index(PLACES)))
            at = b.add(line, b.add(b.mul(b.op("xor", chunk, b.op("and", own, b.index(7))), b.index(CHUNK)), along))
            value = b.op("load", outer.out, at, width=2) if self.together == 2 else b.op("load", outer.out, at)
            channel = b.add(b.add(indices[self.channel], column), own)
            given = [*indices[: self.channel], channel, *indices[self.channel + 1 :]]
            conditions = [b.op("lt", b.add(b.add(index.base, column), own), bound) for index, bound in edges]

            def put(inner: Builder, given: list[Value] = given, value: Value = value) -> list[Value]:
                inner.multi("store", self.op.operands[0], *given, value)
                return []

            if conditions:
                b.if_(reduce(b.logical_and, conditions), put, lambda inner: [])
            else:
                put(b)


def image_results(outer: ImageEpilogue, op: Op) -> ImageResults | None:
    """How a store of all results is made along the places of an image; None where its memory does not run along these, or elements have not two bytes."""
    tensor = op.operands[0].type
    assert isinstance(tensor, Tensor)
    value = op.operands[1 + tensor.rank].type
    tile = outer.sides
    if tensor.dtype.itemsize != 2 or not isinstance(value, Tile) or value.shape != (tile.m, tile.n) or tile.bands or tile.n % 16 or tensor.strides[-1] != ONE:
        return None
    shapes = [index.type.shape if isinstance(index.type, Tile) else () for index in op.operands[1 : 1 + tensor.rank]]
    places = [axis for axis, shape in enumerate(shapes) if shape == (tile.m, 1)]
    channels = [axis for axis, shape in enumerate(shapes) if shape == (1, tile.n)]
    if any(shape not in ((), (1, 1), (tile.m, 1), (1, tile.n)) for shape in shapes) or len(channels) != 1 or tensor.rank - 1 not in places:
        return None
    return ImageResults(outer, op, places, channels[0])
