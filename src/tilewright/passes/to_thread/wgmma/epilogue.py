"""How the results of a contraction or of attention leave a block: in pieces, through shared memory, by the copy engine.

In: the tile-stage ops behind the sum, and the sums in registers. Out: thread-stage ops. What the kernel does to its results is computed for
64 rows of 128 bytes at a time, so that few values are alive at once, with the loads of the next piece on their way. A piece goes from registers
to swizzled shared memory (by `stmatrix` where elements have two bytes) and from there by a bulk copy, which leaves out what is outside the
array. Results the copy engine cannot write, since their rows begin anywhere, take the same way, but each warp stores its rows itself: lanes
that lie side by side, where registers would give eight rows of 16 bytes at a time. What is no plane of its array is stored from registers.

Results may lie across: where factors are exchanged, a tile's rows are what lies side by side in the array of results. A piece of
64 x 64 results of two bytes is turned on its way to shared memory (`stmatrix` with `trans`) and leaves as any other.

    accumulators [64 rows, 64 columns] -> shared memory [64 columns][64 rows], swizzled -> out[column.., row..]

An array of the results' own size (a residual) may come by the copy engine, too, while the sum is computed: its pieces are copied
into the very buffers the results leave through. As many pieces as there are buffers are asked for before the sum begins, the others as
soon as the piece that leaves has been read. Each thread reads what it adds from shared memory and writes its results to the same place.
Loads that do not lie as the results do stay loads.

    before the sum:  leader: for the first pieces { expect arrived[p]; tma_load buffer[p] }
    piece p:         wait arrived[p]; read buffer; …; write buffer; leader: tma_store buffer, tma_load the piece after next
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis import divisors
from tilewright.base.dtypes import bool_, i32, u32, u64
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import MMA_LANES, WGMMA_WARPS
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.rewrite import has_effects
from tilewright.ir.types import Tensor, Tile, dtype_of
from tilewright.passes.common.registers import Cell, Held, Mask, RegisterIndex, Registers
from tilewright.passes.to_thread.wgmma.image_results import ImageEpilogue, ImageResults, image_results

GROUP = WGMMA_WARPS * MMA_LANES
"""Threads of a warp group."""
BAND_ROWS = 16
"""Rows of a warp in one matrix instruction."""
PIECE_ROWS = WGMMA_WARPS * BAND_ROWS


@record
class ResultTile:
    """What an epilogue has to know of a schedule: the tile of results, and how it leaves."""

    m: int
    n: int
    warpgroups: int = 1
    pingpong: bool = False
    """Each warp group has a whole tile."""
    stages: int = 1
    """Pieces of a warp group on their way out at once."""
    store: str = "direct"
    """Through shared memory by the copy engine (`tma`), or turned there, along the places of an image (`turned`); or from registers (`direct`)."""
    horizontal: int = 1
    """Products side by side, each with a result of its own."""
    turns: bool = False
    """Results that lie across are turned, to leave by the copy engine."""
    fetches: bool = False
    """The copy engine brings an array that lies as the results do."""
    sharing: int = 1
    """Blocks that compute parts of the same tile's sums."""
    bands: int = 0
    """Times 16 rows that each warp has to itself, where there are no warp groups; else 0."""


