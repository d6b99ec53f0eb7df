"""Selections on a CPU that read most elements once: whatever the order, ties, NaN, dtypes, and numbers that are wanted around those at which another way is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.primitives.cpu_rows import SELECTED_BY_VECTORS, kept_of

RNG = np.random.default_rng(7)


def inputs(size: int, dtype: Any) -> dict[str, np.ndarray]:
    whole = np.issubdtype(dtype, np.integer)
    drawn = RNG.integers(0, 100, size).astype(dtype) if whole else RNG.standard_normal(size).astype(dtype)
    rising = np.sort(drawn)
    found = {"drawn": drawn, "rising": rising, "falling": rising[::-1].copy(), "equal": np.full(size, drawn[0], dtype), "late": np.concatenate([np.sort(drawn[size // 2 :]), rising[: size // 2]])}
    if not whole:
        special = drawn.copy()
        special[RNG.integers(0, size, size // 3)] = np.nan
        special[RNG.integers(0, size, 5)] = np.inf
        special[RNG.integers(0, size, 5)] = -np.inf
        special[RNG.integers(0, size, 9)] = -0.0
        found |= {"special": special, "nan": np.full(size, np.nan, dtype)}
    return found


def check(x: np.ndarray, k: int, largest: bool) -> None:
    values, places = tw.topk(x, k, largest=largest)
    # NaN is larger than everything else; of equal elements the first ones are taken.
    _, order = np.unique(x, return_inverse=True)
    expected = np.argsort(-order if largest else order, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8, np.float16])
@pytest.mark.parametrize("size", [601, 5003, 4 * SELECTED_BY_VECTORS // 7, 2 * SELECTED_BY_VECTORS + 31])
def test_orders(dtype: Any, size: int) -> None:
    for kind, x in inputs(size, dtype).items():
        for k in (1, 31, 128, 129):
            if 4 * k <= size:
                check(x, k, kind != "falling")


@pytest.mark.parametrize("k", [127, 128, 129, 1023, 1024, 1025])
def test_numbers_where_the_way_changes(k: int) -> None:
    for x in inputs(9001, np.float32).values():
        check(x, k, True)
        check(x, k, False)


def test_ways() -> None:
    assert [kept_of(k) for k in (1, 128, 129, 1024, 1025)] == [512, 512, 4096, 4096, 0]


def test_rows() -> None:
    x = RNG.standard_normal((7, 3001)).astype(np.float32)
    values, places = tw.topk(x, 33)
    expected = np.argsort(-x, axis=-1, kind="stable")[:, :33]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))
