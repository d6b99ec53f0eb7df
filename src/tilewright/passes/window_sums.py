"""Sums of guarded products, as windows have them, become guarded `fma`s. Tile stage, in and out.

In: what `lower_loops` writes for `if guard { total += x * w }`. Out: a product that is left out costs one choice, and one that is not
is rounded once.

    %p = mul %x, %w; %t = select %guard, %p, 0; %s = add %total, %t  ->  %s = select %guard, fma(%x, %w, %total), %total
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import eliminate_dead, rewrite, use_counts
from tilewright.ir.types import dtype_of
from tilewright.passes.contract import contract


def window_sums(kernel: Kernel) -> Kernel:
    made: dict[Value, Op] = {result: op for op in walk(kernel.body) for result in op.results}
    counts = use_counts(kernel.body)

    def is_zero(value: Value) -> bool:
        op = made.get(value)
        if op is not None and op.opcode == "broadcast":
            return is_zero(op.operands[0])
        return op is not None and op.opcode == "const" and op.attrs["value"] == 0

    def guarded(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "add" or not dtype_of(op.results[0].type).is_float:
            return None
        total, term = op.operands
        choice = made.get(term)
        if choice is None or choice.opcode != "select" or counts[term] != 1 or not is_zero(choice.operands[2]):
            return None
        guard, value, _ = choice.operands
        return [b.select(guard, b.add(total, value), total)]

    return contract(eliminate_dead(rewrite(kernel, guarded)))
