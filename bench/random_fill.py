"""Filling arrays with random numbers: `tw.random` against NumPy's generators (and PyTorch, where it is installed) on a CPU, PyTorch and CuPy on a GPU.

In: whether to be quick. Out: cases for `harness.measure`. Every variant fills an array that is there. A result is right where it has the
mean and the spread that such numbers have.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

COUNT = 1 << 24
_DTYPES = {"f32": np.float32, "f64": np.float64}
_MOMENTS = {"uniform": (0.5, 12**-0.5), "normal": (0.0, 1.0)}


def _wrong(op: str, values: Any) -> str:
    mean, spread = float(values.mean()), float(values.std())
    wanted, deviation = _MOMENTS[op]
    near = 6 * deviation / values.size**0.5 + 1e-6
    return "" if abs(mean - wanted) < near and abs(spread - deviation) < 3 * near else f"mean {mean:.5f}, deviation {spread:.5f}"


def cpu_cases(quick: bool) -> list[Case]:
    return [_cpu_case(op, dtype, COUNT >> (4 if quick else 0)) for op in _MOMENTS for dtype in _DTYPES]


def _cpu_case(op: str, dtype: str, count: int) -> Case:
    def prepare() -> Prepared:
        out = np.empty(count, _DTYPES[dtype])
        ours = getattr(tw.random, op)
        variants = [Variant(OURS, lambda slot: ours(7, out=out))]
        for kind in (np.random.PCG64, np.random.Philox):
            generator = np.random.Generator(kind(7))
            fill: Callable[..., object] = generator.random if op == "uniform" else generator.standard_normal
            variants.append(Variant(f"numpy {kind.__name__}", lambda slot, fill=fill: fill(out=out, dtype=out.dtype)))  # type: ignore[misc]
        if importlib.util.find_spec("torch") is not None:
            tensor = importlib.import_module("torch").from_numpy(out)
            variants.append(Variant("torch", lambda slot: tensor.uniform_() if op == "uniform" else tensor.normal_()))

        return Prepared(variants, lambda: out.fill(np.nan), lambda slot, returned, variant: _wrong(op, out.astype(np.float64)))

    return Case(op, (count,), dtype, count * np.dtype(_DTYPES[dtype]).itemsize, prepare, Bar(1.0))


def gpu_cases(quick: bool) -> list[Case]:
    return [_gpu_case(op, dtype, (1 << 28) >> (4 if quick else 0)) for op in _MOMENTS for dtype in _DTYPES]


def _gpu_case(op: str, dtype: str, count: int) -> Case:
    torch: Any = importlib.import_module("torch")
    cupy: Any = importlib.import_module("cupy")

    def prepare() -> Prepared:
        out = torch.empty(count, dtype=getattr(torch, np.dtype(_DTYPES[dtype]).name), device="cuda")
        ours = getattr(tw.random, op)
        generator, shared = cupy.random.default_rng(7), cupy.asarray(out)
        drawn = generator.random if op == "uniform" else generator.standard_normal
        variants = [
            Variant(OURS, lambda slot: ours(7, out=out)),
            Variant("torch", lambda slot: out.uniform_() if op == "uniform" else out.normal_()),
            Variant("cupy", lambda slot: drawn(out=shared, dtype=shared.dtype)),
        ]
        return Prepared(variants, lambda: out.fill_(float("nan")), lambda slot, returned, variant: _wrong(op, out.double().cpu().numpy()))

    return Case(op, (count,), dtype, count * np.dtype(_DTYPES[dtype]).itemsize, prepare, Bar(1.0))
