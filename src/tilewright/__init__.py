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

from typing import TYPE_CHECKING

from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit, TilewrightError, UserError

if TYPE_CHECKING:
    from tilewright.api.array_files import read_values
    from tilewright.api.arrays import allocate, array, asarray, copy, from_dlpack, pinned, to_device
    from tilewright.api.compute import load
    from tilewright.api.devices import (
        Device,
        compute_devices,
        cpu_partitions,
        default_device,
        devices,
        set_default_device,
    )
    from tilewright.api.export import export
    from tilewright.api.graphs import Graph, capture, graph
    from tilewright.api.heterogeneous import heterogeneous, schedule, task
    from tilewright.api.jax_ops import jax_function
    from tilewright.api.kernel import Kernel, kernel
    from tilewright.api.language import (
        Array,
        abs,
        all,
        any,
        argmax,
        argmin,
        barrier,
        cast,
        ceil,
        clamp,
        cos,
        cosh,
        dot,
        empty,
        empty_like,
        erf,
        exp,
        exp2,
        floor,
        fma,
        full,
        gelu,
        grid,
        inf,
        isnan,
        log,
        log2,
        matmul,
        max,
        maximum,
        min,
        minimum,
        ones,
        pow,
        prod,
        reduce,
        relu,
        round,
        row_max,
        row_min,
        row_sum,
        rsqrt,
        shared,
        sigmoid,
        silu,
        sin,
        sinh,
        softplus,
        sqrt,
        sum,
        tan,
        tanh,
        transpose,
        trunc,
        where,
        zeros,
        zeros_like,
    )
    from tilewright.api.memory import Pool, default_pool, memory_pool
    from tilewright.api.pipeline import Pipeline, parallel, stage
    from tilewright.api.primitive_sorts import gpu_argsort, gpu_run_lengths, gpu_sort, gpu_unique
    from tilewright.api.primitives import gpu_filter, gpu_histogram, gpu_map, gpu_reduce, gpu_scan, gpu_transpose
    from tilewright.api.profile import Profile, profile
    from tilewright.api.streams import Event, Stream, current_stream, stream, timed
    from tilewright.api.torch_ops import torch_op
    from tilewright.api.transfers import transfer
    from tilewright.api.tune import Tuning, tune
    from tilewright.base.dtypes import (
        DType,
        bf16,
        bool_,
        f8e4m3,
        f8e5m2,
        f16,
        f32,
        f64,
        i8,
        i16,
        i32,
        i64,
        q4_0,
        q4_k,
        q5_k,
        q6_k,
        q8_0,
        u8,
        u16,
        u32,
        u64,
    )
    from tilewright.runtime.cpu_pool import get_num_threads, set_num_threads
    from tilewright.runtime.futures import Future, all_of, any_of
    from tilewright.tree.metadata import CompileTarget

__version__ = "0.1.0"
__all__ = [
    "Array",
    "CompileTarget",
    "CompilerBug",
    "DType",
    "Device",
    "DeviceError",
    "Event",
    "Future",
    "Graph",
    "Kernel",
    "Pipeline",
    "Pool",
    "Profile",
    "Stream",
    "TargetLimit",
    "TilewrightError",
    "Tuning",
    "UserError",
    "abs",
    "all",
    "all_of",
    "allocate",
    "any",
    "any_of",
    "argmax",
    "argmin",
    "array",
    "asarray",
    "barrier",
    "bf16",
    "bool_",
    "capture",
    "cast",
    "ceil",
    "clamp",
    "compute_devices",
    "copy",
    "cos",
    "cosh",
    "cpu_partitions",
    "current_stream",
    "default_device",
    "default_pool",
    "devices",
    "dot",
    "empty",
    "empty_like",
    "erf",
    "exp",
    "exp2",
    "export",
    "f8e4m3",
    "f8e5m2",
    "f16",
    "f32",
    "f64",
    "floor",
    "fma",
    "from_dlpack",
    "full",
    "gelu",
    "get_num_threads",
    "gpu_argsort",
    "gpu_filter",
    "gpu_histogram",
    "gpu_map",
    "gpu_reduce",
    "gpu_run_lengths",
    "gpu_scan",
    "gpu_sort",
    "gpu_transpose",
    "gpu_unique",
    "graph",
    "grid",
    "heterogeneous",
    "i8",
    "i16",
    "i32",
    "i64",
    "inf",
    "isnan",
    "jax_function",
    "kernel",
    "load",
    "log",
    "log2",
    "matmul",
    "max",
    "maximum",
    "memory_pool",
    "min",
    "minimum",
    "ones",
    "parallel",
    "pinned",
    "pow",
    "prod",
    "profile",
    "q4_0",
    "q4_k",
    "q5_k",
    "q6_k",
    "q8_0",
    "read_values",
    "reduce",
    "relu",
    "round",
    "row_max",
    "row_min",
    "row_sum",
    "rsqrt",
    "schedule",
    "set_default_device",
    "set_num_threads",
    "shared",
    "sigmoid",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "sqrt",
    "stage",
    "stream",
    "sum",
    "tan",
    "tanh",
    "task",
    "timed",
    "to_device",
    "torch_op",
    "transfer",
    "transpose",
    "trunc",
    "tune",
    "u8",
    "u16",
    "u32",
    "u64",
    "where",
    "zeros",
    "zeros_like",
]


