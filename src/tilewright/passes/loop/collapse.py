"""Merge neighbouring loops that walk memory as one: fewer, longer loops.

In: a loop-stage kernel. Out: the same, where adjacent indices `i, j` of `parallel` and of each `reduce` are one index when
every access uses them side by side and rows follow one another without gaps. Sits first, because schedules are chosen on
the merged domain: contiguous elementwise work of any rank becomes one loop.

    parallel %rows, %cols (%i, %j) { %v = load %x, %i, %j … }
    -> parallel %n (%k) { %v = load %x', %k … }      x': tensor<f32, [cols*rows], [1]>
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk, watched_axes
from tilewright.ir.rewrite import use_counts
from tilewright.ir.types import INDEX, Tensor


def collapse(kernel: Kernel) -> Kernel:
    while True:
        merged = _merge_first(kernel)
        if merged is None:
            return kernel
        kernel = merged


def _merge_first(kernel: Kernel) -> Kernel | None:
    """Merge one pair of indices somewhere, or None when there is none left."""
    forms = analyse(kernel)
    accesses = [op for op in walk(kernel.body) if op.opcode in ("load", "store")]
    counts = use_counts(kernel.body)
    for op in walk(kernel.body):
        if op.opcode not in ("parallel", "reduce"):
            continue
        for position in range(len(op.operands) - 1):
            pair = op.regions[0].args[position], op.regions[0].args[position + 1]
            extent = forms.get(op.operands[position + 1], Affine(((pair[0], Size.of(1)),)))
            outer = forms.get(op.operands[position], Affine(((pair[0], Size.of(1)),)))
            if extent.factors or outer.factors:
                continue
            axes = _mergeable(pair, extent.constant, accesses, forms, counts)
            if axes is not None:
                return _merge(kernel, op, position, outer.constant * extent.constant, axes)
    return None


def _mergeable(
    pair: tuple[Value, Value], extent: Size, accesses: list[Op], forms: Forms, counts: dict[Value, int]
) -> dict[Value, int] | None:
    """The tensors whose axes (d, d+1) merge with the pair, or None when some access forbids it."""
    axes: dict[Value, int] = {}
    untouched: set[Value] = set()
    uses = 0
    for access in accesses:
        memory = access.operands[0]
        assert isinstance(memory.type, Tensor)
        indices = access.operands[1 : 1 + memory.type.rank]
        touching = [d for d, index in enumerate(indices) if set(forms[index].values) & set(pair)]
        if not touching:
            untouched.add(memory)
            continue
        d = touching[0]
        if (
            touching != [d, d + 1]
            or indices[d] is not pair[0]
            or indices[d + 1] is not pair[1]
            or memory.type.shape[d + 1] != extent
            or memory.type.strides[d] != memory.type.strides[d + 1] * extent
            or memory.type.space != "global"
            or any(axis >= d for axis in watched_axes(access))
            or axes.setdefault(memory, d) != d
        ):
            return None
        uses += 1
    if untouched & axes.keys() or counts.get(pair[0], 0) != uses or counts.get(pair[1], 0) != uses:
        return None
    return axes


def _merge(kernel: Kernel, target: Op, position: int, extent: Size, axes: dict[Value, int]) -> Kernel:
    mapping: dict[Value, Value] = {}
    for memory, d in axes.items():
        old = memory.type
        assert isinstance(old, Tensor)
        shape = (*old.shape[:d], old.shape[d] * old.shape[d + 1], *old.shape[d + 2 :])
        strides = (*old.strides[:d], *old.strides[d + 1 :])
        mapping[memory] = Value(replace(old, shape=shape, strides=strides), memory.name)

    def block(old: Block) -> Block:
        builder = Builder()
        for op in old.ops:
            builder.append(rebuilt(op, builder))
        return Block(old.args, tuple(builder.ops))

    def rebuilt(op: Op, builder: Builder) -> Op:
        if op is target:
            index = Value(INDEX, "".join(a.name for a in op.regions[0].args[position : position + 2]))
            args = (*op.regions[0].args[:position], index, *op.regions[0].args[position + 2 :])
            mapping[op.regions[0].args[position + 1]] = index
            with builder.at(op.span):
                size = builder.index(extent)
            operands = (*op.operands[:position], size, *op.operands[position + 2 :])
            return replace(op, operands=operands, regions=(Block(args, block(op.regions[0]).ops),))
        operands = op.operands
        if op.opcode in ("load", "store") and op.operands[0] in axes:
            d = axes[op.operands[0]]
            operands = (*operands[: 1 + d], *operands[2 + d :])
        operands = tuple(mapping.get(v, v) for v in operands)
        return replace(op, operands=operands, regions=tuple(block(r) for r in op.regions))

    body = block(kernel.body)
    return replace(kernel, params=tuple(mapping.get(p, p) for p in kernel.params), body=body)
