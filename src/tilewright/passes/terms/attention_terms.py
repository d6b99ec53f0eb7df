"""Operands of attention as terms of bf16. `Program -> Program`.

In: a program and the schedules of its calls. Where a call is attention of f32 by warp groups (`family=attention bf16_terms=6`), an f32 is the sum of three bf16, which it is
exactly, and a product six products of these (`split_terms`). Out: the program with a kernel for each operand that writes its terms to scratch, and those arrays as further
parameters of the attention, which its lowering alone uses, in place of the operands. The attribute `terms` has their names.

    parallel rows, d { q0, q1, q2 = terms(d < D ? q[.., d] : 0); store q.terms[.., d] = q0; store q.terms[.., K + d] = q1; store q.terms[.., 2 * K + d] = q2 }

Terms of queries and keys lie K elements apart, which instructions take whole; those of values begin at whole blocks of 64.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.attention import Attention, find_attention
from tilewright.base.dtypes import bf16, f32
from tilewright.base.errors import CompilerBug
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor, tensor
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.schedules.attention import WgmmaAttention
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.terms.split_terms import three_terms

OPERANDS = ("q", "k", "v")


def attention_terms(program: Program, plans: Plans) -> tuple[Program, Plans]:
    """The program with kernels that write terms, and the schedules of its calls."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, plan in zip(program.calls, plans, strict=True):
        if isinstance(plan, WgmmaAttention) and plan.bf16_terms:
            found = find_attention(call.kernel)
            if found is None:
                raise CompilerBug.at("TW040", f"{call.kernel.name} is not attention", call.kernel.span)
            made: list[Value] = []
            for load, pitch, columns in _operands(found, plan):
                own = load.operands[0]
                assert isinstance(own.type, Tensor)
                memory = Value(tensor(bf16, *own.type.shape[:-1], Size.of(columns), align=16), f"{call.kernel.name}.terms{len(scratch)}")
                assert isinstance(memory.type, Tensor)
                scratch.append(ProgramArray(memory.name, memory.type, "scratch"))
                source = call.args[call.kernel.params.index(own)]
                calls.append(KernelCall(_writing(call.kernel, own, memory, pitch), (source, memory.name), call.loops))
                schedules.append(None)
                made.append(memory)
            attrs: dict[str, Attr] = {**call.kernel.attrs, "terms": tuple(memory.name for memory in made)}
            kernel = replace(call.kernel, params=(*call.kernel.params, *made), attrs=MappingProxyType(attrs))
            call = replace(call, kernel=kernel, args=(*call.args, *(memory.name for memory in made)))
        calls.append(call)
        schedules.append(plan)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _operands(found: Attention, plan: WgmmaAttention) -> list[tuple[Op, int, int]]:
    """Each operand, how far apart its terms lie, and the elements of a row of them."""
    keys, values = (plan.k, plan.key_columns), (plan.value_pitch, plan.value_columns)
    return [(found.query, *keys), (found.key, *keys), (found.value, *values)]


def _writing(kernel: Kernel, source: Value, memory: Value, pitch: int) -> Kernel:
    """The kernel that writes the terms of an array."""
    assert isinstance(source.type, Tensor)
    *outer, last = source.type.shape
    b = Builder(kernel.span)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        *front, column = indices

        def load(deep: Builder) -> list[Value]:
            return [deep.op("load", source, *indices)]

        if last.constant == pitch:
            (whole,) = load(inner)
        else:
            inside = inner.op("lt", column, inner.index(last))
            (whole,) = inner.if_(inside, load, lambda deep: [deep.const(0, f32)])
        for number, term in enumerate(three_terms(inner, whole)):
            place = inner.add(column, inner.index(number * pitch)) if number else column
            inner.multi("store", memory, *front, place, inner.cast(term, bf16))
        return []

    b.parallel([b.index(size) for size in (*outer, Size.of(pitch))], body, [f"i{axis}" for axis in range(len(outer) + 1)])
    made = Kernel(f"{kernel.name}.terms", Stage.LOOP, (source, memory), Block((), tuple(b.ops)), span=kernel.span)
    known = {name: divisor for name, divisor in kernel.facts.items() if name in made.size_names}
    return collapse(replace(made, facts=MappingProxyType(known)))
