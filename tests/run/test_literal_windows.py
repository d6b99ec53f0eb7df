"""Windows whose size is written as a number, or taken from one axis of the weights for two: they are convolutions like others."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import TilewrightError

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(7)


@tw.kernel
def whole(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                for q in range(3):
                    y = i + p - 1
                    z = j + q - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def nested(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                y = i + p - 1
                if y >= 0 and y < height:
                    for q in range(3):
                        z = j + q - 1
                        if z >= 0 and z < width:
                            total += w[f, c, p, q] * x[b, c, y, z]
        out[b, f, i, j] = total
    return out


@tw.kernel
def square(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, size, _ = w.shape
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(size):
                for q in range(size):
                    y = i + p - 1
                    z = j + q - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def channels_last(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, channels = x.shape
    filters = w.shape[3]
    out = tw.empty((n, height, width, filters), x.dtype)
    for b, i, j, f in tw.grid(n, height, width, filters):
        total = tw.f32(0)
        for p in range(3):
            for q in range(3):
                for c in range(channels):
                    y = i + p - 1
                    z = j + q - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, y, z, c] * w[p, q, c, f]
        out[b, i, j, f] = total
    return out


@tw.kernel
def strided(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    rows, columns = (height + 1) // 2, (width + 1) // 2
    out = tw.empty((n, filters, rows, columns), x.dtype)
    for b, f, i, j in tw.grid(n, filters, rows, columns):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                for q in range(3):
                    y = 2 * i + p - 1
                    z = 2 * j + q - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def dilated(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                for q in range(3):
                    y = i + 2 * p - 2
                    z = j + 2 * q - 2
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def depthwise(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    out = tw.empty((n, channels, height, width), x.dtype)
    for b, c, i, j in tw.grid(n, channels, height, width):
        total = tw.f32(0)
        for p in range(3):
            for q in range(3):
                y = i + p - 1
                z = j + q - 1
                if 0 <= y < height and 0 <= z < width:
                    total += x[b, c, y, z] * w[c, p, q]
        out[b, c, i, j] = total
    return out


@tw.kernel
def along(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, length), x.dtype)
    for b, f, i in tw.grid(n, filters, length):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(5):
                y = i + p - 2
                if 0 <= y < length:
                    total += x[b, c, y] * w[f, c, p]
        out[b, f, i] = total
    return out


@tw.kernel
def volume(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, depth, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, depth, height, width), x.dtype)
    for b, f, h, i, j in tw.grid(n, filters, depth, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for o in range(3):
                for p in range(3):
                    for q in range(3):
                        a = h + o - 1
                        y = i + p - 1
                        z = j + q - 1
                        if 0 <= a < depth and 0 <= y < height and 0 <= z < width:
                            total += x[b, c, a, y, z] * w[f, c, o, p, q]
        out[b, f, h, i, j] = total
    return out


@tw.kernel
def image(x: tw.Array, w: tw.Array) -> tw.Array:
    height, width = x.shape
    out = tw.empty((height, width), x.dtype)
    for i, j in tw.grid(height, width):
        total = x.dtype(0)
        for p in range(3):
            for q in range(3):
                y = i + p - 1
                z = j + q - 1
                if 0 <= y < height and 0 <= z < width:
                    total += x[y, z] * w[p, q]
        out[i, j] = total
    return out


@tw.kernel
def padded(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                for q in range(3):
                    y = i + p - 1
                    z = j + q - 1
                    value = x[b, c, y, z] if y >= 0 and y < height and z >= 0 and z < width else tw.f32(0)
                    total += value * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def skipped(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                y = i + p - 1
                if y < 0 or y >= height:
                    continue
                for q in range(3):
                    z = j + q - 1
                    if z < 0 or z >= width:
                        continue
                    total += x[b, c, y, z] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def cut(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(max(0, 1 - i), min(3, height + 1 - i)):
                for q in range(max(0, 1 - j), min(3, width + 1 - j)):
                    total += x[b, c, i + p - 1, j + q - 1] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def clamped(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                for q in range(3):
                    y = min(max(i + p - 1, 0), height - 1)
                    z = min(max(j + q - 1, 0), width - 1)
                    total += x[b, c, y, z] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


@tw.kernel
def wrapped(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        total = tw.f32(0)
        for c in range(channels):
            for p in range(3):
                for q in range(3):
                    total += x[b, c, (i + p + height - 1) % height, (j + q - 1) % width] * w[f, c, p, q]
        out[b, f, i, j] = total
    return out


CASES: dict[str, tuple[Any, int, str, int, int]] = {
    "whole": (whole, 2, "fc", 1, 1),
    "nested": (nested, 2, "fc", 1, 1),
    "square": (square, 2, "fc", 1, 1),
    "channels_last": (channels_last, 2, "cf", 1, 1),
    "strided": (strided, 2, "fc", 2, 1),
    "dilated": (dilated, 2, "fc", 1, 2),
    "depthwise": (depthwise, 2, "c", 1, 1),
    "along": (along, 1, "fc", 1, 1),
    "volume": (volume, 3, "fc", 1, 1),
    "image": (image, 2, "", 1, 1),
    "padded": (padded, 2, "fc", 1, 1),
    "skipped": (skipped, 2, "fc", 1, 1),
    "cut": (cut, 2, "fc", 1, 1),
    "clamped": (clamped, 2, "fc", 1, 1),
    "wrapped": (wrapped, 2, "fc", 1, 1),
}
"""The kernel, the axes of its window, the other axes of its weights, its stride and dilation."""
SHAPES = [(1, 1, 1, 1), (2, 3, 7, 5), (1, 5, 17, 33), (1, 33, 13, 31), (0, 3, 7, 5)]
"""Images, channels, height, width."""


def made(name: str, shape: tuple[int, int, int, int], filters: int, larger: int = 0) -> tuple[Array, Array]:
    """An image and weights, whose window is larger than the kernel's by some."""
    _, axes, kind, _, _ = CASES[name]
    n, channels, height, width = shape
    taps = 5 if axes == 1 else 3
    size = (taps + larger,) * axes
    sides = (4, height, width)[3 - axes :]
    images = sides if not kind else (n, *sides, channels) if kind == "cf" else (n, channels, *sides)
    weights = {"": size, "c": (channels, *size), "fc": (filters, channels, *size), "cf": (*size, channels, filters)}[kind]
    return RNG.standard_normal(images).astype(np.float32), RNG.standard_normal(weights).astype(np.float32)


