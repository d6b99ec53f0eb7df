"""Convolutions of f32 in parts of tf32 (Hopper's copy engine and warp-group instructions): as exact as a chain of multiply-adds, with its infinities, for images of
one to three axes, with strides, dilations and padding, transposed ones too. Executed by the emulator, at the tile stage and at the thread stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from f32_reference import product
from images_reference import Steps, convolved, transposed
from tilewright.base.errors import UserError
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.ir.types import Tile
from tilewright.passes.schedules.matrix import Wgmma

PARTS = "family=wgmma m=128 n=64 k=32 stages=2 math_warpgroups=2 tf32_terms=3 chunk=32"


def results(kernel: tw.Kernel[..., Any], schedule: str = PARTS, **arrays: np.ndarray) -> list[np.ndarray]:
    """At both stages; some kernel has the schedule."""
    stages = tw.kernel(schedule=schedule)(kernel.python).stages(*arrays.values(), target="sm_90a").stages
    assert any(isinstance(s, Wgmma) and s.tf32_terms for s in stages.schedules)
    return [np.asarray(next(iter(run_program(stage, arrays).values()))) for stage in (stages.tile, stages.thread)]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
CASES: dict[str, tuple[Any, Callable[..., np.ndarray], Shapes, Steps, Steps, int]] = {
    "1-D": (convolutions.conv1d(2, 3, 2), convolved, ((2, 19, 50), (20, 19, 5)), (2,), (3,), 2),
    "2-D": (convolutions.conv2d((1, 2), (1, 2), 1, True), convolved, ((2, 33, 7, 9), (17, 33, 3, 5)), (1, 2), (1, 2), 1),
    "3-D": (convolutions.conv3d(2, 1), convolved, ((2, 19, 5, 6, 7), (20, 19, 3, 3, 3)), (2, 2, 2), (1, 1, 1), 1),
    "backwards": (convolutions.transposed2d((1, 1), (3, 1), 2, True), transposed, ((2, 19, 5, 6), (19, 20, 3, 3)), (1, 1), (3, 1), 2),
    "phases": (convolutions.transposed2d((2, 1), (1, 0), 1, False), transposed, ((1, 68, 4, 5), (68, 20, 3, 1)), (2, 1), (1, 0), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_images(name: str) -> None:
    kernel, exact, (one, other), stride, padding, dilation = CASES[name]
    x, w = normal(*one), normal(*other)
    want = exact(x, w, stride, padding, dilation)
    for found in results(kernel, x=x, w=w):
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(("rows", "groups"), [(128, 2), (192, 3), (256, 2)])
@pytest.mark.parametrize("filters", [17, 35, 53])
def test_columns_that_fit_the_filters(filters: int, rows: int, groups: int) -> None:
    x, w = normal(2, 7, 3, 22, 19), normal(filters, 7, 1, 5, 3)
    schedule = f"family=wgmma m={rows} n={-(-filters // 8) * 8} k=32 stages=2 math_warpgroups={groups} tf32_terms=4 chunk=32"
    want = convolved(x, w, (2, 2, 2), (0, 0, 0), 1)
    for found in results(convolutions.conv3d(2, 0), schedule, x=x, w=w):
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(("channels", "step"), [(8, 8), (19, 24), (35, 24), (39, 16)])
def test_steps_that_fit_the_channels(channels: int, step: int) -> None:
    """Rows of shared memory have 32 elements, of which a step multiplies fewer."""
    x, w = normal(2, channels, 7, 9), normal(21, channels, 3, 3)
    schedule = f"family=wgmma m=128 n=24 k={step} stages=3 math_warpgroups=2 tf32_terms=4 chunk={step}"
    want = convolved(x, w, (1, 2), (1, 1), 1)
    for found in results(convolutions.conv2d((1, 2), (1, 1), 1, True), schedule, x=x, w=w):
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


def test_filters_choose_the_columns() -> None:
    """Of 35 filters no tile has 64 columns."""
    x, w = np.empty((16, 70, 13, 98, 91), np.float32), np.empty((35, 70, 1, 5, 3), np.float32)
    (chosen,) = (s for s in convolutions.conv3d(1, 0).stages(x, w, target="sm_90a").stages.schedules if isinstance(s, Wgmma))
    assert chosen.n == 40 and chosen.tf32_terms


@pytest.mark.parametrize("schedule", ["m=64 n=32 stages=2 tf32_terms=4 chunk=64", "m=256 n=64 stages=1 math_warpgroups=2 tf32_terms=3 chunk=32"])
def test_channels_last(schedule: str) -> None:
    x, w = normal(2, 6, 9, 40), normal(21, 3, 1, 40)
    want = convolved(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2), (1, 2), (1, 0), 1).transpose(0, 2, 3, 1)
    for found in results(convolutions.conv2d_last((1, 2), (1, 0), 1), f"family=wgmma k=32 {schedule}", x=x, w=w):
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


def test_infinities() -> None:
    """An infinity is one once more, where numbers beside it are tf32 too, and nothing becomes NaN."""
    x, w = np.ones((1, 40, 5, 6), np.float32), np.full((16, 40, 3, 3), 0.1, np.float32)
    x[0, 3, 2, 2], x[0, 7, 0, 5] = np.inf, -np.inf
    want = convolved(x, w, (1, 1), (0, 0), 1)
    for found in results(convolutions.conv2d((1, 1), (0, 0), 1, False), x=x, w=w):
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_no_further_off_than_a_chain() -> None:
    """Largest and mean errors, with numbers of very different size."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape)) for shape in ((1, 64, 6, 6), (16, 64, 3, 3)))
    x, w = x.astype(np.float32), w.astype(np.float32)
    want = convolved(x, w, (1, 1), (0, 0), 1)
    chain = np.zeros(want.shape, np.float32)
    for c, r, s in itertools.product(range(64), range(3), range(3)):
        product = x[:, c, r : r + 4, s : s + 4].astype(np.float64)[:, None] * w[:, c, r, s].astype(np.float64)[None, :, None, None]
        chain = (chain + product).astype(np.float32)
    limits = np.abs(chain - want)
    for found in results(convolutions.conv2d((1, 1), (0, 0), 1, False), PARTS.replace("terms=3", "terms=4"), x=x, w=w):
        off = np.abs(found - want)
        assert off.max() <= limits.max()
        assert off.mean() <= limits.mean()


