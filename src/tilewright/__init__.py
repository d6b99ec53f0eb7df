"""Tilewright: one kernel source in Python or ZynML, checked once, fast on every device.

    import tilewright as tw

    @tw.kernel
    def scale(m: tw.Array, v: tw.Array) -> tw.Array:
        rows, cols = m.shape
        out = tw.empty((rows, cols), tw.f32)
        for i, j in tw.grid(rows, cols):
            out[i, j] = m[i, j] * v[j]
        return out
"""

from __future__ import annotations

from types import FunctionType

from tilewright.base import registry
from tilewright.base.environment import VERSION
from tilewright.base.errors import (
    CompilerBug,
    DeviceError,
    DeviceWarning,
    PerformanceWarning,
    TargetLimit,
    TilewrightError,
    UserError,
    public,
)
from tilewright.base.hooks import provide

__version__ = VERSION

_EXPORTS = {
    "api.debugging": "debug",
    "api.export": "export",
    "api.marks": "gpu_compute inline_always target vectorizable",
    "api.occupancy": "best_block occupancy",
    "api.profile": "Profile profile",
    "api.regions": "parallel_gpu prange",
    "api.simd": "CpuFunction cpu",
    "base.dtypes": "DType bf16 bool_ complex128 complex64 f16 f32 f64 f8e4m3 f8e5m2 fixed i16 i32 i64 i8 q4_0 q4_1 q4_k q5_0 q5_1 q5_k q6_k q8_0 u16 u32 u64 u8",
    "base.simd": (
        "f32x16 f32x4 f32x8 f64x2 f64x4 f64x8 i16x16 i16x32 i16x8 i32x16 i32x4 i32x8 i64x2 i64x4 i64x8 i8x16 i8x32 i8x64 "
        "u16x16 u16x32 u16x8 u32x16 u32x4 u32x8 u64x2 u64x4 u64x8 u8x16 u8x32 u8x64"
    ),
    "compile.critical_proof": "CriticalProof",
    "compile.tiers": "TierReport tiers",
    "distributed.heterogeneous": "heterogeneous schedule task",
    "distributed.pipeline": "Pipeline parallel stage",
    "execute.array_files": "read_values",
    "execute.arrays": "allocate array asarray copy from_dlpack pinned to_device",
    "execute.critical.function": "CriticalFunction critical critical_path no_allocation no_syscalls",
    "execute.critical.latency": "Latency latency",
    "execute.critical.ring": "Ring",
    "execute.devices": "Device compute_devices cpu_partitions default_device devices set_default_device",
    "execute.graphs": "Graph capture",
    "execute.kernel": "Kernel kernel",
    "execute.memory": "Pool default_pool memory_pool",
    "execute.packed.arrays": "dequantize packed_array q4_group q8_group quantize",
    "execute.primitives.elements": "gpu_map gpu_reduce gpu_transpose map",
    "execute.primitives.filters": "filter gpu_filter",
    "execute.primitives.histograms": "gpu_histogram histogram",
    "execute.primitives.scans": "gpu_scan scan",
    "execute.primitives.sorts": "argsort gpu_argsort gpu_sort sort topk",
    "execute.primitives.uniques": "gpu_run_lengths gpu_unique run_lengths unique",
    "execute.random_arrays": "random",
    "execute.simt.choices": "LaunchChoice",
    "execute.simt.kernels": "GpuKernel gpu gpu_launch",
    "execute.simt.memory": "gpu_alloc gpu_check_leaks gpu_copy_from gpu_copy_to gpu_free gpu_sync",
    "execute.streams": "Event Stream current_stream stream timed",
    "execute.transfers": "transfer",
    "execute.tune": "tune",
    "execute.tune_search": "Tuning",
    "execute.tuning_files": "TuningFile export_tuning import_tuning",
    "frontend.critical.state": "State StateArray",
    "frontend.python.sources": "run_source",
    "graphs.entry": "graph",
    "graphs.graph": "TensorGraph",
    "graphs.registry": "OpParam TensorType",
    "graphs.onnx.imported": "OnnxGraph",
    "graphs.tensor": "Tensor",
    "interop.jax": "jax_function",
    "interop.torch": "torch_op",
    "runtime.core.futures": "Future all_of any_of",
    "runtime.cpu.pool": "get_num_threads set_num_threads",
    "runtime.memory.packed_array": "PackedArray",
    "tree.metadata": "CompileTarget DeviceTarget ExecutionConstraints KernelHints KernelKind KernelMetadata",
    "zyn.load": "load",
}
"""What is offered besides errors and the words of the kernel languages (`frontend.words`). A module is loaded when somebody asks
for one of its names. Type checkers read `__init__.pyi`, which `tools/words.py --write` makes from this table and the words."""

