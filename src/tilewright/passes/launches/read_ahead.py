"""Products with few rows read their weights one step ahead. `Program -> Program`, at the thread stage.

In: a program of several kernels, and what is known of its sizes. Out: the same, where the loop of a product with few rows (`family=gemv`) carries what it read of the rows of the weight for this step,
and reads the next step's before it computes. The first step's is read ahead of all loops, also of those that reduce the rows of x for a norm. Memory is busy
while a warp computes. Products of many rows of weights have other blocks that fill the gaps, and stay as they are. Rows of the weight are told from x by the number of the block.

    for k { w = load %w[k]; x = load %x[k]; … }    ->    w = load %w[0]; for k (w) { next = load %w[k + step] if there is one; x = load %x[k]; …; yield next }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.sizes import product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import Program
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Tensor, Vec

MOST_VECTORS = 12
"""Vectors of the weights that a lane holds for the next step, at most: each takes four registers."""
MOST_WAVES = 2
"""Times that a product's blocks fill all multiprocessors, at most."""
REGISTERS = 65536
"""Of a multiprocessor."""
_BYTES = 16


def read_ahead(program: Program, target: Target, hints: Mapping[str, int]) -> Program:
    """The program with loops that read ahead."""
    if not target.simt or len(program.calls) < 2 or program.loops:
        return program
    return replace(program, calls=tuple(replace(call, kernel=ahead(call.kernel)) if _is_short(call.kernel, target, hints) else call for call in program.calls))


def _is_short(kernel: Kernel, target: Target, hints: Mapping[str, int]) -> bool:
    blocks, resident = product(kernel.grid), kernel.attrs.get("min_blocks", 1)
    assert isinstance(resident, int)
    return blocks.names <= hints.keys() and blocks.evaluate(hints) <= MOST_WAVES * target.multiprocessors * max(1, resident)


