"""Primitives on devices whose blocks cannot wait for each other: every one of them, odd sizes, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import f32, i32
from tilewright.base.target import parse_target
from tilewright.compile.primitives import finished_program
from tilewright.ir.emulator import run_program
from tilewright.primitives.functions import Monoid
from tilewright.primitives.scan_plan import ScanPlan, StateFunction
from tilewright.primitives.sort import SortPlan
from tilewright.primitives.threads.filter import threads_filter_program
from tilewright.primitives.threads.scan import is_cut, threads_scan_program
from tilewright.primitives.threads.sort import threads_sort_program

on_each = pytest.mark.parametrize("device", [pytest.param(name, marks=pytest.mark.requires(name)) for name in ("webgpu", "vulkan", "opencl")])
SIZES = (1, 31, 4099)


def numbers(shape: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.random.default_rng(0).integers(-1000, 1000, shape).astype(dtype)


def floats(shape: Any) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def host(array: Any) -> np.ndarray:
    return array.numpy() if hasattr(array, "numpy") else np.asarray(array)


@on_each
def test_scans(device: str) -> None:
    for n in SIZES:
        x = tw.to_device(numbers(n), device)
        np.testing.assert_array_equal(host(tw.scan(x)), np.cumsum(numbers(n), dtype=np.int32))
    x, plain = tw.to_device(numbers(4099), device), numbers(4099)
    np.testing.assert_array_equal(host(tw.scan(x, exclusive=True, reverse=True)), np.cumsum(plain[::-1], dtype=np.int32)[::-1] - plain)
    flags = np.random.default_rng(2).random(4099) < 0.02
    np.testing.assert_array_equal(host(tw.scan(x, segments=tw.to_device(flags, device))), tw.scan(plain, segments=flags))
    later = lambda a, b: b * 1 + a * 0  # noqa: E731
    np.testing.assert_array_equal(host(tw.scan(x, later)), plain)  # a function that nothing is neutral to, and whose order counts
    for shape in ((3, 301), (70, 33)):
        rows = numbers(shape, np.int64)
        np.testing.assert_array_equal(host(tw.scan(tw.to_device(rows, device), axis=1)), np.cumsum(rows, 1))
        np.testing.assert_array_equal(host(tw.scan(tw.to_device(rows, device), axis=0)), np.cumsum(rows, 0))


@on_each
def test_sorts(device: str) -> None:
    for n in SIZES:
        x = floats(n)
        x[:: max(2, n // 5)] = np.nan
        np.testing.assert_array_equal(host(tw.sort(tw.to_device(x, device))), np.sort(x))
    small = numbers(1025, np.int8)
    np.testing.assert_array_equal(host(tw.sort(tw.to_device(small, device), descending=True)), np.sort(small)[::-1])
    np.testing.assert_array_equal(host(tw.argsort(tw.to_device(small, device))), np.argsort(small, kind="stable"))
    rows = numbers((5, 77), np.int16)
    np.testing.assert_array_equal(host(tw.sort(tw.to_device(rows, device), axis=1)), np.sort(rows, 1))
    np.testing.assert_array_equal(host(tw.topk(tw.to_device(small, device), 7)[0]), np.sort(small)[::-1][:7])


@on_each
def test_filters_and_runs(device: str) -> None:
    for n in SIZES:
        x = numbers(n)
        np.testing.assert_array_equal(host(tw.gpu_filter(tw.to_device(x, device), lambda v: v > 0)), x[x > 0])
    mask = numbers(4099) % 3 == 0
    np.testing.assert_array_equal(host(tw.gpu_filter(tw.to_device(numbers(4099), device), tw.to_device(mask, device))), numbers(4099)[mask])
    np.testing.assert_array_equal(host(tw.unique(tw.to_device(numbers(999, np.int8), device))), np.unique(numbers(999, np.int8)))


@on_each
def test_the_others(device: str) -> None:
    x, f = numbers(4099), floats(4099)
    assert host(tw.gpu_reduce(tw.to_device(x, device))) == x.sum()
    np.testing.assert_array_equal(host(tw.histogram(tw.to_device(abs(x), device), 900, range=(0, 900))), np.histogram(abs(x), 900, (0, 900))[0])
    np.testing.assert_array_equal(host(tw.histogram(tw.to_device(f, device), 16, range=(-2, 2))), np.histogram(f, 16, (-2, 2))[0])
    edges = np.array([-2, -1.1, 0.3, float(f[7]), 3])
    np.testing.assert_array_equal(host(tw.histogram(tw.to_device(f, device), edges)), np.histogram(f.astype(np.float64), edges)[0])
    rows = f[:4000].reshape(8, 500)
    expected = np.stack([np.histogram(row, 10, (-2, 2))[0] for row in rows])
    np.testing.assert_array_equal(host(tw.histogram(tw.to_device(rows, device), 10, range=(-2, 2), axis=1)), expected)
    matrix = numbers((33, 70))
    np.testing.assert_array_equal(host(tw.gpu_transpose(tw.to_device(matrix, device))), matrix.T)
    np.testing.assert_array_equal(host(tw.gpu_map(tw.to_device(x, device), lambda v: v * 2)), x * 2)


def emulated(program: Any, inputs: dict[str, Any], outputs: dict[str, np.ndarray]) -> None:
    run_program(finished_program(program, parse_target("spirv-vulkan")), inputs, outputs)


@pytest.mark.parametrize("n", [1, 65, 1500])
def test_programs_in_the_emulator(n: int) -> None:
    x, y, count = floats((2, n)), np.empty((2, n), np.float32), np.zeros(1, np.int64)
    emulated(threads_sort_program(SortPlan(f32)), {"keys": x}, {"sorted": y})
    np.testing.assert_array_equal(y, np.sort(x, 1))
    whole = numbers((2, n))
    total = np.empty_like(whole)
    emulated(threads_scan_program(ScanPlan((i32,), (i32,), StateFunction(Monoid(i32, "add"))), is_cut(2, n)), {"x": whole}, {"y": total})
    np.testing.assert_array_equal(total, np.cumsum(whole, 1, dtype=np.int32))
    places = np.zeros(n, np.int64)
    emulated(threads_filter_program(i32, None, heads=True), {"x": np.sort(whole[0])}, {"y": places, "count": count})
    np.testing.assert_array_equal(places[: count[0]], np.flatnonzero(np.diff(np.sort(whole[0]), prepend=-5000)))
