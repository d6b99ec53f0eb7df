"""Elements that lie side by side and belong to several vectors are read and written in whole vectors. In and out: a kernel at the thread stage.

Vectors that take every second, third or fourth element of an array are lists of single loads and stores. Where several of them begin next to each other, such as the
real and the imaginary parts of complex numbers, all that lies between their ends is read once, and lanes are sorted out of it; stores of neighbours become one where
they fill what they cover. Loads move up to the first of their group and stores down to the last, past nothing that touches their array in between.

    %0 = load %x, %j, 0   %1 = load %x, (%j + 1), 0   …  %a = pack %0, %1, …        %v = load %x, %j, 0 {width = 16}
    %8 = load %x, %j, 1   %9 = load %x, (%j + 1), 1   …  %b = pack %8, %9, …   ->   %a = rearrange %v {lanes = (0, 2, …)}   %b = rearrange %v {lanes = (1, 3, …)}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import replace_values, use_counts
from tilewright.ir.types import Scalar, Tensor, Vec, dtype_of

MOST = 4
"""Elements between two of a vector, at most."""
_SMALLEST = 4
"""Lanes of a register, and of a vector, from which on sorting pays."""
_READ = frozenset({"load", "load_lanes", "gather"})
_TOUCH = _READ | {"store", "accumulate", "atomic", "atomic_load", "atomic_store", "store_lanes", "scatter"}
Terms = tuple[tuple[object, ...], ...]
Place = tuple[Terms, int]
"""What a place is the sum of, and a constant."""


@record
class Strided:
    """A vector whose elements lie `stride` apart, from `start` on."""

    memory: Value
    terms: Terms
    start: int
    stride: int
    width: int
    ops: tuple[Op, ...]
    """Its loads or stores, by lane."""
    vector: Value
    """What is packed, or what is stored: a single number where that is the same in all lanes."""


def interleave(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with whole vectors for interleaved ones."""
    if not any(op.opcode in ("pack", "extract") for op in walk(kernel.body)):
        return kernel
    return replace(kernel, body=_Interleaving(kernel, target.vector_bytes // _SMALLEST).block(kernel.body))


class _Interleaving:
    def __init__(self, kernel: Kernel, widest: int) -> None:
        self.widest = widest
        """Bytes of an element."""
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.order = {value: number for number, value in enumerate((*kernel.params, *self.made))}
        self.uses = use_counts(kernel.body)
        self.written = {op.operands[0] for op in walk(kernel.body) if op.opcode in _TOUCH - _READ}
        self.places: dict[Value, tuple[Mapping[Value, int], int]] = {}

    # -- places -----------------------------------------------------------------------------------------------------

    def index(self, value: Value) -> tuple[Mapping[Value, int], int]:
        """An index as multiples of values, and a constant."""
        if value not in self.places:
            self.places[value] = self._index(value)
        return self.places[value]

    def _index(self, value: Value) -> tuple[Mapping[Value, int], int]:
        op = self.made.get(value)
        if op is None or not isinstance(value.type, Scalar) or value.type.dtype is not i64:
            return {value: 1}, 0
        if op.opcode == "const" and isinstance(op.attrs["value"], int):
            return {}, op.attrs["value"]
        if op.opcode in ("add", "sub"):
            sign = 1 if op.opcode == "add" else -1
            (first, one), (second, two) = (self.index(v) for v in op.operands)
            total = {v: first.get(v, 0) + sign * second.get(v, 0) for v in (*first, *second)}
            return {v: n for v, n in total.items() if n}, one + sign * two
        if op.opcode == "mul":
            for factor, other in (op.operands, op.operands[::-1]):
                terms, constant = self.index(factor)
                if not terms:
                    rest, offset = self.index(other)
                    return {v: n * constant for v, n in rest.items() if constant}, offset * constant
        return {value: 1}, 0

    def place(self, op: Op) -> Place | None:
        """Where a load or store of one element lies in its array."""
        memory = op.operands[0].type
        assert isinstance(memory, Tensor)
        constant = 0
        flat: dict[Value, int] = {}
        terms: list[tuple[object, ...]] = []
        for index, stride in zip(op.operands[1 : 1 + memory.rank], memory.strides, strict=True):
            parts, offset = self.index(index)
            step = stride.constant
            if step is None:
                terms.append((str(stride), offset, *sorted((self.order.get(v, -1), n) for v, n in parts.items())))
                continue
            constant += offset * step
            for value, factor in parts.items():
                flat[value] = flat.get(value, 0) + factor * step
        terms.append(tuple(sorted((self.order.get(v, -1), n) for v, n in flat.items() if n)))
        if any(self.order.get(v, -1) < 0 for index in op.operands[1 : 1 + memory.rank] for v in self.index(index)[0]):
            return None
        return tuple(terms), constant

    # -- blocks -----------------------------------------------------------------------------------------------------

    def block(self, block: Block) -> Block:
        for arg in block.args:
            self.order.setdefault(arg, len(self.order))
        position = {op: number for number, op in enumerate(block.ops)}
        loads = self.clusters([one for op in block.ops if (one := self.loaded(op, position)) is not None], position, block)
        stores = [group for group in self.clusters(self.stored(block), position, block) if _fills(group)]
        first = {min((op for one in group for op in one.ops), key=position.__getitem__): group for group in loads}
        last = {max((op for one in group for op in one.ops), key=position.__getitem__): group for group in stores}
        gone = {op for group in (*loads, *stores) for one in group for op in one.ops}
        vectors: dict[Value, Value] = {}
        b = Builder()
        for op in block.ops:
            with b.at(op.span):
                if op in first:
                    self.load(b, op, first[op], vectors)
                if op in last:
                    self.store(b, last[op], vectors)
            if op in gone or (op.opcode == "pack" and op.results[0] in vectors):
                continue
            operands = tuple(vectors.get(v, v) for v in op.operands)
            regions = tuple(self.block(replace_values(region, vectors)) for region in op.regions)
            b.append(op if operands == op.operands and not regions else replace(op, operands=operands, regions=regions))
        return Block(block.args, tuple(b.ops))

    def loaded(self, op: Op, position: Mapping[Op, int]) -> Strided | None:
        """A pack of loads that lie evenly apart."""
        if op.opcode != "pack" or len(op.operands) < _SMALLEST:
            return None
        ops = [self.made.get(v) for v in op.operands]
        if any(one is None or one.opcode != "load" or one.attrs or one not in position or self.uses[one.results[0]] != 1 for one in ops):
            return None
        return self.strided([one for one in ops if one is not None], op.results[0])

    def stored(self, block: Block) -> list[Strided]:
        """Vectors, or single numbers, whose lanes are stored evenly apart."""
        groups: dict[tuple[Value, Terms, Value], dict[int, Op]] = {}
        several: set[tuple[Value, Terms, Value]] = set()
        for op in block.ops:
            if op.opcode != "store" or op.attrs or isinstance(op.operands[-1].type, Vec) or not isinstance(op.operands[0].type, Tensor):
                continue
            place = self.place(op) if op.operands[0].type.rank else None
            if place is None:
                continue
            value = op.operands[-1]
            made = self.made.get(value)
            lane = made.attrs["lane"] if made is not None and made.opcode == "extract" else None
            key = (op.operands[0], place[0], made.operands[0] if made is not None and lane is not None else value)
            own = groups.setdefault(key, {})
            at = lane if isinstance(lane, int) else place[1]
            if at in own:
                several.add(key)
            own[at] = op
        found: list[Strided] = []
        for key, own in groups.items():
            vector = key[2]
            whole = not isinstance(vector.type, Vec) or sorted(own) == list(range(vector.type.width))
            if key in several or not whole or len(own) < _SMALLEST:
                continue
            one = self.strided([own[lane] for lane in sorted(own)], vector)
            if one is not None:
                found.append(one)
        return found

    def strided(self, ops: Sequence[Op], vector: Value) -> Strided | None:
        memory = ops[0].operands[0]
        if not isinstance(memory.type, Tensor) or any(op.operands[0] is not memory for op in ops) or memory.type.dtype.is_bool:
            return None
        if memory.type.dtype.itemsize > self.widest or not any(stride.constant == 1 for stride in memory.type.strides):
            return None
        places = [self.place(op) for op in ops]
        if places[0] is None or places[1] is None:
            return None
        terms, start = places[0]
        stride = places[1][1] - start
        if not 2 <= stride <= MOST or any(place != (terms, start + stride * lane) for lane, place in enumerate(places)):
            return None
        return Strided(memory, terms, start, stride, len(ops), tuple(ops), vector)

    def clusters(self, vectors: Sequence[Strided], position: Mapping[Op, int], block: Block) -> list[list[Strided]]:
        """Vectors that begin less than a stride apart, where nothing touches their array in between."""
        alike: dict[tuple[object, ...], list[Strided]] = {}
        for one in vectors:
            alike.setdefault((one.memory, one.terms, one.stride, one.width, dtype_of(one.vector.type)), []).append(one)
        found: list[list[Strided]] = []
        for group in alike.values():
            rest = sorted(group, key=lambda one: one.start)
            while rest:
                own = [one for one in rest if one.start < rest[0].start + one.stride]
                rest = rest[len(own) :]
                if self.together(own, position, block):
                    found.append(own)
        return found

    def together(self, group: Sequence[Strided], position: Mapping[Op, int], block: Block) -> bool:
        ops = {op for one in group for op in one.ops}
        places = [position[op] for op in ops]
        reads, memory = next(iter(ops)).opcode == "load", group[0].memory
        if reads and memory in self.written and not _fills(group):
            return False  # what lies between may be another thread's to write
        between = block.ops[min(places) : max(places) + 1]
        return not any(op not in ops and _touches(op, memory, reads) for op in between)

    # -- code -------------------------------------------------------------------------------------------------------

    def load(self, b: Builder, op: Op, group: Sequence[Strided], vectors: dict[Value, Value]) -> None:
        """Whole vectors before the first load of a group."""
        one = next(one for one in group if op in one.ops)
        away = group[0].start - one.start - one.stride * one.ops.index(op)
        stride, width = one.stride, one.width
        size = stride * width
        if _fills(group):
            whole = b.op("load", op.operands[0], *_moved(b, op, away), width=size, unaligned=True)
            for each in group:
                lanes = tuple(each.start - group[0].start + stride * lane for lane in range(width))
                vectors[each.vector] = b.op("rearrange", whole, lanes=lanes)
            return
        covered = group[-1].start - group[0].start + stride * (width - 1) + 1
        half = size // 2
        parts = [b.op("load", op.operands[0], *_moved(b, op, away + begin), width=half, unaligned=True) for begin in (0, covered - half)]
        for each in group:
            places = [each.start - group[0].start + stride * lane for lane in range(width)]
            vectors[each.vector] = b.op("rearrange", *parts, lanes=tuple(p if p < half else p - covered + 2 * half for p in places))

    def store(self, b: Builder, group: Sequence[Strided], vectors: Mapping[Value, Value]) -> None:
        """One vector after the last store of a group."""
        width, stride = group[0].width, group[0].stride
        values = []
        for one in group:
            value = vectors.get(one.vector, one.vector)
            values.append(value if isinstance(value.type, Vec) else b.op("broadcast", value, width=width))
        if stride == 2:
            whole = b.op("rearrange", *values, lanes=tuple(part * width + lane for lane in range(width) for part in range(2)))
        else:
            both = tuple(range(2 * width))
            pairs = [b.op("rearrange", values[0], values[1], lanes=both), b.op("rearrange", values[2], values[-1], lanes=both)]
            whole = b.op("rearrange", *pairs, lanes=tuple(part * width + lane for lane in range(width) for part in range(stride)))
        b.multi("store", *group[0].ops[0].operands[:-1], whole, unaligned=True)


def _fills(group: Sequence[Strided]) -> bool:
    """Whether vectors have all that lies between their ends."""
    return [one.start - group[0].start for one in group] == list(range(group[0].stride))


def _touches(op: Op, memory: Value, reads: bool) -> bool:
    """Whether an op may not be passed: it touches the array, or it ends the kernel where an index is wrong."""
    inside = (op, *(inner for region in op.regions for inner in walk(region)))
    return any(one.opcode == "report" or (one.opcode in _TOUCH and one.operands[0] is memory and not (reads and one.opcode in _READ)) for one in inside)


def _moved(b: Builder, op: Op, away: int) -> list[Value]:
    """The indices of an access, moved by some elements."""
    memory = op.operands[0].type
    assert isinstance(memory, Tensor)
    indices = list(op.operands[1 : 1 + memory.rank])
    if away:
        axis = next(d for d in reversed(range(memory.rank)) if memory.strides[d].constant == 1)
        indices[axis] = b.add(indices[axis], b.index(away))
    return indices
