"""Kernels that hold every op of the op table in every dtype: what the code generators must translate on every target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from support import array, loop_kernel, program, reduce_2d, strided
from tilewright.base.dtypes import SCALARS, DType, f32, f64, i32, u32
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.ops import OPS, TypeRuleError, result_types
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.types import Scalar, dtype_of
from tilewright.ir.verify import verify_kernel
from tilewright.passes.late.expand_casts import expand_casts
from tilewright.passes.routes import lower

COUNT = 4096
"""Elements, known and divisible by every tile, so that no code is generated twice for edges."""
ELEMENTWISE = tuple(d.name for d in OPS.values() if d.group in ("elementwise", "function") and "loop" in d.stages)
REDUCTIONS = ("add", "mul", "min", "max", "and", "or", "argmin", "argmax")


def arity(opcode: str, dtype: DType) -> int | None:
    """How many operands of that dtype the op takes; None when it does not take the dtype."""
    for count in (1, 2, 3):
        try:
            result_types(opcode, [Scalar(dtype)] * count, {})
        except TypeRuleError:
            continue
        return count
    return None


def map_kernels(dtype: DType, vectors: bool, casts: bool = True) -> list[Kernel]:
    """Every elementwise op, function and conversion of one dtype, on vectors or on scalars."""
    plain: list[tuple[str, DType | None]] = [("select", None)]
    if not (dtype.is_float and dtype.bits == 8):  # f8 is for memory: the front end computes in f32
        plain += [(name, None) for name in ELEMENTWISE if arity(name, dtype) or (name == "scale_by_power" and dtype.is_float)]
    kernels = [_map(f"ops_{dtype}", dtype, plain, vectors)]
    if casts:
        targets: list[tuple[str, DType | None]] = [("cast", t) for t in SCALARS if t is not dtype]
        targets += [("bitcast", t) for t in SCALARS if t is not dtype and t.bits == dtype.bits and not t.is_bool and not dtype.is_bool]
        kernels.append(_map(f"casts_{dtype}", dtype, targets, vectors))
    return kernels


def _parameter(name: str, dtype: DType, vectors: bool) -> Value:
    return array(name, dtype, COUNT, align=16) if vectors else strided(name, dtype, [COUNT], ["s"])


def _map(name: str, dtype: DType, entries: Sequence[tuple[str, DType | None]], vectors: bool) -> Kernel:
    inputs = [_parameter(letter, dtype, vectors) for letter in "abc"]
    outputs: list[Value] = []

    def body(b: Builder, i: Value) -> None:
        loaded = [b.op("load", p, i) for p in inputs]
        flag = b.op("lt", *(b.cast(v, f32) for v in loaded[:2]))
        for position, (opcode, target) in enumerate(entries):
            if target is not None:
                value = b.op(opcode, loaded[0], dtype=target)
            elif opcode == "select":
                value = b.select(flag, loaded[1], loaded[2])
            elif opcode == "scale_by_power":
                value = b.op(opcode, loaded[0], b.cast(loaded[1], i32))
            else:
                value = b.op(opcode, *loaded[: arity(opcode, dtype)])
            output = _parameter(f"o{position}", dtype_of(value.type), vectors)
            outputs.append(output)
            b.multi("store", output, i, value)

    kernel = loop_kernel(f"{name}_{'vectors' if vectors else 'scalars'}", [], [COUNT], body)
    return replace(kernel, params=(*inputs, *outputs))


def reduction_kernels(dtype: DType) -> list[Kernel]:
    """Every reduction of the dtype, along rows: through vectors, lanes, warps and shared memory."""
    kernels = []
    for kind in REDUCTIONS:
        if (kind in ("and", "or") and dtype.is_float) or (kind in ("add", "mul") and dtype.is_bool) or (dtype.bits == 8 and dtype.is_float):
            continue
        kernels.append(_reduction(kind, dtype))
    return kernels


def _reduction(kind: str, dtype: DType) -> Kernel:
    kernel = reduce_2d(kind, 1, dtype, {"cols": 16})
    return replace(kernel, name=f"{kind}_{dtype}")


def thread_kernel(target: Target) -> Kernel:
    """Every op that only exists at the thread stage, written by hand: one block of 64 threads."""
    output = array("o", f32, 64)
    wide = array("w", f32, 64, align=16)
    b = Builder()
    thread = b.op("thread_id")
    block = b.op("program_id", axis=0)
    place = b.add(thread, b.mul(block, b.index(64)))
    total = b.op("load", output, place)
    shared = b.op("alloc", dtype=f32, shape=(64,), space="shared")
    local = b.op("alloc", dtype=f32, shape=(8,), space="local")
    b.multi("store", shared, thread, total)
    b.multi("store", local, b.op("and", thread, b.index(7)), total)
    b.multi("barrier")
    if target.is_gpu:
        b.multi("grid_barrier")
        total = b.add(total, b.cast(b.op("grid_size", axis=0), f32))
    b.multi("warp_sync")
    for scope in ("thread", "block", "device", "system"):
        b.multi("fence", scope=scope)
    total = b.add(total, b.op("load", shared, b.op("xor", thread, b.index(1))))
    total = b.add(total, b.op("load", local, b.index(0)))
    for dtype in SCALARS:
        value = b.cast(total, dtype)
        for mode, amount in (("idx", 3), ("up", 1), ("down", 2), ("xor", 4)):
            value = b.op("shuffle", value, b.const(amount, i32), mode=mode)
        value = b.op("shuffle", value, b.const(1, i32), mode="xor", width=16)
        total = b.add(total, b.cast(value, f32))
    flag = b.op("lt", total, b.const(1.0, f32))
    ballot = b.op("vote", flag, mode="ballot")
    both = b.op("and", b.op("vote", flag, mode="any"), b.op("vote", flag, mode="all"))
    total = b.add(total, b.cast(ballot, f32))
    total = b.select(both, total, b.op("neg", total))
    for opcode in (name for name, d in OPS.items() if d.group == "function" and d.stages == frozenset({"thread"})):
        total = b.add(total, b.op(opcode, total))
    vector = b.op("load", wide, b.mul(thread, b.index(4)), width=4)
    low, high = b.multi("split", vector)
    packed = b.op("pack", b.op("extract", low, lane=0), b.op("extract", high, lane=1))
    doubled = b.add(packed, b.op("broadcast", total, width=2))
    total = b.add(b.op("extract", doubled, lane=0), b.op("extract", doubled, lane=1))
    total = b.select(b.op("every", b.op("lt", packed, doubled)), total, b.op("neg", total))

    def more(inner: Builder, k: Value, value: Value) -> list[Value]:
        return [inner.op("lt", k, inner.index(3)), k, value]

    def step(inner: Builder, k: Value, value: Value) -> list[Value]:
        return [inner.add(k, inner.index(1)), inner.mul(value, value)]

    start = b.index(0)
    condition = b.region([start.type, total.type], ["k", "v"], more)
    loop = b.region([start.type, total.type], ["k", "v"], step)
    results = b.append(Op("while", (start, total), (Value(start.type), Value(total.type)), regions=(condition, loop)))
    total = results[1]
    narrow = b.for_(b.const(0, u32), b.const(3, u32), b.const(1, u32), [total], lambda inner, k, v: [inner.add(v, v)], unroll=1)
    total = narrow[0]
    total = b.if_(flag, lambda inner: [inner.add(total, total)], lambda inner: [total])[0]
    b.multi("store", output, place, b.cast(b.cast(total, f64), f32))
    b.multi("store", wide, b.mul(thread, b.index(4)), vector)
    kernel = Kernel("threads", Stage.THREAD, (output, wide), Block((), tuple(b.ops)), grid=(Size.of(1),), threads=64)
    verify_kernel(kernel)
    return expand_casts(kernel, target)


def module(kernels: Sequence[Kernel], target: Target) -> Program:
    """All of them at the thread stage, as one program."""
    calls: list[KernelCall] = []
    first: Program | None = None
    for kernel in kernels:
        outputs = [p.name for p in kernel.params if p.name.startswith("o")]
        lowered = lower(program(kernel, outputs), target, {"rows": 64, "cols": 4096}).thread
        first = first or lowered
        calls += lowered.calls
    assert first is not None
    return replace(first, calls=tuple(calls))
