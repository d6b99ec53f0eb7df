"""Tile stage -> thread stage, for tiles in blocked layouts: what one thread executes.

In: a tile-stage kernel whose tiles have `Blocked` layouts. Out: a thread-stage kernel. A tile becomes a set of registers
(cells), one short vector each along the vector axis. Index tiles stay symbolic (`base + factor * coordinate`), so a load
knows which elements follow one another and how they are aligned, and becomes 16-byte accesses where that is provable. A
reduction along an axis is done in registers, then by shuffles between lanes, then through shared memory between warps;
always in the same order. Values that many threads hold are stored by one of them.

    %v = load %x, %i : tile<f32, [1024]>      blocked([4], [32], [8])
    -> %t = thread_id …  %v = load %x, %first {width = 4} : vec<f32, 4>
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from types import MappingProxyType

from tilewright.analysis import divisors
from tilewright.base.errors import CompilerBug
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Blocked
from tilewright.ir.nodes import Attrs, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.types import Tensor, Tile, Vec, dtype_of
from tilewright.passes.one_meeting import Meeting, find_meeting
from tilewright.passes.registers import Cell, Held, Index, Mask, Registers, Shape, shape_of
from tilewright.passes.tile_reductions import TileReductions
from tilewright.passes.tile_symbols import TileSymbols

MANY = 8
"""Elements of a vector from which on it is worth a branch not to ask each of them whether it is inside."""


def lower_tiles(kernel: Kernel, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return TileLowering(kernel, target).run()


class TileLowering(TileSymbols, TileReductions):
    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.env: dict[Value, Held] = {p: p for p in kernel.params}
        self.exchanged = _exchanged(kernel) if target.is_gpu else set()
        self.depth = 0
        self.blocks = self.layout.blocks if isinstance(self.layout, Blocked) else 1
        """Blocks that share a tile."""
        found = find_meeting(kernel) if self.blocks > 1 else None
        self.meeting = Meeting(found, self, self.env) if found is not None else None
        self.shifted = any("aligned" in op.attrs for op in walk(kernel.body))
        """Edges cut through vectors that lie at multiples of their size nevertheless."""

    def run(self) -> Kernel:
        b = Builder(self.kernel.span)
        attrs = self.kernel.attrs
        if attrs.get("early") and "early" in self.target.features:
            b.multi("release_next")  # the next kernel comes in as the last blocks leave
            b.multi("wait_previous")
            attrs = MappingProxyType({**attrs, "dependent": True})
        self.coordinates(b)
        self.ops(b, self.kernel.body.ops)
        grid = self.kernel.grid
        if self.blocks > 1:
            self._leave_cluster(b)
            attrs = MappingProxyType({**attrs, "cluster": self.blocks})
            grid = (grid[0] * self.blocks, *grid[1:])
        return replace(self.kernel, stage=Stage.THREAD, body=Block((), tuple(b.ops)), attrs=attrs, grid=grid)

    def _leave_cluster(self, b: Builder) -> None:
        """Nobody leaves while others still read its memory. Who has read all it wants says so at once, not only when its results are stored."""
        reading = [place for place, op in enumerate(b.ops) if any(o.opcode == "load_remote" for o in (op, *(i for r in op.regions for i in walk(r))))]
        early = bool(reading) and b.ops[reading[-1]].opcode == "load_remote"
        if early:
            arrival = Builder(self.kernel.span)
            arrival.multi("cluster_arrive")
            b.ops[reading[-1] + 1 : reading[-1] + 1] = arrival.ops
        b.emit("cluster_sync", [], {"arrived": True} if early else {})

    # -- ops ----------------------------------------------------------------------------------------------------

    def ops(self, b: Builder, ops: Sequence[Op]) -> tuple[Held, ...]:
        for op in ops:
            with b.at(op.span):
                if op.opcode == "yield":
                    return tuple(self.env[v] for v in op.operands)
                self._op(b, op)
        return ()

    def _op(self, b: Builder, op: Op) -> None:
        if self.meeting is not None and self.meeting.lower(b, op):
            return
        special: dict[str, Callable[[Builder, Op], None]] = {
            "load": self.load, "store": self.store, "reduce_tile": self._reduce_tile, "for": self.for_, "if": self._if, "while": self._while,
            "iota": self._iota, "broadcast": self._broadcast, "item": self._item, "alloc": self._alloc,
            "program_id": self._program_id, "reshape": self._unsupported,
            "transpose": self._unsupported, "slice": self._unsupported, "dot": self.dot, "scan_tile": self._unsupported,
        }  # fmt: skip
        handler = special.get(op.opcode)
        if handler is not None:
            handler(b, op)
            return
        held = [self.env[v] for v in op.operands]
        result = op.results[0].type if op.results else None
        if not isinstance(result, Tile):
            results = b.emit(op.opcode, [v for v in held if isinstance(v, Value)], op.attrs, _name(op))
            self._remember(op, results)
            return
        symbolic = self._symbolic(b, op, held, result)
        if symbolic is not None:
            self.env[op.results[0]] = symbolic
            return
        if op.opcode == "select" and isinstance(held[0], Mask) and self._may_be_cut(held[0]):
            self._cut_select(b, op, held[0], held[1:])
            return
        if self.meeting is not None and op in self.meeting.found.quotients:
            assert self.meeting.local is not None
            held = [held[0], Registers(result.shape, dict.fromkeys(self.cells(result.shape), b.op("broadcast", self.meeting.local, width=self.vector)))]
        operands = [self.registers(b, h, shape_of(v)) for h, v in zip(held, op.operands, strict=True)]
        cells: dict[Cell, Value] = {}
        memo: dict[tuple[Value, ...], Value] = {}
        for cell in self.cells(result.shape):
            inputs = tuple(o.cells[cell] for o in operands)
            if inputs not in memo:
                memo[inputs] = b.emit(op.opcode, inputs, op.attrs)[0]
            cells[cell] = memo[inputs]
        self.env[op.results[0]] = Registers(result.shape, cells)

    def _remember(self, op: Op, results: Sequence[Value]) -> None:
        for old, new in zip(op.results, results, strict=True):
            self.env[old] = new
            if old in self.divisors:
                self.divisors[new] = self.divisors[old]
            value = op.attrs.get("value")
            if op.opcode == "const" and isinstance(value, int):
                self.constants[new] = value

    def _program_id(self, b: Builder, op: Op) -> None:
        """The number of the block, or of its cluster."""
        (number,) = b.emit(op.opcode, (), op.attrs, _name(op))
        if self.blocks > 1 and op.attrs.get("axis", 0) == 0:
            number = b.op("shr", number, b.index(self.blocks.bit_length() - 1))
        self._remember(op, [number])

    def dot(self, b: Builder, op: Op) -> None:
        """Matrix instructions are for lowerings of their own."""
        self._unsupported(b, op)

    def _alloc(self, b: Builder, op: Op) -> None:
        """Memory has no layout: accesses go on naming it."""
        b.append(op)
        self.env[op.result] = op.result

    def _unsupported(self, b: Builder, op: Op) -> None:
        raise CompilerBug.at("TW040", f"lower_tiles: no lowering for {op.opcode} in a blocked layout", op.span)

    # -- memory -------------------------------------------------------------------------------------------------

    def _access(
        self, b: Builder, memory: Tensor, indices: Sequence[Held], shape: Shape, cell: Cell, aligned: int
    ) -> tuple[list[Value], int, list[list[Value]]]:
        """For one cell: the first element's indices, how many elements one access may take (0: elements are not
        neighbours and each has indices of its own, given last). `aligned`: every so many elements of the tile begin a vector."""
        first: list[Value] = []
        stride, divisor, affine = 0, 0, True
        known = True
        for held, size in zip(indices, memory.strides, strict=True):
            if isinstance(held, Registers):
                own_value = held.cells[self.collapsed(cell, held.shape)]
                affine = affine and not isinstance(own_value.type, Vec)
                divisor = gcd(divisor, divisors.of_size(size, self.kernel.facts))
                first.append(own_value)
                continue
            assert isinstance(held, Index | Value)
            value = self.first(b, held, self.collapsed(cell, held.shape) if isinstance(held, Index) else cell)
            first.append(value)
            factor = held.factors.get(self.axis, 0) if isinstance(held, Index) else 0
            if factor:
                step = size.constant
                known = known and step is not None
                stride += factor * (step or 0)
            divisor = gcd(divisor, self.divisors.get(value, 1) * divisors.of_size(size, self.kernel.facts))
        divisor = aligned or divisor
        if not self.is_wide(shape):
            return first, 1, []
        if affine and known and stride == 1:
            if not self.target.is_gpu:
                return first, self.vector, []  # CPUs load vectors from any address
            width = self.vector
            align = memory.align or memory.dtype.itemsize
            while width > 1 and (
                width * memory.dtype.itemsize > 16 or divisor % width or align % (width * memory.dtype.itemsize)
            ):
                width //= 2
            return first, width, []
        elements: list[list[Value]] = []
        for lane in range(self.vector):
            own: list[Value] = []
            for held, value in zip(indices, first, strict=True):
                factor = held.factors.get(self.axis, 0) if isinstance(held, Index) else 0
                if isinstance(value.type, Vec):
                    value = b.op("extract", value, lane=lane)
                elif factor and lane:
                    value = b.add(value, b.index(factor * lane))
                own.append(value)
            elements.append(own)
        return first, 0, elements

    def pieces_of(
        self, b: Builder, memory: Tensor, indices: Sequence[Held], shape: Shape, cell: Cell, aligned: int = 0
    ) -> list[tuple[list[Value], int]]:
        """The accesses that make up one cell: indices and width of each."""
        first, width, elements = self._access(b, memory, indices, shape, cell, aligned)
        if elements:
            return [(own, 1) for own in elements]
        if not self.is_wide(shape):
            return [(first, 1)]
        walking = next(
            d for d, held in enumerate(indices) if isinstance(held, Index) and held.factors.get(self.axis, 0)
        )
        step = memory.strides[walking].constant
        pieces: list[tuple[list[Value], int]] = []
        for start in range(0, self.vector, width):
            own = list(first)
            if start:
                assert step
                own[walking] = b.add(first[walking], b.index(start // step))
            pieces.append((own, width))
        return pieces

    def _condition(self, b: Builder, mask: Held | None, shape: Shape, cell: Cell, pieces: int) -> list[Value] | None:
        """The scalar condition of each piece, or None when there is none."""
        if mask is None:
            return None
        if isinstance(mask, Value):
            return [mask] * pieces
        if not self.is_wide(shape):
            return [self.registers(b, mask, shape).cells[cell] if isinstance(mask, Registers) else self.mask_cell(b, mask, cell)] * pieces  # type: ignore[arg-type]
        if isinstance(mask, Mask) and self._mask_is_uniform(b, mask, cell):
            total: Value | None = None
            for index, bound in mask.edges:
                inside = b.op("lt", self.first(b, index, self.collapsed(cell, index.shape)), bound)
                total = inside if total is None else b.logical_and(total, inside)
            for other in mask.others:
                inside = other.cells[self.collapsed(cell, other.shape)]
                total = inside if total is None else b.logical_and(total, inside)
            assert total is not None
            return [total] * pieces
        assert isinstance(mask, Mask | Registers)
        width = self.vector // pieces
        if self.shifted and isinstance(mask, Mask):
            lanes = self._lanes_inside(b, mask, cell)
        else:
            wide = self.mask_cell(b, mask, cell) if isinstance(mask, Mask) else mask.cells[cell]
            lanes = [b.op("extract", wide, lane=lane) for lane in range(self.vector)]
        if width == 1:
            return lanes
        return [b.logical_and(lanes[p * width], lanes[p * width + width - 1]) for p in range(pieces)]

    def mask_cell(self, b: Builder, mask: Mask, cell: Cell) -> Value:
        """One comparison for a whole vector, where the edge does not cut through it."""
        if self.shifted and self.is_wide(mask.shape):
            return b.op("pack", *self._lanes_inside(b, mask, cell))
        if not self.target.is_gpu or not self.is_wide(mask.shape) or not self._mask_is_uniform(b, mask, cell):
            return super().mask_cell(b, mask, cell)
        conditions = self._condition(b, mask, mask.shape, cell, 1)
        assert conditions is not None
        return b.op("broadcast", conditions[0], width=self.vector)

    def _lanes_inside(self, b: Builder, mask: Mask, cell: Cell) -> list[Value]:
        """Which elements of a vector are inside: scalars, so that ranges prove them one by one."""
        conditions: list[list[Value]] = []
        for index, bound in mask.edges:
            room = b.sub(bound, self.first(b, index, self.collapsed(cell, index.shape)))
            factor = index.factors.get(self.axis, 0)
            conditions.append([b.op("lt", b.index(factor * lane), room) for lane in range(self.vector)])
        for other in mask.others:
            value = other.cells[self.collapsed(cell, other.shape)]
            wide = isinstance(value.type, Vec)
            conditions.append([b.op("extract", value, lane=lane) if wide else value for lane in range(self.vector)])
        lanes = conditions[0]
        for more in conditions[1:]:
            lanes = [b.logical_and(a, c) for a, c in zip(lanes, more, strict=True)]
        return lanes

    def _whole(self, b: Builder, mask: Mask, cell: Cell) -> Value:
        """Whether all elements of a vector are inside; edges need be asked of its ends only."""
        lanes = self._lanes_inside(b, mask, cell)
        asked = lanes if any(other.shape[self.axis] > 1 for other in mask.others) else (lanes[0], lanes[-1])
        total = asked[0]
        for lane in asked[1:]:
            total = b.logical_and(total, lane)
        return total

    def _may_be_cut(self, mask: Mask) -> bool:
        """Whether rows begin anywhere, so that their first and last vectors may be cut, and are of many elements."""
        return self.shifted and self.vector >= MANY and self.is_wide(mask.shape) and not mask.others

    def _cut_select(self, b: Builder, op: Op, mask: Mask, choices: Sequence[Held]) -> None:
        """Element by element only in the few threads that hold an end of a row."""
        first, second = (self.registers(b, held, shape_of(v)) for held, v in zip(choices, op.operands[1:], strict=True))
        cells: dict[Cell, Value] = {}
        for cell in self.cells(mask.shape):
            inside, outside = first.cells[cell], second.cells[cell]

            def each(inner: Builder, cell: Cell = cell, inside: Value = inside, outside: Value = outside) -> list[Value]:
                return [inner.select(inner.op("pack", *self._lanes_inside(inner, mask, cell)), inside, outside)]

            (cells[cell],) = b.if_(self._whole(b, mask, cell), lambda inner, inside=inside: [inside], each)
        self.env[op.results[0]] = Registers(mask.shape, cells)

    def _mask_is_uniform(self, b: Builder, mask: Mask, cell: Cell) -> bool:
        """Whether each vector lies wholly inside or wholly outside."""
        if any(other.shape[self.axis] > 1 for other in mask.others):
            return False
        for index, bound in mask.edges:
            if not index.factors.get(self.axis, 0):
                continue
            first = self.divisors.get(index.base, 1)
            if index.factors[self.axis] != 1 or first % self.vector or self.divisors.get(bound, 1) % self.vector:
                return False
            if any(a != self.axis for a in index.factors):
                return False
        return True

    def load(self, b: Builder, op: Op) -> None:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        rank = memory.type.rank
        held = [self.env[v] for v in op.operands[1 : 1 + rank]]
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        aligned = _aligned(op)
        result = op.result.type
        if memory in self.exchanged:
            b.multi("barrier")  # another thread may have written it
        if not isinstance(result, Tile):
            if mask is None:
                self.env[op.result] = b.op("load", memory, *(v for v in held if isinstance(v, Value)))
            else:
                assert isinstance(mask, Value)
                self.env[op.result] = self._guarded_load(b, memory, [v for v in held if isinstance(v, Value)], 1, mask)
            return
        cells: dict[Cell, Value] = {}
        cut: list[tuple[Cell, Value, list[tuple[list[Value], int]]]] = []
        for cell in self.cells(result.shape):
            pieces = self.pieces_of(b, memory.type, held, result.shape, cell, aligned)
            if aligned and isinstance(mask, Mask) and len(pieces) < self.vector:
                whole = self._whole(b, mask, cell)
                together = [b.op("load", memory, *indices, whole, width=width, masked=True) for indices, width in pieces]
                cells[cell] = self.concatenated(b, together)
                cut.append((cell, whole, pieces))
                continue
            one_each = mask is not None and len(pieces) < self.vector and not self._whole_vectors(b, mask, cell)
            if one_each and self.is_wide(result.shape):
                pieces = self.singles(b, memory.type, held, pieces)
            conditions = self._condition(b, mask, result.shape, cell, len(pieces))
            parts: list[Value] = []
            for position, (indices, width) in enumerate(pieces):
                if conditions is None:
                    parts.append(self.plain_load(b, memory, indices, width))
                else:
                    parts.append(self._guarded_load(b, memory, indices, width, conditions[position]))
            cells[cell] = self.concatenated(b, parts)
        for cell, whole, pieces in cut:
            assert isinstance(mask, Mask)
            cells[cell] = self._with_singles(b, memory, held, pieces, (mask, cell), (whole, cells[cell]))
        self.env[op.result] = Registers(result.shape, cells)

    def _with_singles(
        self, b: Builder, memory: Value, held: Sequence[Held], pieces: list[tuple[list[Value], int]], where: tuple[Mask, Cell],
        together: tuple[Value, Value],
    ) -> Value:  # fmt: skip
        """A vector loaded at once where all of it is inside, else its elements one by one. That many elements have a branch, behind all the loads
        of vectors, for nothing moves past it."""
        whole, vector = together
        tensor = memory.type
        assert isinstance(tensor, Tensor)

        def alone(inner: Builder, cut: Value | None = None) -> list[Value]:
            lanes = self._lanes_inside(inner, *where)
            lanes = lanes if cut is None else [inner.logical_and(cut, lane) for lane in lanes]
            singles = self.singles(inner, tensor, held, pieces)
            loaded = [inner.op("load", memory, *indices, lane, masked=True) for (indices, _), lane in zip(singles, lanes, strict=True)]
            return [inner.op("pack", *loaded)]

        if self.vector >= MANY:
            return b.if_(whole, lambda inner: [vector], alone)[0]
        return b.select(b.op("broadcast", whole, width=self.vector), vector, alone(b, b.op("not", whole))[0])

    def _whole_vectors(self, b: Builder, mask: Held, cell: Cell) -> bool:
        if isinstance(mask, Value):
            return True
        return isinstance(mask, Mask) and self._mask_is_uniform(b, mask, cell)

    def singles(
        self, b: Builder, memory: Tensor, indices: Sequence[Held], pieces: list[tuple[list[Value], int]]
    ) -> list[tuple[list[Value], int]]:
        """Cut accesses into single elements, for masks that cut through vectors."""
        walking = next(
            d for d, held in enumerate(indices) if isinstance(held, Index) and held.factors.get(self.axis, 0)
        )
        step = memory.strides[walking].constant or 1
        singles: list[tuple[list[Value], int]] = []
        for own, width in pieces:
            for lane in range(width):
                each = list(own)
                if lane:
                    each[walking] = b.add(own[walking], b.index(lane // step))
                singles.append((each, 1))
        return singles

    def plain_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int) -> Value:
        if width == 1:
            return b.op("load", memory, *indices)
        if self.target.is_gpu:
            return b.op("load", memory, *indices, width=width)
        return b.op("load", memory, *indices, width=width, unaligned=True)

    def _plain_store(self, b: Builder, memory: Value, indices: Sequence[Value], value: Value) -> Sequence[Value]:
        if isinstance(value.type, Vec) and not self.target.is_gpu:
            return b.multi("store", memory, *indices, value, unaligned=True)
        return b.multi("store", memory, *indices, value)

    def _guarded_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int, cond: Value) -> Value:
        def zero(inner: Builder) -> list[Value]:
            scalar = inner.const(0, dtype_of(memory.type))
            return [inner.op("broadcast", scalar, width=width) if width > 1 else scalar]

        assert isinstance(memory.type, Tensor)
        if self.shifted and memory.type.space == "global" and width == 1:
            return b.op("load", memory, *indices, cond, masked=True)  # no branch between what is read before and after
        return b.if_(cond, lambda inner: [self.plain_load(inner, memory, indices, width)], zero)[0]

    def concatenated(self, b: Builder, parts: Sequence[Value]) -> Value:
        if len(parts) == 1:
            return parts[0]
        singles: list[Value] = []
        for part in parts:
            if isinstance(part.type, Vec):
                singles += [b.op("extract", part, lane=lane) for lane in range(part.type.width)]
            else:
                singles.append(part)
        return b.op("pack", *singles)

    def store(self, b: Builder, op: Op) -> None:
        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        rank = memory.type.rank
        held = [self.env[v] for v in op.operands[1 : 1 + rank]]
        value = self.env[op.operands[1 + rank]]
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        shape = shape_of(op.operands[1 + rank])
        if memory in self.exchanged:
            b.multi("barrier")  # another thread may still read what was there
        if not shape:
            operands = [v for v in (*held, value) if isinstance(v, Value)]
            if self.kernel.threads == 1 and mask is None:
                b.multi("store", memory, *operands)
                return
            only = b.op("eq", self.thread, b.index(0))
            if isinstance(mask, Value):
                only = b.logical_and(only, mask)
            b.if_(only, lambda inner: inner.multi("store", memory, *operands), lambda inner: [])
            return
        registers, aligned = self.registers(b, value, shape), _aligned(op)

        def everything(inner: Builder) -> list[Value]:
            cells = self.cells(shape)
            if aligned:
                cells = [*cells[1:-1], cells[0], *cells[1:][-1:]]  # edges have branches: what comes before them has not to wait
            for cell in cells:
                self._store_cell(inner, memory, held, shape, cell, registers.cells[cell], mask, aligned)
            return []

        owner = self._owner(b, shape)
        if owner is None:
            everything(b)
        else:
            b.if_(owner, everything, lambda inner: [])

    def _owner(self, b: Builder, shape: Shape) -> Value | None:
        """Whether this thread is the one that stores, where several hold the same elements."""
        total: Value | None = None
        for a, extent in enumerate(shape):
            if extent == 1 and self.layout.lanes[a] * self.layout.warps[a] > 1:
                mine = b.op("eq", self.bases[a], b.index(0))
                total = mine if total is None else b.logical_and(total, mine)
        return total

    def _store_cell(
        self, b: Builder, memory: Value, held: Sequence[Held], shape: Shape, cell: Cell, value: Value, mask: Held | None,
        aligned: int,
    ) -> None:  # fmt: skip
        tensor = memory.type
        assert isinstance(tensor, Tensor)
        pieces = self.pieces_of(b, tensor, held, shape, cell, aligned)
        if aligned and isinstance(mask, Mask) and len(pieces) < self.vector:

            def alone(inner: Builder) -> list[Value]:
                lanes = self._lanes_inside(inner, mask, cell)
                self._store_pieces(inner, memory, self.singles(inner, tensor, held, pieces), value, lanes)
                return []

            def together(inner: Builder) -> list[Value]:
                self._store_pieces(inner, memory, pieces, value, None)
                return []

            b.if_(self._whole(b, mask, cell), together, alone)
            return
        if mask is not None and len(pieces) < self.vector and self.is_wide(shape) and not self._whole_vectors(b, mask, cell):
            pieces = self.singles(b, tensor, held, pieces)
        self._store_pieces(b, memory, pieces, value, self._condition(b, mask, shape, cell, len(pieces)))

    def _store_pieces(
        self, b: Builder, memory: Value, pieces: list[tuple[list[Value], int]], value: Value, conditions: Sequence[Value] | None
    ) -> None:
        position = 0
        for number, (indices, width) in enumerate(pieces):
            if isinstance(value.type, Vec) and width != value.type.width:
                lanes = [b.op("extract", value, lane=position + lane) for lane in range(width)]
                part = lanes[0] if width == 1 else b.op("pack", *lanes)
            else:
                part = value
            position += width
            if conditions is None:
                self._plain_store(b, memory, indices, part)
            else:
                b.if_(
                    conditions[number],
                    lambda inner, i=indices, p=part: self._plain_store(inner, memory, i, p),
                    lambda inner: [],
                )

    # -- control flow -------------------------------------------------------------------------------------------

    def flat(self, b: Builder, values: Sequence[Value], helds: Sequence[Held]) -> list[Value]:
        flat: list[Value] = []
        for value, held in zip(values, helds, strict=True):
            shape = shape_of(value)
            flat += self.registers(b, held, shape).cells.values() if shape else [held]  # type: ignore[list-item]
        return flat

    def bind(self, values: Sequence[Value], flat: Sequence[Value]) -> None:
        remaining = list(flat)
        for value in values:
            if isinstance(value.type, Tile):
                cells = self.cells(value.type.shape)
                self.env[value] = Registers(value.type.shape, dict(zip(cells, remaining[: len(cells)], strict=True)))
                del remaining[: len(cells)]
            else:
                self.env[value] = remaining.pop(0)

    def for_(self, b: Builder, op: Op) -> None:
        low, high, step = (self.env[v] for v in op.operands[:3])
        assert isinstance(low, Value) and isinstance(high, Value) and isinstance(step, Value)
        initial = self.flat(b, op.operands[3:], [self.env[v] for v in op.operands[3:]])
        region = op.regions[0]

        def body(inner: Builder, index: Value, *carried: Value) -> list[Value]:
            self.env[region.args[0]] = index
            if region.args[0] in self.divisors:
                self.divisors[index] = self.divisors[region.args[0]]
            self.bind(region.args[1:], carried)
            self.depth += 1
            yielded = self.ops(inner, region.ops)
            self.depth -= 1
            return self.flat(inner, region.yields, yielded)

        attrs: Attrs = {k: v for k, v in op.attrs.items() if k in ("unroll", "stages")}
        self.bind(op.results, b.for_(low, high, step, initial, body, name=region.args[0].name, **attrs))

    def _while(self, b: Builder, op: Op) -> None:
        initial = self.flat(b, op.operands, [self.env[v] for v in op.operands])
        types, names = [v.type for v in initial], [v.name for v in initial]

        def part(region: Block) -> Callable[..., list[Value]]:
            def build(inner: Builder, *carried: Value) -> list[Value]:
                self.bind(region.args, carried)
                self.depth += 1
                yielded = self.ops(inner, region.ops)
                self.depth -= 1
                return self.flat(inner, region.yields, yielded)

            return build

        regions = tuple(b.region(types, names, part(region)) for region in op.regions)
        results = tuple(Value(t, n) for t, n in zip(types, names, strict=True))
        self.bind(op.results, b.append(Op("while", tuple(initial), results, regions=regions, span=op.span)))

    def _if(self, b: Builder, op: Op) -> None:
        cond = self.env[op.operands[0]]
        assert isinstance(cond, Value)
        then, otherwise = (
            lambda inner, r=region: self.flat(inner, r.yields, self.ops(inner, r.ops))
            for region in op.regions
        )
        self.bind(op.results, b.if_(cond, then, otherwise))


def _exchanged(kernel: Kernel) -> set[Value]:
    """Arrays the kernel both writes and reads, at places that are not plainly the same: elements may change threads."""
    loads: dict[Value, set[tuple[Value, ...]]] = {}
    stores: dict[Value, set[tuple[Value, ...]]] = {}
    for op in walk(kernel.body):
        if op.opcode in ("load", "store"):
            memory = op.operands[0]
            assert isinstance(memory.type, Tensor)
            (loads if op.opcode == "load" else stores).setdefault(memory, set()).add(op.operands[1 : 1 + memory.type.rank])
    return {m for m in loads.keys() & stores.keys() if len(loads[m] | stores[m]) > 1}


def _aligned(op: Op) -> int:
    """Every how many elements of an access a vector begins, where something else than its indices says so; else 0."""
    found = op.attrs.get("aligned", 0)
    assert isinstance(found, int)
    return found


def _name(op: Op) -> str:
    return op.results[0].name if op.results else ""
