"""Windows over arrays that end where a page ends that nobody may touch: a read before the first element or behind the last kills the process."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
from random_kernels.memory import Arena

import tilewright as tw

POOLS = ((2, 2, 0), (3, 1, 1), (3, 2, 1), (4, 3, 2), (5, 5, 2), (8, 2, 4), (11, 3, 5))
"""Window, stride, padding."""


def pools(k: int, s: int, p: int) -> tuple[Any, Any]:
    @tw.kernel
    def largest(x: tw.Array) -> tw.Array:
        c, h, w = x.shape
        out = tw.empty((c, (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1), x.dtype)
        for b, i, j in tw.grid(c, (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1):
            best = -tw.inf
            for q in range(k):
                for r in range(k):
                    y = i * s + q - p
                    z = j * s + r - p
                    if 0 <= y < h and 0 <= z < w:
                        best = max(best, x[b, y, z])
            out[b, i, j] = best
        return out

    @tw.kernel
    def total(x: tw.Array) -> tw.Array:
        c, h, w = x.shape
        out = tw.empty((c, (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1), x.dtype)
        for b, i, j in tw.grid(c, (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1):
            sum_ = tw.f32(0)
            for q in range(k):
                for r in range(k):
                    y = i * s + q - p
                    z = j * s + r - p
                    if 0 <= y < h and 0 <= z < w:
                        sum_ += x[b, y, z]
            out[b, i, j] = sum_
        return out

    return largest, total


def framed(x: np.ndarray, pool: tuple[int, int, int], fill: float) -> np.ndarray:
    k, s, p = pool
    wide = np.pad(x.astype(np.float64), [(0, 0), (p, p), (p, p)], constant_values=fill)
    rows, columns = ((side + 2 * p - k) // s + 1 for side in x.shape[1:])
    return np.stack(
        [wide[:, q : q + s * (rows - 1) + 1 : s, r : r + s * (columns - 1) + 1 : s] for q in range(k) for r in range(k)]
    )


def main() -> None:
    arena, rng = Arena(), random.Random(0)
    numbers = np.random.default_rng(0)
    for pool in POOLS:
        largest, total = pools(*pool)
        for shape in ((1, 11, 11), (2, 13, 37), (3, 16, 32)):
            for layout in ("contiguous", "contiguous", "misaligned", "permuted", "negative"):
                x = arena.place(shape, np.dtype(np.float32), layout, rng)
                x[...] = numbers.standard_normal(shape)
                arena.snapshot()
                np.testing.assert_array_equal(largest(x), framed(x, pool, -np.inf).max(axis=0))
                np.testing.assert_allclose(total(x), framed(x, pool, 0).sum(axis=0), rtol=1e-5, atol=1e-5)
                assert not arena.spoilt(None)
    print("all inside")


def test_windows_stay_inside_their_arrays() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout.strip()) == (0, "all inside"), done.stderr[-2000:]


if __name__ == "__main__":
    main()
