"""OpenCL devices by name: `opencl` is the first, `opencl:1` the second. In: names and kernels; out: devices, and calls on them."""

from __future__ import annotations

from tilewright.device_kinds.found_kind import FoundKind
from tilewright.execute.device import Device
from tilewright.runtime.opencl import device as opencl


class OpenClKind(FoundKind):
    """The OpenCL devices of this machine that take SPIR-V."""

    kind = "opencl"
    title = "OpenCL"
    found = opencl.FOUND

    def describe(self, one: opencl.OpenClDevice) -> Device:
        return Device(one.id, "opencl", one.name, one.target, int(one.handle.global_mem_size))

    def is_cpu(self, one: opencl.OpenClDevice) -> bool:
        return one.is_cpu
