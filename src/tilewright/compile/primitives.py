"""Thread-stage programs of primitives -> artifacts, kept in memory and on disk as those of kernels are.

In: what a primitive is made for, as a text that tells it from all others, and a function that builds its program. Out: its
artifact. The passes of the end of the pipeline are run on it; a cached artifact is found without building anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tilewright.base import chunks, environment, levels
from tilewright.base.artifact import Artifact
from tilewright.base.target import Target
from tilewright.codegen.host.interpreter import abi_key
from tilewright.compile import driver, tuning
from tilewright.compile.store import STORE

if TYPE_CHECKING:
    from tilewright.ir.program import Program


def finished_program(program: Program, target: Target) -> Program:
    """The program as code generators and the emulator take it: functions and conversions are arithmetic."""
    from tilewright.passes.routes import lower_primitive
    from tilewright.passes.runner import Trace

    return lower_primitive(program, target, Trace())


def compile_program(what: str, target: Target, build: Callable[[], Program]) -> Artifact:
    """The artifact of the program for `what`."""
    chunks.note(what, build)
    # All that decides which code it is; a small call takes longer to find that out than to run.
    asked = what, id(target), chunks.said(), levels.holds_now(), environment.text("TILEWRIGHT_TUNING"), tuning.changes()
    known = _known.get(asked)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[asked] = _Asked(what, target)

    def built() -> Artifact:
        from tilewright.compile import build as generator

        with chunks.with_chunk(known.chunk):
            program = build()
        return generator.build_artifact(finished_program(program, known.target), known.target, known.key, entry=False)

    return STORE.get_or_build(known.key, built)


class _Asked:
    """What a program is compiled for: the target at its level, elements of a unit of work where tables name them, and the key of its code."""

    def __init__(self, what: str, target: Target) -> None:
        self.given = target  # kept, so that no other target has its identity
        self.target = levels.at(target, "")
        said = chunks.said()
        self.chunk = _tuned_chunk(what, self.target) if said is None and target.is_host else said or 0
        what = f"{what} chunk={self.chunk}" if self.chunk else what
        host = abi_key() if target.is_host else ""
        self.key = hashlib.sha256("\0".join(("primitive", what, self.target.key(), host, driver.compiler_version())).encode()).hexdigest()


_known: dict[tuple[object, ...], _Asked] = {}
_MOST_KNOWN = 512


def program_key(what: str, target: Target) -> str:
    """The identity of a primitive's program in the tuning tables."""
    return hashlib.sha256("\0".join(("primitive", what, target.key())).encode()).hexdigest()


def _tuned_chunk(what: str, target: Target) -> int:
    """The units of work that were measured to be fastest; 0 for the usual ones."""
    table = tuning.look_up(program_key(what, target))
    text = "" if table is None else tuning.advise_loops(table, (), driver.compiler_version())
    return int(text.rpartition("=")[2]) if text else 0
