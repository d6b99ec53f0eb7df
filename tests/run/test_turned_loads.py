"""Transpositions whose rows begin anywhere: blocks read squares along memory, and hand them over in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from kernels_matrix import on
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device


@tw.kernel
def turned_over(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((columns, rows), x.dtype)
    for i, j in tw.grid(columns, rows):
        out[i, j] = x[j, i]
    return out


@tw.kernel
def turned_planes(x: tw.Array) -> tw.Array:
    planes, rows, columns = x.shape
    out = tw.empty((planes, columns, rows), x.dtype)
    for p, i, j in tw.grid(planes, columns, rows):
        out[p, i, j] = x[p, j, i] * 2
    return out


@tw.kernel
def turned_and_added(x: tw.Array, y: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((columns, rows), x.dtype)
    for i, j in tw.grid(columns, rows):
        out[i, j] = x[j, i] + y[i, j]
    return out


def emulated(kernel: tw.Kernel[..., Any], *arrays: np.ndarray) -> np.ndarray:
    return np.asarray(on(kernel, emulator_device("thread", parse_target("sm_90a")))(arrays))


def is_turned(kernel: tw.Kernel[..., Any], *arrays: np.ndarray) -> bool:
    (schedule,) = kernel.stages(*arrays, target="sm_90a").stages.schedules
    return bool(schedule.turned == "elements")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8])
@pytest.mark.parametrize("shape", [(131, 67), (67, 128), (65, 43), (63, 129)])
def test_rows_that_begin_anywhere(shape: tuple[int, int], dtype: type) -> None:
    x = (np.random.default_rng(shape).standard_normal(shape) * 50).astype(dtype)
    assert is_turned(turned_over, x)
    np.testing.assert_array_equal(emulated(turned_over, x), x.T)


def test_several_planes_and_no_elements() -> None:
    x = np.random.default_rng(1).standard_normal((3, 71, 66)).astype(np.float32)
    assert is_turned(turned_planes, x)
    np.testing.assert_array_equal(emulated(turned_planes, x), 2 * x.transpose(0, 2, 1))
    np.testing.assert_array_equal(emulated(turned_over, np.empty((0, 67), np.float32)), np.empty((67, 0), np.float32))


def test_views() -> None:
    x = np.random.default_rng(2).standard_normal((140, 150)).astype(np.float32)
    for view in (x[3:70, 1:100], x[::2, ::2], x[::-1, ::-1], x.T[1:68, 2:69]):
        np.testing.assert_array_equal(emulated(turned_over, view), view.T)


def test_vectors_and_several_arrays_are_read_as_before() -> None:
    """Rows that are whole vectors of wide elements make up for lanes that read far apart; a short side leaves lanes without work; of two arrays one lies as the results do."""
    assert not is_turned(turned_over, np.empty((512, 131), np.float64))
    assert is_turned(turned_over, np.empty((512, 131), np.float16))
    assert not is_turned(turned_over, np.empty((512, 24), np.float16))
    x, y = np.random.default_rng(3).standard_normal((2, 67, 131)).astype(np.float32)
    assert not is_turned(turned_and_added, x, y.T.copy())
    np.testing.assert_array_equal(emulated(turned_and_added, x, y.T.copy()), x.T + y.T)
