"""The backend of AMD GPUs: LLVM text, and code objects that AMD's loader takes.

Nothing here has run on a device: every code object is linked, disassembled and compared with its plan by tests, and the same thread-stage
IR runs in the emulator with waves of the same size.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tilewright.base.artifact import Launch
from tilewright.base.target import Target
from tilewright.codegen.amdgpu import code_object
from tilewright.codegen.amdgpu.atomics import is_cooperative
from tilewright.codegen.amdgpu.emitter import amdgpu_function
from tilewright.codegen.llvm import native
from tilewright.codegen.registry import Backend, CodeUse, ProgramText, entry_name, register_backend
from tilewright.ir.nodes import Stage
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program

_FLAGS = '!0 = !{}\n!1 = !{i32 1}\n!llvm.module.flags = !{!2}\n!2 = !{i32 1, !"amdhsa_code_object_version", i32 500}\n'
_HOST_ONLY = frozenset({"print", "step", "fault", "run_blocks", "ldexp"})
"""Ops of the thread stage that need the host, or are of CPUs and of the debugger."""
_FOREIGN = frozenset({"copy", "matrix", "lanes"})
"""Groups of ops that are those of NVIDIA's copy engine and matrix units, and of CPUs."""
_NVIDIA = frozenset({
    "mbarrier_init", "fence_init", "mbarrier_arrive", "mbarrier_expect", "mbarrier_wait", "named_barrier", "cluster_rank", "cluster_sync", "cluster_arrive",
    "wait_previous", "release_next", "set_registers", "elect",
})  # fmt: skip
KNOWN_OPS = frozenset(
    row.name for row in OPS.values()
    if "thread" in row.stages and (row.group not in _FOREIGN or row.name == "wave_mma") and row.name not in _HOST_ONLY | _NVIDIA
)
"""The ops of the thread stage that have code here; `passes/late/check_target.py` refuses others, with target, construct and line."""


def write(program: Program, target: Target) -> ProgramText:
    """One LLVM module with every kernel. What kernels share is part of the code: launches bring none."""
    parts: list[str] = []
    declarations: set[str] = set()
    for position, call in enumerate(program.calls):
        text, needs = amdgpu_function(call.kernel, entry_name(program, position), target)
        # Metadata of loops is numbered per module: every kernel has numbers of its own.
        parts.append(re.sub(r"!(\d{4,})", lambda m, s=100000 * position: f"!{int(m.group(1)) + s}", text))  # type: ignore[misc]
        declarations |= needs
    return ProgramText("\n".join(sorted(declarations)) + "\n" + "\n".join(parts) + "\n" + _FLAGS, (0,) * len(program.calls))


def finish(text: str, target: Target) -> bytes:
    """The code object of such a module."""
    return code_object.link(native.compile_object(text, target))


def finish_for(text: str, triple: str, cpu: str, features: str, level: str = "") -> bytes:
    """`finish` for a target given by its names; called in the compile server."""
    return code_object.link(native.compile_object_for(text, triple, cpu, features, level))


def launch(plain: Launch, call: KernelCall, target: Target) -> Launch:
    cooperative = call.kernel.stage is Stage.THREAD and is_cooperative(call.kernel)
    return replace(plain, cooperative=cooperative)


def uses(code: bytes) -> dict[str, CodeUse]:
    return {use.name: CodeUse(use.vgprs, use.scratch, use.lds, "code object") for use in code_object.kernel_uses(code)}


register_backend(
    Backend(
        "amdgpu", "hsaco", write, finish, ops=KNOWN_OPS, launch=launch, listing=native.emit_assembly, uses=uses,
        finish_apart=lambda target: ("tilewright.codegen.amdgpu.backend:finish_for", *native.machine_names(target), target.level),
    )
)  # fmt: skip
