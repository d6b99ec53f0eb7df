"""Which kernels could have caused a fault: those launched since the device, or their stream, was last waited for.

Launches are many and faults are rare, so a launch only leaves a number: that of the wait it came before. `epoch` is the number
of the next wait; machine code writes it beside the stream into a record of its own (`base.launch_abi`), and nothing is looked
at until somebody asks. Machine code may wait as well: it counts in `words`, which has the epoch and the latest wait for the
whole device.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Protocol

SEVERAL = -1
"""In place of a stream: one of several."""


class Launches(Protocol):
    """What launches kernels without telling."""

    def launches(self) -> list[tuple[int, str, int]]:
        """Stream, name and epoch of those it launched."""


class LaunchLog:
    def __init__(self) -> None:
        self.words = (ctypes.c_uint64 * 2)(1, 0)
        self.launchers: weakref.WeakSet[Launches] = weakref.WeakSet()
        self._noted: dict[tuple[int, str], int] = {}
        self._waited_on: dict[int, int] = {}

    def note(self, stream: int, entry: str, epoch: int | None = None) -> None:
        """A kernel was launched."""
        self._noted[stream, entry] = self.words[0] if epoch is None else epoch

    def begin_wait(self) -> int:
        """Launches from now on come after this wait; its number."""
        number = self.words[0]
        self.words[0] = number + 1
        return number

    def end_wait(self, number: int, stream: int | None = None) -> None:
        """All launched before this wait, on one stream or on all, has ended well."""
        if stream is not None:
            self._waited_on[stream] = max(number, self._waited_on.get(stream, 0))
            return
        self.words[1] = waited = max(number, self.words[1])
        if self._noted:
            self._noted = {key: epoch for key, epoch in list(self._noted.items()) if epoch > waited}
        if self._waited_on:
            self._waited_on = {s: epoch for s, epoch in list(self._waited_on.items()) if epoch > waited}

    def pending(self) -> dict[tuple[int, str], None]:
        """Stream and name of the kernels that may still run or whose end nobody has seen."""
        found = [(stream, entry, epoch) for (stream, entry), epoch in list(self._noted.items())]
        found += [launch for launcher in list(self.launchers) for launch in launcher.launches()]
        since, waited = self._waited_on, self.words[1]
        return {(s, entry): None for s, entry, epoch in found if epoch > max(waited, since.get(s, 0))}
