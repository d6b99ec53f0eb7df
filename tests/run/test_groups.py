"""Products whose results are in groups, by a quotient or a rest of an index: an axis of groups, and one of results."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(23)


def convolution(x, w, per_group: int, pad: int):  # type: ignore[no-untyped-def]
    n, _, height, width = x.shape
    filters, channels, kh, kw = w.shape
    y = tw.zeros((n, filters, height + 2 * pad - kh + 1, width + 2 * pad - kw + 1), dtype=x.dtype)
    for b, o, i, j in tw.grid(n, filters, height + 2 * pad - kh + 1, width + 2 * pad - kw + 1):
        s = 0.0
        for cc in range(channels):
            for p in range(kh):
                for q in range(kw):
                    u = i + p - pad
                    v = j + q - pad
                    if u >= 0 and u < height and v >= 0 and v < width:
                        s += x[b, (o // per_group) * channels + cc, u, v] * w[o, cc, p, q]
        y[b, o, i, j] = s
    return y


def by_shapes(x, w, per_group: int, pad: int):  # type: ignore[no-untyped-def]
    n, c, height, width = x.shape
    filters, channels, kh, kw = w.shape
    size = filters // (c // channels)
    y = tw.empty((n, filters, height - kh + 1, width - kw + 1), dtype=x.dtype)
    for b, o, i, j in tw.grid(n, filters, height - kh + 1, width - kw + 1):
        s = 0.0
        first = (o // size) * channels
        for p in range(kh):
            for q in range(kw):
                for cc in range(channels):
                    s += x[b, first + cc, i + p, j + q] * w[o, cc, p, q]
        y[b, o, i, j] = max(s, 0.0)
    return y


def shuffled(x, w, groups: int, pad: int):  # type: ignore[no-untyped-def]
    n, _, height, width = x.shape
    filters, channels, kh, kw = w.shape
    y = tw.empty((n, filters, height - kh + 1, width - kw + 1), dtype=x.dtype)
    for b, o, i, j in tw.grid(n, filters, height - kh + 1, width - kw + 1):
        s = 0.0
        for cc in range(channels):
            for p in range(kh):
                for q in range(kw):
                    s += x[b, (o % groups) * channels + cc, i + p, j + q] * w[o, cc, p, q]
        y[b, o, i, j] = s
    return y


def literal(x, w, per_group: int, pad: int):  # type: ignore[no-untyped-def]
    n, _, height, width = x.shape
    filters, channels, kh, kw = w.shape
    y = tw.empty((n, filters, height - kh + 1, width - kw + 1), dtype=x.dtype)
    for b, o, i, j in tw.grid(n, filters, height - kh + 1, width - kw + 1):
        s = 0.0
        for cc in range(channels):
            for p in range(kh):
                for q in range(kw):
                    s += x[b, o // 3 * channels + cc, i + p, j + q] * w[o, cc, p, q]
        y[b, o, i, j] = s + o // 3 - o % 3
    return y


def wanted(function: Any, x: np.ndarray, w: np.ndarray, per_group: int, pad: int) -> np.ndarray:
    x, w = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pad, pad), (pad, pad))), w.astype(np.float64)
    channels = w.shape[1]
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    results = []
    for o in range(len(w)):
        group = o % per_group if function is shuffled else o // per_group
        found = np.einsum("bcijpq,cpq->bij", windows[:, group * channels : (group + 1) * channels], w[o])
        results.append(np.maximum(found, 0) if function is by_shapes else found + o // 3 - o % 3 if function is literal else found)
    return np.stack(results, axis=1)


CASES = [(1, 4, 2, 3), (2, 12, 3, 3), (3, 10, 4, 3), (2, 6, 1, 3), (1, 11, 2, 3), (2, 3, 5, 3)]
"""Images, filters, channels of a group, filters of a group."""


def made(dtype: type, images: int, filters: int, channels: int, per_group: int, function: Any) -> tuple[np.ndarray, np.ndarray]:
    groups = per_group if function is shuffled else -(-filters // per_group)
    x = RNG.integers(-3, 4, (images, groups * channels, 9, 11)).astype(dtype)
    return x, RNG.integers(-3, 4, (filters, channels, 3, 2)).astype(dtype)


@pytest.mark.parametrize("function", [convolution, by_shapes, shuffled, literal], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_right_where_groups_are_whole_and_where_not(function: Any, dtype: type, case: tuple[int, ...]) -> None:
    if function is by_shapes and case[1] % case[3]:
        pytest.skip("the number of groups is made of the shapes")
    x, w = made(dtype, *case, function)  # type: ignore[arg-type]
    pad = 1 if function is convolution else 0
    np.testing.assert_array_equal(tw.kernel(function)(x, w, case[3], pad), wanted(function, x, w, case[3], pad))


@pytest.mark.parametrize("function", [convolution, literal, shuffled], ids=lambda f: f.__name__)
def test_on_the_emulator(function: Any) -> None:
    x, w = made(np.float32, 1, 7, 2, 3, function)
    pad = 1 if function is convolution else 0
    np.testing.assert_array_equal(tw.kernel(function)(x, w, 3, pad, device="emulator"), wanted(function, x, w, 3, pad))


@pytest.mark.parametrize("function", [convolution, by_shapes, shuffled, literal], ids=lambda f: f.__name__)
def test_they_are_products(function: Any) -> None:
    x, w = made(np.float32, 1, 96, 32, 3, function)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.PerformanceWarning)
        tw.kernel(function)(x, w, 3, 0)


def test_a_group_that_is_not_there_is_refused() -> None:
    x, w = made(np.float32, 1, 6, 2, 3, convolution)
    with pytest.raises(tw.TilewrightError, match="TW013"):
        tw.kernel(convolution)(x[:, :3], w, 3, 1)
    with pytest.raises(tw.TilewrightError, match="TW013"):
        tw.kernel(by_shapes)(RNG.standard_normal((1, 8, 9, 9)), RNG.standard_normal((3, 2, 3, 3)), 1, 0)


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_a_length_that_may_be_zero(columns: int, device: str) -> None:
    @tw.kernel
    def by_length(x, w, lengths):  # type: ignore[no-untyped-def]
        (size,) = lengths.shape
        y = tw.empty((w.shape[0],), dtype=x.dtype)
        for o in tw.grid(w.shape[0]):
            s = 0.0
            for k in range(w.shape[1]):
                s += x[o // size * w.shape[1] + k] * w[o, k] + x[o % size]
            y[o] = s
        return y

    x, w = RNG.integers(-3, 4, 40).astype(np.float32), RNG.integers(-3, 4, (7, 5)).astype(np.float32)
    if not columns:
        with pytest.raises(tw.TilewrightError, match="divided by 0"):
            by_length(x, w, np.zeros(0), device=device)
        return
    expected = [x[o // columns * 5 :][:5] @ w[o] + 5 * x[o % columns] for o in range(7)]
    np.testing.assert_array_equal(by_length(x, w, np.zeros(columns), device=device), expected)


def test_layers_in_blocks() -> None:
    @tw.kernel
    def blocks(x, w):  # type: ignore[no-untyped-def]
        n, c = x.shape
        filters, per = w.shape
        size = filters // (c // per)
        y = tw.zeros((n, filters), dtype=x.dtype)
        for b, o in tw.grid(n, filters):
            for k in range(per):
                y[b, o] += x[b, o // size * per + k] * w[o, k]
        return y

    for images, groups, per, size in ((1, 1, 1, 1), (5, 3, 7, 4), (33, 4, 31, 17), (0, 2, 3, 4), (100, 8, 64, 64)):
        x, w = RNG.integers(-3, 4, (images, groups * per)).astype(np.float32), RNG.integers(-3, 4, (groups * size, per)).astype(np.float32)
        np.testing.assert_array_equal(blocks(x, w), np.einsum("bgk,gok->bgo", x.reshape(images, groups, per), w.reshape(groups, size, per)).reshape(images, groups * size))


def test_heads_that_share_keys() -> None:
    @tw.kernel
    def scores(q, k):  # type: ignore[no-untyped-def]
        heads, length, depth = q.shape
        shared, keys, _ = k.shape
        y = tw.empty((heads, length, keys), dtype=q.dtype)
        for h, i, j in tw.grid(heads, length, keys):
            s = 0.0
            for d in range(depth):
                s += q[h, i, d] * k[h // (heads // shared), j, d]
            y[h, i, j] = s
        return y

    q, k = RNG.standard_normal((6, 31, 16)), RNG.standard_normal((2, 29, 16))
    np.testing.assert_allclose(scores(q, k), np.einsum("hid,hjd->hij", q, np.repeat(k, 3, axis=0)), rtol=1e-12, atol=1e-12)


def test_an_axis_that_the_author_has_cut() -> None:
    @tw.kernel
    def by_axis(x, w):  # type: ignore[no-untyped-def]
        n, c, height, width = x.shape
        filters, channels, kh, kw = w.shape
        y = tw.zeros((n, filters, height - kh + 1, width - kw + 1), dtype=x.dtype)
        for b, g, o, i, j in tw.grid(n, c // channels, 4, height - kh + 1, width - kw + 1):
            s = 0.0
            for cc in range(channels):
                for p in range(kh):
                    for q in range(kw):
                        s += x[b, g * channels + cc, i + p, j + q] * w[4 * g + o, cc, p, q]
            y[b, 4 * g + o, i, j] = s
        return y

    x, w = made(np.float64, 2, 12, 3, 4, by_axis)
    np.testing.assert_array_equal(by_axis(x, w), wanted(by_axis, x, w, 4, 0))
    assert by_axis.last is not None
    assert len(by_axis.last.launches) < 4


@pytest.mark.parametrize("function", [convolution, by_shapes, literal], ids=lambda f: f.__name__)
def test_groups_are_cut(function: Any) -> None:
    kernel = tw.kernel(function)
    kernel(*made(np.float32, 1, 12, 2, 3, function), 3, 0)
    assert kernel.last is not None
    assert any("_rest" in launch.entry for launch in kernel.last.launches)
    assert len(kernel.last.launches) < 5
