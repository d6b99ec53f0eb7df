"""Arrays between guard pages: an access beyond either end of the memory kills the process; a write beside an array is found.

An `Arena` is a few pages with one that nobody may touch on each side. An array lies at one of its ends, in one of these layouts:

    contiguous   row-major
    padded       gaps between elements and rows
    permuted     the last axis varies slowest
    negative     some axes run backwards
    zero         one axis repeats (stride 0)
    overlapping  rows share elements, as windows of a signal do
    misaligned   at an odd address
    odd          strides that are no multiple of the element
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Sequence

import numpy as np

PAGE = mmap.PAGESIZE
PAGES = 16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    def __init__(self, pages: int = PAGES) -> None:
        self.map = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for guard in (start, start + (pages + 1) * PAGE):
            if _libc.mprotect(guard, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.size = pages * PAGE
        self.bytes = np.frombuffer(self.map, np.uint8, self.size, PAGE)
        self.before = self.bytes.copy()

    def place(self, shape: Sequence[int], dtype: np.dtype, layout: str, rng: random.Random) -> np.ndarray:
        """An array of that layout at one end; what it holds is whatever was there."""
        strides, low, high = strides_of(shape, dtype.itemsize, layout)
        if high - low > self.size:
            raise ValueError(f"{shape} of {dtype} does not fit an arena")
        slack = 1 if layout == "misaligned" else 0
        at_end = rng.random() < 0.6
        first = self.size - high - (0 if layout != "misaligned" or (self.size - high) % 2 else 1) if at_end else slack - low
        return np.ndarray(tuple(shape), dtype, buffer=self.bytes, offset=first, strides=strides)

    def fill(self) -> None:
        self.bytes[:] = 0xA5

    def snapshot(self) -> None:
        self.before[:] = self.bytes

    def spoilt(self, view: np.ndarray | None) -> bool:
        """Whether anything but the elements of `view` has changed since the snapshot."""
        if view is None:
            return not np.array_equal(self.before, self.bytes)
        offset = view.__array_interface__["data"][0] - self.bytes.__array_interface__["data"][0]
        same = np.ndarray(view.shape, view.dtype, buffer=self.before, offset=offset, strides=view.strides)
        same[...] = view
        return not np.array_equal(self.before, self.bytes)


def strides_of(shape: Sequence[int], item: int, layout: str) -> tuple[tuple[int, ...], int, int]:
    """Strides in bytes, and the first and last byte relative to the first element."""
    rank = len(shape)
    strides = [0] * rank
    step = {"padded": 2 * item, "odd": item + (1 if item < 8 else 3)}.get(layout, item)
    for axis in range(rank) if layout == "permuted" else reversed(range(rank)):
        strides[axis] = step
        step = step * max(1, shape[axis]) + (3 * item if layout == "padded" else 0)
    if layout == "negative":
        strides = [-s if axis in (0, rank - 1) else s for axis, s in enumerate(strides)]
    elif layout == "zero" and rank:
        repeated = max(range(rank), key=lambda a: shape[a])
        strides[repeated] = 0
    elif layout == "overlapping":
        strides = [item] * rank
    if 0 in shape:
        return tuple(strides), 0, item
    reach = [(e - 1) * s for e, s in zip(shape, strides, strict=True)]
    return tuple(strides), sum(min(0, r) for r in reach), sum(max(0, r) for r in reach) + item


class Memory:
    """Arenas that are used again and again."""

    def __init__(self) -> None:
        self.free: list[Arena] = []
        self.taken: list[Arena] = []

    def take(self) -> Arena:
        arena = self.free.pop() if self.free else Arena()
        arena.fill()
        self.taken.append(arena)
        return arena

    def reset(self) -> None:
        self.free += self.taken
        self.taken = []
