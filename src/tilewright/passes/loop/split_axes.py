"""An axis that loops walk in blocks becomes two: heads that lie beside each other in a row are an axis of their own.

In: a loop-stage kernel. Out: the same, where a tensor's last axis, of known extent, is two axes if every access has an index `c * (…) + r` along it,
with `r` one index from 0 up to at most `c`. It is the same memory; attention and contractions are found where rows and columns have axes.

    load %qkv, %b, %s, 64 * %h + %d + 768     ->     load %qkv', %b, %s, %h + 12, %d
    qkv: tensor<bf16, [batch, seq, 2304], …>         qkv': tensor<bf16, [batch, seq, 36, 64], …>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.analysis.ranges import Range, surely_at_most, surely_not_negative
from tilewright.analysis.ranges import analyse as analyse_ranges
from tilewright.base.sizes import ONE, Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk, watched_axes
from tilewright.ir.rewrite import eliminate_dead, rewrite
from tilewright.ir.types import Tensor

_LEAST = 8
"""Elements of a block: shorter ones are windows, not columns."""


def split_axes(kernel: Kernel) -> Kernel:
    """The kernel with axes cut where all its accesses are in blocks."""
    accesses: dict[Value, list[Op]] = {}
    for op in walk(kernel.body):
        for place, value in enumerate(op.operands):
            if value in kernel.params and isinstance(value.type, Tensor):
                accesses.setdefault(value, []).append(op)
                if place or op.opcode not in ("load", "store"):
                    accesses[value].append(Op("unknown"))
    forms: Forms = {}
    cuts: dict[Value, tuple[Value, int]] = {}
    known: Mapping[Value, Range] = {}
    for memory, found in accesses.items():
        assert isinstance(memory.type, Tensor)
        # What is loaded from an array of integers may be an index itself.
        extent = memory.type.shape[-1].constant if memory.type.rank and memory.type.dtype.is_float else None
        if extent is None or memory.type.strides[-1] != ONE or any(op.opcode == "unknown" for op in found):
            continue
        if any(memory.type.rank - 1 in watched_axes(op) for op in found):
            continue
        forms, known = forms or analyse(kernel), known or analyse_ranges(kernel)
        block = _block([forms[op.operands[memory.type.rank]] for op in found], extent, known)
        if block:
            cuts[memory] = Value(_cut(memory.type, extent, block), memory.name), block
    return _parted(kernel, cuts, forms) if cuts else kernel


def _block(indices: Sequence[Affine], extent: int, known: Mapping[Value, Range]) -> int:
    """The elements of a block, or 0 where accesses do not walk in blocks."""
    block, several = extent, False
    for index in indices:
        inner = _inner(index)
        outer = [f.constant for v, f in index.factors if v is not inner]
        if inner is None or index.constant.constant is None or any(f is None for f in outer):
            return 0
        block = gcd(block, index.constant.constant, *(f for f in outer if f is not None))
        several = several or bool(outer)
    if not several or block < _LEAST or block == extent:
        return 0
    return block if all(_stays_inside(known.get(inner), block) for index in indices if (inner := _inner(index))) else 0


def _inner(index: Affine) -> Value | None:
    """The one value that counts single elements."""
    found = [v for v, f in index.factors if f == ONE]
    return found[0] if len(found) == 1 else None


def _stays_inside(found: Range | None, block: int) -> bool:
    return found is not None and surely_not_negative(found.low) and surely_at_most(found.high, Size.of(block - 1))


def _cut(old: Tensor, extent: int, block: int) -> Tensor:
    shape = (*old.shape[:-1], Size.of(extent // block), Size.of(block))
    return replace(old, shape=shape, strides=(*old.strides[:-1], Size.of(block), ONE))


def _parted(kernel: Kernel, cuts: Mapping[Value, tuple[Value, int]], forms: Forms) -> Kernel:
    def change(builder: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode not in ("load", "store") or op.operands[0] not in cuts:
            return None
        old = op.operands[0].type
        assert isinstance(old, Tensor)
        memory, block = cuts[op.operands[0]]
        index = forms[op.operands[old.rank]]
        inner = _inner(index)
        assert inner is not None and index.constant.constant is not None
        total: Value | None = builder.index(index.constant.constant // block) if index.constant.constant else None
        for value, factor in index.factors:
            if value is not inner:
                times = (factor.constant or 0) // block
                term = value if times == 1 else builder.mul(value, builder.index(times))
                total = term if total is None else builder.add(term, total)
        outer = total if total is not None else builder.index(0)
        operands = (memory, *op.operands[1 : old.rank], outer, inner, *op.operands[old.rank + 1 :])
        return builder.emit(op.opcode, operands, op.attrs)

    made = rewrite(kernel, change)
    return eliminate_dead(replace(made, params=tuple(cuts[p][0] if p in cuts else p for p in kernel.params)))
