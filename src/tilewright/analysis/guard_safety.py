"""Whether a load may be done where a guard around it does not hold.

The checker lets an index rely on a guard that tests it. An index that is in range anyway, or has no loop index in common with the guard,
does not rely on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.analysis.ranges import Range, surely_at_most, surely_not_negative
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Tensor


def is_safe_without(load: Op, guard: Value, made: Mapping[Value, Op], known: Mapping[Value, Range]) -> bool:
    """`made` says which op computes a value, `known` between which sizes it lies."""
    memory = load.operands[0].type
    assert isinstance(memory, Tensor)
    if "watch" in load.attrs:
        return False
    tested = _leaves(guard, made)
    for index, extent in zip(load.operands[1 : 1 + memory.rank], memory.shape, strict=True):
        reach = known.get(index)
        inside = reach is not None and surely_not_negative(reach.low) and surely_at_most(reach.high, extent - 1)
        if not inside and tested & _leaves(index, made):
            return False
    return True


def _leaves(value: Value, made: Mapping[Value, Op]) -> set[Value]:
    """The values no op computes that it is made of."""
    found: set[Value] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        op = made.get(one)
        if op is None:
            found.add(one)
        else:
            waiting += op.operands
    return found
