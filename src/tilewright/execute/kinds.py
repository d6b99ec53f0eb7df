"""What a kind of device must offer: finding its devices, their runtimes, and calls of kernels on them.

In: a name or a `Device`; out: devices, and objects that keep what was compiled and loaded for one kernel on them. A kind registers itself
with `base.registry.register`; nothing else in the package asks which kind a device is of. `execute/array_kind.py` has the
calls of every device with memory of its own, so that such a kind says where its devices are and little more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilewright.base import registry
from tilewright.base.errors import UserError
from tilewright.execute.calls.kernel_calls import KernelCalls, KernelSource
from tilewright.execute.device import Device
from tilewright.runtime.core.device import DeviceRuntime
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray

if TYPE_CHECKING:
    # Loaded with the first explicit kernel, primitive or graph.
    from tilewright.execute.places import DevicePlace
    from tilewright.execute.simt.launches import ExplicitSource, KernelLaunches
    from tilewright.runtime.core.graph import DeviceGraph, ParametricReplay


class DeviceKind(ABC):
    """One kind of device."""

    kind: str
    title: str
    """What users call it, for messages."""
    simulated = False
    """Whether its devices are there to be right, not fast."""
    launch_seconds = 1e-5
    """What any launch takes, for the model that places work."""

    # -- devices ------------------------------------------------------------------------------------------------

    @abstractmethod
    def devices(self) -> list[Device]:
        """Those of this machine that can run kernels."""

    def by_name(self) -> list[Device]:
        """Devices that only those get who name them: drivers that play a GPU on the CPU."""
        return []

    @abstractmethod
    def find(self, name: str) -> Device | None:
        """The device of a name that begins with the kind; None where that is no name of a device, DeviceError where there is none."""

    def automatic(self) -> Device | None:
        """What `auto` means, for a kind that is registered for it: its first device that is not lost."""
        return next((device for device in self.devices() if not device.runtime.lost), None)

    def absence(self) -> str:
        """Why there are no devices; empty where there are some, or where nobody expects any."""
        return ""

    @abstractmethod
    def runtime(self, device: Device) -> DeviceRuntime:
        """What runs programs on it; the same object each time."""

    def generation(self) -> object:
        """Another object whenever the devices of the process have changed, as in a forked child."""
        return None

    def in_use(self) -> Sequence[ArrayDevice]:
        """Devices with memory of their own that somebody has asked for; starts no driver."""
        return ()

    # -- kernels ------------------------------------------------------------------------------------------------

    @abstractmethod
    def calls(self, kernel: KernelSource) -> KernelCalls:
        """Calls of a kernel."""

    @abstractmethod
    def launches(self, kernel: ExplicitSource) -> KernelLaunches:
        """Launches of an explicit kernel."""

    @abstractmethod
    def place(self, device: Device, values: Sequence[object]) -> DevicePlace:
        """Where a primitive runs that is called with these values."""

    # -- graphs -------------------------------------------------------------------------------------------------

    def graph(self, device: Device, origin: int) -> DeviceGraph:
        """A new graph that takes the place of stream `origin`."""
        raise UserError.at("TW016", f"graphs cannot be captured on '{device.id}'", help="make the calls one by one")

    def parametric(self, graph: DeviceGraph, ports: Sequence[DeviceArray]) -> ParametricReplay | None:
        """A captured graph whose ports are other arrays at every replay; None where there is no such thing for it."""
        return None


def absences() -> list[str]:
    """Why there are no devices of the kinds that somebody may expect some of, a line for each."""
    return [f"no {kind.title} device: {kind.absence()}" for kind in kinds() if kind.absence()]


def kind_of(device: Device) -> DeviceKind:
    """The kind of a device."""
    found: DeviceKind = registry.load(device.kind)
    return found


def loaded_kinds() -> list[DeviceKind]:
    """The kinds somebody has asked for."""
    return list(registry.loaded())


def kinds() -> list[DeviceKind]:
    """All kinds, loaded."""
    found: list[Any] = [registry.load(r.kind) for r in registry.registered()]
    return found
