"""Packed weights on their way to matrix instructions: threads read some bytes of a block, unpack them, and write elements to shared memory.

In: the tile-stage ops that make the operand's tile, arithmetic on bytes of packed blocks. Out: thread-stage ops that fill one stage of the ring. Of
those ops only the indices are kept: which row and which place along the row the tile begins at. A thread has the bytes of a few neighbours, and what
they share (`unpack_weights.counts`): all are loaded when the step is brought, and unpacked when it is put.

    bring: %q = load %w, row, block, place … {8 bytes}, scales     put: 16 elements, two stores of 16 bytes to ring[stage][row * pitch + place]

A step is whole runs of the block's first digit, or whole blocks. Rows and steps behind the end read the last one: what is computed of these rows is never
stored, and what steps behind the end are multiplied with is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as combinations
from math import prod

from tilewright.base.dtypes import by_name
from tilewright.base.errors import CompilerBug
from tilewright.ir.build import Builder
from tilewright.ir.layouts import Blocked
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor, Tile
from tilewright.passes.common.registers import RegisterIndex, Registers
from tilewright.passes.packed.elements import element_at, hidden_zero, radices
from tilewright.passes.packed.unpack_weights import counts, weights_of
from tilewright.passes.to_thread.lower_tiles import TileLowering
from tilewright.passes.to_thread.stage_operand import OperandSource, OperandView, Ring

REGISTERS = 12
"""That a unit's bytes and scales take, about."""


