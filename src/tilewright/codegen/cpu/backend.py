"""The backend of CPUs: LLVM text, an object, and the CPython function that calls it."""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.abi import LOCAL_MEMORY
from tilewright.base.artifact import Launch
from tilewright.base.target import Target
from tilewright.codegen.cpu.emitter import cpu_function, faults, heap_bytes, renumbered
from tilewright.codegen.host.entries import host_object
from tilewright.codegen.llvm import native
from tilewright.codegen.registry import Backend, ProgramText, entry_name, register_backend
from tilewright.ir.program import KernelCall, Program


def write(program: Program, target: Target) -> ProgramText:
    """One LLVM module with every kernel. Marks on loops are numbered per module: each kernel after the first has its numbers shifted."""
    parts: list[str] = []
    declarations: set[str] = set()
    for position, call in enumerate(program.calls):
        text, needs = cpu_function(call.kernel, entry_name(program, position))
        if position:
            text = renumbered(text, 100000 * position)
        parts.append(text)
        declarations |= needs
    return ProgramText("\n".join(sorted(declarations)) + "\n" + "\n".join(parts), (0,) * len(parts))


def launch(plain: Launch, call: KernelCall, target: Target) -> Launch:
    failing = [(op.span.place() if op.span.line else plain.place, str(op.attrs["text"])) for op in faults(call.kernel)]
    local = heap_bytes(call.kernel)
    if local:
        failing.append((plain.place, f"{LOCAL_MEMORY}{local}"))
    return replace(plain, asserts=tuple(failing))


register_backend(
    Backend(
        "cpu", "object", write, native.compile_object, launch=launch, entry=host_object,
        finish_apart=lambda target: ("tilewright.codegen.llvm.native:compile_object_for", *native.machine_names(target)),
    )
)  # fmt: skip
