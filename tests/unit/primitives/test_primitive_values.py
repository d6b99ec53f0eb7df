"""Primitives on the CPU and in the emulator, against NumPy: dtypes, sizes around those of tiles, order, NaN, views, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA
from tilewright.base.dtypes import bf16, from_numpy
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.compile.primitives import finished_program
from tilewright.ir.emulator import run_program
from tilewright.primitives.functions import Monoid
from tilewright.primitives.scan import scan_program, scan_shape
from tilewright.primitives.scan_plan import ScanPlan, StateFunction

DEVICES = ("cpu", "emulator")
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64]


def sizes(device: str) -> tuple[int, ...]:
    return (0, 1, 2, 31, 1000, 8200) if device == "emulator" else (0, 1, 7, 4096, 8193, 65536, 200_001)


def numbers(n: int, dtype: Any, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + n)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype, endpoint=True)
    if np.dtype(dtype).kind == "b":
        return rng.random(n) > 0.5
    return (rng.standard_normal(n) * 8).astype(dtype)


def with_special(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    for k, special in enumerate((np.nan, np.inf, -np.inf, -0.0, 0.0, -np.nan)):
        values[k::11] = special
    return values


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_scan_of_every_length(device: str) -> None:
    for n in sizes(device):
        x = numbers(n, np.int32)
        assert np.array_equal(tw.gpu_scan(x, device=device), np.cumsum(x, dtype=np.int32)), n
        assert np.array_equal(tw.gpu_scan(x, "max", device=device), np.maximum.accumulate(x)), n
        before = np.concatenate([[7], (np.cumsum(x, dtype=np.int32) + np.int32(7))[:-1]]).astype(np.int32)[:n]
        assert np.array_equal(tw.gpu_scan(x, exclusive=True, init=7, device=device), before), n


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, bf16.numpy], ids=str)
def test_scan_of_every_dtype(device: str, dtype: Any) -> None:
    n = 3000
    x = (np.random.default_rng(1).integers(0, 3, n)).astype(dtype)
    wide = np.cumsum(x.astype(np.float64 if np.dtype(dtype).kind not in "iu" else dtype), dtype=None if np.dtype(dtype).kind not in "iu" else dtype)
    found = tw.gpu_scan(x, device=device)
    assert found.dtype == x.dtype
    assert np.array_equal(found.astype(np.float64), wide.astype(dtype).astype(np.float64))
    assert np.array_equal(tw.gpu_scan(x, "min", device=device).astype(float), np.minimum.accumulate(x.astype(float)))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_scan_keeps_the_order_of_a_function_that_is_not_commutative(device: str) -> None:
    for n in sizes(device):
        x = numbers(n, np.int64)
        assert np.array_equal(tw.gpu_scan(x, lambda a, b: b, device=device), x), n
        assert np.array_equal(tw.gpu_scan(x, lambda a, b: a, device=device), np.repeat(x[:1], n)), n
        if n:
            assert np.array_equal(tw.gpu_scan(x, lambda a, b: a, exclusive=True, init=3, device=device), np.full(n, 3)), n


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_scan_in_another_dtype(device: str) -> None:
    x = numbers(2000, np.uint8)
    found = tw.gpu_scan(x, dtype=tw.i64, device=device)
    assert found.dtype == np.int64 and np.array_equal(found, np.cumsum(x, dtype=np.int64))


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=str)
def test_scan_in_the_tiles_of_large_arrays(dtype: Any) -> None:
    kind = from_numpy(np.dtype(dtype))
    assert kind is not None
    plan = ScanPlan((kind,), (kind,), StateFunction(Monoid(kind, "add")))
    target = parse_target("sm_90a")
    tile = scan_shape(plan, large=True, target=target).tile
    for n in (100, tile, tile * 2 + 1):
        x = numbers(n, dtype)
        found = run_program(finished_program(scan_program(plan, target, large=True), target), {"x": x})["y"]
        assert np.array_equal(found, np.cumsum(x, dtype=dtype))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_reduce(device: str) -> None:
    for n in sizes(device):
        x = numbers(n, np.int64)
        with np.errstate(over="ignore"):
            assert tw.gpu_reduce(x, 5, lambda acc, v: acc + v, device=device) == x.sum() + 5, n
        assert tw.gpu_reduce(x, 5, lambda acc, v: v, device=device) == (x[-1] if n else 5), n
        assert tw.gpu_reduce(x, -(1 << 63), "max", device=device) == (x.max() if n else -(1 << 63)), n
    half = np.ones(5000, np.float16)
    assert tw.gpu_reduce(half, 0, device=device) == 5000


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, np.bool_], ids=str)
def test_filter(device: str, dtype: Any) -> None:
    for n in sizes(device)[-3:]:
        x = numbers(n, dtype)
        mask = np.random.default_rng(n).random(n) > 0.4
        assert np.array_equal(tw.gpu_filter(x, mask, device=device), x[mask]), n
        found = tw.gpu_filter(x, lambda v: v > 0, device=device)
        assert found.dtype == x.dtype and np.array_equal(found, x[x > 0]), n


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_filter_of_all_and_none(device: str) -> None:
    for n in sizes(device):
        x = numbers(n, np.float32)
        assert np.array_equal(tw.gpu_filter(x, lambda v: v == v, device=device), x), n
        assert tw.gpu_filter(x, lambda v: v != v, device=device).size == 0


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, bf16.numpy, np.bool_], ids=str)
def test_sort_of_every_dtype(device: str, dtype: Any) -> None:
    for n in (0, 1, 700) if device == "emulator" else (0, 1, 3000, 70_001):
        x = numbers(n, dtype)
        if np.dtype(dtype).kind == "f":
            x = with_special(x)
        wanted = np.sort(x.astype(np.float32) if dtype is bf16.numpy else x)
        found = tw.gpu_sort(x, device=device)
        assert found.dtype == x.dtype
        found = found.astype(wanted.dtype)
        assert np.array_equal(found, wanted, equal_nan=wanted.dtype.kind == "f")
        down = tw.gpu_sort(x, descending=True, device=device).astype(wanted.dtype)
        assert np.array_equal(down, wanted[::-1], equal_nan=wanted.dtype.kind == "f")


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_sorts_are_stable(device: str) -> None:
    n = 5000 if device == "emulator" else 100_000
    keys = np.random.default_rng(2).integers(-5, 5, n).astype(np.int16)
    order = np.argsort(keys, kind="stable")
    assert np.array_equal(tw.gpu_argsort(keys, device=device), order)
    values = np.arange(n, dtype=np.float64)
    sorted_keys, moved = tw.gpu_sort(keys, values, device=device)
    assert np.array_equal(sorted_keys, keys[order]) and np.array_equal(moved, order)
    assert np.array_equal(tw.gpu_argsort(keys, descending=True, device=device), np.argsort(-keys, kind="stable"))
    special = with_special(np.zeros(500, np.float32))
    assert np.array_equal(tw.gpu_argsort(special, device=device), np.argsort(special, kind="stable"))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("shape", [(3, 1), (40, 5), (300, 2), (7, 100), (3, 1025), (2, 3, 77), (0, 5), (5, 0)], ids=str)
def test_sort_of_rows(device: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(3).integers(0, 40, shape).astype(np.int32)
    assert np.array_equal(tw.gpu_sort(x, device=device), np.sort(x, axis=-1))
    assert np.array_equal(tw.gpu_argsort(x, device=device), np.argsort(x, axis=-1, kind="stable"))
    values = np.arange(x.size, dtype=np.uint64).reshape(shape)
    _, moved = tw.gpu_sort(x, values, descending=True, device=device)
    assert np.array_equal(moved, np.take_along_axis(values, np.argsort(-x, axis=-1, kind="stable"), -1))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("bins", [1, 10, 700, 9000, 70_000])
def test_histogram(device: str, bins: int) -> None:
    n = 3000 if device == "emulator" else 200_001
    x = np.random.default_rng(4).integers(-50, bins + 50, n)
    found = tw.gpu_histogram(x, bins, device=device)
    assert found.dtype == np.int64
    inside = x[(x >= 0) & (x <= bins)]
    assert np.array_equal(found, np.bincount(np.minimum(inside, bins - 1), minlength=bins))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_histogram_of_floats(device: str) -> None:
    x = with_special(np.random.default_rng(5).random(4000).astype(np.float32))
    finite = x[np.isfinite(x)]
    # Powers of two: every step is exact, so that the bins are NumPy's.
    assert np.array_equal(tw.gpu_histogram(x, 64, (0, 1), device=device), np.histogram(finite, 64, (0, 1))[0])
    assert tw.gpu_histogram(finite, 16, device=device).sum() == finite.size
    same = np.full(70_000, 0.25)
    assert tw.gpu_histogram(same, 4, (0, 1), device=device).tolist() == [0, 70_000, 0, 0]
    with pytest.raises(UserError, match="which is no range for bins"):
        tw.gpu_histogram(x, 16, device=device)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_counts_of_more_than_16_bits_in_many_bins(device: str) -> None:
    """Tables of 16-bit counts hand on what overflows: of even bins, odd ones and both in turn."""
    n = 70_000
    for values in ([4], [5], [4, 5], [69_998, 69_999]):
        x = np.resize(np.array(values, np.int32), n * 2 if device == "cpu" else n)
        found = tw.gpu_histogram(x, 70_000, device=device)
        assert np.array_equal(found, np.bincount(x, minlength=70_000))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_unique_and_run_lengths(device: str) -> None:
    for n in sizes(device)[:5]:
        x = np.random.default_rng(6).integers(0, 9, n).astype(np.int16)
        values, counts = tw.gpu_unique(x, return_counts=True, device=device)
        wanted, wanted_counts = np.unique(x, return_counts=True)
        assert np.array_equal(values, wanted) and np.array_equal(counts, wanted_counts)
        runs, lengths = tw.gpu_run_lengths(x, device=device)
        assert np.array_equal(np.repeat(runs, lengths), x) and not np.any(runs[1:] == runs[:-1])
    floats = np.array([np.nan, 1, np.nan, np.nan, 0.5], np.float32)
    assert np.array_equal(tw.gpu_unique(floats, device=device), np.unique(floats), equal_nan=True)
    runs, lengths = tw.gpu_run_lengths(floats, device=device)
    assert lengths.tolist() == [1, 1, 2, 1]


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, np.bool_], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (65, 33), (3, 70, 130), (0, 4)], ids=str)
def test_transpose(device: str, dtype: Any, shape: tuple[int, ...]) -> None:
    x = numbers(int(np.prod(shape)), dtype).reshape(shape)
    found = tw.gpu_transpose(x, device=device)
    assert found.flags.c_contiguous and np.array_equal(found, np.swapaxes(x, -1, -2))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_map(device: str) -> None:
    k = 0.25
    x, y = numbers(1000, np.float32), numbers(1000, np.float32, 1)
    np.testing.assert_allclose(tw.gpu_map(x, y, lambda a, b: a * b + k, device=device), x * y + np.float32(k), rtol=1e-5, atol=1e-6)
    assert np.array_equal(tw.gpu_map(x.reshape(10, 100), lambda v: v > k, device=device), x.reshape(10, 100) > k)
    found = tw.gpu_map(numbers(50, np.int8), lambda v: v * 2, dtype=tw.i32, device=device)
    assert found.dtype == np.int32
    assert tw.gpu_map(np.empty((0, 3), np.float32), lambda v: v + 1, device=device).shape == (0, 3)


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_views_and_tensors(device: str) -> None:
    torch = pytest.importorskip("torch")
    x = numbers(3001, np.float32)
    assert np.array_equal(tw.gpu_sort(x[1::2], device=device), np.sort(x[1::2]))
    assert np.array_equal(tw.gpu_filter(x[1:], lambda v: v > 0, device=device), x[1:][x[1:] > 0])
    assert np.array_equal(tw.gpu_sort(np.asfortranarray(x[:3000].reshape(50, 60)), device=device), np.sort(x[:3000].reshape(50, 60)))
    found = tw.gpu_sort(torch.from_numpy(x), device=device)
    assert isinstance(found, torch.Tensor) and np.array_equal(found.numpy(), np.sort(x))


def test_a_changed_captured_number_is_seen() -> None:
    x = np.arange(10, dtype=np.float32)
    limit = 3.0

    def above(v: float) -> bool:
        return v > limit

    assert tw.gpu_filter(x, above).tolist() == [4, 5, 6, 7, 8, 9]
    limit = 7.0
    assert tw.gpu_filter(x, above).tolist() == [8, 9]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: tw.gpu_scan(x, "median"), "scan does not know 'median'"),
        (lambda x: tw.gpu_scan(x, lambda a, b: a + b, exclusive=True), "needs init="),
        (lambda x: tw.gpu_scan(x, "xor"), "takes integers, got f32"),
        (lambda x: tw.gpu_scan(x.astype(bool)), "does not take bool"),
        (lambda x: tw.gpu_reduce(x.astype(np.int8), 1000), "init is 1000, which is no i8"),
        (lambda x: tw.gpu_filter(x, x), r"mask is f32\[10\]"),
        (lambda x: tw.gpu_filter(x, x[:5] > 0), r"mask is bool\[5\]"),
        (lambda x: tw.gpu_sort(x, x[:5]), r"values have shape \[5\], but its keys \[10\]"),
        (lambda x: tw.gpu_sort(np.float32(1)), "not an array"),
        (lambda x: tw.gpu_histogram(x, 0), "bins is 0"),
        (lambda x: tw.gpu_histogram(x, 4, (1, 1)), "not a smaller and a larger finite number"),
        (lambda x: tw.gpu_transpose(x), r"at least two axes, got shape \[10\]"),
        (lambda x: tw.gpu_map(x), "takes one or more arrays and then a function"),
        (lambda x: tw.gpu_map(x, x[:5], lambda a, b: a), r"arrays of one shape, got \[10\] and \[5\]"),
        (lambda x: tw.gpu_map(x, lambda a, b: a), r"takes 2 number\(s\), but is called with 1"),
        (lambda x: tw.gpu_sort([1, 2]), "not an array"),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        call(np.arange(10, dtype=np.float32))
