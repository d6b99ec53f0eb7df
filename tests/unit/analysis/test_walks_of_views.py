"""Which index the lanes of a GPU walk: of views the one whose elements lie near each other, whatever arrays with fewer axes have."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import parse_target
from tilewright.compile.driver import PreparedKernel
from tilewright.ir.emulator import run_program
from tilewright.passes.schedules.loops import Schedule

TARGET = parse_target("sm_90a")


@tw.kernel
def total_of(x: tw.Array) -> float:
    return tw.sum(x)


@tw.kernel
def row_totals(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        total = tw.f32(0)
        for j in range(columns):
            total += x[i, j]
        out[i] = total
    return out


@tw.kernel
def scaled_groups(x: tw.Array, mean: tw.Array, scale: tw.Array) -> tw.Array:
    n, groups, each, pixels = x.shape
    out = tw.empty((n, groups, each, pixels), x.dtype)
    for b, g, c, i in tw.grid(n, groups, each, pixels):
        out[b, g, c, i] = (x[b, g, c, i] - mean[b, g]) * scale[g, c]
    return out


def schedules(kernel: tw.Kernel[..., object], x: np.ndarray, strides: tuple[int | None, ...]) -> tuple[list[Schedule], PreparedKernel, object]:
    """Of a view in device memory whose strides are these."""
    signature = kernel._signature((x,), {}, TARGET)
    signature = replace(signature, args=(replace(signature.args[0], strides=strides),))
    prepared = PreparedKernel(kernel.function, signature, TARGET)
    stages = prepared.finish(signature).stages
    return [s for s in stages.schedules if isinstance(s, Schedule)], prepared, stages.thread


@pytest.mark.parametrize("kernel", [total_of, row_totals], ids=["total", "rows"])
@pytest.mark.parametrize("step", [2, 3, 8])
def test_lanes_walk_along_every_second_column(kernel: tw.Kernel[..., object], step: int) -> None:
    x = np.random.default_rng(step).standard_normal((300, 700 * step)).astype(np.float32)[:, ::step]
    found, _, program = schedules(kernel, x, (None, step))
    assert found[0].vector_on_reduction and found[0].vector == 1
    result = np.asarray(next(iter(run_program(program, {"x": x}).values())))
    want = x.astype(np.float64).sum() if kernel is total_of else x.astype(np.float64).sum(1)
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-2)


def test_lanes_walk_along_the_rows_of_a_transposed_view() -> None:
    """Elements that follow each other down the columns are read by lanes of different rows."""
    x = np.random.default_rng(1).standard_normal((700, 300)).astype(np.float32).T
    found, _, program = schedules(row_totals, x, (1, None))
    assert not found[0].vector_on_reduction
    np.testing.assert_allclose(np.asarray(next(iter(run_program(program, {"x": x}).values()))), x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "f16", "f32"])
def test_means_by_group_do_not_choose_the_axis(dtype: type) -> None:
    """Means in f32 have more bytes than elements in bf16, and are read again for every pixel."""
    x, mean, scale = np.ones((4, 3, 8, 640), dtype), np.ones((4, 3), np.float32), np.ones((3, 8), dtype)
    (schedule,) = scaled_groups.stages(x, mean, scale, target="sm_90a").stages.schedules
    assert isinstance(schedule, Schedule)
    assert schedule.vector_index == 3 and schedule.across == 1
