"""Pass: what the lanes of a warp do together goes through shared memory, for targets whose warps are nothing to rely on.

In: a thread-stage kernel with shuffles, votes, matches and the like, in warps of `target.simt_warp` threads. Out: the same with stores, barriers and loads. A barrier is the
whole block's, so every thread of the block has to come by: an op under a condition that differs between threads is refused, at its line.

    %w = shuffle %v, %d {mode = "xor"}   ->   shared[thread] = v; barrier; w = shared[thread ^ d]; barrier
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tilewright.analysis.uniform import block_values, control, waiting_ops
from tilewright.base.dtypes import DType, i32, i64, u32, u64
from tilewright.base.errors import TargetLimit
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import dtype_of

_TOGETHER = frozenset({"shuffle", "vote", "match", "redux", "warp_sync", "barrier_reduce", "active_mask"})
_OWN = frozenset({"lane_id", "warp_id", "lane_mask"})


def warps_to_shared(kernel: Kernel, target: Target) -> Kernel:
    """The kernel without warps."""
    if not any(op.opcode in _TOGETHER or op.opcode in _OWN for op in walk(kernel.body)):
        return kernel
    return _Exchange(kernel, target).run()


class _Exchange:
    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target, self.warp = kernel, target, target.simt_warp
        self.uniform = block_values(kernel, waiting_ops(kernel))
        self.mapping: dict[Value, Value] = {}
        self.rooms: dict[DType, Value] = {}
        self.head = Builder(kernel.span)
        self.thread = self.head.op("thread_id")
        self.lane = self.head.op("and", self.thread, self.head.index(self.warp - 1))
        self.first = self.head.sub(self.thread, self.lane)

    def run(self) -> Kernel:
        body = self.region(self.kernel.body, True)
        return replace(self.kernel, body=Block(body.args, (*self.head.ops, *body.ops)))

    def region(self, block: Block, together: bool) -> Block:
        b = Builder()
        for old in block.ops:
            op = replace(old, operands=tuple(self.mapping.get(v, v) for v in old.operands))
            with b.at(op.span):
                if op.regions:
                    inside = together and all(v in self.uniform for v in control(old))
                    b.append(replace(op, regions=tuple(self.region(r, inside) for r in op.regions)))
                elif op.opcode in _TOGETHER:
                    if not together:
                        raise self.refused(op)
                    results = _RULES[op.opcode](self, b, op)
                    self.mapping.update(zip(old.results, results, strict=True))
                elif op.opcode in _OWN:
                    self.mapping[old.results[0]] = self.own(b, op)
                else:
                    b.append(op)
        return Block(block.args, tuple(b.ops))

    def refused(self, op: Op) -> Exception:
        return TargetLimit.at(
            "TW020", f"{self.target.name} cannot do {op.opcode} where not every thread of the block comes by: its warps meet at barriers of the block",
            op.span if op.span.line else self.kernel.span, help="move it out of the condition, or use another device",
        )  # fmt: skip

    # -- the exchange ---------------------------------------------------------------------------------------------------

    def room(self, dtype: DType) -> Value:
        """Shared memory with an element for each thread."""
        if dtype not in self.rooms:
            self.rooms[dtype] = self.head.op("alloc", dtype=dtype, shape=(self.kernel.threads,), space="shared")
        return self.rooms[dtype]

    def published(self, b: Builder, value: Value, read: Callable[[Value], tuple[Value, ...]]) -> tuple[Value, ...]:
        """What `read` makes of the memory that holds every thread's value."""
        room = self.room(dtype_of(value.type))
        b.multi("store", room, self.thread, value)
        b.multi("barrier")
        results = read(room)
        b.multi("barrier")
        return results

    def over_lanes(self, b: Builder, start: Value, step: Callable[[Builder, Value, Value], Value], count: int | None = None) -> Value:
        """`step(builder, lane, so far)` for every lane of the warp that has a thread (or for `count` threads of the block)."""
        end = b.index(count) if count is not None else b.op("min", b.index(self.warp), b.sub(b.index(self.kernel.threads), self.first))
        return b.for_(b.index(0), end, b.index(1), [start], lambda inner, k, now: [step(inner, k, now)], name="lane")[0]

    def bit(self, b: Builder, lane: Value) -> Value:
        return b.op("shl", b.const(1, u32), b.cast(lane, u32))

    def taking(self, b: Builder, op: Op, count: int) -> Value | None:
        """The mask of an op that has one."""
        return b.cast(op.operands[count], u32) if len(op.operands) > count else None

    def takes(self, b: Builder, mask: Value | None, lane: Value, value: Value, otherwise: Value) -> Value:
        if mask is None:
            return value
        there = b.op("ne", b.op("and", mask, self.bit(b, lane)), b.const(0, u32))
        return b.select(there, value, otherwise)

    def word(self, b: Builder, op: Op, mask: Value) -> Value:
        return b.cast(mask, u64) if op.attrs.get("bits", 32) == 64 else mask

    def everyone(self, b: Builder) -> Value:
        """The lanes of the warp that have a thread."""
        return self.over_lanes(b, b.const(0, u32), lambda inner, k, now: inner.op("or", now, self.bit(inner, k)))

    # -- ops ------------------------------------------------------------------------------------------------------------

    def own(self, b: Builder, op: Op) -> Value:
        if op.opcode == "lane_id":
            return b.cast(self.lane, i32)
        if op.opcode == "warp_id":
            return b.cast(b.op("shr", self.thread, b.index(self.warp.bit_length() - 1)), i32)
        own = self.bit(b, self.lane)
        below, all_ = b.sub(own, b.const(1, u32)), b.const((1 << self.warp) - 1, u32)
        upto = b.op("or", below, own)
        found = {"lt": below, "le": upto, "eq": own, "ge": b.op("and", b.op("not", below), all_), "gt": b.op("and", b.op("not", upto), all_)}
        return self.word(b, op, found[str(op.attrs["relation"])])

    def shuffle(self, b: Builder, op: Op) -> tuple[Value, ...]:
        value, given = op.operands[0], b.cast(op.operands[1], i64)
        width = op.attrs.get("width", self.warp)
        assert isinstance(width, int)
        width = min(width, self.warp)
        given = b.op("and", given, b.index(self.warp - 1))
        base = b.op("and", self.lane, b.index(~(width - 1)))
        end = b.add(base, b.index(width))
        mode = str(op.attrs["mode"])
        if mode == "idx":
            source = b.add(base, b.op("and", given, b.index(width - 1)))
        else:
            source = b.op({"up": "sub", "down": "add", "xor": "xor"}[mode], self.lane, given)
        there = b.op("and", b.op("ge", source, base), b.op("lt", source, end))
        place = b.add(self.first, source)
        there = b.op("and", there, b.op("lt", place, b.index(self.kernel.threads)))
        place = b.select(there, place, self.thread)
        return self.published(b, value, lambda room: (b.op("load", room, place),))

    def ballot(self, b: Builder, value: Value) -> Value:
        def read(room: Value) -> tuple[Value, ...]:
            def step(inner: Builder, k: Value, now: Value) -> Value:
                held = inner.op("load", room, inner.add(self.first, k))
                return inner.op("or", now, inner.select(held, self.bit(inner, k), inner.const(0, u32)))

            return (self.over_lanes(b, b.const(0, u32), step),)

        return self.published(b, value, read)[0]

    def vote(self, b: Builder, op: Op) -> tuple[Value, ...]:
        mask, bits = self.taking(b, op, 1), self.ballot(b, op.operands[0])
        if mask is not None:
            bits = b.op("and", bits, mask)
        mode, none = str(op.attrs["mode"]), b.const(0, u32)
        if mode == "ballot":
            return (self.word(b, op, bits),)
        if mode == "any":
            return (b.op("ne", bits, none),)
        here = self.everyone(b)
        here = here if mask is None else b.op("and", here, mask)
        whole = b.op("eq", bits, here)
        return (whole if mode == "all" else b.op("or", whole, b.op("eq", bits, none)),)

    def match(self, b: Builder, op: Op) -> tuple[Value, ...]:
        mask, dtype = self.taking(b, op, 1), dtype_of(op.operands[0].type)
        value = b.bitcast(op.operands[0], u64 if dtype.bits == 64 else u32)

        def read(room: Value) -> tuple[Value, ...]:
            def step(inner: Builder, k: Value, now: Value) -> Value:
                same = inner.op("eq", inner.op("load", room, inner.add(self.first, k)), value)
                return inner.op("or", now, inner.select(same, self.bit(inner, k), inner.const(0, u32)))

            return (self.over_lanes(b, b.const(0, u32), step),)

        alike = self.published(b, value, read)[0]
        alike = alike if mask is None else b.op("and", alike, mask)
        if op.attrs["mode"] == "any":
            return (self.word(b, op, alike),)
        here = self.everyone(b)
        here = here if mask is None else b.op("and", here, mask)
        same = b.op("eq", alike, here)
        return self.word(b, op, b.select(same, here, b.const(0, u32))), same

    def redux(self, b: Builder, op: Op) -> tuple[Value, ...]:
        kind, value, mask = str(op.attrs["kind"]), op.operands[0], self.taking(b, op, 1)
        dtype = dtype_of(value.type)
        neutral = {"add": 0, "or": 0, "xor": 0, "and": -1 if dtype is i32 else (1 << 32) - 1, "min": int(dtype.max_value), "max": int(dtype.min_value)}[kind]
        start = b.const(neutral, dtype)

        def read(room: Value) -> tuple[Value, ...]:
            def step(inner: Builder, k: Value, now: Value) -> Value:
                return inner.op(kind, now, self.takes(inner, mask, k, inner.op("load", room, inner.add(self.first, k)), start))

            return (self.over_lanes(b, start, step),)

        return self.published(b, value, read)

    def barrier_reduce(self, b: Builder, op: Op) -> tuple[Value, ...]:
        kind = str(op.attrs["kind"])

        def read(room: Value) -> tuple[Value, ...]:
            def step(inner: Builder, k: Value, now: Value) -> Value:
                return inner.add(now, inner.cast(inner.op("load", room, k), i32))

            return (self.over_lanes(b, b.const(0, i32), step, self.kernel.threads),)

        (count,) = self.published(b, op.operands[0], read)
        if kind == "count":
            return (count,)
        return (b.op("ne", count, b.const(0, i32)) if kind == "or" else b.op("eq", count, b.const(self.kernel.threads, i32)),)

    def warp_sync(self, b: Builder, op: Op) -> tuple[Value, ...]:
        b.multi("barrier")
        return ()

    def active_mask(self, b: Builder, op: Op) -> tuple[Value, ...]:
        return (self.word(b, op, self.everyone(b)),)


_RULES: Mapping[str, Callable[[_Exchange, Builder, Op], tuple[Value, ...]]] = {
    "shuffle": _Exchange.shuffle, "vote": _Exchange.vote, "match": _Exchange.match, "redux": _Exchange.redux, "barrier_reduce": _Exchange.barrier_reduce,
    "warp_sync": _Exchange.warp_sync, "active_mask": _Exchange.active_mask,
}  # fmt: skip
assert set(_RULES) == _TOGETHER
