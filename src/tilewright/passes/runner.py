"""The runner of passes: runs, times, verifies, dumps and blames every one of them.

In: an order of passes (`pipeline.py` holds them all), a program or a tree, and what passes are told besides (`PassContext`). Out: the program
after the last pass, and the context with what passes said besides.

A pass that raises anything but a `TilewrightError`, or whose result does not verify, ends as a `CompilerBug`. It names the pass and the file
that holds what the pass was given. `TILEWRIGHT_DUMP=folder` writes what every pass returned to a file of its own.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from tilewright.base import environment
from tilewright.base.errors import CompilerBug, TilewrightError
from tilewright.base.record import record, replace
from tilewright.base.source import Span
from tilewright.base.target import Target
from tilewright.ir.nodes import Kernel
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.verify import verify_kernel, verify_program
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.tree.block_graph import BlockGraph
from tilewright.tree.metadata import KernelMetadata
from tilewright.tree.typed import TypedKernel
from tilewright.tree.typed_text import show

if TYPE_CHECKING:
    from tilewright.passes.common.fusion_report import FusionReport
    from tilewright.passes.late.bounds_checks import Site
    from tilewright.passes.windows.join_phases import Phases

Result = TypeVar("Result")
Subject = Kernel | Program | TypedKernel | BlockGraph
"""What a pass is given first."""
ANY = "any"
"""The stage of a pass that takes a kernel of any stage and returns one of the same."""
_KERNELS = ("loop", "tile", "thread", ANY)


class LateFunction:
    """The function of a pass, whose module is loaded when it runs first: most kernels take few of all passes."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @functools.cached_property
    def loaded(self) -> Callable[..., object]:
        found: Callable[..., object] = getattr(importlib.import_module(self.module), self.name)
        return found

    def __call__(self, *arguments: object) -> object:
        return self.loaded(*arguments)


def late(module: str, name: str) -> LateFunction:
    """The function of a module of passes, by its place under `tilewright.passes`."""
    return LateFunction(f"tilewright.passes.{module}", name)


@record(identity=True)
class Pass:
    """One pass, as data."""

    name: str
    source: str
    """What it takes: a kernel at the stage `loop`, `tile`, `thread` or `any`, a `program`, a typed `tree`, or a graph of `blocks`."""
    result: str
    """What it returns: a stage, a `program`, or `plans`, which leave the program as it is."""
    function: Callable[..., object]
    """Takes the kernel (or program, or tree), then what `takes` names. Returns the new one, or a pair of it and what `gives` names."""
    what: str
    """What it does, in one sentence."""
    takes: tuple[str, ...] = ()
    """Fields of the context that the function takes."""
    gives: str = ""
    """The field of the context that the function returns besides."""
    gpu: bool = False
    """Whether it does nothing where the target is a CPU, or not known. It is not loaded there."""
    cpu: bool = False
    """Whether it does nothing where the target is a GPU. It is not loaded there."""
    needs: str = ""
    """What it does nothing without: the opcode of some op, one of several words, `@name` for an attribute of some op; or several `calls`; or `plans`, or `phases`, of any call. Without
    it the pass is not even loaded."""

    @property
    def is_of_kernels(self) -> bool:
        return self.source in _KERNELS

    def is_idle(self, subject: Subject, context: PassContext) -> bool:
        """Whether it has nothing to do."""
        if (self.gpu and not context.simt) or (self.cpu and context.simt):
            return True
        if not self.needs or context.given:
            return False
        if self.needs == "plans":
            return not any(context.plans)
        if self.needs == "calls":
            return isinstance(subject, Program) and len(subject.calls) < 2
        if self.needs == "phases":
            return not context.phases
        kernels = (subject,) if isinstance(subject, Kernel) else tuple(call.kernel for call in subject.calls) if isinstance(subject, Program) else ()
        wanted = self.needs.split()
        return bool(kernels) and all(kernel.opcodes.isdisjoint(wanted) for kernel in kernels)


@record
class PassContext:
    """What passes are told besides a kernel or program, and what they say besides."""

    target: Target | None = None
    schedule: Plan = None
    """The schedule of the kernel at hand; None before one is chosen."""
    plans: Plans = ()
    """One schedule, or None, for each call of the program."""
    hints: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Rough sizes."""
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The very sizes of a call."""
    later: frozenset[str] = frozenset()
    """Sizes that become numbers before code is made."""
    given: str = ""
    """A schedule that the user gives."""
    phases: Phases = ()
    """What tells calls of joined phases apart."""
    metadata: KernelMetadata | None = None
    loop: Program | None = None
    """The program at the loop stage."""
    programs: tuple[Program, ...] = ()
    """One program for each block of a graph."""
    fusion: FusionReport | None = None
    """What was fused, and what was not."""
    checks: str = "all"
    """Which indices are checked as kernels run: of `all` accesses, or of `stores` alone."""
    sites: tuple[Site, ...] = ()
    """The accesses that bounds checks watch."""

    @property
    def simt(self) -> bool:
        return self.target is not None and self.target.simt


