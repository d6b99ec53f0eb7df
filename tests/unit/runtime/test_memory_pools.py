"""Memory pools on the null driver: reuse in stream order, limits, flushing, leaks, and memory that runs out at every place."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fake_cuda import FakeCuda

import tilewright.compile.driver  # noqa: F401 (says where machine code comes from)
from copy_kernels import register_copies
from tilewright.base import dtypes, memory_abi
from tilewright.base.errors import DeviceError, TilewrightError, UserError
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver
from tilewright.runtime.memory import native_memory
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.device_memory import MemoryBlock, MemoryPool, size_class
from tilewright.runtime.memory.slab import Slab


@pytest.fixture(params=["native", "python"], autouse=True)
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    assert native_memory.available()
    if request.param == "python":
        monkeypatch.setattr(native_memory, "available", lambda: False)
    name: str = request.param
    return name


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda(mode="lazy", count=2)
    register_copies(made)
    yield made
    assert made.violations == []


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[CudaDevice]:
    made = CudaDevice(Driver(fake), 0)
    yield made
    gc.collect()
    made.release_memory()
    assert fake.leaks() in ({}, {"module": fake.leaks().get("module", 0)})


# -- classes and reuse ----------------------------------------------------------------------------------------------


def test_machine_code_and_python_agree_on_size_classes(device: CudaDevice, arena: str) -> None:
    sizes = sorted({max(1, base + step) for base in (*(1 << n for n in range(31)), 3 << 20, 5 << 25) for step in (-1, 0, 1)})
    for nbytes in sizes:
        found = memory_abi.size_class(nbytes)
        assert found.nbytes == size_class(nbytes)
        if nbytes <= memory_abi.LARGEST:
            assert 0 <= found.index < memory_abi.CLASSES
        else:
            assert found.index == -1
    indices = [memory_abi.size_class(n).index for n in sizes if n <= memory_abi.LARGEST]
    assert indices == sorted(indices)
    for nbytes in (1, 512, 513, 8192, 8193, 9216, 9217, 100_000, 1 << 20, (1 << 20) + 1):
        block = device.pool.take(nbytes)
        pointer, size = block.pointer, block.nbytes
        assert size == size_class(nbytes)
        del block
        again = device.pool.take(size)
        assert (again.pointer, again.nbytes) == (pointer, size)


def test_huge_blocks_are_reused_too(fake: FakeCuda) -> None:
    fake.total = 1 << 40
    released: list[int] = []

    class Memory(CudaDevice):
        def raw_allocate(self, nbytes: int) -> int:
            return 0x10_0000_0000 + len(released) * (1 << 36)

        def raw_free(self, pointers: list[int]) -> None:
            released.extend(pointers)

    device = Memory(Driver(fake), 0)
    block = device.pool.take(3 << 30)
    pointer = block.pointer
    assert block.nbytes == 3 << 30
    del block
    assert device.pool.take(3 << 30).pointer == pointer
    assert device.pool.flush() == 3 << 30
    assert released == [pointer]


def test_many_streams(device: CudaDevice) -> None:
    streams = [device.create_stream() for _ in range(memory_abi.MOST_STREAMS + 8)]
    pointers = []
    for stream in streams:
        block = device.pool.take(1000, stream)
        pointers.append(block.pointer)
        del block
    assert len(set(pointers)) == len(streams)
    assert [device.pool.take(1000, stream).pointer for stream in streams] == pointers
    assert device.pool.usage() == (0, 1024 * len(streams))
    for stream in streams:
        device.destroy_stream(stream)
    blocks = [device.pool.take(1000) for _ in streams]
    assert {block.pointer for block in blocks} == set(pointers)


def test_a_stream_that_ends_while_its_memory_is_in_use(device: CudaDevice) -> None:
    stream = device.create_stream()
    array = device.empty((1000,), dtypes.f32, stream)
    pointer = array.pointer
    device.destroy_stream(stream)
    array.copy_from(np.ones(1000, np.float32))
    assert array.numpy().sum() == 1000
    del array
    assert device.pool.take(4000).pointer == pointer
    assert device.pool.flush() == 4096


def test_work_of_another_stream_is_finished_before_reuse(device: CudaDevice, fake: FakeCuda) -> None:
    """The null driver is lazy: what nobody waits for does not happen."""
    stream = device.create_stream()
    source, target = device.from_numpy(np.full(1000, 7.0, np.float32)), device.empty((1000,), dtypes.f32, stream)
    device.copy(target, source, stream)
    pointer = source.pointer
    del source
    other = device.empty((1000,), dtypes.f32)
    assert other.pointer == pointer
    other.copy_from(np.zeros(1000, np.float32))
    assert (target.numpy() == 7).all()
    del target, other
    device.destroy_stream(stream)


# -- flushing -------------------------------------------------------------------------------------------------------


def test_flush_frees_only_what_is_idle(device: CudaDevice, fake: FakeCuda) -> None:
    stream = device.create_stream()
    idle, busy = device.pool.take(1000), device.pool.take(2000, stream)
    with device.active():
        device.call("cuMemsetD8Async", busy.pointer, 0, 2000, stream)
    del idle, busy
    original, asked = device.is_idle, []

    def is_idle(which: int) -> bool:
        asked.append(which)
        return which != stream and original(which)

    device.is_idle = is_idle  # type: ignore[method-assign]
    assert device.pool.flush() == 1024
    assert asked == [0, stream]
    assert fake.calls("cuCtxSynchronize") == []
    assert device.pool.flush(wait=True) == 2048
    device.destroy_stream(stream)


def test_no_more_than_the_limit(device: CudaDevice) -> None:
    pool = device.new_pool(limit=4096)
    kept = [pool.take(1024) for _ in range(4)]
    with pytest.raises(DeviceError, match="of a limit of 4096 bytes"):
        pool.take(1)
    del kept[0]
    assert pool.take(1024).nbytes == 1024
    assert pool.take(512).nbytes == 512  # the free kilobyte is flushed for it
    statistics = pool.statistics()
    assert (statistics.in_use, statistics.cached, statistics.limit) == (3072, 512, 4096)
    assert statistics.peak == 4096
    assert (statistics.allocations, statistics.grown) == (6, 5)
    assert statistics.frees == 3


def test_fragmentation(device: CudaDevice) -> None:
    blocks = [device.pool.take(size) for size in (1024, 3072)]
    assert device.pool.statistics().fragmentation == 0
    del blocks
    assert device.pool.statistics().fragmentation == 0.25


# -- pools of their own ---------------------------------------------------------------------------------------------


def test_a_pool_that_goes_before_its_arrays(device: CudaDevice, fake: FakeCuda) -> None:
    pool = device.new_pool()
    device.push_pool(pool)
    array = device.empty((1000,), dtypes.f32)
    device.pop_pool()
    array.copy_from(np.ones(1000, np.float32))
    spare = pool.take(600)
    del pool, spare
    gc.collect()
    assert array.numpy().sum() == 1000
    assert device.pool.usage() == (0, 0)
    del array
    gc.collect()
    device.pool.flush()
    assert fake.used() == 0


def test_a_slab_goes_back_after_those_who_used_it(device: CudaDevice, fake: FakeCuda) -> None:
    stream = device.create_stream()
    pool = device.new_pool(reserve=1 << 20)
    assert device.pool.in_use == 1 << 20
    block = pool.take(1000, stream)
    with pytest.raises(DeviceError, match="out of memory"):
        pool.take(1 << 20)
    del block, pool
    gc.collect()
    fake.log.clear()
    assert device.pool.in_use == 0
    assert [call[1] for call in fake.calls("cuEventRecord")] == [stream]
    device.destroy_stream(stream)


def test_slabs_join_their_pieces(device: CudaDevice) -> None:
    slab = Slab(device, MemoryBlock(4096, 4096, 0, None))
    a, b, c = (slab.raw_allocate(1024) for _ in range(3))
    assert (a, b, c) == (4096, 5120, 6144)
    slab.raw_free([a, c])
    assert slab.free_memory() == (3072, 4096)
    assert slab.raw_allocate(2048) == c
    assert slab.raw_allocate(2048) == 0
    slab.raw_free([b])
    assert slab.raw_allocate(2048) == a


def test_reset_ends_all_arrays(device: CudaDevice) -> None:
    pool = device.new_pool()
    device.push_pool(pool)
    arrays = [device.empty((n,), dtypes.f32) for n in (10, 1000)]
    device.pop_pool()
    view, other = arrays[1][2:], device.empty((5,), dtypes.f32)
    pool.reset()
    assert pool.usage() == (0, 512 + 4096)
    for array in (*arrays, view):
        with pytest.raises(DeviceError, match="after it was freed"):
            array.numpy()
    other.fill(1.0)
    assert other.numpy().sum() == 5


def test_the_current_pool_is_that_of_the_thread(device: CudaDevice) -> None:
    pool, seen = device.new_pool(), []
    device.push_pool(pool)
    thread = threading.Thread(target=lambda: seen.append(device.current_pool))
    thread.start()
    thread.join()
    assert device.current_pool is pool
    device.pop_pool()
    assert seen == [device.pool]
    assert device.current_pool is device.pool


# -- what goes wrong ------------------------------------------------------------------------------------------------


def test_holders_are_named(device: CudaDevice, fake: FakeCuda) -> None:
    device.pool.trace()
    arrays = [device.empty((n, 256), dtypes.f16) for n in range(1, 9)]
    view = arrays[-1][2:]
    scratch = device.pool.take(1 << 20)
    fake.fail["cuMemAllocAsync"] = 2
    with pytest.raises(DeviceError) as caught:
        device.empty((1 << 22,), dtypes.f64)
    del fake.fail["cuMemAllocAsync"]
    lines = str(caught.value).splitlines()
    line = sys._getframe().f_lineno
    assert lines[1] == f"  scratch memory, 1048576 bytes, made at {__file__}:{line - 6}"
    assert lines[2] == f"  f16[8, 256], 4096 bytes, made at {__file__}:{line - 8}"
    assert lines[6] == "  and 4 more"
    assert view.shape == (6, 256)
    device.pool.trace(False)
    assert device.empty((3,), dtypes.f32).owner.trace is None
    del scratch


def test_tracing_by_the_environment(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_TRACE_MEMORY", "1")
    device = CudaDevice(Driver(fake), 0)
    array = device.empty((3,), dtypes.f32)
    assert array.owner.trace == f"{os.path.abspath(__file__)}:{sys._getframe().f_lineno - 1}"
    monkeypatch.setenv("TILEWRIGHT_TRACE_MEMORY", "maybe")
    with pytest.raises(UserError, match="TILEWRIGHT_TRACE_MEMORY is 'maybe'"):
        MemoryPool(device)


def test_an_error_while_memory_is_put_in_order_loses_nothing(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = device.create_stream()
    blocks = [device.pool.take(1000) for _ in range(3)]
    pointers = {block.pointer for block in blocks}
    for block in blocks:
        block.use_on(stream)
    del block, blocks

    def fail(later: int, earlier: int) -> None:
        raise DeviceError.at("TW032", "no order")

    with monkeypatch.context() as patched:
        patched.setattr(device, "order", fail)
        for _ in range(2):
            with pytest.raises(DeviceError, match="no order"):
                device.pool.take(1000)
    taken = [device.pool.take(1000) for _ in range(3)]
    assert {block.pointer for block in taken} == pointers
    assert device.pool.usage() == (3 * 1024, 0)
    del taken
    device.destroy_stream(stream)


def test_a_block_that_cannot_be_made_leaves_no_memory(device: CudaDevice, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> MemoryBlock:
        raise MemoryError

    monkeypatch.setattr(device.pool.arena, "adopt", fail)
    with pytest.raises(MemoryError):
        device.pool.take(1000)
    assert fake.used() == 0


def test_freeing_twice_and_in_the_middle(device: CudaDevice) -> None:
    array = device.empty((1000,), dtypes.f32)
    array.free()
    array.free()
    assert device.pool.usage() == (0, 4096)
    del array
    assert device.pool.usage() == (0, 4096)


def _make_and_fill(device: CudaDevice) -> None:
    array = device.from_numpy(np.arange(12, dtype=np.float64).reshape(3, 4))
    array[:, ::2] = 1.5
    array.T.copy().numpy()


def _pool(device: CudaDevice) -> None:
    pool = device.new_pool(reserve=1 << 16)
    device.push_pool(pool)
    try:
        device.empty((100,), dtypes.f32)
    finally:
        device.pop_pool()


def _host(device: CudaDevice) -> None:
    pinned = device.empty_pinned((1000,), dtypes.f32)
    pinned[...] = 3
    array = device.empty((1000,), dtypes.f32)
    ticket = device.copy_in_async(array, pinned)
    back = np.empty(1000, np.float32)
    device.copy_out_async(back, array).wait()
    ticket.wait()
    assert (back == 3).all()


def _managed(device: CudaDevice) -> None:
    device.empty_managed((100,), dtypes.f32).host()[...] = 1


def _shared(device: CudaDevice) -> None:
    values = np.arange(5000, dtype=np.float32)
    device.share(values)[10:20].copy().numpy()


def _staged(device: CudaDevice) -> None:
    values = np.arange(3 << 20, dtype=np.uint8)
    assert (device.from_numpy(values).numpy() == values).all()


@pytest.mark.parametrize("use", [_make_and_fill, _pool, _host, _managed, _shared, _staged])
def test_failure_of_every_call_leaks_nothing(arena: str, use: Callable[[CudaDevice], None]) -> None:
    """Each driver call of a piece of work fails once, as if memory had run out; then all that was taken is given back."""
    fake = FakeCuda()
    register_copies(fake)
    device = CudaDevice(Driver(fake), 0)
    use(device)
    gc.collect()
    device.release_memory()
    fake.log.clear()
    use(device)
    calls = [entry[0] for entry in fake.log if entry[0] not in ("cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamQuery")]
    gc.collect()
    device.release_memory()
    ending = ("cuMemFree", "cuStreamDestroy", "cuEventDestroy", "cuMemFreeAsync", "cuMemFreeHost", "cuMemHostUnregister", "cuModuleUnload")
    counts = {name: calls.count(name) for name in dict.fromkeys(calls) if name not in ending}
    failed = 0
    for name, count in counts.items():
        for number in range(1, count + 1):
            # Twice, since a pool asks again.
            fake.inject[name] = {fake.counts[name] + number: 2, fake.counts[name] + number + 1: 2}
            try:
                use(device)
            except TilewrightError:
                failed += 1
            fake.inject.clear()
            device.release_memory()
            if not set(fake.leaks()) <= {"module"}:
                gc.collect()  # the error's traceback may hold what is in a cycle with it
                device.release_memory()
            assert set(fake.leaks()) <= {"module"}, (name, number)
            assert device.pool.usage() == (0, 0)
    assert failed > 0
    use(device)


def test_threads_take_and_drop(device: CudaDevice) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            held: list[DeviceArray] = []
            for _ in range(2000):
                held.append(device.empty((int(rng.integers(1, 3000)),), dtypes.f32))
                if len(held) > 5:
                    del held[int(rng.integers(len(held)))]
                spans = sorted((a.pointer, a.pointer + a.nbytes) for a in held)
                assert all(low[1] <= high[0] for low, high in itertools.pairwise(spans))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    statistics = device.pool.statistics()
    assert statistics.in_use == 0
    assert statistics.allocations == statistics.frees == 12000


def test_many_allocations_leave_everything_where_it_was(device: CudaDevice) -> None:
    for _ in range(100):
        device.empty((64, 64), dtypes.f32)
    gc.collect()
    before = len(gc.get_objects()), device.pool.usage(), sys.getrefcount(device), sys.getrefcount(dtypes.f32)
    for number in range(20_000):
        device.empty((64, 1 + number % 7), dtypes.f32)
    gc.collect()
    after = len(gc.get_objects()), device.pool.usage(), sys.getrefcount(device), sys.getrefcount(dtypes.f32)
    assert after[1][0] == before[1][0] == 0
    assert after[2:] == before[2:]
    assert abs(after[0] - before[0]) < 200


def test_machine_code_refuses_what_it_does_not_know(device: CudaDevice, arena: str) -> None:
    if arena == "python":
        return
    device.empty((4,), dtypes.f32)
    f32 = dtypes.f32
    for given in (([4], f32, 0), ((4,), "f32", 0), ((-4,), f32, 0), ((0,), f32, 0), ((4.0,), f32, 0), ((4,), f32, 99), ((4,), f32, -1),
                  ((True,), f32, 0), ((1 << 40, 1 << 40), f32, 0), ((1 << 70,), f32, 0), ((4,), f32), ((), f32, "0")):  # fmt: skip
        assert device._make(*given) is None
    made = device._make((4,), f32, 0)
    assert made is not None
    assert (made.shape, made.strides, made.readonly, made.base, made.form) == ((4,), (1,), False, None, None)
    del made
    scalar = device._make((), f32, 0)
    assert scalar is not None
    assert (scalar.shape, scalar.strides) == ((), ())
    for given in ((-1, 0), ("4", 0), (4,), (4, 1 << 70)):
        assert device.pool._take(*given) is None  # type: ignore[call-arg, arg-type]
