"""Thread-stage program -> artifact: generated code plus the rule to launch it.

In: the program at the thread stage and a target. Out: an `Artifact` with the object or PTX, the launch list and, for a CPU,
the CPython entry stub. LLVM ends the process on some backend errors; `is_proven` says which kernels hold only ops whose code
generation is covered by tests on every target. Anything else is compiled in a separate process, where such an end becomes a
`CompilerBug`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import MappingProxyType

from tilewright.base import abi
from tilewright.base.artifact import ArrayParam, Artifact, CallCheck, Launch, MapParam, ScalarParam, SizeBinding
from tilewright.base.sizes import Size, ceildiv, maximum, product
from tilewright.base.target import Target
from tilewright.codegen import native
from tilewright.codegen.cpu import cpu_function, faults
from tilewright.codegen.host import host_object
from tilewright.codegen.nvptx import cluster_of, kernel_needs, nvptx_function
from tilewright.codegen.nvptx_grid import is_cooperative
from tilewright.codegen.nvptx_report import assertions
from tilewright.codegen.nvptx_simt import ptx_needed
from tilewright.ir.nodes import Kernel, Stage, walk
from tilewright.ir.program import Array, KernelCall, Program
from tilewright.ir.types import Tensor

_UNPROVEN = frozenset({"while"})
"""Ops whose code generation no test drives through every target yet."""


def is_proven(kernel: Kernel) -> bool:
    return not any(op.opcode in _UNPROVEN for op in walk(kernel.body))


def entry_name(program: Program, position: int) -> str:
    """The symbol of the program's kernel: letters, digits and underscores."""
    text = f"{program.calls[position].kernel.name}_{position}"
    return "tw_" + "".join(c if c.isalnum() and c.isascii() else "_" for c in text)


def llvm_text(program: Program, target: Target) -> tuple[str, tuple[int, ...]]:
    """One LLVM module with every kernel, and the dynamic shared memory of each."""
    parts: list[str] = []
    declarations: set[str] = set()
    shared: list[int] = []
    if target.is_gpu and len(program.calls) > 1:
        # Debug metadata is numbered per module; only single-kernel modules carry line tables of their own numbering.
        return _merged_modules(program, target)
    for position, call in enumerate(program.calls):
        if target.is_gpu:
            text, needs, launch = nvptx_function(call.kernel, entry_name(program, position), target)
            shared.append(launch.shared_bytes)
        else:
            text, needs = cpu_function(call.kernel, entry_name(program, position))
            shared.append(0)
        parts.append(text)
        declarations |= needs
    return "\n".join(sorted(declarations)) + "\n" + "\n".join(parts), tuple(shared)


def _merged_modules(program: Program, target: Target) -> tuple[str, tuple[int, ...]]:
    """Several kernels in one module: metadata numbers are shifted so that each keeps its own."""
    parts: list[str] = []
    declarations: set[str] = set()
    shared: list[int] = []
    flags: list[str] = []
    for position, call in enumerate(program.calls):
        text, needs, launch = nvptx_function(call.kernel, entry_name(program, position), target)
        shift = 100000 * position
        text = re.sub(r"!(\d+)", lambda m, s=shift: f"!{int(m.group(1)) + s}", text)  # type: ignore[misc]
        for line in text.splitlines():
            if line.startswith(("!llvm.dbg.cu", "!llvm.module.flags")):
                flags.append(line)
        parts.append("\n".join(line for line in text.splitlines() if not line.startswith("!llvm.")))
        declarations |= needs
        shared.append(launch.shared_bytes)
    units = ", ".join(re.findall(r"!\d+", " ".join(f for f in flags if f.startswith("!llvm.dbg.cu"))))
    first = next((f for f in flags if f.startswith("!llvm.module.flags")), "")
    tail = (f"!llvm.dbg.cu = !{{{units}}}\n" if units else "") + first
    return "\n".join(sorted(declarations)) + "\n" + "\n".join(parts) + "\n" + tail + "\n", tuple(shared)


def describe_program(program: Program, target: Target, key: str = "", alias_safe: bool = False) -> Artifact:
    """The artifact of a program but for its code: signature, sizes, checks and launch rules."""
    facts: dict[str, int] = {}
    for call in program.calls:
        facts.update(call.kernel.facts)
    return Artifact(
        name=program.name,
        target=target.name,
        kind="ptx" if target.is_gpu else "object",
        code=b"",
        inputs=tuple(_array(a) if isinstance(a, Array) else ScalarParam(a.name, a.dtype) for a in program.inputs),
        outputs=tuple(_array(a) for a in program.outputs),
        scratch=tuple(_array(a) for a in program.scratch),
        launches=tuple(_launch(entry_name(program, position), call, target) for position, call in enumerate(program.calls)),
        bindings=tuple(SizeBinding(b.name, b.array, b.axis, b.stride) for b in program.bindings()),
        checks=tuple(
            CallCheck(c.left, c.relation, c.right, c.message, c.span.places() if c.span.line else "", c.span.excerpt(), c.code)
            for c in program.checks
        ),
        facts=tuple(sorted(facts.items())),
        alias_safe=alias_safe,
        key=key,
    )  # fmt: skip


