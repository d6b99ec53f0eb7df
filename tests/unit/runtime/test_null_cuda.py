"""The null driver: its contract, when work is done, native entry points, injected failures and what is left over."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import null_contract
from null_cuda import CONTEXT, FOREIGN_CONTEXT, Fault, NullCuda
from null_cuda.constants import PLAIN, TABLES, enumerations
from null_cuda.programs import read_config, read_entries
from null_cuda.state import Refused

PTX = null_contract.PTX
ORDERED = ("eager", "lazy", "reverse", "random", "background")


def started(**options: Any) -> NullCuda:
    """A driver with the first device's context current."""
    made = NullCuda(**options)
    made.cuInit(0)
    made.cuCtxSetCurrent(made.cuDevicePrimaryCtxRetain(0)[1])

    def fill(table: int, grid: tuple[int, int, int]) -> None:
        pointer, value = arguments(table)
        ctypes.c_float.from_address(pointer).value = value

    def add(table: int, grid: tuple[int, int, int]) -> None:
        pointer, value = arguments(table)
        ctypes.c_float.from_address(pointer).value += value

    made.kernels |= {"fill": fill, "add": add}
    return made


def arguments(table: int) -> tuple[int, float]:
    first, second = (ctypes.c_uint64 * 2).from_address(table)
    return ctypes.c_uint64.from_address(first).value, ctypes.c_float.from_address(second).value


@pytest.fixture
def driver() -> NullCuda:
    return started()


def get(result: tuple[Any, ...]) -> Any:
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]


def functions(driver: NullCuda) -> tuple[int, int]:
    module = get(driver.cuModuleLoadDataEx(PTX, 0, [], []))
    return get(driver.cuModuleGetFunction(module, b"fill")), get(driver.cuModuleGetFunction(module, b"add"))


def launch(driver: NullCuda, function: int, pointer: int, value: float, stream: int = 0) -> None:
    """With a block that changes right after, as the caller's may."""
    table = null_contract.Table(pointer, value)
    assert driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, table.address, 0)[0] == 0
    table.value.value = float("nan")


def read(pointer: int) -> float:
    """What memory holds now, whatever is queued."""
    return ctypes.c_float.from_address(pointer).value


# -- the contract ---------------------------------------------------------------------------------------------------


def test_contract() -> None:
    driver = started()
    driver.process = 0
    found = null_contract.run(driver)
    assert {k: v for k, v in found.items() if v != null_contract.EXPECTED.get(k)} == {}
    assert found.keys() == null_contract.EXPECTED.keys()


def test_numbers_are_those_of_the_bindings() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="NVIDIA's bindings are not installed")
    own = enumerations()
    for name in TABLES:
        real = getattr(bindings, name, None)
        if real is None:
            continue  # older bindings know fewer
        wrong = {m: int(v) for m, v in real.__members__.items() if m in own[name].__members__ and own[name][m] != v}
        assert wrong == {}, name
    assert {name: getattr(bindings, name) for name in PLAIN} == PLAIN


def test_launch_configurations_have_the_layout_of_the_bindings() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="NVIDIA's bindings are not installed")
    config, cluster, early = bindings.CUlaunchConfig(), bindings.CUlaunchAttribute(), bindings.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = 4, 6, 3
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 2, 5
    config.sharedMemBytes, config.hStream = 1234, 0x5678
    cluster.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 2, 3, 1
    early.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [cluster, early], 2
    found = read_config(config.getPtr())
    assert (found.grid, found.block, found.shared, found.stream) == ((4, 6, 3), (32, 2, 5), 1234, 0x5678)
    assert (found.cluster, found.dependent, found.cooperative) == (6, True, False)


def test_entries_of_ptx() -> None:
    text = """
    // .entry not_this(.param .u64 a) {
    .visible .entry tw_x_0(
        .param .u64 .ptr .global .align 16 tw_x_0_param_0,
        .param .u8 tw_x_0_param_1,
        .param .align 64 .b8 tw_x_0_param_2[128],
        .param .f64 d
    )
    .maxntid 256, 1, 1
    .reqnctapercluster 2, 1, 1
    { ret; }
    .entry none { ret; }
    """
    found = read_entries(text)
    assert list(found) == ["tw_x_0", "none"]
    assert (found["tw_x_0"].sizes, found["none"].sizes) == ((8, 1, 128, 8), ())
    assert found["tw_x_0"].bounds == {"maxntid": 256, "reqnctapercluster": 2}
    with pytest.raises(Refused):
        read_entries(".entry odd(.param .v4 x) { ret; }")


