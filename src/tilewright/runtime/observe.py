"""Who watches calls and launches. In: what the runtimes did; out: the same, to the one observer there is, if there is one.

`observer` is None but while somebody profiles: runtimes ask for it once per call and go on at once when it is None. Fast ways into
machine code ask nobody, so whoever starts to watch has them left first (`when_watching` tells those who own them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tilewright.base.artifact import Artifact, Launch
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.tree.syntax import Function


class Observer(Protocol):
    """What runtimes tell."""

    def call(self, function: Function, device: str) -> AbstractContextManager[Any]:
        """A call of a kernel runs inside; gives its record."""

    def count(self, record: Any, function: Function, artifact: Artifact, values: Mapping[str, Any]) -> None:
        """With what it was called."""

    def before_launch(self, device: CudaDevice, launch: Launch, grid: tuple[int, int, int], stream: int) -> object:
        """A kernel is about to be queued on `stream`; what is returned comes back when it was."""

    def after_launch(self, token: object) -> None:
        """It was."""


observer: Observer | None = None
_listeners: list[Callable[[bool], None]] = []


def when_watching(listener: Callable[[bool], None]) -> None:
    """Have `listener` called with True before somebody watches, and with False after."""
    _listeners.append(listener)


def watch(watcher: Observer) -> None:
    """Tell `watcher` of everything from now on."""
    global observer
    observer = watcher
    for listener in _listeners:
        listener(True)


def unwatch() -> None:
    global observer
    observer = None
    for listener in _listeners:
        listener(False)
