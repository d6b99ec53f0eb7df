"""Arrays and pools of the public API, on null devices with lazy streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from copy_kernels import register_copies
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.base.errors import DeviceError, UserError
from tilewright.execute.memory import parse_size
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.memory.device_array import DeviceArray


@pytest.fixture
def driver() -> Iterator[NullCuda]:
    with installed(count=2, mode="lazy") as made:
        register_copies(made)
        yield made
        assert made.violations == []


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def make_scale() -> Any:
    @tw.kernel
    def scale(x: tw.Array, factor: float) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] * factor
        return out

    return scale


# -- making ---------------------------------------------------------------------------------------------------------


def test_array_copies_and_asarray_does_not(driver: NullCuda) -> None:
    values = numbers(3, 4)
    on_host = tw.array(values)
    assert isinstance(on_host, np.ndarray)
    assert not np.shares_memory(on_host, values)
    assert tw.asarray(values) is values
    array = tw.array(values, device="cuda:1")
    assert isinstance(array, DeviceArray)
    assert array.device.ordinal == 1
    assert tw.asarray(array) is array
    again = tw.array(array)
    assert again.pointer != array.pointer
    assert again.device is array.device
    np.testing.assert_array_equal(again.numpy(), values)
    assert tw.asarray(array, device="cuda:1") is array


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [([1, 2, 3], None, np.int64), ([[1.5], [2.5]], tw.f32, np.float32), ((True, False), None, np.bool_), (3, "f16", np.float16),
     (np.arange(3, dtype=np.int8), "float32", np.float32), (numbers(3), np.float64, np.float64)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_array_of_values_and_dtypes(driver: NullCuda, device: str, values: Any, dtype: Any, expected: Any) -> None:
    array = tw.array(values, dtype, device)
    found = array.numpy() if isinstance(array, DeviceArray) else array
    np.testing.assert_array_equal(found, np.array(values, expected))
    assert found.dtype == expected


def test_the_default_device(driver: NullCuda) -> None:
    tw.set_default_device("cuda:1")
    try:
        assert tw.array([1.0]).device.ordinal == 1
        assert tw.allocate((3,)).device.ordinal == 1
    finally:
        tw.set_default_device("cpu")
    assert isinstance(tw.allocate(3), np.ndarray)


def test_allocate(driver: NullCuda) -> None:
    for shape, wanted in (((3, 4), (3, 4)), ([2, 0], (2, 0)), (5, (5,)), (np.int64(2), (2,)), ((), ())):
        for device in ("cpu", "cuda", "cuda:0"):
            array = tw.allocate(shape, tw.bf16, device)
            assert array.shape == wanted
            assert array.dtype == (tw.bf16.numpy if device == "cpu" else tw.bf16)
    pinned = tw.allocate((3, 4), tw.f32, "cpu", pinned=True)
    assert isinstance(pinned, np.ndarray)
    assert isinstance(tw.allocate((3,), tw.f32, managed=True), DeviceArray)


def test_what_cannot_be_made(driver: NullCuda) -> None:
    with pytest.raises(UserError, match=r"shape \(2, -1\)"):
        tw.allocate((2, -1), tw.f32, "cuda")
    with pytest.raises(UserError, match=r"shape \(-1,\)"):
        tw.allocate(-1)
    with pytest.raises(UserError, match="'x' is no shape"):
        tw.allocate("x")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is no dtype"):
        tw.allocate(3, "complex32")
    with pytest.raises(UserError, match="pinned or managed, not both"):
        tw.allocate(3, pinned=True, managed=True)
    with pytest.raises(UserError, match="arrays of object are not supported"):
        tw.array([None])
    with pytest.raises(UserError, match="the values are no array"):
        tw.array([[1], [2, 3]], device="cuda")
    with pytest.raises(DeviceError, match="'cuda:7' is not present"):
        tw.array([1], device="cuda:7")
    with pytest.raises(DeviceError, match="out of memory"):
        tw.allocate((1 << 40,), tw.f32, "cuda")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_found", ())
    monkeypatch.setattr(cuda, "_reason", "there is none")
    with pytest.raises(DeviceError, match="managed memory needs a CUDA device: there is none"):
        tw.allocate((3,), managed=True)
    with pytest.raises(DeviceError, match="not present: there is none"):
        tw.memory_pool("cuda")
    np.testing.assert_array_equal(tw.to_device([1, 2], "auto"), [1, 2])


# -- moving ---------------------------------------------------------------------------------------------------------


def test_to_device(driver: NullCuda) -> None:
    values = numbers(4, 5)
    array = tw.to_device(values, "cuda:0")
    assert array.to_device("cuda:0") is array
    assert tw.to_device(array, "cuda:0", copy=True).pointer != array.pointer
    moved = array.T.to_device("cuda:1")
    assert moved.device.ordinal == 1
    np.testing.assert_array_equal(moved.to_device("cpu"), values.T)
    with pytest.raises(UserError, match=r"cannot be on cuda:1 .* without a copy"):
        array.to_device("cuda:1", copy=False)
    with pytest.raises(UserError, match="does not see the memory"):
        array.to_device("cpu", copy=False)
    with pytest.raises(UserError, match="copy='no'"):
        tw.to_device(values, "cuda", copy="no")  # type: ignore[arg-type]
    assert tw.to_device(values, "cpu", copy=False) is values
    assert not np.shares_memory(tw.to_device(values, "cpu"), values)


def test_to_device_without_a_copy(driver: NullCuda) -> None:
    pinned = tw.allocate((6,), tw.f32, pinned=True)
    pinned[...] = numbers(6)
    shared = tw.to_device(pinned, "cuda", copy=False)
    pinned[2] = 50
    assert shared.copy().numpy()[2] == 50
    assert np.shares_memory(shared.to_device("cpu", copy=False), pinned)
    plain = numbers(6)
    assert tw.to_device(plain, "cuda", copy=False)[1:].copy().numpy()[0] == 1


def test_copy(driver: NullCuda) -> None:
    array, out = tw.allocate((4,), tw.f32, "cuda"), np.zeros(4, np.float32)
    assert tw.copy(array, numbers(4)) is None
    ticket = tw.copy(out, array, wait=False)
    assert ticket is not None
    ticket.wait()
    np.testing.assert_array_equal(out, numbers(4))
    tw.copy(array[:2], array[2:])
    tw.copy(out, array)
    np.testing.assert_array_equal(out, [2, 3, 2, 3])
    with pytest.raises(UserError, match="cannot copy a ndarray to a ndarray"):
        tw.copy(out, out)


# -- working with them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index", [np.s_[...], np.s_[None], np.s_[..., None, 1], np.s_[1, ..., ::-1], np.s_[:, None, 1:, None], np.s_[-1], np.s_[2:0:-1, ..., 3]], ids=str
)  # fmt: skip
def test_indices_as_in_numpy(driver: NullCuda, index: Any) -> None:
    values = numbers(3, 4, 5)
    array = tw.array(values, device="cuda")
    np.testing.assert_array_equal(array[index].numpy(), values[index])
    array[index] = -1
    values[index] = -1
    np.testing.assert_array_equal(array.numpy(), values)


def test_bad_indices(driver: NullCuda) -> None:
    array = tw.array(numbers(3, 4), device="cuda")
    with pytest.raises(UserError, match="more than one ellipsis"):
        array[..., 0, ...]
    with pytest.raises(UserError, match="no slice of an axis"):
        array[::0]
    with pytest.raises(UserError, match="3 indices for an array of rank 2"):
        array[0, None, 0, 0]
    with pytest.raises(UserError, match=r"is not walked element by element(.|\n)*array.numpy\(\)"):
        list(array)


@pytest.mark.parametrize(
    ("view", "shape"),
    [(np.s_[...], (4, 6)), (np.s_[:, ::2], (2, 2, 3, 1)), (np.s_[::2], (-1, 4)), (np.s_[..., 0], (6,)), (np.s_[:, :, 1:2], (2, 3)), (np.s_[0:0], (5, 0))],
    ids=str,
)  # fmt: skip
def test_reshape_without_a_copy(driver: NullCuda, view: Any, shape: tuple[int, ...]) -> None:
    values = numbers(2, 3, 4)
    expected = values[view].reshape(shape) if view != np.s_[:, ::2] else values[view].reshape(2, 2, 2, 2)
    wanted = shape if view != np.s_[:, ::2] else (2, 2, 2, 2)
    array = tw.array(values, device="cuda")[view].reshape(*wanted)
    np.testing.assert_array_equal(array.numpy(), expected)
    np.testing.assert_array_equal(tw.array(values, device="cuda")[view].reshape(wanted).numpy(), expected)


def test_reshape_that_needs_a_copy(driver: NullCuda) -> None:
    array = tw.array(numbers(3, 4), device="cuda")
    with pytest.raises(UserError, match=r"cannot reshape a view with strides \(1, 4\)(.|\n)*copy\(\) it first"):
        array.T.reshape(12)
    np.testing.assert_array_equal(array.T.copy().ravel().numpy(), numbers(3, 4).T.ravel())
    np.testing.assert_array_equal(array.permute(-1, 0).numpy(), numbers(3, 4).T)
    with pytest.raises(UserError, match="a shape is made of integers"):
        array.reshape(2.0, 6)


def test_conversions(driver: NullCuda) -> None:
    values = numbers(4, 6)
    array = tw.array(values, device="cuda")
    np.testing.assert_array_equal(array[:, ::2].astype(tw.i32).numpy(), values[:, ::2].astype(np.int32))
    assert array.astype(tw.f32, copy=False) is array
    assert array.astype(tw.f32).pointer != array.pointer
    assert array[:0].astype(tw.f16).shape == (0, 6)
    with pytest.raises(UserError, match="cannot be converted to q4_0"):
        array.astype(tw.q4_0)
    assert tw.array(array, tw.f64).dtype is tw.f64


def test_assignment(driver: NullCuda) -> None:
    array = tw.array(np.zeros((3, 4), np.int32), device="cuda")
    array[0] = [1, 2, 3, 4]
    array[1, :2] = np.array([7, 8], np.int16)
    array[2] = array[0]
    array[1, 2:] = np.int64(9)
    np.testing.assert_array_equal(array.numpy(), [[1, 2, 3, 4], [7, 8, 9, 9], [1, 2, 3, 4]])
    for value, message in (
        (1.5, "1.5 to an array of i32 would lose data"), ([1.5], "float64 to an array of i32 would lose"), (1 << 40, "out of the range of i32"),
        (np.zeros(3, np.float32), "f32 to an array of i32 would lose"), ([1, 2], r"shape \(2,\) do not fit an array of shape \(4,\)"),
        ([1 << 40], "would lose data"), ("x", "a str cannot be assigned"), (np.zeros(4, np.complex64), "complex64 to an array of i32 would lose"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            array[0] = value
    with pytest.raises(UserError, match="cannot be repeated"):
        array[0] = array[:, :2]
    with pytest.raises(DeviceError, match="read-only"):
        array.broadcast_to((2, 3, 4))[0] = 1
    np.testing.assert_array_equal(array.numpy()[0], [1, 2, 3, 4])


def test_overlapping_assignment(driver: NullCuda) -> None:
    array, expected = tw.array(numbers(10), device="cuda"), numbers(10)
    array[1:] = array[:-1]
    expected[1:] = expected[:-1].copy()
    np.testing.assert_array_equal(array.numpy(), expected)
    array[::-1] = array
    np.testing.assert_array_equal(array.numpy(), expected[::-1])


def test_small_things(driver: NullCuda) -> None:
    array = tw.array(numbers(2, 3), device="cuda")
    assert (array.ndim, array.size, array.nbytes, array.itemsize, len(array)) == (2, 6, 24, 4, 2)
    assert array[1, 2].item() == 5.0
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert repr(array) == "DeviceArray(f32[2, 3], cuda:0 (Fake GPU))"
    with pytest.raises(UserError, match=r"item\(\) of an array of shape \(2, 3\)"):
        array.item()
    out = np.empty((3, 2), np.float32).T
    assert array.to_host(out) is out
    np.testing.assert_array_equal(out, numbers(2, 3))


def test_kernels_take_all_kinds_of_memory(driver: NullCuda) -> None:
    scale = make_scale()
    np.testing.assert_array_equal(scale(numbers(8), 2.0, device="cuda"), numbers(8) * 2)
    managed = tw.allocate((8,), tw.f32, "cuda", managed=True)
    managed.host()[...] = numbers(8)
    np.testing.assert_array_equal(scale(managed, 3.0).numpy(), numbers(8) * 3)
    out = tw.allocate((8,), tw.f32, "cuda", managed=True)
    assert scale(managed, 4.0, out=out, device="cpu") is out
    np.testing.assert_array_equal(out.host(), numbers(8) * 4)
    shared = tw.to_device(numbers(8), "cuda", copy=False)
    np.testing.assert_array_equal(scale(shared, 5.0).numpy(), numbers(8) * 5)


# -- pools ----------------------------------------------------------------------------------------------------------


def test_pools(driver: NullCuda) -> None:
    pool = tw.memory_pool("cuda:1", size="64KiB")
    assert (pool.device, pool.size, pool.limit) == ("cuda:1", 65536, None)
    first, second = pool.allocate((100, 10)), pool.allocate([256], tw.u8)
    assert first.device.ordinal == 1
    pool.free(first)
    with pytest.raises(DeviceError, match="was freed before"):
        pool.free(first)
    with pytest.raises(DeviceError, match="is not of this pool"):
        pool.free(tw.allocate((3,), tw.f32, "cuda:1"))
    with pytest.raises(UserError, match="a int is no array"):
        pool.free(3)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"out of memory(.|\n)*u8\[256\], 512 bytes"):
        pool.allocate(1 << 16)
    pool.reset()
    with pytest.raises(DeviceError, match="after it was freed"):
        second.numpy()
    assert pool.allocate(1 << 14, tw.i32).nbytes == 65536
    assert "0 bytes in use" in repr(pool)
    assert pool.statistics().frees == 3
    assert pool.flush() == 65536


def test_the_current_pool(driver: NullCuda) -> None:
    pool, scale, x = tw.memory_pool("cuda", limit="1MiB"), make_scale(), tw.array(numbers(64), device="cuda")
    with pool:
        y = scale(x, 2.0)
        y = scale(x, 2.0)
        with tw.default_pool("cuda"):
            z = tw.array(y)
    assert pool.statistics().in_use == 512
    np.testing.assert_array_equal(z.numpy(), numbers(64) * 2)
    with pytest.raises(ZeroDivisionError), pool:
        raise ZeroDivisionError
    assert tw.allocate((3,), tw.f32, "cuda").owner.arena is not y.owner.arena
    pool.limit = 512
    with pytest.raises(DeviceError, match="limit of 512 bytes"):
        pool.allocate(1000)


def test_sizes() -> None:
    for text, wanted in (("1GB", 10**9), ("64 MiB", 64 << 20), ("1.5kib", 1536), ("12", 12), (7, 7), ("3b", 3)):
        assert parse_size(text, "size") == wanted
    for bad in ("", "GB", "1XB", "-1", 0, -5, True, 1.5, None):
        with pytest.raises(UserError, match="size="):
            parse_size(bad, "size")  # type: ignore[arg-type]


def test_bad_pools(driver: NullCuda) -> None:
    with pytest.raises(UserError, match="a size or a limit, not both"):
        tw.memory_pool("cuda", size=5, limit=6)
    with pytest.raises(DeviceError, match="out of memory"):
        tw.memory_pool("cuda", size="100GB")


def test_nothing_is_left(driver: NullCuda) -> None:
    test_pools(driver)
    test_the_current_pool(driver)
    test_to_device_without_a_copy(driver)
    gc.collect()
    for gpu in cuda.devices():
        gpu.synchronize()
        gpu.release_memory()
    assert {kind for kind in driver.leaks() if "memory" in kind or kind in ("stream", "event")} == set()


def test_arrays_of_other_libraries(driver: NullCuda) -> None:
    class Foreign:
        """An array of a library that has only the array interface."""

        def __init__(self, array: DeviceArray) -> None:
            self.array = array

        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            return self.array.__cuda_array_interface__

    source = tw.array(numbers(3, 4), device="cuda")
    shared = tw.asarray(Foreign(source[:, ::2]))
    assert (shared.pointer, shared.strides) == (source.pointer, (4, 2))
    copied = tw.array(Foreign(source))
    assert copied.pointer != source.pointer
    np.testing.assert_array_equal(copied.numpy(), numbers(3, 4))
    source[0] = Foreign(source[1])
    np.testing.assert_array_equal(source[0].numpy(), numbers(3, 4)[1])


def test_tensors_of_pytorch(driver: NullCuda) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(2, 3)
    array = tw.array(tensor.to(torch.bfloat16), device="cuda")
    assert array.dtype is tw.bf16
    np.testing.assert_array_equal(array.astype(tw.f32).numpy(), tensor.numpy())
    assert np.shares_memory(tw.asarray(tensor), tensor.numpy())

    class OnGpu:
        is_cuda = True
        requires_grad = True

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **options: object) -> object:
            raise AssertionError

        @property
        def __cuda_array_interface__(self) -> object:
            raise RuntimeError("needs gradients")

    with pytest.raises(UserError, match="needs gradients cannot be shared"):
        tw.array(OnGpu())