def test_handles_of_another_kind_or_destroyed(driver: NullCuda) -> None:
    stream, event = get(driver.cuStreamCreate(1)), get(driver.cuEventCreate(2))
    assert driver.cuEventRecord(stream, 0)[0] == 400
    assert driver.cuStreamDestroy(stream)[0] == 0
    assert driver.cuStreamSynchronize(stream)[0] == 201
    assert driver.cuStreamDestroy(stream)[0] == 201
    assert driver.cuEventDestroy(event)[0] == 0
    assert driver.violations == [
        f"cuEventRecord: {stream:#x} is no event, a stream",
        f"cuStreamSynchronize: {stream:#x} is no stream, a destroyed stream",
        f"cuStreamDestroy: {stream:#x} is no stream, a destroyed stream",
    ]


def test_contexts_do_not_share_streams_events_or_functions() -> None:
    driver = started(count=2)
    stream, event = get(driver.cuStreamCreate(1)), get(driver.cuEventCreate(2))
    fill, _ = functions(driver)
    driver.cuCtxSetCurrent(get(driver.cuDevicePrimaryCtxRetain(1)))
    assert driver.cuStreamSynchronize(stream)[0] == 400
    assert driver.cuEventRecord(event, 0)[0] == 400
    assert driver.cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, 0, null_contract.Table(1, 1.0).address, 0)[0] == 400
    assert driver.cuMemAlloc(16)[0] == 0
    assert driver.cuStreamWaitEvent(get(driver.cuStreamCreate(1)), event, 0)[0] == 0  # events may be waited for across devices


def test_peers() -> None:
    driver = started(count=2)
    there = get(driver.cuDevicePrimaryCtxRetain(1))
    assert get(driver.cuDeviceCanAccessPeer(0, 1)) == 1
    assert [driver.cuCtxEnablePeerAccess(c, 0)[0] for c in (CONTEXT, there, there)] == [101, 0, 704]
    assert [driver.cuCtxDisablePeerAccess(there)[0] for _ in range(2)] == [0, 705]
    assert driver.cuDeviceCanAccessPeer(0, 2)[0] == 101


def test_a_forked_child_is_not_initialised() -> None:
    driver = started()
    driver.process += 1  # as if this were the child
    assert [driver.cuInit(0)[0], driver.cuMemAlloc(16)[0], driver.cuDeviceGetCount()[0]] == [3, 3, 3]


# -- when work is done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ORDERED)
def test_a_stream_runs_in_order(mode: str) -> None:
    driver = started(mode=mode)
    fill, add = functions(driver)
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(1))
    launch(driver, fill, pointer, 1.0, stream)
    for _ in range(20):
        launch(driver, add, pointer, 2.0, stream)
    assert driver.cuStreamSynchronize(stream)[0] == 0
    assert read(pointer) == 41.0


@pytest.mark.parametrize("mode", ["lazy", "reverse", "random"])
def test_nothing_runs_before_somebody_waits(mode: str) -> None:
    driver = started(mode=mode)
    fill, _ = functions(driver)
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(1))
    before = struct.pack("f", read(pointer))
    launch(driver, fill, pointer, 1.0, stream)
    assert struct.pack("f", read(pointer)) == before
    assert driver.cuStreamQuery(stream)[0] == 600
    assert driver.cuStreamQuery(stream)[0] == 0
    assert read(pointer) == 1.0


def test_forgetting_to_wait_for_another_stream_shows() -> None:
    """Two streams without order between them: each order of the two results is seen under some mode."""
    seen = set()
    for mode, seed in (("lazy", 0), ("reverse", 0), *(("random", seed) for seed in range(8))):
        driver = started(mode=mode, seed=seed)
        fill, _ = functions(driver)
        pointer = get(driver.cuMemAlloc(64))
        for value in (1.0, 2.0):
            launch(driver, fill, pointer, value, get(driver.cuStreamCreate(1)))
        assert driver.cuCtxSynchronize()[0] == 0
        seen.add(read(pointer))
    assert seen == {1.0, 2.0}


