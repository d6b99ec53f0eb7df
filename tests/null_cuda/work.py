"""Work that was queued and is done later. In: ops with what they come after; out: they run, each after those, in the order asked for.

A stream is a chain of ops. An op runs when somebody waits for it (`lazy`), at once (`eager`) or on a thread of its own some time
later (`background`). Where the order is open, `reverse` takes what was queued last first and `random` draws it by the seed: a
program that forgot to wait computes wrong results under one of them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable

MODES = ("eager", "lazy", "reverse", "random", "background")
MOST_QUEUED = 1024
"""Ops that may wait; the one that queues more runs the oldest first, as a driver's full queue makes its caller wait."""


class Op:
    """One piece of work of a stream."""

    __slots__ = ("after", "body", "context", "finished_at", "host", "name", "state")

    def __init__(self, name: str, body: Callable[[], None], after: Iterable[Op | None] = (), host: bool = False) -> None:
        self.name = name
        self.host = host
        """It runs a function of the caller's, which may not call the driver."""
        self.body: Callable[[], None] | None = body
        self.after = [op for op in after if op is not None and op.state != "done"]
        self.state = "queued"
        self.finished_at = 0.0
        self.context = 0

    def __repr__(self) -> str:
        return f"Op({self.name}, {self.state})"


class Queue:
    """All work of a process. `lock` is the driver's; op bodies run without it, as a device runs while the host goes on."""

    def __init__(self, mode: str, seed: int) -> None:
        if mode not in MODES:
            raise ValueError(f"mode '{mode}' is none of {', '.join(MODES)}")
        self.mode = mode
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.pending: dict[Op, None] = {}
        self.random = random.Random(seed)
        self.now = 0.0
        """Milliseconds of device time that went by."""
        self._running: set[int] = set()
        """Threads inside a host function."""
        self._worker: threading.Thread | None = None

    def add(self, op: Op) -> None:
        self.pending[op] = None
        if self.mode == "eager":
            self.finish([op])
        elif self.mode == "background":
            self._start_worker()
            self.changed.notify_all()
        elif len(self.pending) > MOST_QUEUED:
            self.finish([next(iter(self.pending))])

    def inside(self) -> bool:
        """This thread is running a host function."""
        return threading.get_ident() in self._running

    def finish(self, ops: Iterable[Op | None]) -> None:
        """Return when all of `ops`, and what comes before them, is done."""
        for op in self._order([op for op in ops if op is not None]):
            while op.state == "running":
                self.changed.wait()
            if op.state == "queued":
                self._run(op)

    def finish_all(self) -> None:
        self.finish(list(self.pending))

    def step(self, op: Op) -> None:
        """Progress by one op on the way to `op`: what time going by does, for a caller that polls."""
        for first in self._order([op]):
            # Another thread may be running what it comes after.
            if first.state == "queued" and all(before.state == "done" for before in first.after):
                self._run(first)
                return

    def _order(self, targets: list[Op]) -> list[Op]:
        """`targets` and all they come after, each op behind what it comes after."""
        found: list[Op] = []
        seen: set[Op] = set()
        stack = [(op, False) for op in self._arranged(targets)][::-1]
        while stack:
            op, ready = stack.pop()
            if ready:
                found.append(op)
            elif op not in seen and op.state != "done":
                seen.add(op)
                stack.append((op, True))
                stack.extend((before, False) for before in self._arranged(op.after)[::-1])
        return found

    def _arranged(self, ops: list[Op]) -> list[Op]:
        if self.mode == "reverse":
            return ops[::-1]
        if self.mode in ("random", "background"):
            return self.random.sample(ops, len(ops))
        return ops

    def _run(self, op: Op) -> None:
        op.state = "running"
        me = threading.get_ident()
        if op.host:
            self._running.add(me)
        saved = self.lock._release_save()  # type: ignore[attr-defined]
        try:
            assert op.body is not None
            op.body()
        finally:
            self.lock._acquire_restore(saved)  # type: ignore[attr-defined]
            self._running.discard(me)
            op.state = "done"
            op.finished_at = self.now
            op.after, op.body = [], None
            self.pending.pop(op, None)
            self.changed.notify_all()

    def _start_worker(self) -> None:
        if self._worker is None or not self._worker.is_alive():
            self._worker = threading.Thread(target=self._work, name="null-cuda", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        idle_since = time.monotonic()
        with self.lock:
            while time.monotonic() - idle_since < 5.0:
                waiting = [op for op in self.pending if op.state == "queued"]
                if not waiting:
                    self.changed.wait(0.5)
                    continue
                ready = [op for op in waiting if all(before.state == "done" for before in op.after)]
                if ready:
                    self._run(self.random.choice(ready))
                    idle_since = time.monotonic()
                else:
                    self.changed.wait(0.5)
            self._worker = None
