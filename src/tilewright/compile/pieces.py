"""A program cut into parts that can run on different devices. In: a kernel's tree and signature; out: parts with what each reads and
writes and which it needs, and their artifacts for a target.

Every kernel of the fused program is a part. Kernels that write one array are one part with all between them, so that an array has one
author. A part is a program of its own: arrays of other parts are its inputs, and sizes that none of its arrays has are numbers it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from tilewright.analysis.work import work_of
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, is_number, parameter_of
from tilewright.base.target import Target
from tilewright.compile import build, driver
from tilewright.compile.driver import Signature, cache_key, front_end
from tilewright.compile.store import STORE
from tilewright.ir.nodes import walk
from tilewright.ir.program import KernelCall, Program, ProgramArray, ScalarInput
from tilewright.passes.common.fusion_report import FusionReport
from tilewright.passes.routes import fuse_kernels, prepare, specialise
from tilewright.passes.runner import Trace
from tilewright.tree.syntax import Function
from tilewright.tree.typed import TypedKernel


@record
class ProgramPart:
    """Some kernels of a program, to run on one device."""

    name: str
    program: Program
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: tuple[int, ...]
    """Earlier parts whose arrays it reads."""
    operations: Size
    bytes: Size


@record
class CutProgram:
    """A kernel for one signature, whole and in parts."""

    function: Function
    signature: Signature
    typed: TypedKernel
    program: Program
    parts: tuple[ProgramPart, ...]


def cut_kernel(function: Function, signature: Signature) -> CutProgram:
    typed, written = front_end(function, signature)
    program, _ = fuse_kernels(written, Trace())
    return CutProgram(function, signature, typed, program, _parts(program))


def _touched(call: KernelCall) -> tuple[set[str], set[str]]:
    """Arrays a call reads and writes."""
    names = dict(zip(call.kernel.params, call.args, strict=True))
    reads: set[str] = set()
    writes: set[str] = set()
    for op in walk(call.kernel.body):
        if op.opcode in ("load", "store", "atomic", "accumulate") and op.operands[0] in names:
            if op.opcode != "store":
                reads.add(names[op.operands[0]])
            if op.opcode != "load":
                writes.add(names[op.operands[0]])
    return reads, writes


def _groups(program: Program) -> list[list[int]]:
    """Calls that stay together: ranges from the first to the last author of an array."""
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for number, call in enumerate(program.calls):
        for name in _touched(call)[1]:
            first.setdefault(name, number)
            last[name] = number
    found: list[list[int]] = []
    end = -1
    for number in range(len(program.calls)):
        if number > end:
            found.append([])
        found[-1].append(number)
        loops = [turn.loop for turn in program.calls[number].loops[:1]]
        steps = (other for other, call in enumerate(program.calls) if any(turn.loop in loops for turn in call.loops))
        end = max([end, number, *steps, *(last[name] for name in first if first[name] == number)])
    return found


def _parts(program: Program) -> tuple[ProgramPart, ...]:
    groups = _groups(program)
    touched = [_touched(call) for call in program.calls]
    author = {name: position for position, group in enumerate(groups) for number in group for name in touched[number][1]}
    kept = {array.name for array in program.outputs}
    names = _names([program.calls[group[0]].kernel.name for group in groups])
    found: list[ProgramPart] = []
    for position, group in enumerate(groups):
        used = {name for number in group for side in touched[number] for name in side}
        needed = {
            name for other, numbers in enumerate(groups) if other != position for number in numbers for name in touched[number][0]
        }
        reads = sorted(name for name in used if author.get(name) != position)
        own = sorted(name for name in used if author.get(name) == position)
        writes = tuple(name for name in own if name in kept or name in needed)
        calls = tuple(program.calls[number] for number in group)
        counts = [work_of(call.kernel) for call in calls]
        part = _sub_program(program, names[position], calls, reads, writes, [n for n in own if n not in writes])
        after = tuple(sorted({author[name] for name in reads if name in author}))
        operations, moved = sum((c.operations for c in counts), ZERO), sum((c.bytes for c in counts), ZERO)
        found.append(ProgramPart(names[position], part, tuple(reads), writes, after, operations, moved))
    return tuple(found)


def _names(kernels: list[str]) -> list[str]:
    """Names of parts: those of their kernels, numbered where several have one."""
    return [name if kernels.count(name) == 1 else f"{name}.{kernels[:number].count(name)}" for number, name in enumerate(kernels)]


def _sub_program(
    program: Program, name: str, calls: tuple[KernelCall, ...], reads: list[str], writes: tuple[str, ...], inner: list[str]
) -> Program:
    def as_role(array: str, role: str) -> ProgramArray:
        return replace(program.array(array), role=role)

    scalars = [x for x in program.inputs if isinstance(x, ScalarInput) and any(x.name in call.args for call in calls)]
    part = Program(
        name, (*(as_role(n, "input") for n in reads), *scalars), tuple(as_role(n, "output") for n in writes),
        tuple(as_role(n, "scratch") for n in inner), calls, (), program.span,
        loops=tuple(loop for loop in program.loops if any(turn.loop == loop.name for call in calls for turn in call.loops)),
    )  # fmt: skip
    bound = {binding.name for binding in part.bindings()} | {scalar.name for scalar in scalars}
    used = {
        n
        for array in (*part.input_arrays, *part.outputs, *part.scratch)
        for size in (*array.type.shape, *array.type.strides)
        for n in size.names
    }
    used |= {n for call in calls for n in call.kernel.size_names} | {n for loop in part.loops if loop.count is not None for n in loop.count.names}
    used -= {loop.name for loop in part.loops}
    computed = tuple((n, size) for n, size in program.computed if n in used and all(is_number(x) or x in bound for x in size.names))
    asked = {parameter_of(x) for _, size in computed for x in size.names if is_number(x)}
    numbers = tuple(x for x in program.inputs if isinstance(x, ScalarInput) and x.name in asked and x not in scalars)
    missing = tuple(ScalarInput(n, i64) for n in sorted(used - bound - {n for n, _ in computed}))
    return replace(part, inputs=(*part.inputs, *numbers, *missing), computed=computed)


class _PreparedPart(driver.PreparedKernel):
    """A part after the passes that do not depend on sizes."""

    def __init__(self, cut: CutProgram, part: ProgramPart, target: Target, sizes: Mapping[str, int] | None = None) -> None:
        self.function, self.target, self.typed = cut.function, target, cut.typed
        self.together, self.limits = False, target
        self.trace = Trace()
        self.program = specialise(part.program, sizes or {}, self.trace)
        self.fusion = FusionReport((), (), len(part.program.calls), len(part.program.calls))
        self.loop = prepare(self.program, self.trace, target)

    def _tuned(self, signature: Signature) -> str:
        """Measurements are of whole kernels."""
        return ""



def compile_part(cut: CutProgram, number: int, target: Target, sizes: Mapping[str, int]) -> Artifact:
    """The artifact of a part for a target and the sizes of a call, from memory, from disk or freshly compiled."""
    part = cut.parts[number]
    arrays = (*part.program.input_arrays, *part.program.outputs)
    extents = tuple((a.name, axis, s.evaluate(sizes)) for a in arrays for axis, s in enumerate(a.type.shape))
    signature = replace(cut.signature, extents=extents, schedule="")
    prepared = _PreparedPart(cut, part, target)
    short = prepared.short_sums(signature)
    if short:
        prepared = _PreparedPart(cut, part, target, short)
    plan = prepared.plan(signature)
    described = (str(sorted(short.items())), *(p.describe() if p else "" for p in plan))
    key = hashlib.sha256("\0".join((cache_key(cut.function, signature, target), str(number), *described)).encode()).hexdigest()
    return STORE.get_or_build(
        key, lambda: build.build_artifact(prepared.finish(signature, plan).stages.thread, target, key, entry=False)
    )
