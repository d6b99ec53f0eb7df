"""Several devices with real GPUs: as many as there are, and the CPU. Skipped where there is no GPU."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import kernels_several as kernels
import tilewright as tw
from tilewright.runtime.cuda import device as cuda

pytestmark = pytest.mark.requires("cuda")
RNG = np.random.default_rng(8)


def gpus() -> list[str]:
    return [device.id for device in tw.devices() if device.kind == "cuda"]


def places() -> list[list[str]]:
    """Lists of devices to share work: every GPU with the CPU, and all GPUs where there are several."""
    found = [["cuda:0", "cpu"], ["cpu", "cuda:0"], ["cuda:0"]]
    return [*found, gpus(), [*reversed(gpus())]] if len(gpus()) > 1 else found


def matrix(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def even(devices: list[str]) -> list[float]:
    return [1.0] * len(devices)


def test_the_gpu_says_what_it_is() -> None:
    gpu = next(device for device in tw.compute_devices() if device.kind == "cuda")
    limits = gpu.limits
    assert gpu.compute_capability is not None and gpu.compute_capability >= (7, 5)
    assert gpu.memory > 1 << 30 and 0 < gpu.free_memory <= gpu.memory
    assert limits.threads_per_block == 1024 and limits.warp_size == 32 and limits.block[2] == 64
    assert limits.grid == (2**31 - 1, 65535, 65535)
    assert limits.shared_per_block >= 48 << 10 and limits.shared_per_multiprocessor >= limits.shared_per_block
    assert limits.registers_per_multiprocessor == 65536 and limits.l2_bytes > 1 << 20
    assert limits.clock > 10**8 and limits.memory_clock > 10**8 and limits.memory_bus_bits >= 64
    assert limits.cluster == (8 if gpu.compute_capability >= (9, 0) else 1)
    before = gpu.free_memory
    held = tw.allocate((1 << 26,), device=gpu.id)
    assert gpu.free_memory <= before
    del held


def test_a_batch_is_shared_out() -> None:
    x, b, kernel = matrix(999, 200), matrix(200), kernels.shifted_exp()
    expected = np.exp(x.astype(np.float64)) + b
    for devices in places():
        for along in (("x", 0), ("x", 1)):
            spread = tw.parallel(kernel, devices, shares=even(devices), along=along)
            np.testing.assert_allclose(spread(x, b), expected, rtol=1e-5, atol=1e-5)
            assert [part.device for part in spread.last] == devices
            for home in gpus():
                there = tw.to_device(x, home)
                out = tw.allocate(x.shape, device=home)
                for found in (spread(there, b), spread(there, tw.to_device(b, home), out=out)):
                    assert f"cuda:{found.device.ordinal}" == home
                    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


def test_sums_and_products_over_the_batch() -> None:
    x = matrix(4001, 64)
    for devices in places():
        sums = tw.parallel(kernels.column_sums(), devices, shares=even(devices), along=("x", 0))
        np.testing.assert_allclose(sums(x), x.sum(0, dtype=np.float64), atol=1e-3)
        np.testing.assert_allclose(np.asarray(sums(tw.to_device(x, "cuda:0"))), x.sum(0, dtype=np.float64), atol=1e-3)
        low, high, total = tw.parallel(kernels.extremes(), devices, shares=even(devices))(x[:, 0])
        assert (low[0], high[0]) == (x[:, 0].min(), x[:, 0].max())
        np.testing.assert_allclose(total, x[:, 0].sum(dtype=np.float64), atol=1e-3)
        rows = tw.parallel(kernels.product(), devices, shares=even(devices))
        np.testing.assert_allclose(rows(x[:512], x[:64]), x[:512].astype(np.float64) @ x[:64], atol=1e-3)


def test_tensors_of_torch_come_back_as_such() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(500, 64, device="cuda:0")
    for devices in places():
        found = tw.parallel(kernels.softmax_rows(), devices, shares=even(devices))(x)
        assert isinstance(found, torch.Tensor) and found.device == x.device
        torch.testing.assert_close(found, torch.softmax(x, 1), rtol=1e-4, atol=1e-6)


def test_pipelines() -> None:
    x, b, w = matrix(256, 64), matrix(64), matrix(64, 32)
    first, second, third = kernels.shifted_exp(), kernels.product(), kernels.softmax_rows()
    scores = (np.exp(x.astype(np.float64)) + b) @ w
    expected = np.exp(scores - scores.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    others = gpus()[1:] or ["cuda:0"]
    for devices in (["cuda:0", "cpu", "cuda:0"], ["cpu", "cuda:0", "cpu"], ["cuda:0", others[0], "cuda:0"]):
        line = tw.parallel([tw.stage(first, b), tw.stage(second, w), third], devices, model=True, microbatches=4)
        np.testing.assert_allclose(line(x), expected, rtol=1e-3, atol=1e-4)
        back = line(tw.to_device(x, "cuda:0"))
        assert back.device.ordinal == 0
        np.testing.assert_allclose(np.asarray(back), expected, rtol=1e-3, atol=1e-4)
        assert {step.device for step in line.last} == set(devices)


def test_independent_parts_on_cpu_and_gpu() -> None:
    x, y = matrix(30_000), np.abs(matrix(20_000))
    kernel = kernels.two_ways()
    expected = kernel(x, y, 0.5, device="cpu")
    devices = ["cpu", *gpus()]
    names = [item.name for item in tw.heterogeneous(kernel, devices).plan(x, y, 0.5)]
    for turn in range(len(devices)):
        placement = {name: devices[(number + turn) % len(devices)] for number, name in enumerate(names)}
        placed = tw.heterogeneous(kernel, devices, placement)
        for found, right in zip(placed(x, y, 0.5), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4)
        assert {ran.name: ran.device for ran in placed.last} == placement
        there = placed(tw.to_device(x, "cuda:0"), tw.to_device(y, "cuda:0"), 0.5)
        np.testing.assert_allclose(np.asarray(there[0]), expected[0], rtol=1e-4)
    for found, right in zip(kernel(x, y, 0.5, device="heterogeneous"), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4)


def test_contractions_in_parts() -> None:
    a, b = matrix(512, 256), matrix(256, 384)
    for device in ("cpu", "cuda:0"):
        found = kernels.product()(a, b, device="heterogeneous", devices=[device])
        np.testing.assert_allclose(found, a.astype(np.float64) @ b, atol=1e-3)


def test_tasks() -> None:
    x, b = matrix(300, 200), matrix(200)
    soft, shift = kernels.softmax_rows(), kernels.shifted_exp()
    left, right = tw.task(soft, x, device="cuda:0"), tw.task(soft, x, device="cpu", name="right")
    done = tw.schedule([tw.task(shift, left, b, device="cpu"), tw.task(shift, right, b, device="cuda:0", name="last")])
    expected = np.exp(soft(x, device="cpu")) + b
    for found in done.results:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1", reason="times mean nothing beside other tests")
def test_cpu_and_gpu_work_at_the_same_time() -> None:
    """Each alone takes as long as it takes; together not the sum."""

    @tw.kernel
    def busy(x: tw.Array, rounds: int) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            value = x[i]
            for _ in range(rounds):
                value = tw.sqrt(value * value + 1e-30)
            out[i] = value
        return out

    x = np.ones(4096, np.float32)

    def seconds(device: str, rounds: int) -> float:
        busy(x, rounds, device=device)
        start = time.perf_counter()
        busy(x, rounds, device=device)
        return time.perf_counter() - start

    rounds = {device: max(1000, int(20_000 * 0.15 / seconds(device, 20_000))) for device in ("cpu", "cuda:0")}
    tasks = [tw.task(busy, x, rounds[device], device=device, name=device) for device in rounds]
    tw.schedule(tasks)
    start = time.perf_counter()
    done = tw.schedule(tasks)
    together = time.perf_counter() - start
    assert together < 0.8 * sum(ran.seconds for ran in done.ran)


def test_memory_is_given_back() -> None:
    kernel, x = kernels.softmax_rows(), matrix(640, 160)
    spread = tw.parallel(kernel, ["cuda:0", "cpu"], shares=[1, 1])
    line = tw.parallel([kernel, kernel], ["cuda:0", "cpu"])
    placed = tw.heterogeneous(kernel, ["cuda:0"])
    calls = (lambda: spread(tw.to_device(x, "cuda:0")), lambda: line(x), lambda: placed(x))
    for call in calls:
        call()
    held = tw.default_pool("cuda:0").statistics().in_use
    for call in calls * 20:
        call()
    assert tw.default_pool("cuda:0").statistics().in_use == held
    cuda.devices()[0].synchronize()
