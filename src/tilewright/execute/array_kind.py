"""The calls of every kind of device with memory of its own. In: kernels; out: their calls, launches and places, in terms of `ArrayDevice`."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.execute.calls.formed_calls import FormedCalls
from tilewright.execute.calls.kernel_calls import KernelCalls, KernelSource
from tilewright.execute.device import Device
from tilewright.execute.kinds import DeviceKind
from tilewright.execute.places import ArrayPlace, DevicePlace
from tilewright.execute.simt.array_launches import ArrayLaunches
from tilewright.execute.simt.launches import ExplicitSource, KernelLaunches


class ArrayKind(DeviceKind):
    """A kind of device with memory of its own: what is left to say is where its devices are."""

    def calls(self, kernel: KernelSource) -> KernelCalls:
        return FormedCalls(kernel)

    def launches(self, kernel: ExplicitSource) -> KernelLaunches:
        return ArrayLaunches(kernel)

    def place(self, device: Device, values: Sequence[object]) -> DevicePlace:
        return ArrayPlace(device, values)
