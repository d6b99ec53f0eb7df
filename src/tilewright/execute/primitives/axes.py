"""Axes of primitives: which one is meant, and lines along it as rows.

In: arrays of a place, contiguous. Out: arrays whose last axis is the one along which something is done, and results brought back.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from tilewright.base.errors import UserError
from tilewright.execute.places import Array, DevicePlace
from tilewright.execute.primitives.elements import exchanged
from tilewright.runtime.memory.packed_array import PackedArray


def axis_of(axis: Any, shape: tuple[int, ...], what: str) -> int:
    """The number of an axis, counted from the first."""
    if not shape:
        raise UserError.at("TW003", f"{what} takes an array of at least one axis, got a single element")
    try:
        number = operator.index(axis)
    except TypeError:
        raise UserError.at("TW009", f"axis is {axis!r}, not a whole number") from None
    if isinstance(axis, bool) or not -len(shape) <= number < len(shape):
        raise UserError.at(
            "TW003", f"axis is {axis!r}, but the data have shape {list(shape)}", help=f"give one from {-len(shape)} to {len(shape) - 1}"
        )
    return number % len(shape)


def numbers_only(value: object, what: str) -> None:
    """Refuse packed weights, whose memory holds bytes of blocks."""
    if isinstance(value, PackedArray):
        raise UserError.at("TW005", f"{what} takes an array of numbers, but the data are packed blocks", help="unpack them first: tw.dequantize(data)")


class Lines:
    """Lines along an axis, as rows: the axis goes last, and back."""

    def __init__(self, shape: tuple[int, ...], axis: Any, what: str) -> None:
        self.axis = axis_of(axis, shape, what)
        self.before, self.after = shape[: self.axis], shape[self.axis + 1 :]
        self.moved = math.prod(self.after) != 1

    def last(self, place: DevicePlace, array: Array) -> Array:
        size = array.shape[self.axis]
        if not self.moved:
            return array.reshape((*self.before, *self.after, size)) if self.after else array
        three = array.reshape((math.prod(self.before), size, math.prod(self.after)))
        return exchanged(place, three).reshape((*self.before, *self.after, size))

    def back(self, place: DevicePlace, array: Array) -> Array:
        size = array.shape[-1]
        shape = (*self.before, size, *self.after)
        if not self.moved:
            return array.reshape(shape) if self.after else array
        three = array.reshape((math.prod(self.before), math.prod(self.after), size))
        return exchanged(place, three).reshape(shape)
