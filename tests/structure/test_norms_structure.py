"""Norms and sums over several axes: how many kernels, how many blocks, how memory is read."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from assembled import assemble

GROUPS = 4
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@tw.kernel
def group_norm(x: tw.Array, w: tw.Array, b: tw.Array) -> tw.Array:
    n, g, c, h, wd = x.shape
    out = tw.empty((n, g, c, h, wd), x.dtype)
    for i, j in tw.grid(n, g):
        s = tw.f32(0)
        for k, y, z in tw.grid(c, h, wd):
            s += x[i, j, k, y, z]
        m = s / (c * h * wd)
        v = tw.f32(0)
        for k, y, z in tw.grid(c, h, wd):
            v += (x[i, j, k, y, z] - m) * (x[i, j, k, y, z] - m)
        r = tw.rsqrt(v / (c * h * wd) + 1e-5)
        for k, y, z in tw.grid(c, h, wd):
            out[i, j, k, y, z] = (x[i, j, k, y, z] - m) * r * w[j, k] + b[j, k]
    return out


@tw.kernel
def group_norm_of_channels(x: tw.Array, w: tw.Array, b: tw.Array) -> tw.Array:
    n, c, h, wd = x.shape
    out = tw.empty((n, c, h, wd), x.dtype)
    q = c // GROUPS
    for i, j in tw.grid(n, GROUPS):
        m = tw.f32(0)
        for k, y, z in tw.grid(q, h, wd):
            m += x[i, j * q + k, y, z] / (q * h * wd)
        v = tw.f32(0)
        for k, y, z in tw.grid(q, h, wd):
            d = x[i, j * q + k, y, z] - m
            v += d * d
        r = tw.rsqrt(v / (q * h * wd) + 1e-5)
        for k, y, z in tw.grid(q, h, wd):
            out[i, j * q + k, y, z] = (x[i, j * q + k, y, z] - m) * r * w[j * q + k] + b[j * q + k]
    return out


@tw.kernel
def instance_norm(x: tw.Array, w: tw.Array, b: tw.Array) -> tw.Array:
    n, c, h, wd = x.shape
    out = tw.empty((n, c, h, wd), x.dtype)
    for i, j in tw.grid(n, c):
        s = tw.f32(0)
        q = tw.f32(0)
        for y in range(h):
            for z in range(wd):
                s += x[i, j, y, z]
                q += x[i, j, y, z] * x[i, j, y, z]
        m = s / (h * wd)
        r = tw.rsqrt(q / (h * wd) - m * m + 1e-5)
        for y in range(h):
            for z in range(wd):
                out[i, j, y, z] = (x[i, j, y, z] - m) * r * w[j] + b[j]
    return out


@tw.kernel
def layer_norm(x: tw.Array, w: tw.Array, b: tw.Array) -> tw.Array:
    n, c, h, wd = x.shape
    out = tw.empty((n, c, h, wd), x.dtype)
    for i in tw.grid(n):
        m = tw.sum(x[i]) / (c * h * wd)
        v = tw.f32(0)
        for k, y, z in tw.grid(c, h, wd):
            v += (x[i, k, y, z] - m) * (x[i, k, y, z] - m)
        r = tw.rsqrt(v / (c * h * wd) + 1e-5)
        for k, y, z in tw.grid(c, h, wd):
            out[i, k, y, z] = (x[i, k, y, z] - m) * r * w[k, y, z] + b[k, y, z]
    return out


@tw.kernel
def batch_norm(x: tw.Array, w: tw.Array, b: tw.Array, mean: tw.InOut, var: tw.InOut) -> tw.Array:
    """Training: statistics over all but the channels, and running ones updated in place."""
    n, c, h, wd = x.shape
    out = tw.empty((n, c, h, wd), x.dtype)
    for j in tw.grid(c):
        s = tw.f32(0)
        for i, y, z in tw.grid(n, h, wd):
            s += x[i, j, y, z]
        m = s / (n * h * wd)
        v = tw.f32(0)
        for i, y, z in tw.grid(n, h, wd):
            v += (x[i, j, y, z] - m) * (x[i, j, y, z] - m)
        mean[j] = mean[j] * 0.9 + m * 0.1
        var[j] = var[j] * 0.9 + v / (n * h * wd - 1) * 0.1
        r = tw.rsqrt(v / (n * h * wd) + 1e-5)
        for i, y, z in tw.grid(n, h, wd):
            out[i, j, y, z] = (x[i, j, y, z] - m) * r * w[j] + b[j]
    return out


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        m = tw.max(x[i])
        s = tw.f32(0)
        for j in range(c):
            s += tw.exp(x[i, j] - m)
        for j in range(c):
            out[i, j] = tw.exp(x[i, j] - m) / s
    return out


@tw.kernel
def weighted(x: tw.Array, v: tw.Array) -> float:
    n, m = x.shape
    s = 0.0
    for i, j in tw.grid(n, m):
        s += x[i, j] * v[j]
    return s


@tw.kernel
def left_product(t: tw.Array, a: tw.Array) -> tw.Array:
    return t @ a


@tw.kernel
def column_sums(a: tw.Array) -> tw.Array:
    return tw.sum(a, axis=0)


@tw.kernel
def squared_columns(a: tw.Array) -> tw.Array:
    return tw.sum(a * a, axis=0)


@tw.kernel
def middle_sum(x: tw.Array) -> tw.Array:
    _, b, _ = x.shape
    out = tw.empty((b,), x.dtype)
    for j in tw.grid(b):
        out[j] = tw.sum(x[:, j, :])
    return out


@tw.kernel
def middle_max(x: tw.Array) -> tw.Array:
    _, b, _ = x.shape
    out = tw.empty((b,), x.dtype)
    for j in tw.grid(b):
        out[j] = tw.max(x[:, j, :])
    return out


def zeros(*shape: int, dtype: str = "f32") -> np.ndarray:
    return np.zeros(shape, DTYPES[dtype])


def schedules(kernel: tw.Kernel, *arguments: object) -> list[str]:  # type: ignore[name-defined]
    return [s.describe() for s in kernel.stages(*arguments, target="sm_90a").stages.schedules]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_row_of_several_axes_is_one_row(dtype: str) -> None:
    """Read once, in whole vectors, with one scale for a vector."""
    elements = 4 if dtype == "f32" else 8
    for kernel, shape, scales in (
        (group_norm, (4, 8, 4, 32, 32), (8, 4)), (group_norm_of_channels, (4, 16, 32, 32), (16,)),
        (instance_norm, (4, 8, 64, 64), (8,)), (layer_norm, (4, 4, 32, 32), (4, 32, 32)),
    ):  # fmt: skip
        arguments = (zeros(*shape, dtype=dtype), zeros(*scales), zeros(*scales))
        (schedule,) = schedules(kernel, *arguments)
        assert "whole=True" in schedule
        assert ("flat=True" in schedule) == (kernel in (group_norm, group_norm_of_channels))
        ptx = kernel.compile(*arguments, target="sm_90a").code.decode()
        made = assemble(ptx, "sm_90a")
        assert made.spills == 0
        threads = int(re.search(r"\.reqntid (\d+)", ptx).group(1))  # type: ignore[union-attr]
        steps = 4096 // (threads * elements)
        # The last step may be tested once for all that follows, which then stands there twice: with it and without.
        assert len(re.findall(r"st\.global\.v4", ptx)) in (steps, 2 * steps - 1)
        if kernel is not layer_norm:
            assert len(re.findall(r"ld\.global[.\w]*v4", ptx)) == steps
            assert len(re.findall(r"ld\.global[.\w]*\.b32", ptx)) - steps <= 2 * steps


@pytest.mark.parametrize(("shape", "vector", "registers"), [((4, 41, 64, 16), 4, 128), ((4, 18, 45, 23), 2, 128), ((4, 17, 45, 23), 2, 128)])
def test_only_the_ends_of_a_row_of_several_axes_are_tested(shape: tuple[int, ...], vector: int, registers: int) -> None:
    """What the schedule knows of a row's length it knows of a product of sizes, too: all of its steps but the last are full, and rows that begin anywhere are shifted."""
    arguments = (zeros(*shape), zeros(*shape[1:]), zeros(*shape[1:]))
    (schedule,) = schedules(layer_norm, *arguments)
    assert f"vector={vector}" in schedule
    assert ("shifted=True" in schedule) == (shape[3] % 2 == 1)
    ptx = layer_norm.compile(*arguments, target="sm_90a").code.decode()
    made = assemble(ptx, "sm_90a")
    assert made.spills == 0
    assert max(made.registers) <= registers
    assert len(re.findall(r"setp", ptx)) <= 16


