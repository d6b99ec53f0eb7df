"""`check=True` and copies of explicit kernels: asynchronous ones and those of the copy engine, on a GPU that the emulator stands for."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed


@tw.gpu
def by_the_engine(x: tw.GpuBuffer[tw.f32], o: tw.GpuBuffer[tw.f32]) -> None:
    tile, bars = tw.shared(128, tw.f32, align=128), tw.mbarriers(1)
    t, start = tw.thread.x, 128 * tw.block.x
    if t == 0:
        tw.mbarrier_init(bars, 0, 1)
        tw.fence_init()
    tw.gpu_sync()
    if t == 0:
        tw.mbarrier_expect(bars, 0, 512)
        tw.bulk_load(tile, 0, x, start, 128, bars, 0)
    tw.mbarrier_wait(bars, 0, 0)
    if start + t < o.shape[0]:
        o[start + t] = 2 * tile[t]


@tw.gpu
def by_threads(x: tw.GpuBuffer[tw.f32], o: tw.GpuBuffer[tw.f32]) -> None:
    tile = tw.shared(128, tw.f32, align=128)
    t, start = tw.thread.x, 128 * tw.block.x
    tw.copy_async(tile, t, x, start + t)
    tw.copy_commit()
    tw.copy_wait()
    if start + t < o.shape[0]:
        o[start + t] = 2 * tile[t]


@tw.gpu
def computed_barrier(x: tw.GpuBuffer[tw.f32], i: tw.i32) -> None:
    bars = tw.mbarriers(2)
    if tw.thread.x == 0:
        tw.mbarrier_init(bars, i, 1)
        x[0] = tw.f32(1)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (by_the_engine, r"TW050.*bulk_load of 128 elements of 'x' from \[128\] on is out of bounds: it has 200 elements, in block \(1\), thread 0"),
        (by_threads, r"TW050.*copy_async of 1 elements of 'x' from \[2\d\d\] on is out of bounds: it has 200 elements, in block \(1\)"),
    ],
)
def test_copies_are_tested(kernel: tw.GpuKernel, message: str) -> None:
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x, o = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
        kernel[2, 128](x, o, device="cuda", check=True)
        np.testing.assert_array_equal(o, 2 * x)
        with pytest.raises(tw.UserError, match=message):
            kernel[2, 128](x[:200], o[:200], device="cuda", check=True)
        # The device goes on.
        kernel[2, 128](x, o, device="cuda", check=True)


def test_what_is_not_tested_is_said() -> None:
    with installed(), pytest.warns(RuntimeWarning, match=r"test_copy_checks.py:\d+:\d+: the checks of computed_barrier do not test the places in shared memory of mbarrier_init"):
        computed_barrier[1, 32](np.zeros(1, np.float32), 1, device="cuda", check=True)
