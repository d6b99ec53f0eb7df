"""Code generators, found by the kind of their target.

A backend is a record: the text it makes of a thread-stage program, the code it makes of that text, and what a launch needs besides. It
registers itself with `register_backend`, together with the targets users can name. Those of CPUs and NVIDIA GPUs do so when they are
first asked for, so that nobody loads LLVM who compiles nothing.

In: a `Target`. Out: its `Backend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from tilewright.base.artifact import Artifact, Launch
from tilewright.base.errors import TargetLimit
from tilewright.base.record import record
from tilewright.base.target import Target, register_target
from tilewright.ir.program import KernelCall, Program

_BUILT_IN = {kind: f"tilewright.codegen.{kind.partition('-')[0]}.backend" for kind in ("cpu", "nvptx", "amdgpu", "msl", "wgsl", "spirv-opencl", "spirv-vulkan")}
"""Modules that register a backend when they are imported, by its kind."""
_backends: dict[str, Backend] = {}


@record
class ProgramText:
    """A program as one text, and the bytes of dynamic shared memory of each of its launches."""

    text: str
    shared: tuple[int, ...]


@record
class CodeUse:
    """What one kernel takes of the device, as its code says."""

    registers: int
    spilled: int
    """Bytes of memory of a thread's own that registers and local arrays lie in."""
    shared: int
    source: str
    """Who says so."""


@record
class Backend:
    """A code generator."""

    kind: str
    """The `kind` of the targets it serves."""
    code_kind: str
    """What its code is, in an artifact: `object`, `ptx`…"""
    write: Callable[[Program, Target], ProgramText]
    """The text of a program at the thread stage. Kernels are called `entry_name(program, position)`."""
    finish: Callable[[str, Target], bytes]
    """The code of such a text."""
    targets: tuple[Target, ...] = ()
    """Targets users can name, beyond those of `base.target`."""
    ops: frozenset[str] | None = None
    """The thread-stage ops it knows; None for one that knows all that passes leave for its targets."""
    prepare: Callable[[Program, Target], tuple[Program, Target]] = lambda program, target: (program, target)
    """The last step before `write`: the program and the target, as this program needs them."""
    launch: Callable[[Launch, KernelCall, Target], Launch] = lambda plain, call, target: plain
    """What a launch of the kernel needs beyond grid, threads and arguments. Kernels may be at any stage."""
    entry: Callable[[Artifact, Target], bytes] | None = None
    """The object with the CPython function through which Python calls the artifact; None where there is none."""
    listing: Callable[[str, Target], str] | None = None
    """The assembly of such a text, where the code itself is no text."""
    uses: Callable[[bytes], Mapping[str, CodeUse]] | None = None
    """What the kernels of such code take, by their entries, where the code says it."""
    entries: Callable[[Program], Sequence[int]] = lambda program: range(len(program.calls))
    """For each call, the position of the one whose entry it launches: `first_calls` where the text has a kernel that several calls name once, `first_alike`
    where it has what they have in common (`KernelCall.common`) once."""
    finish_apart: Callable[[Target], tuple[str, ...]] | None = None
    """For a `finish` that may end its process: `module:function` that does the same in another one, and what it takes after the text."""


def register_backend(backend: Backend) -> None:
    """Make a code generator, and the targets it knows, available."""
    _backends[backend.kind] = backend
    for target in backend.targets:
        register_target(target)


def backend_for(target: Target) -> Backend:
    """The code generator of a target."""
    if target.kind not in _backends and target.kind in _BUILT_IN:
        importlib.import_module(_BUILT_IN[target.kind])
    if target.kind not in _backends:
        raise TargetLimit.at("TW020", f"no code generator for {target.name}: none is registered for '{target.kind}'")
    return _backends[target.kind]


def first_calls(program: Program) -> list[int]:
    """For each call, the position of the first one of its kernel."""
    found: dict[int, int] = {}
    return [found.setdefault(id(call.kernel), position) for position, call in enumerate(program.calls)]


def first_alike(program: Program) -> list[int]:
    """For each call, the position of the first one with the kernel that it has in common with others; of a call that has nothing in common its own."""
    found: dict[int, int] = {}
    return [found.setdefault(id(call.common.kernel), n) if call.common is not None else n for n, call in enumerate(program.calls)]


def entry_name(program: Program, position: int) -> str:
    """The symbol of the program's kernel: letters, digits and underscores."""
    text = f"{program.calls[position].kernel.name}_{position}"
    return "tw_" + "".join(c if c.isalnum() and c.isascii() else "_" for c in text)