def wanted(name: str, x: Array, w: Array) -> Array:
    """The sum over taps, each of them over the whole image, in float64."""
    _, axes, kind, step, apart = CASES[name]
    taps = 5 if axes == 1 else 3
    a, b = x.astype(np.float64), w.astype(np.float64)
    if kind == "":
        a, b = a[None, None], b[None, None]
    elif kind == "cf":
        a, b = np.moveaxis(a, -1, 1), np.moveaxis(b, (-1, -2), (0, 1))
    sides = a.shape[2:]
    border: Any = {"clamped": "edge", "wrapped": "wrap"}.get(name, "constant") if a.size else "constant"
    framed = np.pad(a, ((0, 0), (0, 0), *((apart * (taps // 2),) * 2 for _ in sides)), mode=border)
    total: Any = 0
    for tap in np.ndindex(*(taps,) * axes):
        seen = framed[(slice(None), slice(None), *(slice(apart * t, apart * t + side, step) for t, side in zip(tap, sides, strict=True)))]
        own = b[(..., *tap)]
        total = total + (np.einsum("bc...,fc->bf...", seen, own) if kind != "c" else seen * own[None, :, *(None,) * axes])
    return total[0, 0] if kind == "" else np.moveaxis(total, 1, -1) if kind == "cf" else total


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "larger"), [(name, larger) for name in CASES for larger in (0, 2) if name != "square" or not larger])
def test_right_whatever_the_weights_have_beyond(name: str, shape: tuple[int, int, int, int], larger: int) -> None:
    x, w = made(name, shape, 6, larger)
    found = CASES[name][0](x, w)
    assert found.shape == wanted(name, x, w).shape
    np.testing.assert_allclose(found, wanted(name, x, w), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_an_image_that_is_no_number_at_its_border(name: str) -> None:
    x, w = made(name, (1, 3, 9, 11), 4)
    x[..., 0] = np.nan
    x[..., -1] = np.inf
    with np.errstate(invalid="ignore"):
        expected = wanted(name, x, w)
        found = np.asarray(CASES[name][0](x, w))
    framed = np.isfinite(expected)
    assert framed.any() == np.isfinite(found).any()
    np.testing.assert_allclose(found[framed], expected[framed], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_weights_that_are_too_small_are_refused(name: str) -> None:
    x, w = made(name, (1, 3, 9, 11), 4, larger=-1)
    if name == "square":
        w = w[..., :1]
    with pytest.raises(TilewrightError, match="TW013"):
        CASES[name][0](x, w)


@pytest.mark.parametrize("name", CASES)
def test_they_are_convolutions(name: str) -> None:
    x, w = made(name, (1, 32, 28, 28), 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.PerformanceWarning)
        CASES[name][0](x, w)


@pytest.mark.parametrize("name", ["whole", "square", "padded", "skipped", "cut", "clamped", "wrapped"])
def test_on_the_emulator(name: str) -> None:
    x, w = made(name, (1, 5, 7, 9), 6, larger=0 if name == "square" else 2)
    np.testing.assert_allclose(CASES[name][0](x, w, device="emulator"), wanted(name, x, w), rtol=2e-5, atol=2e-4)


@tw.kernel
def masked_rows(a: tw.Array, b: tw.Array) -> tw.Array:
    m, depth = a.shape
    _, n = b.shape
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        total = a.dtype(0)
        for k in range(depth):
            value = a[i, k] if k > 2 and k + i < depth else a.dtype(0)
            total += value * b[k, j]
        out[i, j] = total
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 31, 7), (70, 65, 67), (0, 3, 4), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_factor_under_a_condition_of_its_own(sizes: tuple[int, int, int], dtype: type, device: str) -> None:
    m, depth, n = sizes
    a, b = RNG.standard_normal((m, depth)).astype(dtype), RNG.standard_normal((depth, n)).astype(dtype)
    i, k = np.ogrid[:m, :depth]
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.PerformanceWarning)
        found = masked_rows(a, b, device=device)
    np.testing.assert_allclose(found, np.where((k > 2) & (k + i < depth), a, 0).astype(np.float64) @ b, rtol=2e-5, atol=2e-4)


def test_weights_too_small_for_an_image_without_elements() -> None:
    x, w = made("whole", (0, 3, 9, 11), 4, larger=-1)
    with pytest.raises(TilewrightError, match="TW013"):
        whole(x, w)


def test_weights_that_are_a_view() -> None:
    x, w = made("whole", (2, 5, 20, 22), 9, larger=1)
    view = w[:, :, ::-1, 1:][:, :, :, ::-1]
    np.testing.assert_allclose(whole(x, view), wanted("whole", x, np.ascontiguousarray(view)), rtol=2e-5, atol=2e-4)


def test_a_condition_about_a_loop_keeps_it_inside() -> None:
    x = RNG.standard_normal(40).astype(np.float32)
    np.testing.assert_allclose(some_taps(x, x[:2].copy()), [np.dot(x[i : i + 2], x[:2]) for i in range(33)], rtol=2e-5, atol=2e-5)


@tw.kernel
def some_taps(x: tw.Array, w: tw.Array) -> tw.Array:
    (n,) = x.shape
    (m,) = w.shape
    out = tw.empty((n - 7,), x.dtype)
    for i in range(n - 7):
        total = tw.f32(0)
        for p in range(8):
            if p < m and i + p < n:
                total += x[i + p] * w[p]
        out[i] = total
    return out


@tw.kernel
def box(x: tw.Array, w: tw.Array) -> tw.Array:
    height, width = x.shape
    out = tw.empty((height, width), x.dtype)
    for i, j in tw.grid(height, width):
        total = tw.f32(0)
        for y in range(max(0, i - 1), min(height, i + 2)):
            for z in range(max(0, j - 1), min(width, j + 2)):
                total += x[y, z] * w[y - i + 1, z - j + 1]
        out[i, j] = total
    return out


@tw.kernel
def mean(x: tw.Array) -> tw.Array:
    height, width = x.shape
    out = tw.empty((height, width), x.dtype)
    for i, j in tw.grid(height, width):
        total = tw.f32(0)
        count = 0
        for y in range(max(i - 1, 0), min(i + 2, height)):
            for z in range(max(j - 1, 0), min(j + 2, width)):
                total += x[y, z]
                count += 1
        out[i, j] = total / count
    return out


@tw.kernel
def largest(x: tw.Array, radius: int) -> tw.Array:
    height, width = x.shape
    out = tw.empty((height, width), x.dtype)
    for i, j in tw.grid(height, width):
        most = -tw.inf
        for y in range(max(0, i - radius), min(height, i + radius + 1)):
            for z in range(max(0, j - 1), min(width, j + 2)):
                most = tw.max(most, x[y, z])
        out[i, j] = most
    return out


@tw.kernel
def dilated_mask(x: tw.Array) -> tw.Array:
    height, width = x.shape
    out = tw.empty((height, width), x.dtype)
    for i, j in tw.grid(height, width):
        most = x[i, j]
        for p in range(-2, 3):
            for q in range(-2, 3):
                most = max(most, x[min(max(i + p, 0), height - 1), abs(j + q) % width])
        out[i, j] = most
    return out


@tw.kernel
def one_plane(x: tw.Array, w: tw.Array) -> tw.Array:
    _, n = x.shape
    out = tw.empty((n,), x.dtype)
    for i in range(n):
        total = tw.f32(0)
        for p in range(5):
            total += x[1, (i + p) % n] * w[p] + x[0, min(i + 2 * p, n - 1)]
        out[i] = total
    return out


@tw.kernel
def last_three(x: tw.Array) -> tw.Array:
    rows, n = x.shape
    out = tw.empty((rows, n), x.dtype)
    for r, i in tw.grid(rows, n):
        total = tw.f32(0)
        for k in range(max(0, i - 2), i + 1):
            total += x[r, k]
        out[r, i] = total
    return out


@tw.kernel
def lower(a: tw.Array, b: tw.Array, diagonals: int) -> tw.Array:
    n, _ = a.shape
    out = tw.empty((n, n), a.dtype)
    for i, j in tw.grid(n, n):
        total = tw.f32(0)
        for k in range(max(0, j - diagonals), min(n, i + 1)):
            total += a[i, k] * b[k, j]
        out[i, j] = total
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2), (7, 5), (33, 31)], ids=str)
def test_windows_that_are_cut_at_borders(shape: tuple[int, int], device: str) -> None:
    x, w = (RNG.standard_normal(s).astype(np.float32) for s in (shape, (3, 3)))

    def near(i: int, j: int, r: int = 1) -> tuple[slice, slice]:
        return slice(max(0, i - r), i + r + 1), slice(max(0, j - 1), j + 2)

    def each(value: Any) -> Array:
        return np.array([[value(i, j) for j in range(shape[1])] for i in range(shape[0])])

    def weighted(i: int, j: int) -> float:
        return sum(
            float(x[y, z]) * w[y - i + 1, z - j + 1] for y in range(max(0, i - 1), min(shape[0], i + 2)) for z in range(max(0, j - 1), min(shape[1], j + 2))
        )

    np.testing.assert_allclose(box(x, w, device=device), each(weighted), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mean(x, device=device), each(lambda i, j: x[near(i, j)].astype(np.float64).mean()), rtol=1e-5, atol=1e-5)
    for radius in (0, 1, 3):
        np.testing.assert_array_equal(largest(x, radius, device=device), each(lambda i, j, r=radius: x[near(i, j, r)].max()))
    np.testing.assert_allclose(last_three(x, device=device), each(lambda i, j: x[i, max(0, j - 2) : j + 1].sum()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 9), (2, 2), (7, 5), (33, 31), (0, 5), (5, 0)], ids=str)
