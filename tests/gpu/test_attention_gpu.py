"""Attention in plain loops on a real GPU, against float64: the ways to write it, odd lengths, many tiles of different length, the same bits twice.

`TILEWRIGHT_MATRIX_DEVICE=emulator:thread` runs the same tests on another device, at few and small sizes.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from conftest import require
from kernels_attention import attend, scores
from tilewright.base.dtypes import bf16

DEVICE = os.environ.get("TILEWRIGHT_MATRIX_DEVICE", "cuda")
IS_GPU = DEVICE.startswith("cuda")
LENGTHS = (1, 7, 63, 65, 129, 777) if IS_GPU else (7, 65)


@pytest.fixture(autouse=True)
def _device() -> None:
    if IS_GPU:
        require("cuda")


def arrays(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(kernel: tw.Kernel[..., Any], *arguments: object) -> np.ndarray:
    return np.asarray(kernel(*arguments, device=DEVICE))


def check(found: np.ndarray, want: np.ndarray, error: float = 2e-3) -> None:
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=error, atol=error)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("columns", [64, 128])
def test_lengths(length: int, columns: int) -> None:
    q, k, v = arrays(length, (2, 4, length, columns), (2, 2, length, columns), (2, 2, length, columns))
    wide, long = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    limit = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
    for scale in (0.1, -0.2):
        check(run(text.plain, q, wide, long, scale), attend(scores(q, wide, scale), long))
    check(run(text.grouped_causal, q, k, v, 0.1), attend(scores(q, k, 0.1) + limit, v))
    check(run(text.ranged, q, wide, long), attend(scores(q, k) + limit, v))


@pytest.mark.parametrize("length", LENGTHS[-2:])
def test_masks_and_biases(length: int) -> None:
    q, k, v = arrays(3, (1, 2, length, 64), (1, 2, length, 64), (1, 2, length, 64), dtype=bf16.numpy)
    rng = np.random.default_rng(3)
    mask = (rng.random((length, length)) > 0.3).astype(np.uint8)
    mask[3] = 0
    want = attend(np.where(mask > 0, scores(q, k, 0.2), -np.inf), v)
    want[:, :, 3] = 0
    check(run(text.masked, q, k, v, mask, 0.2), want, 2e-2)
    bias = rng.standard_normal((2, length, length)).astype(np.float32) * 10
    bias[0, 2] = np.finfo(np.float32).min
    with np.errstate(over="ignore"):
        score = (scores(q, k).astype(np.float32) + bias).astype(np.float64)
    check(run(text.biased, q, k, v, bias), attend(score, v), 2e-2)


def test_many_tiles_of_different_length_give_the_same_bits_twice() -> None:
    heads, length = (64, 1500) if IS_GPU else (2, 130)
    q, k, v = arrays(4, (1, heads, length, 128), (1, heads, length, 128), (1, heads, length, 128))
    first, second = (run(text.grouped_causal, q, k, v, 0.1) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))
    limit = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
    for head in (0, heads - 1):
        one = slice(head, head + 1)
        check(first[:, one], attend(scores(q[:, one], k[:, one], 0.1) + limit, v[:, one]))


def test_no_keys() -> None:
    q, k, v = arrays(5, (1, 2, 5, 64), (1, 2, 0, 64), (1, 2, 0, 64))
    assert np.isnan(run(text.plain, q, k, v, 0.1)).all()
    assert (run(text.before, q, k, v) == 7.0).all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
@pytest.mark.parametrize("words", ["m=64 n=32 warps_m=4 stages=2 persistent=0", "m=128 n=16 warps_m=8 stages=3"])
def test_warp_instructions(length: int, columns: int, words: str) -> None:
    """Those of other GPUs run on every one that has asynchronous copies; blocks of one tile, and of several."""
    copy = "rs" if columns <= 128 else "cp_async"
    given = tw.kernel(schedule=f"family=attention_mma {words} k={columns} head_dim_v={columns} a_copy={copy}")
    q, k, v = arrays(length, (2, 4, length, columns), (2, 2, length, columns), (2, 2, length, columns))
    wide, long = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    limit = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
    for scale in (0.1, -0.2):
        check(run(given(text.plain.python), q, wide, long, scale), attend(scores(q, wide, scale), long))
    causal = given(text.grouped_causal.python)
    found = run(causal, q, k, v, 0.1)
    check(found, attend(scores(q, k, 0.1) + limit, v))
    assert np.array_equal(found, run(causal, q, k, v, 0.1), equal_nan=True)
