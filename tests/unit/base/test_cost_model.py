"""Numbers by which schedules are chosen: today's targets have fitted ones, a new chip gets such that go with what it can do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.cost_model import FITTED, H200, H200_BANDWIDTH, H200_F32, H200_HALF, H200_MULTIPROCESSORS, derived
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target, names, parse_target
from tilewright.passes.choose.products import matrix_schedules
from tilewright.passes.schedules.matrix import Wgmma

HOPPER = NVPTX[DEFAULT_NVPTX]


def new_chip(times: float, multiprocessors: int = HOPPER.multiprocessors) -> Target:
    """One that nobody measured, so many times as fast as a H200."""
    peaks = tuple((name, rate * times) for name, rate in HOPPER.peaks)
    return replace(HOPPER, name="sm_99a", peaks=peaks, bandwidth=HOPPER.bandwidth * times, multiprocessors=multiprocessors)


@pytest.mark.parametrize("name", [name for name in names() if name != "cpu" and parse_target(name).kind in ("cpu", "nvptx")])
def test_known_targets_plan_with_the_fitted_numbers(name: str) -> None:
    assert parse_target(name).costs is H200


def test_the_fitted_numbers_are_those_of_a_target() -> None:
    assert FITTED.keys() == NVPTX.keys()
    numbers = (H200_MULTIPROCESSORS, H200_BANDWIDTH, H200_HALF, H200_F32)
    assert numbers == (HOPPER.multiprocessors, HOPPER.bandwidth, HOPPER.peak("bf16"), HOPPER.peak("f32"))


def test_derived_numbers_of_the_same_device_are_the_fitted_ones() -> None:
    same = new_chip(1.0).costs
    assert same == replace(H200, chip="")
    assert same is not H200


def test_rates_of_a_new_chip_go_with_the_device() -> None:
    fast, fitted = new_chip(2.0).costs.wgmma, H200.wgmma
    assert (fast.rate, fast.stream, fast.feed) == (2 * fitted.rate, 2 * fitted.stream, 2 * fitted.feed)
    assert fast.finish == fitted.finish / 2 and fast.read == fitted.read / 2
    assert (fast.start, fast.exchange, fast.tile_rates) == (fitted.start, fitted.exchange, fitted.tile_rates)
    # As much, shared by twice as many: each does half of it.
    wide = new_chip(1.0, 2 * HOPPER.multiprocessors).costs.wgmma
    assert (wide.rate, wide.arrive, wide.stream) == (fitted.rate / 2, fitted.arrive / 2, fitted.stream)


def test_a_chip_of_which_nothing_is_known_is_as_fast_as_its_multiprocessors() -> None:
    unknown = derived(2 * H200_MULTIPROCESSORS, 0.0, 0.0, 0.0)
    assert (unknown.wgmma.rate, unknown.wgmma.stream) == (H200.wgmma.rate, 2 * H200.wgmma.stream)


def test_a_new_chip_has_schedules_of_its_own() -> None:
    def product(a: tw.Array, b: tw.Array) -> tw.Array:
        m, k = a.shape
        n = b.shape[1]
        out = tw.empty((m, n), a.dtype)
        for i, j in tw.grid(m, n):
            total = 0.0
            for p in range(k):
                total += a[i, p] * b[p, j]
            out[i, j] = total
        return out

    matrix = np.zeros((4096, 4096), np.float16)
    loop = tw.kernel(product).stages(matrix, matrix, target="sm_90a").stages.loop.calls[0].kernel
    sizes = dict.fromkeys(("m", "n", "k"), 4096)
    known, new = (matrix_schedules(loop, target, sizes) for target in (HOPPER, new_chip(1.0)))
    assert known == new and isinstance(known[0], Wgmma)
    # Memory that is a hundred times as slow: what is read most often decides.
    starved = replace(new_chip(1.0), bandwidth=HOPPER.bandwidth / 100)
    assert matrix_schedules(loop, starved, sizes) != known
