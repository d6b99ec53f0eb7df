"""How one operand of a contraction gets into shared memory, step by step along the sum, on any GPU.

In: the tile-stage ops that make the operand's tile (a plain load, or loads and whatever is computed from them). Out:
thread-stage ops that fill one stage of a ring of tiles. The threads of the block share the tile in a blocked layout of its
own, chosen so that global memory is read in the widest vectors that are provably aligned; a plain load whose vectors lie in
shared memory as they do in global memory goes by asynchronous copies, everything else through registers.

    ring[stage][row * pitch + column]       rows run along the sum (`k`) or across it (`mn`)

What does not change from step to step is computed before the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.sizes import ONE
from tilewright.ir.build import Builder
from tilewright.ir.layouts import MMA_LANES, Accumulator, Blocked
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Tile, Vec, dtype_of
from tilewright.passes.common.registers import Cell, Held, Mask, RegisterIndex, Registers, SameInVector, Shape, shape_of
from tilewright.passes.to_thread.lower_tiles import TileLowering

WIDEST = 16
"""Bytes of the widest access."""
NOTHING = -(1 << 30)
"""A bound that no index is below."""


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


class OperandSource:
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
        self.made = made
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
        loads = [
            op for op in (*self.fixed, *self.changing) if op.opcode == "load" and isinstance(op.results[0].type, Tile)
        ]
        self.main = max(loads, key=lambda op: _count(shape_of(op.results[0])), default=None)
        """The load that reads most."""


def _reads(op: Op) -> list[Value]:
    return [*op.operands, *(v for region in op.regions for inner in walk(region) for v in inner.operands)]


def _count(shape: Shape) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


class ThreadTile(Blocked):
    """A blocked layout with vectors along both axes. Along `wide` they are vectors of a thread; along the other axis each
    of their elements is a register of its own."""

    wide = 1

    def registers(self, shape: Shape) -> Shape:
        steps = super().registers(shape)
        return tuple(n if a == self.wide or shape[a] == 1 else n * self.vector[a] for a, n in enumerate(steps))

    def offset(self, axis: int, register: int) -> int:
        if axis == self.wide:
            return super().offset(axis, register)
        return super().offset(axis, register // self.vector[axis]) + register % self.vector[axis]


class TallTile(ThreadTile):
    """The same with vectors along the first axis."""

    wide = 0


class OperandView(TileLowering):
    """The threads of the block as they share one operand's tile. A view without a ring only looks at what a step would load."""

    def __init__(
        self, outer: TileLowering, source: OperandSource, layout: Blocked | Accumulator, ring: Ring | None = None, asynchronous: bool = False
    ) -> None:
        self.given = layout
        super().__init__(outer.kernel, outer.target)
        if isinstance(layout, ThreadTile):
            self.axis, self.vector = layout.wide, layout.vector[layout.wide]
        self.divisors, self.constants = outer.divisors, outer.constants
        self.source, self._ring, self.asynchronous = source, ring, asynchronous
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

    @property
    def layout_warp(self) -> int:
        return MMA_LANES

    def _digits(self, b: Builder, number: Value, sizes: tuple[int, ...]) -> list[Value]:
        """Neighbouring lanes read neighbours: those that read 16 bytes each go to memory eight at a time."""
        if self.axis == 1:
            return super()._digits(b, number, sizes)
        return list(reversed(super()._digits(b, number, sizes[::-1])))

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
    def ring(self) -> Ring:
        assert self._ring is not None
        return self._ring

    @property
    def cost(self) -> int:
        """About how many registers bringing a tile takes."""
        count = len(self.cells(self.ring.shape))
        # Addresses that are computed cell by cell, with conditions of their own, are many.
        computed = any(op.opcode == "floordiv" for op in (*self.source.fixed, *self.source.changing))
        words = 0 if self.asynchronous else max(1, self.vector * self.ring.dtype.itemsize // 4)
        return count * (words + (12 if computed else 2 if self.vector > 1 else 4))

    # -- what is the same for a whole vector --------------------------------------------------------------------

    def is_narrow(self, held: Held) -> bool:
        """Whether all elements of a vector are the same."""
        if isinstance(held, Registers):
            return held.shape[self.axis] == 1
        if isinstance(held, RegisterIndex):
            return not held.factors.get(self.axis, 0)
        return isinstance(held, Value | SameInVector) or (
            all(self.is_narrow(i) for i, _ in held.edges) and all(map(self.is_narrow, held.others))
        )

    def _narrowed(self, shape: Shape) -> Shape:
        return tuple(1 if a == self.axis else e for a, e in enumerate(shape))

    def registers(self, b: Builder, held: Held, shape: Shape) -> Registers:
        if not isinstance(held, Registers) or held.shape == shape:
            return super().registers(b, held, shape)
        memo: dict[Value, Value] = {}
        cells: dict[Cell, Value] = {}
        for cell in self.cells(shape):
            value = held.cells[self.collapsed(cell, held.shape)]
            if self.is_wide(shape) and not isinstance(value.type, Vec):
                if value not in memo:
                    memo[value] = b.op("broadcast", value, width=self.vector)
                value = memo[value]
            cells[cell] = value
        return Registers(shape, cells)

    def broadcast(self, b: Builder, op: Op) -> None:
        held, shape = self.env[op.operands[0]], shape_of(op.result)
        if isinstance(held, Registers) and self.is_wide(shape) and held.shape[self.axis] == 1:
            narrow = self._narrowed(shape)
            self.env[op.result] = Registers(
                narrow, {c: held.cells[self.collapsed(c, held.shape)] for c in self.cells(narrow)}
            )
            return
        super().broadcast(b, op)

    def symbolic(self, b: Builder, op: Op, held: Sequence[Held], result: Tile) -> Held | None:
        """Beside what is symbolic everywhere: quotients that are the same for a whole tile, and what is the same for a vector."""
        found = super().symbolic(b, op, held, result)
        if found is not None:
            return found
        if op.opcode in ("floordiv", "mul") and all(isinstance(h, RegisterIndex) for h in held):
            first, second = held
            assert isinstance(first, RegisterIndex) and isinstance(second, RegisterIndex)
            if not second.factors and self._stays(op, first, second):
                base = b.op(op.opcode, first.base, second.base)
                known = [self.divisors.get(h.base, 1) for h in (first, second)]
                self.divisors[base] = known[0] * known[1] if op.opcode == "mul" else 1
                return RegisterIndex(result.shape, base, {})
        if not self.is_wide(result.shape) or not all(self.is_narrow(h) for h in held):
            return None
        narrow = self._narrowed(result.shape)
        operands = [self.registers(b, self.seen_as(h, narrow), narrow) for h in held]
        return Registers(
            narrow, {c: b.emit(op.opcode, [o.cells[c] for o in operands], op.attrs)[0] for c in self.cells(narrow)}
        )

    def seen_as(self, held: Held, shape: Shape) -> Held:
        """The same, seen as a tile of another shape."""
        if isinstance(held, RegisterIndex):
            return RegisterIndex(shape, held.base, held.factors)
        return Mask(shape, held.edges, held.others) if isinstance(held, Mask) else held

    def _stays(self, op: Op, first: RegisterIndex, second: RegisterIndex) -> bool:
        """Whether `first * second`, or the quotient, is one number for the whole tile."""
        if not first.factors:
            return True
        if op.opcode == "mul" or min(first.factors.values()) < 0 or not self._is_size(op.operands[1]):
            return False
        reach = sum(factor * (first.shape[a] - 1) for a, factor in first.factors.items())
        return reach < gcd(self.divisors.get(first.base, 1), self.divisors.get(second.base, 1))

    def _is_size(self, value: Value) -> bool:
        """Whether a tile repeats the extent of an array or a constant, which are not negative."""
        op = self.source.made.get(value)
        while op is not None and op.opcode == "broadcast":
            op = self.source.made.get(op.operands[0])
        if op is None:
            return False
        number = op.attrs.get("value")
        return op.opcode == "size" or (op.opcode == "const" and isinstance(number, int) and number > 0)

    def whole_vectors(self, b: Builder, mask: Held, cell: Cell) -> bool:
        if isinstance(mask, Mask):
            return self.mask_is_uniform(b, mask, cell) and all(self.is_narrow(other) for other in mask.others)
        return self.is_narrow(mask)

    def condition(self, b: Builder, mask: Held | None, shape: Shape, cell: Cell, pieces: int) -> list[Value] | None:
        if not isinstance(mask, Mask | Registers) or not self.is_wide(shape) or not self.whole_vectors(b, mask, cell):
            return super().condition(b, mask, shape, cell, pieces)
        edges, others = (mask.edges, mask.others) if isinstance(mask, Mask) else ((), (mask,))
        parts = [b.op("lt", self.first(b, index, self.collapsed(cell, index.shape)), bound) for index, bound in edges]
        parts += [other.cells[self.collapsed(cell, other.shape)] for other in others]
        total = parts[0]
        for part in parts[1:]:
            total = b.logical_and(total, part)
        return [total] * pieces

    # -- global memory ------------------------------------------------------------------------------------------

    def load(self, b: Builder, op: Op) -> None:
        if op is not self.source.main:
            super().load(b, op)
            return
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        for index, stride in zip(op.operands[1 : 1 + memory.rank], memory.strides, strict=True):
            held = self.env[index]
            if stride == ONE and isinstance(held, RegisterIndex):
                axes = [a for a, factor in held.factors.items() if factor == 1]
                self.contiguous = axes[0] if len(held.factors) == 1 and axes else None
        self.widths.append(0)
        if self.asynchronous and op is self.source.load:
            self._copy(b, op, memory)
            return
        super().load(b, op)

    def plain_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int) -> Value:
        if self.widths and memory is (self.source.main.operands[0] if self.source.main else None):
            self.widths.append(width)
        return super().plain_load(b, memory, indices, width)

    def _copy(self, b: Builder, op: Op, memory: Tensor) -> None:
        """Start copying the thread's part of the tile."""
        held = [self.env[v] for v in op.operands[1 : 1 + memory.rank]]
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        shape = shape_of(op.results[0])
        ended = self._ended(b, mask) if isinstance(mask, Mask) else None
        for cell in self.cells(shape):
            ((indices, width),) = self.pieces_of(b, memory, held, shape, cell)
            conditions = self.condition(b, ended or mask, shape, cell, 1)
            wanted = [v for v in (None if ended else self.valid, conditions[0] if conditions else None) if v is not None]
            if len(wanted) == 2:
                wanted = [b.logical_and(*wanted)]
            bytes_ = width * memory.dtype.itemsize
            b.multi(
                "copy_async",
                self.ring.memory,
                self._place(b, cell),
                op.operands[0],
                *indices,
                *wanted,
                bytes=bytes_,
                masked=bool(wanted),
            )

    def _ended(self, b: Builder, mask: Mask) -> Mask | None:
        """The mask with nothing inside where there is no step to copy for: an edge along the sum moves, which is one condition less for each copy."""
        along = next((number for number, (index, _) in enumerate(mask.edges) if self.ring.along in index.factors), None)
        if along is None or self.valid is None:
            return None
        index, bound = mask.edges[along]
        moved = b.select(self.valid, bound, b.index(NOTHING))
        self.divisors[moved] = gcd(self.divisors.get(bound, 1), NOTHING)
        return Mask(mask.shape, (*mask.edges[:along], (index, moved), *mask.edges[along + 1 :]), mask.others)

    # -- shared memory ------------------------------------------------------------------------------------------

    def _place(self, b: Builder, cell: Cell) -> Value:
        """Where a cell's first element goes."""
        assert self.offset is not None
        start = self.ring.place(b, self.bases[1 - self.ring.along], self.bases[self.ring.along])
        fixed = self.ring.static(*(self.layout.offset(a, cell[a]) for a in (1 - self.ring.along, self.ring.along)))
        return b.add(b.add(self.offset, start), b.index(fixed))

    def put(self, b: Builder, held: Registers) -> None:
        """Write what `bring` gave to the stage at `offset`."""
        cells = {cell: b.cast(value, self.ring.dtype) for cell, value in held.cells.items()}
        if isinstance(self.layout, ThreadTile):
            self._put_across(b, cells)
            return
        for cell, value in cells.items():
            place = self._place(b, cell)
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

    def _put_across(self, b: Builder, cells: dict[Cell, Value]) -> None:
        """Patches that lie across: one vector of a patch's rows for each of its columns."""
        other = 1 - self.axis
        height = self.layout.vector[other]
        for cell in (c for c in cells if c[other] % height == 0):
            rows = [cells[_moved(cell, other, step)] for step in range(height)]
            place = self._place(b, cell)
            for lane in range(self.vector):
                column = [b.op("extract", row, lane=lane) if isinstance(row.type, Vec) else row for row in rows]
                b.multi(
                    "store",
                    self.ring.memory,
                    b.add(place, b.index(lane * self.ring.scale(self.axis))),
                    b.op("pack", *column),
                )


