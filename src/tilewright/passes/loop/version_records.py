"""Kernels that read pairs, triples or fours of numbers get a second version for just that many. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a kernel that walks the last axis of arrays by constants alone (`x[i, 0]`, `x[i, 1]`) is two kernels: one where
those axes have as many elements as the constants say, and one for longer ones. Sizes decide which of them has points; the other has none. In the first, how far
records lie apart is a number, so that vectors go along them.

    parallel %n (%i) { … x[i, 0] … x[i, 1] … }
    ->  parallel n * (k == 2) (%i) { … x: [n, 2] … }     parallel n * (k != 2) (%i) { … x: [n, k] … }
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.affine import analyse
from tilewright.analysis.loop_nest import (
    FEWEST_LANES,
    compute_bytes,
    constant_of,
    nest_of,
    record_index,
    record_sizes,
    vector_index,
)
from tilewright.base.dtypes import i64
from tilewright.base.sizes import ONE, Size, maximum, minimum
from tilewright.base.target import Target
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.specialise import with_sizes
from tilewright.ir.types import Scalar
from tilewright.passes.schedules.plans import Plan, Plans


def version_records(program: Program, plans: Plans, target: Target) -> tuple[Program, Plans]:
    """The program with versions for records."""
    if target.simt:
        return program, plans
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    for call, schedule in zip(program.calls, plans, strict=True):
        versions = _versions(program, call) if schedule is None and target.vector_bytes >= FEWEST_LANES * compute_bytes(call.kernel) else (call,)
        calls += versions
        schedules += [schedule] * len(versions)
    return replace(program, calls=tuple(calls)), tuple(schedules)


def _versions(program: Program, call: KernelCall) -> tuple[KernelCall, ...]:
    kernel = call.kernel
    if "in_order" in kernel.attrs or not any(op.opcode == "parallel" for op in kernel.body.ops):
        return (call,)
    sizes = record_sizes(kernel)
    if not sizes or not nest_of(kernel).extents:
        return (call,)
    short = with_sizes(replace(program, calls=(call,), checks=(), computed=()), sizes).calls[0]
    nest = nest_of(short.kernel)
    if record_index(short.kernel, nest) < 0 and vector_index(nest) < 0:
        return (call,)
    extent = constant_of(analyse(kernel)[nest_of(kernel).parallel.operands[0]])
    if "$dynamic" in extent.names:
        return (call,)
    exact = ONE
    for name, number in sizes.items():
        exact = exact * minimum(1, maximum(0, number + 1 - Size.of(name)))  # it is never less, where there are points
    return (
        replace(short, kernel=_with_extent(short.kernel, extent.substitute({n: Size.of(k) for n, k in sizes.items()}) * exact, f"{kernel.name}.records")),
        replace(call, kernel=_with_extent(kernel, extent * (ONE - exact), kernel.name)),
    )


def _with_extent(kernel: Kernel, extent: Size, name: str) -> Kernel:
    """The kernel with another extent of its first index."""
    value = Value(Scalar(i64), "points")
    size = Op("size", (), (value,), MappingProxyType({"value": extent}), (), kernel.span)
    ops = tuple(replace(op, operands=(value, *op.operands[1:])) if op.opcode == "parallel" else op for op in kernel.body.ops)
    return replace(kernel, name=name, body=Block(kernel.body.args, (size, *ops)))
