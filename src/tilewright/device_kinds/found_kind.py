"""Kinds whose devices a runtime finds and numbers: `opencl` is the first, `opencl:1` the second. In: what the runtime found; out: devices by name.

A driver that plays a GPU on the CPU is there by name only: it is slower than code for the CPU itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tilewright.base.errors import DeviceError
from tilewright.execute.array_kind import ArrayKind
from tilewright.execute.device import Device
from tilewright.runtime.core.found import FoundDevices
from tilewright.runtime.memory.device_array import ArrayDevice


class FoundKind(ArrayKind):
    """Devices that are found once."""

    launch_seconds = 5e-5
    found: FoundDevices[Any]

    @abstractmethod
    def describe(self, one: Any) -> Device:
        """The device in words and numbers."""

    def is_cpu(self, one: Any) -> bool:
        """Whether it is the CPU that plays a GPU."""
        return False

    def devices(self) -> list[Device]:
        return [self.describe(one) for one in self.found.devices() if not self.is_cpu(one)]

    def by_name(self) -> list[Device]:
        return [self.describe(one) for one in self.found.devices() if self.is_cpu(one)]

    def find(self, name: str) -> Device | None:
        number = name.partition(":")[2] or ("0" if name == self.kind else "")
        if not number.isdigit():
            return None
        found = self.found.devices()
        if int(number) < len(found):
            return self.describe(found[int(number)])
        reason = self.found.unavailable_reason() or f"this machine has {len(found)}"
        raise DeviceError.at("TW030", f"device '{name}' is not present: {reason}", help="use device='cpu'")

    def automatic(self) -> Device | None:
        return next((self.describe(one) for one in self.found.devices() if not one.lost and not self.is_cpu(one)), None)

    def absence(self) -> str:
        return self.found.unavailable_reason()

    def runtime(self, device: Device) -> ArrayDevice:
        one: ArrayDevice = self.found.devices()[int(device.id.partition(":")[2])]
        return one

    def generation(self) -> object:
        return self.found.in_use() or object()

    def in_use(self) -> Sequence[ArrayDevice]:
        return self.found.in_use()
