"""Sums of guarded products, as windows have them, become sums that can be plain `fma`s. Tile stage, in and out.

In: what `lower_loops` writes for `if guard { total += x * w }`. Out: where the guard is the same for a whole vector, the factor that is not
loaded under the guard is made zero where it does not hold; the other one is zero there already, as masked loads are. Several results
share such a factor, for theirs is the same guard. Where it differs inside a vector the factor would take the registers of several, and
the sum itself is chosen; so it is where both factors, or none, are loads under the guard.

    %p = mul %x, %w; %t = select %guard, %p, 0; %s = add %total, %t
    -> %s = fma %x, (select %guard, %w, 0), %total                          %x is loaded under %guard
    -> %p = mul %x, %w; %s = select %guard, (add %total, %p), %total        otherwise; fuse_multiply_add follows
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import eliminate_dead, rewrite, use_counts
from tilewright.ir.types import Tile, dtype_of
from tilewright.passes.schedules.loops import Schedule


def window_sums(kernel: Kernel, schedule: Schedule) -> Kernel:
    """The kernel with such sums."""
    axis = sum(tile > 1 for tile in schedule.tiles[: schedule.vector_index])
    """The axis of its tiles along which vectors lie."""
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
        guard, value, zero = choice.operands
        product = made.get(value)
        even = not any(isinstance(v.type, Tile) and v.type.shape[axis] > 1 for v in conjuncts(guard))
        if even and product is not None and product.opcode == "mul" and counts[value] == 1:
            under = [is_loaded_under(factor, conjuncts(guard)) for factor in product.operands]
            if under[0] != under[1]:
                loaded, other = product.operands if under[0] else reversed(product.operands)
                return [b.fma(loaded, b.select(guard, other, zero), total)]
        return [b.select(guard, b.add(total, value), total)]

    def conjuncts(mask: Value) -> set[Value]:
        """What must hold where the mask does; values stand for themselves in any shape."""
        op = made.get(mask)
        if op is not None and op.opcode == "broadcast":
            return conjuncts(op.operands[0])
        if op is not None and op.opcode == "and":
            return conjuncts(op.operands[0]) | conjuncts(op.operands[1])
        return {mask}

    def is_loaded_under(value: Value, guard: set[Value]) -> bool:
        op = made.get(value)
        if op is not None and op.opcode in ("cast", "broadcast"):
            return is_loaded_under(op.operands[0], guard)
        return op is not None and op.opcode == "load" and bool(op.attrs.get("masked")) and guard <= conjuncts(op.operands[-1])

    return eliminate_dead(rewrite(kernel, guarded))
