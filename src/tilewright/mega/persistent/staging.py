"""What tasks of an op with a ring read besides weights: by shared memory, and early.

In: the body of a product whose weights come by a ring. Out: the body with loads where they cost least. A long row does not fit registers, so a body reads it piece by piece in its
loop, and each look waits behind the copies of the ring. Here all threads of a block fetch the row at once into shared memory, and tasks read it there (`row_arrays`).
Single numbers that a task needs at its end are asked for at its beginning (`loads_first`). A load ahead of the next turn of a loop needs no zeros after the last (`mark_unread`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.ir.nodes import Block, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import use_counts
from tilewright.ir.types import Tensor

ROW_BYTES = 32 << 10
"""Bytes of shared memory, at most, for the rows of an op."""
UNREAD = "unread"
"""Attribute of a masked load of a body: where its mask does not hold, nobody reads what it gives."""


def row_arrays(rest: Sequence[Op], arrays: Iterable[Value]) -> list[Value]:
    """Those of the arrays that loops of the body load from and nobody writes, as many as fit; all are dense, and multiples of 16 bytes."""
    inside = {o.operands[0] for op in rest for region in op.regions for o in walk(region) if o.opcode == "load"}
    written = {v for op in rest for o in (op, *(i for r in op.regions for i in walk(r))) if OPS[o.opcode].effect not in ("pure", "read", "control", "sync") for v in o.operands}
    found: list[Value] = []
    left = ROW_BYTES
    for value in arrays:
        if value in inside and value not in written and (size := dense_bytes(value)) and size <= left:
            found.append(value)
            left -= size
    return found


def dense_bytes(value: Value) -> int:
    """Bytes of an array without gaps that 16 bytes at once can be read of; else 0."""
    type_ = value.type
    if not isinstance(type_, Tensor) or type_.align < 16:
        return 0
    apart = 1
    for extent, stride in zip(reversed(type_.shape), reversed(type_.strides), strict=True):
        count = extent.evaluate({})
        if count != 1 and stride.evaluate({}) != apart:
            return 0
        apart *= count
    size = apart * type_.dtype.itemsize
    return size if size % 16 == 0 else 0


def loads_first(rest: Sequence[Op]) -> list[Op]:
    """The ops with loads behind a loop before it, where nothing that they need comes later."""
    first = next((n for n, op in enumerate(rest) if op.opcode == "for"), len(rest))
    written = {v for op in rest for o in (op, *(i for r in op.regions for i in walk(r))) if OPS[o.opcode].effect not in ("pure", "read", "control", "sync") for v in o.operands}
    late: set[Value] = set()
    free: list[Op] = []
    for op in rest[first:]:
        moves = not op.regions and (OPS[op.opcode].effect == "pure" or (op.opcode == "load" and op.operands[0] not in written)) and late.isdisjoint(op.operands)
        if moves:
            free.append(op)
        else:
            late.update(op.results)
    wanted: set[Value] = set()
    chosen: set[int] = set()
    for op in reversed(free):
        if op.opcode == "load" or wanted.intersection(op.results):
            wanted.update(op.operands)
            chosen.add(id(op))
    return [*rest[:first], *(op for op in free if id(op) in chosen), *(op for op in rest[first:] if id(op) not in chosen)]


def mark_unread(body: Block, memories: Iterable[Value]) -> Block:
    """The body in which loads from the memories say where nobody reads what their mask leaves out: those for the next turn of a loop, whose mask is that there is one."""
    known, counts = set(memories), use_counts(body)
    return replace(body, ops=tuple(_marked(op, known, counts) for op in body.ops))


def _marked(op: Op, memories: set[Value], counts: dict[Value, int]) -> Op:
    if op.opcode != "for":
        return op
    region = op.regions[0]
    index, (_, high, step) = region.args[0], op.operands[:3]
    defined = {r: o for o in region.ops for r in o.results}
    ops: list[Op] = []
    for inner in region.ops:
        if inner.opcode == "load" and inner.operands[0] in memories and inner.attrs.get("masked"):
            mask, places = defined.get(inner.operands[-1]), [n for n, v in enumerate(region.yields) if v is inner.result]
            ahead = defined.get(mask.operands[0]) if mask is not None and mask.opcode == "lt" and mask.operands[1] is high else None
            if ahead is not None and ahead.opcode == "add" and {*ahead.operands} == {index, step} and len(places) == counts[inner.result] and not any(op.results[n] in counts for n in places):
                inner = replace(inner, attrs=MappingProxyType({**inner.attrs, UNREAD: True}))
        ops.append(inner)
    return replace(op, regions=(replace(region, ops=tuple(ops)),))