class Epilogue(ImageEpilogue):
    """The ops of a kernel around its sums, in a thread of a computing warp group, and what that does to its sums.

    `thread` counts in the block, `warp` and `lane` within the warp group, `own` is the number of the computing group, `group` that of
    all groups, the copying one first; `leader` is one thread of the group. Where each warp has rows to itself, `own` and `warp` count warps
    of the block, and there are no `group` and no `leader`.
    """

    thread: Value
    warp: Value
    lane: Value
    group: Value
    own: Value
    leader: Value

    def __init__(self, kernel: Kernel, tile: ResultTile, target: Target) -> None:
        super().__init__(kernel, target)
        self.tile = tile
        self.sum = next(op for op in walk(kernel.body) if op.opcode == "for" and op.attrs.get("role") == "sum")
        self.shared_groups = 1 if tile.pingpong else tile.warpgroups
        """Groups that share a tile."""
        self.rows = BAND_ROWS * tile.bands if tile.bands else tile.m // self.shared_groups
        """Rows of a warp group, or of a warp."""
        self.piece_rows = BAND_ROWS if tile.bands else PIECE_ROWS
        """Rows of the block that two registers along m are, of all threads that share a piece."""
        self.out_maps: dict[Op, Value] = {}
        self.images: ImageResults | None = None
        """The store that warps make along the places of an image."""
        self.row_stores: list[Op] = []
        """Stores through shared memory that warps make row by row."""
        self.out_size = 2
        """Bytes of an element in a piece."""
        self.is_across = False
        """What leaves by the copy engine is turned on its way."""
        self.across_columns = next((c for c in (64, 48, 32, 16) if tile.n % c == 0), 0)
        """Columns of a piece that is turned."""
        self.fetched: Op | None = None
        """The load that the copy engine makes."""
        self.turn: Value | None = None
        """Tiles this group has finished: which use of the mbarriers of fetched pieces this is."""
        self.pieces = 0
        self.buffers = 1

    @property
    def sides(self) -> ResultTile:
        return self.tile

    # -- where a thread is ----------------------------------------------------------------------------------------

    def coordinates(self, b: Builder) -> None:
        self.thread = b.op("thread_id", name="thread")
        self.lane = b.op("and", self.thread, b.index(MMA_LANES - 1), name="lane")
        warp_bits = b.index(MMA_LANES.bit_length() - 1)
        if self.tile.bands:
            self.warp = self.own = b.op("shr", self.thread, warp_bits, name="warp")
            row = b.add(b.mul(self.own, b.index(self.rows)), b.op("shr", self.lane, b.index(2)))
        else:
            self.warp = b.op("and", b.op("shr", self.thread, warp_bits), b.index(WGMMA_WARPS - 1), name="warp")
            number = b.cast(b.op("shr", self.thread, b.index(GROUP.bit_length() - 1)), i32)
            # All threads of a warp have the same: saying so lets the compiler branch once for the warp.
            self.group = b.op("shuffle", number, b.const(0, i32), mode="idx", name="group")
            self.own = b.sub(b.cast(self.group, dtype_of(self.thread.type)), b.index(1))
            row = b.add(b.mul(self.warp, b.index(BAND_ROWS)), b.op("shr", self.lane, b.index(2)))
            if not self.tile.pingpong:
                row = b.add(row, b.mul(self.own, b.index(self.rows)))
        column = b.mul(b.op("and", self.lane, b.index(3)), b.index(2))
        self.divisors[row], self.divisors[column] = 1, 2
        self.bases = [row, column]
        if not self.tile.bands:
            self.leader = b.op("eq", b.op("and", self.thread, b.index(GROUP - 1)), b.index(0), name="leader")

    def program_id(self, b: Builder, op: Op) -> None:
        super().program_id(b, op)
        if self.tile.sharing > 1:
            # All blocks that share a sum have the same tile.
            self.env[op.result] = b.op("floordiv", b.op("program_id", axis=0), b.index(self.tile.sharing))

    # -- results ------------------------------------------------------------------------------------------------

    def outputs(self, b: Builder) -> None:
        """Maps and buffers of what leaves and comes through the copy engine."""
        if self.tile.store == "tma":
            self._outgoing(b)
        elif self.tile.store == "turned":
            self._outgoing_images(b)
        if self.tile.fetches:
            self.fetched = self._fetchable()
        if self.fetched is not None:
            self._incoming(b, self.fetched)

    def _outgoing(self, b: Builder) -> None:
        largest = 0
        for op in walk(self.kernel.body):
            if op.opcode != "store" or not self._can_leave_by_copy(op):
                continue
            tensor = op.operands[0]
            assert isinstance(tensor.type, Tensor)
            row_axis, column_axis = self.axes(op, 0)
            box = [1] * tensor.type.rank
            columns = self.across_columns if self.is_across else min(ROW_BYTES // tensor.type.dtype.itemsize, self.tile.n)
            box[row_axis], box[column_axis] = PIECE_ROWS, columns
            attrs: dict[str, Attr] = {
                "shape": tensor.type.shape, "strides": tensor.type.strides, "box": tuple(box), "swizzle": ROW_BYTES,
            }  # fmt: skip
            (self.out_maps[op],) = b.emit("tensor_map", (tensor,), attrs, "out.map")
            largest = max(largest, PIECE_ROWS * ROW_BYTES // tensor.type.dtype.itemsize)
            self.out_dtype = tensor.type.dtype
        if not self.out_maps:
            self._outgoing_rows(b)
            return
        # Buffers are taken in turn, always the same ones for the same piece of a tile: a whole number of rounds.
        across = self.tile.n // self.across_columns if self.is_across else self.tile.n * self.out_dtype.itemsize // ROW_BYTES
        pieces = len(self.out_maps) * (self.rows // PIECE_ROWS) * across
        self.buffers = max(b for b in range(1, self.tile.stages + 1) if pieces % b == 0)
        self.outgoing_buffers(b, largest)

    def _outgoing_rows(self, b: Builder) -> None:
        """One buffer for each group, of which each warp fills and empties its own rows."""
        for op in walk(self.kernel.body):
            if op.opcode == "store" and self._gains_in_rows(op):
                dtype = dtype_of(op.operands[0].type)
                if not self.row_stores or dtype is self.out_dtype:
                    self.row_stores.append(op)
                    self.out_dtype = dtype
        if self.row_stores:
            self.outgoing_buffers(b, PIECE_ROWS * ROW_BYTES // self.out_dtype.itemsize)

    def _outgoing_images(self, b: Builder) -> None:
        """One buffer for each group, for the first store along the places of an image."""
        found = (image_results(self, op) for op in walk(self.kernel.body) if op.opcode == "store")
        self.images = next((images for images in found if images is not None), None)
        if self.images is not None:
            self.out_dtype = self.images.tensor.dtype
            self.images.allocate(b)

    def outgoing_buffers(self, b: Builder, size: int) -> None:
        count = self.tile.warpgroups * self.buffers
        self.out = b.op("alloc", dtype=self.out_dtype, shape=(count * size,), space="shared", align=1024, name="out")
        self.out_size, self.piece_size = self.out_dtype.itemsize, size

    def _can_leave_by_copy(self, op: Op) -> bool:
        if self._lies_along(op):
            return True
        if self.tile.turns and self._lies_across(op):
            self.is_across = True
            return True
        return False

    def _lies_along(self, op: Op) -> bool:
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        if not self._lies_in_rows(op) or tensor.rank > 5 or tensor.align < 16 or (self.tile.n * tensor.dtype.itemsize) % ROW_BYTES:
            return False
        if self.out_maps and (self.tile.horizontal == 1 or tensor.dtype is not self.out_dtype or self.is_across):
            return False
        return self._apart_by(tensor, 16)

    def _lies_in_rows(self, op: Op) -> bool:
        """Whether a store is of all results, and neighbours along the tile's rows are neighbours in memory."""
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        value = op.operands[1 + tensor.rank].type
        size = tensor.dtype.itemsize
        if not hasattr(value, "shape") or value.shape != (self.tile.m, self.tile.n) or tensor.dtype is bool_:
            return False
        if size > 4:
            return False
        try:
            _, column_axis = self.axes(op, 0)
        except CompilerBug:
            return False
        return column_axis == tensor.rank - 1 and tensor.strides[-1] == ONE

    def _gains_in_rows(self, op: Op) -> bool:
        """Whether threads that store their registers would write less than 32 bytes of a row at once: four of them have neighbouring pairs."""
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        size = tensor.dtype.itemsize
        if size not in (2, 4) or not self._lies_in_rows(op):
            return False
        return size == 2 or tensor.align < 2 * size or not self._apart_by(tensor, 2 * size)

    def _apart_by(self, tensor: Tensor, count: int) -> bool:
        """Whether rows surely begin at multiples of so many bytes, if the first one does."""
        return all(divisors.of_size(x, self.kernel.facts) * tensor.dtype.itemsize % count == 0 for x in tensor.strides[:-1])

    def _lies_across(self, op: Op) -> bool:
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        value, size = op.operands[1 + tensor.rank].type, tensor.dtype.itemsize
        if self.out_maps or not isinstance(value, Tile) or value.shape != (self.tile.m, self.tile.n):
            return False
        if size * PIECE_ROWS != ROW_BYTES or tensor.rank > 5 or tensor.align < 16 or not self.across_columns:
            return False
        try:
            row_axis, _ = self.axes(op, 0)
        except CompilerBug:
            return False
        if row_axis != tensor.rank - 1 or tensor.strides[-1] != ONE:
            return False
        return all(divisors.of_size(x, self.kernel.facts) * size % 16 == 0 for x in tensor.strides[:-1])

    def axes(self, access: Op, row_tile_axis: int) -> tuple[int, int]:
        """The axes of the tensor that a load's (or store's) tile walks: along the given axis of the tile, and along the other."""
        tensor = access.operands[0].type
        assert isinstance(tensor, Tensor)
        walked: dict[int, int] = {}
        for axis, index in enumerate(access.operands[1 : 1 + tensor.rank]):
            shape = index.type.shape if isinstance(index.type, Tile) else ()
            for tile_axis, size in enumerate(shape):
                if size > 1:
                    walked[tile_axis] = axis if tile_axis not in walked else -1
        if len(walked) != 2 or -1 in walked.values():
            raise CompilerBug.at("TW040", "lower_wgmma: an operand is not a plane of its tensor", access.span)
        return walked[row_tile_axis], walked[1 - row_tile_axis]

    def origin(self, held: Held) -> Value:
        """The first coordinate of a tile along one axis of its tensor."""
        if isinstance(held, Value):
            return held
        assert isinstance(held, RegisterIndex) and all(f == 1 for f in held.factors.values())
        return held.base

    # -- finishing -----------------------------------------------------------------------------------------------

    def finish(self, b: Builder, ops: Sequence[Op], turn: Value | None = None) -> None:
        """What the kernel does to its results, one piece after another. What does not depend on the sum, loads above all, is done a piece
        ahead: its latency passes while the piece before is finished. `turn`: how many tiles this group has finished, where something is fetched."""
        self.turn = turn
        ahead, behind = self._apart(ops)
        windows = self._windows()
        self.pieces = 0
        ready = self._ahead(b, ahead, windows[0])
        # All sums are alive in the first piece: where functions need registers besides, and a fetched piece is waited for anyhow, the second one's loads follow it.
        crowded = self.fetched is not None and self.is_crowded()
        for number, window in enumerate(windows):
            later = windows[number + 1 : number + 2]
            waits = crowded and number == 0
            following = self._ahead(b, ahead, later[0]) if later and not waits else {}
            self.env.update(ready)
            self.window = window
            self.ops(b, behind)
            self.pieces += 1
            ready = self._ahead(b, ahead, later[0]) if later and waits else following
        self.window = None

    def _windows(self) -> list[tuple[range, range]]:
        """The registers of each piece, along both axes."""
        rows, columns = self.layout.registers((self.tile.m, self.tile.n))
        wide = self.across_columns // 8 if self.is_across else ROW_BYTES // self.out_size // 8
        return [
            (range(row, row + 2), range(column, min(column + wide, columns)))
            for row in range(0, rows, 2) for column in range(0, columns, wide)
        ]  # fmt: skip

    def load(self, b: Builder, op: Op) -> None:
        if op is self.fetched:
            self._load_fetched(b, op)
        else:
            self._load_inside(b, op)

    def _load_inside(self, b: Builder, op: Op) -> None:
        """Beyond the edges anything may be read, for nothing is stored there: indices are held inside instead of asking for each load."""
        limits = self._limits(op)
        if limits is None:
            super().load(b, op)
            return
        memory, result = op.operands[0], op.result.type
        assert isinstance(memory.type, Tensor) and isinstance(result, Tile)
        held = [self.env[v] for v in op.operands[1 : 1 + memory.type.rank]]
        for number, (index, (limit, _)) in enumerate(zip(held, limits, strict=True)):
            moved = self._moved_inside(b, index, limit)
            if moved is not None:
                held[number], limits[number] = moved, (None, False)
        cells: dict[Cell, Value] = {}
        for cell in self.cells(result.shape):
            parts: list[Value] = []
            pieces = self.pieces_of(b, memory.type, held, result.shape, cell)
            if any(w > 1 and self.divisors.get(limit, 1) % w for limit, along in limits if limit is not None and along for _, w in pieces):
                pieces = self.singles(b, memory.type, held, pieces)  # the edge cuts through a vector
            for indices, width in pieces:
                inside = [
                    index if limit is None else b.op("min", index, b.sub(limit, b.index(width if along else 1)))
                    for index, (limit, along) in zip(indices, limits, strict=True)
                ]
                parts.append(self.plain_load(b, memory, inside, width))
            cells[cell] = self.concatenated(b, parts)
        self.env[op.result] = Registers(result.shape, cells)

    def _moved_inside(self, b: Builder, held: Held, limit: Value | None) -> RegisterIndex | None:
        """An index of which a piece is inside or outside as a whole, moved inside: once, not for each load. None where pieces are cut."""
        if limit is None or not isinstance(held, RegisterIndex) or self.window is None:
            return None
        (axis,) = held.factors
        start, size = self.layout.offset(axis, self.window[axis].start), (self.piece_rows * len(self.window[0]) // 2, 8 * len(self.window[1]))[axis]
        if self.divisors.get(limit, 1) % size or self.divisors.get(held.base, 1) % size:
            return None
        before = b.index(start)
        if axis == 0 and not self.tile.pingpong:
            before = b.add(b.mul(self.own, b.index(self.rows)), before)
        first = b.op("min", b.add(held.base, before), b.sub(limit, b.index(size)))
        base = b.sub(first, before)
        self.divisors[base] = size
        return RegisterIndex(held.shape, base, held.factors)

    def _limits(self, op: Op) -> list[tuple[Value | None, bool]] | None:
        """For each index of a masked load the bound it must stay under, and whether it walks the vector axis; None where the mask says
        more than that indices are inside."""
        if self.window is None or not op.attrs.get("masked"):
            return None
        memory, mask = op.operands[0].type, self.env[op.operands[-1]]
        assert isinstance(memory, Tensor)
        if not isinstance(mask, Mask) or mask.others:
            return None
        limits: list[tuple[Value | None, bool]] = []
        for value in op.operands[1 : 1 + memory.rank]:
            held = self.env[value]
            if isinstance(held, Registers):
                return None
            if not isinstance(held, RegisterIndex) or not held.factors:
                limits.append((None, False))
                continue
            bound = [limit for index, limit in mask.edges if index.base is held.base and index.factors == held.factors]
            axes = list(held.factors)
            if len(axes) != 1 or held.factors[axes[0]] != 1:
                return None
            limits.append((bound[0] if bound else None, axes[0] == self.axis))
        edges = {(id(index.base), *index.factors) for index, _ in mask.edges}
        own = {(id(h.base), *h.factors) for h in (self.env[v] for v in op.operands[1 : 1 + memory.rank]) if isinstance(h, RegisterIndex)}
        return limits if edges <= own else None

    def _ahead(self, b: Builder, ops: Sequence[Op], window: tuple[range, range]) -> dict[Value, Held]:
        self.window = window
        self.ops(b, ops)
        return {result: self.env[result] for op in ops for result in op.results}

    def _apart(self, ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
        """Ops that do not depend on the sum and only read, and all others."""
        late: set[Value] = set(self.sum.results)
        ahead: list[Op] = []
        behind: list[Op] = []
        for op in ops:
            if op is self.fetched or op.regions or has_effects(op) or any(v in late for v in op.operands):
                behind.append(op)
                late.update(op.results)
            else:
                ahead.append(op)
        return ahead, behind

    def store(self, b: Builder, op: Op) -> None:
        if op in self.row_stores and self._store_by_rows(b, op):
            return
        if self.images is not None and op is self.images.op and self.images.store(b):
            return
        if op not in self.out_maps:
            self._store_by_threads(b, op)
            return
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor) and self.window is not None
        shape = (self.tile.m, self.tile.n)
        registers = self.registers(b, self.env[op.operands[1 + tensor.rank]], shape)
        buffer = self.buffer_of(b, self.pieces * len(self.out_maps) + list(self.out_maps).index(op))
        if self.fetched is None:
            self._claim(b)  # else what was fetched into the buffer makes it this piece's
        if self.is_across:
            self.fill_turned(b, registers, buffer)
        else:
            self._fill(b, registers, buffer)
        b.multi("fence_async")
        self.meet(b)
        coordinates = self._piece_origin(b, op, self.window)

        def send(inner: Builder) -> list[Value]:
            inner.multi("tma_store", self.out, buffer, self.out_maps[op], *coordinates)
            inner.multi("tma_commit")
            return []

        b.if_(self.leader, send, lambda inner: [])
        if self.fetched is not None:
            self._fetch_following(b)

    def _store_by_rows(self, b: Builder, op: Op) -> bool:
        """A piece through shared memory, of which each warp stores the 16 rows that it has filled itself. False where more than edges is masked."""
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor) and self.window is not None
        edges = self._limits(op) if op.attrs.get("masked") else [(None, False)] * tensor.rank
        if edges is None:
            return False
        registers = self.registers(b, self.env[op.operands[1 + tensor.rank]], (self.tile.m, self.tile.n))
        buffer = self.buffer_of(b, 0)
        b.multi("warp_sync")  # other lanes may still read what was there
        self._fill(b, registers, buffer)
        b.multi("warp_sync")
        origin = self._piece_origin(b, op, self.window)
        inside = self._is_inside(b, self.env[op.operands[-1]]) if op.attrs.get("masked") else None
        bounds, none = [bound for bound, _ in edges], [None] * tensor.rank
        if inside is None:
            self._empty_rows(b, op, buffer, origin, bounds)
        else:
            b.if_(inside, lambda inner: self._empty_rows(inner, op, buffer, origin, none), lambda inner: self._empty_rows(inner, op, buffer, origin, bounds))
        return True

    def _empty_rows(self, b: Builder, op: Op, buffer: Value, origin: Sequence[Value], bounds: Sequence[Value | None]) -> list[Value]:
        """Store a warp's rows of a piece: lanes lie along a row, and those that are left over along the next ones."""
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor) and self.window is not None
        row_axis, column_axis = self.axes(op, 0)
        columns, size = 8 * len(self.window[1]), tensor.dtype.itemsize
        width = self._row_width(tensor, origin[column_axis], bounds[column_axis])
        across, in_chunk = columns // width, 16 // size
        lanes = min(MMA_LANES, 1 << (across - 1).bit_length())
        first, column = b.mul(self.warp, b.index(BAND_ROWS)), b.mul(self.lane, b.index(width))
        if lanes < MMA_LANES:
            first = b.add(first, b.op("floordiv", self.lane, b.index(lanes)))
            column = b.op("and", column, b.index(lanes * width - 1))
        ends: list[Value | None] = [None] * tensor.rank
        if across % lanes:
            # A tile's last columns are fewer than lanes; behind them are those of the next tile.
            ends[column_axis] = b.add(origin[column_axis], b.index(columns))

        def some(inner: Builder, number: Value) -> list[Value]:
            row = inner.add(first, number)
            line, turn = inner.add(buffer, inner.mul(row, inner.index(ROW_BYTES // size))), inner.op("and", row, inner.index(7))
            for start in range(0, across, MMA_LANES):
                along = inner.add(column, inner.index(start * width))
                filled = inner.op("min", along, inner.index(columns - width)) if across % lanes else along
                chunk = inner.op("xor", inner.op("floordiv", filled, inner.index(in_chunk)), turn)
                place = inner.add(line, inner.add(inner.mul(chunk, inner.index(in_chunk)), inner.op("and", filled, inner.index(in_chunk - 1))))
                value = inner.op("load", self.out, place, width=width) if width > 1 else inner.op("load", self.out, place)
                indices = list(origin)
                indices[row_axis], indices[column_axis] = inner.add(origin[row_axis], row), inner.add(origin[column_axis], along)
                self._store_inside(inner, op, indices, value, bounds, ends)
            return []

        b.for_(b.index(0), b.index(BAND_ROWS), b.index(MMA_LANES // lanes), [], some, "row", unroll=2)
        return []

    def _row_width(self, tensor: Tensor, column: Value, bound: Value | None) -> int:
        """Elements that a lane stores at once: rows begin at such multiples, and edges do not cut through them."""
        for width in (8 // tensor.dtype.itemsize, 4 // tensor.dtype.itemsize):
            if tensor.align < width * tensor.dtype.itemsize or not self._apart_by(tensor, width * tensor.dtype.itemsize):
                continue
            if self.divisors.get(column, 1) % width == 0 and (bound is None or self.divisors.get(bound, 1) % width == 0):
                return width
        return 1

    def _store_inside(self, b: Builder, op: Op, indices: Sequence[Value], value: Value, *limits: Sequence[Value | None]) -> None:
        conditions = [b.op("lt", index, bound) for bounds in limits for index, bound in zip(indices, bounds, strict=True) if bound is not None]
        if not conditions:
            b.multi("store", op.operands[0], *indices, value)
            return
        inside = functools.reduce(b.logical_and, conditions)
        b.if_(inside, lambda inner: inner.multi("store", op.operands[0], *indices, value), lambda inner: [])

    def _store_by_threads(self, b: Builder, op: Op) -> None:
        """Results from registers. A piece that lies inside as a whole needs no test for each element: addresses are computed once, and neighbours leave together."""
        inside = self._is_inside(b, self.env[op.operands[-1]]) if op.attrs.get("masked") else None
        if inside is None:
            super().store(b, op)
            return
        whole = replace(op, operands=op.operands[:-1], attrs=MappingProxyType({name: value for name, value in op.attrs.items() if name != "masked"}))

        def stored(inner: Builder, given: Op) -> list[Value]:
            super(Epilogue, self).store(inner, given)
            return []

        b.if_(inside, lambda inner: stored(inner, whole), lambda inner: stored(inner, op))

    def _is_inside(self, b: Builder, mask: Held) -> Value | None:
        """Whether all elements of a piece are inside, for all threads alike; None where the mask says more than that indices are below bounds."""
        if self.window is None or not isinstance(mask, Mask) or mask.others or not mask.edges:
            return None
        total: Value | None = None
        for index, bound in mask.edges:
            last = index.base
            for axis, factor in index.factors.items():
                if factor < 0:
                    return None
                most = self.tile.m - 1 if axis == 0 else self.layout.offset(axis, self.window[axis].stop - 1) + 7
                last = b.add(last, b.index(factor * most))
            below = b.op("lt", last, bound)
            total = below if total is None else b.logical_and(total, below)
        return total

    def buffer_of(self, b: Builder, number: int) -> Value:
        """Where in shared memory a piece of this group is put together."""
        first = b.mul(self.own, b.index(self.buffers * self.piece_size))
        return b.add(first, b.index(number % self.buffers * self.piece_size))

    def _claim(self, b: Builder) -> None:
        """Wait until the piece that was in this one's buffer has been read."""
        pending = self.buffers - 1
        b.if_(self.leader, lambda inner: inner.multi("tma_wait", pending=pending, read=True), lambda inner: [])
        self.meet(b)

    def meet(self, b: Builder) -> None:
        b.multi("named_barrier", b.cast(b.add(self.own, b.index(1)), i32), threads=GROUP)

    def _piece_origin(self, b: Builder, op: Op, window: tuple[range, range]) -> list[Value]:
        """The first element of a piece in the tensor of a load or store."""
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        row = b.index(self.layout.offset(0, window[0].start))
        if not self.tile.pingpong:
            row = b.add(row, b.mul(self.own, b.index(self.rows)))
        offsets = (row, b.index(self.layout.offset(1, window[1].start)))
        result: list[Value] = []
        for index in op.operands[1 : 1 + tensor.rank]:
            held = self.env[index]
            origin = self.origin(held)
            for axis in held.factors if isinstance(held, RegisterIndex) else ():
                origin = b.add(origin, offsets[axis])
            result.append(origin)
        return result

    def _fill(self, b: Builder, registers: Registers, buffer: Value) -> None:
        if self.out_dtype.itemsize != 2:
            for place, cell in self._by_pair(b, buffer):
                b.multi("store", self.out, place, registers.cells[cell])
            return
        for place, cells in self._by_matrix(b, buffer):
            b.multi("stmatrix", self.out, place, *(b.op("to_bits", registers.cells[c]) for c in cells))

    def fill_turned(self, b: Builder, registers: Registers, buffer: Value) -> None:
        """Each lane gives the place of one column: eight rows of it side by side."""
        assert self.window is not None
        column = b.op("and", self.lane, b.index(7))
        pair = b.op("shr", self.lane, b.index(4))
        half = b.op("and", b.op("shr", self.lane, b.index(3)), b.index(1))
        chunk = b.op("xor", b.add(b.mul(self.warp, b.index(2)), half), column)
        along = b.add(b.mul(pair, b.index(8)), column)
        start = b.add(b.add(buffer, b.mul(along, b.index(64))), b.mul(chunk, b.index(8)))
        for number in range(0, len(self.window[1]), 2):
            top, left = self.window[0].start, self.window[1].start + number
            cells = [(top, left), (top + 1, left), (top, left + 1), (top + 1, left + 1)]
            place = b.add(start, b.index(8 * 64 * number))
            b.multi("stmatrix", self.out, place, *(b.op("to_bits", registers.cells[c]) for c in cells), trans=True)

    def _by_matrix(self, b: Builder, buffer: Value) -> Iterator[tuple[Value, list[Cell]]]:
        """Two bytes an element: four 8x8 matrices at a time, or the last two, each lane giving the place of one of their rows."""
        assert self.window is not None
        row = b.add(b.mul(self.warp, b.index(16)), b.op("and", self.lane, b.index(15)))
        start = b.add(buffer, b.mul(row, b.index(64)))
        half, turn = b.op("shr", self.lane, b.index(4)), b.op("and", self.lane, b.index(7))
        for number in range(0, len(self.window[1]), 2):
            chunk = b.op("xor", b.add(half, b.index(number)), turn)
            place = b.add(start, b.mul(chunk, b.index(8)))
            top, left = self.window[0].start, self.window[1].start + number
            yield place, [(top + half, column) for column in (left, left + 1) if column in self.window[1] for half in (0, 1)]

    def _by_pair(self, b: Builder, buffer: Value) -> Iterator[tuple[Value, Cell]]:
        """Other elements: two neighbours at a time."""
        assert self.window is not None
        size = self.out_dtype.itemsize
        in_row = ROW_BYTES // size
        chunk_size = 16 // size
        for number, column in enumerate(self.window[1]):
            for half, row in enumerate(self.window[0]):
                down = b.add(b.add(b.mul(self.warp, b.index(16)), b.op("shr", self.lane, b.index(2))), b.index(8 * half))
                along = b.add(self.bases[1], b.index(8 * number))
                chunk = b.op("floordiv", along, b.index(chunk_size))
                chunk = b.op("xor", chunk, b.op("and", down, b.index(7)))
                inside = b.op("and", along, b.index(chunk_size - 1))
                place = b.add(b.add(buffer, b.mul(down, b.index(in_row))), b.add(b.mul(chunk, b.index(chunk_size)), inside))
                yield place, (row, column)

    # -- what the copy engine brings -------------------------------------------------------------------------------

    def _fetchable(self) -> Op | None:
        """The first load that lies as the results do: the same indices along the tile, and nothing left out that is stored."""
        if len(self.out_maps) != 1 or self.is_across:
            return None
        (store,) = self.out_maps
        blocks: list[Block] = [self.kernel.body, *(region for op in walk(self.kernel.body) for region in op.regions)]
        siblings = next((block.ops for block in blocks if self.sum in block.ops), ())
        if store not in siblings:
            return None
        for op in siblings[: siblings.index(store)]:
            if op.opcode == "load" and self._lies_as(op, store):
                return op
        return None

    def _lies_as(self, load: Op, store: Op) -> bool:
        tensor, target, result = load.operands[0].type, store.operands[0].type, load.results[0].type
        assert isinstance(tensor, Tensor) and isinstance(target, Tensor)
        if not isinstance(result, Tile) or result.shape != (self.tile.m, self.tile.n) or tensor.space != "global":
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

    def _incoming(self, b: Builder, load: Op) -> None:
        """The map of what is fetched, and an mbarrier for each piece of each group."""
        tensor = load.operands[0]
        assert isinstance(tensor.type, Tensor)
        row_axis, column_axis = self.axes(load, 0)
        box = [1] * tensor.type.rank
        box[row_axis], box[column_axis] = PIECE_ROWS, ROW_BYTES // tensor.type.dtype.itemsize
        attrs: dict[str, Attr] = {
            "shape": tensor.type.shape, "strides": tensor.type.strides, "box": tuple(box), "swizzle": ROW_BYTES,
        }  # fmt: skip
        (self.fetch_map,) = b.emit("tensor_map", (tensor,), attrs, "fetch.map")
        count = self.tile.warpgroups * len(self._windows())
        self.arrived = b.op("alloc", dtype=u64, shape=(count,), space="shared", name="arrived")

    def initialise_fetch(self, b: Builder) -> None:
        """The mbarriers of what is fetched, if anything is."""
        if self.fetched is None:
            return
        b.multi("prefetch_map", self.fetch_map)
        for number in range(self.tile.warpgroups * len(self._windows())):
            b.multi("mbarrier_init", self.arrived, b.index(number), count=1)

    def fetch_first(self, b: Builder, ops: Sequence[Op]) -> None:
        """Before the sum: ask for as many pieces as there are buffers. `ops` are those behind the sum."""
        if self.fetched is None:
            return
        self.ops(b, self._leading_to(ops, self.fetched))
        first = range(min(self.buffers, len(self._windows())))
        places = [self._place(b, number) for number in first]

        def ask(inner: Builder) -> list[Value]:
            inner.multi("tma_wait", pending=0, read=True)
            for number, place in zip(first, places, strict=True):
                self._fetch(inner, number, *place)
            return []

        b.if_(self.leader, ask, lambda inner: [])

    def _leading_to(self, ops: Sequence[Op], load: Op) -> list[Op]:
        """Of these ops those that its indices are made of."""
        needed = set(load.operands[1:])
        leading: list[Op] = []
        for op in reversed(ops):
            if any(result in needed for result in op.results):
                needed.update(op.operands)
                leading.append(op)
        return leading[::-1]

    def _place(self, b: Builder, number: int) -> tuple[Value, list[Value]]:
        """Where a piece goes, and where it lies in its array."""
        assert self.fetched is not None
        return self.buffer_of(b, number), self._piece_origin(b, self.fetched, self._windows()[number])

    def _fetch(self, b: Builder, number: int, buffer: Value, coordinates: Sequence[Value]) -> None:
        barrier = self._barrier(b, number)
        b.multi("mbarrier_expect", self.arrived, barrier, bytes=PIECE_ROWS * ROW_BYTES)
        b.multi("tma_load", self.out, buffer, self.fetch_map, self.arrived, barrier, *coordinates)

    def _barrier(self, b: Builder, number: int) -> Value:
        return b.add(b.mul(self.own, b.index(len(self._windows()))), b.index(number))

    def _load_fetched(self, b: Builder, op: Op) -> None:
        assert isinstance(op.result.type, Tile) and self.turn is not None
        parity = b.op("and", self.turn, b.const(1, u32))
        b.multi("mbarrier_wait", self.arrived, self._barrier(b, self.pieces), parity)
        buffer = self.buffer_of(b, self.pieces)
        cells: dict[Cell, Value] = {}
        if self.out_dtype.itemsize == 2:
            for place, four in self._by_matrix(b, buffer):
                words = b.multi("ldmatrix", self.out, place, count=4)
                cells.update((cell, b.op("from_bits", word, dtype=self.out_dtype)) for cell, word in zip(four, words, strict=True))
        else:
            for place, cell in self._by_pair(b, buffer):
                cells[cell] = b.op("load", self.out, place, width=2)
        self.env[op.result] = Registers(op.result.type.shape, cells)

    def _fetch_following(self, b: Builder) -> None:
        """A piece is leaving: once the one before it has been read its buffer takes another. With one buffer there is none before."""
        behind = 1 if self.buffers > 1 else 0
        following = self.pieces - behind + self.buffers
        if self.pieces < behind or following >= len(self._windows()):
            return
        buffer, coordinates = self._place(b, following)

        def ask(inner: Builder) -> list[Value]:
            inner.multi("tma_wait", pending=behind, read=True)
            self._fetch(inner, following, buffer, coordinates)
            return []

        b.if_(self.leader, ask, lambda inner: [])

    # -- registers ------------------------------------------------------------------------------------------------

    def is_crowded(self) -> bool:
        """Whether results go through functions, or are combined with an array of their own size that threads read."""
        inside = {id(op) for op in walk(self.sum.regions[0])}
        if any(OPS[op.opcode].group == "function" for op in walk(self.kernel.body) if id(op) not in inside):
            return True
        shape = (self.tile.m, self.tile.n)
        return any(
            op.opcode == "load" and op is not self.fetched and id(op) not in inside
            and isinstance(op.result.type, Tile) and op.result.type.shape == shape
            for op in walk(self.kernel.body)
        )
