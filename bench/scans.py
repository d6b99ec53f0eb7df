"""Scans, sorts and histograms along axes: on the CPU against NumPy, Numba and PyTorch where they are installed, on a GPU against PyTorch and CuPy.

In: whether the run is quick. Out: cases for `harness.measure`, made as those of `primitives`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Case
from bench.primitives import Row, case_of, exactly, sums

Variants = dict[str, Callable[[], Any]]


@tw.kernel
def loop_sum(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    total = 0.0
    for i in range(n):
        total += x[i]
        out[i] = total
    return out


@tw.kernel
def loop_rows(x: tw.Array) -> tw.Array:
    m, n = x.shape
    out = tw.empty((m, n), x.dtype)
    for r in tw.grid(m):
        total = 0.0
        for i in range(n):
            total += x[r, i]
            out[r, i] = total
    return out


def _pairs(found: Any, wanted: Any) -> str:
    """Values and their places: values have to be the same, places may differ among equal ones."""
    return exactly(found[0], wanted[0])


def _close(found: Any, wanted: Any) -> str:
    worst = float(np.max(np.abs(np.asarray(found) - np.asarray(wanted)) / np.maximum(np.abs(np.asarray(wanted)), 1)))
    return "" if worst < 1e-9 else f"relative error {worst:.2g}"


def cpu_cases(quick: bool) -> list[Case]:
    has_numba, has_torch = (importlib.util.find_spec(name) is not None for name in ("numba", "torch"))
    side, small = (512, (8, 64, 64)) if quick else (4096, (64, 512, 512))
    m, table = (1 << 18, (256, 256)) if quick else (1 << 22, (2048, 2048))
    rng = np.random.default_rng(1)

    def uniform(*shape: int) -> Callable[[], Any]:
        return lambda: rng.random(shape, np.float32)

    def scans(x: np.ndarray, axis: int) -> Variants:
        found: Variants = {
            "reference": lambda: np.cumsum(x, axis, np.float64), OURS: lambda: tw.scan(x, axis=axis), "numpy": lambda: np.cumsum(x, axis),
        }  # fmt: skip
        if has_numba and x.ndim == 2:
            compiled = _numba_scans()[axis]
            found["numba"] = lambda: compiled(x)
        if has_torch:
            torch: Any = importlib.import_module("torch")
            found["torch"] = lambda: torch.cumsum(torch.from_numpy(x), axis)
        return found

    def scan(shape: tuple[int, ...], axis: int) -> Row:
        name = f"scan_axis{axis}"
        return Row(name, shape, "f32", 8 * int(np.prod(shape)), 1.0, uniform(*shape), lambda x: scans(x, axis), sums)

    def running(x: np.ndarray) -> Variants:
        kernel = loop_sum if x.ndim == 1 else loop_rows
        return {"reference": lambda: np.cumsum(x, -1, np.float64), OURS: lambda: kernel(x), "our tw.scan": lambda: tw.scan(x), "numpy": lambda: np.cumsum(x, -1)}

    weights = rng.random(m)
    edges = np.sort(rng.random(257).astype(np.float64))
    rows = [
        scan((side, side), 1), scan((side, side), 0), scan(small, 1), scan(small, 0),
        Row("scan_reverse", (side, side), "f32", 8 * side * side, 1.0, uniform(side, side), lambda x: {
            "reference": lambda: np.cumsum(x[:, ::-1], 1, np.float64)[:, ::-1], OURS: lambda: tw.scan(x, reverse=True), "numpy": lambda: np.cumsum(x[:, ::-1], 1)[:, ::-1],
        }, sums),
        Row("scan_max", (side, side), "f32", 8 * side * side, 1.0, uniform(side, side), lambda x: {
            "reference": lambda: np.maximum.accumulate(x, 1), OURS: lambda: tw.scan(x, "max"), "numpy": lambda: np.maximum.accumulate(x, 1),
        }, exactly),
        Row("loop_scan", (side * side,), "f32", 8 * side * side, 1.0, uniform(side * side), running, sums),
        Row("loop_scan", (side, side), "f32", 8 * side * side, 1.0, uniform(side, side), running, sums),
        Row("sort", (m,), "f32", 8 * m, 1.0, uniform(m), lambda x: {
            "reference": lambda: np.sort(x), OURS: lambda: tw.sort(x), "numpy": lambda: np.sort(x),
        }, exactly),
        *(Row(f"sort_axis{axis}", table, "f32", 8 * m, 1.0, uniform(*table), lambda x, axis=axis: {
            "reference": lambda: np.sort(x, axis), OURS: lambda: tw.sort(x, axis=axis), "numpy": lambda: np.sort(x, axis),
        }, exactly) for axis in (1, 0)),
        Row("argsort", (m,), "f32", 12 * m, 1.0, uniform(m), lambda x: {
            "reference": lambda: np.argsort(x, kind="stable"), OURS: lambda: tw.argsort(x), "numpy": lambda: np.argsort(x, kind="stable"),
        }, exactly),
        Row("argsort_axis1", table, "f32", 12 * m, 1.0, uniform(*table), lambda x: {
            "reference": lambda: np.argsort(x, 1, kind="stable"), OURS: lambda: tw.argsort(x), "numpy": lambda: np.argsort(x, 1, kind="stable"),
        }, exactly),
        *(Row(f"topk_{k}", (m,), "f32", 4 * m, 1.0, uniform(m), lambda x, k=k: {
            "reference": lambda: _largest(x, k), OURS: lambda: tw.topk(x, k), "numpy (argpartition)": lambda: _largest(x, k),
        }, _pairs) for k in (10, 1000)),
        Row("topk_rows_10", table, "f32", 4 * m, 1.0, uniform(*table), lambda x: {
            "reference": lambda: _largest(x, 10), OURS: lambda: tw.topk(x, 10), "numpy (argpartition)": lambda: _largest(x, 10),
        }, _pairs),
        Row("unique", (m,), "i32", 4 * m, 1.0, lambda: rng.integers(0, 1 << 20, m).astype(np.int32), lambda x: {
            "reference": lambda: np.unique(x), OURS: lambda: tw.unique(x), "numpy": lambda: np.unique(x),
        }, exactly),
        Row("histogram", (m, 256), "f32", 4 * m, 1.0, uniform(m), lambda x: {
            "reference": lambda: np.histogram(x, 256, (0, 1))[0], OURS: lambda: tw.histogram(x, 256, (0, 1)), "numpy": lambda: np.histogram(x, 256, (0, 1))[0],
        }, exactly),
        Row("histogram_weights", (m, 256), "f32", 12 * m, 1.0, uniform(m), lambda x: {
            "reference": lambda: np.histogram(x, 256, (0, 1), weights=weights)[0], OURS: lambda: tw.histogram(x, 256, (0, 1), weights=weights),
            "numpy": lambda: np.histogram(x, 256, (0, 1), weights=weights)[0],
        }, _close),
        Row("histogram_edges", (m, 256), "f32", 4 * m, 1.0, uniform(m), lambda x: {
            "reference": lambda: np.histogram(x, edges)[0], OURS: lambda: tw.histogram(x, edges), "numpy": lambda: np.histogram(x, edges)[0],
        }, exactly),
    ]  # fmt: skip
    return [case_of(row) for row in rows]


def _largest(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest, in order, as one writes it with NumPy."""
    places = np.argpartition(x, x.shape[-1] - k)[..., -k:]
    values = np.take_along_axis(x, places, -1)
    order = np.argsort(-values, kind="stable")
    return np.take_along_axis(values, order, -1), np.take_along_axis(places, order, -1)


