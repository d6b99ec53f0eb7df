"""Which arrays a kernel walks row by row.

`row_arrays(region)` looks at the body of a loop-stage kernel's parallel loop, at its reductions and loops: arrays they read
or write at an index of their own, that along the row, and before it at indices of the results.
"""

from __future__ import annotations

from tilewright.ir.nodes import Block, Op, Value, walk
from tilewright.ir.types import Tensor


def row_arrays(region: Block) -> dict[Value, Op]:
    """For each such array an access to it; its last index is that along the row."""
    found: dict[Value, Op] = {}
    for loop in walk(region):
        if loop.opcode not in ("reduce", "for") or not loop.regions[0].args:
            continue
        for op in loop.regions[0].ops:
            if op.opcode not in ("load", "store"):
                continue
            tensor = op.operands[0].type
            assert isinstance(tensor, Tensor)
            *row, last = op.operands[1 : 1 + tensor.rank] or (None,)
            if last is loop.regions[0].args[0] and row and all(v in region.args for v in row):
                found.setdefault(op.operands[0], op)
    return found
