"""A WebGPU device: memory, copies of any bytes, calls that are bound once, refusals and failures."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit, UserError
from tilewright.execute.devices import find_device, own_memory
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.webgpu import adapters, queue
from tilewright.runtime.webgpu.device import WebGpuDevice

needs_device = pytest.mark.requires("webgpu")


@tw.kernel
def scaled(x: tw.Array, a: float) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * a
    return out


@tw.kernel(check=True)
def picked(x: tw.Array, places: tw.Array) -> tw.Array:
    n = places.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[places[i]]
    return out


@tw.gpu
def staged(x: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    kept = tw.shared(65536, tw.f32)
    i = tw.gpu_thread_id()
    kept[i] = x[i]
    tw.barrier()
    x[i] = kept[31 - i]


@tw.gpu
def second(x: tw.GpuBuffer[tw.f32], unused: tw.GpuBuffer[tw.f32]):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    x[i] = x[i] + 1.0


@needs_device
def test_arrays_go_there_and_back() -> None:
    for dtype in (np.float32, np.float16, np.int8, np.int64, np.bool_):
        host = np.arange(35).reshape(5, 7).astype(dtype)
        x = tw.to_device(host, "webgpu")
        assert isinstance(x, DeviceArray)
        np.testing.assert_array_equal(x.numpy(), host)
        np.testing.assert_array_equal(x[1:4, ::2].numpy(), host[1:4, ::2])
        np.testing.assert_array_equal(x.T.copy().numpy(), host.T)
        x[0, 1:4] = np.ones(3, dtype)
        host[0, 1:4] = 1
        x[2] = 0
        host[2] = 0
        np.testing.assert_array_equal(x.numpy(), host)
    with pytest.raises(DeviceError, match="has no address"):
        _ = x.pointer
    x.free()
    with pytest.raises(DeviceError, match="after it was freed"):
        x.numpy()


@needs_device
def test_memory_that_a_cycle_of_garbage_held_is_used_again() -> None:
    for _ in range(3):
        cycle: list[object] = [tw.to_device(np.ones(33, np.float32), "webgpu")]
        cycle.append(cycle)
        del cycle
        gc.collect()
        again = tw.to_device(np.arange(33, dtype=np.float32), "webgpu")
        np.testing.assert_array_equal(again.numpy(), np.arange(33))


@needs_device
def test_calls_are_bound_once() -> None:
    x = tw.to_device(np.arange(33, dtype=np.float32), "webgpu")
    out = tw.to_device(np.zeros(33, np.float32), "webgpu")
    device = own_memory(find_device("webgpu"))
    assert isinstance(device, WebGpuDevice)
    before = device.dispatched
    for factor in (2.0, 2.0, 3.0):
        assert scaled(x, factor, out=out) is out
        np.testing.assert_array_equal(out.numpy(), np.arange(33, dtype=np.float32) * np.float32(factor))
    assert device.dispatched == before + 3
    # What is read shares its buffer with what is written.
    scaled(x[:16], 2.0, out=x[17:])
    np.testing.assert_array_equal(x.numpy()[17:], 2 * np.arange(16))
    assert scaled.last is not None
    assert scaled.last.target == "wgsl"


@needs_device
@pytest.mark.parametrize("raw", [True, False])
def test_a_bound_call_again(raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the C functions of wgpu-native, or where those are not found by wgpu-py's objects: other numbers, and arrays that are copied first, are served alike."""
    device = own_memory(find_device("webgpu"))
    assert isinstance(device, WebGpuDevice)
    asked: list[int] = []
    if raw:
        whole = device.submit_raw
        monkeypatch.setattr(device, "submit_raw", lambda commands: (asked.append(1), whole(commands)))
    else:
        monkeypatch.setattr(device, "raw", None)
        monkeypatch.setattr(device, "submit_raw", lambda commands: pytest.fail("the C functions are not there"))
    x = tw.to_device(np.arange(71 + raw, dtype=np.float32), "webgpu")
    out = device.empty(x.shape, tw.f32)
    for a in (2.0, 3.0, 3.0):
        scaled(x, a, out=out)
        np.testing.assert_array_equal(out.numpy(), a * x.numpy())
    second[1, len(x)](x, x)
    second[1, len(x)](x, x)
    np.testing.assert_array_equal(x.numpy(), np.arange(len(x)) + 2)
    assert bool(asked) is raw


