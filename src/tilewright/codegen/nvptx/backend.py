"""The backend of NVIDIA GPUs: LLVM text, and PTX."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.artifact import Launch, MapParam
from tilewright.base.target import Target
from tilewright.codegen.llvm import native
from tilewright.codegen.nvptx.emitter import kernel_needs, nvptx_function, ptx_needed
from tilewright.codegen.nvptx.grid import is_cooperative
from tilewright.codegen.registry import Backend, ProgramText, entry_name, first_alike, register_backend
from tilewright.ir.needs import assertions, cluster_of
from tilewright.ir.nodes import Stage
from tilewright.ir.program import KernelCall, Program


def prepare(program: Program, target: Target) -> tuple[Program, Target]:
    """The target with the PTX version that the kernels need, and kernels with assertions that know which of the program's they are: they
    report it. Phases know what they have in common."""
    version = max([target.ptx, *(ptx_needed(call.kernel, target) for call in program.calls)])
    calls = tuple(
        replace(call, kernel=replace(call.kernel, attrs=MappingProxyType({**call.kernel.attrs, "watchdog_number": number})))
        if assertions(call.kernel) else call
        for number, call in enumerate(program.calls)
    )  # fmt: skip
    program = replace(program, calls=calls)
    if any("phase_of" in call.kernel.attrs for call in calls):
        from tilewright.codegen.nvptx.alike_kernels import share_alike

        program = share_alike(program)
    return program, replace(target, ptx=version)


def write(program: Program, target: Target) -> ProgramText:
    """One LLVM module with every kernel, those that phases have in common once, and the dynamic shared memory of each. Debug metadata is numbered per module: where there are
    several kernels, numbers are shifted so that each keeps its own."""
    parts: list[str] = []
    declarations: set[str] = set()
    shared: list[int] = []
    flags: list[str] = []
    several = len(program.calls) > 1
    for position, (call, first) in enumerate(zip(program.calls, first_alike(program), strict=True)):
        if first < position:
            shared.append(shared[first])
            continue
        kernel = call.kernel if call.common is None else call.common.kernel
        text, needs, launch = nvptx_function(kernel, entry_name(program, position), target)
        if several:
            shift = 100000 * position
            text = re.sub(r"!(\d+)", lambda m, s=shift: f"!{int(m.group(1)) + s}", text)  # type: ignore[misc]
            flags += [line for line in text.splitlines() if line.startswith(("!llvm.dbg.cu", "!llvm.module.flags"))]
            text = "\n".join(line for line in text.splitlines() if not line.startswith("!llvm."))
        parts.append(text)
        declarations |= needs
        shared.append(launch.shared_bytes)
    return ProgramText("\n".join(sorted(declarations)) + "\n" + "\n".join(parts) + (_tail(flags) if several else ""), tuple(shared))


def _tail(flags: list[str]) -> str:
    """The named metadata of a module of several kernels."""
    units = ", ".join(re.findall(r"!\d+", " ".join(f for f in flags if f.startswith("!llvm.dbg.cu"))))
    first = next((f for f in flags if f.startswith("!llvm.module.flags")), "")
    return "\n" + (f"!llvm.dbg.cu = !{{{units}}}\n" if units else "") + first + "\n"


def launch(plain: Launch, call: KernelCall, target: Target) -> Launch:
    kernel = call.kernel
    if kernel.stage is not Stage.THREAD:
        return plain
    needs = kernel_needs(kernel)
    maps = tuple(
        MapParam(
            call.args[m.parameter], m.dtype, m.shape, m.strides, m.box, m.swizzle, m.pixels, m.lower, m.upper, m.steps, m.rounds
        )
        for m in needs.maps
    )
    cooperative = is_cooperative(kernel)
    return replace(
        plain, shared_bytes=needs.shared_bytes, maps=maps, cluster=cluster_of(kernel), cooperative=cooperative,
        dependent=bool(kernel.attrs.get("dependent")) and not cooperative, persistent=bool(kernel.attrs.get("persistent")),
        asserts=tuple((op.span.place() if op.span.line else plain.place, str(op.attrs["text"])) for op in assertions(kernel)),
    )  # fmt: skip


register_backend(
    Backend(
        "nvptx", "ptx", write, lambda text, target: native.emit_assembly(text, target).encode(), prepare=prepare, launch=launch, entries=first_alike,
        finish_apart=lambda target: ("tilewright.codegen.llvm.native:emit_assembly_for", *native.machine_names(target), target.level),
    )
)  # fmt: skip
