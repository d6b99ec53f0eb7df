"""Arrays that begin anywhere, on the emulator and the CPU: slices, and bytes read from the middle of a buffer."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw

DTYPES = (np.uint8, np.int16, np.float16, np.uint32, np.float32, np.float64, np.int64)


@tw.kernel
def double(x: tw.Array) -> tw.Array:
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = x[i] + x[i]
    return out


@tw.kernel
def column_sums(x: tw.Array) -> tw.Array:
    rows, cols = x.shape
    out = tw.empty((cols,), x.dtype)
    for j in tw.grid(cols):
        total = tw.cast(0, x.dtype)
        for i in range(rows):
            total += x[i, j]
        out[j] = total
    return out


@tw.gpu
def pairs(x, out):  # type: ignore[no-untyped-def]
    i = 2 * tw.thread.x
    tw.vstore(out, i, tw.vload(x, i, width=2))


def shifted(values: np.ndarray, by: int) -> np.ndarray:
    """The same values in memory that begins `by` bytes after a multiple of 64."""
    memory = np.zeros(values.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + by
    made = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


@pytest.mark.parametrize("device", ["cpu", "emulator", "emulator:tile", "emulator:loop"])
def test_kernels_take_arrays_from_anywhere(device: str) -> None:
    for dtype in DTYPES:
        for by in (1, 2, 4, 8, 12):
            x = shifted(np.arange(40).astype(dtype), by)
            np.testing.assert_array_equal(double(x, device=device), x + x)
            out = shifted(np.zeros(40, dtype), by) if by % np.dtype(dtype).itemsize == 0 else np.zeros(40, dtype)
            assert double(x, out=out, device=device) is out
            np.testing.assert_array_equal(out, x + x)
        np.testing.assert_array_equal(double(np.arange(9).astype(dtype)[1:], device=device), 2 * np.arange(1, 9).astype(dtype))
        square = np.arange(36).reshape(6, 6).astype(dtype)[1:, 1:]
        np.testing.assert_array_equal(column_sums(square, device=device), square.sum(0, dtype=dtype))


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_explicit_kernels_take_arrays_from_anywhere(device: str) -> None:
    for dtype in DTYPES:
        for by in (1, 2, 4, 8, 12):
            if by % np.dtype(dtype).itemsize:
                continue
            x, out = shifted(np.arange(64).astype(dtype), by), shifted(np.zeros(64, dtype), by)
            pairs[1, 32](x, out, device=device)
            np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_primitives_take_arrays_from_anywhere(device: str) -> None:
    x = shifted(np.arange(50, dtype=np.float32)[::-1].copy(), 4)
    np.testing.assert_array_equal(tw.gpu_scan(x, device=device), np.cumsum(x))
