"""Texts over tiles on the CPU and in the emulator, at the tile and the thread stage for Hopper, against float64: lengths around the
edges of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_tiled as text
import tilewright as tw
from kernels_attention import attend, scores
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import MatrixSchedule


def arrays(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def on_hopper(kernel: tw.Kernel[..., Any], family: str, *arguments: np.ndarray | float) -> list[list[np.ndarray]]:
    """The results at each stage of one compilation, which must be of a family."""
    stages = kernel.stages(*arguments, target="sm_90a").stages
    assert [s.family for s in stages.schedules if isinstance(s, MatrixSchedule)] == [family]
    programs = (stages.loop, stages.tile, stages.thread)
    return [[np.asarray(x) for x in run_program(p, kernel.bound(*arguments)).values()] for p in programs]


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (47, 33), (48, 32), (49, 65), (97, 31)])
def test_flash(rows: int, keys: int) -> None:
    q, k, v = arrays(rows, (1, 2, rows, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    wanted = attend(scores(q, k, 0.2), v)
    for (found,) in on_hopper(text.flash, "attention", q, k, v, 0.2):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(text.flash(q, k, v, 0.2, device="cpu").astype(np.float64), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("length", [16, 65])
def test_masked_flash(length: int) -> None:
    """Rows whose first blocks have no score are as good as others."""
    q, k, v = arrays(length, (length, 64), (length, 64), (length, 64))
    mask = np.random.default_rng(1).random((length, length)) < 0.5
    mask[:, -1] = True
    mask[::3, :-1] = False
    q4, k4, v4 = (x[None, None] for x in (q, k, v))
    wanted = attend(scores(q4, k4, 0.125) + np.where(mask, 0.0, -np.inf), v4)[0, 0]
    for (found,) in on_hopper(text.masked_flash, "attention", q, k, v, mask):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)


def test_flash_with_logarithm() -> None:
    q, k, v = arrays(5, (65, 64), (70, 64), (70, 64))
    s = q.astype(np.float64) @ k.T.astype(np.float64) * 0.125
    top = s.max(-1, keepdims=True)
    wanted = attend(s[None, None], v[None, None])[0, 0], (top + np.log(np.exp(s - top).sum(-1, keepdims=True)))[:, 0]
    for found in on_hopper(text.flash_with_logarithm, "attention", q, k, v):
        for one, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one.astype(np.float64), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(65, 48, 33), (128, 104, 64)])
def test_tiled_matmul(rows: int, columns: int, depth: int) -> None:
    a, b = arrays(rows, (rows, depth), (depth, columns), dtype=np.float32)
    wanted = a.astype(np.float64) @ b
    for device in ("cpu", "emulator:loop", "emulator:tile"):
        np.testing.assert_allclose(text.tiled_matmul(a, b, device=device), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (65, 65), (70, 40)])
def test_causal_rows(rows: int, keys: int) -> None:
    """Rows that end where they are, or where the keys do."""
    q, k, v = arrays(6, (rows, 64), (keys, 64), (keys, 64))
    limit = np.where(np.arange(keys) <= np.arange(rows)[:, None], 0.0, -np.inf)
    q4, k4, v4 = (x[None, None] for x in (q, k, v))
    wanted = attend(scores(q4, k4) + limit, v4)[0, 0]
    for (found,) in on_hopper(text.causal_rows, "attention", q, k, v):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("length", [1, 64, 65])
def test_causal_flash(length: int) -> None:
    """Rows see the keys up to their own that the mask shows them; some none."""
    q, k, v = arrays(length, (length, 64), (length, 64), (length, 64))
    mask = np.tri(length, dtype=bool) & (np.random.default_rng(2).random((length, length)) < 0.6)
    mask[::5] = False
    shown = mask.any(-1)
    wanted = np.zeros((length, 64))
    score = scores(q[None, None], k[None, None], 0.125)[0, 0] + np.where(mask, 0.0, -np.inf)
    wanted[shown] = attend(score[None, None, shown], v[None, None])[0, 0]
    for (found,) in on_hopper(text.causal_flash, "attention", q, k, v, mask):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(text.causal_flash(q, k, v, mask, device="cpu").astype(np.float64), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (47, 100), (48, 48), (97, 49), (100, 100)])
@pytest.mark.parametrize("kernel", [text.block_causal_flash, text.block_causal_loops], ids=["tiles", "loops"])
def test_block_causal_flash(kernel: tw.Kernel[..., Any], rows: int, keys: int) -> None:
    q, k, v = arrays(rows, (2, rows, 64), (2, keys, 64), (2, keys, 64))
    limit = np.where(np.arange(keys)[None] // 48 <= np.arange(rows)[:, None] // 48, 0.0, -np.inf)
    wanted = attend(scores(q[:, None], k[:, None], 0.125) + limit, v[:, None])[:, 0]
    for (found,) in on_hopper(kernel, "attention", q, k, v):
        np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(kernel(q, k, v, device="cpu").astype(np.float64), wanted, rtol=2e-3, atol=2e-3)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    np.testing.assert_allclose(kernel(*wide, device="cpu").astype(np.float64), wanted, rtol=2e-5, atol=2e-5)


def test_blocks_that_do_not_fit_each_other_stay_as_written() -> None:
    """Keys in blocks of 24 up to the end of a block of 64 queries: some see keys beyond it, as the text has it."""

    @tw.kernel
    def ragged(q, k, v):
        length, width = q.shape
        out = tw.empty((length, width), q.dtype)
        for block in tw.grid(range(0, length, 64)):
            m = -tw.inf
            total = 0.0
            o = tw.zeros((64, width))
            for kv in range(0, block + 64, 24):
                s = q[block : block + 64] @ tw.transpose(k[kv : kv + 24])
                m_new = tw.maximum(m, tw.row_max(s))
                total = tw.exp(m - m_new) * total + tw.row_sum(tw.exp(s - m_new))
                o = tw.exp(m - m_new) * o + tw.exp(s - m_new) @ v[kv : kv + 24]
                m = m_new
            out[block : block + 64] = o / total
        return out

    q, k, v = (x * 0.3 for x in arrays(9, (150, 16), (150, 16), (150, 16), dtype=np.float32))
    ends = np.minimum(-(-(np.arange(150) // 64 * 64 + 64) // 24) * 24, 150)
    score = scores(q[None, None], k[None, None], 1.0) + np.where(np.arange(150)[None] < ends[:, None], 0.0, -np.inf)
    np.testing.assert_allclose(ragged(q, k, v, device="cpu"), attend(score, v[None, None])[0, 0], rtol=1e-5, atol=1e-5)
