"""Several GPUs without any: null devices compute on the emulator, in every order the real ones might."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kernels_several as kernels
import tilewright as tw
from copy_kernels import register_copies
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.base.errors import DeviceError, UserError
from tilewright.distributed import heterogeneous, pipeline
from tilewright.runtime.cpu import pool as cpu_pool

assert pipeline and heterogeneous  # loaded before a null driver is: modules it saw come go again with it
RNG = np.random.default_rng(6)
PLACES = [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:1"]]


def matrix(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=["lazy", "random", "background"])
def driver(request: pytest.FixtureRequest) -> Iterator[NullCuda]:
    with installed(count=2, mode=request.param, seed=3) as made:
        register_copies(made)
        yield made


def test_devices_say_what_they_are(driver: NullCuda) -> None:
    found = {device.id: device for device in tw.compute_devices()}
    assert list(found) == ["cpu", "cuda:0", "cuda:1"]
    gpu = found["cuda:1"]
    assert (gpu.type, gpu.compute_capability, gpu.multiprocessors) == ("cuda", (9, 0), driver.multiprocessors)
    limits = gpu.limits
    assert (limits.threads_per_block, limits.block, limits.grid) == (1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535))
    assert (limits.warp_size, limits.cluster, limits.l2_bytes, limits.clock) == (32, 8, 60 << 20, 1_980_000_000)
    assert (limits.shared_per_block, limits.registers_per_multiprocessor, limits.memory_bus_bits) == (227 << 10, 65536, 6144)
    before = gpu.free_memory
    held = tw.allocate((1 << 20,), device="cuda:1")
    assert gpu.free_memory < before <= gpu.memory
    del held


@pytest.mark.parametrize("devices", PLACES)
def test_a_batch_on_the_host_is_shared_out(driver: NullCuda, devices: list[str]) -> None:
    x, kernel = matrix(48, 24), kernels.softmax_rows()
    spread = tw.parallel(kernel, devices, shares=[1, 1])
    found = spread(x)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, kernel(x, device="cpu"), rtol=1e-5)
    assert [part.device for part in spread.last] == devices
    np.testing.assert_allclose(tw.parallel(kernels.column_sums(), devices, shares=[1, 1], along=("x", 0))(x), x.sum(0), atol=1e-4)


@pytest.mark.parametrize("home", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("devices", PLACES)
def test_a_batch_on_a_gpu_comes_back_to_it(driver: NullCuda, devices: list[str], home: str) -> None:
    x, b = matrix(40, 24), matrix(24)
    there, kernel = tw.to_device(x, home), kernels.shifted_exp()
    for along in (("x", 0), ("x", 1)):
        spread = tw.parallel(kernel, devices, shares=[1, 1], along=along)
        out = tw.allocate((40, 24), device=home)
        for found in (spread(there, b), spread(there, tw.to_device(b, home), out=out)):
            assert f"cuda:{found.device.ordinal}" == home
            np.testing.assert_allclose(np.asarray(found), np.exp(x) + b, rtol=1e-5, atol=1e-5)  # the sum may cancel
    low, high, total = tw.parallel(kernels.extremes(), devices, shares=[1, 1])(there[:, 0])
    assert (np.asarray(low)[0], np.asarray(high)[0]) == (x[:, 0].min(), x[:, 0].max())
    np.testing.assert_allclose(np.asarray(total), x[:, 0].sum(), atol=1e-4)
    assert low.device is there.device


def test_the_cpu_gets_less_of_a_batch_than_a_gpu(driver: NullCuda) -> None:
    spread = tw.parallel(kernels.softmax_rows(), ["cuda:0", "cpu"])
    assert spread.shares[0] > 5 * spread.shares[1] > 0


def test_pipelines_copy_from_gpu_to_gpu(driver: NullCuda) -> None:
    x, b = matrix(32, 24), matrix(24)
    first, second = kernels.shifted_exp(), kernels.softmax_rows()
    expected = second(first(x, b, device="cpu"), device="cpu")
    line = tw.parallel([tw.stage(first, b), second], ["cuda:0", "cuda:1"], model=True, microbatches=4)
    before = driver.counts["cuMemcpyPeerAsync"]
    found = line(x)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert driver.counts["cuMemcpyPeerAsync"] == before + 4
    back = line(tw.to_device(x, "cuda:0"))
    assert back.device.ordinal == 0
    np.testing.assert_allclose(np.asarray(back), expected, rtol=1e-5)
    mixed = tw.parallel([tw.stage(first, b), second], ["cpu", "cuda:1"], microbatches=2)
    np.testing.assert_allclose(np.asarray(mixed(tw.to_device(x, "cuda:0"))), expected, rtol=1e-5)


def test_independent_parts_on_cpu_and_gpus(driver: NullCuda) -> None:
    x, y = matrix(200), np.abs(matrix(150))
    kernel = kernels.two_ways()
    expected = kernel(x, y, 0.5, device="cpu")
    devices = ["cpu", "cuda:0", "cuda:1"]
    names = [item.name for item in tw.heterogeneous(kernel, devices).plan(x, y, 0.5)]
    for turn in range(3):
        placement = {name: devices[(number + turn) % 3] for number, name in enumerate(names)}
        placed = tw.heterogeneous(kernel, devices, placement)
        for found, right in zip(placed(x, y, 0.5), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5)
        assert {ran.name: ran.device for ran in placed.last} == placement
        there = placed(tw.to_device(x, "cuda:1"), tw.to_device(y, "cuda:1"), 0.5)
        assert all(part.device.ordinal == 1 for part in there)
        np.testing.assert_allclose(np.asarray(there[0]), expected[0], rtol=1e-5)


def test_large_work_goes_to_the_gpu_and_small_work_stays(driver: NullCuda) -> None:
    kernel = kernels.product()
    placed = tw.heterogeneous(kernel, ["cpu", "cuda:0"])
    small, large = np.ones((4, 4), np.float32), np.ones((8192, 8192), np.float32)
    assert {item.device for item in placed.plan(small, small)} == {"cpu"}
    assert {item.device for item in placed.plan(large, large)} == {"cuda:0"}


def test_tasks_on_both(driver: NullCuda) -> None:
    x, b = matrix(30, 20), matrix(20)
    soft, shift = kernels.softmax_rows(), kernels.shifted_exp()
    left = tw.task(soft, x, device="cuda:0")
    right = tw.task(soft, x, device="cuda:1", name="right")
    both = tw.task(shift, left, b, device="cpu", name="both")
    last = tw.task(shift, right, b, device="cuda:0", name="last")
    done = tw.schedule([both, last])
    expected = np.exp(soft(x, device="cpu")) + b
    for found in done.results:
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    there = tw.schedule([tw.task(shift, tw.task(soft, tw.to_device(x, "cuda:1")), b)])
    assert there.results[0].device.ordinal == 1


def test_a_fault_on_one_device_is_told_and_the_others_go_on() -> None:
    x = matrix(64, 16)
    with installed(count=2, mode="eager") as driver:
        kernel = kernels.softmax_rows()
        spread = tw.parallel(kernel, ["cuda:0", "cuda:1"])
        spread(x)
        driver.fail["cuLaunchKernelEx"] = driver.fail["cuLaunchKernel"] = 700
        with pytest.raises(DeviceError, match="700"):
            spread(x)
        driver.fail.clear()
        with pytest.raises(DeviceError):
            spread(x)
        if len(cpu_pool.usable_cores()) > 1:
            np.testing.assert_allclose(kernel(x, device=["cpu:0/2", "cpu:1/2"]), kernel(x, device="cpu"), rtol=1e-6)
        assert [device.id for device in tw.heterogeneous(kernel).devices] == ["cpu"]


def test_a_result_on_the_host_of_arrays_on_a_gpu(driver: NullCuda) -> None:
    x, kernel = matrix(8, 8), kernels.softmax_rows()
    for _ in range(3):
        out = np.full((8, 8), 7, np.float32)
        assert kernel(tw.to_device(x, "cuda:0"), out=out) is out
        np.testing.assert_allclose(out, kernel(x, device="cpu"), rtol=1e-5)


def test_memory_is_given_back() -> None:
    with installed(count=2, mode="lazy") as driver:
        register_copies(driver)
        kernel, x = kernels.softmax_rows(), matrix(64, 16)
        spread = tw.parallel(kernel, ["cuda:0", "cuda:1"])
        line = tw.parallel([kernel, kernel], ["cuda:0", "cuda:1"])
        placed = tw.heterogeneous(kernel, ["cuda:0", "cuda:1"])
        calls = (lambda: spread(tw.to_device(x, "cuda:0")), lambda: line(x), lambda: placed(x))
        for call in calls:
            call()
        held = [tw.default_pool(name).statistics().in_use for name in ("cuda:0", "cuda:1")]
        for call in calls * 5:
            call()
        assert [tw.default_pool(name).statistics().in_use for name in ("cuda:0", "cuda:1")] == held


def test_devices_that_are_not_there_are_named() -> None:
    with installed(count=1), pytest.raises(DeviceError, match="device 'cuda:1' is not present: this machine has 1"):
        kernels.softmax_rows()(matrix(4, 4), device=["cuda:0", "cuda:1"])
    with installed(count=1), pytest.raises(UserError, match="give a list of names"):
        tw.parallel(kernels.softmax_rows(), "cuda:0")  # type: ignore[arg-type]
