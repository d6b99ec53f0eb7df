"""Arrays that kernels reach by address. In: arrays that someone registers; out: the memory at an address, or none.

A kernel with `tensor_at` finds addresses in a table. On a GPU they are what they are; here only those of registered arrays count, so that a wrong table is an
error and not a crash. Arrays are registered for as long as they live.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right

import numpy as np

from tilewright.ir.emulator.memory.memory import restrided

Array = np.ndarray
_known: dict[int, weakref.ref[Array]] = {}
"""By the address of the first byte."""


def register(array: Array) -> int:
    """The address of a contiguous array, under which kernels find it from now on."""
    if not array.flags.c_contiguous:
        raise ValueError("only contiguous arrays have one address")
    start = int(array.__array_interface__["data"][0])
    _known[start] = weakref.ref(array)
    return start


def registered() -> list[Array]:
    """All arrays that are alive, in the order of their addresses."""
    found: list[Array] = []
    for start in sorted(_known):
        array = _known[start]()
        if array is None:
            del _known[start]
        else:
            found.append(array)
    return found


def array_at(address: int, dtype: np.dtype[np.generic], shape: tuple[int, ...], strides: tuple[int, ...]) -> Array | None:
    """What lies at an address, seen with a dtype, a shape and strides in elements; None where it is not within one registered array."""
    arrays = registered()
    starts = [int(a.__array_interface__["data"][0]) for a in arrays]
    reach = (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * dtype.itemsize if 0 not in shape else 0
    for number in range(bisect_right(starts, address) - 1, -1, -1):
        offset = address - starts[number]
        if offset + reach <= arrays[number].nbytes:
            plain = arrays[number].reshape(-1).view(np.uint8)[offset : offset + reach].view(dtype)
            return restrided(plain, shape, tuple(s * dtype.itemsize for s in strides))
    return None
