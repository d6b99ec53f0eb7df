"""Operations among the threads of a warp that run as the lanes of a vec: part of `lane_ops.LaneCode`.

In: shuffles, votes, matches and reductions of warps. Out: vec ops. The lanes that take part are those that are active and, where the op has a
mask of its own, in that. What comes out the same for all of them is a scalar.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, by_name, i32, i64, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import dtype_of
from tilewright.passes.simt_to_simd.lane_memory import LaneMemory
from tilewright.passes.simt_to_simd.lane_values import Lanes, Uniform, Varying

LANE_OPS = frozenset({"shuffle", "vote", "match", "redux", "active_mask", "elect", "warp_sync"})
"""Ops for which a vec must be a warp. Its lanes go in step, so that they have met wherever a `warp_sync` stands."""


class LaneWarps(LaneMemory):
    def special(self, op: Op) -> bool:
        handler = {
            "shuffle": self._shuffle, "vote": self._vote, "match": self._match, "redux": self._redux, "active_mask": self._active_mask,
            "lane_id": self._lane_id, "warp_id": self._warp_id, "lane_mask": self._lane_mask, "elect": self._elect,
        }.get(op.opcode)  # fmt: skip
        if handler is None:
            return super().special(op)
        self.set(op.results, handler(op))
        return True

    # -- numbers of lanes ----------------------------------------------------------------------------------------

    def _lane_id(self, op: Op) -> list[Lanes]:
        return [self.cast(self.pure(Op("mod"), [self.thread(), self.number(self.group.warp_size)]), i32)]

    def _warp_id(self, op: Op) -> list[Lanes]:
        return [self.cast(self.pure(Op("floordiv"), [self.thread(), self.number(self.group.warp_size)]), i32)]

    def _lane_mask(self, op: Op) -> list[Lanes]:
        lane = self.cast(self._lane_id(op)[0], u32)
        own = self.pure(Op("shl"), [self.word(1), lane])
        below = self.pure(Op("sub"), [own, self.word(1)])
        relation = op.attrs["relation"]
        if relation in ("lt", "ge"):
            return [below if relation == "lt" else self.pure(Op("not"), [below])]
        if relation == "eq":
            return [own]
        upto = self.pure(Op("or"), [own, below])
        return [upto if relation == "le" else self.pure(Op("not"), [upto])]

    def _active_mask(self, op: Op) -> list[Lanes]:
        return [Uniform(self.bits(self.mask))]

    def _elect(self, op: Op) -> list[Lanes]:
        first = Uniform(self.b.op("ctz", self.bits(self.mask)))
        return [self.pure(Op("eq"), [self.cast(self._lane_id(op)[0], u32), first])]

    def word(self, value: int) -> Uniform:
        return Uniform(self.b.const(value, u32))

    def taking_part(self, op: Op, count: int) -> Lanes:
        """The lanes of an op with `count` operands and perhaps a mask after them, as bits."""
        active = Uniform(self.bits(self.mask))
        return active if len(op.operands) == count else self.pure(Op("and"), [active, self.get(op.operands[count])])

    def among(self, bits: Lanes) -> Value:
        """For each lane whether it is one of those."""
        lane = self.b.op("lane_ids", width=self.group.warp_size, dtype=u32)
        own = self.b.op("and", self.b.op("shr", self.vec(bits), lane), self.b.splat(1, lane))
        return self.b.op("ne", own, self.b.splat(0, lane))

    # -- shuffles ------------------------------------------------------------------------------------------------

    def _shuffle(self, op: Op) -> list[Lanes]:
        value, operand = self.get(op.operands[0]), self.get(op.operands[1])
        mode, width = str(op.attrs["mode"]), op.attrs.get("width", self.group.warp_size)
        assert isinstance(width, int)
        if isinstance(value, Uniform):
            return [value]
        distance = self.constant(operand)
        if distance is not None:
            places = tuple(_source(mode, lane, distance & (self.group.warp_size - 1), width) for lane in range(self.group.warp_size))
            return [Varying(self.b.op("rearrange", self.vec(value), lanes=places))]
        memory = self.kept(value)
        wide = self.index(operand)
        if isinstance(wide, Uniform) and mode == "idx" and width == self.group.warp_size:
            return [Uniform(self.b.op("load", memory, self.b.op("and", wide.value, self.b.index(self.group.warp_size - 1))))]
        source = self._sources(mode, self.vec(wide), width)
        return [Varying(self.b.op("gather", memory, source, self.truth() if self.mask is None else self.mask))]

    def _sources(self, mode: str, operand: Value, width: int) -> Value:
        """The lane that each lane reads."""
        b = self.b
        lane = b.op("lane_ids", width=self.group.warp_size, dtype=i64)
        operand = b.op("and", operand, b.splat(self.group.warp_size - 1, lane))
        lowest = b.op("and", lane, b.splat(-width, lane))
        if mode == "idx":
            return b.op("or", lowest, b.op("and", operand, b.splat(width - 1, lane)))
        if mode == "up":
            source = b.sub(lane, operand)
            return b.select(b.op("lt", source, lowest), lane, source)
        source = b.add(lane, operand) if mode == "down" else b.op("xor", lane, operand)
        return b.select(b.op("gt", source, b.add(lowest, b.splat(width - 1, lane))), lane, source)

    # -- votes and matches ---------------------------------------------------------------------------------------

    def _vote(self, op: Op) -> list[Lanes]:
        value, mode, b = self.get(op.operands[0]), op.attrs["mode"], self.b
        part = self.taking_part(op, 1)
        if isinstance(value, Uniform):
            votes: Lanes = Uniform(b.select(value.value, self.bits(self.mask), b.const(0, u32)))
        else:
            votes = Uniform(b.op("mask_bits", self.both(self.mask, self.vec(value))))
        if len(op.operands) > 1:
            votes = self.pure(Op("and"), [votes, part])
        if mode == "ballot":
            return [votes]
        if mode == "any":
            return [self.pure(Op("ne"), [votes, self.word(0)])]
        whole = self.pure(Op("eq"), [votes, part])
        return [whole if mode == "all" else self.pure(Op("or"), [whole, self.pure(Op("eq"), [votes, self.word(0)])])]

    def _match(self, op: Op) -> list[Lanes]:
        part = self.taking_part(op, 1)
        same = self.pure(Op("and"), [self._same_bits(self.get(op.operands[0])), part])
        if op.attrs["mode"] == "any":
            return [same]
        alike = self.pure(Op("eq"), [same, part])
        return [self.pure(Op("select"), [alike, part, self.word(0)]), alike]

    def _same_bits(self, value: Lanes) -> Lanes:
        """The lanes with the bits of each lane."""
        if isinstance(value, Uniform):
            return self.word((1 << self.group.warp_size) - 1)
        values = self.vec(value)
        bits = _as_bits(dtype_of(values.type))
        values = self.b.bitcast(values, bits)
        memory = self.kept(Varying(values))

        def lane(b: Builder, number: Value, found: Value) -> Sequence[Value]:
            other = b.like(b.op("load", memory, number), values)
            one = b.like(b.op("shl", b.const(1, u32), b.cast(number, u32)), found)
            return [b.select(b.op("eq", values, other), b.op("or", found, one), found)]

        b = self.b
        start = b.op("broadcast", b.const(0, u32), width=self.group.warp_size)
        return Varying(b.for_(b.index(0), b.index(self.group.warp_size), b.index(1), [start], lane, name="lane")[0])

    # -- reductions ----------------------------------------------------------------------------------------------

    def _redux(self, op: Op) -> list[Lanes]:
        kind, b = str(op.attrs["kind"]), self.b
        values = self.vec(self.get(op.operands[0]))
        dtype = dtype_of(values.type)
        part = self.taking_part(op, 1)
        start = {"and": -1 if dtype.kind == "i" else dtype.max_value, "min": dtype.max_value, "max": dtype.min_value}.get(kind, 0)
        if isinstance(part, Uniform):
            chosen = b.select(self.among(part), values, b.splat(start, values))
            return [Uniform(b.op("fold", chosen, kind=kind))]
        memory, lanes = self.kept(Varying(values)), self.vec(part)

        def lane(inner: Builder, number: Value, found: Value) -> Sequence[Value]:
            one = inner.like(inner.op("shl", inner.const(1, u32), inner.cast(number, u32)), lanes)
            takes = inner.op("ne", inner.op("and", lanes, one), inner.splat(0, lanes))
            return [inner.select(takes, inner.op(kind, found, inner.like(inner.op("load", memory, number), found)), found)]

        return [Varying(b.for_(b.index(0), b.index(self.group.warp_size), b.index(1), [b.splat(start, values)], lane, name="lane")[0])]


def _source(mode: str, lane: int, operand: int, width: int) -> int:
    lowest = lane & -width
    if mode == "idx":
        return lowest | (operand & (width - 1))
    if mode == "up":
        return lane if lane - operand < lowest else lane - operand
    source = lane + operand if mode == "down" else lane ^ operand
    return lane if source > lowest + width - 1 else source


def _as_bits(dtype: DType) -> DType:
    return by_name(f"u{dtype.bits}")
