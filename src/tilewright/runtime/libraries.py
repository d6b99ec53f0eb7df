"""Other libraries whose arrays kernels take: which one an array is of, its current stream, and new arrays of it.

In: arguments of a call; out: a `Library`, or None where all arrays are ours. Nothing here imports a library: an array of it
can only be there when its owner did.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.base.dtypes import DType
from tilewright.runtime.device_memory import stream_handle

if TYPE_CHECKING:
    from tilewright.runtime.device_array import DeviceArray

_TORCH_NAMES = {
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
        found = getattr(self.module, _TORCH_NAMES.get(dtype.name, ""), None)
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


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of PyTorch, or of a class made from it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def is_array(value: object) -> bool:
    """Whether it shares its memory by one of the protocols for that."""
    return hasattr(value, "__cuda_array_interface__") or hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")