@pytest.mark.parametrize("mode", ORDERED)
def test_events_order_streams(mode: str) -> None:
    driver = started(mode=mode, seed=3)
    fill, add = functions(driver)
    pointer, event = get(driver.cuMemAlloc(64)), get(driver.cuEventCreate(2))
    first, second = get(driver.cuStreamCreate(1)), get(driver.cuStreamCreate(1))
    for value in range(10):
        launch(driver, fill, pointer, float(value), first)
        driver.cuEventRecord(event, first)
        driver.cuStreamWaitEvent(second, event, 0)
        launch(driver, add, pointer, 100.0, second)
        driver.cuEventRecord(event, second)
        driver.cuStreamWaitEvent(first, event, 0)
    assert driver.cuEventSynchronize(event)[0] == 0
    assert read(pointer) == 109.0


@pytest.mark.parametrize("mode", ORDERED)
def test_blocking_streams_are_ordered_with_the_default_stream(mode: str) -> None:
    driver = started(mode=mode)
    fill, add = functions(driver)
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(0))
    for value in range(5):
        launch(driver, fill, pointer, float(value), stream)
        launch(driver, add, pointer, 10.0)
    assert driver.cuStreamSynchronize(0)[0] == 0
    assert read(pointer) == 14.0


def test_copies_from_pinned_memory_read_it_late_and_from_pageable_memory_at_once() -> None:
    driver = started(mode="lazy")
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(1))
    pinned, pageable = get(driver.cuMemHostAlloc(64, 0)), (ctypes.c_float * 1)(1.0)
    for source in (pinned, ctypes.addressof(pageable)):
        ctypes.c_float.from_address(source).value = 1.0
        driver.cuMemcpyHtoDAsync(pointer, source, 4, stream)
        ctypes.c_float.from_address(source).value = 2.0  # too early for pinned memory
        driver.cuStreamSynchronize(stream)
        assert read(pointer) == (2.0 if source == pinned else 1.0)
    target = (ctypes.c_float * 1)()
    driver.cuMemcpyDtoHAsync(ctypes.addressof(target), pointer, 4, stream)
    assert target[0] == 1.0  # pageable: it has been waited for
    ctypes.c_float.from_address(pinned).value = 7.0
    driver.cuMemcpyDtoHAsync(pinned, pointer, 4, stream)
    assert read(pinned) == 7.0
    driver.cuStreamSynchronize(stream)
    assert read(pinned) == 1.0


def test_a_plain_copy_does_not_wait_for_a_non_blocking_stream() -> None:
    driver = started(mode="lazy")
    fill, _ = functions(driver)
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(1))
    driver.cuMemsetD32(pointer, 0, 16)
    launch(driver, fill, pointer, 5.0, stream)
    value = ctypes.c_float(-1.0)
    driver.cuMemcpyDtoH(ctypes.addressof(value), pointer, 4)
    assert value.value == 0.0


def test_memory_freed_before_its_use_is_a_fault() -> None:
    driver = started(mode="lazy")
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(1))
    driver.cuMemsetD32Async(pointer, 1, 16, stream)
    driver.cuMemFree(pointer)
    assert driver.cuStreamSynchronize(stream)[0] == 700
    assert driver.cuMemAlloc(16)[0] == 700
    assert get(driver.cuCtxGetCurrent()) == CONTEXT
    assert driver.cuDevicePrimaryCtxRetain(0)[0] == 0
    driver.cuDevicePrimaryCtxReset(0)
    assert driver.cuDevicePrimaryCtxRetain(0)[0] == 700  # the process has lost it for good


def test_a_fault_ends_one_context_and_what_is_queued_there() -> None:
    driver = started(mode="lazy", count=2)
    fill, add = functions(driver)

    def faulting(table: int, grid: tuple[int, int, int]) -> None:
        raise Fault(719)

    driver.kernels["fill"] = faulting
    pointer = get(driver.cuMemAlloc(64))
    ctypes.c_float.from_address(pointer).value = 3.0
    launch(driver, fill, pointer, 1.0)
    launch(driver, add, pointer, 1.0)
    assert driver.cuCtxSynchronize()[0] == 719
    assert read(pointer) == 3.0
    driver.cuCtxSetCurrent(get(driver.cuDevicePrimaryCtxRetain(1)))
    assert driver.cuCtxSynchronize()[0] == 0


