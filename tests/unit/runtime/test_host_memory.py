"""Pinned, registered and managed memory, and copies through them, on the null driver, which is lazy: what nobody waits for does not happen."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda import FakeCuda

import tilewright.compile.driver  # noqa: F401 (says where machine code comes from)
from copy_kernels import register_copies
from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.cuda import host_memory
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver
from tilewright.runtime.cuda.host_memory import registered


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
    assert set(fake.leaks()) <= {"module"}


def numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)


# -- staging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 1, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, (41 << 20) + 7])
def test_plain_memory_goes_through_the_ring(device: CudaDevice, fake: FakeCuda, nbytes: int) -> None:
    values = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    array = device.from_numpy(values)
    assert fake.calls("cuMemcpyHtoD") == []
    assert len(fake.calls("cuMemcpyHtoDAsync")) == -(-nbytes // host_memory.PIECE)
    np.testing.assert_array_equal(array.numpy(), values)
    assert fake.calls("cuMemcpyDtoH") == []


def test_small_copies_are_the_drivers(device: CudaDevice, fake: FakeCuda) -> None:
    device.from_numpy(numbers(100)).numpy()
    assert len(fake.calls("cuMemcpyHtoD")) == len(fake.calls("cuMemcpyDtoH")) == 1
    assert fake.calls("cuMemHostAlloc") == []


def test_staged_copies_on_a_stream_of_their_own(device: CudaDevice) -> None:
    stream = device.create_stream()
    values = numbers(1 << 20)
    array = device.from_numpy(values, stream=stream)
    other = device.create_stream()
    array.launch_pointer(other)
    np.testing.assert_array_equal(array.numpy(), values)
    array.copy_from(values[::-1])
    np.testing.assert_array_equal(array.numpy(), values[::-1])
    del array
    device.destroy_stream(stream)
    device.destroy_stream(other)


# -- pinned ---------------------------------------------------------------------------------------------------------


def test_pinned_arrays_are_copied_directly(device: CudaDevice, fake: FakeCuda) -> None:
    pinned = device.empty_pinned((1 << 20,), dtypes.f32)
    assert (pinned.dtype, pinned.shape, pinned.flags.c_contiguous) == (np.float32, (1 << 20,), True)
    pinned[...] = numbers(1 << 20)
    array = device.from_numpy(pinned)
    assert len(fake.calls("cuMemcpyHtoD")) == 1
    pinned[...] = 0
    array.to_host(pinned[: 1 << 20])
    np.testing.assert_array_equal(pinned, numbers(1 << 20))
    assert device.empty_pinned((0, 3), dtypes.f32).shape == (0, 3)


def test_pinned_memory_is_reused_when_the_device_is_done_with_it(device: CudaDevice) -> None:
    pinned = device.empty_pinned((1000,), dtypes.f32)
    address = pinned.__array_interface__["data"][0]
    pinned[...] = 5
    array = device.empty((1000,), dtypes.f32)
    ticket = device.copy_in_async(array, pinned)
    del pinned, ticket
    again = device.empty_pinned((1000,), dtypes.f32)
    assert again.__array_interface__["data"][0] == address
    again[...] = 7  # the copy is done by now
    assert (array.numpy() == 5).all()


def test_tickets(device: CudaDevice, fake: FakeCuda) -> None:
    pinned = device.empty_pinned((1000,), dtypes.f32)
    pinned[...] = numbers(1000)
    array, stream = device.empty((1000,), dtypes.f32), device.create_stream()
    sent = device.copy_in_async(array, pinned, stream)
    plain = np.zeros(1000, np.float32)
    back = device.copy_out_async(plain, array, stream)
    assert sent.stream == stream
    assert plain.sum() == 0
    back.wait()
    back.wait()
    np.testing.assert_array_equal(plain, numbers(1000))
    assert sent.done()
    assert back.done()
    del sent, back, array
    device.destroy_stream(stream)


def test_what_a_ticket_is_not_given_for(device: CudaDevice) -> None:
    array = device.empty((4, 4), dtypes.f32)
    with pytest.raises(UserError, match="cannot copy values of shape"):
        device.copy_in_async(array, numbers(4))
    with pytest.raises(UserError, match="cannot be copied without waiting"):
        device.copy_in_async(array.T, numbers(16).reshape(4, 4))
    with pytest.raises(UserError, match="writable array in C order"):
        device.copy_out_async(np.empty((4, 4), np.float32).T, array)
    with pytest.raises(UserError, match="float64 to an array of f32"):
        device.copy_out_async(np.empty((4, 4)), array)


# -- registered -----------------------------------------------------------------------------------------------------


def test_registered_arrays(device: CudaDevice, fake: FakeCuda) -> None:
    values = numbers(1 << 20)
    with registered(device, values) as inside, registered(device, values):
        assert inside is values
        array = device.from_numpy(values)
        part = device.from_numpy(values[100:-100])
        assert len(fake.calls("cuMemcpyHtoD")) == 2
    assert len(fake.calls("cuMemHostRegister")) == len(fake.calls("cuMemHostUnregister")) == 1
    np.testing.assert_array_equal(array.numpy(), values)
    np.testing.assert_array_equal(part.numpy(), values[100:-100])
    pinned = device.empty_pinned((4,), dtypes.f32)
    with registered(device, pinned), registered(device, np.empty(0)):
        assert len(fake.calls("cuMemHostRegister")) == 1


def test_the_end_of_a_registration_waits_for_copies(device: CudaDevice) -> None:
    values, array = numbers(1000), device.empty((1000,), dtypes.f32)
    with registered(device, values):
        ticket = device.copy_in_async(array, values)
    values[...] = 0
    assert ticket.done()
    np.testing.assert_array_equal(array.numpy(), numbers(1000))


def test_registration_is_undone_after_an_error(device: CudaDevice, fake: FakeCuda) -> None:
    values = numbers(1000)
    with pytest.raises(ZeroDivisionError), registered(device, values):
        raise ZeroDivisionError
    assert fake.leaks().get("registered memory") is None
    with registered(device, values[100:]), pytest.raises(DeviceError, match="part of them is registered"), registered(device, values):
        pass
    with pytest.raises(UserError, match="a list cannot be pinned"), registered(device, [1]):  # type: ignore[arg-type]
        pass
    with pytest.raises(UserError, match="cannot be pinned"), registered(device, values[::2]):
        pass


# -- sharing --------------------------------------------------------------------------------------------------------


def test_host_arrays_without_a_copy(device: CudaDevice, fake: FakeCuda) -> None:
    values = numbers(1000)
    shared = device.share(values)
    values[3] = 77
    assert shared.copy().numpy()[3] == 77
    view = device.share(values[::-2])
    np.testing.assert_array_equal(view.copy().numpy(), values[::-2])
    assert len(fake.calls("cuMemHostRegister")) == 1
    assert np.shares_memory(shared.host(), values)
    shared[5:7] = 1.5
    assert shared.host()[5] == 1.5
    assert values[6] == 1.5
    values.flags.writeable = False
    with pytest.raises(DeviceError, match="read-only"):
        device.share(values).fill(0.0)
    del shared, view
    gc.collect()
    device.registry.settle()
    assert fake.leaks().get("registered memory") is None
    assert device.share(np.empty((0, 2), np.float32)).shape == (0, 2)


def test_shared_memory_is_let_go_after_its_last_use(device: CudaDevice) -> None:
    values = np.full(1000, 4.0, np.float32)
    shared, target, stream = device.share(values), device.empty((1000,), dtypes.f32), device.create_stream()
    device.copy(target, shared, stream)
    del shared
    gc.collect()
    device.registry.settle()
    values[...] = 0
    assert (target.numpy() == 4).all()
    del target
    device.destroy_stream(stream)


def test_freeing_ends_the_registration(device: CudaDevice, fake: FakeCuda) -> None:
    shared = device.share(numbers(1000))
    shared.free()
    device.registry.settle()
    assert fake.leaks().get("registered memory") is None
    with pytest.raises(DeviceError, match="after it was freed"):
        shared.numpy()


def test_no_pinned_memory_left(device: CudaDevice, fake: FakeCuda) -> None:
    kept = device.empty_pinned((1000,), dtypes.f32)
    fake.fail["cuMemHostAlloc"] = 2
    with pytest.raises(DeviceError, match=r"out of memory on pinned host memory of cuda:0(.|\n)*the largest:\n  4096 bytes"):
        device.empty_pinned((1 << 20,), dtypes.f32)
    del fake.fail["cuMemHostAlloc"]
    assert kept.shape == (1000,)


def test_what_cannot_be_shared(device: CudaDevice) -> None:
    record = np.zeros(10, [("a", np.float32), ("b", np.int8)])
    with pytest.raises(UserError, match="not multiples of the 4 bytes"):
        device.share(record["a"])
    with pytest.raises(UserError, match="arrays of >c8"):
        device.share(np.zeros(3, ">c8"))
    with pytest.raises(UserError, match=r"does not see the memory of the f32\[3\] array"):
        device.empty((3,), dtypes.f32).host()


# -- managed --------------------------------------------------------------------------------------------------------


def test_managed_arrays(device: CudaDevice, fake: FakeCuda) -> None:
    array = device.empty_managed((10, 100), dtypes.f32)
    seen = array.host()
    seen[...] = numbers(1000).reshape(10, 100)
    other = device.empty((10, 100), dtypes.f32)
    device.copy(other, array)
    np.testing.assert_array_equal(other.numpy(), numbers(1000).reshape(10, 100))
    device.copy(array, other)
    assert array.T[3:5, ::-1].host()[0, 9] == 3
    assert np.asarray(array, copy=False)[1, 1] == 101 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else True
    with pytest.raises(ValueError, match="without a copy"):
        other.__array__(copy=False)
    del array
    assert seen[9, 99] == 999  # the view keeps the memory
    del seen, other
    gc.collect()
    assert device.managed_pool.in_use == 0


def test_a_device_without_managed_memory(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "attribute", lambda name: 0)
    with pytest.raises(DeviceError, match="has no managed memory"):
        device.empty_managed((3,), dtypes.f32)


# -- other devices --------------------------------------------------------------------------------------------------


def test_copies_between_devices(device: CudaDevice, fake: FakeCuda) -> None:
    second = CudaDevice(device.driver, 1)
    values = numbers(24).reshape(4, 6)
    array = device.from_numpy(values)
    moved = second.empty((4, 6), dtypes.f32)
    second.copy(moved, array)
    np.testing.assert_array_equal(moved.numpy(), values)
    turned = second.empty((6, 4), dtypes.f32)
    second.copy(turned.T, array)
    np.testing.assert_array_equal(turned.numpy(), values.T)
    row = second.empty((6,), dtypes.f32)
    row.assign(array[2])
    np.testing.assert_array_equal(row.numpy(), values[2])
    del moved, turned, row
    gc.collect()
    second.release_memory()


def test_without_stream_ordered_allocation(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(Driver(fake), 0)
    original = device.attribute
    monkeypatch.setattr(device, "attribute", lambda name: 0 if name == "MEMORY_POOLS_SUPPORTED" else original(name))
    device.from_numpy(numbers(10)).free()
    assert len(fake.calls("cuMemAlloc")) == 1
    assert device.pool.flush() == 512
    assert len(fake.calls("cuMemFree")) == 1
