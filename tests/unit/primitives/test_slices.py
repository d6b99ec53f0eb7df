"""Slices along an axis, on the CPU and in the emulator, against NumPy: `tw.filter` with a mask of one axis and `tw.unique` with an axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA
from tilewright.base.dtypes import bf16, f8e4m3, f8e5m2
from tilewright.base.errors import UserError

DEVICES = ("cpu", "emulator")
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64, bf16.numpy, f8e4m3.numpy, f8e5m2.numpy]
RNG = np.random.default_rng(31)


def same(a: Any, b: np.ndarray) -> bool:
    """Whether arrays have one dtype, one shape and equal elements."""
    found = np.asarray(a)
    if found.dtype != b.dtype:
        return False
    if found.dtype.kind not in "biu":
        found, b = found.astype(np.float64), b.astype(np.float64)
        return np.array_equal(found, b, equal_nan=True)
    return np.array_equal(found, b)


def few(shape: tuple[int, ...], dtype: Any, different: int = 3) -> np.ndarray:
    """Numbers of which many are equal, of both signs and with extremes where the dtype has them."""
    if np.dtype(dtype) == np.bool_:
        return RNG.random(shape) < 0.5
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return np.array([info.min, info.max, 1, 0, 2], dtype)[RNG.integers(0, different, shape)]
    return np.array([-2.5, 1.0, 0.5, 0.25, 4.0]).astype(dtype)[RNG.integers(0, different, shape)]


# -- filter ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_filter_keeps_slices_along_any_axis(device: str) -> None:
    for shape, dtype in (((1, 1), np.bool_), ((31, 33), np.int64), ((7, 4, 5), np.float16), ((2, 3, 5, 8), np.float32)):
        x = few(shape, dtype, 5)
        for axis in range(-len(shape), len(shape)):
            mask = RNG.random(shape[axis]) < 0.5
            assert same(tw.filter(x, mask, axis=axis, device=device), np.compress(mask, x, axis)), (shape, axis)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [np.bool_, *INTEGERS, *FLOATS], ids=lambda d: np.dtype(d).name)
def test_filter_of_slices_of_every_dtype(device: str, dtype: Any) -> None:
    x, mask = few((5, 8), dtype), np.array([True, False, True, True, False])
    assert same(tw.filter(x, mask, axis=0, device=device), x[mask])
    assert same(tw.filter(x.T, mask, axis=1, device=device), x.T[:, mask])


def test_filter_of_many_slices() -> None:
    for shape, axis in (((70_001, 3), 0), ((3, 70_001), 1), ((2, 9000, 5), 1), ((5, 40_003), 0), ((9000, 4, 1), 1)):
        x, mask = RNG.integers(0, 99, shape), RNG.random(shape[axis]) < 0.3
        assert same(tw.filter(x, mask, axis=axis, device="cpu"), np.compress(mask, x, axis)), shape
        every, none = np.ones_like(mask), np.zeros_like(mask)
        assert same(tw.filter(x, every, axis=axis, device="cpu"), x)
        assert tw.filter(x, none, axis=axis, device="cpu").shape == np.compress(none, x, axis).shape


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_filter_of_views_of_empty_arrays_and_of_one_axis(device: str) -> None:
    whole, mask = RNG.normal(size=(20, 18)), RNG.random(20)[::-2] < 0.5
    for x in (whole[::2, ::-3], whole[::-2, 1:]):
        assert same(tw.filter(x, mask, axis=0, device=device), x[mask])
    for shape, axis in (((0, 3), 0), ((0, 3), 1), ((4, 0), 0), ((2, 0, 3), 1), ((2, 0, 3), 2)):
        x, mask = np.zeros(shape, np.int16), np.arange(shape[axis]) % 2 == 0
        assert same(tw.filter(x, mask, axis=axis, device=device), np.compress(mask, x, axis)), (shape, axis)
    x = np.arange(9.0)
    assert same(tw.filter(x, x > 3, axis=-1, device=device), x[4:])
    assert same(tw.filter(x, lambda v: v > 3, axis=0, device=device), x[4:])


# -- unique ---------------------------------------------------------------------------------------------------------


def check_unique(x: np.ndarray, axis: int, device: str) -> None:
    values, counts = tw.unique(x, axis=axis, return_counts=True, device=device)
    wide = x.astype(np.float64) if x.dtype.kind not in "biu" else x  # NumPy has no structures of some dtypes
    wanted, wanted_counts = np.unique(wide, axis=axis, return_counts=True)
    assert same(values, wanted.astype(x.dtype)), (x.shape, x.dtype, axis)
    assert counts.dtype == np.int64 and np.array_equal(np.asarray(counts), wanted_counts), (x.shape, x.dtype, axis)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_unique_slices_along_any_axis(device: str) -> None:
    for shape, axes in (((1, 1), (0,)), ((33, 3), (0,)), ((2, 31), (1, -1)), ((2, 17, 2), (-2,)), ((2, 1, 2, 2), (3,))):
        for axis in axes:
            check_unique(few(shape, np.int8, 2), axis, device)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [np.bool_, *INTEGERS, *FLOATS], ids=lambda d: np.dtype(d).name)
def test_unique_slices_of_every_dtype(device: str, dtype: Any) -> None:
    """Words of one column, of several, and several words of which the last is not full."""
    check_unique(few((40, 2), dtype), 0, device)
    check_unique(few((40, 64 // (8 * np.dtype(dtype).itemsize) + 1), dtype, 2), 0, device)


@pytest.mark.parametrize(("dtype", "columns"), [(np.bool_, 3), (np.int16, 5), (np.float64, 2), (bf16.numpy, 2), (f8e4m3.numpy, 2)])
def test_unique_slices_in_the_emulator(dtype: Any, columns: int) -> None:
    check_unique(few((40, columns), dtype, 2), 0, "emulator")


def test_unique_of_many_slices() -> None:
    check_unique(RNG.integers(0, 40, (70_001, 3)), 0, "cpu")
    check_unique(RNG.integers(0, 7, (4, 30_011)).astype(np.uint8), 1, "cpu")
    check_unique(RNG.integers(0, 2, (2, 700, 37)).astype(np.float32), 1, "cpu")
    check_unique(np.repeat(RNG.normal(size=(1, 129)), 50, 0), 0, "cpu")


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_unique_of_views_of_empty_arrays_and_of_one_axis(device: str) -> None:
    whole = few((24, 9), np.int16, 2)
    check_unique(whole[::-2, ::4], 0, device)
    check_unique(whole.T[1:7:3], 1, device)
    for shape, axis in (((5, 0), 0), ((5, 0), 1), ((0, 3), 0), ((0, 3), 1), ((0, 0), 0), ((2, 0, 3), 2)):
        check_unique(np.zeros(shape, np.float32), axis, device)
    x = np.array([3, np.nan, 1, 3, np.nan])
    check_unique(x, 0, device)
    assert same(tw.unique(x, axis=-1, device=device), np.unique(x))
    assert same(tw.gpu_unique(whole[:, :2], axis=0, device=device), np.unique(whole[:, :2], axis=0))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_special_numbers_in_slices(device: str) -> None:
    """NaN is last and never equal within slices, zeros are equal, and of equal slices the first one is given, as NumPy has it."""
    for dtype in (np.float16,) if device == "emulator" else (np.float16, np.float32, np.float64):
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -np.nan], dtype)
        check_unique(special[RNG.integers(0, 7, (60, 2))], 0, device)
        zeros = np.array([[0.0, 1.0], [-0.0, 1.0], [1.0, -0.0], [1.0, 0.0]], dtype)
        assert np.signbit(tw.unique(zeros, axis=0, device=device)).tolist() == [[False, False], [False, True]]


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: tw.filter(x, lambda v: v > 0, axis=0), r"axis 0 takes a mask, but 'wanted' is a function"),
        (lambda x: tw.filter(x, x > 0, axis=0), r"mask is bool\[4, 3\], but axis 0 of the data has 4 place"),
        (lambda x: tw.filter(x, np.ones(3, bool), axis=0), r"mask is bool\[3\], but axis 0 of the data has 4 place"),
        (lambda x: tw.filter(x, np.ones(3, np.int32), axis=-1), r"mask is i32\[3\], but axis 1"),
        (lambda x: tw.filter(x, np.ones(3, bool), axis=2), r"axis is 2, but the data have shape \[4, 3\]"),
        (lambda x: tw.filter(x, np.ones(3, bool)), r"mask is bool\[3\], but the data have shape \[4, 3\]"),
        (lambda x: tw.unique(x, axis=-3), r"axis is -3, but the data have shape \[4, 3\]"),
        (lambda x: tw.unique(x, axis=0.5), r"axis is 0\.5, not a whole number"),
        (lambda x: tw.unique(tw.quantize(np.zeros((4, 64), np.float32), "q8_0"), axis=0), r"TW005.*unique takes an array of numbers, but the data are packed"),
        (lambda x: tw.filter(tw.quantize(np.zeros((4, 64), np.float32), "q8_0"), np.ones(4, bool), axis=0), r"TW005.*filter takes an array of numbers"),
        (lambda x: tw.unique(x[0, 0], axis=0), r"unique takes an array of at least one axis|not an array"),
    ],
)
def test_what_is_refused(call: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        call(np.ones((4, 3), np.float32))
