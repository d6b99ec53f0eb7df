"""Largest and smallest numbers of long rows and their places, on a CPU: NaN wins, -0 is below 0, the first of equals is the place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target

LENGTHS = (1, 3, 15, 16, 17, 511, 512, 513, 1025, 2047, 2049, 40_003)


@tw.kernel
def extremes(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array, tw.Array]:
    rows, _ = x.shape
    most = tw.empty((rows,), x.dtype)
    least = tw.empty((rows,), x.dtype)
    first = tw.empty((rows,), tw.i64)
    last = tw.empty((rows,), tw.i64)
    for i in tw.grid(rows):
        most[i] = tw.max(x[i])
        least[i] = tw.min(x[i])
        first[i] = tw.argmax(x[i])
        last[i] = tw.argmin(x[i])
    return most, least, first, last


def rows_of(length: int, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Rows with all that may be found at any place: at the ends, where vectors and runs meet, and twice."""
    plain = rng.standard_normal((8, length)) * 40 if np.dtype(dtype).kind == "f" else rng.integers(0, 100, (8, length))
    x = plain.astype(dtype)
    x[1] = x[1, 0]
    x[2, rng.integers(length)], x[2, rng.integers(length)] = 120, 120
    x[3, -1], x[3, 0] = 121, 0
    if x.dtype.kind == "f":
        x[4] = np.where(rng.random(length) < 0.5, -0.0, 0.0)
        x[5], x[6] = -np.inf, np.inf
        x[6, rng.integers(length)] = -np.inf
        x[7, rng.integers(length)] = np.nan
        x[7, rng.integers(length)] = np.nan
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.uint8, np.int64], ids=str)
def test_values_and_places(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    for length in LENGTHS:
        x = rows_of(length, dtype, rng)
        most, least, first, last = extremes(x)
        np.testing.assert_array_equal(most, x.max(axis=1))
        np.testing.assert_array_equal(least, x.min(axis=1))
        np.testing.assert_array_equal(first, x.argmax(axis=1))
        np.testing.assert_array_equal(last, x.argmin(axis=1))
        if x.dtype.kind == "f":
            assert not np.signbit(most[4]) or np.signbit(x[4]).all()
            assert np.signbit(least[4]) == np.signbit(x[4]).any()


def test_one_long_row() -> None:
    """Rows so long that several threads have parts of them."""

    @tw.kernel
    def place(x: tw.Array) -> int:
        return tw.argmax(x)

    x = np.random.default_rng(0).standard_normal(3_000_017).astype(np.float32)
    assert place(x) == x.argmax()
    for at in (0, 511, 512, 1_499_999, 3_000_016):
        y = x.copy()
        y[at] = y[at // 2 + 1_500_008] = 77
        assert place(y) == at
        y[2_999_999], y[1_700_000] = np.nan, np.nan
        assert place(y) == 1_700_000
    assert place(np.full(3_000_017, -np.inf, np.float32)) == 0


def test_maxima_of_aarch64_need_no_second_look() -> None:
    """One instruction for a vector, and nothing beside it that watches for NaN; x86 has a probe."""
    x = np.zeros((4, 4096), np.float32)
    for name in ("x86-64-avx2", "x86-64-avx512", "aarch64-neon"):
        target = parse_target(name)
        thread = "\n".join(str(call.kernel) for call in extremes.stages(x, target=name).stages.thread.calls)
        assert ("larger" in thread) != target.has_ieee_maximum, name