def test_batch_norm_reads_twice_and_fills_the_device() -> None:
    x = zeros(64, 64, 56, 56)
    artifact = batch_norm.compile(x, *(zeros(64) for _ in range(4)), target="sm_90a")
    first, second, third = artifact.launches
    sizes = {"n": 64, "c": 64, "h": 56, "wd": 56}
    assert [launch.grid[0].evaluate(sizes) for launch in (first, second, third)] == [4096, 16, 16384]
    partial, _, points = schedules(batch_norm, x, *(zeros(64) for _ in range(4)))
    assert "whole=True" in partial
    assert "across" not in points


@pytest.mark.parametrize(("kernel", "arguments"), [(weighted, ((4096, 1024), (1024,))), (middle_sum, ((256, 3, 1000),)), (middle_max, ((256, 3, 1000),))])
def test_sums_whose_axes_do_not_collapse_fill_the_device(kernel: tw.Kernel, arguments: tuple[tuple[int, ...], ...]) -> None:  # type: ignore[name-defined]
    arrays = [zeros(*shape) for shape in arguments]
    artifact = kernel.compile(*arrays, target="sm_90a")
    grid = artifact.launches[0].grid[0]
    sizes = {"n": 4096, "m": 1024, "b": 3, "_$1": 256, "_$2": 1000}
    assert grid.evaluate(sizes) >= 256


