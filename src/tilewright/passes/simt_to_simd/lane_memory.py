"""Memory of a group of threads that run as lanes: part of `lane_ops.LaneCode`.

In: loads, stores, atomics, fences, prints and assertions of a thread. Out: vec ops. Tensors of single threads have one more axis, of lanes, and
one of groups where there are barriers. What has no vector form (`one_by_one`) is done lane after lane, through small arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.base.dtypes import DType, i64, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.simt_to_simd.lane_values import Arithmetic, Lanes, Linear, Uniform, Varying, step_between


@dataclass(frozen=True)
class Own:
    """Where a tensor of single threads lies: in `memory`, with an axis of groups before its own, if any, and one of lanes after."""

    memory: Value
    grouped: bool


@dataclass(frozen=True)
class Group:
    """Which threads of a block the lanes are: `first`, `first + 1`, … of `threads`. `block` is the block's linear number."""

    block: Value
    number: Value
    first: Value
    width: int
    threads: int
    warp_size: int
    row: tuple[Value, Value, int] | None = None
    """Where a row of threads is walked: its first thread, the first lane's place in it, and its threads."""


class LaneMemory(Arithmetic):
    def __init__(self, builder: Builder, head: Builder, group: Group, own: dict[Value, Own], mask: Value | None) -> None:
        super().__init__(builder, group.width)
        self.head = head
        """Where memory is allocated: at the start of the kernel."""
        self.group, self.own, self.mask = group, own, mask
        self.known: dict[Value, Lanes] = {}

    def get(self, value: Value) -> Lanes:
        return self.known[value]

    def set(self, values: Sequence[Value], lanes: Sequence[Lanes]) -> None:
        self.known.update(zip(values, lanes, strict=True))

    def both(self, a: Value | None, b: Value) -> Value:
        return b if a is None else self.b.op("and", a, b)

    def bits(self, mask: Value | None) -> Value:
        """The active lanes as bits of a u32."""
        return self.b.const((1 << self.width) - 1, u32) if mask is None else self.b.op("mask_bits", mask)

    def any(self, mask: Value) -> Value:
        return self.b.op("ne", self.b.op("mask_bits", mask), self.b.const(0, u32))

    def thread(self) -> Lanes:
        """The number of each lane's thread."""
        group = self.group
        return Linear(group.first, 1, group.width, 0, -(-group.threads // group.width) * group.width - 1, group.row)

    def special(self, op: Op) -> bool:
        """Write an op that is neither pure nor control flow; False where there is no way."""
        opcode = op.opcode
        if opcode == "alloc":
            return True
        if opcode == "fence":
            self.b.append(op)
        elif opcode == "load":
            self.set(op.results, [self.load(op)])
        elif opcode == "store":
            self.store(op)
        elif opcode in ("atomic", "print"):
            self.set(op.results, self.one_by_one(op))
        elif opcode in ("atomic_load", "atomic_store"):
            self.set(op.results, self.once(op) or self.one_by_one(op))
        elif opcode == "clock":
            self.set(op.results, [Uniform(self.b.emit(opcode, (), op.attrs)[0])])
        elif opcode == "assert":
            self.check(op)
        else:
            return False
        return True

    # -- loads and stores ----------------------------------------------------------------------------------------

    def place(self, memory: Value, indices: Sequence[Lanes]) -> tuple[Value, list[Lanes]]:
        """The tensor and indices that stand for an element of a thread's tensor."""
        own = self.own.get(memory)
        found = [self.index(i) for i in indices]
        if own is None:
            return memory, found
        groups: list[Lanes] = [Uniform(self.group.number)] if own.grouped else []
        return own.memory, [*groups, *found, Linear(self.b.index(0), 1, self.width, 0, self.width - 1)]

    def _condition(self, op: Op) -> Value | None:
        """The mask of an access, which may have a condition of its own as its last operand."""
        if not op.attrs.get("masked"):
            return self.mask
        return self.both(self.mask, self.vec(self.get(op.operands[-1])))

    def load(self, op: Op) -> Lanes:
        type_ = op.operands[0].type
        assert isinstance(type_, Tensor)
        memory, indices = self.place(op.operands[0], [self.get(v) for v in op.operands[1 : 1 + type_.rank]])
        mask = self._condition(op)
        if all(isinstance(i, Uniform) for i in indices) and not op.attrs.get("masked"):
            return Uniform(self.b.op("load", memory, *_scalars(indices)))
        if _in_a_row(memory, indices):
            if mask is None:
                return Varying(self.b.op("load", memory, *_scalars(indices), width=self.width, unaligned=True))
            return Varying(self.b.op("load_lanes", memory, *_scalars(indices), mask))
        return Varying(self.b.op("gather", memory, *self._scattered(indices), self.truth() if mask is None else mask))

    def store(self, op: Op) -> None:
        type_ = op.operands[0].type
        assert isinstance(type_, Tensor)
        memory, indices = self.place(op.operands[0], [self.get(v) for v in op.operands[1 : 1 + type_.rank]])
        self.write(memory, indices, self.get(op.operands[1 + type_.rank]), self._condition(op), bool(op.attrs.get("masked")))

    def write(self, memory: Value, indices: Sequence[Lanes], value: Lanes, mask: Value | None, guarded: bool = False) -> None:
        """`guarded`: no lane may be active."""
        if all(isinstance(i, Uniform) for i in indices) and isinstance(value, Uniform) and not guarded:
            self.b.multi("store", memory, *_scalars(indices), value.value)
        elif _in_a_row(memory, indices):
            if mask is None:
                self.b.multi("store", memory, *_scalars(indices), self.vec(value), unaligned=True)
            else:
                self.b.multi("store_lanes", memory, *_scalars(indices), self.vec(value), mask)
        else:
            whole = self.truth() if mask is None else mask
            self.b.multi("scatter", memory, *self._scattered(indices), self.vec(value), whole)

    def _scattered(self, indices: Sequence[Lanes]) -> list[Value]:
        return [i.value if isinstance(i, Uniform) else self.vec(i) for i in indices]

    # -- one lane after another ----------------------------------------------------------------------------------

    def array(self, dtype: DType, *shape: int) -> Value:
        """Memory of the whole kernel."""
        return self.head.op("alloc", dtype=dtype, shape=shape, space="local", align=64)

    def kept(self, lanes: Lanes) -> Value:
        """A small array with the lanes' values."""
        vec = self.vec(lanes)
        memory = self.array(dtype_of(vec.type), self.width)
        self.b.multi("store", memory, self.b.index(0), vec, unaligned=True)
        return memory

    def once(self, op: Op) -> list[Lanes]:
        """An access that is the same for all lanes, done once; nothing where lanes differ."""
        given = [self.get(v) for v in op.operands[1:]]
        if op.operands[0] in self.own or not all(isinstance(g, Uniform) for g in given) or not op.results:
            return []
        memory, indices = self.place(op.operands[0], given)
        return [Uniform(v) for v in self.b.emit(op.opcode, [memory, *_scalars(indices)], op.attrs)]

    def check(self, op: Op) -> None:
        """An assertion: the first lane where it does not hold ends the kernel."""
        holds, b = self.get(op.operands[0]), self.b
        if isinstance(holds, Uniform):
            wrong, bits = b.op("not", holds.value), self.bits(self.mask)
        else:
            bits = b.op("mask_bits", self.both(self.mask, b.op("not", self.vec(holds))))
            wrong = b.op("ne", bits, b.const(0, u32))

        def fail(inner: Builder) -> Sequence[Value]:
            lane = inner.cast(inner.op("ctz", bits), i64)
            inner.multi("fault", self.group.block, inner.add(self.group.first, lane), text=str(op.attrs["text"]))
            return []

        b.if_(wrong, fail, lambda inner: [])

    def one_by_one(self, op: Op) -> list[Lanes]:
        """The op for each active lane in turn."""
        tensor = op.operands[0].type if op.operands else None
        given = [None if isinstance(v.type, Tensor) else self.get(v) for v in op.operands]
        if isinstance(tensor, Tensor):
            memory, indices = self.place(op.operands[0], [g for g in given[1 : 1 + tensor.rank] if g is not None])
            given = [None, *indices, *given[1 + tensor.rank :]]
        arrays = [self.kept(g) if isinstance(g, Varying) else None for g in given]
        active = self.kept(Varying(self.mask)) if self.mask is not None else None
        results = [self.array(dtype_of(r.type), self.width) for r in op.results]

        def once(b: Builder, lane: Value) -> None:
            operands: list[Value] = []
            for lanes, kept in zip(given, arrays, strict=True):
                if lanes is None:
                    operands.append(memory)
                elif kept is not None:
                    operands.append(b.op("load", kept, lane))
                elif isinstance(lanes, Linear):
                    operands.append(b.add(lanes.base, b.mul(b.cast(lane, dtype_of(lanes.base.type)), step_between(b, lanes))))
                else:
                    assert isinstance(lanes, Uniform)
                    operands.append(lanes.value)
            for found, kept_result in zip(b.emit(op.opcode, operands, op.attrs), results, strict=True):
                b.multi("store", kept_result, lane, found)

        def turn(b: Builder, lane: Value) -> Sequence[Value]:
            if active is None:
                once(b, lane)
                return []

            def then(inner: Builder) -> Sequence[Value]:
                once(inner, lane)
                return []

            b.if_(b.op("load", active, lane), then, lambda inner: [])
            return []

        b = self.b
        b.for_(b.index(0), b.index(self.width), b.index(1), [], turn, name="lane")
        return [Varying(b.op("load", r, b.index(0), width=self.width, unaligned=True)) for r in results]


def _scalars(indices: Sequence[Lanes]) -> list[Value]:
    return [i.base if isinstance(i, Linear) else i.value for i in indices]


def _in_a_row(memory: Value, indices: Sequence[Lanes]) -> bool:
    """Whether neighbouring lanes access neighbouring elements."""
    assert isinstance(memory.type, Tensor)
    step = 0
    for index, stride in zip(indices, memory.type.strides, strict=True):
        if isinstance(index, Varying):
            return False
        if isinstance(index, Linear):
            if stride.constant is None:
                return False
            step += index.step * stride.constant
    return step == 1
