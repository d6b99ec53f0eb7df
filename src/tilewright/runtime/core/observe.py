"""Who watches calls and launches. In: what the runtimes did; out: the same, to the one observer there is, if there is one.

`observer` is None but while somebody profiles: runtimes ask for it once per call and go on at once when it is None. Fast ways into
machine code ask nobody: whoever watches keeps them closed (`streams.special`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tilewright.base.artifact import Artifact, Launch


class Named(Protocol):
    """A kernel, as far as its name goes."""

    @property
    def name(self) -> str: ...


class Observer(Protocol):
    """What runtimes tell."""

    def call(self, function: Named, device: str) -> AbstractContextManager[Any]:
        """A call of a kernel runs inside; gives its record."""

    def count(self, record: Any, function: Any, artifact: Artifact, values: Mapping[str, Any]) -> None:
        """With what it was called."""

    def compiled(self, seconds: float) -> None:
        """Code was compiled, or read from the disk, in this thread."""

    def before_launch(self, device: Any, launch: Launch, grid: tuple[int, int, int], stream: int) -> object:
        """A kernel is about to be queued on `stream`; what is returned comes back when it was."""

    def after_launch(self, token: object) -> None:
        """It was."""


observer: Observer | None = None