class PackedOperand(OperandView):
    """The threads of the block as they share units of a tile of packed weights."""

    def __init__(self, outer: TileLowering, source: OperandSource, ring: Ring, threads: int) -> None:
        super().__init__(outer, source, Blocked((1, 1), (1, 32), (threads // 32, 1)), ring)
        self.outer, self.threads = outer, threads
        ops = [*source.fixed, *source.changing]
        element = next((op for op in reversed(ops) if "packed" in op.attrs), None)
        loads = [op for op in ops if op.opcode == "load" and isinstance(op.operands[0].type, Tensor) and op.operands[0].type.dtype.name == "u8"]
        if element is None or not loads:
            raise CompilerBug.at("TW040", "lower_mma: no packed weights", outer.kernel.span)
        self.format = by_name(str(element.attrs["packed"]))
        self.memory = loads[0].operands[0]
        assert isinstance(self.memory.type, Tensor)
        *lead, block, _ = loads[0].operands[1 : 1 + self.memory.type.rank]
        self.lead = tuple(lead)
        self.index = self._divided(block)
        self.step = ring.shape[ring.along]
        self.rows = ring.shape[1 - ring.along]
        self.fixed = self._needed(source.fixed, source.changing)
        self.changing = self._needed(source.changing, ())
        self.waiting: list[tuple[list[Op], list[tuple[Value, Sequence[Value]]]]] = []
        """What `put` does: ops, and runs of elements with the places they go to."""

    def _divided(self, block: Value) -> Value:
        """The index along the row, of which the block is the quotient."""
        op = self.source.made.get(block)
        while op is not None and op.opcode in ("broadcast", "cast"):
            op = self.source.made.get(op.operands[0])
        if op is None or op.opcode not in ("floordiv", "shr"):
            raise CompilerBug.at("TW040", "lower_mma: the block of packed weights is no quotient", self.kernel.span)
        return op.operands[0]

    def _needed(self, ops: Sequence[Op], later: Sequence[Op]) -> list[Op]:
        """The ops that the indices of the tile are made of."""
        wanted = {*self.lead, self.index}
        for op in reversed((*ops, *later)):
            if any(r in wanted for r in op.results):
                wanted.update(op.operands)
        return [op for op in ops if any(r in wanted for r in op.results)]

    @property
    def cost(self) -> int:
        return REGISTERS * max(1, self.units // self.threads)

    # -- who has which unit ---------------------------------------------------------------------------------------

    @property
    def in_step(self) -> list[int]:
        """Groups along each digit that a row has in one step, blocks before them."""
        digits, own, weights = radices(self.format), counts(self.format), weights_of(self.format)
        first = min(digits[0], self.step // weights[0]) // own[0]
        return [max(1, self.step // self.format.block), first, *(d // c for d, c in zip(digits[1:], own[1:], strict=True))]

    @property
    def units(self) -> int:
        return self.rows * prod(self.in_step)

    def coordinates(self, b: Builder) -> None:
        """Indices begin where the tile does: units are counted from there."""
        super().coordinates(b)
        self.bases = [b.index(0), b.index(0)]

    def begin(self, b: Builder, outer: TileLowering) -> None:
        self.env = {v: h for v, h in outer.env.items() if isinstance(h, Value)}
        self.ops(b, self.fixed)
        self.nothing = hidden_zero(b, self.memory)

    def _origin(self, value: Value) -> tuple[Value, int]:
        """The first of a tile of indices, and the step along its rows."""
        held = self.env[value]
        if isinstance(held, RegisterIndex):
            return held.base, held.factors.get(1 - self.ring.along, 0)
        if isinstance(held, Value) and not isinstance(value.type, Tile):
            return held, 0
        raise CompilerBug.at("TW040", "lower_mma: packed weights are not read row by row", self.kernel.span)

    # -- one step -------------------------------------------------------------------------------------------------

    def bring(self, b: Builder, k: Value) -> Registers | None:
        self.env[self.source.step] = k
        self.divisors[k] = self.step
        self.ops(b, self.changing)
        tensor, format_ = self.memory.type, self.format
        assert isinstance(tensor, Tensor) and self.offset is not None
        last = b.sub(b.mul(b.index(tensor.shape[-2]), b.index(format_.block)), b.index(self.step))
        start = b.op("min", self._origin(self.index)[0], last)
        first_block = b.op("floordiv", start, b.index(format_.block))
        first_place = b.op("mod", start, b.index(format_.block)) if format_.block > self.step else b.index(0)
        self.waiting = []
        for number in range(-(-self.units // self.threads)):
            unit = b.add(self.outer.thread, b.index(number * self.threads)) if number else self.outer.thread
            if self.units < self.threads:
                unit = b.op("mod", unit, b.index(self.units))  # some write the same as others
            self._unit(b, unit, first_block, first_place)
        return Registers(self.ring.shape, {})

    def _unit(self, b: Builder, unit: Value, first_block: Value, first_place: Value) -> None:
        format_, shape = self.format, self.in_step
        own, weights = counts(format_), weights_of(format_)
        tensor = self.memory.type
        assert isinstance(tensor, Tensor)
        size = prod(shape)
        row, rest = b.op("floordiv", unit, b.index(size)), b.op("mod", unit, b.index(size))
        groups: list[Value] = []
        for count in shape:
            size //= count
            groups.append(b.op("floordiv", rest, b.index(size)) if count > 1 else b.index(0))
            rest = b.op("mod", rest, b.index(size)) if count > 1 and size > 1 else rest
        jump, *groups = groups
        lead: list[Value] = []
        for value, extent in zip(self.lead, tensor.shape[:-2], strict=True):
            origin, factor = self._origin(value)
            own_row = b.add(origin, b.mul(row, b.index(factor))) if factor else origin
            lead.append(b.op("min", own_row, b.sub(b.index(extent), b.index(1))) if factor else own_row)
        block = b.add(first_block, jump) if shape[0] > 1 else first_block
        base = [b.mul(group, b.index(count)) if count > 1 else group for group, count in zip(groups, own, strict=True)]
        in_row = b.mul(jump, b.index(format_.block)) if shape[0] > 1 else b.index(0)
        for value, weight in zip(base, weights, strict=True):
            in_row = b.add(in_row, b.mul(value, b.index(weight)) if weight > 1 else value)
        base[0] = b.add(base[0], b.op("floordiv", first_place, b.index(weights[0])))
        place = b.add(self.offset, b.add(b.mul(row, b.index(self.ring.pitch)), in_row)) if self.offset is not None else row
        apart = Builder(b.span)
        found: dict[int, Value] = {}
        for places in combinations(*map(range, own)):
            at = [apart.add(value, apart.index(step)) if step else value for value, step in zip(base, places, strict=True)]
            offset = sum(step * weight for step, weight in zip(places, weights, strict=True))
            found[offset] = element_at(apart, self.memory, lead, block, at, format_, self.nothing)
        early = _before_loads(apart.ops)
        for op in early:
            b.append(op)
        known = set(map(id, early))
        later = [op for op in apart.ops if id(op) not in known]
        self.waiting.append((later, _runs(b, place, found, 16 // self.ring.dtype.itemsize)))

    def put(self, b: Builder, held: Registers) -> None:
        for ops, runs in self.waiting:
            for op in ops:
                b.append(op)
            for place, values in runs:
                b.multi("store", self.ring.memory, place, b.cast(b.op("pack", *values), self.ring.dtype))


def _before_loads(ops: Sequence[Op]) -> list[Op]:
    """The loads, and what their indices are made of."""
    wanted: set[Value] = set()
    found: list[Op] = []
    for op in reversed(ops):
        if op.opcode == "load" or any(r in wanted for r in op.results):
            wanted.update(op.operands)
            found.append(op)
    return found[::-1]


def _runs(b: Builder, place: Value, found: dict[int, Value], width: int) -> list[tuple[Value, Sequence[Value]]]:
    """Elements that are neighbours, with where the first goes."""
    runs: list[tuple[Value, Sequence[Value]]] = []
    offsets = sorted(found)
    for first in range(0, len(offsets), width):
        own = offsets[first : first + width]
        assert own[-1] - own[0] == len(own) - 1
        runs.append((b.add(place, b.index(own[0])) if own[0] else place, [found[o] for o in own]))
    return runs
