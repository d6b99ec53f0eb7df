"""Results that read overlapping windows (stencils, depthwise convolutions, poolings) as GPUs compute them: executed by the emulator at
the tile and the thread stage against float64, over odd sizes, and what their code looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import bf16
from tilewright.ir.emulator import run_program
from tilewright.ir.nodes import Block, Kernel, Op, walk
from tilewright.passes.routes import Stages
from tilewright.passes.schedules.loops import Schedule

BF16 = bf16.numpy
SIZES = ((1, 1, 1, 1), (2, 3, 5, 7), (1, 9, 8, 8), (1, 5, 31, 33), (1, 2, 9, 56), (2, 16, 3, 16))


@tw.kernel
def planes(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, kh, kw = w.shape
    out = tw.empty((n, c, height, width), x.dtype)
    for b, q, i, j in tw.grid(n, c, height, width):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < height and z >= 0 and z < width:
                    acc += x[b, q, y, z] * w[q, r, s]
        out[b, q, i, j] = acc
    return out


@tw.kernel
def channels_last(x: tw.Array, w: tw.Array) -> tw.Array:
    n, height, width, c = x.shape
    kh, kw, _ = w.shape
    out = tw.empty((n, height, width, c), x.dtype)
    for b, i, j, q in tw.grid(n, height, width, c):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < height and z >= 0 and z < width:
                    acc += x[b, y, z, q] * w[r, s, q]
        out[b, i, j, q] = acc
    return out


@tw.kernel
def dilated(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, kh, kw = w.shape
    out = tw.empty((n, c, height, width), x.dtype)
    for b, q, i, j in tw.grid(n, c, height, width):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + 2 * r - 2
                z = j + 3 * s - 3
                if y >= 0 and y < height and z >= 0 and z < width:
                    acc += x[b, q, y, z] * w[q, r, s]
        out[b, q, i, j] = acc
    return out


@tw.kernel
def strided(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, kh, kw = w.shape
    rows = (height + 1) // 2
    columns = (width + 1) // 2
    out = tw.empty((n, c, rows, columns), x.dtype)
    for b, q, i, j in tw.grid(n, c, rows, columns):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i * 2 + r - 1
                z = j * 2 + s - 1
                if y >= 0 and y < height and z >= 0 and z < width:
                    acc += x[b, q, y, z] * w[q, r, s]
        out[b, q, i, j] = acc
    return out


@tw.kernel
def inside_only(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, kh, kw = w.shape
    out = tw.empty((n, c, height - kh + 1, width - kw + 1), x.dtype)
    for b, q, i, j in tw.grid(n, c, height - kh + 1, width - kw + 1):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                acc += x[b, q, i + r, j + s] * w[q, r, s]
        out[b, q, i, j] = acc
    return out


@tw.kernel
def inner_columns(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, kh, kw = w.shape
    out = tw.empty((n, c, height, width), x.dtype)
    for b, q, i, j in tw.grid(n, c, height, width):
        acc = tw.f32(0)
        for r in range(kh):
            for s in range(kw):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < height - 2 and z >= 1 and z < width:
                    acc += x[b, q, y, z] * w[q, r, s]
        out[b, q, i, j] = acc
    return out


@tw.kernel
def five_points(x: tw.Array) -> tw.Array:
    height, width = x.shape
    out = tw.empty((height, width), x.dtype)
    for i, j in tw.grid(height, width):
        v = x[i, j] * 4.0
        if i > 0:
            v -= x[i - 1, j]
        if i < height - 1:
            v -= x[i + 1, j]
        if j > 0:
            v -= x[i, j - 1]
        if j < width - 1:
            v -= x[i, j + 1]
        out[i, j] = v
    return out


@tw.kernel
def largest_around(x: tw.Array) -> tw.Array:
    height, width = x.shape
    out = tw.empty((height, width), x.dtype)
    for i, j in tw.grid(height, width):
        best = -tw.inf
        for r in range(3):
            for s in range(3):
                y = i + r - 1
                z = j + s - 1
                if y >= 0 and y < height and z >= 0 and z < width and x[y, z] < 1.0:
                    best = max(best, x[y, z])
        out[i, j] = best
    return out


def stages_of(kernel: tw.Kernel[..., Any], *arguments: np.ndarray, target: str = "sm_90a") -> Stages:
    stages: Stages = kernel.stages(*arguments, target=target).stages
    return stages


def run(kernel: tw.Kernel[..., Any], *arguments: np.ndarray, target: str = "sm_90a") -> dict[str, np.ndarray]:
    """The result at both stages, of code that shares windows."""
    stages = stages_of(kernel, *arguments, target=target)
    (schedule,) = stages.schedules
    assert isinstance(schedule, Schedule)
    assert schedule.window
    inputs = {name: np.ascontiguousarray(a) for name, a in kernel.bound(*arguments).items()}
    found = {stage: run_program(getattr(stages, stage), inputs) for stage in ("tile", "thread")}
    (name,) = found["tile"]
    return {stage: outputs[name].astype(np.float64) for stage, outputs in found.items()}


def reference(x: np.ndarray, w: np.ndarray, step: int = 1, apart: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Sums over windows [c, r, s] of planes [n, c, h, w]; what is outside is left out."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    n, c, height, width = x.shape
    out = np.zeros((n, c, -(-height // step), -(-width // step)))
    for i in range(out.shape[2]):
        for j in range(out.shape[3]):
            for r in range(w.shape[1]):
                for s in range(w.shape[2]):
                    y, z = i * step + (r - 1) * apart[0], j * step + (s - 1) * apart[1]
                    if 0 <= y < height and 0 <= z < width:
                        out[:, :, i, j] += x[:, :, y, z] * w[:, r, s]
    return out


def operands(size: tuple[int, ...], dtype: Any, window: tuple[int, int] = (3, 3)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(size))
    return rng.standard_normal(size).astype(dtype), rng.standard_normal((size[1], *window)).astype(dtype)


def close(found: dict[str, np.ndarray], want: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """Within the rounding of sums of that many products, and of the result."""
    terms = w.shape[-1] * w.shape[-2] if w.ndim == 3 else 1
    largest = float(np.abs(x.astype(np.float64)).max() * np.abs(w.astype(np.float64)).max()) * terms
    unit = 2.0**-24 * terms + (2.0**-9 if x.dtype == BF16 else 0)
    for stage, result in found.items():
        np.testing.assert_allclose(result, want, rtol=0, atol=unit * largest, err_msg=stage)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float64], ids=["f32", "bf16", "f64"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_depthwise(size: tuple[int, ...], dtype: Any) -> None:
    x, w = operands(size, dtype)
    want = reference(x, w)
    close(run(planes, x, w), want, x, w)
    turned = np.ascontiguousarray(x.transpose(0, 2, 3, 1)), np.ascontiguousarray(w.transpose(1, 2, 0))
    close(run(channels_last, *turned), want.transpose(0, 2, 3, 1), x, w)


@pytest.mark.parametrize("size", [(1, 2, 9, 8), (1, 3, 13, 17), (1, 2, 16, 24)], ids=str)
def test_steps_distances_and_larger_windows(size: tuple[int, ...]) -> None:
    x, w = operands(size, np.float32)
    close(run(dilated, x, w), reference(x, w, apart=(2, 3)), x, w)
    close(run(strided, x, w), reference(x, w, step=2), x, w)
    close(run(inside_only, x, w), reference(x, w)[:, :, 1:-1, 1:-1], x, w)
    x, w = operands(size, np.float32, (2, 5))
    close(run(planes, x, w), reference(x, w), x, w)
    close(run(planes, x, w, target="sm_80"), reference(x, w), x, w)


def test_what_is_left_out_stays_out() -> None:
    """Infinite weights times what is not there are no NaN."""
    for size in ((1, 2, 6, 8), (1, 2, 5, 7)):
        x, w = operands(size, np.float32)
        x, w = np.abs(x) + 1, np.full_like(w, np.inf)
        for stage, result in run(planes, x, w).items():
            assert (result == np.inf).all(), stage
        turned = np.ascontiguousarray(x.transpose(0, 2, 3, 1)), np.ascontiguousarray(w.transpose(1, 2, 0))
        for stage, result in run(channels_last, *turned).items():
            assert (result == np.inf).all(), stage


def test_guards_that_leave_out_what_is_there() -> None:
    """Not every guard is about the borders of the array: what it leaves out may be infinite."""
    for width in (8, 7):
        x, w = operands((1, 2, 6, width), np.float32)
        x[..., 0] = np.inf
        x[:, :, 4:] = np.nan
        want = reference(np.where(np.isfinite(x), x, 0), w)
        close(run(inner_columns, x, w), want, x[:, :, :4, 1:], w)


@pytest.mark.parametrize("size", [(1, 1), (5, 8), (17, 64), (33, 31), (7, 260)], ids=str)
def test_stencils(size: tuple[int, int]) -> None:
    x = np.random.default_rng(3).standard_normal(size).astype(np.float32)
    wide = np.pad(x.astype(np.float64), 1)
    want = 4 * wide[1:-1, 1:-1] - wide[:-2, 1:-1] - wide[2:, 1:-1] - wide[1:-1, :-2] - wide[1:-1, 2:]
    close(run(five_points, x), want, x, np.full(1, 8.0))
    framed = np.pad(np.where(x < 1, x, -np.inf), 1, constant_values=-np.inf).astype(np.float64)
    around = [framed[r : r + size[0], s : s + size[1]] for r in range(3) for s in range(3)]
    for stage, result in run(largest_around, x).items():
        np.testing.assert_array_equal(result, np.max(around, axis=0), err_msg=stage)


def thread_kernel(kernel: tw.Kernel[..., Any], *arguments: np.ndarray) -> Kernel:
    return stages_of(kernel, *arguments).thread.calls[0].kernel


def first_code(kernel: tw.Kernel[..., Any], *arguments: np.ndarray) -> list[Op]:
    """The ops of a kernel but those in the branch for sums that are no number."""
    ops = thread_kernel(kernel, *arguments).body.ops
    (branch,) = (op for op in ops if op.opcode == "if" and any(inner.opcode == "for" for inner in walk(op.regions[0])))
    return [inner for op in ops if op is not branch for inner in walk(Block((), (op,)))]


def loads_of(code: Sequence[Op], name: str) -> int:
    return sum(op.opcode == "load" and op.operands[0].name == name for op in code)


def rows_of(kernel: tw.Kernel[..., Any], *arguments: np.ndarray) -> int:
    """Results a thread has along the index it walks itself."""
    (schedule,) = stages_of(kernel, *arguments).schedules
    assert isinstance(schedule, Schedule)
    return schedule.tiles[schedule.along]


PLANES = np.zeros((2, 64, 56, 56), np.float32), np.zeros((64, 3, 3), np.float32)
CHANNELS = np.zeros((2, 56, 56, 64), np.float32), np.zeros((3, 3, 64), np.float32)


def test_windows_are_loaded_once_and_without_branches() -> None:
    """In planes a thread loads of each row a vector and its two neighbours, with channels last three vectors: two rows more than it has."""
    code, rows = first_code(planes, *PLANES), rows_of(planes, *PLANES)
    assert rows > 2
    assert loads_of(code, "x") == (rows + 2) * 3
    assert loads_of(code, "w") == 9
    last, rows = list(walk(thread_kernel(channels_last, *CHANNELS).body)), rows_of(channels_last, *CHANNELS)
    assert rows > 2
    assert loads_of(last, "x") == (rows + 2) * 3
    assert loads_of(last, "w") == 9
    assert not any(op.opcode == "if" for op in last)


def count(code: Sequence[Op], opcode: str) -> int:
    return sum(op.opcode == opcode for op in code)


def test_guards_that_hold_anyway_cost_nothing() -> None:
    """In planes nothing is chosen; with channels last only weights, which all rows share, where rows reach over the borders of a thread's results."""
    code, rows = first_code(planes, *PLANES), rows_of(planes, *PLANES)
    assert count(code, "fma") == 9 * rows
    assert count(code, "select") == 0
    last, rows = list(walk(thread_kernel(channels_last, *CHANNELS).body)), rows_of(channels_last, *CHANNELS)
    assert count(last, "fma") == 9 * rows
    assert count(last, "select") == 3 * 2 + 3 * 2


