"""The queries of attention on Hopper (`lower_wgmma_attention`): read into registers, and with the sign that scores are to have.

In: shared memory with a block's queries, as the copy engine put them there. Out: words of a first operand in registers, or that memory
with signs changed.
"""

from __future__ import annotations

from tilewright.base.dtypes import DType, f32, i32, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.passes.schedules.attention import TERMS, WgmmaAttention
from tilewright.passes.to_thread.attention.scores import AttentionScores
from tilewright.passes.to_thread.wgmma.epilogue import GROUP, Epilogue


class AttentionQueries:
    """The queries of one computing thread: `epilogue` knows where it is, `scores` which sign they have."""

    def __init__(self, epilogue: Epilogue, scores: AttentionScores, schedule: WgmmaAttention, dtype: DType) -> None:
        self.epilogue, self.scores, self.schedule = epilogue, scores, schedule
        self.dtype = dtype
        """Of an element in shared memory."""

    def words(self, b: Builder, memory: Value, empty: Value) -> list[Value]:
        """The queries as a first operand in registers, with the sign of what scores are multiplied by; their memory is free
        then."""
        wide, chunk = ROW_BYTES // self.dtype.itemsize, 16 // self.dtype.itemsize
        row = b.add(b.mul(self.epilogue.warp, b.index(16)), b.op("and", self.epilogue.lane, b.index(15)))
        start = b.mul(b.add(row, b.mul(self.epilogue.own, b.index(64))), b.index(wide))
        half, turn = b.op("shr", self.epilogue.lane, b.index(4)), b.op("and", self.epilogue.lane, b.index(7))
        words: list[Value] = []
        for number in range(self.schedule.k // TERMS):
            block, inside = divmod(number * TERMS, wide)
            place = b.op("xor", b.add(half, b.index(inside // chunk)), turn)
            place = b.add(b.add(start, b.mul(place, b.index(chunk))), b.index(block * self.schedule.m * wide))
            words += b.multi("ldmatrix", memory, place, count=4)
        one_each = b.op("eq", self.epilogue.lane, b.index(0))
        b.if_(one_each, lambda inner: inner.multi("mbarrier_arrive", empty, inner.const(0, u32)), lambda inner: [])
        signs = self.scores.query_signs(b)
        return words if signs is None else [b.op("xor", word, signs) for word in words]

    def turn_round(self, b: Builder, memory: Value) -> None:
        """Where scores are multiplied by a negative number: the queries change their sign instead."""
        scale = self.scores.signed_scale(b)
        if scale is None:
            return
        wide, width = ROW_BYTES // self.dtype.itemsize, 16 // self.dtype.itemsize
        mine = b.mul(b.op("and", self.epilogue.thread, b.index(GROUP - 1)), b.index(width))
        mine = b.add(mine, b.mul(self.epilogue.own, b.index(64 * wide)))

        def negate(inner: Builder) -> list[Value]:
            for block in range(self.schedule.key_columns // wide):
                for part in range(64 * wide // (GROUP * width)):
                    place = inner.add(mine, inner.index(block * self.schedule.m * wide + part * GROUP * width))
                    value = inner.op("load", memory, place, width=width)
                    inner.multi("store", memory, place, inner.op("neg", value))
            inner.multi("fence_async")
            inner.multi("named_barrier", inner.cast(inner.add(self.epilogue.own, inner.index(1)), i32), threads=GROUP)
            return []

        b.if_(b.op("lt", scale, b.const(0.0, f32)), negate, lambda inner: [])
