"""The calls of each ordered loop as one kernel, which holds the loop. `Program -> Program`.

In: a program at the thread stage. Out: the same without ordered loops. On a GPU the blocks of the new kernel stay, share out the blocks of each call
and wait for each other between calls (`program/persistent_kernel.py`). On a CPU one thread walks the steps; `run_blocks` hands the blocks of a call to all:

    ordered t count n {                 kernel @a grid=[1] {
      call @a(u, v)             ->          for %t = 0, n, 1 {
      call @b(v, u)                             run_blocks … (%block) { … a … }
    }                                           run_blocks … (%block) { … b … } } }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from tilewright.analysis.work import elements_per_block
from tilewright.base.sizes import ONE, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value
from tilewright.ir.program import KernelCall, OrderedCalls, Program, call_tree
from tilewright.ir.rewrite import clone_block, rewrite_block
from tilewright.passes.common.size_values import size_value
from tilewright.passes.common.steps import each_step, in_turn
from tilewright.passes.program.persistent_kernel import merged


def ordered_kernels(program: Program, target: Target) -> Program:
    """The program with one call for each outermost ordered loop."""
    if not program.loops:
        return program
    calls: list[KernelCall] = []
    for outer, group in groupby(program.calls, key=lambda call: call.loops[0].loop if call.loops else ""):
        own = tuple(group)
        if not outer:
            calls += own
            continue
        part = replace(program, name=own[0].kernel.name, calls=own)
        calls.append(merged(part) if target.simt else _Conductor(part).call())
    return replace(program, calls=tuple(calls), loops=())


class _Conductor:
    """The kernel of an ordered loop on a CPU."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.params: dict[tuple[str, str], Value] = {}
        """By name and type: an array may be seen with several shapes."""

    def call(self) -> KernelCall:
        first = self.program.calls[0].kernel
        b = Builder(first.span)
        self.items(b, call_tree(self.program), {})
        facts = {name: divisor for call in self.program.calls for name, divisor in call.kernel.facts.items()}
        kernel = Kernel(
            self.program.name, Stage.THREAD, tuple(self.params.values()), Block((), tuple(b.ops)), (ONE,), 1, MappingProxyType(facts), span=first.span
        )
        return KernelCall(kernel, tuple(name for name, _ in self.params))

    def items(self, b: Builder, items: Sequence[KernelCall | OrderedCalls], indices: Mapping[str, Value]) -> None:
        for item in items:
            with b.at(item.kernel.span if isinstance(item, KernelCall) else item.loop.span):
                if isinstance(item, KernelCall):
                    self.blocks(b, item, indices)
                else:
                    self.loop(b, item, indices)

    def loop(self, b: Builder, item: OrderedCalls, indices: Mapping[str, Value]) -> None:
        loop = item.loop
        cell = None
        if loop.cell:
            type_ = self.program.array(loop.cell).type
            cell = self.params.setdefault((loop.cell, str(type_)), Value(type_, loop.cell))

        def step(inner: Builder, number: Value) -> Sequence[Value]:
            for turn, calls in item.turns:

                def body(b: Builder, calls: Sequence[KernelCall | OrderedCalls] = calls) -> Sequence[Value]:
                    self.items(b, calls, {**indices, loop.name: number})
                    return []

                in_turn(inner, turn, number, body)
            return []

        each_step(b, loop, indices, cell, step)

    def blocks(self, b: Builder, call: KernelCall, indices: Mapping[str, Value]) -> None:
        """The blocks of a call, shared out."""
        kernel = call.kernel
        mapping: dict[Value, Value] = {}
        for param, name in zip(kernel.params, call.args, strict=True):
            mapping[param] = self.params.setdefault((name, str(param.type)), Value(param.type, param.name))
        block = Value(b.index(0).type, "block")

        def placed(inner: Builder, op: Op) -> Sequence[Value] | None:
            if op.opcode == "program_id":
                return [block]
            size = op.attrs.get("value")
            if op.opcode == "size" and not size.names.isdisjoint(indices):  # type: ignore[union-attr]
                return [size_value(inner, size, indices)]  # type: ignore[arg-type]
            return None

        body = rewrite_block(clone_block(kernel.body, mapping), placed, {})
        region = Block((block,), (*body.ops, Op("yield", span=b.span)))
        count, work = size_value(b, product(kernel.grid), indices), size_value(b, elements_per_block(kernel), indices)
        attrs = {name: value for name, value in kernel.attrs.items() if name != "operations"}  # they are in `work`, and have lengths in them that change from step to step
        b.append(Op("run_blocks", (count, work), (), MappingProxyType(attrs), (region,), b.span))
