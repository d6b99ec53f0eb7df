"""Tile stage -> thread stage, for results whose values lie along another index than they do: what one thread executes.

In: a tile-stage kernel whose schedule says `turned=vectors`, with tiles of two axes: values are read in vectors along one of them, and results are written along the other. Out: a thread-stage kernel in
which a block's values go through shared memory, so that both are accessed in whole lines. Threads hold tiles in one way while they read, and in another while they write:

    %v = load %pixels, %row, %channel : tile<bf16, [64, 128]>; store %y, …, %channel, …, %column, %v
    -> lanes along channels: load %pixels {width = 8}, store shared; barrier; lanes along columns: load shared {width = 2}, store %y

A line of shared memory has the values of one column, and a word more than these: neither vectors of channels nor columns side by side meet in a bank. What a kernel does to its values is done by
those who write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Blocked
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Tile, Vec, tensor
from tilewright.passes.common.registers import Cell, Held, Mask, RegisterIndex, Registers, shape_of
from tilewright.passes.to_thread.lower_tiles import TileLowering
from tilewright.passes.to_thread.turned_lines import coordinates_of, word_elements


def lower_turned(kernel: Kernel, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return TurnedLowering(kernel, target).run()


class TurnedLowering(TileLowering):
    """A block's loads with the layout of the tiles, everything else with one whose lanes lie along the other axis."""

    shared: Value

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        loads = [op for op in walk(kernel.body) if op.opcode == "load" and isinstance(op.result.type, Tile)]
        assert loads and isinstance(self.layout, Blocked) and len(self.layout.vector) == 2
        tile = loads[0].result.type
        assert isinstance(tile, Tile)
        self.along, self.shape, self.dtype = self.axis, tile.shape, tile.dtype
        """The axis that memory lies along where values are read, and the tile."""
        self.pair = word_elements(self.dtype)
        self.reading, self.writing = self.layout, self._other_layout(self.layout)
        self.places: dict[Blocked, list[Value]] = {}
        self.around: list[Op] = []
        """The ops of the regions around the ones at hand."""
        self.rows: dict[Value, Value] = {}
        """Arrays of results that are written by the number of an element, and what they are then."""

    def run(self) -> Kernel:
        kernel = super().run()
        return replace(kernel, params=tuple(self.rows.get(p, p) for p in kernel.params))

    def _other_layout(self, layout: Blocked) -> Blocked:
        """Lanes and warps along the axis that results lie along; each thread has words of the other."""
        across, lanes = 1 - self.along, self.target.warp_size
        vector, own, warps = [1, 1], [1, 1], [1, 1]
        vector[self.along] = self.pair
        own[across] = min(lanes, self.shape[across])
        own[self.along] = lanes // own[across]
        count = layout.threads // lanes
        warps[across] = min(count, self.shape[across] // own[across])
        warps[self.along] = count // warps[across]
        return Blocked(tuple(vector), tuple(own), tuple(warps))

    def _hold(self, layout: Blocked) -> None:
        """Tiles are held in this way from here on."""
        self.layout, self.bases = layout, self.places[layout]
        self.axis, self.vector = self.along, layout.vector[self.along]

    def coordinates(self, b: Builder) -> None:
        for layout in (self.reading, self.writing):
            self.layout, self.bases = layout, []
            super().coordinates(b)
            self.places[layout] = self.bases
        self.line = self.shape[self.along] + self.pair
        count = self.shape[1 - self.along] * self.line
        self.shared = b.op("alloc", dtype=self.dtype, shape=(count,), space="shared", align=16, name="turned")
        self._hold(self.writing)

    def ops(self, b: Builder, ops: Sequence[Op]) -> tuple[Held, ...]:
        around, self.around = self.around, [*self.around, *ops]
        held = self._turned_ops(b, ops) if any(op.opcode == "load" and isinstance(op.result.type, Tile) for op in ops) else super().ops(b, ops)
        self.around = around
        return held

    def _turned_ops(self, b: Builder, ops: Sequence[Op]) -> tuple[Held, ...]:
        """Ops with one load: what it needs and the load first, then all others."""
        (load,) = (op for op in ops if op.opcode == "load" and isinstance(op.result.type, Tile))
        before = dict(self.env)
        self._hold(self.reading)
        super().ops(b, [*self._leading_to(load), load])
        read = self.env[load.result]
        assert isinstance(read, Registers)
        for cell, place in self._in_shared(b):
            self._put(b, place, read.cells[cell])
        b.multi("barrier")
        self.env = before
        self._hold(self.writing)
        self.env[load.result] = Registers(self.shape, {cell: self.plain_load(b, self.shared, [place], self.pair) for cell, place in self._in_shared(b)})
        return super().ops(b, [op for op in ops if op is not load])

    def _leading_to(self, load: Op) -> list[Op]:
        """The tiles that a load's operands are made of, and the numbers that are not there yet."""
        needed = set(load.operands)
        leading: list[Op] = []
        for op in reversed(self.around):
            if any(result in needed and (isinstance(result.type, Tile) or result not in self.env) for result in op.results):
                needed.update(op.operands)
                leading.append(op)
        return leading[::-1]

    def _in_shared(self, b: Builder) -> list[tuple[Cell, Value]]:
        """Where each of a thread's vectors begins in shared memory."""
        found: list[tuple[Cell, Value]] = []
        for cell in self.cells(self.shape):
            at = coordinates_of(self, b, cell, range(2))
            found.append((cell, b.add(b.mul(at[1 - self.along], b.index(self.line)), at[self.along])))
        return found

    def _put(self, b: Builder, place: Value, value: Value) -> None:
        """Store a vector word by word: lines begin at any of these."""
        if isinstance(value.type, Vec) and value.type.width > self.pair:
            low, high = b.multi("split", value)
            self._put(b, place, low)
            self._put(b, b.add(place, b.index(value.type.width // 2)), high)
            return
        b.multi("store", self.shared, place, value if self.pair > 1 or not isinstance(value.type, Vec) else b.op("extract", value, lane=0))

    # -- what is read ---------------------------------------------------------------------------------------------

    def load(self, b: Builder, op: Op) -> None:
        """Rows of memory are whole vectors: what is beyond the results, but in a row, may be read."""
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        if isinstance(mask, Mask):
            self.env[op.operands[-1]] = self._of_whole_vectors(b, op, mask)
        super().load(b, op)

    def _of_whole_vectors(self, b: Builder, op: Op, mask: Mask) -> Mask:
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        last = self.env[op.operands[memory.rank]]
        edges: list[tuple[RegisterIndex, Value]] = []
        for index, bound in mask.edges:
            if isinstance(last, RegisterIndex) and index.base is last.base and index.factors == last.factors == {self.along: 1}:
                bound = b.index(memory.shape[-1])
                self.divisors[bound] = self.vector
            edges.append((index, bound))
        return replace(mask, edges=tuple(edges))

    def guarded_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int, cond: Value) -> Value:
        if self.predicated and width > 1:
            return b.op("load", memory, *indices, cond, width=width, masked=True)
        return super().guarded_load(b, memory, indices, width, cond)

    # -- what is written ------------------------------------------------------------------------------------------

    def store(self, b: Builder, op: Op) -> None:
        """A thread has one column of many channels: from one to the next it is as far as a size says."""
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        rank, shape = memory.type.rank, shape_of(op.operands[1 + memory.type.rank])
        held = [self.env[v] for v in op.operands[1 : 1 + rank]]
        walking = [axis for axis, index in enumerate(held) if isinstance(index, RegisterIndex) and index.factors.get(self.along)]
        plain = all(isinstance(index, Value | RegisterIndex) for index in held)
        if not plain or shape != self.shape or len(walking) != 1 or not memory.type.is_contiguous or self._steps(held[walking[0]]) != 1:
            super().store(b, op)
            return
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        values = self.registers(b, self.env[op.operands[1 + rank]], shape)
        row = self.rows.setdefault(memory, Value(tensor(memory.type.dtype, product(memory.type.shape), align=memory.type.align), memory.name))
        assert isinstance(self.layout, Blocked)
        stride = memory.type.strides[walking[0]]
        step = b.index(stride) if stride.constant is not None else b.op("size", value=stride, kept=True)
        far = b.index(self.layout.span(self.along) - self.vector + 1)
        place = b.index(0)
        for cell in sorted(self.cells(shape), key=lambda own: (own[1 - self.along], own[self.along])):
            place = b.add(place, b.mul(step, far)) if cell[self.along] else self._number(b, memory.type, held, cell)
            conditions = self.condition(b, mask, shape, cell, self.vector)
            for lane in range(self.vector):
                place = b.add(place, step) if lane else place
                value = values.cells[cell]
                part = b.op("extract", value, lane=lane) if isinstance(value.type, Vec) else value
                self.store_pieces(b, row, [([place], 1)], part, None if conditions is None else conditions[lane : lane + 1])

    def _steps(self, held: Held) -> int:
        return held.factors[self.along] if isinstance(held, RegisterIndex) else 0

    def _number(self, b: Builder, memory: Tensor, held: Sequence[Held], cell: Cell) -> Value:
        """The number of the first element of a cell in a contiguous array."""
        total = b.index(0)
        for index, extent in zip(held, memory.shape, strict=True):
            assert isinstance(index, Value | RegisterIndex)
            own = self.first(b, index, self.collapsed(cell, index.shape) if isinstance(index, RegisterIndex) else cell)
            total = b.add(b.mul(total, b.index(extent)), own)
        return total
