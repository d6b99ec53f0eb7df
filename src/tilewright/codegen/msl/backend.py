"""The backend of Apple's GPUs: one text of Metal Shading Language with every kernel of a program.

Nothing here has run on a device of Apple's: tests compile the text as C++ and execute it thread by thread.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tilewright.base.artifact import Launch
from tilewright.base.target import Target
from tilewright.codegen.msl.emitter import KNOWN, MslWriter, kernel_sizes
from tilewright.codegen.msl.tables import FUNCTIONS
from tilewright.codegen.registry import Backend, ProgramText, entry_name, first_calls, register_backend
from tilewright.ir.nodes import Stage
from tilewright.ir.program import KernelCall, Program

_FUNCTION = re.compile(r"\btw_\w+(?=[(<])")
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def write(program: Program, target: Target) -> ProgramText:
    """Functions that the kernels use, then the kernels."""
    texts = [MslWriter(program.calls[k].kernel, entry_name(program, k), target).text for k in dict.fromkeys(first_calls(program))]
    used = set(_FUNCTION.findall("\n".join(texts)))
    functions = [text for name, text in FUNCTIONS.items() if name in used]
    return ProgramText("\n".join([HEAD, *functions, *texts]) + "\n", (0,) * len(program.calls))


def launch(plain: Launch, call: KernelCall, target: Target) -> Launch:
    return replace(plain, values=kernel_sizes(call.kernel)) if call.kernel.stage is Stage.THREAD else plain


register_backend(Backend("msl", "msl", write, lambda text, target: text.encode(), ops=KNOWN, launch=launch, entries=first_calls))
