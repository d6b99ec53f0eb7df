"""Sums in levels: stretches of a long sum are added up from zero, and their sums are added to those of the level above.

In: how long the stretches of each level are, and the registers of one level. Out: where the levels above are kept while the innermost
one is added up. A chain of k additions errs like k, stretches of c like the root of k (c + k / c), and matrix units, whose additions
drop bits, err by as much as they have added up; so an accurate sum has stretches near the root of its length. The sums of levels that
registers have no room for lie in shared memory, each thread's where it reads and writes whole vectors without meeting another's.

    level 0: chunk * chunks … terms of each sum that is kept        level 1: chunk terms        innermost: steps, in registers
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import Vec, dtype_of
from tilewright.passes.schedules.matrix import Mma, WarpProduct

ROOM = 224
"""Registers of a thread that may be planned for."""
_VECTOR = 16
"""Bytes of one access to shared memory."""
_AT_ONCE = 4
"""Vectors of kept sums that are in registers at once, while all sums of the level below are."""


def stretches(schedule: WarpProduct) -> list[int]:
    """Terms of one sum of each level but the outermost, longest first."""
    if not schedule.chunk:
        return []
    return [schedule.chunk * schedule.chunks, schedule.chunk] if schedule.chunks > 1 else [schedule.chunk]


def in_registers(schedule: WarpProduct, words: int, others: int) -> int:
    """How many of the levels above the innermost are kept in registers: `words` are those of one level, `others` all else."""
    if isinstance(schedule, Mma) and schedule.levels_held >= 0:
        return min(len(stretches(schedule)), schedule.levels_held)
    return max(0, min(len(stretches(schedule)), (ROOM - others) // words - 1))


class PartialSums:
    """The sums of one level in shared memory."""

    def __init__(self, b: Builder, like: Sequence[Value], thread: Value, threads: int, number: int) -> None:
        self.types = [v.type for v in like]
        self.dtype: DType = dtype_of(like[0].type)
        widths = [t.width if isinstance(t, Vec) else 1 for t in self.types]
        self.width = _VECTOR // self.dtype.itemsize
        self.vectors = sum(widths) // self.width
        self.threads = threads
        self.memory = b.op(
            "alloc", dtype=self.dtype, shape=(sum(widths) * threads,), space="shared", align=128, name=f"sums{number}"
        )
        self.base = b.mul(thread, b.index(self.width))

    def _place(self, b: Builder, number: int) -> Value:
        return b.add(self.base, b.index(number * self.threads * self.width))

    def put(self, b: Builder, sums: Sequence[Value]) -> None:
        """Keep these."""
        for number, whole in enumerate(self._joined(b, sums)):
            b.multi("store", self.memory, self._place(b, number), whole)

    def get(self, b: Builder) -> list[Value]:
        """What was kept last."""
        found = [b.op("load", self.memory, self._place(b, n), width=self.width) for n in range(self.vectors)]
        if isinstance(self.types[0], Vec):
            return found
        return [b.op("extract", whole, lane=lane) for whole in found for lane in range(self.width)]

    def add(self, b: Builder, sums: Sequence[Value]) -> None:
        """Add these to what is kept, a vector at a time."""
        for number, whole in enumerate(self._joined(b, sums)):
            place = self._place(b, number)
            b.multi("store", self.memory, place, b.add(b.op("load", self.memory, place, width=self.width), whole))
            if number % _AT_ONCE == _AT_ONCE - 1:
                b.multi("warp_sync")

    def _joined(self, b: Builder, sums: Sequence[Value]) -> list[Value]:
        """The sums as whole vectors."""
        if isinstance(self.types[0], Vec):
            return list(sums)
        return [b.op("pack", *sums[n : n + self.width]) for n in range(0, len(sums), self.width)]