@needs_device
def test_an_error_of_a_bound_call_is_raised() -> None:
    device = own_memory(find_device("webgpu"))
    assert isinstance(device, WebGpuDevice) and device.raw is not None
    source = device.gpu.create_buffer(size=4, usage=0x8)  # copies may not read it
    target = device.gpu.create_buffer(size=4, usage=0x8)
    with pytest.raises(DeviceError, match="refused work"):
        device.submit_raw(device.raw.bound([], [(source, 0, target, 4)]))
    np.testing.assert_array_equal(scaled(np.ones(5, np.float32), 2.0, device="webgpu"), np.full(5, 2.0))


@needs_device
def test_an_index_outside_is_reported() -> None:
    with pytest.raises(UserError, match="picked reads 'x' at index 99, but its extent there is 5"):
        picked(np.ones(5, np.float32), np.array([1, 99], np.int32), device="webgpu")


@needs_device
def test_refusals() -> None:
    device = own_memory(find_device("webgpu"))
    with pytest.raises(DeviceError, match="more than webgpu:0"):
        device.empty((1 << 32,), tw.f32)
    with pytest.raises(UserError, match="has no f64"):
        tw.to_device(np.ones(3), "webgpu")
    with pytest.raises(DeviceError, match="device 'webgpu:7' is not present"):
        find_device("webgpu:7")
    with pytest.raises(TargetLimit, match="staged needs 262144 bytes of shared memory; a block of wgsl has"):
        staged[1, 32](tw.to_device(np.ones(32, np.float32), "webgpu"))


@needs_device
def test_more_arrays_than_a_kernel_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    device = own_memory(find_device("webgpu"))
    scaled(np.ones(3, np.float32), 2.0, device="webgpu")
    assert scaled.last is not None
    monkeypatch.setattr(device, "target", replace(find_device("webgpu").target, max_arrays=1))
    with pytest.raises(TargetLimit, match=r"kernel 'tw_scaled_0' of 'scaled' has 2 arrays, but webgpu:0 .* gives a kernel 1"):
        device.load(scaled.last)


@needs_device
def test_a_lost_device_says_so() -> None:
    found, _ = adapters.adapters(0)
    device = WebGpuDevice(9, found[0])
    x = device.from_numpy(np.ones(3, np.float32))

    def lost(*given: object) -> None:
        raise RuntimeError("Parent device is lost")

    device.gpu.queue.submit = lost
    with pytest.raises(DeviceError, match=r"webgpu:9 .* is lost: Parent device is lost"):
        x.numpy()
    with pytest.raises(DeviceError, match="is lost"):
        device.synchronize()


@needs_device
def test_arrays_that_a_kernel_does_not_use_are_bound_all_the_same() -> None:
    x = tw.to_device(np.ones(4, np.float32), "webgpu")
    second[1, 4](x, tw.to_device(np.ones(9, np.float32), "webgpu"))
    np.testing.assert_array_equal(x.numpy(), 2)


@needs_device
def test_a_rejected_shader_is_a_bug_with_its_text() -> None:
    device = own_memory(find_device("webgpu"))
    scaled(np.ones(3, np.float32), 2.0, device="webgpu")
    assert scaled.last is not None
    with pytest.raises(CompilerBug, match="rejects the code of 'scaled'") as caught:
        device.load(replace(scaled.last, code=b"fn broken( {"))
    place = Path(str(caught.value).rpartition(" is in ")[2].split()[0])
    assert place.read_text() == "fn broken( {"
    place.unlink()


@needs_device
def test_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not answer is lost, and says so from then on."""
    found, _ = adapters.adapters(0)
    device = WebGpuDevice(9, found[0])
    x = device.from_numpy(np.ones(3, np.float32))
    monkeypatch.setattr(queue, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(device.gpu, "_poll", lambda: None)
    monkeypatch.setattr(device.gpu, "_poll_wait", lambda: time.sleep(0.5))
    monkeypatch.setattr(type(x.owner.buffer), "map_async", lambda *given: SimpleNamespace(_state="pending"))
    with pytest.raises(DeviceError, match="did not answer"):
        x.numpy()
    assert device.lost
    with pytest.raises(DeviceError, match="is lost"):
        device.synchronize()


def test_no_adapter_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters.importlib, "import_module", lambda name: SimpleNamespace(gpu=SimpleNamespace(enumerate_adapters_sync=list)))
    adapters.adapters.cache_clear()
    assert adapters.adapters(-1) == ((), "wgpu finds no adapter (a Vulkan driver such as mesa-vulkan-drivers is needed)")
    monkeypatch.undo()

    def missing(name: str) -> object:
        raise ImportError("No module named 'wgpu'")

    monkeypatch.setattr(adapters.importlib, "import_module", missing)
    assert "pip install tilewright[webgpu]" in adapters.adapters(-2)[1]
