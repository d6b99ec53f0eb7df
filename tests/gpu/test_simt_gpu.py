"""Explicit kernels on a GPU: every construct against NumPy, device arrays in place, both launches, streams and aliasing."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw
from simt_constructs import CASES, check
from tilewright.runtime.memory.device_array import DeviceArray

pytestmark = pytest.mark.requires("cuda")


@pytest.mark.parametrize("name", CASES)
def test_construct(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = arguments()
    kernel[launch](*given, device="cuda")
    check(name, given)


@pytest.mark.parametrize("name", CASES)
def test_construct_on_device_arrays(name: str) -> None:
    kernel, launch, arguments, _ = CASES[name]
    given = [tw.to_device(a, "cuda") if isinstance(a, np.ndarray) else a for a in arguments()]
    for _ in range(2):
        kernel[launch](*given)
        if name in ("saxpy", "counted", "mixed"):
            break  # these add to what is there
    check(name, [a.numpy() if isinstance(a, DeviceArray) else a for a in given])


WEIGHTS = np.array([[1.5, 2, 3], [4, 5, 6]], np.float32)


@tw.gpu
def weighted(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    y[i] = x[i] * WEIGHTS[i % 2, i % 3]


@tw.gpu
def double(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    i = tw.gpu_thread_id()
    y[i] = 2 * x[i]


@tw.gpu
def neighbours(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    tile = tw.shared(34, tw.f32)
    i, t = tw.gpu_thread_id(), tw.thread.x
    tile[t + 1] = x[i]
    if t == 0:
        tile[0] = x[i - 1] if i > 0 else 0.0
    if t == 31:
        tile[33] = x[i + 1]
    tw.gpu_sync()
    y[i] = tile[t] + tile[t + 1] + tile[t + 2]


@tw.gpu
def reverse(x: tw.GpuBuffer[tw.f32], y: tw.GpuBuffer[tw.f32]):
    own = tw.shared_dynamic(tw.f32)
    t = tw.thread.x
    for k in range(t, len(own), tw.block.size.x):
        own[k] = x[k]
    tw.gpu_sync()
    for k in range(t, len(own), tw.block.size.x):
        y[k] = own[len(own) - 1 - k]


def test_constant_memory() -> None:
    x, y, i = np.arange(96, dtype=np.float32), np.zeros(96, np.float32), np.arange(96)
    weighted[3, 32](x, y, device="cuda")
    assert np.array_equal(y, x * WEIGHTS[i % 2, i % 3])


@pytest.mark.parametrize("n", [1, 31, 32, 1000])
def test_threads_beyond_the_count_do_nothing(n: int) -> None:
    x, y = np.arange(1024, dtype=np.float32), np.full(1024, -1, np.float32)
    tw.gpu_launch(double, n, 32, x, y, device="cuda")
    assert np.array_equal(y, np.where(np.arange(1024) < n, 2 * x, -1))


@pytest.mark.parametrize("n", [1, 40, 70, 1001])
def test_the_tail_still_reaches_barriers(n: int) -> None:
    x, y = np.arange(1, n + 1, dtype=np.float32), np.zeros(n, np.float32)
    tw.gpu_launch(neighbours, n, 32, x, y, device="cuda")
    padded = np.concatenate([[0], x, [0]])
    assert np.array_equal(y, padded[:-2] + padded[1:-1] + padded[2:])


@pytest.mark.parametrize("nbytes", [4096, 40 << 10, 200 << 10])
def test_dynamic_shared_memory(nbytes: int) -> None:
    x = np.arange(nbytes // 4, dtype=np.float32)
    y = np.zeros_like(x)
    reverse[1, 256, nbytes](x, y, device="cuda")
    assert np.array_equal(y, x[::-1])


def test_streams_and_aliasing() -> None:
    stream = tw.Stream("cuda:0")
    x = tw.to_device(np.ones(1024, np.float32), "cuda")
    for _ in range(10):
        double[4, 256, 0, stream](x, x)
    stream.synchronize()
    assert np.all(x.numpy() == 1024)
    with stream:
        for _ in range(3):
            double[4, 256](x, x)
    stream.synchronize()
    assert np.all(x.numpy() == 8192)


def test_tensors_of_torch_and_cupy() -> None:
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x, y = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
    for _ in range(3):
        double[4, 256](x, y)
    assert bool((y == 2).all())
    cx, cy = cupy.ones(1024, cupy.float32), cupy.zeros(1024, cupy.float32)
    for _ in range(3):
        double[4, 256](cx, cy)
    assert bool((cy == 2).all())


def test_explicit_memory() -> None:
    a, b = tw.gpu_alloc(1000), tw.gpu_alloc(1000, unified=True)
    tw.gpu_copy_to(a, np.arange(1000, dtype=np.float32))
    tw.gpu_launch(double, 1000, 256, a, b)
    tw.gpu_sync()
    back = np.zeros(1000, np.float32)
    tw.gpu_copy_from(b, back)
    assert np.array_equal(back, 2 * np.arange(1000))
    tw.gpu_free(a)
    tw.gpu_free(b)
    tw.gpu_check_leaks()


def test_occupancy_from_the_driver() -> None:
    found = tw.occupancy(double, 256)
    assert found.fraction == 1.0 and tw.best_block(double) == 256
