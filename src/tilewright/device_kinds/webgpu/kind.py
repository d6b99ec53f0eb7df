"""GPUs through WebGPU by name: `webgpu` is the first, `webgpu:1` the second. In: names; out: devices. The calls are those of every device with memory of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tilewright.device_kinds.found_kind import FoundKind
from tilewright.execute.device import Device
from tilewright.runtime.core.found import FoundDevices
from tilewright.runtime.webgpu.adapters import adapters
from tilewright.runtime.webgpu.device import WebGpuDevice


def _look() -> tuple[list[WebGpuDevice], str]:
    found, reason = adapters(os.getpid())
    return [WebGpuDevice(number, adapter) for number, adapter in enumerate(found)], reason


class WebGpuKind(FoundKind):
    """The WebGPU adapters of this machine."""

    kind = "webgpu"
    title = "WebGPU"
    launch_seconds = 1e-4
    found = FoundDevices(_look)

    def describe(self, one: WebGpuDevice) -> Device:
        return Device(one.id, "webgpu", f"{one.adapter.name}, {one.adapter.api}", one.target, one.adapter.limits["max-buffer-size"])

    def is_cpu(self, one: WebGpuDevice) -> bool:
        return one.adapter.software

    def in_use(self) -> Sequence[WebGpuDevice]:
        return [one for one in self.found.in_use() if one._device is not None]
