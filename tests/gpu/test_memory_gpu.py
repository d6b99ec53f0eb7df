"""Arrays and memory on a real GPU: pools, copies, views, sharing with other libraries. Skipped where there is no GPU."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.memory.device_array import DeviceArray

pytestmark = pytest.mark.requires("cuda")


@pytest.fixture
def gpu() -> CudaDevice:
    return cuda.devices()[0]


@tw.kernel
def scale(x: tw.Array, factor: float) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * factor
    return out


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# -- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes.SCALARS, ids=str)
@pytest.mark.parametrize(
    "index",
    [np.s_[::2, ::-3, :], np.s_[:, 2, ::2], np.s_[..., 0], np.s_[None, 1:, :, 1], np.s_[1:3, 1:6, :], np.s_[:, :, ::-1]],
    ids=str,
)
def test_strided_copies_on_the_device(dtype: dtypes.DType, index: Any) -> None:
    values = (np.arange(4 * 8 * 6).reshape(4, 8, 6) % 2).astype(dtype.numpy)
    values[0, 0, 0] = 1
    array = tw.array(values, device="cuda")
    np.testing.assert_array_equal(array[index].copy().numpy(), values[index])
    target = tw.array(np.zeros_like(values), device="cuda")
    target[index] = array[index]
    expected = np.zeros_like(values)
    expected[index] = values[index]
    np.testing.assert_array_equal(target.numpy(), expected)


def test_strided_copies_of_many_shapes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        rank = int(rng.integers(1, 6))
        values = rng.standard_normal(tuple(rng.integers(1, 9, rank))).astype(np.float32)
        index = tuple(slice(None, None, int(rng.choice([1, 2, -1, -2]))) for _ in range(rank))
        order = tuple(int(axis) for axis in rng.permutation(rank))
        array = tw.array(values, device="cuda")[index].permute(*order)
        np.testing.assert_array_equal(array.copy().numpy(), values[index].transpose(order))


def test_a_large_transposed_copy() -> None:
    values = numbers(3000, 2001)
    np.testing.assert_array_equal(tw.array(values, device="cuda").T.copy().numpy(), values.T)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(
    [tw.f32, tw.f16, tw.bf16, tw.i32, tw.u8, tw.bool_, tw.f64], [tw.f32, tw.f16, tw.bf16, tw.f64, tw.i32, tw.i64, tw.f8e4m3])), ids=str)  # fmt: skip
def test_astype(source: tw.DType, target: tw.DType) -> None:
    values = np.array([0, 1, 1, 0, 1, 1, 1], np.float32).astype(source.numpy)
    np.testing.assert_array_equal(tw.array(values, device="cuda").astype(target).numpy(), values.astype(target.numpy))


@pytest.mark.parametrize("value", [0, 1, 7])
@pytest.mark.parametrize("dtype", [d for d in dtypes.SCALARS if not d.is_bool], ids=str)
def test_fill(dtype: dtypes.DType, value: int) -> None:
    array = tw.allocate((33, 5), dtype, "cuda")
    array.fill(value)
    np.testing.assert_array_equal(array.numpy(), np.full((33, 5), value).astype(dtype.numpy))
    array[:, 1:3] = 2
    expected = np.full((33, 5), value).astype(dtype.numpy)
    expected[:, 1:3] = 2
    np.testing.assert_array_equal(array.numpy(), expected)


def test_assignment_from_everything() -> None:
    torch = pytest.importorskip("torch")
    array = tw.array(np.zeros((4, 6), np.float32), device="cuda")
    array[0] = np.arange(6, dtype=np.float32)
    array[1, ::2] = [1, 2, 3]
    array[2] = torch.full((6,), 5.0, device="cuda")
    array[3] = array[0]
    array[1:3, 1:2] = tw.array(np.array([[7.0], [8.0]], np.float32), device="cuda")
    expected = np.zeros((4, 6), np.float32)
    expected[0], expected[1, ::2], expected[2] = np.arange(6), [1, 2, 3], 5
    expected[3] = expected[0]
    expected[1:3, 1:2] = [[7], [8]]
    np.testing.assert_array_equal(array.numpy(), expected)
    array[:, :3] = array[:, 1:4]  # overlapping
    expected[:, :3] = expected[:, 1:4].copy()
    np.testing.assert_array_equal(array.numpy(), expected)


# -- pools ----------------------------------------------------------------------------------------------------------


def held(gpu: CudaDevice) -> tuple[int, int]:
    """Bytes that this process uses, and has reserved, of the driver's pool. The card's free memory also shows other processes."""
    with gpu.active():
        if not gpu.attribute("MEMORY_POOLS_SUPPORTED"):
            free, total = gpu.free_memory()
            return total - free, total - free
        gpu.call("cuCtxSynchronize")
        (pool,) = gpu.call("cuDeviceGetDefaultMemPool", gpu.call("cuDeviceGet", gpu.ordinal)[0])
        names = ("CU_MEMPOOL_ATTR_USED_MEM_CURRENT", "CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT")
        used, reserved = (int(gpu.call("cuMemPoolGetAttribute", pool, gpu.driver.constant("CUmemPool_attribute", name))[0]) for name in names)
        return used, reserved


def test_memory_returns(gpu: CudaDevice) -> None:
    gc.collect()
    gpu.release_memory()
    used, reserved = held(gpu)
    pool = tw.memory_pool("cuda", limit="1GiB")
    arrays = [pool.allocate((n, 1024)) for n in range(1, 200)]
    assert pool.statistics().in_use >= sum(n * 4096 for n in range(1, 200))
    assert held(gpu)[0] >= used + sum(n * 4096 for n in range(1, 200))
    del arrays
    assert pool.statistics().in_use == 0
    assert pool.flush() > 0
    assert pool.statistics().cached == 0
    del pool
    gpu.release_memory()
    assert held(gpu)[0] <= used
    assert held(gpu)[1] <= reserved + (2 << 20)


def test_flush_does_not_wait_for_other_streams(gpu: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    array = tw.allocate((1 << 20,), tw.f32, "cuda")
    del array
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
    start = time.perf_counter()
    freed = tw.default_pool("cuda").flush()
    took = time.perf_counter() - start
    busy = not stream.query()
    torch.cuda.synchronize()
    assert freed >= 4 << 20
    assert busy
    assert took < 0.1


def test_busy_blocks_stay(gpu: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    pool = tw.memory_pool("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    block = pool._pool.take(1 << 20, stream.cuda_stream)
    del block
    assert pool.flush() == 0
    assert pool.flush(wait=True) == 1 << 20
    assert stream.query()


def test_memory_used_on_another_stream_is_not_overwritten(gpu: CudaDevice) -> None:
    """A block dropped while a slow kernel of another stream still reads it is given out again, and written only after that."""
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    for _ in range(20):
        values = tw.array(np.full(1 << 20, 3.0, np.float32), device="cuda")
        shared = torch.from_dlpack(values)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            copied = shared.clone()
        values.owner.use_on(stream.cuda_stream)
        del shared, values
        other = tw.allocate((1 << 20,), tw.f32, "cuda")
        other.fill(0.0)
        torch.cuda.synchronize()
        assert bool((copied == 3.0).all())
        del other


def test_out_of_memory_names_the_holders() -> None:
    pool = tw.memory_pool("cuda", limit="64MiB")
    pool.trace()
    big = pool.allocate((12 << 20,))
    with pytest.raises(DeviceError, match=r"(?s)out of memory.*f32\[12582912\], 50331648 bytes, made at .*test_memory_gpu.py") as caught:
        pool.allocate((8 << 20,), tw.f32)
    assert caught.value.code == "TW031"
    del big
    assert pool.allocate((8 << 20,), tw.f32).size == 8 << 20


def test_a_pool_of_a_fixed_size_and_its_reset() -> None:
    pool = tw.memory_pool("cuda", size="8MiB")
    first = pool.allocate((1 << 20,))
    with pytest.raises(DeviceError, match="out of memory"):
        pool.allocate((2 << 20,))
    pool.reset()
    with pytest.raises(DeviceError, match="after it was freed"):
        first.numpy()
    second = pool.allocate((2 << 20,))
    second.fill(1.5)
    assert second[-1].item() == 1.5


def test_results_come_from_the_current_pool() -> None:
    pool = tw.memory_pool("cuda", limit="16MiB")
    x = tw.array(numbers(1000), device="cuda")
    with pool:
        result = scale(x, 2.0)
    assert pool.statistics().in_use >= 4000
    np.testing.assert_array_equal(result.numpy(), numbers(1000) * 2)


def test_allocations_leave_memory_where_it_was(gpu: CudaDevice) -> None:
    gc.collect()
    used = gpu.pool.usage()[0]
    for n in range(100_000):
        tw.allocate((1 + n % 5000,), tw.f32, "cuda")
    assert gpu.pool.usage()[0] == used


def test_threads_share_a_pool(gpu: CudaDevice) -> None:
    pool = tw.memory_pool("cuda", limit="256MiB")
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            with pool:
                held: list[tuple[DeviceArray, int]] = []
                for _ in range(300):
                    array = tw.allocate((int(rng.integers(1, 5000)),), tw.i32, "cuda")
                    value = int(rng.integers(1 << 30))
                    array.fill(value)
                    held.append((array, value))
                    if len(held) > 8:
                        checked, wanted = held.pop(int(rng.integers(len(held))))
                        assert (checked.numpy() == wanted).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.statistics().in_use == 0


# -- host memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 20) + 3, (37 << 20) + 5])
def test_copies_of_plain_pinned_and_registered_memory(nbytes: int) -> None:
    values = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    array = tw.array(values, device="cuda")
    np.testing.assert_array_equal(array.numpy(), values)
    pinned = tw.allocate((nbytes,), tw.u8, "cpu", pinned=True)
    pinned[...] = values[::-1]
    array.copy_from(pinned)
    np.testing.assert_array_equal(array.numpy(), values[::-1])
    pinned[...] = 0
    array.to_host(pinned)
    np.testing.assert_array_equal(pinned, values[::-1])
    with tw.pinned(values):
        array.copy_from(values)
        ticket = tw.copy(pinned, array, wait=False)
        assert ticket is not None
        ticket.wait()
    np.testing.assert_array_equal(pinned, values)


def test_copies_without_waiting() -> None:
    values = numbers(1 << 20)
    pinned = tw.allocate(values.shape, tw.f32, pinned=True)
    pinned[...] = values
    array, plain = tw.allocate(values.shape, tw.f32, "cuda"), np.empty_like(values)
    sent = tw.copy(array, pinned, wait=False)
    back = tw.copy(plain, array, wait=False)
    assert sent is not None
    assert back is not None
    back.wait()
    assert sent.done()
    np.testing.assert_array_equal(plain, values)


def test_zero_copy(gpu: CudaDevice) -> None:
    pinned = tw.allocate((5000,), tw.f32, "cpu", pinned=True)
    pinned[...] = numbers(5000)
    shared = tw.to_device(pinned, "cuda", copy=False)
    out = tw.allocate((5000,), tw.f32, pinned=True)
    scale(shared, 3.0, out=tw.to_device(out, "cuda", copy=False))
    gpu.synchronize()
    np.testing.assert_array_equal(out, numbers(5000) * 3)
    plain = numbers(6000)
    mapped = tw.to_device(plain, "cuda", copy=False)
    np.testing.assert_array_equal(scale(mapped, 2.0).numpy(), plain * 2)
    with pytest.raises(UserError, match="the host does not see"):
        tw.to_device(scale(mapped, 1.0), "cpu", copy=False)


def test_managed_memory_on_both_sides() -> None:
    array = tw.allocate((5000,), tw.f32, "cuda", managed=True)
    array.host()[...] = numbers(5000)
    result = scale(array, 2.0)
    np.testing.assert_array_equal(result.numpy(), numbers(5000) * 2)
    on_cpu = scale(array, 4.0, device="cpu")
    assert isinstance(on_cpu, np.ndarray)
    np.testing.assert_array_equal(on_cpu, numbers(5000) * 4)
    out = tw.allocate((5000,), tw.f32, "cuda", managed=True)
    scale(array, 5.0, out=out)
    np.testing.assert_array_equal(out.host(), numbers(5000) * 5)
    assert np.shares_memory(tw.to_device(out, "cpu", copy=False), out.host())


# -- other libraries ------------------------------------------------------------------------------------------------


def test_torch_both_ways() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64):
        tensor = torch.ones(6, 8, device="cuda").to(dtype)[::2, 1:]
        array = tw.from_dlpack(tensor)
        assert isinstance(array, DeviceArray)
        assert (array.pointer, array.shape, array.strides) == (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        again = torch.from_dlpack(array)
        assert (again.data_ptr(), again.shape, again.stride(), again.dtype) == (
            tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        )  # fmt: skip
    with pytest.raises(UserError, match="needs gradients"):
        tw.from_dlpack(torch.ones(3, device="cuda", requires_grad=True))


def test_import_waits_for_the_producers_stream() -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        tensor = torch.full((1000,), 4.0, device="cuda")
        array = tw.from_dlpack(tensor)
    assert (scale(array, 2.0).numpy() == 8).all()


def test_cupy_both_ways() -> None:
    cupy = pytest.importorskip("cupy")
    values = cupy.arange(24, dtype=cupy.float32).reshape(4, 6)
    for array in (tw.from_dlpack(values[:, ::2]), tw.asarray(values[:, ::2])):
        assert isinstance(array, DeviceArray)
        np.testing.assert_array_equal(array.numpy(), values[:, ::2].get())
    back = cupy.asarray(tw.array(numbers(3, 4), device="cuda"))
    np.testing.assert_array_equal(back.get(), numbers(3, 4))
    np.testing.assert_array_equal(cupy.from_dlpack(tw.array(numbers(3, 4), device="cuda")).get(), numbers(3, 4))


def test_memory_lent_stays(gpu: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    array = tw.array(numbers(1000), device="cuda")
    tensor = torch.from_dlpack(array)
    array.free()
    other = tw.allocate((1000,), tw.f32, "cuda")
    other.fill(9.0)
    assert other.pointer != tensor.data_ptr()
    np.testing.assert_array_equal(tensor.cpu().numpy(), numbers(1000))
