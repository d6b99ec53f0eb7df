"""CPU: nests that compute in loops where they scatter to become two. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a nest whose points each run through a loop before they scatter (`accumulate`) is a nest that stores what these loops
result in, and one that reads it and scatters. Points of the first are lanes of vectors; those of the second have to be gone through in order.

    parallel n (i) { best = for j … { distance of x[i] and c[j] }; accumulate count, best, 1 }
    -> parallel n (i) { best = for j … { … }; store found[i], best }
       parallel n (i) { best = load found[i]; accumulate count, best, 1 }

Only where an array of the nest has at least one element for each of its points: what is stored takes no more memory than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tilewright.analysis.loop_nest import nest_of
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, has_effects
from tilewright.ir.types import Scalar, Tensor, dtype_of, tensor
from tilewright.passes.common.rebuild_nest import Copies, copy_outside, finished

MOST_RESULTS = 4
"""Results that are handed on."""
_LOOPS = frozenset({"for", "while", "reduce"})
_MAY_SCATTER = frozenset({"accumulate", "store", "yield", "if"}) | _LOOPS


def fission_scatters(program: Program, target: Target | None) -> Program:
    """The program with such nests in two."""
    if target is None or target.simt:
        return program
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    for call in program.calls:
        parts = _parts(call, len(scratch))
        calls += [call] if parts is None else parts[0]
        scratch += [] if parts is None else parts[1]
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)) if len(calls) > len(program.calls) else program


def _parts(call: KernelCall, number: int) -> tuple[list[KernelCall], list[ProgramArray]] | None:
    """The two kernels and the arrays between them; None where the nest stays one."""
    kernel = call.kernel
    nests = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if call.loops or call.varies or len(nests) != 1 or not nests[0].operands or not any(op.opcode == "accumulate" for op in walk(kernel.body)):
        return None
    region, extents = nests[0].regions[0], nest_of(kernel).extents
    first = next(p for p, op in enumerate(region.ops) if op.opcode == "yield" or has_effects(op))
    before, after = region.ops[:first], region.ops[first:-1]
    made = [op for op in before if op.regions]
    if not any(inner.opcode in _LOOPS for op in made for inner in _inside(op)) or not _may_part(before, after):
        return None
    if not any(Counter(extents) <= Counter(p.type.shape) for p in kernel.params if isinstance(p.type, Tensor)):
        return None
    found = {
        value: Value(tensor(dtype_of(value.type), *extents, align=64), f"{kernel.name}.found{number + place}")
        for place, value in enumerate(value for op in made for value in op.results)
    }

    def scatters(b: Builder, indices: Sequence[Value], copies: Copies) -> None:
        for op in (*before, *after):
            if op in made:
                with b.at(op.span):
                    copies.update((value, b.op("load", found[value], *indices)) for value in op.results)
            else:
                clone_ops(b, [op], copies)

    last = _with_body(kernel, kernel.name, nests[0], scatters, tuple(found.values()))
    needed = {value: memory for value, memory in found.items() if memory in last.params}
    if not needed or len(needed) > MOST_RESULTS:
        return None

    def stores(b: Builder, indices: Sequence[Value], copies: Copies) -> None:
        clone_ops(b, before, copies)
        for value, memory in needed.items():
            b.multi("store", memory, *indices, copies[value])

    names = dict(zip(kernel.params, call.args, strict=True)) | {memory: str(memory.name) for memory in needed.values()}
    kernels = (_with_body(kernel, f"{kernel.name}.found", nests[0], stores, tuple(needed.values())), last)
    arrays = [ProgramArray(str(memory.name), memory.type, "scratch") for memory in needed.values() if isinstance(memory.type, Tensor)]
    return [KernelCall(one, tuple(names[p] for p in one.params), call.loops) for one in kernels], arrays


def _inside(op: Op) -> Iterator[Op]:
    """An op and all ops inside of it."""
    yield op
    for region in op.regions:
        yield from walk(region)


def _may_part(before: Sequence[Op], after: Sequence[Op]) -> bool:
    """Whether all points may do their first part before any does its second: this writes nothing that the first reads, and nothing else happens in it."""
    second = [inner for op in after for inner in _inside(op)]
    if any(OPS[op.opcode].effect not in ("pure", "read") and op.opcode not in _MAY_SCATTER for op in second):
        return False
    written = {op.operands[0] for op in second if op.opcode in ("accumulate", "store")}
    read = {inner.operands[0] for op in before for inner in _inside(op) if OPS[inner.opcode].effect == "read"}
    return not written & read and all(isinstance(result.type, Scalar) for op in before for result in op.results)


def _with_body(
    kernel: Kernel, name: str, parallel: Op, body: Callable[[Builder, Sequence[Value], Copies], None], arrays: Sequence[Value]
) -> Kernel:
    """The kernel with another body of its nest."""
    b = Builder(kernel.span)
    outside = copy_outside(b, kernel)

    def point(inner: Builder, *indices: Value) -> list[Value]:
        body(inner, indices, outside | dict(zip(parallel.regions[0].args, indices, strict=True)))
        return []

    with b.at(parallel.span):
        b.parallel([outside[extent] for extent in parallel.operands], point, [arg.name for arg in parallel.regions[0].args])
    return finished(kernel, name, b, arrays)
