"""Thread-stage programs of primitives -> artifacts, kept in memory and on disk as those of kernels are.

In: what a primitive is made for, as a text that tells it from all others, and a function that builds its program. Out: its
artifact. The passes of the end of the pipeline are run on it; a cached artifact is found without building anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewright.base import levels
from tilewright.base.artifact import Artifact
from tilewright.base.target import Target
from tilewright.codegen.host.interpreter import abi_key
from tilewright.compile import driver
from tilewright.compile.store import STORE

if TYPE_CHECKING:
    from tilewright.ir.program import Program


def finished_program(program: Program, target: Target) -> Program:
    """The program as code generators and the emulator take it: functions and conversions are arithmetic."""
    from tilewright.passes.pipeline import lower_primitive
    from tilewright.passes.runner import Trace

    return lower_primitive(program, target, Trace())


def compile_program(what: str, target: Target, build: Callable[[], Program]) -> Artifact:
    """The artifact of the program for `what`."""
    target = levels.at(target, "")
    host = abi_key() if target.is_host else ""
    key = hashlib.sha256("\0".join(("primitive", what, target.key(), host, driver.compiler_version())).encode()).hexdigest()

    def built() -> Artifact:
        from tilewright.compile import build as generator

        return generator.build_artifact(finished_program(build(), target), target, key, entry=False)

    return STORE.get_or_build(key, built)
