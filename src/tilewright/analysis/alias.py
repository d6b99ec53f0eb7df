"""Whether a program may write its result over its input.

`alias_safe` holds when an output array that *is* an input array (same start, shape, strides and dtype) gives the same result as a
fresh one: nothing is written in place, and from the first kernel that stores to an output on, input elements are only read at the place stored to, before it is
stored to, and not by later kernels. Inputs of another rank or dtype cannot be the same array and do not matter.
"""

from __future__ import annotations

from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.program import Program
from tilewright.ir.types import Tensor


def alias_safe(program: Program) -> bool:
    """Whether every output may be an input of the same type. Works on loop-stage kernels."""
    if any(i.role == "inout" for i in program.input_arrays):
        return False
    outputs = {o.name: o.type for o in program.outputs}
    inputs = {i.name: i.type for i in program.input_arrays}
    if program.loops:
        return False
    started = False
    for call in program.calls:
        names = dict(zip(call.kernel.params, call.args, strict=True))
        stores = [op for op in walk(call.kernel.body) if op.opcode in ("store", "accumulate") and names[op.operands[0]] in outputs]
        loads = [op for op in walk(call.kernel.body) if op.opcode == "load" and names[op.operands[0]] in inputs]
        risky = [op for op in loads if any(_could_be(inputs[names[op.operands[0]]], t) for t in outputs.values())]
        if risky and started:
            return False
        started = started or bool(stores)
        if started and risky and not _same_place(call.kernel, stores, risky, outputs, inputs, names):
            return False
    return True


def _could_be(source: Tensor, target: Tensor) -> bool:
    return source.rank == target.rank and source.dtype is target.dtype


def _same_place(
    kernel: Kernel, stores: list[Op], loads: list[Op], outputs: dict[str, Tensor], inputs: dict[str, Tensor], names: dict[Value, str]
) -> bool:  # fmt: skip
    """Every load that could see a store comes before it, at the same index of an array laid out the same, and outside loops."""
    loops = ("reduce", "for", "while")
    inside = {op for loop in walk(kernel.body) if loop.opcode in loops for region in loop.regions for op in walk(region)}
    order = {op: position for position, op in enumerate(walk(kernel.body))}
    keys = _Keys(kernel.body)
    for load in loads:
        source = inputs[names[load.operands[0]]]
        for store in stores:
            target = outputs[names[store.operands[0]]]
            if not _could_be(source, target):
                continue
            here = [keys.of(v) for v in load.operands[1 : 1 + source.rank]]
            there = [keys.of(v) for v in store.operands[1 : 1 + target.rank]]
            if load in inside or store in inside or order[load] > order[store] or store.opcode != "store":
                return False
            if here != there or source.strides != target.strides:
                return False
    return True


class _Keys:
    """Values that are computed alike from the same leaves get equal keys."""

    def __init__(self, body: Block) -> None:
        self._definitions = {result: op for op in walk(body) for result in op.results}
        self._found: dict[Value, object] = {}

    def of(self, value: Value) -> object:
        if value not in self._found:
            op = self._definitions.get(value)
            if op is None or op.regions or op.opcode == "load":
                self._found[value] = value
            else:
                attrs = tuple(sorted((k, str(a)) for k, a in op.attrs.items()))
                self._found[value] = (op.opcode, attrs, tuple(self.of(v) for v in op.operands))
        return self._found[value]
