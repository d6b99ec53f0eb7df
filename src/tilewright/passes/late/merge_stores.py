"""Stores of neighbouring elements become one. In and out: a kernel at the thread stage.

Stores of single elements whose places are the same sum plus different constants, in one block, are joined into accesses of up to 16 bytes where these are
surely aligned. Only arrays that the kernel never reads, and whose stores in that block are all of one such sum, are written so: stores move down to
the last of their group. Numbers that are rounded to be stored are rounded together.

    store %y, %i, (%c + 4), %0   store %y, %i, (%c + 5), %1   …   ->   %v = pack %0, %1, …   store %y, %i, (%c + 4), %v
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.base.dtypes import f32
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Scalar, Tensor, dtype_of
from tilewright.passes.late.neighbours import Form, Neighbours

_OTHERS = frozenset({"load", "accumulate", "atomic", "atomic_load", "atomic_store", "load_lanes", "gather", "store_lanes", "scatter"})


def merge_stores(kernel: Kernel) -> Kernel:
    """The kernel with wide stores."""
    return replace(kernel, body=_StoreMerging(kernel).block(kernel.body))


class _StoreMerging:
    def __init__(self, kernel: Kernel) -> None:
        self.neighbours = Neighbours(kernel)
        touched = {op.operands[0] for op in walk(kernel.body) if op.opcode in _OTHERS}
        self.write_only = {p for p in kernel.params if isinstance(p.type, Tensor) and p not in touched}

    def block(self, block: Block) -> Block:
        joined: dict[Op, list[Op]] = {}
        for memory in {op.operands[0] for op in block.ops if op.opcode == "store"} & self.write_only:
            for run in self.runs([op for op in block.ops if op.opcode == "store" and op.operands[0] is memory]):
                joined |= dict.fromkeys(run, run)
        left = {id(run): len(run) for run in joined.values()}
        b = Builder()
        for op in block.ops:
            own = joined.get(op)
            if own is None:
                b.append(replace(op, regions=tuple(self.block(region) for region in op.regions)) if op.regions else op)
                continue
            left[id(own)] -= 1
            if not left[id(own)]:
                self.store(b, own)
        return Block(block.args, tuple(b.ops))

    def runs(self, stores: Sequence[Op]) -> list[list[Op]]:
        """Stores that become one, in the order of their places; none where some place may be written twice."""
        rank = stores[0].operands[0].type.rank  # type: ignore[union-attr]
        if rank == 0 or any(op.attrs or not isinstance(op.operands[-1].type, Scalar) or len(op.operands) != rank + 2 for op in stores):
            return []
        forms: list[Form] = [self.neighbours.form(op.operands[rank]) for op in stores]
        if len({(op.operands[1:rank], form[0]) for op, form in zip(stores, forms, strict=True)}) != 1:
            return []
        at = {form[1]: op for op, form in zip(stores, forms, strict=True)}
        if len(at) != len(stores):
            return []
        return self.neighbours.runs(at)

    def store(self, b: Builder, run: Sequence[Op]) -> None:
        first = run[0]
        values = [op.operands[-1] for op in run]
        casts = [self.neighbours.made.get(v) for v in values]
        wide = [c.operands[0] for c in casts if c is not None and c.opcode == "cast" and not c.attrs.keys() - {"dtype"}]
        with b.at(first.span):
            if len(wide) == len(values) and all(dtype_of(v.type) is f32 for v in wide):
                found: Value = b.cast(b.op("pack", *wide), dtype_of(values[0].type))
            else:
                found = b.op("pack", *values)
            b.multi("store", *first.operands[:-1], found)
