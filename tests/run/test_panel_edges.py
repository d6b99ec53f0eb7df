"""Products and convolutions on a CPU at sizes around the edges of their panels. Few filters and many, rows of images with and without gaps, terms that lie one
behind the other. Against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Op, Value, walk
from tilewright.ir.types import Tensor

TARGETS = ["aarch64-neon", "x86-64-avx2", "x86-64-avx512"]


@tw.kernel
def pointwise(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _ = w.shape
    out = tw.empty((n, filters, height, width), x.dtype)
    for b, o, i, j in tw.grid(n, filters, height, width):
        total = x.dtype(0)
        for c in range(channels):
            total += x[b, c, i, j] * w[o, c]
        out[b, o, i, j] = total
    return out


@tw.kernel
def channels_last(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, channels = x.shape
    filters, kh, kw, _ = w.shape
    out = tw.empty((n, height, width - kw + 1, filters), x.dtype)
    for b, i, j, o in tw.grid(n, height, width - kw + 1, filters):
        total = x.dtype(0)
        for k in range(kh):
            for m in range(kw):
                for c in range(channels):
                    y = i + k - 1
                    if 0 <= y < height:
                        total += x[b, y, j + m, c] * w[o, k, m, c]
        out[b, i, j, o] = total
    return out


@tw.kernel
def with_bias(x: tw.Array, w: tw.Array, bias: tw.Array, more: tw.Array) -> tw.Array:
    n, height, width, channels = x.shape
    filters = w.shape[0]
    out = tw.empty((n, height, width, filters), x.dtype)
    for b, i, j, o in tw.grid(n, height, width, filters):
        total = x.dtype(0)
        for c in range(channels):
            total += x[b, i, j, c] * w[o, c]
        out[b, i, j, o] = max(total + bias[o], 0.0) + more[b, i, j, o]
    return out


@tw.kernel
def by_place(x: tw.Array, w: tw.Array, scale: tw.Array) -> tw.Array:
    n, height, width, channels = x.shape
    filters, _, taps = w.shape
    out = tw.empty((n, height, width - taps + 1, filters), x.dtype)
    for b, i, j, o in tw.grid(n, height, width - taps + 1, filters):
        total = x.dtype(0)
        for c in range(channels):
            for k in range(taps):
                total += x[b, i, j + k, c] * w[o, c, k]
        out[b, i, j, o] = total * scale[i] + j
    return out


@tw.kernel
def turned(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, channels = x.shape
    filters, _, taps = w.shape
    out = tw.empty((height, n, width - taps + 1, filters), x.dtype)
    for b, i, j, o in tw.grid(n, height, width - taps + 1, filters):
        total = x.dtype(0)
        for c in range(channels):
            for k in range(taps):
                total += x[b, i, j + k, c] * w[o, c, k]
        out[i, b, j, o] = total
    return out


@tw.kernel
def every_second_row(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, kh, kw = w.shape
    out = tw.empty((n, filters, (height + 1) // 2, width), x.dtype)
    for b, o, i, j in tw.grid(n, filters, (height + 1) // 2, width):
        total = x.dtype(0)
        for c in range(channels):
            for k in range(kh):
                for m in range(kw):
                    y = 2 * i + k - 1
                    z = j + m - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[o, c, k, m]
        out[b, o, i, j] = total
    return out


@tw.kernel
def three_by_three(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters = w.shape[0]
    out = tw.empty((n, filters, (height + 1) // 2, width), x.dtype)
    for b, o, i, j in tw.grid(n, filters, (height + 1) // 2, width):
        total = x.dtype(0)
        for c in range(channels):
            for k in range(3):
                for m in range(3):
                    y = 2 * i + k - 1
                    z = j + m - 1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[o, c, k, m]
        out[b, o, i, j] = total
    return out


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    out = tw.empty((a.shape[0], b.shape[1]), a.dtype)
    for i, j in tw.grid(a.shape[0], b.shape[1]):
        total = a.dtype(0)
        for k in range(a.shape[1]):
            total += a[i, k] * b[k, j]
        out[i, j] = total
    return out


def drawn(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(sum(shape) + len(shape))
    if np.dtype(dtype).kind == "i":
        return rng.integers(-50, 50, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def close(found: Any, want: np.ndarray, dtype: Any = np.float32) -> None:
    limit = (
        0.0
        if np.dtype(dtype).kind == "i"
        else 8 * (1e-5 if dtype is np.float32 else 1e-14) * max(1.0, np.abs(want).max(initial=0.0))
    )
    np.testing.assert_allclose(found, want, rtol=0, atol=limit)


def last_reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    wide = np.pad(x.astype(np.float64), ((0, 0), (1, w.shape[1]), (0, 0), (0, 0)))
    columns = x.shape[2] - w.shape[2] + 1
    out = np.zeros((x.shape[0], x.shape[1], columns, w.shape[0]))
    for k in range(w.shape[1]):
        for m in range(w.shape[2]):
            out += wide[:, k : k + x.shape[1], m : m + columns] @ w[:, k, m].astype(np.float64).T
    return out


def second_reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, w.shape[2] + 1), (1, w.shape[3])))
    rows, columns = (x.shape[2] + 1) // 2, x.shape[3]
    out = np.zeros((x.shape[0], w.shape[0], rows, columns))
    for k in range(w.shape[2]):
        for m in range(w.shape[3]):
            out += np.einsum(
                "bcij,oc->boij", wide[:, :, k : k + 2 * rows : 2, m : m + columns], w[:, :, k, m].astype(np.float64)
            )
    return out


@pytest.mark.parametrize("filters", [1, 8, 16, 17, 25, 61])
def test_one_pixel_at_a_time(filters: int) -> None:
    """One panel of filters reads columns where they lie; more of them read copies."""
    for n, c, h, w in ((3, 7, 5, 7), (1, 700, 3, 5), (2, 33, 1, 12), (5, 20, 4, 9)):
        x, taps = drawn((n, c, h, w)), drawn((filters, c))
        close(pointwise(x, taps), np.einsum("bchw,fc->bfhw", x.astype(np.float64), taps))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_every_width_of_the_last_panel(dtype: Any) -> None:
    for columns in (2, *range(3, 14), 16, 20, 21, 25, 64):
        for rows, terms in ((3, 40), (8, 700), (21, 33)):
            a, b = drawn((rows, terms), dtype), drawn((terms, columns), dtype)
            exact = np.int64 if np.dtype(dtype).kind == "i" else np.float64
            close(product(a, b), a.astype(exact) @ b.astype(exact), dtype)


@pytest.mark.parametrize("filters", [1, 4, 5, 9, 16, 17])
def test_channels_that_lie_last(filters: int) -> None:
    """The channels of neighbouring pixels follow one another: they are copied as one run."""
    for n, h, w, c, kh, kw in (
        (2, 5, 9, 7, 3, 3),
        (1, 4, 6, 94, 4, 5),
        (3, 6, 5, 1, 3, 2),
        (1, 9, 13, 3, 1, 3),
        (2, 3, 8, 66, 2, 8),
    ):
        x, taps = drawn((n, h, w, c)), drawn((filters, kh, kw, c))
        close(channels_last(x, taps), last_reference(x, taps))


@pytest.mark.parametrize("filters", [3, 12, 17, 40])
def test_what_follows_the_sum_of_pixels(filters: int) -> None:
    """Whole tiles of pixels are written from registers, by the numbers of their rows; unless the rest of the kernel asks for more than those."""
    for n, h, w, c in ((2, 5, 9, 7), (1, 4, 6, 40), (3, 1, 5, 2)):
        x, taps, bias, more = drawn((n, h, w, c)), drawn((filters, c)), drawn((filters,)), drawn((n, h, w, filters))
        close(with_bias(x, taps, bias, more), np.maximum(x.astype(np.float64) @ taps.T + bias, 0) + more)
        window, scale = drawn((filters, c, 3)), drawn((h,))
        total = sum(x[:, :, k : w - 2 + k].astype(np.float64) @ window[:, :, k].T for k in range(3))
        close(by_place(x, window, scale), total * scale[:, None, None] + np.arange(w - 2)[:, None])
        close(turned(x, window), np.swapaxes(total, 0, 1))


@pytest.mark.parametrize("filters", [3, 17, 50])
def test_rows_with_wide_gaps_and_without(filters: int) -> None:
    for n, c, h, w, kh, kw in ((2, 3, 9, 8, 3, 3), (1, 31, 7, 15, 3, 5), (3, 60, 4, 3, 3, 3), (1, 1, 1, 26, 3, 3)):
        x, taps = drawn((n, c, h, w)), drawn((filters, c, kh, kw))
        close(every_second_row(x, taps), second_reference(x, taps))
        if (kh, kw) == (3, 3):
            close(three_by_three(x, taps), second_reference(x, taps))


def test_sums_of_nothing_are_zero() -> None:
    assert not three_by_three(np.ones((2, 0, 9, 9), np.float32), np.ones((5, 0, 3, 3), np.float32)).any()
    assert not pointwise(np.ones((2, 0, 3, 3), np.float32), np.ones((20, 0), np.float32)).any()
    assert three_by_three(np.ones((2, 3, 9, 0), np.float32), np.ones((5, 3, 3, 3), np.float32)).shape == (2, 5, 5, 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("filters", [5, 29])
def test_every_stage_stays_inside_its_arrays(target: str, filters: int) -> None:
    x, last = drawn((1, 2, 5, 7)), drawn((1, 4, 6, 2))
    cases: tuple[tuple[Any, np.ndarray, np.ndarray, np.ndarray], ...] = (
        (pointwise, x, drawn((filters, 2)), np.einsum("bchw,fc->bfhw", x, drawn((filters, 2)))),
        (three_by_three, x, drawn((filters, 2, 3, 3)), second_reference(x, drawn((filters, 2, 3, 3)))),
        (channels_last, last, drawn((filters, 3, 3, 2)), last_reference(last, drawn((filters, 3, 3, 2)))),
    )
    for kernel, image, taps, want in cases:
        stages = kernel.stages(image, taps, target=target).stages
        for stage in (stages.loop, stages.tile, stages.thread):
            np.testing.assert_allclose(run_program(stage, {"x": image, "w": taps})["out"], want, rtol=0, atol=1e-4)


def loads_of(kernel: Any, name: str) -> list[Op]:
    return [op for op in walk(kernel.body) if op.opcode == "load" and op.operands[0].name == name]


def rank(value: Value) -> int:
    assert isinstance(value.type, Tensor)
    return value.type.rank


def test_terms_of_a_filter_are_one_axis() -> None:
    x, w = np.zeros((3, 9, 17, 15), np.float32), np.zeros((30, 9, 3, 3), np.float32)
    stages: Any = every_second_row.stages(x, w, target="aarch64-neon").stages
    (load, *_) = loads_of(stages.tile.calls[1].kernel, "w")
    assert rank(load.operands[0]) == 2
    vectors = [op for op in loads_of(stages.tile.calls[1].kernel, "w") if str(op.results[0].type).startswith("tile")]
    assert vectors, "filters are copied element by element"
