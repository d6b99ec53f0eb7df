"""Tile stage -> thread stage, for tiles in blocked layouts: what one thread executes.

In: a tile-stage kernel whose tiles have `Blocked` layouts. Out: a thread-stage kernel. A tile becomes a set of registers
(cells), one short vector each along the vector axis. Index tiles stay symbolic (`base + factor * coordinate`), so a load
knows which elements follow one another and how they are aligned, and becomes 16-byte accesses where that is provable.
Reductions are `tile_reductions`'. Values that many threads hold are stored by one of them.

    %v = load %x, %i : tile<f32, [1024]>      blocked([4], [32], [8])
    -> %t = thread_id …  %v = load %x, %first {width = 4} : vec<f32, 4>
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.base.dtypes import DType, u16
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import ONE
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Blocked
from tilewright.ir.nodes import Attrs, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.types import Tensor, Tile, Vec, dtype_of
from tilewright.passes.common.registers import (
    Cell,
    Held,
    Mask,
    RegisterIndex,
    Registers,
    SameInVector,
    Shape,
    ThreadView,
    shape_of,
)
from tilewright.passes.to_thread.access_pieces import Piece, pieces_of, singles
from tilewright.passes.to_thread.masked_vectors import all_inside, lanes_inside, lanes_of
from tilewright.passes.to_thread.symbolic_tiles import broadcast, symbolic

if TYPE_CHECKING:
    from tilewright.passes.to_thread.cluster_softmax import ClusterMeeting
    from tilewright.passes.to_thread.tile_reductions import TileReductions
    from tilewright.passes.to_thread.warp_scatters import Scattered

MANY = 8
"""Elements of a vector from which on it is worth a branch not to ask each of them whether it is inside."""


def lower_tiles(kernel: Kernel, target: Target) -> Kernel:
    """The thread-stage kernel."""
    return TileLowering(kernel, target).run()


class TileLowering(ThreadView):
    """The ops of a kernel, one after the other, as one thread executes them. Lowerings of matrix products and of windows have one, or are one
    that does some ops in another way: what has no underscore is theirs to call and to replace."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        super().__init__(kernel, target)
        self.env: dict[Value, Held] = {p: p for p in kernel.params}
        self.exchanged = _exchanged(kernel) if target.simt else set()
        self.depth = 0
        """Loops around the op at hand."""
        self.window: tuple[range, range] | None = None
        """The registers, along both axes, that are computed now, where a lowering takes some after the others."""
        self.blocks = self.layout.blocks if isinstance(self.layout, Blocked) else 1
        """Blocks that share a tile."""
        self.meeting = self._meeting() if self.blocks > 1 else None
        self.predicated = bool(kernel.attrs.keys() & {"placed", "rows_in_turn"}) and target.kind == "nvptx"
        """Loads and stores under a condition have no branch: what many of them have in common is computed once."""

    @functools.cached_property
    def reductions(self) -> TileReductions:
        from tilewright.passes.to_thread.tile_reductions import TileReductions

        return TileReductions(self)

    def _meeting(self) -> ClusterMeeting | None:
        """Where the blocks that share a tile meet."""
        from tilewright.passes.to_thread.cluster_softmax import ClusterMeeting, find_meeting

        meeting = find_meeting(self.kernel)
        return ClusterMeeting(meeting, self.reductions, self.env) if meeting is not None else None

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
                self.lower_op(b, op)
        return ()

    def lower_op(self, b: Builder, op: Op) -> None:
        if self.meeting is not None and self.meeting.lower(b, op):
            return
        special: dict[str, Callable[[Builder, Op], None]] = {
            "load": self.load, "store": self.store, "accumulate": self.accumulate, "reduce_tile": self.reduce_tile, "for": self.for_, "if": self.if_, "while": self._while,
            "print": self._check, "assert": self._check, "iota": self._iota, "broadcast": self.broadcast, "item": self._item, "alloc": self._alloc,
            "program_id": self.program_id, "report": self._check, "inside": self._check, "reshape": self._unsupported,
            "transpose": self._unsupported, "slice": self._unsupported, "dot": self.dot, "scan_tile": self._scan_tile,
        }  # fmt: skip
        handler = special.get(op.opcode)
        if handler is not None:
            handler(b, op)
            return
        held = [self.env[v] for v in op.operands]
        result = op.results[0].type if op.results else None
        if not isinstance(result, Tile):
            results = b.emit(op.opcode, [v for v in held if isinstance(v, Value)], op.attrs, _name(op))
            self.remember(op, results)
            return
        symbolic = self.symbolic(b, op, held, result)
        if symbolic is not None:
            self.env[op.results[0]] = symbolic
            return
        if op.opcode == "select" and isinstance(held[0], Mask) and self._may_be_cut(held[0]):
            self._cut_select(b, op, held[0], held[1:])
            return
        divisor = self.meeting.divisor(op) if self.meeting is not None else None
        if divisor is not None:
            held = [held[0], Registers(result.shape, dict.fromkeys(self.cells(result.shape), b.op("broadcast", divisor, width=self.vector)))]
        operands = [self.registers(b, h, shape_of(v)) for h, v in zip(held, op.operands, strict=True)]
        cells: dict[Cell, Value] = {}
        memo: dict[tuple[Value, ...], Value] = {}
        for cell in self.cells(result.shape):
            inputs = tuple(o.cells[cell] for o in operands)
            if inputs not in memo:
                memo[inputs] = b.emit(op.opcode, inputs, op.attrs)[0]
            cells[cell] = memo[inputs]
        self.env[op.results[0]] = Registers(result.shape, cells)

    def remember(self, op: Op, results: Sequence[Value]) -> None:
        for old, new in zip(op.results, results, strict=True):
            self.env[old] = new
            if old in self.divisors:
                self.divisors[new] = self.divisors[old]
            value = op.attrs.get("value")
            if op.opcode == "const" and isinstance(value, int):
                self.constants[new] = value

    def program_id(self, b: Builder, op: Op) -> None:
        """The number of the block, or of its cluster."""
        (number,) = b.emit(op.opcode, (), op.attrs, _name(op))
        if self.blocks > 1 and op.attrs.get("axis", 0) == 0:
            number = b.op("shr", number, b.index(self.blocks.bit_length() - 1))
        self.remember(op, [number])

    def _check(self, b: Builder, op: Op) -> None:
        """What a kernel says and checks as it runs."""
        from tilewright.passes.to_thread import checks

        if op.opcode == "inside":
            self.env[op.result] = checks.lower_inside(self, self.env, b, op)
            return
        lowerings = {"print": checks.lower_print, "assert": checks.lower_assert, "report": checks.lower_report}
        lowerings[op.opcode](self, self.env, b, op)

    def dot(self, b: Builder, op: Op) -> None:
        """Matrix instructions are for lowerings of their own."""
        self._unsupported(b, op)

    def _alloc(self, b: Builder, op: Op) -> None:
        """Memory has no layout: accesses go on naming it."""
        b.append(op)
        self.env[op.result] = op.result

    def _unsupported(self, b: Builder, op: Op) -> None:
        raise CompilerBug.at("TW040", f"lower_tiles: no lowering for {op.opcode} in a blocked layout", op.span)

    def reduce_tile(self, b: Builder, op: Op) -> None:
        shape = shape_of(op.operands[0])
        sources = [self.registers(b, self.env[v], shape) for v in op.operands]
        self.env.update(zip(op.results, self.reductions.reduce(b, op, sources, in_loop=self.depth > 0), strict=True))

    def _scan_tile(self, b: Builder, op: Op) -> None:
        from tilewright.passes.to_thread.tile_scans import TileScans

        terms, first = (self.registers(b, self.env[v], shape_of(v)) for v in op.operands)
        self.env.update(zip(op.results, TileScans(self).scan(b, op, terms, first, in_loop=self.depth > 0), strict=True))

    def cells(self, shape: Shape) -> list[Cell]:
        every = super().cells(shape)
        if self.window is None:
            return every
        return [c for c in every if all(e == 1 or x in w for x, e, w in zip(c, shape, self.window, strict=True))]

    # -- tiles that stay formulas as long as nobody needs their numbers -------------------------------------------

    def symbolic(self, b: Builder, op: Op, held: Sequence[Held], result: Tile) -> Held | None:
        """Index arithmetic and edge masks that need not be computed yet."""
        return symbolic(self, b, op, held, result)

    def _iota(self, b: Builder, op: Op) -> None:
        axis = op.attrs["axis"]
        assert isinstance(axis, int)
        zero = b.index(0)
        self.constants[zero] = 0
        self.divisors[zero] = 0
        self.env[op.result] = RegisterIndex(shape_of(op.result), zero, {axis: 1})

    def broadcast(self, b: Builder, op: Op) -> None:
        self.env[op.result] = broadcast(self, b, self.env[op.operands[0]], op.result)

    def _item(self, b: Builder, op: Op) -> None:
        held = self.registers(b, self.env[op.operands[0]], shape_of(op.operands[0]))
        (only,) = held.cells.values()
        self.env[op.result] = only

    # -- memory -------------------------------------------------------------------------------------------------

    def pieces_of(
        self, b: Builder, memory: Tensor, indices: Sequence[Held], shape: Shape, cell: Cell, aligned: int = 0
    ) -> list[Piece]:
        """The accesses that make up one cell: indices and width of each."""
        return pieces_of(self, b, memory, indices, shape, cell, aligned)

    def condition(self, b: Builder, mask: Held | None, shape: Shape, cell: Cell, pieces: int) -> list[Value] | None:
        """The scalar condition of each piece, or None when there is none."""
        if mask is None:
            return None
        if isinstance(mask, Value):
            return [mask] * pieces
        if not self.is_wide(shape):
            return [self.registers(b, mask, shape).cells[cell] if isinstance(mask, Registers) else self.mask_cell(b, mask, cell)] * pieces  # type: ignore[arg-type]
        if isinstance(mask, Mask) and self.mask_is_uniform(b, mask, cell):
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
            lanes = lanes_inside(self, b, mask, cell)
        else:
            wide = self.mask_cell(b, mask, cell) if isinstance(mask, Mask) else mask.cells[cell]
            lanes = [b.op("extract", wide, lane=lane) for lane in range(self.vector)]
        if width == 1:
            return lanes
        return [b.logical_and(lanes[p * width], lanes[p * width + width - 1]) for p in range(pieces)]

    def mask_cell(self, b: Builder, mask: Mask, cell: Cell) -> Value:
        """One comparison for a whole vector, where the edge does not cut through it."""
        if self.shifted and self.is_wide(mask.shape):
            return b.op("pack", *lanes_inside(self, b, mask, cell))
        if not self.target.simt or not self.is_wide(mask.shape) or not self.mask_is_uniform(b, mask, cell):
            return super().mask_cell(b, mask, cell)
        conditions = self.condition(b, mask, mask.shape, cell, 1)
        assert conditions is not None
        return b.op("broadcast", conditions[0], width=self.vector)

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
                return [inner.select(inner.op("pack", *lanes_inside(self, inner, mask, cell)), inside, outside)]

            (cells[cell],) = b.if_(all_inside(self, b, mask, cell), lambda inner, inside=inside: [inside], each)
        self.env[op.results[0]] = Registers(mask.shape, cells)

    def mask_is_uniform(self, b: Builder, mask: Mask, cell: Cell) -> bool:
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
                self.env[op.result] = self.guarded_load(b, memory, [v for v in held if isinstance(v, Value)], 1, mask)
            return
        if self.kernel.attrs.get("turned") == "elements" and not self.depth:
            from tilewright.passes.to_thread.turned_loads import load_turned

            turned = load_turned(self, b, memory, held, result.shape, mask, lambda where, inside: self._element(b, memory, where, inside))
            if turned is not None:
                self.env[op.result] = turned
                return
        cells: dict[Cell, Value] = {}
        cut: list[tuple[Cell, Value, list[Piece]]] = []
        once = self._same_for_vectors(held, result.shape)
        for cell in self.cells(result.shape):
            apart = None if op.attrs.get("apart") else self._every_second(b, memory, held, result.shape, cell, mask)
            if apart is not None:
                cells[cell] = apart
                continue
            pieces = self.pieces_of(b, memory.type, held, result.shape, cell, aligned)
            if once and (mask is None or self.whole_vectors(b, mask, cell)):
                conditions = self.condition(b, mask, result.shape, cell, 1)
                first = pieces[0][0]
                number = self.plain_load(b, memory, first, 1) if conditions is None else self.guarded_load(b, memory, first, 1, conditions[0])
                cells[cell] = b.op("broadcast", number, width=self.vector)
                continue
            if aligned and isinstance(mask, Mask) and len(pieces) < self.vector:
                whole = all_inside(self, b, mask, cell)
                together = [b.op("load", memory, *indices, whole, width=width, masked=True) for indices, width in pieces]
                cells[cell] = self.concatenated(b, together)
                cut.append((cell, whole, pieces))
                continue
            if mask is not None and self._takes_lanes(b, memory.type, held, pieces, mask, cell):
                cells[cell] = b.op("load_lanes", memory, *pieces[0][0], lanes_of(self, b, mask, cell))
                continue
            one_each = mask is not None and len(pieces) < self.vector and not self.whole_vectors(b, mask, cell)
            if one_each and self.is_wide(result.shape):
                pieces = self.singles(b, memory.type, held, pieces)
            conditions = self.condition(b, mask, result.shape, cell, len(pieces))
            parts: list[Value] = []
            for position, (indices, width) in enumerate(pieces):
                if conditions is None:
                    parts.append(self._load_apart(b, memory, indices, width) if op.attrs.get("apart") else self.plain_load(b, memory, indices, width))
                else:
                    parts.append(self.guarded_load(b, memory, indices, width, conditions[position]))
            cells[cell] = self.concatenated(b, parts)
        for cell, whole, pieces in cut:
            assert isinstance(mask, Mask)
            cells[cell] = self._with_singles(b, memory, held, pieces, (mask, cell), (whole, cells[cell]))
        self.env[op.result] = Registers(result.shape, cells)

    def _every_second(self, b: Builder, memory: Value, indices: Sequence[Held], shape: Shape, cell: Cell, mask: Held | None) -> Value | None:
        """CPU: elements that are two or three apart, as vectors."""
        if self.target.simt or not any(isinstance(held, RegisterIndex) and held.factors.get(self.axis, 0) in (2, 3) for held in indices):
            return None
        from tilewright.passes.to_thread.strided_loads import load_every_second

        return load_every_second(self, b, memory, indices, shape, cell, mask, self.plain_load)

    def _element(self, b: Builder, memory: Value, indices: Sequence[Value], inside: Value | None) -> Value:
        """One element, which is read only where it is inside."""
        return self.plain_load(b, memory, indices, 1) if inside is None else self.guarded_load(b, memory, indices, 1, inside)

    def _same_for_vectors(self, indices: Sequence[Held], shape: Shape) -> bool:
        """Whether all elements of a thread's vector are at the same place, which a quotient of their index says."""
        if not self.is_wide(shape) or not any(isinstance(held, SameInVector) for held in indices):
            return False
        return all(isinstance(held, Value | SameInVector) or (isinstance(held, RegisterIndex) and not held.factors.get(self.axis, 0)) for held in indices)

    def _with_singles(
        self, b: Builder, memory: Value, held: Sequence[Held], pieces: list[Piece], where: tuple[Mask, Cell],
        together: tuple[Value, Value],
    ) -> Value:  # fmt: skip
        """A vector loaded at once where all of it is inside, else its elements one by one. That many elements have a branch, behind all the loads
        of vectors, for nothing moves past it."""
        whole, vector = together
        tensor = memory.type
        assert isinstance(tensor, Tensor)

        def alone(inner: Builder, cut: Value | None = None) -> list[Value]:
            lanes = lanes_inside(self, inner, *where)
            lanes = lanes if cut is None else [inner.logical_and(cut, lane) for lane in lanes]
            singles = self.singles(inner, tensor, held, pieces)
            loaded = [inner.op("load", memory, *indices, lane, masked=True) for (indices, _), lane in zip(singles, lanes, strict=True)]
            return [inner.op("pack", *loaded)]

        if self.vector >= MANY:
            return b.if_(whole, lambda inner: [vector], alone)[0]
        return b.select(b.op("broadcast", whole, width=self.vector), vector, alone(b, b.op("not", whole))[0])

    def whole_vectors(self, b: Builder, mask: Held, cell: Cell) -> bool:
        if isinstance(mask, Value):
            return True
        return isinstance(mask, Mask) and self.mask_is_uniform(b, mask, cell)

    def _takes_lanes(self, b: Builder, memory: Tensor, indices: Sequence[Held], pieces: Sequence[Piece], mask: Held, cell: Cell) -> bool:
        """Whether one instruction accesses those elements of a vector that a mask names. They follow one another along the last axis."""
        if not self.target.has_lane_masks or len(pieces) != 1 or pieces[0][1] != self.vector or self.vector == 1:
            return False
        if not isinstance(mask, Mask | Registers) or not self.is_wide(mask.shape) or self.whole_vectors(b, mask, cell):
            return False
        *outer, last = indices
        along = isinstance(last, RegisterIndex) and last.factors.get(self.axis, 0) == 1 and memory.strides[-1] == ONE
        return along and not any(isinstance(held, RegisterIndex) and held.factors.get(self.axis, 0) for held in outer)

    def singles(self, b: Builder, memory: Tensor, indices: Sequence[Held], pieces: Sequence[Piece]) -> list[Piece]:
        """Cut accesses into single elements, for masks that cut through vectors."""
        return singles(self, b, memory, indices, pieces)

    def plain_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int) -> Value:
        if width == 1:
            return b.op("load", memory, *indices)
        if self.target.simt:
            return b.op("load", memory, *indices, width=width)
        return b.op("load", memory, *indices, width=width, unaligned=True)

    def _load_apart(self, b: Builder, memory: Value, indices: Sequence[Value], width: int) -> Value:
        """A load on a CPU that is not joined with others of the same elements."""
        if width == 1:
            return b.op("load", memory, *indices, apart=True)
        return b.op("load", memory, *indices, apart=True, width=width, unaligned=True)

    def _plain_store(self, b: Builder, memory: Value, indices: Sequence[Value], value: Value) -> Sequence[Value]:
        if isinstance(value.type, Vec) and not self.target.simt:
            return b.multi("store", memory, *indices, value, unaligned=True)
        return b.multi("store", memory, *indices, value)

    def guarded_load(self, b: Builder, memory: Value, indices: Sequence[Value], width: int, cond: Value) -> Value:
        def zero(inner: Builder) -> list[Value]:
            scalar = inner.const(0, dtype_of(memory.type))
            return [inner.op("broadcast", scalar, width=width) if width > 1 else scalar]

        assert isinstance(memory.type, Tensor)
        if (self.shifted or self.predicated) and memory.type.space == "global" and (width == 1 or "rows_in_turn" in self.kernel.attrs):
            if width > 1:
                return b.op("load", memory, *indices, cond, width=width, masked=True)
            return b.op("load", memory, *indices, cond, masked=True)  # no branch between what is read before and after
        if self._are_words(memory.type.dtype):
            # As integers: a short float that a branch gives is a number that LLVM widens and rounds again, with a function of its own.
            words = b.if_(
                cond, lambda inner: [inner.op("bitcast", self.plain_load(inner, memory, indices, width), dtype=u16)],
                lambda inner: [inner.op("bitcast", zero(inner)[0], dtype=u16)],
            )  # fmt: skip
            return b.op("bitcast", words[0], dtype=memory.type.dtype)
        return b.if_(cond, lambda inner: [self.plain_load(inner, memory, indices, width)], zero)[0]

    def _are_words(self, dtype: DType) -> bool:
        """Whether elements are moved as integers: short floats on a CPU."""
        return not self.target.simt and dtype.is_float and dtype.itemsize == 2

    def concatenated(self, b: Builder, parts: Sequence[Value]) -> Value:
        if len(parts) == 1:
            return parts[0]
        singles: list[Value] = []
        for part in parts:
            if isinstance(part.type, Vec):
                singles += [b.op("extract", part, lane=lane) for lane in range(part.type.width)]
            else:
                singles.append(part)
        dtype = dtype_of(singles[0].type)
        if self._are_words(dtype):
            return b.op("bitcast", b.op("pack", *(b.op("bitcast", v, dtype=u16) for v in singles)), dtype=dtype)
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
        registers, aligned, checked = self.registers(b, value, shape), _aligned(op), bool(op.attrs.get("checked"))
        if mask is None and not self.target.simt and len(shape) == 2:
            from tilewright.passes.to_thread.turned_stores import store_turned

            if store_turned(self, b, memory, held, shape, registers):
                return

        def everything(inner: Builder) -> list[Value]:
            cells = self.cells(shape)
            if aligned:
                cells = [*cells[1:-1], cells[0], *cells[1:][-1:]]  # edges have branches: what comes before them has not to wait
            for cell in cells:
                self._store_cell(inner, memory, held, shape, cell, registers.cells[cell], mask, aligned, checked)
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
        aligned: int, checked: bool,
    ) -> None:  # fmt: skip
        tensor = memory.type
        assert isinstance(tensor, Tensor)
        pieces = self.pieces_of(b, tensor, held, shape, cell, aligned)
        if aligned and isinstance(mask, Mask) and len(pieces) < self.vector:

            def alone(inner: Builder) -> list[Value]:
                lanes = lanes_inside(self, inner, mask, cell)
                self.store_pieces(inner, memory, self.singles(inner, tensor, held, pieces), value, lanes)
                return []

            def together(inner: Builder) -> list[Value]:
                self.store_pieces(inner, memory, pieces, value, None)
                return []

            b.if_(all_inside(self, b, mask, cell), together, alone)
            return
        if mask is not None and self._takes_lanes(b, tensor, held, pieces, mask, cell):
            b.multi("store_lanes", memory, *pieces[0][0], value, lanes_of(self, b, mask, cell))
            return
        cut = mask is not None and len(pieces) < self.vector and self.is_wide(shape) and not self.whole_vectors(b, mask, cell)
        singles = self.singles(b, tensor, held, pieces) if cut else pieces
        conditions = self.condition(b, mask, shape, cell, len(singles))
        if not (checked and cut):
            self.store_pieces(b, memory, singles, value, conditions)
            return
        # What is checked is nearly always inside: then vectors are written as such.
        assert conditions is not None
        b.if_(
            functools.reduce(b.logical_and, conditions),
            lambda inner: self.store_pieces(inner, memory, pieces, value, None),
            lambda inner: self.store_pieces(inner, memory, singles, value, conditions),
        )

    def store_pieces(
        self, b: Builder, memory: Value, pieces: list[Piece], value: Value, conditions: Sequence[Value] | None
    ) -> list[Value]:
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
            elif self.predicated:
                b.multi("store", memory, *indices, part, conditions[number], masked=True)
            else:
                b.if_(
                    conditions[number],
                    lambda inner, i=indices, p=part: self._plain_store(inner, memory, i, p),
                    lambda inner: [],
                )
        return []

    def accumulate(self, b: Builder, op: Op) -> None:
        """Each thread combines the elements that it holds, one by one; those that many threads hold are one thread's."""
        from tilewright.passes.common.accumulate import combine_alone, combine_atomic
        from tilewright.passes.to_thread.warp_scatters import KINDS, Scattered, WarpScatter, scatter_each

        memory = op.operands[0]
        assert isinstance(memory.type, Tensor)
        tensor, rank, kind, alone = memory.type, memory.type.rank, str(op.attrs["kind"]), bool(op.attrs.get("alone"))
        held = [self.env[v] for v in op.operands[1 : 1 + rank]]
        value = self.env[op.operands[1 + rank]]
        mask = self.env[op.operands[-1]] if op.attrs.get("masked") else None
        shape = shape_of(op.operands[1 + rank])

        def one(inner: Builder, indices: Sequence[Value], part: Value) -> list[Value]:
            if alone:
                combine_alone(inner, memory, indices, part, kind, part.type.width if isinstance(part.type, Vec) else 1)
            else:
                combine_atomic(inner, memory, indices, part, kind, "block" if tensor.space == "shared" else "device")
            return []

        def everything(inner: Builder) -> list[Value]:
            if not shape:
                assert isinstance(value, Value)
                return one(inner, [v for v in held if isinstance(v, Value)], value)
            registers, cells = self.registers(inner, value, shape), list[list[Scattered]]()
            for cell in self.cells(shape):
                pieces = self.pieces_of(inner, tensor, held, shape, cell) if held else [([], 1)] * (self.vector if self.is_wide(shape) else 1)
                if len(pieces) < self.vector and self.is_wide(shape) and (mask is not None or not alone):
                    pieces = self.singles(inner, tensor, held, pieces)
                cells.append(self._pieces(inner, pieces, registers.cells[cell], self.condition(inner, mask, shape, cell, len(pieces))))
            whole = self.kernel.threads % self.target.warp_size == 0  # lanes that a small block lacks have nothing to hand on
            if owner is None and not alone and kind in KINDS and whole and self._may_meet(held, shape):
                WarpScatter(cells, kind, self.lane, self.target.warp_size, one).run(inner)
                return []
            return scatter_each(inner, [element for cell in cells for element in cell], one)

        owner = self._owner(b, shape) if shape else None
        if self.kernel.threads > 1 and not shape:
            owner = b.op("eq", self.thread, b.index(0))
        if isinstance(mask, Value) and not shape:
            owner = mask if owner is None else b.logical_and(owner, mask)
        if owner is None:
            everything(b)
        else:
            b.if_(owner, everything, lambda inner: [])

    def _pieces(self, b: Builder, pieces: list[Piece], value: Value, conditions: Sequence[Value] | None) -> list[Scattered]:
        """What a thread combines, by the places it goes to."""
        from tilewright.passes.to_thread.warp_scatters import Scattered

        elements, position = list[Scattered](), 0
        for number, (indices, width) in enumerate(pieces):
            part = value
            if isinstance(value.type, Vec) and width != value.type.width:
                part = b.op("extract", value, lane=position)
            position += width
            elements.append(Scattered(tuple(indices), part, None if conditions is None else conditions[number]))
        return elements

    def _may_meet(self, held: Sequence[Held], shape: Shape) -> bool:
        """Whether all elements of a warp could go to one place: no index grows along a tile."""
        return not any(isinstance(index, RegisterIndex) and any(shape[axis] > 1 for axis in index.factors) for index in held)

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

    def if_(self, b: Builder, op: Op) -> None:
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
