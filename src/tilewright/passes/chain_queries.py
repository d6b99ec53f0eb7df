"""The queries of attention on Hopper (`lower_wgmma_chain`): read into registers, and with the sign that scores are to have.

In: shared memory with a block's queries, as the copy engine put them there. Out: words of a first operand in registers, or that memory
with signs changed.
"""

from __future__ import annotations

from tilewright.base.dtypes import f32, i32, u32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.ops_matrix import ROW_BYTES
from tilewright.passes.chain_scores import ChainScores
from tilewright.passes.wgmma_epilogue import GROUP

TERMS = 16
"""Terms of one matrix instruction of two-byte elements."""


class ChainQueries(ChainScores):
    thread: Value

    def _query_words(self, b: Builder, memory: Value, empty: Value) -> list[Value]:
        """The queries as a first operand in registers, with the sign of what scores are multiplied by; their memory is free
        then."""
        wide, chunk = ROW_BYTES // self.dtype.itemsize, 16 // self.dtype.itemsize
        row = b.add(b.mul(self.warp, b.index(16)), b.op("and", self.lane, b.index(15)))
        start = b.mul(b.add(row, b.mul(self.own, b.index(64))), b.index(wide))
        half, turn = b.op("shr", self.lane, b.index(4)), b.op("and", self.lane, b.index(7))
        words: list[Value] = []
        for number in range(self.chain.k // TERMS):
            block, inside = divmod(number * TERMS, wide)
            place = b.op("xor", b.add(half, b.index(inside // chunk)), turn)
            place = b.add(b.add(start, b.mul(place, b.index(chunk))), b.index(block * self.chain.m * wide))
            words += b.multi("ldmatrix", memory, place, count=4)
        one_each = b.op("eq", self.lane, b.index(0))
        b.if_(one_each, lambda inner: inner.multi("mbarrier_arrive", empty, inner.const(0, u32)), lambda inner: [])
        times = self._score(self.steps[-1]).times
        if times is None or self._is_positive(times):
            return words
        held = self._held(b, times)
        signs = b.select(b.op("lt", held, b.const(0.0, f32)), b.const(0x80008000, u32), b.const(0, u32))
        return [b.op("xor", word, signs) for word in words]

    def _turn_round(self, b: Builder, memory: Value) -> None:
        """Where scores are multiplied by a negative number: the queries change their sign instead."""
        times = self._score(self.steps[-1]).times
        if times is None or self._is_positive(times):
            return
        held = self._held(b, times)
        wide, width = ROW_BYTES // self.dtype.itemsize, 16 // self.dtype.itemsize
        mine = b.mul(b.op("and", self.thread, b.index(GROUP - 1)), b.index(width))
        mine = b.add(mine, b.mul(self.own, b.index(64 * wide)))

        def negate(inner: Builder) -> list[Value]:
            for block in range(self.chain.k // wide):
                for part in range(64 * wide // (GROUP * width)):
                    place = inner.add(mine, inner.index(block * self.chain.m * wide + part * GROUP * width))
                    value = inner.op("load", memory, place, width=width)
                    inner.multi("store", memory, place, inner.op("neg", value))
            inner.multi("fence_async")
            inner.multi("named_barrier", inner.cast(inner.add(self.own, inner.index(1)), i32), threads=GROUP)
            return []

        b.if_(b.op("lt", held, b.const(0.0, f32)), negate, lambda inner: [])
