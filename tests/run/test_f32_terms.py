"""Products of f32 as six products of bf16 terms (Hopper's warp-group instructions): no further off than a chain of multiply-adds, with its infinities, wherever
elements lie. Executed by the emulator; `test_f32_parts_gpu.py` has the real unit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from f32_reference import chain, factors, product
from tilewright.base.errors import UserError
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import Mma, Wgmma

TERMS = "family=wgmma m=128 n=64 k=64 stages=2 math_warpgroups=2 bf16_terms=6 chunk=128"
along = tw.kernel(schedule=TERMS)(product.python)


@tw.kernel(schedule=TERMS)
def across(x: tw.Array, w: tw.Array, bias: tw.Array) -> tw.Array:
    depth, m = x.shape
    n = w.shape[1]
    out = tw.empty((m, n), x.dtype)
    for i, j in tw.grid(m, n):
        total = 0.0
        for p in range(depth):
            total += x[p, i] * w[p, j]
        out[i, j] = max(total + bias[j], 0.0)
    return out


@tw.kernel(schedule=TERMS + " split_k=2")
def batched(x: tw.Array, w: tw.Array) -> tw.Array:
    count, m, depth = x.shape
    n = w.shape[1]
    out = tw.empty((count, m, n), x.dtype)
    for c, i, j in tw.grid(count, m, n):
        total = 0.0
        for p in range(depth):
            total += tw.exp(x[c, i, p]) * w[p, j]
        out[c, i, j] = total
    return out


def run(kernel: Any, **arrays: np.ndarray) -> np.ndarray:
    done = kernel.stages(*arrays.values(), target="sm_90a").stages
    assert any(isinstance(s, Wgmma) and s.bf16_terms == 6 for s in done.schedules)
    return np.asarray(next(iter(run_program(done.thread, arrays).values())))


@pytest.mark.parametrize(("kind", "k"), [("normal", 64), ("positive", 101), ("spread", 64), ("cancelling", 130), ("tiny", 64), ("huge", 64), ("positive", 301)])
def test_errors_are_below_those_of_a_chain(kind: str, k: int) -> None:
    x, w = factors(kind, 33, 70, k)
    want = x.astype(np.longdouble) @ w.astype(np.longdouble).T
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    ours, theirs = (np.abs(found - want).astype(np.float64) / size for found in (run(along, x=x, w=w), chain(x, w)))
    assert ours.max() <= theirs.max() and np.quantile(ours, 0.999) <= np.quantile(theirs, 0.999)


def test_infinities_nan_and_zeros() -> None:
    x, w = factors("normal", 33, 40, 64)
    x[1, 3], x[2, 5], x[3, 7], x[5] = np.inf, -np.inf, np.nan, 0.0
    x[4, 2] = np.array(0x7F800001, np.uint32).view(np.float32)  # a NaN whose upper half is that of an infinity
    w[4, 3], w[5, 3], w[6, 5], w[7, 9], w[8], w[9, 3] = 1.0, 0.0, 2.0, np.inf, 2.0**-60, 1 + 2.0**-9
    x[8, 9], x[9, 9] = 1.0, 0.0
    with np.errstate(all="ignore"):
        want = chain(x, w)
    found = run(along, x=x, w=w)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(found[np.isinf(want)], want[np.isinf(want)])
    assert not found[5][np.isfinite(want[5])].any()


def test_factors_across_the_sum_and_an_epilogue() -> None:
    rng = np.random.default_rng(1)
    x, w, bias = (rng.integers(-50, 50, s).astype(np.float32) for s in ((65, 131), (65, 67), (67,)))
    np.testing.assert_array_equal(run(across, x=x, w=w, bias=bias), np.maximum(x.T @ w + bias, 0))


@pytest.mark.parametrize("n", [33, 40], ids=["stored", "by_engine"])
def test_batches_computed_factors_and_sums_in_parts(n: int) -> None:
    """Short kernels before the product and after it do not become one launch, also where the copy engine writes what is read after it."""
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((2, 31, 100)).astype(np.float32), rng.standard_normal((100, n)).astype(np.float32)
    np.testing.assert_allclose(run(batched, x=x, w=w), np.exp(x.astype(np.float64)) @ w, rtol=1e-5, atol=1e-4)


def test_which_products_are_computed_so() -> None:
    def chosen(kernel: Any, *shapes: tuple[int, int]) -> Any:
        return kernel.stages(*(np.zeros(s, np.float32) for s in shapes), target="sm_90a").stages.schedules[-1]

    plain = tw.kernel(along.python)
    large = chosen(plain, (3001, 1501), (2003, 1501))
    assert isinstance(large, Wgmma) and large.bf16_terms == 6 and large.chunk
    assert isinstance(chosen(plain, (256, 128), (256, 128)), Mma), "writing terms takes longer than this product"
    assert not isinstance(chosen(tw.kernel(precision="ieee")(along.python), (3001, 1501), (2003, 1501)), Wgmma)
    assert isinstance(chosen(tw.kernel(precision="3xtf32")(along.python), (3001, 1501), (2003, 1501)), Mma)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("family=wgmma m=128 n=64 k=32 stages=2 math_warpgroups=2", "bf16_terms=6 is for products of f32 with the default precision"),
        ("family=wgmma m=128 n=64 k=64 stages=2 math_warpgroups=2 bf16_terms=5", "bf16_terms is 6"),
        ("family=wgmma m=128 n=64 k=64 stages=2 math_warpgroups=2 bf16_terms=6 chunk=100", "a chunk is whole steps of k=64"),
    ],
)  # fmt: skip
def test_refusals(schedule: str, text: str) -> None:
    x = np.zeros((300, 300), np.float32)
    with pytest.raises(UserError, match=text):
        tw.kernel(schedule=schedule)(along.python).stages(x, x, target="sm_90a")


def test_packs_of_two_bytes_that_run_across_the_sum_stay_so() -> None:
    @tw.kernel(schedule="family=wgmma m=64 n=128 k=64 stages=2")
    def columns(x: tw.Array, w: tw.Array) -> tw.Array:
        depth, m = x.shape
        n = w.shape[1]
        out = tw.empty((m, n), tw.f32)
        for i, j in tw.grid(m, n):
            total = tw.f32(0)
            for p in range(depth):
                total += x[p, i] * w[p, j]
            out[i, j] = total
        return out

    rng = np.random.default_rng(3)
    x, w = (rng.integers(-9, 9, s).astype(ml_dtypes.bfloat16) for s in ((77, 43), (77, 131)))
    done = columns.stages(x, w, target="sm_90a").stages
    packs = [a.type for a in done.thread.scratch]
    assert [str(t.shape[-1]) for t in packs] == ["8*ceildiv(m, 8)", "8*ceildiv(n, 8)"]
    found = np.asarray(next(iter(run_program(done.thread, {"x": x, "w": w}).values())))
    np.testing.assert_array_equal(found, x.astype(np.float32).T @ w.astype(np.float32))