def _launch(entry: str, call: KernelCall, target: Target) -> Launch:
    kernel = call.kernel
    place = kernel.span.place() if kernel.span.line else ""
    plain = Launch(entry, call.args, kernel.size_names, kernel.grid, kernel.threads, 0, _work(kernel), place=place)
    limit = kernel.attrs.get("watchdog", 0)
    if isinstance(limit, int) and limit:
        plain = replace(plain, watchdog=limit)
    if not target.is_gpu and (failing := faults(kernel)):
        return replace(plain, asserts=tuple((op.span.place() if op.span.line else place, str(op.attrs["text"])) for op in failing))
    if not target.is_gpu or kernel.stage is not Stage.THREAD:
        return plain
    if asserts := assertions(kernel):
        plain = replace(plain, asserts=tuple((op.span.place() if op.span.line else place, str(op.attrs["text"])) for op in asserts))
    needs = kernel_needs(kernel, target)
    maps = tuple(
        MapParam(
            call.args[m.parameter], m.dtype, m.shape, m.strides, m.box, m.swizzle, m.pixels, m.lower, m.upper, m.steps, m.rounds
        )
        for m in needs.maps
    )
    cooperative, persistent = is_cooperative(kernel), bool(kernel.attrs.get("persistent"))
    dependent = bool(kernel.attrs.get("dependent")) and not cooperative
    own = replace(plain, shared_bytes=needs.shared_bytes, maps=maps, cluster=cluster_of(kernel), dependent=dependent)
    return replace(own, cooperative=cooperative, persistent=persistent)


def build_artifact(
    program: Program, target: Target, key: str = "", alias_safe: bool = False, schedules: tuple[str, ...] = (), entry: bool = True
) -> Artifact:
    """Generate code for the whole program; without `entry`, for a CPU, there is no stub that Python calls."""
    if target.is_gpu:
        target = replace(target, ptx=max([target.ptx, *(ptx_needed(call.kernel, target) for call in program.calls)]))
        program = _numbered(program)
    text, _ = llvm_text(program, target)
    code = _generate(text, target, all(is_proven(c.kernel) for c in program.calls))
    artifact = replace(describe_program(program, target, key, alias_safe), code=code, schedule="\n".join(schedules))
    return artifact if target.is_gpu or not entry else replace(artifact, host=host_object(artifact, target))


def _numbered(program: Program) -> Program:
    """Kernels with assertions know which of the program's they are: they report it."""
    calls = tuple(
        replace(call, kernel=replace(call.kernel, attrs=MappingProxyType({**call.kernel.attrs, "watchdog_number": number})))
        if assertions(call.kernel) else call
        for number, call in enumerate(program.calls)
    )  # fmt: skip
    return replace(program, calls=calls)


def _generate(text: str, target: Target, proven: bool) -> bytes:
    mode = os.environ.get("TILEWRIGHT_ISOLATE", "auto")
    if mode == "always" or (mode == "auto" and not proven):
        from tilewright.compile.isolate import compile_isolated

        names = target.triple, target.cpu, native.machine_features(target)
        function = "emit_assembly_for" if target.is_gpu else "compile_object_for"
        return compile_isolated(f"tilewright.codegen.native:{function}", text, *names)
    if target.is_gpu:
        return native.emit_assembly(text, target).encode()
    return native.compile_object(text, target)


def _array(array: Array) -> ArrayParam:
    type_: Tensor = array.type
    return ArrayParam(array.name, type_.dtype, type_.shape, type_.strides, array.role, type_.align)


def _work(kernel: Kernel) -> Size:
    """Elements one block touches: those of all arrays, shared out over the blocks. Kernels that may run for any time count as ones for
    which other Python threads are let go on."""
    total = Size.of(abi.RELEASE_WORK if _is_open_ended(kernel) else 0)
    for param in kernel.tensors:
        assert isinstance(param.type, Tensor)
        total = total + product(param.type.shape)
    return ceildiv(total, maximum(Size.of(1), product(kernel.grid)))


def _is_open_ended(kernel: Kernel) -> bool:
    """Whether sizes do not bound how long it runs: a loop's length comes from a number or from memory."""
    free = {param for param in kernel.params if not isinstance(param.type, Tensor)}
    for op in walk(kernel.body):
        if op.opcode == "while" or (op.opcode == "for" and any(v in free for v in op.operands[:3])):
            return True
        if op.opcode in ("load", "atomic") or any(v in free for v in op.operands):
            free.update(op.results)
    return False
