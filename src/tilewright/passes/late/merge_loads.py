"""Loads of neighbouring elements become one. In and out: a kernel at the thread stage.

Loads of single elements whose places are the same sum plus different constants, in one block and under the same condition, are joined into accesses of up
to 16 bytes where these are surely aligned. Only arrays that the kernel never writes are read so, and shared memory between two waits for what was copied there:
loads move up to the first of their group.

    %0 = load %w, %i, (%c + 4)   %1 = load %w, %i, (%c + 5)   …   ->   %v = load %w, %i, (%c + 4) {width = 4}   %0 = extract %v {lane = 0}   …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor
from tilewright.passes.late.neighbours import Neighbours

_WRITERS = frozenset({"store", "accumulate", "atomic", "atomic_store", "store_lanes", "scatter"})


def merge_loads(kernel: Kernel) -> Kernel:
    """The kernel with wide loads."""
    return replace(kernel, body=_Merging(kernel).block(kernel.body))


class _Merging:
    def __init__(self, kernel: Kernel) -> None:
        self.neighbours = Neighbours(kernel)
        written = {op.operands[0] for op in walk(kernel.body) if op.opcode in _WRITERS}
        self.read_only = {p for p in kernel.params if isinstance(p.type, Tensor) and p not in written}
        shared = {op.result for op in walk(kernel.body) if op.opcode == "alloc" and op.attrs.get("space") == "shared"}
        self.copied = {op.operands[0] for op in walk(kernel.body) if op.opcode == "copy_async"} & shared - written
        """Shared memory that copies fill: between two waits nobody changes what is read."""

    def block(self, block: Block) -> Block:
        groups: dict[tuple[object, ...], list[tuple[int, Op]]] = {}
        waits = 0
        for op in block.ops:
            waits += op.opcode in ("copy_wait", "warp_sync", "barrier", "copy_async") or bool(op.regions)
            if self.is_single(op):
                rank = op.operands[0].type.rank  # type: ignore[union-attr]
                terms, constant = self.neighbours.form(op.operands[rank])
                key = (op.operands[:rank], op.operands[rank + 1 :], terms, op.operands[rank].type, waits if op.operands[0] in self.copied else 0)
                groups.setdefault(key, []).append((constant, op))
        joined: dict[int, list[Op]] = {}
        for found in groups.values():
            for run in self.runs(found):
                for op in run:
                    joined[id(op)] = run
        b = Builder()
        values: dict[Value, Value] = {}
        done: set[int] = set()
        for op in block.ops:
            own = joined.get(id(op))
            if own is None:
                operands = tuple(values.get(v, v) for v in op.operands)
                b.append(replace(op, operands=operands, regions=tuple(self.inside(r, values) for r in op.regions)))
            elif id(own) not in done:
                done.add(id(own))
                self.load(b, own, values)
        return Block(block.args, tuple(b.ops))

    def inside(self, block: Block, values: dict[Value, Value]) -> Block:
        """A region: loads of its own are joined, and what was joined outside has other names."""
        merged = self.block(block)
        return merged if not values else _renamed(merged, values)

    def is_single(self, op: Op) -> bool:
        return (
            op.opcode == "load" and (op.operands[0] in self.read_only or op.operands[0] in self.copied) and "width" not in op.attrs and "cache" not in op.attrs
            and isinstance(op.result.type, Scalar) and op.operands[0].type.rank > 0  # type: ignore[union-attr]
        )  # fmt: skip

    def runs(self, found: Sequence[tuple[int, Op]]) -> list[list[Op]]:
        """Loads that become one, in the order of their places."""
        at: dict[int, Op] = {}
        for constant, op in found:
            at.setdefault(constant, op)
        return self.neighbours.runs(at)

    def load(self, b: Builder, run: Sequence[Op], values: dict[Value, Value]) -> None:
        first = run[0]
        rank = first.operands[0].type.rank  # type: ignore[union-attr]
        terms, constant = self.neighbours.form(first.operands[rank])
        with b.at(first.span):
            place: Value | None = None
            for term in terms:
                term = values.get(term, term)
                place = term if place is None else b.add(place, term)
            if constant or place is None:
                fixed = b.const(constant, first.operands[rank].type.dtype)
                place = fixed if place is None else b.add(place, fixed)
            operands = [*first.operands[:rank], place, *first.operands[rank + 1 :]]
            (vector,) = b.emit("load", [values.get(v, v) for v in operands], {**first.attrs, "width": len(run)})
            for lane, op in enumerate(run):
                values[op.result] = b.op("extract", vector, lane=lane)


def _renamed(block: Block, values: dict[Value, Value]) -> Block:
    ops = tuple(
        replace(op, operands=tuple(values.get(v, v) for v in op.operands), regions=tuple(_renamed(r, values) for r in op.regions)) for op in block.ops
    )
    return Block(block.args, ops)
