"""Device arrays on a fake driver: copies, views, lifetime, exchange with other libraries, and the memory pool."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import FakeCuda

import tilewright.compile.driver  # noqa: F401 (says where machine code comes from)
from copy_kernels import register_copies
from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver
from tilewright.runtime.exchange import dlpack
from tilewright.runtime.memory import native_memory
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.device_memory import MemoryPool, size_class


@pytest.fixture(params=["native", "python"], autouse=True)
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with free lists of machine code, and with those of Python."""
    assert native_memory.available()
    if request.param == "python":
        monkeypatch.setattr(native_memory, "available", lambda: False)
    name: str = request.param
    return name


@pytest.fixture
def fake() -> FakeCuda:
    made = FakeCuda(count=2)
    register_copies(made)
    return made


@pytest.fixture
def device(fake: FakeCuda) -> CudaDevice:
    return CudaDevice(Driver(fake), 0)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# -- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes.SCALARS, ids=str)
def test_round_trip_of_every_dtype(device: CudaDevice, dtype: dtypes.DType) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.numpy)
    array = device.from_numpy(values)
    assert (array.dtype, array.shape, array.nbytes) == (dtype, (2, 3), values.nbytes)
    back = array.numpy()
    assert back.dtype == values.dtype
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_round_trip_of_shapes(device: CudaDevice, shape: tuple[int, ...]) -> None:
    values = numbers(*shape)
    np.testing.assert_array_equal(device.from_numpy(values).numpy(), values)


def test_packed_blocks(device: CudaDevice) -> None:
    values = np.frombuffer(bytes(range(36)), dtypes.q4_0.numpy)
    array = device.from_numpy(values, dtypes.q4_0)
    assert array.shape == (2,)
    assert array.numpy().tobytes() == bytes(range(36))


def test_source_in_any_order(device: CudaDevice) -> None:
    values = numbers(6, 8)[::2, ::-1].T
    np.testing.assert_array_equal(device.from_numpy(values).numpy(), values)
    np.testing.assert_array_equal(np.asarray(device.from_numpy(values)), values)


def test_unsupported_dtype(device: CudaDevice) -> None:
    with pytest.raises(UserError, match="arrays of >c8 are not supported"):
        device.from_numpy(np.zeros(3, ">c8"))
    with pytest.raises(UserError, match="arrays of >f4"):
        device.from_numpy(np.zeros(3, ">f4"))


def test_negative_shape(device: CudaDevice) -> None:
    with pytest.raises(UserError, match=r"shape \(2, -1\)"):
        device.empty((2, -1), dtypes.f32)


def test_copy_from(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(4, 6))
    array[1:3, ::-2].copy_from(np.full((2, 3), -1, np.float32))
    expected = numbers(4, 6)
    expected[1:3, ::-2] = -1
    np.testing.assert_array_equal(array.numpy(), expected)
    with pytest.raises(UserError, match=r"shape \(2,\) to an array of shape \(4, 6\)"):
        array.copy_from(np.zeros(2, np.float32))
    with pytest.raises(UserError, match="float64 to an array of f32"):
        array.copy_from(np.zeros((4, 6)))


# -- views ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        0, -1, (2, 3), (-2, -3), slice(None), slice(1, 3), slice(None, None, -1), slice(5, 100), slice(3, 1),
        (slice(None), 2), (slice(1, None, 2), slice(None, None, -3)), (1, slice(-3, None)), (slice(None), slice(4, 0, -1)),
        (slice(None), slice(None), 1),
    ],
    ids=str,
)  # fmt: skip
def test_views_equal_numpy(device: CudaDevice, index: object) -> None:
    values = numbers(4, 7, 3)
    view = device.from_numpy(values)[index]  # type: ignore[index]
    expected = values[index]  # type: ignore[index]
    assert view.shape == np.shape(expected)
    np.testing.assert_array_equal(view.numpy(), expected)
    if view.size:
        assert tuple(s * 4 for s in view.strides) == expected.strides
        assert view.is_contiguous == expected.flags.c_contiguous


def test_transpose_and_reshape(device: CudaDevice) -> None:
    values = numbers(2, 3, 4)
    array = device.from_numpy(values)
    np.testing.assert_array_equal(array.T.numpy(), values.T)
    np.testing.assert_array_equal(array.transpose(1, 0, 2)[2].numpy(), values.transpose(1, 0, 2)[2])
    np.testing.assert_array_equal(array.reshape(4, -1).numpy(), values.reshape(4, -1))
    np.testing.assert_array_equal(array[1].reshape(12).numpy(), values[1].reshape(12))
    with pytest.raises(UserError, match="cannot reshape a view with strides"):
        array.T.reshape(24)
    with pytest.raises(UserError, match=r"cannot make shape \(5, -1\) of 24 elements"):
        array.reshape(5, -1)
    with pytest.raises(UserError, match=r"axes \(0, 0, 1\)"):
        array.transpose(0, 0, 1)


