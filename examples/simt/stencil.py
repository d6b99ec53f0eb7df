"""One step of a heat equation on a three-dimensional grid: each thread computes one cell from its six neighbours."""

from __future__ import annotations

import numpy as np

import tilewright as tw

BLOCK = (32, 4, 2)


@tw.gpu
def heat(t: tw.Array, out: tw.Array, rate: float) -> None:
    depth, rows, columns = t.shape
    x, y, z = tw.grid.x, tw.grid.y, tw.grid.z
    if x >= columns or y >= rows or z >= depth:
        return
    here = t[z, y, x]
    if x == 0 or y == 0 or z == 0 or x == columns - 1 or y == rows - 1 or z == depth - 1:
        out[z, y, x] = here
        return
    around = t[z, y, x - 1] + t[z, y, x + 1] + t[z, y - 1, x] + t[z, y + 1, x] + t[z - 1, y, x] + t[z + 1, y, x]
    out[z, y, x] = here + rate * (around - 6 * here)


def blocks(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Blocks along x, y and z for an array of this shape."""
    depth, rows, columns = shape
    return -(-columns // BLOCK[0]), -(-rows // BLOCK[1]), -(-depth // BLOCK[2])


def main(shape: tuple[int, int, int] = (12, 17, 40), steps: int = 2, device: str = "auto") -> None:
    t = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    expected = t.copy()
    out = np.empty_like(t)
    for _ in range(steps):
        heat[blocks(shape), BLOCK](t, out, 0.1, device=device)
        t, out = out, t
        old, inner = expected.copy(), slice(1, -1)
        around = sum(np.roll(old, d, axis) for axis in range(3) for d in (-1, 1))
        expected[inner, inner, inner] = (old + np.float32(0.1) * (around - 6 * old))[inner, inner, inner]
    np.testing.assert_allclose(t, expected, rtol=1e-5, atol=1e-5)
    print(f"heat: {steps} steps on {shape}")


if __name__ == "__main__":
    main()