def _numba_scans() -> dict[int, Callable[[Any], Any]]:
    numba: Any = importlib.import_module("numba")

    @numba.njit(cache=False, parallel=True)  # type: ignore[untyped-decorator]
    def along_rows(x: Any) -> Any:
        out = np.empty_like(x)
        for r in numba.prange(x.shape[0]):
            total = x[r, 0] * 0
            for i in range(x.shape[1]):
                total += x[r, i]
                out[r, i] = total
        return out

    @numba.njit(cache=False, parallel=True)  # type: ignore[untyped-decorator]
    def along_columns(x: Any) -> Any:
        out = np.empty_like(x)
        strips = (x.shape[1] + 511) // 512
        for s in numba.prange(strips):
            low, high = s * 512, min((s + 1) * 512, x.shape[1])
            out[0, low:high] = x[0, low:high]
            for i in range(1, x.shape[0]):
                for j in range(low, high):
                    out[i, j] = out[i - 1, j] + x[i, j]
        return out

    return {1: along_rows, 0: along_columns}


def gpu_cases(quick: bool) -> list[Case]:
    torch: Any = importlib.import_module("torch")
    cupy: Any = importlib.import_module("cupy")
    generator = torch.Generator(device="cuda")
    generator.manual_seed(1)
    side, shape = (2048, (64, 256, 256)) if quick else (8192, (64, 1024, 1024))

    def uniform(*extents: int) -> Callable[[], Any]:
        return lambda: torch.rand(extents, device="cuda", generator=generator)

    def scan(extents: tuple[int, ...], axis: int) -> Row:
        return Row(f"scan_axis{axis}", extents, "f32", 8 * int(np.prod(extents)), 1.5, uniform(*extents), lambda x: {
            "reference": lambda: torch.cumsum(x.double(), axis), OURS: lambda: tw.scan(x, axis=axis), "torch": lambda: torch.cumsum(x, axis),
            "cupy": lambda: cupy.cumsum(cupy.asarray(x), axis),
        }, sums)  # fmt: skip

    rows = [scan((side, side), 1), scan((side, side), 0), scan(shape, 1), scan(shape, 2), scan((1 << 20, 33), 1)]
    rows += [
        Row(f"topk_{k}", (side, side), "f32", 4 * side * side, 1.0, uniform(side, side), lambda x, k=k: {
            "reference": lambda: torch.topk(x, k), OURS: lambda: tw.topk(x, k), "torch": lambda: torch.topk(x, k),
        }, _pairs) for k in (8, 256)
    ]  # fmt: skip
    return [case_of(row) for row in rows]
