"""Results of convolutions that leave by way of shared memory, since their images have odd sides, and weights that are packed first: plain multiply-adds and matrix
instructions of warps, executed by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from f32_reference import product
from images_reference import convolved
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.ir.types import Tile

FMA = "family=fma m=128 n=128 k=8 stages=3 persistent=0 warps_m=2 warps_n=2"
SCHEDULES = {
    "fma": FMA,
    "fma, packed": f"{FMA} a_copy=pack",
    "fma, small tiles": "family=fma m=64 n=64 k=16 stages=2 persistent=0 warps_m=2 warps_n=2 chunk=32 a_copy=pack",
    "fma, flat tiles": "family=fma m=32 n=64 k=16 stages=2 persistent=0 warps_m=2 warps_n=2",
    "fma, few filters": "family=fma m=32 n=128 k=16 stages=3 persistent=0 warps_m=1 warps_n=4 chunk=32",
    "mma": "family=mma m=128 n=128 k=8 stages=3 persistent=0 warps_m=2 warps_n=4 chunk=16 tf32_terms=4",
    "mma, narrow": "family=mma m=64 n=64 k=16 stages=3 persistent=0 warps_m=4 warps_n=2 chunk=16 tf32_terms=4",
    "mma, one warp down": "family=mma m=32 n=32 k=16 stages=3 persistent=0 warps_m=1 warps_n=2 chunk=16 tf32_terms=4",
}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def through_shared(kernel: Any) -> bool:
    """Whether a kernel has a loop over rows of results."""
    return any(op.opcode == "for" and op.regions[0].args[0].name == "row" for op in walk(kernel.body))


def results(kernel: tw.Kernel[..., Any], schedule: str, staged: bool, **arrays: np.ndarray) -> list[np.ndarray]:
    stages = tw.kernel(schedule=schedule)(kernel.python).stages(*arrays.values(), target="sm_90a").stages
    assert through_shared(stages.thread.calls[-1].kernel) == staged
    return [np.asarray(next(iter(run_program(stage, arrays).values()))) for stage in (stages.tile, stages.thread)]


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
CASES: dict[str, tuple[Callable[..., Any], Shapes, tuple[int, ...], tuple[int, ...], int]] = {
    "3x1": (convolutions.conv2d((2, 1), (0, 0), 1, False), ((3, 23, 9, 7), (33, 23, 3, 1)), (2, 1), (0, 0), 1),
    "padded": (convolutions.conv2d((1, 2), (1, 1), 2, True), ((2, 9, 9, 11), (17, 9, 3, 3)), (1, 2), (1, 1), 2),
    "1x1": (convolutions.conv2d((2, 2), (0, 0), 1, True), ((2, 70, 7, 11), (45, 70, 1, 1)), (2, 2), (0, 0), 1),
    "3-D": (convolutions.conv3d(2, 1), ((1, 9, 3, 5, 7), (20, 9, 1, 3, 3)), (2, 2, 2), (1, 1, 1), 1),
    "1-D": (convolutions.conv1d(3, 2, 1), ((3, 14, 31), (12, 14, 5)), (3,), (2,), 1),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_odd_sides(name: str, schedule: str) -> None:
    kernel, (one, other), stride, padding, dilation = CASES[name]
    x, w = normal(*one), normal(*other)
    want = convolved(x, w, stride, padding, dilation)
    for found in results(kernel, SCHEDULES[schedule], True, x=x, w=w):
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


def test_products_leave_from_registers() -> None:
    """Columns of a matrix are neighbours in memory."""
    x, w = normal(33, 70), normal(45, 70)
    for found in results(product, FMA, False, x=x, w=w):
        np.testing.assert_allclose(found, x.astype(np.float64) @ w.T, rtol=1e-4, atol=1e-4)


def test_infinities_and_nothing() -> None:
    """What is not a number stays where it is; places that no window reads are zero."""
    kernel = convolutions.conv2d((1, 1), (2, 2), 1, False)
    x, w = np.zeros((1, 9, 3, 5), np.float32), np.ones((12, 9, 3, 3), np.float32)
    x[0, 4, 1, 1], x[0, 5, 2, 4] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want = convolved(x, w, (1, 1), (2, 2), 1)
    for schedule in ("fma", "mma"):
        for found in results(kernel, SCHEDULES[schedule], True, x=x, w=w):
            np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
            np.testing.assert_array_equal(found[~np.isnan(found)], want[~np.isnan(want)])


def test_no_images() -> None:
    kernel = tw.kernel(schedule=FMA)(convolutions.conv2d((2, 1), (1, 1), 1, False).python)
    w = normal(12, 9, 3, 3)
    stages = kernel.stages(normal(1, 9, 5, 7), w, target="sm_90a").stages
    found = np.asarray(next(iter(run_program(stages.thread, {"x": np.zeros((0, 9, 5, 7), np.float32), "w": w}).values())))
    assert found.shape == (0, 12, 3, 7)


def test_windows_that_stay_inside_are_not_tested() -> None:
    """Without padding no window leaves its image, whatever the stride; with padding each place is tested."""
    for padding in (0, 1):
        x, w = np.zeros((2, 9, 5, 7), np.float32), np.zeros((12, 9, 3, 3), np.float32)
        kernel = tw.kernel(schedule=FMA)(convolutions.conv2d((2, 2), (padding, padding), 1, False).python)
        tile = kernel.stages(x, w, target="sm_90a").stages.tile.calls[-1].kernel
        tests = [op for op in walk(tile.body) if op.opcode in ("lt", "ge") and isinstance(op.result.type, Tile) and 1 not in op.result.type.shape]
        assert bool(tests) == bool(padding)
