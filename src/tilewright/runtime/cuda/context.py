"""A GPU as the parts of its runtime see each other. In: nothing; out: the names and types of what `CudaDevice` has.

`CudaDevice` is put together from parts: streams, copies, memory. Each part, and each object that works for a device (programs, graphs,
events, launchers), needs some of the others; they know this class, and only `device.py` knows them all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, SupportsInt

from tilewright.base.artifact import Artifact
from tilewright.base.errors import TilewrightError
from tilewright.base.target import Target
from tilewright.runtime.core.device import LoadedProgram
from tilewright.runtime.core.launch_log import LaunchLog
from tilewright.runtime.cuda.driver import Driver, Results
from tilewright.runtime.memory.device_array import ArrayDevice
from tilewright.runtime.memory.device_memory import MemoryPool


class CudaContext(ArrayDevice):
    """One GPU: its driver, its context and its pools."""

    driver: Driver
    log: LaunchLog
    pool: MemoryPool
    capability: tuple[int, int]
    max_shared: int
    multiprocessors: int
    idle_events: tuple[deque[Any], deque[Any]]
    """Events nobody holds: without timing, and with."""
    quick_wait: Callable[[], object] | None
    """Machine code that waits, once there is some: True, a status, or None where it did nothing."""
    wait_memory: object

    @property
    @abstractmethod
    def target(self) -> Target:
        """What to compile for."""

    @property
    @abstractmethod
    def context(self) -> SupportsInt:
        """The driver's handle of its context."""

    @property
    @abstractmethod
    def context_address(self) -> int: ...

    # -- calls --------------------------------------------------------------------------------------------------

    @abstractmethod
    def attribute(self, name: str) -> int:
        """What the driver says of `CU_DEVICE_ATTRIBUTE_<name>`."""

    @abstractmethod
    def enter(self) -> bool:
        """Make the context current on this thread; True when another one was and `leave` must bring it back."""

    @abstractmethod
    def leave(self, entered: bool) -> None: ...

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """`with device.active():` the context is current inside."""

    @abstractmethod
    def call(self, api: str, *arguments: object) -> Results:
        """A driver call inside the active context, with errors that name this device and the kernels under way."""

    @abstractmethod
    def error(self, api: str, status: int, detail: str = "") -> TilewrightError:
        """The error for a failed call."""

    @abstractmethod
    def watch(self, callback: Callable[[TilewrightError], None], stream: int) -> None:
        """Call `callback` with the error if work launched on `stream` up to its next synchronisation faults."""

    @abstractmethod
    def watch_module(self, module: SupportsInt, artifact: Artifact) -> None:
        """Tell a module where its watchdog reports, if it has one."""

    @abstractmethod
    def index_record(self, artifact: Artifact) -> int:
        """The address of the record in which a program leaves an index outside its array. The context must be active."""

    @abstractmethod
    def drop_index_record(self, address: int) -> None:
        """The program is gone. This may run anywhere."""

    @abstractmethod
    def raise_reports(self) -> None:
        """After a wait: raise what kernels found outside their arrays."""

    @abstractmethod
    def retire(self, module: SupportsInt) -> None:
        """Unload a module once nothing can be running of it."""

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def pinned_pool(self) -> MemoryPool:
        """Page-locked host memory."""

    @property
    @abstractmethod
    def registers_read_only(self) -> bool:
        """Whether read-only host memory can be registered as such."""

    @property
    @abstractmethod
    def registry(self) -> Any:
        """Host arrays made reachable for it: a `host_memory.Registry`."""

    @abstractmethod
    def is_idle(self, stream: int) -> bool:
        """Whether all work queued on the stream is done."""

    @abstractmethod
    def copy_program(self, width: int, rank: int, wide: bool) -> LoadedProgram:
        """The loaded kernel for copies between strided arrays."""

    # -- streams and events -------------------------------------------------------------------------------------

    @abstractmethod
    def new_event(self) -> Any:
        """An event of the driver's without timing."""

    @abstractmethod
    def retire_event(self, event: Any) -> None:
        """Destroy an event later: this may run anywhere."""

    @abstractmethod
    def take_event(self, timing: bool) -> SupportsInt:
        """For `CudaEvent`: a handle of the driver's."""

    @abstractmethod
    def take_capture_stream(self) -> int:
        """A stream that serves captures alone."""

    @abstractmethod
    def return_capture_stream(self, stream: int) -> None: ...
