"""Thread-stage program -> artifact: generated code plus the rule to launch it.

In: the program at the thread stage and a target. Out: an `Artifact` with the code that the target's backend makes (`codegen.registry`),
the launch list and, for a CPU, the CPython entry stub. LLVM ends the process on some backend errors; `is_proven` says which kernels hold only ops whose code
generation is covered by tests on every target. Anything else is compiled in a separate process, where such an end becomes a
`CompilerBug`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.work import per_block
from tilewright.base import abi, environment
from tilewright.base.artifact import ArrayParam, Artifact, CallCheck, Launch, ScalarParam, SizeBinding, SmallSums
from tilewright.base.levels import DEFAULT
from tilewright.base.sizes import Size, number_name, product
from tilewright.base.target import Target
from tilewright.codegen.registry import Backend, backend_for, entry_name
from tilewright.ir.needs import free_values
from tilewright.ir.nodes import Kernel, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.types import Tensor
from tilewright.passes.late.check_target import check_target

_UNPROVEN = frozenset({"while"})
"""Ops whose code generation no test drives through every target yet."""


def is_proven(kernel: Kernel) -> bool:
    return not any(op.opcode in _UNPROVEN for op in walk(kernel.body))


def llvm_text(program: Program, target: Target) -> tuple[str, tuple[int, ...]]:
    """One module with every kernel, as the target's code generator writes it, and the dynamic shared memory of each."""
    backend = backend_for(target)
    check_target(program, target, backend.ops)
    written = backend.write(program, target)
    return written.text, written.shared


def legal_program(program: Program, target: Target) -> Program:
    """The program without what a portable GPU lacks; as it is for others."""
    if not target.simt or (target.vectors and target.wide_ints and target.atomic_floats and target.has_warps):
        return program
    from tilewright.passes.routes import legalise
    from tilewright.passes.runner import Trace

    return legalise(program, target, Trace())


def describe_program(
    program: Program, target: Target, key: str = "", alias_safe: bool = False, typed: Collection[str] = ()
) -> Artifact:
    """The artifact of a program but for its code: signature, sizes, checks and launch rules."""
    facts: dict[str, int] = {}
    for call in program.calls:
        facts.update(call.kernel.facts)
    in_place = {a.name for a in program.input_arrays if a.role == "inout"}
    positions = backend_for(target).entries(program)
    numbers = _common_numbers(program, positions)
    return Artifact(
        name=program.name,
        target=target.name,
        kind=backend_for(target).code_kind,
        code=b"",
        inputs=tuple(_array(a) if isinstance(a, ProgramArray) else ScalarParam(a.name, a.dtype, a.name in typed) for a in program.inputs),
        outputs=tuple(_array(a) for a in program.outputs),
        scratch=tuple(_array(a) for a in program.scratch),
        launches=tuple(_launch(entry_name(program, position), call, target, in_place, numbers) for position, call in zip(positions, program.calls, strict=True)),
        bindings=tuple(SizeBinding(b.name, b.array, b.axis, b.stride) for b in program.bindings()),
        checks=tuple(
            CallCheck(c.left, c.relation, c.right, c.message, c.span.places() if c.span.line else "", c.span.excerpt(), c.code)
            for c in program.checks
        ),
        facts=tuple(sorted(facts.items())),
        computed=(*program.computed, *((name, size) for size, name in numbers.items())),
        sites=program.sites,
        alias_safe=alias_safe,
        key=key,
    )  # fmt: skip


def _common_numbers(program: Program, positions: Sequence[int]) -> dict[Size, str]:
    """Names for the numbers of calls that launch what they have in common with others."""
    if len(set(positions)) == len(positions):
        return {}
    sizes = dict.fromkeys(size for call in program.calls if call.common is not None for size in call.common.numbers.values())
    return {size: f"number${n}" for n, size in enumerate(sizes)}


def _launch(entry: str, call: KernelCall, target: Target, in_place: Collection[str], numbers: Mapping[Size, str]) -> Launch:
    kernel, common, sizes = call.kernel, call.common, call.kernel.size_names
    if common is not None and numbers:
        sizes = tuple(numbers[common.numbers[name]] if name in common.numbers else name for name in common.kernel.size_names)
    place = kernel.span.place() if kernel.span.line else ""
    plain = Launch(entry, call.args, sizes, kernel.grid, kernel.threads, 0, _work(call, in_place), place=place)
    limit = kernel.attrs.get("watchdog", 0)
    if isinstance(limit, int) and limit:
        plain = replace(plain, watchdog=limit)
    turns = kernel.attrs.get("turns")
    if isinstance(turns, Size):
        given = {number_name(param.name): Size.of(number_name(name)) for param, name in zip(kernel.params, call.args, strict=True)}
        plain = replace(plain, turns=turns.substitute(given), open_loops=bool(kernel.attrs["open_loops"]))
    return backend_for(target).launch(plain, call, target)


