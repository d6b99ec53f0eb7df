"""Thread-stage programs of primitives -> artifacts, kept in memory and on disk as those of kernels are.

In: what a primitive is made for, as a text that tells it from all others, and a function that builds its program. Out: its
artifact. The passes of the end of the pipeline are run on it; a cached artifact is found without building anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewright.base import chunks, levels
from tilewright.base.artifact import Artifact
from tilewright.base.target import Target
from tilewright.codegen.host.interpreter import abi_key
from tilewright.compile import driver, tuning
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
    chunks.note(what, build)
    said = chunks.said()
    number = _tuned_chunk(what, target) if said is None and target.is_host else said or 0
    what = f"{what} chunk={number}" if number else what
    host = abi_key() if target.is_host else ""
    key = hashlib.sha256("\0".join(("primitive", what, target.key(), host, driver.compiler_version())).encode()).hexdigest()

    def built() -> Artifact:
        from tilewright.compile import build as generator

        with chunks.with_chunk(number):
            program = build()
        return generator.build_artifact(finished_program(program, target), target, key, entry=False)

    return STORE.get_or_build(key, built)


def program_key(what: str, target: Target) -> str:
    """The identity of a primitive's program in the tuning tables."""
    return hashlib.sha256("\0".join(("primitive", what, target.key())).encode()).hexdigest()


def _tuned_chunk(what: str, target: Target) -> int:
    """The units of work that were measured to be fastest; 0 for the usual ones."""
    table = tuning.look_up(program_key(what, target))
    text = "" if table is None else tuning.advise_loops(table, (), driver.compiler_version())
    return int(text.rpartition("=")[2]) if text else 0
