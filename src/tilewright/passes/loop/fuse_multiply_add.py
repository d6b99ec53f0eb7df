"""Fuse a multiplication and the addition that uses it into one `fma`, on every target alike.

In: a kernel at any stage. Out: the same, with `add(mul(a, b), c)` and `sub` forms as `fma` where the product has no other
use. It is a pass of our own, and not left to LLVM, so that all devices and the emulator round in the same places.
Sits after simplification (products shared by several sums are visible then) and before math functions are expanded
(their fused operations are chosen by hand).

    %p = mul %a, %b;  %s = add %p, %c  ->  %s = fma %a, %b, %c
    %p = mul %a, %b;  %s = sub %p, %c  ->  %s = fma %a, %b, neg %c
    %p = mul %a, %b;  %s = sub %c, %p  ->  %s = fma neg %a, %b, %c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, blocks
from tilewright.ir.rewrite import eliminate_dead, rewrite, use_counts
from tilewright.ir.types import dtype_of, is_number


def fuse_multiply_add(kernel: Kernel) -> Kernel:
    counts = use_counts(kernel.body)
    products: dict[Value, Op] = {}
    home: dict[Value, Block] = {}
    """The block each value is computed in: a product stays where it is when its sum sits deeper, in a loop perhaps."""
    for block in blocks(kernel.body):
        for op in block.ops:
            home.update((r, block) for r in op.results)
            if op.opcode == "mul" and dtype_of(op.results[0].type).is_float and counts.get(op.results[0], 0) == 1:
                products[op.results[0]] = op

    def fuse(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode == "mul" and op.results[0] in products:
            products[op.results[0]] = op  # its operands may be sums that have been fused themselves
        if op.opcode not in ("add", "sub") or not is_number(op.results[0].type):
            return None
        left, right = op.operands
        if not any(v in products and home[v] is home[op.results[0]] for v in (left, right)):
            return None
        if left in products and home[left] is home[op.results[0]]:
            a, c = products[left].operands
            return [_marked(b, op, b.fma(a, c, right if op.opcode == "add" else b.op("neg", right)))]
        a, c = products[right].operands
        return [_marked(b, op, b.fma(a if op.opcode == "add" else b.op("neg", a), c, left))]

    return eliminate_dead(rewrite(kernel, fuse))


def _marked(b: Builder, op: Op, result: Value) -> Value:
    """An element of a packed array stays known as one."""
    if "packed" in op.attrs:
        b.ops[-1] = replace(b.ops[-1], attrs=MappingProxyType({**b.ops[-1].attrs, "packed": op.attrs["packed"]}))
    return result