def test_bad_indices(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    with pytest.raises(UserError, match="index 3 is out of range for axis 0 of extent 3"):
        array[3]
    with pytest.raises(UserError, match="3 indices for an array of rank 2"):
        array[0, 0, 0]
    with pytest.raises(UserError, match="not by list"):
        array[[0, 1]]  # type: ignore[index]


def test_len_and_repr(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    assert len(array) == 3
    assert repr(array) == "DeviceArray(f32[3, 4], cuda:0 (Fake GPU))"
    with pytest.raises(TypeError):
        len(device.from_numpy(numbers()))
    array.free()
    assert "freed" in repr(array)


# -- lifetime -------------------------------------------------------------------------------------------------------


def test_use_after_free(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    view = array[1]
    array.free()
    array.free()
    uses = (array.numpy, view.numpy, lambda: array[0], lambda: array.pointer, lambda: array.__cuda_array_interface__)
    for use in uses:
        with pytest.raises(DeviceError, match=r"f32\[.*\] array on cuda:0 .* was used after it was freed") as caught:
            use()
        assert caught.value.code == "TW033"


def test_a_view_keeps_the_memory(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    view = array[2]
    del array
    gc.collect()
    device.from_numpy(np.zeros((3, 4), np.float32))
    np.testing.assert_array_equal(view.numpy(), numbers(3, 4)[2])


def test_memory_is_reused_in_stream_order(device: CudaDevice, fake: FakeCuda) -> None:
    first = device.empty((1000,), dtypes.f32)
    pointer = first.pointer
    other = device.empty((1000,), dtypes.f32)
    assert other.pointer != pointer
    del first
    assert device.empty((1000,), dtypes.f32).pointer == pointer
    stream = device.create_stream()
    assert device.empty((1000,), dtypes.f32, stream).pointer != pointer
    assert len(fake.calls("cuMemAllocAsync")) == 3
    assert fake.calls("cuMemFreeAsync") == []


def test_a_block_used_on_another_stream_is_waited_for(device: CudaDevice, fake: FakeCuda) -> None:
    stream = device.create_stream()
    array = device.empty((1000,), dtypes.f32)
    array.launch_pointer(stream)
    del array
    assert fake.calls("cuStreamWaitEvent") == []
    device.empty((1000,), dtypes.f32)
    ((recorded, on),) = fake.calls("cuEventRecord")
    ((waiter, event, _),) = fake.calls("cuStreamWaitEvent")
    assert (on, waiter, event) == (stream, 0, recorded)


def test_copies_wait_for_streams_that_use_the_block(device: CudaDevice, fake: FakeCuda) -> None:
    stream = device.create_stream()
    array = device.empty((4,), dtypes.f32, stream)
    fake.log.clear()
    array.copy_from(numbers(4))
    other = device.create_stream()
    array.launch_pointer(other)
    array.numpy()
    assert fake.calls("cuStreamSynchronize") == [(stream,), (stream,), (stream,), (other,), (stream,)]


def test_pool_accounting_and_flush(device: CudaDevice, fake: FakeCuda) -> None:
    arrays = [device.empty((n,), dtypes.u8) for n in (1, 600, 5000, 1 << 20, 0)]
    in_use = 512 + 1024 + 5120 + (1 << 20)
    assert device.pool.usage() == (in_use, 0)
    assert fake.used() == in_use
    del arrays
    assert device.pool.usage() == (0, in_use)
    assert device.pool.peak == in_use
    assert device.pool.flush() == in_use
    assert device.pool.usage() == (0, 0)
    assert fake.used() == 0
    assert fake.calls("cuCtxSynchronize") == []
    assert fake.calls("cuStreamQuery") == [(0,)]


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 5000, 12345, 1 << 20, (1 << 20) + 1, 10**9, (1 << 30) + 1, 10**11])
def test_size_classes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % 512 == 0
    assert size_class(size) == size
    assert nbytes < 4096 or size <= nbytes * 9 / 8
    assert nbytes < 1 << 30 or size - nbytes < 2 << 20


def test_out_of_memory_flushes_and_tries_again(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(Driver(fake), 0)
    cached = device.empty((1 << 20,), dtypes.u8)
    del cached

    def allocate(nbytes: int) -> int:
        return 0 if fake.used() + nbytes > 3 << 19 else original(nbytes)

    original = device.raw_allocate
    monkeypatch.setattr(device, "raw_allocate", allocate)
    kept = device.empty((3 << 18,), dtypes.u8)
    assert kept.size == 3 << 18
    assert device.pool.cached == 0


def test_out_of_memory_message(device: CudaDevice, fake: FakeCuda) -> None:
    kept = device.empty((1000,), dtypes.u8)
    fake.fail["cuMemAllocAsync"] = 2
    with pytest.raises(DeviceError) as caught:
        device.empty((1 << 31,), dtypes.f32)
    assert caught.value.code == "TW031"
    assert str(caught.value).startswith(
        f"error[TW031]: out of memory on cuda:0 (Fake GPU): asked for {1 << 33} bytes, {(1 << 30) - 1024} bytes are free "
        f"of {1 << 30}; Tilewright arrays hold 1024 bytes"
    )
    assert kept.size == 1000
    del fake.fail["cuMemAllocAsync"]
    device.empty((10,), dtypes.f32)


def test_pool_limit(device: CudaDevice) -> None:
    device.pool.limit = 4096
    first = device.empty((2048,), dtypes.u8)
    with pytest.raises(DeviceError, match="of a limit of 4096 bytes"):
        device.empty((3000,), dtypes.u8)
    del first
    assert device.empty((3000,), dtypes.u8).size == 3000


def test_a_finaliser_may_allocate_while_the_pool_is_at_work(device: CudaDevice) -> None:
    class Hook:
        def __del__(self) -> None:
            device.empty((10,), dtypes.u8)

    device.pool.limit = 1 << 20
    cycle: list[object] = [Hook()]
    cycle.append(cycle)
    del cycle
    with pytest.raises(DeviceError):
        device.empty((2 << 20,), dtypes.u8)  # collects garbage inside


def test_streams_that_cannot_be_used(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match="stream 2 is not usable: the per-thread"):
        device.empty((1,), dtypes.f32, stream=2)
    assert device.empty((1,), dtypes.f32, stream=1).owner.stream == 0


def test_destroyed_stream_leaves_its_memory(device: CudaDevice) -> None:
    stream = device.create_stream()
    array = device.empty((1000,), dtypes.f32, stream)
    pointer = array.pointer
    del array
    device.destroy_stream(stream)
    assert device.empty((1000,), dtypes.f32).pointer == pointer


# -- exchange -------------------------------------------------------------------------------------------------------


def test_cuda_array_interface(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    assert array.__cuda_array_interface__ == {
        "version": 3, "shape": (3, 4), "typestr": "<f4", "data": (array.pointer, False), "strides": None, "stream": 1,
    }  # fmt: skip
    view = array.T.__cuda_array_interface__
    assert (view["shape"], view["strides"]) == ((4, 3), (4, 16))
    assert device.empty((0, 3), dtypes.f32).__cuda_array_interface__["data"] == (0, False)


def test_wrapping_a_foreign_array(device: CudaDevice, fake: FakeCuda) -> None:
    source = device.from_numpy(numbers(3, 4))
    foreign = SimpleNamespace(__cuda_array_interface__={**source.T.__cuda_array_interface__, "stream": 99})
    wrapped = device.wrap(foreign)
    assert (wrapped.pointer, wrapped.shape, wrapped.strides, wrapped.base) == (source.pointer, (4, 3), (1, 4), foreign)
    np.testing.assert_array_equal(wrapped.numpy(), numbers(3, 4).T)
    assert fake.calls("cuEventRecord")[0][1] == 99
    in_use = device.pool.usage()
    del wrapped
    assert device.pool.usage() == in_use
    assert device.wrap(source) is source


def test_wrapping_reads_the_dtype_by_name(device: CudaDevice) -> None:
    held = device.empty((2,), dtypes.bf16)
    interface = {"shape": (2,), "typestr": "<V2", "data": (held.pointer, True), "version": 2}
    for change in ({"data": (0, True)}, {"shape": (-2,)}, {"strides": (2, 2)}, {"mask": held}):
        with pytest.raises(UserError, match=r"no memory|cannot have shape|masked"):
            device.wrap(SimpleNamespace(__cuda_array_interface__={**interface, **change}))
    assert device.wrap(SimpleNamespace(__cuda_array_interface__=interface)).dtype is dtypes.bf16
    tensor = SimpleNamespace(__cuda_array_interface__={**interface, "typestr": "|V1"}, dtype="torch.float8_e5m2")
    wrapped = device.wrap(tensor)
    assert wrapped.dtype is dtypes.f8e5m2
    assert wrapped.readonly
    with pytest.raises(DeviceError, match="read-only"):
        wrapped.copy_from(np.zeros(2, dtypes.f8e5m2.numpy))


class TensorWithoutInterface:
    """As PyTorch's 8-bit floats: their interface raises."""

    dtype, shape, is_cuda, requires_grad = "torch.float8_e4m3fn", (2, 8), True, False

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise KeyError(self.dtype)

    def data_ptr(self) -> int:
        return 4096

    def stride(self) -> tuple[int, ...]:
        return (8, 1)


def test_wrapping_a_tensor_by_its_methods(device: CudaDevice, fake: FakeCuda) -> None:
    fake.adopt(4096, 16)
    wrapped = device.wrap(TensorWithoutInterface())
    assert (wrapped.pointer, wrapped.dtype, wrapped.shape, wrapped.strides) == (4096, dtypes.f8e4m3, (2, 8), (8, 1))


def test_wrapping_what_cannot_be(device: CudaDevice, monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> None:
    def wrap(**changes: object) -> DeviceArray:
        interface = {"shape": (2,), "typestr": "<f4", "data": (512, False), "version": 3, **changes}
        return device.wrap(SimpleNamespace(__cuda_array_interface__=interface))

    with pytest.raises(UserError, match="type '<M8'"):
        wrap(typestr="<M8")
    with pytest.raises(UserError, match="masked"):
        wrap(mask=object())
    with pytest.raises(UserError, match="not multiples of the 4 bytes of f32"):
        wrap(strides=(6,))
    with pytest.raises(UserError, match="a ndarray is not an array on a CUDA device"):
        device.wrap(np.zeros(3))
    fake.adopt(512, 8, ordinal=1)
    with pytest.raises(DeviceError, match="the array is on cuda:1, but was given to cuda:0"):
        wrap()


class HostExport:
    """A fake device's memory is host memory, so NumPy and PyTorch can read a capsule that says so."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __dlpack__(self, **options: object) -> object:
        a = self.array
        return dlpack.export(a.owner, a.pointer, a.shape, a.strides, a.dtype, (dlpack.CPU, 0))


def test_dlpack_to_numpy(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    taken = np.from_dlpack(HostExport(array.T))
    np.testing.assert_array_equal(taken, numbers(3, 4).T)
    assert taken.ctypes.data == array.pointer


def test_dlpack_keeps_the_memory_until_the_consumer_is_done(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    taken = np.from_dlpack(HostExport(array))
    array.free()
    del array
    assert device.pool.usage()[0] > 0
    np.testing.assert_array_equal(taken, numbers(3, 4))
    del taken
    assert device.pool.usage()[0] == 0


def test_a_dropped_capsule_ends_the_loan(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(3, 4))
    capsule = array.__dlpack__()
    assert "dltensor" in repr(capsule)
    del array
    assert device.pool.usage()[0] > 0
    del capsule
    assert device.pool.usage()[0] == 0


@pytest.mark.parametrize("dtype", dtypes.SCALARS, ids=str)
def test_dlpack_dtypes_in_torch(device: CudaDevice, dtype: dtypes.DType) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    array = device.from_numpy(np.array([1, 0, 1]).astype(dtype.numpy))
    tensor = torch.from_dlpack(HostExport(array))
    assert dtypes.by_name(str(tensor.dtype).removeprefix("torch.")) is dtype
    assert tensor.to(torch.float32).tolist() == [1, 0, 1]


def test_dlpack_orders_streams(device: CudaDevice, fake: FakeCuda) -> None:
    array = device.empty((4,), dtypes.f32)
    array.__dlpack__(stream=-1)
    array.__dlpack__(stream=1)
    assert fake.calls("cuStreamWaitEvent") == []
    array.__dlpack__(stream=99)
    assert fake.calls("cuStreamWaitEvent")[0][0] == 99
    assert array.owner.users == {99}


def test_dlpack_refusals(device: CudaDevice) -> None:
    array = device.from_numpy(numbers(4))
    with pytest.raises(BufferError, match="makes no copy"):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="use numpy"):
        array.__dlpack__(dl_device=(1, 0))
    with pytest.raises(DeviceError, match="q4_0 cannot be shared"):
        device.empty((2,), dtypes.q4_0).__dlpack__()


def test_pool_is_freestanding() -> None:
    class Memory:
        def raw_allocate(self, nbytes: int) -> int:
            return 4096

        def raw_free(self, pointers: list[int]) -> None: ...
        def order(self, later: int, earlier: int) -> None: ...
        def exhausted(self, nbytes: int, pool: MemoryPool) -> DeviceError:
            raise AssertionError

    block = MemoryPool(Memory()).take(0)
    assert (block.pointer, block.nbytes) == (0, 0)
