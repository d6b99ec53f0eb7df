"""Attention written as one nest on portable GPUs: scores, weights and weighted values are kernels of their own, against float64."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import PORTABLE, parse_target
from tilewright.compile.driver import compile_stages
from tilewright.execute.devices import find_device, own_memory
from tilewright.ir.emulator.run import run_program
from tilewright.passes.schedules.attention import CpuAttention

sys.path.append(str(Path(__file__).parents[2] / "examples"))
DEVICES = [pytest.param(name, marks=pytest.mark.requires(name)) for name in ("webgpu", "vulkan", "opencl")]
STAGED = [pytest.param(name, marks=pytest.mark.requires(name)) for name in ("webgpu", "vulkan")]


@tw.kernel
def plain(q: tw.Array, k: tw.Array, v: tw.Array, scale: float) -> tw.Array:
    heads, rows, depth = q.shape
    keys, width = k.shape[1], v.shape[2]
    out = tw.empty((rows, heads, width), q.dtype)
    for h, i in tw.grid(heads, rows):
        most = -tw.inf
        for j in range(keys):
            score = tw.f32(0)
            for d in range(depth):
                score += tw.f32(q[h, i, d]) * tw.f32(k[h, j, d])
            most = max(most, score * scale)
        total = tw.f32(0)
        for j in range(keys):
            score = tw.f32(0)
            for d in range(depth):
                score += tw.f32(q[h, i, d]) * tw.f32(k[h, j, d])
            total += tw.exp(score * scale - most)
        for e in range(width):
            mixed = tw.f32(0)
            for j in range(keys):
                score = tw.f32(0)
                for d in range(depth):
                    score += tw.f32(q[h, i, d]) * tw.f32(k[h, j, d])
                mixed += tw.exp(score * scale - most) * tw.f32(v[h, j, e])
            out[i, h, e] = mixed / total
    return out


@tw.kernel
def causal(q: tw.Array, k: tw.Array, v: tw.Array) -> tuple[tw.Array, tw.Array]:
    """Rows that end where they stand; the logarithm of each sum is a result, too."""
    rows, depth = q.shape
    width = v.shape[1]
    out = tw.empty((rows, width), tw.f32)
    logs = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(i + 1):
            score = 0.0
            for d in range(depth):
                score += q[i, d] * k[j, d]
            most = max(most, score)
        total = 0.0
        for j in range(i + 1):
            score = 0.0
            for d in range(depth):
                score += q[i, d] * k[j, d]
            total += tw.exp(score - most)
        logs[i] = most + tw.log(total)
        for e in range(width):
            mixed = 0.0
            for j in range(i + 1):
                score = 0.0
                for d in range(depth):
                    score += q[i, d] * k[j, d]
                mixed += tw.exp(score - most) / total * v[j, e]
            out[i, e] = mixed
    return out, logs


@tw.kernel
def masked(q: tw.Array, k: tw.Array, v: tw.Array, mask: tw.Array) -> tw.Array:
    """Scores that an array masks, heads that share keys."""
    heads, rows, depth = q.shape
    keys, width = k.shape[1], v.shape[2]
    out = tw.empty((heads, rows, width), tw.f32)
    for h, i, e in tw.grid(heads, rows, width):
        most = -tw.inf
        for j in range(keys):
            score = 0.0
            for d in range(depth):
                score += q[h, i, d] * k[h // 2, j, d]
            most = max(most, tw.where(mask[i, j] > 0, score, -tw.inf))
        total = 0.0
        for j in range(keys):
            score = 0.0
            for d in range(depth):
                score += q[h, i, d] * k[h // 2, j, d]
            total += tw.exp(tw.where(mask[i, j] > 0, score, -tw.inf) - most)
        mixed = 0.0
        for j in range(keys):
            score = 0.0
            for d in range(depth):
                score += q[h, i, d] * k[h // 2, j, d]
            mixed += tw.exp(tw.where(mask[i, j] > 0, score, -tw.inf) - most) * v[h // 2, j, e]
        out[h, i, e] = mixed / total
    return out


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float = 1.0, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Results and the logarithms of the sums."""
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * scale
    scores = scores if keep is None else np.where(keep, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    return weights / total @ v, (most + np.log(total))[..., 0]


def is_staged(kernel: Any) -> bool:
    return kernel.last is not None and ".scores" in kernel.last.schedule


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device as it is, or one that says for a while that it is a GPU with the least shared memory."""
    name, tiled = request.param
    if tiled:
        runtime: Any = own_memory(find_device(name))
        least = PORTABLE[runtime.target.name].max_shared
        monkeypatch.setattr(runtime, "target", replace(runtime.target, features=runtime.target.features - {"serial"}, max_shared=least))
    return str(name)


ways = pytest.mark.parametrize(
    "device", [pytest.param((p.values[0], tiled), marks=p.marks, id=f"{p.values[0]}{'-tiles' * tiled}") for p in STAGED for tiled in (False, True)], indirect=True
)  # fmt: skip


@ways
@pytest.mark.parametrize(("heads", "rows", "keys", "depth", "width"), [(2, 33, 31, 17, 19), (1, 1, 1, 1, 1), (3, 45, 67, 32, 32), (2, 0, 5, 4, 4)])
def test_plain(device: str, heads: int, rows: int, keys: int, depth: int, width: int) -> None:
    draw = np.random.default_rng(rows)
    q, k, v = (draw.standard_normal(shape, np.float32) for shape in ((heads, rows, depth), (heads, keys, depth), (heads, keys, width)))
    got = plain(q, k, v, depth**-0.5, device=device)
    assert is_staged(plain)
    np.testing.assert_allclose(got, reference(q, k, v, depth**-0.5)[0].swapaxes(0, 1), atol=3e-6)


@ways
def test_f16(device: str) -> None:
    draw = np.random.default_rng(5)
    q, k, v = (draw.standard_normal(shape).astype(np.float16) for shape in ((2, 21, 16), (2, 37, 16), (2, 37, 24)))
    got = plain(q, k, v, 0.25, device=device)
    assert is_staged(plain)
    np.testing.assert_allclose(got, reference(q, k, v, 0.25)[0].swapaxes(0, 1), atol=2e-3)


@ways
@pytest.mark.parametrize("rows", [1, 37])
def test_rows_that_end_where_they_stand(device: str, rows: int) -> None:
    draw = np.random.default_rng(rows)
    q, k, v = (draw.standard_normal((rows, width), np.float32) for width in (13, 13, 11))
    got, logs = causal(q, k, v, device=device)
    assert is_staged(causal)
    want, want_logs = reference(q, k, v, keep=np.tri(rows, dtype=bool))
    np.testing.assert_allclose(got, want, atol=3e-6)
    np.testing.assert_allclose(logs, want_logs, atol=3e-6)


@ways
def test_masks_and_shared_keys(device: str) -> None:
    draw = np.random.default_rng(8)
    q, k, v = (draw.standard_normal(shape, np.float32) for shape in ((4, 19, 8), (2, 41, 8), (2, 41, 9)))
    mask = (draw.random((19, 41)) > 0.4).astype(np.int32)
    mask[:, 3] = 1
    got = masked(q, k, v, mask, device=device)
    assert is_staged(masked)
    np.testing.assert_allclose(got, reference(q, k.repeat(2, 0), v.repeat(2, 0), keep=mask > 0)[0], atol=3e-6)


@ways
def test_numbers_that_are_none(device: str) -> None:
    """NaN in a query reaches its row alone; rows whose scores are all -inf are what the CPU says."""
    draw = np.random.default_rng(9)
    q, k, v = (draw.standard_normal(shape, np.float32) for shape in ((1, 6, 4), (1, 7, 4), (1, 7, 5)))
    q[0, 2, 1] = np.nan
    np.testing.assert_allclose(plain(q, k, v, 0.5, device=device), plain(q, k, v, 0.5, device="cpu"), atol=3e-6)
    mask = np.ones((6, 7), np.int32)
    mask[4] = 0
    given = (draw.standard_normal((2, 6, 4), np.float32), k, v, mask)
    np.testing.assert_allclose(masked(*given, device=device), masked(*given, device="cpu"), atol=3e-6)


@pytest.mark.parametrize("device_name", DEVICES)
def test_the_transformer_block(device_name: str) -> None:
    import transformer as t

    draw = np.random.default_rng(1)
    weights = t.make_weights(draw, 64, 96)
    x = draw.standard_normal((2 * 24, 64)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = t.block(x, weights, batch=2, heads=4, device=device_name)
    np.testing.assert_allclose(got, t.reference(x, weights, 2, 4), atol=2e-5)


@pytest.mark.parametrize(("target", "family"), [("gfx942", "mfma"), ("gfx1100", "wmma3"), ("sm_75", "fma"), ("msl", "fma"), ("wgsl", "fma"), ("spirv-opencl", "fma")])
def test_in_the_emulator(target: str, family: str) -> None:
    """With the warps of each target; AMD's matrix instructions take both products of f16."""
    draw, chosen = np.random.default_rng(5), parse_target(target)
    q, k, v = (draw.standard_normal(shape).astype(np.float16) for shape in ((2, 37, 32), (2, 53, 32), (2, 53, 48)))
    runner = plain.runner
    bound = plain.bound(q, k, v, 0.2)
    done = compile_stages(plain.function, runner.signature(runner.arguments(bound, True), True), chosen).stages
    first, _, last = (s.describe() for s in done.schedules)
    assert f"family={family} " in first and f"family={family} " in last
    got = run_program(done.thread, bound, target=chosen)["out"]
    np.testing.assert_allclose(got.astype(np.float64), reference(q, k, v, 0.2)[0].swapaxes(0, 1), atol=4e-3)


def test_long_rows_stay_one_kernel() -> None:
    """Scratch arrays that not every device binds are not made."""
    runner = plain.runner
    for rows, count in ((512, 3), (4096, 1)):
        q, k, v = (np.zeros((4, rows, 8), np.float32) for _ in range(3))
        signature = runner.signature(runner.arguments(plain.bound(q, k, v, 0.2), True), True)
        assert len(compile_stages(plain.function, signature, parse_target("wgsl")).stages.thread.calls) == count


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
def test_attention_fits_the_memory_of_a_thread(vector_bytes: int) -> None:
    """A CPU whose driver gives a thread 1 MB, whatever its vectors."""
    from transformer import attend

    usual = PORTABLE["spirv-opencl"]
    target = replace(usual, max_threads=1, max_local=1044480, vector_bytes=vector_bytes, features=usual.features | {"spir"})
    q = np.zeros((2, 4, 24, 16), np.float32)
    runner = attend.runner
    arguments = runner.arguments(attend.bound(q, q, q, 0.25), True)
    chosen = compile_stages(attend.function, runner.signature(arguments, True), target).stages.schedules
    assert any(isinstance(s, CpuAttention) and s.local_bytes <= target.max_local for s in chosen)
