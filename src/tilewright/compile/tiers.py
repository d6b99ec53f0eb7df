"""Tiers: a kernel's first calls run code that was compiled quickly; the optimised code comes from the background.

In: a kernel, what it is compiled for, and a CPU. Out: its artifact where it was compiled before, else a `Tier`: an artifact at level `O0` that can run
at once, and the promise of the optimised one. Both are made of the same kernel after all passes, so they compute the same bits. One thread of the
background makes the optimised code; LLVM works there without Python's lock and without keeping other compilations waiting. It is stored as any other,
so a later process finds it and has no quick code.

Explicit kernels have tiers too. Code that tuning has chosen for a kernel in tiers is compiled in the background as well: the kernel goes on with the code
it has until then.

A fork waits for the compilation under way (`base/forks.py`); the child has a thread of its own for what its parent had not finished. When the
interpreter ends, what has not begun is dropped, and what is under way is waited for.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from tilewright.base import levels
from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.forks import at_work, fork_safe_lock
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.compile.driver import Signature, at_level, cache_key, compile_first, compile_kernel, said_level
from tilewright.compile.store import STORE
from tilewright.tree.syntax import Function

if TYPE_CHECKING:
    from tilewright.ir.program import Program

log = logging.getLogger("tilewright")


@record
class TierReport:
    """What tiers have done so far in this process."""

    on: bool
    """Whether kernels that name no level are compiled in tiers."""
    quick: int
    """Kernels that were compiled quickly."""
    quick_calls: int
    """Calls that ran quick code."""
    exchanged: int
    """Kernels whose quick code was exchanged for the optimised one."""
    waiting: int
    """Kernels whose optimised or tuned code is still to come."""
    failed: tuple[str, ...]
    """What went wrong in the background; those kernels stay with the code they have."""
    tuned: int = 0
    """Kernels whose code was exchanged for that which tuning has chosen."""


class _Counts:
    """Numbers of the report, under one lock."""

    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self.quick = self.calls = self.exchanged = self.tuned = 0
        self.failed: list[str] = []


_counts = _Counts()
_on = False


class Finishable(Protocol):
    """A kernel after all passes, of which code can be made at any level."""

    def quick(self) -> Artifact:
        """Code that is soon there; it is kept nowhere."""

    def keep(self, verify: bool = False) -> Artifact:
        """The optimised code, kept as any other. `verify`: what passes made is verified before."""


class Job(ABC):
    """Something for the background to do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self.error: Exception | None = None
        """Why it cannot be done."""

    @property
    def is_open(self) -> bool:
        """Whether the background has not answered yet."""
        return not self.done and self.error is None

    @abstractmethod
    def work(self) -> None:
        """What is to be done."""

    def run(self) -> None:
        """The background's part."""
        from tilewright.codegen.llvm import native

        try:
            with native.apart():
                self.work()
            self.done = True
        except Exception as error:  # the thread has nobody to raise it to: the report has it, and a kernel with quick code says so
            self.error = error
            with _counts.lock:
                _counts.failed.append(f"{self.name}: {error}")
            log.error("optimised code for %s could not be compiled in the background: %s", self.name, error)


class Tier(Job):
    """A kernel with quick code whose optimised code is on its way."""

    def __init__(self, kernel: Finishable) -> None:
        self.artifact = kernel.quick()
        """The quick one."""
        super().__init__(self.artifact.name)
        self._kernel: Finishable | None = kernel
        self.load: Callable[[Artifact], object] = lambda artifact: artifact
        """What the background does with the optimised artifact, before it is ready."""
        self.ready: object = None
        """What `load` made of it; None until then."""

    @property
    def is_open(self) -> bool:
        return self.ready is None and self.error is None

    def finish(self) -> object:
        """What `load` makes of the optimised artifact, now, in this thread; waits for the background where that is at it."""
        kernel = self._kernel
        if self.ready is None and kernel is not None:
            self.ready = self.load(kernel.keep(verify=True))
            self._kernel = None
        return self.ready

    def work(self) -> None:
        self.finish()


class TunedCode(Job):
    """Code for a kernel that runs, by schedules that were measured meanwhile."""

    def __init__(self, function: Function, signatures: Sequence[Signature], target: Target, ready: Callable[[], None]) -> None:
        super().__init__(function.name)
        self._function, self._signatures, self._target, self._ready = function, signatures, target, ready
        self._made: list[Artifact] = []
        """Held until the kernel has them."""

    def work(self) -> None:
        self._made = [compile_kernel(self._function, signature, self._target) for signature in self._signatures]
        self._ready()
        with _counts.lock:
            _counts.tuned += 1


