"""Stencils that take several steps for each tile: the bits of step by step, at every border, for every number of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def five_points(x: tw.Array, steps: int) -> tuple[tw.Array, tw.Array]:
    rows, cols = x.shape
    u = x * 1.0
    v = x * 3.0
    for _ in range(steps):
        for i, j in tw.grid(range(1, rows - 1), range(1, cols - 1)):
            v[i, j] = (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1]) * 0.25
        u, v = v, u
    return u, v


@tw.kernel
def far(x: tw.Array, rate: float, steps: int) -> tw.Array:
    u = x * 1.0
    for _ in range(steps):
        u[2:-1, :-3] = u[2:-1, :-3] + rate * max(u[:-3, 3:] - u[3:, :-3], 0.0)
    return u


@tw.kernel
def with_another_array(x: tw.Array, w: tw.Array, steps: int) -> tw.Array:
    u = x * 1.0
    for _ in range(steps):
        u[1:-1, 1:-1] = (u[:-2, 1:-1] + u[2:, 1:-1]) * w[1:-1, 1:-1]
    return u


@tw.kernel
def with_a_function(x: tw.Array, steps: int) -> tw.Array:
    u = x * 1.0
    for _ in range(steps):
        u[1:-1, 1:-1] = tw.exp(-abs(u[:-2, 1:-1] + u[2:, 1:-1]))
    return u


def plate(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def same(found: Any, wanted: Any) -> bool:
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("steps", [0, 1, 2, 17, 18, 19, 37])
def test_every_number_of_steps(steps: int) -> None:
    x = plate(7, 9)
    assert same(five_points(x, steps, device="emulator"), five_points(x, steps, device="cpu"))


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 3), (31, 33), (37, 130), (3, 260)], ids=str)
def test_every_shape(shape: tuple[int, int]) -> None:
    x = plate(*shape)
    assert same(five_points(x, 21, device="emulator"), five_points(x, 21, device="cpu"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_longer_distances_numbers_and_special_values(dtype: Any) -> None:
    x = plate(30, 132, dtype=dtype)
    x[10, 20], x[11, 90], x[12, 3] = np.nan, np.inf, -0.0
    assert same(far(x, 0.125, 23, device="emulator"), far(x, 0.125, 23, device="cpu"))


@tw.kernel
def nine_points(x: tw.Array, steps: int) -> tw.Array:
    u = x * 1.0
    for _ in range(steps):
        u[1:-1, 1:-1] = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] + u[:-2, :-2] + u[2:, 2:] + u[:-2, 2:] + u[2:, :-2]) / 8
    return u


def test_large_arrays_take_fewer_steps_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiles(kernel: Any, *args: Any) -> list[tuple[int, ...]]:
        (call,) = (c for c in kernel.stages(*args, target="sm_90a").stages.thread.calls if ".tiles" in c.kernel.name)
        return [op.attrs["shape"] for op in call.kernel.body.ops if op.opcode == "alloc"]  # type: ignore[misc]

    small, large = tiles(five_points, plate(64, 64), 9), tiles(five_points, np.zeros((1024, 1024), np.float32), 9)
    assert small and large and small[0] < large[0]
    for name in ("_MEDIUM", "_LARGE"):
        monkeypatch.setattr(f"tilewright.passes.ordered.time_tiles.{name}", 1)
    x = plate(120, 248)  # one tile lies inside with its frame
    assert same(nine_points(x, 10, device="emulator"), nine_points(x, 10, device="cpu"))


def test_which_loops_are_tiled() -> None:
    def tiled(kernel: Any, *args: Any) -> bool:
        return any(".tiles" in call.kernel.name for call in kernel.stages(*args, target="sm_90a").stages.thread.calls)

    x = plate(40, 40)
    assert tiled(five_points, x, 9)
    assert tiled(far, x, 0.5, 9)
    assert not tiled(with_another_array, x, x, 9)
    assert not tiled(with_a_function, x, 9)
    assert not tiled(five_points, x.astype(np.float16), 9)
    assert same(with_another_array(x, x, 5, device="emulator"), with_another_array(x, x, 5, device="cpu"))
