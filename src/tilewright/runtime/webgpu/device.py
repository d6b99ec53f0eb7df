"""One WebGPU device with its programs. In: artifacts of kind `wgsl`; out: the device that runs them."""

from __future__ import annotations

from tilewright.base.artifact import Artifact
from tilewright.runtime.webgpu.program import WebGpuProgram
from tilewright.runtime.webgpu.queue import WebGpuQueue


class WebGpuDevice(WebGpuQueue):
    """A device of an adapter."""

    def load(self, artifact: Artifact) -> WebGpuProgram:
        return WebGpuProgram(self, artifact)
