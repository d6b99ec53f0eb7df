"""Kernels with reductions say how many operations they do. In and out: a loop-stage kernel for a CPU.

A launch wakes other threads where it has work enough for them. Most kernels have as much as they have elements; products, convolutions and windows do many
operations for each. They are counted here, where loops still have their lengths: `operations` of the kernel, in the sizes of the call.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.work import work_of
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel


def count_operations(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with its number of operations, where it has reductions."""
    if target.simt or "reduce" not in kernel.opcodes:
        return kernel
    return replace(kernel, attrs=MappingProxyType({**kernel.attrs, "operations": work_of(kernel).operations}))
