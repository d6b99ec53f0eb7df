"""Long sums on portable devices of CPUs: equal parts, a thread for each, and what is left behind them; against float64."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw

DEVICES = [pytest.param(name, marks=pytest.mark.requires(name)) for name in ("webgpu", "vulkan")]
on_each = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore::tilewright.base.errors.DeviceWarning")


@tw.kernel
def total(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((1,), x.dtype)
    for r in tw.grid(1):
        s = 0.0
        for i in range(n):
            s += x[i]
        out[r] = s
    return out


@tw.kernel
def largest(x: tw.Array) -> tw.Array:
    rows = x.shape[0]
    out = tw.empty((rows,), tw.i64)
    for r in tw.grid(rows):
        out[r] = tw.argmax(x[r])
    return out


@on_each
def test_sums_of_any_length(device: str) -> None:
    """Code for one length serves others: parts that are none, one more than parts hold, a prime, an empty array."""
    draw = np.random.default_rng(2)
    for n in (131_072, 16_385, 32_771, 5000, 1, 0):
        x = draw.standard_normal(n, np.float32)
        got = float(total(x, device=device)[0])
        assert abs(got - x.sum(dtype=np.float64)) <= 1e-6 * np.sqrt(max(1, n)) * np.abs(x).max(initial=1)
        if n > 1 << 14:
            assert total.last is not None and "total.parts" in total.last.schedule and "total.rest" in total.last.schedule


@on_each
def test_no_number_is_lost(device: str) -> None:
    for place in (0, 16_384, 20_000, 20_479):
        x = np.zeros(20_480, np.float32)
        x[place] = np.nan
        assert np.isnan(total(x, device=device)[0])
        x[place] = 3.0
        assert total(x, device=device)[0] == 3.0


@on_each
def test_places_of_extremes(device: str) -> None:
    x = np.zeros((2, 33_001), np.float32)
    x[0, 17], x[0, 33_000], x[1, 33_000] = 1.0, 1.0, 2.0
    np.testing.assert_array_equal(largest(x, device=device), [17, 33_000])
