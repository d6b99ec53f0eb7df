"""Convolutions of few channels on Hopper that count the row of a window as channels, executed by the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench.families import convolutions
from test_matrix_emulated import followed

import tilewright as tw
from images_reference import convolved, transposed
from kernels_matrix import again, on
from tilewright.base.dtypes import bf16, f16
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import Wgmma

SCHEDULES = (
    "family=wgmma m=64 n=24 k=64 stages=3 swap_ab=1 store=direct to_channels_last=rows",
    "family=wgmma m=128 n=64 k=64 stages=4 math_warpgroups=2 pingpong=1 mma_in_flight=1 swap_ab=1 store=turned to_channels_last=rows32",
)
LAST = "family=wgmma m=64 n=64 k=64 stages=2 to_channels_last=rows"


def computed(kernel: tw.Kernel[..., Any], schedule: str, x: np.ndarray, w: np.ndarray) -> dict[str, np.ndarray]:
    stages = again(kernel, schedule=schedule).stages(x, w, target="sm_90a").stages
    (chosen,) = (s for s in stages.schedules if isinstance(s, Wgmma))
    assert (chosen.a_copy, chosen.to_channels_last) == ("im2col", schedule.rpartition("=")[2])
    return {name: next(iter(run_program(stage, {"x": x, "w": w}).values())) for name, stage in (("tile", stages.tile), ("thread", stages.thread))}


def numbers(dtype: Any, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [rng.integers(-2, 3, shape).astype(dtype.numpy) for shape in shapes]


@pytest.mark.parametrize(
    ("kernel", "one", "other", "stride", "padding", "dilation", "is_transposed"),
    [
        (convolutions.conv2d((1, 1), (3, 3), 1, True), (2, 24, 9, 10), (53, 24, 7, 7), (1, 1), (3, 3), 1, False),
        (convolutions.conv2d((2, 2), (1, 0), 1, False), (2, 13, 9, 11), (17, 13, 3, 5), (2, 2), (1, 0), 1, False),
        (convolutions.conv2d((1, 2), (0, 2), 1, False), (1, 17, 5, 12), (31, 17, 3, 5), (1, 2), (0, 2), 1, False),
        (convolutions.conv2d((2, 4), (3, 1), 2, False), (2, 15, 12, 23), (17, 15, 3, 4), (2, 4), (3, 1), 2, False),
        (convolutions.conv2d((1, 1), (1, 1), 1, False), (1, 8, 1, 1), (7, 8, 3, 3), (1, 1), (1, 1), 1, False),
        (convolutions.conv2d((1, 1), (0, 1), 1, False), (3, 16, 7, 31), (5, 16, 1, 3), (1, 1), (0, 1), 1, False),
        (convolutions.conv1d(2, 3, 1), (3, 19, 41), (20, 19, 5), (2,), (3,), 1, False),
        (convolutions.conv3d(2, 1), (1, 11, 5, 6, 7), (20, 11, 3, 3, 3), (2, 2, 2), (1, 1, 1), 1, False),
        (convolutions.transposed2d((1, 1), (1, 0), 1, False), (2, 19, 6, 7), (19, 40, 4, 4), (1, 1), (1, 0), 1, True),
    ],
    ids=["7x7", "steps of 2", "one step of 2", "places left out", "single pixels", "rows alone", "one axis", "three axes", "backwards"],
)
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_rows_of_windows_are_channels(
    kernel: tw.Kernel[..., Any], one: tuple[int, ...], other: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: int, is_transposed: bool, dtype: Any
) -> None:
    x, w = numbers(dtype, one, other)
    want = (transposed if is_transposed else convolved)(x, w, stride, padding, dilation).astype(dtype.numpy)
    for name, found in computed(kernel, SCHEDULES[dtype is f16], x, w).items():
        np.testing.assert_array_equal(found, want, err_msg=name)


def test_channels_that_lie_last() -> None:
    x, w = numbers(bf16, (2, 5, 6, 21), (20, 3, 3, 21))
    want = convolved(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2), (1, 1), (1, 1), 1).transpose(0, 2, 3, 1).astype(bf16.numpy)
    for name, found in computed(convolutions.conv2d_last((1, 1), (1, 1), 1), LAST, x, w).items():
        np.testing.assert_array_equal(found, want, err_msg=name)


GATHERED = ("family=wgmma m=64 n=64 k=64 stages=2 to_channels_last=gather", "family=wgmma m=128 n=40 k=64 stages=3 math_warpgroups=2 pingpong=1 mma_in_flight=1 to_channels_last=gather")


@pytest.mark.parametrize(
    ("one", "other", "stride", "padding", "dilation"),
    [
        ((2, 9, 11, 21), (40, 3, 3, 21), (1, 1), (2, 1), 2),
        ((1, 7, 12, 5), (9, 3, 5, 5), (2, 2), (1, 4), 1),
        ((2, 5, 31, 3), (17, 1, 7, 3), (1, 2), (0, 3), 2),
        ((1, 1, 1, 12), (8, 3, 3, 12), (1, 1), (1, 1), 1),
        ((1, 4, 70, 31), (70, 2, 4, 31), (1, 3), (0, 0), 2),
    ],
    ids=["places apart", "steps", "a row of three channels", "single pixels", "two steps"],
)
def test_rows_of_windows_are_gathered(one: tuple[int, ...], other: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int], dilation: int) -> None:
    x, w = numbers(bf16, one, other)
    want = convolved(x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2), stride, padding, dilation).transpose(0, 2, 3, 1).astype(bf16.numpy)
    for schedule in GATHERED:
        for name, found in computed(convolutions.conv2d_last(stride, padding, dilation), schedule, x, w).items():
            np.testing.assert_array_equal(found, want, err_msg=name)


@pytest.mark.parametrize("folded", [0, 1])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("one", "other", "stride", "padding", "dilation"),
    [((2, 21, 9, 11), (40, 21, 3, 3), (1, 1), (2, 1), 2), ((1, 5, 12, 7), (9, 5, 5, 3), (2, 2), (4, 1), 1), ((2, 3, 31, 9), (17, 3, 7, 2), (2, 1), (3, 0), 2)],
    ids=["places apart", "steps", "few channels"],
)
def test_either_axis_is_gathered(one: tuple[int, ...], other: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int], dilation: int, last: bool, folded: int) -> None:
    """Images with channels first are turned before."""
    x, w = numbers(bf16, one, other)
    want = convolved(x, w, stride, padding, dilation).astype(bf16.numpy)
    kernel, schedule = convolutions.conv2d(stride, padding, dilation, False), f"family=wgmma m=64 n=64 k=64 stages=2 swap_ab=1 store=turned to_channels_last=image_gather folded={folded}"
    if last:
        x, w, want = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)) for a in (x, w, want))
        kernel, schedule = convolutions.conv2d_last(stride, padding, dilation), f"family=wgmma m=64 n=40 k=64 stages=2 to_channels_last=gather folded={folded}"
    stages = again(kernel, schedule=schedule).stages(x, w, target="sm_90a").stages
    for stage in (stages.tile, stages.thread):
        np.testing.assert_array_equal(next(iter(run_program(stage, {"x": x, "w": w}).values())), want)


def test_what_is_no_number_is_gathered_for_its_windows_alone() -> None:
    """Behind the channels of a gathered row lies what nobody wrote."""
    x, w = (np.abs(a.astype(np.float32)) + 1 for a in numbers(bf16, (2, 6, 9, 19), (7, 3, 3, 19)))
    for place in ((0, 0, 0, 0), (0, 2, 8, 18), (1, 5, 4, 3)):
        x[place] = np.nan
    given = x.astype(bf16.numpy), w.astype(bf16.numpy)
    want = np.isnan(convolved(*(a.transpose(0, 3, 1, 2) for a in given), (1, 1), (2, 2), 2)).transpose(0, 2, 3, 1)
    for name, found in computed(convolutions.conv2d_last((1, 1), (2, 2), 2), GATHERED[0], *given).items():
        np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), want, err_msg=name)


def test_places_that_lie_apart_are_gathered() -> None:
    x, w = np.empty((32, 132, 132, 21), bf16.numpy), np.empty((191, 3, 3, 21), bf16.numpy)
    (chosen,) = followed(convolutions.conv2d_last((1, 1), (2, 1), 2), (x, w))
    assert chosen.to_channels_last == "gather"


def test_views() -> None:
    x, w = numbers(bf16, (2, 12, 5, 7), (9, 12, 3, 3))
    want = convolved(x, w, (1, 1), (1, 1), 1).astype(bf16.numpy)
    kernel = convolutions.conv2d((1, 1), (1, 1), 1, False)
    views = (np.repeat(x, 2, axis=3)[..., ::2], np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1], np.pad(x, 2)[2:-2, 2:-2, 2:-2, 2:-2])
    given = on(again(kernel, schedule=SCHEDULES[0]), emulator_device("thread", parse_target("sm_90a")))
    for view in views:
        np.testing.assert_array_equal(np.asarray(given((view, np.pad(w, 1)[1:-1, 1:-1, 1:-1, 1:-1]))), want)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_what_is_no_number_reaches_its_windows_alone(odd: float) -> None:
    """Rows of windows overlap in memory, and steps end behind them: zeros of the weights must meet zeros."""
    x, w = (a.astype(np.float64) for a in numbers(bf16, (2, 19, 6, 9), (7, 19, 3, 3)))
    x, w = np.abs(x) + 1, np.abs(w) + 1
    for place in ((0, 0, 0, 0), (0, 18, 2, 8), (1, 3, 5, 4)):
        x[place] = odd
    given = x.astype(bf16.numpy), w.astype(bf16.numpy)
    with np.errstate(invalid="ignore"):
        want = ~np.isfinite(convolved(*given, (1, 1), (1, 1), 1))
    for name, found in computed(convolutions.conv2d((1, 1), (1, 1), 1, False), SCHEDULES[0], *given).items():
        np.testing.assert_array_equal(~np.isfinite(found.astype(np.float64)), want, err_msg=name)


@pytest.mark.parametrize(("one", "other"), [((0, 12, 5, 5), (9, 12, 3, 3)), ((2, 12, 5, 5), (0, 12, 3, 3)), ((2, 12, 5, 0), (9, 12, 3, 3))], ids=["images", "filters", "columns"])
def test_none(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    x, w = numbers(bf16, one, other)
    for found in computed(convolutions.conv2d((1, 1), (1, 1), 1, False), SCHEDULES[0], x, w).values():
        np.testing.assert_array_equal(found, np.zeros((one[0], other[0], 5, one[3]), bf16.numpy))


def test_no_channels() -> None:
    x, w = numbers(bf16, (70, 0, 64, 64), (72, 0, 3, 3))
    assert convolutions.conv2d((1, 1), (1, 1), 1, False).stages(x, w, target="sm_90a").stages.schedules


def test_places_that_are_not_neighbours_are_refused() -> None:
    kernel = again(convolutions.conv2d((1, 1), (2, 2), 2, False), schedule=SCHEDULES[0])
    with pytest.raises(UserError, match="to_channels_last"):
        kernel.stages(*numbers(bf16, (2, 12, 9, 9), (9, 12, 3, 3)), target="sm_90a")


def test_few_channels_of_large_windows_are_read_so() -> None:
    x, w = np.empty((64, 24, 48, 80), bf16.numpy), np.empty((53, 24, 7, 7), bf16.numpy)
    (chosen,) = followed(convolutions.conv2d((1, 1), (3, 3), 1, False), (x, w))
    assert chosen.to_channels_last in ("rows", "rows32")
    x, w = np.empty((32, 64, 56, 56), bf16.numpy), np.empty((64, 64, 3, 3), bf16.numpy)
    (chosen,) = followed(convolutions.conv2d((1, 1), (1, 1), 1, False), (x, w))
    assert chosen.to_channels_last == "image"
