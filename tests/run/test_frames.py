"""Convolutions that read past the borders of small images on a CPU: steps of the sum that read nothing but the frame are left out, panel by panel. Results against float64,
where panels cross rows and images, where the frame is wider than the image, in one to three dimensions, in both layouts, on other CPUs."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
from bench.families import convolutions
from tests.run.test_few_filters import channels_first, channels_last, numbers, turned, wanted

import tilewright as tw
from tilewright.ir.emulator import run_program


@cache
def last(s: int, p: int, d: int) -> tw.Kernel[..., Any]:
    return cast("tw.Kernel[..., Any]", convolutions.conv2d_last((s, s), (p, p), d))


@cache
def first(s: int, p: int, d: int) -> tw.Kernel[..., Any]:
    return cast("tw.Kernel[..., Any]", convolutions.conv2d((s, s), (p, p), d, False))


def check(x: np.ndarray, w: np.ndarray, s: int = 1, p: int = 0, d: int = 1) -> None:
    """Both layouts."""
    exact = wanted(x, w, s, p, d)
    most = (2e-6 if x.dtype == np.float32 else 1e-14) * float(np.abs(exact).max(initial=1e-3)) * np.sqrt(w.shape[-1])
    filters = w.shape[0]
    # Those of the bench add up in f32.
    by_pixel, by_plane = (last(s, p, d), first(s, p, d)) if x.dtype == np.float32 else (channels_last(filters, s, p, d), channels_first(filters, s, p, d))
    np.testing.assert_allclose(by_pixel(x, w), exact, rtol=0, atol=most)
    np.testing.assert_allclose(by_plane(turned(x), turned(w)), turned(exact), rtol=0, atol=most)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("filters", [1, 13, 31, 40])
def test_frames_of_small_images(filters: int, dtype: Any) -> None:
    for height, width, channels in ((1, 1, 1), (2, 33, 9), (7, 7, 17), (13, 30, 8), (5, 97, 33)):
        for kernel, p, d in ((3, 1, 1), (5, 4, 1), (7, 6, 2), (3, 5, 1)):
            if height + 2 * p > d * (kernel - 1):
                x, w = numbers(3, height, width, channels, dtype=dtype), numbers(filters, kernel, kernel, channels, dtype=dtype)
                check(x, w, 1, p, d)


@pytest.mark.parametrize(("s", "p", "d"), [(2, 2, 1), (2, 4, 2), (3, 3, 1)])
def test_steps(s: int, p: int, d: int) -> None:
    for height, width in ((9, 11), (6, 40)):
        check(numbers(2, height, width, 19), numbers(20, 5, 5, 19), s, p, d)


@pytest.mark.parametrize("channels", [90, 700])
def test_stretches_of_the_sum(channels: int) -> None:
    """Runs and steps that count are found again for each stretch; some stretches have none."""
    for height, width in ((4, 5), (9, 34)):
        check(numbers(2, height, width, channels), numbers(18, 5, 5, channels), p=4)


def test_a_frame_that_is_wider_than_the_window() -> None:
    """Rows of results without a term are zero, whatever the weights are: no step of them is computed."""
    x, w = numbers(1, 6, 96, 24), numbers(40, 3, 3, 24)
    check(x, w, p=9)
    w[:] = np.nan
    outside = slice(0, 6)
    assert np.isnan(last(1, 9, 1)(x, w)[:, 10:12, 40:60]).all()
    assert (last(1, 9, 1)(x, w)[:, outside] == 0).all()
    assert (first(1, 9, 1)(turned(x), turned(w))[:, :, outside] == 0).all()


def test_volumes() -> None:
    x, w = numbers(2, 5, 3, 6, 9), numbers(17, 5, 3, 3, 3)
    exact = np.zeros((2, 17, 5, 8, 11))
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (2, 2), (2, 2), (2, 2)))
    for q, k, m in product(range(3), repeat=3):
        exact += np.einsum("bcvyz,oc->bovyz", padded[:, :, q : q + 5, k : k + 8, m : m + 11], w[:, :, q, k, m].astype(np.float64))
    np.testing.assert_allclose(convolutions.conv3d(1, 2)(x, w), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("p", "d"), [(0, 1), (4, 1), (8, 2), (30, 3)])
def test_lines(p: int, d: int) -> None:
    x, w = numbers(3, 20, 41), numbers(25, 20, 5)
    exact = wanted(np.moveaxis(x, 1, 2)[:, None], np.moveaxis(w, 1, 2)[:, None], 1, 0, d)[:, 0] if p == 0 else None
    if exact is None:
        padded = np.pad(np.moveaxis(x, 1, 2), ((0, 0), (p, p), (0, 0)))
        exact = wanted(padded[:, None], np.moveaxis(w, 1, 2)[:, None], 1, 0, d)[:, 0]
    np.testing.assert_allclose(convolutions.conv1d(1, p, d)(x, w), np.moveaxis(exact, 2, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("p", "d"), [(0, 1), (0, 2), (2, 1), (3, 3)])
def test_transposed_with_step_one(p: int, d: int) -> None:
    for height, width, filters, channels in ((1, 1, 1, 1), (6, 17, 20, 40), (18, 30, 33, 20)):
        x, w = numbers(3, channels, height, width), numbers(channels, filters, 5, 2)
        if width - 1 - 2 * p + d < 0:
            continue
        whole = np.zeros((3, filters, height + 4 * d, width + d))
        for k, m in product(range(5), range(2)):
            whole[:, :, k * d : k * d + height, m * d : m * d + width] += np.einsum("bcyz,co->boyz", x.astype(np.float64), w[:, :, k, m].astype(np.float64))
        exact = whole[:, :, p : whole.shape[2] - p, p : whole.shape[3] - p]
        np.testing.assert_allclose(convolutions.transposed2d((1, 1), (p, p), d, False)(x, w), exact, rtol=0, atol=1e-4)


def test_empty_images_views_and_what_is_no_number() -> None:
    w = numbers(20, 5, 5, 40)
    assert last(1, 2, 1)(numbers(0, 9, 9, 40), w).shape == (0, 9, 9, 20)
    x = numbers(4, 9, 20, 80)[::2, :, 3:14, ::2]
    np.testing.assert_allclose(last(1, 4, 1)(x, w), wanted(x, w, p=4), rtol=0, atol=1e-4)
    x = numbers(1, 9, 9, 40)
    x[0, 4, 5, 6], x[0, 8, 0, 1] = np.nan, np.inf
    exact = wanted(x, w, p=4)
    for found in (last(1, 4, 1)(x, w), np.moveaxis(first(1, 4, 1)(turned(x), turned(w)), 1, 3)):
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(exact))
        np.testing.assert_allclose(found[np.isfinite(exact)], exact[np.isfinite(exact)], rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2", "aarch64-neon"])
def test_other_cpus(target: str) -> None:
    """Nothing outside is read, and nothing that nobody wrote."""
    for channels, p, d in ((17, 4, 1), (9, 2, 2), (3, 2, 1)):
        x, w = numbers(2, 3, 10, channels), numbers(15, 3, 3, channels)
        exact = wanted(x, w, 1, p, d)
        for kernel, own, weights, result in ((last(1, p, d), x, w, exact), (first(1, p, d), turned(x), turned(w), turned(exact))):
            program = kernel.stages(own, weights, target=target).stages.tile
            (found,) = run_program(program, {"x": own, "w": weights}).values()
            np.testing.assert_allclose(found, result, rtol=1e-4, atol=1e-4)
