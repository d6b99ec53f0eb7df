"""A long reduction is cut over the whole device also when its terms use a value computed beside it, such as a mean."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def variance(x: tw.Array) -> float:
    (n,) = x.shape
    mean = tw.sum(x) / n
    squares = 0.0
    for i in range(n):
        squares += (x[i] - mean) * (x[i] - mean)
    return squares / n


@pytest.mark.parametrize("target", ["x86-64-avx2", "sm_90a"])
def test_both_reductions_are_cut(target: str) -> None:
    artifact = variance.compile(np.ones(1 << 20, np.float32), target=target)
    cut = [launch for launch in artifact.launches if "_parts_" in launch.entry]
    assert len(cut) == 2, [launch.entry for launch in artifact.launches]
    assert all(launch.grid[0].names == {"n"} for launch in cut)


def test_a_cut_sum_is_accurate() -> None:
    x = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    # Sequential f32 accumulation is off by 8e-6 here.
    assert abs(variance(x) - np.var(x.astype(np.float64))) < 5e-7
