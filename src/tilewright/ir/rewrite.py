"""Rewriting immutable IR: map ops to replacements, clone with fresh values, remove what is dead.

`rewrite` walks a kernel inside out and in order. The function it is given sees each op with operands already replaced and
regions already rewritten, and either returns None (keep the op) or builds new ops and returns the values that stand for
the op's results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilewright.base.record import replace
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS

Rewrite = Callable[[Builder, Op], Sequence[Value] | None]


def rewrite(kernel: Kernel, function: Rewrite) -> Kernel:
    """The kernel with `function` applied to every op."""
    return replace(kernel, body=rewrite_block(kernel.body, function, {}))


def rewrite_block(block: Block, function: Rewrite, mapping: dict[Value, Value]) -> Block:
    builder = Builder()
    for op in block.ops:
        current = _substituted(op, mapping, lambda region: rewrite_block(region, function, mapping))
        with builder.at(current.span):
            results = function(builder, current)
        if results is None:
            builder.append(current)
        else:
            mapping.update(zip(op.results, results, strict=True))
    return Block(block.args, tuple(builder.ops))


def _substituted(op: Op, mapping: Mapping[Value, Value], region: Callable[[Block], Block]) -> Op:
    """The op with operands replaced and each region passed through `region`."""
    operands = tuple([mapping.get(v, v) for v in op.operands])
    if not op.regions and operands == op.operands:
        return op
    return Op(op.opcode, operands, op.results, op.attrs, tuple([region(r) for r in op.regions]), op.span)


def clone_ops(builder: Builder, ops: Sequence[Op], mapping: dict[Value, Value]) -> None:
    """Append copies of the ops with fresh result values; `mapping` is read and extended."""
    for op in ops:
        builder.append(_clone(op, mapping))


def _clone(op: Op, mapping: dict[Value, Value]) -> Op:
    operands = tuple(mapping.get(v, v) for v in op.operands)
    regions = tuple(clone_block(r, mapping) for r in op.regions)
    results = tuple(Value(r.type, r.name) for r in op.results)
    mapping.update(zip(op.results, results, strict=True))
    return Op(op.opcode, operands, results, op.attrs, regions, op.span)


def clone_block(block: Block, mapping: dict[Value, Value]) -> Block:
    args = tuple(Value(a.type, a.name) for a in block.args)
    mapping.update(zip(block.args, args, strict=True))
    return Block(args, tuple(_clone(op, mapping) for op in block.ops))


def replace_values(block: Block, mapping: Mapping[Value, Value]) -> Block:
    """The block with operands replaced; ops keep their result values."""
    return Block(block.args, tuple(_substituted(op, mapping, lambda r: replace_values(r, mapping)) for op in block.ops))


def use_counts(block: Block) -> dict[Value, int]:
    """How often each value is used in the block and inside it."""
    counts: dict[Value, int] = {}
    for op in walk(block):
        for value in op.operands:
            counts[value] = counts.get(value, 0) + 1
    return counts


def has_effects(op: Op) -> bool:
    """Whether removing the op could change anything but its results (reads are removable)."""
    if op.regions:
        return any(has_effects(inner) for region in op.regions for inner in region.ops if inner.opcode != "yield")
    return OPS[op.opcode].effect not in ("pure", "read") and op.opcode != "alloc"


def eliminate_dead(kernel: Kernel) -> Kernel:
    """Without ops whose results nobody uses and which have no effects."""
    live: set[Value] = set()
    return replace(kernel, body=_live_block(kernel.body, live))


def _live_block(block: Block, live: set[Value]) -> Block:
    kept: list[Op] = []
    for op in reversed(block.ops):
        # A kernel at the loop stage has its `parallel` even where nothing is left in it.
        if not (op.opcode in ("yield", "parallel") or has_effects(op) or any(r in live for r in op.results)):
            continue
        live.update(op.operands)
        if op.regions:
            op = Op(op.opcode, op.operands, op.results, op.attrs, tuple([_live_block(r, live) for r in op.regions]), op.span)
        kept.append(op)
    return Block(block.args, tuple(reversed(kept)))