def build_artifact(
    program: Program, target: Target, key: str = "", alias_safe: bool = False, schedules: tuple[str, ...] = (), entry: bool = True,
    typed: Collection[str] = (), absent: tuple[int, ...] = (), small: tuple[SmallSums, ...] = (), is_sized: bool = False, text: str = "",
) -> Artifact:  # fmt: skip
    """Generate code for the whole program; without `entry`, for a CPU, there is no stub that Python calls. `typed`: numbers with a type of their own;
    `absent`: positions of arguments that are None; `small`, `is_sized`: as the artifact has them; `text`: what `llvm_text` gave, where it was asked before."""
    backend = backend_for(target)
    program, target = backend.prepare(legal_program(program, target), target)
    text = text or llvm_text(program, target)[0]
    code = _generate(backend, text, target, all(is_proven(c.kernel) for c in program.calls))
    artifact = replace(
        describe_program(program, target, key, alias_safe, typed), code=code, schedule="\n".join(schedules), absent=absent, small=small, is_sized=is_sized,
        level=target.level or DEFAULT,
    )  # fmt: skip
    return artifact if backend.entry is None or not entry else replace(artifact, host=backend.entry(artifact, target))


def _generate(backend: Backend, text: str, target: Target, proven: bool) -> bytes:
    mode = environment.word("TILEWRIGHT_ISOLATE")
    if backend.finish_apart is not None and (mode == "always" or (mode == "auto" and not proven)):
        from tilewright.compile.isolate import compile_isolated

        function, *names = backend.finish_apart(target)
        return compile_isolated(function, text, *names)
    return backend.finish(text, target)


def _array(array: ProgramArray) -> ArrayParam:
    type_: Tensor = array.type
    return ArrayParam(array.name, type_.dtype, type_.shape, type_.strides, array.role, type_.align)


def _work(call: KernelCall, in_place: Collection[str]) -> Size:
    """Elements one block touches: those of all arrays, shared out over the blocks; of arrays written in place, the part that is reached. Kernels
    that may run for any time count as ones for which other Python threads are let go on."""
    kernel = call.kernel
    total = Size.of(abi.RELEASE_WORK if _is_open_ended(kernel) else 0)
    fixed = _fixed_axes(kernel) if in_place else {}
    for param, name in zip(kernel.params, call.args, strict=True):
        if isinstance(param.type, Tensor):
            still = fixed.get(param, frozenset()) if name in in_place else frozenset()
            total = total + product(tuple(s for axis, s in enumerate(param.type.shape) if axis not in still))
    return per_block(kernel, total)


def _fixed_axes(kernel: Kernel) -> dict[Value, frozenset[int]]:
    """The axes of tensors along which a kernel has the same index at all its accesses, as the row that it writes."""
    still: set[Value] = {param for param in kernel.params if not isinstance(param.type, Tensor)}
    places: dict[tuple[Value, int], set[Value | None]] = {}
    for op in walk(kernel.body):
        row = OPS[op.opcode]
        if row.is_pure and not op.regions and row.group not in ("tile", "thread") and all(v in still for v in op.operands):
            still.update(op.results)
        if op.opcode in ("load", "store", "atomic"):
            tensor = op.operands[0]
            rank = tensor.type.rank if isinstance(tensor.type, Tensor) else 0
            for axis, index in enumerate(op.operands[1 : 1 + rank]):
                places.setdefault((tensor, axis), set()).add(index if index in still else None)
    found: dict[Value, set[int]] = {}
    for (tensor, axis), indices in places.items():
        if len(indices) == 1 and None not in indices:
            found.setdefault(tensor, set()).add(axis)
    return {tensor: frozenset(axes) for tensor, axes in found.items()}


def _is_open_ended(kernel: Kernel) -> bool:
    """Whether sizes do not bound how long it runs: a loop's length comes from a number or from memory."""
    free = free_values(kernel)
    return any(
        op.opcode in ("while", "run_blocks") or (op.opcode == "for" and any(v in free for v in op.operands[:3])) for op in walk(kernel.body)
    )
