"""The devices of one kind on this machine. In: a function that looks for them; out: they, found once, or why there are none.

A driver is started by the first question and by no other. A forked child cannot use its parent's queues: it looks again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

D = TypeVar("D")


class FoundDevices(Generic[D]):
    """What `look` finds: devices, and why there are none."""

    def __init__(self, look: Callable[[], tuple[Sequence[D], str]]) -> None:
        self._look = look
        self._guard = threading.Lock()
        self._found: tuple[D, ...] | None = None
        self._reason = ""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def devices(self) -> list[D]:
        """All of them; empty where there is none, and then `unavailable_reason` says why."""
        with self._guard:
            if self._found is None:
                found, self._reason = self._look()
                self._found = tuple(found)
            return list(self._found)

    def in_use(self) -> tuple[D, ...]:
        """Those somebody has asked for: this starts no driver."""
        return self._found or ()

    def unavailable_reason(self) -> str:
        """Why `devices()` is empty; '' when it is not."""
        self.devices()
        return self._reason

    def forget(self) -> None:
        """Look for devices again."""
        self._guard, self._found = threading.Lock(), None
