"""A device from outside (`tests/toy_device`), without addresses, through the public API: the gallery, arrays, streams, futures, launches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
import toy_device
from gallery_cases import CONTRACTION_CASES, GALLERY_CASES
from tilewright.base import registry
from tilewright.base.errors import DeviceError, TargetLimit, UserError
from tilewright.cli.main import cli
from tilewright.execute.devices import find_device, own_memory
from tilewright.runtime.memory.device_array import DeviceArray
from toy_device.runtime import ToyDevice

CASES = {case.name: case for case in (*GALLERY_CASES, *CONTRACTION_CASES)}
REFUSED = {"multiply_add": "toy8 cannot take 'a' of multiply_add: it has no f64"}


@pytest.fixture(autouse=True)
def toy() -> Iterator[ToyDevice]:
    """The device, registered for one test."""
    toy_device.register()
    device = own_memory(find_device("toy"))
    assert isinstance(device, ToyDevice)
    yield device
    device.synchronize()
    toy_device.unregister()


@tw.kernel
def scale(x: tw.Array, y: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        out[i] = x[i] * y[i]
    return out


@tw.gpu
def add_one(x: tw.GpuBuffer[tw.f32], n: tw.i32):  # type: ignore[no-untyped-def]
    i = tw.gpu_thread_id()
    if i < n:
        x[i] = x[i] + 1.0


def numbers(count: int = 100) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


@pytest.mark.parametrize("elements", [1, 77, 1000])
@pytest.mark.parametrize("name", CASES)
def test_gallery(name: str, elements: int, toy: ToyDevice) -> None:
    case = CASES[name]
    if name in REFUSED:
        with pytest.raises(TargetLimit, match=REFUSED[name]) as caught:
            case.check("toy", case.arguments(elements))
        assert caught.value.diagnostics[0].span.line
        return
    before = toy.launched
    case.check("toy", case.arguments(elements))
    assert toy.launched > before


def test_arrays_have_no_addresses(toy: ToyDevice) -> None:
    x = tw.to_device(numbers(), "toy")
    assert isinstance(x, DeviceArray)
    assert x.device is toy
    for ask in (lambda: x.pointer, lambda: x[3:].pointer):
        with pytest.raises(DeviceError, match="has no address"):
            ask()
    with pytest.raises(TypeError, match="no addresses"):
        int(x.owner.handle)  # type: ignore[attr-defined]
    assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(BufferError, match="not shared through DLPack"):
        x.__dlpack_device__()
    assert (x[3:].offset, x[3:].is_aligned(4), x[3:].is_aligned(16)) == (12, True, False)


def test_arrays_go_there_and_back() -> None:
    host = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    x = tw.to_device(host, "toy:1")
    assert repr(x) == "DeviceArray(f32[5, 6], toy:1 (eight lanes))"
    np.testing.assert_array_equal(x.numpy(), host)
    np.testing.assert_array_equal(x[1:4, ::2].numpy(), host[1:4, ::2])
    np.testing.assert_array_equal(x.T.copy().numpy(), host.T)
    x[2] = 7.0
    x[0, 1:3] = np.array([1.5, 2.5], np.float32)
    host[2], host[0, 1:3] = 7.0, [1.5, 2.5]
    np.testing.assert_array_equal(tw.to_device(x, "cpu"), host)
    across = tw.to_device(x, "toy:0")
    assert across.device.id == "toy:0"
    np.testing.assert_array_equal(across.numpy(), host)
    np.testing.assert_array_equal(tw.array(x, tw.f16).numpy(), host.astype(np.float16))
    target = np.empty_like(host)
    tw.copy(target, x)
    np.testing.assert_array_equal(target, host)
    ticket = tw.copy(x, 2 * host, wait=False)
    assert ticket is not None
    ticket.wait()
    np.testing.assert_array_equal(x.numpy(), 2 * host)


def test_calls_run_where_their_arrays_are(toy: ToyDevice) -> None:
    x = tw.to_device(numbers(), "toy")
    before = toy.launched
    y = scale(x, x)
    assert isinstance(y, DeviceArray)
    assert toy.launched == before + 1
    np.testing.assert_array_equal(y.numpy(), numbers() ** 2)
    out = tw.allocate((100,), tw.f32, "toy")
    assert scale(x, y, out=out) is out
    np.testing.assert_array_equal(out.numpy(), numbers() ** 3)
    # Reading and writing the same memory in part: a copy stands between.
    assert scale(x[:50], x[:50], out=x[10:60]) is not None
    np.testing.assert_array_equal(x[10:60].numpy(), numbers(50) ** 2)
    np.testing.assert_array_equal(scale(y[:4], x[:4], device="cpu"), numbers(4) ** 3)
    assert scale.last is not None


def test_memory_comes_back(toy: ToyDevice) -> None:
    free = toy.free_memory()[0]
    x = tw.to_device(numbers(1000), "toy")
    assert toy.free_memory()[0] == free - 4000
    x.free()
    with pytest.raises(DeviceError, match="used after it was freed"):
        x.numpy()
    y = scale(tw.to_device(numbers(), "toy"), numbers())
    del x, y
    toy.synchronize()
    assert toy.free_memory()[0] == free
    with pytest.raises(DeviceError, match="out of memory on toy:0"):
        tw.allocate((1 << 30,), tw.f32, "toy")


def test_futures() -> None:
    first = scale(numbers(), numbers(), device="toy", asynchronous=True)
    np.testing.assert_array_equal(first.result(), numbers() ** 2)
    x = tw.to_device(numbers(), "toy")
    chained = scale(scale(x, x, asynchronous=True), x, asynchronous=True)
    np.testing.assert_array_equal(chained.result().numpy(), numbers() ** 3)
    there = tw.transfer(numbers(), "toy")
    back = tw.transfer(scale(there, there, asynchronous=True), "cpu")
    np.testing.assert_array_equal(back.result(), numbers() ** 2)
    # What the CPU makes later is waited for by the host.
    mixed = scale(scale(numbers(), numbers(), device="cpu", asynchronous=True), numbers(), device="toy", asynchronous=True)
    np.testing.assert_array_equal(mixed.result(), numbers() ** 3)


def test_streams_and_events(toy: ToyDevice) -> None:
    x = tw.to_device(numbers(), "toy")
    one, other = tw.Stream("toy"), tw.Stream("toy")
    assert one.device == "toy:0" and one.handle != other.handle
    assert not hasattr(one, "__cuda_stream__")
    with one:
        assert tw.current_stream("toy").handle == one.handle
        y = scale(x, x)
    other.wait(one.record())
    with other:
        z = scale(y, x)
    other.synchronize()
    assert other.done()
    np.testing.assert_array_equal(z.numpy(), numbers() ** 3)
    with tw.timed("toy") as timer:
        scale(x, x)
    assert timer.milliseconds > 0
    queue = tw.Stream("cpu")
    queue.wait(one.record())
    queue.synchronize()
    with pytest.raises(UserError, match=r"'toy:0' has 0 .first. to 0 .last."):
        tw.Stream("toy", priority=1)


def test_explicit_kernels_and_primitives() -> None:
    x = tw.to_device(numbers(), "toy")
    for _ in range(2):
        tw.gpu_launch(add_one, 100, 32, x, 100)
    np.testing.assert_array_equal(x.numpy(), numbers() + 2)
    host = numbers()
    tw.gpu_launch(add_one, 100, 32, host, 100, device="toy")
    np.testing.assert_array_equal(host, numbers() + 1)
    total = tw.gpu_reduce(x, 0.0, "sum")
    assert isinstance(total, DeviceArray)
    assert float(total.numpy()) == float((numbers() + 2).sum())
    np.testing.assert_allclose(tw.gpu_scan(x).numpy(), np.cumsum(numbers() + 2), rtol=1e-6)
    with pytest.raises(TargetLimit, match="toy8 cannot do atomic of 64 bits"):
        tw.gpu_scan(tw.to_device(numbers(1 << 17), "toy"))  # too long for one block
    with pytest.raises(TargetLimit, match="transpose needs 16640 bytes of shared memory; a block of toy8 has 16384"):
        tw.gpu_transpose(tw.to_device(numbers().reshape(10, 10), "toy"))
    tw.gpu_sync()


def test_several_devices() -> None:
    found = scale(numbers(64), numbers(64), device=["toy:0", "toy:1"])
    np.testing.assert_array_equal(found, numbers(64) ** 2)
    assert [part.device for part in scale.ran] == ["toy:0", "toy:1"]  # type: ignore[attr-defined]


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="graphs cannot be captured on 'toy:0'"), tw.capture("toy"):
        pass
    with pytest.raises(UserError, match=r"toy:0 .eight lanes. has no pinned memory"):
        tw.allocate((3,), device="toy", pinned=True)
    with pytest.raises(UserError, match=r"toy:0 .eight lanes. has no memory pools"):
        tw.memory_pool("toy")
    with pytest.raises(UserError, match=r"toy:0 .eight lanes. does not see host memory"):
        tw.to_device(numbers(), "toy", copy=False)
    x = tw.to_device(numbers(), "toy")
    with pytest.raises(UserError, match="'x' runs backwards"):
        scale(x[::-1], x)
    with pytest.raises(UserError, match="an array on toy:0"):
        scale(x, x, device="toy:1")


def test_names() -> None:
    assert {"toy:0", "toy:1"} <= {device.id for device in tw.devices()}
    device = find_device("toy")
    assert (device.kind, device.target.name, device.limits.warp_size) == ("toy", "toy8", 8)
    with pytest.raises(DeviceError, match="'toy:2' is not present"):
        find_device("toy:2")
    with pytest.raises(UserError, match="unknown device 'toy:x'"):
        find_device("toy:x")
    with pytest.raises(UserError) as caught:
        find_device("toys")
    assert "toy, toy:N" in str(caught.value)
    listed = CliRunner().invoke(cli, ["devices"], env={"COLUMNS": "200"})
    assert "toy:1" in listed.output and "toy8" in listed.output
    registry.unregister("toy")
    with pytest.raises(UserError, match="unknown device 'toy'"):
        find_device("toy")
