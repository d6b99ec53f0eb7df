"""Thread-stage program -> artifact: generated code plus the rule to launch it.

In: the program at the thread stage and a target. Out: an `Artifact` with the code that the target's backend makes (`codegen.registry`),
the launch list and, for a CPU, the CPython entry stub. LLVM ends the process on some backend errors; `is_proven` says which kernels hold only ops whose code
generation is covered by tests on every target. Anything else is compiled in a separate process, where such an end becomes a
`CompilerBug`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

from tilewright.base import abi
from tilewright.base.artifact import ArrayParam, Artifact, CallCheck, Launch, ScalarParam, SizeBinding
from tilewright.base.sizes import Size, ceildiv, maximum, product
from tilewright.base.target import Target
from tilewright.codegen.registry import Backend, backend_for, entry_name
from tilewright.ir.nodes import Kernel, walk
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


def describe_program(
    program: Program, target: Target, key: str = "", alias_safe: bool = False, typed: Collection[str] = ()
) -> Artifact:
    """The artifact of a program but for its code: signature, sizes, checks and launch rules."""
    facts: dict[str, int] = {}
    for call in program.calls:
        facts.update(call.kernel.facts)
    return Artifact(
        name=program.name,
        target=target.name,
        kind=backend_for(target).code_kind,
        code=b"",
        inputs=tuple(_array(a) if isinstance(a, ProgramArray) else ScalarParam(a.name, a.dtype, a.name in typed) for a in program.inputs),
        outputs=tuple(_array(a) for a in program.outputs),
        scratch=tuple(_array(a) for a in program.scratch),
        launches=tuple(_launch(entry_name(program, position), call, target) for position, call in enumerate(program.calls)),
        bindings=tuple(SizeBinding(b.name, b.array, b.axis, b.stride) for b in program.bindings()),
        checks=tuple(
            CallCheck(c.left, c.relation, c.right, c.message, c.span.places() if c.span.line else "", c.span.excerpt(), c.code)
            for c in program.checks
        ),
        facts=tuple(sorted(facts.items())),
        sites=program.sites,
        alias_safe=alias_safe,
        key=key,
    )  # fmt: skip


def _launch(entry: str, call: KernelCall, target: Target) -> Launch:
    kernel = call.kernel
    place = kernel.span.place() if kernel.span.line else ""
    plain = Launch(entry, call.args, kernel.size_names, kernel.grid, kernel.threads, 0, _work(kernel), place=place)
    limit = kernel.attrs.get("watchdog", 0)
    if isinstance(limit, int) and limit:
        plain = replace(plain, watchdog=limit)
    return backend_for(target).launch(plain, call, target)


def build_artifact(
    program: Program, target: Target, key: str = "", alias_safe: bool = False, schedules: tuple[str, ...] = (), entry: bool = True,
    typed: Collection[str] = (),
) -> Artifact:  # fmt: skip
    """Generate code for the whole program; without `entry`, for a CPU, there is no stub that Python calls. `typed`: numbers with a type of their own."""
    backend = backend_for(target)
    program, target = backend.prepare(program, target)
    text, _ = llvm_text(program, target)
    code = _generate(backend, text, target, all(is_proven(c.kernel) for c in program.calls))
    artifact = replace(describe_program(program, target, key, alias_safe, typed), code=code, schedule="\n".join(schedules))
    return artifact if backend.entry is None or not entry else replace(artifact, host=backend.entry(artifact, target))


def _generate(backend: Backend, text: str, target: Target, proven: bool) -> bytes:
    mode = os.environ.get("TILEWRIGHT_ISOLATE", "auto")
    if backend.finish_apart is not None and (mode == "always" or (mode == "auto" and not proven)):
        from tilewright.compile.isolate import compile_isolated

        function, *names = backend.finish_apart(target)
        return compile_isolated(function, text, *names)
    return backend.finish(text, target)


def _array(array: ProgramArray) -> ArrayParam:
    type_: Tensor = array.type
    return ArrayParam(array.name, type_.dtype, type_.shape, type_.strides, array.role, type_.align)


def _work(kernel: Kernel) -> Size:
    """Elements one block touches: those of all arrays, shared out over the blocks. Kernels that may run for any time count as ones for
    which other Python threads are let go on."""
    total = Size.of(abi.RELEASE_WORK if _is_open_ended(kernel) else 0)
    for param in kernel.tensors:
        assert isinstance(param.type, Tensor)
        total = total + product(param.type.shape)
    return ceildiv(total, maximum(Size.of(1), product(kernel.grid)))


def _is_open_ended(kernel: Kernel) -> bool:
    """Whether sizes do not bound how long it runs: a loop's length comes from a number or from memory."""
    free = {param for param in kernel.params if not isinstance(param.type, Tensor)}
    for op in walk(kernel.body):
        if op.opcode in ("while", "run_blocks") or (op.opcode == "for" and any(v in free for v in op.operands[:3])):
            return True
        if op.opcode in ("load", "atomic") or any(v in free for v in op.operands):
            free.update(op.results)
    return False