def test_host_functions_run_in_order_and_may_not_call_the_driver() -> None:
    driver = started(mode="lazy")
    fill, _ = functions(driver)
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(1))
    seen: list[object] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def note(data: int | None) -> None:
        seen.append((data, read(pointer), int(driver.cuMemAlloc(16)[0])))

    launch(driver, fill, pointer, 4.0, stream)
    driver.cuLaunchHostFunc(stream, ctypes.cast(note, ctypes.c_void_p).value, 77)
    launch(driver, fill, pointer, 5.0, stream)
    assert seen == []
    driver.cuStreamSynchronize(stream)
    assert seen == [(77, 4.0, 800)]


def test_work_in_the_background_needs_no_waiting() -> None:
    driver = started(mode="background")
    fill, _ = functions(driver)
    pointer, stream = get(driver.cuMemAlloc(64)), get(driver.cuStreamCreate(1))
    done = threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def tell(data: int | None) -> None:
        done.set()

    launch(driver, fill, pointer, 4.0, stream)
    driver.cuLaunchHostFunc(stream, ctypes.cast(tell, ctypes.c_void_p).value, 0)
    assert done.wait(60)
    assert read(pointer) == 4.0


def test_event_times_count_kernels() -> None:
    driver = started(mode="lazy")
    fill, add = functions(driver)
    driver.durations |= {"fill": 2.0, "add": 5.0}
    pointer, events = get(driver.cuMemAlloc(64)), [get(driver.cuEventCreate(0)) for _ in range(2)]
    driver.cuEventRecord(events[0], 0)
    launch(driver, fill, pointer, 1.0)
    launch(driver, add, pointer, 1.0)
    driver.cuEventRecord(events[1], 0)
    assert driver.cuEventElapsedTime(*events)[0] == 600
    driver.cuCtxSynchronize()
    assert get(driver.cuEventElapsedTime(*events)) == 7.25


# -- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ORDERED)
def test_a_graph_keeps_the_order_of_its_capture(mode: str) -> None:
    driver = started(mode=mode, seed=5)
    fill, add = functions(driver)
    pointer, event = get(driver.cuMemAlloc(64)), get(driver.cuEventCreate(2))
    first, second = get(driver.cuStreamCreate(1)), get(driver.cuStreamCreate(1))
    driver.cuStreamBeginCapture(first, 0)
    launch(driver, fill, pointer, 1.0, first)
    driver.cuEventRecord(event, first)
    driver.cuStreamWaitEvent(second, event, 0)
    launch(driver, add, pointer, 2.0, second)
    driver.cuMemsetD32Async(pointer + 4, 9, 1, first)
    driver.cuEventRecord(event, second)
    driver.cuStreamWaitEvent(first, event, 0)
    launch(driver, add, pointer, 10.0, first)
    graph = get(driver.cuStreamEndCapture(first))
    assert get(driver.cuGraphGetNodes(graph, 9))[1] == 4
    executable = get(driver.cuGraphInstantiate(graph, 0))
    driver.cuGraphDestroy(graph)
    driver.cuMemsetD32(pointer, 0, 16)
    driver.cuCtxSynchronize()
    assert read(pointer) == 0.0  # capturing ran nothing
    for _ in range(3):
        driver.cuGraphLaunch(executable, second)
    driver.cuStreamSynchronize(second)
    assert (read(pointer), ctypes.c_int32.from_address(pointer + 4).value) == (13.0, 9)
    driver.cuGraphExecDestroy(executable)
    assert driver.violations == []


# -- native entry points --------------------------------------------------------------------------------------------


def native(driver: NullCuda, name: str, *types: type) -> Any:
    address, found = get(driver.cuGetProcAddress(name.encode(), 13000, 0))
    assert found == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)


