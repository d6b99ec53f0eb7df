"""Explicit kernels: thread-stage IR to artifacts, with the caches of other kernels.

In: what the front end of explicit kernels built, and a target. Out: an artifact. `passes/pipeline.py` has the passes.
The key of an artifact is the IR's text, so whatever the kernel captured is in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from tilewright.base import levels
from tilewright.base.artifact import Artifact
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.codegen.host.interpreter import abi_key
from tilewright.compile import driver
from tilewright.compile.collection import no_collection
from tilewright.compile.store import STORE
from tilewright.ir.nodes import walk
from tilewright.ir.program import Program
from tilewright.ir.text import print_program


def prepare_simt(program: Program, target: Target) -> Program:
    """The program as it becomes code for the target, and as the emulator runs it."""
    _check(program)
    return _lowered(program, target)


def _check(program: Program) -> None:
    """Refuse what the text shows to be wrong; also for code that a store holds."""
    from tilewright.analysis import thread_faults

    for call in program.calls:
        thread_faults.check_threads(call.kernel)


def _lowered(program: Program, target: Target) -> Program:
    from tilewright.passes.routes import lower_explicit
    from tilewright.passes.runner import Trace

    return lower_explicit(program, target, Trace())


def addressed(program: Program, target: Target) -> Program:
    """The last steps before code: how addresses and indices are computed on a GPU, and the marks of an optimisation level."""
    from tilewright.passes.common.code_level import with_level
    from tilewright.passes.routes import address_explicit
    from tilewright.passes.runner import Trace

    return with_level(address_explicit(program, target, Trace()), levelled(program, target))


def said_simt_level(program: Program) -> str:
    """The level that an explicit kernel names; empty where it names none."""
    said = (call.kernel.attrs.get("optimize", "") for call in program.calls)
    return next((str(word) for word in said if word), "")


def levelled(program: Program, target: Target) -> Target:
    """The target at the optimisation level that holds for an explicit kernel."""
    return levels.at(target, said_simt_level(program))


def compile_simt(program: Program, target: Target) -> Artifact:
    """The artifact of an explicit kernel, from memory, from disk or freshly compiled."""
    _check(program)
    target = levelled(program, target)
    key = simt_key(program, target)
    return STORE.get_or_build(key, lambda: FinalSimt(program, target, key).build())


def final_simt(program: Program, target: Target) -> Artifact | FinalSimt:
    """The artifact where it was compiled before; else the kernel after all passes."""
    _check(program)
    target = levelled(program, target)
    key = simt_key(program, target)
    with no_collection():
        return STORE.find(key) or FinalSimt(program, target, key)


class FinalSimt:
    """An explicit kernel after all passes, each verified: what is left is to make code of it."""

    def __init__(self, program: Program, target: Target, key: str) -> None:
        self._target, self._key = target, key
        self._program = addressed(_lowered(program, target), target)
        self._text = ""

    def quick(self) -> Artifact:
        """Code for a CPU that is soon there: at level `O0`. It is kept nowhere."""
        from tilewright.compile import build

        self._text = build.llvm_text(self._program, self._target)[0]
        return build.build_artifact(self._program, replace(self._target, level="O0"), self._key, entry=False, text=self._text)

    def keep(self, verify: bool = False) -> Artifact:
        """The artifact at the kernel's own level, kept in memory and on disk."""
        return STORE.get_or_build(self._key, self.build)

    def build(self) -> Artifact:
        """The same, kept nowhere."""
        from tilewright.compile import build

        return build.build_artifact(self._program, self._target, self._key, entry=False, text=self._text)


def simt_key(program: Program, target: Target) -> str:
    """Content hash: the IR, where its lines are from, and the target."""
    places = [_place(op.span) for call in program.calls for op in walk(call.kernel.body)]
    host = abi_key() if target.is_host else ""
    parts = ("simt", print_program(program), program.span.path, *places, target.key(), host, driver.compiler_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _place(span: Span) -> str:
    return f"{span.line}:{span.column}"
