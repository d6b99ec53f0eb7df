"""What a persistent kernel is made of: ops, loops over them, the arrays they touch, and the waits between them.

An op is one thread-stage kernel whose blocks are tasks. Ops that repeat, as those of the layers of a network, stand in a `TaskLoop` and share code; the
addresses of what they touch come from a table, which has a row for each iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import Program


@dataclass(frozen=True)
class MemoryRegion:
    """Bytes of a space: the workspace, or an array of its own."""

    space: str
    start: int = 0
    end: int = 1 << 62

    def overlaps(self, other: MemoryRegion) -> bool:
        return self.space == other.space and self.start < other.end and other.start < self.end

    def covers(self, other: MemoryRegion) -> bool:
        return self.space == other.space and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True)
class ArraySlot:
    """An array of one run of a program: where it lies, and how it is found when a step is bound to a device."""

    region: MemoryRegion
    source: Any
    """A `Ref`, a `PlannedValue`, the name of scratch memory, or the bits of a number."""
    nbytes: int
    align: int
    constant: bool
    """Whether nobody writes to it while the kernel runs."""


def number_slot(value: int | float) -> ArraySlot:
    """A number of the table: whole numbers by their bits, others as those of a double."""
    bits = int(np.int64(value).view(np.uint64)) if isinstance(value, int) else int(np.float64(value).view(np.uint64))
    return ArraySlot(MemoryRegion("number"), bits, 0, 0, True)


@dataclass(eq=False)
class PersistentOp:
    """A kernel of the step. `number` is that of its counter."""

    number: int
    title: str
    kernel: Kernel
    args: tuple[str, ...]
    """For each parameter a name of the program's: an array, or a number."""
    reads: frozenset[str]
    writes: frozenset[str]
    numbers: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    """Which program of the loop's body it belongs to."""
    tasks: int = 1
    grid: tuple[int, ...] = (1,)
    others: tuple[PersistentOp, ...] = ()
    """The same op with other kernels: which one an iteration runs is a number of the table, 0 for this. None of them has more tasks."""
    choice: str = ""
    """The column of that number."""

    @property
    def bodies(self) -> tuple[PersistentOp, ...]:
        """The op with each of its kernels."""
        return (self, *self.others)


@dataclass(frozen=True)
class OpWait:
    """Wait for an op: that of this iteration, of the one before, of all iterations of its loop in this step, or of the last step."""

    op: int
    which: str
    """`same`, `previous`, `all` or `last_step`."""


@dataclass(eq=False)
class TaskLoop:
    """Ops that run `count` times, one iteration after the other; those of other iterations touch other arrays."""

    count: int
    ops: list[PersistentOp]
    slots: list[list[dict[str, ArraySlot]]]
    """For each iteration, for each program of the body: arrays by name."""
    titles: list[str]
    columns: list[tuple[int, str]] = field(default_factory=list)
    """Which (program, array) each column of its part of the address table is for."""
    first_entry: int = 0
    """Where its part of the table begins."""
    first_instance: int = 0
    """How many ops of all iterations come before its first."""
    first: dict[int, list[OpWait]] = field(default_factory=dict)
    """What ops of the first iteration wait for, by number."""
    rest: dict[int, list[OpWait]] = field(default_factory=dict)
    """What ops of the other iterations wait for."""


@dataclass(eq=False)
class StepPlan:
    """A step of a graph as loops of ops."""

    name: str
    target: Any
    loops: list[TaskLoop]
    programs: list[Program]
    scratch: dict[str, tuple[int, DType]]
    """Bytes of each scratch array."""
    many: bool = False
    """Whether a launch makes several steps: then those of one step wait for the step before. Launches come one after the other anyway."""
    failures: dict[str, Program] = field(default_factory=dict)
    """Scratch arrays that hold what index checks found, and the program whose they are."""

    @property
    def ops(self) -> list[PersistentOp]:
        return [op for loop in self.loops for op in loop.ops]

    @property
    def bodies(self) -> list[PersistentOp]:
        """Ops with each of their kernels."""
        return [body for op in self.ops for body in op.bodies]

    @property
    def length(self) -> int:
        """Ops of a step, those of all iterations counted."""
        return sum(loop.count * len(loop.ops) for loop in self.loops)

    @property
    def entries(self) -> int:
        """Addresses of the table."""
        return sum(loop.count * len(loop.columns) for loop in self.loops)

    def instances(self, steps: int = 1, most: int = 0) -> Iterator[Instance]:
        """Every op of every iteration, in the order in which each block walks them. `most`: no more iterations of a loop than that."""
        for step in range(steps):
            for number, loop in enumerate(self.loops):
                for iteration in range(min(loop.count, most) if most else loop.count):
                    for op in loop.ops:
                        yield Instance(step, number, iteration, op.number)


@dataclass(frozen=True)
class Instance:
    """An op of an iteration of a step."""

    step: int
    loop: int
    iteration: int
    op: int
