"""Convolutions with few filters on a CPU: tiles are as high, or as wide, as these are many, and pixels with channels last are read where they lie. Results
against float64, over what other code there is beside: short runs, several stretches of the sum, views, what is no number, other CPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.execute.kernel import parse_target
from tilewright.ir.emulator import run_program
from tilewright.passes.choose.cpu.register_tiles import HIGHEST, fitted_columns, fitted_tile, register_tile
from tilewright.passes.schedules.matrix import fit_registers


@cache
def channels_last(filters: int, s: int = 1, p: int = 0, d: int = 1) -> tw.Kernel[..., Any]:
    @tw.kernel
    def last(x: tw.Array, w: tw.Array) -> tw.Array:
        n, height, width, channels = x.shape
        _, kh, kw, _ = w.shape
        rows = (height + 2 * p - d * (kh - 1) - 1) // s + 1
        columns = (width + 2 * p - d * (kw - 1) - 1) // s + 1
        out = tw.empty((n, rows, columns, filters), x.dtype)
        for b, i, j, o in tw.grid(n, rows, columns, filters):
            total = x.dtype(0)
            for k in range(kh):
                for m in range(kw):
                    for c in range(channels):
                        y = i * s + k * d - p
                        z = j * s + m * d - p
                        if 0 <= y < height and 0 <= z < width:
                            total += x[b, y, z, c] * w[o, k, m, c]
            out[b, i, j, o] = total
        return out

    return last


@cache
def channels_first(filters: int, s: int = 1, p: int = 0, d: int = 1) -> tw.Kernel[..., Any]:
    @tw.kernel
    def first(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        _, _, kh, kw = w.shape
        rows = (height + 2 * p - d * (kh - 1) - 1) // s + 1
        columns = (width + 2 * p - d * (kw - 1) - 1) // s + 1
        out = tw.empty((n, filters, rows, columns), x.dtype)
        for b, o, i, j in tw.grid(n, filters, rows, columns):
            total = x.dtype(0)
            for c in range(channels):
                for k in range(kh):
                    for m in range(kw):
                        y = i * s + k * d - p
                        z = j * s + m * d - p
                        if 0 <= y < height and 0 <= z < width:
                            total += x[b, c, y, z] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    return first


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def wanted(x: np.ndarray, w: np.ndarray, s: int = 1, p: int = 0, d: int = 1) -> np.ndarray:
    """In float64, channels last."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (p, p), (p, p), (0, 0)))
    n, height, width, _ = padded.shape
    _, kh, kw, _ = w.shape
    rows, columns = (height - d * (kh - 1) - 1) // s + 1, (width - d * (kw - 1) - 1) // s + 1
    out = np.zeros((n, rows, columns, w.shape[0]))
    for k in range(kh):
        for m in range(kw):
            seen = padded[:, k * d : k * d + s * (rows - 1) + 1 : s, m * d : m * d + s * (columns - 1) + 1 : s]
            out += np.einsum("bijc,oc->bijo", seen, w[:, k, m].astype(np.float64))
    return out


def turned(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(x, 3, 1))


def check(x: np.ndarray, w: np.ndarray, s: int = 1, p: int = 0, d: int = 1) -> None:
    """Both layouts."""
    exact, filters = wanted(x, w, s, p, d), w.shape[0]
    most = 2e-6 * float(np.abs(exact).max(initial=1e-3))
    np.testing.assert_allclose(channels_last(filters, s, p, d)(x, w), exact, rtol=0, atol=most)
    np.testing.assert_allclose(channels_first(filters, s, p, d)(turned(x), turned(w)), turned(exact), rtol=0, atol=most)


@pytest.mark.parametrize("filters", [1, 2, 5, 8, 13, 14, 16, 17])
def test_filters(filters: int) -> None:
    for width in (1, 7, 23):
        check(numbers(2, 11, width + 2, 40), numbers(filters, 3, 3, 40))


@pytest.mark.parametrize("channels", [1, 3, 10, 11, 31, 32, 33, 300])
@pytest.mark.parametrize(("s", "p", "d"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 0, 1)])
def test_runs_of_any_length(channels: int, s: int, p: int, d: int) -> None:
    check(numbers(2, 9, 10, channels), numbers(6, 3, 3, channels), s, p, d)


