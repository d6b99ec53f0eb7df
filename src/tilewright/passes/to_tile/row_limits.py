"""Which elements of a row count: those below a limit that all uses of what is loaded ask for. `region -> {load: limit}`.

In: the region of a reduction or of a sweep over a row. Out: for each of its loads whose result is used only where the row's index is below some value, by way of
`select(j < limit, f(x), constant)`, that value, where it is known before the region. Elements from there on need not be read.

    for j in 0..width { x = load row[j]; store out[j] = select(j < limit, exp(x - m), 0) }    the load has the limit
"""

from __future__ import annotations

from tilewright.ir.nodes import Block, Op, Value
from tilewright.ir.ops import OPS


def load_limits(region: Block) -> dict[int, Value]:
    """The limit of each load that has one, by the load's identity."""
    made = {result: op for op in region.ops for result in op.results}
    users: dict[Value, list[Op]] = {}
    for op in region.ops:
        for value in dict.fromkeys(op.operands):
            users.setdefault(value, []).append(op)
    inside = {v for op in region.ops for inner in op.regions for deep in inner.ops for v in deep.operands}
    found: dict[int, Value] = {}
    for op in region.ops:
        if op.opcode == "load" and not op.regions:
            limits = _limits(op.results[0], region.args[-1], made, users, inside)
            if limits is not None and len(limits) == 1:
                found[id(op)] = next(iter(limits))
    return found


def _limits(value: Value, index: Value, made: dict[Value, Op], users: dict[Value, list[Op]], inside: set[Value]) -> set[Value] | None:
    """The limits under which a value is used; None where some use has none."""
    if value in inside or not users.get(value):
        return None
    limits: set[Value] = set()
    for user in users[value]:
        if user.opcode == "select" and user.operands[1] is value and value not in (user.operands[0], user.operands[2]):
            test = made.get(user.operands[0])
            if test is not None and test.opcode == "lt" and test.operands[0] is index and test.operands[1] not in made:
                limits.add(test.operands[1])
                continue
        if user.opcode == "yield" or user.regions or not OPS[user.opcode].is_pure:
            return None
        for result in user.results:
            further = _limits(result, index, made, users, inside)
            if further is None:
                return None
            limits |= further
    return limits
