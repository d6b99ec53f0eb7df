"""Calls of one kernel on devices of one kind: what every kind offers. In: arguments by name, a device and `out=`; out: results.

`execute/calls/array_calls.py` has them for devices with memory of their own; `device_kinds` those of the CPU and the emulator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from tilewright.base.artifact import Artifact
from tilewright.compile.driver import Signature
from tilewright.execute.calls.arguments import ReadArgument
from tilewright.execute.device import Device
from tilewright.tree.syntax import Function

Entry = Callable[..., object]


class KernelSource(Protocol):
    """A kernel, as far as its calls on a device need it."""

    @property
    def function(self) -> Function: ...

    def arguments(self, values: Mapping[str, object], gpu: bool) -> list[ReadArgument]:
        """What a call was given."""

    def signature(self, arguments: list[ReadArgument], gpu: bool) -> Signature:
        """What to compile for a call with these arguments."""


class KernelCalls(ABC):
    """One kernel on the devices of one kind: keeps what was compiled and loaded for it."""

    learns = False
    """Whether `entry` knows more after each call of `run`."""

    def __init__(self, kernel: KernelSource) -> None:
        self.kernel = kernel
        self.function = kernel.function

    @abstractmethod
    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> tuple[object, Artifact]:
        """The results of a call, and what ran."""

    def entry(self, device: Device, fallback: Entry) -> Entry | None:
        """Machine code for calls like those made so far, which hands others to `fallback`; None where there is none."""
        return None

    def entry_for(self, values: Mapping[str, object], device: Device, fallback: Entry) -> Entry | None:
        """Machine code for calls with arguments like these; None where there is none, yet or at all."""
        return self.entry(device, fallback)

    @property
    def direct(self) -> Entry | None:
        """What ran the latest call, for calls with host arrays like those: it gives `NotImplemented` for others. None where there is none."""
        return None

    @property
    def latest(self) -> Artifact | None:
        """What machine code ran last, where the latest call was one of its own."""
        return None

    @property
    def wanted(self) -> tuple[Signature, ...]:
        """What its programs were compiled for, where the background can make others."""
        return ()

    @property
    def loaded(self) -> Artifact | None:
        """What was loaded last for a call, also for one that has not returned."""
        return None

    def forget_latest(self) -> None:
        """A call went another way."""
        return
