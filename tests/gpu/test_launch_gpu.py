"""Launches from machine code on a real GPU: forms, streams, results of each library, PyTorch's graphs, threads."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import DeviceError, UserError
from tilewright.device_kinds.cuda.calls import CudaCalls
from tilewright.runtime.core import streams
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.memory.device_array import DeviceArray

pytestmark = pytest.mark.requires("cuda")


@tw.kernel
def axpy(x: tw.Array, y: tw.Array, a: float) -> tw.Array:
    out = tw.empty(x.shape, x.dtype)
    for i in range(x.shape[0]):
        out[i] = a * x[i] + y[i]
    return out


@tw.kernel
def turned(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in range(n):
        out[i] = x[n - 1 - i]
    return out


@tw.kernel
def share(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    total = 0.0
    for i in tw.grid(n):
        total += x[i]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] / total
    return out


@tw.kernel
def product(a: tw.Array, b: tw.Array) -> tw.Array:
    n, k = a.shape
    _, m = b.shape
    out = tw.empty((n, m), a.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in tw.grid(k):
            total += a[i, p] * b[p, j]
        out[i, j] = total
    return out


@tw.kernel
def both(x: tw.Array, n: int, flag: bool) -> tuple[tw.Array, tw.Array]:
    up = tw.empty(x.shape, x.dtype)
    down = tw.empty(x.shape, x.dtype)
    for i in range(x.shape[0]):
        up[i] = x[i] + n if flag else x[i]
        down[i] = x[i] - n
    return up, down


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that took the general path, by the kernel's name."""
    # Calls that an earlier test left with the host send all calls of the process to the general path.
    end = time.monotonic() + 20
    while streams.FAST_PATH_OFF.value and time.monotonic() < end:
        time.sleep(0.001)
    assert streams.FAST_PATH_OFF.value == 0, "an earlier test left a capture open or calls pending"
    gc.collect()
    seen: list[str] = []
    original = CudaCalls.run

    def run(self: CudaCalls, *args: object) -> object:
        seen.append(self.function.name)
        result = original(self, *args)  # type: ignore[arg-type]
        # Shown where a test fails: what kept the call from being learnt.
        print(self.function.name, [type(a).__name__ for a in args], "fast path off:", streams.FAST_PATH_OFF.value, "named:", streams.STREAM_NAMED.value)
        return result

    monkeypatch.setattr(CudaCalls, "run", run)
    return seen


def device_array(values: Any) -> DeviceArray:
    made = tw.to_device(np.asarray(values, np.float32), "cuda")
    assert isinstance(made, DeviceArray)
    return made


def test_the_layout_of_a_launch_is_the_bindings_own() -> None:
    """What machine code reads is laid out as the driver's own headers say."""
    from cuda.bindings import driver

    from tilewright.base import launch_abi
    from tilewright.runtime.cuda.launch_records import _Attribute, _Step

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 1, 2, 3
    config.blockDimX, config.blockDimY, config.blockDimZ = 4, 5, 6
    config.sharedMemBytes, config.hStream, config.attrs, config.numAttrs = 7, 0x1234567890, [attribute], 1
    seen = _Step.from_buffer_copy(ctypes.string_at(config.getPtr(), launch_abi.CONFIG_BYTES).ljust(launch_abi.STEP_BYTES, b"\0"))
    assert (*seen.grid, *seen.block, seen.shared, seen.stream, seen.attribute_count) == (1, 2, 3, 4, 5, 6, 7, 0x1234567890, 1)
    inner = _Attribute.from_address(seen.attributes)
    assert (inner.id, inner.value) == (6, 1)


def test_shapes_in_turn(general: list[str]) -> None:
    kernel = tw.Kernel(axpy.python)
    arrays = [device_array(np.arange(n)) for n in (1, 7, 64, 1000, 4096, 100_000)]
    for turn in range(4):
        for x in arrays:
            assert np.array_equal(kernel(x, x, float(turn)).numpy(), np.arange(x.shape[0], dtype=np.float32) * (turn + 1))
    assert general == ["axpy"] * len(arrays)


def test_tensors_give_tensors(torch: Any, general: list[str]) -> None:
    kernel = tw.Kernel(axpy.python)
    x, y = torch.arange(1000, device="cuda", dtype=torch.float32), torch.ones(1000, device="cuda")
    for turn in range(4):
        found = kernel(x, y, float(turn))
        assert type(found) is torch.Tensor and found.device == x.device
        assert torch.equal(found, turn * x + y)
        out = torch.empty_like(x)
        assert kernel(x, y, float(turn), out=out) is out
        assert torch.equal(out, turn * x + y)
    assert general == ["axpy"] * 2


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64", "float32"])
def test_dtypes_of_tensors(torch: Any, general: list[str], name: str) -> None:
    kernel, dtype = tw.Kernel(axpy.python), getattr(torch, name)
    x = torch.arange(64, device="cuda").to(dtype)
    for a in (0.5, 2.0, 2.0, -1.0):
        found = kernel(x, x, a)
        assert found.dtype is dtype
        assert torch.equal(found.double(), x.double() * (a + 1))
    assert general == ["axpy"]


