"""Vulkan devices by name: `vulkan` is the first, `vulkan:1` the second. In: names and kernels; out: devices, and calls on them."""

from __future__ import annotations

from tilewright.device_kinds.found_kind import FoundKind
from tilewright.execute.device import Device
from tilewright.runtime.vulkan import device as vulkan


class VulkanKind(FoundKind):
    """The Vulkan devices of this machine."""

    kind = "vulkan"
    title = "Vulkan"
    found = vulkan.FOUND

    def describe(self, one: vulkan.VulkanDevice) -> Device:
        return Device(one.id, "vulkan", one.name, one.target, one.physical.memory)

    def is_cpu(self, one: vulkan.VulkanDevice) -> bool:
        return one.physical.is_cpu
