"""Results of a contraction that leave registers by way of shared memory, so that the lanes of a warp write neighbours. Part of `lower_mma`.

A thread's sums lie where multiplying them is cheap: a few neighbours along a row, in several rows. Where columns are several indices walked as one, as the places of
an image are, neighbours may lie in different rows of it: each is a store of its own, whose neighbours in a warp write elsewhere, at an address that is
found by division. So some rows at a time go to shared memory, and the lanes of a warp take neighbours of them:

    what depends on columns alone, once
    for some rows of the tile { barrier;  registers -> shared memory;  barrier;  for a few of these rows { shared memory -> the kernel's epilogue } }
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import f32
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.layouts import MMA_LANES, Accumulator, Blocked
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor, Tile, dtype_of
from tilewright.passes.common.registers import Cell, Registers, shape_of
from tilewright.passes.to_thread.lower_tiles import TileLowering

ROWS = 32
"""Rows in shared memory at once, if threads can hold so few."""
TOGETHER = 8
"""Rows whose results a thread has at once."""
APART = 8
"""Elements between rows of shared memory: vectors of several rows go to different banks."""
ELEMENTWISE = ("iota", "broadcast", "load", "store")
"""Ops of an epilogue that are not arithmetic on single elements."""


class ResultRows(TileLowering):
    """The threads of a block as they share rows of the results."""

    def __init__(self, outer: TileLowering, shape: tuple[int, int], ops: Sequence[Op], result: Value, threads: int) -> None:
        warps = threads // MMA_LANES
        along = min(warps, shape[1] // MMA_LANES)
        self.given = Blocked((1, 1), (1, MMA_LANES), (warps // along, along))
        super().__init__(outer.kernel, outer.target)
        self.divisors, self.constants = outer.divisors, outer.constants
        self.outer, self.shape, self.result = outer, shape, result
        layout = outer.layout
        self.block = layout.vector[0] * layout.lanes[0]
        """Neighbouring rows of one warp."""
        registers, _ = layout.registers(shape)
        whole = layout.vector[0] if isinstance(layout, Blocked) else 1
        self.count = min(registers, max(whole, whole * (ROWS // (self.block * layout.warps[0]))))
        """Rows of a thread that go to shared memory at once."""
        self.near = self.block * (self.count // whole) if isinstance(layout, Accumulator) else self.block * layout.warps[0] * (self.count // whole)
        """Rows that are neighbours both in shared memory and in the tile."""
        self.height = self.block * layout.warps[0] * (self.count // whole)
        self.pitch = shape[1] + APART
        self.together = min(TOGETHER, self.near // self.given.warps[0])
        self.columns, self.others = _by_columns(ops, result)
        self.memory: Value | None = None

    def _layout(self) -> Blocked | Accumulator:
        return self.given

    @property
    def layout_warp(self) -> int:
        return MMA_LANES

    @property
    def size(self) -> int:
        """Elements of shared memory."""
        return self.height * self.pitch

    def finish(self, b: Builder) -> None:
        """The epilogue of one tile."""
        outer = self.outer
        first, second = self.given.warps[0], list(self.bases)
        self.env = {v: h for v, h in outer.env.items() if isinstance(h, Value)}
        self.ops(b, self.columns)
        known = dict(self.env)
        registers, _ = outer.layout.registers(self.shape)
        step = self.together * first
        for begin in range(0, registers, self.count):
            b.multi("barrier")  # others may still read what was there
            self._put(b, range(begin, begin + self.count))
            b.multi("barrier")

            def rows(inner: Builder, row: Value, begin: int = begin) -> list[Value]:
                self.env = dict(known)
                self.bases = [inner.add(self._row(inner, row, begin), second[0]), second[1]]
                self._take(inner, inner.add(row, second[0]), second[1])
                self.ops(inner, self.others)
                self.bases = second
                return []

            b.for_(b.index(0), b.index(self.height), b.index(step), [], rows, name="row", unroll=1)
        self.window = None

    def _put(self, b: Builder, registers: range) -> None:
        """Write some rows of the sums to shared memory."""
        outer, layout = self.outer, self.outer.layout
        held = outer.env[self.result]
        assert isinstance(held, Registers) and self.memory is not None
        start = outer.bases[0]
        if isinstance(layout, Accumulator):
            # Warps have parts of the tile that lie apart; their rows come together.
            away = layout.part(0, self.shape[0]) - self.near
            start = b.sub(start, b.mul(outer.warp_digits[0], b.index(away))) if away else start
        place = b.add(b.mul(start, b.index(self.pitch)), outer.bases[1])
        for (row, column), value in held.cells.items():
            if row in registers:
                away = layout.offset(0, row) - layout.offset(0, registers.start)
                b.multi("store", self.memory, b.add(place, b.index(away * self.pitch + layout.offset(1, column))), value)

    def _row(self, b: Builder, row: Value, begin: int) -> Value:
        """The row of the tile that a row of shared memory is, `begin` being the first of a thread's that it has."""
        layout = self.outer.layout
        first = b.index(layout.offset(0, begin))
        if isinstance(layout, Accumulator) and self.near < self.height:
            part = b.op("shr", row, b.index(self.near.bit_length() - 1))
            row = b.add(row, b.mul(part, b.index(layout.part(0, self.shape[0]) - self.near)))
        return b.add(row, first)

    def _take(self, b: Builder, row: Value, column: Value) -> None:
        """Read a thread's part of a few rows."""
        _, columns = self.given.registers(self.shape)
        self.window = (range(self.together), range(columns))
        place = b.add(b.mul(row, b.index(self.pitch)), column)
        cells: dict[Cell, Value] = {}
        for cell in self.cells(self.shape):
            away = self.given.offset(0, cell[0]) * self.pitch + self.given.offset(1, cell[1])
            assert self.memory is not None
            cells[cell] = b.op("load", self.memory, b.add(place, b.index(away)))
        self.env[self.result] = Registers(self.shape, cells)


