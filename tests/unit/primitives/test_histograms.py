"""Histograms with weights and edges, and along axes, on the CPU and in the emulator, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from support import CUDA
from tilewright.base.errors import UserError

DEVICES = ("cpu", "emulator")
EDGES = np.array([-3.0, -1.5, -1.5, 0.0, 0.25, 2.0, 10.0])


def floats(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    x = (np.random.default_rng(0).standard_normal(shape) * 3).astype(dtype)
    x.reshape(-1)[::13] = np.nan
    x.reshape(-1)[3::17] = 2.0
    x.reshape(-1)[5::19] = 10.0
    return x


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 997])
def test_edges(device: str, n: int) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        x = floats((n,), dtype)
        wanted = np.histogram(x[~np.isnan(x)], EDGES)[0]
        for edges in (EDGES, EDGES.tolist()):
            found = tw.histogram(x, edges, device=device)
            assert found.dtype == np.int64 and np.array_equal(found, wanted)
    for kind in (np.int8, np.uint8, np.int64, np.uint64):
        y = np.random.default_rng(1).integers(0, 60, n).astype(kind)
        edges = np.array([2, 3, 10, 10, 59])
        assert np.array_equal(tw.histogram(y, edges, device=device), np.histogram(y, edges)[0])
        assert np.array_equal(tw.histogram(y, edges + 0.5, device=device), np.histogram(y, edges + 0.5)[0])


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_whole_numbers_beyond_those_of_floats(device: str) -> None:
    x = np.array([2**62, 2**62 + 1, 2**62 + 2])
    assert tw.histogram(x, np.array([2**62, 2**62 + 1, 2**62 + 2, 2**62 + 3]), device=device).tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
def test_weights(device: str) -> None:
    x = floats((1001,))
    known = ~np.isnan(x)
    for weights in (np.random.default_rng(2).integers(-5, 5, 1001), np.random.default_rng(2).random(1001), np.random.default_rng(2).random(1001).astype(np.float16)):
        for bins, span in ((EDGES, None), (16, (-4.0, 4.0))):
            found = tw.histogram(x, bins, span, weights=weights, device=device)
            wanted = np.histogram(x[known], bins, span, weights=weights[known].astype(np.float64))[0]
            assert found.dtype == (np.int64 if weights.dtype.kind == "i" else np.float64)
            np.testing.assert_allclose(found, wanted, rtol=1e-12)
    small = np.random.default_rng(3).integers(0, 9, 500).astype(np.uint8)
    weights = np.random.default_rng(3).integers(0, 9, 500)
    assert np.array_equal(tw.histogram(small, 9, weights=weights, device=device), np.bincount(small, weights, 9))
    many = np.random.default_rng(3).integers(0, 6000, 500)
    assert np.array_equal(tw.histogram(many, 6000, weights=weights, device=device), np.bincount(many, weights, 6000))


@pytest.mark.parametrize("device", [*DEVICES, CUDA])
@pytest.mark.parametrize("shape", [(40,), (3, 50), (50, 3), (2, 30, 3), (0, 5), (5, 0)], ids=str)
def test_axes(device: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(4).integers(0, 8, shape).astype(np.int16)
    weights = np.random.default_rng(5).integers(0, 8, shape)
    for axis in range(-len(shape), len(shape)):
        moved, amounts = np.moveaxis(x, axis, -1), np.moveaxis(weights, axis, -1)
        wanted = np.zeros((*moved.shape[:-1], 8), np.int64)
        total = wanted.copy()
        for index in np.ndindex(moved.shape[:-1]):
            wanted[index] = np.bincount(moved[index], minlength=8)
            total[index] = np.bincount(moved[index], amounts[index], 8)
        assert np.array_equal(tw.histogram(x, 8, axis=axis, device=device), np.moveaxis(wanted, -1, axis))
        assert np.array_equal(tw.histogram(x, np.arange(9), weights=weights, axis=axis, device=device), np.moveaxis(total, -1, axis))


def test_of_many_elements() -> None:
    x = np.random.default_rng(0).random(300_001)
    weights = np.random.default_rng(1).random(300_001)
    edges = np.sort(np.random.default_rng(2).random(1000))
    assert np.array_equal(tw.histogram(x, edges), np.histogram(x, edges)[0])
    np.testing.assert_allclose(tw.histogram(x, edges, weights=weights), np.histogram(x, edges, weights=weights)[0], rtol=1e-10)
    assert np.array_equal(tw.histogram(x, edges, weights=weights), tw.histogram(x, edges, weights=weights))


def test_filter_takes_any_shape() -> None:
    x = floats((6, 7))
    assert np.array_equal(tw.filter(x, lambda v: v > 0), x[x > 0])
    assert np.array_equal(tw.filter(x, x < 0), x[x < 0])


def _x() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tw.histogram(_x(), [3, 1, 2]), "do not ascend: edge 1 is 1, after 3"),
        (lambda: tw.histogram(_x(), [0.0, np.nan]), "do not ascend: edge 1 is nan, after 0.0"),
        (lambda: tw.histogram(_x(), [1.0]), "at least two edges"),
        (lambda: tw.histogram(_x(), "auto"), "bins is 'auto'"),
        (lambda: tw.histogram(_x(), [0, 1], (0, 1)), "edges or a range"),
        (lambda: tw.histogram(_x(), 4, weights=np.ones(4)), r"weights have shape \[4\], but the data \[3, 4\]"),
        (lambda: tw.histogram(_x(), 4, axis=2), "axis is 2"),
        (lambda: tw.histogram(_x(), -1), "bins is -1"),
        (lambda: tw.histogram(_x(), True), "bins is True"),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        call()
