"""Graphs of a device: work recorded once and replayed as one. What `execute/graphs.py` asks of those that a device captures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Number = int | float | bool


class RecordedGraph(ABC):
    """A graph, of a device or of the host."""

    shaped: set[str]
    """Names of numbers that decide the shapes of what it computes: they cannot be exchanged."""

    @property
    @abstractmethod
    def knows_all(self) -> bool:
        """Whether all nodes are launches made here, so that exchanging an array reaches every use of it."""

    @property
    @abstractmethod
    def nodes(self) -> int:
        """How many pieces of work a replay runs."""

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @abstractmethod
    def conflict(self, arrays: Sequence[tuple[Any, Any]]) -> bool:
        """Whether after the exchange something would be written that something else uses and did not before."""

    @abstractmethod
    def overlap(self, one: Any, other: Any) -> bool:
        """Whether two arrays share memory."""

    @abstractmethod
    def exchange(self, arrays: Sequence[tuple[Any, Any]], numbers: Mapping[str, Number]) -> int:
        """Let nodes use the second array of a pair, of the same form, for the first, and other named numbers; how many nodes."""

    @abstractmethod
    def close(self) -> None:
        """End it. Replays under way run to their end."""


class DeviceGraph(RecordedGraph):
    """A graph that a device captures from a stream."""

    instantiations: int
    """How often it had to be built."""

    @abstractmethod
    def begin(self) -> int:
        """Start capturing; the stream to queue work on."""

    @abstractmethod
    def end(self) -> None:
        """Stop capturing and make it ready to run."""

    @abstractmethod
    def abort(self) -> None:
        """Stop capturing and drop what was captured; a graph captured before stays as it is."""

    @property
    @abstractmethod
    def diverged(self) -> bool:
        """Whether a repeated capture asked for other memory than the one before, so that it cannot take its place."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Bytes of the device held for it."""

    @abstractmethod
    def replay(self, stream: int) -> None:
        """Queue all of it on `stream`."""


class ParametricReplay(ABC):
    """A captured graph whose ports are other arrays at every replay, as generated code calls it."""

    ordinal: int
    """Of its device."""

    @abstractmethod
    def replay(self, ports: Any, stream: int) -> None:
        """Queue it on `stream`, with these ports: a tuple of what `input_text` and `output_text` compute."""

    @abstractmethod
    def fits_text(self, name: str) -> str:
        """An expression: whether the array in the variable `name`, of the captured form, can be a port."""

    @abstractmethod
    def input_text(self, name: str, stream: str) -> tuple[list[str], str]:
        """Lines that prepare the array in the variable `name` for work on `stream`, and an expression for the port."""

    @abstractmethod
    def output_text(self, name: str) -> str:
        """An expression for the port of a new array in the variable `name`."""
