"""Reductions on GPUs without warps, whose threads combine what they have in shared memory: in two steps where they are many."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.target import PORTABLE
from tilewright.compile.driver import compile_stages
from tilewright.execute.devices import Device, emulator_device
from tilewright.ir.nodes import walk

SIZES = [(1, 5003), (3, 777), (2, 33), (5, 1), (300, 64)]


def device_of(name: str) -> Device:
    return emulator_device("thread", PORTABLE[name])


@tw.kernel
def rows(x: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array]:
    count = x.shape[0]
    sums = tw.empty((count,), tw.f32)
    most = tw.empty((count,), tw.f32)
    where = tw.empty((count,), tw.i64)
    for i in tw.grid(count):
        sums[i] = tw.sum(x[i])
        most[i] = tw.max(x[i])
        where[i] = tw.argmax(x[i])
    return sums, most, where


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    count, columns = x.shape
    out = tw.empty((count, columns), tw.f32)
    for i in tw.grid(count):
        weights = tw.exp(x[i] - tw.max(x[i]))
        out[i] = weights / tw.sum(weights)
    return out


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["wgsl", "spirv-vulkan"])
def test_rows(name: str, size: tuple[int, int]) -> None:
    x = np.random.default_rng(0).integers(-50, 50, size).astype(np.float32)
    sums, most, where = rows(x, device=device_of(name))
    np.testing.assert_array_equal(sums, x.sum(axis=1))
    np.testing.assert_array_equal(most, x.max(axis=1))
    np.testing.assert_array_equal(where, x.argmax(axis=1))


@pytest.mark.parametrize("size", SIZES[:3], ids=str)
def test_softmax(size: tuple[int, int]) -> None:
    x = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    weights = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(softmax(x, device=device_of("wgsl")), weights / weights.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-9)


def test_no_thread_reads_what_all_have() -> None:
    target = PORTABLE["wgsl"]
    runner = softmax.runner
    given = runner.arguments(softmax.bound(np.ones((4, 4096), np.float32)), True)
    (call,) = compile_stages(softmax.function, runner.signature(given, True), target).stages.thread.calls
    shared = [op for op in walk(call.kernel.body) if op.opcode == "load" and getattr(op.operands[0].type, "space", "") == "shared"]
    assert call.kernel.threads >= 64
    assert 0 < len(shared) <= 2 * 2 * 2 * int(call.kernel.threads**0.5)
