"""The backend of WebGPU: one WGSL module with every kernel of a program."""

from __future__ import annotations

import re
from dataclasses import replace

from tilewright.base.artifact import Launch
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.codegen.registry import Backend, ProgramText, entry_name, first_calls, register_backend
from tilewright.codegen.wgsl.emitter import KNOWN, WgslWriter, kernel_values
from tilewright.codegen.wgsl.tables import FUNCTIONS
from tilewright.ir.nodes import Stage
from tilewright.ir.program import KernelCall, Program

_HALF = re.compile(r"\bf16\b|\dh\b|\btw_half\b|\btw_to_f16\b")
_FUNCTION = re.compile(r"\btw_\w+(?=\()")


def write(program: Program, target: Target) -> ProgramText:
    """The module: functions that the kernels use, then the kernels."""
    first = first_calls(program)
    kernels = {k: WgslWriter(program.calls[k].kernel, entry_name(program, k), k, target) for k in dict.fromkeys(first)}
    texts = [kernel.text for kernel in kernels.values()]
    enabled = ["enable f16;"] if any(_HALF.search(text) for text in texts) else []
    return ProgramText("\n\n".join([*enabled, *_functions("\n".join(texts)), *texts]) + "\n", tuple(kernels[k].shared for k in first))


def _functions(text: str) -> list[str]:
    """What a text calls, and what that calls."""
    found: dict[str, str] = {}
    left = _FUNCTION.findall(text)
    while left:
        name = left.pop()
        if name in FUNCTIONS and name not in found:
            found[name] = FUNCTIONS[name]
            left += _FUNCTION.findall(FUNCTIONS[name])
    return [found[name] for name in FUNCTIONS if name in found]


def launch(plain: Launch, call: KernelCall, target: Target) -> Launch:
    if call.kernel.stage is not Stage.THREAD:
        return plain
    narrow = call.kernel.attrs.get("narrow", ())
    assert isinstance(narrow, tuple)
    return replace(plain, values=kernel_values(call.kernel), narrow=tuple(size for size in narrow if isinstance(size, Size)))


register_backend(Backend("wgsl", "wgsl", write, lambda text, target: text.encode(), ops=KNOWN, launch=launch, entries=first_calls))