def test_borders_that_repeat(shape: tuple[int, int], device: str) -> None:
    x = RNG.standard_normal(shape).astype(np.float32)
    height, width = shape
    most = [[max(x[min(max(i + p, 0), height - 1), abs(j + q) % width] for p in range(-2, 3) for q in range(-2, 3)) for j in range(width)] for i in range(height)]
    np.testing.assert_array_equal(dilated_mask(x, device=device), np.array(most).reshape(shape))
    if height > 1:
        w = RNG.standard_normal(5).astype(np.float32)
        ends = [sum(float(x[1, (i + p) % width]) * w[p] + x[0, min(i + 2 * p, width - 1)] for p in range(5)) for i in range(width)]
        np.testing.assert_allclose(one_plane(x, w, device=device), ends, rtol=1e-5, atol=1e-5)


def test_loops_near_a_diagonal() -> None:
    a, b = (RNG.standard_normal((40, 40)).astype(np.float32) for _ in range(2))
    for diagonals in (0, 3, 50):
        expected = [[sum(float(a[i, k]) * b[k, j] for k in range(max(0, j - diagonals), min(40, i + 1))) for j in range(40)] for i in range(40)]
        np.testing.assert_allclose(lower(a, b, diagonals), expected, rtol=1e-5, atol=1e-5)