def test_precision_keeps_multiply_adds() -> None:
    kernel = tw.kernel(precision="ieee")(convolutions.conv2d((1, 1), (1, 1), 1, False).python)
    x, w = np.empty((26, 64, 22, 42), np.float32), np.empty((141, 64, 5, 5), np.float32)
    assert not any(isinstance(s, Wgmma) for s in kernel.stages(x, w, target="sm_90a").stages.schedules)


def test_products_have_no_images() -> None:
    with pytest.raises(UserError, match="no convolution"):
        tw.kernel(schedule=PARTS)(product.python).stages(normal(128, 128), normal(128, 128), target="sm_90a")


FOLDED: dict[str, tuple[Any, Callable[..., np.ndarray], Shapes, Steps, Steps, int, tuple[int, ...]]] = {
    "1-D": (convolutions.conv1d(2, 3, 2), convolved, ((2, 19, 50), (20, 19, 5)), (2,), (3,), 2, (1,)),
    "2-D": (convolutions.conv2d((1, 2), (1, 2), 1, True), convolved, ((2, 9, 7, 9), (17, 9, 3, 5)), (1, 2), (1, 2), 1, (1, 2, 3)),
    "2-D without padding": (convolutions.conv2d((2, 1), (0, 0), 2, False), convolved, ((1, 5, 11, 14), (18, 5, 3, 5)), (2, 1), (0, 0), 2, (1, 2)),
    "3-D": (convolutions.conv3d(2, 1), convolved, ((2, 9, 5, 6, 7), (20, 9, 1, 3, 3)), (2, 2, 2), (1, 1, 1), 1, (1, 3, 4, 7)),
    "backwards": (convolutions.transposed2d((1, 1), (3, 1), 2, True), transposed, ((2, 9, 5, 6), (9, 20, 3, 3)), (1, 1), (3, 1), 2, (1, 2)),
    "windows of one": (convolutions.conv2d((2, 2), (0, 1), 1, False), convolved, ((2, 67, 5, 23), (18, 67, 1, 1)), (2, 2), (0, 1), 1, (2, 3)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_places_of_the_window_beside_channels(name: str) -> None:
    kernel, exact, (one, other), stride, padding, dilation, ways = FOLDED[name]
    x, w = normal(*one), normal(*other)
    want = exact(x, w, stride, padding, dilation)
    for folded in ways:
        for found in results(kernel, f"{PARTS} folded={folded}", x=x, w=w):
            assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max(), folded


ROWS: dict[str, tuple[Any, Callable[..., np.ndarray], Shapes, Steps, Steps, int]] = {
    "1-D": (convolutions.conv1d(2, 3, 2), convolved, ((2, 13, 50), (20, 13, 5)), (2,), (3,), 2),
    "2-D": (convolutions.conv2d((1, 2), (1, 2), 1, True), convolved, ((2, 5, 7, 9), (17, 5, 3, 5)), (1, 2), (1, 2), 1),
    "3-D": (convolutions.conv3d(1, 1), convolved, ((2, 10, 5, 6, 7), (20, 10, 1, 3, 5)), (1, 1, 1), (1, 1, 1), 1),
    "backwards": (convolutions.transposed2d((1, 1), (1, 0), 1, True), transposed, ((2, 9, 5, 6), (9, 20, 3, 3)), (1, 1), (1, 0), 1),
}


@pytest.mark.parametrize("way", ["rows", "rows32"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_windows_are_channels(name: str, way: str) -> None:
    kernel, exact, (one, other), stride, padding, dilation = ROWS[name]
    x, w = normal(*one), normal(*other)
    want = exact(x, w, stride, padding, dilation)
    for found in results(kernel, f"{PARTS} to_channels_last={way}", x=x, w=w):
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


def test_rows_of_windows_are_copied_where_channels_are_few() -> None:
    x, w = (np.broadcast_to(np.float32(0), shape) for shape in ((4, 72, 14, 70, 42), (95, 72, 3, 3, 3)))
    chosen = [s for s in convolutions.conv3d(1, 0).stages(x, w, target="sm_90a").stages.schedules if isinstance(s, Wgmma)]
    assert [s.to_channels_last for s in chosen] == ["rows"]


def test_folded_axes_are_those_of_the_image() -> None:
    x, w = normal(2, 9, 7, 9), normal(17, 9, 3, 5)
    with pytest.raises(UserError, match="TW020"):
        results(convolutions.conv2d((1, 2), (1, 2), 1, True), f"{PARTS} folded=4", x=x, w=w)


def test_windows_are_folded_where_channels_are_few() -> None:
    """Rows or columns of the window beside 6 channels; planes that no window reads have no parts."""
    few = convolutions.conv2d((1, 1), (3, 1), 1, False).stages(np.zeros((8, 6, 99, 97), np.float32), np.zeros((96, 6, 7, 5), np.float32), target="sm_90a").stages
    assert isinstance(few.schedules[-1], Wgmma) and few.schedules[-1].folded in (1, 2)
    sparse = convolutions.conv3d(2, 0).stages(np.zeros((4, 64, 13, 83, 57), np.float32), np.zeros((96, 64, 1, 5, 3), np.float32), target="sm_90a").stages
    assert isinstance(sparse.schedules[-1], Wgmma) and sparse.schedules[-1].folded == 1
    many = convolutions.conv2d((1, 1), (1, 1), 1, False).stages(np.zeros((8, 64, 99, 97), np.float32), np.zeros((96, 64, 3, 3), np.float32), target="sm_90a").stages
    assert isinstance(many.schedules[-1], Wgmma) and many.schedules[-1].folded == 0


def test_copies_of_every_second_column_are_turned_by_lanes() -> None:
    """Lanes of a warp read neighbours of a row, and write those of a pixel."""
    x, w = np.zeros((13, 512, 144, 52), np.float32), np.zeros((144, 512, 1, 1), np.float32)
    kernel = tw.kernel(schedule=f"{PARTS} folded=3")(convolutions.conv2d((2, 2), (0, 0), 1, False).python)
    parts = kernel.stages(x, w, target="sm_90a").stages.tile.calls[0].kernel
    assert "across=8" in str(parts.attrs["schedule"])
    assert not any(op.opcode == "floordiv" and isinstance(op.result.type, Tile) for op in walk(parts.body))


GATHERED: dict[str, tuple[Any, Shapes, Steps, Steps, int]] = {
    "every phase": (convolutions.transposed2d((2, 2), (1, 0), 1, False), ((1, 68, 4, 5), (68, 20, 3, 3)), (2, 2), (1, 0), 1),
    "phases without terms": (convolutions.transposed2d((4, 4), (0, 1), 1, True), ((1, 68, 4, 5), (68, 20, 3, 5)), (4, 4), (0, 1), 1),
    "one axis": (convolutions.transposed1d(3, 1, 2, 0), ((2, 68, 21), (68, 20, 4)), (3,), (1,), 2),
    "three axes": (convolutions.transposed3d(3, 1), ((2, 68, 3, 3, 4), (68, 20, 2, 2, 4)), (3, 3, 3), (1, 1, 1), 1),
}


@pytest.mark.parametrize("name", GATHERED)
def test_phases_are_gathered(name: str) -> None:
    """Phases write to scratch, and one kernel writes every result once, zeros of phases without terms too."""
    kernel, (one, other), stride, padding, dilation = GATHERED[name]
    x, w = normal(*one), normal(*other)
    want = transposed(x, w, stride, padding, dilation)
    for found in results(kernel, f"{PARTS} gather=1", x=x, w=w):
        assert np.abs(found - want).max() <= 1e-6 * np.abs(want).max()


def test_phases_are_gathered_where_results_are_many() -> None:
    """Windows of many taps: products would be many for each result."""
    kernel = convolutions.transposed2d((2, 2), (0, 0), 2, False)
    for side, gathered in ((20, False), (96, True)):
        x, w = np.zeros((4, 64, side, side), np.float32), np.zeros((64, 40, 5, 7), np.float32)
        calls = [call.kernel.name for call in kernel.stages(x, w, target="sm_90a").stages.tile.calls]
        assert any(name.endswith(".gather") for name in calls) == gathered and any(name.endswith(".empty") for name in calls) != gathered


def test_only_phases_are_gathered() -> None:
    x, w = normal(2, 33, 7, 9), normal(17, 33, 3, 5)
    with pytest.raises(UserError, match="gather is for the phases"):
        results(convolutions.conv2d((1, 2), (1, 2), 1, True), f"{PARTS} gather=1", x=x, w=w)
