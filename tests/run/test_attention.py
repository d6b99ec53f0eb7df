"""Attention from plain loops, executed by the emulator at the tile and the thread stage for Hopper, against float64: the ways
to write it, lengths around the edges of tiles, schedules, and rows of -inf, NaN and huge numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from kernels_attention import attend, scores
from tilewright.base.dtypes import bf16
from tilewright.base.target import parse_target
from tilewright.execute.devices import emulator_device
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import MatrixSchedule

STAGES = ("tile", "thread")
SMALL = "family=attention m=64 n=32 k=64 stages=2 head_dim_v=64"
"""Many steps for few keys."""


def arrays(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(kernel: tw.Kernel[..., Any], *arguments: object, schedule: str = "") -> dict[str, list[np.ndarray]]:
    """The results at both stages of one compilation, which must be one of attention."""
    if schedule:
        kernel = tw.kernel(schedule=schedule)(kernel.python)
    stages = kernel.stages(*arguments, target="sm_90a").stages
    assert [s.family for s in stages.schedules if isinstance(s, MatrixSchedule)] == ["attention"]
    inputs = {n: np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for n, a in kernel.bound(*arguments).items()}
    return {stage: [np.asarray(x) for x in run_program(getattr(stages, stage), inputs).values()] for stage in STAGES}


def check(
    kernel: tw.Kernel[..., Any], arguments: tuple[object, ...], want: np.ndarray, schedule: str = "", error: float = 2e-3
) -> None:
    for stage, (found, *_) in run(kernel, *arguments, schedule=schedule).items():
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=error, atol=error, err_msg=f"at the {stage} stage")


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (7, 5), (63, 64), (64, 65), (65, 129), (129, 63)])
def test_lengths(rows: int, keys: int) -> None:
    q, k, v = arrays(rows, (1, 2, rows, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    check(text.plain, (q, k, v, 0.2), attend(scores(q, k, 0.2), v), SMALL)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.5])
@pytest.mark.parametrize("copy", ["tma", "rs"])
def test_any_scale(scale: float, copy: str) -> None:
    """Its sign is only known when the code runs."""
    q, k, v = arrays(1, (1, 1, 70, 64), (1, 1, 70, 64), (1, 1, 70, 64))
    check(text.plain, (q, k, v, scale), attend(scores(q, k, scale), v), f"{SMALL} a_copy={copy}")


@pytest.mark.parametrize(("terms", "columns"), [(128, 128), (64, 128), (40, 72), (192, 64), (256, 256)])
def test_terms_and_columns(terms: int, columns: int) -> None:
    q, k, v = arrays(2, (1, 1, 65, terms), (1, 1, 40, terms), (1, 1, 40, columns))
    check(text.plain, (q, k, v, 0.1), attend(scores(q, k, 0.1), v))


@pytest.mark.parametrize("k", [48, 64])
def test_terms_of_whole_blocks_may_be_asked_for(k: int) -> None:
    q, k_, v = arrays(2, (1, 1, 65, 40), (1, 1, 40, 40), (1, 1, 40, 40))
    check(text.plain, (q, k_, v, 0.1), attend(scores(q, k_, 0.1), v), f"family=attention m=64 n=32 k={k} head_dim_v=64 stages=2")


def test_bf16() -> None:
    q, k, v = arrays(3, (1, 1, 40, 64), (1, 1, 70, 64), (1, 1, 70, 64), dtype=bf16.numpy)
    check(text.plain, (q, k, v, 0.1), attend(scores(q, k, 0.1), v), error=1e-2)


@pytest.mark.parametrize("length", [1, 63, 130])
def test_causal(length: int) -> None:
    q, k, v = arrays(4, (1, 4, length, 64), (1, 2, length, 64), (1, 2, length, 64))
    limit = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
    check(text.grouped_causal, (q, k, v, 0.2), attend(scores(q, k, 0.2) + limit, v), f"{SMALL} persistent=0 raster=2")
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    check(text.ranged, (q, k, v), attend(scores(q, k) + limit, v))


@pytest.mark.parametrize("columns", [64, 128])
def test_heads_side_by_side_and_a_wide_result(columns: int) -> None:
    q, k, v = arrays(13, (2, 70, 3, 64), (2, 70, 3, 64), (2, 70, 3, columns))
    limit = np.where(np.tri(70, k=3, dtype=bool), 0.0, -np.inf)
    first, second, third = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    check(text.rows_first, (q, k, v), attend(scores(first, second) + limit, third).transpose(0, 2, 1, 3), error=1e-3)


def test_fewer_keys_than_the_limit() -> None:
    q, k, v = arrays(5, (1, 1, 100, 64), (1, 1, 37, 64), (1, 1, 37, 64))
    limit = np.where(np.tri(100, 37, dtype=bool), 0.0, -np.inf)
    check(text.grouped_causal, (q, k, v, 0.2), attend(scores(q, k, 0.2) + limit, v), SMALL)


def test_rows_without_keys_get_what_the_text_says() -> None:
    q, k, v = arrays(6, (1, 1, 70, 64), (1, 1, 70, 64), (1, 1, 70, 64))
    want = attend(scores(q, k, 1.0) + np.where(np.tri(70, k=-1, dtype=bool), 0.0, -np.inf), v)
    want[:, :, 0] = 7.0
    check(text.before, (q, k, v), want, SMALL)


def test_nothing_to_attend_to() -> None:
    q, k, v = arrays(14, (1, 2, 5, 64), (1, 2, 0, 64), (1, 2, 0, 64))
    check(text.plain, (q, k, v, 0.1), np.full((1, 2, 5, 64), np.nan))
    check(text.before, (q, k, v), np.full((1, 2, 5, 64), 7.0))
    check(text.plain, (q[:, :0], k[:, :0], v[:, :0], 0.1), np.zeros((1, 0, 5, 64)))


def test_a_mask() -> None:
    """A row that is masked altogether is zero."""
    q, k, v = arrays(7, (1, 2, 66, 64), (1, 2, 70, 64), (1, 2, 70, 64))
    mask = (np.random.default_rng(7).random((66, 70)) > 0.4).astype(np.uint8)
    mask[5] = 0
    mask[6, 32:] = 0
    want = attend(np.where(mask > 0, scores(q, k, 0.2), -np.inf), v)
    assert np.isnan(want[:, :, 5]).all() and np.isfinite(np.delete(want, 5, 2)).all()
    want[:, :, 5] = 0
    check(text.masked, (q, k, v, mask, 0.2), want, SMALL)


def test_a_bias_of_any_size() -> None:
    """The lowest number everywhere is no number more than another; infinity is none."""
    q, k, v = arrays(8, (1, 2, 66, 64), (1, 2, 70, 64), (1, 2, 70, 64))
    bias = np.random.default_rng(8).standard_normal((2, 66, 70)).astype(np.float32) * 50
    bias[0, 3] = np.finfo(np.float32).min
    bias[0, 4, :60] = np.finfo(np.float32).min
    bias[0, 5] = -np.inf
    bias[0, 6, 9] = np.inf
    bias[0, 7] = np.linspace(-3e4, 3e4, 70)
    bias[1, 8, 40:] = -np.inf
    with np.errstate(over="ignore"):
        score = (scores(q, k).astype(np.float32) + bias).astype(np.float64)
    want = attend(score, v)
    assert np.isnan(want[0, 0, 5:7]).all() and np.isfinite(want[0, 0, [3, 4, 7]]).all() and np.isfinite(want[0, 1]).all()
    check(text.biased, (q, k, v, bias), want, SMALL, error=4e-3)


def test_further_arrays_with_many_terms() -> None:
    q, k, v = arrays(15, (1, 1, 70, 128), (1, 1, 130, 128), (1, 1, 130, 128))
    (bias,) = arrays(16, (1, 70, 130))
    mask = (np.random.default_rng(16).random((70, 130)) > 0.4).astype(np.uint8)
    check(text.biased, (q, k, v, bias), attend(scores(q, k) + bias, v))
    check(text.masked, (q, k, v, mask, 0.2), attend(np.where(mask > 0, scores(q, k, 0.2), -np.inf), v))


def test_nan_stays_in_its_row() -> None:
    q, k, v = arrays(9, (1, 1, 70, 64), (1, 1, 70, 64), (1, 1, 70, 64))
    q[0, 0, 11, 3] = np.nan
    q[0, 0, 12] = 6e4
    want = attend(scores(q, k, 0.125), v)
    assert np.isnan(want[0, 0, 11]).all() and np.isfinite(want[0, 0, 12]).all()
    check(text.plain, (q, k, v, 0.125), want, SMALL)


def test_the_logarithm_of_the_sum() -> None:
    q, k, v = arrays(10, (1, 2, 66, 64), (1, 2, 100, 64), (1, 2, 100, 64))
    score = scores(q, k, 0.7)
    want = np.log(np.exp(score).sum(-1))
    for stage, (out, lse) in run(text.with_logarithm, q, k, v, 0.7, schedule=SMALL).items():
        np.testing.assert_allclose(out.astype(np.float64), attend(score, v), rtol=2e-3, atol=2e-3, err_msg=stage)
        np.testing.assert_allclose(lse, want, rtol=1e-5, atol=1e-5, err_msg=stage)


@pytest.mark.parametrize(
    "schedule",
    [
        "m=64 n=32", "m=64 n=32 dynamic=1", "m=128 n=32 math_warpgroups=2 dynamic=1", "m=128 n=32 math_warpgroups=2 a_copy=rs",
        "m=192 n=48 math_warpgroups=3 stages=3", "m=64 n=64 stages=3 blocks=3 a_copy=rs pdl=1", "m=256 n=64 math_warpgroups=4 stages=4 pdl=1",
    ],
)  # fmt: skip
def test_blocks_that_compute_many_tiles(schedule: str) -> None:
    """On a GPU that is too small, with rows of different length."""
    q, k, v = arrays(11, (1, 4, 200, 64), (1, 2, 200, 64), (1, 2, 200, 64))
    limit = np.where(np.tri(200, dtype=bool), 0.0, -np.inf)
    words = {"stages": "2", **dict(w.split("=") for w in schedule.split())}
    given = " ".join(f"{n}={x}" for n, x in words.items())
    kernel = tw.kernel(schedule=f"family=attention {given} k=64 head_dim_v=64 raster=3")(text.grouped_causal.python)
    small = replace(parse_target("sm_90a"), multiprocessors=3)
    for stage in STAGES:
        found = np.asarray(kernel.runner.run({"q": q, "k": k, "v": v, "scale": 0.2}, emulator_device(stage, small)))
        want = attend(scores(q, k, 0.2) + limit, v)
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=2e-3, atol=2e-3, err_msg=stage)


@pytest.mark.parametrize(("dtype", "precision"), [(np.float32, "ieee"), (np.float64, "auto")])
def test_what_the_matrix_units_do_not_take_is_computed_otherwise(dtype: type, precision: str) -> None:
    q, k, v = arrays(12, (1, 1, 9, 16), (1, 1, 9, 16), (1, 1, 9, 16), dtype=dtype)
    kernel = tw.kernel(precision=precision)(text.plain.python)
    stages = kernel.stages(q, k, v, 0.3, target="sm_90a").stages
    assert not any(isinstance(s, MatrixSchedule) for s in stages.schedules)
    device = emulator_device("thread", parse_target("sm_90a"))
    found = np.asarray(kernel.runner.run({"q": q, "k": k, "v": v, "scale": 0.3}, device))
    np.testing.assert_allclose(found, attend(scores(q, k, 0.3), v), rtol=1e-5, atol=1e-5)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    q = np.zeros((1, 1, 64, 64), np.float16)
    with pytest.raises(tw.UserError, match="does not fit plain"):
        tw.kernel(schedule="family=attention m=64 n=32 k=128 head_dim_v=64")(text.plain.python).stages(q, q, q, 1.0, target="sm_90a")
    with pytest.raises(tw.UserError, match="several blocks at once have one group"):
        tw.kernel(schedule="family=attention m=128 n=32 math_warpgroups=2 blocks=2 k=64 head_dim_v=64")(text.plain.python).stages(q, q, q, 1.0, target="sm_90a")
