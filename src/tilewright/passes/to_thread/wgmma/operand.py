"""The first operand of warp-group instructions, computed in registers from arrays that come as they lie.

In: the tile-stage ops that make the operand's tile: loads of arrays with a row for each result's row, and whatever is computed from them and
from others (casts, scales of a row, a column or a group of columns). Out: thread-stage ops. The arrays of the operand's own size pass through
rings in shared memory, in rows of at most 128 bytes, swizzled; a warp group reads its elements as the matrix unit wants them,
computes, and packs them into words. Everything else is read from global memory a step ahead. What no step changes is computed once.

    ring[stage][block][row][up to 128 bytes]     word r of thread t: row t % 32 / 4 + 8 (r % 2), columns 4 v (r / 2) + v (t % 4)…

Factors of f32 are rounded to the 10 bits of mantissa matrix units use.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f32, i64, u32
from tilewright.base.errors import CompilerBug
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Accumulator
from tilewright.ir.nodes import Op, Value
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.registers import Cell, Held, RegisterIndex, Registers, Shape, shape_of
from tilewright.passes.to_thread.stage_operand import OperandSource, OperandView
from tilewright.passes.to_thread.wgmma.epilogue import Epilogue


class OperandWords(Accumulator):
    """How a tile of the first operand lies in registers: rows as the results do; along the sum each word has neighbours, and four
    lanes have words side by side."""

    @property
    def vector(self) -> tuple[int, int]:
        return (1, self.shape[2] // 8)

    def registers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, _ = super().registers((shape[0], 1))
        return rows, 1 if shape[1] == 1 else shape[1] // (self.shape[2] // 2)

    def offset(self, axis: int, register: int) -> int:
        return register * (self.shape[2] // 2) if axis == 1 else super().offset(axis, register)


@record
class RawRing:
    """Tiles of one array in shared memory. A tile has `blocks` of `rows` by `columns` elements, one after the other: columns walk the sum, or,
    where the array lies `across` it, the tile's rows."""

    load: Op
    memory: Value
    map: Value
    rows: int
    columns: int
    blocks: int
    across: bool

    @property
    def bytes(self) -> int:
        """Of one stage."""
        return self.rows * self.columns * self.blocks * dtype_of(self.memory.type).itemsize


