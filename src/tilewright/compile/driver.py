"""Source -> artifact: parse, check, lower, optimise, generate; with caches in memory and on disk.

`compile_kernel` takes the untyped tree of one kernel and what its arguments are (`Signature`). Its key is made of the tree,
the signature, the target and the compiler's own version, so a cached artifact is found before anything is checked or lowered.
Many threads may ask for one kernel: it is compiled once.

The compiler proper (passes and code generators) is loaded when something has to be compiled: programs that find all their
kernels in the cache start faster without it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.base.artifact import Artifact
from tilewright.base.record import record
from tilewright.base.target import Target, host_cpu
from tilewright.codegen.interpreter import abi_key
from tilewright.compile.cache import DiskCache
from tilewright.runtime import cpu_pool
from tilewright.tree.check import check_kernel
from tilewright.tree.syntax import Function
from tilewright.tree.typed import ArgSpec, TypedKernel

if TYPE_CHECKING:
    from tilewright.ir.program import Program
    from tilewright.passes.pipeline import Stages, Trace

log = logging.getLogger("tilewright")
if os.environ.get("TILEWRIGHT_LOG"):
    # One line per compilation, on request; an application's own logging setup is left alone.
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("tilewright: %(message)s"))
    log.addHandler(_handler)
    log.setLevel(logging.INFO)
AxisNumbers = tuple[tuple[str, int, int], ...]
"""(array, axis, number) triples."""


@record
class Signature:
    """What a kernel is compiled for. `divisors` are promised, `hints` (rough extents) only steer the schedule."""

    args: tuple[ArgSpec, ...]
    divisors: AxisNumbers = ()
    hints: AxisNumbers = ()


@record
class Compilation:
    """Every stage of one compilation, for those who want to look."""

    typed: TypedKernel
    program: Program
    stages: Stages
    trace: Trace


@functools.cache
def compiler_version() -> str:
    """Changes whenever the compiler's source or LLVM does; part of every cache key."""
    import llvmlite

    found: list[str] = []

    def visit(directory: str) -> None:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".lark")):
                    status = entry.stat()
                    found.append(f"{entry.path}:{status.st_size}:{status.st_mtime_ns}")
                elif entry.is_dir() and entry.name != "__pycache__":
                    visit(entry.path)

    visit(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    text = "\n".join([llvmlite.__version__, *sorted(found)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def disk_cache() -> DiskCache:
    return DiskCache()


def _pool_code() -> bytes:
    """The thread pool's machine code, from disk where it was built before."""
    target = host_cpu()
    key = hashlib.sha256(f"pool|{target.key()}|{compiler_version()}".encode()).hexdigest()
    found = disk_cache().get(key)
    if found is None:
        from tilewright.codegen.pool import pool_object

        found = Artifact("pool", target.name, "object", pool_object(target), (), (), (), (), (), (), key=key)
        disk_cache().put(key, found)
    return found.code


cpu_pool.provide_code(_pool_code)


def cache_key(function: Function, signature: Signature, target: Target) -> str:
    """Content hash: the same source for the same arguments and target gives the same key."""
    place = f"{function.span.path}:{function.span.line}"
    host = "" if target.is_gpu else abi_key()
    parts = (repr(function), place, repr(signature), target.key(), host, compiler_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def front_end(function: Function, signature: Signature) -> tuple[TypedKernel, Program]:
    """Check and lower to the loop stage; the program carries the signature's divisors as facts."""
    from tilewright.ir.verify import verify_program
    from tilewright.passes.lower_tree import lower_kernel

    typed = check_kernel(function, signature.args)
    program = lower_kernel(typed)
    verify_program(program)
    facts = _by_name(program, signature.divisors)
    if facts:
        program = replace(
            program,
            calls=tuple(
                replace(
                    call,
                    kernel=replace(
                        call.kernel,
                        facts=MappingProxyType({n: d for n, d in facts.items() if n in call.kernel.size_names}),
                    ),
                )
                for call in program.calls
            ),
        )
    return typed, program


def _by_name(program: Program, numbers: AxisNumbers) -> dict[str, int]:
    """Numbers given per array axis, keyed by the size name bound there."""
    given = {(array, axis): number for array, axis, number in numbers}
    return {b.name: given[b.array, b.axis] for b in program.bindings() if not b.stride and (b.array, b.axis) in given}


def compile_stages(function: Function, signature: Signature, target: Target) -> Compilation:
    """All stages, nothing cached."""
    from tilewright.passes.pipeline import Trace, lower

    trace = Trace(dump=os.environ.get("TILEWRIGHT_DUMP", ""))
    start = time.perf_counter()
    typed, program = front_end(function, signature)
    trace.times["front end"] = time.perf_counter() - start
    hints: Mapping[str, int] = _by_name(program, signature.hints)
    return Compilation(typed, program, lower(program, target, hints, trace), trace)


_memory: dict[str, Artifact] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def compile_kernel(function: Function, signature: Signature, target: Target) -> Artifact:
    """The artifact, from memory, from disk or freshly compiled."""
    key = cache_key(function, signature, target)
    found = _memory.get(key)
    if found is not None:
        return found
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        found = _memory.get(key)
        if found is not None:
            return found
        start = time.perf_counter()
        artifact = disk_cache().get(key)
        if artifact is None:
            artifact = _compile(function, signature, target, key, start)
            disk_cache().put(key, artifact)
        elif log.isEnabledFor(logging.INFO):
            log.info("loaded %s for %s from cache in %.1f ms", function.name, target.name, (time.perf_counter() - start) * 1e3)
        _memory[key] = artifact
        return artifact


def _compile(function: Function, signature: Signature, target: Target, key: str, start: float) -> Artifact:
    from tilewright.analysis.alias import alias_safe
    from tilewright.compile.build import build_artifact

    done = compile_stages(function, signature, target)
    middle = time.perf_counter()
    schedules = tuple(
        f"{call.kernel.name}: {schedule.describe()}"
        for call, schedule in zip(done.stages.thread.calls, done.stages.schedules, strict=True)
    )
    artifact = build_artifact(done.stages.thread, target, key, alias_safe(done.program), schedules)
    if log.isEnabledFor(logging.INFO):
        log.info(
            "compiled %s(%s) for %s: passes %.1f ms, code %.1f ms, %d kernel(s), %d bytes",
            function.name, ", ".join(map(str, signature.args)), target.name, (middle - start) * 1e3,
            (time.perf_counter() - middle) * 1e3, len(artifact.launches), len(artifact.code),
        )  # fmt: skip
    return artifact


def forget() -> None:
    """Empty the in-memory cache (tests and benchmarks of cold compilation)."""
    _memory.clear()
