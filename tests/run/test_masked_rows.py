"""Rows that a mask leaves without any key are zero, whatever computes them: a CPU's strips and its plain loops, the emulator for Hopper,
for other GPUs and for those without matrix units, at each stage; rows with NaN among their scores stay NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention
import kernels_masked as text
import tilewright as tw
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import MatrixSchedule

LENGTHS = (1, 7, 63, 64, 65, 777, 1000)
FAMILIES = {"sm_90a": "attention", "sm_80": "attention_mma", "sm_75": ""}


def first(found: object) -> np.ndarray:
    return np.asarray(found[0] if isinstance(found, tuple | list) else found).astype(np.float64)


def emulated(kernel: tw.Kernel[..., Any], target: str, *arguments: np.ndarray) -> dict[str, list[np.ndarray]]:
    stages = kernel.stages(*arguments, target=target).stages
    families = [s.family for s in stages.schedules if isinstance(s, MatrixSchedule)]
    assert families == [FAMILIES[target]] if FAMILIES[target] else families in ([], ["fma", "fma"])  # in one kernel, or scores and weighted values apart
    inputs = kernel.bound(*arguments)
    return {
        stage: [np.asarray(x) for x in run_program(getattr(stages, stage), inputs).values()] for stage in ("loop", "tile", "thread")
    }


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kernel", text.MASKED, ids=lambda kernel: kernel.python.__name__)
def test_on_the_cpu(kernel: tw.Kernel[..., Any], length: int) -> None:
    given = text.problem(length, 16, np.float32)
    want = text.wanted(*given)
    assert not want[:, 0].any() and (length < 3 or np.isnan(want[0, 1]).all())
    np.testing.assert_allclose(first(kernel(*given, device="cpu")), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kernel", text.MASKED, ids=lambda kernel: kernel.python.__name__)
def test_plain_loops_on_the_cpu(kernel: tw.Kernel[..., Any]) -> None:
    """More columns than there is room for, and numbers that strips are not for."""
    for given in (text.problem(7, 1030, np.float32), text.problem(7, 8, np.float64)):
        np.testing.assert_allclose(first(kernel(*given, device="cpu")), text.wanted(*given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("kernel", text.MASKED, ids=lambda kernel: kernel.python.__name__)
@pytest.mark.parametrize("length", [1, 7, 65])
def test_emulated(kernel: tw.Kernel[..., Any], length: int, target: str) -> None:
    given = text.problem(length if FAMILIES[target] else min(length, 17), 64, np.float16)
    for stage, found in emulated(kernel, target, *given).items():
        np.testing.assert_allclose(found[0].astype(np.float64), text.wanted(*given), rtol=2e-3, atol=2e-3, err_msg=stage)


@pytest.mark.parametrize("target", ["cpu", *FAMILIES])
def test_nothing_before_the_first_row(target: str) -> None:
    q, k, v, _ = text.problem(20, 64, np.float16)
    want = text.wanted(q, k, v, np.tri(20, k=-1, dtype=bool))
    assert not want[:, 0].any()
    results = [[np.asarray(text.earlier(q, k, v, device="cpu"))]] if target == "cpu" else emulated(text.earlier, target, q, k, v).values()
    for (found,) in results:
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_the_logarithm_of_nothing(target: str) -> None:
    given = text.problem(33, 64, np.float16)
    results = [text.hidden(*given, device="cpu")] if target == "cpu" else list(emulated(text.hidden, target, *given).values())
    for _, logarithm in results:
        assert (np.asarray(logarithm)[:, ::3] == -np.inf).all() and np.isfinite(np.asarray(logarithm)[1, 1::3]).all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_factor_that_is_not_positive(scale: float) -> None:
    """The maximum of nothing is -inf, whatever scores are multiplied by."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, 9, 64)).astype(np.float16) for _ in range(3))
    mask = np.tri(9, k=-1).astype(np.uint8)
    score = np.where(mask > 0, kernels_attention.scores(q, k, scale), -np.inf)
    want = kernels_attention.attend(score, v)
    want[:, :, 0] = 0
    kernel = kernels_attention.masked
    stages = kernel.stages(q, k, v, mask, scale, target="sm_90a").stages
    for program in (stages.tile, stages.thread):
        (found,) = run_program(program, kernel.bound(q, k, v, mask, scale)).values()
        np.testing.assert_allclose(np.asarray(found).astype(np.float64), want, rtol=2e-3, atol=2e-3)


def test_text_without_a_mask_stays_as_it_is() -> None:
    """Scores that are -inf by themselves, and no keys at all: NaN, as the text has it."""
    q = np.full((1, 1, 3, 64), -1.0, np.float32)
    k = np.full((1, 1, 5, 64), np.inf, np.float32)
    assert np.isnan(kernels_attention.plain(q, k, np.ones_like(k), 0.5, device="cpu")).all()
    assert np.isnan(kernels_attention.plain(q, k[:, :, :0], k[:, :, :0], 0.5, device="cpu")).all()


def test_a_mask_over_whole_steps() -> None:
    """Where keys are whole steps of a tile no limit hides any: the mask still does."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 1, 9, 64)).astype(np.float16)
    k, v = (rng.standard_normal((1, 1, 384, 64)).astype(np.float16) for _ in range(2))
    mask = (rng.random((9, 384)) < 0.5).astype(np.uint8)
    want = kernels_attention.attend(np.where(mask > 0, kernels_attention.scores(q, k, 0.2), -np.inf), v)
    kernel = kernels_attention.masked
    stages = kernel.stages(q, k, v, mask, 0.2, target="sm_90a").stages
    (found,) = run_program(stages.thread, kernel.bound(q, k, v, mask, 0.2)).values()
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), want, rtol=2e-3, atol=2e-3)
