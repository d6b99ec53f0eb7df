"""Tensors of other libraries as arrays, without a copy. In: an object with DLPack; out: a `DeviceArray`, or a NumPy array on the host.

Libraries that offer DLPack's exchange functions (a table of C functions on the type, PyTorch since 2.10) are asked through them, by
machine code: the type is looked up, and all the rest of the import happens without a line of Python. Others make a capsule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base import memory_abi as abi
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.core import streams
from tilewright.runtime.exchange import dlpack
from tilewright.runtime.exchange.torch_tensors import tensor_access
from tilewright.runtime.memory import native_memory
from tilewright.runtime.memory.array_views import reach
from tilewright.runtime.memory.device_array import DeviceArray, row_major
from tilewright.runtime.memory.device_memory import MemoryBlock

if TYPE_CHECKING:
    from tilewright.runtime.cuda.device import CudaDevice

_CAPSULE = b"dlpack_exchange_api"
_FUNCTIONS = 16
"""Bytes of the table's header: version and an older table. Then come its functions."""
_TENSOR_READER, _STREAM_READER = 3, 4

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class _Table:
    """The types machine code knows, and what it makes of their tensors."""

    def __init__(self) -> None:
        self.words = native_memory.code().imports
        self.known: list[type] = []
        self.devices: list[CudaDevice] = []
        self._dtypes = native_memory.MemoryWords(16 * (len(dlpack.CODES) + 1))
        for number, (code, dtype) in enumerate(dlpack.CODES.items()):
            self._dtypes[16 * number], self._dtypes[16 * number + 8] = code, id(dtype)
        self.words[abi.IMPORT_DTYPES] = self._dtypes.address
        self._objects = native_memory.MemoryWords(8)
        self.wrap: Callable[[object], DeviceArray | None] = native_memory.code().function("wrap", None)

    def set_devices(self, devices: list[CudaDevice]) -> None:
        if devices == self.devices:
            return
        self.words[abi.IMPORT_DEVICE_COUNT] = 0
        objects = native_memory.MemoryWords(8 * max(1, len(devices)))
        for number, device in enumerate(devices):
            objects[8 * number] = id(device)
        self.devices, self._objects = devices, objects
        self.words[abi.IMPORT_DEVICES] = objects.address
        self.words[abi.IMPORT_DEVICE_COUNT] = len(devices)

    def add(self, kind: type) -> bool:
        """Let machine code know a type; False where it has no exchange functions or there is no room."""
        functions, getter = exchange_functions(kind), _gradient_getter(kind)
        if functions is None or getter is None or len(self.known) == abi.MOST_TYPES:
            return False
        at = abi.IMPORT_TYPES + 32 * len(self.known)
        self.known.append(kind)
        self.words[at + 8], self.words[at + 16] = functions
        self.words[at + 24] = getter
        # The type last: it makes the entry count.
        self.words[at] = id(kind)
        return True


