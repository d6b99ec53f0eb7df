"""Loads come before the first barrier of a kernel. In and out: a kernel at the thread stage.

A block that reads few elements and meets several times waits for memory once, not once after every barrier. Moved are the loads of arrays that the kernel
never writes, and what they need, where none of it depends on a barrier, a shuffle or shared memory. They come after `wait_previous`, in the order they had.

    %0 = load %m, …; barrier; %1 = load %o, …   ->   %0 = load %m, …; %1 = load %o, …; barrier
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.types import Tensor

_TOGETHER = frozenset({"shuffle", "vote"})
"""Ops whose results come from other threads."""


def early_loads(kernel: Kernel) -> Kernel:
    """The kernel with its loads first."""
    written = {op.operands[0] for op in walk(kernel.body) if op.operands and OPS[op.opcode].effect == "write"}
    read_only = {p for p in kernel.params if isinstance(p.type, Tensor) and p not in written}
    return replace(kernel, body=Block(kernel.body.args, loads_first(kernel.body.ops, read_only)))


def loads_first(ops: Sequence[Op], read_only: set[Value]) -> tuple[Op, ...]:
    """Ops with the loads of these arrays first, where they may be."""
    start = max((place + 1 for place, op in enumerate(ops) if op.opcode in ("wait_previous", "release_next")), default=0)
    made = {result: op for op in ops[start:] for result in op.results}
    late: set[Value] = set()
    loads: list[Op] = []
    for op in ops[start:]:
        if not _can_move(op, read_only) or any(v in late for v in _needs(op)):
            late.update(op.results)
        elif any(inner.opcode == "load" for inner in _inside(op)):
            loads.append(op)
    wanted: set[int] = set()
    waiting = list(loads)
    while waiting:
        op = waiting.pop()
        if id(op) not in wanted:
            wanted.add(id(op))
            waiting += [made[v] for v in _needs(op) if v in made]
    first = [op for op in ops[start:] if id(op) in wanted]
    rest = [op for op in ops[start:] if id(op) not in wanted]
    return (*ops[:start], *first, *rest)


def _inside(op: Op) -> list[Op]:
    return [op, *(inner for region in op.regions for inner in walk(region))]


def _needs(op: Op) -> list[Value]:
    """What an op and the ops inside it use from outside."""
    everything = _inside(op)
    own = {result for inner in everything for result in inner.results} | {a for inner in everything for region in inner.regions for a in region.args}
    return [v for inner in everything for v in inner.operands if v not in own]


def _can_move(op: Op, read_only: set[Value]) -> bool:
    """Whether it may come earlier: it writes nothing, speaks to no other thread, and reads what nobody writes."""
    if op.opcode == "for":
        return False
    for inner in _inside(op):
        if inner.opcode == "load":
            if inner.operands[0] not in read_only:
                return False
        elif inner.opcode in _TOGETHER or not (inner.opcode in ("if", "yield") or OPS[inner.opcode].effect == "pure"):
            return False
    return True
