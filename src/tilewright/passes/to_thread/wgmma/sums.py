"""Sums of one tile that several blocks share: each adds up a stretch of the sum, one of them finishes the tile.

`ClusterSum`, within a cluster. In: the partial sums of a warp group's tile, in registers. Out: in the block of rank 0 the whole
sums; the others' have been sent there. Every block has a *box* in shared memory with a place for each sender. A sender writes its
sums to its own place in its own box and has the copy engine bring them to the same place in the box of rank 0, where their bytes
count on the mbarrier `given`; when they have been added, in the order of ranks, rank 0 arrives at the sender's mbarrier `taken`,
if there can be another tile. Warp groups have boxes and mbarriers of their own.

    rank > 0:  wait taken; store box[rank - 1]; fence; copy_remote to rank 0
    rank 0:    expect given; wait given; sums += box[0], box[1], …; arrive at the others' taken

`StreamSum`, over the whole grid. All steps of all tiles are one line, of which each block takes an equal stretch. It may begin in
the middle of a tile: those sums it leaves in memory, before anything else, and raises its flag. It may end in the middle of one:
that tile it finishes, with what the blocks of the stretches behind have left, in their order. Stretches are dealt out from the
last to the first, so a block waits only for blocks of lower number, which have started and wait for nobody before they have
raised their flags.

    for tiles of the stretch {
      sums of the steps of the tile that are in the stretch
      if it does not begin the tile { store partials[own]; raise_flag own }
      else { if it does not end the tile { for the blocks behind { await_flag; sums += partials } }; finish }
    }
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType, i32, i64, u32, u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Tensor
from tilewright.passes.schedules.matrix import Wgmma
from tilewright.passes.to_thread.wgmma.epilogue import GROUP

WIDE = 4
"""Sums stored at once."""


class ClusterSum:
    """The exchange of one kernel. `rank` is the block's number in its cluster, `count` the sums each thread holds."""

    def __init__(self, b: Builder, schedule: Wgmma, rank: Value, count: int, dtype: DType) -> None:
        self.schedule, self.rank, self.count = schedule, rank, count
        self.senders = schedule.cluster_k - 1
        self.message = GROUP * count
        self.itemsize = dtype.itemsize
        shape = (self.senders * schedule.math_warpgroups * self.message,)
        self.box = b.op("alloc", dtype=dtype, shape=shape, space="shared", align=128, name="box")
        self.given = b.op("alloc", dtype=u64, shape=(schedule.math_warpgroups,), space="shared", name="given")
        self.taken = b.op("alloc", dtype=u64, shape=(schedule.math_warpgroups,), space="shared", name="taken")
        self.is_first = b.op("eq", rank, b.const(0, i32), name="finishes")

    def initialise(self, b: Builder) -> None:
        for number in range(self.schedule.math_warpgroups):
            b.multi("mbarrier_init", self.given, b.index(number), count=1)
            b.multi("mbarrier_init", self.taken, b.index(number), count=1)

    def stretch(self, b: Builder, steps: Value) -> tuple[Value, Value]:
        """The first of this block's steps, and how many it takes, of so many."""
        blocks = self.schedule.cluster_k
        each = b.op("floordiv", b.add(steps, b.const(blocks - 1, u32)), b.const(blocks, u32))
        first = b.op("min", b.mul(b.cast(self.rank, u32), each), steps)
        return first, b.op("min", b.sub(steps, first), each)

    def send(self, b: Builder, group: Value, thread: Value, leader: Value, turn: Value, sums: Sequence[Value]) -> None:
        """A sender's part. `group`: the warp group's number; `thread`: in it; `turn`: tiles the group has computed so far."""
        if self.schedule.persistent:
            b.multi("mbarrier_wait", self.taken, group, b.op("xor", self._parity(b, turn), b.const(1, u32)))
        place = self._place(b, group, b.sub(b.cast(self.rank, u32), b.const(1, u32)))
        own = self._own(b, place, thread)
        for number in range(0, self.count, WIDE):
            where = b.add(own, b.index(number * GROUP))
            b.multi("store", self.box, where, b.op("pack", *sums[number : number + WIDE]))
        b.multi("fence_async")
        _meet(b, group)

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
        if not self.schedule.persistent:
            return total
        _meet(b, group)
        peer = b.add(b.cast(thread, i32), b.const(1, i32))
        told = b.op("le", peer, b.const(self.senders, i32))
        b.if_(told, lambda inner: inner.multi("mbarrier_arrive", self.taken, group, peer, remote=True), lambda inner: [])
        return total

    def _place(self, b: Builder, group: Value, sender: Value) -> Value:
        number = b.add(b.mul(sender, b.const(self.schedule.math_warpgroups, u32)), group)
        return b.mul(number, b.const(self.message, u32))

    def _own(self, b: Builder, place: Value, thread: Value) -> Value:
        """Where a thread's sums begin: those of one step lie thread by thread."""
        return b.cast(b.add(place, b.mul(thread, b.const(WIDE, u32))), i64)

    def _parity(self, b: Builder, turn: Value) -> Value:
        return b.op("and", turn, b.const(1, u32))