class WholeCompiler(Job):
    """The passes that no kernel has needed yet: the first call of another kernel does not wait for them to be loaded."""

    def __init__(self) -> None:
        super().__init__("the compiler")

    def work(self) -> None:
        from tilewright.passes import pipeline

        for load in pipeline.loaders():
            with at_work():  # a fork must not find a module half loaded
                load()


class _Background:
    """The thread that compiles, and what it has to do. It is started when there is something, and ends when there is nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[Job] = deque()
        self.current: Job | None = None
        self.thread: threading.Thread | None = None
        self.ending = False
        self.has_all = False
        """Whether it was told to load the whole compiler."""

    def add(self, job: Job) -> None:
        with self.lock:
            if job.is_open and job is not self.current and job not in self.waiting:
                self.waiting.append(job)
            if self.waiting and not self.has_all:
                self.has_all = True
                self.waiting.append(WholeCompiler())
            self._start()

    def _start(self) -> None:
        if self.thread is None and self.waiting and not self.ending:
            self.thread = threading.Thread(target=self._work, name="tilewright-tiers", daemon=True)
            self.thread.start()

    def _work(self) -> None:
        while True:
            with self.lock:
                if self.ending or not self.waiting:
                    self.thread = self.current = None
                    return
                self.current = self.waiting.popleft()
            self.current.run()

    def end(self) -> None:
        """The interpreter ends: LLVM must not be at work when it is unloaded."""
        with self.lock:
            self.ending = True
            self.waiting.clear()
            thread = self.thread
        if thread is not None:
            thread.join()

    def after_fork(self) -> None:
        """The child has no such thread; what its parent was at is to be done again here."""
        self.lock = threading.Lock()
        self.thread = None
        if self.current is not None and self.current.is_open:
            self.waiting.appendleft(self.current)
        self.current = None


_background = _Background()
atexit.register(_background.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_background.after_fork)
_under_way: WeakValueDictionary[str, Tier] = WeakValueDictionary()
"""Tiers whose optimised code is not stored yet, by what they are compiled for."""


def tiers(on: bool | None = None) -> TierReport:
    """Switch tiers on or off for kernels that name no level, and say what tiers have done so far. Without an argument nothing is switched.

    With tiers, the first call of a kernel on the CPU runs code that is compiled in a few milliseconds; a thread of the background compiles the
    optimised code, which later calls run. Both give the same bits. `optimize="tiered"` asks for it for one kernel.
    """
    global _on
    given: object = on
    if on is not None:
        if not isinstance(given, bool):
            raise UserError.at("TW009", f"tw.tiers was given {on!r}", help="give True or False, or nothing to ask what tiers have done")
        _on = on
    with _background.lock:
        waiting = len(_background.waiting) + (_background.current is not None)
    with _counts.lock:
        return TierReport(_on, _counts.quick, _counts.calls, _counts.exchanged, waiting, tuple(_counts.failed), _counts.tuned)


def hold(function: Function) -> bool:
    """Whether a kernel is compiled in tiers."""
    said = said_level(function)
    word = levels.holds(said)
    return word == levels.TIERED or (_on and not said and not levels.is_given())


def hold_explicit(program: Program) -> bool:
    """Whether an explicit kernel is compiled in tiers."""
    from tilewright.compile.simt import said_simt_level

    said = said_simt_level(program)
    return levels.holds(said) == levels.TIERED or (_on and not said and not levels.is_given())


def begin(function: Function, signature: Signature, target: Target) -> Artifact | Tier:
    """The artifact of a kernel that was compiled before, or a tier with quick code. `add` sends it to the background."""
    key = f"{cache_key(function, signature, at_level(function, target))} {signature.extents}"
    return _begin(key, lambda: compile_first(function, signature, target))


def begin_explicit(program: Program, target: Target) -> Artifact | Tier:
    """The same for an explicit kernel."""
    from tilewright.compile.simt import final_simt, simt_key

    return _begin(f"{simt_key(program, target)} explicit", lambda: final_simt(program, target))


def _begin(key: str, find: Callable[[], Artifact | Finishable]) -> Artifact | Tier:
    with STORE.alone(key):
        tier = _under_way.get(key)
        if tier is not None and tier.is_open:
            return tier
        found = find()
        if isinstance(found, Artifact):
            return found
        tier = _under_way[key] = Tier(found)
        with _counts.lock:
            _counts.quick += 1
        return tier


def add(job: Job) -> None:
    """Have the background compile the optimised code of a tier, or tuned code. Nothing happens where it is at it, or has done so."""
    if job.is_open:
        _background.add(job)


def count_call() -> None:
    with _counts.lock:
        _counts.calls += 1


def count_exchange() -> None:
    with _counts.lock:
        _counts.exchanged += 1
