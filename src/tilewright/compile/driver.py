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
import re
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.base import environment, levels
from tilewright.base.artifact import SMALL_EXTENT, Artifact, SmallSums
from tilewright.base.errors import CompilerBug, Note, TilewrightError, UserError
from tilewright.base.llvm_library import library_path
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target, host_cpu
from tilewright.codegen.host.interpreter import abi_key
from tilewright.compile.collection import no_collection
from tilewright.compile.store import STORE
from tilewright.compile.tuning_folder import may_have_tables
from tilewright.runtime.core import machine_code
from tilewright.runtime.cpu import pool as cpu_pool
from tilewright.tree import syntax
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.inline import nodes
from tilewright.tree.metadata import CONTRACTIONS
from tilewright.tree.syntax import Function
from tilewright.tree.typed import ArgSpec, NoneArg, ScalarArg, TypedKernel

if TYPE_CHECKING:
    from tilewright.ir.nodes import Kernel
    from tilewright.ir.program import Program
    from tilewright.passes.choose.fates import Fate
    from tilewright.passes.common.fusion_report import FusionReport
    from tilewright.passes.routes import Stages
    from tilewright.passes.runner import Trace
    from tilewright.passes.schedules.loop_words import LoopNumbers
    from tilewright.passes.schedules.matrix import MatrixSchedule
    from tilewright.passes.schedules.plans import Plans

log = logging.getLogger("tilewright")
if environment.text("TILEWRIGHT_LOG").lower() not in ("", "0", "off", "no", "false"):
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
    spacing: AxisNumbers = ()
    """What divides strides (in elements) that are no constants."""
    hints: AxisNumbers = ()
    precision: str = "auto"
    """How f32 operands of contractions are multiplied: `auto` (as `3xtf32` where that is faster, else `ieee`), `ieee`, `tf32` or `3xtf32`."""
    watchdog: int = 0
    """Nanoseconds after which open-ended loops of GPU code stop it; 0: they do not."""
    schedule: str = ""
    """The schedule to use for contractions, as `MatrixSchedule.describe` writes it, or for loop nests, as `LoopNumbers.describe` does; empty: the compiler chooses."""
    launches: int = 0
    """1: GPU code is one launch, whatever kernels there are; 0: one for each kernel."""
    indices: str = ""
    """Whose indices are checked as kernels run where nothing proves them: of `all` accesses, of `stores`, of `none`; empty: as the target and the kernel have it."""
    numbers: tuple[tuple[str, int], ...] = ()
    """Whole numbers of the call that are part of the code: steps and paddings of windows (`frontend/window_numbers.py`)."""
    results: tuple[tuple[int | None, ...] | None, ...] = ()
    """Strides of the arrays that results are written to, as those of an argument: of each None where it is row-major without gaps; empty where all are."""
    extents: AxisNumbers = field(default=(), compare=False, repr=False)
    """The very extents of the call: they choose between schedules of contractions and are no part of what code is made for."""


@record
class Compilation:
    """Every stage of one compilation, for those who want to look."""

    typed: TypedKernel
    program: Program
    stages: Stages
    trace: Trace
    fusion: FusionReport
    notes: tuple[Note, ...] = ()
    """What makes it slow."""
    fates: tuple[Fate, ...] = ()
    """What became of attributes that ask for something of schedules."""
    written: Program | None = None
    """Of a kernel with `empty` arrays: the program as its author wrote it, before kernels were fused."""


COMPILER = ("base", "tree", "ir", "frontend", "analysis", "passes", "primitives", "codegen", "runtime", "compile")
"""The layers that artifacts are made by; those above call them."""


