"""Products of f32 in parts of tf32, the default of GPUs where sums are long: no further off than a chain of multiply-adds, for numbers of any size, and with
its infinities. Executed by the emulator, whose matrix unit adds up exactly and rounds every instruction's sum; `bench` and tests/gpu have the real one."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from f32_reference import chain, factors, product
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import Fma, Mma, Wgmma

KINDS = ("normal", "positive", "spread", "cancelling", "tiny", "huge")


def computed(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    done = product.stages(x, w, target="sm_90a").stages
    assert any(isinstance(s, Mma) or (isinstance(s, Wgmma) and s.bf16_terms) for s in done.schedules)
    return np.asarray(next(iter(run_program(done.thread, {"x": x, "w": w}).values())))


@pytest.mark.parametrize("k", [64, 101, 1100])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_below_those_of_a_chain(kind: str, k: int) -> None:
    x, w = factors(kind, 97, 128, k) if k < 1000 else factors(kind, 33, 40, k)
    want = x.astype(np.longdouble) @ w.astype(np.longdouble).T
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    ours, theirs = (np.abs(found - want).astype(np.float64) / size for found in (computed(x, w), chain(x, w)))
    assert ours.max() <= theirs.max() and np.quantile(ours, 0.999) <= np.quantile(theirs, 0.999)


def test_infinities_nan_and_zeros() -> None:
    x, w = factors("normal", 33, 40, 64)
    x[1, 3], x[2, 5], x[3, 7], x[5] = np.inf, -np.inf, np.nan, 0.0
    w[4, 3], w[5, 3], w[6, 5], w[7, 9], w[8] = 1.0, 0.0, 2.0, np.inf, 2.0**-60
    x[8, 9], x[9, 9] = 1.0, 0.0
    with np.errstate(all="ignore"):
        want = chain(x, w)
    found = computed(x, w)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(found[np.isinf(want)], want[np.isinf(want)])
    assert not found[5][np.isfinite(want[5])].any()


def test_integers_are_exact() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-50, 50, (r, 128)).astype(np.float32) for r in (33, 34))
    np.testing.assert_array_equal(computed(x, w), x.astype(np.float64) @ w.astype(np.float64).T)


def test_short_sums_and_ieee_are_multiply_adds() -> None:
    x, w = factors("normal", 64, 64, 63)
    assert isinstance(product.stages(x, w, target="sm_90a").stages.schedules[0], Fma)
    x, w = factors("normal", 64, 64, 256)
    kept = tw.kernel(precision="ieee")(product.python)
    assert isinstance(kept.stages(x, w, target="sm_90a").stages.schedules[0], Fma)


@pytest.mark.parametrize("family", ["mma m=32 n=32 k=16 stages=2 warps_n=2 chunk=16 tf32_terms=4", "fma m=32 n=32 k=32 stages=2 warps_m=2"])
def test_sums_in_parts(family: str) -> None:
    """Results are few, and sums are cut into parts that are added up; the last one is shorter."""
    x, w = factors("normal", 33, 35, 301)
    kernel = tw.kernel(schedule=f"family={family} persistent=0 split_k=3")(product.python)
    done = kernel.stages(x, w, target="sm_90a").stages
    found = np.asarray(next(iter(run_program(done.thread, {"x": x, "w": w}).values())))
    np.testing.assert_allclose(found, x.astype(np.float64) @ w.astype(np.float64).T, rtol=1e-5, atol=1e-4)


def test_few_results_of_long_sums_are_cut() -> None:
    x, w = np.zeros((192, 100_000), np.float32), np.zeros((320, 100_000), np.float32)
    schedule = product.stages(x, w, target="sm_90a").stages.schedules[0]
    assert isinstance(schedule, Mma) and schedule.split_k > 4
    x, w = np.zeros((2048, 1536), np.float32), np.zeros((384, 1536), np.float32)
    whole = product.stages(x, w, target="sm_80").stages.schedules[0]
    assert isinstance(whole, Mma) and whole.split_k == 1
