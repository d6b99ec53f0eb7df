"""Other libraries whose arrays kernels take: which one an array is of, its current stream, and new arrays of it.

In: arguments of a call; out: a `Library`, or None where all arrays are ours. Nothing here imports a library: an array of it
can only be there when its owner did.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.device_memory import stream_handle

TORCH_NAMES = {
    "bool": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}  # fmt: skip


class Library(Protocol):
    """A library with arrays on CUDA devices."""

    name: str

    def stream(self, ordinal: int) -> int:
        """The handle of its current stream on a device."""

    def maker(self, shape: tuple[int, ...], dtype: DType, ordinal: int) -> Callable[[], Any] | None:
        """What makes new row-major arrays, good for work on its current stream; None where it has no such dtype."""

    def memory(self, nbytes: int, ordinal: int) -> tuple[int, object]:
        """The address of new memory, good for work on its current stream until the second item is dropped."""

    def adopt(self, array: DeviceArray) -> Any:
        """An array of the library in the memory of one of ours, which it keeps."""


class Torch:
    name = "torch"

    def __init__(self) -> None:
        self.module: Any = sys.modules["torch"]

    def stream(self, ordinal: int) -> int:
        return stream_handle(int(self.module.cuda.current_stream(ordinal).cuda_stream))

    def maker(self, shape: tuple[int, ...], dtype: DType, ordinal: int) -> Callable[[], Any] | None:
        found = getattr(self.module, TORCH_NAMES.get(dtype.name, ""), None)
        if found is None:
            return None
        return functools.partial(self.module.empty, shape, dtype=found, device=self.module.device("cuda", ordinal))

    def memory(self, nbytes: int, ordinal: int) -> tuple[int, object]:
        made = self.module.empty(nbytes, dtype=self.module.uint8, device=self.module.device("cuda", ordinal))
        return made.data_ptr(), made

    def adopt(self, array: DeviceArray) -> Any:
        return self.module.from_dlpack(array)


class Cupy:
    name = "cupy"

    def __init__(self) -> None:
        self.module: Any = sys.modules["cupy"]

    def stream(self, ordinal: int) -> int:
        with self.module.cuda.Device(ordinal):
            return stream_handle(int(self.module.cuda.get_current_stream().ptr))

    def maker(self, shape: tuple[int, ...], dtype: DType, ordinal: int) -> Callable[[], Any] | None:
        if dtype.name in ("bf16", "f8e4m3", "f8e5m2") or dtype.kind == "q":
            return None

        def make() -> Any:
            with self.module.cuda.Device(ordinal):
                return self.module.empty(shape, dtype.numpy)

        return make

    def memory(self, nbytes: int, ordinal: int) -> tuple[int, object]:
        with self.module.cuda.Device(ordinal):
            made = self.module.cuda.alloc(nbytes)
        return int(made.ptr), made

    def adopt(self, array: DeviceArray) -> Any:
        return self.module.from_dlpack(array)


def library_of(values: Iterable[object]) -> Library | None:
    """The library of the first array that is not ours."""
    for value in values:
        if is_tensor(value):
            if value.is_cuda:  # type: ignore[attr-defined]
                return Torch()
        elif type(value).__module__.partition(".")[0] == "cupy" and hasattr(value, "__cuda_array_interface__"):
            return Cupy()
    return None


def is_foreign(value: object) -> bool:
    """Whether it is an array of another library on a GPU."""
    if is_tensor(value):
        return bool(value.is_cuda)  # type: ignore[attr-defined]
    try:
        return not isinstance(value, np.ndarray | DeviceArray) and hasattr(value, "__cuda_array_interface__")
    except RuntimeError:
        return True  # PyTorch's way to say that a tensor cannot be shared as it is; reading it says why


def foreign_device(value: object) -> str:
    """The device that an array of another library is on."""
    index = getattr(getattr(value, "device", None), "index", None)
    return f"cuda:{index if isinstance(index, int) else 0}"


def foreign_span(value: object) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, int] | None:
    """Address, shape, strides in bytes and bytes of an element of an array on a GPU; None where it has no addresses there."""
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    return interface["data"][0], interface["shape"], interface.get("strides"), np.dtype(interface["typestr"]).itemsize


def foreign_stream(stream: object) -> tuple[int, str | None]:
    """The driver's handle of a stream of another library, and the device it is on where it tells."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream, None
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):  # PyTorch
        index = getattr(stream, "device_index", None)
        return handle, f"cuda:{index}" if isinstance(index, int) else None
    handle = getattr(stream, "ptr", None)
    if isinstance(handle, int):  # CuPy
        index = getattr(stream, "device_id", -1)
        return handle, f"cuda:{index}" if isinstance(index, int) and index >= 0 else None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version == 0:
            return int(handle), None
    raise UserError.at(
        "TW009", f"a {type(stream).__name__} is not a stream", help="give a tw.Stream, a stream of PyTorch or CuPy, or its handle"
    )


class SharedStream:
    """A stream of ours as other libraries take it."""

    handle: int
    device: str
    is_shared: bool
    """Whether it is one of the driver that those libraries use."""

    @property
    def __cuda_stream__(self) -> object:
        """`(0, handle)`, by a call."""
        if not self.is_shared:
            raise AttributeError(f"the stream is one of '{self.device}', not of a GPU")
        return lambda: (0, self.handle)


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of PyTorch, or of a class made from it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def is_array(value: object) -> bool:
    """Whether it shares its memory by one of the protocols for that."""
    return hasattr(value, "__cuda_array_interface__") or hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")


def range_marks() -> Any:
    """Functions that open and close a range in a profiler's timeline: of the package `nvtx`, or of PyTorch."""
    try:
        import nvtx  # type: ignore[import-not-found]
    except ImportError:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise UserError.at("TW030", "there is nothing to mark ranges with", help="pip install nvtx, or import torch first") from None
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    return nvtx.push_range, nvtx.pop_range
