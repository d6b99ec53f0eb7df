"""How the results of a contraction leave a block of warp groups: in pieces, through shared memory, by the copy engine.

`Epilogue` is the part of `lower_wgmma` that begins where the sums are done: what the kernel does to its results is computed for
64 rows of 128 bytes at a time, so that few values are alive at once, with the loads of the next piece on their way. A piece goes from registers
to swizzled shared memory (by `stmatrix` where elements have two bytes) and from there by a bulk copy, which leaves out what is outside the
array. Results the copy engine cannot write are stored from registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.analysis import divisors
from tilewright.base.dtypes import bool_, i32
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.rewrite import has_effects
from tilewright.ir.types import Tensor, Tile
from tilewright.passes.lower_tiles import TileLowering
from tilewright.passes.registers import Cell, Held, Index, Mask, Registers, Shape
from tilewright.passes.schedule_matrix import MatrixSchedule

GROUP = 128
"""Threads of a warp group."""
PIECE_ROWS = 64


class Epilogue(TileLowering):
    """What a computing warp group does to its sums. `warp` and `lane` count within the group, `own` is its number, `leader` one thread of it."""

    warp: Value
    lane: Value
    own: Value
    leader: Value

    def __init__(self, kernel: Kernel, schedule: MatrixSchedule, target: Target) -> None:
        super().__init__(kernel, target)
        self.schedule = schedule
        self.sum = next(op for op in walk(kernel.body) if op.opcode == "for" and op.attrs.get("role") == "sum")
        self.shared_groups = 1 if schedule.turns else schedule.groups
        """Groups that share a tile."""
        self.rows = schedule.m // self.shared_groups
        self.piece_rows = PIECE_ROWS
        """Rows of the block that two registers along m are, of all threads that share a piece."""
        self.window: tuple[range, range] | None = None
        """The registers, along both axes, of the piece at hand."""
        self.out_maps: dict[Op, Value] = {}
        self.fetched: Op | None = None
        """The load that the copy engine makes."""
        self.pieces = 0
        self.buffers = 1

    # -- results ------------------------------------------------------------------------------------------------

    def outputs(self, b: Builder) -> None:
        """Maps and buffers of what leaves through the copy engine."""
        if self.schedule.store != "tma":
            return
        largest = 0
        for op in walk(self.kernel.body):
            if op.opcode != "store" or not self._can_leave_by_copy(op):
                continue
            tensor = op.operands[0]
            assert isinstance(tensor.type, Tensor)
            row_axis, column_axis = self.axes(op, 0)
            box = [1] * tensor.type.rank
            box[row_axis], box[column_axis] = PIECE_ROWS, min(ROW_BYTES // tensor.type.dtype.itemsize, self.schedule.n)
            attrs: dict[str, Attr] = {
                "shape": tensor.type.shape, "strides": tensor.type.strides, "box": tuple(box), "swizzle": ROW_BYTES,
            }  # fmt: skip
            (self.out_maps[op],) = b.emit("tensor_map", (tensor,), attrs, "out.map")
            largest = max(largest, PIECE_ROWS * ROW_BYTES // tensor.type.dtype.itemsize)
            self.out_dtype = tensor.type.dtype
        if self.out_maps:
            # Buffers are taken in turn, always the same ones for the same piece of a tile: a whole number of rounds.
            pieces = len(self.out_maps) * (self.rows // PIECE_ROWS) * (self.schedule.n * self.out_dtype.itemsize // ROW_BYTES)
            self.buffers = max(b for b in range(1, self.schedule.buffers + 1) if pieces % b == 0)
            count = self.schedule.groups * self.buffers
            self.out = b.op("alloc", dtype=self.out_dtype, shape=(count * largest,), space="shared", align=1024, name="out")
            self.piece_size = largest

    def _can_leave_by_copy(self, op: Op) -> bool:
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        value = op.operands[1 + tensor.rank].type
        size = tensor.dtype.itemsize
        if not hasattr(value, "shape") or value.shape != (self.schedule.m, self.schedule.n) or tensor.dtype is bool_:
            return False
        if tensor.rank > 5 or size > 4 or tensor.align < 16 or (self.schedule.n * size) % ROW_BYTES:
            return False
        try:
            _, column_axis = self.axes(op, 0)
        except CompilerBug:
            return False
        if self.out_maps and (self.schedule.beside == 1 or tensor.dtype is not self.out_dtype or self.lies_across()):
            return False
        if column_axis != tensor.rank - 1 or tensor.strides[-1] != ONE:
            return False
        return all(divisors.of_size(x, self.kernel.facts) * size % 16 == 0 for x in tensor.strides[:-1])

    def lies_across(self) -> bool:
        """Whether what leaves by the copy engine is turned on its way."""
        return False

    def axes(self, access: Op, row_tile_axis: int) -> tuple[int, int]:
        """The axes of the tensor that a load's (or store's) tile walks: along the given axis of the tile, and along the other."""
        tensor = access.operands[0].type
        assert isinstance(tensor, Tensor)
        found: dict[int, int] = {}
        for axis, index in enumerate(access.operands[1 : 1 + tensor.rank]):
            shape = index.type.shape if isinstance(index.type, Tile) else ()
            for tile_axis, size in enumerate(shape):
                if size > 1:
                    found[tile_axis] = axis if tile_axis not in found else -1
        if len(found) != 2 or -1 in found.values():
            raise CompilerBug.at("TW040", "lower_wgmma: an operand is not a plane of its tensor", access.span)
        return found[row_tile_axis], found[1 - row_tile_axis]

    def origin(self, held: Held) -> Value:
        """The first coordinate of a tile along one axis of its tensor."""
        if isinstance(held, Value):
            return held
        assert isinstance(held, Index) and all(f == 1 for f in held.factors.values())
        return held.base

    # -- finishing -----------------------------------------------------------------------------------------------

    def cells(self, shape: Shape) -> list[Cell]:
        every = super().cells(shape)
        if self.window is None:
            return every
        return [c for c in every if all(e == 1 or x in w for x, e, w in zip(c, shape, self.window, strict=True))]

    def finish(self, b: Builder, ops: Sequence[Op]) -> None:
        """What the kernel does to its results, one piece after another. What does not depend on the sum, loads above all, is done a piece
        ahead: its latency passes while the piece before is finished."""
        ahead, behind = self._apart(ops)
        windows = self.windows()
        self.pieces = 0
        ready = self._ahead(b, ahead, windows[0])
        for number, window in enumerate(windows):
            following = self._ahead(b, ahead, windows[number + 1]) if number + 1 < len(windows) else {}
            self.env.update(ready)
            self.window = window
            self.ops(b, behind)
            self.pieces += 1
            ready = following
        self.window = None

    def windows(self) -> list[tuple[range, range]]:
        """The registers of each piece, along both axes."""
        rows, columns = self.layout.registers((self.schedule.m, self.schedule.n))
        wide = ROW_BYTES // (self.out_dtype.itemsize if self.out_maps else 2) // 8
        return [
            (range(row, row + 2), range(column, min(column + wide, columns)))
            for row in range(0, rows, 2) for column in range(0, columns, wide)
        ]  # fmt: skip

    def load(self, b: Builder, op: Op) -> None:
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

    def _moved_inside(self, b: Builder, held: Held, limit: Value | None) -> Index | None:
        """An index of which a piece is inside or outside as a whole, moved inside: once, not for each load. None where pieces are cut."""
        if limit is None or not isinstance(held, Index) or self.window is None:
            return None
        (axis,) = held.factors
        start, size = self.layout.offset(axis, self.window[axis].start), (self.piece_rows * len(self.window[0]) // 2, 8 * len(self.window[1]))[axis]
        if self.divisors.get(limit, 1) % size or self.divisors.get(held.base, 1) % size:
            return None
        before = b.index(start)
        if axis == 0 and not self.schedule.turns:
            before = b.add(b.mul(self.own, b.index(self.rows)), before)
        first = b.op("min", b.add(held.base, before), b.sub(limit, b.index(size)))
        base = b.sub(first, before)
        self.divisors[base] = size
        return Index(held.shape, base, held.factors)

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
            if not isinstance(held, Index) or not held.factors:
                limits.append((None, False))
                continue
            bound = [limit for index, limit in mask.edges if index.base is held.base and index.factors == held.factors]
            axes = list(held.factors)
            if len(axes) != 1 or held.factors[axes[0]] != 1:
                return None
            limits.append((bound[0] if bound else None, axes[0] == self.axis))
        edges = {(id(index.base), *index.factors) for index, _ in mask.edges}
        own = {(id(h.base), *h.factors) for h in (self.env[v] for v in op.operands[1 : 1 + memory.rank]) if isinstance(h, Index)}
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
        if op not in self.out_maps:
            super().store(b, op)
            return
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor) and self.window is not None
        shape = (self.schedule.m, self.schedule.n)
        registers = self.registers(b, self.env[op.operands[1 + tensor.rank]], shape)
        buffer = self.buffer_of(b, self.pieces * len(self.out_maps) + list(self.out_maps).index(op))
        self.claim(b)
        if tensor.dtype.itemsize == 2:
            self._fill_by_matrix(b, registers, buffer)
        else:
            self._fill(b, registers, buffer)
        b.multi("fence_async")
        self._meet(b)
        coordinates = self.piece_origin(b, op, self.window)

        def send(inner: Builder) -> list[Value]:
            inner.multi("tma_store", self.out, buffer, self.out_maps[op], *coordinates)
            inner.multi("tma_commit")
            return []

        b.if_(self.leader, send, lambda inner: [])
        self.sent(b)

    def buffer_of(self, b: Builder, number: int) -> Value:
        """Where in shared memory a piece of this group is put together."""
        first = b.mul(self.own, b.index(self.buffers * self.piece_size))
        return b.add(first, b.index(number % self.buffers * self.piece_size))

    def claim(self, b: Builder) -> None:
        """Wait until the piece that was in this one's buffer has been read."""
        pending = self.buffers - 1
        b.if_(self.leader, lambda inner: inner.multi("tma_wait", pending=pending, read=True), lambda inner: [])
        self._meet(b)

    def sent(self, b: Builder) -> None:
        """A piece is on its way."""

    def _meet(self, b: Builder) -> None:
        b.multi("named_barrier", b.cast(b.add(self.own, b.index(1)), i32), threads=GROUP)

    def piece_origin(self, b: Builder, op: Op, window: tuple[range, range]) -> list[Value]:
        """The first element of a piece in the tensor of a load or store."""
        tensor = op.operands[0].type
        assert isinstance(tensor, Tensor)
        row = b.index(self.layout.offset(0, window[0].start))
        if not self.schedule.turns:
            row = b.add(row, b.mul(self.own, b.index(self.rows)))
        offsets = (row, b.index(self.layout.offset(1, window[1].start)))
        result: list[Value] = []
        for index in op.operands[1 : 1 + tensor.rank]:
            held = self.env[index]
            origin = self.origin(held)
            for axis in held.factors if isinstance(held, Index) else ():
                origin = b.add(origin, offsets[axis])
            result.append(origin)
        return result

    def _fill_by_matrix(self, b: Builder, registers: Registers, buffer: Value) -> None:
        for place, cells in self.by_matrix(b, buffer):
            b.multi("stmatrix", self.out, place, *(b.op("to_bits", registers.cells[c]) for c in cells))

    def by_matrix(self, b: Builder, buffer: Value) -> Iterator[tuple[Value, list[Cell]]]:
        """Two bytes an element: four 8x8 matrices at a time, each lane giving the place of one of their rows."""
        assert self.window is not None
        row = b.add(b.mul(self.warp, b.index(16)), b.op("and", self.lane, b.index(15)))
        start = b.add(buffer, b.mul(row, b.index(64)))
        half, turn = b.op("shr", self.lane, b.index(4)), b.op("and", self.lane, b.index(7))
        for number in range(0, len(self.window[1]), 2):
            chunk = b.op("xor", b.add(half, b.index(number)), turn)
            place = b.add(start, b.mul(chunk, b.index(8)))
            top, left = self.window[0].start, self.window[1].start + number
            yield place, [(top, left), (top + 1, left), (top, left + 1), (top + 1, left + 1)]

    def _fill(self, b: Builder, registers: Registers, buffer: Value) -> None:
        for place, cell in self.by_pair(b, buffer):
            b.multi("store", self.out, place, registers.cells[cell])

    def by_pair(self, b: Builder, buffer: Value) -> Iterator[tuple[Value, Cell]]:
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

    def is_crowded(self) -> bool:
        """Whether results go through functions, or are combined with an array of their own size that threads read."""
        inside = {id(op) for op in walk(self.sum.regions[0])}
        if any(OPS[op.opcode].group == "function" for op in walk(self.kernel.body) if id(op) not in inside):
            return True
        shape = (self.schedule.m, self.schedule.n)
        return any(
            op.opcode == "load" and op is not self.fetched and id(op) not in inside
            and isinstance(op.result.type, Tile) and op.result.type.shape == shape
            for op in walk(self.kernel.body)
        )
