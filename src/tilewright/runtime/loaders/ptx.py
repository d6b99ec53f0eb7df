"""Launches exported GPU code through the package `cuda-bindings`."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Mapping
from typing import Any

from tilewright.runtime.loaders.common import (
    BoundSizes,
    CallArguments,
    Description,
    bind,
    check,
    check_in_place,
    checked_number,
    checked_pointer,
    from_interface,
    itemsize,
    outputs_of,
    overlapping,
)

_PACK = {
    "bool": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f16": "e",
    "f32": "f", "f64": "d",
}  # fmt: skip
_MAP_TYPES = {
    "bool": "UINT8", "i8": "UINT8", "u8": "UINT8", "f8e4m3": "UINT8", "f8e5m2": "UINT8", "i16": "UINT16", "u16": "UINT16",
    "i32": "INT32", "u32": "UINT32", "i64": "INT64", "u64": "UINT64", "f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32",
    "f64": "FLOAT64",
}  # fmt: skip
_TORCH = {
    "bool": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}  # fmt: skip


_MOST_BLOCKS = ((1 << 31) - 1, 65535)
"""Along x, and along y and z."""
_OUT_OF_MEMORY = 2
_FAILURE = "$failure"
"""The scratch array in which kernels leave the first index that lies outside: its site, from 1 on, the index and the extent."""


class ExportedGpuProgram:
    """The exported function: arrays of PyTorch, CuPy, Numba… on the current device in; results go to `out=`, on `stream`.

    The first call loads the code into the current context. Without `out=` results are made as PyTorch tensors or CuPy arrays, as
    the first array given is.
    """

    def __init__(self, description: Description, folder: str = "") -> None:
        self.description = description
        self._folder = folder or os.path.dirname(os.path.abspath(__file__))
        self._sizes = BoundSizes()
        self._lock = threading.Lock()
        self._functions: dict[int, dict[str, Any]] = {}

    def __call__(self, *inputs: Any, out: Any = None, stream: int = 0) -> Any:
        d = self.description
        if len(inputs) != len(d["inputs"]):
            raise TypeError(f"{d['name']} takes {', '.join(p[0] for p in d['inputs'])}; got {len(inputs)} argument(s)")
        arrays: dict[str, CallArguments] = {}
        scalars: dict[str, Any] = {}
        for param, value in zip(d["inputs"], inputs):
            if len(param) > 2:
                arrays[param[0]] = _array(param[0], param[1], value, param[0] in d["in_place"])
            else:
                scalars[param[0]] = checked_number(param[0], param[1], value)
        given = outputs_of(out, len(d["outputs"]))
        arrays.update({p[0]: _array(p[0], p[1], item, True) for p, item in zip(d["outputs"], given) if item is not None})
        sizes = bind(d, arrays, scalars)
        results = []
        for param, item in zip(d["outputs"], given):
            if item is None:
                item = _empty(inputs, param[1], self._sizes.values(param[2], sizes))
                arrays[param[0]] = _array(param[0], param[1], item)
            results.append(item)
        sizes.update({k: v for k, v in bind(d, arrays, scalars).items() if k not in sizes})
        check(d, sizes, arrays, self._sizes)
        check_in_place(d, arrays)
        for param, item in zip(d["outputs"], given):
            other = overlapping(param[0], d, arrays) if item is not None else ""
            if other and not (d["alias_safe"] and other in [p[0] for p in d["inputs"]]):
                raise ValueError(f"out= for '{param[0]}' shares memory with '{other}'; give another array")
        self._launch({name: array.pointer for name, array in arrays.items()}, scalars, sizes, stream)
        return results[0] if len(results) == 1 else tuple(results) or None

    def _launch(self, pointers: dict[str, int], scalars: Mapping[str, Any], sizes: Mapping[str, int], stream: int) -> None:
        driver = _driver()
        functions = self._load()
        scratch = []
        try:
            for name, dtype, shape, _, _ in self.description["scratch"]:
                nbytes = itemsize(dtype)
                for extent in self._sizes.values(shape, sizes):
                    nbytes *= extent
                if not 0 <= nbytes < 1 << 63:
                    raise MemoryError(f"{self.description['name']}: the scratch array {name} would have {nbytes} bytes")
                pointers[name] = int(_call(driver.cuMemAllocAsync, max(16, nbytes), stream))
                scratch.append(pointers[name])
                if name == _FAILURE:
                    _call(driver.cuMemsetD8Async, pointers[name], 0, nbytes, stream)
            for launch in self.description["launches"]:
                self._one(driver, functions[launch["entry"]], launch, pointers, scalars, sizes, stream)
            if _FAILURE in pointers:
                self._check_failure(driver, pointers[_FAILURE], stream)
        finally:
            for pointer in scratch:
                driver.cuMemFreeAsync(pointer, stream)

    def _check_failure(self, driver: Any, cell: int, stream: int) -> None:
        """Wait, and raise what lay outside its array: the kernels left it out."""
        found = (ctypes.c_int64 * 3)()
        _call(driver.cuMemcpyDtoHAsync, ctypes.addressof(found), cell, ctypes.sizeof(found), stream)
        _call(driver.cuStreamSynchronize, stream)
        if found[0]:
            raise IndexError(f"{self.description['sites'][found[0] - 1]}: index {found[1]}, extent {found[2]}")

    def _one(
        self, driver: Any, function: Any, launch: Mapping[str, Any], pointers: Mapping[str, int], scalars: Mapping[str, Any],
        sizes: Mapping[str, int], stream: int,
    ) -> None:  # fmt: skip
        grid = (*self._sizes.values(launch["grid"], sizes), 1, 1, 1)[:3]
        if min(grid) <= 0:
            return
        if grid[0] > _MOST_BLOCKS[0] or max(grid[1:]) > _MOST_BLOCKS[1]:
            raise ValueError(f"{launch['entry']} would have a grid of {grid}, more blocks than a GPU can launch")
        types = {p[0]: p[1] for p in self.description["inputs"] if len(p) == 2}
        memory: list[Any] = []
        for name in launch["args"]:
            data = struct.pack("<Q", pointers[name]) if name in pointers else struct.pack("<" + _PACK[types[name]], scalars[name])
            memory.append(ctypes.create_string_buffer(data, max(8, len(data))))
        memory += [ctypes.c_int64(sizes[name]) for name in launch["sizes"]]
        places = [ctypes.addressof(item) for item in memory]
        for parameter in launch["maps"]:
            room = ctypes.create_string_buffer(192)
            place = -(-ctypes.addressof(room) // 64) * 64
            ctypes.memmove(place, self._map(driver, parameter, pointers[parameter["array"]], sizes), 128)
            memory.append(room)
            places.append(place)
        table = (ctypes.c_void_p * max(1, len(places)))(*places)
        if launch["persistent"]:
            grid = (min(grid[0], _resident(driver, function, launch)), *grid[1:])
        rest = (*grid, launch["threads"], 1, 1, launch["shared"], stream, ctypes.addressof(table))
        if launch["cooperative"]:
            _call(driver.cuLaunchCooperativeKernel, function, *rest)
        else:
            _call(driver.cuLaunchKernel, function, *rest, 0)

    def _map(self, driver: Any, parameter: Mapping[str, Any], address: int, sizes: Mapping[str, int]) -> bytes:
        """The copy engine's description of an array: axes innermost first, strides in bytes."""
        shape, strides = self._sizes.values(parameter["shape"], sizes), self._sizes.values(parameter["strides"], sizes)
        empty, size = min(shape) <= 0, itemsize(parameter["dtype"])
        extents = [1] * len(shape) if empty else list(shape[::-1])
        legal = -(-extents[0] * size // 16) * 16
        steps = []
        for extent, stride in zip(extents[1:], strides[-2::-1]):
            legal = stride * size if extent > 1 else legal
            steps.append(legal)
        long, short = driver.cuuint64_t, driver.cuuint32_t
        box = parameter["box"][::-1]
        swizzle = f"{parameter['swizzle']}B" if parameter["swizzle"] else "NONE"
        kind = "TFLOAT32" if parameter["rounds"] else _MAP_TYPES[parameter["dtype"]]
        head = (
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"), len(extents), 16 if empty else address,
            [long(extent) for extent in extents], [long(step) for step in steps or (16,)],
        )  # fmt: skip
        tail = (
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if parameter["pixels"]:
            lower, upper = self._sizes.values(parameter["lower"], sizes)[::-1], self._sizes.values(parameter["upper"], sizes)[::-1]
            steps_along = [1, *parameter["steps"][::-1], 1]
            if empty:
                lower, upper, steps_along = (0, 0), (0, 0), [1, 1, 1, 1]
            shaped = (list(lower), list(upper), box[0], parameter["pixels"], [short(step) for step in steps_along])
            encoded = _call(driver.cuTensorMapEncodeIm2col, *head, *shaped, *tail)
        else:
            encoded = _call(driver.cuTensorMapEncodeTiled, *head, [short(n) for n in box], [short(1)] * len(box), *tail)
        return ctypes.string_at(encoded.getPtr(), 128)

    def _load(self) -> dict[str, Any]:
        """The kernels in the current context."""
        driver = _driver()
        context = int(_call(driver.cuCtxGetCurrent))
        if not context:
            device = _call(driver.cuDeviceGet, 0)
            context_handle = _call(driver.cuDevicePrimaryCtxRetain, device)
            _call(driver.cuCtxSetCurrent, context_handle)
            context = int(context_handle)
        with self._lock:
            if context not in self._functions:
                self._functions[context] = self._load_into(driver)
            return self._functions[context]

    def _load_into(self, driver: Any) -> dict[str, Any]:
        module, problem = None, ""
        for name in self.description["code"]:
            with open(os.path.join(self._folder, name), "rb") as file:
                status, module = driver.cuModuleLoadData(file.read() + b"\0")
            if int(status) == 0:
                break
            problem = f"{name} ({driver.cuGetErrorName(status)[1].decode()})"
        else:
            raise RuntimeError(f"the driver takes neither file of {self.description['name']} for {self.description['target']}: {problem}")
        functions = {}
        for launch in self.description["launches"]:
            function = functions[launch["entry"]] = _call(driver.cuModuleGetFunction, module, launch["entry"].encode())
            if launch["shared"] > 48 << 10:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _call(driver.cuFuncSetAttribute, function, attribute, launch["shared"])
            if launch["cluster"] > 8:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                _call(driver.cuFuncSetAttribute, function, attribute, 1)
        return functions


def _driver() -> Any:
    from cuda.bindings import driver

    driver.cuInit(0)
    return driver


def _resident(driver: Any, function: Any, launch: Mapping[str, Any]) -> int:
    """How many blocks of a kernel the device of the current context runs at once."""
    blocks = _call(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor, function, launch["threads"], launch["shared"])
    count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return max(1, int(blocks) * int(_call(driver.cuDeviceGetAttribute, count, _call(driver.cuCtxGetDevice))))


def _call(function: Any, *arguments: Any) -> Any:
    from cuda.bindings import driver

    status, *results = function(*arguments)
    if int(status) == _OUT_OF_MEMORY:
        raise MemoryError(f"{function.__name__}: the GPU has no memory left for scratch arrays")
    if int(status):
        name = driver.cuGetErrorName(status)[1]
        raise RuntimeError(f"{function.__name__} failed with {name.decode() if isinstance(name, bytes) else name}")
    return results[0] if results else None


def _array(name: str, dtype: str, value: Any, written: bool = False) -> CallArguments:
    if type(value).__module__.startswith("torch"):
        if str(value.dtype) != f"torch.{_TORCH[dtype]}":
            raise TypeError(f"'{name}' has elements of type {value.dtype}, but this code takes {dtype}")
        if not value.is_cuda:
            raise TypeError(f"'{name}' is on {value.device}, not on a GPU")
        pointer = checked_pointer(name, value.data_ptr(), value.shape, itemsize(dtype))
        return CallArguments(pointer, tuple(value.shape), tuple(value.stride()), value)
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"'{name}' is a {type(value).__name__}, not an array on a GPU")
    return from_interface(name, dtype, interface, value, written)


def _empty(inputs: tuple[Any, ...], dtype: str, shape: tuple[int, ...]) -> Any:
    for value in inputs:
        package = type(value).__module__.partition(".")[0]
        if package == "torch" and hasattr(value, "new_empty"):
            import torch

            return value.new_empty(shape, dtype=getattr(torch, _TORCH[dtype]))
        if package == "cupy":
            import cupy

            return cupy.empty(shape, _TORCH[dtype])
    raise TypeError("out= is needed: only PyTorch tensors and CuPy arrays are made here")
