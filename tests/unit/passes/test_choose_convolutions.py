"""Which schedules convolutions get on a Hopper GPU: none falls to plain loops, whatever its strides, dilations and padding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from tilewright.base.dtypes import DType, bf16, f32
from tilewright.passes.schedules.matrix import Fma, MatrixSchedule, Wgmma

Strides = tuple[int, int]


def empty(*shape: int, dtype: DType = bf16) -> np.ndarray:
    """Memory that is never touched: only its form counts."""
    return np.empty(shape, dtype.numpy)


def schedules(kernel: tw.Kernel[..., Any], *arguments: np.ndarray) -> list[object]:
    return list(kernel.stages(*arguments, target="sm_90a").stages.schedules)


SHARED = [
    (stride, dilation, padding)
    for stride, dilation, padding in itertools.product(((1, 2), (2, 2), (3, 1), (2, 4)), (1, 2, 3, 4), ((0, 0), (3, 1)))
    if dilation > 1
]
"""Strides and dilations with a common divisor among them: the tests of an index lose it."""


@pytest.mark.parametrize(("stride", "dilation", "padding"), SHARED[::3], ids=str)
def test_channels_last(stride: Strides, dilation: int, padding: Strides) -> None:
    kernel = convolutions.conv2d_last(stride, padding, dilation)
    (chosen,) = schedules(kernel, empty(4, 40, 41, 64), empty(72, 7, 3, 64))
    assert isinstance(chosen, Wgmma)
    assert chosen.a_copy == "im2col"


@pytest.mark.parametrize(("stride", "dilation", "padding"), SHARED[1::5], ids=str)
@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
def test_channels_first(stride: Strides, dilation: int, padding: Strides, dtype: DType) -> None:
    kernel = convolutions.conv2d(stride, padding, dilation, nested=False)
    chosen = schedules(kernel, empty(4, 64, 40, 41, dtype=dtype), empty(72, 64, 7, 3, dtype=dtype))
    assert any(isinstance(s, MatrixSchedule) for s in chosen)


@pytest.mark.parametrize(("stride", "dilation"), [(2, 2), (3, 3), (4, 2)], ids=str)
def test_one_axis(stride: int, dilation: int) -> None:
    (chosen, *_) = schedules(convolutions.conv1d(stride, 3, dilation), empty(4, 64, 400, dtype=f32), empty(72, 64, 5, dtype=f32))
    assert isinstance(chosen, MatrixSchedule)


@pytest.mark.parametrize(("stride", "dilation", "padding"), [((1, 2), 2, (3, 0)), ((2, 4), 4, (1, 3))], ids=str)
def test_values_where_a_divisor_is_shared(stride: Strides, dilation: int, padding: Strides) -> None:
    """The copy engine's zeros stand for what the divided conditions leave out."""
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-2, 3, shape).astype(bf16.numpy) for shape in ((2, 20, 19, 32), (16, 3, 3, 32)))
    kernel = tw.kernel(schedule="family=wgmma m=64 n=64 k=64 stages=2")(convolutions.conv2d_last(stride, padding, dilation).python)
    found = np.asarray(kernel(x, w, device="emulator")).astype(np.float64)
    padded = np.pad(x.astype(np.float64), ((0, 0), (padding[0],) * 2, (padding[1],) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * dilation + 1, 2 * dilation + 1), axis=(1, 2))
    windows = windows[:, :: stride[0], :: stride[1], :, ::dilation, ::dilation]
    want = np.einsum("nijcrs,orsc->nijo", windows, w.astype(np.float64)).astype(bf16.numpy).astype(np.float64)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_images_with_a_stride_are_slower_by_multiply_adds(stride: int) -> None:
    chosen = schedules(convolutions.conv1d(stride, 2, 1), empty(13, 132, 20004, dtype=f32), empty(60, 132, 4, dtype=f32))
    assert not any(isinstance(s, Fma) for s in chosen)
