"""Primitives over whole arrays, against PyTorch and CuPy (CUB) on a GPU, and NumPy, Numba and PyTorch on the CPU.

In: whether the run is quick. Out: cases for `harness.measure`. Every variant returns its result, as users call these functions, so
that memory for results is part of the time of all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

Check = Callable[[Any, Any], str]


@dataclass(frozen=True)
class Row:
    """One line of the table: how to make the data, the variants, and how results are compared with the first peer's."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    bar: float
    data: Callable[[], Any]
    variants: Callable[[Any], dict[str, Callable[[], Any]]]
    same: Check


def _plain(x: Any) -> Any:
    """A result as a NumPy array or as a tensor, where it is."""
    x = x[0] if isinstance(x, tuple) else x
    if type(x).__module__.partition(".")[0] == "cupy":
        return importlib.import_module("torch").from_dlpack(x)
    return x if hasattr(x, "data_ptr") else np.asarray(x)


def _wide(x: Any) -> Any:
    x = _plain(x)
    return x.double() if hasattr(x, "data_ptr") else x.astype(np.float64)


def exactly(found: Any, wanted: Any) -> str:
    a, b = _plain(found), _plain(wanted)
    if a.dtype != b.dtype or isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        a, b = (v.cpu().numpy() if hasattr(v, "data_ptr") else v for v in (a, b))
        return "" if np.array_equal(a, b) else "the result differs"
    torch: Any = importlib.import_module("torch")
    if a.dtype == torch.uint32:
        a, b = a.view(torch.int32), b.view(torch.int32)
    same = torch.equal(a, b)
    return "" if same else "the result differs"


def sums(found: Any, wanted: Any) -> str:
    """Running sums of numbers between 0 and 1, against sums in float64."""
    a, b = _wide(found), _wide(wanted)
    if isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        a, b = (v.numpy() if hasattr(v, "data_ptr") else v for v in (a, b))
    worst = float((abs(a - b) / b.clip(1.0)).max())
    return "" if worst < 1e-3 else f"relative error {worst:.2g}"


def _one_sum(found: Any, wanted: Any) -> str:
    a, b = float(_wide(found)), float(_wide(wanted))
    return "" if abs(a - b) <= 1e-4 * abs(b) else f"{a} for {b}"


def _kept(x: Any) -> Any:
    return x[x > 0.5]


def case_of(row: Row) -> Case:
    def prepare() -> Prepared:
        data = row.data()
        variants = row.variants(data)
        reference = variants.pop("reference")()
        made = [Variant(name, lambda _, run=run: run(), returns=True) for name, run in variants.items()]  # type: ignore[misc]
        return Prepared(made, lambda: None, lambda slot, result, variant: row.same(result, reference))

    return Case(row.op, row.shape, row.dtype, row.nbytes, prepare, Bar(row.bar))


