"""How soon the points of a plane leave for infinity: each thread iterates one point, and ends when it knows."""

from __future__ import annotations

import numpy as np

import tilewright as tw

BLOCK = (32, 8)


@tw.gpu
def mandelbrot(out: tw.Array, left: float, top: float, step: float, limit: int) -> None:
    rows, columns = out.shape
    column, row = tw.grid.x, tw.grid.y
    if column >= columns or row >= rows:
        return
    cx, cy = left + step * column, top + step * row
    x, y = 0.0, 0.0
    # Python's integers have 64 bits; a GPU counts faster with 32.
    count, most = tw.i32(0), tw.i32(limit)
    while count < most and x * x + y * y <= 4.0:
        x, y = x * x - y * y + cx, 2.0 * x * y + cy
        count += 1
    out[row, column] = count


def main(rows: int = 48, columns: int = 64, limit: int = 60, device: str = "auto") -> None:
    out = np.zeros((rows, columns), np.int32)
    grid = -(-columns // BLOCK[0]), -(-rows // BLOCK[1])
    mandelbrot[grid, BLOCK](out, -2.0, -1.125, 3.0 / columns, limit, device=device)
    c = -2.0 + 3.0 / columns * np.arange(columns) + 1j * (-1.125 + 3.0 / columns * np.arange(rows))[:, None]
    z, count = np.zeros_like(c), np.zeros(c.shape, np.int32)
    for _ in range(limit):
        inside = abs(z) <= 2
        count += inside
        z = np.where(inside, z * z + c, z)
    # Points at the very border may go either way in f32.
    assert np.mean(out == count) > 0.99
    print(f"mandelbrot: {rows} x {columns}, {out.mean():.1f} turns on average")


if __name__ == "__main__":
    main()
