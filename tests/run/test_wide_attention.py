"""Attention that matrix attention does not take: rows of more than 256 terms or columns, or of odd lengths. It is three kernels, whose two products matrix units compute. Against float64
in the emulator, with keys and values behind the last one that counts that must not be read into results."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import GpuProduct

NEAR = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2e-2}


@tw.kernel
def plain(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    heads, rows, depth = q.shape
    keys, width = k.shape[1], v.shape[2]
    out = tw.empty((heads, rows, width), q.dtype)
    for h, i in tw.grid(heads, rows):
        most = -tw.inf
        for j in range(keys):
            score = tw.f32(0)
            for d in range(depth):
                score += q[h, i, d] * k[h, j, d]
            most = max(most, score * scale)
        total = tw.f32(0)
        for j in range(keys):
            score = tw.f32(0)
            for d in range(depth):
                score += q[h, i, d] * k[h, j, d]
            total += tw.exp(score * scale - most)
        for e in range(width):
            mixed = tw.f32(0)
            for j in range(keys):
                score = tw.f32(0)
                for d in range(depth):
                    score += q[h, i, d] * k[h, j, d]
                mixed += tw.exp(score * scale - most) * v[h, j, e]
            out[h, i, e] = mixed / total
    return out


@tw.kernel
def earlier(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    """Rows that end where they stand."""
    heads, rows, depth = q.shape
    width = v.shape[2]
    out = tw.empty((heads, rows, width), q.dtype)
    for h, i in tw.grid(heads, rows):
        most = -tw.inf
        for j in range(i + 1):
            score = tw.f32(0)
            for d in range(depth):
                score += q[h, i, d] * k[h, j, d]
            most = max(most, score * scale)
        total = tw.f32(0)
        for j in range(i + 1):
            score = tw.f32(0)
            for d in range(depth):
                score += q[h, i, d] * k[h, j, d]
            total += tw.exp(score * scale - most)
        for e in range(width):
            mixed = tw.f32(0)
            for j in range(i + 1):
                score = tw.f32(0)
                for d in range(depth):
                    score += q[h, i, d] * k[h, j, d]
                mixed += tw.exp(score * scale - most) * v[h, j, e]
            out[h, i, e] = mixed / total
    return out


@tw.kernel
def biased(q: tw.Array, k: tw.Array, v: tw.Array, bias: tw.Array) -> tw.Array:
    """What is added to scores has a number for each key, and none behind the last."""
    heads, rows, depth = q.shape
    keys, width = k.shape[1], v.shape[2]
    out = tw.empty((heads, rows, width), q.dtype)
    for h, i in tw.grid(heads, rows):
        most = -tw.inf
        for j in range(keys):
            score = tw.f32(0)
            for d in range(depth):
                score += q[h, i, d] * k[h, j, d]
            most = max(most, score + bias[i, j])
        total = tw.f32(0)
        for j in range(keys):
            score = tw.f32(0)
            for d in range(depth):
                score += q[h, i, d] * k[h, j, d]
            total += tw.exp(score + bias[i, j] - most)
        for e in range(width):
            mixed = tw.f32(0)
            for j in range(keys):
                score = tw.f32(0)
                for d in range(depth):
                    score += q[h, i, d] * k[h, j, d]
                mixed += tw.exp(score + bias[i, j] - most) * v[h, j, e]
            out[h, i, e] = mixed / total
    return out


def exact(scores: np.ndarray, v: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64)


def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ np.swapaxes(b.astype(np.float64), -1, -2)


def drawn(dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(map(math.prod, shapes)))
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for shape in shapes]


def emulated(kernel: tw.Kernel[..., tw.Array], *arguments: object, target: str = "sm_90a") -> np.ndarray:
    done = kernel.stages(*arguments, target=target).stages
    assert [call.kernel.name.rsplit(".", 1)[-1] for call in done.tile.calls][-1] == kernel.function.name
    names = [call.kernel.name for call in done.tile.calls]
    assert f"{kernel.function.name}.scores" in names and f"{kernel.function.name}.weights" in names
    return np.asarray(next(iter(run_program(done.thread, dict(kernel.bound(*arguments))).values()))).astype(np.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("heads", "rows", "keys", "depth", "width"), [(1, 33, 41, 264, 264), (2, 17, 64, 512, 40), (1, 40, 31, 33, 35)])
def test_widths(dtype: str, heads: int, rows: int, keys: int, depth: int, width: int) -> None:
    if dtype == "float32" and depth == 512:
        depth = 320
    q, k, v = drawn(dtype, (heads, rows, depth), (heads, keys, depth), (heads, keys, width))
    scale = 1 / math.sqrt(depth)
    found = emulated(plain, q, k, v, scale)
    np.testing.assert_allclose(found, exact(products(q, k) * scale, v), rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("rows", [1, 31, 40])
def test_rows_that_end_where_they_stand(rows: int) -> None:
    q, k, v = drawn("bfloat16", (1, rows, 272), (1, rows + 9, 272), (1, rows + 9, 264))
    k[:, rows:], v[:, rows:] = np.nan, np.inf  # no row may read these
    want = exact(np.where(np.tri(rows, dtype=bool), products(q, k[:, :rows]) * 0.06, -np.inf), v[:, :rows])
    np.testing.assert_allclose(emulated(earlier, q, k, v, 0.06), want, rtol=2e-2, atol=2e-2)


def test_bias_for_each_key() -> None:
    q, k, v, bias = drawn("float16", (2, 21, 264), (2, 43, 264), (2, 43, 264), (21, 43))
    bias = bias.astype(np.float32)
    q = (q * np.float16(0.06)).astype(np.float16)
    np.testing.assert_allclose(emulated(biased, q, k, v, bias), exact(products(q, k) + bias, v), rtol=3e-3, atol=3e-3)


def test_infinities() -> None:
    q, k, v = drawn("bfloat16", (1, 20, 264), (1, 24, 264), (1, 24, 264))
    v[0, 3, 5] = np.inf
    found = emulated(plain, q, k, v, 0.06)
    assert np.isposinf(found[0, :, 5]).all() and np.isfinite(np.delete(found, 5, 2)).all()


def test_products_are_made_by_matrix_units() -> None:
    q, k, v = drawn("bfloat16", (24, 160, 512), (24, 160, 512), (24, 160, 512))
    schedules = plain.stages(q, k, v, 0.04, target="sm_90a").stages.schedules
    assert sum(isinstance(s, GpuProduct) for s in schedules) == 2


@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_matrix_attention_stays_one_kernel(width: int) -> None:
    """Blocks have room for what it needs: code for a limit of rows is made, too."""
    q = np.zeros((24, 1615, width), ml_dtypes.bfloat16)
    artifact = earlier.compile(q, q, q, 0.1, target="sm_90a")
    assert "family=attention" in artifact.schedule and ".scores" not in artifact.schedule
    assert all(launch.shared_bytes <= parse_target("sm_90a").max_shared for launch in artifact.launches)
