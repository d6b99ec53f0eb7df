"""Attention in f32 by warp-group instructions, in terms of bf16: executed by the emulator at the tile and the thread stage, against float64. Errors stay below those of
sums in f32, and infinities give what the text gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from kernels_attention import attend, attend_in_chains, scores
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.attention import GpuAttention, WgmmaAttention

NEAR = 4e-6


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def schedule(depth: int, wide: int, n: int = 32, groups: int = 1, **others: int) -> str:
    words = " ".join(f"{name}={value}" for name, value in others.items())
    return f"family=attention m={64 * groups} n={n} k={-(-depth // 16) * 16} head_dim_v={-(-wide // 32) * 32} stages=2 math_warpgroups={groups} bf16_terms=6 {words}"


def run(kernel: tw.Kernel[..., Any], words: str, *arguments: object, stages: tuple[str, ...] = ("thread",)) -> list[np.ndarray]:
    """What each stage gives; it must be attention in terms."""
    kernel = tw.kernel(schedule=words)(kernel.python)
    done = kernel.stages(*arguments, target="sm_90a").stages
    assert any(isinstance(s, WgmmaAttention) and s.bf16_terms for s in done.schedules)
    inputs = {n: np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for n, a in kernel.bound(*arguments).items()}
    return [np.asarray(next(iter(run_program(getattr(done, stage), inputs).values()))) for stage in stages]


def check(found: list[np.ndarray], want: np.ndarray, near: float = NEAR) -> None:
    for own in found:
        np.testing.assert_allclose(own.astype(np.float64), want, rtol=near, atol=near)


@pytest.mark.parametrize(
    ("rows", "keys", "depth", "wide", "n"),
    [(1, 1, 64, 64, 64), (7, 5, 16, 32, 32), (33, 65, 20, 24, 32), (65, 129, 40, 40, 64), (31, 33, 80, 80, 48), (17, 18, 128, 128, 32), (31, 70, 32, 96, 16)],
)
def test_lengths_and_widths(rows: int, keys: int, depth: int, wide: int, n: int) -> None:
    q, k, v = arrays(rows, (1, 2, rows, depth), (1, 2, keys, depth), (1, 2, keys, wide))
    check(run(text.plain, schedule(depth, wide, n), q, k, v, 0.2, stages=("loop", "tile", "thread")), attend(scores(q, k, 0.2), v))


@pytest.mark.parametrize("others", [{}, {"dynamic": 1, "raster": 2}])
def test_causal_with_grouped_queries(others: dict[str, int]) -> None:
    q, k, v = arrays(4, (1, 4, 131, 64), (1, 2, 131, 64), (1, 2, 131, 64))
    want = attend(scores(q, k, -0.2) + np.where(np.tri(131, dtype=bool), 0.0, -np.inf), v)
    check(run(text.grouped_causal, schedule(64, 64, 32, 2, **others), q, k, v, -0.2), want)


def test_masks_and_biases() -> None:
    q, k, v = arrays(5, (1, 2, 35, 32), (1, 2, 35, 32), (1, 2, 35, 32))
    mask = (np.random.default_rng(1).random((35, 35)) > 0.3).astype(np.uint8)
    check(run(text.masked, schedule(32, 32), q, k, v, mask, 0.3), attend(scores(q, k, 0.3) + np.where(mask > 0, 0.0, -np.inf), v))
    (bias,) = arrays(6, (2, 35, 35))
    check(run(text.biased, schedule(32, 32), q, k, v, bias), attend(scores(q, k) + bias, v))


@pytest.mark.parametrize("scale", [1e-17, 1.0, 1e17])
def test_errors_are_below_those_of_a_chain(scale: float) -> None:
    """Scores and weighted values as loops in f32 have them, against f64."""
    q, k, v = arrays(8, (1, 2, 33, 64), (1, 2, 97, 64), (1, 2, 97, 64))
    q, v = q / np.float32(scale), v * np.float32(scale)
    (found,) = run(text.plain, schedule(64, 64), q, k, v, 0.3 * scale)
    want = attend(scores(q, k, 0.3 * scale), v)
    ours, theirs = (np.abs(x.astype(np.float64) - want) for x in (found, attend_in_chains(q, k, v, 0.3 * scale)))
    assert ours.max() <= theirs.max() and np.quantile(ours, 0.999) <= np.quantile(theirs, 0.999)


def test_infinities_are_those_of_the_text() -> None:
    """A value that is infinite is, where its weight is more than zero, be that one or a whole number; a score of -inf has no weight; NaN stays in its row."""
    q, k, v = arrays(9, (1, 1, 20, 16), (1, 1, 24, 16), (1, 1, 24, 16))
    k[0, 0, :, 0], q[0, 0, :, 0] = 1.0, 0.5
    k[0, 0, 3, 0] = -np.inf  # scores of the fourth key
    k[0, 0, 5] = 2.0 * q[0, 0, 4]  # whose own weight is the largest of some row: one
    v[0, 0, 5, 2], v[0, 0, 6, 3] = np.inf, -np.inf
    q[0, 0, 7, 1] = np.nan
    want = attend(scores(q, k, 0.1), v)
    (found,) = run(text.plain, schedule(16, 16), q, k, v, 0.1)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(want))
    np.testing.assert_allclose(found[np.isfinite(want)], want[np.isfinite(want)], rtol=NEAR, atol=NEAR)


@pytest.mark.parametrize(("heads", "rows", "width", "wanted"), [(48, 4096, 64, 6), (57, 2755, 128, 6), (1, 128, 64, 0), (2, 64, 128, 0)])
def test_large_problems_are_multiplied_in_terms(heads: int, rows: int, width: int, wanted: int) -> None:
    """Of small ones writing terms would take longer than it gains."""
    q = np.empty((1, heads, rows, width), np.float32)
    (chosen,) = (s for s in text.plain.stages(q, q, q, 0.2, target="sm_90a").stages.schedules if isinstance(s, GpuAttention))
    assert getattr(chosen, "bf16_terms", 0) == wanted
