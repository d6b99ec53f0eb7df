"""Packed rows on their way through shared memory: what `lower_row_dots` copies ahead of the steps that read it.

In: the loop over steps of a tile-stage kernel, and how threads hold its tiles. Out: ops of the thread stage. Blocks of 34 or 18 bytes begin anywhere, so lanes that
read them from memory ask for two bytes at a time, and few of these at once lie in one line. Here each warp copies its own part of its rows, which lies in one
piece, 16 bytes a lane (8 or 4 where rows begin there), some steps ahead; what lanes then read of it comes from shared memory. Warps do not wait for each other.

    ring[warp, stage, row of the warp, bytes of a step]
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tilewright.analysis import divisors
from tilewright.base.record import record
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.types import Tensor, Tile
from tilewright.passes.common.registers import Cell, RegisterIndex, ThreadView, shape_of

WIDEST = 16
"""Bytes of one copy."""


@record(identity=True)
class Copied:
    """A tensor whose rows are copied: which index walks rows, and what a warp copies in a step."""

    memory: Value
    lead: tuple[RegisterIndex | Value, ...]
    row: int
    """Which of the leading indices walks the rows."""
    axis: int
    """The axis of tiles along which rows lie."""
    units: int
    """Of a block."""
    rows: int
    """Rows of a warp."""
    pieces: int
    """Parts of a row that a warp copies in a step, each in one piece."""
    chunk: int
    """Bytes of one copy."""
    chunks: int
    """Copies for a row."""
    pitch: int
    """Elements from one row to the next."""


def chunk_of(memory: Tensor, facts: Kernel, units: int, lanes: int, vectors: int, warps_k: int) -> int:
    """Bytes that a warp can copy at once of rows whose blocks have so many units; 0 where rows begin anywhere."""
    if lanes % units:
        return 0
    pieces = 1 if warps_k == 1 else vectors
    size = memory.dtype.itemsize
    piece = lanes * vectors // pieces // units * (memory.shape[-1].constant or 1) * size
    found = gcd(WIDEST, piece, memory.align or size)
    for stride in memory.strides[:-2]:
        found = gcd(found, divisors.of_size(stride, facts.facts) * size)
    return found if found >= 4 else 0


class StagedRows:
    """The rings of a loop, and the copies that fill them."""

    def __init__(self, view: ThreadView, stages: int, copied: Sequence[Copied]) -> None:
        self.view, self.stages, self.copied = view, stages, copied
        self.rings: dict[Value, Value] = {}
        self.slot: Value | None = None

    def begin(self, b: Builder) -> None:
        """Shared memory, and where this thread copies from and to: the same in every step but for the block."""
        view = self.view
        warps = view.kernel.threads // 32
        warp = b.op("shr", view.thread, b.index(5))
        self.places: dict[Value, list[tuple[list[Value], Value, Value, Value, Value | None]]] = {}
        for one in self.copied:
            memory = one.memory.type
            assert isinstance(memory, Tensor)
            size, words = memory.dtype.itemsize, memory.shape[-1].constant or 1
            stage = one.rows * one.pitch
            self.rings[one.memory] = b.op("alloc", dtype=memory.dtype, shape=(warps * self.stages * stage,), space="shared", align=16)
            lanes_n, warps_n = view.layout.lanes[one.axis], view.layout.warps[one.axis]
            lanes_k, warps_k = view.layout.lanes[-1], view.layout.warps[-1]
            total = one.rows * one.chunks
            found: list[tuple[list[Value], Value, Value, Value, Value | None]] = []
            for number in range(-(-total // 32)):
                place = b.add(view.lane, b.index(32 * number)) if number else view.lane
                row, chunk = _divided(b, place, one.chunks)
                register, lane = _divided(b, row, lanes_n)
                coordinate = b.add(b.mul(b.add(b.mul(register, b.index(warps_n)), view.warp_digits[one.axis]), b.index(lanes_n)), lane)
                indices: list[Value] = []
                for position, held in enumerate(one.lead):
                    base = held.base if isinstance(held, RegisterIndex) else held
                    if position == one.row:
                        assert isinstance(held, RegisterIndex)
                        base = b.add(base, b.mul(coordinate, b.index(held.factors[one.axis])))
                    indices.append(base)
                piece, inner = _divided(b, chunk, one.chunks // one.pieces)
                element = b.mul(inner, b.index(one.chunk // size))
                block, word = _divided(b, element, words)
                units = b.mul(b.add(b.mul(piece, b.index(warps_k)), view.warp_digits[-1]), b.index(lanes_k // one.units))
                to = b.add(b.add(b.mul(warp, b.index(self.stages * stage)), b.mul(row, b.index(one.pitch))), b.mul(chunk, b.index(one.chunk // size)))
                inside = b.op("lt", place, b.index(total)) if 32 * (number + 1) > total else None
                found.append((indices, b.add(block, units), word, to, inside))
            self.places[one.memory] = found
            self.own = b.mul(warp, b.index(self.stages * stage))
        self.warp = warp

    def copy(self, b: Builder, step: Value, high: Value, slot: Value) -> None:
        """Start copying a step, if there is one, to that slot; one group in any case."""

        def body(inner: Builder) -> list[Value]:
            for one in self.copied:
                memory = one.memory.type
                assert isinstance(memory, Tensor)
                first = inner.op("floordiv", step, inner.index(one.units))
                at = inner.mul(slot, inner.index(one.rows * one.pitch))
                for indices, block, word, to, inside in self.places[one.memory]:
                    operands = (self.rings[one.memory], inner.add(to, at), one.memory, *indices, inner.add(first, block), word)
                    if inside is None:
                        inner.multi("copy_async", *operands, bytes=one.chunk)
                    else:
                        inner.if_(inside, lambda most, own=operands, size=one.chunk: _copy(most, own, size), lambda most: [])
            return []

        b.if_(b.op("lt", step, high), body, lambda inner: [])
        b.multi("copy_commit")

    def load(self, b: Builder, op: Op, one: Copied, cell: Cell, place: Value) -> Value:
        """The word that a lane reads of a cell, from the ring."""
        view, memory = self.view, one.memory.type
        assert isinstance(memory, Tensor) and isinstance(op.result.type, Tile) and self.slot is not None
        words = memory.shape[-1].constant or 1
        lanes_n, lanes_k = view.layout.lanes[one.axis], view.layout.lanes[-1]
        stage = one.rows * one.pitch
        own = b.add(b.mul(self.warp, b.index(self.stages * stage)), b.mul(self.slot, b.index(stage)))
        own = b.add(own, b.mul(view.lane_digits[one.axis], b.index(one.pitch))) if lanes_n > 1 else own
        own = b.add(own, b.mul(b.op("floordiv", view.lane_digits[-1], b.index(one.units)), b.index(words)))
        fixed = cell[one.axis] * lanes_n * one.pitch + cell[-1] * (lanes_k // one.units) * words
        own = b.add(b.add(own, place), b.index(fixed))
        return b.op("load", self.rings[one.memory], own)


def _copy(b: Builder, operands: Sequence[Value], size: int) -> list[Value]:
    b.multi("copy_async", *operands, bytes=size)
    return []


def _divided(b: Builder, value: Value, number: int) -> tuple[Value, Value]:
    if number == 1:
        return value, b.index(0)
    return b.op("floordiv", value, b.index(number)), b.op("mod", value, b.index(number))


def copied_tensors(view: ThreadView, loop: Op, rows: dict[str, int], env: dict[Value, object]) -> list[Copied]:
    """The tensors whose rows a loop walks unmasked, each with all loads alike; none where something cannot be copied."""
    found: dict[Value, Copied] = {}
    for op in loop.regions[0].ops:
        memory = op.operands[0] if op.opcode == "load" else None
        if memory is None or memory.name not in rows or not isinstance(memory.type, Tensor):
            continue
        shape = shape_of(op.result)
        lead = tuple(env.get(v) for v in op.operands[1 : memory.type.rank - 1])
        if op.attrs.get("masked") or not shape or not all(isinstance(v, RegisterIndex | Value) for v in lead):
            return []
        walking = [(p, v) for p, v in enumerate(lead) if isinstance(v, RegisterIndex) and v.factors]
        if len(walking) != 1 or len(walking[0][1].factors) != 1:
            return []
        ((position, index),) = walking
        (axis,) = index.factors
        units, lanes = rows[memory.name], view.layout.lanes[-1]
        registers = view.layout.registers(_rows_shape(view, loop, memory, axis))
        vectors, warps_k = registers[-1], view.layout.warps[-1]
        chunk = chunk_of(memory.type, view.kernel, units, lanes, vectors, warps_k)
        if not chunk or memory in found:
            if not chunk:
                return []
            continue
        size, words = memory.type.dtype.itemsize, memory.type.shape[-1].constant or 1
        chunks = vectors * lanes // units * words * size // chunk
        pitch = chunks * chunk
        if view.layout.lanes[axis] > 1 and pitch // 16 % 2 == 0:
            pitch += 16  # lanes of different rows read from different banks
        pitch = -(-pitch // 16) * 16
        found[memory] = Copied(
            memory, lead, position, axis, units, registers[axis] * view.layout.lanes[axis], 1 if warps_k == 1 else vectors, chunk, chunks, pitch // size  # type: ignore[arg-type]
        )
    return list(found.values())


def _rows_shape(view: ThreadView, loop: Op, memory: Value, axis: int) -> tuple[int, ...]:
    """The largest extents of the tiles that are loaded of a tensor."""
    shapes = [shape_of(op.result) for op in loop.regions[0].ops if op.opcode == "load" and op.operands[0] is memory]
    return tuple(max(extents) for extents in zip(*shapes, strict=True))
