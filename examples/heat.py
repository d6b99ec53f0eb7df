"""The heat equation on a plate: a time loop around a parallel step, as one kernel.

Every step runs on the whole device; the loop over steps is in order. The swap moves no data: the names change places. Run it:

    python examples/heat.py

It compares the plate with NumPy and prints how long both take. `until_steady` goes on until nothing changes any more; the device decides that.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

import tilewright as tw


@tw.kernel
def heat(plate: tw.Array, rate: float, steps: int) -> tw.Array:
    rows, cols = plate.shape
    now = plate * 1.0
    after = plate * 1.0
    for _ in range(steps):
        for i, j in tw.grid(range(1, rows - 1), range(1, cols - 1)):
            around = now[i - 1, j] + now[i + 1, j] + now[i, j - 1] + now[i, j + 1]
            after[i, j] = now[i, j] + rate * (around - 4 * now[i, j])
        now, after = after, now
    return now


@tw.kernel
def until_steady(plate: tw.Array, rate: float, limit: float) -> tuple[tw.Array, int]:
    rows, cols = plate.shape
    now = plate * 1.0
    after = plate * 1.0
    change = 2 * limit
    steps = 0
    while change > limit:
        for i, j in tw.grid(range(1, rows - 1), range(1, cols - 1)):
            around = now[i - 1, j] + now[i + 1, j] + now[i, j - 1] + now[i, j + 1]
            after[i, j] = now[i, j] + rate * (around - 4 * now[i, j])
        change = 0.0
        for i in range(rows):
            for j in range(cols):
                change = max(change, abs(after[i, j] - now[i, j]))
        now, after = after, now
        steps += 1
    return now, steps


def heat_numpy(plate: NDArray[np.float32], rate: float, steps: int) -> NDArray[np.float32]:
    """What the kernel computes, in slices."""
    now, after = plate.copy(), plate.copy()
    for _ in range(steps):
        around = now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:]
        after[1:-1, 1:-1] = now[1:-1, 1:-1] + np.float32(rate) * (around - 4 * now[1:-1, 1:-1])
        now, after = after, now
    return now


def main(size: int = 512, steps: int = 100) -> None:
    plate = np.zeros((size, size), np.float32)
    plate[0] = 100.0
    heat(plate, 0.1, 1)  # compiles
    start = time.perf_counter()
    mine = heat(plate, 0.1, steps)
    middle = time.perf_counter()
    wanted = heat_numpy(plate, 0.1, steps)
    end = time.perf_counter()
    np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4)
    print(f"{size} x {size}, {steps} steps: {1e3 * (middle - start):.1f} ms, NumPy {1e3 * (end - middle):.1f} ms")
    small, turns = until_steady(plate[:34, :34], 0.2, 0.01)
    print(f"34 x 34 is steady after {turns} steps; its middle has {small[17, 17]:.2f} degrees")


if __name__ == "__main__":
    main()
