"""Attention in f32 by matrix instructions, in parts of tf32: executed by the emulator at the tile and the thread stage, against float64. Errors stay below
those of sums in f32, infinities give what the text gives, and `precision="ieee"` keeps multiply-adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from kernels_attention import attend, attend_in_chains, scores
from tilewright.graphs.kernels.attention import attention_lengths
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.attention import MmaAttention

NEAR = 4e-6
SMALL = "family=attention_mma m=32 n=16 k=64 stages=2 warps_m=2 persistent=0 a_copy={} head_dim_v=64 tf32_terms={}"


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def run(kernel: tw.Kernel[..., Any], *arguments: object, target: str = "sm_90a", stages: tuple[str, ...] = ("tile", "thread"), **options: str) -> list[np.ndarray]:
    """What each stage gives; it must be one of attention with matrix instructions."""
    kernel = tw.kernel(**options)(kernel.python) if options else kernel
    done = kernel.stages(*arguments, target=target).stages
    assert any(isinstance(s, MmaAttention) and s.tf32_terms for s in done.schedules)
    inputs = {n: np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for n, a in kernel.bound(*arguments).items()}
    return [np.asarray(next(iter(run_program(getattr(done, stage), inputs).values()))) for stage in stages]


def check(found: list[np.ndarray], want: np.ndarray, near: float = NEAR) -> None:
    for own in found:
        np.testing.assert_allclose(own.astype(np.float64), want, rtol=near, atol=near)


@pytest.mark.parametrize(
    ("rows", "keys", "depth", "wide"), [(1, 1, 64, 64), (7, 5, 16, 32), (33, 65, 20, 24), (31, 33, 128, 64), (17, 18, 64, 128), (65, 129, 32, 32)]
)
def test_lengths_and_widths(rows: int, keys: int, depth: int, wide: int) -> None:
    q, k, v = arrays(rows, (1, 2, rows, depth), (1, 2, keys, depth), (1, 2, keys, wide))
    check(run(text.plain, q, k, v, 0.2), attend(scores(q, k, 0.2), v))


@pytest.mark.parametrize("copy", ["rs", "cp_async"])
@pytest.mark.parametrize(("terms", "near"), [(4, NEAR), (3, NEAR), (1, 4e-3)])
def test_schedules(copy: str, terms: int, near: float) -> None:
    q, k, v = arrays(3, (1, 2, 37, 64), (1, 2, 41, 64), (1, 2, 41, 64))
    check(run(text.plain, q, k, v, -0.2, schedule=SMALL.format(copy, terms)), attend(scores(q, k, -0.2), v), near)


def test_causal_with_grouped_queries() -> None:
    q, k, v = arrays(4, (1, 4, 65, 64), (1, 2, 65, 64), (1, 2, 65, 64))
    check(run(text.grouped_causal, q, k, v, 0.2), attend(scores(q, k, 0.2) + np.where(np.tri(65, dtype=bool), 0.0, -np.inf), v))


def test_masks_and_biases() -> None:
    q, k, v = arrays(5, (1, 2, 35, 32), (1, 2, 35, 32), (1, 2, 35, 32))
    mask = (np.random.default_rng(1).random((35, 35)) > 0.3).astype(np.uint8)
    check(run(text.masked, q, k, v, mask, 0.3, stages=("thread",)), attend(scores(q, k, 0.3) + np.where(mask > 0, 0.0, -np.inf), v))
    (bias,) = arrays(6, (2, 35, 35))
    check(run(text.biased, q, k, v, bias, stages=("thread",)), attend(scores(q, k) + bias, v))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_lengths_of_sentences(dtype: type) -> None:
    q, k, v = (x.astype(dtype) for x in arrays(7, (3, 40, 2, 1, 32), (3, 40, 2, 32), (3, 40, 2, 32)))
    lengths = np.array([40, 17, 0], np.int32)
    done = attention_lengths.stages(q, k, v, lengths, 0.2, target="sm_90a").stages
    assert isinstance(done.schedules[0], MmaAttention)
    found = np.asarray(next(iter(run_program(done.thread, dict(attention_lengths.bound(q, k, v, lengths, 0.2))).values())))
    for sentence, length in enumerate(lengths[:2]):
        want = attend(scores(q[None, sentence, :, :, 0].swapaxes(1, 2), k[None, sentence, :length].swapaxes(1, 2), 0.2), v[None, sentence, :length].swapaxes(1, 2))
        np.testing.assert_allclose(found[sentence, :, :, 0].swapaxes(0, 1), want[0], rtol=4e-6 if dtype is np.float32 else 3e-3, atol=4e-6 if dtype is np.float32 else 3e-3)
    assert not found[2].any(), "a sentence of nothing"


@pytest.mark.parametrize("scale", [1e-17, 1.0, 1e17])
def test_errors_are_below_those_of_a_chain(scale: float) -> None:
    """Scores and weighted values as loops in f32 have them, against f64."""
    q, k, v = arrays(8, (1, 2, 33, 64), (1, 2, 97, 64), (1, 2, 97, 64))
    q, v = q / np.float32(scale), v * np.float32(scale)
    (found,) = run(text.plain, q, k, v, 0.3 * scale, stages=("thread",))
    want = attend(scores(q, k, 0.3 * scale), v)
    ours, theirs = (np.abs(x.astype(np.float64) - want) for x in (found, attend_in_chains(q, k, v, 0.3 * scale)))
    assert ours.max() <= theirs.max() and np.quantile(ours, 0.999) <= np.quantile(theirs, 0.999)


def test_infinities_are_those_of_the_text() -> None:
    """A value that is infinite is, where its weight is more than zero; a score of -inf has no weight; NaN stays in its row."""
    q, k, v = arrays(9, (1, 1, 20, 16), (1, 1, 24, 16), (1, 1, 24, 16))
    k[0, 0, :, 0], q[0, 0, :, 0] = 1.0, 0.5
    k[0, 0, 3, 0] = -np.inf  # scores of the fourth key
    v[0, 0, 5, 2], v[0, 0, 6, 3] = np.inf, -np.inf
    q[0, 0, 7, 1] = np.nan
    want = attend(scores(q, k, 0.1), v)
    (found,) = run(text.plain, q, k, v, 0.1, stages=("thread",))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(want))
    np.testing.assert_allclose(found[np.isfinite(want)], want[np.isfinite(want)], rtol=NEAR, atol=NEAR)


def test_ieee_keeps_multiply_adds() -> None:
    q, k, v = arrays(1, (1, 1, 20, 64), (1, 1, 20, 64), (1, 1, 20, 64))
    kernel = tw.kernel(precision="ieee")(text.plain.python)
    code = kernel.compile(q, k, v, 0.1, target="sm_90a").code.decode()
    assert "mma.sync" not in code and "fma.rn.f32" in code
