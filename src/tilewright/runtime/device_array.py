"""Arrays in device memory: a pointer with shape, strides and dtype, and its exchange with NumPy and other libraries.

In: a `Block` of device memory, or a foreign object that lends its pointer; out: a `DeviceArray`. Strides are in elements, as
everywhere in Tilewright. Views share the block; the memory is reused when the last of them is dropped or `free` is called, and
using a freed array is an error. A copy to or from the host waits for the streams known to use the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Protocol

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime import dlpack
from tilewright.runtime.device_memory import Block, stream_handle
from tilewright.runtime.streams import recorders

Index = int | slice


class ArrayDevice(Protocol):
    """What an array needs of its device."""

    @property
    def ordinal(self) -> int: ...

    @property
    def label(self) -> str: ...

    def copy_in(self, pointer: int, host: int, nbytes: int, streams: Iterable[int]) -> None:
        """Host to device, after the work queued on `streams`."""

    def copy_out(self, host: int, pointer: int, nbytes: int, streams: Iterable[int]) -> None:
        """Device to host, after the work queued on `streams`."""

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

    # Machine code of `runtime.cuda_launcher` reads `_pointer`, `form`, `owner` and `readonly`. What `form` describes never changes.
    __slots__ = ("_pointer", "base", "device", "dtype", "form", "owner", "readonly", "shape", "strides")

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
        self.form: ArrayForm | None = None

    # -- asking -------------------------------------------------------------------------------------------------

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        if self.owner.freed:
            raise DeviceError.at(
                "TW033",
                f"the {self._form()} array on {self.device.label} was used after it was freed",
                help="drop the call of free(), or use the array before it",
            )
        return self._pointer

    def launch_pointer(self, stream: int) -> int:
        """The address for a kernel on `stream`; the block is noted as used there."""
        if not recorders or stream not in recorders:
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

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of rank 0 has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        state = ", freed" if self.owner.freed else ""
        return f"DeviceArray({self._form()}, {self.device.label}{state})"

    def _form(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    # -- host copies --------------------------------------------------------------------------------------------

    def numpy(self) -> np.ndarray:
        """A copy on the host, in C order."""
        pointer = self.pointer
        result = np.empty(self.shape, self.dtype.numpy)
        if not self.size:
            return result
        if self.is_contiguous:
            self.device.copy_out(result.ctypes.data, pointer, result.nbytes, self._streams())
            return result
        low, high = self._reach()
        itemsize = self.dtype.itemsize
        raw = np.empty((high - low) * itemsize, np.uint8)
        self.device.copy_out(raw.ctypes.data, pointer + low * itemsize, raw.nbytes, self._streams())
        strides = tuple(s * itemsize for s in self.strides)
        result[...] = np.ndarray(self.shape, self.dtype.numpy, raw, -low * itemsize, strides)
        return result

    def copy_from(self, values: np.ndarray) -> None:
        """Overwrite it with host values of the same shape and dtype."""
        if self.readonly:
            raise DeviceError.at("TW033", f"the {self._form()} array on {self.device.label} is read-only")
        if values.shape != self.shape:
            raise UserError.at("TW004", f"cannot copy values of shape {values.shape} to an array of shape {self.shape}")
        if values.dtype != self.dtype.numpy:
            raise UserError.at("TW009", f"cannot copy values of {values.dtype} to an array of {self.dtype}")
        pointer = self.pointer
        if not self.size:
            return
        if self.is_contiguous:
            source = np.ascontiguousarray(values)
            self.device.copy_in(pointer, source.ctypes.data, source.nbytes, self._streams())
            return
        # The gaps belong to other arrays: read all that is between, change ours, write it back.
        low, high = self._reach()
        itemsize = self.dtype.itemsize
        raw = np.empty((high - low) * itemsize, np.uint8)
        self.device.copy_out(raw.ctypes.data, pointer + low * itemsize, raw.nbytes, self._streams())
        strides = tuple(s * itemsize for s in self.strides)
        np.ndarray(self.shape, self.dtype.numpy, raw, -low * itemsize, strides)[...] = values
        self.device.copy_in(pointer + low * itemsize, raw.ctypes.data, raw.nbytes, self._streams())

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("an array on a device cannot be read by NumPy without a copy")
        result = self.numpy()
        return result if dtype is None else result.astype(dtype, copy=False)

    def _streams(self) -> tuple[int, ...]:
        return (self.owner.stream, *self.owner.users)

    def _reach(self) -> tuple[int, int]:
        """First and one past the last element touched, relative to the pointer."""
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides)]
        return sum(min(0, s) for s in steps), sum(max(0, s) for s in steps) + 1

    def reach(self) -> tuple[int, int]:
        """First byte and the one after the last that its elements touch, relative to the pointer; equal when there are none."""
        low, high = self._reach() if self.size else (0, 0)
        return low * self.dtype.itemsize, high * self.dtype.itemsize

    # -- views --------------------------------------------------------------------------------------------------

    def _view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> DeviceArray:
        pointer = self.pointer + offset * self.dtype.itemsize
        return DeviceArray(self.device, pointer, shape, self.dtype, strides, self.owner, self.base, self.readonly)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> DeviceArray:
        items = index if isinstance(index, tuple) else (index,)
        if len(items) > self.ndim:
            raise UserError.at("TW003", f"{len(items)} indices for an array of rank {self.ndim}")
        offset = 0
        shape: list[int] = []
        strides: list[int] = []
        for axis, (extent, stride) in enumerate(zip(self.shape, self.strides)):
            item = items[axis] if axis < len(items) else slice(None)
            if isinstance(item, slice):
                start, stop, step = item.indices(extent)
                count = len(range(start, stop, step))
                offset += start * stride if count else 0
                shape.append(count)
                strides.append(stride * step)
            elif isinstance(item, int | np.integer) and not isinstance(item, bool):
                if not -extent <= item < extent:
                    raise UserError.at("TW013", f"index {item} is out of range for axis {axis} of extent {extent}")
                offset += int(item) % extent * stride
            else:
                raise UserError.at(
                    "TW009", f"a device array is indexed by integers and slices, not by {type(item).__name__}"
                )
        return self._view(offset, tuple(shape), tuple(strides))

    def transpose(self, *axes: int) -> DeviceArray:
        """The axes reversed, or in the given order."""
        order = axes or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise UserError.at("TW003", f"axes {order} are not an order of the {self.ndim} axes of the array")
        return self._view(0, tuple(self.shape[a] for a in order), tuple(self.strides[a] for a in order))

    @property
    def T(self) -> DeviceArray:
        return self.transpose()

    def reshape(self, *shape: int) -> DeviceArray:
        """Another shape of the same elements; one extent may be -1. Needs a contiguous array."""
        wanted = list(shape)
        unknown = [axis for axis, extent in enumerate(wanted) if extent == -1]
        known = prod(extent for extent in wanted if extent != -1)
        if len(unknown) == 1 and known and self.size % known == 0:
            wanted[unknown[0]] = self.size // known
        if prod(wanted) != self.size or any(extent < 0 for extent in wanted):
            raise UserError.at("TW004", f"cannot make shape {shape} of {self.size} elements of shape {self.shape}")
        if not self.is_contiguous:
            raise UserError.at(
                "TW033", f"cannot reshape a view with strides {self.strides}", help="reshape before slicing or transposing"
            )
        return self._view(0, tuple(wanted), row_major(wanted))

    # -- lifetime and exchange ----------------------------------------------------------------------------------

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
            "stream": self.owner.stream or 1,
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
        if self.readonly:
            raise BufferError("a read-only array cannot be shared through DLPack")
        if stream != -1:
            consumer = stream_handle(stream or 0)
            for producer in self._streams():
                if producer != consumer:
                    self.device.order(consumer, producer)
            self.owner.use_on(consumer)
        return dlpack.export(self.owner, self.pointer, self.shape, self.strides, self.dtype, self.__dlpack_device__())


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
