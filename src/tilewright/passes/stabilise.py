"""Forms that lose fewer bits: algebra that is exact on paper and better in floating point.

In: a loop-stage kernel. Out: the same, with `1 + tanh(u)` as `2 * sigmoid(2u)`: near -1 the sum cancels all but a few bits of tanh,
the sigmoid keeps them, and costs no more. GELU in its tanh form is where this counts. Sits before contraction, which would
hide the sum in an fma.

    %t = tanh %u;  %s = add 1.0, %t  ->  %s = mul 2.0, sigmoid (mul 2.0, %u)
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.rewrite import eliminate_dead, rewrite


def stabilise(kernel: Kernel) -> Kernel:
    tangents = {op.results[0]: op for op in walk(kernel.body) if op.opcode == "tanh"}
    ones = {op.results[0] for op in walk(kernel.body) if op.opcode == "const" and op.attrs["value"] == 1.0}
    if not tangents:
        return kernel

    def better(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "add":
            return None
        tangent = next((tangents[v] for v in op.operands if v in tangents), None)
        if tangent is None or not any(v in ones for v in op.operands):
            return None
        twice = b.mul(tangent.operands[0], b.splat(2.0, tangent.operands[0]))
        (half,) = b.emit("sigmoid", [twice], tangent.attrs)
        return [b.mul(half, b.splat(2.0, half))]

    return eliminate_dead(rewrite(kernel, better))
