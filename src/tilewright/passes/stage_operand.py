"""How one operand of a contraction gets into shared memory, step by step along the sum, on any GPU.

In: the tile-stage ops that make the operand's tile (a plain load, or loads and whatever is computed from them). Out: thread-stage ops
that fill one stage of a ring of tiles. The threads of the block share the tile in a blocked layout of its own, chosen so that global
memory is read in the widest vectors that are provably aligned; a plain load whose vectors lie in shared memory as they do in global
memory goes by asynchronous copies, everything else through registers.

    ring[stage][row * pitch + column]       rows run along the sum (`k`) or across it (`mn`)

What does not change from step to step is computed before the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Accumulator, Blocked
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Tile, Vec, dtype_of
from tilewright.passes.lower_tiles import TileLowering
from tilewright.passes.registers import Cell, Index, Registers, Shape, shape_of

WIDEST = 16
"""Bytes of the widest access."""


@record
class Ring:
    """Tiles of one operand in shared memory. `along` is the axis of the tile that walks the sum."""

    memory: Value
    dtype: DType
    shape: Shape
    along: int
    major: str
    """`k`: a row of shared memory runs along the sum; `mn`: across it."""
    pitch: int
    """Elements from one row to the next."""

    @property
    def inner(self) -> int:
        """The axis of the tile along which neighbours are neighbours in shared memory."""
        return self.along if self.major == "k" else 1 - self.along

    @property
    def size(self) -> int:
        """Elements of one stage."""
        return self.shape[1 - self.inner] * self.pitch

    def scale(self, axis: int) -> int:
        """How far apart neighbours along an axis of the tile are."""
        return 1 if axis == self.inner else self.pitch

    def static(self, across: int, along: int) -> int:
        """Where an element lies: `across` counts along m or n, `along` along the sum."""
        return along * self.scale(self.along) + across * self.scale(1 - self.along)

    def place(self, b: Builder, across: Value, along: Value) -> Value:
        parts = [(across, self.scale(1 - self.along)), (along, self.scale(self.along))]
        first, second = (b.mul(v, b.index(s)) if s > 1 else v for v, s in parts)
        return b.add(first, second)


class Source:
    """The ops of a kernel that make one operand, split into those that change from step to step and those that do not."""

    def __init__(self, kernel: Kernel, total: Op, operand: Value) -> None:
        self.operand, self.step = operand, total.regions[0].args[0]
        made = {result: op for op in walk(kernel.body) for result in op.results}
        inside = {id(op) for op in total.regions[0].ops}
        needed: set[int] = set()
        changing: set[Value] = {self.step}
        waiting = [operand]
        while waiting:
            op = made.get(waiting.pop())
            if op is None or id(op) in needed or not (id(op) in inside or isinstance(op.results[0].type, Tile)):
                continue
            needed.add(id(op))
            waiting += _reads(op)
        self.fixed: list[Op] = []
        self.changing: list[Op] = []
        for op in walk(kernel.body):
            if id(op) not in needed:
                continue
            if any(v in changing for v in _reads(op)):
                changing.update(op.results)
                self.changing.append(op)
            else:
                self.fixed.append(op)
        last = made[operand]
        self.load = last if last.opcode == "load" else None
        """The load the operand is, where nothing is done to it."""
        loads = [op for op in (*self.fixed, *self.changing) if op.opcode == "load" and isinstance(op.results[0].type, Tile)]
        self.main = max(loads, key=lambda op: _count(shape_of(op.results[0])), default=None)
        """The load that reads most."""


def _reads(op: Op) -> list[Value]:
    return [*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)]


def _count(shape: Shape) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


class OperandView(TileLowering):
    """The threads of the block as they share one operand's tile."""

    def __init__(self, outer: TileLowering, source: Source, layout: Blocked) -> None:
        self.given = layout
        super().__init__(outer.kernel, outer.target)
        self.divisors, self.constants = outer.divisors, outer.constants
        self.source = source
        self.ring: Ring | None = None
        self.asynchronous = False
        self.offset: Value | None = None
        """Where the stage to fill starts."""
        self.valid: Value | None = None
        """Whether there is a step to copy for; zeros are copied otherwise."""
        self.contiguous: int | None = None
        """The axis of the tile along which the main load reads neighbours."""
        self.widths: list[int] = []
        """Elements of each access of the main load."""

    def _layout(self) -> Blocked | Accumulator:
        return self.given

    def begin(self, b: Builder, outer: TileLowering) -> None:
        """What all steps share. `outer` has the scalars computed so far."""
        self.env = {v: h for v, h in outer.env.items() if isinstance(h, Value)}
        self.ops(b, self.source.fixed)

    def bring(self, b: Builder, k: Value) -> Registers | None:
        """The tile of the step that starts at `k`, in registers; None where it is on its way to shared memory."""
        self.env[self.source.step] = k
        self.ops(b, self.source.changing)
        if self.asynchronous:
            return None
        return self.registers(b, self.env[self.source.operand], shape_of(self.source.operand))

    @property
    def ring_(self) -> Ring:
        assert self.ring is not None
        return self.ring

    # -- global memory ------------------------------------------------------------------------------------------

    def load(self, b: Builder, op: Op) -> None:
        if op is not self.source.main:
            super().load(b, op)
            return
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        for index, stride in zip(op.operands[1 : 1 + memory.rank], memory.strides, strict=True):
            held = self.env[index]
            if stride == ONE and isinstance(held, Index):
                axes = [a for a, factor in held.factors.items() if factor == 1]
                self.contiguous = axes[0] if len(held.factors) == 1 and axes else None
        self.widths.append(0)
        if self.asynchronous and op is self.source.load:
            self._copy(b, op, memory)
            return
        super().load(b, op)

    def _plain_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int) -> Value:
        if self.widths and memory is (self.source.main.operands[0] if self.source.main else None):
            self.widths.append(width)
        return super()._plain_load(b, memory, indices, width)

    def _copy(self, b: Builder, op: Op, memory: Tensor) -> None:
        """Start copying the thread's part of the tile."""
        assert self.ring is not None
        held = [self.env[v] for v in op.operands[1 : 1 + memory.rank]]
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        shape = shape_of(op.results[0])
        for cell in self.cells(shape):
            ((indices, width),) = self._pieces(b, memory, held, shape, cell)
            conditions = self._condition(b, mask, shape, cell, 1)
            wanted = [v for v in (self.valid, conditions[0] if conditions else None) if v is not None]
            if len(wanted) == 2:
                wanted = [b.logical_and(*wanted)]
            bytes_ = width * memory.dtype.itemsize
            b.multi("copy_async", self.ring.memory, self._place(b, cell), op.operands[0], *indices, *wanted, bytes=bytes_, masked=bool(wanted))

    # -- shared memory ------------------------------------------------------------------------------------------

    def _place(self, b: Builder, cell: Cell) -> Value:
        """Where a cell's first element goes."""
        assert self.ring is not None and self.offset is not None
        start = self.ring.place(b, self.bases[1 - self.ring.along], self.bases[self.ring.along])
        fixed = self.ring.static(*(self.layout.offset(a, cell[a]) for a in (1 - self.ring.along, self.ring.along)))
        return b.add(b.add(self.offset, start), b.index(fixed))

    def put(self, b: Builder, held: Registers) -> None:
        """Write what `bring` gave to the stage at `offset`."""
        assert self.ring is not None
        for cell in self.cells(held.shape):
            value, place = held.cells[cell], self._place(b, cell)
            if not isinstance(value.type, Vec):
                b.multi("store", self.ring.memory, place, value)
                continue
            widest = WIDEST // self.ring.dtype.itemsize if self.axis == self.ring.inner else 1
            step = min(widest, value.type.width)
            for first in range(0, value.type.width, step):
                part = value
                if step < value.type.width:
                    lanes = [b.op("extract", value, lane=lane) for lane in range(first, first + step)]
                    part = lanes[0] if step == 1 else b.op("pack", *lanes)
                b.multi("store", self.ring.memory, b.add(place, b.index(first * self.ring.scale(self.axis))), part)


