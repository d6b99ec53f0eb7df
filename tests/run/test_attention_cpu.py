"""Attention from plain loops on a CPU, run as machine code and by the emulator, against float64: the ways to write it, lengths around
the edges of strips and panels, dtypes, and rows of -inf, NaN and huge numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_attention as text
import tilewright as tw
from kernels_attention import attend, scores
from tilewright.base.dtypes import bf16
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.matrix import MatrixSchedule

LENGTHS = (1, 7, 16, 17, 33, 63, 64, 65, 129, 193, 777)


def arrays(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(kernel: tw.Kernel[..., Any], arguments: tuple[object, ...], want: np.ndarray, error: float = 2e-5) -> None:
    found = kernel(*arguments)
    assert kernel.runner.last is not None and "family=cpu_attention" in kernel.runner.last.schedule
    first = np.asarray(found[0] if isinstance(found, tuple) else found)
    np.testing.assert_allclose(first.astype(np.float64), want, rtol=error, atol=error)


def limit(rows: int, keys: int, k: int = 0) -> np.ndarray:
    return np.where(np.tri(rows, keys, k=k, dtype=bool), 0.0, -np.inf)


@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("keys", [1, 47, 48, 49, 125])
def test_lengths(rows: int, keys: int) -> None:
    q, k, v = arrays(rows, (1, 2, rows, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    check(text.plain, (q, k, v, 0.2), attend(scores(q, k, 0.2), v))


@pytest.mark.parametrize(("terms", "columns"), [(1, 1), (3, 5), (16, 16), (40, 72), (64, 67), (128, 64), (300, 257)])
def test_terms_and_columns(terms: int, columns: int) -> None:
    q, k, v = arrays(2, (2, 3, 70, terms), (2, 3, 75, terms), (2, 3, 75, columns))
    check(text.plain, (q, k, v, 0.1), attend(scores(q, k, 0.1), v))


@pytest.mark.parametrize(("terms", "columns"), [(1030, 4), (4, 1030)])
def test_longer_rows_than_there_is_room_for(terms: int, columns: int) -> None:
    q, k, v = arrays(3, (1, 1, 5, terms), (1, 1, 9, terms), (1, 1, 9, columns))
    check(text.plain, (q, k, v, 0.1), attend(scores(q, k, 0.1), v))
    check(text.ranged, (q[:, :, :5], k, v), attend(scores(q, k) + limit(5, 9), v))


@pytest.mark.parametrize(("dtype", "error"), [(np.float16, 1e-3), (bf16.numpy, 8e-3)])
def test_narrow_types_are_widened(dtype: Any, error: float) -> None:
    q, k, v = arrays(4, (1, 2, 70, 64), (1, 2, 90, 64), (1, 2, 90, 64), dtype=dtype)
    check(text.plain, (q, k, v, 0.2), attend(scores(q, k, 0.2), v), error)


@pytest.mark.parametrize("length", LENGTHS)
def test_causal(length: int) -> None:
    q, k, v = arrays(5, (1, 4, length, 32), (1, 2, length, 32), (1, 2, length, 32))
    check(text.grouped_causal, (q, k, v, 0.2), attend(scores(q, k, 0.2) + limit(length, length), v))
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    check(text.ranged, (q, k, v), attend(scores(q, k) + limit(length, length), v))


@pytest.mark.parametrize(("rows", "keys"), [(200, 37), (37, 200)])
def test_a_limit_and_other_numbers_of_keys(rows: int, keys: int) -> None:
    q, k, v = arrays(6, (1, 1, rows, 64), (1, 1, keys, 64), (1, 1, keys, 64))
    check(text.grouped_causal, (q, k, v, 0.2), attend(scores(q, k, 0.2) + limit(rows, keys), v))


def test_heads_side_by_side() -> None:
    q, k, v = arrays(7, (2, 130, 3, 64), (2, 130, 3, 64), (2, 130, 3, 48))
    first, second, third = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    check(text.rows_first, (q, k, v), attend(scores(first, second) + limit(130, 130, 3), third).transpose(0, 2, 1, 3))


def test_rows_without_keys_get_what_the_text_says() -> None:
    q, k, v = arrays(8, (1, 1, 70, 64), (1, 1, 70, 64), (1, 1, 70, 64))
    want = attend(scores(q, k, 1.0) + limit(70, 70, -1), v)
    want[:, :, 0] = 7.0
    check(text.before, (q, k, v), want)


def test_nothing_to_attend_to() -> None:
    q, k, v = arrays(9, (1, 2, 5, 64), (1, 2, 0, 64), (1, 2, 0, 64))
    check(text.plain, (q, k, v, 0.1), np.full((1, 2, 5, 64), np.nan))
    check(text.before, (q, k, v), np.full((1, 2, 5, 64), 7.0))
    check(text.plain, (q[:, :0], k[:, :0], v[:, :0], 0.1), np.zeros((1, 0, 5, 64)))
    check(text.plain, (q[:, :, :0], k, v, 0.1), np.zeros((1, 2, 0, 64)))


def test_a_mask() -> None:
    """A row that is masked altogether is zero."""
    q, k, v = arrays(10, (1, 2, 66, 64), (1, 2, 70, 64), (1, 2, 70, 64))
    mask = (np.random.default_rng(7).random((66, 70)) > 0.4).astype(np.uint8)
    mask[5] = 0
    mask[6, 32:] = 0
    mask[7, :65] = 0
    want = attend(np.where(mask > 0, scores(q, k, 0.2), -np.inf), v)
    assert np.isnan(want[:, :, 5]).all() and np.isfinite(np.delete(want, 5, 2)).all()
    want[:, :, 5] = 0
    check(text.masked, (q, k, v, mask, 0.2), want)


def test_a_bias_of_any_size() -> None:
    """The lowest number everywhere is no number more than another; infinity is none."""
    q, k, v = arrays(11, (1, 2, 66, 64), (1, 2, 70, 64), (1, 2, 70, 64))
    bias = np.random.default_rng(8).standard_normal((2, 66, 70)).astype(np.float32) * 50
    bias[0, 3] = np.finfo(np.float32).min
    bias[0, 4, :65] = np.finfo(np.float32).min
    bias[0, 5] = -np.inf
    bias[0, 6, 9] = np.inf
    bias[0, 7] = np.linspace(-3e4, 3e4, 70)
    bias[1, 8, 40:] = -np.inf
    with np.errstate(over="ignore"):
        score = (scores(q, k).astype(np.float32) + bias).astype(np.float64)
    want = attend(score, v)
    assert np.isnan(want[0, 0, 5:7]).all() and np.isfinite(want[0, 0, [3, 4, 7]]).all() and np.isfinite(want[0, 1]).all()
    check(text.biased, (q, k, v, bias), want, error=1e-4)


def test_nan_stays_in_its_row() -> None:
    q, k, v = arrays(12, (1, 1, 70, 64), (1, 1, 70, 64), (1, 1, 70, 64))
    q[0, 0, 11, 3] = np.nan
    q[0, 0, 12] = 6e4
    want = attend(scores(q, k, 0.125), v)
    assert np.isnan(want[0, 0, 11]).all() and np.isfinite(want[0, 0, 12]).all()
    check(text.plain, (q, k, v, 0.125), want)


def test_the_logarithm_of_the_sum() -> None:
    q, k, v = arrays(13, (1, 2, 66, 64), (1, 2, 100, 64), (1, 2, 100, 64))
    score = scores(q, k, 0.7)
    check(text.with_logarithm, (q, k, v, 0.7), attend(score, v))
    lse = np.asarray(text.with_logarithm(q, k, v, 0.7)[1])
    np.testing.assert_allclose(lse, np.log(np.exp(score).sum(-1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2", "aarch64-neon"])
@pytest.mark.parametrize("rows", [3, 41])
def test_every_stage_and_width_in_the_emulator(target: str, rows: int) -> None:
    q, k, v = arrays(14, (1, 2, rows, 12), (1, 1, rows, 12), (1, 1, rows, 21))
    stages = text.grouped_causal.stages(q, k, v, 0.2, target=target).stages
    assert [s.family for s in stages.schedules if isinstance(s, MatrixSchedule)] == ["cpu_attention"]
    want = attend(scores(q, k, 0.2) + limit(rows, rows), v)
    for stage in ("tile", "thread"):
        (found,) = run_program(getattr(stages, stage), {"q": q, "k": k, "v": v, "scale": 0.2}).values()
        np.testing.assert_allclose(np.asarray(found), want, rtol=2e-5, atol=2e-5, err_msg=f"at the {stage} stage")


def test_schedules() -> None:
    q, k, v = arrays(15, (1, 2, 150, 20), (1, 2, 90, 20), (1, 2, 90, 20))
    want = attend(scores(q, k, 0.2), v)
    (lanes,) = {s.nr // s.vectors for s in text.plain.stages(q, k, v, 0.2).stages.schedules if isinstance(s, MatrixSchedule)}
    for mr, vectors, strips, n in ((4, 1, 1, 8), (3, 2, 3, 48), (6, 2, 1, 12)):
        nr = vectors * lanes
        words = f"family=cpu_attention m={strips * nr} n={n} k=24 mr={mr} nr={nr} vectors={vectors}"
        check(tw.kernel(schedule=words)(text.plain.python), (q, k, v, 0.2), want)
    with pytest.raises(tw.UserError, match="does not fit plain"):
        tw.kernel(schedule=f"family=cpu_attention m={lanes} n=9 k=24 mr=3 nr={lanes} vectors=1")(text.plain.python)(q, k, v, 0.2)
