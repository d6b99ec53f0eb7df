"""What all tasks of an op have in common is computed once.

In: the body of a kernel and the value that is the number of the task. Out: the ops that do not depend on it, which go before the loop over tasks, and the
others. Products with few rows compute the norm of their row in every block; blocks that stay need it once. Loops of one or two turns are written out before,
so that what they read of the row can be kept, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import bool_
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops, replace_values
from tilewright.ir.types import INDEX, Scalar, Tensor, Vec
from tilewright.mega.persistent.stream import ValueRanges
from tilewright.passes.common.simplify import simplify

MOST_TURNS = 2
"""Turns of a loop that is written out."""
MOST_WORDS = 64
"""Registers that what is kept may take."""
_WIDE = 16
"""Bytes that a lane of a weight's reader loads at once."""
_MOVES = frozenset({"pure", "read"})
_TOGETHER = frozenset({"shuffle", "vote", "reduce_lanes"})
"""Ops of a whole warp: all threads come by where they stand at the top of a kernel."""


def settled(kernel: Kernel, tasks: int) -> Kernel:
    """The kernel for so many tasks: what is the same number for all of them is that number."""
    if len(kernel.grid) != 1:
        return kernel
    ranges = ValueRanges(kernel, 0, max(0, tasks - 1))
    ranges.run()
    ops: list[Op] = []
    for op in kernel.body.ops:
        type_ = op.results[0].type if len(op.results) == 1 else None
        known = ranges.values.get(op.results[0]) if isinstance(type_, Scalar) and type_.dtype.is_int else None
        if known is not None and known[0] == known[1] and op.opcode in ("floordiv", "mod", "sub", "mul", "add", "shr", "and") and not op.regions:
            b = Builder(op.span)
            assert isinstance(type_, Scalar)
            b.const(known[0], type_.dtype)
            ops.append(replace(b.ops[0], results=op.results))
        else:
            ops.append(op)
    return simplify(replace(kernel, body=Block(kernel.body.args, tuple(ops))))


def write_out(kernel: Kernel, most: int = MOST_TURNS) -> Kernel:
    """The kernel with short loops at its top written out: those of at most so many turns."""
    ops: list[Op] = []
    renamed: dict[Value, Value] = {}
    numbers: dict[Value, int] = {}
    for old in kernel.body.ops:
        op = _renamed(old, renamed)
        turns = _turns(op, numbers, most) if op.opcode == "for" else None
        if turns is None:
            ops.append(op)
            if op.opcode == "const" and isinstance(op.attrs["value"], int):
                numbers[op.result] = int(op.attrs["value"])
            continue
        region = op.regions[0]
        carried: Sequence[Value] = op.operands[3:]
        for index in turns:
            b = Builder(op.span)
            number = b.index(index)
            numbers[number] = index
            mapping: dict[Value, Value] = {region.args[0]: number, **dict(zip(region.args[1:], carried, strict=True))}
            clone_ops(b, region.ops[:-1], mapping)
            carried = [mapping.get(v, v) for v in region.yields]
            ops += b.ops
        renamed.update(zip(op.results, carried, strict=True))
    return replace(kernel, body=Block(kernel.body.args, tuple(ops)))


def _renamed(op: Op, renamed: dict[Value, Value]) -> Op:
    if not renamed:
        return op
    return replace(op, operands=tuple(renamed.get(v, v) for v in op.operands), regions=tuple(replace_values(region, renamed) for region in op.regions))


def _turns(op: Op, numbers: dict[Value, int], most: int) -> range | None:
    low, high, step = (numbers.get(v) for v in op.operands[:3])
    if low is None or high is None or step is None or step <= 0:
        return None
    turns = range(low, high, step)
    return turns if 1 <= len(turns) <= most else None


