"""Primitives on a real GPU, against NumPy and PyTorch: dtypes, sizes, views, order, more than 2^31 elements, streams, own arrays and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from conftest import require

SIZES = (0, 1, 31, 33, 1000, 16_384, 16_385, 1_000_003)
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64]


@pytest.fixture(autouse=True)
def _device() -> None:
    require("cuda")


def numbers(n: int, dtype: Any, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + n)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype, endpoint=True)
    return (rng.standard_normal(n) * 8).astype(dtype)


def on_gpu(x: np.ndarray) -> Any:
    return tw.asarray(x, device="cuda")


@pytest.mark.parametrize("n", SIZES)
def test_scan(n: int) -> None:
    x = numbers(n, np.int32)
    given = on_gpu(x)
    assert np.array_equal(tw.gpu_scan(given).numpy(), np.cumsum(x, dtype=np.int32))
    assert np.array_equal(tw.gpu_scan(given, "max").numpy(), np.maximum.accumulate(x))
    assert np.array_equal(tw.gpu_scan(given, lambda a, b: b).numpy(), x)
    before = np.concatenate([[7], (np.cumsum(x, dtype=np.int32) + np.int32(7))[:-1]]).astype(np.int32)[:n]
    assert np.array_equal(tw.gpu_scan(given, exclusive=True, init=7).numpy(), before)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_scan_of_every_dtype(dtype: Any) -> None:
    x = np.random.default_rng(1).integers(0, 2, 2000).astype(dtype)
    assert np.array_equal(tw.gpu_scan(on_gpu(x)).numpy(), np.cumsum(x, dtype=dtype))
    large = numbers(300_001, dtype)
    assert np.array_equal(tw.gpu_scan(on_gpu(large), "min").numpy(), np.minimum.accumulate(large))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8], ids=str)
def test_scan_of_a_large_array(dtype: Any) -> None:
    x = numbers((1 << 25) + 12_345, dtype)
    given = on_gpu(x)
    assert np.array_equal(tw.gpu_scan(given).numpy(), np.cumsum(x, dtype=dtype))
    assert np.array_equal(tw.gpu_scan(given, lambda a, b: b).numpy(), x)


def test_a_scan_of_doubles_is_the_same_twice_but_for_rounding() -> None:
    x = numbers(3_000_001, np.float64)
    found = tw.gpu_scan(on_gpu(x)).numpy()
    np.testing.assert_allclose(found, np.cumsum(x), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_reduce(n: int) -> None:
    x = numbers(n, np.int64)
    given = on_gpu(x)
    with np.errstate(over="ignore"):
        assert tw.gpu_reduce(given, 5, lambda acc, v: acc + v).item() == x.sum() + 5
    assert tw.gpu_reduce(given, 5, lambda acc, v: v).item() == (x[-1] if n else 5)
    assert tw.gpu_reduce(given, 0, lambda acc, v: acc if acc > v else v).item() == max(0, x.max(initial=0))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
@pytest.mark.parametrize("n", SIZES[3:])
def test_filter(n: int, dtype: Any) -> None:
    x = numbers(n, dtype)
    mask = np.random.default_rng(n).random(n) > 0.4
    assert np.array_equal(tw.gpu_filter(on_gpu(x), on_gpu(mask)).numpy(), x[mask])
    assert np.array_equal(tw.gpu_filter(on_gpu(x), lambda v: v > 3).numpy(), x[x > 3])


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_sort(n: int, dtype: Any) -> None:
    x = numbers(n, dtype)
    if np.dtype(dtype).kind == "f":
        for k, special in enumerate((np.nan, np.inf, -np.inf, -0.0, 0.0, -np.nan)):
            x[k::101] = special
    equal_nan = np.dtype(dtype).kind == "f"
    assert np.array_equal(tw.gpu_sort(on_gpu(x)).numpy(), np.sort(x), equal_nan=equal_nan)
    assert np.array_equal(tw.gpu_sort(on_gpu(x), descending=True).numpy(), np.sort(x)[::-1], equal_nan=equal_nan)
    assert np.array_equal(tw.gpu_argsort(on_gpu(x)).numpy(), np.argsort(x, kind="stable"))


@pytest.mark.parametrize("kind", ["few", "sorted", "reversed", "equal", "one bit"])
def test_sorts_of_uneven_keys(kind: str) -> None:
    n = 500_009
    rng = np.random.default_rng(5)
    keys = {
        "few": rng.integers(0, 3, n), "sorted": np.arange(n), "reversed": np.arange(n)[::-1], "equal": np.zeros(n), "one bit": rng.integers(0, 2, n) << 31,
    }[kind].astype(np.uint32)  # fmt: skip
    values = np.arange(n, dtype=np.float64)
    order = np.argsort(keys, kind="stable")
    found, moved = tw.gpu_sort(on_gpu(keys), on_gpu(values))
    assert np.array_equal(found.numpy(), keys[order]) and np.array_equal(moved.numpy(), order)


@pytest.mark.parametrize("shape", [(1000, 1), (40, 5), (30_000, 2), (700, 100), (300, 1024), (33, 1025), (9, 4096), (3, 5000)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8], ids=str)
def test_rows(shape: tuple[int, ...], dtype: Any) -> None:
    x = np.random.default_rng(3).integers(0, 90, shape).astype(dtype)
    assert np.array_equal(tw.gpu_sort(on_gpu(x)).numpy(), np.sort(x, axis=-1))
    assert np.array_equal(tw.gpu_argsort(on_gpu(x)).numpy(), np.argsort(x, axis=-1, kind="stable"))
    values = np.arange(x.size, dtype=np.int32).reshape(shape)
    _, moved = tw.gpu_sort(on_gpu(x), on_gpu(values), descending=True)
    assert np.array_equal(moved.numpy(), np.take_along_axis(values, np.argsort(-x.astype(np.int64), axis=-1, kind="stable"), -1))


@pytest.mark.parametrize("bins", [1, 256, 700, 9000, 65_536, 100_000, 300_000])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64], ids=str)
def test_histogram(bins: int, dtype: Any) -> None:
    top = min(bins + 50, np.iinfo(dtype).max)
    x = np.random.default_rng(4).integers(0, top, 1_000_003).astype(dtype)
    inside = x[x <= bins].astype(np.int64)
    assert np.array_equal(tw.gpu_histogram(on_gpu(x), bins).numpy(), np.bincount(np.minimum(inside, bins - 1), minlength=bins))
    same = np.full(3_000_000, 3, dtype)
    assert tw.gpu_histogram(on_gpu(same), bins).numpy()[min(3, bins - 1)] == (same.size if bins >= 3 else 0)


def test_histogram_of_floats() -> None:
    x = np.random.default_rng(5).random(1_000_003).astype(np.float32)
    x[::50] = np.nan
    for bins in (64, 4096, 65_536):
        assert np.array_equal(tw.gpu_histogram(on_gpu(x), bins, (0, 1)).numpy(), np.histogram(x[x == x], bins, (0, 1))[0])


def test_unique_and_run_lengths() -> None:
    x = np.random.default_rng(6).integers(0, 1000, 500_000).astype(np.int16)
    values, counts = tw.gpu_unique(on_gpu(x), return_counts=True)
    wanted, wanted_counts = np.unique(x, return_counts=True)
    assert np.array_equal(values.numpy(), wanted) and np.array_equal(counts.numpy(), wanted_counts)
    runs, lengths = (a.numpy() for a in tw.gpu_run_lengths(on_gpu(x)))
    assert np.array_equal(np.repeat(runs, lengths), x) and not np.any(runs[1:] == runs[:-1])


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int32, np.float64], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((300_007, 3), 0), ((8, 70_001), 1), ((3, 5000, 16), 1), ((31, 4, 33), -1)], ids=str)
def test_slices(dtype: Any, shape: tuple[int, ...], axis: int) -> None:
    x = np.random.default_rng(8).integers(0, 4, shape).astype(dtype)
    mask = np.random.default_rng(9).random(shape[axis]) < 0.4
    assert np.array_equal(tw.filter(on_gpu(x), on_gpu(mask), axis=axis).numpy(), np.compress(mask, x, axis))
    few = x if x.size // shape[axis] < 100 else x[:1, :, :3]
    values, counts = tw.unique(on_gpu(np.ascontiguousarray(few)), axis=axis, return_counts=True)
    wanted, wanted_counts = np.unique(few, axis=axis, return_counts=True)
    assert np.array_equal(values.numpy(), wanted) and np.array_equal(counts.numpy(), wanted_counts)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (65, 33), (3, 70, 130), (1000, 1004), (4096, 2)], ids=str)
def test_transpose(dtype: Any, shape: tuple[int, ...]) -> None:
    x = numbers(int(np.prod(shape)), dtype).reshape(shape)
    assert np.array_equal(tw.gpu_transpose(on_gpu(x)).numpy(), np.swapaxes(x, -1, -2))


def test_tensors_stay_tensors_and_run_on_their_stream() -> None:
    torch = pytest.importorskip("torch")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(1 << 22, device="cuda")
        x += 1
        found, kept = tw.gpu_sort(x), tw.gpu_filter(x, lambda v: v > 1)
        scaled = tw.gpu_map(x, x, lambda a, b: a * b)
        total = tw.gpu_reduce(x, 0.0, lambda a, b: a + b)
        assert torch.equal(found, torch.sort(x)[0]) and torch.equal(kept, x[x > 1])
        torch.testing.assert_close(scaled, x * x)
        torch.testing.assert_close(total, x.sum())
        for view in (x[1:], x[::3], x.reshape(2048, 2048).T[5]):
            torch.testing.assert_close(tw.gpu_scan(view.double()), torch.cumsum(view.double(), 0))
            assert torch.equal(tw.gpu_filter(view, lambda v: v > 1), view[view > 1])
            assert torch.equal(tw.gpu_sort(view), torch.sort(view)[0])


def test_host_arrays_come_back() -> None:
    x = numbers(100_000, np.float32)
    assert np.array_equal(tw.gpu_sort(x, device="cuda"), np.sort(x))
    assert np.array_equal(tw.gpu_map(x, lambda v: v + 1, device="cuda"), x + 1)
    assert tw.gpu_reduce(x.astype(np.int64), device="cuda") == x.astype(np.int64).sum()


def test_more_than_2_to_the_31_elements() -> None:
    torch = pytest.importorskip("torch")

    n = (1 << 31) + 12_345
    x = torch.randint(0, 256, (n,), device="cuda", dtype=torch.uint8)
    assert torch.equal(tw.gpu_histogram(x), torch.bincount(x[: 1 << 30].int(), minlength=256)
                       + torch.bincount(x[1 << 30 : 1 << 31].int(), minlength=256) + torch.bincount(x[1 << 31 :].int(), minlength=256))  # fmt: skip
    kept = tw.gpu_filter(x, lambda v: v > 250)
    assert torch.equal(kept[-1000:], x[-2_000_000:][x[-2_000_000:] > 250][-1000:])
    running = tw.gpu_scan(x)
    assert int(running[-1]) == int(x.sum()) % 256
    found = tw.gpu_sort(x)
    assert bool((found[1:] >= found[:-1]).all()) and torch.equal(tw.gpu_histogram(found), tw.gpu_histogram(x))