def first_columns(p, q):  # type: ignore[no-untyped-def]
    m, d = p.shape
    (n,) = q.shape
    out = tw.zeros((n,), dtype=q.dtype)
    for i in tw.grid(n):
        for j in range(m):
            if i < d:
                out[i] += p[j, 0] * q[i]
    return out


@pytest.mark.parametrize("columns", [0, 1, 3])
def test_a_condition_about_an_extent_keeps_a_number_inside(columns: int) -> None:
    p, q = RNG.standard_normal((4, columns)), RNG.standard_normal(5)
    wanted = np.zeros(5)
    wanted[:columns] = p[:, :1].sum() * q[:columns]
    np.testing.assert_allclose(tw.kernel(first_columns)(p, q), wanted, rtol=1e-12, atol=1e-12)


@tw.kernel
def shifted(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, width = x.shape
    filters, inside, taps = w.shape
    groups = channels // inside
    out = tw.empty((n, filters, width), x.dtype)
    for b, g, o, i in tw.grid(n, groups, filters // groups, width):
        total = tw.f32(0)
        for p in range(taps):
            y = max(min(i + 2 * p - 2, width - 1), 0)
            for c in range(inside):
                total += (x[b, g * inside + c, y] + 1) * w[g * (filters // groups) + o, c, p]
        out[b, g * (filters // groups) + o, i] = max(total, 0)
    return out


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2, 11), (2, 6, 40)])
def test_pixels_that_are_computed(shape: tuple[int, int, int], dtype: type) -> None:
    x, w = RNG.integers(-2, 3, shape).astype(dtype), RNG.integers(-2, 3, (4, shape[1] // 2, 3)).astype(dtype)
    a = np.pad(x.astype(np.float64) + 1, ((0, 0), (0, 0), (2, 2)), "edge").reshape(shape[0], 2, shape[1] // 2, -1)
    windows = np.stack([a[..., 2 * p : 2 * p + shape[2]] for p in range(3)])
    wanted = np.einsum("pbgci,gocp->bgoi", windows, w.astype(np.float64).reshape(2, 2, shape[1] // 2, 3)).reshape(shape[0], 4, shape[2])
    np.testing.assert_array_equal(np.asarray(shifted(x, w), np.float64), np.maximum(wanted, 0))