# -- choosing the layout ------------------------------------------------------------------------------------------------


def shared_layout(shape: Shape, axis: int, vector: int, threads: int, narrow: bool) -> Blocked | None:
    """The threads side by side along `axis`, in vectors; None where the tile is too small. `narrow`: two lanes along the axis and the rest
    across it, so that what is written across the vectors goes to different banks."""
    other = 1 - axis
    lanes, warps, vectors = [1, 1], [1, 1], [1, 1]
    vectors[axis] = vector
    lanes[axis] = min(32, shape[axis] // vector, 2 if narrow else 32)
    if not lanes[axis]:
        return None
    lanes[other] = min(32 // lanes[axis], shape[other])
    lanes[axis] = 32 // lanes[other]
    count = threads // 32
    warps[other] = min(count, max(1, shape[other] // lanes[other]))
    warps[axis] = count // warps[other]
    layout = Blocked((vectors[0], vectors[1]), (lanes[0], lanes[1]), (warps[0], warps[1]))
    return layout if all(shape[a] % layout.span(a) == 0 for a in (0, 1)) else None


def _tried(outer: TileLowering, source: Source, layout: Blocked) -> OperandView:
    """A view that has been through one step, for what it found out. `outer` has computed what comes before the sum."""
    view = OperandView(outer, source, layout)
    scratch = Builder()
    view.coordinates(scratch)
    view.begin(scratch, outer)
    view.bring(scratch, source.step)
    return view


def contiguous_axis(outer: TileLowering, source: Source, threads: int) -> int | None:
    """The axis of the tile along which its main load reads neighbours."""
    shape = shape_of(source.operand)
    for axis in (0, 1):
        layout = shared_layout(shape, axis, 1, threads, narrow=False)
        if layout is not None:
            return _tried(outer, source, layout).contiguous
    raise _too_small(shape, threads)


def make_view(outer: TileLowering, source: Source, ring: Ring, threads: int, copy: str, contiguous: int | None) -> OperandView:
    """The best way to fill the ring. `copy`: `threads` (through registers), `async` (asynchronously even one element at a time) or what is
    best."""
    axis = contiguous if contiguous is not None else ring.inner
    size = dtype_of(source.main.results[0].type).itemsize if source.main is not None else ring.dtype.itemsize
    is_load = source.load is not None and source.load is source.main and dtype_of(source.operand.type) is ring.dtype
    may = "cp.async" in outer.target.features and is_load and copy != "threads"
    across = axis != ring.inner
    by_element = may and copy == "async" and across
    vector = max(1, WIDEST // size) if contiguous is not None and not by_element else 1
    while vector >= 1:
        layout = shared_layout(ring.shape, axis, vector, threads, narrow=across and not by_element)
        if layout is not None and (vector == 1 or all(w in (0, vector) for w in _tried(outer, source, layout).widths)):
            view = OperandView(outer, source, layout)
            view.ring = ring
            view.asynchronous = may and vector * size in (4, 8, 16) and (by_element or not across)
            return view
        vector //= 2
    raise _too_small(ring.shape, threads)


def _too_small(shape: Shape, threads: int) -> UserError:
    error = UserError.at("TW005", f"a tile of {shape[0]} x {shape[1]} is too small for {threads} threads")
    assert isinstance(error, UserError)
    return error
