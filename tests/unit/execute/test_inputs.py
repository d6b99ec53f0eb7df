"""What a call is given: every kind of array and number gives the right result, or an error that says what to pass."""

from __future__ import annotations

import ctypes
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")


@tw.kernel
def twice(x: tw.Array):
    out = tw.empty_like(x)
    for i in tw.grid(len(x)):
        out[i] = x[i] * 2
    return out


@tw.kernel
def scaled(x: tw.Array, a):
    return x * a


@tw.kernel
def total(x: tw.Array):
    return tw.sum(x)


@tw.gpu
def add_one(x: tw.GpuBuffer):
    i = tw.gpu_thread_id()
    if i < len(x):
        x[i] = x[i] + 1


class Quantity(np.ndarray):
    def __array_ufunc__(self, *args: Any, **keywords: Any) -> Any:
        return NotImplemented


VALUES = [1.0, 100.0, 7.0]
REFUSED: dict[str, tuple[Any, str]] = {
    "masked": (np.ma.array(VALUES, mask=[False, True, False]), "masked array"),
    "masked without a mask": (np.ma.array(VALUES), "masked array"),
    "matrix": (np.matrix([VALUES]), "whose arithmetic is not that of arrays"),
    "with a unit": (np.array(VALUES).view(Quantity), "whose arithmetic is not that of arrays"),
    "long double": (np.ones(3, np.longdouble), "has dtype float128" if np.longdouble is not np.float64 else ""),
    "objects": (np.array([1, None], object), "has dtype object"),
    "text": (np.array(["a"]), "has dtype <U1"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "has dtype datetime64"),
    "records": (np.zeros(2, [("a", "<f4"), ("b", "<i4")]), "struct"),
    "other byte order": (np.array(VALUES, ">f4"), "other byte order"),
    "list": (VALUES, "is a list"),
    "list with masks": ([np.ma.array(VALUES)], "is a list"),
    "bytes": (b"abc", "is a bytes"),
    "memoryview": (memoryview(np.ones(3)), "is a memoryview"),
    "only __array__": (SimpleNamespace(__array__=lambda *a, **k: np.ones(3)), "is a SimpleNamespace"),
    "decimal": (Decimal(1), "is a Decimal"),
    "fraction": (Fraction(1, 2), "is a Fraction"),
    "a large int": (1 << 63, "no 64-bit integer holds"),
    "a date": (np.datetime64("2020-01-01"), "has dtype datetime64"),
    "nothing": (None, "got None"),
}


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("case", list(REFUSED))
def test_what_would_lose_its_meaning_is_refused(case: str, device: str) -> None:
    value, reason = REFUSED[case]
    for call in (lambda: total(value, device=device), lambda: scaled(np.ones(3, np.float32), value, device=device)):
        with pytest.raises(tw.UserError) as caught:
            call()
        assert reason in str(caught.value), str(caught.value)
    with pytest.raises(tw.UserError):
        tw.gpu_launch(add_one, 1, 32, value, device=device)


@pytest.mark.parametrize("value", [np.ones(3, np.complex64), 1j, np.complex128(1)], ids=["array", "number", "NumPy's number"])
def test_complex_numbers_are_no_arguments_of_explicit_kernels(value: Any) -> None:
    with pytest.raises(tw.UserError, match="complex"):
        tw.gpu_launch(add_one, 1, 32, value, device="emulator")


def test_the_same_after_calls_that_were_right() -> None:
    total(np.ones(3))
    total(np.ones(3))
    for value, _ in REFUSED.values():
        with pytest.raises(tw.UserError):
            total(value)
    with pytest.raises(tw.UserError, match="masked"):
        tw.load("let y = x + 1").run(x=np.ma.array(VALUES, mask=[True, False, False]))
    with pytest.raises(tw.UserError, match="masked"):
        tw.asarray(np.ma.array(VALUES))
    with pytest.raises(tw.UserError, match="masked"):
        tw.array([np.ma.array(VALUES, mask=[True, False, False])])


