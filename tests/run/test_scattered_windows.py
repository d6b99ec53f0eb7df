"""Transposed convolutions in the ways people write them: scattered, in blocks of results, by quotients and rests. All are products."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.record import record

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(11)


@tw.kernel
def channel_outside(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, 2 * height + kh - 2, 2 * width + kw - 2), x.dtype)
    for b, f in tw.grid(n, filters):
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    for p in range(kh):
                        for q in range(kw):
                            out[b, f, 2 * i + p, 2 * j + q] += x[b, c, i, j] * w[c, f, p, q]
    return out


@tw.kernel
def channel_inside(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, 2 * height + kh - 2, 2 * width + kw - 2), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        for p in range(kh):
            for q in range(kw):
                for c in range(channels):
                    out[b, f, 2 * i + p, 2 * j + q] += x[b, c, i, j] * w[c, f, p, q]
    return out


@tw.kernel
def a_sum_at_a_time(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, 2 * height + kh - 2, 2 * width + kw - 2), x.dtype)
    for p in range(kh):
        for q in range(kw):
            for b, f, i, j in tw.grid(n, filters, height, width):
                total = x.dtype(0)
                for c in range(channels):
                    total += x[b, c, i, j] * w[c, f, p, q]
                out[b, f, 2 * i + p, 2 * j + q] += total
    return out


@tw.kernel
def pixel_first(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, 2 * height + kh - 2, 2 * width + kw - 2), x.dtype)
    for b in range(n):
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    pixel = x[b, c, i, j]
                    for f in range(filters):
                        for p in range(kh):
                            for q in range(kw):
                                out[b, f, 2 * i + p, 2 * j + q] += pixel * w[c, f, p, q]
    return out


@tw.kernel
def without_steps(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, height + kh - 1, width + kw - 1), x.dtype)
    for b, f, c, i, j in tw.grid(n, filters, channels, height, width):
        for p, q in tw.grid(kh, kw):
            out[b, f, i + p, j + q] += x[b, c, i, j] * w[c, f, p, q]
    return out


@tw.kernel
def spread(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, 3 * height + 2 * kh - 4, 3 * width + 2 * kw - 4), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        for p in range(kh):
            for q in range(kw):
                for c in range(channels):
                    out[b, f, 3 * i + 2 * p, 3 * j + 2 * q] += x[b, c, i, j] * w[c, f, p, q]
    return out


@tw.kernel
def padded(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    out = tw.zeros((n, filters, 2 * height, 2 * width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        for p in range(kh):
            for q in range(kw):
                y = 2 * i + p - 1
                z = 2 * j + q - 1
                if 0 <= y < 2 * height and 0 <= z < 2 * width:
                    for c in range(channels):
                        out[b, f, y, z] += x[b, c, i, j] * w[c, f, p, q]
    return out


@tw.kernel
def channels_last(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, channels = x.shape
    kh, kw, _, filters = w.shape
    out = tw.zeros((n, 2 * height + kh - 2, 2 * width + kw - 2, filters), x.dtype)
    for b, i, j in tw.grid(n, height, width):
        for p in range(kh):
            for q in range(kw):
                for f in range(filters):
                    for c in range(channels):
                        out[b, 2 * i + p, 2 * j + q, f] += x[b, i, j, c] * w[p, q, c, f]
    return out


@tw.kernel
def along(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, width = x.shape
    _, filters, kw = w.shape
    out = tw.zeros((n, filters, 2 * width + kw - 2), x.dtype)
    for b, f, c, j, q in tw.grid(n, filters, channels, width, kw):
        out[b, f, 2 * j + q] += x[b, c, j] * w[c, f, q]
    return out


@tw.kernel
def plane(x: tw.Array, w: tw.Array) -> tw.Array:
    height, width = x.shape
    kh, kw = w.shape
    out = tw.zeros((height + kh - 1, width + kw - 1), x.dtype)
    for i, j in tw.grid(height, width):
        for p in range(kh):
            for q in range(kw):
                out[i + p, j + q] += x[i, j] * w[p, q]
    return out


@tw.kernel
def literal(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[1]
    out = tw.zeros((n, filters, 2 * height, 2 * width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        for p in range(2):
            for q in range(2):
                for c in range(channels):
                    out[b, f, 2 * i + p, 2 * j + q] += x[b, c, i, j] * w[c, f, p, q]
    return out


@tw.kernel
def blocks(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[1]
    out = tw.empty((n, filters, 2 * height, 2 * width), x.dtype)
    for b, f, i, j in tw.grid(n, filters, height, width):
        for p in range(2):
            for q in range(2):
                total = x.dtype(0)
                for c in range(channels):
                    total += x[b, c, i, j] * w[c, f, p, q]
                out[b, f, 2 * i + p, 2 * j + q] = total
    return out


@tw.kernel
def quotients(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[1]
    out = tw.empty((n, filters, 2 * height, 2 * width), x.dtype)
    for b, f, y, z in tw.grid(n, filters, 2 * height, 2 * width):
        total = x.dtype(0)
        for c in range(channels):
            total += x[b, c, y // 2, z // 2] * w[c, f, y % 2, z % 2]
        out[b, f, y, z] = total
    return out


@tw.kernel
def literal_rests(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[1]
    out = tw.empty((n, filters, 2 * height, 2 * width), x.dtype)
    for b, f, y, z in tw.grid(n, filters, 2 * height, 2 * width):
        total = x.dtype(0)
        for c in range(channels):
            for p in range(2):
                for q in range(2):
                    if (y - p) % 2 == 0 and (z - q) % 2 == 0:
                        i = (y - p) // 2
                        j = (z - q) // 2
                        if 0 <= i < height and 0 <= j < width:
                            total += x[b, c, i, j] * w[c, f, p, q]
        out[b, f, y, z] = total
    return out


@record
class Case:
    """A kernel, its step, the distance of taps, and what is cut off in front; taps of the weights, or 0 for any."""

    kernel: Any
    step: int = 2
    apart: int = 1
    cut: int = 0
    taps: int = 0
    axes: int = 2


CASES = {
    "channel outside": Case(channel_outside), "channel inside": Case(channel_inside), "a sum at a time": Case(a_sum_at_a_time), "pixel first": Case(pixel_first),
    "without steps": Case(without_steps, 1), "spread": Case(spread, 3, 2), "padded": Case(padded, cut=1, taps=3), "channels last": Case(channels_last),
    "along": Case(along, axes=1), "plane": Case(plane, 1, axes=0), "literal": Case(literal, taps=2), "blocks": Case(blocks, taps=2),
    "quotients": Case(quotients, taps=2), "literal rests": Case(literal_rests, taps=2),
}  # fmt: skip
SHAPES = [(1, 1, 1, 1, 1, 2), (2, 3, 5, 7, 5, 3), (1, 17, 9, 11, 13, 2), (1, 2, 3, 5, 31, 4), (0, 3, 4, 5, 6, 3), (2, 0, 4, 5, 6, 2)]
"""Images, channels, filters, height, width, taps."""


def wanted(case: Case, x: Array, w: Array, shape: tuple[int, ...] = ()) -> Array:
    """What the taps add, each over the whole image, in float64."""
    a, b = x.astype(np.float64), w.astype(np.float64)
    if case.axes == 0:
        a, b = a[None, None], b[None, None]
    if case.kernel is channels_last:
        a, b = np.moveaxis(a, -1, 1), np.moveaxis(b, (-2, -1), (0, 1))
    sides, taps = a.shape[2:], b.shape[2:]
    whole = np.zeros((a.shape[0], b.shape[1], *(max(case.step * (s - 1) + case.apart * (t - 1) + 1, 0) for s, t in zip(sides, taps, strict=True))))
    for tap in np.ndindex(*taps):
        at = tuple(slice(case.apart * t, case.apart * t + case.step * (s - 1) + 1, case.step) for t, s in zip(tap, sides, strict=True))
        if a.size:
            whole[(slice(None), slice(None), *at)] += np.einsum("bc...,cf->bf...", a, b[(..., *tap)])
    whole = whole[(slice(None), slice(None), *(slice(case.cut, case.cut + case.step * s if case.cut else None) for s in sides))]
    return whole[0, 0] if case.axes == 0 else np.moveaxis(whole, 1, -1) if case.kernel is channels_last else whole


def made(case: Case, shape: tuple[int, ...], dtype: type = np.float32) -> tuple[Array, Array]:
    n, channels, filters, height, width, taps = shape
    sides, window = (height, width)[2 - (case.axes or 2) :], (case.taps or taps,) * (case.axes or 2)
    images: tuple[int, ...] = (n, *sides, channels) if case.kernel is channels_last else (n, channels, *sides) if case.axes else sides
    weights: tuple[int, ...] = (*window, channels, filters) if case.kernel is channels_last else (channels, filters, *window) if case.axes else window
    return (RNG.integers(-9, 9, images).astype(dtype), RNG.integers(-9, 9, weights).astype(dtype)) if np.issubdtype(dtype, np.integer) else (
        RNG.standard_normal(images).astype(dtype), RNG.standard_normal(weights).astype(dtype)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, np.float32) for shape in SHAPES), *((shape, dtype) for shape in SHAPES[1:2] for dtype in (np.float64, np.int64))], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_right_at_all_sizes(name: str, dtype: type, shape: tuple[int, ...]) -> None:
    case = CASES[name]
    x, w = made(case, shape, dtype)
    np.testing.assert_allclose(case.kernel(x, w), wanted(case, x, w), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_floats_of_two_bytes(name: str, dtype: type) -> None:
    case = CASES[name]
    x, w = (RNG.integers(-2, 3, a.shape).astype(dtype) for a in made(case, (2, 3, 5, 7, 5, 3)))
    np.testing.assert_array_equal(np.asarray(case.kernel(x, w), np.float64), wanted(case, x, w))


@pytest.mark.parametrize("device", ["emulator", "emulator:tile"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_emulator(name: str, device: str) -> None:
    case = CASES[name]
    x, w = made(case, (1, 2, 3, 3, 4, 3))
    np.testing.assert_allclose(case.kernel(x, w, device=device), wanted(case, x, w), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_numbers_that_are_none_stay_where_they_belong(name: str) -> None:
    case = CASES[name]
    x, w = made(case, (1, 3, 4, 6, 7, 3))
    x[..., 0], x[..., -1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        expected, found = wanted(case, x, w), np.asarray(case.kernel(x, w))
    framed = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), framed)
    np.testing.assert_allclose(found[framed], expected[framed], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.taps == 0])
def test_nothing_is_scattered(name: str, target: str) -> None:
    case = CASES[name]
    calls = case.kernel.stages(*made(case, (2, 8, 8, 12, 12, 3)), target=target).stages.loop.calls
    assert all("accumulate" not in call.kernel.opcodes for call in calls)


@tw.kernel
def added(x: tw.Array, w: tw.Array, out: tw.InOut) -> None:
    n, channels, height, width = x.shape
    _, filters, kh, kw = w.shape
    for b, f, i, j in tw.grid(n, filters, height, width):
        for p in range(kh):
            for q in range(kw):
                for c in range(channels):
                    out[b, f, 2 * i + p, 2 * j + q] += x[b, c, i, j] * w[c, f, p, q]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_what_was_there_stays(device: str) -> None:
    case = CASES["channel inside"]
    x, w = made(case, (2, 3, 4, 5, 6, 3))
    out = RNG.standard_normal((2, 4, 13, 15)).astype(np.float32)
    expected = out.astype(np.float64)
    expected[:, :, :11, :13] += wanted(case, x, w)
    added(x, w, out, device=device)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-4)


@tw.kernel
def from_what_was_there(x: tw.Array, w: tw.Array, out: tw.InOut) -> None:
    rows, terms = x.shape
    columns = w.shape[1]
    for i, j in tw.grid(rows, columns):
        for p in range(2):
            for q in range(2):
                old = out[2 * i + p, 2 * j + q]
                for k in range(terms):
                    out[2 * i + p, 2 * j + q] = old + x[i, k] * w[k, j]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_the_last_of_several_stores_counts(device: str) -> None:
    x, w, before = RNG.standard_normal((5, 3)), RNG.standard_normal((3, 7)), RNG.standard_normal((10, 14))
    found = before.copy()
    from_what_was_there(x, w, found, device=device)
    np.testing.assert_allclose(found, before + np.kron(np.outer(x[:, -1], w[-1]), np.ones((2, 2))), rtol=1e-12)


@tw.kernel
def masked(x: tw.Array, w: tw.Array, mask: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    _, filters, k = w.shape
    (_,) = mask.shape
    out = tw.zeros((n, filters, 2 * length + k - 2), dtype=x.dtype)
    for b, f in tw.grid(n, filters):
        for i in range(length):
            if mask[i] > 0:
                for p in range(k):
                    for c in range(channels):
                        out[b, f, 2 * i + p] += x[b, c, i] * w[c, f, p]
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_conditions_on_data_are_read_where_loops_go(device: str) -> None:
    x, w, mask = RNG.standard_normal((2, 3, 5)), RNG.standard_normal((3, 4, 3)), RNG.integers(0, 2, 5)
    expected = np.zeros((2, 4, 11))
    for i, p in np.ndindex(5, 3):
        expected[:, :, 2 * i + p] += mask[i] * np.einsum("bc,cf->bf", x[:, :, i], w[:, :, p])
    np.testing.assert_allclose(masked(x, w, mask, device=device), expected, rtol=1e-12, atol=1e-12)


def test_an_array_that_is_too_small_is_refused() -> None:
    x, w = made(CASES["channel inside"], (2, 3, 4, 5, 6, 3))
    with pytest.raises(tw.TilewrightError, match="TW013"):
        added(x, w, np.zeros((2, 4, 10, 13), np.float32))


@tw.kernel
def polynomial(a: tw.Array, b: tw.Array) -> tw.Array:
    (n,) = a.shape
    (m,) = b.shape
    out = tw.zeros((n + m - 1,), a.dtype)
    for i in range(n):
        for j in range(m):
            out[i + j] += a[i] * b[j]
    return out


@pytest.mark.parametrize("sizes", [(1, 1), (33, 7), (5, 300)], ids=str)
def test_coefficients_of_a_product(sizes: tuple[int, int]) -> None:
    a, b = RNG.standard_normal(sizes[0]), RNG.standard_normal(sizes[1])
    np.testing.assert_allclose(polynomial(a, b), np.convolve(a, b), rtol=1e-12, atol=1e-12)