def test_views_of_tensors(torch: Any, general: list[str]) -> None:
    kernel, whole = tw.Kernel(axpy.python), torch.arange(4096, device="cuda", dtype=torch.float32)
    views = [whole[:64], whole[1:65], whole[::64], whole.view(64, 64).t()[3], whole[:1]]
    for _ in range(3):
        for view in views:
            assert torch.equal(kernel(view, view, 2.0), 3 * view)
    assert general == ["axpy"] * len(views)


def test_several_results(torch: Any, general: list[str]) -> None:
    kernel, x = tw.Kernel(both.python), torch.arange(10, device="cuda", dtype=torch.float32)
    for n, flag in ((3, True), (4, False), (-5, True)):
        up, down = kernel(x, n, flag)
        assert torch.equal(up, x + n if flag else x) and torch.equal(down, x - n)
        given = torch.empty_like(x), torch.empty_like(x)
        assert kernel(x, n, flag, out=given) is given
        assert torch.equal(given[0], up) and torch.equal(given[1], down)
    assert general == ["both"] * 2


def test_cupy_gives_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(100, dtype=cupy.float32)
    for a in (1.0, 2.0):
        found = axpy(x, x, a)
        assert isinstance(found, cupy.ndarray)
        assert cupy.array_equal(found, x * (a + 1))
        out = cupy.empty_like(x)
        assert axpy(x, x, a, out=out) is out
        assert cupy.array_equal(out, found)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        big = cupy.arange(1 << 22, dtype=cupy.float32)
        found = axpy(big, big, 1.0)
        assert cupy.array_equal(found, 2 * big)


def test_mixed_libraries(torch: Any) -> None:
    own, tensor, host = device_array([1, 2, 3]), torch.tensor([10.0, 20, 30], device="cuda"), np.array([1, 2, 3], np.float32)
    for _ in range(2):
        assert axpy(own, tensor, 2.0).tolist() == [12, 24, 36]
        assert isinstance(axpy(own, tensor, 2.0), torch.Tensor)
        out = device_array([0, 0, 0])
        axpy(tensor, own, 1.0, out=out)
        torch.cuda.synchronize()
        assert out.numpy().tolist() == [11, 22, 33]
        assert isinstance(axpy(own, own, 1.0), DeviceArray)
        assert isinstance(axpy(host, host, 1.0, device="cuda"), np.ndarray)


def test_tensors_that_are_refused(torch: Any) -> None:
    x = torch.ones(8, device="cuda")
    kernel = tw.Kernel(axpy.python)
    kernel(x, x, 1.0), kernel(x, x, 1.0)
    with pytest.raises(UserError, match="requires a gradient"):
        kernel(x, torch.ones(8, device="cuda", requires_grad=True), 1.0)
    negated = torch.view_as_complex(torch.ones(8, 2, device="cuda")).conj().imag
    with pytest.raises(UserError, match="negated view"):
        kernel(negated, negated, 1.0)
    with pytest.raises(UserError, match="negated view"):
        kernel(negated[:1], negated[:1], 1.0)
    assert kernel(x, x, 1.0).tolist() == [2.0] * 8
    parameter = torch.nn.Parameter(x, requires_grad=False)
    assert kernel(parameter, x, 1.0).tolist() == [2.0] * 8


# -- streams ---------------------------------------------------------------------------------------------------------------


