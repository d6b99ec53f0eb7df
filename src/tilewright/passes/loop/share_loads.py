"""Elements that a point has read before are not read again under a condition. Loop stage -> loop stage.

In: a loop-stage kernel. Out: the same, where a load gives what an earlier load of the same element gave: nothing of the point writes to the array between the two, and what other
points write are other elements. What a branch computes is then often what its condition needs, too, and a vector's lanes do it once for all of them.

    %p = load %d, %i, %j                                        %p = load %d, %i, %j
    %c = lt %t, %p                                              %c = lt %t, %p
    %v = if %c { yield %t }                              ->     %v = if %c { yield %t } { yield %p }
               { %q = load %d, %i, %j; yield %q }               store %d, %i, %j, %v
    store %d, %i, %j, %v
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS

_Place = tuple[tuple[Value, ...], str]
_PLAIN = frozenset({"store", "load"})


def share_loads(kernel: Kernel) -> Kernel:
    """The kernel with loads shared, in nests that have conditions."""
    if kernel.attrs.get("aliased") or not any(op.opcode == "if" for op in walk(kernel.body)):
        return kernel
    # Elements that points combine into may change at any time.
    shared = {op.operands[0] for op in walk(kernel.body) if op.operands and op.opcode not in _PLAIN and OPS[op.opcode].effect not in ("pure", "control")}
    return replace(kernel, body=_LoadSharing(shared).block(kernel.body, {}))


class _LoadSharing:
    def __init__(self, combined: set[Value]) -> None:
        self.combined = combined
        self.values: dict[Value, Value] = {}
        """What stands for the result of a load that is gone."""

    def block(self, block: Block, before: dict[_Place, Value]) -> Block:
        """`before`: what places held when they were read last."""
        known, ops = dict(before), list[Op]()
        for op in block.ops:
            written = {inner.operands[0] for inner in (op, *(i for region in op.regions for i in walk(region))) if inner.opcode == "store"}
            operands = tuple(self.values.get(v, v) for v in op.operands)
            # A loop may come back to what it has written; a branch reads what was there before.
            start = known if op.opcode == "if" else _without(known, written)
            op = replace(op, operands=operands, regions=tuple(self.block(region, start) for region in op.regions))
            known = _without(known, written)
            if op.opcode == "load" and operands[0] not in self.combined:
                place = operands, repr(sorted((k, repr(v)) for k, v in op.attrs.items()))
                if place in known:
                    self.values[op.result] = known[place]
                    continue
                known[place] = op.result
            ops.append(op)
        return Block(block.args, tuple(ops))


def _without(known: dict[_Place, Value], written: set[Value]) -> dict[_Place, Value]:
    return {place: value for place, value in known.items() if not written.intersection(place[0])} if written else known
