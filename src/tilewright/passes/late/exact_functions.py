"""Pass: functions by a GPU's own approximate instructions become the exact ones, for devices that have no such instructions.

    %y = rsqrt_approx %x   ->   %y = rsqrt %x
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value
from tilewright.ir.rewrite import rewrite

EXACT = {
    "exp2_approx": "exp2", "tanh_approx": "tanh", "sin_approx": "sin", "cos_approx": "cos", "log2_approx": "log2", "sqrt_approx": "sqrt",
    "rsqrt_approx": "rsqrt", "div_approx": "div",
}  # fmt: skip


def exact_functions(kernel: Kernel) -> Kernel:
    def one(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode == "rcp_approx":
            return [b.op("div", b.splat(1, op.operands[0]), op.operands[0])]
        exact = EXACT.get(op.opcode)
        return None if exact is None else [b.op(exact, *op.operands)]

    return rewrite(kernel, one)
