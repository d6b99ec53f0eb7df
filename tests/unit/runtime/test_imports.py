"""Tensors of other libraries as arrays: through machine code, through capsules of both forms, and all that is refused."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda

import tilewright.compile.driver  # noqa: F401 (says where machine code comes from)
from tilewright.base import dtypes
from tilewright.base.errors import DeviceError, UserError
from tilewright.runtime.core import streams
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.driver import Driver
from tilewright.runtime.exchange import dlpack, imports
from tilewright.runtime.memory import native_memory
from tilewright.runtime.memory.device_array import DeviceArray

_Reader = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_Stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    made = CudaDevice(Driver(FakeCuda()), 0)
    monkeypatch.setattr(cuda, "_found", (made,))
    imports.forget()
    yield made
    imports.forget()


class Tensor:
    """A tensor of a library with DLPack's exchange functions, whose answers a test may change."""

    kind, number, stream, status, code = 2, 0, 0, 0, 2 | 32 << 8 | 1 << 16
    asked = 0

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.address = address
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.number

    def __dlpack__(self, **options: object) -> object:
        raise BufferError("only by exchange")


def _read(tensor: Any, out: int) -> int:
    Tensor.asked += 1
    words = (ctypes.c_uint64 * 6).from_address(out)
    words[0] = tensor.address - 16
    words[1] = tensor.kind | tensor.number << 32
    words[2] = len(tensor.shape) | tensor.code << 32
    words[3] = ctypes.addressof(tensor.shape)
    words[4] = ctypes.addressof(tensor.strides) if tensor.strides is not None else 0
    words[5] = 16
    return int(tensor.status)


def _current(kind: int, number: int, out: Any) -> int:
    out[0] = Tensor.stream or None
    return 0


_reader, _stream_reader = _Reader(_read), _Stream(_current)
_api = (ctypes.c_uint64 * 7)(
    1 | 3 << 32, 0, 0, 0, 0,
    ctypes.cast(_reader, ctypes.c_void_p).value or 0, ctypes.cast(_stream_reader, ctypes.c_void_p).value or 0,
)  # fmt: skip
_NAME = b"dlpack_exchange_api"  # a capsule does not copy its name
Tensor.__dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_api), _NAME, None)  # type: ignore[attr-defined]


@pytest.fixture
def tensor(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    memory = device.from_numpy(np.arange(64, dtype=np.float32))
    made = Tensor(memory.pointer, (4, 3), (12, 2))
    made.memory = memory  # type: ignore[attr-defined]
    return made


def test_machine_code_reads_the_tensor(device: CudaDevice, tensor: Tensor) -> None:
    first = imports.from_dlpack(tensor)
    before = Tensor.asked
    array = imports.from_dlpack(tensor)
    assert Tensor.asked == before + 1
    for found in (first, array):
        assert isinstance(found, DeviceArray)
        assert (found.pointer, found.shape, found.strides, found.dtype) == (tensor.address, (4, 3), (12, 2), dtypes.f32)
        assert (found.device, found.base, found.readonly, found.form) == (device, tensor, False, None)
        assert (found.owner.nbytes, found.owner.freed, found.owner.users, found.owner.stream) == (0, False, (), 0)
        np.testing.assert_array_equal(found.numpy(), np.arange(64, dtype=np.float32)[:48].reshape(4, 12)[:, :6:2])


def test_the_array_keeps_the_tensor_and_nothing_leaks(device: CudaDevice, tensor: Tensor) -> None:
    imports.from_dlpack(tensor)
    gc.collect()

    def counts() -> list[int]:
        return [sys.getrefcount(item) for item in (tensor, device, dtypes.f32, DeviceArray, Tensor, None)]

    before = counts()
    array = imports.from_dlpack(tensor)
    assert counts()[0] == before[0] + 1
    for _ in range(1000):
        imports.from_dlpack(tensor)
    del array
    assert all(abs(a - b) < 20 for a, b in zip(counts(), before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"code": 5 | 32 << 8 | 1 << 16}, "only by exchange"), ({"status": -1}, "only by exchange"), ({"strides": None}, "only by exchange")],
    ids=str,
)
def test_what_machine_code_does_not_know_takes_the_general_way(tensor: Tensor, change: dict[str, Any], message: str) -> None:
    imports.from_dlpack(tensor)
    for name, value in change.items():
        setattr(tensor, name, value)
    with pytest.raises(UserError, match=message):
        imports.from_dlpack(tensor)


