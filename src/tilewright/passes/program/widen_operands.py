"""Copy 8-bit operands of attention into 16-bit ones, which its lowerings take. `Program -> Program`.

In: a program and the schedules of its calls. Where a call is attention (`family=attention…`) with queries, keys or values
of an 8-bit float, those are first written to scratch as f16, or as the type of the others, which holds every number of either 8-bit
type exactly. Out: the program with a kernel for each such array before it, which reads the copies; what it computes is the same.
Copying moves three bytes an element once, a tenth of the time of a long row's attention or less.

    parallel … { … cast(load %k : f8e4m3) … }  ->  parallel … { store %k.wide, cast(load %k) }; parallel … { … cast(load %k.wide : f16) … }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.dtypes import DType, bf16, f16
from tilewright.base.errors import CompilerBug
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import rewrite
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.schedules.attention import GpuAttention
from tilewright.passes.schedules.plans import Plan, Plans


def widen_operands(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with copies, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        if isinstance(schedule, GpuAttention):
            found = find_attention(call.kernel)
            if found is None:
                raise CompilerBug.at("TW040", f"{call.kernel.name} is not attention", call.kernel.span)
            for param in _narrow(found):
                copy = Value(widened(found, param), f"{call.kernel.name}.wide{len(scratch)}")
                assert isinstance(copy.type, Tensor)
                scratch.append(ProgramArray(copy.name, copy.type, "scratch"))
                calls.append(KernelCall(_copying(call.kernel, param, copy), (_name(call, param), copy.name), call.loops))
                schedules.append(None)
                call = _reading(call, param, copy)
        calls.append(call)
        schedules.append(schedule)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def operand_dtype(found: Attention) -> DType | None:
    """The dtype all three operands have, once 8-bit ones are copied and computed ones rounded; None where they have several."""
    wide = {dtype for op in _loads(found) if not _is_byte(dtype := dtype_of(op.result.type))}
    if len(wide) > 1:
        return None
    return wide.pop() if wide else f16


def widened(found: Attention, memory: Value) -> Tensor:
    """What an operand is read from: itself, or its copy where its elements have 8 bits."""
    own, dtype = memory.type, operand_dtype(found)
    assert isinstance(own, Tensor)
    return tensor(dtype, *own.shape, align=16) if _is_byte(own.dtype) and dtype is not None else own


def can_widen(kernel: Kernel, found: Attention) -> bool:
    """Whether 8-bit operands, if any, are only read, and only to be computed with."""
    narrow = _narrow(found)
    if narrow and operand_dtype(found) not in (f16, bf16):
        return False
    read = {op.result for op in walk(kernel.body) if op.opcode == "load" and op.operands[0] in narrow}
    for op in walk(kernel.body):
        if any(v in narrow for v in op.operands) and op.opcode != "load":
            return False
        if any(v in read for v in op.operands) and op.opcode != "cast":
            return False
    return True


def _loads(found: Attention) -> tuple[Op, ...]:
    """Operands that are elements of arrays; what is computed is rounded as it is computed."""
    return tuple(op for op in (found.query, found.key, found.value) if op.opcode == "load")


def _is_byte(dtype: DType) -> bool:
    return dtype.is_float and dtype.itemsize == 1


def _narrow(found: Attention) -> list[Value]:
    return list(dict.fromkeys(op.operands[0] for op in _loads(found) if _is_byte(dtype_of(op.result.type))))


def _name(call: KernelCall, param: Value) -> str:
    return call.args[call.kernel.params.index(param)]


def _copying(kernel: Kernel, param: Value, copy: Value) -> Kernel:
    assert isinstance(copy.type, Tensor)
    dtype = copy.type.dtype
    b = Builder(kernel.span)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        inner.multi("store", copy, *indices, inner.cast(inner.op("load", param, *indices), dtype))
        return []

    b.parallel([b.index(size) for size in copy.type.shape], body, [f"i{axis}" for axis in range(copy.type.rank)])
    made = Kernel(f"{kernel.name}.wide", Stage.LOOP, (param, copy), Block((), tuple(b.ops)), span=kernel.span)
    known = {name: divisor for name, divisor in kernel.facts.items() if name in made.size_names}
    return collapse(replace(made, facts=MappingProxyType(known)))


def _reading(call: KernelCall, param: Value, copy: Value) -> KernelCall:
    """The call of a kernel that reads the copy."""

    def function(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.opcode != "load" or op.operands[0] is not param:
            return None
        return [b.op("load", copy, *op.operands[1:])]

    kernel = rewrite(call.kernel, function)
    place = call.kernel.params.index(param)
    params = (*kernel.params[:place], copy, *kernel.params[place + 1 :])
    return replace(call, kernel=replace(kernel, params=params), args=(*call.args[:place], copy.name, *call.args[place + 1 :]))
