"""Explicit kernels: thread-stage IR to artifacts, with the caches of other kernels.

In: what the front end of explicit kernels built, and a target. Out: an artifact. The passes are those that end the way of other
kernels: simplification, contraction to `fma`, math functions and conversions as arithmetic; for a CPU, threads become lanes and loops.
The key of an artifact is the IR's text, so whatever the kernel captured is in it.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace

from tilewright.base.artifact import Artifact
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.codegen.interpreter import abi_key
from tilewright.compile import driver
from tilewright.ir.nodes import Kernel, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import Program
from tilewright.ir.text import print_program
from tilewright.ir.verify import verify_program

_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def prepare_simt(program: Program, target: Target) -> Program:
    """The program as it becomes code for the target, and as the emulator runs it."""
    from tilewright.passes.contract import contract
    from tilewright.passes.exact_functions import exact_functions
    from tilewright.passes.expand_casts import expand_casts
    from tilewright.passes.expand_math import expand_math
    from tilewright.passes.pipeline import Trace, run_pass
    from tilewright.passes.simplify import simplify
    from tilewright.passes.split_vectors import split_vectors
    from tilewright.passes.threads_to_loops import threads_to_loops

    trace = Trace()
    verify_program(program)

    def one(kernel: Kernel) -> Kernel:
        if target.is_gpu and any(OPS[op.opcode].group == "lanes" for op in walk(kernel.body)):
            kernel = run_pass("split_vectors", kernel, split_vectors, trace)
        kernel = run_pass("simplify", kernel, simplify, trace)
        kernel = run_pass("contract", kernel, contract, trace)
        if not target.is_gpu:
            kernel = run_pass("exact_functions", kernel, exact_functions, trace)
            kernel = run_pass("threads_to_loops", kernel, lambda k: threads_to_loops(k, target), trace)
            kernel = run_pass("simplify", kernel, simplify, trace)
        kernel = run_pass("expand_math", kernel, lambda k: expand_math(k, target), trace)
        kernel = run_pass("expand_casts", kernel, lambda k: expand_casts(k, target), trace)
        return run_pass("simplify", kernel, simplify, trace)

    return replace(program, calls=tuple(replace(call, kernel=one(call.kernel)) for call in program.calls))


def addressed(program: Program, target: Target) -> Program:
    """The last step before code for a GPU: how addresses and indices are computed."""
    if not target.is_gpu:
        return program
    from tilewright.passes.flat_accesses import flat_accesses
    from tilewright.passes.narrow_indices import narrow_indices
    from tilewright.passes.pipeline import Trace, run_pass
    from tilewright.passes.simplify import simplify

    trace = Trace()

    def one(kernel: Kernel) -> Kernel:
        kernel = run_pass("flat_accesses", kernel, flat_accesses, trace)
        kernel = run_pass("simplify", kernel, simplify, trace)
        kernel = run_pass("narrow_indices", kernel, narrow_indices, trace)
        return run_pass("simplify", kernel, simplify, trace)

    return replace(program, calls=tuple(replace(call, kernel=one(call.kernel)) for call in program.calls))


def compile_simt(program: Program, target: Target) -> Artifact:
    """The artifact of an explicit kernel, from memory, from disk or freshly compiled."""
    key = simt_key(program, target)
    found = driver._memory.get(key)
    if found is not None:
        return found
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        found = driver._memory.get(key) or driver.disk_cache().get(key)
        if found is None:
            from tilewright.compile import build

            ready = addressed(prepare_simt(program, target), target)
            found = build.build_artifact(ready, target, key, entry=False)
            driver.disk_cache().put(key, found)
        driver._memory[key] = found
    return found


def simt_key(program: Program, target: Target) -> str:
    """Content hash: the IR, where its lines are from, and the target."""
    places = [_place(op.span) for call in program.calls for op in walk(call.kernel.body)]
    host = "" if target.is_gpu else abi_key()
    parts = ("simt", print_program(program), program.span.path, *places, target.key(), host, driver.compiler_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _place(span: Span) -> str:
    return f"{span.line}:{span.column}"
