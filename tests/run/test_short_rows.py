"""Convolutions whose images have short rows, as CPUs copy their columns: on this machine, and in the emulator as a CPU with masks does, against float64.

What several rows have of a vector of columns is merged before it is written. Rows end anywhere in a vector, filters end anywhere in a tile, and images have a frame
of zeros or none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.ir.types import Tensor, Tile


def convolution(p: int, d: int = 1) -> tw.Kernel[..., Any]:
    kernel = convolutions.conv2d((1, 1), (p, p), d, False)
    assert isinstance(kernel, tw.Kernel)
    return kernel


@tw.kernel
def inside(x: tw.Array, w: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, kh, kw = w.shape
    out = tw.empty((n, filters, height - kh + 1, width - kw + 1), x.dtype)
    for b, o, i, j in tw.grid(n, filters, height - kh + 1, width - kw + 1):
        total = tw.f32(0)
        for c in range(channels):
            for k in range(kh):
                for m in range(kw):
                    total += x[b, c, i + k, j + m] * w[o, c, k, m]
        out[b, o, i, j] = total
    return out


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape, dtype=np.float32)


def wanted(x: np.ndarray, w: np.ndarray, p: int, d: int = 1) -> np.ndarray:
    framed = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (p, p), (p, p)))
    rows, columns = (framed.shape[2 + axis] - d * (w.shape[2 + axis] - 1) for axis in range(2))
    found = np.zeros((x.shape[0], w.shape[0], rows, columns))
    for k in range(w.shape[2]):
        for m in range(w.shape[3]):
            part = framed[:, :, k * d : k * d + rows, m * d : m * d + columns]
            found += np.einsum("nchw,oc->nohw", part, w[:, :, k, m].astype(np.float64))
    return found


@pytest.mark.parametrize("p", [0, 1])
def test_rows_of_any_length(p: int) -> None:
    kernel = convolution(p)
    for width in (3, 5, 7, 8, 9, 11, 15, 16, 17, 19, 31, 33, 35):
        x, w = numbers(3, 5, 9, width), numbers(14, 5, 3, 3)
        np.testing.assert_allclose(kernel(x, w), wanted(x, w, p), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("filters", [1, 2, 3, 6, 9, 12, 13, 14, 16, 19, 22, 25, 31, 53])
def test_filters_beside_whole_tiles(filters: int) -> None:
    x, w = numbers(2, 7, 11, 21), numbers(filters, 7, 3, 3)
    np.testing.assert_allclose(convolution(1)(x, w), wanted(x, w, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("filters", [9, 13, 15])
def test_sums_of_several_stretches(filters: int) -> None:
    for p, d in ((0, 1), (2, 2)):
        x, w = numbers(2, 149, 11, 13), numbers(filters, 149, 3, 3)
        np.testing.assert_allclose(convolution(p, d)(x, w), wanted(x, w, p, d), rtol=1e-4, atol=1e-3)


def test_views_empty_images_and_what_is_no_number() -> None:
    kernel = convolution(0)
    x, w = numbers(4, 10, 12, 30)[::2, ::2, :, 5:24], numbers(14, 5, 3, 3)
    np.testing.assert_allclose(kernel(x, w), wanted(x, w, 0), rtol=1e-4, atol=1e-4)
    assert kernel(numbers(0, 5, 12, 19), w).shape == (0, 14, 10, 17)
    x = numbers(2, 5, 12, 19)
    x[0, 2, 5, 18] = np.nan
    found, exact = kernel(x, w), wanted(x, w, 0)
    assert (np.isnan(found) == np.isnan(exact)).all()
    np.testing.assert_allclose(found[np.isfinite(exact)], exact[np.isfinite(exact)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [10, 18])
def test_a_cpu_with_masks_merges_rows_and_reads_nothing_outside(width: int) -> None:
    x, w = numbers(2, 3, 5, width), numbers(4, 3, 3, 3)
    for kernel in (inside, convolution(1)):
        program = kernel.stages(x, w, target="x86-64-avx512").stages.tile
        (found,) = run_program(program, {"x": x, "w": w}).values()
        np.testing.assert_allclose(found, wanted(x, w, int(kernel is not inside)), rtol=1e-4, atol=1e-4)


def of_filters(filters: int) -> tw.Kernel[..., Any]:
    """`inside`, whose code knows how many filters there are."""

    @tw.kernel
    def fitted(x: tw.Array, w: tw.Array) -> tw.Array:
        n, channels, height, width = x.shape
        _, _, kh, kw = w.shape
        out = tw.empty((n, filters, height - kh + 1, width - kw + 1), x.dtype)
        for b, o, i, j in tw.grid(n, filters, height - kh + 1, width - kw + 1):
            total = tw.f32(0)
            for c in range(channels):
                for k in range(kh):
                    for m in range(kw):
                        total += x[b, c, i + k, j + m] * w[o, c, k, m]
            out[b, o, i, j] = total
        return out

    return fitted


@pytest.mark.parametrize(("filters", "at_once"), [(9, False), (11, True), (13, True), (14, False)])
def test_columns_of_few_filters_are_merged_as_they_are_multiplied(filters: int, at_once: bool) -> None:
    """All filters are one tile of results, so a copy would be read once; tiles of three registers along a row have too many masks for it."""
    kernel = of_filters(filters)
    for width in (7, 10, 20):
        x, w = numbers(2, 3, 5, width), numbers(filters, 3, 3, 3)
        tile = kernel.stages(x, w, target="x86-64-avx512").stages.tile
        rooms = {op.results[0].name for call in tile.calls for op in walk(call.kernel.body) if op.opcode == "alloc"}
        assert ("merged" in rooms) is at_once
        (out,) = run_program(tile, {"x": x, "w": w}).values()
        np.testing.assert_allclose(out, wanted(x, w, 0), rtol=1e-4, atol=1e-4)
    x, w = numbers(3, 97, 11, 18), numbers(filters, 97, 3, 3)
    x[1, 5, 3, 17] = np.nan
    np.testing.assert_allclose(kernel(x, w), wanted(x, w, 0), rtol=1e-4, atol=1e-3)


def test_images_without_a_frame_have_one_place_for_each_step() -> None:
    """A place of three numbers is three loads and products for each element."""
    x, w = numbers(2, 3, 9, 20), numbers(4, 3, 3, 3)
    for target, rank in (("x86-64-avx512", 2), ("x86-64-avx2", 4), ("aarch64-neon", 4)):
        (call,) = inside.stages(x, w, target=target).stages.tile.calls
        (image,) = (p for p in call.kernel.params if p.name == "x")
        assert isinstance(image.type, Tensor) and image.type.rank == rank, target
    np.testing.assert_allclose(inside(x, w), wanted(x, w, 0), rtol=1e-4, atol=1e-4)


@tw.kernel
def scaled_and_added(x: tw.Array, w: tw.Array, before: tw.Array, scale: tw.Array) -> tw.Array:
    n, channels, height, width = x.shape
    filters, _, kh, kw = w.shape
    out = tw.empty((n, filters, height - kh + 1, width - kw + 1), x.dtype)
    for b, o, i, j in tw.grid(n, filters, height - kh + 1, width - kw + 1):
        total = tw.f32(0)
        for c in range(channels):
            for k in range(kh):
                for m in range(kw):
                    total += x[b, c, i + k, j + m] * w[o, c, k, m]
        out[b, o, i, j] = max(total * scale[o] + before[b, o, i, j], 0.0)
    return out


@pytest.mark.parametrize("width", [3, 6, 9, 15, 19])
def test_what_follows_the_sum_reads_and_writes_the_elements_of_its_row_alone(width: int) -> None:
    """The row's results are less than a vector: they are one under a mask. What lies beside them is another thread's."""
    x, w, scale = numbers(2, 3, 8, width), numbers(14, 3, 3, 3), numbers(14)
    before = numbers(2, 14, 6, width - 2)
    before[0, 3, 2, 0] = np.nan
    exact = np.maximum(wanted(x, w, 0) * scale[:, None, None].astype(np.float64) + before, 0.0)
    np.testing.assert_allclose(scaled_and_added(x, w, before, scale), exact, rtol=1e-4, atol=1e-4)
    tile = scaled_and_added.stages(x, w, before, scale, target="x86-64-avx512").stages.tile
    (out,) = run_program(tile, {"x": x, "w": w, "before": before, "scale": scale}).values()
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)
    for call in tile.calls:
        result = next(p for p in call.kernel.params if p.name == "out")
        stores = [op for op in walk(call.kernel.body) if op.opcode == "store" and op.operands[0] is result]
        assert stores and all(isinstance(op.operands[-2 if op.attrs.get("masked") else -1].type, Tile) for op in stores), "no result is written alone"
