"""What a launch on a CPU counts as work: elements, or operations where there are many for each element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.analysis.work import OPERATIONS, elements_per_block
from tilewright.base.sizes import product
from tilewright.codegen.host.pool import PARALLEL_WORK


@tw.kernel
def multiplied(a: tw.Array, b: tw.Array) -> tw.Array:
    return a @ b


@tw.kernel
def blurred(x: tw.Array, w: tw.Array) -> tw.Array:
    out = tw.zeros((x.shape[0] - 10, x.shape[1] - 10), tw.f32)
    for i, j in tw.grid(x.shape[0] - 10, x.shape[1] - 10):
        total = tw.f32(0)
        for p in range(11):
            for q in range(11):
                total += x[i + p, j + q] * w[p, q]
        out[i, j] = total
    return out


@tw.kernel
def doubled(x: tw.Array) -> tw.Array:
    return x + x


@tw.kernel
def below(a: tw.Array) -> tw.Array:
    out = tw.zeros(a.shape, a.dtype)
    for i in tw.grid(a.shape[0]):
        for j in range(i):
            out[i, j] = a[i, j] * 2.0
    return out


@tw.kernel
def paths(start: tw.Array, steps: int) -> tw.Array:
    out = tw.empty(start.shape, start.dtype)
    for i in tw.grid(start.shape[0]):
        price = start[i]
        for _ in range(steps):
            price = price * 1.01 + 0.5
        out[i] = price
    return out


def work_of_launch(kernel: Any, target: str = "x86-64-avx512", **arrays: np.ndarray) -> int:
    """Elements that all blocks of the last launch count together, nearly."""
    call = kernel.stages(*arrays.values(), target=target).stages.thread.calls[-1]
    sizes = {f"{name}${axis}": n for name, array in arrays.items() for axis, n in enumerate(array.shape)}
    return elements_per_block(call.kernel).evaluate(sizes) * product(call.kernel.grid).evaluate(sizes)


@pytest.mark.parametrize("target", ["x86-64-avx512", "x86-64-avx2", "aarch64-neon"])
def test_small_arrays_with_many_operations_are_work_for_threads(target: str) -> None:
    a = np.zeros((128, 128), np.float32)
    assert 3 * a.size < PARALLEL_WORK  # by its elements it would run on one thread
    work = work_of_launch(multiplied, target, a=a, b=a)
    assert 2 * 128**3 // OPERATIONS <= work < 2 * 128**3 // OPERATIONS + 1000
    assert work > PARALLEL_WORK
    small = np.zeros((32, 32), np.float32)
    assert work_of_launch(multiplied, target, a=small, b=small) < PARALLEL_WORK


def test_windows_count_their_terms() -> None:
    x, w = np.zeros((140, 140), np.float32), np.zeros((11, 11), np.float32)
    assert work_of_launch(blurred, x=x, w=w) >= 2 * 130 * 130 * 121 // OPERATIONS


def test_maps_count_their_elements() -> None:
    x = np.zeros(1000, np.float32)
    assert 2000 <= work_of_launch(doubled, x=x) < 2100


def test_loops_count_where_they_come_to_elements_again() -> None:
    a, start = np.zeros((100, 100), np.float32), np.zeros(1000, np.float32)
    assert work_of_launch(below, a=a) < 2 * a.size + 200  # a row for each point, and a loop along it
    call = paths.stages(start, 100, target="x86-64-avx512").stages.thread.calls[-1]
    sizes = {"start$0": start.size}
    assert elements_per_block(call.kernel).evaluate(sizes) * product(call.kernel.grid).evaluate(sizes) >= 16 * start.size
