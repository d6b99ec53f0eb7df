"""What the PTX of `runtime.cuda.strided_copy` does, in Python, for the null driver."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from tilewright.runtime.cuda.strided_copy import MOST_AXES, entry_name


def register_copies(driver: Any) -> None:
    """Let launches of copy kernels on this driver copy."""
    for width, rank, wide in itertools.product((1, 2, 4, 8, 16), range(1, MOST_AXES + 1), (False, True)):
        driver.kernels[entry_name(width, rank, wide)] = _kernel(width, rank)


def _kernel(width: int, rank: int) -> Any:
    def run(table: int, grid: tuple[int, int, int]) -> None:
        places = (ctypes.c_uint64 * (3 + 3 * rank)).from_address(table)
        source, target, count, *rest = (ctypes.c_int64.from_address(place).value for place in places)
        axes = [rest[3 * axis : 3 * axis + 3] for axis in range(rank)]
        assert grid[0] * 256 >= count
        done = 0
        for index in itertools.product(*(range(extent) for extent, _, _ in axes)):
            step = sum(i * axis[1] for i, axis in zip(index, axes, strict=True))
            stride = sum(i * axis[2] for i, axis in zip(index, axes, strict=True))
            ctypes.memmove(target + stride, source + step, width)
            done += 1
        assert done == count

    return run
