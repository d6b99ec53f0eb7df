"""Sums across rows on a GPU: lanes go along what is read anew for each result, whatever rows' lengths, and all multiprocessors take part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.nodes import walk


@tw.kernel
def from_the_left(t: tw.Array, a: tw.Array) -> tw.Array:
    return t @ a


@tw.kernel
def transposed(t: tw.Array, a: tw.Array) -> tw.Array:
    return a.T @ t


@tw.kernel
def under_condition(t: tw.Array, a: tw.Array) -> tw.Array:
    rows, columns = a.shape
    out = tw.empty((columns,), a.dtype)
    for j in tw.grid(columns):
        total = tw.f32(0)
        for i in range(rows):
            if t[i] > 0:
                total += t[i] * a[i, j]
        out[j] = total
    return out


@tw.kernel
def moments(a: tw.Array) -> tuple[tw.Array, tw.Array]:
    n, m = a.shape
    s = tw.empty((m,), tw.f32)
    q = tw.empty((m,), tw.f32)
    for j in tw.grid(m):
        u = tw.f32(0)
        v = tw.f32(0)
        for i in range(n):
            u += a[i, j]
            v += a[i, j] * a[i, j]
        s[j] = u
        q[j] = v
    return s, q


@tw.kernel
def largest(a: tw.Array) -> tw.Array:
    return tw.max(a, axis=0)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.broadcast_to(np.zeros(1, dtype), shape).copy()


def launches(kernel: Any, *arguments: np.ndarray) -> list[tuple[str, int]]:
    """The schedules of a call's kernels, and their blocks."""
    program = kernel.stages(*arguments, target="sm_90a").stages.thread
    sizes = dict(zip(("t$0", "a$1"), arguments[-1].shape, strict=True)) | {"a$0": arguments[-1].shape[0]}
    sizes |= dict(zip(("rows", "columns"), arguments[-1].shape, strict=True)) | dict(zip(("n", "m"), arguments[-1].shape, strict=True))
    return [(str(call.kernel.attrs["schedule"]), call.kernel.grid[0].evaluate(sizes)) for call in program.calls]


@pytest.mark.parametrize("kernel", [from_the_left, transposed, under_condition], ids=lambda k: k.__name__)
def test_lanes_go_along_the_matrix(kernel: Any) -> None:
    """The vector is read again for every column, and decides nothing."""
    for columns in (2248, 2247):
        (schedule, blocks), *_ = launches(kernel, array(4000), array(4000, columns))
        assert "vector_on_reduction" not in schedule and ("tiles=(1, 128)" in schedule or "tiles=(1, 512)" in schedule), schedule
        assert ("vector=4" in schedule) == (columns % 4 == 0), "rows that begin anywhere are read element by element, lanes side by side"
        assert blocks * threads_of(schedule) >= 900 * 132


def threads_of(schedule: str) -> int:
    return int(schedule.partition("threads=")[2].partition(",")[0])


def test_no_cliff_where_columns_fill_the_device_once() -> None:
    """A block for each multiprocessor and a few more would take as long as two."""
    for columns in (128 * 132, 128 * 140, 128 * 400):
        (schedule, blocks), *rest = launches(from_the_left, array(1024), array(1024, columns))
        assert blocks * threads_of(schedule) >= 900 * 132 and rest
    assert len(launches(from_the_left, array(100), array(100, 30_000))) == 1, "few rows are not worth a second launch"


def test_few_columns_leave_no_lane_idle() -> None:
    (schedule, _), *_ = launches(largest, array(100_000, 32))
    assert "tiles=(1, 32), reduce_tile=128, vector=4" in schedule


def test_sums_side_by_side_read_once() -> None:
    program = moments.stages(array(20_000, 3072), target="sm_90a").stages.tile
    loops = [op for op in walk(program.calls[0].kernel.body) if op.opcode == "for"]
    assert loops and all(sum(op.opcode == "load" for op in walk(loop.regions[0])) == 1 and len(loop.results) == 2 for loop in loops)


@pytest.mark.parametrize("shape", [(1, 1), (70, 33), (129, 130), (515, 7)], ids=str)
def test_results(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    t, a = rng.standard_normal(shape[0]).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    want = t.astype(np.float64) @ a.astype(np.float64)
    for kernel in (from_the_left, transposed):
        np.testing.assert_allclose(kernel(t, a, device="emulator:thread"), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(under_condition(t, a, device="emulator:thread"), np.maximum(t, 0).astype(np.float64) @ a, rtol=1e-4, atol=1e-4)
    found = moments(a, device="emulator:thread")
    np.testing.assert_allclose(found[0], a.astype(np.float64).sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], (a.astype(np.float64) ** 2).sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(largest(a, device="emulator:thread"), a.max(0))
