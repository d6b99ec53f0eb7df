"""argmin and argmax on a CPU, along rows and down columns: the first of equals, NaN before everything, infinities, empty arrays, and rows about as long as a run."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel(device="cpu")
def largest_down(x: tw.Array) -> tw.Array:
    return tw.argmax(x, axis=0)


@tw.kernel(device="cpu")
def smallest_down(x: tw.Array) -> tw.Array:
    return tw.argmin(x, axis=0)


@tw.kernel(device="cpu")
def largest_along(x: tw.Array) -> tw.Array:
    return tw.argmax(x, axis=1)


@tw.kernel(device="cpu")
def smallest_along(x: tw.Array) -> tw.Array:
    return tw.argmin(x, axis=1)


def check(x: np.ndarray) -> None:
    for ours, numpy_function, axis in ((largest_down, np.argmax, 0), (smallest_down, np.argmin, 0), (largest_along, np.argmax, 1), (smallest_along, np.argmin, 1)):
        np.testing.assert_array_equal(ours(x), numpy_function(x, axis))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (31, 67), (3, 2049), (2047, 3)])
def test_equals(shape: tuple[int, int], dtype: type) -> None:
    rng = np.random.default_rng(shape[1])
    check(rng.integers(0, 4, shape).astype(dtype))
    check(np.zeros(shape, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_special_values(dtype: type) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((41, 77)).astype(dtype)
    x[rng.random(x.shape) < 0.1] = np.nan
    x[rng.random(x.shape) < 0.1] = np.inf
    x[rng.random(x.shape) < 0.1] = -np.inf
    check(x)
    for value in (np.inf, -np.inf, np.nan, -0.0):
        check(np.full((9, 35), value, dtype))
    check(np.where(rng.random((9, 70)) < 0.5, dtype(0.0), dtype(-0.0)).astype(dtype))


def test_identities_of_integers() -> None:
    for value in (np.iinfo(np.int32).min, np.iinfo(np.int32).max):
        check(np.full((7, 37), value, np.int32))
    wide = np.arange(60 * 50, dtype=np.float32).reshape(60, 50) % 13
    check(wide[::2, 1::3])