class RegisterOperand(OperandView):
    """One operand of `outer`, a lowering whose groups have `outer.rows` rows each. `k` elements of the sum are a step."""

    def __init__(self, outer: Epilogue, operand: Value, k: int) -> None:
        self.dtype = dtype_of(operand.type)
        whole = outer.layout
        assert isinstance(whole, Accumulator)
        layout = OperandWords(whole.family, (64, whole.shape[1], 32 // self.dtype.itemsize), whole.warps)
        super().__init__(outer, OperandSource(outer.kernel, outer.sum, operand), layout)
        self.outer, self.k = outer, k
        self.shape: Shape = shape_of(operand)
        self.chunks = k * self.dtype.itemsize // 32
        """Instructions along the sum in one step."""
        self.rings: dict[Op, RawRing] = {}
        loads = [op for op in (*self.source.fixed, *self.source.changing) if op.opcode == "load"]
        self.raw = [op for op in loads if shape_of(op.result) == self.shape and self._is_straight(op)]
        changing = set(map(id, self.source.changing))
        self.others = [op for op in loads if op not in self.raw and id(op) in changing]
        """Loads from global memory that each step makes."""
        if not self.raw:
            raise CompilerBug.at("TW040", "lower_wgmma: nothing an operand is computed from has its size", outer.sum.span)
        self.addresses = self._needed_for(self.others)
        self.work = [op for op in self.source.changing if op not in loads]

    def _is_straight(self, load: Op) -> bool:
        """Whether the last axis walks the sum by ones and another the rows, or, for words of one element, the other way round."""
        tensor = load.operands[0].type
        assert isinstance(tensor, Tensor)
        indices = load.operands[1 : 1 + tensor.rank]
        if not all(self._walks(v) for v in indices):
            return False
        shapes = [shape_of(v) for v in indices]
        along = bool(shapes[-1]) and (shapes[-1][1] > 1 or (self.vector == 1 and shapes[-1][0] > 1))
        return along and sum(any(e > 1 for e in s) for s in shapes) == 2

    def _walks(self, value: Value) -> bool:
        op = self.source.made.get(value)
        if op is None or not shape_of(value) or op.opcode == "iota":
            return True
        return op.opcode in ("add", "sub", "broadcast") and all(self._walks(v) for v in op.operands)

    def _needed_for(self, loads: Sequence[Op]) -> list[Op]:
        """The ops of a step that the indices of these loads take."""
        wanted = {v for op in loads for v in op.operands}
        found: list[Op] = []
        for op in reversed(self.source.changing):
            if any(r in wanted for r in op.results) or op in loads:
                wanted.update(op.operands)
                found.insert(0, op)
        return found

    # -- copying ------------------------------------------------------------------------------------------------

    def make_rings(self, b: Builder, stages: int) -> None:
        """Shared memory and maps of the arrays that come as they lie."""
        for number, load in enumerate(self.raw):
            tensor = load.operands[0]
            assert isinstance(tensor.type, Tensor)
            dtype = tensor.type.dtype
            row_axis, k_axis = self.outer.axes(load, 0)
            across = row_axis == tensor.type.rank - 1
            rows, length = (self.k, self.shape[0]) if across else (self.shape[0], self.k)
            columns = min(length, ROW_BYTES // dtype.itemsize)
            box = [1] * tensor.type.rank
            box[k_axis if across else row_axis], box[-1] = rows, columns
            count = stages * self.shape[0] * self.k
            memory = b.op("alloc", dtype=dtype, shape=(count,), space="shared", align=1024, name=f"a{number or ''}.ring")
            found = b.op(
                "tensor_map", tensor, shape=tensor.type.shape, strides=tensor.type.strides, box=tuple(box),
                swizzle=columns * dtype.itemsize, name=f"a{number or ''}.map",
            )  # fmt: skip
            self.rings[load] = RawRing(load, memory, found, rows, columns, length // columns, across)

    def copy(self, b: Builder, ring: RawRing, stage: Value, full: Value, coordinates: Sequence[Value]) -> None:
        """Start copying one step's tile, block after block."""
        offset = b.mul(stage, b.const(self.shape[0] * self.k, u32))
        for block in range(ring.blocks):
            where, there = list(coordinates), offset
            if block:
                there = b.add(offset, b.const(block * ring.rows * ring.columns, u32))
                where[-1] = b.add(coordinates[-1], b.index(block * ring.columns))
            b.multi("tma_load", ring.memory, there, ring.map, full, stage, *where)

    # -- computing ----------------------------------------------------------------------------------------------

    def start(self, b: Builder) -> None:
        """What all steps share."""
        column = b.mul(b.op("and", self.outer.lane, b.index(3)), b.index(self.vector))
        self.divisors[column] = self.vector
        self.bases = [self.outer.bases[0], column]
        self.begin(b, self.outer)
        self.own = {ring.load: self._own_place(b, ring) for ring in self.rings.values()}

    def fetch(self, b: Builder, k: Value) -> list[Value]:
        """Begin loading what the step that starts at `k` takes from global memory."""
        self._at(k)
        self.window = None
        self.ops(b, self.addresses)
        held = [self.env[op.result] for op in self.others]
        return [v for h in held if isinstance(h, Registers) for v in h.cells.values()] + [h for h in held if isinstance(h, Value)]

    def read(self, b: Builder, stage: Value, chunk: int) -> list[Value]:
        """This thread's elements of one instruction along the sum, as they lie in shared memory."""
        self.window = self._piece(chunk)
        return [self._read(b, ring, stage, cell) for ring in self.rings.values() for cell in self.cells(self.shape)]

    def words(self, b: Builder, k: Value, raw: Sequence[Value], fetched: Sequence[Value], chunk: int) -> list[Value]:
        """The words of one instruction along the sum, from what was read for it: four for each 64 rows."""
        self._at(k)
        self._bind(fetched)
        self.window = self._piece(chunk)
        cells = self.cells(self.shape)
        for number, load in enumerate(self.rings):
            own = raw[number * len(cells) : (number + 1) * len(cells)]
            self.env[load.result] = Registers(self.shape, dict(zip(cells, own, strict=True)))
        self.ops(b, self.work)
        tile = self.registers(b, self.env[self.source.operand], self.shape)
        done = {cell: self._word(b, tile.cells[cell]) for cell in cells}
        self.window = None
        first = 2 * chunk
        rows = self.layout.registers(self.shape)[0]
        return [done[row + half, first + column] for row in range(0, rows, 2) for column in (0, 1) for half in (0, 1)]

    def _piece(self, chunk: int) -> tuple[range, range]:
        """The registers of one instruction along the sum."""
        return range(self.layout.registers(self.shape)[0]), range(2 * chunk, 2 * chunk + 2)

    def _at(self, k: Value) -> None:
        self.env[self.source.step] = k
        self.divisors[k] = self.k

    def _bind(self, fetched: Sequence[Value]) -> None:
        """The fetched values as what their loads give."""
        remaining = list(fetched)
        self.window = None
        for op in self.others:
            shape = self._loaded_shape(op)
            if not shape:
                continue
            cells = self.cells(shape)
            self.env[op.result] = Registers(shape, dict(zip(cells, remaining[: len(cells)], strict=True)))
            del remaining[: len(cells)]
        for op in self.others:
            if not shape_of(op.result):
                self.env[op.result] = remaining.pop(0)

    def _loaded_shape(self, op: Op) -> Shape:
        held = self.env[op.result]
        return held.shape if isinstance(held, Registers) else ()

    def _word(self, b: Builder, value: Value) -> Value:
        value = b.cast(value, self.dtype)
        if self.dtype is f32:
            return _rounded(b, value)
        return b.op("to_bits", value)

    def load(self, b: Builder, op: Op) -> None:
        narrow = self._narrow_load(op)
        if narrow is None:
            super().load(b, op)
            return
        # The same for all columns of the step: one element for each row.
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        held = [self.seen_as(self.env[v], narrow) for v in op.operands[1 : 1 + memory.type.rank]]
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        cells: dict[Cell, Value] = {}
        for cell in self.cells(narrow):
            ((indices, _),) = self.pieces_of(b, memory.type, held, narrow, cell)
            conditions = self.condition(b, None if mask is None else self.seen_as(mask, narrow), narrow, cell, 1)
            if conditions is None:
                cells[cell] = self.plain_load(b, memory, indices, 1)
            else:
                cells[cell] = self.guarded_load(b, memory, indices, 1, conditions[0])
        self.env[op.result] = Registers(narrow, cells)

    def _narrow_load(self, op: Op) -> Shape | None:
        """The shape of a load's tile without the axis along which it is the same, where it is."""
        memory, shape = op.operands[0].type, shape_of(op.result)
        assert isinstance(memory, Tensor)
        if not shape or shape[1] == 1:
            return None
        helds: list[Held] = [self.env[v] for v in op.operands[1 : 1 + memory.rank]]
        if not all(isinstance(h, Value | RegisterIndex) and self.is_narrow(h) for h in helds):
            return None
        if op.attrs.get("masked"):
            mask = self.env[op.operands[-1]]
            if not self.is_narrow(mask):
                return None
        return shape[0], 1

    # -- shared memory ------------------------------------------------------------------------------------------

    def _own_place(self, b: Builder, ring: RawRing) -> Value:
        """Where this thread's first element of a ring lies: its row, and the swizzled place in it."""
        size = dtype_of(ring.memory.type).itemsize
        in_row, in_chunk = ring.columns * size, 16 // size
        row = self.bases[0]
        if ring.across:
            return self._own_place_across(b, ring, in_chunk)
        # Rows of a thread are a multiple of 8 apart: they are swizzled alike.
        turn = b.op("shr", self.outer.lane, b.index(2 + (ROW_BYTES // in_row).bit_length() - 1))
        column = self.bases[1]
        chunk = b.op("xor", b.op("floordiv", column, b.index(in_chunk)), turn)
        inside = b.op("and", column, b.index(in_chunk - 1))
        place = b.add(b.mul(row, b.index(ring.columns)), b.add(b.mul(chunk, b.index(in_chunk)), inside))
        return b.cast(place, u32)

    def _own_place_across(self, b: Builder, ring: RawRing, in_chunk: int) -> Value:
        """The same where rows of shared memory walk the sum: four lanes have a row each."""
        row, number = self.bases[1], self.bases[0]
        block = b.op("floordiv", number, b.index(ring.columns))
        column = b.op("and", number, b.index(ring.columns - 1))
        chunk = b.op("xor", b.op("floordiv", column, b.index(in_chunk)), row)
        place = b.add(b.mul(chunk, b.index(in_chunk)), b.op("and", column, b.index(in_chunk - 1)))
        place = b.add(place, b.mul(row, b.index(ring.columns)))
        return b.cast(b.add(place, b.mul(block, b.index(ring.rows * ring.columns))), u32)

    def _read(self, b: Builder, ring: RawRing, stage: Value, cell: Cell) -> Value:
        size = dtype_of(ring.memory.type).itemsize
        in_chunk = 16 // size
        down, along = (self.layout.offset(axis, cell[axis]) for axis in (0, 1))
        turn = 0
        if ring.across:
            # Of a row's number, four times the register, one bit is swizzled with.
            down, along, turn = along, down, along % 8
        block, along = divmod(along, ring.columns)
        chunk, inside = divmod(along, in_chunk)
        chunk ^= turn
        start = b.add(b.mul(stage, b.const(self.shape[0] * self.k, u32)), self.own[ring.load])
        # What is fixed is added last and in 64 bits: it becomes part of the instruction.
        place = b.cast(b.op("xor", start, b.const(chunk * in_chunk, u32)), i64)
        place = b.add(place, b.index(block * ring.rows * ring.columns + down * ring.columns + inside))
        if self.vector == 1:
            return b.op("load", ring.memory, place)
        return b.op("load", ring.memory, place, width=self.vector)



def _rounded(b: Builder, value: Value) -> Value:
    """The bits of an f32 such that dropping the last 13 rounds to nearest, ties to even, as the copy engine does; what is NaN stays so."""
    bits = b.bitcast(value, u32)
    last = b.op("and", b.op("shr", bits, b.const(13, u32)), b.const(1, u32))
    near = b.add(b.add(bits, b.const(0xFFF, u32)), last)
    return b.select(b.op("isnan", value), b.const(0x7FC00000, u32), near)
