"""An array of the results' own size (a residual) comes to a block of warp groups by the copy engine, while the sum is computed.

`Fetching` is `Epilogue` with one load of the epilogue taken out of the threads' hands: its pieces, 64 rows of 128 bytes as those of
the result, are copied into the very buffers the results leave through. As many pieces as there are buffers are asked for before
the sum begins, the others as soon as the piece that leaves has been read. Each thread then reads what it adds from shared memory
and writes its results to the same place.

    before the sum:  leader: for the first pieces { expect arrived[p]; tma_load buffer[p] }
    piece p:         wait arrived[p]; read buffer; …; write buffer; leader: tma_store buffer, tma_load the piece after next

Loads that do not lie as the results do stay loads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis import divisors
from tilewright.base.dtypes import u32, u64
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Value, walk
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.types import Tensor, Tile
from tilewright.passes.registers import Cell, Registers
from tilewright.passes.schedule_matrix import MatrixSchedule
from tilewright.passes.wgmma_epilogue import PIECE_ROWS, Epilogue


class Fetching(Epilogue):
    """An epilogue that may have one of its loads brought by the copy engine. `tile_count` counts the tiles this group has finished."""

    tile_count: Value

    def __init__(self, kernel: Kernel, schedule: MatrixSchedule, target: Target) -> None:
        super().__init__(kernel, schedule, target)
        self.siblings = next((block.ops for block in self._blocks() if self.sum in block.ops), ())

    def _blocks(self) -> list[Block]:
        return [self.kernel.body, *(region for op in walk(self.kernel.body) for region in op.regions)]

    def outputs(self, b: Builder) -> None:
        super().outputs(b)
        self.fetched = self._fetchable()
        if self.fetched is None:
            return
        tensor = self.fetched.operands[0]
        assert isinstance(tensor.type, Tensor)
        row_axis, column_axis = self.axes(self.fetched, 0)
        box = [1] * tensor.type.rank
        box[row_axis], box[column_axis] = PIECE_ROWS, ROW_BYTES // tensor.type.dtype.itemsize
        attrs: dict[str, Attr] = {
            "shape": tensor.type.shape, "strides": tensor.type.strides, "box": tuple(box), "swizzle": ROW_BYTES,
        }  # fmt: skip
        (self.fetch_map,) = b.emit("tensor_map", (tensor,), attrs, "fetch.map")
        count = self.schedule.groups * len(self.windows())
        self.arrived = b.op("alloc", dtype=u64, shape=(count,), space="shared", name="arrived")

    def _fetchable(self) -> Op | None:
        """The first load that lies as the results do: the same indices along the tile, and nothing left out that is stored."""
        if len(self.out_maps) != 1 or self.lies_across() or self.schedule.sum_cluster > 1 or self.schedule.stream:
            return None
        (store,) = self.out_maps
        if store not in self.siblings:
            return None
        for op in self.siblings[: self.siblings.index(store)]:
            if op.opcode == "load" and self._lies_as(op, store):
                return op
        return None

    def _lies_as(self, load: Op, store: Op) -> bool:
        tensor, target, result = load.operands[0].type, store.operands[0].type, load.results[0].type
        assert isinstance(tensor, Tensor) and isinstance(target, Tensor)
        if not isinstance(result, Tile) or result.shape != (self.schedule.m, self.schedule.n) or tensor.space != "global":
            return False
        if tensor.dtype is not target.dtype or tensor.rank > 5 or tensor.align < 16 or tensor.strides[-1] != ONE:
            return False
        indices, theirs = load.operands[1 : 1 + tensor.rank], store.operands[1 : 1 + target.rank]
        if any(isinstance(v.type, Tile) and v not in theirs for v in indices):
            return False
        walking = [v for v in indices if isinstance(v.type, Tile) and max(v.type.shape) > 1]
        if len(walking) != 2 or indices[-1] is not theirs[-1] or walking[0] is walking[1]:
            return False
        if load.attrs.get("masked") and not (store.attrs.get("masked") and load.operands[-1] is store.operands[-1]):
            return False
        size = tensor.dtype.itemsize
        return all(divisors.of_size(x, self.kernel.facts) * size % 16 == 0 for x in tensor.strides[:-1])

    # -- asking for pieces ---------------------------------------------------------------------------------------

    def initialise_fetch(self, b: Builder) -> None:
        if self.fetched is None:
            return
        b.multi("prefetch_map", self.fetch_map)
        for number in range(self.schedule.groups * len(self.windows())):
            b.multi("mbarrier_init", self.arrived, b.index(number), count=1)

    def fetch_first(self, b: Builder, ops: Sequence[Op]) -> None:
        """Before the sum: ask for as many pieces as there are buffers."""
        if self.fetched is None:
            return
        self.ops(b, self._leading_to(ops, self.fetched))
        first = range(min(self.buffers, len(self.windows())))
        places = [self._place(b, number) for number in first]

        def ask(inner: Builder) -> list[Value]:
            inner.multi("tma_wait", pending=0, read=True)
            for number, place in zip(first, places, strict=True):
                self._fetch(inner, number, *place)
            return []

        b.if_(self.leader, ask, lambda inner: [])

    def _leading_to(self, ops: Sequence[Op], load: Op) -> list[Op]:
        """Of these ops those that its indices are made of."""
        needed, found = set(load.operands[1:]), []
        for op in reversed(ops):
            if any(result in needed for result in op.results):
                needed.update(op.operands)
                found.append(op)
        return found[::-1]

    def _place(self, b: Builder, number: int) -> tuple[Value, list[Value]]:
        """Where a piece goes, and where it lies in its array."""
        assert self.fetched is not None
        return self.buffer_of(b, number), self.piece_origin(b, self.fetched, self.windows()[number])

    def _fetch(self, b: Builder, number: int, buffer: Value, coordinates: Sequence[Value]) -> None:
        barrier = self._barrier(b, number)
        b.multi("mbarrier_expect", self.arrived, barrier, bytes=PIECE_ROWS * ROW_BYTES)
        b.multi("tma_load", self.out, buffer, self.fetch_map, self.arrived, barrier, *coordinates)

    def _barrier(self, b: Builder, number: int) -> Value:
        return b.add(b.mul(self.own, b.index(len(self.windows()))), b.index(number))

    # -- using them ----------------------------------------------------------------------------------------------

    def load(self, b: Builder, op: Op) -> None:
        if op is not self.fetched:
            super().load(b, op)
            return
        assert isinstance(op.result.type, Tile)
        parity = b.op("and", self.tile_count, b.const(1, u32))
        b.multi("mbarrier_wait", self.arrived, self._barrier(b, self.pieces), parity)
        buffer = self.buffer_of(b, self.pieces)
        cells: dict[Cell, Value] = {}
        if self.out_dtype.itemsize == 2:
            for place, four in self.by_matrix(b, buffer):
                words = b.multi("ldmatrix", self.out, place, count=4)
                cells.update((cell, b.op("from_bits", word, dtype=self.out_dtype)) for cell, word in zip(four, words, strict=True))
        else:
            for place, cell in self.by_pair(b, buffer):
                cells[cell] = b.op("load", self.out, place, width=2)
        self.env[op.result] = Registers(op.result.type.shape, cells)

    def claim(self, b: Builder) -> None:
        """What was fetched into a buffer makes it this piece's."""
        if self.fetched is None:
            super().claim(b)

    def sent(self, b: Builder) -> None:
        """A piece is leaving: once the one before it has been read its buffer takes another. With one buffer there is none before."""
        behind = 1 if self.buffers > 1 else 0
        following = self.pieces - behind + self.buffers
        if self.fetched is None or self.pieces < behind or following >= len(self.windows()):
            return
        buffer, coordinates = self._place(b, following)

        def ask(inner: Builder) -> list[Value]:
            inner.multi("tma_wait", pending=behind, read=True)
            self._fetch(inner, following, buffer, coordinates)
            return []

        b.if_(self.leader, ask, lambda inner: [])
