"""Windows over rows that are narrower than a vector, as CPUs compute them: on this machine, and in the emulator as other CPUs do, against float64.

Several rows are done together, the last group of them and the last vector of a row repeat what others did, and rows shorter than a vector are one vector under a
mask where the CPU has masks.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk


def depthwise(step: int, pad: tuple[int, int]) -> tw.Kernel[..., Any]:
    p0, p1 = pad

    @tw.kernel
    def each_channel(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        _, kh, kw = w.shape
        rows = (height + 2 * p0 - kh) // step + 1
        columns = (width + 2 * p1 - kw) // step + 1
        out = tw.empty((n, channels, rows, columns), x.dtype)
        for b, c, i, j in tw.grid(n, channels, rows, columns):
            total = tw.f32(0)
            for k in range(kh):
                for m in range(kw):
                    y = i * step + k - p0
                    z = j * step + m - p1
                    if 0 <= y < height and 0 <= z < width:
                        total += x[b, c, y, z] * w[c, k, m]
            out[b, c, i, j] = total
        return out

    return each_channel


@tw.kernel
def unguarded(x: tw.Array, w: tw.Array) -> tw.Array:
    channels, height, width = x.shape
    _, kh, kw = w.shape
    rows, columns = height - kh + 1, width - kw + 1
    out = tw.empty((channels, rows, columns), x.dtype)
    for c, i, j in tw.grid(channels, rows, columns):
        total = tw.f32(0)
        for k in range(kh):
            for m in range(kw):
                total += x[c, i + k, j + m] * w[c, k, m]
        out[c, i, j] = total
    return out


def wanted(x: np.ndarray, w: np.ndarray, step: int = 1, pad: tuple[int, int] = (0, 0)) -> np.ndarray:
    framed = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pad[0],) * 2, (pad[1],) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(framed, w.shape[1:], (2, 3))[:, :, ::step, ::step]
    return np.asarray(np.einsum("bcijkm,ckm->bcij", windows, w.astype(np.float64)))


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 47])
@pytest.mark.parametrize("taps", [(1, 3), (3, 1), (3, 3), (11, 3), (3, 11), (5, 7)], ids=lambda taps: "x".join(map(str, taps)))
def test_rows_of_any_width(width: int, taps: tuple[int, int]) -> None:
    kernel = depthwise(1, (0, 0))
    for height in (1, 3, 4, 6, 21):
        x, w = numbers((2, 3, height + taps[0] - 1, width + taps[1] - 1)), numbers((3, *taps))
        np.testing.assert_allclose(kernel(x, w), wanted(x, w), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(unguarded(x[0], w), wanted(x, w)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("pad", [(0, 1), (1, 0), (2, 2)], ids=str)
def test_frames_and_strides(step: int, pad: tuple[int, int]) -> None:
    kernel = depthwise(step, pad)
    for height, width in ((5, 5), (6, 14), (7, 29), (19, 40)):
        x, w = numbers((2, 3, height, width)), numbers((3, 5, 5))
        np.testing.assert_allclose(kernel(x, w), wanted(x, w, step, pad), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16], ids=["f64", "f16", "bf16"])
@pytest.mark.parametrize("pad", [(0, 0), (1, 1)], ids=str)
def test_other_floats(dtype: Any, pad: tuple[int, int]) -> None:
    kernel = depthwise(1, pad)
    for width in (3, 7, 11, 18, 35):
        x, w = numbers((2, 3, 9, width), dtype), numbers((3, 3, 3), dtype)
        tolerance = 1e-5 if dtype is np.float64 else 3e-2
        np.testing.assert_allclose(np.asarray(kernel(x, w)).astype(np.float64), wanted(x, w, 1, pad), rtol=tolerance, atol=tolerance)


def test_neighbours_are_left_alone() -> None:
    """What lies beside a narrow row is neither read nor written."""
    kernel = depthwise(1, (0, 0))
    x = numbers((2, 3, 9, 13))
    wide = np.full((2, 3, 9, 40), np.nan, np.float32)
    wide[..., 5:18] = x
    w = numbers((3, 3, 3))
    np.testing.assert_allclose(kernel(wide[..., 5:18], w), wanted(x, w), rtol=1e-4, atol=1e-4)


def test_numbers_that_are_not_finite() -> None:
    x, w = numbers((1, 2, 8, 9)), numbers((2, 3, 3))
    x[0, 0, 3, 4], x[0, 1, 0, 0] = np.nan, np.inf
    found = np.asarray(depthwise(1, (1, 1))(x, w))
    framed = wanted(np.isfinite(x).astype(np.float32), np.ones_like(w), 1, (1, 1)) == wanted(np.ones_like(x), np.ones_like(w), 1, (1, 1))
    np.testing.assert_array_equal(np.isfinite(found), framed)


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2", "aarch64-neon"])
@pytest.mark.parametrize("pad", [(0, 0), (1, 1)], ids=str)
def test_other_cpus(target: str, pad: tuple[int, int]) -> None:
    kernel = depthwise(1, pad)
    for width in (4, 11, 21):
        x, w = numbers((1, 2, 7, width)), numbers((2, 3, 3))
        stages = kernel.stages(x, w, target=target).stages
        for program in (stages.tile, stages.thread):
            (found,) = run_program(program, {"x": x, "w": w}).values()
            np.testing.assert_allclose(found, wanted(x, w, 1, pad), rtol=1e-4, atol=1e-4)


def test_the_code_has_masks_and_no_needless_copy() -> None:
    arguments = numbers((1, 2, 7, 9)), numbers((2, 3, 3))
    plain = depthwise(1, (0, 0)).stages(*arguments, target="x86-64-avx512").stages.thread
    assert len(plain.calls) == 1, "windows that never leave the array need no frame"
    ops = {op.opcode for call in plain.calls for op in walk(call.kernel.body)}
    assert {"load_lanes", "store_lanes", "fma"} <= ops
    other = depthwise(1, (0, 0)).stages(*arguments, target="aarch64-neon").stages.thread
    assert "load_lanes" not in {op.opcode for call in other.calls for op in walk(call.kernel.body)}
    assert len(depthwise(1, (1, 1)).stages(*arguments, target="x86-64-avx512").stages.thread.calls) == 2


def filtered(pad: int) -> tw.Kernel[..., Any]:
    @tw.kernel
    def filters(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        many, _, kh, kw = w.shape
        rows, columns = height + 2 * pad - kh + 1, width + 2 * pad - kw + 1
        out = tw.empty((n, many, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, many, rows, columns):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    for m in range(kw):
                        y = i + k - pad
                        z = j + m - pad
                        if 0 <= y < height and 0 <= z < width:
                            total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    return filters


@pytest.mark.parametrize("width", [3, 4, 5, 15, 17, 33])
@pytest.mark.parametrize("pad", [0, 1])
def test_products_of_narrow_images(width: int, pad: int) -> None:
    """Columns of a product that lie in several short rows."""
    for n, height in ((1, 3), (3, 11)):
        x, w = numbers((n, 19, height, width)), numbers((21, 19, 3, 3))
        framed = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        windows = np.lib.stride_tricks.sliding_window_view(framed, (3, 3), (2, 3))
        want = np.einsum("bcijkm,ockm->boij", windows, w.astype(np.float64))
        np.testing.assert_allclose(filtered(pad)(x, w), want, rtol=1e-4, atol=1e-4)


@tw.kernel
def growing(a: tw.Array, b: tw.Array) -> tw.Array:
    m, n = a.shape[0], b.shape[1]
    out = tw.empty((m, n), tw.f32)
    for i, j in tw.grid(m, n):
        total = tw.f32(0)
        for k in range(i + 1):
            total += a[i, k] * b[k, j]
        out[i, j] = total
    return out


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
def test_short_floats_under_conditions(dtype: Any) -> None:
    """Loads of short floats that a condition guards call nothing that the machine may not have."""
    for rows in (1, 5, 40):
        a, b = numbers((rows, rows), dtype), numbers((rows + 9, 40), dtype)
        want = np.tril(a.astype(np.float64)) @ b[:rows].astype(np.float64)
        np.testing.assert_allclose(growing(a, b), want, rtol=2e-5, atol=2e-5)