def depthwise(pad: int, step: int, apart: int) -> tw.Kernel[..., Any]:
    """Windows of any size, with a condition for each axis."""

    @tw.kernel
    def each_channel(x: tw.Array, w: tw.Array) -> tw.Array:
        n, c, height, width = x.shape
        _, kh, kw = w.shape
        rows = (height + 2 * pad - (kh - 1) * apart - 1) // step + 1
        columns = (width + 2 * pad - (kw - 1) * apart - 1) // step + 1
        out = tw.empty((n, c, rows, columns), x.dtype)
        for b, q, i, j in tw.grid(n, c, rows, columns):
            acc = x[b, q, 0, 0] * 0
            for r in range(kh):
                y = i * step + r * apart - pad
                if 0 <= y < height:
                    for s in range(kw):
                        z = j * step + s * apart - pad
                        if 0 <= z < width:
                            acc += x[b, q, y, z] * w[q, r, s]
            out[b, q, i, j] = acc
        return out

    return each_channel


def framed_sums(x: np.ndarray, w: np.ndarray, pad: int, step: int, apart: int) -> np.ndarray:
    """The same in float64; what is outside is left out, whatever it would be multiplied with."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    (kh, kw), (height, width) = w.shape[1:], x.shape[2:]
    out = np.zeros((*x.shape[:2], (height + 2 * pad - (kh - 1) * apart - 1) // step + 1, (width + 2 * pad - (kw - 1) * apart - 1) // step + 1))
    for i, j, r, s in np.ndindex(*out.shape[2:], kh, kw):
        y, z = i * step + r * apart - pad, j * step + s * apart - pad
        if 0 <= y < height and 0 <= z < width:
            out[:, :, i, j] += x[:, :, y, z] * w[:, r, s]
    return out


LARGE = {
    "11x7": ((1, 3, 13, 33), (11, 7), 3, 1, 1, np.float32), "15x15": ((1, 2, 17, 15), (15, 15), 7, 1, 1, np.float32), "7x7, vectors": ((2, 2, 9, 16), (7, 7), 3, 1, 1, np.float32),
    "11x7, bf16": ((1, 2, 31, 16), (11, 7), 3, 1, 1, BF16), "7x9, f64": ((1, 2, 8, 31), (7, 9), 4, 1, 1, np.float64), "7x7, steps of 3": ((1, 2, 31, 20), (7, 7), 2, 3, 1, np.float32),
    "9x5, dilation 2": ((1, 1, 33, 17), (9, 5), 4, 1, 2, np.float32), "27x2": ((1, 2, 31, 9), (27, 2), 1, 1, 1, np.float32), "2x31": ((2, 2, 5, 35), (2, 31), 1, 1, 1, np.float32), "one pixel": ((1, 1, 1, 1), (7, 7), 3, 1, 1, np.float32),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_large_windows(case: str) -> None:
    """A thread walks the columns of a window, or its terms are written out; elements of a column are shared by results below one another."""
    size, window, pad, step, apart, dtype = LARGE[case]
    x, w = operands(size, dtype, window)
    close(run(depthwise(pad, step, apart), x, w), framed_sums(x, w, pad, step, apart), x, w)


def test_large_windows_leave_out_what_is_outside() -> None:
    """Sums of weights that are no finite numbers are added up again: pixels that are not there are not multiplied with them."""
    for size, window in (((1, 4, 12, 17), (9, 7)), ((1, 4, 9, 16), (5, 11)), ((1, 4, 10, 16), (3, 3))):
        x, w = operands(size, np.float32, window)
        w[0, 0, 0], w[1, -1, -1], x[0, 2, 4, 4] = np.inf, np.nan, -np.inf
        with np.errstate(invalid="ignore"):
            want = framed_sums(x, w, 3, 1, 1)
        assert np.isfinite(want[0, 0]).any()
        assert np.isinf(want[0, 0]).any()
        assert np.isnan(want[0, 1]).any()
        for stage, result in run(depthwise(3, 1, 1), x, w).items():
            np.testing.assert_allclose(result, want, rtol=0, atol=1e-4, err_msg=stage)


def test_sums_of_pixels_choose_nothing() -> None:
    """What is outside adds zero; nothing is multiplied with it, so no sum is added up again."""

    @tw.kernel
    def box(x: tw.Array) -> tw.Array:
        height, width = x.shape
        out = tw.empty((height, width), x.dtype)
        for i, j in tw.grid(height, width):
            acc = tw.f32(0)
            for r in range(3):
                for s in range(5):
                    y = i + r - 1
                    z = j + s - 2
                    if 0 <= y < height and 0 <= z < width:
                        acc += x[y, z]
            out[i, j] = acc
        return out

    x = np.random.default_rng(0).standard_normal((33, 47)).astype(np.float32)
    x[3, 4] = np.inf
    wide = np.pad(x.astype(np.float64), ((1, 1), (2, 2)))
    want = sum(wide[r : r + 33, s : s + 47] for r in range(3) for s in range(5))
    for stage, result in run(box, x).items():
        np.testing.assert_allclose(result, want, rtol=0, atol=1e-4, err_msg=stage)
    code = list(walk(thread_kernel(box, x).body))
    assert count(code, "select") == 0
    assert count(code, "for") == 0


@tw.kernel
def each_volume(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, depth, height, width = x.shape
    _, kd, kh, kw = w.shape
    out = tw.empty((n, c, depth, height, width), x.dtype)
    for b, q, h, i, j in tw.grid(n, c, depth, height, width):
        acc = tw.f32(0)
        for t in range(kd):
            for r in range(kh):
                for s in range(kw):
                    v = h + t - 1
                    y = i + r - 2
                    z = j + s - 1
                    if 0 <= v < depth and 0 <= y < height and 0 <= z < width:
                        acc += x[b, q, v, y, z] * w[q, t, r, s]
        out[b, q, h, i, j] = acc
    return out


@tw.kernel
def each_row(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, length = x.shape
    _, k = w.shape
    out = tw.empty((n, c, length - k + 1), x.dtype)
    for b, q, i in tw.grid(n, c, length - k + 1):
        acc = tw.f32(0)
        for s in range(k):
            acc += x[b, q, i + s] * w[q, s]
        out[b, q, i] = acc
    return out


def test_windows_of_one_and_three_axes() -> None:
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((1, 2, 5, 9, 17)).astype(np.float32), rng.standard_normal((2, 3, 5, 3)).astype(np.float32)
    wide = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (2, 2), (1, 1)))
    want = sum(wide[:, :, t : t + 5, r : r + 9, s : s + 17] * w[None, :, t, r, s, None, None, None] for t, r, s in np.ndindex(3, 5, 3))
    for stage, result in run(each_volume, x, w).items():
        np.testing.assert_allclose(result, want, rtol=0, atol=1e-4, err_msg=stage)
    for length, k in ((70, 29), (64, 5), (31, 31)):
        x, w = rng.standard_normal((3, 2, length)).astype(np.float32), rng.standard_normal((2, k)).astype(np.float32)
        want = sum(x[:, :, s : s + length - k + 1].astype(np.float64) * w[None, :, s, None] for s in range(k))
        for stage, result in run(each_row, x, w).items():
            np.testing.assert_allclose(result, want, rtol=0, atol=1e-4, err_msg=stage)


def test_windows_of_any_step_overlap() -> None:
    """Steps of 3 share elements as steps of 2 do; windows side by side share none, but are read at once; those far apart are no windows."""

    def largest(k: int, step: int) -> tw.Kernel[..., Any]:
        @tw.kernel
        def pooled(x: tw.Array) -> tw.Array:
            height, width = x.shape
            out = tw.empty(((height - k) // step + 1, (width - k) // step + 1), x.dtype)
            for i, j in tw.grid((height - k) // step + 1, (width - k) // step + 1):
                best = -tw.inf
                for r in range(k):
                    for s in range(k):
                        best = max(best, x[i * step + r, j * step + s])
                out[i, j] = best
            return out

        return pooled

    x = np.random.default_rng(1).standard_normal((40, 61)).astype(np.float32)
    want = np.lib.stride_tricks.sliding_window_view(x, (5, 5))[::3, ::3].max((-1, -2))
    for stage, result in run(largest(5, 3), x).items():
        np.testing.assert_array_equal(result, want, err_msg=stage)
    for step, is_window in ((3, True), (20, False)):
        (schedule,) = stages_of(largest(3, step), x).schedules
        assert isinstance(schedule, Schedule)
        assert schedule.window is is_window
