"""Pass: how many iterations the loops of a thread make, for drivers that leave loops after so many.

In: a thread-stage kernel as its code will be, and a target with `max_turns`. Out: the same kernel. Its attribute `turns` is the count, a size that a launch
evaluates; `open_loops` says that there are loops whose end no launch knows. A launch that is over the limit is refused (`Launch.turns`).

An op that becomes a loop counts as that: divisions of 64 bits where a target has no such integers have 64 iterations. An update of a float in memory is tried again
while other threads are faster: 16 attempts are counted, and the loop is open.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel, Op, walk
from tilewright.ir.types import Scalar, dtype_of
from tilewright.passes.portable.loop_turns import loop_turns

_ATTEMPTS = 16
_BITS = 66
"""Iterations of a division of 64 bits, and the pass that leaves it."""
_BYTES = 6
"""Those of `byte_perm`."""


def count_turns(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with the count of its iterations."""

    def cost(op: Op) -> int:
        if op.opcode == "atomic":
            return _ATTEMPTS if _tries(op) else 2
        if op.opcode in ("floordiv", "mod") and not target.wide_ints and isinstance(op.results[0].type, Scalar):
            dtype = dtype_of(op.results[0].type)
            return _BITS if dtype.is_int and dtype.bits == 64 else 0
        return _BYTES if op.opcode == "byte_perm" and not target.wide_ints else 0

    found = loop_turns(kernel, cost)
    is_open = found.open_ended or any(op.opcode == "atomic" and _tries(op) for op in walk(kernel.body))
    return replace(kernel, attrs=MappingProxyType({**kernel.attrs, "turns": found.count, "open_loops": is_open}))


def _tries(op: Op) -> bool:
    """Whether an update is a loop of compare-and-swap."""
    kind = op.attrs["kind"]
    return kind in ("inc", "dec") or (dtype_of(op.results[0].type).is_float and kind not in ("cas", "exchange"))
