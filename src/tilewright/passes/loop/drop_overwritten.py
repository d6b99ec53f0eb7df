"""Stores that another store overwrites before anything reads them are dropped. Loop stage -> loop stage.

In: a loop-stage kernel. Out: the same without a store that the same block follows by one to the same element, with nothing between them that reads the array. Sums are written so
(`c[i, j] = 0; for k: c[i, j] += …`), and what is left is a plain product, whose result is stored once.

    store %c, %i, %j, %0                      %s = reduce …
    %s = reduce …                    ->       store %c, %i, %j, %s
    store %c, %i, %j, %s
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import eliminate_dead

_KNOWN = ("pure", "read", "control")


def drop_overwritten(kernel: Kernel) -> Kernel:
    """The kernel without such stores."""
    body = _without(kernel.body)
    return kernel if body is kernel.body else eliminate_dead(replace(kernel, body=body))


def _without(block: Block) -> Block:
    ops = [_inside(op) for op in block.ops]
    last: dict[tuple[Value, ...], int] = {}
    dropped: set[int] = set()
    for position, op in enumerate(ops):
        if op.opcode == "store":
            place = op.operands[:-1]
            if place in last and not op.attrs and not ops[last[place]].attrs:
                dropped.add(last[place])
            last[place] = position
            continue
        inner = (op, *(i for region in op.regions for i in walk(region)))
        if any(i.opcode != "store" and OPS[i.opcode].effect not in _KNOWN for i in inner):
            last.clear()
        read = {i.operands[0] for i in inner if i.opcode != "store" and OPS[i.opcode].effect == "read" and i.operands}
        last = {place: at for place, at in last.items() if place[0] not in read}
    if not dropped and all(a is b for a, b in zip(ops, block.ops, strict=True)):
        return block
    return Block(block.args, tuple(op for position, op in enumerate(ops) if position not in dropped))


def _inside(op: Op) -> Op:
    regions = tuple(_without(region) for region in op.regions)
    return op if all(a is b for a, b in zip(regions, op.regions, strict=True)) else replace(op, regions=regions)
