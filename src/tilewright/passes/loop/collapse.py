"""Merge neighbouring loops that walk memory as one: fewer, longer loops.

In: a loop-stage kernel. Out: the same, where adjacent indices `i, j` are one index when every access uses them side by side and rows follow one
another without gaps. Adjacent are indices of `parallel`, of one `reduce`, and those of a loop of independent iterations and the one inside it.
Loops that walk the same array are merged together: the sums of a norm and the loop that scales its rows. Sits first, because schedules are chosen
on the merged domain: contiguous elementwise work of any rank becomes one loop.

    parallel %rows, %cols (%i, %j) { %v = load %x, %i, %j … }
    -> parallel %n (%k) { %v = load %x', %k … }      x': tensor<f32, [cols*rows], [1]>
"""

from __future__ import annotations

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.loop_nest import is_sweep
from tilewright.base.record import record, replace
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk, watched_axes
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import use_counts
from tilewright.ir.types import INDEX, Tensor


@record(identity=True)
class _Pair:
    """Two indices that may become one, and what they run to."""

    outer: Value
    inner: Value
    outer_extent: Size
    extent: Size
    op: Op
    """The op whose indices they are; for two loops the outer one."""
    position: int = 0
    loop: Op | None = None
    """The inner of two loops."""


def collapse(kernel: Kernel) -> Kernel:
    while True:
        merged = _merge_first(kernel)
        if merged is None:
            return kernel
        kernel = merged


def _merge_first(kernel: Kernel) -> Kernel | None:
    """Merge the pairs of some arrays' axes, or None when there are none left."""
    forms = analyse(kernel)
    pairs = [pair for op in walk(kernel.body) for pair in _pairs(op, forms)]
    if not pairs:
        return None
    users: dict[Value, list[Op]] = {}
    for op in walk(kernel.body):
        for value in set(op.operands):
            users.setdefault(value, []).append(op)
    counts = use_counts(kernel.body)
    by_indices = {(pair.outer, pair.inner): pair for pair in pairs}
    for pair in pairs:
        found = _together(pair, by_indices, users, forms, counts)
        if found is not None:
            return _merge(kernel, *found)
    return None


def _pairs(op: Op, forms: Forms) -> list[_Pair]:
    """The pairs of adjacent indices of an op."""
    found: list[_Pair] = []
    if op.opcode in ("parallel", "reduce"):
        args = op.regions[0].args
        extents = [_extent(v, forms) for v in op.operands]
        for position in range(len(op.operands) - 1):
            outer, extent = extents[position], extents[position + 1]
            if outer is not None and extent is not None:
                found.append(_Pair(args[position], args[position + 1], outer, extent, op, position))
    elif is_sweep(op):
        *before, inner, last = op.regions[0].ops if len(op.regions[0].ops) > 1 else (op, op)
        plain = last.opcode == "yield" and all(not o.regions and OPS[o.opcode].is_pure for o in before)
        if plain and is_sweep(inner) and inner is not op:
            ends = [_extent(v, forms) for v in (*op.operands, *inner.operands)]
            if ends[0] == ends[3] == ZERO and ends[2] == ends[5] == ONE and ends[1] is not None and ends[4] is not None:
                found.append(_Pair(op.regions[0].args[0], inner.regions[0].args[0], ends[1], ends[4], op, loop=inner))
    return found


def _extent(value: Value, forms: Forms) -> Size | None:
    form = forms.get(value)
    return form.constant if form is not None and not form.factors else None


def _together(
    first: _Pair, pairs: dict[tuple[Value, Value], _Pair], users: dict[Value, list[Op]], forms: Forms, counts: dict[Value, int]
) -> tuple[list[_Pair], dict[Value, int]] | None:
    """The pairs that merge with this one, and the arrays whose axes (d, d+1) merge with them; None when some access forbids it."""
    merged: list[_Pair] = []
    axes: dict[Value, int] = {}
    waiting = [first]
    while waiting:
        pair = waiting.pop()
        if pair in merged:
            continue
        merged.append(pair)
        uses = 0
        for access in users.get(pair.inner, []):
            if access.opcode not in ("load", "store"):
                return None
            memory = access.operands[0]
            assert isinstance(memory.type, Tensor)
            indices = access.operands[1 : 1 + memory.type.rank]
            d = next((d for d, index in enumerate(indices) if index is pair.outer), -1)
            if not _merges(memory.type, d, pair.extent) or indices[d + 1] is not pair.inner or axes.setdefault(memory, d) != d:
                return None
            uses += 1
            for other in users[memory]:
                own = _pair_of(other, memory, d, pairs, forms)
                if own is None or own.extent != pair.extent:
                    return None
                waiting.append(own)
        if counts.get(pair.outer, 0) != uses or counts.get(pair.inner, 0) != uses:
            return None
    return merged, axes


def _merges(memory: Tensor, d: int, extent: Size) -> bool:
    """Whether a tensor's axis d and the one behind it, of that extent, can be one."""
    if not 0 <= d < memory.rank - 1 or memory.space != "global" or memory.shape[d + 1] != extent:
        return False
    return memory.strides[d] == memory.strides[d + 1] * extent


def _pair_of(access: Op, memory: Value, d: int, pairs: dict[tuple[Value, Value], _Pair], forms: Forms) -> _Pair | None:
    """The pair with which an access walks the axes d and d+1 of an array, if it does nothing else with it."""
    assert isinstance(memory.type, Tensor)
    if access.opcode not in ("load", "store") or access.operands.count(memory) != 1 or access.operands[0] is not memory:
        return None
    indices = access.operands[1 : 1 + memory.type.rank]
    pair = pairs.get((indices[d], indices[d + 1]))
    if pair is None or any(axis >= d for axis in watched_axes(access)):
        return None
    both = {pair.outer, pair.inner}
    if any(set(forms[index].values) & both for p, index in enumerate(indices) if p not in (d, d + 1)):
        return None
    return pair


def _merge(kernel: Kernel, pairs: list[_Pair], axes: dict[Value, int]) -> Kernel:
    mapping: dict[Value, Value] = {}
    for memory, d in axes.items():
        old = memory.type
        assert isinstance(old, Tensor)
        shape = (*old.shape[:d], old.shape[d] * old.shape[d + 1], *old.shape[d + 2 :])
        strides = (*old.strides[:d], *old.strides[d + 1 :])
        mapping[memory] = Value(replace(old, shape=shape, strides=strides), memory.name)
    targets: dict[Op, _Pair] = {pair.op: pair for pair in pairs}

    def block(old: Block) -> Block:
        builder = Builder()
        for op in old.ops:
            builder.append(rebuilt(op, builder))
        return Block(old.args, tuple(builder.ops))

    def rebuilt(op: Op, builder: Builder) -> Op:
        pair = targets.get(op)
        if pair is not None:
            index = Value(INDEX, pair.outer.name + pair.inner.name)
            mapping[pair.inner] = index
            with builder.at(op.span):
                size = builder.index(pair.outer_extent * pair.extent)
            if pair.loop is not None:
                *before, _, _ = op.regions[0].ops
                body = block(Block((index,), (*before, *pair.loop.regions[0].ops)))
                low, step = (mapping.get(v, v) for v in (op.operands[0], op.operands[2]))
                return replace(op, operands=(low, size, step), regions=(body,))
            position = pair.position
            args = (*op.regions[0].args[:position], index, *op.regions[0].args[position + 2 :])
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
