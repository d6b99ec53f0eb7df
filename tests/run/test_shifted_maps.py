"""Maps of rows that begin anywhere are written in whole vectors all the same (`passes/to_tile/loops/shifted_maps.py`), and sums over groups are cut as rows of one axis.
Executed by the emulator, at the tile stage and at the thread stage."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bench.families.norms import group_norm

import tilewright as tw
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import walk
from tilewright.ir.types import Vec
from tilewright.passes.schedules.loops import Schedule


@tw.kernel
def scaled(x: tw.Array, s: tw.Array, t: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    out = tw.empty((n, channels, length), x.dtype)
    for i, j, k in tw.grid(n, channels, length):
        out[i, j, k] = x[i, j, k] * s[i, j] + t[k]
    return out


@tw.kernel
def scaled_rows(x: tw.Array, s: tw.Array) -> tw.Array:
    n, channels, length = x.shape
    out = tw.empty((n, channels, length), x.dtype)
    for i, j, k in tw.grid(n, channels, length):
        out[i, j, k] = x[i, j, k] * s[i, j] + s[i, j]
    return out


@tw.kernel
def two_results(x: tw.Array, y: tw.Array) -> tuple[tw.Array, tw.Array]:
    rows, length = x.shape
    total, larger = tw.empty((rows, length), x.dtype), tw.empty((rows, length), x.dtype)
    for i, k in tw.grid(rows, length):
        total[i, k] = x[i, k] + y[i]
        larger[i, k] = max(x[i, k], y[i])
    return total, larger


def stages_of(kernel: tw.Kernel[..., Any], *arrays: np.ndarray) -> Any:
    return kernel.stages(*arrays, target="sm_90a").stages


def results(kernel: tw.Kernel[..., Any], *arrays: np.ndarray) -> list[list[np.ndarray]]:
    stages = stages_of(kernel, *arrays)
    given = dict(zip([a.name for a in stages.tile.inputs], arrays, strict=True))
    return [[np.asarray(v) for v in run_program(stage, given).values()] for stage in (stages.tile, stages.thread)]


def shifted(kernel: tw.Kernel[..., Any], *arrays: np.ndarray) -> list[bool]:
    return [s.shifted for s in stages_of(kernel, *arrays).schedules if isinstance(s, Schedule)]


def numbers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * 4).astype(dtype)


SHAPES = [(3, 5, 197), (5, 7, 67), (2, 3, 1021), (2, 2, 2049), (1, 1, 4099), (1, 3, 777), (70, 1, 71)]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64, np.int8], ids=["f32", "bf16", "f64", "i8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_begin_anywhere(shape: tuple[int, int, int], dtype: Any) -> None:
    x, s, t = numbers(shape, dtype), numbers(shape[:2], dtype), numbers(shape[2:], dtype)
    # Single elements of 8 bytes are read as fast; what short rows share is one vector for all of them.
    assert shifted(scaled_rows, x, s) == [x.itemsize < 8]
    assert shifted(scaled, x, s, t) == [x.itemsize < 8 and shape[2] > 512]
    wide = np.int64 if dtype is np.int8 else np.float64
    for kernel, arrays, more in ((scaled, (x, s, t), t.astype(wide)), (scaled_rows, (x, s), s.astype(wide)[..., None])):
        want = (x.astype(wide) * s.astype(wide)[..., None] + more).astype(dtype)
        for (found,) in results(kernel, *arrays):
            np.testing.assert_allclose(found.astype(np.float64), want.astype(np.float64), rtol=2e-2 if dtype is ml_dtypes.bfloat16 else 1e-5, atol=2e-2 if dtype is ml_dtypes.bfloat16 else 1e-5)


@pytest.mark.parametrize("shape", [(3, 31), (2, 33), (1, 1), (37, 130), (0, 67), (5, 1030)], ids=str)
def test_several_results_with_special_numbers(shape: tuple[int, int]) -> None:
    x, y = numbers(shape, np.float32), numbers(shape[:1], np.float32)
    x.flat[::7], x.flat[3::11] = np.inf, np.nan
    for total, larger in results(two_results, x, y):
        np.testing.assert_array_equal(total, x + y[:, None])
        np.testing.assert_array_equal(larger, np.maximum(x, y[:, None]))


def test_rows_of_whole_vectors_are_not_shifted() -> None:
    assert shifted(scaled, *(np.zeros(shape, np.float32) for shape in ((4, 4, 1024), (4, 4), (1024,)))) == [False]


def test_vectors_are_whole() -> None:
    """Both the load and the store of a row take 16 bytes at once."""
    thread = stages_of(scaled, *(np.zeros(shape, np.float32) for shape in ((4, 64, 1021), (4, 64), (1021,)))).thread
    (kernel,) = (call.kernel for call in thread.calls)
    stored = [op.operands[-1].type for op in walk(kernel.body) if op.opcode == "store"]
    assert any(isinstance(type_, Vec) and type_.width == 4 for type_ in stored)
    assert any(op.opcode == "load" and isinstance(op.result.type, Vec) and op.result.type.width == 4 for op in walk(kernel.body))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("shape", "groups"), [((2, 4, 129, 131), 2), ((1, 6, 97, 227), 3)], ids=str)
def test_groups_are_cut_as_rows_of_one_axis(shape: tuple[int, ...], groups: int, dtype: Any) -> None:
    x, s, t = numbers(shape, dtype), numbers(shape[1:2], dtype), numbers(shape[1:2], dtype)
    schedules = [k for k in stages_of(group_norm(groups), x, s, t).schedules if isinstance(k, Schedule)]
    assert [k.shifted for k in schedules] == [True, False, True] and len(schedules[0].tiles) == 3
    rows = x.astype(np.float64).reshape(shape[0], groups, -1)
    normed = ((rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)).reshape(shape)
    want = normed * s.astype(np.float64)[:, None, None] + t.astype(np.float64)[:, None, None]
    for (found,) in results(group_norm(groups), x, s, t):
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=2e-2 if dtype is ml_dtypes.bfloat16 else 1e-5, atol=2e-2 if dtype is ml_dtypes.bfloat16 else 1e-5)