def test_the_current_stream_of_torch(torch: Any, general: list[str]) -> None:
    """A long wait on the stream before the inputs are written: a launch elsewhere would read what was there before."""
    kernel = tw.Kernel(axpy.python)
    x = torch.zeros(1 << 20, device="cuda")
    kernel(x, x, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for turn in range(1, 5):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.fill_(turn)
            found = kernel(x, x, 1.0)
            assert found.sum().item() == 2 * turn * (1 << 20)
    assert general == ["axpy"]


def test_a_named_stream_and_tensors(torch: Any) -> None:
    device = cuda.devices()[0]
    stream = device.create_stream()
    x = torch.zeros(1 << 20, device="cuda")
    for turn in range(1, 4):
        torch.cuda._sleep(10_000_000)
        x.fill_(turn)
        with streams.use(0, stream):
            found = axpy(x, x, 1.0)
        assert found.sum().item() == 2 * turn * (1 << 20)


def test_a_named_stream(general: list[str]) -> None:
    kernel, device = tw.Kernel(axpy.python), cuda.devices()[0]
    stream = device.create_stream()
    x = device_array(np.arange(1 << 16))
    kernel(x, x, 1.0)
    with streams.use(0, stream):
        results = [kernel(x, x, float(a)) for a in range(8)]
    assert {r.owner.stream for r in results} == {stream}
    for a, result in enumerate(results):
        assert np.array_equal(result.numpy(), np.arange(1 << 16, dtype=np.float32) * (a + 1))
    assert general == ["axpy"]


def test_graphs_of_torch(torch: Any, general: list[str]) -> None:
    """Our kernels are captured: results and scratch come from the graph's own memory."""
    kernels = [tw.Kernel(k.python) for k in (axpy, share, product)]
    x = torch.ones(4096, device="cuda")
    a = torch.ones(128, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def work() -> Any:
        kernels[0](x, x, 2.0, out=out)
        return kernels[0](kernels[1](out), x, 1.0), kernels[2](a, a)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    learnt = len(general)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shares, squared = work()
    assert len(general) == learnt
    junk = [torch.full((4096,), -7.0, device="cuda") for _ in range(50)]
    for value in (1.0, 3.0, 5.0):
        x.fill_(value)
        a.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert out[0].item() == 3 * value
        assert shares[7].item() == pytest.approx(1 / 4096 + value)
        assert squared[3, 5].item() == 128 * value * value
    assert all(j[0].item() == -7 for j in junk)


# -- what is refused, and errors -------------------------------------------------------------------------------------------


def test_freed_arrays() -> None:
    kernel, x, out = tw.Kernel(axpy.python), device_array([1, 2]), device_array([0, 0])
    kernel(x, x, 1.0, out=out), kernel(x, x, 1.0, out=out)
    x.free()
    with pytest.raises(DeviceError, match="used after it was freed"):
        kernel(x, x, 1.0, out=out)


def test_results_that_overlap_inputs(torch: Any) -> None:
    kernel = tw.Kernel(turned.python)
    whole = torch.arange(12, device="cuda", dtype=torch.float32)
    kernel(whole[:8], out=torch.empty(8, device="cuda"))
    kernel(whole[:8], out=whole[4:])
    assert whole.tolist() == [0, 1, 2, 3, 7, 6, 5, 4, 3, 2, 1, 0]
    own = device_array(np.arange(12))
    kernel(own[:8], out=device_array(np.zeros(8)))
    kernel(own[:8], out=own[4:])
    assert own.numpy().tolist() == [0, 1, 2, 3, 7, 6, 5, 4, 3, 2, 1, 0]


def test_another_device(torch: Any) -> None:
    if len(cuda.devices()) < 2:
        pytest.skip("there is one GPU")
    x, y = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
    axpy(x, x, 1.0), axpy(y, y, 1.0)
    assert axpy(y, y, 1.0).device.index == 1
    with pytest.raises(DeviceError, match="cuda:1"):
        axpy(x, y, 1.0)


def test_new_addresses_have_new_maps(torch: Any, general: list[str]) -> None:
    kernel = tw.Kernel(product.python)
    ones = torch.eye(128, device="cuda", dtype=torch.bfloat16)
    factors = [ones * k for k in range(1, 100)]
    for turn in range(2):
        for k, factor in enumerate(factors, 1):
            assert kernel(factor, ones)[5, 5].item() == k, turn
    assert general == ["product"]


def test_threads(torch: Any) -> None:
    """Each thread has streams and shapes of its own, and one kernel serves them all."""
    kernel, wrong = tw.Kernel(axpy.python), []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                n = 1000 + number % 4
                x = torch.full((n,), float(number), device="cuda")
                own = device_array(np.full(n, number))
                for turn in range(200):
                    if kernel(x, x, float(turn))[n - 1].item() != number * (turn + 1):
                        wrong.append((number, turn))
                    if turn % 20 == 0 and kernel(own, own, 1.0).numpy()[0] != 2 * number:
                        wrong.append((number, turn, "own"))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_many_launches_leave_memory_where_it_was(torch: Any) -> None:
    device, kernel = cuda.devices()[0], tw.Kernel(share.python)
    x, t = device_array(np.ones(4096)), torch.ones(4096, device="cuda")
    for _ in range(5):
        kernel(x), kernel(t)
    device.synchronize()
    gc.collect()
    before, others = device.pool.usage()[0], torch.cuda.memory_allocated()
    for _ in range(20_000):
        kernel(x), kernel(t)
    device.synchronize()
    gc.collect()
    assert device.pool.usage()[0] == before
    assert torch.cuda.memory_allocated() == others


def test_the_first_kernel_of_a_process_is_launched_by_machine_code_too(torch: Any) -> None:
    """What machine code knows of PyTorch must outlive the loading of what all launchers share."""
    code = """
import torch, tilewright as tw
from test_launch_gpu import CudaCalls, turned

seen, original = [], CudaCalls.run
CudaCalls.run = lambda self, *args: (seen.append(1), original(self, *args))[1]
x = torch.arange(5.0, device="cuda")
for _ in range(4):
    result = turned(x)
print(len(seen), result.tolist())
"""
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r})\n{code}"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(None, 1) == ["1", "[4.0, 3.0, 2.0, 1.0, 0.0]\n"]
