"""Convolutions whose pixels lie apart or in short rows, on a CPU: columns are copied by their places in a framed copy. Against float64, over odd sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.passes.to_tile.panels.active_steps import without_frames

Axes = tuple[int, ...]


def exact(x: np.ndarray, w: np.ndarray, s: Axes, p: Axes, d: Axes) -> np.ndarray:
    """The convolution in float64: for each tap, a view of the framed image."""
    taps = w.shape[2:]
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *((q, q) for q in p)))
    size = [(e - f * (t - 1) - 1) // g + 1 for e, f, t, g in zip(wide.shape[2:], d, taps, s, strict=True)]
    out = np.zeros((x.shape[0], w.shape[0], *size))
    for tap in itertools.product(*map(range, taps)):
        ends = [slice(t * f, t * f + g * (n - 1) + 1, g) for t, f, g, n in zip(tap, d, s, size, strict=True)]
        every: Any = slice(None)
        out += np.einsum("bc...,oc->bo...", wide[(every, every, *ends)], w[(every, every, *tap)].astype(np.float64))
    return out


def along(s: int, p: int, d: int) -> Callable[..., Any]:
    @tw.kernel
    def convolution(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, length = x.shape
        filters, _, taps = w.shape
        size = (length + 2 * p - d * (taps - 1) - 1) // s + 1
        out = tw.empty((n, filters, size), x.dtype)
        for b, o, i in tw.grid(n, filters, size):
            total = x.dtype(0)
            for c in range(channels):
                for k in range(taps):
                    at = i * s + k * d - p
                    if 0 <= at < length:
                        total += x[b, c, at] * w[o, c, k]
            out[b, o, i] = total
        return out

    return convolution


def plane(s: Axes, p: Axes, d: int) -> Callable[..., Any]:
    (s0, s1), (p0, p1) = s, p

    @tw.kernel
    def convolution(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        filters, _, kh, kw = w.shape
        rows = (height + 2 * p0 - d * (kh - 1) - 1) // s0 + 1
        columns = (width + 2 * p1 - d * (kw - 1) - 1) // s1 + 1
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = x.dtype(0)
            for c in range(channels):
                for k in range(kh):
                    y = i * s0 + k * d - p0
                    if 0 <= y < height:
                        for m in range(kw):
                            z = j * s1 + m * d - p1
                            if 0 <= z < width:
                                total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    return convolution


def space(s: int, p: int) -> Callable[..., Any]:
    @tw.kernel
    def convolution(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, depth, height, width = x.shape
        filters, _, kd, kh, kw = w.shape
        planes = (depth + 2 * p - kd) // s + 1
        rows = (height + 2 * p - kh) // s + 1
        columns = (width + 2 * p - kw) // s + 1
        out = tw.empty((n, filters, planes, rows, columns), x.dtype)
        for b, o, h, i, j in tw.grid(n, filters, planes, rows, columns):
            total = x.dtype(0)
            for c in range(channels):
                for q in range(kd):
                    for k in range(kh):
                        for m in range(kw):
                            v = h * s + q - p
                            y = i * s + k - p
                            z = j * s + m - p
                            if 0 <= v < depth and 0 <= y < height and 0 <= z < width:
                                total += x[b, c, v, y, z] * w[o, c, q, k, m]
            out[b, o, h, i, j] = total
        return out

    return convolution


def check(kernel: Callable[..., Any], x: Axes, w: Axes, s: Axes, p: Axes, d: Axes, dtype: Any = np.float32) -> None:
    rng = np.random.default_rng(len(x) + sum(x))
    image, taps = rng.standard_normal(x).astype(dtype), rng.standard_normal(w).astype(dtype)
    want = exact(image, taps, s, p, d)
    limit = (1e-5 if dtype is np.float32 else 1e-13) * max(1.0, np.abs(want).max(initial=0.0)) * 8
    np.testing.assert_allclose(kernel(image, taps), want, rtol=0, atol=limit)


@pytest.mark.parametrize(("s", "p", "d", "taps"), [(2, 7, 2, 8), (1, 5, 1, 6), (3, 13, 3, 6), (4, 2, 2, 3)])
def test_along_one_axis(s: int, p: int, d: int, taps: int) -> None:
    kernel = along(s, p, d)
    for n, c, f, length in ((3, 5, 13, 61), (1, 50, 17, 40), (10, 90, 9, 33), (2, 1, 33, d * (taps - 1) + 1), (2, 103, 8, 515), (1, 3, 1, 1031)):
        check(kernel, (n, c, length), (f, c, taps), (s,), (p,), (d,))


@pytest.mark.parametrize(
    ("s", "p", "d", "taps"),
    [
        ((2, 2), (8, 2), 2, (11, 11)),
        ((2, 2), (7, 3), 2, (5, 5)),  # the padding is no multiple of what the index moves by
        ((2, 2), (5, 0), 1, (11, 7)),
        ((1, 2), (0, 1), 1, (3, 3)),
        ((1, 1), (1, 1), 1, (4, 4)),
        ((3, 6), (4, 5), 3, (3, 2)),
    ],
)
def test_in_a_plane(s: Axes, p: Axes, d: int, taps: Axes) -> None:
    kernel = plane(s, p, d)
    least = [d * (t - 1) + 1 for t in taps]
    for n, c, f, h, w in ((2, 3, 16, 9, 11), (1, 31, 5, 0, 6), (5, 7, 41, 13, 0), (3, 70, 19, 2, 3)):
        check(kernel, (n, c, h + least[0], w + least[1]), (f, c, *taps), s, p, (d, d))


@pytest.mark.parametrize(("s", "p"), [(1, 1), (2, 2)])
def test_in_space(s: int, p: int) -> None:
    kernel = space(s, p)
    for n, c, f, size in ((2, 3, 13, (5, 7, 9)), (1, 19, 8, (3, 4, 15)), (4, 5, 17, (4, 3, 3))):
        check(kernel, (n, c, *size), (f, c, 3, 3, 2), (s,) * 3, (p,) * 3, (1,) * 3)


def test_in_double_precision() -> None:
    check(plane((2, 2), (2, 1), 2), (3, 9, 17, 15), (7, 9, 3, 3), (2, 2), (2, 1), (2, 2), np.float64)
    check(along(2, 3, 1), (3, 9, 37), (7, 9, 5), (2,), (3,), (1,), np.float64)


def test_no_image_gives_no_result() -> None:
    kernel = plane((2, 2), (1, 1), 2)
    assert kernel(np.zeros((0, 3, 9, 9), np.float32), np.zeros((5, 3, 3, 3), np.float32)).shape == (0, 5, 4, 4)
    assert not kernel(np.ones((2, 0, 9, 9), np.float32), np.ones((5, 0, 3, 3), np.float32)).any()


@pytest.mark.parametrize("target", ["x86-64-avx2", "aarch64-neon"])
@pytest.mark.parametrize(("s", "p", "d"), [((2, 2), (4, 3), 2), ((2, 1), (1, 2), 1)])
def test_every_stage_stays_inside_its_arrays(target: str, s: Axes, p: Axes, d: int) -> None:
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((2, 3, 9, 8)).astype(np.float32), rng.standard_normal((5, 3, 3, 3)).astype(np.float32)
    stages = plane(s, p, d).stages(x, w, target=target).stages  # type: ignore[attr-defined]
    want = exact(x, w, s, p, (d, d))
    for stage in (stages.loop, stages.tile, stages.thread):
        np.testing.assert_allclose(run_program(stage, {"x": x, "w": w})["out"], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("s", "p", "d", "taps"), [(1, 2, 1, 3), (2, 3, 3, 2), (3, 0, 2, 4), (4, 5, 1, 2)])
def test_rows_that_are_read_past_their_ends_stay_inside_their_arrays(s: int, p: int, d: int, taps: int) -> None:
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((2, 3, 75 * s)).astype(np.float32), rng.standard_normal((5, 3, taps)).astype(np.float32)
    stages = along(s, p, d).stages(x, w, target="x86-64-avx512").stages  # type: ignore[attr-defined]
    want = exact(x, w, (s,), (p,), (d,))
    for stage in (stages.loop, stages.tile, stages.thread):
        np.testing.assert_allclose(run_program(stage, {"x": x, "w": w})["out"], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("target", "s", "frames"), [("x86-64-avx512", 1, 0), ("x86-64-avx512", 3, 0), ("x86-64-avx512", 4, 1), ("x86-64-avx2", 1, 1), ("aarch64-neon", 2, 1)])
def test_rows_get_no_frame_where_vectors_are_read_under_masks(target: str, s: int, frames: int) -> None:
    x, w = np.zeros((3, 9, 97), np.float32), np.zeros((7, 9, 3), np.float32)
    stages = along(s, 2, 1).stages(x, w, target=target).stages  # type: ignore[attr-defined]
    assert len(stages.loop.scratch) == frames


@pytest.mark.parametrize("s", [1, 2, 3])
def test_rows_that_lie_apart_and_numbers_that_are_none(s: int) -> None:
    rng = np.random.default_rng(s)
    wide, w = rng.standard_normal((3, 131, 5, 2)).astype(np.float32), rng.standard_normal((20, 5, 4)).astype(np.float32)
    wide[1, 64, 2, 1], wide[2, 0, 0, 1], wide[0, 130, 4, 1] = np.nan, np.inf, -np.inf
    x = wide[..., 1].transpose(0, 2, 1)
    for image in (x, np.ascontiguousarray(x), x[:, ::-1, ::-1]):
        with np.errstate(invalid="ignore"):
            want = exact(image, w, (s,), (5,), (2,))
        found = along(s, 5, 2)(image, w)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("s", "p", "d"), [((2, 2), (8, 2), 2), ((2, 2), (7, 3), 2), ((2, 2), (1, 1), 1), ((3, 6), (4, 5), 3)]
)
def test_what_the_sum_walks_along_is_one_axis_of_a_frame(s: Axes, p: Axes, d: int) -> None:
    x, w = np.zeros((3, 9, 17, 15), np.float32), np.zeros((7, 9, 3, 3), np.float32)
    stages = plane(s, p, d).stages(x, w, target="aarch64-neon").stages  # type: ignore[attr-defined]
    (frame,) = stages.loop.scratch
    assert len(frame.type.shape) == 2
    assert not any(op.opcode == "if" for op in walk(without_frames(stages.loop.calls[1].kernel)[0].body))


@tw.kernel
def diagonals(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, taps = w.shape
    out = tw.empty((n, filters, height), x.dtype)
    for b, o, i in tw.grid(n, filters, height):
        total = x.dtype(0)
        for c in range(channels):
            for k in range(taps):
                y = i + k - 2
                z = k + i - 2
                if 0 <= y < height and 0 <= z < width:
                    total += x[b, c, y, z] * w[o, c, k]
        out[b, o, i] = total
    return out


@pytest.mark.parametrize("size", [(9, 9), (9, 13), (13, 9)])
def test_one_index_for_two_axes(size: Axes) -> None:
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal((3, 5, *size)).astype(np.float32), rng.standard_normal((7, 5, 5)).astype(np.float32)
    line = np.zeros((3, 5, size[0]))
    line[:, :, : min(size)] = np.diagonal(x.astype(np.float64), axis1=2, axis2=3)
    want = exact(line, w, (1,), (2,), (1,))
    np.testing.assert_allclose(diagonals(x, w), want, rtol=0, atol=1e-4)
    stages = diagonals.stages(x, w, target="x86-64-avx2").stages
    np.testing.assert_allclose(run_program(stages.tile, {"x": x, "w": w})["out"], want, rtol=0, atol=1e-4)


@tw.kernel
def every_second_pixel(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, channels = x.shape
    filters, _ = w.shape
    out = tw.empty((n, (height - 1) // 2 + 1, (width - 1) // 2 + 1, filters), x.dtype)
    for b, i, j, o in tw.grid(n, (height - 1) // 2 + 1, (width - 1) // 2 + 1, filters):
        total = x.dtype(0)
        for c in range(channels):
            y = i * 2
            z = j * 2
            if 0 <= y < height and 0 <= z < width:
                total += x[b, y, z, c] * w[o, c]
        out[b, i, j, o] = total
    return out


@pytest.mark.parametrize("size", [(1, 1), (7, 8), (12, 31)])
def test_pixels_that_are_rows_get_no_frame_where_none_is_outside(size: Axes) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((3, *size, 11)).astype(np.float32), rng.standard_normal((18, 11)).astype(np.float32)
    np.testing.assert_allclose(every_second_pixel(x, w), x[:, ::2, ::2].astype(np.float64) @ w.T, rtol=0, atol=1e-4)
    assert not every_second_pixel.stages(x, w, target="x86-64-avx512").stages.loop.scratch


# -- rows of results that are shorter than a vector or two: vectors are merged of several rows, and results are written across the ends of rows -----------------


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 7, 8, 10, 15, 16, 17, 31, 33])
@pytest.mark.parametrize(("s", "p", "d"), [((2, 2), (0, 0), 1), ((3, 3), (0, 0), 2), ((1, 2), (1, 1), 1), ((2, 3), (2, 1), 2)])
def test_short_rows_of_any_length(columns: int, s: Axes, p: Axes, d: int) -> None:
    kernel = plane(s, p, d)
    for n, c, f, rows in ((3, 2, 17, 5), (1, 3, 5, 1), (7, 1, 2, 2)):
        size = [(e - 1) * g + d * 2 + 1 - 2 * q for e, g, q in zip((rows, columns), s, p, strict=True)]
        if min(size) > 0:
            check(kernel, (n, c, *size), (f, c, 3, 3), s, p, (d, d))
            check(kernel, (n, c, size[0] + s[0] - 1, size[1] + s[1] - 1), (f, c, 3, 3), s, p, (d, d))


@pytest.mark.parametrize("columns", [4, 10, 16])
def test_planes_and_doubles(columns: int) -> None:
    for p in (0, 1):
        check(space(2, p), (2, 3, 4, 7, 2 * columns), (15, 3, 1, 3, 2), (2,) * 3, (p,) * 3, (1,) * 3)
        check(plane((2, 2), (p, p), 1), (3, 4, 9, 2 * columns), (15, 4, 3, 2), (2, 2), (p, p), (1, 1), np.float64)


@pytest.mark.parametrize(("columns", "p"), [(5, 0), (10, 0), (20, 0), (10, 1)])
def test_nothing_outside_is_read(columns: int, p: int) -> None:
    rng = np.random.default_rng(columns)
    x, w = rng.standard_normal((2, 2, 9, 2 * columns + 1)).astype(np.float32), rng.standard_normal((3, 2, 3, 3)).astype(np.float32)
    stages = plane((2, 2), (p, p), 1).stages(x, w, target="x86-64-avx512").stages  # type: ignore[attr-defined]
    want = exact(x, w, (2, 2), (p, p), (1, 1))
    for stage in (stages.loop, stages.tile, stages.thread):
        np.testing.assert_allclose(run_program(stage, {"x": x, "w": w})["out"], want, rtol=0, atol=1e-4)


def test_numbers_that_are_none_stay_where_they_are() -> None:
    rng = np.random.default_rng(3)
    wide, w = rng.standard_normal((3, 2, 11, 23, 2)).astype(np.float32), rng.standard_normal((5, 2, 3, 3)).astype(np.float32)
    wide[0, 0, 0, 0], wide[1, 1, 10, 22], wide[2, 0, 5, 9] = np.nan, np.inf, -np.inf
    x = wide[..., 1]
    for image in (x, np.ascontiguousarray(x), np.ascontiguousarray(x)[:, ::-1, :, ::-1]):
        with np.errstate(invalid="ignore"):
            want = exact(image, w, (2, 2), (0, 0), (1, 1))
        found = plane((2, 2), (0, 0), 1)(image, w)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4)


def _program(target: str, s: int, p: int) -> Any:
    x, w = np.zeros((3, 9, 41, 21), np.float32), np.zeros((7, 9, 3, 3), np.float32)
    return plane((s, s), (p, p), 1).stages(x, w, target=target).stages  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target", "s", "p", "frames"), [("x86-64-avx512", 2, 0, 0), ("x86-64-avx512", 2, 1, 1), ("x86-64-avx512", 4, 0, 1), ("aarch64-neon", 2, 0, 1)])
def test_images_are_copied_only_where_something_is_outside(target: str, s: int, p: int, frames: int) -> None:
    assert len(_program(target, s, p).loop.scratch) == frames


def test_rows_of_results_are_one_axis() -> None:
    (call,) = _program("x86-64-avx512", 2, 0).tile.calls
    (out,) = (param for param in call.kernel.params if param.name == "out")
    assert out.type.rank == 3