def exchange_functions(kind: type) -> tuple[int, int] | None:
    """Addresses of the functions that describe a tensor and tell the current stream; None where the type has none of version 1."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    try:
        address = _capsule_pointer(capsule, _CAPSULE)
    except (ValueError, TypeError):
        return None
    while address:
        major = ctypes.c_uint32.from_address(address).value
        if major == 1:
            functions = (ctypes.c_uint64 * 5).from_address(address + _FUNCTIONS)
            found = functions[_TENSOR_READER], functions[_STREAM_READER]
            return found if all(found) else None
        address = ctypes.c_uint64.from_address(address + 8).value
    return None


def _gradient_getter(kind: type) -> int | None:
    """The C function that tells whether a tensor needs gradients; 0 where the type knows of none, None where it cannot be called."""
    if not hasattr(kind, "requires_grad"):
        return 0
    access = tensor_access()
    return access.functions["tilewright_requires_grad"] if access is not None and access.type is kind else None


_table: _Table | None = None
_asked: set[type] = set()


def from_dlpack(item: Any) -> DeviceArray | np.ndarray:
    """The tensor's memory as an array of this library: on a CUDA device a `DeviceArray`, on the host a NumPy array.

    Work of this thread on the array comes after what its producer has queued. The array keeps the tensor alive.
    """
    if _table is not None:
        found = _table.wrap(item)
        if found is not None:
            if not found.pointer and found.size:
                raise UserError.at("TW009", f"a tensor of shape {list(found.shape)} has no memory")
            return found
    return _general(item)


def _general(item: Any) -> DeviceArray | np.ndarray:
    if isinstance(item, DeviceArray | np.ndarray):
        return item
    ask = getattr(item, "__dlpack_device__", None)
    if ask is None or not hasattr(item, "__dlpack__"):
        raise UserError.at(
            "TW009", f"a {type(item).__name__} has no __dlpack__", help="pass a tensor of PyTorch, CuPy, JAX, NumPy or any library with DLPack"
        )
    if getattr(item, "requires_grad", False) is True:
        raise UserError.at("TW009", "a tensor that needs gradients cannot be shared", help="share tensor.detach()")
    try:
        kind, number = (int(part) for part in ask())
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        raise UserError.at("TW009", f"a {type(item).__name__} cannot be shared: {error}") from error
    if kind in (dlpack.CPU, dlpack.CUDA_HOST):
        taken = _take(item, None)
        if taken.device[0] not in (dlpack.CPU, dlpack.CUDA_HOST):
            raise UserError.at("TW009", f"a {type(item).__name__} says it is on the host, but its memory is of DLPack's kind {taken.device[0]}")
        return _on_host(taken)
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise UserError.at("TW009", f"a tensor on a device of DLPack's kind {kind} cannot be shared", help="move it to a CUDA device or the host")
    device = _device(number)
    if type(item) not in _asked:
        _asked.add(type(item))
        if _register(type(item)) and _table is not None:
            found = _table.wrap(item)
            if found is not None:
                return found
    stream = streams.current(number) or 0
    taken = _take(item, stream or 1)
    block = MemoryBlock(taken.pointer, 0, stream, None, taken.keep, taken.pointer if kind == dlpack.CUDA_MANAGED else 0)
    strides = row_major(taken.shape) if taken.strides is None else taken.strides
    return DeviceArray(device, taken.pointer, taken.shape, taken.dtype, strides, block, item, taken.readonly)


def _register(kind: type) -> bool:
    global _table
    if not native_memory.available():
        return False
    if _table is None:
        _table = _Table()
    from tilewright.runtime.cuda import device as cuda

    _table.set_devices(cuda.devices())
    return _table.add(kind)


def _device(number: int) -> CudaDevice:
    from tilewright.runtime.cuda import device as cuda

    found = cuda.devices()
    if number >= len(found):
        raise DeviceError.at("TW030", f"the tensor is on cuda:{number}, but {cuda.unavailable_reason() or f'there are {len(found)} devices'}")
    return found[number]


def _take(item: Any, stream: int | None) -> dlpack.Imported:
    """The tensor through a capsule, in the newest form its library has."""
    on_device = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = item.__dlpack__(**on_device, max_version=dlpack.VERSION)
        except TypeError:
            capsule = item.__dlpack__(**on_device)
    except (BufferError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UserError.at("TW009", f"a {type(item).__name__} cannot be shared: {error}") from error
    return dlpack.take_over(capsule)


class _Memory:
    """Host memory of another library as NumPy sees it."""

    def __init__(self, taken: dlpack.Imported, address: int, nbytes: int) -> None:
        self.taken = taken
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, taken.readonly)}


def _on_host(taken: dlpack.Imported) -> np.ndarray:
    dtype = taken.dtype.numpy
    if 0 in taken.shape:
        return np.empty(taken.shape, dtype)
    strides = row_major(taken.shape) if taken.strides is None else taken.strides
    low, high = reach(taken.shape, strides)
    size = dtype.itemsize
    raw = np.asarray(_Memory(taken, taken.pointer + low * size, (high - low) * size))
    return np.ndarray(taken.shape, dtype, raw, -low * size, tuple(step * size for step in strides))


def forget() -> None:
    """Ask libraries and devices anew: the devices of the process changed."""
    global _table
    if _table is not None:
        _table.set_devices([])
        _table = None
    _asked.clear()
