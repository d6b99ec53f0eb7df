"""Long loops where a driver leaves them: sums are cut into parts, and what would be left is refused before it runs (Mesa's llvmpipe, after 65,535 iterations)."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import tilewright as tw
from target_constructs import row_sums
from tilewright.base.errors import DeviceWarning, TargetLimit
from tilewright.execute.devices import find_device
from tilewright.runtime.portable.drivers import most_turns

on_each = pytest.mark.parametrize("device", [pytest.param(name, marks=pytest.mark.requires(name)) for name in ("webgpu", "vulkan")])


@tw.kernel
def column_sums(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((columns,), x.dtype)
    for j in tw.grid(columns):
        total = 0.0
        for i in range(rows):
            total += x[i, j]
        out[j] = total
    return out


@tw.kernel
def spread(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((1,), x.dtype)
    for r in tw.grid(1):
        least = tw.inf
        for i in range(n):
            least = min(least, x[i])
        total = 0.0
        for i in range(n):
            total += (x[i] - least) * (x[i] - least)
        out[r] = total
    return out


@tw.gpu
def walk(x: tw.GpuBuffer[tw.i32], turns: tw.i32):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    total = 0
    for k in range(turns):
        total = total + (x[i] ^ k)
    x[i] = total


@tw.gpu
def nested(x: tw.GpuBuffer[tw.i32], turns: tw.i32, inner: tw.i32):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    total = 0
    if i % 2 == 0:
        for k in range(turns):
            for j in range(inner):
                total = total + (x[i] ^ (k * j))
    x[i] = total


@tw.gpu
def from_memory(x: tw.GpuBuffer[tw.i32]):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    total = 0
    for _ in range(x[i]):
        total = total + 1
    x[i] = total


def limit(device: str) -> int:
    most = find_device(device).target.max_turns
    if not most:
        pytest.skip(f"{device} has no limit of iterations")
    return most


@on_each
def test_long_sums_are_right(device: str) -> None:
    for shape, kernel, axis in (((1, (1 << 22) + 17), row_sums, 1), ((1, 1_100_003), row_sums, 1), ((200_003, 3), column_sums, 0)):
        x = np.random.default_rng(0).random(shape, dtype=np.float32)
        np.testing.assert_allclose(kernel(x, device=device), x.sum(axis, dtype=np.float64), rtol=1e-5)


@on_each
def test_loops_up_to_the_limit_run(device: str) -> None:
    most = limit(device)
    for kernel, numbers in ((walk, (most - 1,)), (nested, (250, 250))):
        x = np.arange(32, dtype=np.int32)
        expected = x.copy()
        kernel[1, 32](expected, *numbers, device="cpu")
        kernel[1, 32](x, *numbers, device=device)
        np.testing.assert_array_equal(x, expected)


@on_each
def test_longer_loops_are_refused(device: str) -> None:
    most, x = limit(device), np.arange(32, dtype=np.int32)
    with pytest.raises(TargetLimit, match=rf"'tw_walk_0' of 'walk' .*test_long_loops.py:\d+.*up to {most + 1} iterations, and {device}:0 \(llvmpipe.* leaves them after {most}"):
        walk[1, 32](x, most, device=device)
    with pytest.raises(TargetLimit, match="up to 66306 iterations"):
        nested[1, 32](x, 256, 256, device=device)
    np.testing.assert_array_equal(x, np.arange(32))  # nothing ran
    walk[0, 32](x, most, device=device)  # no block, no loop
    with pytest.raises(TargetLimit, match=r"'spread'.*iterations"):
        spread(np.ones(1 << 24, np.float32), device=device)


@on_each
def test_loops_without_a_known_end_are_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(device)
    monkeypatch.setenv("TILEWRIGHT_WARN", "on")
    x = np.full(32, 5, np.int32)
    with pytest.warns(DeviceWarning, match="loops whose length is known only as it runs"):
        from_memory[1, 32](x, device=device)
    np.testing.assert_array_equal(x, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_memory[1, 32](x, device=device)  # once
        walk[1, 32](x, 9, device=device)


def test_only_one_driver_has_the_limit() -> None:
    assert most_turns("llvmpipe (LLVM 15.0.6, 128 bits)") == 65535
    assert most_turns("NVIDIA H200") == most_turns("SwiftShader Device (Subzero)") == 0
