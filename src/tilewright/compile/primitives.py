"""Thread-stage programs of primitives -> artifacts, kept in memory and on disk as those of kernels are.

In: what a primitive is made for, as a text that tells it from all others, and a function that builds its program. Out: its
artifact. The passes of the end of the pipeline are run on it; a cached artifact is found without building anything.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.base.artifact import Artifact
from tilewright.base.target import Target
from tilewright.codegen.interpreter import abi_key
from tilewright.compile import driver

if TYPE_CHECKING:
    from tilewright.ir.nodes import Kernel
    from tilewright.ir.program import Program

_guard = threading.Lock()


def finished_program(program: Program, target: Target) -> Program:
    """The program as code generators and the emulator take it: functions and conversions are arithmetic."""
    from tilewright.ir.verify import verify_program
    from tilewright.passes.expand_casts import expand_casts
    from tilewright.passes.expand_math import expand_math
    from tilewright.passes.pipeline import Trace, run_pass
    from tilewright.passes.simplify import simplify

    verify_program(program)
    trace = Trace(dump=os.environ.get("TILEWRIGHT_DUMP", ""))

    def one(kernel: Kernel) -> Kernel:
        kernel = run_pass("simplify", kernel, simplify, trace)
        kernel = run_pass("expand_math", kernel, lambda k: expand_math(k, target), trace)
        kernel = run_pass("expand_casts", kernel, lambda k: expand_casts(k, target), trace)
        return run_pass("simplify", kernel, simplify, trace)

    return replace(program, calls=tuple(replace(call, kernel=one(call.kernel)) for call in program.calls))


def compile_program(what: str, target: Target, build: Callable[[], Program]) -> Artifact:
    """The artifact of the program for `what`."""
    host = "" if target.is_gpu else abi_key()
    key = hashlib.sha256("\0".join(("primitive", what, target.key(), host, driver.compiler_version())).encode()).hexdigest()
    found = driver._memory.get(key)
    if found is not None:
        return found
    with _guard:
        found = driver._memory.get(key) or driver.disk_cache().get(key)
        if found is None:
            from tilewright.compile import build as generator

            found = generator.build_artifact(finished_program(build(), target), target, key, entry=False)
            driver.disk_cache().put(key, found)
        driver._memory[key] = found
        return found
