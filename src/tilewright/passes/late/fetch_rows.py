"""Rows are asked for before the kernel launched before has ended. In and out: a thread-stage kernel that starts early (`wait_previous`), with rows to walk.

What the first steps of a product's loop read of the long factor is fetched to the level-2 cache ahead of `wait_previous`. No value is read: the cache is the
one that all multiprocessors share, so whoever writes those elements in the meantime writes them there too. Rows are told from x by the number of the block.

    wait_previous; …; for %k = 0, n, 512 { load %w, (program_id …), (… + %k); load %x, (… + %k) }
    ->   prefetch %w, …; wait_previous; …; for …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Tensor
from tilewright.passes.schedules.gemv import Gemv

SECTOR = 32
"""Bytes that memory sends at once."""


def fetch_rows(kernel: Kernel, schedule: Gemv) -> Kernel:
    """The kernel that asks for its first rows early; the very same one where it waits for nobody."""
    ops = kernel.body.ops
    waits = [place for place, op in enumerate(ops) if op.opcode == "wait_previous"]
    loop = next((op for op in walk(kernel.body) if op.opcode == "for" and any(o.opcode == "load" for o in op.regions[0].ops)), None)
    if not waits or loop is None:
        return kernel
    (at,) = waits
    b = Builder(kernel.span)
    fetching = _Fetching(kernel, loop)
    for step in range(schedule.fetch):
        fetching.emit(b, step)
    return replace(kernel, body=Block(kernel.body.args, (*ops[:at], *b.ops, *ops[at:])))


class _Fetching:
    def __init__(self, kernel: Kernel, loop: Op) -> None:
        self.loop = loop
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.index = loop.regions[0].args[0]

    def needed(self, values: Sequence[Value]) -> list[Op] | None:
        """The pure ops that values are computed by, in order; None where they need something else."""
        found: dict[int, Op] = {}
        order: list[Op] = []

        def visit(value: Value) -> bool:
            op = self.made.get(value)
            if op is None:
                return value is self.index
            if id(op) in found:
                return True
            if op.regions or OPS[op.opcode].effect != "pure" or not all(map(visit, op.operands)):
                return False
            found[id(op)] = op
            order.append(op)
            return True

        return order if all(map(visit, values)) else None

    def emit(self, b: Builder, step: int) -> None:
        first, _, width = self.loop.operands[:3]
        begin = self.needed([first, width])
        if begin is None:
            return
        mapping: dict[Value, Value] = {}
        clone_ops(b, begin, mapping)
        index = mapping.get(first, first)
        for _ in range(step):
            index = b.add(index, mapping.get(width, width))
        mapping[self.index] = index
        done: set[tuple[object, ...]] = set()
        for load in self.loop.regions[0].ops:
            memory = load.operands[0] if load.opcode == "load" else None
            if memory is None or not isinstance(memory.type, Tensor) or memory.type.space != "global":
                continue
            places = load.operands[1 : 1 + memory.type.rank]
            ops = self.needed(places)
            if ops is None or not any(op.opcode == "program_id" for op in ops):
                continue
            terms, constant = self.form(places[-1])
            key = (memory, places[:-1], terms, constant * memory.type.dtype.itemsize // SECTOR)
            if key not in done:
                done.add(key)
                clone_ops(b, [op for op in ops if op.result not in mapping], mapping)
                b.multi("prefetch", memory, *(mapping.get(v, v) for v in places))

    def form(self, value: Value) -> tuple[tuple[Value, ...], int]:
        """A place as values that are added up, and a constant."""
        op = self.made.get(value)
        if op is not None and op.opcode == "const" and isinstance(op.attrs["value"], int):
            return (), op.attrs["value"]
        if op is not None and op.opcode == "add":
            (first, one), (second, two) = (self.form(v) for v in op.operands)
            return (*first, *second), one + two
        return (value,), 0
