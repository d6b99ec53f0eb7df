"""y = a*x + y, one element for each thread: the smallest explicit kernel, and both ways to launch one."""

from __future__ import annotations

import numpy as np

import tilewright as tw


@tw.gpu
def saxpy(a: float, x: tw.GpuBuffer[float], y: tw.GpuBuffer[float]) -> None:
    i = tw.gpu_thread_id()
    y[i] += a * x[i]


@tw.gpu
def saxpy_striding(a: float, x: tw.GpuBuffer[float], y: tw.GpuBuffer[float]) -> None:
    """The same for a grid of any size: each thread takes every so manieth element."""
    for i in range(tw.gpu_thread_id(), len(x), tw.grid.size.x * tw.block.size.x):
        y[i] += a * x[i]


def main(n: int = 10_000, device: str = "auto") -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=n).astype(np.float32), rng.normal(size=n).astype(np.float32)
    expected = y + 2 * (np.float32(1.5) * x)
    # For n elements: threads beyond the last one do nothing.
    tw.gpu_launch(saxpy, n, 256, 1.5, x, y, device=device)
    # On a grid of 4 blocks with 128 threads each.
    saxpy_striding[4, 128](1.5, x, y, device=device)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    print(f"saxpy: {n} elements")


if __name__ == "__main__":
    main()
