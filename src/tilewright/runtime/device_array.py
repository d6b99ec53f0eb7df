"""Arrays in device memory: a pointer with shape, strides and dtype, and its exchange with NumPy and other libraries.

In: a `Block` of device memory, or a foreign object that lends its pointer; out: a `DeviceArray`. Strides are in elements, as
everywhere in Tilewright. Views share the block; the memory is reused when the last of them is dropped or `free` is called, and
using a freed array is an error. A copy to or from the host waits for the streams known to use the block; what happens on the device
(`copy`, `fill`, assignment to a part) is queued on the stream that is current on the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from types import EllipsisType
from typing import Any, Protocol

import numpy as np

from tilewright.base import dtypes, memory_abi
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime import array_views, dlpack, streams
from tilewright.runtime.device_memory import HOST, Block, stream_handle

Index = int | slice | None | EllipsisType
Number = int | float | bool


class ArrayDevice(Protocol):
    """What an array needs of its device."""

    @property
    def ordinal(self) -> int: ...

    @property
    def label(self) -> str: ...

    def empty(self, shape: Sequence[int], dtype: DType, stream: int = 0) -> DeviceArray:
        """A new row-major array for work on `stream`."""

    def is_pinned(self, address: int, nbytes: int, array: np.ndarray | None = None) -> bool:
        """Whether the device reaches host memory by itself."""

    def copy_in(self, pointer: int, host: int, nbytes: int, streams: Iterable[int], pinned: bool = False) -> None:
        """Host to device, after the work queued on `streams`."""

    def copy_out(self, host: int, pointer: int, nbytes: int, streams: Iterable[int], pinned: bool = False) -> None:
        """Device to host, after the work queued on `streams`."""

    def copy(self, target: DeviceArray, source: DeviceArray, stream: int = 0) -> None:
        """Device to device, in stream order."""

    def fill_bytes(self, pointer: int, pattern: bytes, count: int, stream: int) -> None:
        """Set `count` elements of 1, 2 or 4 bytes, in stream order."""

    def wait_for(self, stream: int) -> None:
        """Return when all work queued on the stream is done."""

    def order(self, later: int, earlier: int) -> None:
        """Work queued on stream `later` from now on waits for what is queued on `earlier`."""


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
    """An array on a device. `owner` keeps its memory alive: a `Block`, with the foreign object behind it where there is one."""

    # Machine code makes these objects (`codegen.memory`), and that of `runtime.cuda_launcher` reads `_pointer`, `form`, `owner` and
    # `readonly`. What `form` describes never changes.
    __slots__ = memory_abi.ARRAY_SLOTS

    _pointer: int
    base: object
    device: ArrayDevice
    dtype: DType
    form: ArrayForm | None
    owner: Block
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
        owner: Block,
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

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        if self.owner.freed:
            place = f" (allocated at {self.owner.trace})" if self.owner.trace else ""
            raise DeviceError.at(
                "TW033",
                f"the {self.form_text()} array on {self.device.label} was used after it was freed{place}",
                help="drop the call of free(), or use the array before it",
            )
        return self._pointer

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

    def to_host(self, out: np.ndarray | None = None) -> np.ndarray:
        """A copy on the host: in `out`, or in a new array in C order."""
        pointer = self.pointer
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
            self._copy_out(out, pointer)
            return out
        raw = np.empty((high - low) * itemsize, np.uint8)
        self._copy_out(raw, pointer + low * itemsize)
        strides = tuple(s * itemsize for s in self.strides)
        out[...] = np.ndarray(self.shape, self.dtype.numpy, raw, -low * itemsize, strides)
        return out

    def _copy_out(self, target: np.ndarray, pointer: int) -> None:
        address = target.__array_interface__["data"][0]
        pinned = self.device.is_pinned(address, target.nbytes, target)
        self.device.copy_out(address, pointer, target.nbytes, self._streams(), pinned)

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

    def copy_from(self, values: np.ndarray) -> None:
        """Overwrite it with host values of the same shape and dtype."""
        self.check_values(values)
        pointer = self.pointer
        if not self.size:
            return
        if not self.is_contiguous:
            # The gaps belong to others, so the values go to memory of their own first.
            landed = self.device.empty(self.shape, self.dtype, self._stream())
            landed.copy_from(values)
            self.device.copy(self, landed, self._stream())
            return
        source = np.ascontiguousarray(values)
        address = source.__array_interface__["data"][0]
        pinned = self.device.is_pinned(address, source.nbytes, source)
        self.device.copy_in(pointer, address, source.nbytes, self._streams(), pinned)

    def host(self) -> np.ndarray:
        """The very memory as a NumPy array, where the host sees it (managed, pinned). Waits for the streams that use it."""
        if not self.owner.host:
            raise UserError.at(
                "TW033", f"the host does not see the memory of the {self.form_text()} array on {self.device.label}",
                help="copy it with numpy(), or allocate it with managed=True",
            )  # fmt: skip
        pointer = self.pointer
        for stream in self._streams():
            self.device.wait_for(stream)
        offset = pointer - self.owner.pointer
        return array_views.host_view(self.owner, offset, self.shape, self.strides, self.dtype, self.readonly)

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

    def astype(self, dtype: DType, copy: bool = True) -> DeviceArray:
        """The elements converted, in a new array in C order; with `copy=False` the array itself where it has that dtype."""
        if dtype is self.dtype:
            return self.copy() if copy else self
        if _convert is None or not isinstance(dtype, DType) or "q" in (dtype.kind, self.dtype.kind):
            raise UserError.at("TW009", f"an array of {self.dtype} cannot be converted to {dtype}")
        whole = self if self.is_contiguous else self.copy()
        return _convert(whole.reshape(self.size), dtype).reshape(*self.shape)

    def fill(self, value: Number) -> None:
        """Set every element."""
        self._check_writable()
        element = array_views.element(value, self.dtype)
        pointer, stream = self.pointer, self._stream()
        if not self.size:
            return
        pattern = element.tobytes()
        if len(set(pattern)) == 1:
            pattern = pattern[:1]
        if self.is_contiguous and len(pattern) in (1, 2, 4):
            self.owner.use_on(stream)
            self.device.fill_bytes(pointer, pattern, self.nbytes // len(pattern), stream)
            return
        one = self.device.empty((1,), self.dtype, stream)
        one.copy_from(element.reshape(1))
        self.device.copy(self, one.broadcast_to(self.shape), stream)

    def __setitem__(self, index: Index | tuple[Index, ...], value: object) -> None:
        self._check_writable()
        view = self[index]
        if isinstance(value, DeviceArray):
            view.assign(value)
        elif isinstance(value, bool | int | float | np.generic):
            view.fill(value)  # type: ignore[arg-type]
        elif isinstance(value, np.ndarray | list | tuple):
            view.copy_from(array_views.fitting(value, view.shape, view.dtype))
        elif hasattr(value, "__cuda_array_interface__"):
            device: Any = self.device
            view.assign(device.wrap(value, self._stream()))
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
        if source.device is self.device and source.owner is self.owner and array_views.may_overlap(source, self):
            source = source.copy()
        if source.device is not self.device and source.shape != self.shape:
            moved = self.device.empty(source.shape, source.dtype, self._stream())
            self.device.copy(moved, source, self._stream())
            source = moved
        self.device.copy(self, source.broadcast_to(self.shape), self._stream())

    def _streams(self) -> tuple[int, ...]:
        return (self.owner.stream, *self.owner.users)

    def _reach(self) -> tuple[int, int]:
        return array_views.reach(self.shape, self.strides)

    def reach(self) -> tuple[int, int]:
        """First byte and the one after the last that its elements touch, relative to the pointer; equal when there are none."""
        low, high = self._reach() if self.size else (0, 0)
        return low * self.dtype.itemsize, high * self.dtype.itemsize

    # -- views --------------------------------------------------------------------------------------------------

    def _view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        pointer = self.pointer + offset * self.dtype.itemsize
        return DeviceArray(self.device, pointer, shape, self.dtype, strides, self.owner, self.base, self.readonly)

    def strided(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        """Elements of the same memory: the first one and steps in elements, which must stay inside."""
        return self._view(offset, shape, strides)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> DeviceArray:
        return self._view(*array_views.index(self.shape, self.strides, index))

    def permute(self, *axes: int) -> DeviceArray:
        """The axes in the given order; negative ones count from the end."""
        return self.transpose(*(axis + self.ndim if -self.ndim <= axis < 0 else axis for axis in axes))

    def broadcast_to(self, shape: Sequence[int]) -> DeviceArray:
        """A view of a larger shape that repeats elements along axes of extent 1 and new ones in front; it is read-only."""
        view = self._view(0, tuple(shape), array_views.broadcast(self.shape, self.strides, tuple(shape)))
        view.readonly = True
        return view

    def transpose(self, *axes: int) -> DeviceArray:
        """The axes reversed, or in the given order."""
        order = axes or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise UserError.at("TW003", f"axes {order} are not an order of the {self.ndim} axes of the array")
        return self._view(0, tuple(self.shape[a] for a in order), tuple(self.strides[a] for a in order))

    @property
    def T(self) -> DeviceArray:
        return self.transpose()

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
        return dlpack.CUDA, self.device.ordinal

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
            for producer in self._streams():
                if producer not in (consumer, HOST):
                    self.device.order(consumer, producer)
            self.owner.use_on(consumer)
        form = (pointer, self.shape, self.strides, self.dtype)
        return dlpack.export(self.owner, *form, self.__dlpack_device__(), versioned, self.readonly)


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
        known = dtypes.from_numpy(np.dtype(typestr))
    except TypeError:
        return None
    if known is None and typestr.lstrip("<|>") == "V2":
        return dtypes.bf16
    return known