def gpu_cases(quick: bool) -> list[Case]:
    torch: Any = importlib.import_module("torch")
    cupy: Any = importlib.import_module("cupy")
    generator = torch.Generator(device="cuda")
    generator.manual_seed(1)
    small = 4 if quick else 0

    def uniform(*shape: int) -> Callable[[], Any]:
        return lambda: torch.rand(shape, device="cuda", generator=generator)

    def whole(n: int, dtype: Any) -> Callable[[], Any]:
        return lambda: torch.randint(-(1 << 31), 1 << 31, (n,), device="cuda", generator=generator).to(torch.int32).view(dtype)

    def small_integers(n: int) -> Callable[[], Any]:
        return lambda: torch.randint(-3, 4, (n,), device="cuda", dtype=torch.int32, generator=generator)

    scan, middle, side = 1 << (28 - small), 1 << (26 - small), 8192 >> (small // 2)
    rows: list[Row] = [
        Row("scan", (scan,), "f32", 8 * scan, 1.25, uniform(scan), lambda x: {
            "reference": lambda: torch.cumsum(x.double(), 0), OURS: lambda: tw.gpu_scan(x), "torch": lambda: torch.cumsum(x, 0),
            "cupy": lambda: cupy.cumsum(cupy.asarray(x)),
        }, sums),
        Row("scan", (scan,), "i32", 8 * scan, 1.25, small_integers(scan), lambda x: {
            "reference": lambda: torch.cumsum(x, 0, dtype=torch.int32), OURS: lambda: tw.gpu_scan(x),
            "torch": lambda: torch.cumsum(x, 0, dtype=torch.int32), "cupy": lambda: cupy.cumsum(cupy.asarray(x), dtype=cupy.int32),
        }, exactly),
        Row("sort", (middle,), "f32", 8 * middle, 1.0, uniform(middle), lambda x: {
            "reference": lambda: torch.sort(x)[0], OURS: lambda: tw.gpu_sort(x), "torch": lambda: torch.sort(x)[0],
            "cupy": lambda: cupy.sort(cupy.asarray(x)),
        }, exactly),
        Row("sort", (middle,), "u32", 8 * middle, 1.0, whole(middle, torch.uint32), lambda x: {
            "reference": lambda: cupy.sort(cupy.asarray(x)), OURS: lambda: tw.gpu_sort(x), "cupy": lambda: cupy.sort(cupy.asarray(x)),
        }, exactly),
        Row("sort_pairs", (middle,), "i32", 16 * middle, 1.0, whole(middle, torch.int32), lambda x: {
            "reference": lambda: torch.sort(x, stable=True)[0],
            OURS: lambda: tw.gpu_sort(x, x),
            "torch (64-bit places)": lambda: torch.sort(x, stable=True),
        }, exactly),
        Row("argsort", (middle,), "f32", 12 * middle, 1.0, uniform(middle), lambda x: {
            "reference": lambda: torch.argsort(x, stable=True), OURS: lambda: tw.gpu_argsort(x), "torch": lambda: torch.argsort(x, stable=True),
            "cupy": lambda: cupy.argsort(cupy.asarray(x)),
        }, exactly),
        *(Row("sort_rows", (middle // length, length), "f32", 8 * middle, 1.0, uniform(middle // length, length), lambda x: {
            "reference": lambda: torch.sort(x, dim=1)[0], OURS: lambda: tw.gpu_sort(x), "torch": lambda: torch.sort(x, dim=1),
            "cupy": lambda: cupy.sort(cupy.asarray(x), axis=1),
        }, exactly) for length in (64, 256, 1024, 4096)),
        Row("filter", (middle,), "f32", 6 * middle, 2.7, uniform(middle), lambda x: {
            "reference": lambda: x[x > 0.5], OURS: lambda: tw.gpu_filter(x, lambda v: v > 0.5), "torch": lambda: x[x > 0.5],
            "cupy": lambda: _kept(cupy.asarray(x)),
        }, exactly),
        *(Row("histogram", (middle, bins), "f32", 4 * middle, bar, uniform(middle), lambda x, bins=bins: {
            "reference": lambda: torch.histc(x, bins, 0, 1), OURS: lambda: tw.gpu_histogram(x, bins, (0, 1)),
            "torch": lambda: torch.histc(x, bins, 0, 1), "cupy": lambda: cupy.histogram(cupy.asarray(x), bins, (0, 1)),
        }, exactly) for bins, bar in ((256, 4.0), (65536, 1.5))),
        Row("transpose", (side, side), "f32", 8 * side * side, 3.0, uniform(side, side), lambda x: {
            "reference": lambda: x.T.contiguous(), OURS: lambda: tw.gpu_transpose(x), "torch": lambda: x.T.contiguous(),
            "cupy": lambda: cupy.ascontiguousarray(cupy.asarray(x).T),
        }, exactly),
        Row("reduce_lambda", (scan,), "f32", 4 * scan, 0.97, uniform(scan), lambda x: {
            "reference": lambda: x.double().sum(), OURS: lambda: tw.gpu_reduce(x, 0.0, lambda acc, v: acc + v), "our tw.sum": lambda: _total(x),
        }, _one_sum),
    ]  # fmt: skip
    return [case_of(row) for row in rows]


@tw.kernel
def _total(x: tw.Array) -> tw.Array:
    return tw.sum(x)


def cpu_cases(quick: bool) -> list[Case]:
    torch: Any = importlib.import_module("torch")
    numba: Any = importlib.import_module("numba")

    @numba.njit(cache=False)  # type: ignore[untyped-decorator]
    def running(x: Any) -> Any:
        out = np.empty_like(x)
        total = x[0] * 0
        for i in range(x.size):
            total += x[i]
            out[i] = total
        return out

    @numba.njit(cache=False)  # type: ignore[untyped-decorator]
    def kept(x: Any) -> Any:
        out = np.empty_like(x)
        count = 0
        for i in range(x.size):
            out[count] = x[i]
            count += x[i] > 0.5
        return out[:count]

    n, m = (1 << 20, 1 << 18) if quick else (1 << 24, 1 << 22)
    rng = np.random.default_rng(1)

    def uniform(count: int) -> Callable[[], Any]:
        return lambda: rng.random(count, np.float32)

    rows = [
        Row("scan", (n,), "f32", 8 * n, 1.0, uniform(n), lambda x: {
            "reference": lambda: np.cumsum(x, dtype=np.float64), OURS: lambda: tw.gpu_scan(x), "numpy": lambda: np.cumsum(x),
            "numba": lambda: running(x), "torch": lambda: torch.cumsum(torch.from_numpy(x), 0),
        }, sums),
        Row("sort", (m,), "f32", 8 * m, 1.0, uniform(m), lambda x: {
            "reference": lambda: np.sort(x), OURS: lambda: tw.gpu_sort(x), "numpy": lambda: np.sort(x),
            "torch": lambda: torch.sort(torch.from_numpy(x))[0],
        }, exactly),
        Row("argsort", (m,), "f32", 12 * m, 1.0, uniform(m), lambda x: {
            "reference": lambda: np.argsort(x, kind="stable"), OURS: lambda: tw.gpu_argsort(x), "numpy": lambda: np.argsort(x, kind="stable"),
            "torch": lambda: torch.argsort(torch.from_numpy(x), stable=True),
        }, exactly),
        Row("filter", (n,), "f32", 6 * n, 1.0, uniform(n), lambda x: {
            "reference": lambda: x[x > 0.5], OURS: lambda: tw.gpu_filter(x, lambda v: v > 0.5), "numpy": lambda: x[x > 0.5],
            "numba": lambda: kept(x), "torch": lambda: _kept(torch.from_numpy(x)),
        }, exactly),
    ]  # fmt: skip
    return [case_of(row) for row in rows]



