"""A matrix product with tiles in shared memory: every element of a tile is read from memory once and used TILE times."""

from __future__ import annotations

import numpy as np

import tilewright as tw

TILE = 32


@tw.gpu
def matmul(a: tw.Array, b: tw.Array, out: tw.Array) -> None:
    left, right = tw.shared((TILE, TILE), a.dtype), tw.shared((TILE, TILE), b.dtype)
    rows, depth = a.shape
    columns = b.shape[1]
    tx, ty = tw.thread.x, tw.thread.y
    row, column = tw.block.y * TILE + ty, tw.block.x * TILE + tx
    total = 0.0
    for first in range(0, depth, TILE):
        left[ty, tx] = a[row, first + tx] if row < rows and first + tx < depth else 0.0
        right[ty, tx] = b[first + ty, column] if first + ty < depth and column < columns else 0.0
        tw.gpu_sync()
        for k in tw.unrolled(range(TILE)):
            total += left[ty, k] * right[k, tx]
        tw.gpu_sync()
    if row < rows and column < columns:
        out[row, column] = total


def main(rows: int = 40, depth: int = 70, columns: int = 50, device: str = "auto") -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(rows, depth)).astype(np.float32), rng.normal(size=(depth, columns)).astype(np.float32)
    out = np.empty((rows, columns), np.float32)
    matmul[(-(-columns // TILE), -(-rows // TILE)), (TILE, TILE)](a, b, out, device=device)
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-4)
    print(f"matmul: {rows} x {depth} x {columns}")


if __name__ == "__main__":
    main()