def early(ops: Sequence[Op], constant: set[Value], most: int = 1 << 30) -> tuple[list[Op], list[Op]]:
    """The ops that need nothing but numbers and constant memory, whose loads begin where they stand, and the others; both in order. `most`: registers that the loads may take."""
    late: set[Value] = set()
    first: list[Op] = []
    rest: list[Op] = []
    b = Builder()
    true = b.const(True, bool_)
    for op in ops:
        pure = not op.regions and OPS[op.opcode].effect == "pure"
        reads = op.opcode == "load" and op.operands[0] in constant and isinstance(op.result.type, Vec) and op.result.type.width * op.result.type.dtype.itemsize == _WIDE
        if reads and not late.intersection(op.operands):
            most -= _WIDE // 4
            reads = most >= 0
        if (pure or reads) and not late.intersection(op.operands):
            if reads:
                attrs = MappingProxyType({**op.attrs, "masked": True, "early": True})
                op = replace(op, operands=op.operands if op.attrs.get("masked") else (*op.operands, true), attrs=attrs)
            first.append(op)
        else:
            rest.append(op)
            late.update(op.results)
    # Only what loads need is worth computing before the wait.
    wanted: set[Value] = set()
    chosen: set[int] = set()
    for op in reversed(first):
        if op.opcode == "load" or wanted.intersection(op.results):
            wanted.update(op.operands)
            chosen.add(id(op))
    moved = [op for op in first if id(op) in chosen]
    kept = {id(op) for op in first} - chosen
    stay = [op for op in first if id(op) in kept]
    return ([*b.ops, *moved] if moved else []), [*stay, *rest]


def split(ops: Sequence[Op], task: set[Value], written: set[Value], keep: int = MOST_WORDS) -> tuple[list[Op], list[Op]]:
    """The ops that need nothing of the task nor of memory that the op writes, and the others; both in order."""
    varies = set(task)
    common: list[Op] = []
    rest: list[Op] = []
    for op in ops:
        inside = [op, *(inner for region in op.regions for inner in walk(region))]
        needs = {v for each in inside for v in each.operands}
        still = all(_may_move(each) for each in inside) and needs.isdisjoint(varies) and needs.isdisjoint(written)
        (common if still else rest).append(op)
        if not still:
            varies.update(v for each in inside for v in each.results)
    return _affordable(common, rest, keep)


def _may_move(op: Op) -> bool:
    definition = OPS[op.opcode]
    return definition.effect in _MOVES or op.opcode in _TOGETHER or definition.effect == "control"


def _affordable(common: list[Op], rest: list[Op], keep: int) -> tuple[list[Op], list[Op]]:
    """As much of it as registers hold: whatever the others need of it stays there all the time."""
    needed = {v for op in rest for each in (op, *(i for r in op.regions for i in walk(r))) for v in each.operands}
    kept = [v for op in common for v in op.results if v in needed and op.opcode not in ("const", "tensor_at")]
    if sum(_words(v) for v in kept) <= keep:
        return common, rest
    # Reductions are worth it alone: their results are few.
    wanted: set[Value] = set()
    for op in reversed(common):
        if op.opcode in _TOGETHER or op.regions or any(r in wanted for r in op.results):
            wanted.update(v for each in (op, *(i for r in op.regions for i in walk(r))) for v in each.operands)
            wanted.update(op.results)
    first = [op for op in common if any(r in wanted for r in op.results) or op.opcode in ("const", "tensor_at")]
    chosen = set(map(id, first))
    order = {id(op): n for n, op in enumerate((*common, *rest))}
    others = [op for op in common if id(op) not in chosen] + rest
    # What is left of the common ops comes first: it needs nothing of the task.
    return first, sorted(others, key=lambda op: order[id(op)])


def _words(value: Value) -> int:
    type_ = value.type
    if isinstance(type_, Tensor) or type_ == INDEX:
        return 0  # indices are few, or computed again
    width = type_.width if isinstance(type_, Vec) else 1
    return max(1, width * type_.dtype.itemsize // 4)
