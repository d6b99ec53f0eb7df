"""A matrix transposed through shared memory, so that both reads and writes go along rows.

Blocks of 32 x 8 threads move tiles of 32 x 32 elements. The tile's rows are one element longer than needed: its columns then lie in
different banks.
"""

from __future__ import annotations

import numpy as np

import tilewright as tw

TILE = 32
ROWS = 8


@tw.gpu
def transpose(x: tw.Array, out: tw.Array) -> None:
    tile = tw.shared((TILE, TILE + 1), x.dtype)
    rows, columns = x.shape
    column = tw.block.x * TILE + tw.thread.x
    row = tw.block.y * TILE + tw.thread.y
    for k in tw.unrolled(range(0, TILE, ROWS)):
        if row + k < rows and column < columns:
            tile[tw.thread.y + k, tw.thread.x] = x[row + k, column]
    tw.gpu_sync()
    column = tw.block.y * TILE + tw.thread.x
    row = tw.block.x * TILE + tw.thread.y
    for k in tw.unrolled(range(0, TILE, ROWS)):
        if row + k < columns and column < rows:
            out[row + k, column] = tile[tw.thread.x, tw.thread.y + k]


def main(rows: int = 100, columns: int = 75, device: str = "auto") -> None:
    x = np.random.default_rng(2).normal(size=(rows, columns)).astype(np.float32)
    out = np.empty((columns, rows), np.float32)
    transpose[(-(-columns // TILE), -(-rows // TILE)), (TILE, ROWS)](x, out, device=device)
    assert np.array_equal(out, x.T)
    print(f"transpose: {rows} x {columns}")


if __name__ == "__main__":
    main()