@record
class When:
    """A condition of a step, with the words the table of passes has for it."""

    text: str
    holds: Callable[[Kernel, PassContext], bool]


@record(identity=True)
class Selection:
    """A place in an order where the kernel's schedule and the target choose the pass."""

    name: str
    choose: Callable[[Plan, Target], Pass]
    passes: tuple[Pass, ...]
    """All that it chooses from."""

    @property
    def is_of_kernels(self) -> bool:
        return True


@record(identity=True)
class Step:
    """One place in an order of passes."""

    run: Pass | Selection
    why: str
    """Why it stands here."""
    only: When | None = None
    """The kernels that take this step; None: all."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The pass, or those of which one is chosen."""
        return (self.run,) if isinstance(self.run, Pass) else self.run.passes

    @property
    def only_pass(self) -> Pass:
        (one,) = self.passes
        return one

    def chosen(self, context: PassContext) -> Pass:
        """The pass for the schedule and the target at hand."""
        if isinstance(self.run, Pass):
            return self.run
        assert context.target is not None
        return self.run.choose(context.schedule, context.target)


class Trace:
    """Seconds spent in each pass; and, where `dump` names a folder, a file for what each pass returned."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.dump = environment.text("TILEWRIGHT_DUMP")

    def copied(self) -> Trace:
        """The same times, to be added to apart."""
        own = copy(self)
        own.times = dict(self.times)
        return own

    def record(self, name: str, seconds: float, text: Callable[[], str]) -> None:
        self.times[name] = self.times.get(name, 0.0) + seconds
        if self.dump:
            os.makedirs(self.dump, exist_ok=True)
            with open(os.path.join(self.dump, f"{next(_dumped):04d}-{name}.kir"), "w", encoding="utf-8") as file:
                file.write(text())


_thread = threading.local()


@contextmanager
def unverified() -> Iterator[None]:
    """Inside, what passes of this thread return is not verified after each of them. Whoever does so verifies what comes out, before it is kept."""
    before, _thread.hurry = getattr(_thread, "hurry", False), True
    try:
        yield
    finally:
        _thread.hurry = before


_dumped = itertools.count()
"""Numbers the files of all compilations of the process, so that none overwrites another."""


def run_order(order: Sequence[Step], program: Program, context: PassContext, trace: Trace) -> tuple[Program, PassContext]:
    """The program after all steps. Passes of kernels that follow each other run kernel by kernel."""
    for of_kernels, group in itertools.groupby(order, key=lambda step: step.run.is_of_kernels):
        steps = tuple(group)
        if of_kernels:
            # Calls of one kernel stay so: it goes through the passes once.
            done: dict[tuple[int, Plan], Kernel] = {}
            kernels = []
            for call, schedule in _scheduled(program, context):
                key = (id(call.kernel), schedule)
                if key not in done:
                    done[key] = _run_on_kernel(steps, call.kernel, schedule, context, trace)
                kernels.append(done[key])
            program = replace(
                program, calls=tuple(replace(call, kernel=kernel) for call, kernel in zip(program.calls, kernels, strict=True))
            )
        else:
            for step in steps:
                program, context = run_on_program(step.only_pass, program, context, trace)
    return program, context


def _scheduled(program: Program, context: PassContext) -> Iterator[tuple[KernelCall, Plan]]:
    return zip(program.calls, context.plans or (None,) * len(program.calls), strict=True)


def _run_on_kernel(steps: Sequence[Step], kernel: Kernel, schedule: Plan, context: PassContext, trace: Trace) -> Kernel:
    own = replace(context, schedule=schedule)
    for step in steps:
        if step.only is None or step.only.holds(kernel, own):
            kernel = run_on_kernel(step.chosen(own), kernel, own, trace)
    return kernel


def run_on_kernel(one: Pass, kernel: Kernel, context: PassContext, trace: Trace) -> Kernel:
    """The kernel after one pass."""

    def checked(result: object) -> Kernel:
        if not isinstance(result, Kernel):
            raise TypeError(f"it returns {type(result).__name__}, not a kernel")
        expected = kernel.stage.value if one.result == ANY else one.result
        if result.stage.value != expected:
            raise ValueError(f"it returns a kernel of stage {result.stage.value}, not {expected}")
        if result is not kernel and not getattr(_thread, "hurry", False):
            verify_kernel(result)
        return result

    if one.is_idle(kernel, context):
        _check_idle(one, kernel, context, trace, checked)
        return kernel
    if one.source not in (ANY, kernel.stage.value):
        raise _blame(one, kernel, context, f"it takes stage {one.source}, the kernel is of stage {kernel.stage.value}")
    return _run(one, kernel, context, trace, checked, _kernel_text)


def run_on_program(one: Pass, subject: Program | TypedKernel | BlockGraph, context: PassContext, trace: Trace) -> tuple[Program, PassContext]:
    """The program after one pass, or that a tree becomes, and the context with what the pass gives besides."""
    known = frozenset(call.kernel for call in subject.calls) if isinstance(subject, Program) else frozenset()

    def checked(returned: object) -> tuple[Program, PassContext]:
        if one.result == "plans":
            returned = subject, returned
        result, extra = returned if one.gives and isinstance(returned, tuple) else (returned, None)
        if not isinstance(result, Program):
            raise TypeError(f"it returns {type(result).__name__}, not a program")
        if result is not subject and not getattr(_thread, "hurry", False):
            verify_program(result, known)
        return result, replace(context, **{one.gives: extra}) if one.gives else context

    if isinstance(subject, Program) and one.is_idle(subject, context):
        if one.result == "plans":
            context = replace(context, plans=(None,) * len(subject.calls))
        _check_idle(one, subject, context, trace, lambda returned: checked(returned)[0])
        return subject, context
    return _run(one, subject, context, trace, checked, lambda done: _program_text(done[0]))


def _check_idle(one: Pass, subject: Kernel | Program, context: PassContext, trace: Trace, checked: Callable[[object], Subject]) -> None:
    """A pass that has nothing to do. Where passes are verified it runs all the same, and must leave everything as it is."""

    def text() -> str:
        return _described(subject, context)[1]

    if not getattr(_thread, "hurry", False) and environment.word("TILEWRIGHT_VERIFY") == "passes":

        def unchanged(returned: object) -> object:
            result = checked(returned)
            if one.result == "plans" and isinstance(returned, tuple) and any(returned):
                raise ValueError(f"it says that it needs '{one.needs}', and plans without")
            if result is not subject and _described(result, context)[1] != text():
                raise ValueError(f"it says that it needs '{one.needs}', and changes what has none")
            return result

        _run(one, subject, context, trace, unchanged, lambda _: text())
        return
    trace.record(one.name, 0.0, text)


def _run(
    one: Pass, subject: Subject, context: PassContext, trace: Trace, checked: Callable[[object], Result], text: Callable[[Result], str]
) -> Result:
    start = time.perf_counter()
    try:
        result = checked(one.function(subject, *(getattr(context, name) for name in one.takes)))
    except CompilerBug as error:
        raise _blame(one, subject, context, str(error)) from error
    except (TilewrightError, MemoryError):
        raise
    except Exception as error:  # a pass must never leak its own failure as something else
        raise _blame(one, subject, context, f"{type(error).__name__}: {error}") from error
    trace.record(one.name, time.perf_counter() - start, lambda: text(result))
    return result


def _kernel_text(kernel: Kernel) -> str:
    from tilewright.ir.text import print_kernel  # it is seldom asked for

    return print_kernel(kernel)


def _program_text(program: Program) -> str:
    from tilewright.ir.text import print_program

    return print_program(program)


def _blame(one: Pass, subject: Subject, context: PassContext, reason: str) -> CompilerBug:
    kind, text, suffix = _described(subject, context)
    handle, path = tempfile.mkstemp(prefix=f"tilewright-{one.name}-", suffix=suffix)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    span: Span = subject.span
    bug = CompilerBug.at(
        "TW040", f"pass {one.name} failed on {kind} {subject.name}: {reason}", span, f"please report this; the {kind} is in {path}"
    )
    assert isinstance(bug, CompilerBug)
    return bug


def _described(subject: Subject, context: PassContext) -> tuple[str, str, str]:
    """What a subject is called, its text, and how a file of that is named."""
    if isinstance(subject, Kernel):
        return "kernel", _kernel_text(subject), ".kir"
    if isinstance(subject, Program):
        return "program", _program_text(subject), ".kir"
    if isinstance(subject, TypedKernel):
        return "typed tree", show(subject), ".txt"
    return "graph of blocks", "\n".join(map(_program_text, context.programs)), ".kir"
