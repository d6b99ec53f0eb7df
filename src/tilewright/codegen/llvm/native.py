"""LLVM text in, machine code out.

In: LLVM IR text without `target triple` and `target datalayout` lines, and a `Target` (CPU or GPU). Out: a relocatable
object, assembly text, or the optimised IR. In between: the text is parsed and verified in a context of its own, so that what
LLVM's code generator sees is always a legal module (it ends the process on anything else); a module that is not is our
mistake and raises `CompilerBug` naming the file that holds the text.

Code is position independent with the small code model: data of the same object is reached relative to the instruction, symbols
from outside through a table that the loader fills. Kernels come with explicit vectors, so LLVM's loop and SLP vectorisers stay
off: they cost time and may not reorder our floating point anyway. CPU kernels arrive in the shape they should have, several
vectors a step: LLVM's longer pipelines and unrolling doubled the time to compile and made none of them faster, so they get the
short one; the code generator itself runs at full level. Of long text, only those passes of it run that simplify one
function. Other levels (`base/levels.py`) are asked for through the target. Target machines
are kept and reused.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tilewright.base.errors import CompilerBug
from tilewright.base.forks import at_work, fork_safe_rlock
from tilewright.base.headroom import COMPILE_BYTES, require_room
from tilewright.base.levels import Level, level_of
from tilewright.base.llvm_library import LlvmModule, TargetMachine
from tilewright.base.target import Target
from tilewright.codegen.llvm.short_floats import helpers

# The loader's memory is laid out before linking, and LLVM does not count the table entries that calls of outside functions need.
# A word of data makes it set aside a page, which holds them all.
_RESERVE = """
@tilewright.reserve = internal global i64 1
@llvm.compiler.used = appending global [1 x ptr] [ptr @tilewright.reserve], section "llvm.metadata"
"""

LONG = 5000
"""Lines of text from which on CPU kernels get only what simplifies functions one by one. What follows in LLVM's short pipeline compares every
access of a loop with every other, and takes as long again. Kernels this long are those of several products, whose loops it leaves as they are;
of short ones it hoists what rows have in common."""

# A target machine serves one compilation at a time. Those in the background have machines, and a turn, of their own.
_compiling = fork_safe_rlock()
_compiling_apart = fork_safe_rlock()
_thread = threading.local()


@contextmanager
def apart() -> Iterator[None]:
    """Inside, what this thread compiles keeps no other thread waiting: it has target machines of its own."""
    _thread.apart = True
    try:
        yield
    finally:
        _thread.apart = False


def _is_apart() -> bool:
    return getattr(_thread, "apart", False)


def _turn() -> threading.RLock:
    return _compiling_apart if _is_apart() else _compiling


@functools.cache
def _machine(triple: str, cpu: str, features: str, opt: int, apart: bool) -> TargetMachine:
    return TargetMachine(triple, cpu, features, opt, "default" if triple.startswith("nvptx") else "small")


@functools.cache
def _header(triple: str, cpu: str, features: str, opt: int, apart: bool) -> str:
    layout = _machine(triple, cpu, features, opt, apart).data_layout()
    return f'target triple = "{triple}"\ntarget datalayout = "{layout}"\n'


def machine_features(target: Target) -> str:
    """The feature string LLVM gets: the CPU's own, or the PTX version."""
    return f"+ptx{target.ptx}" if target.kind == "nvptx" else target.cpu_features


def machine_names(target: Target) -> tuple[str, str, str]:
    """What names an LLVM target machine: triple, CPU and features."""
    return target.triple, target.cpu, machine_features(target)


def _save(text: str) -> str:
    """Keep rejected text where the message can point to it."""
    handle, path = tempfile.mkstemp(prefix="tilewright-", suffix=".ll")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def _level(target: Target, opt: int | None) -> Level:
    """What LLVM is asked for: that of the target's level, or of a number from 0 to 3."""
    if opt is None and target.is_host:
        return level_of(target)
    if opt is None:
        opt = level_of(target).machine
    return Level("", "", min(opt, 1) if target.is_host else opt, opt, unroll=not target.is_host and opt > 1)


class _Module:
    """A verified, optimised module together with the machine that can emit it."""

    def __init__(self, text: str, target: Target, opt: int | None) -> None:
        require_room(COMPILE_BYTES, f"compile for {target.name}")
        level = _level(target, opt)
        key = (*machine_names(target), level.machine, _is_apart())
        self.machine = _machine(*key)
        whole = _header(*key) + text + (_RESERVE if target.is_host else "")
        try:
            self.module = LlvmModule(whole)
        except RuntimeError as error:
            raise CompilerBug.at(
                "TW040",
                f"LLVM rejects the code generated for {target.name}: {str(error).strip()}",
                help=f"please report this; the LLVM text is in {_save(whole)}",
            ) from error
        self.module.optimise(self.machine, level.passes, level.unroll, whole=level.passes != 1 or text.count("\n") < LONG)

    def emit(self, as_object: bool) -> bytes:
        """The module as an object, or as assembly."""
        return self.machine.emit(self.module, as_object)

    def close(self) -> None:
        """Free the module now; the machine is kept."""
        self.module.close()


def compile_object(text: str, target: Target, opt: int | None = None) -> bytes:
    """The relocatable object of `text` for `target`, with what it calls of LLVM's own. `opt` is 0 to 3; without it the target's level holds."""
    with at_work(), _turn():
        code = _object(text, target, opt)
        called = helpers(code, text, target)
        return _object(text + called, target, opt) if called else code


def _object(text: str, target: Target, opt: int | None) -> bytes:
    module = _Module(text, target, opt)
    try:
        return module.emit(as_object=True)
    finally:
        module.close()


def emit_assembly(text: str, target: Target, opt: int | None = None) -> str:
    """The assembly of `text` for `target`; PTX for NVIDIA targets."""
    with at_work(), _turn():
        module = _Module(text, target, opt)
        try:
            assembly = module.emit(as_object=False).decode()
            if target.kind != "nvptx" or not ("neg.s16" in assembly or "abs.s16" in assembly):
                return assembly
            from tilewright.codegen.llvm.assembler_faults import avoid_faults

            return avoid_faults(assembly)
        finally:
            module.close()


def optimised_ir(text: str, target: Target, opt: int | None = None) -> str:
    """The LLVM IR after LLVM's own passes, to look at."""
    with at_work(), _turn():
        module = _Module(text, target, opt)
        try:
            return str(module.module)
        finally:
            module.close()


def emit_assembly_for(text: str, triple: str, cpu: str, features: str, level: str = "") -> bytes:
    """`emit_assembly` for a target given by its names; called in the compile server."""
    return emit_assembly(text, _named(triple, cpu, features, level)).encode()


def compile_object_for(text: str, triple: str, cpu: str, features: str, level: str = "") -> bytes:
    """`compile_object` for a target given by its names; called in the compile server."""
    return compile_object(text, _named(triple, cpu, features, level))


def _named(triple: str, cpu: str, features: str, level: str) -> Target:
    if triple.startswith("nvptx"):
        return Target(cpu, "nvptx", triple=triple, cpu=cpu, ptx=int(features.removeprefix("+ptx")), level=level)
    if triple.startswith("amdgcn"):
        return Target(cpu, "amdgpu", triple=triple, cpu=cpu, cpu_features=features, level=level)
    return Target(cpu, "cpu", triple=triple, cpu=cpu, cpu_features=features, level=level)