def test_native_calls(driver: NullCuda) -> None:
    fill, add = functions(driver)
    pointer, current = ctypes.c_uint64(), ctypes.c_uint64()
    allocate = native(driver, "cuMemAlloc", ctypes.c_void_p, ctypes.c_size_t)
    assert allocate(ctypes.addressof(pointer), 64) == 0
    assert pointer.value in driver.allocations
    assert native(driver, "cuCtxGetCurrent", ctypes.c_void_p)(ctypes.addressof(current)) == 0
    assert current.value == CONTEXT
    word = ctypes.c_uint32
    start = native(driver, "cuLaunchKernel", ctypes.c_uint64, *[word] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    table = null_contract.Table(pointer.value, 6.0)
    assert start(fill, 1, 1, 1, 1, 1, 1, 0, None, table.address, None) == 0
    assert start(fill, 0, 1, 1, 1, 1, 1, 0, None, table.address, None) == 1
    assert read(pointer.value) == 6.0
    config = struct.pack("<7I4xQQI4x", 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)
    extended = native(driver, "cuLaunchKernelEx", ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
    assert extended(config, add, table.address, None) == 0
    assert read(pointer.value) == 12.0
    assert native(driver, "cuCtxSetCurrent", ctypes.c_uint64)(FOREIGN_CONTEXT) == 0
    assert driver.stack() == [FOREIGN_CONTEXT]
    assert allocate(ctypes.addressof(pointer), 0) == 1
    assert driver.cuGetProcAddress(b"cuNothing", 13000, 0)[0] == 500


def test_native_calls_from_a_thread_without_a_context(driver: NullCuda) -> None:
    pointer, codes = ctypes.c_uint64(), []
    allocate = native(driver, "cuMemAlloc", ctypes.c_void_p, ctypes.c_size_t)
    thread = threading.Thread(target=lambda: codes.append(allocate(ctypes.addressof(pointer), 64)))
    thread.start()
    thread.join()
    assert codes == [201]


# -- failures and leaks ---------------------------------------------------------------------------------------------


def test_injected_failures(driver: NullCuda) -> None:
    driver.inject["cuMemAlloc"] = {2: 2, 4: 999}
    assert [int(driver.cuMemAlloc(16)[0]) for _ in range(5)] == [0, 2, 0, 999, 0]
    driver.fail["cuStreamCreate"] = 46
    assert driver.cuStreamCreate(1) == (46, None)
    assert driver.counts["cuMemAlloc"] == 5


def test_memory_is_limited(driver: NullCuda) -> None:
    driver.total = 1 << 20
    first = get(driver.cuMemAlloc(1 << 19))
    assert driver.cuMemAlloc((1 << 19) + 1)[0] == 2
    assert get(driver.cuMemGetInfo()) == (1 << 19, 1 << 20)
    driver.cuMemFree(first)
    assert driver.cuMemAlloc((1 << 19) + 1)[0] == 0


def test_leaks(driver: NullCuda) -> None:
    functions(driver)
    stream, event = get(driver.cuStreamCreate(1)), get(driver.cuEventCreate(2))
    pointer, pinned = get(driver.cuMemAlloc(16)), get(driver.cuMemHostAlloc(16, 0))
    driver.cuStreamBeginCapture(stream, 0)
    graph = get(driver.cuStreamEndCapture(stream))
    executable = get(driver.cuGraphInstantiate(graph, 0))
    assert driver.leaks() == {
        "module": 1, "stream": 1, "event": 1, "graph": 1, "executable graph": 1, "device memory": 1, "host memory": 1,
    }  # fmt: skip
    with pytest.raises(AssertionError, match="left over"):
        driver.check()
    for call in (
        driver.cuGraphExecDestroy(executable), driver.cuGraphDestroy(graph), driver.cuMemFreeHost(pinned), driver.cuMemFree(pointer),
        driver.cuEventDestroy(event), driver.cuStreamDestroy(stream),
    ):  # fmt: skip
        assert call[0] == 0
    assert driver.leaks() == {"module": 1}


@pytest.fixture
def queued() -> Iterator[NullCuda]:
    driver = started(mode="lazy", record=False)
    yield driver
    assert driver.log == []


def test_a_long_queue_is_worked_off(queued: NullCuda) -> None:
    fill, add = functions(queued)
    pointer = get(queued.cuMemAlloc(64))
    launch(queued, fill, pointer, 0.0)
    for _ in range(5000):
        launch(queued, add, pointer, 1.0)
    assert len(queued.queue.pending) <= 1100
    queued.cuCtxSynchronize()
    assert read(pointer) == 5000.0
    assert not queued.queue.pending
    assert np.isfinite(read(pointer))
