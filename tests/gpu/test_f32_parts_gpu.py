"""Products and attention of f32 in parts of tf32 on a real GPU: no further off than chains of multiply-adds, with their infinities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from conftest import require
from f32_reference import chain, factors, product
from kernels_attention import attend, scores
from tilewright.graphs.kernels.attention import attention_lengths


@pytest.fixture(autouse=True)
def _device() -> None:
    require("cuda")


def run(kernel: tw.Kernel[..., Any], *arguments: object) -> np.ndarray:
    return np.asarray(kernel(*arguments, device="cuda"))


@pytest.mark.parametrize("k", [64, 384, 4096])
@pytest.mark.parametrize("kind", ["normal", "positive", "tiny", "huge"])
def test_errors_are_below_those_of_a_chain(kind: str, k: int) -> None:
    x, w = factors(kind, 96, 128, k)
    want, size = x.astype(np.float64) @ w.astype(np.float64).T, np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    ours, theirs = (np.abs(found - want) / size for found in (run(product, x, w), chain(x, w)))
    assert ours.max() <= theirs.max() and np.quantile(ours, 0.999) <= np.quantile(theirs, 0.999)


def test_infinities_nan_zeros_and_integers() -> None:
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((r, 128)).astype(np.float32) for r in (64, 64))
    x[1, 3], x[2, 5], x[3, 7], x[5] = np.inf, -np.inf, np.nan, 0.0
    w[4, 3], w[5, 3], w[6, 5], w[7, 9], w[8] = 1.0, 0.0, 2.0, np.inf, 2.0**-60
    with np.errstate(all="ignore"):
        want = chain(x, w)
    found = run(product, x, w)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(found[np.isinf(want)], want[np.isinf(want)])
    assert not found[5][np.isfinite(want[5])].any()
    x, w = (rng.integers(-50, 50, (64, 512)).astype(np.float32) for _ in range(2))
    np.testing.assert_array_equal(run(product, x, w), x.astype(np.float64) @ w.astype(np.float64).T)


@pytest.mark.parametrize(("rows", "keys", "depth", "wide"), [(1, 1, 64, 64), (65, 63, 32, 32), (77, 130, 20, 24), (33, 257, 128, 64), (31, 70, 256, 256)])
def test_attention(rows: int, keys: int, depth: int, wide: int) -> None:
    rng = np.random.default_rng(rows)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, rows, depth), (2, 3, keys, depth), (2, 3, keys, wide)))
    np.testing.assert_allclose(run(text.plain, q, k, v, 0.2), attend(scores(q, k, 0.2), v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "depth"), [(129, 64), (67, 128), (65, 256)])
def test_causal_attention(length: int, depth: int) -> None:
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((1, h, length, depth)).astype(np.float32) for h in (4, 2, 2))
    want = attend(scores(q, k, 0.2) + np.where(np.tri(length, dtype=bool), 0.0, -np.inf), v)
    np.testing.assert_allclose(run(text.grouped_causal, q, k, v, 0.2), want, rtol=1e-5, atol=1e-5)


def test_lengths_of_sentences() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((3, 140, 2, 1, 32), (3, 140, 2, 32), (3, 140, 2, 32)))
    lengths = np.array([140, 17, 0], np.int32)
    found = run(attention_lengths, q, k, v, lengths, 0.2)
    for sentence, length in enumerate(lengths[:2]):
        want = attend(scores(q[None, sentence, :, :, 0].swapaxes(1, 2), k[None, sentence, :length].swapaxes(1, 2), 0.2), v[None, sentence, :length].swapaxes(1, 2))
        np.testing.assert_allclose(found[sentence, :, :, 0].swapaxes(0, 1), want[0], rtol=1e-5, atol=1e-5)
    assert not found[2].any(), "a sentence of nothing"
