"""The backends of OpenCL and Vulkan: SPIR-V assembly, and SPIR-V."""

from __future__ import annotations

from tilewright.base.target import Target
from tilewright.codegen.registry import Backend, ProgramText, entry_name, first_calls, register_backend
from tilewright.codegen.spirv.assembler import assemble
from tilewright.codegen.spirv.atomics import ATOMICS
from tilewright.codegen.spirv.emitter import KernelText
from tilewright.codegen.spirv.lanes import LANES
from tilewright.codegen.spirv.module import OPENCL, VULKAN, Flavour, ModuleText
from tilewright.codegen.spirv.ops import HANDLERS, Handler
from tilewright.ir.program import Program

ALL: dict[str, Handler] = {**HANDLERS, **ATOMICS, **LANES}
"""Every op that becomes SPIR-V, but for control flow."""
KNOWN = frozenset({*ALL, "if", "for", "while", "yield"})


def write(program: Program, target: Target) -> ProgramText:
    """One module with an entry point for every kernel."""
    return ProgramText(_module(program, target).text(), (0,) * len(program.calls))


def _module(program: Program, target: Target) -> ModuleText:
    # Drivers may keep one rounding for floats of 16 and of 64 bits.
    modes = [("RoundingModeRTE", bits) for bits in (16, 64) if bits == 16 or "f64" not in target.missing_dtypes]
    modes += [("DenormPreserve", 16)] if target.has("f16.denormals") else []
    module = ModuleText(
        _flavour(target), half=target.has("f16"), preserves=target.has("preserve"), spir=target.has("spir"), vector_bytes=target.vector_bytes, half_modes=tuple(modes),
    )  # fmt: skip
    for position in dict.fromkeys(first_calls(program)):
        KernelText(module, program.calls[position].kernel, entry_name(program, position), ALL, target.simt)
    return module


def _flavour(target: Target) -> Flavour:
    return OPENCL if target.kind == "spirv-opencl" else VULKAN


for kind in ("spirv-opencl", "spirv-vulkan"):
    register_backend(Backend(kind, "spirv", write, lambda text, target: assemble(text), ops=KNOWN, listing=lambda text, target: text, entries=first_calls))
