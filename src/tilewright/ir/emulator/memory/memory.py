"""Memory as the emulator sees it: a flat run of elements, with a shape and strides laid over it.

A `Memory` is one tensor: a caller's array (whatever its strides), or a block's shared or a thread's local allocation. All
accesses go through element offsets into `flat`, so that a vector access can read what follows in memory, and so that one
path serves every stage. An allocation has one copy per *owner* (a block, or a lane), side by side in `flat`, and a shadow
that says which elements were written. Indices are checked before they get here: offsets are always inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.source import Span
from tilewright.ir.types import Tensor

Array = np.ndarray
_ALLOCATOR_ALIGNMENT = 16
"""What NumPy's allocator guarantees; an array that has it counts as aligned to any vector."""


def fault(message: str, span: Span, help: str = "") -> UserError:
    """The error of a kernel that did something it must not."""
    error = UserError.at("TW050", message, span, help)
    assert isinstance(error, UserError)
    return error


def poison(array: Array, dtype: DType) -> None:
    """Fill with what no correct kernel reads: NaN, large integers, True."""
    if dtype.is_bool:
        array.fill(True)
    elif dtype.is_int:
        array.fill(int.from_bytes(b"\x7f" * dtype.itemsize, "little"))
    elif dtype.is_float:
        array.fill(np.nan)
    else:
        array.fill(np.void(b"\x7f" * dtype.itemsize))


def _room(shape: tuple[int, ...], dtype: DType, what: str) -> Array:
    """New memory, or the error that there is none."""
    try:
        return np.empty(shape, dtype.numpy)
    except (MemoryError, ValueError) as error:
        raise DeviceError.at("TW031", f"out of memory on emulator: {what}: {error}", help="work on smaller pieces") from error


def _flatten(array: Array) -> tuple[Array, tuple[int, ...], int]:
    """All memory between an array's lowest and highest element as one axis, the strides in elements, and where element
    [0, 0, …] lies in it."""
    size = array.itemsize
    strides = tuple(s // size for s in array.strides)
    if array.size == 0:
        return np.empty(0, array.dtype), strides, 0
    if array.flags.c_contiguous:
        return array.reshape(-1), strides, 0
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, strides, strict=True)]
    base = -sum(r for r in reach if r < 0)
    lowest = array[tuple(slice(None, None, -1) if r < 0 else slice(None) for r in reach)]
    span = 1 + sum(abs(r) for r in reach)
    return restrided(lowest, (span,), (size,)), strides, base


def restrided(array: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """The array's memory seen with another shape and other strides, in bytes."""
    # NumPy cannot do that to dtypes it does not know itself, f8 for one; to plain integers it can.
    plain = array.view(f"u{array.itemsize}") if array.dtype.kind != "V" else array
    view = np.lib.stride_tricks.as_strided(plain, shape, strides, writeable=array.flags.writeable)
    return view.view(array.dtype)


@dataclass(frozen=True, eq=False)
class Memory:
    """One tensor. `owners` is 0 for memory all lanes share, else the number of copies."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flat: Array
    base: int = 0
    owners: int = 0
    space: str = "global"
    address: int = 0
    """Bytes the first element lies past an aligned address."""
    written: Array | None = None
    """Which elements of `flat` were written; None where everything is."""

    @staticmethod
    def of_array(name: str, type_: Tensor, array: Array) -> Memory:
        flat, strides, base = _flatten(array)
        address = int(array.__array_interface__["data"][0]) % _ALLOCATOR_ALIGNMENT if array.size else 0
        return Memory(name, type_.dtype, array.shape, strides, flat, base, 0, type_.space, address)

    @staticmethod
    def allocate(name: str, type_: Tensor, shape: tuple[int, ...], owners: int) -> Memory:
        """One copy per owner, poisoned and marked unwritten."""
        size = prod(shape)
        flat = _room((owners * size,), type_.dtype, f"{owners} x {list(shape)} in {type_.space} memory for '{name}'")
        poison(flat, type_.dtype)
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        written = np.zeros(owners * size, np.bool_)
        return Memory(name, type_.dtype, shape, strides, flat, 0, owners, type_.space, 0, written)

    @property
    def label(self) -> str:
        return f"'{self.name}'" if self.name else f"a {self.space} tensor"

    @property
    def size(self) -> int:
        """Elements of one copy."""
        return prod(self.shape)

    @cached_property
    def _holes(self) -> Array | None:
        """Which places of `flat` hold no element of the tensor; None when there are none."""
        if self.owners or self.flat.size <= 1:
            return None
        holes = np.ones(self.flat.size, np.bool_)
        places = np.asarray(self.base)
        for extent, stride in zip(self.shape, self.strides, strict=True):
            places = places[..., None] + np.arange(extent) * stride
        holes[places.reshape(-1)] = False
        return holes if holes.any() else None

    def offsets(self, indices: Sequence[Array], owner: Array | None) -> Array:
        """Places in `flat` of the elements at these indices, which broadcast against one another."""
        result = np.asarray([self.base], np.int64)
        if owner is not None and self.owners:
            result = result + owner * self.size
        for index, stride in zip(indices, self.strides, strict=True):
            if result.ndim < index.ndim:
                result = result.reshape(result.shape + (1,) * (index.ndim - result.ndim))
            result = result + index * stride
        return result

    def outside(self, places: Array, first: Array) -> Array:
        """For a vector access starting at `first`: which of `places` hold no element of the same copy of the tensor."""
        if self.owners:
            return np.asarray(places // max(self.size, 1) != first // max(self.size, 1))
        bad = (places < 0) | (places >= self.flat.size)
        if self._holes is not None:
            bad |= self._holes[np.where(bad, 0, places)]
        return np.asarray(bad)

    def misaligned(self, first: Array, width: int) -> Array:
        """Which vector accesses of `width` elements starting at `first` are not at a multiple of the vector's bytes."""
        bytes_ = width * self.dtype.itemsize
        # A vector of 3 or 6 elements can only be asked for the power of two that divides its bytes.
        needed = bytes_ & -bytes_
        start = (first % max(self.size, 1) if self.owners else first - self.base) * self.dtype.itemsize
        return np.asarray((self.address + start) % needed != 0)

    def read(self, places: Array) -> Array:
        found: Array = self.flat[places]
        return found

    def write(self, places: Array, values: Array) -> None:
        """Where two values go to one place the last one stays."""
        self.flat[places] = values
        if self.written is not None:
            self.written[places] = True

    def forget(self, places: Array) -> None:
        """Make these elements undefined again."""
        if self.written is not None:
            part = np.empty(places.shape, self.flat.dtype)
            poison(part, self.dtype)
            self.flat[places] = part
            self.written[places] = False


def new_array(type_: Tensor, sizes: Mapping[str, int]) -> Array:
    """A poisoned array of that type; row-major where its strides are names nothing has bound."""
    shape = tuple(max(0, s.evaluate(sizes)) for s in type_.shape)
    names = frozenset[str]().union(*(s.names for s in type_.strides)) if type_.strides else frozenset[str]()
    contiguous = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    strides = tuple(s.evaluate(sizes) for s in type_.strides) if names <= sizes.keys() else contiguous
    if strides == contiguous or prod(shape) == 0:
        array = _room(shape, type_.dtype, f"an array of {type_.dtype}{list(shape)}")
        poison(array, type_.dtype)
        return array
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    flat = _room((span,), type_.dtype, f"an array of {type_.dtype}{list(shape)}")
    poison(flat, type_.dtype)
    return restrided(flat, shape, tuple(s * flat.itemsize for s in strides))