def _moved(cell: Cell, axis: int, step: int) -> Cell:
    return tuple(c + step if a == axis else c for a, c in enumerate(cell))


# -- choosing the layout ------------------------------------------------------------------------------------------------


def shared_layout(
    shape: Shape, axis: int, vector: int, threads: int, across: bool = False, height: int = 1
) -> Blocked | None:
    """The threads side by side along `axis`, in vectors; None where the tile is too small. `across`: what is read along the
    axis is written across it, so few lanes go along it and the rest to other banks; `height` rows are a thread's own then."""
    other = 1 - axis
    lanes, warps, vectors = [1, 1], [1, 1], [1, 1]
    vectors[axis], vectors[other] = vector, height
    lanes[axis] = min(_two_power(shape[axis] // vector), max(2, 8 // vector) if across else MMA_LANES)
    if not lanes[axis] or shape[other] < height:
        return None
    lanes[other] = min(MMA_LANES // lanes[axis], _two_power(shape[other] // height))
    lanes[axis] = MMA_LANES // lanes[other]
    count = threads // MMA_LANES
    warps[other] = min(count, max(1, _two_power(shape[other] // (height * lanes[other]))))
    warps[axis] = count // warps[other]
    kind = Blocked if height == 1 else ThreadTile if axis == 1 else TallTile
    layout = kind((vectors[0], vectors[1]), (lanes[0], lanes[1]), (warps[0], warps[1]))
    return layout if all(shape[a] % layout.span(a) == 0 for a in (0, 1)) else None


def _two_power(count: int) -> int:
    """The largest power of two that so many can be shared by."""
    return count & -count


def _tried(outer: TileLowering, source: OperandSource, layout: Blocked) -> OperandView:
    """A view that has been through one step, for what it found out. `outer` has computed what comes before the sum."""
    view = OperandView(outer, source, layout)
    scratch = Builder()
    view.coordinates(scratch)
    view.begin(scratch, outer)
    view.bring(scratch, source.step)
    return view


def contiguous_axis(outer: TileLowering, source: OperandSource, threads: int) -> int | None:
    """The axis of the tile along which its main load reads neighbours."""
    shape = shape_of(source.operand)
    for axis in (0, 1):
        layout = shared_layout(shape, axis, 1, threads)
        if layout is not None:
            return _tried(outer, source, layout).contiguous
    raise _too_small(shape, threads)


def make_view(
    outer: TileLowering, source: OperandSource, ring: Ring, threads: int, copy: str, contiguous: int | None
) -> OperandView:
    """The best way to fill the ring. `copy`: `threads` (through registers), `cp_async` (asynchronously even one element at a
    time), or anything else for what is best."""
    axis = contiguous if contiguous is not None else ring.inner
    size = dtype_of(source.main.results[0].type).itemsize if source.main is not None else ring.dtype.itemsize
    is_load = source.load is not None and source.load is source.main and dtype_of(source.operand.type) is ring.dtype
    may = "cp.async" in outer.target.features and is_load and copy != "threads"
    across = axis != ring.inner
    by_element = may and copy == "cp_async" and across
    # Bytes are turned in registers, four at a time.
    heights = (4, 1) if across and ring.dtype.itemsize == 1 else (1,)
    vector = max(1, WIDEST // size) if contiguous is not None and not by_element else 1
    while vector >= 1:
        for height in heights:
            layout = shared_layout(ring.shape, axis, vector, threads, across and not by_element, height)
            if layout is not None and (
                vector == 1 or all(w in (0, vector) for w in _tried(outer, source, layout).widths)
            ):
                asynchronous = may and vector * size in (4, 8, 16) and (by_element or not across)
                return OperandView(outer, source, layout, ring, asynchronous)
        vector //= 2
    raise _too_small(ring.shape, threads)


def _too_small(shape: Shape, threads: int) -> UserError:
    error = UserError.at("TW005", f"a tile of {shape[0]} x {shape[1]} is too small for {threads} threads")
    assert isinstance(error, UserError)
    return error
