"""Sorts, places and the first k along axes, by keys, on the CPU and in the emulator, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA
from tilewright.base.dtypes import DType, bf16, f8e4m3, f8e5m2
from tilewright.base.errors import UserError

DEVICES = ("cpu", "emulator")
DTYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64, bf16.numpy, np.bool_]
SHAPES = [(1,), (31,), (1, 1), (3, 31), (33, 7), (2, 29, 3), (0, 4), (4, 0)]
EMULATED = [(31,), (2, 29, 3), (4, 0)]
"""The emulator is slow, and its code is the same for all lengths."""
ON_DEVICES = [*(("cpu", shape) for shape in SHAPES), *(("emulator", shape) for shape in EMULATED)]


def numbers(shape: tuple[int, ...], dtype: Any = np.int32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30, shape).astype(dtype)


def special(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    x = (np.random.default_rng(1).standard_normal(shape) * 4).astype(dtype)
    flat = x.reshape(-1)
    for k, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0)):
        flat[k::7] = value
    return x


def order_of(x: np.ndarray, axis: int, descending: bool = False) -> np.ndarray:
    """The stable order; NaN is the largest number."""
    wide = x.astype(np.float64) if x.dtype.kind not in "iub" else x
    ranks = np.unique(wide, return_inverse=True)[1].reshape(x.shape).astype(np.int64)
    return np.argsort(-ranks if descending else ranks, axis, kind="stable")


@pytest.mark.parametrize(("device", "shape"), ON_DEVICES, ids=str)
def test_every_axis(device: str, shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    values = np.arange(x.size, dtype=np.float64).reshape(shape)
    for axis in range(-len(shape) if device == "cpu" else 0, len(shape)):
        for descending in (False, True):
            order = order_of(x, axis, descending)
            options = {"axis": axis, "descending": descending, "device": device}
            assert np.array_equal(tw.argsort(x, **options), order)
            assert np.array_equal(tw.sort(x, **options), np.take_along_axis(x, order, axis))
            _, moved = tw.sort(x, values, **options)
            assert np.array_equal(moved, np.take_along_axis(values, order, axis))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_along_the_first_axis(device: str, dtype: Any) -> None:
    """More and fewer elements than are compared with each other, on a CPU."""
    for shape in ((40, 3), (20, 3)) if device == "cpu" else ((40, 3),):
        x = special(shape, dtype) if np.dtype(dtype).kind in "fV" else numbers(shape, dtype)
        order = order_of(x, 0)
        assert np.array_equal(tw.argsort(x, axis=0, device=device), order)
        found = tw.sort(x, axis=0, device=device)
        assert found.dtype == x.dtype
        wanted = np.take_along_axis(x, order, 0).astype(np.float64)
        assert np.array_equal(found.astype(np.float64), wanted, equal_nan=True)
        places = tw.topk(x, 5, axis=0, device=device)[1]
        assert np.array_equal(places, order_of(x, 0, True)[:5])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.float32, np.float64], ids=str)
def test_short_rows(dtype: Any) -> None:
    """Rows about as long as those whose elements are compared with each other, and as the vectors that compare them."""
    for n in (2, 7, 8, 9, 15, 16, 17, 24, 25, 31, 33, 63, 64, 65):
        x = numbers((5, n), dtype, n)
        order = order_of(x, 1)
        assert np.array_equal(tw.argsort(x), order)
        keys, moved = tw.sort(x, order.astype(np.float32))
        assert np.array_equal(keys, np.sort(x)) and np.array_equal(moved, np.take_along_axis(order.astype(np.float32), order, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_by_a_key(device: str) -> None:
    x = np.random.default_rng(0).integers(-20, 20, (5, 40)).astype(np.float32)
    for axis in (0, 1):
        order = order_of(np.abs(x), axis)
        assert np.array_equal(tw.sort(x, axis=axis, key=abs_of, device=device), np.take_along_axis(x, order, axis))
        assert np.array_equal(tw.argsort(x, axis=axis, key=lambda v: v if v > 0 else -v, device=device), order)
        keys, moved = tw.sort(x, np.arange(x.size).reshape(x.shape), axis=axis, key=abs_of, descending=True, device=device)
        down = order_of(np.abs(x), axis, True)
        assert np.array_equal(keys, np.take_along_axis(x, down, axis))
        assert np.array_equal(moved, np.take_along_axis(np.arange(x.size).reshape(x.shape), down, axis))
        values, places = tw.topk(x, 3, axis=axis, key=abs_of, largest=False, device=device)
        first = np.take(order, range(3), axis)
        assert np.array_equal(places, first) and np.array_equal(values, np.take_along_axis(x, first, axis))


def abs_of(v: Any) -> Any:
    return -v if v < 0 else v


@pytest.mark.parametrize(
    ("device", "shape"), [*(("cpu", s) for s in [(1,), (37,), (300,), (3, 101), (101, 3), (2, 50, 3)]), ("emulator", (37,)), ("emulator", (2, 50, 3))], ids=str
)
def test_the_first_k(device: str, shape: tuple[int, ...]) -> None:
    for x in (numbers(shape), special(shape, np.float32), np.zeros(shape, np.int8)) if device == "cpu" else (special(shape, np.float32),):
        for axis in range(len(shape)):
            for k in sorted({0, 1, min(3, shape[axis]), shape[axis] // 4, shape[axis]}) if device == "cpu" else (min(3, shape[axis]),):
                for largest in (True, False):
                    values, places = tw.topk(x, k, axis=axis, largest=largest, device=device)
                    wanted = np.take(order_of(x, axis, largest), range(k), axis)
                    assert places.dtype == np.int64 and np.array_equal(places, wanted)
                    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis))


def test_the_first_k_of_many() -> None:
    """Several parts of a row are selected from on a CPU."""
    for n in (200_003, 65_536):
        for x in (np.random.default_rng(0).random(n).astype(np.float32), numbers((n,)), np.random.default_rng(0).integers(-(2**60), 2**60, n)):
            for k in (1, 17, 9_000, n // 5):
                for largest in (True, False):
                    values, places = tw.topk(x, k, largest=largest)
                    wanted = order_of(x, 0, largest)[:k]
                    assert np.array_equal(places, wanted) and np.array_equal(values, x[wanted])


def test_long_rows() -> None:
    x = np.random.default_rng(0).standard_normal((3, 20_001))
    assert np.array_equal(tw.sort(x), np.sort(x))
    assert np.array_equal(tw.argsort(x), np.argsort(x, kind="stable"))
    y = np.random.default_rng(0).integers(-(2**62), 2**62, (2, 300_001))
    assert np.array_equal(tw.sort(y), np.sort(y))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32, np.int64, np.uint64, np.float64], ids=str)
def test_buckets_of_every_size(dtype: Any) -> None:
    """Buckets of one key, of a few, of hundreds and of all keys: each is sorted by digits of another length. Equal keys keep their order."""
    rng, kind = np.random.default_rng(7), np.dtype(dtype)
    bits = 8 * kind.itemsize
    wide = rng.integers(0, 1 << 63, 40_001, dtype=np.uint64) >> np.uint64(63 - bits + (bits == 64))
    near = rng.integers(0, 50, 30_011, dtype=np.uint64)
    two = np.where(rng.random(30_011) < 0.5, np.uint64(3), np.uint64((1 << bits) - 7))
    mixed = np.concatenate([near, wide[:900], near + np.uint64(1 << (bits - 2))])
    for keys in (wide, wide[:1500], near, two, mixed, near + (near << np.uint64(bits - 8)), wide[:1], np.full(20_000, wide[0])):
        x = keys.astype(f"u{kind.itemsize}").view(kind)
        if kind.kind == "f":
            x = np.where(np.isnan(x) | (x == 0), kind.type(1.5), x)
        for descending in (False, True):
            order = order_of(x, 0, descending)
            assert np.array_equal(tw.argsort(x, descending=descending), order)
            assert np.array_equal(tw.sort(x, descending=descending), x[order])


@pytest.mark.parametrize("device", DEVICES)
def test_views(device: str) -> None:
    x = numbers((12, 10, 6))
    for view in (x[::2, ::-1], x.transpose(2, 0, 1), np.asfortranarray(x)) if device == "cpu" else (x[::2, ::-1],):
        for axis in range(3):
            assert np.array_equal(tw.sort(view, axis=axis, device=device), np.sort(view, axis))
            assert np.array_equal(tw.argsort(view, axis=axis, device=device), np.argsort(view, axis, kind="stable"))


def _x() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tw.sort(_x(), axis=2), r"axis is 2, but the data have shape \[3, 4\]"),
        (lambda: tw.argsort(_x(), axis=None), "axis is None, not a whole number"),
        (lambda: tw.topk(_x(), 5), r"k is 5, but axis 1 of the data has 4 element\(s\)"),
        (lambda: tw.topk(_x(), 4, axis=0), r"k is 4, but axis 0 of the data has 3 element\(s\)"),
        (lambda: tw.topk(_x(), -1), "k is -1"),
        (lambda: tw.topk(_x(), 1.5), "k is 1.5"),
        (lambda: tw.sort(_x(), _x()[:2]), r"values have shape \[2, 4\], but its keys \[3, 4\]"),
        (lambda: tw.sort(_x(), key=lambda a, b: a), r"takes 2 number\(s\)"),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        call()


@pytest.mark.parametrize("device", ["cpu", "emulator", CUDA])
@pytest.mark.parametrize("dtype", [f8e4m3, f8e5m2], ids=str)
def test_every_f8(dtype: DType, device: str) -> None:
    """Every number there is of 8 bits, with all NaN last and the largest one before them."""
    x = np.random.default_rng(3).permutation(np.arange(256, dtype=np.uint8)).view(dtype.numpy)
    wide = x.astype(np.float32)
    assert np.array_equal(tw.sort(x, device=device).astype(np.float32), np.sort(wide), equal_nan=True)
    assert np.array_equal(tw.argsort(x, device=device), np.argsort(wide, kind="stable"))
    assert np.array_equal(tw.unique(x, device=device).astype(np.float32), np.unique(wide), equal_nan=True)
