"""Views of strided arrays, as numbers: what an index, a reshape or a broadcast makes of a shape and strides; and host memory as NumPy.

In: shapes and strides in elements; out: the same of the view, with the offset of its first element. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.runtime.core.device import Buffer

Shape = tuple[int, ...]


def index(shape: Shape, strides: Shape, given: object) -> tuple[int, Shape, Shape]:
    """Offset, shape and strides of `array[given]`: integers, slices, an ellipsis, None for a new axis."""
    items = list(given) if isinstance(given, tuple) else [given]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > len(shape):
        raise UserError.at("TW003", f"{used} indices for an array of rank {len(shape)}")
    gaps = [place for place, item in enumerate(items) if item is Ellipsis]
    if len(gaps) > 1:
        raise UserError.at("TW003", "an index has more than one ellipsis")
    at = gaps[0] if gaps else len(items)
    rest: list[object] = [slice(None)] * (len(shape) - used)
    items[at : at + 1] = rest
    offset, axis = 0, 0
    extents: list[int] = []
    steps: list[int] = []
    for item in items:
        if item is None:
            extents.append(1)
            steps.append(0)
            continue
        extent, stride = shape[axis], strides[axis]
        if isinstance(item, slice):
            start, stop, step = _bounds(item, extent)
            count = len(range(start, stop, step))
            offset += start * stride if count else 0
            extents.append(count)
            steps.append(stride * step)
        elif isinstance(item, int | np.integer) and not isinstance(item, bool):
            if not -extent <= item < extent:
                raise UserError.at("TW013", f"index {item} is out of range for axis {axis} of extent {extent}")
            offset += int(item) % extent * stride
        else:
            raise UserError.at("TW009", f"a device array is indexed by integers and slices, not by {type(item).__name__}")
        axis += 1
    return offset, tuple(extents), tuple(steps)


def _bounds(item: slice, extent: int) -> tuple[int, int, int]:
    try:
        return item.indices(extent)
    except (TypeError, ValueError) as error:
        raise UserError.at("TW009", f"{item} is no slice of an axis: {error}") from None


def reshape(shape: Shape, strides: Shape, given: Sequence[object]) -> tuple[Shape, Shape]:
    """Shape and strides of the same elements in another shape, of which one extent may be -1; UserError where that needs a copy."""
    first = given[0] if len(given) == 1 else None
    wanted: list[Any] = list(first) if isinstance(first, tuple | list) else list(given)
    if not all(isinstance(extent, int | np.integer) and not isinstance(extent, bool) for extent in wanted):
        raise UserError.at("TW009", f"a shape is made of integers, not {tuple(wanted)}")
    extents = [int(extent) for extent in wanted]
    size = prod(shape)
    unknown = [axis for axis, extent in enumerate(extents) if extent == -1]
    known = prod(extent for extent in extents if extent != -1)
    if len(unknown) == 1 and known and size % known == 0:
        extents[unknown[0]] = size // known
    if prod(extents) != size or any(extent < 0 for extent in extents):
        raise UserError.at("TW004", f"cannot make shape {tuple(wanted)} of {size} elements of shape {shape}")
    found = _same_elements(shape, strides, extents)
    if found is None:
        raise UserError.at("TW033", f"cannot reshape a view with strides {strides}", help="copy() it first")
    return tuple(extents), found


def _same_elements(shape: Shape, strides: Shape, wanted: list[int]) -> Shape | None:
    """Strides of the wanted shape on the same elements; None where there are none. Groups of axes with equal products are matched."""
    if not prod(shape):
        return tuple([0] * len(wanted))
    old = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    found = [0] * len(wanted)
    at, place = 0, 0
    while place < len(wanted):
        if wanted[place] == 1:
            place += 1
            continue
        start, last = at, place
        have, need = old[at][0], wanted[place]
        while have != need:
            if have < need:
                at += 1
                have *= old[at][0]
            else:
                last += 1
                need *= wanted[last]
        for one, following in zip(old[start:at], old[start + 1 : at + 1], strict=True):
            if one[1] != following[1] * following[0]:
                return None
        step = old[at][1]
        for axis in range(last, place - 1, -1):
            found[axis] = step
            step *= wanted[axis]
        at, place = at + 1, last + 1
    return _ones_like_numpy(found, wanted)


def _ones_like_numpy(strides: list[int], shape: list[int]) -> Shape:
    """Axes of extent 1 get the stride a contiguous array would have there."""
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            strides[axis] = step
        step = strides[axis] * shape[axis]
    return tuple(strides)


def broadcast(shape: Shape, strides: Shape, wanted: Shape) -> Shape:
    """Strides that repeat elements along axes of extent 1, and along new ones in front."""
    missing = len(wanted) - len(shape)
    fits = missing >= 0 and all(have in (1, want) for have, want in zip(shape, wanted[missing:], strict=True))
    if not fits:
        raise UserError.at("TW004", f"an array of shape {shape} cannot be repeated to shape {wanted}")
    pairs = zip(shape, strides, wanted[missing:], strict=True)
    return (*([0] * missing), *(0 if have != want else stride for have, stride, want in pairs))


def element(value: object, dtype: DType) -> np.ndarray:
    """A number as one element of a dtype; UserError where it would lose data."""
    if dtype.kind == "q":
        raise UserError.at("TW009", f"elements of {dtype} are packed blocks and cannot be set to a number")
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, bool | int | float | complex):
        raise UserError.at("TW009", f"a {type(value).__name__} is no number")
    if isinstance(value, complex) and not dtype.is_complex:
        raise UserError.at("TW006", f"assigning {value} to an array of {dtype} would lose data", help="take its .real")
    if dtype.is_complex:
        return np.asarray(value).astype(dtype.numpy)
    assert not isinstance(value, complex)
    if isinstance(value, float) and not dtype.is_float:
        raise UserError.at("TW006", f"assigning {value} to an array of {dtype} would lose data", help="round it first")
    if dtype.is_bool and value not in (0, 1):
        raise UserError.at("TW006", f"assigning {value} to an array of bool would lose data")
    if dtype.is_int and not dtype.min_value <= value <= dtype.max_value:
        raise UserError.at("TW006", f"{value} is out of the range of {dtype}, {dtype.min_value} to {dtype.max_value}")
    return np.asarray(value).astype(dtype.numpy)


def fitting(values: object, shape: Shape, dtype: DType) -> np.ndarray:
    """Host values for an array of that shape and dtype: repeated where they are smaller, converted where nothing is lost."""
    array = np.asarray(values)
    known = dtypes.of_array(array.dtype)
    if isinstance(values, list | tuple) and array.size:
        if array.dtype.kind not in "biufc":
            raise UserError.at("TW009", f"values of {array.dtype} cannot be assigned to an array of {dtype}")
        low, high = (array.min().item(), array.max().item()) if array.dtype.kind in "iu" else (0, 0)
        exact = dtype.is_complex or (dtype.is_float and array.dtype.kind != "c") or (known is not None and not known.is_inexact and dtype.min_value <= low and high <= dtype.max_value)
        if not exact:
            raise UserError.at("TW006", f"assigning values of {array.dtype} to an array of {dtype} would lose data")
    elif known is None:
        raise UserError.at("TW009", f"arrays of {array.dtype} are not supported on a device")
    elif dtypes.loses(known, dtype):
        raise UserError.at("TW006", f"assigning {known} to an array of {dtype} would lose data", help="convert it with .astype(...)")
    try:
        return np.broadcast_to(array.astype(dtype.numpy, copy=False), shape)
    except ValueError:
        raise UserError.at("TW004", f"values of shape {array.shape} do not fit an array of shape {shape}") from None


def reach(shape: Shape, strides: Shape) -> tuple[int, int]:
    """First and one past the last element touched, relative to the first element of the array, which has some."""
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    return sum(min(0, step) for step in steps), sum(max(0, step) for step in steps) + 1


# -- host memory ----------------------------------------------------------------------------------------------------


class _HostBuffer:
    """A block as NumPy sees memory; the array on it keeps it, and so the block."""

    def __init__(self, block: Buffer, address: int, nbytes: int, readonly: bool) -> None:
        self.block = block
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, readonly)}


def host_array(block: Buffer, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """A NumPy array at the start of a block the host sees."""
    count = prod(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.asarray(_HostBuffer(block, block.host, count * dtype.itemsize, False)).view(dtype).reshape(shape)


def host_view(block: Buffer, offset: int, shape: Shape, strides: Shape, dtype: DType, readonly: bool) -> np.ndarray:
    """A NumPy array `offset` bytes behind the start of a block the host sees; strides in elements."""
    if not prod(shape):
        return np.empty(shape, dtype.numpy)
    low, high = reach(shape, strides)
    itemsize = dtype.itemsize
    raw = np.asarray(_HostBuffer(block, block.host + offset + low * itemsize, (high - low) * itemsize, readonly))
    return np.ndarray(shape, dtype.numpy, raw, -low * itemsize, tuple(stride * itemsize for stride in strides))


def block_of(array: np.ndarray) -> Buffer | None:
    """The block a NumPy array lies in, where it lies in one of ours."""
    item: object = array
    while isinstance(item, np.ndarray):
        item = item.base
    return item.block if isinstance(item, _HostBuffer) else None