def result_rows(outer: TileLowering, shape: tuple[int, int], ops: Sequence[Op], result: Value, threads: int) -> ResultRows | None:
    """How the results of a tile leave by way of shared memory; None where that is not possible, or gains nothing: memory does not run along columns that are
    several indices walked as one."""
    if "cp.async" not in outer.target.features or shape[1] % MMA_LANES or threads % MMA_LANES or dtype_of(result.type) is not f32:
        return None
    warps = threads // MMA_LANES
    stores = [op for op in ops if op.opcode == "store"]
    if not stores or warps & (warps - 1) or shape[1] & (shape[1] - 1) or any(op.regions or not _elementwise(op) for op in ops):
        return None
    made = {result: op for op in ops for result in op.results}
    if not all(_along_columns(op, made) for op in stores):
        return None
    rows = ResultRows(outer, shape, ops, result, threads)
    whole = rows.height % (rows.together * rows.given.warps[0]) == 0 and outer.layout.registers(shape)[0] % rows.count == 0
    return rows if whole and rows.together else None


def _elementwise(op: Op) -> bool:
    if op.opcode in ELEMENTWISE or not op.results or not isinstance(op.results[0].type, Tile):
        return op.opcode not in ("accumulate", "atomic", "barrier", "print", "assert", "report")
    return op.opcode not in ("reduce_tile", "scan_tile", "dot", "reshape", "transpose", "slice", "item")


def _along_columns(op: Op, made: dict[Value, Op]) -> bool:
    """Whether a store's memory runs along columns, one of whose indices is a quotient or a rest."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    if memory.dtype is not f32 or memory.rank == 0 or memory.strides[-1] != ONE:
        return False
    axes, divided = _sources(op.operands[memory.rank], made)
    return axes == {1} and divided


def _sources(value: Value, made: dict[Value, Op]) -> tuple[set[int], bool]:
    """The axes of a tile along which a value changes, and whether it is made by division."""
    axes: set[int] = set()
    seen: set[Value] = set()
    waiting, divided = [value], False
    while waiting:
        one = waiting.pop()
        op = made.get(one)
        if op is None or one in seen:
            continue
        seen.add(one)
        axis = op.attrs.get("axis")
        if op.opcode == "iota" and isinstance(axis, int):
            axes.add(axis)
        divided = divided or op.opcode == "floordiv"
        waiting += op.operands
    return axes, divided


def _by_columns(ops: Sequence[Op], result: Value) -> tuple[list[Op], list[Op]]:
    """The ops that depend on columns alone, and are no accesses to memory, and all others."""
    moving: set[Value] = {result}
    columns: list[Op] = []
    others: list[Op] = []
    for op in ops:
        fixed = op.opcode not in ("load", "store") and not (op.opcode == "iota" and op.attrs.get("axis") == 0) and not any(v in moving for v in op.operands)
        if fixed and all(not isinstance(r.type, Tile) or shape_of(r)[0] == 1 for r in op.results):
            columns.append(op)
        else:
            moving.update(op.results)
            others.append(op)
    return columns, others
