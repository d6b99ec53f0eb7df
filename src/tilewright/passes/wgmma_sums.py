"""Sums of one tile that several blocks of a cluster share: each adds up a stretch of the sum, one of them finishes the tile.

In: the partial sums of a warp group's tile, in registers. Out: in the block of rank 0 the whole sums; the others' have been sent there.
Every block has a *box* in shared memory with a place for each sender. A sender writes its sums to its own place in its own box and has
the copy engine bring them to the same place in the box of rank 0, where their bytes count on the mbarrier `given`; when they have been
added, in the order of ranks, rank 0 arrives at the sender's mbarrier `taken`. Warp groups have boxes and mbarriers of their own.

    rank > 0:  wait taken; store box[rank - 1]; fence; copy_remote to rank 0
    rank 0:    expect given; wait given; sums += box[0], box[1], …; arrive at the others' taken
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, i32, i64, u32, u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.passes.schedule_matrix import MatrixSchedule

GROUP = 128
"""Threads of a warp group."""
WIDE = 4
"""Sums stored at once."""


class ClusterSum:
    """The exchange of one kernel. `rank` is the block's number in its cluster, `count` the sums each thread holds."""

    def __init__(self, b: Builder, schedule: MatrixSchedule, rank: Value, count: int, dtype: DType) -> None:
        self.schedule, self.rank, self.count = schedule, rank, count
        self.senders = schedule.sum_cluster - 1
        self.message = GROUP * count
        self.itemsize = dtype.itemsize
        shape = (self.senders * schedule.groups * self.message,)
        self.box = b.op("alloc", dtype=dtype, shape=shape, space="shared", align=128, name="box")
        self.given = b.op("alloc", dtype=u64, shape=(schedule.groups,), space="shared", name="given")
        self.taken = b.op("alloc", dtype=u64, shape=(schedule.groups,), space="shared", name="taken")
        self.is_first = b.op("eq", rank, b.const(0, i32), name="finishes")

    def initialise(self, b: Builder) -> None:
        for number in range(self.schedule.groups):
            b.multi("mbarrier_init", self.given, b.index(number), count=1)
            b.multi("mbarrier_init", self.taken, b.index(number), count=1)

    def stretch(self, b: Builder, steps: Value) -> tuple[Value, Value]:
        """The first of this block's steps, and how many it takes, of so many."""
        blocks = self.schedule.sum_cluster
        each = b.op("floordiv", b.add(steps, b.const(blocks - 1, u32)), b.const(blocks, u32))
        first = b.op("min", b.mul(b.cast(self.rank, u32), each), steps)
        return first, b.op("min", b.sub(steps, first), each)

    def send(self, b: Builder, group: Value, thread: Value, leader: Value, turn: Value, sums: Sequence[Value]) -> None:
        """A sender's part. `group`: the warp group's number; `thread`: in the group; `turn`: how many tiles the group has computed."""
        b.multi("mbarrier_wait", self.taken, group, b.op("xor", self._parity(b, turn), b.const(1, u32)))
        place = self._place(b, group, b.sub(b.cast(self.rank, u32), b.const(1, u32)))
        own = self._own(b, place, thread)
        for number in range(0, self.count, WIDE):
            where = b.add(own, b.index(number * GROUP))
            b.multi("store", self.box, where, b.op("pack", *sums[number : number + WIDE]))
        b.multi("fence_async")
        self._meet(b, group)

        def copy(inner: Builder) -> list[Value]:
            rank = inner.const(0, i32)
            inner.multi("copy_remote", self.box, place, self.box, place, self.given, group, rank, count=self.message)
            return []

        b.if_(leader, copy, lambda inner: [])

    def collect(self, b: Builder, group: Value, thread: Value, leader: Value, turn: Value, sums: Sequence[Value]) -> list[Value]:
        """The part of rank 0: the whole sums."""
        size = self.senders * self.message * self.itemsize
        b.if_(leader, lambda inner: inner.multi("mbarrier_expect", self.given, group, bytes=size), lambda inner: [])
        b.multi("mbarrier_wait", self.given, group, self._parity(b, turn))
        total = list(sums)
        for sender in range(self.senders):
            own = self._own(b, self._place(b, group, b.const(sender, u32)), thread)
            for number in range(0, self.count, WIDE):
                part = b.op("load", self.box, b.add(own, b.index(number * GROUP)), width=WIDE)
                for lane in range(WIDE):
                    total[number + lane] = b.add(total[number + lane], b.op("extract", part, lane=lane))
        self._meet(b, group)
        peer = b.add(b.cast(thread, i32), b.const(1, i32))
        told = b.op("le", peer, b.const(self.senders, i32))
        b.if_(told, lambda inner: inner.multi("mbarrier_arrive", self.taken, group, peer, remote=True), lambda inner: [])
        return total

    def _meet(self, b: Builder, group: Value) -> None:
        """The threads of the warp group wait for one another."""
        b.multi("named_barrier", b.add(b.cast(group, i32), b.const(1, i32)), threads=GROUP)

    def _place(self, b: Builder, group: Value, sender: Value) -> Value:
        number = b.add(b.mul(sender, b.const(self.schedule.groups, u32)), group)
        return b.mul(number, b.const(self.message, u32))

    def _own(self, b: Builder, place: Value, thread: Value) -> Value:
        """Where a thread's sums begin: those of one step lie thread by thread."""
        return b.cast(b.add(place, b.mul(thread, b.const(WIDE, u32))), i64)

    def _parity(self, b: Builder, turn: Value) -> Value:
        return b.op("and", turn, b.const(1, u32))
