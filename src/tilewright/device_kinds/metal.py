"""Metal devices by name: `metal` is the first, `metal:1` the second. In: names and kernels; out: devices, and calls on them."""

from __future__ import annotations

from tilewright.device_kinds.found_kind import FoundKind
from tilewright.execute.device import Device
from tilewright.runtime.metal import device as metal


class MetalKind(FoundKind):
    """The Metal devices of a Mac."""

    kind = "metal"
    title = "Metal"
    found = metal.FOUND

    def describe(self, one: metal.MetalDevice) -> Device:
        return Device(one.id, "metal", one.name, one.target, one.free_memory()[1])
