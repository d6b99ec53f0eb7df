"""Convolutions of images with channels first on Hopper: copies that have them last before and after, executed by the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from test_matrix_emulated import check, followed, run_stages

from kernels_matrix import BY_NAME, CHANNELS_FIRST, Sizes, again, convolution_kernel, on
from tilewright.base.dtypes import bf16
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device

TURNED = {
    "both": "family=wgmma m=64 n=64 k=64 stages=3 to_channels_last=both",
    "both, in turns": "family=wgmma m=64 n=128 k=64 stages=4 math_warpgroups=2 pingpong=1 mma_in_flight=1 to_channels_last=both",
    "both, direct": "family=wgmma m=128 n=32 k=64 stages=4 math_warpgroups=2 store=direct to_channels_last=both",
    "image": "family=wgmma m=64 n=64 k=64 stages=3 swap_ab=1 store=direct to_channels_last=image",
    "image, in turns": "family=wgmma m=128 n=128 k=64 stages=4 math_warpgroups=2 pingpong=1 mma_in_flight=1 swap_ab=1 store=direct to_channels_last=image",
    "image, fitted": "family=wgmma m=64 n=40 k=64 stages=3 swap_ab=1 store=direct to_channels_last=image",
    "image, turned": "family=wgmma m=128 n=48 k=64 stages=3 math_warpgroups=2 swap_ab=1 store=turned to_channels_last=image",
    "image, turned in turns": "family=wgmma m=64 n=64 k=64 stages=4 math_warpgroups=2 pingpong=1 mma_in_flight=1 swap_ab=1 store=turned to_channels_last=image",
    "image, narrow": "family=wgmma m=128 n=16 k=64 stages=4 math_warpgroups=2 swap_ab=1 store=direct to_channels_last=image",
}
CASES = (
    "conv_nchw_s1p1d1_bf16", "conv_nchw_s1p1d1_f16", "conv_nchw_s2p1d1_bf16", "conv_nchw_s1p2d2_bf16", "conv_nchw_s2p3d2_bf16",
    "conv_nchw_s3p0d1_bf16", "conv_nchw_gelu_and_residual",
)  # fmt: skip


@pytest.mark.parametrize("schedule", TURNED)
@pytest.mark.parametrize("name", CASES)
def test_images_are_turned(name: str, schedule: str) -> None:
    case = BY_NAME[name]
    kernel = again(case.kernel, schedule=TURNED[schedule])
    start = CASES.index(name) + list(TURNED).index(schedule)
    for sizes in (CHANNELS_FIRST[start % 4], CHANNELS_FIRST[(start + 1) % 4]):
        check(case, "sm_90a", sizes, kernel)
        (chosen,) = followed(kernel, case.arguments(sizes))
        assert chosen.a_copy == "im2col"


@pytest.mark.parametrize("schedule", ["both", "image"])
@pytest.mark.parametrize("sizes", [(0, 32, 5, 5, 4, 3, 3), (1, 32, 5, 5, 0, 3, 3), (1, 32, 1, 1, 8, 3, 3)])
def test_no_images_and_single_pixels(sizes: Sizes, schedule: str) -> None:
    case = BY_NAME["conv_nchw_s1p1d1_bf16"]
    check(case, "sm_90a", sizes, again(case.kernel, schedule=TURNED[schedule]))


@pytest.mark.parametrize("schedule", ["both", "image"])
def test_a_pixel_of_a_turned_image_reaches_the_windows_it_is_in(schedule: str) -> None:
    case, sizes = BY_NAME["conv_nchw_s1p1d1_bf16"], (3, 32, 5, 6, 8, 3, 3)
    x, f = case.arguments(sizes)
    x[1, -1, 4, 5] = x[2, 0, 0, 3] = np.nan
    want = np.isnan(case.expected((x, f)))
    assert want.sum() == 8 * (4 + 6)
    for stage, result in run_stages(again(case.kernel, schedule=TURNED[schedule]), "sm_90a", (x, f)).items():
        np.testing.assert_array_equal(np.isnan(result.astype(np.float64)), want, err_msg=stage)


@pytest.mark.parametrize("channels", [8, 13, 28])
def test_few_channels_are_turned(channels: int) -> None:
    """A step of the sum is a place of the window, though channels fill a part of it."""
    case, sizes = BY_NAME["conv_nchw_s1p1d1_bf16"], (2, channels, 6, 7, 9, 3, 2)
    kernel = again(case.kernel, schedule=TURNED["image, fitted"])
    check(case, "sm_90a", sizes, kernel)
    large = np.empty((16, channels, 130, 131), bf16.numpy), np.empty((70, channels, 5, 5), bf16.numpy)
    (chosen,) = followed(case.kernel, large)
    assert (chosen.family, chosen.to_channels_last[:4], chosen.n) == ("wgmma", "rows", 72)


def test_views_are_turned() -> None:
    case, sizes = BY_NAME["conv_nchw_s1p1d1_bf16"], (2, 32, 5, 7, 16, 3, 3)
    x, f = case.arguments(sizes)
    views = {
        "every second": (np.repeat(x, 2, axis=3)[..., ::2], np.repeat(f, 2, axis=1)[:, ::2]),
        "backwards": (x[::-1, ::-1, ::-1, ::-1], f[::-1, ::-1]),
        "channels last in memory": (np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), f),
        "from the middle": (np.pad(x, 2)[2:-2, 2:-2, 2:-2, 2:-2], f),
    }
    kernel = again(case.kernel, schedule=TURNED["both"])
    for name, given in views.items():
        found = on(kernel, emulator_device("thread", parse_target("sm_90a")))(given)
        case.compare(np.asarray(found), given, sizes, name)


def test_what_the_copy_engine_does_not_reach_is_packed() -> None:
    """Steps of more than 8, windows that begin more than 128 pixels outside."""
    for way, turned in (((2, 1, 1), True), ((8, 4, 1), True), ((9, 4, 1), False), ((1, 60, 60), True), ((1, 140, 140), False)):
        x, f = np.empty((32, 64, 96, 96), bf16.numpy), np.empty((64, 64, 3, 3), bf16.numpy)
        (chosen,) = followed(convolution_kernel(False, *way), (x, f))
        assert bool(chosen.to_channels_last) is turned, way


def test_images_that_need_no_turning_are_refused() -> None:
    case = BY_NAME["conv_nhwc_s1p1d1_bf16"]
    with pytest.raises(UserError, match="has no images to bring to channels last that way"):
        again(case.kernel, schedule=TURNED["both"]).stages(*case.arguments((2, 32, 6, 5, 16, 3, 3)), target="sm_90a")
