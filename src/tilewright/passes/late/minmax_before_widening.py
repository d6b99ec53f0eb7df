"""Pass: of numbers that were only widened, the larger and the smaller are found before they are widened.

    %a = cast %x {dtype = f32}; %b = cast %y {dtype = f32}; %m = max %a, %b     x, y: vec<bf16, 8>
    -> %n = max %x, %y : vec<bf16, 8>; %m = cast %n {dtype = f32}

In: a thread-stage kernel for a GPU. Out: the same kernel; a maximum of two bf16 or f16 is one instruction where there were
four, and a row whose maximum is looked for stays in half the registers until it is computed with. Widening keeps the order,
NaN and the sign of zeros, so the results are the same. Where lanes that are not the row's are replaced by the least number
there is, they are replaced before the widening too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.dtypes import DType, bf16, f16, f32
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Vec, dtype_of


def minmax_before_widening(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with extremes taken of narrow vectors."""
    if not target.has("bf16"):
        return kernel
    narrow: dict[Value, Value] = {}
    """For values that are a widened one: that one."""
    infinite: dict[Value, float] = {}

    def alike(values: Sequence[Value]) -> bool:
        return all(v in narrow for v in values) and len({narrow[v].type for v in values}) == 1

    def function(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode == "cast" and isinstance(op.operands[0].type, Vec) and _widens(op):
            narrow[op.results[0]] = op.operands[0]
        elif op.opcode == "const" and op.attrs["dtype"] is f32 and op.attrs["value"] in (math.inf, -math.inf):
            infinite[op.results[0]] = math.inf if op.attrs["value"] == math.inf else -math.inf
        elif op.opcode == "broadcast" and op.operands[0] in infinite:
            infinite[op.results[0]] = infinite[op.operands[0]]
        elif op.opcode == "select" and op.operands[1] in narrow and op.operands[2] in infinite:
            kept = narrow[op.operands[1]]
            return _again(b, [b.select(op.operands[0], kept, b.splat(infinite[op.operands[2]], kept))])
        elif op.opcode in ("min", "max") and alike(op.operands):
            return _again(b, [b.op(op.opcode, *(narrow[v] for v in op.operands))])
        elif op.opcode == "if" and len(op.results) == 1 and alike([region.yields[0] for region in op.regions]):
            return _again(b, _narrow_branches(b, op, narrow))
        elif op.opcode == "split" and op.operands[0] in narrow:
            return _again(b, b.multi("split", narrow[op.operands[0]]))
        return None

    def _again(b: Builder, values: Sequence[Value]) -> list[Value]:
        wide = [b.cast(v, f32) for v in values]
        narrow.update(zip(wide, values, strict=True))
        return wide

    return rewrite(kernel, function)


def _narrow_branches(b: Builder, op: Op, narrow: Mapping[Value, Value]) -> tuple[Value, ...]:
    """The same choice between what was widened."""
    regions = []
    for region in op.regions:
        *ops, last = region.ops
        regions.append(replace(region, ops=(*ops, replace(last, operands=(narrow[last.operands[0]],)))))
    result = Value(narrow[op.regions[0].yields[0]].type)
    return b.append(replace(op, regions=tuple(regions), results=(result,)))


def _widens(op: Op) -> bool:
    source: DType = dtype_of(op.operands[0].type)
    return source in (bf16, f16) and dtype_of(op.results[0].type) is f32
