"""Toy devices by name: what the package asks of a kind of device. The calls are those of every device with memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import DeviceError
from tilewright.execute.array_kind import ArrayKind
from tilewright.execute.device import Device
from toy_device import DEVICES, codegen
from toy_device.runtime import MEMORY, ToyDevice
from toy_device.target import TOY


class ToyKind(ArrayKind):
    """The toy devices of this process."""

    kind = title = "toy"
    simulated = True

    def __init__(self) -> None:
        assert codegen.BACKEND.kind == TOY.kind  # importing the code generator registers it
        self._devices = [ToyDevice(number) for number in range(DEVICES)]

    def devices(self) -> list[Device]:
        return [Device(toy.id, "toy", "eight lanes", TOY, MEMORY) for toy in self._devices]

    def find(self, name: str) -> Device | None:
        number = name.partition(":")[2] or "0"
        if not number.isdigit():
            return None
        if int(number) >= len(self._devices):
            raise DeviceError.at("TW030", f"device '{name}' is not present: there are {len(self._devices)}")
        return self.devices()[int(number)]

    def runtime(self, device: Device) -> ToyDevice:
        return self._devices[int(device.id.partition(":")[2])]

    def in_use(self) -> Sequence[ToyDevice]:
        return self._devices