TYPED = [
    (np.float64(0.1), np.float64), (np.float32(0.1), np.float32), (np.float16(0.1), np.float32), (0.1, np.float32), (np.int32(3), None), (True, np.float32),
    (np.int8(3), np.float32), (3, np.float32), (np.array(0.1), np.float64),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_numbers_keep_their_type_whatever_was_called_before(device: str) -> None:
    """A NumPy number has a dtype, as in NumPy 2: `float32 * float64(0.1)` is float64. Python's numbers take the array's."""
    x = np.array([1, 3, 1e7], np.float32)
    for _ in range(2):
        for first, _ in TYPED:
            for number, dtype in ((first, None), *TYPED):
                if dtype is None:
                    continue
                found = scaled(x, number, device=device) if device != "cpu" else scaled(x, number)
                assert found.dtype == dtype, (first, number)
                np.testing.assert_array_equal(found, x * np.asarray(number, dtype) if dtype is np.float64 else x * np.float32(number))
            if device != "cpu":
                break
    with pytest.raises(tw.UserError, match="TW006"):
        scaled(x, np.int32(3))  # neither holds all values of the other
    whole = np.arange(3)
    assert scaled(whole, 2.5).dtype.kind == "f" and scaled(whole, 2).dtype == np.int64 and scaled(whole, 2.5).dtype.kind == "f"


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_other_layouts_keep_their_values(device: str) -> None:
    base = np.arange(24, dtype=np.float32)
    packed = np.zeros(4, [("a", "<u1"), ("b", "<f4")])
    packed["b"] = [1, 2, 3, 4]
    frozen = base[:4].copy()
    frozen.flags.writeable = False
    cases = [
        base[::-2], np.broadcast_to(base[3:4], (5,)), packed["b"], np.frombuffer(b"x" + base.tobytes(), np.float32, 6, 1), frozen,
        np.memmap.__new__(np.memmap, "/dev/zero", np.float32, "r", shape=(4,)), base[:0], np.ones(3, np.float16), np.ones(3, ml_dtypes.bfloat16),
        packed.view(np.recarray).b,
    ]  # fmt: skip
    for x in cases:
        np.testing.assert_array_equal(twice(x, device=device), np.asarray(x) * 2)
    same = np.ones(2, np.float16).view(np.uint16)
    assert twice(same.view(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16 and twice(same.view(np.float16)).dtype == np.float16


# -- memory of other libraries ----------------------------------------------------------------------------------------


class Producer:
    """An array of another library, as DLPack tells it. Every word of its capsule can be set."""

    def __init__(self, values: np.ndarray, versioned: bool = True, **changes: Any) -> None:
        from tilewright.runtime.exchange import dlpack

        code = {"f": 2, "i": 0, "u": 1, "b": 6}.get(values.dtype.kind, 4)
        words = {
            "data": values.ctypes.data, "device": 1, "rank": values.ndim, "code": code, "bits": values.dtype.itemsize * 8, "lanes": 1, "shape": values.shape,
            "strides": tuple(s // values.dtype.itemsize for s in values.strides), "offset": 0, "flags": 0, "major": 1, "place": 1, **changes,
        }  # fmt: skip
        self.place, self.versioned, self.deleted = words["place"], versioned, 0
        rank = max(len(words["shape"]), 1)
        shape = (ctypes.c_int64 * rank)(*words["shape"]) if words["shape"] is not None else None
        strides = (ctypes.c_int64 * rank)(*words["strides"]) if words["strides"] is not None else None
        tensor = dlpack._Tensor()
        tensor.data, tensor.rank, tensor.byte_offset = words["data"], words["rank"], words["offset"]
        tensor.device.type, tensor.device.id = words["device"], 0
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = words["code"], words["bits"], words["lanes"]
        if shape is not None and not changes.get("no_shape"):
            tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        if strides is not None:
            tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        self.deleter = dlpack._Deleter(self._delete)
        self.managed: Any = dlpack._ManagedVersioned() if versioned else dlpack._Managed()
        if versioned:
            self.managed.major, self.managed.minor, self.managed.flags = words["major"], 0, words["flags"]
        self.managed.deleter, self.managed.tensor = self.deleter, tensor
        self.kept = values, shape, strides
        self.capsule: Any = None

    def _delete(self, address: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place, 0

    def __dlpack__(self, **keywords: Any) -> Any:
        from tilewright.runtime.exchange import dlpack

        if self.capsule is None:
            self.capsule = dlpack._new_capsule(ctypes.addressof(self.managed), dlpack._NAME_VERSIONED if self.versioned else dlpack._NAME, None)
        return self.capsule


@pytest.mark.parametrize("versioned", [False, True])
def test_tensors_without_memory_and_other_untruths(versioned: bool) -> None:
    x = np.arange(6, dtype=np.float32)
    for changes, reason in (
        ({"data": None}, "has no memory"), ({"data": None, "offset": 64}, "has no memory"), ({"rank": 1000}, "1000 axes"), ({"rank": -1}, "-1 axes"),
        ({"no_shape": True}, "axes"), ({"shape": (-3,)}, "cannot have shape"), ({"lanes": 4}, "4 lanes"), ({"bits": 24}, "24 bits"), ({"code": 9}, "code 9"),
        ({"code": 5, "bits": 32}, "code 5"), ({"shape": (1 << 62,)}, "larger than memory"), ({"strides": (1 << 61,)}, "larger than memory"),
        ({"device": 2}, "says it is on the host"), ({"place": 7}, "DLPack's kind 7"),
    ):  # fmt: skip
        for call in (twice, tw.from_dlpack):
            producer = Producer(x, versioned, **changes)
            with pytest.raises(tw.UserError, match=reason):
                call(producer)
    with pytest.raises(tw.UserError, match=r"DLPack 2\.0"):
        twice(Producer(x, True, major=2))


@pytest.mark.parametrize("versioned", [False, True])
def test_tensors_of_every_layout(versioned: bool) -> None:
    x = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(twice(Producer(x, versioned)), x * 2)
    np.testing.assert_array_equal(twice(Producer(x[::-3], versioned)), x[::-3] * 2)
    np.testing.assert_array_equal(twice(Producer(x, versioned, strides=None)), x * 2)
    np.testing.assert_array_equal(twice(Producer(x, versioned, offset=8, shape=(3,))), x[2:5] * 2)
    np.testing.assert_array_equal(twice(Producer(x, versioned, strides=(0,))), np.zeros(12))
    np.testing.assert_array_equal(twice(Producer(x[:0], versioned, data=None)), x[:0])
    bf16 = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(twice(Producer(bf16, versioned)), bf16 * 2)
    used = Producer(x, versioned)
    taken = tw.from_dlpack(used)
    with pytest.raises(tw.UserError, match="used before"):
        twice(used)
    assert not used.deleted
    del taken
    assert used.deleted == 1
    if versioned:
        shared = tw.from_dlpack(Producer(x, flags=1))
        assert not shared.flags.writeable
        with pytest.raises(tw.UserError, match="read-only"):
            twice(x, out=shared)


def test_interfaces_that_tell_untruths() -> None:
    memory = np.arange(4, dtype=np.float32)
    good = {"version": 3, "shape": (4,), "typestr": "<f4", "data": (memory.ctypes.data, False)}
    np.testing.assert_array_equal(twice(SimpleNamespace(__array_interface__=good)), memory * 2)
    for change, reason in (({"data": (0, False)}, "no memory"), ({"mask": good}, "mask"), ({"shape": (-1,)}, "shape"), ({"shape": None}, "shape"), ({"typestr": ">f4"}, "byte order")):
        with pytest.raises(tw.UserError, match=reason):
            twice(SimpleNamespace(__array_interface__={**good, **change}))


def test_tensors_of_pytorch_on_the_host() -> None:
    torch: Any = sys.modules.get("torch") or pytest.importorskip("torch")
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        t = torch.arange(4).to(kind)
        found = twice(t)
        assert isinstance(found, torch.Tensor) and found.dtype == kind and torch.equal(found, t * 2)
        out = torch.empty(4, dtype=kind)
        assert twice(t, out=out) is out and torch.equal(out, t * 2)
        assert torch.equal(twice(t[::2]), t[::2] * 2)
        tw.gpu_launch(add_one, 4, 32, t, device="cpu")
        assert torch.equal(t, torch.arange(1, 5).to(kind))
    assert torch.equal(twice(torch.ones(3), device="emulator"), torch.full((3,), 2.0))
    freed = torch.full((1024,), 5.0)
    freed.untyped_storage().resize_(0)
    for bad in (freed, torch.ones(3, requires_grad=True), torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        with pytest.raises(tw.UserError):
            twice(bad)
    with pytest.raises(tw.UserError):
        twice(torch.ones(3), out=freed)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint32, np.uint64])
def test_numbers_with_a_type_take_the_entry_stub(kind: type[np.generic]) -> None:
    """Code for them is entered as fast as code for Python's numbers, and either refuses the other's."""

    @tw.kernel
    def scaled(x: tw.Array, s):
        out = tw.empty(x.shape, x.dtype)
        for i in tw.grid(len(x)):
            out[i] = x[i] * s
        return out

    x = np.arange(5, dtype=kind)
    values = {"x": x, "s": kind(3)}
    cpu = next(d for d in tw.devices() if d.id == "cpu")
    calls = scaled.runner.calls(cpu)
    np.testing.assert_array_equal(scaled(x, kind(3)), x * kind(3))
    stub = calls.entry_for(values, cpu, lambda *given: "refused")
    assert stub is not None
    np.testing.assert_array_equal(stub(x, kind(2)), x * kind(2))
    assert isinstance(stub(x, 2.0 if np.issubdtype(kind, np.floating) else 2), str)
