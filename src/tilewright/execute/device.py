"""A device as users see it: a name, a target, and what its runtime knows. `execute/devices.py` finds them by name."""

from __future__ import annotations

from tilewright.base import registry
from tilewright.base.limits import Cache, Limits
from tilewright.base.record import record
from tilewright.base.target import Target
from tilewright.runtime.core.device import DeviceRuntime
from tilewright.runtime.memory.device_array import ArrayDevice


@record
class Device:
    """A place kernels run. `kind` is the first word of its name."""

    id: str
    kind: str
    name: str
    target: Target
    memory: int = 0
    """Bytes in all: of a GPU its own, of the CPU and its partitions the host's; 0 for an emulator."""
    stage: str = ""
    """The IR stage an emulator runs."""
    partition: tuple[int, int] | None = None
    """Of a part of the CPU's cores: which part, and how many there are."""

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"<device {self.id}: {self.name}, {self.target.name}>" if self.target.name not in self.name else f"<device {self.id}: {self.name}>"

    @property
    def type(self) -> str:
        """The same as `kind`."""
        return self.kind

    @property
    def runtime(self) -> DeviceRuntime:
        """What runs programs on it."""
        found: DeviceRuntime = registry.load(self.kind).runtime(self)
        return found

    @property
    def free_memory(self) -> int:
        """Bytes that are free now. For a GPU this makes its context, and counts what the pool of this process holds as used."""
        return self.runtime.free_memory()[0]

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Of a GPU."""
        return self.runtime.capability

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of a GPU, cores of a CPU."""
        return self.target.multiprocessors

    @property
    def simd(self) -> str:
        """The SIMD level code is made for on a CPU: `avx512`, `avx2`, `neon`…"""
        return self.runtime.simd

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores of a CPU (partition), as the system numbers them."""
        return self.runtime.cores

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The caches of the CPU's first core, the nearest first."""
        return self.runtime.caches

    @property
    def limits(self) -> Limits:
        """What one kernel may use, and how fast the device is clocked."""
        return self.runtime.limits()


def array_device(device: Device) -> ArrayDevice | None:
    """The runtime of a device with memory of its own; None where arrays of the device are NumPy's."""
    runtime = device.runtime
    return runtime if isinstance(runtime, ArrayDevice) else None


def own_memory(device: Device) -> ArrayDevice:
    """The runtime of a device that is known to have memory of its own."""
    runtime = device.runtime
    assert isinstance(runtime, ArrayDevice)
    return runtime