@functools.cache
def compiler_version(layers: tuple[str, ...] = COMPILER) -> str:
    """Changes whenever the source of these layers or LLVM does; part of every cache key."""
    found: list[str] = []

    def visit(directory: str) -> None:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".lark")):
                    status = entry.stat()
                    found.append(f"{entry.path}:{status.st_size}:{status.st_mtime_ns}")
                elif entry.is_dir() and entry.name != "__pycache__":
                    visit(entry.path)

    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for layer in layers:
        visit(os.path.join(root, layer))
    llvm = os.stat(library_path())
    text = "\n".join([f"{llvm.st_size}:{llvm.st_mtime_ns}", *sorted(found)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def package_version() -> str:
    """The same for all layers: for what those above the compiler keep."""
    return compiler_version((".",))


def _kept_code(name: str, build: Callable[[Target], bytes], extra: str = "") -> bytes:
    """Machine code of the runtime itself, from disk where it was built before."""
    target = host_cpu()
    key = hashlib.sha256(f"{name}|{extra}|{target.key()}|{compiler_version()}".encode()).hexdigest()
    return STORE.get_or_build(
        key, lambda: Artifact(name, target.name, "object", build(target), (), (), (), (), (), (), key=key)
    ).code


def _pool_code() -> bytes:
    """The thread pool's machine code."""

    def build(target: Target) -> bytes:
        from tilewright.codegen.host.pool import pool_object

        return pool_object(target)

    return _kept_code("pool", build)


def _starter_code() -> bytes:
    """The machine code that is there before the thread pool is."""

    def build(target: Target) -> bytes:
        from tilewright.codegen.host.pool import starter_object

        return starter_object(target)

    return _kept_code("starter", build)


def _spare_memory_code() -> bytes:
    """The machine code that keeps the memory of CPU programs for their next calls."""

    def build(target: Target) -> bytes:
        from tilewright.codegen.host.spare_memory import spare_memory_object

        return spare_memory_object(target)

    return _kept_code("spare memory", build)


def _memory_code() -> bytes:
    """The machine code that hands out device memory."""

    def build(target: Target) -> bytes:
        from tilewright.codegen.host.allocator import memory_object

        return memory_object(target)

    return _kept_code("memory", build, abi_key())


def _tensor_code() -> bytes:
    """The machine code that lends tensors of PyTorch to entry stubs."""

    def build(target: Target) -> bytes:
        from tilewright.codegen.host.tensor_entry import tensor_object

        return tensor_object(target)

    return _kept_code("tensors", build, abi_key())


cpu_pool.provide_code(_pool_code, _starter_code)
machine_code.provide("memory", _memory_code)
machine_code.provide("spare memory", _spare_memory_code)
machine_code.provide("tensors", _tensor_code)


def cache_key(function: Function, signature: Signature, target: Target) -> str:
    """Content hash: the same source for the same arguments and target gives the same key."""
    place = f"{function.span.path}:{function.span.line}"
    host = abi_key() if target.is_host else ""
    parts = (repr(function), place, repr(signature), target.key(), host, compiler_version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def said_level(function: Function) -> str:
    """The level that a kernel names, or that blocks which are one program do; empty where none is named. Raises UserError where they differ."""
    if isinstance(function, BlockGraph):
        said = {word: part.function for part in function.parts if (word := said_level(part.function))}
        if len(said) > 1:
            first, second = list(said.items())[:2]
            raise UserError.at(
                "TW016", f"blocks that are one program have different levels: @optimize({first[0]}) in {first[1].name} and @optimize({second[0]}) in {second[1].name}",
                second[1].span, "name one level in all of them, or in none",
            )  # fmt: skip
        return next(iter(said), "")
    for attribute in function.attributes:
        if attribute.name == "optimize":
            value = attribute.args[0].value
            return value.id if isinstance(value, syntax.Name) else value.value if isinstance(value, syntax.String) else ""
    return ""


def at_level(function: Function, target: Target) -> Target:
    """The target at the optimisation level that holds for a kernel."""
    return levels.at(target, said_level(function))


_fronts: dict[tuple[int, Signature], tuple[Function, TypedKernel, Program]] = {}
"""The latest kernels that were lowered to the loop stage, by identity."""
_FRONTS = 8


def front_end(function: Function, signature: Signature) -> tuple[TypedKernel, Program]:
    """Check and lower to the loop stage; the program carries the signature's divisors as facts. Whoever asks again soon gets the same."""
    key = (id(function), signature)
    known = _fronts.get(key)
    if known is None:
        known = function, *_front_end(function, signature)
        if len(_fronts) >= _FRONTS:
            _fronts.clear()
        _fronts[key] = known
    return known[1], known[2]


def _front_end(function: Function, signature: Signature) -> tuple[TypedKernel, Program]:
    from tilewright.passes.routes import from_tree
    from tilewright.passes.runner import Trace

    if isinstance(function, BlockGraph):
        from tilewright.compile.block_graphs import check_joined

        typed, program = check_joined(function, signature.args)
    else:
        if signature.numbers:
            from tilewright.frontend.window_numbers import with_numbers

            function = with_numbers(function, dict(signature.numbers))
        typed = check_kernel(function, signature.args)
        typed = _with_places(typed, _without_parts(typed, signature.results))
        program = from_tree(typed, Trace())
    facts = _by_name(program, signature.divisors) | _by_name(program, signature.spacing, stride=True)
    precision = signature.precision if signature.precision != "auto" else typed.metadata.precision or "auto"
    if facts or precision != "auto":
        program = replace(program, calls=tuple(replace(c, kernel=_promised(c.kernel, facts, precision)) for c in program.calls))
    return typed, program


def _without_parts(typed: TypedKernel, results: Sequence[tuple[int | None, ...] | None]) -> tuple[tuple[int | None, ...] | None, ...]:
    """Strides of results as their dtypes count axes: the parts of complex numbers are given as one more axis."""
    dtypes = [array.dtype for array in typed.outputs]
    if len(results) != len(dtypes):
        return tuple(results)
    return tuple(s[:-1] if s is not None and d.is_complex and s[-1:] == (1,) else s for s, d in zip(results, dtypes, strict=True))


def _with_places(typed: TypedKernel, results: Sequence[tuple[int | None, ...] | None]) -> TypedKernel:
    """The kernel with results that have the strides of the arrays they are written to."""
    if len(results) != len(typed.outputs) or any(s is not None and len(s) != a.rank for s, a in zip(results, typed.outputs, strict=True)):
        return typed  # what was given does not fit, and is refused when it is looked at
    placed = [
        array if strides is None else replace(array, strides=tuple(Size.of(f"{array.name}$s{axis}" if s is None else s) for axis, s in enumerate(strides)))
        for array, strides in zip(typed.outputs, results, strict=True)
    ]
    return replace(typed, outputs=tuple(placed))


def _promised(kernel: Kernel, facts: Mapping[str, int], precision: str) -> Kernel:
    known = MappingProxyType({n: d for n, d in facts.items() if n in kernel.size_names})
    attrs = kernel.attrs if precision == "auto" else MappingProxyType({**kernel.attrs, "precision": precision})
    return replace(kernel, facts=known, attrs=attrs)


def _watched(program: Program, nanoseconds: int) -> Program:
    """Every kernel gets a watchdog, and the number under which it reports."""

    def one(kernel: Kernel, number: int) -> Kernel:
        return replace(kernel, attrs=MappingProxyType({**kernel.attrs, "watchdog": nanoseconds, "watchdog_number": number}))

    return replace(program, calls=tuple(replace(c, kernel=one(c.kernel, n)) for n, c in enumerate(program.calls)))


def _by_name(program: Program, numbers: AxisNumbers, stride: bool = False) -> dict[str, int]:
    """Numbers given per array axis, keyed by the name of the size (or stride) bound there."""
    given = {(array, axis): number for array, axis, number in numbers}
    return {b.name: given[b.array, b.axis] for b in program.bindings() if b.stride is stride and (b.array, b.axis) in given}


def compile_stages(function: Function, signature: Signature, target: Target) -> Compilation:
    """All stages, nothing cached."""
    own = sized_kernel(function, signature, target)
    plan = own.plan(signature)
    written = own.written if _makes_empty(function) else None
    return replace(own.finish(signature, plan), fusion=own.report(signature, plan), notes=own.notes(signature, plan), written=written)


def thread_program(function: Function, signature: Signature, target: Target) -> Program:
    """The thread stage alone, nothing cached."""
    own = sized_kernel(function, signature, target)
    return own.finish(signature, own.plan(signature)).stages.thread


def _makes_empty(item: object) -> bool:
    """Whether the kernel, or one it calls, makes arrays whose elements hold nothing."""
    for node in nodes(item):
        if isinstance(node, syntax.Name) and node.id in ("empty", "empty_like"):
            return True
        if isinstance(node, syntax.Callee) and _makes_empty(node.function):
            return True
    return False


def performance_notes(function: Function, signature: Signature, target: Target) -> tuple[Note, ...]:
    """What would make the kernel slow, without generating its code. There is nothing to verify: no code is made."""
    from tilewright.passes.runner import unverified

    with no_collection(), unverified():
        own = sized_kernel(function, signature, target)
        return own.notes(signature, own.plan(signature))


def contraction_schedules(function: Function, signature: Signature, target: Target, extents: AxisNumbers) -> tuple[MatrixSchedule, ...]:
    """Schedules the cost model lists for a kernel that is a contraction or attention, best first; none for other kernels."""
    return sized_kernel(function, replace(signature, extents=extents), target).ranked(extents)


def _lean(target: Target) -> Target:
    """The target as kernels see it that are to be one launch."""
    from tilewright.passes.program.persistent_kernel import lean

    return lean(target)


def loop_schedules(function: Function, signature: Signature, target: Target, extents: AxisNumbers) -> LoopChoices:
    """What there is to try of a kernel that is no contraction."""
    return LoopChoices(function, replace(signature, extents=extents), target)


class LoopChoices:
    """Ways to run the loop nests of a kernel that differ in their code."""

    def __init__(self, function: Function, signature: Signature, target: Target) -> None:
        self._signature, self._target = signature, target
        self._prepared = sized_kernel(function, signature, target)
        self._known: dict[str, str] = {}
        """By the text of the code, the way that was found first."""
        self.complete = True
        """Whether all was looked at that there is."""

    def first(self, until: Callable[[], bool]) -> list[LoopNumbers]:
        """The compiler's own choice, then each parameter by itself, until there is no more time for looking."""
        from tilewright.passes.schedules.loop_words import alternatives

        return self._differing(alternatives(self._target), until)

    def around(self, numbers: LoopNumbers) -> list[LoopNumbers]:
        """One step away."""
        from tilewright.passes.schedules.loop_words import around

        return self._differing(around(numbers, self._target), lambda: False)

    def _differing(self, candidates: Sequence[LoopNumbers], until: Callable[[], bool]) -> list[LoopNumbers]:
        found: list[LoopNumbers] = []
        for numbers in candidates:
            if self._known and until():
                self.complete = False
                break
            text = numbers.describe()
            try:
                code = _lowered_text(self._prepared.with_loops(text), replace(self._signature, schedule=text))
            except TilewrightError:
                continue  # no schedule of this kernel
            if self._known.setdefault(code, text) == text:
                found.append(numbers)
        return found


def _lowered_text(prepared: PreparedKernel, signature: Signature) -> str:
    """The code of a kernel at the thread stage, as text."""
    from tilewright.ir.text import print_program
    from tilewright.passes.runner import unverified

    with unverified():
        text = print_program(prepared.finish(signature, prepared.plan(signature)).stages.thread)
    return re.sub(r'schedule = "[^"]*"', "", text)  # words that nothing came of make no other code


def _check_loop_words(function: Function, signature: Signature, target: Target) -> None:
    """Raises UserError where a word of a schedule of loops changes nothing in a kernel."""
    from tilewright.passes.schedules.loop_words import parse_loops, words_of

    numbers = parse_loops(signature.schedule, target)
    if not numbers.numbers:
        return
    own = sized_kernel(function, signature, target)
    code = _lowered_text(own, signature)
    for name, number in numbers.numbers:
        other = numbers.without(name).describe()
        if _lowered_text(own.with_loops(other), replace(signature, schedule=other)) == code:
            meaning = next(word.meaning for word in words_of(target) if word.name == name)
            raise UserError.at(
                "TW020", f"schedule '{signature.schedule}': {name}={number} changes nothing in {function.name} ({name}: {meaning})", function.span,
                f"leave {name} out, or use what tw.tune reports",
            )  # fmt: skip


def _with_loop_numbers(target: Target, schedule: str) -> Target:
    """The target with what a schedule of loops says instead of its cost model."""
    if not is_loops(schedule):
        return target
    from tilewright.passes.schedules.loop_words import parse_loops

    return replace(target, tuned=parse_loops(schedule, target).tuned(target))


def is_loops(schedule: str) -> bool:
    """Whether a schedule is one of loop nests."""
    return "family=loops" in schedule


def _with_tuned_loops(function: Function, signature: Signature, target: Target) -> Signature:
    """The signature with the schedule of loops that was measured to be fastest; as it is where nothing was."""
    if signature.schedule or signature.launches:
        return signature
    if not may_have_tables():
        return signature
    from tilewright.compile import tuning

    if not tuning.has_any():
        return signature
    table = tuning.look_up(tuning.kernel_key(function, signature.args, signature.precision, target))
    text = "" if table is None else tuning.advise_loops(table, signature.extents or signature.hints, compiler_version())
    return replace(signature, schedule=text) if text else signature


class PreparedKernel:
    """A kernel after the passes that do not depend on sizes."""

    def __init__(self, function: Function, signature: Signature, target: Target, sizes: Mapping[str, int] | None = None, wait: bool = False) -> None:
        """`wait`: what short loops of this call make of it is left to `sized`."""
        from tilewright.passes.routes import check_accesses, fuse_kernels, prepare, specialise
        from tilewright.passes.runner import Trace

        target = _with_loop_numbers(at_level(function, target), signature.schedule)
        self.function, self.target, self.given = function, target, signature.schedule
        self.together = signature.launches == 1 and target.simt
        self.limits = _lean(target) if self.together else target
        """What the passes know of the target."""
        self.trace = Trace()
        start = time.perf_counter()
        self.typed, written = front_end(function, signature)
        self.written = written
        if written.loops and target.simt:
            self.limits = _lean(target)
        checks = signature.indices or ("stores" if target.simt else "all")
        if checks != "none":
            written = check_accesses(written, checks, None if signature.indices else self.typed.metadata, self.trace)
        self.fused, self.fusion = fuse_kernels(written, self.trace)
        self.program = specialise(self.fused, sizes or {}, self.trace)
        self.trace.times["front end"] = time.perf_counter() - start
        self.extents = _by_name(self.program, signature.extents or signature.hints)
        later = self._short_numbers(signature) if wait else {}
        self.loop = prepare(self.program, self.trace, self.limits, self.extents, frozenset(later), signature.schedule)
        if self.typed.metadata.kind in CONTRACTIONS:
            from tilewright.passes.choose.hints import check_kind

            check_kind(self.typed.metadata, self.loop)

    def _short_numbers(self, signature: Signature) -> dict[str, int]:
        """The extents of a call that are part of the code where phases of sums run over them."""
        if self.program.loops and not self.target.simt:
            return {}
        most = SHORT_PHASED if self.target.simt else SMALL_EXTENT
        return {name: extent for name, extent in _by_name(self.program, signature.extents).items() if 1 <= extent <= most}

    def serves(self, signature: Signature) -> bool:
        """Whether what waits for numbers gets them with the sizes of a call."""
        from tilewright.passes.choose.small_sizes import waiting_sizes

        waits = [name for call in self.loop.calls for name in waiting_sizes(call.kernel)]
        return not waits or set(waits) <= self._short_numbers(signature).keys()

    def sized(self, sizes: Mapping[str, int]) -> PreparedKernel:
        """The same kernel with these sizes as part of its code; itself where there are none."""
        if not sizes:
            return self
        from tilewright.passes.routes import prepare, specialise

        own = copy(self)
        own.trace = self.trace.copied()
        own.program = specialise(self.fused, sizes, own.trace)
        own.loop = prepare(own.program, own.trace, own.limits, {**own.extents, **sizes}, given=own.given)
        return own

    def with_loops(self, schedule: str) -> PreparedKernel:
        """The same kernel, to be lowered by another schedule of loops."""
        own = copy(self)
        own.trace = self.trace.copied()
        own.target = _with_loop_numbers(self.target, schedule)
        own.limits = own.target if self.limits is self.target else replace(self.limits, tuned=own.target.tuned)
        return own

    def plan(self, signature: Signature) -> Plans:
        """The schedule of each contraction of the program for the call's own sizes."""
        from tilewright.passes.routes import plan_calls

        extents = _by_name(self.program, signature.extents or signature.hints)
        metadata = self.typed.metadata
        given = "" if is_loops(signature.schedule) else signature.schedule
        plan = plan_calls(self.loop, self.limits, extents, self.trace, given, metadata)
        if signature.schedule or metadata.strict or self.limits is not self.target or not any(plan):
            return plan
        tuned = self._tuned(signature)
        return plan_calls(self.loop, self.target, extents, self.trace, tuned) if tuned else plan

    def report(self, signature: Signature, plan: Plans) -> FusionReport:
        """What became of the program's kernels, with the products that are computed side by side."""
        if len(self.loop.calls) == 1:
            return self.fusion
        from tilewright.passes.choose.horizontal_fusion import choose_horizontal_fusion
        from tilewright.passes.program.fuse_horizontally import with_joins
        from tilewright.passes.program.row_prologues import with_rows

        extents = _by_name(self.program, signature.extents or signature.hints)
        joined = with_joins(self.fusion, self.loop, plan, choose_horizontal_fusion(self.loop, plan, self.limits, extents)[1])
        return with_rows(joined, self.loop, plan)

    def notes(self, signature: Signature, plan: Plans) -> tuple[Note, ...]:
        """What makes the program slow on this target."""
        from tilewright.compile.notes import program_notes

        return program_notes(self.loop, plan, self.target, _by_name(self.program, signature.extents or signature.hints))

    def short_sums(self, signature: Signature) -> dict[str, int]:
        """Sizes that are made part of the code: those of a convolution's kernel, over which short loops run inside longer sums, those of
        one row of attention, and in a graph's program for a GPU those of products with few rows: a step of a decoder has the same ones each time, and its kernels are mostly index arithmetic."""
        from tilewright.ir.nodes import walk

        extents = _by_name(self.program, signature.extents)
        if not self.target.simt:
            if not self._has_walks():
                return {}
            from tilewright.passes.choose.small_sizes import fixed_sizes as fixed_small

            return fixed_small(self.loop.calls, extents) if extents and not self.program.loops else {}
        if not any("reduce" in call.kernel.opcodes for call in self.loop.calls):
            return {}
        from tilewright.analysis.affine import analyse
        from tilewright.passes.choose.attention import fixed_sizes
        from tilewright.passes.choose.row_dots import find_row_dots
        from tilewright.passes.choose.small_sizes import waiting_sizes
        from tilewright.passes.choose.windows import window_sizes

        found: dict[str, int] = {}
        step = isinstance(self.function, BlockGraph) and self.limits.simt and not self.together and not self.program.loops
        for call in self.loop.calls:
            if step and find_row_dots(call.kernel, extents) is not None:
                found |= {n: extents[n] for n in call.kernel.size_names if n in extents}
            found |= fixed_sizes(call.kernel, self.limits, extents)
            found |= window_sizes(call.kernel, self.limits, extents)
            found |= {name: extents[name] for name in waiting_sizes(call.kernel)}
            forms = None
            for op in walk(call.kernel.body):
                if op.opcode == "reduce" and len(op.operands) > 1:
                    forms = forms or analyse(call.kernel)
                    names = [forms[v].constant.name for v in op.operands if not forms[v].factors]
                    found |= {n: extents[n] for n in names if n is not None and extents.get(n, SHORT + 1) <= SHORT}
                    if "phase" in call.kernel.attrs:
                        inside = {n for v in op.operands if not forms[v].factors and forms[v].constant.name is None for n in forms[v].constant.names}
                        found |= {n: extents[n] for n in inside if extents.get(n, SHORT_PHASED + 1) <= SHORT_PHASED}
        return found

    def small_axes(self) -> tuple[SmallSums, ...]:
        """CPU: the extents that may be part of the code."""
        if self.target.simt or self.program.loops or not self._has_walks():
            return ()
        from tilewright.passes.choose.small_sizes import small_sums

        places = {b.name: (b.array, b.axis) for b in self.fused.bindings() if not b.stride}
        inputs = {a.name for a in self.fused.input_arrays}
        places = {name: place for name, place in places.items() if place[0] in inputs}
        found = [nest for nest in small_sums(self.loop.calls) if nest[0] <= places.keys()]
        return tuple(SmallSums(tuple(sorted(places[n] for n in sums)), tuple(sorted(places[n] for n in around if n in places)), most) for sums, around, most in found)

    def _has_walks(self) -> bool:
        """Whether some kernel has a loop inside its nest."""
        return any(not call.kernel.opcodes.isdisjoint(("reduce", "for")) for call in self.loop.calls)

    def ranked(self, extents: AxisNumbers) -> tuple[MatrixSchedule, ...]:
        """The cost model's schedules for the program's (first) contraction at these extents, best first."""
        from tilewright.passes.choose.attention import attention_schedules
        from tilewright.passes.choose.horizontal_fusion import ranked_beside
        from tilewright.passes.choose.products import product_schedules

        sizes = _by_name(self.program, extents)
        ways = (product_schedules, attention_schedules)
        found = next((r for call in self.loop.calls for way in ways if (r := way(call.kernel, self.target, sizes))), ())
        return (*ranked_beside(self.loop, self.target, sizes), *found)

    def _tuned(self, signature: Signature) -> str:
        """What measurements say about a call; empty where there are none."""
        from tilewright.compile import tuning

        table = tuning.look_up(tuning.kernel_key(self.function, signature.args, signature.precision, self.target))
        if table is None:
            return ""
        return tuning.advise(table, signature.extents or signature.hints, signature.divisors, self.ranked, compiler_version())

    def finish(self, signature: Signature, plan: Plans | None = None) -> Compilation:
        from tilewright.passes.common.code_level import with_level
        from tilewright.passes.routes import arrange_launches, lower_planned, merge_launches, merge_steps

        hints: Mapping[str, int] = _by_name(self.program, signature.hints)
        metadata = self.typed.metadata
        plan = plan or self.plan(signature)
        stages = lower_planned(self.loop, plan, self.limits, hints, self.trace, metadata)
        said: tuple[Fate, ...] = ()
        if metadata.asks:
            from tilewright.passes.choose.code_limits import with_limits
            from tilewright.passes.choose.fates import check_strict, fates

            stages = replace(stages, thread=with_limits(stages.thread, metadata, stages.schedules, self.target))
            said = fates(metadata, stages.schedules, stages.thread, self.target)
            check_strict(metadata, said, self.target, self.typed.span)
        if self.together:
            stages = replace(stages, thread=merge_launches(stages.thread, self.trace))
        else:
            sizes = _by_name(self.program, signature.extents or signature.hints) if any(plan) else {}
            stages = replace(stages, thread=arrange_launches(stages.thread, self.limits, hints, sizes, self.trace))
        stages = replace(stages, thread=merge_steps(stages.thread, self.target, self.trace, stages.loop, hints))
        if signature.watchdog:
            stages = replace(stages, thread=_watched(stages.thread, signature.watchdog))
        stages = replace(stages, thread=with_level(stages.thread, self.target))
        return Compilation(self.typed, self.program, stages, self.trace, self.fusion, fates=said)


def sized_kernel(function: Function, signature: Signature, target: Target) -> PreparedKernel:
    """The kernel with what short loops of this call make of it, nothing cached."""
    prepared = PreparedKernel(function, signature, target, wait=True)
    return prepared.sized(prepared.short_sums(signature))


SHORT_PHASED = 32
"""As SHORT, for kernels whose sums take every second or third place of a window."""
SHORT = 8
"""Extents up to this of short loops inside a sum become part of the code."""
_by_sizes: dict[str, PreparedKernel] = {}
"""Kernels for which the sizes of a call choose the code: contractions, and short loops inside sums."""


def compile_kernel(function: Function, signature: Signature, target: Target) -> Artifact:
    """The artifact, from memory, from disk or freshly compiled."""
    signature = _with_tuned_loops(function, signature, target)
    target = at_level(function, target)
    key = cache_key(function, signature, target)
    sized = _sized_key(function, signature, key, target)
    found = STORE.in_memory(key) or (STORE.in_memory(sized) if sized else None)
    if found is not None:
        return found
    with STORE.alone(key), no_collection():
        if environment.word("TILEWRIGHT_VERIFY") == "passes":
            return _compiled(function, signature, target, key, sized)
        try:
            return _compiled(function, signature, target, key, sized, hurry=True)
        except Exception as error:
            if isinstance(error, MemoryError) or (isinstance(error, TilewrightError) and not isinstance(error, CompilerBug)):
                raise
            # Once more, with what every pass returns verified: the message then names the pass that is wrong.
            for name in [name for name in _by_sizes if name.startswith(key)]:
                del _by_sizes[name]
            _fronts.clear()
            _compiled(function, signature, target, key, sized)
            raise


def _compiled(function: Function, signature: Signature, target: Target, key: str, sized: str, hurry: bool = False) -> Artifact:
    """The artifact, found or made. `hurry`: passes are not verified one by one, but what came out is."""
    if not hurry:
        known = _find_or_prepare(function, signature, target, key, sized)
        return known if isinstance(known, Artifact) else known.keep()
    found = None if key in _by_sizes else STORE.find(key) or (STORE.find(sized) if sized else None)
    if found is not None:
        return found  # the compiler need not be loaded
    from tilewright.passes.runner import unverified

    with unverified():
        known = _find_or_prepare(function, signature, target, key, sized)
        return known if isinstance(known, Artifact) else known.keep(verify=True)


def compile_first(function: Function, signature: Signature, target: Target) -> Artifact | FinalKernel:
    """The artifact where it was compiled before; else the kernel after all passes, of which code can be made at any level.

    Passes are not verified one by one: `FinalKernel.keep` verifies what came out."""
    from tilewright.passes.runner import unverified

    signature = _with_tuned_loops(function, signature, target)
    target = at_level(function, target)
    key = cache_key(function, signature, target)
    with STORE.alone(key), no_collection(), unverified():
        return _find_or_prepare(function, signature, target, key, _sized_key(function, signature, key, target))


def _find_or_prepare(function: Function, signature: Signature, target: Target, key: str, sized: str) -> Artifact | FinalKernel:
    start = time.perf_counter()
    prepared = _by_sizes.get(key)
    if prepared is not None and not prepared.serves(signature):
        prepared = PreparedKernel(function, signature, target)
    if prepared is None:
        found = STORE.find(key) or (STORE.find(sized) if sized else None)
        if found is not None:
            return found
        if is_loops(signature.schedule):
            _check_loop_words(function, signature, target)
        prepared = PreparedKernel(function, signature, target, wait=True)
    short = prepared.short_sums(signature)
    small = prepared.small_axes()
    base = prepared
    if short:
        named = f"{key} {sorted(short.items())}"
        prepared = _by_sizes.get(named) or base.sized(short)
        _by_sizes[named] = prepared
    if not target.simt:
        signature = replace(signature, extents=())  # nothing else of a CPU's code depends on them
    plan = prepared.plan(signature)
    chosen = key
    if any(plan) or short or small:
        # Contractions: code is kept for each choice of schedules, and the call's sizes choose.
        _by_sizes[key] = base
        parts = (key, str(sorted(short.items())), *(p.describe() if p else "" for p in plan))
        chosen = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    also = sized if chosen != key and (target.simt or isinstance(function, BlockGraph) or not any(plan)) else ""
    found = STORE.find(chosen)
    if found is None:
        return FinalKernel(prepared, signature, plan, (chosen, also), start, small, bool(short))
    if also:
        STORE.keep_also(also, found)
    return found


def for_any_extents(artifact: Artifact) -> Artifact:
    """A CPU's code for any extents, with an entry stub that takes small ones too."""
    if not artifact.small or artifact.is_sized or not artifact.host:
        return artifact
    from tilewright.codegen.host.entries import host_object

    plain = replace(artifact, small=())
    return replace(plain, host=host_object(plain, host_cpu()))


def _sized_key(function: Function, signature: Signature, key: str, target: Target) -> str:
    """Of a graph of blocks: the key for these very extents. Its plan takes long to find, and a process that knows the answer need not ask. Of a CPU's kernel: the
    key for those that are small; other kernels have none."""
    if signature.schedule or (target.simt and not isinstance(function, BlockGraph)):
        return ""
    return hashlib.sha256(f"{key} extents {signature.extents!r}".encode()).hexdigest()


class FinalKernel:
    """A kernel after all passes: what is left is to make code of it."""

    def __init__(
        self, prepared: PreparedKernel, signature: Signature, plan: Plans, keys: tuple[str, str], start: float, small: tuple[SmallSums, ...] = (),
        is_sized: bool = False,
    ) -> None:  # fmt: skip
        from tilewright.analysis.alias import alias_safe
        from tilewright.passes.routes import share_memory

        self.prepared, self.signature, self.plan = prepared, signature, plan
        self.key, self.also = keys
        """What it is kept under, and what else; empty where there is nothing else."""
        self.target = prepared.target
        self.small, self.is_sized = small, is_sized and not self.target.simt
        done = prepared.finish(signature, plan)
        # Kernels in one launch may run side by side where they depend on each other only through an output that is an input.
        apart = len(done.stages.thread.calls) == len(done.stages.tile.calls)
        self.program = share_memory(done.stages.thread, done.stages.loop, done.trace) if apart else done.stages.thread
        self.schedules = tuple(
            f"{call.kernel.name}: {schedule.describe()}"
            for call, schedule in zip(done.stages.tile.calls, done.stages.schedules, strict=True)
        )
        self.typed = [
            param.name for param, arg in zip(prepared.function.params, signature.args, strict=True)
            if isinstance(arg, ScalarArg) and not arg.weak and not arg.dtype.is_bool
        ]  # fmt: skip
        self.absent = tuple(position for position, arg in enumerate(signature.args) if isinstance(arg, NoneArg))
        # A product that computes the norm of its rows itself reads them while others write results.
        self.safe = apart and alias_safe(done.program) and (len(done.stages.loop.calls) >= len(prepared.loop.calls) or alias_safe(done.stages.loop))
        self.pass_seconds = time.perf_counter() - start
        self._text = ""

    def quick(self) -> Artifact:
        """Code for a CPU that is soon there: at level `O0`, without a stub that Python calls. It is kept nowhere."""
        from tilewright.compile.build import llvm_text

        assert self.target.is_host
        self._text = llvm_text(self.program, self.target)[0]
        return self._artifact(replace(self.target, level="O0"), entry=False)

    def _artifact(self, target: Target, entry: bool = True) -> Artifact:
        from tilewright.compile.build import build_artifact

        return build_artifact(
            self.program, target, self.key, self.safe, self.schedules, entry, self.typed, self.absent, self.small, self.is_sized, self._text
        )  # fmt: skip

    def keep(self, verify: bool = False) -> Artifact:
        """The artifact at the kernel's own level, kept in memory and on disk. `verify`: passes were not verified as they ran."""
        found = STORE.get_or_build(self.key, lambda: self._build(verify))
        if self.also:
            STORE.keep_also(self.also, found)
        return found

    def _build(self, verify: bool) -> Artifact:
        if verify:
            from tilewright.ir.verify import verify_program

            calls = self.program.calls
            first = {call.common.kernel: call.kernel for call in reversed(calls) if call.common is not None}
            verify_program(self.program, frozenset(call.kernel for call in calls if call.common is not None and call.kernel is not first[call.common.kernel]))
        middle = time.perf_counter()
        artifact = self._artifact(self.target)
        artifact = replace(artifact, notes=self.prepared.notes(self.signature, self.plan))
        if log.isEnabledFor(logging.INFO):
            log.info(
                "compiled %s(%s) for %s: passes %.1f ms, code %.1f ms, %d kernel(s), %d bytes",
                self.program.name, ", ".join(map(str, self.signature.args)), self.target.name, self.pass_seconds * 1e3,
                (time.perf_counter() - middle) * 1e3, len(artifact.launches), len(artifact.code),
            )  # fmt: skip
        return artifact


def forget() -> None:
    """Empty the in-memory cache (tests and benchmarks of cold compilation)."""
    STORE.forget()
    _by_sizes.clear()
    _fronts.clear()
