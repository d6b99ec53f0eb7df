"""Tiers: a kernel's first calls run code that was compiled quickly; the optimised code comes from the background.

In: a kernel, what it is compiled for, and a CPU. Out: its artifact where it was compiled before, else a `Tier`: an artifact at level `O0` that can run
at once, and the promise of the optimised one. Both are made of the same kernel after all passes, so they compute the same bits. One thread of the
background makes the optimised code; LLVM works there without Python's lock and without keeping other compilations waiting. It is stored as any other,
so a later process finds it and has no quick code.

A fork waits for the compilation under way (`base/forks.py`); the child has a thread of its own for what its parent had not finished. When the
interpreter ends, what has not begun is dropped, and what is under way is waited for.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

from tilewright.base import levels
from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.forks import fork_safe_lock
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.compile.driver import FinalKernel, Signature, at_level, cache_key, compile_first, said_level
from tilewright.compile.store import STORE
from tilewright.tree.syntax import Function

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
    """Kernels whose optimised code is still to come."""
    failed: tuple[str, ...]
    """What went wrong in the background; those kernels stay with their quick code."""


class _Counts:
    """Numbers of the report, under one lock."""

    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self.quick = self.calls = self.exchanged = 0
        self.failed: list[str] = []


_counts = _Counts()
_on = False


class Tier:
    """A kernel with quick code whose optimised code is on its way."""

    def __init__(self, kernel: FinalKernel) -> None:
        self.artifact = kernel.quick()
        """The quick one."""
        self._kernel: FinalKernel | None = kernel
        self.load: Callable[[Artifact], object] = lambda artifact: artifact
        """What the background does with the optimised artifact, before it is ready."""
        self.ready: object = None
        """What `load` made of it; None until then."""
        self.error: Exception | None = None
        """Why there will be none."""

    @property
    def is_open(self) -> bool:
        """Whether the background has not answered yet."""
        return self.ready is None and self.error is None

    def finish(self) -> object:
        """What `load` makes of the optimised artifact, now, in this thread; waits for the background where that is at it."""
        kernel = self._kernel
        if self.ready is None and kernel is not None:
            self.ready = self.load(kernel.keep(verify=True))
            self._kernel = None
        return self.ready

    def run(self) -> None:
        """The background's part."""
        from tilewright.codegen.llvm import native

        try:
            with native.apart():
                self.finish()
        except Exception as error:  # the thread has nobody to raise it to: the kernel's next call reports it
            self.error = error
            with _counts.lock:
                _counts.failed.append(f"{self.artifact.name}: {error}")
            log.error("optimised code for %s could not be compiled in the background: %s", self.artifact.name, error)


class _Background:
    """The thread that compiles, and what it has to do. It is started when there is something, and ends when there is nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[Tier] = deque()
        self.current: Tier | None = None
        self.thread: threading.Thread | None = None
        self.ending = False

    def add(self, tier: Tier) -> None:
        with self.lock:
            if tier.is_open and tier is not self.current and tier not in self.waiting:
                self.waiting.append(tier)
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
        return TierReport(_on, _counts.quick, _counts.calls, _counts.exchanged, waiting, tuple(_counts.failed))


def hold(function: Function) -> bool:
    """Whether a kernel is compiled in tiers."""
    said = said_level(function)
    word = levels.holds(said)
    return word == levels.TIERED or (_on and not said and not levels.is_given())


def begin(function: Function, signature: Signature, target: Target) -> Artifact | Tier:
    """The artifact of a kernel that was compiled before, or a tier with quick code. `add` sends it to the background."""
    key = f"{cache_key(function, signature, at_level(function, target))} {signature.extents}"
    with STORE.alone(key):
        tier = _under_way.get(key)
        if tier is not None and tier.is_open:
            return tier
        found = compile_first(function, signature, target)
        if isinstance(found, Artifact):
            return found
        tier = _under_way[key] = Tier(found)
        with _counts.lock:
            _counts.quick += 1
        return tier


def add(tier: Tier) -> None:
    """Have the background compile the optimised code of a tier. Nothing happens where it is at it, or has done so."""
    if tier.is_open:
        _background.add(tier)


def count_call() -> None:
    with _counts.lock:
        _counts.calls += 1


def count_exchange() -> None:
    with _counts.lock:
        _counts.exchanged += 1
