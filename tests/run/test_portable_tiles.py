"""Products in tiles on portable GPUs: the drivers of CPUs take plain loops, so the device here says that it is none, with the least shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import PORTABLE
from tilewright.execute.devices import find_device, own_memory

on_each = pytest.mark.parametrize("device", [pytest.param(name, marks=pytest.mark.requires(name)) for name in ("webgpu", "vulkan")], indirect=True)


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def rows_by_rows(a: tw.Array, b: tw.Array, bias: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[0]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = tw.f32(0)
        for p in range(k):
            total += tw.f32(a[i, p]) * tw.f32(b[j, p])
        out[i, j] = tw.maximum(total + bias[j], 0.0)
    return out


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose target is, for a while, that of a GPU with the least shared memory."""
    runtime: Any = own_memory(find_device(request.param))
    least = PORTABLE[runtime.target.name].max_shared
    monkeypatch.setattr(runtime, "target", replace(runtime.target, features=runtime.target.features - {"serial"}, max_shared=least))
    return str(request.param)


@on_each
@pytest.mark.parametrize(("m", "n", "k"), [(33, 31, 100), (129, 67, 257)])
def test_products(device: str, m: int, n: int, k: int) -> None:
    draw = np.random.default_rng(m)
    a, b = draw.standard_normal((m, k), np.float32), draw.standard_normal((k, n), np.float32)
    got = product(a, b, device=device)
    assert product.last is not None and "family=fma" in product.last.schedule
    want = a.astype(np.float64) @ b
    assert np.abs(got - want).max() <= 2e-6 * np.sqrt(k) * np.abs(a).max() * np.abs(b).max()


@on_each
def test_rows_by_rows_with_an_epilogue(device: str) -> None:
    draw = np.random.default_rng(3)
    a, b, bias = draw.standard_normal((45, 130), np.float32), draw.standard_normal((70, 130), np.float32), draw.standard_normal(70, np.float32)
    got = rows_by_rows(a, b, bias, device=device)
    assert rows_by_rows.last is not None and "family=fma" in rows_by_rows.last.schedule
    np.testing.assert_allclose(got, np.maximum(a.astype(np.float64) @ b.T + bias, 0), atol=1e-4)