def test_another_stream_takes_the_general_way(device: CudaDevice, tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    imports.from_dlpack(tensor)
    monkeypatch.setattr(Tensor, "stream", 0x5000)
    with pytest.raises(UserError, match="only by exchange"):
        imports.from_dlpack(tensor)
    monkeypatch.setattr(Tensor, "stream", 0)
    with streams.use(0, device.create_stream()), pytest.raises(UserError, match="only by exchange"):
        imports.from_dlpack(tensor)


def test_a_device_that_is_not_there(tensor: Tensor) -> None:
    tensor.number = 3
    with pytest.raises(DeviceError, match="the tensor is on cuda:3"):
        imports.from_dlpack(tensor)
    tensor.kind = 10
    with pytest.raises(UserError, match="DLPack's kind 10"):
        imports.from_dlpack(tensor)


def test_too_many_types(device: CudaDevice, tensor: Tensor) -> None:
    imports.from_dlpack(tensor)
    assert imports._table is not None
    kinds = [type(f"T{n}", (Tensor,), {}) for n in range(20)]
    added = [imports._table.add(kind) for kind in kinds]
    assert added.count(True) == 7
    assert imports.exchange_functions(int) is None


# -- capsules -------------------------------------------------------------------------------------------------------


class Exporter:
    """A library without exchange functions."""

    def __init__(self, array: DeviceArray, versions: bool = True) -> None:
        self.array, self.versions = array, versions
        self.streams: list[object] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> object:
        if options and not self.versions:
            raise TypeError("no such argument")
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, **options)


@pytest.mark.parametrize("versions", [True, False], ids=["versioned", "plain"])
def test_capsules(device: CudaDevice, versions: bool) -> None:
    source = device.from_numpy(np.arange(12, dtype=np.int16).reshape(3, 4))
    exporter = Exporter(source.T, versions)
    array = imports.from_dlpack(exporter)
    assert isinstance(array, DeviceArray)
    assert exporter.streams == [1]
    assert (array.pointer, array.shape, array.strides, array.dtype) == (source.pointer, (4, 3), (1, 4), dtypes.i16)
    block = source.owner
    del exporter
    source.free()
    assert block._exports == 1
    np.testing.assert_array_equal(array.numpy(), np.arange(12, dtype=np.int16).reshape(3, 4).T)
    del array
    gc.collect()
    assert block._exports == 0
    assert device.pool.in_use == 0


def test_read_only_arrays_are_shared_as_such(device: CudaDevice) -> None:
    source = device.from_numpy(np.arange(4, dtype=np.float32)).broadcast_to((3, 4))
    array = imports.from_dlpack(Exporter(source))
    assert isinstance(array, DeviceArray)
    assert array.readonly
    with pytest.raises(DeviceError, match="read-only"):
        array[0] = 1.0
    with pytest.raises(UserError, match="read-only array cannot be shared"):
        imports.from_dlpack(Exporter(source, versions=False))


def test_a_capsule_is_used_once(device: CudaDevice) -> None:
    array = device.from_numpy(np.arange(4, dtype=np.float32))
    capsule = array.__dlpack__(max_version=(1, 0))
    taken = dlpack.take_over(capsule)
    assert taken.shape == (4,)
    with pytest.raises(UserError, match="used before"):
        dlpack.take_over(capsule)
    with pytest.raises(UserError, match="no DLPack capsule"):
        dlpack.take_over(7)
    assert array.owner._exports == 1
    del taken, capsule
    assert array.owner._exports == 0


def test_host_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12.0).reshape(3, 4)
    array = imports.from_dlpack(tensor)
    assert isinstance(array, np.ndarray)
    array[0, 0] = 7
    assert tensor[0, 0] == 7
    turned = imports.from_dlpack(tensor.to(torch.bfloat16).t()[::2])
    np.testing.assert_array_equal(turned.astype(np.float32), tensor.t()[::2].numpy())
    assert imports.from_dlpack(torch.empty(0, 3)).shape == (0, 3)
    del tensor
    gc.collect()
    assert array[2, 3] == 11


def test_refusals() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UserError, match=r"needs gradients.*\n.*detach"):
        imports.from_dlpack(torch.zeros(3, requires_grad=True))
    with pytest.raises(UserError, match="type code 5, 32 bits"):
        imports.from_dlpack(torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(UserError, match="a list has no __dlpack__"):
        imports.from_dlpack([1, 2])


def test_without_machine_code(device: CudaDevice, tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_memory, "available", lambda: False)
    with pytest.raises(UserError, match="only by exchange"):
        imports.from_dlpack(tensor)
    source = device.from_numpy(np.arange(4, dtype=np.float32))
    assert imports.from_dlpack(Exporter(source)).shape == (4,)
