"""The backend of CPUs: LLVM text, an object, and the CPython function that calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.base.abi import LOCAL_MEMORY
from tilewright.base.artifact import Launch
from tilewright.base.target import Target
from tilewright.codegen.cpu.emitter import FunctionParts, faults, function_parts, heap_bytes, renumbered
from tilewright.codegen.host.entries import host_object
from tilewright.codegen.llvm import native
from tilewright.codegen.registry import Backend, ProgramText, entry_name, register_backend
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import KernelCall, Program


def write(program: Program, target: Target) -> ProgramText:
    """One LLVM module with every kernel. Marks on loops are numbered per module: each kernel after the first has its numbers shifted."""
    texts: dict[int, str] = {}
    functions: dict[int, FunctionParts] = {}
    common: dict[Kernel, FunctionParts] = {}
    if any(call.common is not None for call in program.calls):
        from tilewright.codegen.cpu.common_bodies import caller, can_call, common_body
    for position, call in enumerate(program.calls):
        entry, shared = entry_name(program, position), call.common
        if shared is None or not can_call(shared):
            functions[position] = function_parts(call.kernel, entry, target.has_range)
            continue
        body = common.get(shared.kernel)
        if body is None:
            body = common[shared.kernel] = function_parts(shared.kernel, entry, target.has_range)
            texts[position] = common_body(body)
        texts[position] = texts.get(position, "") + caller(shared, entry, body)
    for group in _groups(program, functions):
        alike = [functions[position] for position in group]
        texts |= zip(group, _shared(alike) or [f.text() for f in alike], strict=True)
    parts = [renumbered(texts[position], 100000 * position) if position else texts[position] for position in range(len(program.calls))]
    declarations = sorted(frozenset[str]().union(*(f.declarations for f in (*functions.values(), *common.values()))))
    return ProgramText("\n".join(declarations) + "\n" + _with_length("\n".join(parts), target.vector_scale), (0,) * len(parts))


def _with_length(text: str, scale: int) -> str:
    """The functions with the length of SVE registers, so that LLVM puts a vector of fixed length in one. 0: there are none."""
    return re.sub(r"^(define .*) nounwind\b", rf"\1 vscale_range({scale},{scale}) nounwind", text, flags=re.MULTILINE) if scale else text


def _shared(functions: Sequence[FunctionParts]) -> list[str] | None:
    """Text in which several functions have one body; None where they cannot."""
    if len(functions) == 1:
        return None
    from tilewright.codegen.cpu.same_bodies import shared_text

    return shared_text(functions)


def _groups(program: Program, functions: Mapping[int, FunctionParts]) -> list[list[int]]:
    """Positions of phases of one kernel whose code is the same but for numbers; of others alone."""
    groups: dict[object, list[int]] = {}
    for position, function in functions.items():
        phases = program.calls[position].kernel.attrs.get("phase_of")
        key: object = position
        if phases:
            from tilewright.codegen.cpu.same_bodies import shape

            key = phases, shape(function)
        groups.setdefault(key, []).append(position)
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
