"""Attention of wide rows of f32 by products of terms (Hopper): rows that end where they stand have no tiles above the diagonal, and sums that end with their tile of rows. Against float64
in the emulator, whose scratch memory is poisoned: what no kernel wrote is in no result."""

from __future__ import annotations

import numpy as np
import pytest
from bench.families.products import attention

import tilewright as tw
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.ir.program import Program
from tilewright.passes.choose import matrix, wgmma_tiles
from tilewright.passes.schedules.matrix import Wgmma


@pytest.fixture
def by_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products, too, are those of terms, with tiles of 128 x 128 and whole sums."""
    monkeypatch.setattr(matrix, "warp_time", lambda *_: 1e9)
    monkeypatch.setattr(matrix, "in_parts", lambda schedule, *_: [schedule])
    monkeypatch.setattr(matrix, "TERM_TILES", tuple(s for s in wgmma_tiles.TERM_TILES if (s.m, s.n) == (128, 128)))


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    scores = q.astype(np.float64) @ np.swapaxes(k.astype(np.float64), 1, 2) / np.sqrt(q.shape[2])
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf) if causal else scores
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64))


def emulated(causal: bool, *arrays: np.ndarray) -> tuple[np.ndarray, Program]:
    done = attention(arrays[0].shape[2], causal).stages(*arrays, target="sm_90a").stages
    assert sum(isinstance(s, Wgmma) and s.bf16_terms == 6 for s in done.schedules) == 2
    return np.asarray(next(iter(run_program(done.thread, dict(zip("qkv", arrays, strict=True))).values()))), done.tile


@pytest.mark.usefixtures("by_terms")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(2, 131, 136), (1, 256, 132), (1, 70, 160)])
def test_results(shape: tuple[int, int, int], causal: bool) -> None:
    rng = np.random.default_rng(shape[1])
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    found, program = emulated(causal, q, k, v)
    np.testing.assert_allclose(found, exact(q, k, v, causal), rtol=0, atol=2e-6)
    # What computes weights writes their terms; f32 of them is nowhere.
    assert not any("weights" in array.name for array in program.scratch)
    assert sum(call.kernel.name.endswith(".terms") for call in program.calls) == 3


@pytest.mark.usefixtures("by_terms")
def test_what_a_tile_of_rows_does_not_see_is_not_read() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 500, 136)).astype(np.float32) for _ in range(3))
    k[0, 256:], v[0, 256:] = np.nan, np.inf
    found, program = emulated(True, q, k, v)
    want = exact(q[:, :256], k[:, :256], v[:, :256], True)
    np.testing.assert_allclose(found[:, :256], want, rtol=0, atol=2e-6)
    last = program.calls[-1].kernel
    assert any(op.attrs.get("skips") for op in walk(last.body))
    scores = next(call.kernel for call in program.calls if call.kernel.name.endswith(".scores"))
    assert str(scores.grid) != str(last.grid) and any(op.opcode == "sqrt" for op in walk(scores.body))


def test_triangular_products_of_f32_skip_steps() -> None:
    @tw.kernel
    def lower(a: tw.Array, b: tw.Array) -> tw.Array:
        n, m = a.shape[0], b.shape[1]
        out = tw.empty((n, m), a.dtype)
        for i, j in tw.grid(n, m):
            acc = tw.f32(0)
            for k in range(i + 1):
                acc += a[i, k] * b[k, j]
            out[i, j] = acc
        return out

    a = np.zeros((4000, 4000), np.float32)
    listed = [s for s in lower.stages(a, a, target="sm_90a").stages.schedules if isinstance(s, Wgmma)]
    assert listed and listed[0].bf16_terms and listed[0].skips