_LATER = {
    "tilewright.api.array_files": ("read_values",),
    "tilewright.api.arrays": ("allocate", "array", "asarray", "copy", "from_dlpack", "pinned", "to_device"),
    "tilewright.api.compute": ("load",),
    "tilewright.api.devices": ("Device", "compute_devices", "cpu_partitions", "default_device", "devices", "set_default_device"),
    "tilewright.api.export": ("export",),
    "tilewright.api.graphs": ("Graph", "capture", "graph"),
    "tilewright.api.heterogeneous": ("heterogeneous", "schedule", "task"),
    "tilewright.api.jax_ops": ("jax_function",),
    "tilewright.api.kernel": ("Kernel", "kernel"),
    "tilewright.api.language": (
        "Array", "abs", "all", "any", "argmax", "argmin", "barrier", "cast", "ceil", "clamp", "cos", "cosh", "dot",
        "empty", "empty_like", "erf", "exp", "exp2", "floor", "fma", "full", "gelu", "grid", "inf", "isnan", "log",
        "log2", "matmul", "max", "maximum", "min", "minimum", "ones", "pow", "prod", "reduce", "relu", "round",
        "row_max", "row_min", "row_sum", "rsqrt", "shared", "sigmoid", "silu", "sin", "sinh", "softplus", "sqrt", "sum",
        "tan", "tanh", "transpose", "trunc", "where", "zeros", "zeros_like",
    ),
    "tilewright.api.memory": ("Pool", "default_pool", "memory_pool"),
    "tilewright.api.notebook": ("load_ipython_extension", "unload_ipython_extension"),
    "tilewright.api.pipeline": ("Pipeline", "parallel", "stage"),
    "tilewright.api.primitive_sorts": ("gpu_argsort", "gpu_run_lengths", "gpu_sort", "gpu_unique"),
    "tilewright.api.primitives": ("gpu_filter", "gpu_histogram", "gpu_map", "gpu_reduce", "gpu_scan", "gpu_transpose"),
    "tilewright.api.profile": ("Profile", "profile"),
    "tilewright.api.streams": ("Event", "Stream", "current_stream", "stream", "timed"),
    "tilewright.api.torch_ops": ("torch_op",),
    "tilewright.api.transfers": ("transfer",),
    "tilewright.api.tune": ("Tuning", "tune"),
    "tilewright.base.dtypes": (
        "DType", "bf16", "bool_", "f16", "f32", "f64", "f8e4m3", "f8e5m2", "i16", "i32", "i64", "i8", "q4_0", "q4_k",
        "q5_k", "q6_k", "q8_0", "u16", "u32", "u64", "u8",
    ),
    "tilewright.runtime.cpu_pool": ("get_num_threads", "set_num_threads"),
    "tilewright.runtime.futures": ("Future", "all_of", "any_of"),
    "tilewright.tree.metadata": ("CompileTarget",),
}
"""Modules that are loaded when somebody asks for one of their names."""


def __getattr__(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            from importlib import import_module

            found: object = getattr(import_module(module), name)
            globals()[name] = found  # importing a module of the same name must not stand in its place
            return found
    raise AttributeError(f"module 'tilewright' has no attribute '{name}'")