@pytest.mark.parametrize("channels", [640, 641, 1300])
def test_sums_of_several_stretches(channels: int) -> None:
    check(numbers(1, 6, 7, channels), numbers(12, 3, 3, channels), p=1)


def test_two_dtypes() -> None:
    x, w = numbers(1, 9, 9, 50, dtype=np.float64), numbers(9, 3, 3, 50, dtype=np.float64)
    np.testing.assert_allclose(channels_last(9)(x, w), wanted(x, w), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(channels_first(9)(turned(x), turned(w)), turned(wanted(x, w)), rtol=1e-12, atol=1e-12)


def test_views_empty_images_and_what_is_no_number() -> None:
    x, w = numbers(4, 9, 20, 80)[::2, :, 3:14, ::2], numbers(16, 3, 3, 40)
    np.testing.assert_allclose(channels_last(16)(x, w), wanted(x, w), rtol=0, atol=1e-4)
    assert channels_last(16)(numbers(0, 9, 9, 40), w).shape == (0, 7, 7, 16)
    x = numbers(1, 9, 9, 40)
    x[0, 4, 5, 6], x[0, 8, 0, 1] = np.nan, np.inf
    found, exact = channels_last(16, p=1)(x, w), wanted(x, w, p=1)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(exact))
    np.testing.assert_allclose(found[np.isfinite(exact)], exact[np.isfinite(exact)], rtol=0, atol=1e-4)


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2", "aarch64-neon"])
@pytest.mark.parametrize("filters", [3, 8, 16])
def test_other_cpus(target: str, filters: int) -> None:
    """Rows that are read where they lie, and rows that are copied: nothing outside is read."""
    for channels, p, d in ((11, 0, 1), (3, 1, 1), (4, 0, 2)):
        x, w = numbers(1, 5, 6, channels), numbers(filters, 3, 3, channels)
        for kernel, own, weights, exact in (
            (channels_last(filters, p=p, d=d), x, w, wanted(x, w, p=p, d=d)),
            (channels_first(filters, p=p, d=d), turned(x), turned(w), turned(wanted(x, w, p=p, d=d))),
        ):
            program = kernel.stages(own, weights, target=target).stages.tile
            (found,) = run_program(program, {"x": own, "w": weights}).values()
            np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


def test_rows_are_not_copied_where_one_tile_has_all_columns() -> None:
    x, w = numbers(1, 9, 9, 40), numbers(16, 3, 3, 40)
    *_, call = channels_last(16).stages(x, w, target="x86-64-avx512").stages.tile.calls
    text = str(call.kernel)
    assert "k=5120 mr=12 nr=16" in text
    *_, call = channels_first(8).stages(turned(x), turned(w[:8]), target="x86-64-avx512").stages.tile.calls
    assert "mr=8 nr=48 vectors=3" in str(call.kernel)


def test_windows_that_stay_inside_have_no_copy_with_a_frame() -> None:
    x, w = numbers(1, 40, 9, 20), numbers(16, 40, 3, 3)
    assert len(channels_first(16).stages(x, w, target="x86-64-avx512").stages.tile.calls) == 1
    assert len(channels_first(16, p=1).stages(x, w, target="x86-64-avx512").stages.tile.calls) == 2


@pytest.mark.parametrize("name", ["x86-64-avx512", "x86-64-avx2", "aarch64-neon"])
def test_tiles_fit_in_registers(name: str) -> None:
    target = parse_target(name)
    usual = HIGHEST if target.vector_bytes == 64 else register_tile(target)[0]
    for filters in range(1, 17):
        rows, vectors = fitted_tile(target, filters)
        assert fit_registers(target, rows, vectors) and rows <= usual
        assert -(-filters // rows) == -(-filters // usual), "as few tiles as with the greatest height"
        lanes = target.vector_bytes // 4
        rows, vectors = fitted_columns(target, lanes, filters)
        assert fit_registers(target, rows, vectors) and rows * vectors >= 8