def ahead(kernel: Kernel) -> Kernel:
    """A kernel whose loop over weights reads one step ahead; the very same one where it has no such loop."""
    if "family=gemv" not in str(kernel.attrs.get("schedule", "")):
        return kernel
    ops = list(kernel.body.ops)
    reader = _Reader(kernel)
    place = next((n for n, op in enumerate(ops) if op.opcode == "for" and reader.loads(op)), None)
    if place is None:
        return kernel
    loop = ops[place]
    loads = reader.loads(loop)
    first = next((n for n, op in enumerate(ops) if op.regions), place)
    needed = reader.above(ops, first, place, [*loop.operands[:3], *(v for load in loads for v in reader.outer(loop, load))])
    if needed is None or len(loads) > MOST_VECTORS:
        return kernel
    b = Builder(loop.span)
    mapping: dict[Value, Value] = {}
    clone_ops(b, needed, mapping)
    low, high = (mapping.get(v, v) for v in loop.operands[:2])
    begun = reader.read(b, loop, loads, low, high, mapping)
    ops[place] = _carrying(loop, loads, begun, reader)
    ops[first:first] = b.ops
    attrs = dict(kernel.attrs)
    blocks = attrs.get("min_blocks")
    if isinstance(blocks, int) and blocks:
        registers = REGISTERS // (kernel.threads * blocks) + 4 * len(loads)
        attrs["min_blocks"] = max(1, REGISTERS // (kernel.threads * registers))
    return replace(kernel, body=Block(kernel.body.args, tuple(ops)), attrs=MappingProxyType(attrs))


def _carrying(loop: Op, loads: Sequence[Op], begun: Sequence[Value], reader: _Reader) -> Op:
    """The loop with what was read as values that it carries."""
    region = loop.regions[0]
    carried = [Value(load.result.type, load.result.name) for load in loads]
    inner = Builder(loop.span)
    index = region.args[0]
    after = inner.add(index, loop.operands[2])
    following = reader.read(inner, loop, loads, after, loop.operands[1], {})
    mapping: dict[Value, Value] = {load.result: value for load, value in zip(loads, carried, strict=True)}
    clone_ops(inner, [op for op in region.ops[:-1] if op not in loads], mapping)
    inner.multi("yield", *(mapping.get(v, v) for v in region.yields), *following)
    results = (*loop.results, *(Value(load.result.type, "") for load in loads))
    body = Block((*region.args, *carried), tuple(inner.ops))
    return replace(loop, operands=(*loop.operands, *begun), results=results, regions=(body,))


class _Reader:
    """What a kernel's loops read of the weights."""

    def __init__(self, kernel: Kernel) -> None:
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        written = {op.operands[0] for op in walk(kernel.body) if op.operands and OPS[op.opcode].effect not in ("pure", "read", "control")}
        self.read_only = {p for p in kernel.params if isinstance(p.type, Tensor) and p not in written}

    def loads(self, loop: Op) -> list[Op]:
        """The wide reads of rows that the block's number chooses, at places that are computed from the loop's index alone."""
        region = loop.regions[0]
        inside = {result: op for op in region.ops for result in op.results}
        found: list[Op] = []
        for op in region.ops:
            if op.opcode != "load" or op.attrs.get("masked") or op.operands[0] not in self.read_only or not isinstance(op.result.type, Vec):
                continue
            memory = op.operands[0].type
            assert isinstance(memory, Tensor)
            uses = self.sources(op.operands[1:])
            plain = all(inside[v].opcode != "load" and not inside[v].regions and OPS[inside[v].opcode].effect == "pure" for v in uses if v in inside)
            rows = any(v in self.made and self.made[v].opcode == "program_id" for v in uses)
            carried = any(v in region.args[1:] for v in uses)
            if plain and rows and not carried and op.result.type.width * memory.dtype.itemsize == _BYTES:
                found.append(op)
        return found

    def sources(self, values: Sequence[Value]) -> set[Value]:
        found, waiting = set[Value](), list(values)
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting += self.made[value].operands if value in self.made else ()
        return found

    def slice_of(self, loop: Op, loads: Sequence[Op]) -> list[Op]:
        """The ops of a loop's body that compute where the loads read."""
        wanted = {v for load in loads for v in self.sources(load.operands[1:])}
        return [op for op in loop.regions[0].ops if any(r in wanted for r in op.results) and op not in loads]

    def outer(self, loop: Op, load: Op) -> list[Value]:
        """What of outside the loop its places are made of."""
        inside = {r for op in loop.regions[0].ops for r in op.results} | set(loop.regions[0].args)
        waiting, found = list(load.operands[1:]), set[Value]()
        outside: list[Value] = []
        while waiting:
            value = waiting.pop()
            if value in found:
                continue
            found.add(value)
            if value in inside:
                waiting += self.made[value].operands if value in self.made else ()
            else:
                outside.append(value)
        return outside

    def above(self, ops: Sequence[Op], first: int, place: int, values: Sequence[Value]) -> list[Op] | None:
        """The ops between two places that compute these values; None where they need more than arithmetic."""
        between = {r: op for op in ops[first:place] for r in op.results}
        needed: set[int] = set()
        waiting = list(values)
        while waiting:
            op = between.get(waiting.pop())
            if op is None or id(op) in needed:
                continue
            if op.regions or OPS[op.opcode].effect != "pure" or op.opcode in ("shuffle", "vote"):
                return None
            needed.add(id(op))
            waiting += op.operands
        return [op for op in ops[first:place] if id(op) in needed]

    def read(self, b: Builder, loop: Op, loads: Sequence[Op], index: Value, high: Value, outer: dict[Value, Value]) -> list[Value]:
        """The loads of the step that begins at an index, where it is there."""
        mapping = {**outer, loop.regions[0].args[0]: index}
        clone_ops(b, self.slice_of(loop, loads), mapping)
        there = b.op("lt", index, high)
        found: list[Value] = []
        for load in loads:
            assert isinstance(load.result.type, Vec)
            found.append(b.op("load", *(mapping.get(v, v) for v in load.operands), there, width=load.result.type.width, masked=True))
        return found
