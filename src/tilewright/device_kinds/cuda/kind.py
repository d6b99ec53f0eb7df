"""NVIDIA GPUs by name: `cuda` is the first, `cuda:1` the second. In: names and kernels; out: devices, and calls that learn from each other."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.errors import DeviceError, UserError
from tilewright.device_kinds.cuda.calls import CudaCalls, CudaLaunches
from tilewright.execute.array_kind import ArrayKind
from tilewright.execute.calls.kernel_calls import KernelSource
from tilewright.execute.device import Device
from tilewright.execute.simt.launches import ExplicitSource
from tilewright.runtime.core.graph import DeviceGraph, ParametricReplay
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.graphs import CudaGraph
from tilewright.runtime.memory.device_array import DeviceArray


class CudaKind(ArrayKind):
    """The NVIDIA GPUs of this machine."""

    kind = "cuda"
    title = "CUDA"

    def devices(self) -> list[Device]:
        found: list[Device] = []
        for gpu in cuda.devices():
            try:
                found.append(_device(gpu))
            except (UserError, DeviceError):
                continue  # no target is known for it, or the driver is too old; asking for it by name says so
        return found

    def find(self, name: str) -> Device | None:
        number = name.partition(":")[2] or ("0" if name == "cuda" else "")
        if not number.isdigit():
            return None
        gpus = cuda.devices()
        if int(number) < len(gpus):
            return _device(gpus[int(number)])
        reason = cuda.unavailable_reason() or f"this machine has {len(gpus)}"
        raise DeviceError.at(
            "TW030", f"device '{name}' is not present: {reason}", help="use device='cpu', or device='emulator' to run GPU code without a GPU"
        )

    def automatic(self) -> Device | None:
        return next((_device(gpu) for gpu in cuda.devices() if not gpu.lost), None)

    def absence(self) -> str:
        return cuda.unavailable_reason()

    def runtime(self, device: Device) -> cuda.CudaDevice:
        return cuda.devices()[int(device.id.partition(":")[2])]

    def generation(self) -> object:
        return cuda.in_use() or object()  # none in use is never the same generation as before

    def in_use(self) -> Sequence[cuda.CudaDevice]:
        return cuda.in_use()

    def calls(self, kernel: KernelSource) -> CudaCalls:
        return CudaCalls(kernel)

    def launches(self, kernel: ExplicitSource) -> CudaLaunches:
        return CudaLaunches(kernel)

    def graph(self, device: Device, origin: int) -> DeviceGraph:
        return CudaGraph(self.runtime(device), origin)

    def parametric(self, graph: DeviceGraph, ports: Sequence[DeviceArray]) -> ParametricReplay | None:
        from tilewright.runtime.cuda.parametric_graphs import ParametricGraph, ports_are_apart

        assert isinstance(graph, CudaGraph)
        return ParametricGraph(graph, ports) if ports_are_apart(ports) else None


def _device(gpu: cuda.CudaDevice) -> Device:
    return Device(gpu.id, "cuda", gpu.name, gpu.target, gpu.memory)