class StreamSum:
    """The stretches of one kernel, and how sums are handed on. `partials` and `flags` are parameters of the kernel."""

    def __init__(self, schedule: Wgmma, partials: Value, flags: Value, count: int) -> None:
        assert isinstance(partials.type, Tensor)
        self.schedule, self.partials, self.flags, self.count = schedule, partials, flags, count
        blocks = partials.type.shape[0].constant
        assert blocks is not None
        self.blocks = blocks

    def lay_out(self, b: Builder, tiles: Value, steps: Value) -> None:
        """Where this block's stretch lies, given the numbers of tiles and of steps of each."""
        self.steps = steps
        # A tile without steps is finished all the same.
        self.units = b.op("max", steps, b.const(1, u32))
        total, blocks = b.mul(tiles, self.units), b.const(self.blocks, u32)
        self.each = b.op("floordiv", total, blocks)
        self.longer = b.sub(total, b.mul(self.each, blocks))
        """So many stretches have one step more: the first ones."""
        self.number = b.sub(b.const(self.blocks - 1, u32), b.cast(b.op("program_id", axis=0), u32))
        self.begin = b.add(b.mul(self.number, self.each), b.op("min", self.number, self.longer))
        more = b.cast(b.op("lt", self.number, self.longer), u32)
        self.end = b.add(b.add(self.begin, self.each), more)

    def tiles(self, b: Builder) -> tuple[Value, Value]:
        """The first of the stretch's tiles, and the one behind the last."""
        last = b.op("floordiv", b.add(self.end, b.sub(self.units, b.const(1, u32))), self.units)
        first = b.op("floordiv", self.begin, self.units)
        return first, b.select(b.op("lt", self.begin, self.end), last, first)

    def enter(self, b: Builder, tile: Value) -> Value:
        """Find this block's steps of a tile; gives how many steps of other tiles it took before."""
        first = b.mul(tile, self.units)
        start = b.op("max", first, self.begin)
        stop = b.op("min", b.add(first, self.units), self.end)
        self.tile_end = b.add(first, self.units)
        self.first_step = b.sub(start, first)
        # Without steps there is one unit, and nothing to do in it.
        self.own_steps = b.op("min", b.sub(stop, start), self.steps)
        self.begins, self.ends = b.op("eq", start, first), b.op("eq", stop, self.tile_end)
        return b.sub(start, self.begin)

    def give(self, b: Builder, group: Value, thread: Value, leader: Value, sums: Sequence[Value]) -> None:
        """Leave the sums for the block that finishes the tile."""
        place = self._own(b, group, thread)
        row = b.cast(self.number, i64)
        for number in range(0, self.count, WIDE):
            where = b.add(place, b.index(number * GROUP))
            b.multi("store", self.partials, row, where, b.op("pack", *sums[number : number + WIDE]))
        _meet(b, group)
        own = self._flag(b, self.number, group)
        b.if_(leader, lambda inner: inner.multi("raise_flag", self.flags, own), lambda inner: [])

    def collect(self, b: Builder, group: Value, thread: Value, leader: Value, sums: Sequence[Value]) -> Sequence[Value]:
        """The whole sums: the blocks behind this one have the rest."""
        place = self._own(b, group, thread)

        def add(inner: Builder, peer: Value, *sums: Value) -> list[Value]:
            inner.if_(leader, lambda deep: deep.multi("await_flag", self.flags, self._flag(deep, peer, group)), lambda deep: [])
            _meet(inner, group)
            row, total = inner.cast(peer, i64), list(sums)
            for number in range(0, self.count, WIDE):
                where = inner.add(place, inner.index(number * GROUP))
                part = inner.op("load", self.partials, row, where, width=WIDE)
                for lane in range(WIDE):
                    total[number + lane] = inner.add(total[number + lane], inner.op("extract", part, lane=lane))
            return total

        one = b.const(1, u32)
        behind = b.add(self._holder(b, b.sub(self.tile_end, one)), one)
        return b.for_(b.add(self.number, one), behind, one, sums, add, name="peer", unroll=1)

    def _holder(self, b: Builder, step: Value) -> Value:
        """The number of the stretch a step belongs to."""
        one = b.const(1, u32)
        long = b.add(self.each, one)
        ahead = b.mul(self.longer, long)
        rest = b.op("floordiv", b.sub(b.op("max", step, ahead), ahead), b.op("max", self.each, one))
        return b.select(b.op("lt", step, ahead), b.op("floordiv", step, long), b.add(self.longer, rest))

    def _flag(self, b: Builder, number: Value, group: Value) -> Value:
        return b.cast(b.add(b.mul(number, b.const(self.schedule.math_warpgroups, u32)), group), i64)

    def _own(self, b: Builder, group: Value, thread: Value) -> Value:
        """Where a thread's sums begin in a row of `partials`."""
        start = b.add(b.mul(group, b.const(GROUP * self.count, u32)), b.mul(thread, b.const(WIDE, u32)))
        return b.cast(start, i64)


def _meet(b: Builder, group: Value) -> None:
    """The threads of the warp group wait for one another."""
    b.multi("named_barrier", b.add(b.cast(group, i32), b.const(1, i32)), threads=GROUP)