_PACKAGES = ("mega", "models")
"""Packages that are offered as they are: `tw.models.load`, `tw.mega.plan`."""
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_EXTENSION = ("load_ipython_extension", "unload_ipython_extension")
"""What IPython asks for; nobody else does."""


def _place_a_call() -> object:
    from tilewright.distributed.heterogeneous import call_placed

    return call_placed


def _spread_a_kernel() -> object:
    from tilewright.distributed.data_parallel import spread_of

    return spread_of


def _step_as_one_kernel() -> object:
    from tilewright.mega.engine import MegaStep

    return MegaStep


def _cpu() -> object:
    from tilewright.device_kinds.cpu.kind import CpuKind

    return CpuKind()


def _cuda() -> object:
    from tilewright.device_kinds.cuda.kind import CudaKind

    return CudaKind()


def _webgpu() -> object:
    from tilewright.device_kinds.webgpu.kind import WebGpuKind

    return WebGpuKind()


def _emulator() -> object:
    from tilewright.device_kinds.emulator import EmulatorKind

    return EmulatorKind()


def _vulkan() -> object:
    from tilewright.device_kinds.vulkan import VulkanKind

    return VulkanKind()


def _metal() -> object:
    from tilewright.device_kinds.metal import MetalKind

    return MetalKind()


def _opencl() -> object:
    from tilewright.device_kinds.opencl import OpenClKind

    return OpenClKind()


registry.register("cpu", _cpu, "cpu, cpu:I/N", "cpu")
registry.register("cuda", _cuda, "cuda, cuda:N", "cuda:0", automatic=True)
registry.register("webgpu", _webgpu, "webgpu, webgpu:N", automatic=True)
registry.register("vulkan", _vulkan, "vulkan, vulkan:N", automatic=True)
registry.register("opencl", _opencl, "opencl, opencl:N", automatic=True)
registry.register("metal", _metal, "metal, metal:N")
registry.register("emulator", _emulator, "emulator, emulator:loop|tile|thread")
provide("place a call", _place_a_call)
provide("spread a kernel", _spread_a_kernel)
provide("step as one kernel", _step_as_one_kernel)


def _names() -> list[str]:
    from tilewright.frontend.words.python_words import NAMES

    errors = (error.__name__ for error in (CompilerBug, DeviceError, DeviceWarning, PerformanceWarning, TargetLimit, TilewrightError, UserError))
    return sorted((*_HOMES, *_PACKAGES, *NAMES, *errors))


def __getattr__(name: str) -> object:
    if name == "__all__":
        value: object = _names()
    elif name in _PACKAGES:
        from importlib import import_module

        value = import_module(f"tilewright.{name}")
    else:
        from importlib import import_module

        home = "interop.notebook" if name in _EXTENSION else _HOMES.get(name, "frontend.words")
        try:
            value = getattr(import_module(f"tilewright.{home}"), name)
        except AttributeError:
            if home != "frontend.words":
                raise
            raise AttributeError(f"module 'tilewright' has no attribute '{name}'") from None
        if isinstance(value, FunctionType) and home != "frontend.words":
            value = public(value)  # code of ours imports it from its home, and gets it as it is
    globals()[name] = value  # importing a module of the same name must not stand in its place
    return value


def __dir__() -> list[str]:
    """What users may use; the modules behind it, which are loaded as they are needed, are not shown."""
    return sorted({*(name for name in globals() if name.startswith("__")), *_names()})
