"""Waits that end. In: a question that is true once the work is done, and what is waited for; out: nothing, or a `DeviceError` after the time limit.

A driver's own wait knows no limit: `wait_blocked` has it made by a thread, and waits for that. Neither takes a core from a device that is the CPU. `wait_until`
is for what can only be asked. The limit is that of open-ended loops where it is set (`TILEWRIGHT_WATCHDOG`, in seconds), else five minutes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from tilewright.base import environment
from tilewright.base.errors import DeviceError, TilewrightError

_LIMIT = 300.0
_MOST = 1 << 20
_AWAKE = 2e-4
"""Seconds to ask again and again before sleeping between questions."""


def limit() -> float:
    """Seconds that a wait may last."""
    return float(environment.whole("TILEWRIGHT_WATCHDOG", _MOST) or _LIMIT)


def timed_out(label: str, what: str, seconds: float | None = None) -> TilewrightError:
    return DeviceError.at(
        "TW032", f"{label}: {what} was not done after {limit() if seconds is None else seconds:.0f} seconds", help="set TILEWRIGHT_WATCHDOG to more seconds, or work on smaller pieces"
    )


def wait_until(done: Callable[[], bool], label: str, what: str) -> None:
    """Return when `done()` holds."""
    start = time.perf_counter()
    end, pause = start + limit(), 2e-5
    while not done():
        now = time.perf_counter()
        if now > end:
            raise timed_out(label, what)
        if now - start > _AWAKE:
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)


class _Waiter:
    """A thread that waits for others."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], object], threading.Lock, list[BaseException]]] = SimpleQueue()
        threading.Thread(target=self._run, name="tilewright waits", daemon=True).start()

    def _run(self) -> None:
        while True:
            block, over, failed = self._asked.get()
            try:
                block()
            except BaseException as error:  # it is raised where somebody waits
                failed.append(error)
            del block
            over.release()

    def wait(self, block: Callable[[], object], seconds: float) -> tuple[bool, list[BaseException]]:
        """Whether it was over in time, and what it raised."""
        over, failed = threading.Lock(), list[BaseException]()
        over.acquire()
        self._asked.put((block, over, failed))
        return over.acquire(timeout=seconds), failed


_idle: dict[int, list[_Waiter]] = {}
"""Waiters with nothing to do, by process: a child made by fork has none of its parent's threads."""


def wait_blocked(block: Callable[[], object], label: str, what: str, seconds: float | None = None) -> None:
    """Return when a call of the driver that waits has returned; raise what it raises."""
    idle = _idle.setdefault(os.getpid(), [])
    try:
        waiter = idle.pop()
    except IndexError:
        waiter = _Waiter()
    over, failed = waiter.wait(block, limit() if seconds is None else seconds)
    if not over:
        raise timed_out(label, what, seconds)  # the thread stays with the driver
    idle.append(waiter)
    if failed:
        raise failed[0]
