"""The backend of CPUs: LLVM text, an object, and the CPython function that calls it."""

from __future__ import annotations

from dataclasses import replace

from tilewright.base.abi import LOCAL_MEMORY
from tilewright.base.artifact import Launch
from tilewright.base.target import Target
from tilewright.codegen.cpu.emitter import FunctionParts, faults, function_parts, heap_bytes, renumbered
from tilewright.codegen.cpu.same_bodies import shape, shared_text
from tilewright.codegen.host.entries import host_object
from tilewright.codegen.llvm import native
from tilewright.codegen.registry import Backend, ProgramText, entry_name, register_backend
from tilewright.ir.program import KernelCall, Program


def write(program: Program, target: Target) -> ProgramText:
    """One LLVM module with every kernel. Marks on loops are numbered per module: each kernel after the first has its numbers shifted."""
    functions = [function_parts(call.kernel, entry_name(program, position)) for position, call in enumerate(program.calls)]
    texts: dict[str, str] = {}
    for group in _groups(program, functions):
        shared = shared_text(group) if len(group) > 1 else None
        texts |= {f.entry: text for f, text in zip(group, shared or [f.text() for f in group], strict=True)}
    parts = [renumbered(texts[f.entry], 100000 * position) if position else texts[f.entry] for position, f in enumerate(functions)]
    declarations = sorted(frozenset[str]().union(*(f.declarations for f in functions)))
    return ProgramText("\n".join(declarations) + "\n" + "\n".join(parts), (0,) * len(parts))


def _groups(program: Program, functions: list[FunctionParts]) -> list[list[FunctionParts]]:
    """Phases of one kernel whose code is the same but for numbers; others alone."""
    groups: dict[object, list[FunctionParts]] = {}
    for position, (call, function) in enumerate(zip(program.calls, functions, strict=True)):
        phases = call.kernel.attrs.get("phase_of")
        groups.setdefault((phases, shape(function)) if phases else position, []).append(function)
    return list(groups.values())


def launch(plain: Launch, call: KernelCall, target: Target) -> Launch:
    failing = [(op.span.place() if op.span.line else plain.place, str(op.attrs["text"])) for op in faults(call.kernel)]
    local = heap_bytes(call.kernel)
    if local:
        failing.append((plain.place, f"{LOCAL_MEMORY}{local}"))
    return replace(plain, asserts=tuple(failing))


register_backend(
    Backend(
        "cpu", "object", write, native.compile_object, launch=launch, entry=host_object,
        finish_apart=lambda target: ("tilewright.codegen.llvm.native:compile_object_for", *native.machine_names(target), target.level),
    )
)  # fmt: skip
