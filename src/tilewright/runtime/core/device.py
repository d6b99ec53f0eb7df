"""What every device offers, whatever it is: programs, streams, events, properties. In: artifacts and work; out: work queued and done.

`DeviceRuntime` is one device. Devices that use the host's memory (the CPU, the emulator) need no more than it; their arrays are
NumPy's and their streams are queues of the host. A device with memory of its own is an `ArrayDevice`
(`runtime/memory/device_array.py`): it adds memory, copies, streams and events, in terms of `Buffer`, `DeviceEvent` and `Transfer`.

Streams are integers. 0 is the default stream of a device; what the others mean is the device's business.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tilewright.base.artifact import Artifact
from tilewright.base.errors import UserError
from tilewright.base.limits import Cache, Limits
from tilewright.base.record import record

Number = int | float | bool
Workspace = tuple[Any, object]
"""Scratch memory as the device's programs take it, and what keeps it."""

_ordinals = itertools.count(1 << 20)


def new_ordinal() -> int:
    """A number no other device of the process has. Devices of CUDA have the driver's numbers, which are small."""
    return next(_ordinals)


@record
class KernelResources:
    """What one kernel takes, as the device reports it."""

    registers: int
    local_bytes: int
    """Stack and spills of one thread."""
    shared_bytes: int
    max_threads: int


class Buffer(ABC):
    """One piece of a device's memory: what arrays hold. They say where they begin in it by an offset in bytes.

    A buffer has a home stream, and is told which other streams use it; `free` gives it back in their order. `host` is the address
    where the host sees the memory, 0 where it does not.
    """

    __slots__ = ()

    has_addresses = False
    freed: bool
    host: int
    nbytes: int
    recent: int
    """The stream that used it last."""
    stream: int
    """Its home."""
    trace: str | None
    """The line that allocated it, where that is known."""
    users: Collection[int]
    """Streams besides its home that use it."""

    @property
    def base(self) -> int:
        """What the offsets of its arrays count from: its address, or 0 where there are none."""
        return 0

    @property
    def token(self) -> object:
        """What gives the memory back when it goes; None where nothing has to."""
        return None

    @abstractmethod
    def use_on(self, stream: int) -> None:
        """Note that work on `stream` touches it."""

    @abstractmethod
    def note_line(self, line: str) -> None:
        """Keep a line of the program, for messages, in `trace`."""

    @abstractmethod
    def free(self) -> None:
        """Give it back now. Doing so twice is harmless."""

    @abstractmethod
    def lend(self) -> None:
        """Another library holds it from here on."""

    @abstractmethod
    def end_loan(self) -> None:
        """The other library is done with it."""


class DeviceEvent(ABC):
    """A point in the work of a stream."""

    __slots__ = ()

    captured: bool
    """Whether it was recorded into a graph: then it never happens by itself."""
    stream: int
    timing: bool
    device: Any

    @abstractmethod
    def record(self, stream: int) -> DeviceEvent:
        """Put it behind the work queued on `stream`; gives itself."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before it is done. Raises what went wrong in it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for it. Raises what went wrong before it."""

    @abstractmethod
    def milliseconds(self, start: Any) -> float:
        """Time on the device from `start`, an event of the same device, to it, both reached."""


class Transfer(ABC):
    """A copy between host and device that is under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is done and its target can be read."""


class LoadedProgram(ABC):
    """An artifact on a device, ready to run."""

    artifact: Artifact

    def resources(self, entry: str) -> KernelResources:
        """Registers, spills and shared memory of one kernel."""
        raise UserError.at("TW016", f"the device does not say what '{entry}' takes")

    @abstractmethod
    def run(
        self, arrays: Mapping[str, Any], scalars: Mapping[str, Number], sizes: Mapping[str, int], stream: int = 0, *,
        take: Callable[[int], Workspace] | None = None,
    ) -> None:  # fmt: skip
        """Queue every launch on `stream` and return (on the host: run them). Arrays are those of the device by name, outputs included.

        `take` gives memory for scratch arrays; without it, the device does.
        """


class DeviceRuntime(ABC):
    """One device."""

    id: str
    """Its name: the kind, and where there may be several, a colon and a number."""
    label: str
    """The same for messages, with the model."""
    capability: tuple[int, int] | None = None
    """The version of its instruction set, where there are versions."""

    @abstractmethod
    def free_memory(self) -> tuple[int, int]:
        """Bytes free and in all."""

    @abstractmethod
    def limits(self) -> Limits:
        """What one kernel may use, and how fast the device is clocked."""

    @property
    def lost(self) -> str:
        """Why it cannot be used any more; empty while it can."""
        return ""

    @property
    def simd(self) -> str:
        """The SIMD level its code is made for, of a CPU."""
        return ""

    @property
    def cores(self) -> tuple[int, ...]:
        """Its cores as the system numbers them, of a CPU."""
        return ()

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The caches of its first core, the nearest first, of a CPU."""
        return ()

    @abstractmethod
    def load(self, artifact: Artifact) -> LoadedProgram:
        """The artifact's code on this device, ready to run."""

    def synchronize(self) -> None:
        """Wait for all work. Raises what went wrong in it. On the host every call is done when it returns."""
        return
