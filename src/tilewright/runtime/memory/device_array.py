"""Arrays in device memory, and the devices that have such memory.

In: a `Buffer` of a device's memory and an offset in it, or a foreign object that lends its pointer; out: a `DeviceArray`, with shape,
strides (in elements, as everywhere in Tilewright) and dtype. Views share the buffer; the memory is reused when the last of them is
dropped or `free` is called, and using a freed array is an error. `ArrayDevice` is what a device must do for its arrays. A copy to or from the host waits for the streams known to use the block; what happens on the device
(`copy`, `fill`, assignment to a part) is queued on the stream that is current on the thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from tilewright.base import dtypes, memory_abi
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError, public
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import Buffer, DeviceEvent, DeviceRuntime, Transfer
from tilewright.runtime.exchange import dlpack
from tilewright.runtime.memory import array_views
from tilewright.runtime.memory.device_memory import HOST, MemoryPool, stream_handle

Index = int | slice | None | EllipsisType
Number = int | float | bool | complex


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Contiguous strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class ArrayForm:
    """All of an array but its address. Arrays of the same form share the object while it is remembered, so machine code that has
    seen the object knows the form; two objects may be equal, which costs a look and no more."""

    __slots__ = ("dtype", "ordinal", "shape", "strides")

    def __init__(self, ordinal: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> None:
        self.ordinal, self.shape, self.strides, self.dtype = ordinal, shape, strides, dtype


_SPARSE = 1 << 20
"""Bytes a view with gaps reaches over from which on it is packed on the device before it is copied to the host."""
_FORMS_KEPT = 4096
_forms: dict[tuple[int, tuple[int, ...], tuple[int, ...], DType], ArrayForm] = {}


def array_form(array: DeviceArray) -> ArrayForm:
    """The form of an array, from now on in its slot."""
    if array.form is None:
        key = array.device.ordinal, array.shape, array.strides, array.dtype
        found = _forms.get(key)
        if found is None:
            if len(_forms) >= _FORMS_KEPT:
                _forms.clear()
            found = _forms.setdefault(key, ArrayForm(*key))
        array.form = found
    return array.form


class DeviceArray:
    """An array on a device. `owner` keeps its memory alive: a `Buffer`, with the foreign object behind it where there is one."""

    # Machine code makes these objects (`codegen.host.allocator`), and that of `runtime.cuda.launcher` reads `_pointer`, `form`, `owner` and
    # `readonly`. What `form` describes never changes.
    __slots__ = memory_abi.ARRAY_SLOTS

    _pointer: int
    """Where its first element is: `owner.base` and the offset in it."""
    base: object
    device: ArrayDevice
    dtype: DType
    form: ArrayForm | None
    owner: Buffer
    readonly: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __init__(
        self,
        device: ArrayDevice,
        pointer: int,
        shape: tuple[int, ...],
        dtype: DType,
        strides: tuple[int, ...] | None,
        owner: Buffer,
        base: object = None,
        readonly: bool = False,
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self.strides = row_major(shape) if strides is None else strides
        self.owner = owner
        self.base = base
        self.readonly = readonly
        self._pointer = pointer
        self.form = None

    # -- asking -------------------------------------------------------------------------------------------------

    @classmethod
    def at(cls, device: ArrayDevice, buffer: Buffer, offset: int, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """A row-major array `offset` bytes behind the start of a buffer."""
        return cls(device, buffer.base + offset, shape, dtype, None, buffer)

    @property
    def offset(self) -> int:
        """Bytes from the start of its buffer to its first element."""
        return self._pointer - self.owner.base

    @property
    def pointer(self) -> int:
        """Address of the first element, on devices that have addresses."""
        self.check_usable()
        if not self.owner.has_addresses:
            raise DeviceError.at("TW033", f"the {self.form_text()} array on {self.device.label} has no address")
        return self._pointer

    def check_usable(self) -> None:
        """Raise the error for an array that was freed."""
        if self.owner.freed:
            place = f" (allocated at {self.owner.trace})" if self.owner.trace else ""
            raise DeviceError.at(
                "TW033",
                f"the {self.form_text()} array on {self.device.label} was used after it was freed{place}",
                help="drop the call of free(), or use the array before it",
            )

    def is_aligned(self, nbytes: int) -> bool:
        """Whether its first element lies at a multiple of so many bytes (buffers begin at multiples of 256)."""
        self.check_usable()
        return not self._pointer % nbytes

    def overlaps(self, other: DeviceArray) -> bool:
        """Whether the memory that both reach meets."""
        if not self.size or not other.size:
            return False
        self.check_usable()
        other.check_usable()
        if self.owner is not other.owner and not (self.owner.has_addresses and other.owner.has_addresses):
            return False
        (low, high), (other_low, other_high) = self.reach(), other.reach()
        return self._pointer + low < other._pointer + other_high and other._pointer + other_low < self._pointer + high

    def is_same(self, other: DeviceArray) -> bool:
        """Whether it has the very elements of another array of the device."""
        place = self.owner is other.owner or (self.owner.has_addresses and other.owner.has_addresses)
        return place and (self._pointer, self.shape, self.strides) == (other._pointer, other.shape, other.strides)

    def launch_pointer(self, stream: int) -> int:
        """The address for a kernel on `stream`; the block is noted as used there."""
        if streams.recorders and stream in streams.recorders:
            streams.recorders[stream].use(self, stream)
        else:
            self.owner.use_on(stream)
        return self.pointer

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps; extents of one and empty arrays never break that."""
        if not self.size:
            return True
        expected = row_major(self.shape)
        return all(n == 1 or s == e for n, s, e in zip(self.shape, self.strides, expected))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __iter__(self) -> Iterator[DeviceArray]:
        raise UserError.at(
            "TW005", f"an array on {self.device.label} is not walked element by element", help="walk array.numpy(), or index it"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of rank 0 has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        state = ", freed" if self.owner.freed else ""
        return f"DeviceArray({self.form_text()}, {self.device.label}{state})"

    def form_text(self) -> str:
        """Dtype and shape, as in messages."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    # -- host copies --------------------------------------------------------------------------------------------

    def numpy(self) -> np.ndarray:
        """A copy on the host, in C order."""
        return self.to_host()

    @public
    def to_host(self, out: np.ndarray | None = None) -> np.ndarray:
        """A copy on the host: in `out`, or in a new array in C order."""
        self.check_usable()
        if out is None:
            out = np.empty(self.shape, self.dtype.numpy)
        else:
            self.check_values(out, writing=False)
            if not out.flags.writeable:
                raise UserError.at("TW018", "out= is read-only")
        if not self.size:
            return out
        low, high = self._reach()
        itemsize = self.dtype.itemsize
        if not self.is_contiguous and (high - low) * itemsize >= _SPARSE and high - low > 4 * self.size:
            return self.copy().to_host(out)
        if self.is_contiguous and out.flags.c_contiguous:
            self.device.read(self, out)
            return out
        raw = np.empty((high - low) * itemsize, np.uint8)
        self.device.read(DeviceArray(self.device, self._pointer + low * itemsize, raw.shape, dtypes.u8, None, self.owner), raw)
        strides = tuple(s * itemsize for s in self.strides)
        out[...] = np.ndarray(self.shape, self.dtype.numpy, raw, -low * itemsize, strides)
        return out

    def check_values(self, values: np.ndarray, writing: bool = True) -> None:
        """UserError unless host values have this shape and dtype; with `writing`, also where the array is read-only."""
        if writing:
            self._check_writable()
        if values.shape != self.shape:
            raise UserError.at("TW004", f"cannot copy values of shape {values.shape} to an array of shape {self.shape}")
        if values.dtype != self.dtype.numpy:
            raise UserError.at("TW009", f"cannot copy values of {values.dtype} to an array of {self.dtype}")

    def _check_writable(self) -> None:
        if self.readonly:
            raise DeviceError.at("TW033", f"the {self.form_text()} array on {self.device.label} is read-only")

    @public
    def copy_from(self, values: np.ndarray) -> None:
        """Overwrite it with host values of the same shape and dtype."""
        self.check_values(values)
        self.check_usable()
        if not self.size:
            return
        if not self.is_contiguous:
            # The gaps belong to others, so the values go to memory of their own first.
            landed = self.device.empty(self.shape, self.dtype, self._stream())
            landed.copy_from(values)
            self.device.copy(self, landed, self._stream())
            return
        self.device.write(self, np.ascontiguousarray(values))

    def host(self) -> np.ndarray:
        """The very memory as a NumPy array, where the host sees it (managed, pinned). Waits for the streams that use it."""
        if not self.owner.host:
            raise UserError.at(
                "TW033", f"the host does not see the memory of the {self.form_text()} array on {self.device.label}",
                help="copy it with numpy(), or allocate it with managed=True",
            )  # fmt: skip
        self.check_usable()
        for stream in self.streams():
            self.device.wait_for(stream)
        return array_views.host_view(self.owner, self.offset, self.shape, self.strides, self.dtype, self.readonly)

    def on_host(self) -> np.ndarray:
        """For code on the host: the memory itself where the host sees it, else a copy."""
        return self.host() if self.owner.host else self.to_host()

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            if not self.owner.host or dtype not in (None, self.dtype.numpy):
                raise ValueError("an array on a device cannot be read by NumPy without a copy")
            return self.host()
        result = self.numpy()
        return result if dtype is None else result.astype(dtype, copy=False)

    @public
    def item(self) -> Number:
        """The element of an array that has one."""
        if self.size != 1:
            raise UserError.at("TW003", f"item() of an array of shape {self.shape}, which has {self.size} elements")
        value: Number = self.to_host().reshape(()).item()
        return value

    def tolist(self) -> Any:
        """The elements as Python numbers in nested lists."""
        return self.to_host().tolist()

    # -- on the device ------------------------------------------------------------------------------------------

    def _stream(self) -> int:
        """Where work of this thread on the array goes."""
        return streams.current(self.device.ordinal) or 0

    def copy(self) -> DeviceArray:
        """A copy on the same device, in C order."""
        made = self.device.empty(self.shape, self.dtype, self._stream())
        self.device.copy(made, self, self._stream())
        return made

    @public
    def astype(self, dtype: DType, copy: bool = True) -> DeviceArray:
        """The elements converted, in a new array in C order; with `copy=False` the array itself where it has that dtype."""
        if dtype is self.dtype:
            return self.copy() if copy else self
        if _convert is None or not isinstance(dtype, DType) or "q" in (dtype.kind, self.dtype.kind):
            raise UserError.at("TW009", f"an array of {self.dtype} cannot be converted to {dtype}")
        whole = self if self.is_contiguous else self.copy()
        return _convert(whole.reshape(self.size), dtype).reshape(*self.shape)

    @public
    def fill(self, value: Number) -> None:
        """Set every element."""
        self._check_writable()
        element = array_views.element(value, self.dtype)
        self.check_usable()
        stream = self._stream()
        if not self.size:
            return
        pattern = element.tobytes()
        if len(set(pattern)) == 1:
            pattern = pattern[:1]
        if self.is_contiguous and len(pattern) in (1, 2, 4):
            self.owner.use_on(stream)
            self.device.fill(self, pattern, stream)
            return
        one = self.device.empty((1,) if self.shape else (), self.dtype, stream)
        one.copy_from(element.reshape(one.shape))
        self.device.copy(self, one.broadcast_to(self.shape), stream)

    @public
    def __setitem__(self, index: Index | tuple[Index, ...], value: object) -> None:
        self._check_writable()
        view = self[index]
        if isinstance(value, DeviceArray):
            view.assign(value)
        elif isinstance(value, bool | int | float | complex | np.generic):
            view.fill(value)  # type: ignore[arg-type]
        elif isinstance(value, np.ndarray | list | tuple):
            view.copy_from(array_views.fitting(value, view.shape, view.dtype))
        elif hasattr(value, "__cuda_array_interface__"):
            view.assign(self.device.wrap(value, self._stream()))
        else:
            raise UserError.at("TW009", f"a {type(value).__name__} cannot be assigned to a part of an array")

    def assign(self, values: DeviceArray) -> None:
        """Overwrite it with the elements of another device array, which may be smaller along axes of extent 1."""
        self._check_writable()
        if dtypes.loses(values.dtype, self.dtype):
            raise UserError.at(
                "TW006", f"assigning {values.dtype} to an array of {self.dtype} would lose data", help="convert it with .astype(...)"
            )
        source = values.astype(self.dtype, copy=False)
        if source.device is self.device and source.owner is self.owner and not source.is_same(self) and source.overlaps(self):
            source = source.copy()
        if source.device is not self.device and source.shape != self.shape:
            moved = self.device.empty(source.shape, source.dtype, self._stream())
            self.device.copy(moved, source, self._stream())
            source = moved
        self.device.copy(self, source.broadcast_to(self.shape), self._stream())

    def streams(self) -> tuple[int, ...]:
        """The streams known to use its memory, its home first."""
        return (self.owner.stream, *self.owner.users)

    def _reach(self) -> tuple[int, int]:
        return array_views.reach(self.shape, self.strides)

    def reach(self) -> tuple[int, int]:
        """First byte and the one after the last that its elements touch, relative to the pointer; equal when there are none."""
        low, high = self._reach() if self.size else (0, 0)
        return low * self.dtype.itemsize, high * self.dtype.itemsize

    # -- views --------------------------------------------------------------------------------------------------

    def parts(self) -> DeviceArray:
        """A complex array as one of floats in the same memory, with one more axis of extent 2."""
        assert self.dtype.is_complex
        strides = (*(2 * step for step in self.strides), 1)
        return DeviceArray(self.device, self._pointer, (*self.shape, 2), self.dtype.part, strides, self.owner, self.base, self.readonly)

    def paired(self, dtype: DType) -> DeviceArray:
        """The other way round: an array of the parts of complex numbers, which lie side by side, as an array of those."""
        assert dtype.is_complex and self.dtype is dtype.part and self.shape[-1] == 2 and self.strides[-1] == 1
        strides = tuple(step // 2 for step in self.strides[:-1])
        return DeviceArray(self.device, self._pointer, self.shape[:-1], dtype, strides, self.owner, self.base, self.readonly)

    def _view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        self.check_usable()
        return DeviceArray(self.device, self._pointer + offset * self.dtype.itemsize, shape, self.dtype, strides, self.owner, self.base, self.readonly)

    def strided(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        """Elements of the same memory: the first one and steps in elements, which must stay inside."""
        return self._view(offset, shape, strides)

    @public
    def __getitem__(self, index: Index | tuple[Index, ...]) -> DeviceArray:
        return self._view(*array_views.index(self.shape, self.strides, index))

    def permute(self, *axes: int) -> DeviceArray:
        """The axes in the given order; negative ones count from the end."""
        return self.transpose(*(axis + self.ndim if -self.ndim <= axis < 0 else axis for axis in axes))

    @public
    def broadcast_to(self, shape: Sequence[int]) -> DeviceArray:
        """A view of a larger shape that repeats elements along axes of extent 1 and new ones in front; it is read-only."""
        view = self._view(0, tuple(shape), array_views.broadcast(self.shape, self.strides, tuple(shape)))
        view.readonly = True
        return view

    @public
    def transpose(self, *axes: int) -> DeviceArray:
        """The axes reversed, or in the given order."""
        order = axes or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise UserError.at("TW003", f"axes {order} are not an order of the {self.ndim} axes of the array")
        return self._view(0, tuple(self.shape[a] for a in order), tuple(self.strides[a] for a in order))

    @property
    def T(self) -> DeviceArray:
        return self.transpose()

    @public
    def reshape(self, *shape: int | tuple[int, ...]) -> DeviceArray:
        """Another shape of the same elements; one extent may be -1. Never copies: the strides must allow it."""
        return self._view(0, *array_views.reshape(self.shape, self.strides, shape))

    def ravel(self) -> DeviceArray:
        """The elements along one axis."""
        return self.reshape(-1)

    # -- lifetime and exchange ----------------------------------------------------------------------------------

    def to_device(self, device: str, copy: bool | None = None) -> Any:
        """The array on another device (`cpu`: as a NumPy array). `copy=True` always copies, `copy=False` never does."""
        if _move is None:
            raise UserError.at("TW005", "arrays are moved by tilewright.to_device, which is not loaded")
        return _move(self, device, copy)

    def free(self) -> None:
        """Give the memory back now, for all views of it. Kernels already launched still run to their end."""
        self.owner.free()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        if not self.device.shares_with_libraries:
            raise AttributeError(f"arrays on {self.device.label} have no __cuda_array_interface__")
        itemsize = self.dtype.itemsize
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.pointer if self.size else 0, self.readonly),
            "strides": None if self.is_contiguous else tuple(s * itemsize for s in self.strides),
            "stream": 1 if self.owner.recent == HOST else self.owner.recent or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device.dlpack_device()

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on {self.device.label} and is shared there alone; use numpy() for a host copy")
        if copy:
            raise BufferError("DLPack export of a device array shares memory and makes no copy")
        versioned = max_version is not None and max_version[0] >= 1
        if self.readonly and not versioned:
            raise BufferError("a read-only array cannot be shared through DLPack before version 1")
        pointer = self.pointer
        if stream != -1:
            consumer = stream_handle(stream or 0)
            for producer in self.streams():
                if producer not in (consumer, HOST):
                    self.device.order(consumer, producer)
            self.owner.use_on(consumer)
        form = (pointer, self.shape, self.strides, self.dtype)
        return dlpack.export(self.owner, *form, self.__dlpack_device__(), versioned, self.readonly)


class ArrayDevice(DeviceRuntime):
    """A device with memory and streams of its own.

    What is abstract here and in `DeviceRuntime` is all that a device must have. The rest has a default that works, or that refuses
    with a message.
    """

    ordinal: int
    """A number no other device of the process has (`new_ordinal`)."""
    shares_with_libraries = False
    """Whether libraries for GPUs take its arrays and streams (`__cuda_array_interface__`)."""
    writes_pinned = False
    """Whether kernels reach page-locked memory of the host (`empty_pinned`) at the addresses that the host uses."""

    # -- memory -------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        """A new row-major array with undefined contents, for work on `stream`."""

    @abstractmethod
    def read(self, array: DeviceArray, out: np.ndarray) -> None:
        """Copy a contiguous array to contiguous host memory of as many bytes, after the work queued on `array.streams()`; waits."""

    @abstractmethod
    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        """Copy contiguous host memory to a contiguous array of as many bytes, after the work queued on `array.streams()`; waits."""

    @abstractmethod
    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        """Device to device, in stream order: arrays of one shape and dtype, with any strides, that do not overlap in part. The source
        may be on another device: its work is waited for."""

    @abstractmethod
    def fill(self, array: DeviceArray, pattern: bytes, stream: int) -> None:
        """Repeat 1, 2 or 4 bytes over a contiguous array, in stream order."""

    @abstractmethod
    def copy_in_async(self, target: DeviceArray, source: np.ndarray, stream: int = 0) -> Transfer:
        """Host to device in stream order, without waiting."""

    @abstractmethod
    def copy_out_async(self, target: np.ndarray, source: DeviceArray, stream: int = 0) -> Transfer:
        """Device to host in stream order, without waiting."""

    def from_numpy(self, values: np.ndarray, dtype: DType | None = None, stream: int = 0) -> DeviceArray:
        """A copy of a host array. `dtype` is needed only where NumPy's does not tell (packed blocks)."""
        array = self.empty(values.shape, known_dtype(values, dtype), stream)
        array.copy_from(values)
        return array

    def share(self, values: np.ndarray, dtype: DType | None = None) -> DeviceArray:
        """A host array as the device sees it, without a copy."""
        raise UserError.at("TW033", f"{self.label} does not see host memory", help="drop copy=False")

    def wrap(self, item: object, stream: int = 0) -> DeviceArray:
        """An array that is on this device, of ours or of another library, without a copy; work on `stream` waits for its producer."""
        if not isinstance(item, DeviceArray):
            raise UserError.at("TW009", f"a {type(item).__name__} is not an array on {self.label}", help=f"copy it: tw.to_device(x, '{self.id}')")
        if item.device is not self:
            raise DeviceError.at("TW033", f"the array is on {item.device.label}, but was given to {self.label}")
        return item

    def library(self, values: Iterable[object]) -> Any:
        """The library (`runtime/exchange/libraries.py`) whose arrays are among `values`, where it shares this device."""
        return None

    def dlpack_device(self) -> tuple[int, int]:
        """What DLPack calls it."""
        raise BufferError(f"arrays on {self.label} are not shared through DLPack; use numpy() for a host copy")

    def empty_pinned(self, shape: Sequence[int], dtype: DType) -> np.ndarray:
        """A new NumPy array in host memory that the device reaches by itself."""
        raise UserError.at("TW030", f"{self.label} has no pinned memory")

    def empty_managed(self, shape: Sequence[int], dtype: DType) -> DeviceArray:
        """A new array that host and device both see."""
        raise UserError.at("TW030", f"{self.label} has no managed memory")

    def registered(self, values: np.ndarray) -> Any:
        """A context manager inside which the device reaches a NumPy array's memory by itself."""
        raise UserError.at("TW030", f"{self.label} has no pinned memory")

    # -- pools --------------------------------------------------------------------------------------------------

    def default_pool(self) -> MemoryPool:
        """Where its arrays come from."""
        raise UserError.at("TW030", f"{self.label} has no memory pools")

    def new_pool(self, limit: int | None = None, reserve: int | None = None) -> MemoryPool:
        """A pool; `reserve` bytes are set aside for it at once, and it never holds more."""
        raise UserError.at("TW030", f"{self.label} has no memory pools")

    def push_pool(self, pool: MemoryPool) -> None:
        """Arrays of this thread come from `pool` until `pop_pool`."""
        raise UserError.at("TW030", f"{self.label} has no memory pools")

    def pop_pool(self) -> None:
        raise UserError.at("TW030", f"{self.label} has no memory pools")

    def peak_memory(self) -> int:
        """The most bytes its arrays held at once; 0 where that is not known."""
        return 0

    def reset_peak_memory(self) -> None:
        """Count the peak from here on."""
        return

    # -- streams and events -------------------------------------------------------------------------------------

    @abstractmethod
    def take_stream(self, priority: int = 0) -> int:
        """A stream for a while."""

    @abstractmethod
    def return_stream(self, stream: int, priority: int = 0) -> None:
        """Nobody queues work on it any more; what is queued still runs."""

    def priorities(self) -> tuple[int, int]:
        """The least and the greatest urgency a stream can have; numbers fall as urgency grows."""
        return 0, 0

    def checked_stream(self, stream: int) -> int:
        """The stream a number from outside means; raises for what is none."""
        return stream

    @abstractmethod
    def stream_done(self, stream: int) -> bool:
        """Whether all work queued on it is done. Raises what went wrong in it."""

    @abstractmethod
    def wait_for(self, stream: int) -> None:
        """Return when all work queued on the stream is done."""

    @abstractmethod
    def synchronize(self, stream: int | None = None) -> None:
        """Wait for all work, or for that of one stream. Raises what went wrong in it."""

    @abstractmethod
    def order(self, later: int, earlier: int) -> None:
        """Work queued on stream `later` from now on waits for what is queued on `earlier`; the host does not."""

    @abstractmethod
    def hold(self, stream: int, event: Any) -> None:
        """Work queued on `stream` from now on waits for an event of a device of this kind; the host does not."""

    @abstractmethod
    def event(self, timing: bool = False) -> DeviceEvent:
        """A new event."""

    def time(self, function: Callable[[], object], repeats: int = 10, warmup: int = 1, stream: int = 0) -> list[float]:
        """Milliseconds on the device of each of `repeats` calls of `function`, which queues its work on `stream`."""
        for _ in range(warmup):
            function()
        events = [self.event(timing=True) for _ in range(2 * repeats)]
        for start, stop in zip(events[::2], events[1::2]):
            start.record(stream)
            function()
            stop.record(stream)
        self.synchronize(stream)
        return [stop.milliseconds(start) for start, stop in zip(events[::2], events[1::2])]


def known_dtype(values: np.ndarray, dtype: DType | None) -> DType:
    """The dtype of host values; UserError where arrays of a device cannot have it."""
    known = dtype or dtypes.of_array(values.dtype)
    if known is None or known.numpy != values.dtype:
        raise UserError.at("TW009", f"arrays of {values.dtype} are not supported on a device")
    return known


def view_taker(source: DeviceArray, views: Sequence[DeviceArray], several: bool, general: Callable[..., object]) -> Callable[..., object]:
    """What takes the same views of other arrays of a form, without finding out about shapes and strides again: a tuple of them, or where
    there are not `several`, the one. Arrays of another form go to `general`."""
    known = array_form(source)
    made = [(view._pointer - source._pointer, array_form(view)) for view in views]

    def take(array: DeviceArray, *rest: object) -> object:
        if (array.form or array_form(array)) is not known:
            return general(array, *rest)
        found = []
        for offset, form in made:
            view = DeviceArray.__new__(DeviceArray)
            view.device, view.dtype, view.shape, view.strides, view.form = array.device, form.dtype, form.shape, form.strides, form
            view._pointer, view.owner, view.base, view.readonly = array._pointer + offset, array.owner, array.base, array.readonly
            found.append(view)
        return tuple(found) if several else found[0]

    return take


_convert: Callable[[DeviceArray, DType], DeviceArray] | None = None
_move: Callable[[DeviceArray, str, bool | None], Any] | None = None


def provide(convert: Callable[[DeviceArray, DType], DeviceArray], move: Callable[[DeviceArray, str, bool | None], Any]) -> None:
    """Tell arrays who converts their elements (a contiguous array of rank 1 in, a new one out), and who moves them."""
    global _convert, _move
    _convert, _move = convert, move


def foreign_dtype(item: object, typestr: str) -> DType | None:
    """The dtype of another library's array: by its dtype's name where that says more than `typestr` (bf16, float8)."""
    name = str(getattr(item, "dtype", "")).removeprefix("torch.")
    if dtypes.is_name(name):
        return dtypes.by_name(name)
    try:
        known = dtypes.of_array(np.dtype(typestr))
    except TypeError:
        return None
    if known is None and typestr.lstrip("<|>") == "V2":
        return dtypes.bf16
    return known