@pytest.mark.parametrize(("columns", "vector"), [(8841, 1), (16810, 1), (8844, 4), (16384, 4)])
def test_rows_that_begin_anywhere_are_read_side_by_side(columns: int, vector: int) -> None:
    """As many elements at once as rows are aligned to, those of neighbouring lanes beside each other; all blocks have as much to do."""
    arguments = zeros(300, columns), zeros(columns)
    parts = weighted.stages(*arguments, target="sm_90a").stages.schedules[0]
    assert (parts.vector, parts.vector_on_reduction) == (vector, True)
    artifact = weighted.compile(*arguments, target="sm_90a")
    assert artifact.launches[0].grid[0].evaluate({"n": 300, "m": columns}) == 300 * -(-columns // 8192)
    entry = re.split(r"\.visible \.entry", artifact.code.decode())[1]
    widths = {int(w or 1) for w in re.findall(r"ld\.global(?:\.nc)?(?:\.v(\d))?\.b32", entry)}
    assert max(widths) == vector
    assert len(re.findall(r"setp", entry)) <= 48  # all steps but the last are whole: no lane of theirs is tested


def test_partial_results_of_few_sums_are_shared_by_threads() -> None:
    (parts, total) = left_product.stages(zeros(12678), zeros(12678, 7888), target="sm_90a").stages.schedules
    assert parts.across_rows
    assert total.across_rows


@pytest.mark.parametrize("kernel", [left_product, column_sums, squared_columns])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_parts_of_sums_across_rows_run_all_at_once(kernel: tw.Kernel, dtype: type) -> None:  # type: ignore[name-defined]
    """As many blocks as the device has room for, without spills; sums that take more registers have smaller blocks."""
    matrix = np.zeros((12678, 7888), dtype)
    arguments = (np.zeros(12678, dtype), matrix) if kernel is left_product else (matrix,)
    artifact = kernel.compile(*arguments, target="sm_90a")
    made = assemble(artifact.code.decode(), "sm_90a")
    assert made.spills == 0
    parts = artifact.launches[0]
    assert parts.threads == 512 or dtype is np.int32 or kernel is squared_columns
    if parts.threads == 512:
        sizes = dict.fromkeys(parts.grid[0].names, 7888)
        assert 132 < parts.grid[0].evaluate(sizes) <= 264


def test_softmax_of_rows_that_no_cluster_holds_reads_twice() -> None:
    """Exponentials are taken below the maximum of their own stretch."""
    partial, _, points = schedules(softmax, zeros(256, 300000))
    assert "whole=True" in partial
    assert "vector=4" in points
