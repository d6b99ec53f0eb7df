"""Inline regions: what they capture, where they run, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed
from tilewright.api import parallel_gpu as regions
from tilewright.base.errors import UserError

OFFSET = 10


def plus(v):
    return v + OFFSET


@pytest.mark.parametrize("device", ["emulator", "cpu"])
def test_arrays_and_numbers_around_it(device: str) -> None:
    data, out = np.arange(100, dtype=np.float32), np.full(128, -1, np.float32)
    for factor in (2.0, 3.0):

        @tw.parallel_gpu(100, 32, device=device)
        def _(i):
            out[i] = plus(data[i] * factor)  # noqa: B023

        assert np.array_equal(out, np.r_[data * np.float32(factor) + 10, np.full(28, -1)].astype(np.float32))


def test_a_region_is_compiled_once() -> None:
    out = np.zeros(8, np.float32)
    regions._regions.clear()
    for step in range(3):
        scale = step + 0.5

        @tw.parallel_gpu(8, 8, device="emulator")
        def _(i):
            out[i] += scale * i  # noqa: B023

    assert len(regions._regions) == 1
    (kernel, _), *_ = regions._regions.values()
    assert len(kernel.runner._built) == 1
    assert np.array_equal(out, 4.5 * np.arange(8))


def test_on_a_gpu() -> None:
    with installed() as driver:
        x = tw.to_device(np.arange(50, dtype=np.float32), "cuda")
        out = tw.to_device(np.zeros(50, np.float32), "cuda")

        @tw.parallel_gpu(50, 16)
        def _(i):
            tile = tw.shared(16, tw.f32)
            tile[tw.thread.x] = x[i]
            tw.gpu_sync()
            out[i] = tile[15 - tw.thread.x]

        expected = np.r_[np.arange(48).reshape(3, 16)[:, ::-1].ravel(), np.zeros(2)]
        assert np.array_equal(out.numpy(), expected)
        assert driver.programs.launched == ["tw___0"]


def test_mistakes() -> None:
    out, total = np.zeros(4, np.float32), 0.0
    with pytest.raises(UserError, match="the region 'two' takes 2 parameters"):

        @tw.parallel_gpu(4, 4, device="emulator")
        def two(i, j):
            out[i] = j

    with pytest.raises(UserError, match="'total' has no value yet"):

        @tw.parallel_gpu(4, 4, device="emulator")
        def adds(i):
            total = total + out[i]  # noqa: F823, F841

    assert total == 0.0
    with pytest.raises(UserError, match="parallel_gpu was given a int"):
        tw.parallel_gpu(4)(3)  # type: ignore[arg-type]
